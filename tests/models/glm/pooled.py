"""The oracle: statsmodels on the stacked table, with formulaic's design."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import statsmodels.api as sm
from formulaic import model_matrix

import fedstat as fs
from fedstat.spline_names import count_from_zero

RNG_COLUMNS = ("x", "z", "days", "w", "v", "g", "site", "pet")


def table(n=600, seed=0, sites=4):
    """Rows of several sites: covariates that differ by site, and a level that one site never saw."""
    rng = np.random.default_rng(seed)
    site = rng.choice(
        [f"S{k}" for k in range(sites)], size=n, p=np.arange(1, sites + 1) / sum(range(sites + 1))
    )
    shift = pd.Series(site).str[1:].astype(float).to_numpy()
    frame = pd.DataFrame({"site": site, "x": rng.normal(0.2 * shift, 1.0), "z": rng.normal(1.0, 0.5, n)})
    frame["g"] = rng.choice(["a", "b", "c"], size=n, p=[0.5, 0.3, 0.2])
    frame.loc[(frame["site"] == "S1") & (frame["g"] == "c"), "g"] = "a"
    frame["days"] = rng.integers(20, 400, n).astype(float)
    frame["w"] = rng.integers(1, 4, n).astype(float)
    frame["v"] = rng.uniform(0.5, 2.0, n)
    frame["ward"] = rng.integers(0, 40, n) + 100 * shift.astype(int)
    frame["region"] = rng.choice(["north", "south", "east", "west", "mid"], n)
    eta = 0.3 + 0.4 * frame["x"] - 0.5 * frame["z"] + 0.3 * (frame["g"] == "b")
    frame["gauss"] = eta + rng.normal(size=n)
    frame["binary"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["n"] = rng.integers(1, 12, n)
    frame["events"] = rng.binomial(frame["n"], 1 / (1 + np.exp(-eta)))
    frame["count"] = rng.poisson(np.exp(eta) * frame["days"] / 100)
    frame["over"] = rng.negative_binomial(2, 2 / (2 + np.exp(eta + 1)))
    frame["gamma"] = rng.gamma(3.0, np.exp(eta) / 3.0) + 0.05
    frame["inverse"] = rng.wald(np.exp(0.3 * eta), 4.0)
    frame["tweedie"] = np.where(rng.uniform(size=n) < 0.3, 0.0, frame["gamma"])
    return frame


def partition(frame, **kwargs):
    return fs.ClientPartition.from_frame(frame, by="site", **kwargs)


def fit_pooled(formula, frame, family, *, offset=None, exposure=None, freq=None, var=None, **fit):
    """statsmodels' GLM on all rows, iterated to the end."""
    left, right = formula.split("~")
    endog = response(left.strip(), frame)
    exog = model_matrix(right.strip(), frame)
    exog = exog if len(exog) == len(frame) else pd.DataFrame({"Intercept": np.ones(len(frame))})
    # formulaic counts the columns of a spline from one, patsy from zero.
    names = list(count_from_zero(exog.columns))
    columns = {"freq_weights": freq, "var_weights": var, "exposure": exposure}
    known = {name: frame[column].to_numpy() for name, column in columns.items() if column is not None}
    if offset is not None:
        known["offset"] = offset
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sm.GLM(endog, pd.DataFrame(np.asarray(exog), columns=names), family=family, **known)
        return model.fit(maxiter=300, tol=1e-14, tol_criterion="params", **fit)


def response(left, frame):
    if left.startswith("cbind"):
        return np.column_stack([frame["events"], frame["n"] - frame["events"]])
    return frame.eval(left).to_numpy().astype(float)
