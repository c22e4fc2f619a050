"""Printed coverage and mean limits of GLORE under shifts, against the stored runs of the same settings.

The tables are eTables 3 to 5 of Li et al. (2024), "Federated learning in healthcare", Health Data Science 4.
The printed figures are from 100 data sets; ours from 500 or 2,000 (``flb_simulation.py``).
"""

from pathlib import Path

import numpy as np
import pandas as pd

TESTS = Path(__file__).parents[2]
PRINTED = TESTS / "reference" / "glore" / "etables.csv"
RUNS = TESTS / "benchmarks" / "results" / "flb.csv"
PUBLISHED_RUNS, QUANTILE = 100, 1.959963984540054
ROUNDED = {"coverage": 0.01, "lower_mean": 0.001, "upper_mean": 0.001}
"""Steps of the printed figures."""


def ours(row):
    """The figure of a stored run, and the variance of one data set."""
    if row["statistic"] == "coverage":
        p = row["coverage"]
        return p, max(p * (1.0 - p), 1e-4)
    side = -1.0 if row["statistic"] == "lower_mean" else 1.0
    return row["mean"] + side * QUANTILE * row["mean_se"], row["sd"] ** 2


def differences():
    """Printed figures less ours, in standard errors; not a number without a run."""
    columns = [f"X{j}" for j in range(1, 9)]
    keys = ["size", "setting", "shift", "subject"]
    known = [*keys[:3], "table", "site", "statistic"]
    printed = pd.read_csv(PRINTED).melt(known, columns, "subject", "value")
    # Limits are those of all sites; where effects differ, coverage is by site.
    printed["target"] = printed["site"].where(printed["statistic"] == "coverage", "all")
    printed.loc[(printed["setting"] == "III") & (printed["target"] == "all"), "target"] = "Site 1"
    runs = pd.read_csv(RUNS).query("sample == 'all' and method == 'GLORE'")
    found = printed.merge(runs, how="left", on=[*keys, "target"])
    values, variances = zip(*(ours(row) for row in found.to_dict("records")), strict=True)
    rounding = found["statistic"].map(ROUNDED) ** 2 / 12.0
    error = np.sqrt(np.array(variances) * (1.0 / PUBLISHED_RUNS + 1.0 / found["runs"]) + rounding)
    return (found["value"] - np.array(values)) / error


def test_the_printed_tables_are_those_of_the_stored_runs():
    """One of 544 beyond three standard errors is what chance gives; settings without a run are left out."""
    away = differences()
    known = away.dropna()
    assert len(away) == 688 and len(known) == 544
    assert (known.abs() > 3.0).sum() <= 2 and known.abs().max() < 3.5
    assert 0.7 < known.std() < 1.1 and abs(known.mean()) < 0.2
