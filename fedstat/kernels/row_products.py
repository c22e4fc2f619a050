"""Products and sums over the rows of one block: cross products, column sums, Gram matrices.

Sums in a fixed order: the results do not depend, to the last bit, on the number of threads that a linear
algebra library would use.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import weighted_sums
from fedstat.typing import Floats

BLOCK = 2048


def row_dots(X: Floats, b: Floats) -> Floats:
    """Return ``X @ b``: (n, p), (p,) -> (n,)."""
    return np.asarray(np.einsum("ij,j->i", X, b))


def column_sums(X: Floats, w: Floats) -> Floats:
    """Return ``X' w``: (n, p), (n,) -> (p,), summed in blocks of rows."""
    total = np.zeros(X.shape[1])
    for start in range(0, len(X), BLOCK):
        rows = slice(start, start + BLOCK)
        total += np.einsum("ij,i->j", X[rows], w[rows])
    return total


def gram(X: Floats, w: Floats) -> Floats:
    """Return ``X' diag(w) X``: (n, p), (n,) -> (p, p)."""
    return weighted_sums(X, w, w)[1]


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
