"""Sums over curves that were measured at different points: Gram matrices that curves weigh differently.

Of a curve on points t_1, t_2, ... the products of basis functions that overlap add up to its own weights, sum
over j of b_a(t_j) b_c(t_j); products of its other columns enter weighted by these (Eilers' row tensors,
Eilers, Currie and Durban 2006). Splines that do not overlap have none, so that the weights are a band.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import blas
from scipy.sparse import csr_array

from fedstat.typing import Floats, Ints


def overlapping(k: int, degree: int) -> tuple[Ints, Ints]:
    """Pairs a <= c of k splines that overlap: (r,) each."""
    a, c = np.triu_indices(k)
    near = c - a <= degree
    return a[near], c[near]


def sum_rows(values: Floats, lengths: Ints) -> Floats:
    """Add up (N, q) values of points over the rows that have so many each: (n, q)."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    ones = np.ones(len(values))
    rows = csr_array((ones, np.arange(len(values)), ends), shape=(len(lengths), len(values)))
    return np.asarray(rows @ values)


def curve_weights(basis: Floats, lengths: Ints, pairs: tuple[Ints, Ints]) -> Floats:
    """Weights of every curve, (n, r), from the splines (N, k) at its points."""
    return np.column_stack(
        [sum_rows((basis[:, a] * basis[:, c])[:, None], lengths) for a, c in zip(*pairs, strict=True)]
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


def whole_gram(grams: Floats, pairs: tuple[Ints, Ints], C: Floats, k: int) -> Floats:
    """Products of columns times k splines over rows and points, (k p, k p), splines outermost.

    From weighted ones (r, K, K), of combinations C (K, p) of the columns.
    """
    p = C.shape[1]
    out = np.zeros((k, p, k, p))
    for G, a, c in zip(grams, *pairs, strict=True):
        out[a, :, c] = out[c, :, a] = C.T @ G @ C
    return out.reshape(k * p, k * p)


def spread_out(values: Floats, pairs: tuple[Ints, Ints], k: int) -> Floats:
    """Symmetric matrices (..., k, k) from their band (..., r)."""
    out = np.zeros((*values.shape[:-1], k, k))
    out[..., pairs[0], pairs[1]] = values
    out[..., pairs[1], pairs[0]] = values
    return out
