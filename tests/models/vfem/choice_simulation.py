"""Coverage of the fits with ``between=None`` where two sites share no entity.

Sites A to D hold two columns each. A has all 1,200 entities, B 60 % of them at random, C and D a fourth each,
and no entity in common. The first column of a site has the correlation `checkable` with those of the others,
that of C with D's is `open`. `PYTHONPATH=tests python tests/models/vfem/choice_simulation.py [runs]` fits 300
data sets for each pair of these correlations and prints their coverage.
"""

import sys

import numpy as np
import pandas as pd
from pattern_moments import moments_of_arrays

from fedstat.errors import EstimationError
from fedstat.models.vertical.joint_normal.assumption_tests import choose_between
from fedstat.models.vertical.joint_normal.fit import open_ranges
from fedstat.models.vfem.covariance.from_moments import MomentsOptions, estimate_from_moments
from fedstat.models.vfem.iteration.state import fit_by_site
from fedstat.models.vfem.outcome import reported_covariance

SIZES, BETA = [2, 2, 2, 2], np.array([0.5, -0.3, 0.5, 0.3, -0.5, 0.4, 0.5, 0.2])
SETTINGS = [(0.0, 0.0), (0.0, 0.1), (0.0, 0.3), (0.0, 0.6), (0.1, 0.1), (0.3, 0.3)]
Z = 1.959963984540054


def draw(checkable, apart, run, n=1_200):
    """Columns (n, 8), nan where a site lacks the entity, and the response (n,)."""
    rng = np.random.default_rng([int(100 * checkable), int(100 * apart), run])
    cov = np.eye(8)
    first = np.arange(0, 8, 2)
    cov[np.ix_(first, first)] += checkable * (1.0 - np.eye(4))
    cov[4, 6] = cov[6, 4] = apart
    X = rng.multivariate_normal(np.zeros(8), cov, size=n)
    y = X @ BETA + rng.normal(size=n)
    X[rng.random(n) < 0.4, 2:4] = np.nan
    at = rng.permutation(n)
    X[at[n // 4 :], 4:6] = np.nan
    X[at[: 3 * n // 4], 6:8] = np.nan
    return X, y


def cover(moments, between):
    """Which of the eight printed intervals contain the truth, and which would with all values left open.

    Nan without an estimate.
    """
    try:
        made = estimate_from_moments(moments, MomentsOptions("observed", between, 200))
    except EstimationError:
        return np.full((2, 8), np.nan)
    half = Z * np.sqrt(np.diag(reported_covariance(made.covariance, fit_by_site(made.found, between))))[1:]
    at, ranges = made.found.params[1:], open_ranges(made.found)
    low, high = np.minimum(at, ranges[0, 1:]), np.maximum(at, ranges[1, 1:])
    wide = (low - half <= BETA) & (high + half >= BETA)
    return np.array([np.abs(BETA - at) <= half if between == "independent" else wide, wide], dtype=float)


def chosen(moments):
    """Return the choice of the default; "free", which has no estimate, where that is refused."""
    try:
        return choose_between(moments).between
    except EstimationError:
        return "free"


def simulate(runs=300):
    """Coverage in each setting, with each choice of the covariance between sites."""
    rows = []
    for checkable, apart in SETTINGS:
        found = {"default": [], "independent": [], "free": []}
        choices = []
        for run in range(runs):
            moments = moments_of_arrays(*draw(checkable, apart, run), SIZES)
            choices.append(chosen(moments))
            for between in ("independent", "free"):
                found[between].append(cover(moments, between))
            found["default"].append(found[choices[-1]][-1])
        for between, out in found.items():
            each, wide = np.nanmean(np.array(out), axis=0)
            rows.append(
                {
                    "checkable": checkable,
                    "open": apart,
                    "between": between,
                    "runs": runs,
                    "independent": np.mean([one == "independent" for one in choices]),
                    "no_estimate": np.isnan([one[0, 0] for one in out]).mean(),
                    "A_and_B": each[:4].mean(),
                    "C_and_D": each[4:].mean(),
                    "worst": each.min(),
                    "with_open_values": wide.min(),
                }
            )
    return pd.DataFrame(rows).round(4)


if __name__ == "__main__":
    table = simulate(*map(int, sys.argv[1:]))
    print(table.to_string())
