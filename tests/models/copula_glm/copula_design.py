"""The design of the simulations: ten mixed columns of three institutions, a Gaussian copula behind them."""

import math

import numpy as np
import pandas as pd
from scipy.special import expit, ndtri

from fedstat.models.copula.bounds import Bounds
from fedstat.models.copula.margins import Bins
from fedstat.models.copula_glm.design import ScoredColumn, ScoredDesign
from fedstat.models.copula_glm.released_distribution import normal_points, release_rows

BOUNDS = Bounds(
    {
        "a": (-4, 4),
        "b": (0, 8),
        "c": [0, 1],
        "d": range(4),
        "e": (-4, 4),
        "f": [0, 1],
        "g": range(10),
        "h": (-4, 4),
        "i": (-0.25, 7.75),
        "j": range(5),
    }
)
OWNERS = dict(zip(BOUNDS, "AAAABBBCCC", strict=True))
RESPONSES = {"Binomial": [0, 1], "Gaussian": (-8, 9), "Poisson": range(40)}
SLOPES = np.array([0.5, -0.3, 0.6, 0.25, 0.0, -0.5, 0.15, 0.0, 0.2, -0.2])
INTERCEPTS = {"Binomial": -1.0, "Gaussian": 0.2, "Poisson": 0.1}
POINTS = normal_points(10, 1)


def _correlation():
    rng = np.random.default_rng(11)
    loadings = rng.normal(0.0, 0.5, (10, 3))
    S = loadings @ loadings.T + np.diag(rng.uniform(0.4, 1.0, 10))
    return S / np.sqrt(np.outer(np.diag(S), np.diag(S)))


OMEGA = _correlation()


def _levels(*p):
    return ndtri(np.cumsum(p)[:-1])


COUNTS = ndtri(np.cumsum([np.exp(-2.0) * 2.0**k / math.factorial(k) for k in range(9)]))


def draw_columns(n, rng):
    """Columns of n entities: continuous, skewed, binary, ordinal, counts, inflated by zeros."""
    Z = rng.standard_normal((n, 10)) @ np.linalg.cholesky(OMEGA).T
    values = [
        Z[:, 0],
        np.minimum(np.exp(0.6 * Z[:, 1]), 8.0),
        Z[:, 2] > 0.52,
        np.searchsorted(_levels(0.4, 0.3, 0.2, 0.1), Z[:, 3]),
        Z[:, 4],
        Z[:, 5] > 1.04,
        np.searchsorted(COUNTS, Z[:, 6]),
        Z[:, 7],
        np.where(Z[:, 8] > 0.25, np.minimum(np.exp(0.5 * Z[:, 8]), 7.7), 0.0),
        np.searchsorted(_levels(0.1, 0.2, 0.4, 0.2, 0.1), Z[:, 9]),
    ]
    return pd.DataFrame(dict(zip(BOUNDS, np.array(values, dtype=float), strict=True)))


def coefficients(family):
    """Intercept and slopes; those of counts are half as large."""
    slopes = 0.5 * SLOPES if family == "Poisson" else SLOPES
    return np.concatenate([[INTERCEPTS[family]], slopes])


def draw_response(family, columns, rng):
    b = coefficients(family)
    eta = b[0] + columns.to_numpy() @ b[1:]
    if family == "Binomial":
        return (rng.uniform(size=len(eta)) < expit(eta)).astype(float)
    return (
        rng.poisson(np.exp(eta)).astype(float) if family == "Poisson" else eta + rng.standard_normal(len(eta))
    )


def scored_design(depth=6):
    bins = tuple(Bins.of(name, BOUNDS[name], depth) for name in BOUNDS)
    columns = tuple(ScoredColumn(name, name, OWNERS[name], j) for j, name in enumerate(BOUNDS))
    return ScoredDesign(bins, columns, ("A", "B", "C"))


def response_bins(family, depth=6):
    return Bins.of("y", Bounds({"y": RESPONSES[family]})["y"], depth)


def released(family, columns, y, depth=6):
    """The release of these rows without noise."""
    design, bins = scored_design(depth), response_bins(family, depth)
    codes = np.column_stack([one.code(columns[one.name]) for one in design.bins])
    return design, release_rows(design, family, bins, codes, bins.code(pd.Series(y)))
