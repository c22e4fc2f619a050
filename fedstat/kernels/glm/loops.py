"""Compiled loops over the rows of a generalized linear model.

Rows are transposed in blocks, so that a block stays in the first cache and every loop runs along its rows.
The sums do not depend on the number of threads, to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from scipy.special import xlog1py, xlogy

from fedstat.typing import Array, Floats

BLOCK = 96
"""Rows of a block; with some tens of columns, a block and its weighted copy fit in the first cache."""

TILE = 4
PAD = 8
"""Empty columns behind a block, so that its rows do not fall on the same cache lines."""

FEW = 2**16
"""Rows times squared columns up to which a product takes less time than it takes to load a compiled loop."""

LOGIT, LOG, IDENTITY = 0, 1, 2
"""The canonical pairs with formulas of their own: Binomial, Poisson, Gaussian."""

REORDER = {"reassoc", "contract", "nsz"}
"""Floating-point options of the compiler to vectorize sums; it must not assume finite numbers."""


INNER: dict[str, Any] = {"no_cpython_wrapper": True}
"""Options of a function that only compiled ones call; a call from Python would crash."""


def as_kernel_array(a: Array, dtype: type = np.float64) -> Array:
    """Return the array in the single type of the compiled loops, with a copy only if it differs."""
    ready = isinstance(a, np.ndarray) and a.dtype == dtype and a.flags.c_contiguous and a.flags.aligned
    if ready and not a.flags.writeable:
        return a
    view = a.view() if ready else np.require(a, dtype, ["C", "A"]).view()
    # Whether an array is writable is part of its type for the compiler: two types, two compilations.
    view.flags.writeable = False
    return view


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
        return np.einsum("ni,n->i", X, s), np.einsum("ni,n,nj->ij", X, w, X)
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


def canonical_weights(link: int, y: Floats, eta: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return residual, variance, half the unit deviance and the squared Pearson residual of rows, each (n,).

    `link` is LOGIT, LOG or IDENTITY; y and the linear predictor eta are (n,).
    """
    if link == LOGIT:
        # From exp(-|eta|) alone, which cannot overflow; 1 - mu keeps its digits where mu is near one.
        e = np.exp(-np.abs(eta))
        d = 1.0 / (1.0 + e)
        r, V = y - np.where(eta >= 0.0, d, e * d), e * d * d
        half = np.maximum(eta, 0.0) - y * eta + np.log1p(e) + xlogy(y, y) + xlog1py(1.0 - y, -y)
        # At least the machine's epsilon, at which statsmodels clips a probability.
        return r, V, half, r * r / np.maximum(V, 2.0**-52)
    if link == LOG:
        mu = np.maximum(np.exp(eta), 1e-300)
        r = y - mu
        return r, mu, xlogy(y, y / mu) - r, r * r / mu
    r = y - eta
    square = r * r
    return r, np.ones_like(r), 0.5 * square, square
