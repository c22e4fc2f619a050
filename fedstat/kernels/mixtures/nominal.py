"""Unordered levels by logits against the first: logs of probabilities, and slopes from counts."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import REORDER, fixed
from fedstat.typing import Floats


def nominal_table(u: Floats) -> Floats:
    """Return log P(x_p = c) at predictors u (P, C - 1, G) of all levels but the first: (P, C, G)."""
    full = np.concatenate([np.zeros_like(u[:, :1]), u], axis=1)
    top = full.max(axis=1, keepdims=True)
    return np.asarray(full - top - np.log(np.exp(full - top).sum(axis=1, keepdims=True)))


def nominal_derivatives(table: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return slopes (P, d) and information (P, d, d) in (a_p, l_p) from counts (P, C, G); d = (C - 1)(1 + Q).

    Intercepts come first, then the loadings of each level; `table` has the logs of probabilities at nodes
    eta (G, Q).
    """
    P, C, G = counts.shape
    d = (C - 1) * (1 + eta.shape[1])
    score, info = np.zeros((P, d)), np.zeros((P, d, d))
    _derivatives(fixed(np.exp(table)), fixed(np.column_stack([np.ones(G), eta])), fixed(counts), score, info)
    return score, info


@njit(cache=True, nogil=True, fastmath=REORDER)
def _derivatives(pi: Floats, X: Floats, counts: Floats, score: Floats, info: Floats) -> None:
    P, C, G = pi.shape
    d = X.shape[1]
    at = np.empty((C - 1, d), dtype=np.int64)
    for c in range(C - 1):
        at[c, 0] = c
        for q in range(d - 1):
            at[c, q + 1] = C - 1 + c * (d - 1) + q
    for p in range(P):
        for g in range(G):
            total = 0.0
            for c in range(C):
                total += counts[p, c, g]
            for b in range(1, C):
                left = counts[p, b, g] - total * pi[p, b, g]
                for q in range(d):
                    score[p, at[b - 1, q]] += left * X[g, q]
                for c in range(1, C):
                    weight = total * pi[p, b, g] * ((1.0 if b == c else 0.0) - pi[p, c, g])
                    for q in range(d):
                        for t in range(d):
                            info[p, at[b - 1, q], at[c - 1, t]] += weight * X[g, q] * X[g, t]
