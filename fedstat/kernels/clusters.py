"""Sums over clusters of rows that have a working correlation: estimating functions and their derivative.

With standardized residuals r and derivatives D of the means (rows are divided by the root of the variance
function), a cluster's estimating function is ``D' R^-1 W r`` and its information ``D' R^-1 W D`` (Liang and
Zeger 1986, equation 6), R the working correlation and W weights that are equal within the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.typing import Floats, Ints

STRUCTURES = ("independence", "exchangeable", "ar1")
"""Working correlations; `kind` is the position here."""


def cluster_sums(
    D: Floats, r: Floats, w: Floats, start: Ints, kind: int, rho: float, each: bool
) -> tuple[Floats, Floats]:
    """Return the clusters' estimating functions (G, p), and their information.

    The information is (G, p, p) for `each` cluster, or (1, p, p) summed over all. `D` (p, n) are columns in
    contiguous rows, `r` and `w` (n,), `start` (G + 1,) the first row of each cluster.
    """
    first, columns = start[:-1], D.T
    solved = solve_clusters(w[:, None] * columns, start, kind, rho)
    residuals = solve_clusters(w[:, None] * r[:, None], start, kind, rho)
    score = np.add.reduceat(columns * residuals, first)
    if each:
        of_column = [np.add.reduceat(columns * solved[:, [j]], first) for j in range(len(D))]
        return score, np.stack(of_column, axis=2)
    information = D @ solved
    return score, (0.5 * (information + information.T))[None]


def solve_clusters(x: Floats, start: Ints, kind: int, rho: float) -> Floats:
    """Return ``R^-1 x`` of rows (n, k), R the working correlation of each cluster."""
    size = np.diff(start)
    if kind == 0:
        return x
    if kind == 1:
        totals = np.repeat(np.add.reduceat(x, start[:-1]), size, axis=0)
        share = rho / (1.0 + (np.repeat(size, size)[:, None] - 1.0) * rho)
        return np.asarray((x - share * totals) / (1.0 - rho))
    begins, ends = (np.isin(np.arange(len(x)), places)[:, None] for places in (start[:-1], start[1:] - 1))
    neighbors = np.where(begins, 0.0, np.roll(x, 1, axis=0)) + np.where(ends, 0.0, np.roll(x, -1, axis=0))
    own = np.where(begins & ends, 1.0 - rho**2, np.where(begins | ends, 1.0, 1.0 + rho**2))
    return np.asarray((own * x - rho * neighbors) / (1.0 - rho**2))


def pair_sums(r: Floats, w: Floats, start: Ints) -> Floats:
    """Sum products of residuals (n,) within clusters, from which a working correlation is estimated: (3,).

    These are the weighted products of all pairs, as for statsmodels' ``Exchangeable``; and the mean products
    of neighbors and mean squares of every cluster of two rows or more, as for its ``Autoregressive`` on a
    grid, which has no weights.
    """
    first, m = start[:-1], np.diff(start)
    squares, totals = np.add.reduceat(r * r, first), np.add.reduceat(r, first)
    pairs = float(w[first] @ (totals**2 - squares)) / 2.0
    neighbors = np.zeros(len(r))
    neighbors[:-1] = r[:-1] * r[1:]
    neighbors[start[1:] - 1] = 0.0
    several = m > 1
    lag = np.add.reduceat(neighbors, first)[several] / (m[several] - 1.0)
    return np.array([pairs, lag.sum(), (squares[several] / m[several]).sum()])


AT_ONE = 1.0 - 1e-9
"""Leverage from which a cluster determines a coefficient alone."""


def cluster_products(X: Floats, weight: Floats, code: Ints, count: int, Y: Floats | None = None) -> Floats:
    """Sum ``w x y'`` over the rows of each cluster: (count, p, q).

    `X` (n, p) and `Y` (n, q), by default X, are columns, `weight` (n,), and `code` (n,) numbers the clusters.
    """
    other = X if Y is None else Y
    found = np.empty((count, X.shape[1], other.shape[1]))
    for j in range(X.shape[1]):
        part = weight * X[:, j]
        for k in range(j if Y is None else 0, other.shape[1]):
            found[:, j, k] = np.bincount(code, part * other[:, k], count)
            if Y is None:
                found[:, k, j] = found[:, j, k]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Margins:
    """Estimated constants that are no coefficients, such as the baseline hazards of the strata of a site.

    A cluster has leverage in them as well. For each pair of a cluster and a constant behind which it has
    rows, in the order of clusters: the `shares` (P,) of the constant's information, the `residuals` (P,) over
    the root of this information, and `cross` (P, p), the information that the cluster has of constant and
    coefficients, over this root as well. `first` (G + 1,) is the place of each cluster's first pair.
    """

    first: Ints
    shares: Floats
    residuals: Floats
    cross: Floats

    def part(self, clusters: slice) -> Margins:
        """Return those of a range of clusters."""
        return Margins(
            self.first[clusters.start : clusters.stop + 1], self.shares, self.residuals, self.cross
        )


@dataclass(frozen=True, slots=True, eq=False)
class CorrectedSums:
    """Sums over clusters for a covariance that is corrected for their leverage.

    Parameters
    ----------
    meat : (p, p) array
        Outer products of the corrected estimating functions.
    concentration : (p,) array
        Squares of the clusters' shares in the model-based variance of each coefficient. Over all clusters
        its inverse is their effective number (Carter, Schnepel and Steigerwald 2017, equation 9).
    leverages : (G,) array
        Largest leverage of each cluster.
    """

    meat: Floats
    concentration: Floats
    leverages: Floats

    @property
    def inside(self) -> bool:
        """Whether no coefficient rests on one cluster; otherwise `meat` is zero."""
        return bool(self.leverages.max(initial=0.0) < AT_ONE)


MANY_COLUMNS = 16
"""Columns from which on clusters of few rows are worth factors of their information."""
SMALL_PIVOT = 1e-14
"""Pivot, relative to the first, below which a factor is complete."""


def information_factors(information: Floats) -> Floats | None:
    """Return A (G, r, p) with ``A'A`` the information of each cluster, (G, p, p).

    Cholesky's method with pivots takes r p numbers a step, so that clusters of few rows need no decomposition
    of p x p matrices. None if one cluster has a rank above p / 3, and for fewer columns than
    :data:`MANY_COLUMNS`.
    """
    G, p = information.shape[:2]
    if p < MANY_COLUMNS or not G:
        return None
    every, factors = np.arange(G), np.zeros((G, p // 3, p))
    left = np.einsum("gjj->gj", information).copy()
    least = SMALL_PIVOT * left.max(axis=1)
    for k in range(p // 3):
        at = left.argmax(axis=1)
        pivot = left[every, at]
        there = pivot > least
        if not there.any():
            return factors[:, :k]
        before = factors[:, :k]
        row = information[every, at] - np.einsum("gk,gkp->gp", before[every, :, at], before)
        factors[:, k] = np.where(there[:, None], row / np.sqrt(np.where(there, pivot, 1.0))[:, None], 0.0)
        left -= factors[:, k] ** 2
        left[every, at] = 0.0
    return None


def adjusted_scores(
    score: Floats,
    information: Floats,
    root: Floats,
    power: float,
    margins: Margins | None = None,
    factors: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Return clusters' estimating functions corrected for their leverage, and leverages.

    With the inverse information of all clusters ``C C'`` (`root` C, (p, p)), the hat matrix of a cluster is
    ``H = D C C' D' R^-1 W``, and ``D' R^-1 W (I - H)^-a r = C'^-1 (I - Q)^-a C' s`` for its estimating
    function s (G, p) and ``Q = C' B C`` of its information B (G, p, p). The power a is one for Mancl and
    DeRouen (2001, equation 5), and one half for Kauermann and Carroll (2001), which is CR2 of Bell and
    McCaffrey (2002) for least squares. Returned are ``(I - Q)^-a C' s`` (G, p), and the largest eigenvalue of
    each Q (G,); with one above or at one the functions are zero.

    With `margins`, Q and C' s have rows of the estimated constants as well. A cluster may be all rows behind
    a constant: its function is zero there, and the inverse is the generalized one. `factors` (G, r, p) are
    those of :func:`information_factors`; their products have the eigenvalues of Q that are not zero.
    """
    if factors is not None and margins is None:
        F, turned = factors @ root, score @ root
        shares, vectors = np.linalg.eigh(F @ F.transpose(0, 2, 1))
        largest = shares[:, -1]
        if not (np.isfinite(shares).all() and largest.max(initial=0.0) < AT_ONE):
            return np.zeros_like(score), largest
        some = shares > 1e-10
        changes = np.where(some, np.expm1(-power * np.log1p(-shares)) / np.where(some, shares, 1.0), power)
        along = vectors.transpose(0, 2, 1) @ (F @ turned[:, :, None])
        return turned + (F.transpose(0, 2, 1) @ (vectors @ (changes[:, :, None] * along)))[:, :, 0], largest
    Q, turned = root.T @ information @ root, score @ root
    shares, vectors = np.linalg.eigh(Q)
    largest = shares[:, -1]
    if not (np.isfinite(shares).all() and largest.max(initial=0.0) < AT_ONE):
        return np.zeros_like(score), largest
    if margins is None or not power:
        factors = (1.0 - shares) ** -power
        return np.einsum("gjk,gk,gik,gi->gj", vectors, factors, vectors, turned, optimize=True), largest
    out = np.empty_like(score)
    for g in range(len(score)):
        there = slice(margins.first[g], margins.first[g + 1])
        cross = margins.cross[there] @ root
        joint = np.block([[np.diag(margins.shares[there]), cross], [cross.T, Q[g]]])
        values, axes = np.linalg.eigh(joint)
        factors = np.where(values < AT_ONE, np.maximum(1.0 - values, 1.0 - AT_ONE) ** -power, 0.0)
        both = np.concatenate([margins.residuals[there], turned[g]])
        out[g] = (axes @ (factors * (axes.T @ both)))[len(cross) :]
    return out, largest


def corrected_sums(
    score: Floats,
    information: Floats,
    inverse: Floats,
    units: Floats,
    power: float,
    margins: Margins | None = None,
) -> CorrectedSums:
    """Sum over clusters what a covariance that is corrected for their leverage needs.

    `score` (G, p) are estimating functions, `information` (G, p, p) is that of each cluster, `inverse` (p, p)
    the inverse information of all. The rows of `units` (k, p) are the coefficients whose variances the
    clusters share; `power` and `margins` are as for :func:`adjusted_scores`.
    """
    # Half of the smallest number keeps a root of an inverse that is singular by rounding.
    values, vectors = np.linalg.eigh((inverse + inverse.T) / 2.0)
    root = vectors * np.sqrt(np.maximum(values, values[-1] * 1e-14))
    lines = units @ inverse
    variance = np.einsum("kp,kp->k", lines, units)
    factors = information_factors(information)
    if factors is None:
        parts = np.einsum("kp,gpq,kq->gk", lines, information, lines, optimize=True) / variance
    else:
        parts = ((factors @ lines.T) ** 2).sum(axis=1) / variance
    corrected, leverages = adjusted_scores(score, information, root, power, margins, factors)
    if power:
        corrected = corrected @ np.linalg.inv(root)
        meat = corrected.T @ corrected
    else:
        meat = score.T @ score
        leverages = np.zeros_like(leverages)
    return CorrectedSums(meat, (parts**2).sum(axis=0), leverages)
