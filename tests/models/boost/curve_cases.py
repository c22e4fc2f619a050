"""Curves of ninety entities, as the reference fits have them; and curves of three sites."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.kernels.curves import spline_basis

LOOSE = fs.Policy(max_parameters=10.0)
S, T = np.linspace(0, 1, 40), np.linspace(0, 1, 25)


def reference_arrays():
    """Three predictors (90, 40), a number, a factor and the response (90, 25), whole and with gaps."""
    random, n = np.random.default_rng(3), 90
    X = [random.normal(size=(n, 9)) @ spline_basis(S, 0, 1, 5).T for _ in range(3)]
    X = [x - x.mean(axis=0) for x in X]
    z, g = random.normal(size=n), random.integers(0, 4, n)
    Y = np.sin(2 * np.pi * T) * 2 + X[0] @ np.outer(np.sin(np.pi * S), np.cos(np.pi * T)) / 40 * 6
    Y = Y + np.outer(z, T) + X[1] @ np.outer(S, 1 - T) / 40 * 3 + random.normal(size=(n, 25)) * 0.5
    Y = Y + np.outer([0.5, -0.5, 0, 0.2], np.ones(25))[g]
    lacking = Y.copy()
    lacking.ravel()[random.choice(Y.size, 220, replace=False)] = np.nan
    return X, z, g, Y, lacking


def curve_table(**curves):
    """Wide columns of curves side by side."""
    wide = [
        pd.DataFrame(values).rename(columns=lambda j, n=name: f"{n}_{j}") for name, values in curves.items()
    ]
    return pd.concat(wide, axis=1)


def declared(*names):
    return {name: fs.Curve(f"{name}_*", domain=(0, 1)) for name in names}


def reference_table():
    X, z, g, Y, lacking = reference_arrays()
    at_t = X[2][:, np.round(np.linspace(1, 40, 25)).astype(int) - 1]
    frame = curve_table(x1=X[0], x2=X[1], x3=X[2], y=Y, lacking=lacking, xc=at_t)
    return frame.assign(z=z, g=np.array(list("abcd"))[g])


def simulated(n=600, seed=5, sites=3):
    """Curves y that depend on x1, a factor and an age, and not on x2; of equally large sites."""
    random = np.random.default_rng(seed)
    s = np.linspace(0, 1, 30)
    x = [random.normal(size=(n, 6)) @ spline_basis(s, 0, 1, 2).T for _ in range(2)]
    x = [values + random.normal(size=values.shape) * 0.05 for values in x]
    age, g = random.uniform(20, 80, n), random.integers(0, 3, n)
    beta = np.outer(np.sin(np.pi * s), np.cos(np.pi * np.linspace(0, 1, 12))) * 5
    y = x[0] @ beta / 30 + np.sin(age / 12)[:, None] + 0.4 * g[:, None] + random.normal(size=(n, 12)) * 0.4
    frame = curve_table(x1=x[0], x2=x[1], y=y)
    return frame.assign(age=age, g=np.array(list("abc"))[g], mean=y.mean(axis=1), site=np.arange(n) % sites)


def by_site(frame, *names, **options):
    sites = frame["site"].map("site {}".format)
    return fs.ClientPartition.from_frame(
        frame.assign(site=sites), by="site", curves=declared(*names), **options
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    X, z, g, Y, lacking = reference_arrays()
    text = "\n".join(",".join("NA" if np.isnan(v) else repr(float(v)) for v in row) for row in lacking)
    (folder / "y_na.csv").write_text(text + "\n")
    tables = {"x1": X[0], "x2": X[1], "x3": X[2], "y": Y, "zg": np.column_stack([z, g])}
    for name, values in tables.items():
        np.savetxt(folder / f"{name}.csv", values, delimiter=",", fmt="%.17g")
