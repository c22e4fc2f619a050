"""Coverage of intervals of random effects over few sites: ``python tests/inference/few_sites.py``."""

import numpy as np
import pandas as pd

from fedstat.inference.meta_analysis import RandomEffectsOptions, combine_sites

WAYS = {"DL, normal": RandomEffectsOptions("DL", "z", "t"), "REML, t": RandomEffectsOptions()}
"""With an interval of a further site that takes the variance as known, and with one that does not."""
CASES = [(m, tau2) for m in (3, 5, 10) for tau2 in (0.0, 0.04, 0.25)]


def coverage(m, tau2, runs=1000, seed=0):
    """Share of runs in which the 95 % intervals hold the mean effect, and that of a further site.

    Sites have 60 to 400 rows, and their estimates the variance 8 / n, .02 to .13.
    """
    rng = np.random.default_rng([seed, m, round(100 * tau2)])
    held = {(way, what): 0 for what in ("mean", "further site") for way in WAYS}
    for _ in range(runs):
        v = 8.0 / rng.uniform(60.0, 400.0, m)
        b, new = rng.normal(size=m) * np.sqrt(v + tau2), rng.normal() * np.sqrt(tau2)
        for way, how in WAYS.items():
            found = combine_sites(b, v, how=how)
            held[way, "mean"] += found.re_low <= 0.0 <= found.re_high
            held[way, "further site"] += found.pred_low <= new <= found.pred_high
    return pd.Series(held) / runs


if __name__ == "__main__":
    table = pd.DataFrame({case: coverage(*case) for case in CASES}).T
    print(table.rename_axis(["sites", "tau2"]).round(3))
