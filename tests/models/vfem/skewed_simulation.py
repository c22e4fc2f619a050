"""Coverage and bias where columns are skewed and the response decides on what is missing, by method.

Columns of the designs of ``blocks_simulation.py`` are functions of its normal scores: "log-normal" with a
standard deviation of the logarithm of .75 (skewness 3.3), "gamma" with shape .5 (2.8), "two-valued" (one in
ten), "t" with five degrees of freedom (0, heavy tails), "normal"; "sum" has a common gamma part and own ones,
and is no function of normal scores. B, C and D lack entities of a small response. All methods see the same
draws. Write the table of ``tests/benchmarks/results``::

    python tests/models/vfem/skewed_simulation.py [two] [four] [a margin ...] [runs]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest does it
from blocks_simulation import DESIGNS, Z, by_least_squares, by_mice, chance
from pattern_moments import moments_of_arrays

from fedstat.models.vertical.joint_normal.corrections import simulated_covariance, without_skewness
from fedstat.models.vertical.joint_normal.fit import (
    all_effects,
    estimates_covariance,
    maximize_joint_normal,
    site_order,
)
from fedstat.models.vertical.joint_normal.likelihood import JointNormalPoint
from fedstat.models.vertical.joint_normal.model import JointNormalModel
from fedstat.models.vertical.moments import StandardizedMoments

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "vfem_skewed.csv"
KEYS = ["design", "margin", "method", "coefficient"]
LOG_SD, SHAPE, SHARE, HEAVY = 0.75, 0.5, 0.1, 5
RHO = 0.4


def margins(scores, margin, random):
    """Columns with mean zero and variance one."""
    U = stats.norm.cdf(scores)
    if margin == "log-normal":
        square = np.exp(LOG_SD**2)
        return (np.exp(LOG_SD * scores) - np.sqrt(square)) / np.sqrt(square * (square - 1.0))
    if margin == "gamma":
        return (stats.gamma.ppf(U, SHAPE) - SHAPE) / np.sqrt(SHAPE)
    if margin == "two-valued":
        return ((U > 1.0 - SHARE) - SHARE) / np.sqrt(SHARE * (1.0 - SHARE))
    if margin == "t":
        return stats.t.ppf(U, HEAVY) / np.sqrt(HEAVY / (HEAVY - 2.0))
    if margin == "sum":
        common, own = random.gamma(1.0, size=(len(U), 1)) - 1.0, random.gamma(0.7, size=U.shape) - 0.7
        return np.sqrt(RHO) * common + np.sqrt((1.0 - RHO) / 0.7) * own
    return scores


MARGINS = ("log-normal", "gamma", "sum", "two-valued", "t", "normal")


def draw(design, margin, run):
    """Columns with nan where they are missing, and the response."""
    random = np.random.default_rng([run, len(design.owner), len(margin)])
    root = np.linalg.cholesky(design.correlations(RHO))
    X = margins(random.normal(size=(design.n, len(root))) @ root.T, margin, random)
    y = design.beta[0] + X @ design.beta[1:] + random.normal(size=design.n)
    lead = (y - y.mean()) / y.std()
    gone = [random.random(design.n) < design.lacks[0]]
    gone += [random.random(design.n) < chance(lead, share) for share in design.lacks[1:]]
    X[np.column_stack(gone)[:, design.owner]] = np.nan
    return X, y


def shapes(X):
    """Mean of z |z| of each column, over the entities that have it."""
    D = X - np.nanmean(X, axis=0)
    return np.nanmean(D * np.abs(D), axis=0) / np.nanmean(D**2, axis=0)


def normal_law(X, y):
    """Fit the normal law to sums by pattern."""
    P = X.shape[1]
    standard = StandardizedMoments(replace(moments_of_arrays(X, y, [1] * P), shape=shapes(X)))
    start = JointNormalPoint(np.zeros(P), 0.0, np.zeros(P), 1.0, standard.precision)
    model = JointNormalModel(standard.moments, all_effects(np.ones((P, P), dtype=bool)))
    return maximize_joint_normal(model, start, 1e-6, 200)


def reported(fit, psi):
    """Estimates and standard errors, (1 + P,) each, from the covariance of (a, s2, beta_1, mu_1, ...)."""
    P = len(fit.beta)
    place = np.argsort(site_order(fit.moments))
    cov = psi[: 2 + 2 * P, : 2 + 2 * P][np.ix_(place, place)]
    J = np.zeros((1 + P, 2 + 2 * P))
    J[0, 0], J[0, 2 : 2 + P], J[0, 2 + P :] = 1.0, -fit.mu, -fit.beta
    J[1:, 2 : 2 + P] = np.eye(P)
    return fit.params, np.sqrt(np.diag(J @ cov @ J.T))


def by_weights(X, y, use):
    """Complete cases by the inverse of their chance, a logistic function of the response; sandwich errors."""
    causes = sm.add_constant(y)
    weight = 1.0 / sm.Logit(use.astype(float), causes).fit(disp=0).predict()[use]
    fit = sm.WLS(y[use], sm.add_constant(X[use]), weights=weight).fit(cov_type="HC0")
    return fit.params, fit.bse


def estimates(design, X, y, mice):
    """Estimates and standard errors by method."""
    fit, use = normal_law(X, y), ~np.isnan(X).any(axis=1)
    found = without_skewness(fit)
    out = {
        "normal": reported(fit, estimates_covariance(fit)),
        "skewness": reported(found.reported, simulated_covariance(found)),
        "complete cases": by_least_squares(X[use], y[use]),
        "weighted complete cases": by_weights(X, y, use),
    }
    return out | ({"MICE": by_mice(X, y)} if mice else {})


def simulate(name, margin, runs, mice=0):
    """A row of the table for each method and coefficient; MICE is added in `mice` of the runs."""
    design, fits, began = DESIGNS[name], {}, time.perf_counter()
    np.random.seed(len(margin))  # noqa: NPY002 (MICEData draws from this generator)
    for run in range(runs):
        X, y = draw(design, margin, run)
        for method, pair in estimates(design, X, y, run < mice).items():
            fits.setdefault(method, []).append(pair)
    rows = []
    first = [design.owner[:j].count(c) for j, c in enumerate(design.owner)]
    names = ["Intercept", *[f"{'ABCD'[c]}{j + 1}" for c, j in zip(design.owner, first, strict=True)]]
    for method, pairs in fits.items():
        values, errors = np.array(pairs).swapaxes(0, 1)
        miss = values - np.array(design.beta)
        rows.append(
            pd.DataFrame(
                {
                    "design": name,
                    "margin": margin,
                    "method": method,
                    "coefficient": names,
                    "truth": design.beta,
                    "bias": miss.mean(axis=0),
                    "sd": values.std(axis=0, ddof=1),
                    "mean_se": errors.mean(axis=0),
                    "coverage": (np.abs(miss) <= Z * errors).mean(axis=0),
                    "runs": len(pairs),
                }
            )
        )
    print(f"{name}, {margin}: {runs} runs, {time.perf_counter() - began:.0f} s", flush=True)
    return pd.concat(rows, ignore_index=True)


def write_table(table):
    """Replace the rows of the table of results that have the same keys."""
    if TABLE.exists():
        before = pd.read_csv(TABLE)
        table = pd.concat([before[~before.set_index(KEYS).index.isin(table.set_index(KEYS).index)], table])
    table.sort_values(KEYS).round(5).to_csv(TABLE, index=False, lineterminator="\n")


def main(words):
    """Run what is named, or all."""
    runs = next((int(word) for word in words if word.isdigit()), 200)
    for name in [name for name in ("two", "four") if name in words] or ("two", "four"):
        for margin in [margin for margin in MARGINS if margin in words] or MARGINS:
            write_table(
                simulate(name, margin, runs, mice=20 if (name, margin) == ("two", "log-normal") else 0)
            )


if __name__ == "__main__":
    main(sys.argv[1:])
