"""Size and power of alarms that run with a fit: ``python tests/models/assumption_alarms.py [RUNS [PART]]``.

A design draws a table and names the note of its test. Size is the share of p-values below 0.05 where the
assumption holds; an alarm, above the summary, has the level 0.01. Overdispersion of a GLM is announced by the
size of Pearson's statistic, without a p-value. PART is a part of the names of the designs to run. Alarms of
mixed models are in ``mixed/departure_simulation.py``.
"""

import sys
import warnings

import numpy as np
import pandas as pd
import statsmodels.api as sm

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1, max_parameters=1e9)
COMMON = {"baseline": "common", "grid": 2, "until": 30}


def censored(rng, site, x, z, time, follow_up=None):
    """Patients with censored times, in tenths; `follow_up` is the last time at each site."""
    end = rng.uniform(5.0, 30.0, len(time))
    if follow_up is not None:
        end = np.minimum(end, np.asarray(follow_up)[site])
    table = pd.DataFrame({"site": [f"S{k:02d}" for k in site], "x": x, "z": z})
    return table.assign(t=np.ceil(10 * np.minimum(time, end)) / 10, e=(time <= end).astype(int))


def proportional(rng, shape=(1.2, 1.2), n=600, sites=2):
    """Weibull times in two arms, with a shape for each; different hazards at the sites."""
    site, x, z = rng.integers(0, sites, n), rng.integers(0, 2, n) * 1.0, rng.normal(size=n)
    scale = 15.0 * np.exp(rng.normal(0.0, 0.4, sites))[site]
    # The effect of z is the same in both arms.
    time = scale * (rng.exponential(size=n) * np.exp(0.3 * z)) ** (1.0 / np.take(shape, x.astype(int)))
    return censored(rng, site, x, z, time)


def crossing(rng):
    """Hazards that cross: shapes 0.8 and 2."""
    return proportional(rng, (0.8, 2.0))


def few_events(rng):
    """Sixty patients."""
    return proportional(rng, n=60)


def tied(rng):
    """Times on five values."""
    table = proportional(rng)
    return table.assign(t=np.minimum(np.ceil(table["t"] / 6.0), 5.0) * 6.0)


def one_baseline(rng, spread=0.0, sites=6, n=600, between=1.0, follow_up=None):
    """Patients whose x differs between sites, by `between`, and is larger where the hazard is."""
    site, level = rng.integers(0, sites, n), rng.normal(size=sites)
    x, z = between * level[site] + rng.normal(size=n), rng.integers(0, 2, n) * 1.0
    hazard = 0.05 * np.exp(spread * level[site] + 0.5 * x - 0.3 * z)
    return censored(rng, site, x, z, rng.exponential(size=n) / hazard, follow_up)


def ordinal(rng, effects=(0.5, 0.5, 0.5), n=300, sites=2):
    """Four categories, with an effect of x at each threshold."""
    x, z = rng.uniform(-1.7, 1.7, n), rng.integers(0, 2, n) * 1.0
    above = 1.0 / (1.0 + np.exp(np.array([-1.2, 0.0, 1.2]) - np.outer(x, effects) - 0.3 * z[:, None]))
    y = (rng.random(n)[:, None] < np.minimum.accumulate(above, axis=1)).sum(axis=1)
    return pd.DataFrame({"site": [f"S{k}" for k in rng.integers(0, sites, n)], "x": x, "z": z, "y": y})


def counts(rng, mean=1.3, shape=None, n=300, sites=5):
    """Counts, with gamma variation of a shape if one is given."""
    x, z = rng.normal(size=n), rng.integers(0, 2, n) * 1.0
    more = 1.0 if shape is None else rng.gamma(shape, 1.0 / shape, n)
    y = rng.poisson(mean * np.exp(0.3 * x - 0.3 * z) * more)
    return pd.DataFrame({"site": [f"S{k}" for k in rng.integers(0, sites, n)], "x": x, "z": z, "y": y})


COX, ORDINAL, COUNTS = "proportional_hazards", "proportional_odds", "overdispersed"
DESIGNS = {
    "proportional hazards, 600 patients": (proportional, COX, {}),
    "the same, common baseline": (lambda rng: one_baseline(rng, sites=2), COX, COMMON),
    "the same, 60 patients": (few_events, COX, {}),
    "the same, times on five values": (tied, COX, {}),
    "one baseline, six sites": (one_baseline, "one_baseline", COMMON),
    "the same, three sites": (lambda rng: one_baseline(rng, sites=3), "one_baseline", COMMON),
    "the same, follow-up from 4 to 30 by site": (
        lambda rng: one_baseline(rng, follow_up=(4, 6, 10, 15, 20, 30)),
        "one_baseline",
        COMMON,
    ),
    "proportional odds, 300 rows": (ordinal, ORDINAL, {}),
    "Poisson, 300 counts": (counts, COUNTS, {}),
    "the same, mean 0.2": (lambda rng: counts(rng, 0.2), COUNTS, {}),
}
"""Designs in which the assumption holds: how a table is drawn, the note, and the arguments of the fit."""
WRONG = {
    "hazards that cross, 600 patients": (crossing, COX, {}),
    "log hazards of sites with sd 0.7": (lambda rng: one_baseline(rng, 0.7), "one_baseline", COMMON),
    "effects 1.2, 0.5, -0.2, 300 rows": (lambda rng: ordinal(rng, (1.2, 0.5, -0.2)), ORDINAL, {}),
    "300 counts, gamma of shape 1.5": (lambda rng: counts(rng, shape=1.5), COUNTS, {}),
}
"""Designs in which it does not."""


def model_of(table, note):
    """Make the model of a design."""
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    if note == COUNTS:
        return fs.FederatedGLM.from_formula("y ~ x + z", partition, family=sm.families.Poisson())
    if note == ORDINAL:
        return fs.FederatedOrdinal.from_formula("y ~ x + z", partition)
    return fs.FederatedCox.from_formula("Surv(t, e) ~ x + z", partition)


def alarms(draw, note, arguments, repeats, seed):
    """P-values of the test that runs with the fit, NaN where it was not made, and whether it is an alarm."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(repeats):
        fit = model_of(draw(rng), note).fit(local=False, masked=False, **arguments)
        made = [one for one in fit.diagnostics().itertuples() if one.kind == note]
        p = made[0].values.get("p_value", np.nan) if made else np.nan
        found.append((p, bool(made) and made[0].severity == "critical"))
    return np.array(found)


def main(repeats=300, part=""):
    """Print a row for each design."""
    warnings.simplefilter("ignore")
    print("| design | runs | p below 0.05 | alarm |\n|---|---|---|---|")
    for name, design in (DESIGNS | WRONG).items():
        if part in name:
            found = alarms(*design, repeats, [7, *name.encode()])
            below = "" if np.isnan(found[:, 0]).all() else f"{(found[:, 0] < 0.05).mean():.3f}"
            print(f"| {name} | {len(found)} | {below} | {found[:, 1].mean():.3f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
