"""Continuous columns given normal factors: x = B'z + L eta + e, eta | k ~ N(mu_k, I), e ~ N(0, diag psi).

Rows that lack the same columns are a pattern: the posterior variance of eta is one of a pattern, by
Woodbury's identity, of the size of the factors. Cells that are not seen are zeros of residuals and of
columns, which leave every sum as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import REORDER, fixed
from fedstat.typing import Bools, Floats, Ints

LOG_2PI = float(np.log(2.0 * np.pi))


class FactorPosterior(NamedTuple):
    """Log densities f (n, K), means e (n, K, Q) of eta given k and the row, and variances V (m, Q, Q)."""

    f: Floats
    e: Floats
    V: Floats


class FactorMoments(NamedTuple):
    """Weighted sums for columns on d = (z, eta), where z begins with one: expectations given what is seen.

    M (m, d, d) is the sum of dd' by pattern, c (P, d) that of x d, xx (P,) that of x^2; N (K,) are weights of
    clusters, m (K, Q) their mean factors.
    """

    M: Floats
    c: Floats
    xx: Floats
    N: Floats
    m: Floats


def factor_posterior(
    Y: Floats, pattern: Ints, seen: Bools, L: Floats, psi: Floats, U: Floats
) -> FactorPosterior:
    """Integrate the factors out: residuals Y (n, P), zero where unseen, of patterns (n,) that see (m, P)."""
    n, (K, Q) = len(Y), U.shape
    V, f, e = np.empty((len(seen), Q, Q)), np.empty((n, K)), np.empty((n, K, Q))
    pattern, seen = fixed(pattern, np.int64), fixed(seen, np.bool_)
    _posterior(fixed(Y), pattern, seen, fixed(L), fixed(psi), fixed(U), V, f, e)
    return FactorPosterior(f, e, V)


def factor_moments(
    X: Floats, Z: Floats, pattern: Ints, posterior: FactorPosterior, r: Floats
) -> FactorMoments:
    """Add up expectations of columns X (n, P), zero where unseen, and Z (n, q), under weights r (n, K)."""
    P, q = X.shape[1], Z.shape[1]
    K, Q = posterior.e.shape[1:]
    M, c, xx = np.zeros((len(posterior.V), q + Q, q + Q)), np.zeros((q + Q, P)), np.zeros(P)
    N, m = np.zeros(K), np.zeros((K, Q))
    e, V = fixed(posterior.e), fixed(posterior.V)
    _moments(fixed(X), fixed(Z), fixed(pattern, np.int64), e, V, fixed(r), M, c, xx, N, m)
    m /= np.maximum(N, 1e-300)[:, None]
    return FactorMoments(M, np.ascontiguousarray(c.T), xx, N, m)


@njit(cache=True, nogil=True, error_model="numpy")
def _invert(A: Floats, V: Floats) -> float:
    """Write the inverse of a positive definite A (Q, Q), which is lost, to V; return log |A|."""
    Q, locarrieddet = len(A), 0.0
    for a in range(Q):
        for b in range(Q):
            V[a, b] = 1.0 if a == b else 0.0
    for a in range(Q):
        pivot = A[a, a]
        locarrieddet += np.log(pivot)
        for b in range(Q):
            A[a, b] /= pivot
            V[a, b] /= pivot
        for c in range(Q):
            if c != a:
                by = A[c, a]
                for b in range(Q):
                    A[c, b] -= by * A[a, b]
                    V[c, b] -= by * V[a, b]
    return float(locarrieddet)


@njit(cache=True, nogil=True, fastmath=REORDER, error_model="numpy")
def _posterior(
    Y: Floats, pattern: Ints, seen: Bools, L: Floats, psi: Floats, U: Floats, V: Floats, f: Floats, e: Floats
) -> None:
    n, P = Y.shape
    K, Q = U.shape
    # Factor by factor, so that sums run along columns.
    W, precision, logs = np.empty((Q, P)), np.empty(P), np.empty(P)
    for p in range(P):
        precision[p], logs[p] = 1.0 / psi[p], np.log(psi[p]) + LOG_2PI
        for q in range(Q):
            W[q, p] = L[p, q] / psi[p]
    A, constant = np.empty((Q, Q)), np.zeros(len(seen))
    for g in range(len(seen)):
        for q in range(Q):
            for t in range(Q):
                A[q, t] = 1.0 if q == t else 0.0
        for p in range(P):
            if seen[g, p]:
                constant[g] -= 0.5 * logs[p]
                for q in range(Q):
                    for t in range(Q):
                        A[q, t] += W[q, p] * L[p, t]
        constant[g] -= 0.5 * _invert(A, V[g])
    h, carried = np.empty(Q), np.empty(Q)
    for i in range(n):
        v, y = V[pattern[i]], Y[i]
        yy = 0.0
        for p in range(P):
            yy += y[p] * y[p] * precision[p]
        for q in range(Q):
            w, total = W[q], 0.0
            for p in range(P):
                total += y[p] * w[p]
            h[q] = total
        for k in range(K):
            quadratic = yy
            for q in range(Q):
                carried[q] = h[q] + U[k, q]
                quadratic += U[k, q] * U[k, q]
            for q in range(Q):
                s = 0.0
                for t in range(Q):
                    s += v[q, t] * carried[t]
                e[i, k, q] = s
                quadratic -= carried[q] * s
            f[i, k] = constant[pattern[i]] - 0.5 * quadratic


@njit(cache=True, nogil=True, fastmath=REORDER)
def _moments(
    X: Floats,
    Z: Floats,
    pattern: Ints,
    e: Floats,
    V: Floats,
    r: Floats,
    M: Floats,
    c: Floats,
    xx: Floats,
    N: Floats,
    m: Floats,
) -> None:
    n, P = X.shape
    q = Z.shape[1]
    K, Q = m.shape
    d = np.empty(q + Q)
    for i in range(n):
        G, v = M[pattern[i]], V[pattern[i]]
        w = 0.0
        d[:] = 0.0
        for k in range(K):
            w += r[i, k]
            N[k] += r[i, k]
            for a in range(Q):
                first = r[i, k] * e[i, k, a]
                m[k, a] += first
                d[q + a] += first
                for b in range(Q):
                    G[q + a, q + b] += first * e[i, k, b]
        for a in range(Q):
            for b in range(Q):
                G[q + a, q + b] += w * v[a, b]
            for b in range(q):
                G[q + a, b] += d[q + a] * Z[i, b]
                G[b, q + a] += d[q + a] * Z[i, b]
        for a in range(q):
            d[a] = w * Z[i, a]
            for b in range(q):
                G[a, b] += d[a] * Z[i, b]
        x = X[i]
        for p in range(P):
            xx[p] += w * x[p] * x[p]
        for a in range(q + Q):
            weight, own = d[a], c[a]
            for p in range(P):
                own[p] += x[p] * weight
