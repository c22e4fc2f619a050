"""Coverage of intervals of Cox regressions: ``python tests/models/cox/cox_coverage.py [N [BASELINE]]``."""

import sys
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
TRUE = {"x": 0.5, "z": -0.3}


def draw(rng, sites, rows, censored, spread=0.4):
    """Weibull times in months; log hazards of sites differ by `spread`; a share `censored` is censored."""
    site = np.repeat(np.arange(sites), rows)
    n = len(site)
    x, z = rng.normal(size=n), rng.integers(0, 2, n) * 1.0
    hazard = 0.02 * np.exp(rng.normal(0.0, spread, sites))[site] * np.exp(TRUE["x"] * x + TRUE["z"] * z)
    time = (rng.exponential(size=n) / hazard) ** (1.0 / 1.2)
    end = np.quantile(time, 1.0 - censored) * rng.uniform(0.6, 1.4, n)
    return pd.DataFrame(
        {
            "site": [f"S{k}" for k in site],
            "x": x,
            "z": z,
            "months": np.ceil(np.minimum(time, end)),
            "died": (time <= end).astype(int),
        }
    )


BASELINES = {
    "site": (0.4, ALLOW, {}),
    "common": (0.0, replace(ALLOW, max_parameters=1e9), {"baseline": "common", "grid": 1}),
    "merged": (0.0, None, {"baseline": "common", "grid": 1}),
    "breslow": (0.0, None, {"baseline": "common", "grid": 1, "ties": "breslow"}),
}
"""Spread of the sites' log hazards, policy, and arguments; the last two have the rules of the default."""


def coverage(sites, rows, censored, repeats, seed=0, baseline="site"):
    """Share of intervals that cover, mean bias in standard errors by coefficient, and intervals of time."""
    rng = np.random.default_rng(seed)
    hits, bias, intervals = np.zeros(2), np.zeros(2), 0
    true = np.array(list(TRUE.values()))
    spread, policy, arguments = BASELINES[baseline]
    for _ in range(repeats):
        table = draw(rng, sites, rows, censored, spread)
        partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
        model = fs.FederatedCox.from_formula("Surv(months, died) ~ x + z", partition)
        until = {"until": table["months"].max()} if baseline != "site" else {}
        fit = model.fit(local=False, masked=False, **arguments, **until)
        low, high = fit.conf_int().to_numpy().T
        hits += (low < true) & (true < high)
        bias += (fit.params.to_numpy() - true) / fit.bse.to_numpy()
        intervals += 0 if fit.grid is None else len(fit.grid)
    return hits / repeats, bias / repeats, intervals / repeats


def main(repeats=1000, baseline="site"):
    """Print the table of the vignette."""
    warnings.simplefilter("ignore")
    print("| sites | patients of each | censored | coverage of x, z | bias in standard errors | intervals |")
    print("|---|---|---|---|---|---|")
    for sites, rows in ((4, 500), (16, 500)):
        for censored in (0.2, 0.8):
            hits, bias, intervals = coverage(sites, rows, censored, int(repeats), baseline=baseline)
            shown = ", ".join(f"{one:.3f}" for one in hits), ", ".join(f"{one:+.2f}" for one in bias)
            print(
                f"| {sites} | {rows} | {100 * censored:.0f} % | {shown[0]} | {shown[1]} | {intervals:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
