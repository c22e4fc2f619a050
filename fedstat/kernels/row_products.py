"""Products and sums over the rows of one block: cross products, column sums, Gram matrices.

Plain loops in a fixed order: the results do not depend, to the last bit, on the number of threads that a
linear algebra library would use.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import REORDER, weighted_sums
from fedstat.typing import Floats, Ints

BLOCK = 2048


@njit(cache=True, nogil=True, fastmath=REORDER)
def row_dots(X: Floats, b: Floats) -> Floats:
    """Return ``X @ b``: (n, p), (p,) -> (n,)."""
    n, p = X.shape
    out = np.empty(n)
    for i in range(n):
        s = 0.0
        for j in range(p):
            s += X[i, j] * b[j]
        out[i] = s
    return out


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


@njit(cache=True, nogil=True)
def add_at(out: Floats, at: Ints, x: Floats) -> None:
    """Add x to ``out[at]``: (n,), (m,) distinct positions, (m,)."""
    for i in range(len(at)):
        out[at[i]] += x[i]


@njit(cache=True, nogil=True)
def weighted_rows(H: Floats, w: Floats, less: Floats, code: Ints) -> Floats:
    """Return ``w' H - less[code]``: (q, n), (q,), (G,), (n,) -> (n,)."""
    q, n = H.shape
    out = np.empty(n)
    for i in range(n):
        s = -less[code[i]]
        for j in range(q):
            s += w[j] * H[j, i]
        out[i] = s
    return out


@njit(cache=True, nogil=True)
def column_sums(X: Floats, w: Floats) -> Floats:
    """Return ``X' w``: (n, p), (n,) -> (p,), summed in blocks of rows."""
    n, p = X.shape
    total, part = np.zeros(p), np.zeros(p)
    for start in range(0, n, BLOCK):
        for i in range(start, min(start + BLOCK, n)):
            for j in range(p):
                part[j] += w[i] * X[i, j]
        for j in range(p):
            total[j] += part[j]
            part[j] = 0.0
    return total


@njit(cache=True, nogil=True)
def cross_products(X: Floats, of: Ints, w: Floats) -> Floats:
    """Return ``X[:, of]' diag(w) X``: (n, p), (m,), (n,) -> (m, p), summed in blocks of rows."""
    n, p = X.shape
    total = np.zeros((len(of), p))
    part = np.empty((len(of), p))
    for start in range(0, n, BLOCK):
        part[:, :] = 0.0
        for i in range(start, min(start + BLOCK, n)):
            for j in range(len(of)):
                s = w[i] * X[i, of[j]]
                for k in range(p):
                    part[j, k] += s * X[i, k]
        total += part
    return total


def gram(X: Floats, w: Floats) -> Floats:
    """Return ``X' diag(w) X``: (n, p), (n,) -> (p, p)."""
    return weighted_sums(X, w, w)[1]


@njit(cache=True, nogil=True)
def standardized_residuals(
    y: Floats, eta: Floats, code: Ints, a: float, v: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return ``z_i = (y_i - a - eta_i) / v_g(i)`` and, per pattern g, the sums of z and z^2.

    Shapes: y, eta (n,); code (n,) pattern of each entity; v (G,); returns (n,), (G,), (G,).
    """
    n = y.shape[0]
    z = np.empty(n)
    z1 = np.zeros(v.shape[0])
    z2 = np.zeros(v.shape[0])
    for i in range(n):
        g = code[i]
        zi = (y[i] - a - eta[i]) / v[g]
        z[i] = zi
        z1[g] += zi
        z2[g] += zi * zi
    return z, z1, z2
