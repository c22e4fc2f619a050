"""Coverage of intervals of Cox regressions: ``python tests/models/cox/cox_coverage.py [REPEATS]``."""

import sys
import warnings

import numpy as np
import pandas as pd

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
TRUE = {"x": 0.5, "z": -0.3}


def draw(rng, sites, rows, censored):
    """Weibull times in months with a baseline for each site; about a share `censored` is censored."""
    site = np.repeat(np.arange(sites), rows)
    n = len(site)
    x, z = rng.normal(size=n), rng.integers(0, 2, n) * 1.0
    hazard = 0.02 * np.exp(rng.normal(0.0, 0.4, sites))[site] * np.exp(TRUE["x"] * x + TRUE["z"] * z)
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


def coverage(sites, rows, censored, repeats, seed=0, cov_type="nonrobust"):
    """Share of intervals that cover, and mean bias in standard errors, by coefficient."""
    rng = np.random.default_rng(seed)
    hits, bias = np.zeros(2), np.zeros(2)
    true = np.array(list(TRUE.values()))
    for _ in range(repeats):
        partition = fs.ClientPartition.from_frame(draw(rng, sites, rows, censored), by="site", policy=ALLOW)
        model = fs.FederatedCox.from_formula("Surv(months, died) ~ x + z", partition)
        fit = model.fit(local=False, masked=False, cov_type=cov_type)
        low, high = fit.conf_int().to_numpy().T
        hits += (low < true) & (true < high)
        bias += (fit.params.to_numpy() - true) / fit.bse.to_numpy()
    return hits / repeats, bias / repeats


def main(repeats=1000):
    """Print the table of the vignette."""
    warnings.simplefilter("ignore")
    print("| sites | patients of each | censored | coverage of x, z | bias in standard errors |")
    print("|---|---|---|---|---|")
    for sites, rows in ((4, 500), (16, 500)):
        for censored in (0.2, 0.8):
            hits, bias = coverage(sites, rows, censored, repeats)
            shown = ", ".join(f"{one:.3f}" for one in hits), ", ".join(f"{one:+.2f}" for one in bias)
            print(f"| {sites} | {rows} | {100 * censored:.0f} % | {shown[0]} | {shown[1]} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
