"""Tables from sums over rows with noise: counts that add up, quantiles, moments and correlations.

Each row adds one vector of whole numbers of a limited length to the sums of a table, and each sum gets noise
of the same variance. So the square of that length is the squared sensitivity of the complete table if one row
is added or removed, whatever the number of sums. Counts have the weight :data:`UNIT` in these vectors, and
numbers that are scaled to [-1, 1] are rounded to multiples of 1 / :data:`UNIT`.

Counts up to the ends of intervals are summed with the weights of :func:`running_weights`, the square root of
the matrix of running sums. Noise on sums of successive intervals then adds up to about log(J) / pi times that
of one sum, where noise on each of J counts adds up to J times.

All estimates are plain functions of the noisy sums. Intervals include the noise: its variance is propagated
to first order and added to that of sampling.

References
----------
Henzinger, M., Upadhyay, J. and Upadhyay, S. (2023). Almost tight error bounds on differentially private
continual counting. SODA. arXiv 2211.05006.

Woodruff, R. S. (1952). Confidence intervals for medians and other position measures. Journal of the American
Statistical Association 47, 635-646.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats
from scipy.linalg import solve_triangular
from scipy.optimize import isotonic_regression

from fedstat.kernels.copula import project_simplex
from fedstat.typing import Array, Floats, Ints

PLACES = 10
UNIT: int = 2**PLACES
"""Weight of one row in a count, and number of steps from 0 to 1 of a scaled number."""
STEP = 0.5
"""Rows by which a count is changed to find the slope of a statistic."""


def normal_quantile(alpha: float) -> float:
    """Return the number of standard errors in half of an interval."""
    return float(stats.norm.isf(alpha / 2.0))


# ----------------------------------------------------------------------------------------------------
# Counts of cells.


def consistent_counts(noisy: Floats) -> Ints:
    """Return whole numbers of zero or more, near noisy counts of any shape and with their sum.

    The nearest vector with this sum is rounded by the largest remainders. The sum has no bias; a cell without
    rows has one, as any count above zero.
    """
    total = max(round(float(noisy.sum())), 0)
    if not total:
        return np.zeros(noisy.shape, dtype=np.int64)
    nearest = project_simplex(noisy.ravel().astype(np.float64), float(total))
    counts = np.floor(nearest).astype(np.int64)
    largest = np.argsort(counts - nearest, kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return counts.reshape(noisy.shape)


def count_limits(noisy: Floats, deviation: float, alpha: float) -> tuple[Floats, Floats]:
    """Return limits of the number of rows behind noisy counts: whole numbers of zero or more."""
    half = normal_quantile(alpha) * deviation
    return np.maximum(np.ceil(noisy - half - STEP), 0.0), np.maximum(np.floor(noisy + half + STEP), 0.0)


def share_limits(noisy: Floats, deviation: float, alpha: float) -> tuple[Floats, Floats, Floats]:
    """Return shares of cells (..., L) among all of a line, and limits that include sampling and noise.

    The limits are Wilson's at the number of rows whose sampling error is as large as both errors together.
    """
    n, L, z = noisy.sum(axis=-1, keepdims=True), noisy.shape[-1], normal_quantile(alpha)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.clip(np.where(n > 0.0, noisy / n, np.nan), 0.0, 1.0)
        # Towards the middle, as of a few rows more: at a share of 0 there is sampling error as well.
        near = (share * n + z**2 / 2.0) / (n + z**2)
        noise = (deviation / n) ** 2 * (1.0 - 2.0 * share + L * share**2)
        rows = near * (1.0 - near) / (near * (1.0 - near) / n + noise)
        center = (share + z**2 / (2.0 * rows)) / (1.0 + z**2 / rows)
        half = z / (1.0 + z**2 / rows) * np.sqrt(share * (1.0 - share) / rows + z**2 / (4.0 * rows**2))
    return share, np.clip(center - half, 0.0, 1.0), np.clip(center + half, 0.0, 1.0)


# ----------------------------------------------------------------------------------------------------
# Running counts: rows up to the end of each of J intervals.


@lru_cache(32)
def running_weights(J: int) -> Ints:
    """Return the weights (J, J) by which counts of J successive intervals are summed, in units of UNIT.

    They are the square root of the lower triangle of ones, with f_k = (2k - 1) / (2k) f_(k-1) on the k-th
    diagonal, rounded. Rounding costs nothing: the rounded matrix is inverted.
    """
    k = np.arange(1, J)
    f = np.rint(UNIT * np.append(1.0, np.cumprod((2.0 * k - 1.0) / (2.0 * k)))).astype(np.int64)
    place = np.subtract.outer(np.arange(J), np.arange(J))
    weights: Ints = np.where(place >= 0, f[np.maximum(place, 0)], 0)
    weights.setflags(write=False)
    return weights


@lru_cache(32)
def _from_sums(J: int) -> Floats:
    """Return the matrix (J, J) that makes running counts of noisy sums."""
    inverse = solve_triangular(running_weights(J).astype(np.float64), np.eye(J), lower=True)
    made: Floats = inverse.cumsum(axis=0)
    made.setflags(write=False)
    return made


def squared_length(weights: Ints) -> int:
    """Return the square of the longest vector that one row adds: the longest column of weights (m, J)."""
    return int((weights**2).sum(axis=0).max())


@dataclass(frozen=True, slots=True, eq=False)
class RunningCounts:
    """Rows up to the end of each of J intervals: `upto` (..., J), the last being all, and their noise.

    `covariance` (J, J) is that of the noise on one line of `upto`.
    """

    upto: Floats
    covariance: Floats

    @classmethod
    def of_sums(cls, noisy: Array, variance: float) -> RunningCounts:
        """Compute running counts from sums (..., J) with noise of a variance, in units of the weights."""
        made = _from_sums(noisy.shape[-1])
        return cls(noisy @ made.T, variance * made @ made.T)

    @property
    def ascending(self) -> Floats:
        """The nearest counts that ascend from zero, (..., J): isotonic regression."""
        lines = self.upto.reshape(-1, self.upto.shape[-1])
        fitted = np.array([isotonic_regression(line).x for line in lines])
        return np.asarray(np.maximum(fitted, 0.0).reshape(self.upto.shape))

    @property
    def counts(self) -> Floats:
        """Rows in each interval, (..., J), of zero or more."""
        return np.asarray(np.diff(self.ascending, axis=-1, prepend=0.0))


def noisy_quantiles(running: RunningCounts, edges: Floats, shares: Floats, alpha: float) -> Floats:
    """Return quantiles of one line of running counts (J,), and their limits: (3, Q).

    The inner `edges` (J - 1,) ascend; the first and the last interval are outside of the range, and a
    quantile in one of them is at the end of the range. Within an interval, rows are spread evenly. Limits are
    those of Woodruff (1952): the quantiles at which the distribution function is as far from the share as its
    error allows.
    """
    upto, n = running.ascending, float(running.ascending[-1])
    if n <= 0.0:
        return np.full((3, len(shares)), np.nan)
    F, C = np.minimum(upto[:-1] / n, 1.0), running.covariance
    noise = np.diag(C)[:-1] - 2.0 * F * C[:-1, -1] + F**2 * C[-1, -1]
    # Edges between which there are no rows have equal F: the smallest increase separates them.
    rising = F + 1e-12 * np.arange(len(F))
    at = np.interp(shares, rising, noise)
    half = normal_quantile(alpha) * np.sqrt(shares * (1.0 - shares) / n + at / n**2)
    return np.array([np.interp(at, rising, edges) for at in (shares, shares - half, shares + half)])


# ----------------------------------------------------------------------------------------------------
# Moments of numbers that are scaled to [-1, 1].


@dataclass(frozen=True, slots=True, eq=False)
class NoisyMoments:
    """Rows, mean and variance of a scaled number by group (G,), and the standard error of the mean."""

    rows: Floats
    mean: Floats
    variance: Floats
    error: Floats


def noisy_moments(sums: Floats, deviation: float) -> NoisyMoments:
    """Estimate moments from sums of ones, of a number in [-1, 1] and of its square, (G, 3), with noise.

    The expected square of the noise on the mean is added to the variance, from which it is missing.
    """
    n, total, squares = (np.asarray(one, dtype=np.float64) for one in sums.T)
    n = np.where(n >= 1.0, n, np.nan)
    mean = np.clip(total / n, -1.0, 1.0)
    noise = (deviation / n) ** 2 * (1.0 + mean**2)
    variance = np.maximum((squares / n - mean**2 + noise) * n / np.maximum(n - 1.0, 1.0), 0.0)
    return NoisyMoments(n, mean, variance, np.sqrt(variance / n + noise))


def noisy_correlation(
    n: float, sums: Floats, products: Floats, deviation: float, alpha: float
) -> tuple[Floats, Floats, Floats]:
    """Return correlations (p, p) and their limits from noisy sums (p,) and products (p, p), symmetric.

    The limits are symmetric on Fisher's scale, with the sampling error of normal columns. All are NaN where
    noise hides that a column varies.
    """
    n = max(n, 1.0)
    mean = sums / n
    covariance = products / n - np.outer(mean, mean)
    spread = np.diag(covariance).copy()
    known = spread > 2.0 * deviation / n
    scale = np.sqrt(np.where(known, spread, np.nan))
    r = np.clip(covariance / np.outer(scale, scale), -1.0, 1.0)
    # Noise on one product, and half of it times r for each of the two squares.
    squares = scale**-4
    slope = np.outer(scale**-2, scale**-2) + r**2 / 4.0 * np.add.outer(squares, squares)
    # Noise on the two means moves the products that are subtracted.
    means = np.add.outer(mean**2, mean**2) * np.outer(scale**-2, scale**-2)
    noise = (deviation / n) ** 2 * (slope + means)
    inner = np.clip(r, -0.9999, 0.9999)
    half = normal_quantile(alpha) * np.sqrt(1.0 / max(n - 3.0, 1.0) + noise / (1.0 - inner**2) ** 2)
    z = np.arctanh(inner)
    low, high = np.tanh(z - half), np.tanh(z + half)
    for one in (r, low, high):
        np.fill_diagonal(one, np.where(known, 1.0, np.nan))
    return r, low, high


# ----------------------------------------------------------------------------------------------------
# Price.


def price(sampling: Floats, noise: Floats) -> float:
    """Return the median ratio of errors with noise to errors without, from their variances (m,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(1.0 + noise / sampling)
    finite = ratio[np.isfinite(ratio)]
    return float(np.median(finite)) if len(finite) else math.inf
