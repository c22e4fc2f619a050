"""How near a synthetic table of codes is to a real one: margins, pairs, ranks, a regression, a classifier."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
from scipy.stats import rankdata

CLASSES = 8
"""Number of bins of a column against another one: quantiles of the real column."""
ROWS = 8_000
"""Rows of either table that a classifier separates."""


def measure(real, made, levels):
    """Measures of one table; `real` and `made` are DataFrames of codes, the first column the response."""
    R, S = (table[list(levels)].to_numpy(int) for table in (real, made))
    errors = np.abs(spearman(R) - spearman(S))[np.triu_indices(R.shape[1], 1)]
    slopes, area, best = regression(R, S)
    return {
        "Spearman error": errors.mean(),
        "largest": errors.max(),
        "pairs TV": pairs_apart(real, made, levels).mean(),
        "margins TV": np.mean([apart(r, s) for r, s in zip(R.T, S.T, strict=True)]),
        "coef. RMSE": slopes,
        "AUC": area,
        "AUC of real": best,
        "pMSE ratio": propensity_ratio(R, S),
    }


def spearman(X):
    return np.corrcoef(rankdata(X, axis=0), rowvar=False)


def apart(a, b):
    """Total variation distance of two columns of codes."""
    k = max(a.max(), b.max()) + 1
    return 0.5 * np.abs(np.bincount(a, minlength=k) / len(a) - np.bincount(b, minlength=k) / len(b)).sum()


def pairs_apart(real, made, levels):
    """Total variation distance of all pairs of columns, in at most 8 classes each."""
    classes = []
    for name, k in levels.items():
        inner = np.unique(np.quantile(real[name], np.arange(1, CLASSES) / CLASSES)) + 0.5
        cuts = np.arange(0.5, k - 1) if k <= CLASSES else inner
        classes.append([np.searchsorted(cuts, table[name]) for table in (real, made)])
    found = {}
    for (i, (a, b)), (j, (c, d)) in combinations(zip(levels, classes, strict=True), 2):
        found[f"{i} {j}"] = apart(a * 2 * CLASSES + c, b * 2 * CLASSES + d)
    return pd.Series(found)


def logistic(X, y, ridge=1e-3, steps=30):
    """Coefficients of a logistic regression with an intercept, by Newton's steps."""
    A = np.column_stack([np.ones(len(X)), X])
    b = np.zeros(A.shape[1])
    for _ in range(steps):
        mean = 1.0 / (1.0 + np.exp(-np.clip(A @ b, -30, 30)))
        H = (A * (mean * (1.0 - mean))[:, None]).T @ A + ridge * np.eye(len(b))
        step = np.linalg.solve(H, A.T @ (y - mean) - ridge * b)
        b += np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-7:
            break
    return b, 1.0 / (1.0 + np.exp(-np.clip(A @ b, -30, 30)))


def regression(R, S):
    """Error of standardized slopes, area under the curve on the real rows, and that of the real slopes."""
    mean, sd = R[:, 1:].mean(axis=0), R[:, 1:].std(axis=0)
    at = [(X[:, 1:] - mean) / sd for X in (R, S)]
    true, made = logistic(at[0], R[:, 0])[0], logistic(at[1], S[:, 0])[0]
    ones = R[:, 0] == 1
    areas = [
        (rankdata(at[0] @ b[1:])[ones].sum() - ones.sum() * (ones.sum() + 1) / 2) / ones.sum() / (~ones).sum()
        for b in (made, true)
    ]
    return np.sqrt(np.mean((made - true)[1:] ** 2)), *areas


def propensity_ratio(R, S, seed=0):
    """Mean squared error of the propensity of being synthetic, relative to two samples of one distribution.

    A logistic regression on columns, their squares and products (Snoke et al. 2018, who divide by half of it,
    for tables of a distribution fitted to the other one): 1 means no detectable misfit at this number of
    rows.
    """
    rng = np.random.default_rng(seed)
    n = min(ROWS, len(R), len(S))
    X = np.vstack([table[rng.choice(len(table), n, replace=False)] for table in (R, S)]).astype(float)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    i, j = np.triu_indices(X.shape[1])
    more = X[:, i] * X[:, j]
    # The square of a column with two levels is a line of it.
    reported = [a != b or len(np.unique(X[:, a])) > 2 for a, b in zip(i, j, strict=True)]
    design = np.hstack([X, more[:, reported]])
    p = logistic(design, np.repeat([0.0, 1.0], n))[1]
    return np.mean((p - 0.5) ** 2) / (design.shape[1] / (8.0 * n))
