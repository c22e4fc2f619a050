"""Gaussian copula: noisy counts, latent normal scores, Hermite expansions, and correlations."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from scipy.optimize import isotonic_regression

from fedstat.kernels import as_kernel_array
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Hermite expansions of step functions of a standard normal, and correlations behind their products.
#
# A score is s(Z) = sum_m c_m h_m(Z) in normalized Hermite polynomials h_m. For a standard bivariate normal
# with correlation r, Mehler's formula gives ``E[s(Z) t(W)] = sum_m c_m d_m r^m``. The coefficients of a step
# function have a closed form, so one formula serves columns that are continuous, ordinal, binary or
# zero-inflated.
#
# References
# ----------
# Mehler, F. G. (1866). Ueber die Entwicklung einer Function von beliebig vielen Variablen nach Laplaceschen
# Functionen hoeherer Ordnung. Journal fuer die reine und angewandte Mathematik 66, 161-176.

ORDER = 200
"""Terms of a series: up to a correlation of .95, the rest is below 1e-7."""
LARGEST = 0.995
"""Largest correlation in the search."""
MAX_NEWTON_STEPS, NEWTON_TOLERANCE = 60, 1e-13
FLAT = 1e-9
"""Range of a product of scores below which it does not determine a correlation."""


def expand_steps(thresholds: Floats, scores: Floats, order: int = ORDER) -> Floats:
    """Return c_m = E[s(Z) h_m(Z)], m = 1, ..., order, of scores (k,) between thresholds (k + 1,), exactly.

    The outer thresholds may be infinite; c_0, the mean, is not returned.
    """
    rises = np.diff(scores, prepend=0.0, append=0.0)
    at = np.isfinite(thresholds) & (rises != 0.0)
    t, rises = thresholds[at], rises[at]
    # h_m(t) phi(t) is an integral of h_{m+1} phi; in normalized polynomials by a stable recurrence.
    rises = rises * np.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi)
    out = np.zeros(order)
    _expand(t, rises, np.sqrt(np.arange(order + 1.0)), out)
    return out


@njit(cache=True, nogil=True)
def _expand(t: Floats, rises: Floats, roots: Floats, out: Floats) -> None:
    # Added in turn: the last bits of a release decide on draws that follow from its digest.
    for k in range(t.shape[0]):
        now, before = 1.0, 0.0
        for m in range(1, roots.shape[0]):
            out[m - 1] += rises[k] * now / roots[m]
            now, before = (t[k] * now - roots[m - 1] * before) / roots[m], now


def expected_products(a: Floats, b: Floats, r: Floats) -> Floats:
    """Return E[s(Z) t(W)] minus the product of means: coefficients (q, M) each, correlations (q,) -> (q,)."""
    out = np.empty(len(r))
    _products(as_kernel_array(a), as_kernel_array(b), as_kernel_array(r), out)
    return out


def latent_correlations(target: Floats, a: Floats, b: Floats) -> Floats:
    """Return the correlations at which scores have these expected products: (q,) from (q,), (q, M), (q, M).

    Scores that increase with Z have products that increase with r. If no correlation up to :data:`LARGEST`
    reaches a product, the nearest is returned; 0 if a score is constant.
    """
    out = np.empty(len(target))
    _invert(as_kernel_array(target), as_kernel_array(a), as_kernel_array(b), out)
    return out


@njit(cache=True, nogil=True)
def _series(a: Floats, b: Floats, r: float) -> tuple[float, float]:
    """Return sum_m a_m b_m r^m and its derivative; an array of products would have to be compiled, too."""
    total = slope = 0.0
    for m in range(a.shape[0] - 1, -1, -1):
        c = a[m] * b[m]
        total = total * r + c
        slope = slope * r + (m + 1) * c
    return total * r, slope


@njit(cache=True, nogil=True)
def _products(a: Floats, b: Floats, r: Floats, out: Floats) -> None:
    for q in range(r.shape[0]):
        out[q] = _series(a[q], b[q], r[q])[0]


@njit(cache=True, nogil=True)
def _invert(target: Floats, a: Floats, b: Floats, out: Floats) -> None:
    """Newton steps, halved if they leave the interval that contains the correlation."""
    for q in range(target.shape[0]):
        low, high = -LARGEST, LARGEST
        least, most = _series(a[q], b[q], low)[0], _series(a[q], b[q], high)[0]
        if most - least < FLAT:
            out[q] = 0.0
        elif not least < target[q] < most:
            out[q] = low if target[q] <= least else high
        else:
            r = 0.0
            for _ in range(MAX_NEWTON_STEPS):
                value, slope = _series(a[q], b[q], r)
                if value < target[q]:
                    low = r
                else:
                    high = r
                new = r + (target[q] - value) / slope if slope > 0.0 else low
                if not low < new < high:
                    new = 0.5 * (low + high)
                moved, r = abs(new - r), new
                if moved < NEWTON_TOLERANCE:
                    break
            out[q] = r


# ----------------------------------------------------------------------------------------------------
# Probabilities from noisy counts, bins of latent normals, the nearest correlation matrix.
#
# References
# ----------
# Hay, M., Rastogi, V., Miklau, G. and Suciu, D. (2010). Boosting the accuracy of differentially private
# histograms through consistency. Proceedings of the VLDB Endowment 3, 1021-1032.
# Higham, N. J. (2002). Computing the nearest correlation matrix: a problem from finance. IMA Journal of
# Numerical Analysis 22, 329-343.

FLOOR = 1e-2
"""Smallest eigenvalue of a correlation matrix for sampling."""
REACH, CELLS = 6, 64
"""Range of latent normals in which a grid helps to find bins, and its cells per unit."""
FEW = 10**6
"""Numbers that are sorted into bins sooner than a loop is compiled."""
PROJECTIONS = 100
PROJECTION_TOLERANCE = 1e-6
ROUNDED = 1e-12
"""Relative difference of sums that is rounding."""


# ---- counts --------------------------------------------------------------------------------------


def project_simplex(counts: Floats, total: float) -> Floats:
    """Return the nearest vector (k,) of nonnegative numbers with a given sum."""
    ordered = np.sort(counts)[::-1]
    shift = (np.cumsum(ordered) - total) / np.arange(1, len(counts) + 1)
    projected: Floats = np.maximum(counts - shift[np.flatnonzero(ordered > shift)[-1]], 0.0)
    return projected


def count_tree(leaf: Ints) -> Ints:
    """Sum leaves (2^D,) to counts of all nodes below the root, level by level: (2^(D + 1) - 2,)."""
    depth = len(leaf).bit_length() - 1
    return np.concatenate([leaf.reshape(2**level, -1).sum(axis=1) for level in range(1, depth + 1)])


def fit_tree(nodes: Floats, total: float, variance_of_total: float = 0.0) -> Floats:
    """Return leaves (2^D,) of least squares from noisy counts of all nodes, (2^(D + 1) - 2,), and their sum.

    All counts have noise of the same variance; Hay et al. (2010), sections 3 and 4. `variance_of_total`, in
    units of that variance, is positive if the sum is known with noise as well.
    """
    depth = (len(nodes) + 2).bit_length() - 2
    noisy = [nodes[2**level - 2 : 2 ** (level + 1) - 2] for level in range(1, depth + 1)]
    up, variance = [noisy[-1]], 1.0
    for counts in noisy[-2::-1]:
        below, of_below = up[-1].reshape(-1, 2).sum(axis=1), 2.0 * variance
        variance = 1.0 / (1.0 + 1.0 / of_below)
        up.append((counts + below / of_below) * variance)
    alone, of_alone = up[-1].sum(), 2.0 * variance
    share = of_alone / (of_alone + variance_of_total)
    down = np.array([share * total + (1.0 - share) * alone])
    for counts in up[::-1]:
        pairs = counts.reshape(-1, 2)
        # Both share the difference from the parent, because their variances are equal.
        down = (pairs + ((down - pairs.sum(axis=1)) / 2.0)[:, None]).ravel()
    return down


def cumulate(leaf: Floats, total: float) -> Floats:
    """Return the distribution function at the edges, (k + 1,), nearest to that of noisy leaves (k,)."""
    levels = np.concatenate([[0.0], np.cumsum(leaf)]) / total
    F = np.clip(isotonic_regression(levels).x, 0.0, 1.0)
    F[0], F[-1] = 0.0, 1.0
    return F


def taper_tails(p: Floats, tail: float, tolerance: float = math.inf) -> Floats:
    """Make probabilities (k,) in either outer `tail` decrease towards its end; the sums of the tails stay.

    Without rows, projections keep the positive part of the noise. An outermost bin may be an atom. A rise
    that changes sums of bins by more than `tolerance` is not noise, and stays.
    """
    if tolerance <= 0.0:  # no rise is noise
        return p
    F = np.cumsum(p)
    low, high = int(np.searchsorted(F, tail)), int(np.searchsorted(F, 1.0 - tail))
    out = p.copy()
    if low > 1:
        out[1:low] = fit_monotone(out[1:low], True, tolerance)
    if high < len(p) - 2:
        out[high + 1 : -1] = fit_monotone(out[high + 1 : -1], False, tolerance)
    return out


def fit_monotone(p: Floats, increasing: bool, tolerance: float) -> Floats:
    """Return the nearest sequence (k,) with as few changes of direction as sums within a `tolerance` allow.

    The isotonic fit is kept if its sums from the start differ from those of `p` by at most the tolerance.
    Otherwise the sequence is split where they differ most: at the end of a peak or of a valley.
    """
    parts = [(0, len(p), increasing)]
    out = p.copy()
    while parts:
        a, b, upwards = parts.pop()
        fitted = isotonic_regression(p[a:b], increasing=upwards).x
        away = np.abs(np.cumsum(fitted - p[a:b]))[:-1]
        # The sums of a fit agree with those of the data where its steps end: no split there.
        if not away.size or away.max() <= max(tolerance, ROUNDED * np.abs(p[a:b]).sum()):
            out[a:b] = fitted
            continue
        k = a + 1 + int(away.argmax())
        parts += [(a, k, upwards), (k, b, not upwards)]
    return out


# ---- latent normals ------------------------------------------------------------------------------


def code_latents(Z: Floats, thresholds: Floats, bins: Ints) -> Ints:
    """Return the bin of its column into which each latent normal falls: (n, p).

    `thresholds` (p, k + 1) ascend from minus infinity in every row, of which column j uses ``bins[j] + 1``.
    """
    if Z.size <= FEW:
        found = [
            np.searchsorted(t[1:k], z, side="right") for t, k, z in zip(thresholds, bins, Z.T, strict=True)
        ]
        return np.stack(found, axis=1)
    grid = np.arange(-REACH * CELLS, REACH * CELLS) / CELLS
    first = np.array(
        [np.searchsorted(t[1:k], grid, side="right") for t, k in zip(thresholds, bins, strict=True)]
    )
    first[:, 0] = 0
    out = np.empty(Z.shape, np.int64)
    _code(
        as_kernel_array(Z),
        as_kernel_array(thresholds),
        as_kernel_array(bins, np.int64),
        as_kernel_array(first, np.int64),
        out,
    )
    return out


@njit(cache=True, nogil=True)
def _code(Z: Floats, thresholds: Floats, bins: Ints, first: Ints, out: Ints) -> None:
    """Find each bin from the first one, `first` (p, cells), that the cell of a fine grid touches."""
    for i in range(Z.shape[0]):
        for j in range(Z.shape[1]):
            z = Z[i, j]
            cell = int((min(max(z, -REACH), REACH) + REACH) * CELLS)
            k = first[j, min(cell, first.shape[1] - 1)]
            while k < bins[j] - 1 and z >= thresholds[j, k + 1]:
                k += 1
            # The sum above is rounded.
            while k > 0 and z < thresholds[j, k]:
                k -= 1
            out[i, j] = k


def scores_of_codes(codes: Ints, scores: Floats) -> Floats:
    """Return the scores (p, k) of bins (n, p), 0 of none: (n, p)."""
    found = np.take_along_axis(np.ascontiguousarray(scores.T), codes, axis=0)
    return np.where(codes >= 0, found, 0.0)


def interpolate_inverse(u: Floats, F: Floats, x: Floats) -> Floats:
    """Return where a distribution function that is linear between (x, F), (k,), reaches u in [0, 1]: (n,).

    F ascends from 0 or less to 1 or more.
    """
    if u.size <= FEW:
        k = np.clip(np.searchsorted(F, u, side="right") - 1, 0, len(F) - 2)
        share = np.clip((u - F[k]) / (F[k + 1] - F[k]), 0.0, 1.0)
        return np.asarray(x[k] + share * (x[k + 1] - x[k]))
    first = np.searchsorted(F, np.arange(len(F)) / len(F), side="right") - 1
    out = np.empty(len(u))
    _interpolate(
        as_kernel_array(u),
        as_kernel_array(F),
        as_kernel_array(x),
        as_kernel_array(np.maximum(first, 0), np.int64),
        out,
    )
    return out


@njit(cache=True, nogil=True)
def _interpolate(u: Floats, F: Floats, x: Floats, first: Ints, out: Floats) -> None:
    last = F.shape[0] - 2
    for i in range(u.shape[0]):
        # A value that is rounded up to the next cell may be slightly below its first interval.
        k = max(first[min(int(u[i] * F.shape[0]), last + 1)] - 1, 0)
        while k < last and u[i] >= F[k + 1]:
            k += 1
        share = (u[i] - F[k]) / (F[k + 1] - F[k])
        out[i] = x[k] + min(max(share, 0.0), 1.0) * (x[k + 1] - x[k])


# ---- correlations --------------------------------------------------------------------------------


def nearest_correlation(C: Floats, floor: float = FLOOR) -> Floats:
    """Return the nearest correlation matrix (p, p) with eigenvalues of at least about `floor`.

    By alternating projections with Dykstra's correction, Higham (2002).
    """
    Y, correction = C.copy(), np.zeros_like(C)
    np.fill_diagonal(Y, 1.0)
    for _ in range(PROJECTIONS):
        moved = Y - correction
        X = _floored(moved, floor)
        if X is moved:
            break
        correction = X - moved
        earlier, Y = Y, X.copy()
        np.fill_diagonal(Y, 1.0)
        if np.abs(Y - earlier).max() < PROJECTION_TOLERANCE:
            break
    X = _floored(Y, floor)
    units = np.sqrt(np.diag(X))
    nearest: Floats = X / np.outer(units, units)
    return nearest


def _floored(S: Floats, floor: float) -> Floats:
    """Return a symmetric matrix with its eigenvalues raised to a floor.

    The matrix itself if none is below.
    """
    values, vectors = np.linalg.eigh(S)
    if values[0] >= floor:
        return S
    raised: Floats = (vectors * np.maximum(values, floor)) @ vectors.T
    return raised
