"""Penalised splines (Eilers and Marx 1996) and integrals along a curve."""

from __future__ import annotations

import numpy as np
from scipy.interpolate import BSpline

from fedstat.typing import Floats, Ints

REGULAR = 1e-6
"""Widths of a grid that differ by no more are one."""


def spline_basis(x: Floats, low: float, high: float, knots: int = 10, degree: int = 3) -> Floats:
    """B-splines on equidistant inner knots of [low, high]: (m,) -> (m, knots + degree + 1)."""
    step = (high - low) / (knots + 1)
    places = low + step * np.arange(-degree, knots + 2 + degree)
    # Rounding may leave an end outside by one digit.
    places[degree], places[-degree - 1] = low, high
    basis: Floats = BSpline.design_matrix(np.clip(x, low, high), places, degree).toarray()
    return basis


def spline_gram(low: float, high: float, knots: int = 10, degree: int = 3) -> Floats:
    """Integrals of products of the functions of :func:`spline_basis`, (k, k), exactly (Gauss-Legendre)."""
    x, w = np.polynomial.legendre.leggauss(degree + 1)
    step = (high - low) / (knots + 1)
    at = (low + step * (np.arange(knots + 1)[:, None] + (x + 1.0) / 2.0)).ravel()
    basis = spline_basis(at, low, high, knots, degree)
    return np.asarray((basis.T * np.tile(w * step / 2.0, knots + 1)) @ basis)


def difference_penalty(k: int, order: int) -> Floats:
    """Squared differences of neighbouring coefficients, (k, k)."""
    D = np.diff(np.eye(k), order, axis=0)
    return np.asarray(D.T @ D)


def smooth_curve(y: Floats, basis: Floats, penalty: Floats) -> Floats:
    """Smooth the values of a curve, (m,), by splines with the penalty of least generalised cross-validation.

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
    """Weights by which a curve on points (m,) is integrated, as FDboost has them.

    Of a regular grid every point has the width, the ends as well; else they are those of trapezoids.
    """
    d = np.diff(s)
    if np.ptp(d) < REGULAR:
        return np.full(len(s), d[0])
    return np.asarray((np.r_[0.0, d] + np.r_[d, 0.0]) / 2.0)


def integration_weights_own(points: Floats, lengths: Ints) -> Floats:
    """Weights (N,) by which curves on points of their own are integrated, as those on common ones.

    Points ascend within a curve; `lengths` (n,) are how many each has, two or more.
    """
    first = np.cumsum(lengths) - lengths
    inner = np.ones(len(points), dtype=bool)
    inner[first] = False
    d = np.where(inner, np.diff(points, prepend=points[:1]), 0.0)
    trapezoids = (d + np.append(d[1:], 0.0)) / 2.0
    # A regular curve has the width at every point, the ends as well.
    least = np.minimum.reduceat(np.where(inner, d, np.inf), first)
    regular = np.maximum.reduceat(d, first) - least < REGULAR
    return np.where(np.repeat(regular, lengths), np.repeat(least, lengths), trapezoids)


def integration_weights_seen(s: Floats, values: Floats) -> Floats:
    """Weights of every curve, (n, m), over those of its points that are seen; 0 at the others."""
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
        # FDboost carries a lost end on to one step beyond the grid.
        if at[0] > 0:
            before[0] = own[0] - (s[0] - d[0])
        if at[-1] < len(s) - 1:
            after[-1] = s[-1] + d[-1] - own[-1]
        W[i, at] = (before + after) / 2.0
    return W
