"""Chapter 3 of the publication: exact boosting, LSA, averages and local fits by the number of sites.

Ding (2024), section 3.5: 100 curves a site, 20 predictors of which 5 have an effect, learners without a
penalty, steps of a tenth, four folds. The text leaves open the noise, the steps and the knots; here errors of
standard deviation 1, 20 and 100 steps, 20 cubic B-splines on [0, 100].

    python tests/models/boost/chapter3_simulation.py RUNS.csv [REPLICATES]     goes on where it was cut short
"""

from __future__ import annotations

import csv
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.kernels.curves import spline_basis

SITES = (2, 4, 6, 10)
EACH, FOLDS, POINTS = 100, 4, np.arange(101.0)
P, ACTIVE, Q = 20, 5, 20
STEPS = (20, 100)
PUBLISHED = {2: (2.59, 2.87), 4: (2.25, 2.82), 6: (2.13, 2.76), 10: (1.90, 2.77)}
"""MAPE of LSA and of averages, per cent, by the number of sites."""
PHI = spline_basis(POINTS, 0.0, 100.0, Q - 4)
NAMES = [f"x{p}" for p in range(1, P + 1)]
TEXT = "y(t) ~ " + " + ".join(f"bsignal({name}, knots={Q - 4}, df={Q})" for name in NAMES)
TIME = f"bbs(t, knots={Q - 4}, df={Q})"
LOOSE = fs.Policy(max_parameters=10.0)
"""The design has 75 rows a site for 401 columns; by default an owner asks for 1,203."""
FIELDS = ("sites", "replicate", "method", "steps", "mape", "rsquared", "sensitivity", "specificity")


def draw(n, random):
    """Curves (P, n, 101) and responses (n, 101)."""
    c = random.uniform(-1, 1, (P, Q)) + np.exp(random.normal(0.1 * np.arange(1, P + 1)[:, None], 1, (P, Q)))
    c = c + random.normal(size=(n, P, Q))
    B = np.zeros((P, Q, Q))
    B[:ACTIVE] = random.normal(1, 0.5, (ACTIVE, Q, Q))
    Y = np.einsum("npq,pqr->nr", c @ (PHI.T @ PHI), B) @ PHI.T
    return np.einsum("npq,tq->pnt", c, PHI), Y + random.normal(size=Y.shape)


def table(X, Y, rows, means):
    """Curves in cells, about their means."""
    cells = {name: list((x - mean)[rows]) for name, x, mean in zip(NAMES, X, means, strict=True)}
    return pd.DataFrame({**cells, "y": list(Y[rows])})


def found(result):
    """Shares of active learners that are selected, and of others that are not."""
    taken = {name for name, share in result.learners["steps"].items() if share > 0} - {"1"}
    active = {f"bsignal({name})" for name in NAMES[:ACTIVE]}
    return len(taken & active) / ACTIVE, 1.0 - len(taken - active) / (P - ACTIVE)


def replicate(K, seed):
    """One draw: rows (method, steps, figures), means over folds."""
    random = np.random.default_rng(seed)
    X, Y = draw(EACH * K, random)
    site, fold = np.repeat(np.arange(K), EACH), np.tile(np.arange(FOLDS), EACH * K // FOLDS)
    curves = {name: fs.Curve(name, domain=(0, 100)) for name in (*NAMES, "y")}
    figures = {}
    for f in range(FOLDS):
        means = X[:, fold != f].mean(axis=1)
        train, test = table(X, Y, fold != f, means), table(X, Y, fold == f, means)
        train["site"] = [f"site {k}" for k in site[fold != f]]
        partition = fs.ClientPartition.from_frame(train, by="site", curves=curves, policy=LOOSE)
        model = fs.FedFunctionBoost.from_formula(TEXT, partition, time=TIME)
        left = Y[fold == f] - Y[fold != f].mean(axis=0)
        figures.setdefault(("mean", 0), []).append(
            [100.0 * np.mean(np.abs(left / Y[fold == f])), 0, np.nan, np.nan]
        )
        for how in ("exact", "lsa", "average", "local"):
            fit = model.fit(steps=max(STEPS), aggregation=how)
            for steps in STEPS:
                several = [one.steps(steps) for one in (fit.values() if how == "local" else [fit])]
                scores = [one.score(test) for one in several]
                row = [[s["mape"], s["rsquared"], *found(r)] for s, r in zip(scores, several, strict=True)]
                figures.setdefault((how, steps), []).append(np.mean(row, axis=0))
    return [(*key, *np.mean(rows, axis=0)) for key, rows in figures.items()]


def summary(runs):
    """Means by method and number of sites, next to the published figures."""
    wide = runs.assign(what=runs["method"] + " " + runs["steps"].astype(str))
    wide = wide.pivot_table("mape", "sites", "what", sort=False).round(2)
    return wide.assign(**{"published LSA": [PUBLISHED[K][0] for K in wide.index],
                          "published average": [PUBLISHED[K][1] for K in wide.index]})  # fmt: skip


def main(path, replicates):
    done = set()
    if path.exists():
        done = set(zip(*pd.read_csv(path)[["sites", "replicate"]].to_numpy().T, strict=True))
    else:
        path.write_text(",".join(FIELDS) + "\n")
    warnings.simplefilter("ignore", fs.errors.DataWarning)
    for r in range(replicates):
        for K in SITES:
            if (K, r) in done:
                continue
            rows = replicate(K, 1000 * K + r)
            with path.open("a", newline="") as file:
                csv.writer(file).writerows(
                    [K, r, how, steps, *(f"{x:.6g}" for x in row)] for how, steps, *row in rows
                )
    print(summary(pd.read_csv(path)).to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
