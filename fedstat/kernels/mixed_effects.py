"""Marginal likelihoods of nested random effects: integrals cluster by cluster, and their derivatives.

A **jet** is a matrix with its first and second derivatives in K parameters: an array whose first axis has the
value, K first derivatives, and K (K + 1) / 2 second ones, (0, 0), (0, 1), ..., (1, 1), ... The rules of
products and inverses then apply to whole likelihoods, which need one matrix of the size of the effects for
each cluster (Woodbury's identity).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np
from numba import njit

from fedstat.typing import Floats, Ints


def pair_index(k: int, m: int, K: int) -> int:
    """Return the place of a second derivative in a jet of K parameters."""
    k, m = min(k, m), max(k, m)
    return 1 + K + k * K - k * (k - 1) // 2 + (m - k)


def jet_length(K: int) -> int:
    """Return the number of values and derivatives in a jet of K parameters."""
    return 1 + K + K * (K + 1) // 2


@lru_cache(maxsize=256)
def product_rule(K: int, left: frozenset[int], right: frozenset[int]) -> Ints:
    """Return the products in the product of two jets, (m, 3): the place of the result and of both factors.

    `left` and `right` are the parameters on which the factors depend.
    """
    rule = [(0, 0, 0)]
    for k in range(K):
        rule += [(1 + k, 1 + k, 0)] if k in left else []
        rule += [(1 + k, 0, 1 + k)] if k in right else []
    for k in range(K):
        for m in range(k, K):
            at = pair_index(k, m, K)
            rule += [(at, at, 0)] if {k, m} <= left else []
            rule += [(at, 0, at)] if {k, m} <= right else []
            rule += [(at, 1 + k, 1 + m)] if k in left and m in right else []
            rule += [(at, 1 + m, 1 + k)] if m in left and k in right else []
    return np.array(rule, dtype=np.int64)


@njit(cache=True, nogil=True)
def jet_product(X: Floats, Y: Floats, rule: Ints, out: Floats) -> None:
    """Write the product of two jets of matrices, (J, a, b) and (J, b, c), to `out` (J, a, c)."""
    out[:] = 0.0
    for r in range(len(rule)):
        o, x, y = rule[r]
        for i in range(X.shape[1]):
            for s in range(X.shape[2]):
                factor = X[x, i, s]
                for j in range(Y.shape[2]):
                    out[o, i, j] += factor * Y[y, s, j]


@njit(cache=True, nogil=True)
def jet_inverse(F: Floats, rule: Ints, out: Floats, logdet: Floats) -> None:
    """Write the inverse of a jet of matrices (J, a, a) to `out`, and add log det F to the jet `logdet` (J,).

    From F F^-1 = I: all products that contribute to one derivative add up to zero. In the same way
    (log det F)_k = tr(F^-1 F_k).
    """
    a = F.shape[1]
    out[0] = np.linalg.inv(F[0])
    logdet[0] += np.log(np.linalg.det(F[0]))
    total = np.zeros((a, a))
    K = int((np.sqrt(8.0 * len(F) + 1.0) - 3.0) / 2.0 + 0.5)
    for r in range(1, len(rule)):
        o, x, y = rule[r]
        if x:
            for i in range(a):
                for s in range(a):
                    for j in range(a):
                        total[i, j] += F[x, i, s] * out[y, s, j]
        if r + 1 == len(rule) or rule[r + 1, 0] != o:
            out[o] = 0.0
            for i in range(a):
                for s in range(a):
                    for j in range(a):
                        out[o, i, j] -= out[0, i, s] * total[s, j]
            total[:] = 0.0
    for k in range(K):
        logdet[1 + k] += np.sum(out[0] * F[1 + k].T)
        for m in range(k, K):
            at = 1 + K + k * K - k * (k - 1) // 2 + (m - k)
            logdet[at] += np.sum(out[0] * F[at].T) + np.sum(out[1 + m] * F[1 + k].T)


@njit(cache=True, nogil=True)
def cluster_products(W: Floats, weight: Floats, code: Ints, clusters: int) -> Floats:
    """Sum the products of columns (n, w) by cluster: (clusters, 1, w, w)."""
    out = np.zeros((clusters, 1, W.shape[1], W.shape[1]))
    for i in range(len(W)):
        for a in range(W.shape[1]):
            factor = weight[i] * W[i, a]
            for b in range(W.shape[1]):
                out[code[i], 0, a, b] += factor * W[i, b]
    return out


def integrate(S: Floats, T: Floats, inner: int, outer: Ints, groups: int) -> tuple[Floats, Floats, Floats]:
    """Integrate the effects of one level out of the products of columns, cluster by cluster.

    With products S = W'V^-1 W of the columns W = (Z, R), the variance V + Z T Z' has the products
    ``R'V^-1 R - R'V^-1 Z P Z'V^-1 R``, P = T (I + Z'V^-1 Z T)^-1, and adds log det(I + Z'V^-1 Z T) to the
    log-determinant (Harville 1977, JASA 72, section 5).

    Parameters
    ----------
    S : (C, J', q + r, q + r) array
        Jets in the first `inner` parameters; those of the effects come first.
    T : (J, q, q) array
        Jet of the covariance of the effects in all K parameters; it depends on those after `inner`.
    inner : int
    outer : (C,) array of int
        Number of the group, of the next level, in which each cluster lies.
    groups : int

    Returns
    -------
    products : (groups, J, r, r) array
    logdet : (J,) array
    P : (C, J, q, q) array
    """
    K = int((np.sqrt(8.0 * len(T) + 1.0) - 3.0) / 2.0 + 0.5)
    before, own = frozenset(range(inner)), frozenset(range(inner, K))
    both = before | own
    wide = np.array([0, *range(1, 1 + inner), *(pair_index(k, m, K) for k in range(inner) for m in range(k, inner))])

    def rule(left: Collection[int], right: Collection[int]) -> Ints:
        return product_rule(K, frozenset(left), frozenset(right))

    return _integrate(
        S, T, wide, outer, groups, rule(before, own), rule(both, both), rule(own, both), rule(both, before),
        rule(before, both),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _integrate(
    S: Floats,
    T: Floats,
    wide: Ints,
    outer: Ints,
    groups: int,
    rule_AT: Ints,
    rule_inverse: Ints,
    rule_TF: Ints,
    rule_PB: Ints,
    rule_BPB: Ints,
) -> tuple[Floats, Floats, Floats]:
    J, q, w = len(T), T.shape[1], S.shape[2]
    out, logdet, P = np.zeros((groups, J, w - q, w - q)), np.zeros(J), np.zeros((len(S), J, q, q))
    A, B, Bt = np.zeros((J, q, q)), np.zeros((J, q, w - q)), np.zeros((J, w - q, q))
    F, inverse = np.zeros((J, q, q)), np.zeros((J, q, q))
    PB, BPB = np.zeros((J, q, w - q)), np.zeros((J, w - q, w - q))
    for c in range(len(S)):
        for j in range(len(wide)):
            A[wide[j]] = S[c, j, :q, :q]
            B[wide[j]] = S[c, j, :q, q:]
            Bt[wide[j]] = S[c, j, q:, :q]
            out[outer[c], wide[j]] += S[c, j, q:, q:]
        jet_product(A, T, rule_AT, F)
        for i in range(q):
            F[0, i, i] += 1.0
        jet_inverse(F, rule_inverse, inverse, logdet)
        jet_product(T, inverse, rule_TF, P[c])
        jet_product(P[c], B, rule_PB, PB)
        jet_product(Bt, PB, rule_BPB, BPB)
        out[outer[c]] -= BPB
    return out, logdet, P
