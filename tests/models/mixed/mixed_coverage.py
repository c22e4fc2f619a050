"""Coverage and size in mixed models: ``python tests/models/mixed/mixed_coverage.py [REPEATS [FILE]]``.

All rows are at one holder, which costs one message instead of thirty; ``test_mixed.py`` shows that one holder
and many give the same estimate. Rows of the table are written as they end.
"""

import sys
import warnings

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy import stats

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
TRUE = {"program": 1.0, "x": 0.5}
NORMAL = {}
BINARY = {"family": sm.families.Binomial(), "nagq": 9}


def draw(rng, sites, patients, visits, between, within, binary=False):
    """Visits of patients; about half of the sites have a program, x varies between visits."""
    n = sites * patients * visits
    site, patient = np.arange(n) // (patients * visits), np.arange(n) // visits
    program, x = (site % 2).astype(float), rng.normal(size=n)
    effects = between * rng.normal(size=sites)[site] + within * rng.normal(size=sites * patients)[patient]
    y = TRUE["program"] * program + TRUE["x"] * x + effects
    y = y + rng.normal(size=n) if not binary else (rng.random(n) < 1 / (1 + np.exp(-y))).astype(float)
    return pd.DataFrame({"site": site, "patient": patient, "program": program, "x": x, "y": y, "all": "one"})


def fitted(table, formula, settings):
    partition = fs.ClientPartition.from_frame(table, by="all", policy=ALLOW)
    return fs.FederatedMixed.from_formula(formula, partition, **settings).fit(masked=False)


def covers(fit):
    """Whether intervals of program and x cover: normal, Satterthwaite, Kenward-Roger, (3, 2)."""
    params, half = fit.params.to_numpy()[1:], [stats.norm.isf(0.025) * fit.bse.to_numpy()[1:]]
    for method in ("satterthwaite", "kenward-roger") if fit.use_t else ():
        tests = fit.coefficient_tests(method).iloc[1:]
        half.append((tests["conf_high"] - tests["estimate"]).to_numpy())
    return np.abs(params - np.array(list(TRUE.values()))) < np.array(half)


def coverage(rng, sites, binary):
    """One trial of coverage; patients have effects in the linear model only."""
    if not binary:
        formula = "y ~ program + x + (1 | patient) + (1 | site)"
        return covers(fitted(draw(rng, sites, 8, 3, 1.0, 1.0), formula, NORMAL))
    return covers(fitted(draw(rng, sites, 24, 1, 1.0, 0.0, True), "y ~ program + x + (1 | site)", BINARY))


def rejects(rng, sites, binary):
    """Whether variances of zero are rejected: of sites, of patients, (2,)."""
    table, out = draw(rng, sites, 8, 3, 0.0, 0.0, binary), []
    for group in ("site", "patient"):
        fit = fitted(table, f"y ~ program + x + (1 | {group})", BINARY if binary else NORMAL)
        out.append(fit.test_variances()["p_value"].iloc[0] < 0.05)
    return np.array(out)


def main(repeats=400, file="/dev/stdout"):
    """Write the table of the vignette, row by row."""
    warnings.simplefilter("ignore")
    with open(file, "w", buffering=1) as out:
        print("| sites | model | program | x | size: sites | size: patients |", file=out)
        print("|---|---|---|---|---|---|", file=out)
        for sites in (5, 10, 30):
            for binary in (False, True):
                rng = np.random.default_rng([0, sites, binary])
                hits = np.mean([coverage(rng, sites, binary) for _ in range(repeats)], axis=0)
                size = np.mean([rejects(rng, sites, binary) for _ in range(repeats)], axis=0)
                program, x = (", ".join(f"{one:.3f}" for one in column) for column in hits.T)
                cells = [sites, "logistic" if binary else "linear", program, x, *(f"{s:.3f}" for s in size)]
                print(f"| {' | '.join(map(str, cells))} |", file=out)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
