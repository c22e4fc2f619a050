"""The published tables of synthesis by randomised comparisons, repeated: order of methods, and true budgets.

    python tests/models/copula/published_simulation.py [data sets of each case]

prints means of every case and writes them to ``tests/benchmarks/results/copula_published.csv``, with the
published root mean squared errors beside them where they are at hand.
"""

from __future__ import annotations

import sys
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import DisclosureWarning

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "copula_published.csv"
PRINTED = {
    ("normal", "original"): (0.071, 0.037, 0.025),
    ("normal", "vcds"): (0.149, 0.087, 0.067),
    ("normal", "evcds"): (0.149, 0.080, 0.063),
    ("binomial", "original"): (0.116, 0.051, 0.039),
    ("binomial", "vcds"): (0.189, 0.147, np.nan),
    ("binomial", "evcds"): (0.164, 0.132, np.nan),
}
"""Root mean squared errors at a published budget of 1, for n of 1,000, 3,000 and 5,000."""
SIZES = (1_000, 3_000, 5_000)


def tables(data, epsilon, seed):
    """Name, table and largest budget of a record: the data themselves, then what the methods make of them."""
    columns = ["y", *data.truth.index]
    yield "original", data.complete[columns], np.nan
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    simulation = fs.CopulaSynthesizer(partition, epsilon, mechanism="published")
    for method in ("vcds", "evcds", "ievcds"):
        made = simulation.fit(method, seed=seed)
        yield method, made.table[columns], made.record_epsilon.max()


def error(table, data, family):
    """Root mean squared error of the coefficients that SCAD and BIC give."""
    holders = {client: list(group.index) for client, group in data.truth.groupby("client", sort=False)}
    first = next(iter(holders))
    holders[first] = ["y", *holders[first]]
    partition = fs.ClientPartition.from_frame(table.reset_index(drop=True), columns=holders)
    fit = fs.VerticalGLM.from_formula("y ~ .", partition, family=family).fit(select="bic", masked=False)
    return np.sqrt(np.mean((fit.params[data.truth.index] - data.truth["coef"]) ** 2))


def main(repeats=4, epsilon=1.0):
    warnings.simplefilter("ignore", DisclosureWarning)
    families = {"normal": sm.families.Gaussian(), "binomial": sm.families.Binomial()}
    rows = []
    for (name, family), n, repeat in product(families.items(), SIZES, range(repeats)):
        data = fs.datasets.make_selection(n, name, standardise=name == "binomial", seed=[n, repeat])
        for method, table, record in tables(data, epsilon, repeat):
            rows.append((name, n, method, error(table, data, family), record))
        print(name, n, repeat + 1, flush=True)
    runs = pd.DataFrame(rows, columns=["family", "n", "method", "rmse", "record epsilon"])
    means = runs.groupby(["family", "n", "method"], sort=False).mean()
    printed = {(f, n, m): v for (f, m), values in PRINTED.items() for n, v in zip(SIZES, values, strict=True)}
    means["printed"] = [printed.get(case, np.nan) for case in means.index]
    original = means.xs("original", level="method")
    for column in ("rmse", "printed"):
        means[f"{column} by original"] = (
            means[column] / original[column].reindex(means.droplevel(2).index).array
        )
    means["data sets"] = repeats
    means.round(4).to_csv(TABLE)
    print(means.round(3).to_string())


if __name__ == "__main__":
    main(*[int(n) for n in sys.argv[1:2]])
