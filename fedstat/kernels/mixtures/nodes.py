"""Categorical columns on nodes of normal factors: what a row tells of them, and expected counts at each.

Without covariates the counts of levels at nodes are all that an M-step needs: its cost does not depend on the
number of rows. No array of rows by nodes is kept.

References
----------
Bock, R. D. and Aitkin, M. (1981). Marginal maximum likelihood estimation of item parameters: application of
an EM algorithm. Psychometrika 46, 443-459.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from fedstat.kernels.exponentials import exponentials
from fedstat.kernels.glm.loops import REORDER, fixed
from fedstat.typing import Floats, Ints

ROWS = 16
"""Rows that are spread over nodes together."""


class Nodes(NamedTuple):
    """Nodes z (t, Q) of a standard normal law, and logs of their weights (t,)."""

    z: Floats
    log_weights: Floats


class ExpectedCounts(NamedTuple):
    """Expected numbers of rows: by group, column, level and node (J, P, C, K t), by cluster and node (K, t).

    f (n, K) are the log densities by cluster on the way there.
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
    """Levels (n, P) of rows, -1 where unseen, and the group (n,) of each: rows with the same covariates."""

    codes: Ints
    group: Ints


def node_densities(rows: GroupedLevels, table: Floats, log_weights: Floats, K: int) -> Floats:
    """Return log f(x_i | k), (n, K), from logs of levels' probabilities by group, (J, P, C, K t)."""
    f = np.empty((len(rows.codes), K))
    _densities(*_fixed_rows(rows), fixed(table), fixed(log_weights), f)
    return f


def node_weights(rows: GroupedLevels, table: Floats, log_weights: Floats, K: int) -> Floats:
    """Return the weights of nodes given a row and its cluster, (n, K, t): few rows at a time."""
    out, f = np.empty((len(rows.codes), K, len(log_weights))), np.empty((len(rows.codes), K))
    _weights(*_fixed_rows(rows), fixed(table), fixed(log_weights), f, out)
    return out


def node_means(rows: GroupedLevels, table: Floats, log_weights: Floats, eta: Floats, K: int) -> Floats:
    """Return E[eta | x_i, k], (n, K, Q), at nodes eta (K t, Q)."""
    e = np.zeros((len(rows.codes), K, eta.shape[1]))
    _means(*_fixed_rows(rows), fixed(table), fixed(log_weights), fixed(eta), e)
    return e


def _fixed_rows(rows: GroupedLevels) -> tuple[Ints, Ints]:
    return fixed(rows.codes, np.int64), fixed(rows.group, np.int64)


def expected_counts(rows: GroupedLevels, r: Floats, table: Floats, log_weights: Floats) -> ExpectedCounts:
    """Spread every row over the nodes where it may be, under weights r (n, K) of clusters."""
    levels, nodes, f = np.zeros(table.shape), np.zeros((r.shape[1], len(log_weights))), np.empty(r.shape)
    _counts(*_fixed_rows(rows), fixed(r), fixed(table), fixed(log_weights), levels, nodes, f)
    return ExpectedCounts(levels, nodes, f)


@njit(cache=True, nogil=True, fastmath=REORDER)
def _add_levels(codes: Ints, group: Ints, table: Floats, log_weights: Floats, a: Floats) -> None:
    """Write log weights and log probabilities of levels (m, P) of some rows at all nodes to a (m, K, t)."""
    m, K, T = a.shape
    flat = a.reshape(m, K * T)
    for i in range(m):
        for k in range(K):
            for t in range(T):
                a[i, k, t] = log_weights[t]
    # Column by column: what a column has at all nodes stays in the first cache.
    for p in range(codes.shape[1]):
        for i in range(m):
            if codes[i, p] >= 0:
                row, own = table[group[i], p, codes[i, p]], flat[i]
                for g in range(K * T):
                    own[g] += row[g]


# Where a step left the parameters' range, densities are no numbers, and are not taken.
@njit(cache=True, nogil=True, fastmath=REORDER, error_model="numpy")
def _normalise(a: Floats, power: Floats, bits: Ints) -> float:
    """Turn logs (t,) into weights; return the log of the sum before."""
    top = a[0]
    for t in range(len(a)):
        top = max(top, a[t])
    for t in range(len(a)):
        a[t] -= top
    exponentials(a, power, bits)
    total = 0.0
    for t in range(len(a)):
        total += a[t]
    for t in range(len(a)):
        a[t] /= total
    return float(top + math.log(total))


@njit(cache=True, nogil=True, error_model="numpy")
def _spread(
    codes: Ints,
    group: Ints,
    table: Floats,
    log_weights: Floats,
    a: Floats,
    f: Floats,
    power: Floats,
    bits: Ints,
) -> None:
    """Write weights of nodes of some rows to a (m, K, t), and their log densities to f (m, K)."""
    _add_levels(codes, group, table, log_weights, a)
    for i in range(len(a)):
        for k in range(a.shape[1]):
            f[i, k] = _normalise(a[i, k], power, bits)


@njit(cache=True, nogil=True, error_model="numpy")
def _weights(codes: Ints, group: Ints, table: Floats, log_weights: Floats, f: Floats, out: Floats) -> None:
    power = np.empty(len(log_weights))
    _spread(codes, group, table, log_weights, out, f, power, power.view(np.int64))


@njit(cache=True, nogil=True, error_model="numpy")
def _densities(codes: Ints, group: Ints, table: Floats, log_weights: Floats, f: Floats) -> None:
    n, K = f.shape
    power = np.empty(len(log_weights))
    room = np.empty((min(n, ROWS), K, len(log_weights)))
    for start in range(0, n, ROWS):
        end = min(n, start + ROWS)
        a = room[: end - start]
        _spread(
            codes[start:end],
            group[start:end],
            table,
            log_weights,
            a,
            f[start:end],
            power,
            power.view(np.int64),
        )


@njit(cache=True, nogil=True, fastmath=REORDER, error_model="numpy")
def _means(codes: Ints, group: Ints, table: Floats, log_weights: Floats, eta: Floats, e: Floats) -> None:
    n, K, Q = e.shape
    T = len(log_weights)
    power = np.empty(T)
    room, f = np.empty((min(n, ROWS), K, T)), np.empty((min(n, ROWS), K))
    for start in range(0, n, ROWS):
        end = min(n, start + ROWS)
        a = room[: end - start]
        _spread(codes[start:end], group[start:end], table, log_weights, a, f, power, power.view(np.int64))
        for i in range(start, end):
            for k in range(K):
                for t in range(T):
                    for q in range(Q):
                        e[i, k, q] += a[i - start, k, t] * eta[k * T + t, q]


@njit(cache=True, nogil=True, fastmath=REORDER, error_model="numpy")
def _counts(
    codes: Ints,
    group: Ints,
    r: Floats,
    table: Floats,
    log_weights: Floats,
    levels: Floats,
    nodes: Floats,
    f: Floats,
) -> None:
    n, K = r.shape
    T = len(log_weights)
    power = np.empty(T)
    room = np.empty((min(n, ROWS), K, T))
    for start in range(0, n, ROWS):
        end = min(n, start + ROWS)
        a = room[: end - start]
        flat = a.reshape(end - start, K * T)
        _spread(
            codes[start:end],
            group[start:end],
            table,
            log_weights,
            a,
            f[start:end],
            power,
            power.view(np.int64),
        )
        for i in range(start, end):
            for k in range(K):
                for t in range(T):
                    a[i - start, k, t] *= r[i, k]
                    nodes[k, t] += a[i - start, k, t]
        for p in range(codes.shape[1]):
            for i in range(start, end):
                if codes[i, p] >= 0:
                    row, own = levels[group[i], p, codes[i, p]], flat[i - start]
                    for g in range(K * T):
                        row[g] += own[g]
