"""Coverage of 95 % intervals of pooled regressions: imputation by sums, and mice on the same tables.

Three sites hold x1 and the response y, x2 and x3, and x4. All columns are jointly normal. Sites 2 and 3 lack
an entity with probabilities that depend on y and x1 (missing at random). The regressions are
y ~ x1 + x2 + x3 + x4 and x2 ~ y + x1. Write ``tests/benchmarks/results/impute_coverage.csv``, with mice
("norm", R) if asked::

    python tests/models/impute/impute_simulation.py RUNS [mice RUNS]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import expit

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest does it
from pattern_moments import moments_of_arrays

import fedstat as fs
from fedstat.federation.audit.ledger import Ledger
from fedstat.models.impute.draws import impute_sums
from fedstat.models.impute.model import sums_of
from fedstat.models.impute.results import Imputations

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "impute_coverage.csv"
R_SCRIPT = Path(__file__).parents[2] / "reference" / "mice" / "coverage.R"
N, M = 500, 20
COV = np.full((4, 4), 0.4) + 0.6 * np.eye(4)
BETA = np.array([1.0, 0.5, -0.5, 1.0])
JOINT = np.block([[COV, (COV @ BETA)[:, None]], [(COV @ BETA)[None], np.array([[BETA @ COV @ BETA + 4.0]])]])
NAMES = ["x1", "x2", "x3", "x4", "y"]
REGRESSIONS = {"y": ["x1", "x2", "x3", "x4"], "x2": ["y", "x1"]}


def draw(run: int) -> tuple[np.ndarray, np.ndarray]:
    """One table: columns, with missing blocks, and response."""
    rng = np.random.default_rng([run, 17])
    rows = rng.multivariate_normal(np.zeros(5), JOINT, N)
    X, y = rows[:, :4].copy(), rows[:, 4]
    X[rng.random(N) < expit(-0.5 + 0.6 * y), 1:3] = np.nan
    X[rng.random(N) < expit(-0.3 - 0.4 * y + 0.5 * rows[:, 0]), 3] = np.nan
    return X, y


def truth() -> dict[str, dict[str, float]]:
    """Coefficients of the regressions in the joint distribution."""
    found = {}
    for response, columns in REGRESSIONS.items():
        at, y = [NAMES.index(name) for name in columns], NAMES.index(response)
        slopes = np.linalg.solve(JOINT[np.ix_(at, at)], JOINT[at, y])
        found[response] = {"Intercept": 0.0, **dict(zip(columns, slopes.tolist(), strict=True))}
    return found


def by_sums(run: int) -> pd.DataFrame:
    """Estimate, error and limits of all coefficients, by imputation of sums."""
    X, y = draw(run)
    sums = sums_of(moments_of_arrays(X, y, (1, 2, 1), names=NAMES[:4]), "y")
    drawn, correlation = impute_sums(sums, M, np.random.default_rng([run, 18]))
    imputations = Imputations(sums, drawn, correlation, Ledger())
    parts = [
        imputations.regress(response, columns).tidy().assign(response=response)
        for response, columns in REGRESSIONS.items()
    ]
    return pd.concat(parts).assign(run=run)


def by_mice(runs: int) -> pd.DataFrame:
    """Return the same by mice, in one process of R."""
    tables = [pd.DataFrame(np.column_stack(draw(run)), columns=NAMES).assign(run=run) for run in range(runs)]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "tables.csv"), Path(folder, "found.csv")
        pd.concat(tables).to_csv(source, index=False)
        subprocess.run(["Rscript", R_SCRIPT, source, target, str(M)], check=True)
        return pd.read_csv(target)


def coverage(found: pd.DataFrame, method: str) -> pd.DataFrame:
    """Coverage, bias in standard deviations, and the ratio of mean error to standard deviation."""
    true = truth()
    found["truth"] = [true[r][t] for r, t in zip(found["response"], found["term"], strict=True)]
    found["covered"] = found["truth"].between(found["conf_low"], found["conf_high"])
    rows = []
    for (response, term), part in found.groupby(["response", "term"], sort=False):
        sd = part["estimate"].std()
        bias, ratio = (part["estimate"].mean() - part["truth"].iloc[0]) / sd, part["std_error"].mean() / sd
        rows.append((method, response, term, len(part), part["covered"].mean(), bias, ratio))
    columns = ["method", "response", "term", "runs", "coverage", "bias_in_sd", "error_over_sd"]
    return pd.DataFrame(rows, columns=columns)


def simulate(runs: int, mice: int = 0) -> pd.DataFrame:
    """Run both methods."""
    tables = [coverage(pd.concat(by_sums(run) for run in range(runs)), "fs.impute")]
    if mice:
        tables.append(coverage(by_mice(mice), "mice"))
    return pd.concat(tables).round(3)


if __name__ == "__main__":
    print(fs.__version__)
    result = simulate(int(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    result.to_csv(TABLE, index=False)
    print(result.to_string(index=False))
