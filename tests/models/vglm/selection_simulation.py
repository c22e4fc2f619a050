"""The published selection study, repeated: one row for each data set and method, and their means.

A run that was cut short goes on where it ended:

    python tests/models/vglm/selection_simulation.py runs.csv [data sets of each case]

writes every data set to ``runs.csv``, and means with their simulation errors to
``tests/benchmarks/results/vglm_simulation.csv``.
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from pooled_path import glm_path

import fedstat as fs
from fedstat.errors import DisclosureWarning, EstimationError
from fedstat.inference.likelihood import bic, ebic, profile_deviance
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "vglm_simulation.csv"
FAMILIES = {"normal": sm.families.Gaussian(), "binomial": sm.families.Binomial()}
SCALES = {"standardized": True, "as drawn": False}
METHODS = {
    "VerticalGLM, scad": {},
    "VerticalGLM, scad, one step": {"steps": 1},
    "VerticalGLM, scad with ridge, one step": {"steps": 1, "l1_ratio": 0.94},
}
OTHERS = {"VerticalGLM, mcp": {"penalty": "mcp"}, "VerticalGLM, lasso": {"penalty": "lasso"}}
CASES = [*product(SCALES, FAMILIES, (1_000, 3_000, 5_000))]
CASE = ["columns", "family", "n"]
COMPARED = 20
"""Data sets of each case on which other penalties and criteria, and pooled rows, are tried as well."""
MEASURES = ["rmse", "gmean", "fdr", "sensitivity", "specificity", "rounds", "megabytes", "seconds"]


def judge(b, truth):
    """Error and selection of coefficients (p,) against the true ones, as the publication measures them."""
    chosen, active = b != 0.0, truth != 0.0
    sensitivity, specificity = chosen[active].mean(), (~chosen[~active]).mean()
    return {
        "rmse": np.sqrt(np.mean((b - truth) ** 2)),
        "gmean": np.sqrt(sensitivity * specificity),
        "fdr": (chosen & ~active).sum() / max(chosen.sum(), 1),
        "sensitivity": sensitivity,
        "specificity": specificity,
    }


def vertical(data, family, steps=None, **options):
    """Fit over the five clients, and choose by BIC."""
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    model = fs.VerticalGLM.from_formula("y ~ .", partition, family=FAMILIES[family], **options)
    result = model.fit(select="bic", steps=steps)
    used = {"rounds": result.ledger.rounds, "megabytes": result.ledger.bytes / 1e6}
    return result.params[data.truth.index].to_numpy(), used | {"converged": result.converged}


def pooled_paths(data, family, crossed=False):
    """Fit all rows in one place along a path that is exact everywhere: coefficients, by what chose them."""
    X, y = columns_of(data)
    sd = X.std(axis=0)
    Z = np.column_stack([np.ones(len(y)), (X - X.mean(axis=0)) / sd])
    path = pooled_path(Z, y, family)
    minus_twice = 2.0 * len(y) * path.loss
    if family == "normal":
        minus_twice = profile_deviance(minus_twice, len(y))
    b = path.coefficients[:, 1:]
    df = 1.0 + np.count_nonzero(b, axis=1)
    scores = {
        "BIC": bic(minus_twice, df, len(y)),
        "EBIC": ebic(minus_twice, df, len(y), chosen=df - 1.0, candidates=b.shape[1]),
    }
    if crossed:
        scores["CV"] = cross_validated(Z, y, family, path.lambdas)
    return {name: b[np.argmin(score)] / sd for name, score in scores.items()}


def pooled_path(Z, y, family, lambdas=None, penalty="scad"):
    groups = replace(CoefficientGroups.single(Z.shape[1]), weights=np.r_[0.0, np.ones(Z.shape[1] - 1)])
    spec = DistributionSpec.of(FAMILIES[family])
    return glm_path(Rows(Z, y), spec, Penalty(penalty), groups, lambdas=lambdas, algorithm="lla")


def cross_validated(Z, y, family, lambdas, folds=5):
    """Deviance of every fold of rows (they are in random order) at the fits of the others: (L,)."""
    fold, total = np.arange(len(y)) % folds, np.zeros(len(lambdas))
    for k in range(folds):
        b = pooled_path(Z[fold != k], y[fold != k], family, lambdas).coefficients
        eta = b @ Z[fold == k].T
        total += [FAMILIES[family].deviance(y[fold == k], FAMILIES[family].link.inverse(e)) for e in eta]
    return total


def oracle(data, family):
    """Fit the columns that have an effect, without a penalty: what knowing them would bring."""
    X, y = columns_of(data)
    active = data.truth["coef"].to_numpy() != 0.0
    b = np.zeros(len(active))
    design = np.column_stack([np.ones(len(y)), X[:, active]])
    b[active] = sm.GLM(y, design, family=FAMILIES[family]).fit().params[1:]
    return b


def columns_of(data):
    return data.complete[data.truth.index].to_numpy(float), data.complete[data.response].to_numpy(float)


def run_one(scale, family, n, seed):
    """Draw one data set and fit it in all ways: one row for each."""
    data = fs.datasets.make_selection(n, family, standardize=SCALES[scale], seed=[n, seed])
    truth, rows = data.truth["coef"].to_numpy(), []

    def add(method, b, seconds=np.nan, **more):
        rows.append(
            dict(zip(CASE, (scale, family, n), strict=True))
            | {"seed": seed, "method": method, **judge(b, truth), "seconds": seconds, **more}
        )

    others = OTHERS if family == "normal" and seed < COMPARED else {}
    for method, options in (METHODS | others).items():
        began = time.process_time()
        try:
            b, more = vertical(data, family, **options)
        except EstimationError:  # columns separate the responses: there is no step without an estimate
            continue
        add(f"{method}, BIC", b, time.process_time() - began, **more)
    if seed < COMPARED:
        for criterion, b in pooled_paths(data, family, crossed=family == "binomial" and n == 1_000).items():
            add(f"Original-C, scad, {criterion}", b)
    add("oracle", oracle(data, family))
    return rows


def simulate(file, runs):
    """Go through all data sets that the file does not hold yet."""
    file = Path(file)
    done = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=[*CASE, "seed"])
    done = set(done[[*CASE, "seed"]].itertuples(index=False, name=None))
    for scale, seed, case in product(SCALES, range(runs), CASES):
        if case[0] == scale and (*case, seed) not in done:
            rows = pd.DataFrame(run_one(*case, seed))
            rows.to_csv(file, mode="a", header=not file.exists(), index=False, lineterminator="\n")
    return pd.read_csv(file)


def summarize(runs):
    """Means over data sets, with their simulation errors."""
    groups = runs.groupby([*CASE, "method"], sort=False)
    means = groups[MEASURES].mean()
    errors = groups[["rmse", "gmean", "fdr"]].sem().add_suffix("_error")
    means = means.join(errors)
    means.insert(0, "runs", groups.size())
    means["converged"] = groups["converged"].mean()
    return means.reset_index()


if __name__ == "__main__":
    warnings.simplefilter("ignore", DisclosureWarning)
    found = simulate(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
    summarize(found).round(5).to_csv(TABLE, index=False, lineterminator="\n")
