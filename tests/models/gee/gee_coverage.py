"""Coverage of intervals of estimating equations: ``python .../gee_coverage.py [REPEATS [SITES ...]]``."""

import sys
import warnings

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy import stats

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1, max_parameters=1.0)
PEOPLE, VISITS, SHARED = 6, 4, 0.5
"""People of a site, their visits, and the correlation of a person's normal variables."""
TRUE = {"arm": 0.8, "visit": -0.2}
KINDS = {"robust": "robust", "corrected halfway": "kauermann_carroll", "bias-reduced": "bias_reduced"}


def draw(rng, sites, binary):
    """People in two arms with correlated responses; the logit, or the mean, is linear in the columns."""
    people = sites * PEOPLE
    person = np.repeat(np.arange(people), VISITS)
    frame = pd.DataFrame(
        {
            "person": person,
            "site": [f"S{k % sites}" for k in person],
            "arm": person // sites % 3 // 2 * 1.0,
            "visit": np.tile(np.arange(VISITS, dtype=float), people),
        }
    )
    z = np.sqrt(SHARED) * rng.normal(size=people)[person] + np.sqrt(1.0 - SHARED) * rng.normal(
        size=len(person)
    )
    eta = -0.3 + TRUE["arm"] * frame["arm"] + TRUE["visit"] * frame["visit"]
    if binary:
        return frame.assign(y=(stats.norm.cdf(z) < 1.0 / (1.0 + np.exp(-eta))).astype(int))
    return frame.assign(y=eta + z)


def coverage(sites, binary, repeats, seed=0):
    """Share of 95 % intervals that cover, by covariance and coefficient: (kinds, 2)."""
    rng, true = np.random.default_rng(seed), np.array(list(TRUE.values()))
    family = sm.families.Binomial() if binary else sm.families.Gaussian()
    hits = np.zeros((len(KINDS), 2))
    for _ in range(repeats):
        partition = fs.ClientPartition.from_frame(draw(rng, sites, binary), by="site", policy=ALLOW)
        model = fs.FederatedGEE.from_formula(
            "y ~ arm + visit", partition, groups="person", family=family, cov_struct="exchangeable"
        )
        for k, kind in enumerate(KINDS.values()):
            fit = model.fit(cov_type=kind, local=False, masked=False)
            low, high = fit.conf_int().loc[list(TRUE)].to_numpy().T
            hits[k] += (low < true) & (true < high)
    return hits / repeats


def main(repeats=500, *sites):
    """Print the table of the vignette: a binary response at some numbers of sites, or all rows."""
    warnings.simplefilter("ignore")
    print("| response | sites | people | coverage of arm, visit: " + " | ".join(KINDS) + " |")
    print("|---|---|---|" + "---|" * len(KINDS))
    for binary, K in [(True, K) for K in sites or (5, 10, 30)] + ([] if sites else [(False, 5)]):
        hits = coverage(K, binary, repeats)
        shown = " | ".join(", ".join(f"{one:.3f}" for one in row) for row in hits)
        kind = "binary" if binary else "number"
        print(f"| {kind} | {K} | {K * PEOPLE} | {shown} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
