"""Bias of penalized quasi-likelihood: ``python tests/models/mixed/quasi_likelihood.py [REPEATS [FILE]]``.

Distributed PQL (Luo et al. 2022, JAMIA 29) gives the estimate of PQL on the pooled table, which R's
``MASS::glmmPQL`` computes. Its paper shows this equality and an application, and no simulation of bias. So
the design here is another one: small groups, where the bias is known (Breslow and Lin 1995, Biometrika 82),
and groups of the size of hospitals, where it vanishes.
"""

import sys
import warnings

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy import optimize

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
TRUE = {"constant": -1.0, "slope": 1.0}
CELLS = ((200, 2, 1.0), (200, 5, 1.0), (200, 5, 2.0), (30, 50, 1.0))
"""Groups, rows of each, and standard deviation of their effects."""


def draw(rng, groups, size, deviation, run):
    group, x = np.repeat(np.arange(groups), size), rng.normal(size=groups * size)
    eta = TRUE["constant"] + TRUE["slope"] * x + deviation * rng.normal(size=groups)[group]
    y = (rng.random(len(x)) < 1.0 / (1.0 + np.exp(-eta))).astype(int)
    return pd.DataFrame({"run": run, "site": np.where(group % 2, "A", "B"), "group": group, "x": x, "y": y})


def likelihood(table, nodes):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    settings = {"family": sm.families.Binomial(), "nagq": nodes}
    fit = fs.FederatedMixed.from_formula("y ~ x + (1 | group)", partition, **settings).fit(masked=False)
    return [*fit.params, fit.variances["std_dev"].iloc[0]]


def penalized(table):
    """PQL with a random intercept: linear mixed models of working responses, fitted by maximum likelihood."""
    X = np.column_stack([np.ones(len(table)), table["x"]])
    group, y, n = table["group"].to_numpy(), table["y"].to_numpy(), len(table)
    beta, effects = np.zeros(2), np.zeros(group.max() + 1)
    for _ in range(200):
        eta = X @ beta + effects[group]
        mean = 1.0 / (1.0 + np.exp(-eta))
        w = mean * (1.0 - mean)
        W = np.column_stack([X, eta + (y - mean) / w])
        sums = np.array([np.bincount(group, w * column) for column in W.T])
        total, squares = np.bincount(group, w), (W * w[:, None]).T @ W

        def products(ratio, sums=sums, total=total, squares=squares):
            return squares - (sums * (ratio / (1.0 + ratio * total))) @ sums.T

        def fitted(ratio, products=products):
            S = products(ratio)
            b = np.linalg.solve(S[:2, :2], S[:2, 2])
            return b, (S[2, 2] - S[2, :2] @ b) / n

        def deviance(log, total=total, fitted=fitted):
            return np.log1p(np.exp(log) * total).sum() + n * np.log(fitted(np.exp(log))[1])

        ratio = np.exp(optimize.minimize_scalar(deviance, bounds=(-12.0, 8.0), method="bounded").x)
        new, scale = fitted(ratio)
        effects = ratio / (1.0 + ratio * total) * (sums[2] - new @ sums[:2])
        change, beta = np.abs(new - beta).max(), new
        if change < 1e-6:
            break
    return [*beta, np.sqrt(ratio * scale)]


def main(repeats=200, file="/dev/stdout"):
    """Write mean estimates of slope and deviation, with simulation errors."""
    warnings.simplefilter("ignore")
    with open(file, "w", buffering=1) as out:
        print("| groups x rows, deviation | method | slope (1) | deviation |", file=out)
        print("|---|---|---|---|", file=out)
        for groups, size, deviation in CELLS:
            rng = np.random.default_rng([groups, size, int(deviation)])
            tables = [draw(rng, groups, size, deviation, run) for run in range(repeats)]
            found = {"PQL": np.array([penalized(table) for table in tables])}
            for name, nodes in (("Laplace", 1), ("15 nodes", 15)):
                found[name] = np.array([likelihood(table, nodes) for table in tables])
            for name, values in found.items():
                kept = values[np.isfinite(values).all(axis=1), 1:]
                error = kept.std(axis=0, ddof=1) / np.sqrt(len(kept))
                cells = " | ".join(
                    f"{m:.3f} ({e:.3f})" for m, e in zip(kept.mean(axis=0), error, strict=True)
                )
                lost = f", {repeats - len(kept)} failed" if len(kept) < repeats else ""
                print(f"| {groups} x {size}, {deviation:g} | {name}{lost} | {cells} |", file=out)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
