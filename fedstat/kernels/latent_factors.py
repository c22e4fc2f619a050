"""Continuous and categorical columns given normal factors: posteriors and expected statistics."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from fedstat.kernels import INNER, REORDER, as_kernel_array
from fedstat.kernels.exponentials import exponentials
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Continuous columns given normal factors: x = B'z + L eta + e, eta | k ~ N(mu_k, I), e ~ N(0, diag psi).
#
# Rows that lack the same columns are a pattern: the posterior variance of eta is the same within a pattern,
# by Woodbury's identity, of the size of the factors. Missing cells are zeros of residuals and of columns,
# which do not change any sum.

LOG_2PI = float(np.log(2.0 * np.pi))


class FactorPosterior(NamedTuple):
    """Log densities f (n, K), means e (n, K, Q) of eta given k and the row, and variances V (m, Q, Q)."""

    f: Floats
    e: Floats
    V: Floats


class FactorMoments(NamedTuple):
    """Weighted sums for columns on d = (z, eta), where z begins with one: expectations given observed cells.

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
    """Integrate the factors out: residuals Y (n, P), zero where missing, of patterns (n,) with (m, P)."""
    n, (K, Q) = len(Y), U.shape
    V, f, e = np.empty((len(seen), Q, Q)), np.empty((n, K)), np.empty((n, K, Q))
    pattern, seen = as_kernel_array(pattern, np.int64), as_kernel_array(seen, np.bool_)
    _posterior(
        as_kernel_array(Y),
        pattern,
        seen,
        as_kernel_array(L),
        as_kernel_array(psi),
        as_kernel_array(U),
        V,
        f,
        e,
    )
    return FactorPosterior(f, e, V)


def factor_moments(
    X: Floats, Z: Floats, pattern: Ints, posterior: FactorPosterior, r: Floats
) -> FactorMoments:
    """Add up expectations of columns X (n, P), zero where missing, and Z (n, q), with weights r (n, K)."""
    P, q = X.shape[1], Z.shape[1]
    K, Q = posterior.e.shape[1:]
    M, c, xx = np.zeros((len(posterior.V), q + Q, q + Q)), np.zeros((q + Q, P)), np.zeros(P)
    N, m = np.zeros(K), np.zeros((K, Q))
    e, V = as_kernel_array(posterior.e), as_kernel_array(posterior.V)
    _moments(
        as_kernel_array(X),
        as_kernel_array(Z),
        as_kernel_array(pattern, np.int64),
        e,
        V,
        as_kernel_array(r),
        M,
        c,
        xx,
        N,
        m,
    )
    m /= np.maximum(N, 1e-300)[:, None]
    return FactorMoments(M, np.ascontiguousarray(c.T), xx, N, m)


@njit(cache=True, nogil=True, error_model="numpy")
def _invert(A: Floats, V: Floats) -> float:
    """Write the inverse of a positive definite A (Q, Q), which is overwritten, to V; return log |A|."""
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
    # Factor by factor, so that sums follow columns.
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


# ----------------------------------------------------------------------------------------------------
# Categorical columns on nodes of normal factors: a row's information on them, and expected counts.
#
# Without covariates, an M-step needs only the counts of levels at nodes: its cost does not depend on the
# number of rows. No array of rows by nodes is stored.
#
# References
# ----------
# Bock, R. D. and Aitkin, M. (1981). Marginal maximum likelihood estimation of item parameters: application of
# an EM algorithm. Psychometrika 46, 443-459.

ROWS = 16
"""Number of rows that are distributed over nodes together."""
MANY_ROWS = 4096
"""Number of rows whose weights at all nodes are in memory at once."""
TOGETHER = 4
"""Columns that are added at once, and numbers of a vector; an integer number of vectors fills a cache
line."""


class Nodes(NamedTuple):
    """Nodes z (t, Q) of a standard normal distribution, and logs of their weights (t,)."""

    z: Floats
    log_weights: Floats


class ExpectedCounts(NamedTuple):
    """Expected numbers of rows: by group, column, level and node (J, P, C, K t), by cluster and node (K, t).

    f (n, K) are the log densities by cluster, which are computed on the way.
    """

    levels: Floats
    nodes: Floats
    f: Floats


def normal_nodes(T: int, Q: int) -> Nodes:
    """Gauss-Hermite nodes of Q independent standard normal variables, T of each."""
    x, w = np.polynomial.hermite_e.hermegauss(T)
    z = np.stack(np.meshgrid(*[x] * Q, indexing="ij"), axis=-1).reshape(-1, Q)
    weights = np.stack(np.meshgrid(*[w / w.sum()] * Q, indexing="ij"), axis=-1).reshape(-1, Q)
    return Nodes(z, np.log(weights).sum(axis=1))


class GroupedLevels(NamedTuple):
    """Levels (n, P) of rows, -1 where missing, and the group (n,) of each: rows with the same covariates."""

    codes: Ints
    group: Ints


class _Room(NamedTuple):
    """What the loops over some rows need: lines of a table of levels, log weights of nodes, and buffers."""

    codes: Ints
    group: Ints
    C: int
    lines: Floats
    log_weights: Floats
    a: Floats
    at: Ints
    power: Floats
    bits: Ints

    @classmethod
    def of(cls, rows: GroupedLevels, table: Floats, log_weights: Floats) -> _Room:
        """Copy a table (J, P, C, G) to lines (J P C + 1, at least G) of complete vectors; the last is zero.

        Lines that cross cache lines take twice as long to read.
        """
        (n, P), G = rows.codes.shape, table.shape[3]
        lines = np.zeros((table.size // G + 1, _filled(G)))
        lines[:-1, :G] = table.reshape(-1, G)
        codes, group = as_kernel_array(rows.codes, np.int64), as_kernel_array(rows.group, np.int64)
        a, at = np.empty((min(n, ROWS), lines.shape[1])), np.empty((min(n, ROWS), _filled(P)), dtype=np.int64)
        power = np.empty(lines.shape[1])
        weights = as_kernel_array(log_weights)
        return cls(codes, group, table.shape[2], lines, weights, a, at, power, power.view(np.int64))


def _filled(count: int) -> int:
    """Round up to complete vectors."""
    return (count + TOGETHER - 1) // TOGETHER * TOGETHER


def node_densities(rows: GroupedLevels, table: Floats, log_weights: Floats, K: int) -> Floats:
    """Return log f(x_i | k), (n, K), from logs of levels' probabilities by group, (J, P, C, K t)."""
    f = np.empty((len(rows.codes), K))
    _weights(*_Room.of(rows, table, log_weights), np.ones((ROWS, K)), f, np.empty((len(f), 0)))
    return f


def node_weights(rows: GroupedLevels, table: Floats, log_weights: Floats, K: int) -> Floats:
    """Return the weights of nodes given a row and its cluster, (n, K, t): few rows at a time."""
    out = np.empty((len(rows.codes), K * len(log_weights)))
    _weights(*_Room.of(rows, table, log_weights), np.ones((ROWS, K)), np.empty((len(out), K)), out)
    return out.reshape(len(out), K, -1)


def node_means(rows: GroupedLevels, table: Floats, log_weights: Floats, eta: Floats, K: int) -> Floats:
    """Return E[eta | x_i, k], (n, K, Q), at nodes eta (K t, Q)."""
    e = np.empty((len(rows.codes), K, eta.shape[1]))
    by_cluster = eta.reshape(K, len(log_weights), -1)
    for start in range(0, len(e), MANY_ROWS):
        some = slice(start, start + MANY_ROWS)
        own = GroupedLevels(rows.codes[some], rows.group[some])
        weights = node_weights(own, table, log_weights, K).transpose(1, 0, 2)
        e[some] = (weights @ by_cluster).transpose(1, 0, 2)
    return e


def expected_counts(rows: GroupedLevels, r: Floats, table: Floats, log_weights: Floats) -> ExpectedCounts:
    """Distribute every row over the nodes, with weights r (n, K) of clusters."""
    J, P, C, G = table.shape
    nodes, f = np.zeros(G), np.empty(r.shape)
    levels = np.zeros((J * P * C, _filled(G)))
    # A copy, because the other loops have writable weights: one compiled function for all.
    _counts(*_Room.of(rows, table, log_weights), np.array(r, order="C"), f, levels, nodes)
    return ExpectedCounts(levels[:, :G].reshape(table.shape), nodes.reshape(r.shape[1], -1), f)


@njit(cache=True, nogil=True, fastmath=REORDER, **INNER)
def _add_levels(
    codes: Ints, group: Ints, C: int, lines: Floats, log_weights: Floats, at: Ints, a: Floats
) -> None:
    """Write log weights and log probabilities of levels (m, P) of some rows at all nodes to a (m, G)."""
    (m, P), T, G, nowhere = codes.shape, len(log_weights), a.shape[1], len(lines) - 1
    for i in range(m):
        for p in range(at.shape[1]):
            seen = p < P and codes[i, p] >= 0
            at[i, p] = (group[i] * P + p) * C + codes[i, p] if seen else nowhere
        for g in range(G):
            a[i, g] = 0.0
        for first in range(0, G - T + 1, T):
            for t in range(T):
                a[i, first + t] = log_weights[t]
    # Some columns at a time, so that their values at all nodes stay in the first cache.
    for p in range(0, at.shape[1], TOGETHER):
        for i in range(m):
            first, second, third, fourth = at[i, p], at[i, p + 1], at[i, p + 2], at[i, p + 3]
            for g in range(G):
                a[i, g] += (lines[first, g] + lines[second, g]) + (lines[third, g] + lines[fourth, g])


# If a step left the parameters' range, densities are nan, and are not used.
@njit(cache=True, nogil=True, fastmath=REORDER, error_model="numpy")
def _normalize(a: Floats, T: int, r: Floats, f: Floats, power: Floats, bits: Ints) -> None:
    """Turn logs at nodes (K T and more,) into weights of sums r (K,); write logs of the sums before to f."""
    for k in range(len(f)):
        own = a[k * T : (k + 1) * T]
        top = own[0]
        for t in range(T):
            top = max(top, own[t])
        for t in range(T):
            own[t] -= top
        f[k] = top
    exponentials(a, power, bits)
    for k in range(len(f)):
        own = a[k * T : (k + 1) * T]
        total = 0.0
        for t in range(T):
            total += own[t]
        f[k] += math.log(total)
        share = r[k] / total
        for t in range(T):
            own[t] *= share


@njit(cache=True, nogil=True, error_model="numpy", **INNER)
def _spread(
    codes: Ints, group: Ints, C: int, lines: Floats, log_weights: Floats, a: Floats, at: Ints, power: Floats,
    bits: Ints, r: Floats, f: Floats,
) -> None:  # fmt: skip
    """Write weights of nodes of some rows to a (m, G), of sums r (m, K), and log densities to f (m, K)."""
    _add_levels(codes, group, C, lines, log_weights, at, a)
    for i in range(len(codes)):
        _normalize(a[i], len(log_weights), r[i], f[i], power, bits)


@njit(cache=True, nogil=True, error_model="numpy")
def _weights(
    codes: Ints, group: Ints, C: int, lines: Floats, log_weights: Floats, a: Floats, at: Ints, power: Floats,
    bits: Ints, ones: Floats, f: Floats, out: Floats,
) -> None:  # fmt: skip
    n = len(codes)
    for start in range(0, n, ROWS):
        end = min(n, start + ROWS)
        own, of = codes[start:end], group[start:end]
        _spread(own, of, C, lines, log_weights, a, at, power, bits, ones, f[start:end])
        for i in range(start, end):
            for g in range(out.shape[1]):
                out[i, g] = a[i - start, g]


@njit(cache=True, nogil=True, fastmath=REORDER, **INNER)
def _add_rows(at: Ints, m: int, a: Floats, levels: Floats) -> None:
    """Add weights of nodes of m rows to the lines of their cells."""
    for p in range(at.shape[1]):
        for i in range(m):
            to = at[i, p]
            if to < len(levels):
                for g in range(a.shape[1]):
                    levels[to, g] += a[i, g]


@njit(cache=True, nogil=True, fastmath=REORDER, error_model="numpy")
def _counts(
    codes: Ints, group: Ints, C: int, lines: Floats, log_weights: Floats, a: Floats, at: Ints, power: Floats,
    bits: Ints, r: Floats, f: Floats, levels: Floats, nodes: Floats,
) -> None:  # fmt: skip
    n = len(codes)
    for start in range(0, n, ROWS):
        end = min(n, start + ROWS)
        own, of = codes[start:end], group[start:end]
        _spread(own, of, C, lines, log_weights, a, at, power, bits, r[start:end], f[start:end])
        for i in range(end - start):
            for g in range(len(nodes)):
                nodes[g] += a[i, g]
        _add_rows(at, end - start, a, levels)
