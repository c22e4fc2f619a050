"""Categorical columns on nodes of normal factors: what a row tells of them, and expected counts at each.

Without covariates the counts of levels at nodes are all that an M-step needs: its cost does not depend on the
number of rows. No array of rows by nodes is kept.

References
----------
Bock, R. D. and Aitkin, M. (1981). Marginal maximum likelihood estimation of item parameters: application of
an EM algorithm. Psychometrika 46, 443-459.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import REORDER, fixed
from fedstat.typing import Floats, Ints

NEGLIGIBLE = -40.0
"""Log of a node's weight, relative to the largest, that does not count any more."""


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
    out = np.empty((len(rows.codes), K, len(log_weights)))
    _weights(*_fixed_rows(rows), fixed(table), fixed(log_weights), out)
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
def _add_levels(codes: Ints, table: Floats, log_weights: Floats, a: Floats) -> None:
    """Write log weights and log probabilities of a row's levels, (P,), at all nodes to a (K, t)."""
    for k in range(a.shape[0]):
        a[k] = log_weights
    flat = a.reshape(a.size)
    for p in range(len(codes)):
        if codes[p] >= 0:
            row = table[p, codes[p]]
            for g in range(len(flat)):
                flat[g] += row[g]


@njit(cache=True, nogil=True, fastmath=REORDER)
def _normalise(a: Floats) -> float:
    """Turn logs (t,) into weights relative to the largest; return its log."""
    top = a[0]
    for t in range(len(a)):
        top = max(top, a[t])
    for t in range(len(a)):
        v = a[t] - top
        a[t] = np.exp(v) if v > NEGLIGIBLE else 0.0
    return float(top)


@njit(cache=True, nogil=True, fastmath=REORDER)
def _total(a: Floats) -> float:
    s = 0.0
    for t in range(len(a)):
        s += a[t]
    return s


@njit(cache=True, nogil=True)
def _densities(codes: Ints, group: Ints, table: Floats, log_weights: Floats, f: Floats) -> None:
    n, K = f.shape
    a = np.empty((K, len(log_weights)))
    for i in range(n):
        _add_levels(codes[i], table[group[i]], log_weights, a)
        for k in range(K):
            top = _normalise(a[k])
            f[i, k] = top + np.log(_total(a[k]))


@njit(cache=True, nogil=True, fastmath=REORDER)
def _weights(codes: Ints, group: Ints, table: Floats, log_weights: Floats, out: Floats) -> None:
    for i in range(len(codes)):
        _add_levels(codes[i], table[group[i]], log_weights, out[i])
        for k in range(out.shape[1]):
            _normalise(out[i, k])
            out[i, k] /= _total(out[i, k])


@njit(cache=True, nogil=True, fastmath=REORDER)
def _means(codes: Ints, group: Ints, table: Floats, log_weights: Floats, eta: Floats, e: Floats) -> None:
    n, K, Q = e.shape
    T = len(log_weights)
    a = np.empty((K, T))
    for i in range(n):
        _add_levels(codes[i], table[group[i]], log_weights, a)
        for k in range(K):
            _normalise(a[k])
            s = _total(a[k])
            for t in range(T):
                for q in range(Q):
                    e[i, k, q] += a[k, t] / s * eta[k * T + t, q]


@njit(cache=True, nogil=True, fastmath=REORDER)
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
    a = np.empty((K, T))
    flat = a.reshape(K * T)
    for i in range(n):
        _add_levels(codes[i], table[group[i]], log_weights, a)
        for k in range(K):
            top = _normalise(a[k])
            total = _total(a[k])
            f[i, k] = top + np.log(total)
            share = r[i, k] / total
            for t in range(T):
                a[k, t] *= share
                nodes[k, t] += a[k, t]
        for p in range(codes.shape[1]):
            if codes[i, p] >= 0:
                row = levels[group[i], p, codes[i, p]]
                for g in range(K * T):
                    row[g] += flat[g]
