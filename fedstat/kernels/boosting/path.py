"""Paths of component-wise L2 boosting from sums of products (Buehlmann and Hothorn 2007).

With Z the columns of all learners side by side and C = Y b the curves in a basis along t, a step fits every
learner to what is left, takes the one that explains most, and moves by a share nu of its fit. All that it
needs is S = Z'Z and what is left of T = Z'C: a step costs one product of S with the fit that was taken.
The same sums over other rows, `S_test` and `T_test`, tell the loss there after every step.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.typing import Floats, Ints


@njit(cache=True)
def follow_shrunk(
    S: Floats, T: Floats, H: Floats, starts: Ints, nu: float, rss: float, S_test: Floats, T_test: Floats,
    rss_test: float, selected: Ints, risk: Floats, risk_test: Floats, coef: Floats,
) -> None:  # fmt: skip
    """Follow a path in coordinates in which every fit is a shrinkage; writes into what comes in.

    S (K, K), T (K, k2), shrinkages H (K, k2) in [0, 1]; learner p has the rows starts[p] to starts[p + 1].
    `selected`, `risk` and `risk_test` are (steps,), `coef` (K, k2); `S_test` without rows for none.
    """
    k2 = T.shape[1]
    P = len(starts) - 1
    test = S_test.shape[0] > 0
    for m in range(len(selected)):
        best, p = -1.0, 0
        for q in range(P):
            gain = 0.0
            for i in range(starts[q], starts[q + 1]):
                for j in range(k2):
                    gain += T[i, j] * T[i, j] * H[i, j] * (2.0 - H[i, j])
            if gain > best:
                best, p = gain, q
        lo, hi = starts[p], starts[p + 1]
        B = np.empty((hi - lo, k2))
        along, size = 0.0, 0.0
        for i in range(hi - lo):
            for j in range(k2):
                B[i, j] = T[lo + i, j] * H[lo + i, j]
                along += T[lo + i, j] * B[i, j]
                size += B[i, j] * B[i, j]
                coef[lo + i, j] += nu * B[i, j]
        if test:
            rss_test -= nu * product(T_test, lo, B)
            move(T_test, S_test, lo, hi, nu, B)
            rss_test -= nu * product(T_test, lo, B)
        move(T, S, lo, hi, nu, B)
        rss += -2.0 * nu * along + nu * nu * size
        selected[m], risk[m], risk_test[m] = p, rss, rss_test


@njit(cache=True)
def follow_full(
    S: Floats, T: Floats, G: Floats, U: Floats, at: Ints, h: Floats, starts: Ints, nu: float, rss: float,
    S_test: Floats, T_test: Floats, rss_test: float, selected: Ints, risk: Floats, risk_test: Floats,
    coef: Floats,
) -> None:  # fmt: skip
    """Follow a path of learners whose penalty mixes both directions: a rotation of k1 k2 columns for each.

    S (K, K), T (K, k2), G (k2, k2) the Gram along t; the rotations (k1 k2, k1 k2) of the learners lie one
    after the other in U, from at[p] on, their shrinkages in `h`. A fit in vec form has t slow. The rest as in
    :func:`follow_shrunk`.
    """
    k2 = T.shape[1]
    P = len(starts) - 1
    test = S_test.shape[0] > 0
    turned = np.empty(len(h))
    for m in range(len(selected)):
        best, p, first, taken = -1.0, 0, 0, 0
        for q in range(P):
            k1 = starts[q + 1] - starts[q]
            k = k1 * k2
            vec = np.empty(k)
            for j in range(k2):
                for i in range(k1):
                    vec[j * k1 + i] = T[starts[q] + i, j]
            turned[first : first + k] = U[at[q] : at[q] + k * k].reshape(k, k) @ vec
            gain = 0.0
            for i in range(first, first + k):
                gain += turned[i] * turned[i] * h[i] * (2.0 - h[i])
            if gain > best:
                best, p, taken = gain, q, first
            first += k
        lo, hi = starts[p], starts[p + 1]
        k1 = hi - lo
        k = k1 * k2
        t, s = turned[taken : taken + k], h[taken : taken + k]
        vec = (t * s) @ U[at[p] : at[p] + k * k].reshape(k, k)
        B = np.empty((k1, k2))
        for j in range(k2):
            for i in range(k1):
                B[i, j] = vec[j * k1 + i]
                coef[lo + i, j] += nu * B[i, j]
        BG = B @ G
        if test:
            rss_test -= nu * product(T_test, lo, B)
            move(T_test, S_test, lo, hi, nu, BG)
            rss_test -= nu * product(T_test, lo, B)
        move(T, S, lo, hi, nu, BG)
        for i in range(k):
            rss += nu * t[i] * t[i] * s[i] * (nu * s[i] - 2.0)
        selected[m], risk[m], risk_test[m] = p, rss, rss_test


@njit(cache=True)
def product(T: Floats, lo: int, B: Floats) -> float:
    """Sum of T times B over B's rows of T, which begin at lo.

    A loss falls by nu times that before a step and after it.
    """
    total = 0.0
    for i in range(B.shape[0]):
        for j in range(B.shape[1]):
            total += T[lo + i, j] * B[i, j]
    return total


@njit(cache=True)
def move(T: Floats, S: Floats, lo: int, hi: int, nu: float, B: Floats) -> None:
    """Take what a step explains out of T: T -= nu S[:, lo:hi] B."""
    K, k2 = T.shape
    for i in range(K):
        for a in range(hi - lo):
            s = nu * S[i, lo + a]
            for j in range(k2):
                T[i, j] -= s * B[a, j]


@njit(cache=True)
def follow_blocks(
    A: Floats, t: Floats, U: Floats, at: Ints, h: Floats, starts: Ints, nu: float, rss: float,
    A_test: Floats, t_test: Floats, rss_test: float, selected: Ints, risk: Floats, risk_test: Floats,
    coef: Floats,
) -> None:  # fmt: skip
    """Follow a path of learners whose sums have no two directions: rows were seen at different points.

    A (D, D) are products of all columns over rows and points, t (D,) those with what is left, learner p the
    columns starts[p] to starts[p + 1]; its rotation lies in U from at[p] on, its shrinkages in `h` from
    starts[p] on. `coef` is (D,). The rest as in :func:`follow_shrunk`.
    """
    P = len(starts) - 1
    test = A_test.shape[0] > 0
    turned = np.empty(len(t))
    for m in range(len(selected)):
        best, p = -1.0, 0
        for q in range(P):
            lo, hi = starts[q], starts[q + 1]
            k = hi - lo
            turned[lo:hi] = U[at[q] : at[q] + k * k].reshape(k, k) @ t[lo:hi]
            gain = 0.0
            for i in range(lo, hi):
                gain += turned[i] * turned[i] * h[i] * (2.0 - h[i])
            if gain > best:
                best, p = gain, q
        lo, hi = starts[p], starts[p + 1]
        k = hi - lo
        fit = turned[lo:hi] * h[lo:hi]
        b = fit @ U[at[p] : at[p] + k * k].reshape(k, k)
        for i in range(k):
            coef[lo + i] += nu * b[i]
            rss += nu * fit[i] * (nu * fit[i] - 2.0 * turned[lo + i])
        if test:
            rss_test -= nu * float(t_test[lo:hi] @ b)
            t_test -= nu * (A_test[lo:hi].T @ b)
            rss_test -= nu * float(t_test[lo:hi] @ b)
        t -= nu * (A[lo:hi].T @ b)
        selected[m], risk[m], risk_test[m] = p, rss, rss_test
