"""Coverage of intervals by pattern of missing blocks where variances differ, at nominal .90.

Three sites; errors are proportional to ``exp(.5 mean)``; blocks are missing at random given the response. The
normal intervals of ``get_prediction`` come from the same fits. Print one line for each set of sites::

    python tests/models/vfem/conformal_simulation.py [runs]
"""

import sys
import warnings

import numpy as np
import pandas as pd
from scipy.special import expit

import fedstat as fs

ALPHA = 0.1
SITES = {"A": ("a", "b"), "B": ("c",), "C": ("d",)}


def tables(seed, n):
    """Entities of which A has all, and B and C some; and their response."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 4)) @ np.linalg.cholesky(0.3 + 0.7 * np.eye(4)).T
    mean = X @ [0.5, 0.5, 0.5, 0.5]
    y = mean + np.exp(0.5 * mean) * rng.standard_t(5, n)
    table = pd.DataFrame(X, columns=list("abcd")).assign(y=y, id=np.arange(n))
    frames = {"A": table[["id", "y", "a", "b"]]}
    for k in "BC":
        frames[k] = table.loc[rng.random(n) < expit(0.5 - 0.5 * y), ["id", *SITES[k]]]
    return frames, pd.Series(y)


def partition(seed, n, **options):
    return fs.ClientPartition.from_frames(tables(seed, n)[0], on="id", **options)


def covered(seed, n=2_000, groups=1):
    """Whether intervals contain the responses of 4,000 new entities, by method; their sets and decile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = fs.VFEMRegression.from_formula("y ~ a + b + c + d", partition(3 * seed, n)).fit()
        new, y = partition(3 * seed + 2, 4_000), tables(3 * seed + 2, 4_000)[1]
        found = fit.predict_set(new, partition(3 * seed + 1, n), ALPHA, groups=groups)
        normal = fit.get_prediction(new).conf_int(obs=True, alpha=ALPHA)
    has = new.presence()[["B", "C"]].to_numpy(dtype=bool)
    y = y.loc[found.index]
    return pd.DataFrame(
        {
            "set": np.array(["A", "A + B", "A + C", "A + B + C"])[has @ [1, 2]],
            "top": found["mean"] > found["mean"].quantile(0.9),
            "conformal": (found["low"] <= y) & (y <= found["high"]),
            "normal": (normal[0] <= y) & (y <= normal[1]),
        }
    )


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    for groups in (1, 5):
        out = pd.concat([covered(seed, groups=groups).assign(seed=seed) for seed in range(runs)])
        of = {"all": out, "top decile": out[out["top"]], **dict(list(out.groupby("set")))}
        for name, rows in of.items():
            by_run = rows.groupby("seed")[["conformal", "normal"]].mean()
            print(f"{groups} ranges, {name}: {by_run.mean().round(3).to_dict()} ({runs} runs)", flush=True)
