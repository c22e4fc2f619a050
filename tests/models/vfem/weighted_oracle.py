"""The weighted sums of VFEM from the joined data, and the design of its simulation.

python tests/models/vfem/weighted_simulation.py
"""

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vfem.weighted import WeightedSums

TRUTH = np.array([1.0, -0.5, 0.7, 0.3, 0.5, -0.4])
RHO = 0.4
MECHANISM = {"A": (1.4, 0.8), "B": (0.4, 1.2), "C": (-0.4, -1.0)}
ERRORS = {
    "normal": lambda random, n: random.normal(size=n),
    "exponential": lambda random, n: 1.5 * (random.exponential(size=n) - 1.0),
    "t5": lambda random, n: random.standard_t(5, n),
}
FORMULA = "y ~ A1 + A2 + B1 + B2 + C1 + C2"


def draw(seed, errors, n=2000, missing=True):
    """Columns (n, 6), response (n,) and which of the three sites has each entity, (3, n)."""
    random = np.random.default_rng(9100 + seed)
    x = random.multivariate_normal(np.zeros(6), RHO ** np.abs(np.subtract.outer(range(6), range(6))), n)
    y = x @ TRUTH + ERRORS[errors](random, n)
    z = (y - y.mean()) / y.std()
    has = np.array([random.random(n) < 1.0 / (1.0 + np.exp(-a - b * z)) for a, b in MECHANISM.values()])
    return x, y, has | (not missing)


def partition_of(x, y, has, **options):
    ids = np.arange(len(y))
    frames = {"H": pd.DataFrame({"id": ids, "y": y})}
    for j, site in enumerate(MECHANISM):
        frame = pd.DataFrame({"id": ids, f"{site}1": x[:, 2 * j], f"{site}2": x[:, 2 * j + 1]})
        frames[site] = frame[has[j]]
    return fs.ClientPartition.from_frames(frames, on="id", **options)


def sums_of(x, y, has, groups):
    """The sums that the sites release together, from the joined data; the basis is written out here again."""
    n, code = len(y), np.random.default_rng(len(y)).permutation(len(y)) % groups
    shift = np.array([x[has[j // 2], j].mean() for j in range(6)])
    scale = np.array([x[has[j // 2], j].std() for j in range(6)])
    z, X = (y - y.mean()) / y.std(), (x - shift) / scale
    a, b, c = np.quantile(z, (0.1, 0.5, 0.9))
    cubes = [np.clip(z - knot, 0.0, None) ** 3 for knot in (a, b, c)]
    spline = (cubes[0] - cubes[2]) / (c - a) - (cubes[1] - cubes[2]) / (c - b)
    basis = np.column_stack([np.ones(n), z, spline])
    by_set, sites = {}, list(MECHANISM)
    for one in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]:
        there = has[list(one)].all(axis=0)
        w = np.where(there, basis @ np.linalg.solve(basis[there].T @ basis[there], basis.sum(axis=0)), 0.0)
        D = np.column_stack([np.ones(n), *[X[:, 2 * j : 2 * j + 2] for j in one], z])
        D = np.where(there[:, None], D, 0.0)
        own = [(D[code == g] * w[code == g, None]).T @ D[code == g] for g in range(groups)]
        by_set[tuple(sites[j] for j in one)] = np.array(own)
    V = np.column_stack([np.ones(n), z])
    base = np.array([V[code == g].T @ V[code == g] for g in range(groups)])
    units = ColumnScales(shift, scale, float(y.mean()), float(y.std()), 0.0)
    places = {site: np.array([2 * j, 2 * j + 1]) for j, site in enumerate(sites)}
    return WeightedSums(units, by_set, base, places, np.array([], dtype=int))
