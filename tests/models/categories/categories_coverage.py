"""Coverage of intervals: ``python tests/models/categories/categories_coverage.py [REPEATS]``."""

import sys
import warnings

import numpy as np
import pandas as pd

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
CUTS = np.array([-1.0, 0.5, 2.0])
TRUE = {"Ordinal": np.array([0.5, -0.4]), "Multinomial": np.array([0.5, -0.4, 1.0, 0.3])}


def draw(rng, kind, sites, rows):
    """Rows of several sites, with a covariate whose mean differs between them."""
    site = np.repeat(np.arange(sites), rows)
    x, z = rng.normal(size=len(site)) + 0.3 * (site % 3), rng.integers(0, 2, len(site)) * 1.0
    if kind == "Ordinal":
        y = np.digitize(TRUE[kind] @ [x, z] + rng.logistic(size=len(site)), CUTS)
    else:
        eta = np.column_stack(
            [np.zeros(len(x)), 0.2 + TRUE[kind][:2] @ [x, z], -0.5 + TRUE[kind][2:] @ [x, z]]
        )
        y = (eta + rng.gumbel(size=eta.shape)).argmax(axis=1)
    return pd.DataFrame({"site": [f"S{k:02d}" for k in site], "x": x, "z": z, "y": y})


def coverage(kind, sites, rows, repeats, seed=0, cov_type="nonrobust"):
    """Share of intervals that cover, and of rejections of true proportional odds at 0.05."""
    rng, true = np.random.default_rng(seed), TRUE[kind]
    hits, rejected = np.zeros(len(true)), 0
    for _ in range(repeats):
        partition = fs.ClientPartition.from_frame(draw(rng, kind, sites, rows), by="site", policy=ALLOW)
        model = getattr(fs, f"Federated{kind}").from_formula("y ~ x + z", partition)
        fit = model.fit(local=False, masked=False, cov_type=cov_type)
        kept = [name for name in fit.params.index if "Intercept" not in name and "/" not in name]
        low, high = fit.conf_int().loc[kept].to_numpy().T
        hits += (low < true) & (true < high)
        if kind == "Ordinal":
            rejected += fit.test_proportional_odds().glance()["p_value"].iloc[0] < 0.05
    return hits / repeats, rejected / repeats


def main(repeats=1000):
    """Print the table of the vignette."""
    warnings.simplefilter("ignore")
    print("| model | sites | rows of each | errors | coverage by coefficient | rejected proportional odds |")
    print("|---|---|---|---|---|---|")
    for kind in TRUE:
        for cov_type in ("nonrobust", "robust"):
            hits, rejected = coverage(kind, 4, 100, repeats, cov_type=cov_type)
            shown = ", ".join(f"{one:.3f}" for one in hits)
            size = f"{rejected:.3f}" if kind == "Ordinal" else ""
            print(f"| {kind} | 4 | 100 | {cov_type} | {shown} | {size} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
