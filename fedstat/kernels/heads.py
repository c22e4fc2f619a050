"""Heads over sets of networks: losses of many predictions from the same outputs, and their derivatives.

A head takes the mean of the outputs of the networks in a set. Of two classes or more its scores are those of
a softmax; of a normal response it is the mean.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels.exponentials import exponentials, log_one_plus
from fedstat.kernels.glm.loops import REORDER
from fedstat.kernels.mlp import BLOCK, add_products, add_sums, forward, gradient
from fedstat.typing import Bools, Floats, Ints

SMALLEST = 1e-12


@njit(cache=True, nogil=True, fastmath=REORDER)
def log_loss(F: Floats, y: Floats, flip: Floats) -> tuple[Floats, Floats]:
    """Minus log-likelihood of classes y (rows,), and its derivatives by the scores F (classes, rows).

    `flip` (classes, classes) are probabilities that a class, by row, was recorded as another: the likelihood
    is that of what was recorded (Patrini et al. 2017, theorem 2, forward correction). It has no rows where
    classes are recorded as they are.
    """
    C, rows = F.shape
    loss, D = np.empty(rows), np.empty((C, rows))
    if C == 2 and len(flip) == 0:
        # Log odds of the other class, and its probability without an overflow.
        odds, small, power = D[0], D[1], loss
        for i in range(rows):
            odds[i] = (F[1, i] - F[0, i]) * (1.0 - 2.0 * y[i])
            small[i] = -abs(odds[i])
        exponentials(small, power, power.view(np.int64))
        for i in range(rows):
            loss[i] = log_one_plus(small[i]) + 0.5 * (odds[i] + abs(odds[i]))
            other = (1.0 if odds[i] > 0.0 else small[i]) / (1.0 + small[i]) * (1.0 - 2.0 * y[i])
            odds[i], small[i] = -other, other
        return loss, D
    for i in range(rows):
        top, total, label = F[0, i], 0.0, int(y[i])
        for c in range(1, C):
            top = max(top, F[c, i])
        for c in range(C):
            D[c, i] = np.exp(F[c, i] - top)
            total += D[c, i]
        for c in range(C):
            D[c, i] /= total
        if len(flip) == 0:
            # Compared so that what is no number stays none.
            loss[i] = -np.log(SMALLEST if D[label, i] < SMALLEST else D[label, i])
            D[label, i] -= 1.0
            continue
        recorded = 0.0
        for c in range(C):
            recorded += D[c, i] * flip[c, label]
        recorded = SMALLEST if recorded < SMALLEST else recorded
        loss[i] = -np.log(recorded)
        for c in range(C):
            D[c, i] *= 1.0 - flip[c, label] / recorded
    return loss, D


@njit(cache=True, nogil=True, fastmath=REORDER)
def squared_loss(F: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Half the squared errors of y (rows,), and their derivatives by F (1, rows)."""
    D = F - y
    return 0.5 * D[0] ** 2, D


@njit(cache=True, nogil=True, fastmath=REORDER)
def _linear_heads_loss(
    theta: Floats,
    widths: Ints,
    R: Floats,
    members: Bools,
    sizes: Ints,
    head: Ints,
    weights: Floats,
    code: Ints,
    own: Floats,
    y: Floats,
    flip: Floats,
) -> tuple[float, Floats, Floats]:
    """Do the same for heads without hidden layers: scores of a set are means of those of its networks."""
    (networks, d, b), C = R.shape, widths[1]
    of_heads, back, total = np.zeros_like(theta), np.zeros_like(R), 0.0
    used = np.empty(networks, dtype=np.bool_)
    for start in range(0, b, BLOCK):
        m = min(start + BLOCK, b) - start
        # As long as the block: loops over parts of longer rows take one number at a time.
        S, of_S = np.empty((networks, C, m)), np.empty((networks, C, m))
        F, w = np.empty((C, m)), np.empty(m)
        for h in range(len(theta)):
            used[:] = False
            for t in range(len(head)):
                if head[t] == h:
                    used |= members[t]
            for k in range(networks):
                if used[k]:
                    S[k], of_S[k] = 0.0, 0.0
                    for c in range(C):
                        add_products(S[k, c], theta[h], c * d, 1, R[k], 0, start, d)
            for t in range(len(head)):
                if head[t] != h:
                    continue
                for i in range(m):
                    w[i] = weights[code[start + i], t] * own[start + i]
                if not w.any():
                    continue
                for c in range(C):
                    F[c] = theta[h, C * d + c]
                share = 1.0 / sizes[t]
                for k in range(networks):
                    if members[t, k]:
                        for c in range(C):
                            f, s = F[c], S[k, c]
                            for i in range(m):
                                f[i] += share * s[i]
                at = y[start : start + m]
                loss, D = log_loss(F, at, flip) if C > 1 else squared_loss(F, at)
                for i in range(m):
                    total += w[i] * loss[i]
                for c in range(C):
                    e, summed = D[c], 0.0
                    for i in range(m):
                        e[i] *= w[i]
                        summed += e[i]
                    of_heads[h, C * d + c] += summed
                for k in range(networks):
                    if members[t, k]:
                        for c in range(C):
                            e, s = D[c], of_S[k, c]
                            for i in range(m):
                                s[i] += share * e[i]
            for k in range(networks):
                if used[k]:
                    for c in range(C):
                        add_sums(of_heads[h], c * d, of_S[k, c], R[k], 0, start, d)
                    for j in range(d):
                        add_products(back[k, j, start : start + m], theta[h], j, d, of_S[k], 0, 0, C)
    return total, of_heads, back


@njit(cache=True, nogil=True, fastmath=REORDER)
def heads_loss(
    theta: Floats,
    widths: Ints,
    R: Floats,
    members: Bools,
    sizes: Ints,
    head: Ints,
    weights: Floats,
    code: Ints,
    own: Floats,
    y: Floats,
    flip: Floats,
) -> tuple[float, Floats, Floats]:
    """Sum the losses of all tasks of a batch; differentiate by heads (H, q), and by outputs (I, d, b).

    R (I, d, b) are the outputs of networks. Task t has the head `head[t]` of parameters `theta` (H, q), on
    the sum over the networks in `members` (T, I) over `sizes`. Its loss in a row counts `weights` (G, T)
    times, by the pattern `code` (b,), and the row's `own` weight (b,). y has classes where a head has two
    outputs or more; `flip` as in :func:`log_loss`.
    """
    if len(widths) == 2:
        return _linear_heads_loss(theta, widths, R, members, sizes, head, weights, code, own, y, flip)
    networks, d, b = R.shape
    of_heads, back, total = np.zeros_like(theta), np.zeros_like(R), 0.0
    for start in range(0, b, BLOCK):
        end = min(start + BLOCK, b)
        for t in range(len(head)):
            w = np.empty(end - start)
            for i in range(len(w)):
                w[i] = weights[code[start + i], t] * own[start + i]
            if not w.any():
                continue
            M = np.zeros((d, end - start))
            for k in range(networks):
                if members[t, k]:
                    M += R[k, :, start:end]
            M /= sizes[t]
            A = forward(theta[head[t]], widths, M)
            F = A[len(A) - widths[-1] :]
            loss, D = log_loss(F, y[start:end], flip) if len(F) > 1 else squared_loss(F, y[start:end])
            total += (w * loss).sum()
            g, of_mean = gradient(theta[head[t]], widths, A, D * w)
            of_heads[head[t]] += g
            of_mean /= sizes[t]
            for k in range(networks):
                if members[t, k]:
                    back[k, :, start:end] += of_mean
    return total, of_heads, back
