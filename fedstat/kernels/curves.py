"""Functional data: penalized splines, integrals along curves, and Gram matrices of curves."""

from __future__ import annotations

import numpy as np
from scipy.interpolate import BSpline
from scipy.linalg import blas
from scipy.sparse import csr_array

from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Penalized splines (Eilers and Marx 1996) and integrals along a curve.

REGULAR = 1e-6
"""Tolerance for equal widths of a grid."""


def spline_basis(x: Floats, low: float, high: float, knots: int = 10, degree: int = 3) -> Floats:
    """B-splines on equidistant inner knots of [low, high]: (m,) -> (m, knots + degree + 1)."""
    step = (high - low) / (knots + 1)
    places = low + step * np.arange(-degree, knots + 2 + degree)
    # Rounding may leave an end outside by one digit.
    places[degree], places[-degree - 1] = low, high
    basis: Floats = BSpline.design_matrix(np.clip(x, low, high), places, degree).toarray()
    return basis


def spline_refinement(knots: int, degree: int = 3) -> Floats:
    """Matrix (2 knots + degree + 2, knots + degree + 1) from splines with one more knot in each interval.

    ``spline_basis(x, knots=k) = spline_basis(x, knots=2 k + 1) @ spline_refinement(k)``.
    """
    x = np.linspace(0.0, 1.0, 8 * (knots + degree + 1) + 1)
    fine, given = (spline_basis(x, 0.0, 1.0, k, degree) for k in (2 * knots + 1, knots))
    return np.asarray(np.linalg.lstsq(fine, given, rcond=None)[0])


def spline_gram(low: float, high: float, knots: int = 10, degree: int = 3) -> Floats:
    """Integrals of products of the functions of :func:`spline_basis`, (k, k), exactly (Gauss-Legendre)."""
    x, w = np.polynomial.legendre.leggauss(degree + 1)
    step = (high - low) / (knots + 1)
    at = (low + step * (np.arange(knots + 1)[:, None] + (x + 1.0) / 2.0)).ravel()
    basis = spline_basis(at, low, high, knots, degree)
    return np.asarray((basis.T * np.tile(w * step / 2.0, knots + 1)) @ basis)


def difference_penalty(k: int, order: int) -> Floats:
    """Squared differences of neighboring coefficients, (k, k)."""
    D = np.diff(np.eye(k), order, axis=0)
    return np.asarray(D.T @ D)


def smooth_curve(y: Floats, basis: Floats, penalty: Floats) -> Floats:
    """Smooth the values of a curve, (m,), by splines with the penalty of least generalized cross-validation.

    `basis` (m, k) is theirs at its points.
    """
    m = len(y)
    best, out = np.inf, y
    for smoothing in np.logspace(-8.0, 8.0, 65) * np.trace(basis.T @ basis) / max(np.trace(penalty), 1e-300):
        H = basis @ np.linalg.lstsq(basis.T @ basis + smoothing * penalty, basis.T, rcond=None)[0]
        left, free = y - H @ y, m - float(np.trace(H))
        loss = float(left @ left) / free**2 if free > 0.5 else np.inf
        if loss < best:
            best, out = loss, H @ y
    return np.asarray(out)


def integration_weights(s: Floats) -> Floats:
    """Weights for the integration of a curve on points (m,), as in FDboost.

    On a regular grid every point has the width, including the ends; otherwise they are those of trapezoids.
    """
    d = np.diff(s)
    if np.ptp(d) < REGULAR:
        return np.full(len(s), d[0])
    return np.asarray((np.r_[0.0, d] + np.r_[d, 0.0]) / 2.0)


def integration_weights_irregular(points: Floats, lengths: Ints) -> Floats:
    """Weights (N,) for the integration of curves on their own points, as for those on common points.

    Points ascend within a curve; `lengths` (n,) are how many each has, two or more.
    """
    first = np.cumsum(lengths) - lengths
    inner = np.ones(len(points), dtype=bool)
    inner[first] = False
    d = np.where(inner, np.diff(points, prepend=points[:1]), 0.0)
    trapezoids = (d + np.append(d[1:], 0.0)) / 2.0
    # A regular curve has the width at every point, including the ends.
    least = np.minimum.reduceat(np.where(inner, d, np.inf), first)
    regular = np.maximum.reduceat(d, first) - least < REGULAR
    return np.where(np.repeat(regular, lengths), np.repeat(least, lengths), trapezoids)


def integration_weights_observed(s: Floats, values: Floats) -> Floats:
    """Weights of every curve, (n, m), over its observed points; 0 at the others."""
    seen = ~np.isnan(values)
    W = np.where(seen, integration_weights(s), 0.0)
    d = np.diff(s)
    for i in np.flatnonzero(~seen.all(axis=1)):
        at = np.flatnonzero(seen[i])
        if len(at) < 2:  # a curve of one point has no integral
            W[i] = 0.0
            continue
        own = s[at]
        before, after = np.r_[0.0, np.diff(own)], np.r_[np.diff(own), 0.0]
        # FDboost extends a missing end by one step beyond the grid.
        if at[0] > 0:
            before[0] = own[0] - (s[0] - d[0])
        if at[-1] < len(s) - 1:
            after[-1] = s[-1] + d[-1] - own[-1]
        W[i, at] = (before + after) / 2.0
    return W


# ----------------------------------------------------------------------------------------------------
# Columns of rows that vary along the response, times functions of it: x(t), and integrals up to t.

GRID_ROUNDING = 1e-12


def row_tensor(columns: Floats, basis: Floats) -> Floats:
    """Products of columns (N, k) with functions (N, l) at the same points, (N, k l), the functions slow."""
    return np.asarray((basis[:, :, None] * columns[:, None, :]).reshape(len(columns), -1))


def left_weights(s: Floats) -> Floats:
    """Weights by which a curve on points (m,) is integrated up to each, as FDboost has them for s <= t."""
    return np.asarray(np.r_[s[1] - s[0], np.diff(s)])


def integrals_up_to(s: Floats, values: Floats, basis: Floats, t: Floats) -> Floats:
    """Integrals of curves (n, m) on points s times functions (m, k) there, over s <= t: (n, len(t), k)."""
    weighed = left_weights(s)[:, None] * basis
    pieces = np.cumsum(values[:, :, None] * weighed, axis=1)
    last = np.searchsorted(s, t + GRID_ROUNDING * (s[-1] - s[0]), side="right")
    before = np.concatenate([np.zeros((len(values), 1, basis.shape[1])), pieces], axis=1)
    return np.asarray(before[:, last])


def products_along(
    E: Floats, Z: Floats, basis: Floats, y: Floats, lengths: Ints
) -> tuple[Floats, Floats, Floats]:
    """Products of columns E (N, M) over points of n curves: with each other, columns of rows, a response.

    Z (n, K) are columns of rows, `basis` (N, L) functions along the response y (N,), and `lengths` (n,) the
    points of every curve. Returned are (M, M), (K, L, M) and (M,).
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    cross = np.empty((Z.shape[1], basis.shape[1], E.shape[1]))
    for j, b in enumerate(basis.T):
        rows = np.flatnonzero(b)
        by_curve = csr_array((b[rows], (owner[rows], rows)), shape=(len(lengths), len(E)))
        cross[:, j] = Z.T @ (by_curve @ E)
    return E.T @ E, cross, E.T @ y


# ----------------------------------------------------------------------------------------------------
# Sums over curves that were measured at different points: Gram matrices that curves weigh differently.
#
# For a curve on points t_1, t_2, ... the products of overlapping basis functions add up to its own weights,
# sum over j of b_a(t_j) b_c(t_j); products of its other columns enter weighted by these (Eilers' row tensors,
# Eilers, Currie and Durban 2006). Splines that do not overlap have none, so the weights are banded.


def overlapping_pairs(k: int, degree: int) -> tuple[Ints, Ints]:
    """Pairs a <= c of k splines that overlap: (r,) each."""
    a, c = np.triu_indices(k)
    near = c - a <= degree
    return a[near], c[near]


def sum_points_by_row(values: Floats, lengths: Ints) -> Floats:
    """Add up (N, q) values of points over rows with these numbers of points: (n, q)."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    ones = np.ones(len(values))
    rows = csr_array((ones, np.arange(len(values)), ends), shape=(len(lengths), len(values)))
    return np.asarray(rows @ values)


def curve_weights(basis: Floats, lengths: Ints, pairs: tuple[Ints, Ints]) -> Floats:
    """Weights of every curve, (n, r), from the splines (N, k) at its points."""
    return np.column_stack(
        [
            sum_points_by_row((basis[:, a] * basis[:, c])[:, None], lengths)
            for a, c in zip(*pairs, strict=True)
        ]
    )


def weighted_grams(Z: Floats, weights: Floats) -> Floats:
    """Products of columns (n, K) by each of the weights (n, r), not negative: (r, K (K + 1) / 2)."""
    upper = np.triu_indices(Z.shape[1])
    out = np.empty((weights.shape[1], len(upper[0])))
    root = np.sqrt(np.maximum(weights, 0.0))
    for j in range(weights.shape[1]):
        rows = np.flatnonzero(root[:, j])
        part = Z[rows] * root[rows, j][:, None]
        # dsyrk of the transpose, which is in Fortran's order: the lower triangle of it is the upper one here.
        out[j] = blas.dsyrk(1.0, part.T, lower=0)[upper] if len(rows) else 0.0
    return out


def full_gram(grams: Floats, pairs: tuple[Ints, Ints], C: Floats, k: int) -> Floats:
    """Products of columns times k splines over rows and points, (k p, k p), splines outermost.

    From weighted ones (r, K, K), of combinations C (K, p) of the columns.
    """
    p = C.shape[1]
    out = np.zeros((k, p, k, p))
    for G, a, c in zip(grams, *pairs, strict=True):
        out[a, :, c] = out[c, :, a] = C.T @ G @ C
    return out.reshape(k * p, k * p)


def dense_from_band(values: Floats, pairs: tuple[Ints, Ints], k: int) -> Floats:
    """Symmetric matrices (..., k, k) from their band (..., r)."""
    out = np.zeros((*values.shape[:-1], k, k))
    out[..., pairs[0], pairs[1]] = values
    out[..., pairs[1], pairs[0]] = values
    return out
