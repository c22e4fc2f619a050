"""Products and sums over the rows of one block: column sums, weighted sums, Gram matrices, small inverses.

Sums in a fixed order: the results do not depend, to the last bit, on the number of threads that a linear
algebra library would use. The weighted sums of many rows transpose them in blocks, so that a block stays in
the first cache and every loop runs along its rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels import INNER, REORDER, as_kernel_array
from fedstat.typing import Floats

COLUMN_BLOCK = 2048
"""Rows that are added up at once where each column has one sum."""

BLOCK = 96
"""Rows of a block; with some tens of columns, a block and its weighted copy fit in the first cache."""

TILE = 4
PAD = 8
"""Empty columns behind a block, so that its rows do not fall on the same cache lines."""

FEW = 2**16
"""Rows times squared columns up to which a product takes less time than it takes to load a compiled loop."""


def row_dots(X: Floats, b: Floats) -> Floats:
    """Return ``X @ b``: (n, p), (p,) -> (n,)."""
    return np.asarray(np.einsum("ij,j->i", X, b))


def column_sums(X: Floats, w: Floats) -> Floats:
    """Return ``X' w``: (n, p), (n,) -> (p,), summed in blocks of rows."""
    total = np.zeros(X.shape[1])
    for start in range(0, len(X), COLUMN_BLOCK):
        rows = slice(start, start + COLUMN_BLOCK)
        total += np.einsum("ij,i->j", X[rows], w[rows])
    return total


def gram(X: Floats, w: Floats) -> Floats:
    """Return ``X' diag(w) X``: (n, p), (n,) -> (p, p)."""
    return weighted_sums(X, w, w)[1]


@njit(cache=True, nogil=True, fastmath=REORDER, **INNER)
def _add_tile(A: Floats, B: Floats, j: int, k: int, m: int, out: Floats) -> None:
    """Add the inner products of four rows of A with four rows of B to a tile of out."""
    # Sixteen scalars stay in registers; an array would be loaded and stored for every row.
    c00 = c01 = c02 = c03 = c10 = c11 = c12 = c13 = 0.0
    c20 = c21 = c22 = c23 = c30 = c31 = c32 = c33 = 0.0
    for i in range(m):
        b0, b1, b2, b3 = B[k, i], B[k + 1, i], B[k + 2, i], B[k + 3, i]
        a = A[j, i]
        c00 += a * b0
        c01 += a * b1
        c02 += a * b2
        c03 += a * b3
        a = A[j + 1, i]
        c10 += a * b0
        c11 += a * b1
        c12 += a * b2
        c13 += a * b3
        a = A[j + 2, i]
        c20 += a * b0
        c21 += a * b1
        c22 += a * b2
        c23 += a * b3
        a = A[j + 3, i]
        c30 += a * b0
        c31 += a * b1
        c32 += a * b2
        c33 += a * b3
    tile = (c00, c01, c02, c03, c10, c11, c12, c13, c20, c21, c22, c23, c30, c31, c32, c33)
    for t in range(16):
        out[j + t // 4, k + t % 4] += tile[t]


@njit(cache=True, nogil=True, fastmath=REORDER, **INNER)
def _turn(X: Floats, start: int, m: int, out: Floats) -> None:
    """Write rows start to start + m of X into the columns of out."""
    for i in range(m):
        for j in range(X.shape[1]):
            out[j, i] = X[start + i, j]


@njit(cache=True, nogil=True, fastmath=REORDER, **INNER)
def _add_block(B: Floats, A: Floats, s: Floats, w: Floats, m: int, score: Floats, info: Floats) -> None:
    """Add ``B s`` and ``B diag(w) B'`` for the first m columns of B; A is room for ``B diag(w)``."""
    for j in range(len(score)):
        total = 0.0
        for i in range(m):
            A[j, i] = w[i] * B[j, i]
            total += s[i] * B[j, i]
        score[j] += total
    for j in range(0, B.shape[0], TILE):
        for k in range(j, B.shape[0], TILE):
            _add_tile(A, B, j, k, m, info)


@njit(cache=True, nogil=True, **INNER)
def _mirror(info: Floats) -> None:
    """Write the upper triangle of a padded matrix to the lower one."""
    for j in range(len(info)):
        for k in range(j):
            info[j, k] = info[k, j]


def weighted_sums(X: Floats, s: Floats, w: Floats) -> tuple[Floats, Floats]:
    """Return ``X' s`` and ``X' diag(w) X``: (n, p), (n,), (n,) -> (p,), (p, p); w of any sign."""
    p = X.shape[1]
    if len(X) * p * p <= FEW:
        return np.einsum("ni,n->i", X, s), np.einsum("ni,nj->ij", X * w[:, None], X)
    # Arrays are made outside of the compiled loop, because each kind that it makes takes long to compile.
    q = (p + TILE - 1) // TILE * TILE  # whole tiles
    B, A = np.zeros((2, q, BLOCK + PAD))
    score, info, (part, weight) = np.zeros(p), np.zeros((q, q)), np.empty((2, BLOCK))
    _add_weighted(as_kernel_array(X), as_kernel_array(s), as_kernel_array(w), B, A, part, weight, score, info)
    return score, info[:p, :p].copy()


@njit(cache=True, nogil=True)
def _add_weighted(
    X: Floats, s: Floats, w: Floats, B: Floats, A: Floats, part: Floats, weight: Floats, score: Floats,
    info: Floats,
) -> None:  # fmt: skip
    n = len(X)
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        _turn(X, start, m, B)
        for i in range(m):
            part[i], weight[i] = s[start + i], w[start + i]
        _add_block(B, A, part, weight, m, score, info)
    _mirror(info)


@njit(cache=True, nogil=True, error_model="numpy")
def invert(A: Floats, V: Floats) -> float:
    """Write the inverse of A (q, q), which is overwritten, to V; return log det A, nan if it is negative.

    Small matrices of which a compiled loop needs many; the largest entry of a column is its pivot.
    """
    q, logdet, sign = len(A), 0.0, 1.0
    for a in range(q):
        for b in range(q):
            V[a, b] = 1.0 if a == b else 0.0
    for a in range(q):
        top = a
        for c in range(a + 1, q):
            top = c if abs(A[c, a]) > abs(A[top, a]) else top
        pivot = A[top, a]
        logdet += np.log(abs(pivot))
        sign *= -1.0 if (pivot < 0.0) != (top != a) else 1.0
        for b in range(q):
            A[a, b], A[top, b] = A[top, b], A[a, b]
            V[a, b], V[top, b] = V[top, b], V[a, b]
            A[a, b] /= pivot
            V[a, b] /= pivot
        for c in range(q):
            by = 0.0 if c == a else A[c, a]
            for b in range(q):
                A[c, b] -= by * A[a, b]
                V[c, b] -= by * V[a, b]
    return logdet if sign > 0.0 else np.nan
