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
SETTINGS = {
    "linear": {},
    "logistic": {"family": sm.families.Binomial(), "nagq": 9},
    "negative binomial": {"family": sm.families.NegativeBinomial(alpha=1.0), "nagq": 9},
    "gamma": {"family": sm.families.Gamma(sm.families.links.Log()), "nagq": 9},
}
ALPHA, SHAPE = 0.5, 2.0


def draw(rng, sites, patients, visits, between, within, kind="linear"):
    """Visits of patients; about half of the sites have a program, x varies between visits."""
    n = sites * patients * visits
    site, patient = np.arange(n) // (patients * visits), np.arange(n) // visits
    program, x = (site % 2).astype(float), rng.normal(size=n)
    effects = between * rng.normal(size=sites)[site] + within * rng.normal(size=sites * patients)[patient]
    y = TRUE["program"] * program + TRUE["x"] * x + effects
    match kind:
        case "linear":
            y = y + rng.normal(size=n)
        case "logistic":
            y = (rng.random(n) < 1 / (1 + np.exp(-y))).astype(float)
        case "negative binomial":
            y = rng.poisson(np.exp(y) * rng.gamma(1 / ALPHA, ALPHA, n)).astype(float)
        case "gamma":
            y = np.exp(y) * rng.gamma(SHAPE, 1 / SHAPE, n)
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


def coverage(rng, sites, kind):
    """One trial of coverage; patients have effects in the linear model only."""
    if kind == "linear":
        formula = "y ~ program + x + (1 | patient) + (1 | site)"
        return covers(fitted(draw(rng, sites, 8, 3, 1.0, 1.0), formula, {}))
    table = draw(rng, sites, 24, 1, 1.0, 0.0, kind)
    return covers(fitted(table, "y ~ program + x + (1 | site)", SETTINGS[kind]))


def rejects(rng, sites, kind):
    """Whether variances of zero are rejected: of sites, of patients, (2,)."""
    table, out = draw(rng, sites, 8, 3, 0.0, 0.0, kind), []
    for group in ("site", "patient"):
        fit = fitted(table, f"y ~ program + x + (1 | {group})", SETTINGS[kind])
        out.append(fit.test_variances()["p_value"].iloc[0] < 0.05)
    return np.array(out)


def main(repeats=400, file="/dev/stdout"):
    """Write the table of the vignette, row by row."""
    warnings.simplefilter("ignore")
    with open(file, "w", buffering=1) as out:
        print("| sites | model | program | x | size: sites | size: patients |", file=out)
        print("|---|---|---|---|---|---|", file=out)
        for sites in (5, 10, 30):
            for number, kind in enumerate(SETTINGS):
                rng = np.random.default_rng([0, sites, number])
                hits = np.mean([coverage(rng, sites, kind) for _ in range(repeats)], axis=0)
                size = np.mean([rejects(rng, sites, kind) for _ in range(repeats)], axis=0)
                program, x = (", ".join(f"{one:.3f}" for one in column) for column in hits.T)
                cells = [sites, kind, program, x, *(f"{s:.3f}" for s in size)]
                print(f"| {' | '.join(map(str, cells))} |", file=out)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
