"""Tables from sums over rows with noise: counts that add up, quantiles, moments, correlations and curves.

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
Fieller, E. C. (1954). Some problems in interval estimation. Journal of the Royal Statistical Society B 16,
175-185.

Henzinger, M., Upadhyay, J. and Upadhyay, S. (2023). Almost tight error bounds on differentially private
continual counting. SODA. arXiv 2211.05006.

Woodruff, R. S. (1952). Confidence intervals for medians and other position measures. Journal of the American
Statistical Association 47, 635-646.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats
from scipy.linalg import solve_triangular
from scipy.optimize import isotonic_regression

from fedstat.inference.survival_curves import SurvivalCounts
from fedstat.kernels.copula import nearest_correlation, project_simplex
from fedstat.typing import Array, Floats, Ints

PLACES = 10
UNIT: int = 2**PLACES
"""Weight of one row in a count, and number of steps from 0 to 1 of a scaled number."""
MOST_CORRELATED = 0.9999
"""Correlation to which noise is cut."""
DRAWS, MOST_SHORTENED = 20_000, 20.0
"""Normal rows that show the bias of shortened rows, and the mean square of a column beyond which none is."""
CLEAR_MISSING = 2.0
"""Deviations of noise on all counts together beyond which rows are missing."""
STEP = 0.5
"""Rows by which a count is changed to find the slope of a statistic."""


def normal_quantile(alpha: float) -> float:
    """Return the number of standard errors in half of an interval."""
    return float(stats.norm.isf(alpha / 2.0))


# ----------------------------------------------------------------------------------------------------
# Counts of cells.


def consistent_counts(noisy: Floats, deviation: float, rows: int) -> Ints:
    """Return whole numbers of zero or more, near noisy counts of any shape, that add up to `rows` at most.

    They add up to all rows, unless more are missing than noise of a `deviation` on each count explains; then
    they have the noisy sum. The nearest vector with this sum is rounded by the largest remainders. A cell
    without rows has a bias, as any count above zero.
    """
    total = max(round(float(noisy.sum())), 0)
    if total > rows - CLEAR_MISSING * deviation * math.sqrt(noisy.size):
        total = rows
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
    n: float,
    sums: Floats,
    products: Floats,
    deviation: float,
    alpha: float,
    squared_radius: float = math.inf,
) -> tuple[Floats, Floats, Floats]:
    """Return correlations (p, p) and their limits from noisy sums (p,) and products (p, p), symmetric.

    The bias of rows that were shortened to a squared length is that of normal columns. Limits of the noise
    are those of a ratio (Fieller 1954): a product over the root of two squares. On Fisher's scale, the
    sampling error of normal columns is added. All are NaN where noise hides that a column varies.
    """
    n, z = max(n, 1.0), normal_quantile(alpha)
    mean, noise = sums / n, deviation / n
    covariance = products / n - np.outer(mean, mean)
    spread = np.diag(covariance).copy()
    known = spread > 2.0 * noise
    spread[~known] = np.nan
    size = np.sqrt(np.outer(spread, spread))
    r = np.clip(covariance / size, -MOST_CORRELATED, MOST_CORRELATED)
    # Noise on a product and on the two means that are subtracted from it, and on the root of two squares.
    of_product = noise**2 * (1.0 + np.add.outer(mean**2, mean**2))
    ratio = np.divide.outer(spread, spread)
    of_size = noise**2 / 4.0 * (ratio + ratio.T)
    first, middle = size**2 - z**2 * of_size, covariance * size
    root = np.sqrt(np.maximum(middle**2 - first * (covariance**2 - z**2 * of_product), 0.0))
    center = np.arctanh(r - shortening_bias(r, squared_radius))
    limits = []
    for sign in (-1.0, 1.0):
        with np.errstate(divide="ignore", invalid="ignore"):
            end = np.where(first > 0.0, (middle + sign * root) / first, sign)
        end = np.arctanh(np.clip(end, -MOST_CORRELATED, MOST_CORRELATED))
        half = np.sqrt((end - np.arctanh(r)) ** 2 + z**2 / max(n - 3.0, 1.0))
        limits.append(np.tanh(center + sign * half))
    out = np.tanh(center), *limits
    for one in out:
        np.fill_diagonal(one, np.where(known, 1.0, np.nan))
    return out


@lru_cache(8)
def _normal_draws(p: int) -> Floats:
    return np.random.default_rng(0).standard_normal((DRAWS, p))


def shortening_bias(correlation: Floats, squared_radius: float) -> Floats:
    """Return what shortening normal rows to a squared length adds to their correlations, (p, p)."""
    p = len(correlation)
    if not squared_radius < MOST_SHORTENED * p:
        return np.zeros((p, p))
    full = nearest_correlation(np.where(np.isnan(correlation), np.eye(p), correlation))
    values, vectors = np.linalg.eigh(full)
    X = _normal_draws(p) @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
    lengths = np.sqrt((X**2).sum(axis=1))
    shorter = X * np.minimum(1.0, math.sqrt(squared_radius) / lengths)[:, None]
    return np.asarray(np.corrcoef(shorter.T) - np.corrcoef(X.T)).reshape(p, p)


# ----------------------------------------------------------------------------------------------------
# Survival curves.


def noisy_survival_counts(events: RunningCounts, censored: RunningCounts, times: Floats) -> SurvivalCounts:
    """Return counts by group of running counts (G, 2 J + 1) up to just before each time, and up to it.

    The last interval is beyond all times (J,). Numbers at risk are the rows that have not left, so they
    descend.
    """
    d, c = events.counts, censored.counts
    before, at = slice(0, -1, 2), slice(1, None, 2)
    return SurvivalCounts(
        times,
        d[:, before] + d[:, at],
        c[:, before] + c[:, at],
        d[:, -1] + c[:, -1],
        at_ends=d[:, at] + c[:, at],
        events_at_ends=d[:, at],
    )


def noise_at_ends(covariance: Floats, J: int) -> Floats:
    """Return the covariance (J + 1, J + 1) of running counts up to the first J times, and of all rows."""
    kept = [*range(1, 2 * J, 2), len(covariance) - 1]
    return np.asarray(covariance[np.ix_(kept, kept)])


def propagate_noise(
    statistic: Callable[[SurvivalCounts], Floats], counts: SurvivalCounts, covariance: Floats
) -> Floats:
    """Return the covariance (q, q) that noise on running counts gives to a statistic (q,) of counts.

    Noise of `covariance` (J + 1, J + 1) is on the running counts of events and of censored rows of each group
    independently; slopes are central differences.
    """
    G, J = counts.events.shape
    root = np.linalg.cholesky(covariance + 1e-12 * np.trace(covariance) * np.eye(J + 1))
    slopes = []
    for g in range(G):
        for of_events in (True, False):
            found = []
            for j in range(J + 1):
                ends = [statistic(_moved(counts, g, of_events, j, sign * STEP)) for sign in (1.0, -1.0)]
                found.append((ends[0] - ends[1]) / (2.0 * STEP))
            # Slopes by counts of intervals; those by running counts are their differences.
            slope = np.array(found)
            slope[:-1] -= slope[1:].copy()
            slopes.append(root.T @ slope)
    every = np.concatenate(slopes)
    return np.asarray(every.T @ every)


def _moved(counts: SurvivalCounts, g: int, of_events: bool, j: int, by: float) -> SurvivalCounts:
    """Return counts with some rows more in one interval of a group, with an event or without."""
    events, censored, beyond = counts.events.copy(), counts.censored.copy(), counts.beyond.copy()
    if j == events.shape[1]:
        beyond[g] += by
    elif of_events:
        events[g, j] += by
    else:
        censored[g, j] += by
    return SurvivalCounts(counts.times, events, censored, beyond)


def log_survival_noise(counts: SurvivalCounts, covariance: Floats) -> Floats:
    """Return the covariance of the noise on the logarithm of each group's curve, (G, J, J).

    log S is the sum of log(n - d) - log(n) over the intervals, n being the rows at risk and d the events. In
    running counts D and C of events and censored rows, with N all rows, n_j = N - D_(j-1) - C_(j-1) and
    n_j - d_j = N - D_j - C_(j-1). Censored rows within an interval change n by a small part.
    """
    G, J = counts.events.shape
    out = np.zeros((G, J, J))
    whole = np.zeros((J, J + 1))
    whole[:, -1] = 1.0
    upto, before = np.eye(J, J + 1), np.eye(J, J + 1, -1)
    for g in range(G):
        n = counts.at_risk[g]
        with np.errstate(divide="ignore", invalid="ignore"):
            of_rest, of_risk = 1.0 / (n - counts.events[g]), 1.0 / n
        both = np.where(np.isfinite(of_rest + of_risk), [of_rest, of_risk], 0.0)
        by_events = both[0][:, None] * (whole - upto) - both[1][:, None] * (whole - before)
        by_censored = (both[0] - both[1])[:, None] * (whole - before)
        for slope in (by_events.cumsum(axis=0), by_censored.cumsum(axis=0)):
            out[g] += slope @ covariance @ slope.T
    return out


def last_known(counts: SurvivalCounts, covariance: Floats) -> Ints:
    """Return how many intervals of each group (G,) have more rows at risk than noise explains."""
    # Rows at risk at the beginning of an interval are all rows without those that left before.
    J = counts.events.shape[1]
    slope = np.zeros((J, J + 1))
    slope[:, -1] = 1.0
    slope -= np.eye(J, J + 1, -1)
    deviation = np.sqrt(2.0 * np.einsum("ij,jk,ik->i", slope, covariance, slope))
    clear = counts.at_risk > 2.0 * deviation
    return np.asarray(np.where(clear.all(axis=1), J, clear.argmin(axis=1)))


def price(sampling: Floats, noise: Floats) -> float:
    """Return the median ratio of errors with noise to errors without, from their variances (m,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(1.0 + noise / sampling)
    finite = ratio[np.isfinite(ratio)]
    return float(np.median(finite)) if len(finite) else math.inf
