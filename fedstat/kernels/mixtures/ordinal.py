"""Ordered levels by cumulative logits, P(x <= c) = expit(alpha_c - u): logs, and slopes from counts.

With F_c = expit(alpha_c - u), log P(x = c) is log F_c + log(1 - F_{c-1}) + log(1 - exp(alpha_{c-1} -
alpha_c)): no difference of probabilities is taken, and all slopes are those of one logistic regression for
each threshold, on the rows at the two levels beside it, but for a term of the gaps between thresholds. It
is concave in thresholds and u.

References
----------
Burridge, J. (1981). A note on maximum likelihood estimation for regression models using grouped data.
Journal of the Royal Statistical Society B 43, 41-45.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import REORDER, fixed
from fedstat.typing import Floats


def ordinal_table(alpha: Floats, u: Floats) -> Floats:
    """Return log P(x_p = c) at predictors u (P, G) and thresholds (P, C - 1): (P, C, G)."""
    P, B = alpha.shape
    out = np.empty((P, B + 1, u.shape[1]))
    _table(fixed(alpha), fixed(u), out)
    return out


def ordinal_derivatives(alpha: Floats, u: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return slopes (P, d) and information (P, d, d) in (alpha_p, l_p), d = C - 1 + Q, from counts (P, C, G).

    The predictors u (P, G) are those of loadings at nodes eta (G, Q).
    """
    P, B = alpha.shape
    d = B + eta.shape[1]
    score, info = np.zeros((P, d)), np.zeros((P, d, d))
    _derivatives(fixed(alpha), fixed(u), fixed(eta), fixed(counts), score, info)
    return score, info


@njit(cache=True, nogil=True)
def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@njit(cache=True, nogil=True)
def _table(alpha: Floats, u: Floats, out: Floats) -> None:
    P, B = alpha.shape
    for p in range(P):
        for c in range(B + 1):
            inner = 0 < c < B
            out[p, c] = np.log(-np.expm1(alpha[p, c - 1] - alpha[p, c])) if inner else 0.0
        for b in range(B):
            for g in range(u.shape[1]):
                x = u[p, g] - alpha[p, b]
                s = _softplus(x)
                out[p, b, g] -= s
                out[p, b + 1, g] -= s - x


@njit(cache=True, nogil=True, fastmath=REORDER)
def _derivatives(alpha: Floats, u: Floats, eta: Floats, counts: Floats, score: Floats, info: Floats) -> None:
    P, B = alpha.shape
    G, Q = eta.shape
    d, m = np.empty(G), np.empty(G)
    for p in range(P):
        H = info[p]
        d[:] = 0.0
        m[:] = 0.0
        for b in range(B):
            for g in range(G):
                below, above = counts[p, b, g], counts[p, b + 1, g]
                F = 1.0 / (1.0 + np.exp(u[p, g] - alpha[p, b]))
                left = below * (1.0 - F) - above * F
                weight = (below + above) * F * (1.0 - F)
                score[p, b] += left
                H[b, b] += weight
                d[g] -= left
                m[g] += weight
                for q in range(Q):
                    H[b, B + q] -= weight * eta[g, q]
            for q in range(Q):
                H[B + q, b] = H[b, B + q]
        for g in range(G):
            for q in range(Q):
                score[p, B + q] += d[g] * eta[g, q]
                for t in range(Q):
                    H[B + q, B + t] += m[g] * eta[g, q] * eta[g, t]
        _add_gaps(alpha[p], counts[p], score[p], H)


@njit(cache=True, nogil=True)
def _add_gaps(alpha: Floats, counts: Floats, score: Floats, H: Floats) -> None:
    """Add slopes of N_c log(1 - exp(-gap_c)) for levels between two thresholds."""
    for c in range(1, len(alpha)):
        kappa = 1.0 / np.expm1(alpha[c] - alpha[c - 1])
        total = np.sum(counts[c])
        score[c] += total * kappa
        score[c - 1] -= total * kappa
        bent = total * kappa * (1.0 + kappa)
        H[c, c] += bent
        H[c - 1, c - 1] += bent
        H[c, c - 1] -= bent
        H[c - 1, c] -= bent
