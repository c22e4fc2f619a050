"""Columns of rows that vary along the response, times functions of it: x(t), and integrals up to t."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array

from fedstat.typing import Floats, Ints

ROUNDING = 1e-12


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
    last = np.searchsorted(s, t + ROUNDING * (s[-1] - s[0]), side="right")
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
