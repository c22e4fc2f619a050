"""Nodewise lasso: the regression of every column on all others, from their correlations alone.

Row j of the relaxed inverse of R is ``a_j / (R a_j)_j`` with ``a_j = e_j - gamma_j``, where gamma_j is the
lasso of column j on the others at its own lambda. The remaining bias of an initial estimate in coefficient j
is at most its error in the 1-norm times ``max_k |(R a_j)_k| / (R a_j)_j``, k not j; the standard error is
proportional to ``tau_j = sqrt(a_j' R a_j) / (R a_j)_j``. A smaller lambda reduces the first and increases the
second.

References
----------
van de Geer, S., Buehlmann, P., Ritov, Y. and Dezeure, R. (2014). On asymptotically optimal confidence regions
and tests for high-dimensional models. Annals of Statistics 42, 1166-1202. doi:10.1214/14-AOS1221.
Zhang, C.-H. and Zhang, S. (2014). Confidence intervals for low dimensional parameters in high dimensional
linear models. Journal of the Royal Statistical Society B 76, 217-242. doi:10.1111/rssb.12026.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.typing import Floats

INFLATION = 1.25
"""Largest factor by which a standard error may increase for less bias (Zhang and Zhang 2014, table 1)."""
SIZE, RATIO = 40, 1e-3
"""Lambdas of each column, and the smallest as a share of the largest."""
MAX_SWEEPS, TOLERANCE = 500, 1e-7
"""Tolerance of descent; a less exact inverse is also valid, because its standard errors are its own."""


@njit(cache=True, nogil=True)
def _lasso(R: Floats, j: int, lam: float, a: Floats, q: Floats) -> None:
    """Solve for ``a = e_j - gamma`` and ``q = R a`` at one lambda, from where they are; a and q change."""
    p = len(a)
    for _ in range(MAX_SWEEPS):
        largest = 0.0
        for k in range(p):
            if k == j:
                continue
            u = q[k] - R[k, k] * a[k]
            size = max(abs(u) - lam, 0.0) / R[k, k]
            new = -size if u > 0.0 else size
            step = new - a[k]
            if step != 0.0:
                a[k] = new
                largest = max(largest, abs(step))
                for i in range(p):
                    q[i] += step * R[i, k]
        if largest <= TOLERANCE:
            break


@njit(cache=True, nogil=True)
def _row(R: Floats, j: int, bias: float, inflation: float, unbiased: float) -> tuple[Floats, float]:
    """Return row j of the relaxed inverse and its lambda; zero if that of the inverse may be used."""
    p = len(R)
    a, q = np.zeros(p), R[:, j].copy()
    a[j] = 1.0
    # No tau is below one (Cauchy-Schwarz), so no ceiling is below the inflation: no lasso is needed.
    if unbiased <= inflation:
        return a / q[j], 0.0
    best, chosen, ceiling = a / q[j], np.inf, np.inf
    largest = 0.0
    for k in range(p):
        if k != j:
            largest = max(largest, abs(q[k]))
    # From the largest lambda down: the bias decreases, and the standard error increases.
    for step in range(SIZE):
        lam = largest * RATIO ** (step / (SIZE - 1))
        _lasso(R, j, lam, a, q)
        variance, rest = 0.0, 0.0
        for k in range(p):
            variance += a[k] * q[k]
            if k != j:
                rest = max(rest, abs(q[k]))
        if variance <= 0.0 or q[j] <= 0.0:
            break
        tau = np.sqrt(variance) / q[j]
        if tau > ceiling:
            break
        # The first lambda whose bias is small compared with the standard error limits the price of further
        # reduction.
        if ceiling == np.inf and rest <= bias * np.sqrt(variance):
            ceiling = inflation * tau
            if unbiased <= ceiling:
                return best, 0.0
        best, chosen = a / q[j], lam
    return best, chosen


@njit(cache=True, nogil=True)
def _rows(R: Floats, bias: float, inflation: float, unbiased: Floats) -> tuple[Floats, Floats]:
    """Return the rows; `unbiased` (p,) are the tau of the inverse, infinite if there is none."""
    p = len(R)
    Theta, lambdas = np.empty((p, p)), np.empty(p)
    for j in range(p):
        Theta[j], lambdas[j] = _row(R, j, bias, inflation, unbiased[j])
    return Theta, lambdas


def relaxed_inverse(R: Floats, n: float, inflation: float = INFLATION) -> tuple[Floats, Floats]:
    """Return a relaxed inverse (p, p) of a correlation matrix, row by row, with the lambda of each row (p,).

    R are correlations of columns of n entities; of weighted columns for a generalized linear model. The
    lambda of a row is the smallest whose standard error is at most `inflation` times that at the largest
    lambda with a bias factor ``sqrt(n) max_k |(R a)_k| / sqrt(a' R a)`` of at most ``sqrt(2 log p)``. Where
    that permits the inverse itself, as an infinite `inflation` does, the row is that of the inverse, its
    lambda
    zero, and no bias is left.
    """
    p, inverse = len(R), _inverse(R)
    unbiased = np.full(p, np.inf) if inverse is None else np.sqrt(np.diag(inverse))
    bias = np.sqrt(2.0 * np.log(max(p, 2)) / n)
    if p == 1 or (inverse is not None and np.isinf(inflation)):
        return (1.0 / R if inverse is None else inverse), np.zeros(p)
    Theta, lambdas = _rows(np.ascontiguousarray(R), bias, inflation, unbiased)
    if inverse is not None:
        Theta[lambdas == 0.0] = inverse[lambdas == 0.0]
    return Theta, lambdas


def _inverse(R: Floats) -> Floats | None:
    """Invert, or return None where columns are dependent to the last digits."""
    values, vectors = np.linalg.eigh(R)
    if values[0] <= len(R) * 1e-12 * values[-1]:
        return None
    return np.asarray((vectors / values) @ vectors.T)
