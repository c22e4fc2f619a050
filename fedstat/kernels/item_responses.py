"""Ordered and unordered categorical items: log probabilities, and slopes from expected counts."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels import REORDER, as_kernel_array
from fedstat.kernels.exponentials import exponentials, log_one_plus
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Unordered levels by logits against the first: logs of probabilities, and slopes from counts.


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
    _nominal_derivatives(
        as_kernel_array(np.exp(table)),
        as_kernel_array(np.column_stack([np.ones(G), eta])),
        as_kernel_array(counts),
        score,
        info,
    )
    return score, info


@njit(cache=True, nogil=True, fastmath=REORDER)
def _nominal_derivatives(pi: Floats, X: Floats, counts: Floats, score: Floats, info: Floats) -> None:
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


# ----------------------------------------------------------------------------------------------------
# Ordered levels by cumulative logits, P(x <= c) = expit(alpha_c - u): logs, and slopes from counts.
#
# With F_c = expit(alpha_c - u), log P(x = c) is log F_c + log(1 - F_{c-1}) + log(1 - exp(alpha_{c-1} -
# alpha_c)). No difference of probabilities is needed. All slopes are those of one logistic regression for
# each threshold, on the rows at the two adjacent levels, except for a term of the gaps between thresholds. It
# is concave in thresholds and u.
#
# References
# ----------
# Burridge, J. (1981). A note on maximum likelihood estimation for regression models using grouped data.
# Journal of the Royal Statistical Society B 43, 41-45.


def ordinal_table(alpha: Floats, u: Floats) -> Floats:
    """Return log P(x_p = c) at predictors u (P, G) and thresholds (P, C - 1): (P, C, G)."""
    P, B = alpha.shape
    out = np.empty((P, B + 1, u.shape[1]))
    _table(as_kernel_array(alpha), as_kernel_array(u), out)
    return out


def ordinal_derivatives(alpha: Floats, u: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return slopes (P, d) and information (P, d, d) in (alpha_p, l_p), d = C - 1 + Q, from counts (P, C, G).

    The predictors u (P, G) are those of loadings at nodes eta (G, Q).
    """
    P, B = alpha.shape
    d = B + eta.shape[1]
    score, info = np.zeros((P, d)), np.zeros((P, d, d))
    _ordinal_derivatives(
        as_kernel_array(alpha),
        as_kernel_array(u),
        as_kernel_array(eta.T),
        as_kernel_array(counts),
        score,
        info,
    )
    return score, info


@njit(cache=True, nogil=True, fastmath=REORDER)
def _table(alpha: Floats, u: Floats, out: Floats) -> None:
    (P, B), G = alpha.shape, u.shape[1]
    e, power = np.empty(G), np.empty(G)
    bits = power.view(np.int64)
    for p in range(P):
        for c in range(B + 1):
            inner = 0 < c < B
            out[p, c] = np.log(-np.expm1(alpha[p, c - 1] - alpha[p, c])) if inner else 0.0
        for b in range(B):
            x, below, above = u[p], out[p, b], out[p, b + 1]
            for g in range(G):
                e[g] = -abs(x[g] - alpha[p, b])
            exponentials(e, power, bits)
            for g in range(G):
                # log(1 + exp(x)), without an overflow.
                over = x[g] - alpha[p, b]
                s = 0.5 * (over + abs(over)) + log_one_plus(e[g])
                below[g] -= s
                above[g] -= s - over


@njit(cache=True, nogil=True, fastmath=REORDER)
def _ordinal_derivatives(
    alpha: Floats, u: Floats, nodes: Floats, counts: Floats, score: Floats, info: Floats
) -> None:
    """Differentiate at nodes (Q, G)."""
    (P, B), (Q, G) = alpha.shape, nodes.shape
    e, power, weights, slopes, curvatures = np.empty(G), np.empty(G), np.empty(G), np.empty(G), np.empty(G)
    bits = power.view(np.int64)
    for p in range(P):
        H, x = info[p], u[p]
        slopes[:] = 0.0
        curvatures[:] = 0.0
        for b in range(B):
            below, above, cut = counts[p, b], counts[p, b + 1], alpha[p, b]
            for g in range(G):
                e[g] = -abs(x[g] - cut)
            exponentials(e, power, bits)
            total = heavy = 0.0
            for g in range(G):
                small = e[g] / (1.0 + e[g])
                above_cut = 1.0 - small if x[g] > cut else small
                left = below[g] * above_cut - above[g] * (1.0 - above_cut)
                weight = (below[g] + above[g]) * small * (1.0 - small)
                weights[g] = weight
                slopes[g] -= left
                curvatures[g] += weight
                total += left
                heavy += weight
            score[p, b] += total
            H[b, b] += heavy
            for q in range(Q):
                z, mixed = nodes[q], 0.0
                for g in range(G):
                    mixed += weights[g] * z[g]
                H[b, B + q] = H[B + q, b] = -mixed
        for q in range(Q):
            z, total = nodes[q], 0.0
            for g in range(G):
                weights[g] = curvatures[g] * z[g]
                total += slopes[g] * z[g]
            score[p, B + q] = total
            for t in range(q + 1):
                other, heavy = nodes[t], 0.0
                for g in range(G):
                    heavy += weights[g] * other[g]
                H[B + q, B + t] = H[B + t, B + q] = heavy
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
