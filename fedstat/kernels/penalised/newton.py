"""Newton steps on the coefficients that are not zero.

Coordinate descent finds in a few passes which coefficients are zero, and then may need thousands to settle
the others where columns are correlated. Between zeros and bends the penalised quadratic is smooth, so that
one linear solve settles them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import REORDER
from fedstat.kernels.penalised.penalties import Terms
from fedstat.typing import Floats

HALVINGS = 6


def newton_step(G: Floats, q: Floats, b: Floats, terms: Terms) -> Floats | None:
    """Take one step of Newton in the groups that are not zero; those that it would turn round become zero.

    G (p, p) is the Hessian of the loss, q (p,) its negative gradient at b (p,). None where no step was found
    that leads nearer to a stationary point.
    """
    active = terms.groups.norms(b) > 0.0
    if not active.any():
        return None
    # Groups at zero stay there: where one has to move, the violations tell the solver.
    at, part = terms.groups.columns(active), terms.take(active)
    G, q, b_active = G[np.ix_(at, at)], q[at], b[at]
    pull, bend = part.derivatives(b_active)
    d = q - pull
    if not _solve_positive(G + bend, d):
        return None
    new = _search(G, q, b_active, d, part)
    if new is None:
        return None
    b = b.copy()
    b[at] = new
    return b


def _search(G: Floats, q: Floats, b: Floats, d: Floats, terms: Terms) -> Floats | None:
    """Shorten the step until it leads down."""
    before, violation = terms.value(b), terms.violation(b, -q)
    for halving in range(HALVINGS):
        new = b + d * 0.5**halving
        turned = terms.groups.inner_products(b, new) <= 0.0
        new[terms.groups.columns(turned)] = 0.0
        move = new - b
        change = G @ move
        # Near the solution the change of the value is below its rounding, and the violation tells.
        if not turned.any() and terms.violation(new, change - q) < 0.1 * violation:
            return new
        if (change / 2.0 - q) @ move + terms.value(new) - before < -1e-14 * abs(before):
            return new
    return None


@njit(cache=True, nogil=True, fastmath=REORDER)
def _dot(a: Floats, b: Floats, m: int) -> float:
    """Return the inner product of the first m numbers."""
    total = 0.0
    for i in range(m):
        total += a[i] * b[i]
    return total


@njit(cache=True, nogil=True)
def _solve_positive(A: Floats, x: Floats) -> bool:
    """Solve ``A z = x`` by Cholesky's factor, writing it over A and z over x; False where A is not positive.

    A plain loop on one thread: a library's threads cost more than they bring at some hundred columns.
    """
    p = len(x)
    for i in range(p):
        size = A[i, i]
        for j in range(i):
            A[i, j] = (A[i, j] - _dot(A[i], A[j], j)) / A[j, j]
        pivot = size - _dot(A[i], A[i], i)
        if not pivot > 1e-12 * size:
            return False
        A[i, i] = np.sqrt(pivot)
        x[i] = (x[i] - _dot(A[i], x, i)) / A[i, i]
    for i in range(p - 1, -1, -1):
        x[i] /= A[i, i]
        for j in range(i):
            x[j] -= A[i, j] * x[i]
    return True
