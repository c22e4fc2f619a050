"""Coverage and size in mixed models: ``python tests/models/mixed/mixed_coverage.py [REPEATS]``."""

import sys
import warnings

import numpy as np
import pandas as pd
from scipy import stats

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
TRUE = {"program": 1.0, "x": 0.5}


def draw(rng, sites, patients=8, visits=3, between=1.0):
    """Visits of patients; about half of the sites have a program, x varies between visits."""
    n = sites * patients * visits
    site, patient = np.arange(n) // (patients * visits), np.arange(n) // visits
    program, x = (site % 2).astype(float), rng.normal(size=n)
    effects = between * rng.normal(size=sites)[site] + rng.normal(size=sites * patients)[patient]
    y = TRUE["program"] * program + TRUE["x"] * x + effects + rng.normal(size=n)
    names = [f"S{k}" for k in site]
    return pd.DataFrame({"site": names, "patient": patient, "program": program, "x": x, "y": y})


def fitted(table, formula):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    return fs.FederatedMixed.from_formula(formula, partition).fit(masked=False)


def coverage(sites, repeats, seed=0):
    """Share of intervals that cover: normal, Satterthwaite, Kenward-Roger, by coefficient, (3, 2)."""
    rng, hits, true = np.random.default_rng([seed, sites]), np.zeros((3, 2)), np.array(list(TRUE.values()))
    for _ in range(repeats):
        fit = fitted(draw(rng, sites), "y ~ program + x + (1 | patient) + (1 | site)")
        params, errors = fit.params.to_numpy()[1:], fit.bse.to_numpy()[1:]
        half = [stats.norm.isf(0.025) * errors]
        for method in ("satterthwaite", "kenward-roger"):
            tests = fit.coefficient_tests(method).iloc[1:]
            half.append((tests["conf_high"] - tests["estimate"]).to_numpy())
        hits += np.abs(params - true) < np.array(half)
    return hits / repeats


def size(sites, repeats, seed=0):
    """Share of p-values below 0.05 of variances that are zero: between sites, between patients."""
    rng, rejected = np.random.default_rng([seed, sites, 1]), np.zeros(2)
    for _ in range(repeats):
        table = draw(rng, sites, between=0.0)
        table["y"] = TRUE["x"] * table["x"] + rng.normal(size=len(table))
        for k, group in enumerate(("site", "patient")):
            rejected[k] += fitted(table, f"y ~ x + (1 | {group})").test_variances()["p_value"].iloc[0] < 0.05
    return rejected / repeats


def main(repeats=500):
    """Print the tables of the vignette."""
    warnings.simplefilter("ignore")
    print("| sites | program: z, Satterthwaite, Kenward-Roger | x: the same | size: sites | size: patients |")
    print("|---|---|---|---|---|")
    for sites in (5, 10, 30):
        hits, rejected = coverage(sites, repeats), size(sites, repeats)
        program, x = (", ".join(f"{one:.3f}" for one in column) for column in hits.T)
        print(f"| {sites} | {program} | {x} | {rejected[0]:.3f} | {rejected[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
