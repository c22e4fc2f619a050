"""Coverage and price of tables and curves with noise, over epsilon, rows and sites.

``python noisy_coverage.py`` writes the table that the vignette on budgets for hospitals shows. The figures
are of the complete protocol: sites in this process, their noise, and the limits of the results.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

import fedstat as fs

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "noisy_tables.csv"
BOUNDS = {"g": ["a", "b"], "kind": ["p", "q", "r"], "x": (-6.0, 6.0), "age": (0.0, 120.0), "y": (-20.0, 20.0)}
SHARES = {"p": 0.6, "q": 0.35, "r": 0.05}
RHO, RATE, GRID = 0.5, 1.0 / 20.0, {"grid": 1, "until": 24}
AGE = stats.gamma(9.0, scale=6.0)
Z = stats.norm.isf(0.025)


def draw(n, sites, seed):
    """Rows of two groups: a normal and a skewed number, a category with a rare level, and a time."""
    random = np.random.default_rng(seed)
    x = random.normal(size=n)
    time, until = random.exponential(1.0 / RATE, n), random.uniform(6.0, 40.0, n)
    return pd.DataFrame(
        {
            "site": np.array([f"S{k}" for k in range(sites)])[np.arange(n) % sites],
            "g": random.choice(["a", "b"], n),
            "kind": random.choice(list(SHARES), n, p=list(SHARES.values())),
            "x": x,
            "age": AGE.rvs(n, random_state=random).clip(0.0, 120.0),
            "y": 2.0 * (RHO * x + np.sqrt(1.0 - RHO**2) * random.normal(size=n)),
            "time": np.minimum(time, until),
            "died": (time <= until).astype(int),
        }
    )


def once(n, epsilon, sites, seed):
    """Errors, covers and ratios to errors without noise, of one release of each table: (figure, ...)."""
    frame = draw(n, sites, seed)
    policy = fs.Policy(privacy=fs.Budget(1000.0, 1e-6, 1 if sites > 2 else None), min_count=1)
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    setting, out = {"epsilon": epsilon, "bounds": BOUNDS}, []

    def note(figure, low, high, true, plain):
        out.append((figure, low <= true <= high, (high - low) / (2.0 * Z * plain)))

    counts = fs.crosstab(partition, "g", "kind", **setting)
    limits, own = counts.conf_int(), pd.crosstab(frame["g"], frame["kind"])
    for place, row in limits.iterrows():
        out.append(("count", row["conf_low"] <= own.loc[place] <= row["conf_high"], np.nan))
    first = fs.table_one(partition, "x + kind", by="g", **setting).tidy()
    for _, row in first[first["figure"] == "share"].iterrows():
        share = SHARES[row["level"]]
        note("share", row["conf_low"], row["conf_high"], share, np.sqrt(2.0 * share * (1.0 - share) / n))
    for _, row in first[first["figure"] == "mean"].iterrows():
        note("mean", row["conf_low"], row["conf_high"], 0.0, np.sqrt(2.0 / n))
    quarters = fs.quantiles(partition, "age", **setting).conf_int()
    for (_, q), row in quarters.iterrows():
        plain = np.sqrt(q * (1.0 - q) / n) / AGE.pdf(AGE.ppf(q))
        note("quantile", row["conf_low"], row["conf_high"], AGE.ppf(q), plain)
    with contextlib.suppress(fs.errors.ModelError):  # few rows for a small epsilon
        row = fs.corr(partition, ["x", "y"], **setting).conf_int().iloc[1]
        note("correlation", row["conf_low"], row["conf_high"], RHO, (1.0 - RHO**2) / np.sqrt(n))
    curves = fs.KaplanMeier.from_formula("Surv(time, died) ~ 1", partition).fit(**GRID, **setting)
    for _, row in curves.tidy().iterrows():
        true = np.exp(-RATE * row["time"])
        out.append(("survival", row["conf_low"] <= true <= row["conf_high"], np.nan))
    out.append(("survival", np.nan, curves._price))
    end = min(12.0, curves.times[-1])
    means = curves.restricted_mean(end).iloc[0]
    true = (1.0 - np.exp(-RATE * end)) / RATE
    out.append(("restricted mean", means["conf_low"] <= true <= means["conf_high"], np.nan))
    return out


def simulate(n, epsilon, sites, runs):
    """Coverage and median price by figure."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(runs):
            found += once(n, epsilon, sites, seed)
    frame = pd.DataFrame(found, columns=["figure", "covered", "price"])
    by = frame.astype({"covered": float}).groupby("figure")
    out = pd.DataFrame({"coverage": by["covered"].mean(), "price": by["price"].median()})
    return out.assign(rows=n, epsilon=epsilon, sites=sites).reset_index()


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    cases = [(n, e, 4) for n in (1000, 5000, 20_000) for e in (0.5, 1.0, 3.0)] + [
        (5000, 1.0, 1),
        (5000, 1.0, 10),
    ]
    table = pd.concat([simulate(*case, runs) for case in cases])
    table.round(4).to_csv(RESULTS, index=False)
    print(table.pivot_table(index=["sites", "rows", "epsilon"], columns="figure", values="coverage").round(3))
    print(table.pivot_table(index=["sites", "rows", "epsilon"], columns="figure", values="price").round(2))
