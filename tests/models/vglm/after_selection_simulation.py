"""Intervals of the selected columns: how many miss, and how often a column without an effect is called one.

Write ``tests/benchmarks/results/vglm_after_selection.csv``::

    python tests/models/vglm/after_selection_simulation.py [runs]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
from coverage_simulation import LINEAR, Setting, Z, setup_of, sums_by_fold, write_table

from fedstat.models.vglm.normal_path import normal_path, normal_refit
from fedstat.models.vglm.path_setup import choose_fit, score_path

SKEW = 1.0
"""Standard deviation of the logarithm of a skewed column: its skewness is 6.2."""
KEYS = ["n", "p", "columns", "inference"]


@dataclass(frozen=True)
class Skewed(Setting):
    """Standardized columns with normal logarithms, which replace normal ones."""

    skewed: ClassVar[bool] = True

    @property
    def correlations(self):
        R = super().correlations
        return np.expm1(SKEW**2 * R) / np.expm1(SKEW**2)

    def columns(self, random):
        R = super().correlations
        X = np.exp(SKEW * random.normal(size=(self.n, self.p)) @ np.linalg.cholesky(R).T)
        return (X - np.exp(SKEW**2 / 2.0)) / np.sqrt(np.exp(SKEW**2) * np.expm1(SKEW**2))


WEAK = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
SETTINGS = [
    *(kind("linear", n, 30, "ar", LINEAR) for kind in (Setting, Skewed) for n in (200, 1_000)),
    Setting("linear", 300, 60, "ar", WEAK),
]


def refits(setting, random):
    """Least squares on what BIC selects: of all entities, and of the half that did not select."""
    X, beta = setting.columns(random), setting.beta
    y = X @ beta + random.normal(size=setting.n)
    halves, units = sums_by_fold(X, y, 2)
    names = [str(j) for j in range(setting.p)]
    complete = halves.sum(axis=0)
    for inference, mine, other in (("conditional", complete, complete), ("split", *halves)):
        path = normal_path(mine, units, setup_of(setting.p))
        S = path.selected[choose_fit(score_path(path, int(mine[0, 0])), "bic")]
        fit = normal_refit(other, units, S, names)
        yield inference, S, fit.params[1:], np.sqrt(np.diag(fit.cov))[1:]


def share(part, complete):
    """Ratio of two means over runs, with its standard error."""
    part, complete = np.asarray(part, dtype=float), np.asarray(complete, dtype=float)
    ratio = part.sum() / complete.sum()
    return ratio, np.std(part - ratio * complete) / complete.mean() / np.sqrt(len(part))


def after_selection(setting, runs):
    """One row for each inference.

    ``missed`` is the mean share of the intervals that miss the coefficient of the model with all columns
    (Benjamini and Yekutieli 2005, the false coverage rate), ``missed_own`` that of the model with the
    selected columns alone; ``rejected`` the share of the selected columns without an effect in the model with
    all columns that have a p-value of .05 at most.
    """
    beta, R, rows = setting.beta, setting.correlations, []
    for run in range(runs):
        random = np.random.default_rng([run, setting.n, setting.p, 17])
        for inference, S, params, se in refits(setting, random):
            own = np.linalg.solve(R[np.ix_(S, S)], R[S] @ beta)
            off, off_own = (np.abs(params - target) > Z * se for target in (beta[S], own))
            null, size = beta[S] == 0.0, max(int(S.sum()), 1)
            wrong = np.sum(null & (np.abs(params) > Z * se))
            rows.append((inference, S.sum(), off.sum() / size, off_own.sum() / size, null.sum(), wrong))
    names = ["inference", "selected", "missed", "missed_own", "null", "wrong"]
    out = []
    for inference, part in pd.DataFrame(rows, columns=names).groupby("inference"):
        rejected, error = share(part["wrong"], part["null"])
        means, errors = part.mean(numeric_only=True), part.sem(numeric_only=True)
        out.append({
            "n": setting.n, "p": setting.p, "columns": "skewed" if setting.skewed else "normal",
            "inference": inference, "runs": runs, "selected": means["selected"],
            "missed": means["missed"], "missed_error": errors["missed"],
            "missed_own": means["missed_own"], "missed_own_error": errors["missed_own"],
            "without_effect": means["null"], "rejected": rejected, "rejected_error": error,
        })  # fmt: skip
    return pd.DataFrame(out)


def main(words):
    """Run all settings."""
    runs = int(words[0]) if words else 1_000
    for setting in SETTINGS:
        table = after_selection(setting, runs)
        print(table.round(3).to_string(), flush=True)
        write_table("vglm_after_selection.csv", table, KEYS)


if __name__ == "__main__":
    main(sys.argv[1:])
