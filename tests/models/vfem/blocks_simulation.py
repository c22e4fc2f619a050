"""Coverage, bias and standard errors where the blocks of different clients correlate, by method.

All methods see the same draws. "two": y = 1 + a + b + e, half of b missing completely at random. "four":
clients A to D lack 20, 40, 60 and 80 % of the entities, and D lacks single cells besides; every two blocks
have the same canonical correlation; "large" is "four" with 8,000 entities. "small sample" is the free law
with its correction. Write the table of
``tests/benchmarks/results``, all or some of it::

    python tests/models/vfem/blocks_simulation.py [two] [four] [large] [a method ...] [runs]
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy.special import expit
from statsmodels.imputation.mice import MICE, MICEData

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest does it
from pattern_moments import moments_of_arrays

from fedstat.models.vertical.joint_normal.corrections import bias_corrected
from fedstat.models.vertical.joint_normal.fit import all_effects, estimates_covariance, maximize_joint_normal
from fedstat.models.vertical.joint_normal.likelihood import JointNormalPoint
from fedstat.models.vertical.joint_normal.model import JointNormalModel
from fedstat.models.vertical.moments import StandardizedMoments

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "vfem_blocks.csv"
Z = 1.959963984540054
KEYS = ["design", "mechanism", "correlation", "method", "coefficient"]
RUNS = {
    "two": {"free": 1_000, "independent": 500, "complete cases": 500, "mean imputation": 500, "MICE": 50},
    "four": {
        "free": 1_000,
        "small sample": 1_000,
        "independent": 200,
        "complete cases": 500,
        "mean imputation": 500,
        "MICE": 20,
    },
    "large": {"free": 1_000},
}
"""Few of what takes seconds, or only has to show a bias."""
METHODS = {method for runs in RUNS.values() for method in runs}
IMPUTATIONS, BURN_IN = 10, 9
MICE_AT = 0.4
"""Correlation of the design with many columns."""


@dataclass(frozen=True)
class Design:
    """Client of each column, coefficients with the intercept first, shares of entities that clients lack."""

    owner: tuple[int, ...]
    beta: tuple[float, ...]
    lacks: tuple[float, ...]
    cells: float
    n: int = 2_000

    @property
    def own(self):
        """Pairs of columns of one client."""
        return np.equal.outer(self.owner, self.owner)

    def correlations(self, rho):
        """Columns of a client have .5, and one of each, given its others, rho with those of the others."""
        within = np.where(self.own, 0.5, 0.0) + 0.5 * np.eye(len(self.owner))
        root = np.linalg.cholesky(within)
        first = np.array([c not in self.owner[:j] for j, c in enumerate(self.owner)])
        latent = np.eye(len(first)) + np.where(np.outer(first, first) & ~self.own, rho, 0.0)
        return root @ latent @ root.T


DESIGNS = {
    "two": Design((0, 1), (1.0, 1.0, 1.0), (0.0, 0.5), 0.0),
    "four": Design(
        (0, 0, 1, 1, 2, 2, 3, 3), (1.0, 0.5, -0.5, 0.5, 0.0, -0.5, 0.5, 0.0, 0.5), (0.2, 0.4, 0.6, 0.8), 0.1
    ),
}
DESIGNS["large"] = replace(DESIGNS["four"], n=8_000)
CELLS = {
    "two": [("mcar", rho) for rho in (0.0, 0.1, 0.2, 0.4)],
    "large": [("mcar", 0.4), ("mar on y", 0.4)],
    "four": [(m, rho) for m in ("mcar", "mar on y", "mar on A") for rho in (0.0, 0.1, 0.4, 0.7)],
}


def draw(design, mechanism, rho, run):
    """Columns with nan where they are missing, and the response.

    A lacks entities, and D cells, completely at random. With "mar on y" B, C and D lack those of a small
    response, with "mar on A" those of a small first column of A, where A has it.
    """
    random = np.random.default_rng([run, int(100 * rho), len(design.owner)])
    root = np.linalg.cholesky(design.correlations(rho))
    X = random.normal(size=(design.n, len(root))) @ root.T
    y = design.beta[0] + X @ design.beta[1:] + random.normal(size=design.n)
    has = random.random(design.n) >= design.lacks[0]
    lead = {"mcar": 0.0 * y, "mar on y": (y - y.mean()) / y.std(), "mar on A": has * X[:, 0]}[mechanism]
    gone = [~has, *[random.random(design.n) < chance(lead, share) for share in design.lacks[1:]]]
    X[np.column_stack(gone)[:, design.owner]] = np.nan
    last = np.array(design.owner) == max(design.owner)
    X[:, last] = np.where(random.random((design.n, last.sum())) < design.cells, np.nan, X[:, last])
    return X, y


def chance(lead, share):
    """Probabilities that fall with the lead and are `share` in the mean."""
    low, high = -20.0, 20.0
    for _ in range(25):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if expit(middle - lead).mean() < share else (low, middle)
    return expit(0.5 * (low + high) - lead)


def by_law(design, rho, X, y, edges, corrected=False):
    """Estimates and standard errors of a normal law, from moments by pattern of columns."""
    P = X.shape[1]
    moments = StandardizedMoments(moments_of_arrays(X, y, [1] * P)).moments
    (*center, mean), (*scale, unit) = moments.center, moments.scale
    # From near the maximum, which saves half of the steps.
    Q = np.linalg.inv(np.where(edges, design.correlations(rho), 0.0)) * np.outer(scale, scale)
    beta = np.array(design.beta[1:]) * scale / unit
    start = JointNormalPoint(-np.divide(center, scale), (design.beta[0] - mean) / unit, beta, unit**-2, Q)
    fit = maximize_joint_normal(JointNormalModel(moments, all_effects(edges)), start, 1e-4, 200)
    assert fit.converged, fit.reason
    # a, s2, and a coefficient and a mean for each column; the intercept is a - mu'beta.
    cov = estimates_covariance(fit)[: 2 + 2 * P, : 2 + 2 * P]
    J = np.zeros((1 + P, 2 + 2 * P))
    J[0, 0], J[0, 2::2], J[0, 3::2] = 1.0, -fit.mu, -fit.beta
    J[1:, 2::2] = np.eye(P)
    errors = np.sqrt(np.diag(J @ cov @ J.T))
    if not corrected:
        return fit.params, errors
    new = bias_corrected(fit)
    return new.params, errors * np.sqrt(new.s2 / fit.s2)


def by_least_squares(X, y):
    fit = sm.OLS(y, sm.add_constant(X)).fit()
    return fit.params, fit.bse


def estimate(method, design, rho, X, y):
    """Estimates and standard errors, (1 + P,) each."""
    if method in ("free", "small sample", "independent"):
        edges = design.own if method == "independent" else np.ones_like(design.own)
        return by_law(design, rho, X, y, edges, method == "small sample")
    if method == "complete cases":
        use = ~np.isnan(X).any(axis=1)
        return by_least_squares(X[use], y[use])
    if method == "mean imputation":
        return by_least_squares(np.where(np.isnan(X), np.nanmean(X, axis=0), X), y)
    return by_mice(X, y)


def by_mice(X, y):
    """Chained equations with predictive means, joined by Rubin's rules."""
    names = [f"x{j}" for j in range(X.shape[1])]
    data = MICEData(pd.DataFrame(X, columns=names).assign(y=y))
    fit = MICE(f"y ~ {' + '.join(names)}", sm.OLS, data, n_skip=0).fit(BURN_IN, IMPUTATIONS)
    return np.asarray(fit.params), np.asarray(fit.bse)


def coverage(name, mechanism, rho, method, runs):
    """One row of the table for each coefficient."""
    design, fits = DESIGNS[name], []
    np.random.seed(int(1_000 * rho) + len(mechanism))  # noqa: NPY002 (MICEData draws from this generator)
    for run in range(runs):
        fits.append(estimate(method, design, rho, *draw(design, mechanism, rho, run)))
    estimates, errors = np.array(fits).swapaxes(0, 1)
    miss = estimates - np.array(design.beta)
    first = [design.owner[:j].count(c) for j, c in enumerate(design.owner)]
    columns = [f"{'ABCD'[c]}{j + 1}" for c, j in zip(design.owner, first, strict=True)]
    return pd.DataFrame(
        {
            "design": name,
            "mechanism": mechanism,
            "correlation": rho,
            "method": method,
            "coefficient": ["Intercept", *columns],
            "truth": design.beta,
            "bias": miss.mean(axis=0),
            "sd": estimates.std(axis=0, ddof=1),
            "mean_se": errors.mean(axis=0),
            "coverage": (np.abs(miss) <= Z * errors).mean(axis=0),
            "runs": runs,
        }
    )


def write_table(table):
    """Replace the rows of the table of results that have the same keys."""
    if TABLE.exists():
        before = pd.read_csv(TABLE)
        stays = ~before.set_index(KEYS).index.isin(table.set_index(KEYS).index)
        table = pd.concat([before[stays], table], ignore_index=True)
    table.sort_values(KEYS).round(5).to_csv(TABLE, index=False, lineterminator="\n")


def simulate(name, method, runs):
    """Cells of a design by one method, written as they come; of "four" MICE, of seconds a run, has few."""
    began, parts = time.perf_counter(), []
    for mechanism, rho in CELLS[name]:
        if method != "MICE" or name == "two" or rho == MICE_AT:
            parts.append(coverage(name, mechanism, rho, method, runs))
            write_table(parts[-1])
    print(f"{name}, {method}: {runs} runs, {time.perf_counter() - began:.0f} s", flush=True)
    return pd.concat(parts, ignore_index=True)


def main(words):
    """Run what is named, or all."""
    runs = next((int(word) for word in words if word.isdigit()), None)
    warnings.simplefilter("ignore", FutureWarning)
    for name in [name for name in DESIGNS if name in words] or DESIGNS:
        for method in [method for method in RUNS[name] if method in words or not set(words) & METHODS]:
            simulate(name, method, runs or RUNS[name][method])


if __name__ == "__main__":
    main(sys.argv[1:])
