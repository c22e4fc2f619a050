"""Intervals of standard deviations: ``python tests/models/mixed/variance_simulation.py [RUNS [ROW ...]]``.

Rows are a distribution of the random intercepts and a number of groups, such as ``exponential 20``. Groups
have 4 to 16 rows, standard deviations are 0.8 and 1. Printed are coverage of the standard deviation of the
intercepts, and the median ratio of its ends, by the profile, the jackknife and the default; and coverage of
the residual one by the first two.
"""

import sys
import warnings

import numpy as np
import pandas as pd

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
EFFECTS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "t5": lambda rng, n: rng.standard_t(5, size=n) * np.sqrt(0.6),
    "exponential": lambda rng, n: rng.exponential(size=n) - 1.0,
}
ROWS = [f"{kind} {groups}" for kind in EFFECTS for groups in (12, 20, 50)]
METHODS = ("profile", "jackknife", None)


def run(rng, kind, groups):
    """Return coverage and logarithm of the ratio of the ends by method, and coverage of the residual one."""
    g = np.repeat(np.arange(groups), rng.integers(4, 17, groups))
    t = rng.normal(size=len(g))
    y = 0.5 * t + 0.8 * EFFECTS[kind](rng, groups)[g] + rng.normal(size=len(g))
    table = pd.DataFrame({"y": y, "t": t, "g": g, "all": "one"})
    partition = fs.ClientPartition.from_frame(table, by="all", policy=ALLOW)
    fit = fs.FederatedMixed.from_formula("y ~ t + (1 | g)", partition).fit(masked=False)
    found = [fit.conf_int_variances(method=method) for method in METHODS]
    low, high = np.array([[one["conf_low"], one["conf_high"]] for one in found]).swapaxes(0, 1)
    inside = (low < [0.8, 1.0]) & (high > [0.8, 1.0])
    return np.concatenate([inside[:, 0], np.log(high / np.maximum(low, 1e-3))[:, 0], inside[:2, 1]])


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
        figures = [
            *found[:, :3].mean(axis=0),
            *np.exp(np.median(found[:, 3:6], axis=0)),
            *found[:, 6:].mean(axis=0),
        ]
        print(
            f"{name} | {len(found)} runs, {failed} failed | " + " ".join(f"{x:.3f}" for x in figures),
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
