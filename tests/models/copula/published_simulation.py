"""The published tables of synthesis by randomized comparisons, repeated: order of methods, and true budgets.

    python tests/models/copula/published_simulation.py [data sets of each case [methods]]

prints means of every case and writes them to ``tests/benchmarks/results/copula_published.csv``, with the
published root mean squared errors next to them if available; with named methods, the rows of all others
stay unchanged. "private" is the release of this package, with an epsilon of 10 for a whole record, or
with the epsilon that a whole record spends in "evcds". "admm" has noise for a budget of 1 in every round, as
if a record moved nothing but its own predictor.
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
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.penalties import Penalty
from fedstat.privacy.gaussian_dp import mu_of

sys.path.append(str(Path(__file__).parents[1] / "vglm"))
from noisy_admm import noisy_admm

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


METHODS = ("original", "vcds", "evcds", "ievcds", "private, 10", "private, as evcds", "admm")
CLIP, DELTA = 3.0, 1e-6


def error_of(method, data, name, family, seed):
    """Root mean squared error of the coefficients by a method, and the largest budget of a record."""
    columns = ["y", *data.truth.index]
    if method == "original":
        return error(data.complete[columns], data, family), np.nan
    if method == "admm":
        return by_admm(data, family, seed)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    simulation = fs.CopulaSynthesizer(partition, 1.0, mechanism="published")
    if method in ("vcds", "evcds", "ievcds"):
        made = simulation.fit(method, seed=seed)
        return error(made.table[columns], data, family), made.record_epsilon.max()
    epsilon = 10.0 if method == "private, 10" else simulation.fit("evcds", seed=seed).record_epsilon.max()
    policy = fs.Policy(privacy=fs.Budget(epsilon, DELTA))
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key, policy=policy)
    fit = fs.CopulaSynthesizer(partition, epsilon, bounds_of(data, name)).fit()
    return error(fit.sample(len(data.complete), seed=seed), data, family), fit.privacy["epsilon"].max()


def bounds_of(data, name):
    """Public facts on the columns: the range of the standardized ones for a binary response."""
    kinds = {"count": (0, 12), "class": range(3), "binary": [0, 1]}
    of = data.truth["type"] if name == "normal" else pd.Series("", data.truth.index)
    bounds = {column: kinds.get(kind, (-6, 6)) for column, kind in of.items()}
    return bounds | {"y": (-10, 10) if name == "normal" else [0, 1]}


def by_admm(data, family, seed):
    """ADMM with noise on the predictors of every round."""
    blocks = [data.complete[list(g.index)].to_numpy() for _, g in data.truth.groupby("client", sort=False)]
    noise = 2.0 * CLIP / mu_of(1.0, DELTA)
    y, spec, random = (
        data.complete["y"].to_numpy(float),
        DistributionSpec.of(family),
        np.random.default_rng(seed),
    )
    found = noisy_admm(blocks, y, spec, Penalty("scad"), noise=noise, random=random, clip=CLIP)
    truth = np.concatenate([g["coef"] for _, g in data.truth.groupby("client", sort=False)])
    return np.sqrt(np.mean((found.coefficients[found.chosen] - truth) ** 2)), found.epsilon(DELTA)


def error(table, data, family):
    """Root mean squared error of the coefficients that SCAD and BIC give."""
    holders = {site: list(group.index) for site, group in data.truth.groupby("client", sort=False)}
    first = next(iter(holders))
    holders[first] = ["y", *holders[first]]
    partition = fs.ClientPartition.from_frame(table.reset_index(drop=True), columns=holders)
    fit = fs.VerticalGLM.from_formula("y ~ .", partition, family=family).fit(select="bic", masked=False)
    return np.sqrt(np.mean((fit.params[data.truth.index] - data.truth["coef"]) ** 2))


def main(repeats=4, methods=METHODS):
    warnings.simplefilter("ignore", DisclosureWarning)
    families = {"normal": sm.families.Gaussian(), "binomial": sm.families.Binomial()}
    case = ["family", "n", "method"]
    held = pd.read_csv(TABLE) if TABLE.exists() else pd.DataFrame(columns=[*case, "rmse"])
    for (name, family), n in product(families.items(), SIZES):
        rows = []
        for method, repeat in product(methods, range(repeats)):
            data = fs.datasets.make_selection(n, name, standardize=name == "binomial", seed=[n, repeat])
            rows.append((name, n, method, *error_of(method, data, name, family, repeat)))
        runs = pd.DataFrame(rows, columns=[*case, "rmse", "record epsilon"])
        means = runs.groupby(case, sort=False).mean().reset_index().assign(**{"data sets": repeats})
        new = pd.MultiIndex.from_frame(means[case])
        held = pd.concat([held[~pd.MultiIndex.from_frame(held[case]).isin(new)], means], ignore_index=True)
        write(held.set_index(case))


def write(means):
    """Print the published errors next to these, and ratios to those of the data themselves."""
    order = {value: i for i, value in enumerate(("normal", "binomial", *SIZES, *METHODS))}
    means = means.sort_index(key=lambda index: index.map(order))
    printed = {(f, n, m): v for (f, m), values in PRINTED.items() for n, v in zip(SIZES, values, strict=True)}
    means["printed"] = [printed.get(case, np.nan) for case in means.index]
    original = means.xs("original", level="method")
    for column in ("rmse", "printed"):
        beside = original[column].reindex(means.index.droplevel("method"))
        means[f"{column} by original"] = means[column] / beside.array
    means.round(4).to_csv(TABLE, lineterminator="\n")
    print(means.round(3).to_string(), flush=True)


if __name__ == "__main__":
    main(*[int(n) for n in sys.argv[1:2]], *([sys.argv[2:]] if sys.argv[2:] else []))
