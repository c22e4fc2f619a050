"""Coverage of debiased and split intervals, and false selections under the bound of stability selection.

Write the tables of ``tests/benchmarks/results``, all or some of them::

    python tests/models/vglm/coverage_simulation.py [linear] [logistic] [stability] [runs]
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy.special import expit

import fedstat as fs
from fedstat.errors import FedstatWarning
from fedstat.kernels.penalized.path import lambda_grid
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vglm.debiased import normal_debiased
from fedstat.models.vglm.normal_path import normal_path, normal_refit, normal_stability
from fedstat.models.vglm.path_setup import PathSetup, choose_fit, score_path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Z, CELL = 1.959963984540054, ["model", "n", "p", "design"]


@dataclass(frozen=True)
class Setting:
    """One cell: entities, columns, correlation of the columns, coefficients that are not zero."""

    skewed: ClassVar[bool] = False
    model: str
    n: int
    p: int
    design: str
    sizes: tuple[float, ...]

    @property
    def correlations(self):
        if self.design == "ar":
            return 0.5 ** np.abs(np.subtract.outer(np.arange(self.p), np.arange(self.p)))
        return 0.3 + 0.7 * np.eye(self.p)

    @property
    def beta(self):
        """Signs alternate, and the smallest is near zero: there is no beta-min condition."""
        beta = np.zeros(self.p)
        at = np.linspace(0, self.p - 1, len(self.sizes)).round().astype(int)
        beta[at] = np.array(self.sizes) * (-1.0) ** np.arange(len(self.sizes))
        return beta

    def columns(self, random):
        return random.normal(size=(self.n, self.p)) @ np.linalg.cholesky(self.correlations).T


LINEAR = tuple(np.linspace(0.05, 1.0, 10).round(3).tolist())
LOGISTIC = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
SETTINGS = [
    Setting("linear", 500, 100, "ar", LINEAR),
    Setting("linear", 1000, 50, "equal", LINEAR),
    Setting("logistic", 1000, 50, "ar", LOGISTIC),
    Setting("logistic", 500, 50, "equal", LOGISTIC),
]


def sums_by_fold(X, y, folds):
    """Releases of the sites for standardized columns, and their units."""
    units = ColumnScales(X.mean(axis=0), X.std(axis=0), float(y.mean()), float(y.std()), 0.0)
    rows = [np.ones(len(y)), *((X - units.shift) / units.scale).T, (y - units.mean) / units.sd]
    V, code = np.column_stack(rows), np.arange(len(y)) % folds
    return np.array([V[code == f].T @ V[code == f] for f in range(folds)]), units


def setup_of(p, penalty="scad", lambdas=None):
    return PathSetup(Penalty(penalty), CoefficientGroups.single(p), 0.0, lambdas, 30, 1e-2, "lla", 1e-7)


def linear_run(setting, random):
    """Estimates, standard errors and targets: debiased of all columns, split of the selected ones."""
    X, beta = setting.columns(random), setting.beta
    y = X @ beta + random.normal(size=setting.n)
    products, units = sums_by_fold(X, y, 2)
    setup, Sigma = setup_of(setting.p), setting.correlations
    found = normal_debiased(products.sum(axis=0), units, setup)
    yield "debiased", found.params[1:], np.sqrt(np.diag(found.cov))[1:], beta, beta != 0.0
    path = normal_path(products[0], units, setup)
    S = path.selected[choose_fit(score_path(path, setting.n // 2), "bic")]
    refit = normal_refit(products[1], units, S, [str(j) for j in range(setting.p)])
    # The best prediction from the selected columns, which is beta where no active one was left out.
    target = np.linalg.solve(Sigma[np.ix_(S, S)], Sigma[S] @ beta)
    yield "split", refit.params[1:], np.sqrt(np.diag(refit.cov))[1:], target, beta[S] != 0.0


def logistic_run(setting, random):
    """The same from fits of a table; split intervals count where no active column was left out."""
    X, beta = setting.columns(random), setting.beta
    names = [f"x{j}" for j in range(setting.p)]
    table = pd.DataFrame(X, columns=names)
    table["y"] = (random.random(setting.n) < expit(X @ beta)).astype(float)
    partition = fs.ClientPartition.from_frame(table, columns={"All": ["y", *names]})
    model = fs.VerticalGLM.from_formula("y ~ .", partition, family=sm.families.Binomial())
    found = model.fit(inference="debiased", n_lambdas=30, ratio=1e-2).debiased
    yield "debiased", found.params.to_numpy()[1:], found.bse.to_numpy()[1:], beta, beta != 0.0
    if setting.n // 2 < 6 * (setting.p + 1):
        return
    halves = model.fit(inference="split", select="aic", n_lambdas=30, ratio=1e-2, seed=1).refit
    S = np.isin(names, halves.params.index)
    if S[beta != 0.0].all():
        at = [names.index(name) for name in halves.params.index[1:]]
        estimates, errors = halves.params.to_numpy()[1:], halves.bse.to_numpy()[1:]
        yield "split", estimates, errors, beta[at], beta[at] != 0.0


def coverage(setting, runs):
    """One row for each inference and kind of coefficient."""
    simulate = linear_run if setting.model == "linear" else logistic_run
    rows = []
    for run in range(runs):
        random = np.random.default_rng([run, setting.n, setting.p, 7])
        for inference, estimate, se, target, active in simulate(setting, random):
            for kind, which in (("active", active), ("inactive", ~active)):
                error, sign = (estimate - target)[which], np.where(target[which] < 0.0, -1.0, 1.0)
                if len(error):
                    covered = np.mean(np.abs(error) <= Z * se[which])
                    numbers = covered, np.mean(sign * error), np.mean(error**2), np.mean(se[which])
                    rows.append((inference, kind, run, *numbers))
    names = ["inference", "coefficients", "run", "coverage", "bias", "mse", "mean_se"]
    groups = pd.DataFrame(rows, columns=names).groupby(["inference", "coefficients"], sort=True)
    out = groups[["coverage", "bias", "mse", "mean_se"]].mean()
    out["rmse"] = np.sqrt(out.pop("mse"))
    out.insert(1, "mc_error", groups["coverage"].sem())
    out.insert(0, "runs", groups["run"].count())
    out = out.reset_index()
    cell = {name: getattr(setting, name) for name in CELL}
    return out.assign(**cell)[[*CELL, *out.columns]]


def false_selections(threshold, lam, runs, design="ar", n=400, p=60, folds=10, draws=25):
    """Mean number of columns without effect among the stable ones, next to the bound."""
    setting = Setting("linear", n, p, design, (0.5,) * 6)
    false, bounds, true = [], [], []
    for run in range(runs):
        random = np.random.default_rng([run, n, p, 3])
        X = setting.columns(random)
        y = X @ setting.beta + random.normal(size=n)
        products, units = sums_by_fold(X, y, folds)
        setup = setup_of(p, "lasso", lambda_grid(1.0, ratio=lam, size=8))
        path = normal_path(products.sum(axis=0), units, setup)
        frequencies, numbers = normal_stability(products, units, setup, path, draws, random)
        stable = frequencies.max(axis=0) >= threshold
        false.append(np.count_nonzero(stable & (setting.beta == 0.0)))
        true.append(np.count_nonzero(stable & (setting.beta != 0.0)))
        bounds.append(numbers[-1] ** 2 / ((2.0 * threshold - 1.0) * p))
    return {
        "design": design, "n": n, "p": p, "runs": runs, "threshold": threshold, "lambda": lam,
        "false": np.mean(false), "mc_error": np.std(false, ddof=1) / np.sqrt(runs), "bound": np.mean(bounds),
        "found_of_6": np.mean(true),
    }  # fmt: skip


def write_table(name, table, keys):
    """Replace the rows of a table of results that have the same keys."""
    path = RESULTS / name
    if path.exists():
        before = pd.read_csv(path)
        fresh = table.set_index(keys).index
        table = pd.concat([before[~before.set_index(keys).index.isin(fresh)], table], ignore_index=True)
    table.round(4).to_csv(path, index=False)


def main(words):
    """Run the simulations that are named, or all."""
    runs = next((int(word) for word in words if word.isdigit()), 500)
    kinds = [word for word in words if not word.isdigit()] or ["linear", "logistic", "stability"]
    warnings.simplefilter("ignore", FedstatWarning)
    for setting in SETTINGS:
        if setting.model in kinds:
            table = coverage(setting, runs)
            print(table.to_string(), flush=True)
            write_table(
                "vglm_coverage.csv", table, ["model", "n", "p", "design", "inference", "coefficients"]
            )
    if "stability" in kinds:
        cells = [(t, lam, d) for d in ("ar", "equal") for t in (0.6, 0.75, 0.9) for lam in (0.25, 0.15, 0.1)]
        table = pd.DataFrame([false_selections(t, lam, runs, d) for t, lam, d in cells])
        print(table.to_string(), flush=True)
        write_table("vglm_stability.csv", table, ["design", "n", "p", "threshold", "lambda"])


if __name__ == "__main__":
    main(sys.argv[1:])
