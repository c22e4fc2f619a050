"""Sums over clusters of rows that have a working correlation: estimating functions and their derivative.

With standardized residuals r and derivatives D of the means (rows are divided by the root of the variance
function), a cluster's estimating function is ``D' R^-1 W r`` and its information ``D' R^-1 W D`` (Liang and
Zeger 1986, equation 6), R the working correlation and W weights that are equal within the cluster.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.typing import Floats, Ints

STRUCTURES = ("independence", "exchangeable", "ar1")
"""Working correlations; `kind` is the position here."""


@njit(cache=True, nogil=True)
def _solved(x: Floats, first: int, i: int, last: int, kind: int, rho: float, total: float) -> float:
    """Return entry i of ``R^-1 x``, x[first:last] the cluster; `total` is the sum of x over it."""
    m = last - first
    if kind == 0 or m == 1:
        return float(x[i])
    if kind == 1:
        return float((x[i] - rho / (1.0 + (m - 1.0) * rho) * total) / (1.0 - rho))
    value = float(x[i]) if i == first or i == last - 1 else float((1.0 + rho * rho) * x[i])
    if i > first:
        value -= float(rho * x[i - 1])
    if i < last - 1:
        value -= float(rho * x[i + 1])
    return value / (1.0 - rho * rho)


@njit(cache=True, nogil=True)
def cluster_sums(
    D: Floats, r: Floats, w: Floats, start: Ints, kind: int, rho: float, each: bool
) -> tuple[Floats, Floats]:
    """Return the clusters' estimating functions (G, p), and their information.

    The information is (G, p, p) for `each` cluster, or (1, p, p) summed over all. `D` (p, n) are columns in
    contiguous rows, `r` and `w` (n,), `start` (G + 1,) the first row of each cluster.
    """
    p, n = D.shape
    G = len(start) - 1
    score = np.zeros((G, p))
    information = np.zeros((G if each else 1, p, p))
    solved = np.empty(n)
    weighted = np.empty(n)
    for j in range(p + 1):
        for i in range(n):
            weighted[i] = w[i] * (r[i] if j == p else D[j, i])
        for g in range(G):
            first, last = start[g], start[g + 1]
            total = 0.0
            for i in range(first, last):
                total += weighted[i]
            for i in range(first, last):
                solved[i] = _solved(weighted, first, i, last, kind, rho, total)
            for k in range(p if j == p else j + 1):
                s = 0.0
                for i in range(first, last):
                    s += D[k, i] * solved[i]
                if j == p:
                    score[g, k] = s
                else:
                    information[g if each else 0, j, k] += s
    for g in range(len(information)):
        for j in range(p):
            for k in range(j):
                information[g, k, j] = information[g, j, k]
    return score, information


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


def adjusted_scores(score: Floats, information: Floats, root: Floats, power: float) -> tuple[Floats, Floats]:
    """Return clusters' estimating functions corrected for their leverage, and leverages.

    With the inverse information of all clusters ``C C'`` (`root` C, (p, p)), the hat matrix of a cluster is
    ``H = D C C' D' R^-1 W``, and ``D' R^-1 W (I - H)^-a r = C'^-1 (I - Q)^-a C' s`` for its estimating
    function s (G, p) and ``Q = C' B C`` of its information B (G, p, p). The power a is one for Mancl and
    DeRouen (2001, equation 5), and one half for Kauermann and Carroll (2001). Returned are ``(I - Q)^-a C'
    s`` (G, p), and the largest eigenvalue of each Q (G,); with one above or at one the functions are zero.
    """
    shares, vectors = np.linalg.eigh(root.T @ information @ root)
    largest = shares[:, -1]
    if not (np.isfinite(shares).all() and largest.max(initial=0.0) < 1.0 - 1e-9):
        return np.zeros_like(score), largest
    turned = np.einsum("gjk,gj->gk", vectors, score @ root) * (1.0 - shares) ** -power
    return np.einsum("gjk,gk->gj", vectors, turned), largest
