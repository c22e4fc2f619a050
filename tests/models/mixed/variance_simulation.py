"""Intervals of standard deviations: ``python tests/models/mixed/variance_simulation.py [RUNS [ROW ...]]``.

Rows are a distribution of the random intercepts and a number of groups, such as ``exponential 20``. Groups
have 4 to 16 rows, standard deviations are 0.8 and 1. Printed are coverage of the standard deviation of the
intercepts by the profile, the jackknife and the default, that of the residuals by the jackknife, and the
median ratio of the ends of the jackknife. The profile covers if the likelihood ratio at the truth is small.
"""

import sys
import warnings
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats

import fedstat as fs
from fedstat.models.mixed.profile import Profiles, reopened
from fedstat.models.mixed.results import FEW_FOR_JACKKNIFE, WELL_DETERMINED
from fedstat.models.mixed.steps import FAMILY

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
EFFECTS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "t5": lambda rng, n: rng.standard_t(5, size=n) * np.sqrt(0.6),
    "exponential": lambda rng, n: rng.exponential(size=n) - 1.0,
}
ROWS = [f"{kind} {groups}" for kind in EFFECTS for groups in (12, 20, 50)]
QUANTILE = stats.chi2.isf(0.05, 1)


def increase_at_truth(session, fit):
    """Return by how much -2 log L is larger at the true standard deviation of the intercepts."""
    profiles = Profiles.of((yield from reopened(session, fit)), fit, 0, 0)
    place, length = profiles.place(0), 0.8 / profiles.unit(0, 0)
    _, value, _ = yield from profiles.minimize(profiles.estimate, place, length)
    return value - fit.deviance


def run(rng, kind, groups):
    """Return coverage, and the logarithm of the ratio of the ends."""
    g = np.repeat(np.arange(groups), rng.integers(4, 17, groups))
    t = rng.normal(size=len(g))
    y = 0.5 * t + 0.8 * EFFECTS[kind](rng, groups)[g] + rng.normal(size=len(g))
    table = pd.DataFrame({"y": y, "t": t, "g": g, "all": "one"})
    partition = fs.ClientPartition.from_frame(table, by="all", policy=ALLOW)
    fit = fs.FederatedMixed.from_formula("y ~ t + (1 | g)", partition).fit(masked=False)
    profile = fit._after_fit("profile", FAMILY, partial(increase_at_truth, fit=fit._record.fit)) < QUANTILE
    found = fit.conf_int_variances(method="jackknife")
    inside = (found["conf_low"] < [0.8, 1.0]) & (found["conf_high"] > [0.8, 1.0])
    error = fit._record.fit.jackknife[0][0]
    default = inside.iloc[0] if groups >= FEW_FOR_JACKKNIFE and error <= WELL_DETERMINED else profile
    return np.array(
        [
            profile,
            inside.iloc[0],
            default,
            inside.iloc[1],
            np.log(found["conf_high"] / found["conf_low"]).iloc[0],
        ]
    )


def main(runs=300, *rows):
    warnings.simplefilter("ignore")
    for name in rows or ROWS:
        kind, groups = name.split()
        rng, found, failed = np.random.default_rng([7, *name.encode()]), [], 0
        for _ in range(runs):
            try:
                found.append(run(rng, kind, int(groups)))
            except fs.errors.FedstatError:
                failed += 1
        found = np.array(found)
        figures = [*found[:, :4].mean(axis=0), np.exp(np.median(found[:, 4]))]
        print(
            f"{name} | {len(found)} runs, {failed} failed | " + " ".join(f"{x:.3f}" for x in figures),
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
