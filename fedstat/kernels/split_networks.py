"""Split networks: dense layers, prediction heads over sets of sites, their losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import pairwise
from math import comb
from typing import TypeAlias

import numpy as np
from numba import njit

from fedstat.kernels import REORDER, as_kernel_array
from fedstat.kernels.exponentials import exponentials, log_one_plus
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Small dense networks: forward, gradients and Adam's steps, on arrays of (units, rows).
#
# Every inner loop runs over the rows of a batch and vectorizes; a network of ten units would spend its time
# in the dispatch of a library's operators. The parameters of a network are one vector: for each layer its
# matrix (out, in), row by row, and its biases (out,). Hidden layers are rectified, the last is linear.

BLOCK = 256
"""Rows that are processed at once: those of all layers stay in the nearest cache."""
MANY_ROWS = 2**15
"""Rows whose weights in all tasks are in memory at once."""
FIRST_DECAY, SECOND_DECAY, TINY = 0.9, 0.999, 1e-8


def count_parameters(widths: Sequence[int]) -> int:
    """Parameters of a network with layers of these widths, the columns first."""
    return sum((a + 1) * b for a, b in pairwise(widths))


def draw_parameters(widths: Sequence[int], rng: np.random.Generator) -> Floats:
    """Draw uniform parameters between -1 and 1 over the root of a layer's inputs, as PyTorch does."""
    layers = [rng.uniform(-1.0, 1.0, (a + 1) * b) / np.sqrt(a) for a, b in pairwise(widths)]
    return np.concatenate(layers)


# Inlined by name: a loop from the cache is not inlined, one just compiled is, and their last bits differ.
@njit(cache=True, nogil=True, fastmath=REORDER, inline="always")
def add_products(
    out: Floats, w: Floats, at: int, stride: int, X: Floats, base: int, start: int, a: int
) -> None:
    """Add a rows of X from `base`, in columns from `start`, times w[at], w[at + stride], ... to `out`.

    Five rows at once: `out` is read and written once for all of them.
    """
    m, c = len(out), 0
    while c + 5 <= a:
        w0, w1, w2 = w[at + c * stride], w[at + (c + 1) * stride], w[at + (c + 2) * stride]
        w3, w4 = w[at + (c + 3) * stride], w[at + (c + 4) * stride]
        x0, x1 = X[base + c, start : start + m], X[base + c + 1, start : start + m]
        x2, x3 = X[base + c + 2, start : start + m], X[base + c + 3, start : start + m]
        x4 = X[base + c + 4, start : start + m]
        for i in range(m):
            out[i] += w0 * x0[i] + w1 * x1[i] + w2 * x2[i] + w3 * x3[i] + w4 * x4[i]
        c += 5
    for k in range(c, a):
        v, x = w[at + k * stride], X[base + k, start : start + m]
        for i in range(m):
            out[i] += v * x[i]


@njit(cache=True, nogil=True, fastmath=REORDER, inline="always")
def add_sums(g: Floats, at: int, d: Floats, X: Floats, base: int, start: int, a: int) -> None:
    """Add sums of d times each of a rows of X from `base`, in columns from `start`, to g from `at` on.

    Five rows at once: d is read once for all of them, and their sums are independent.
    """
    m, c = len(d), 0
    while c + 5 <= a:
        x0, x1 = X[base + c, start : start + m], X[base + c + 1, start : start + m]
        x2, x3 = X[base + c + 2, start : start + m], X[base + c + 3, start : start + m]
        x4 = X[base + c + 4, start : start + m]
        s0, s1, s2, s3, s4 = 0.0, 0.0, 0.0, 0.0, 0.0
        for i in range(m):
            s0 += d[i] * x0[i]
            s1 += d[i] * x1[i]
            s2 += d[i] * x2[i]
            s3 += d[i] * x3[i]
            s4 += d[i] * x4[i]
        g[at + c] += s0
        g[at + c + 1] += s1
        g[at + c + 2] += s2
        g[at + c + 3] += s3
        g[at + c + 4] += s4
        c += 5
    for k in range(c, a):
        x, s = X[base + k, start : start + m], 0.0
        for i in range(m):
            s += d[i] * x[i]
        g[at + k] += s


def forward(theta: Floats, widths: Ints, X: Floats) -> Floats:
    """Activations of all layers, concatenated, from columns X (p, rows): (sum of widths, rows)."""
    A = np.empty((int(widths.sum()), X.shape[1]))
    A[: len(X)] = X
    _forward(as_kernel_array(theta), as_kernel_array(widths, np.int64), A)
    return A


@njit(cache=True, nogil=True, fastmath=REORDER)
def _forward(theta: Floats, widths: Ints, A: Floats) -> None:
    rows, last = A.shape[1], len(widths) - 2
    for start in range(0, rows, BLOCK):
        end = min(start + BLOCK, rows)
        at, base = 0, 0
        for layer in range(last + 1):
            a, b = widths[layer], widths[layer + 1]
            biases = at + a * b
            for r in range(b):
                out = A[base + a + r, start:end]
                for i in range(len(out)):
                    out[i] = theta[biases + r]
                add_products(out, theta, at + r * a, 1, A, base, start, a)
                if layer < last:
                    for i in range(len(out)):
                        out[i] = max(out[i], 0.0)
            at, base = biases + b, base + a


def gradient(
    theta: Floats, widths: Ints, A: Floats, D: Floats, columns: bool = True
) -> tuple[Floats, Floats]:
    """Differentiate a loss by parameters, and by columns if requested: (q,) and (p, rows).

    A are the activations of :func:`forward`, D (d, rows) the derivatives by the last of them.
    """
    g, of_columns = np.zeros(theta.shape), np.empty((int(widths[0]) if columns else 0, A.shape[1]))
    known = as_kernel_array(theta), as_kernel_array(widths, np.int64), as_kernel_array(A), as_kernel_array(D)
    _gradient(*known, g, of_columns)
    return g, of_columns


@njit(cache=True, nogil=True, fastmath=REORDER)
def _gradient(theta: Floats, widths: Ints, A: Floats, D: Floats, g: Floats, of_columns: Floats) -> None:
    rows = A.shape[1]
    for start in range(0, rows, BLOCK):
        m = min(start + BLOCK, rows) - start
        at, base = len(theta), A.shape[0]
        above = np.empty((D.shape[0], m))
        for r in range(D.shape[0]):
            for i in range(m):
                above[r, i] = D[r, start + i]
        for layer in range(len(widths) - 2, -1, -1):
            a, b = widths[layer], widths[layer + 1]
            base -= b
            below = base - a
            biases = at - b
            at = biases - a * b
            for r in range(b):
                d = above[r]
                s = 0.0
                for i in range(len(d)):
                    s += d[i]
                g[biases + r] += s
                add_sums(g, at + r * a, d, A, below, start, a)
            if layer == 0 and len(of_columns) == 0:
                break
            E = np.empty((a, m))
            for c in range(a):
                e = E[c]
                for i in range(len(e)):
                    e[i] = 0.0
                add_products(e, theta, at + c, a, above, 0, 0, b)
                if layer > 0:
                    x = A[below + c, start : start + m]
                    for i in range(len(e)):
                        e[i] = 0.0 if x[i] <= 0.0 else e[i]
            above = E
        for c in range(len(of_columns)):
            for i in range(m):
                of_columns[c, start + i] = above[c, i]


@njit(cache=True, nogil=True, error_model="numpy")
def adam_step(
    theta: Floats, g: Floats, first: Floats, second: Floats, step: int, rate: float, decay: float
) -> None:
    """Move parameters by a step of Adam (Kingma and Ba 2015, algorithm 1), with an L2 penalty; in place.

    `first` and `second` are the running moments, `step` counts from one.
    """
    c1, c2 = 1.0 - FIRST_DECAY**step, 1.0 - SECOND_DECAY**step
    for j in range(len(theta)):
        q = g[j] + decay * theta[j]
        first[j] += (1.0 - FIRST_DECAY) * (q - first[j])
        second[j] += (1.0 - SECOND_DECAY) * (q * q - second[j])
        theta[j] -= rate * (first[j] / c1) / (np.sqrt(second[j] / c2) + TINY)


# ----------------------------------------------------------------------------------------------------
# Heads over sets of networks: losses of many predictions from the same outputs, and their derivatives.
#
# The input of a head is the mean of the outputs of the networks in a set. For two or more classes its scores
# are those of a softmax; for a normal response it is the mean.

SMALLEST = 1e-12


@njit(cache=True, nogil=True, fastmath=REORDER)
def log_loss(F: Floats, y: Floats, flip: Floats) -> tuple[Floats, Floats]:
    """Minus log-likelihood of classes y (rows,), and its derivatives by the scores F (classes, rows).

    `flip` (classes, classes) are probabilities that a class, by row, was recorded as another: the likelihood
    is that of the recorded classes (Patrini et al. 2017, theorem 2, forward correction). It has no rows if
    classes are recorded without error.
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
            # The comparison is such that nan stays nan.
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


def squared_loss(F: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Half the squared errors of y (rows,), and their derivatives by F (..., rows), of the shape of F."""
    D = F - y
    return 0.5 * D * D, D


@njit(cache=True, nogil=True, fastmath=REORDER)
def _log_losses_of_means(
    S: Floats, members: Bools, sizes: Ints, biases: Floats, weights: Floats, y: Floats, flip: Floats,
    of_biases: Floats, of_S: Floats,
) -> float:  # fmt: skip
    """Add the losses of tasks whose scores are means of networks' scores S (I, C, b), and biases (C,).

    `weights` (T, b) are those of the rows. Adds the derivatives to `of_biases` (C,) and `of_S` (I, C, b).
    """
    (networks, C, b), total = S.shape, 0.0
    for start in range(0, b, BLOCK):
        m = min(start + BLOCK, b) - start
        # As long as the block, because loops over parts of longer rows process one number at a time.
        F, at, w = np.empty((C, m)), np.empty(m), np.empty(m)
        for i in range(m):
            at[i] = y[start + i]
        for t in range(len(members)):
            counts, share = False, 1.0 / sizes[t]
            for i in range(m):
                w[i] = weights[t, start + i]
                counts |= w[i] != 0.0
            if not counts:
                continue
            for c in range(C):
                for i in range(m):
                    F[c, i] = biases[c]
                for k in range(networks):
                    if members[t, k]:
                        for i in range(m):
                            F[c, i] += share * S[k, c, start + i]
            loss, D = log_loss(F, at, flip)
            for i in range(m):
                total += w[i] * loss[i]
            for c in range(C):
                summed = 0.0
                for i in range(m):
                    D[c, i] *= w[i]
                    summed += D[c, i]
                of_biases[c] += summed
                for k in range(networks):
                    if members[t, k]:
                        for i in range(m):
                            of_S[k, c, start + i] += share * D[c, i]
    return total


@np.errstate(all="ignore")
def _linear_head_loss(
    theta: Floats, R: Floats, members: Bools, sizes: Ints, weights: Floats, y: Floats, flip: Floats
) -> tuple[float, Floats, Floats]:
    """Loss and derivatives of the tasks of one head without hidden layers; see :func:`heads_loss`.

    `weights` (T, b) are those of the rows.
    """
    (networks, d, b), of_head = R.shape, np.empty(theta.shape)
    C = len(theta) // (d + 1)
    W, biases, of_biases = theta[: C * d].reshape(C, d), theta[C * d :], np.zeros(C)
    S, of_S = W @ R, np.zeros((networks, C, b))
    if C == 1:
        shares = members / sizes[:, None]
        loss, D = squared_loss(shares @ S[:, 0] + biases, y)
        D *= weights
        total = float((weights * loss).sum())
        of_biases[0] = D.sum()
        np.matmul(shares.T, D, out=of_S[:, 0])
    else:
        total = _log_losses_of_means(
            as_kernel_array(S),
            as_kernel_array(members, np.bool_),
            as_kernel_array(sizes, np.int64),
            as_kernel_array(biases),
            as_kernel_array(weights),
            y,
            flip,
            of_biases,
            of_S,
        )
    of_head[: C * d], of_head[C * d :] = (of_S @ R.transpose(0, 2, 1)).sum(axis=0).reshape(-1), of_biases
    return total, of_head, W.T @ of_S


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
    the sum over the networks in `members` (T, I) divided by `sizes`. Its loss in a row counts `weights` (G,
    T) times, by the pattern `code` (b,), and the row's `own` weight (b,). y has classes if a head has two
    outputs or more; `flip` as in :func:`log_loss`.
    """
    y, flip, of_heads, total = as_kernel_array(y), as_kernel_array(flip), np.zeros(theta.shape), 0.0
    if len(widths) == 2 and len(head) and len(y):
        backs = []
        for start in range(0, len(y), MANY_ROWS):
            rows, parts = slice(start, start + MANY_ROWS), list[Floats]()
            w = np.ascontiguousarray(weights[code[rows]].T) * own[rows]
            for h in sorted(set(head.tolist())):
                of = np.flatnonzero(head == h)
                block = R[:, :, rows], members[of], sizes[of], w[of], y[rows], flip
                added, of_head, part = _linear_head_loss(theta[h], *block)
                total += added
                of_heads[h] += of_head
                parts.append(part)
            backs.append(reduce(np.add, parts))
        return total, of_heads, backs[0] if len(backs) == 1 else np.concatenate(backs, axis=2)
    back = np.zeros(R.shape)
    for t, h in enumerate(head):
        w = weights[code, t] * own
        if w.any():
            A = forward(theta[h], widths, R[members[t]].sum(axis=0) / sizes[t])
            F = A[-widths[-1] :].copy()
            loss, D = log_loss(F, y, flip) if len(F) > 1 else squared_loss(F, y)
            g, of_mean = gradient(theta[h], widths, A, D * w)
            total += float((w * loss).sum())
            of_heads[h] += g
            back[members[t]] += of_mean / sizes[t]
    return total, of_heads, back


# ----------------------------------------------------------------------------------------------------
# Sets of sites over which the loss of a split network is taken: all of them, or drawn ones.
#
# A set is an integer whose bits are the sites in it. For an entity that the sites of `seen` have, the loss is
# the sum over all sets within `seen`; drawn sets replace them, with weights for which the expectation is that
# sum.

SubsetDraw: TypeAlias = Callable[[int], int]
"""Draws a whole number below another, all equally likely."""
SubsetDraws: TypeAlias = Callable[[Ints], Ints]
"""Draws one below each of some."""
MAX_LISTED = 6
"""Number of sites for which all sets are used; for more, one set of each size is drawn."""


@lru_cache(maxsize=4096)
def subsets_within(seen: int) -> tuple[int, ...]:
    """List all sets of one site or more within another, ascending."""
    return tuple(s for s in range(1, seen + 1) if s & seen == s)


@lru_cache(maxsize=4096)
def subsets_of_size(seen: int, size: int) -> tuple[int, ...]:
    """List those of one size; there are C(k, size)."""
    bits = [1 << k for k in range(seen.bit_length()) if seen >> k & 1]

    def choose(first: int, left: int) -> list[int]:
        if left == 0:
            return [0]
        return [
            bits[i] | rest for i in range(first, len(bits) - left + 1) for rest in choose(i + 1, left - 1)
        ]

    return tuple(choose(0, size))


def draw_subset_per_size(seen: int, draw: SubsetDraw) -> dict[int, float]:
    """Draw a set of each size; it has the weight of all of its size."""
    k = seen.bit_count()
    chosen = ((subsets_of_size(seen, size)[draw(comb(k, size))], comb(k, size)) for size in range(1, k + 1))
    return {s: float(weight) for s, weight in chosen}


@lru_cache(maxsize=4096)
def _by_size(seen: int) -> tuple[Ints, Ints]:
    """List all sets within another by their size, and where each size begins, (k + 1,)."""
    sizes = [subsets_of_size(seen, size) for size in range(1, seen.bit_count() + 1)]
    return np.concatenate(sizes), np.cumsum([0, 0, *map(len, sizes)])[:-1]


def draw_subset_per_row(seen: Ints, draw: SubsetDraws) -> tuple[Ints, Floats]:
    """Draw one set within each of `seen` (b,): its size, then one of that size.

    Its weight is one over its probability.
    """
    sets, weights = np.zeros_like(seen), np.zeros(len(seen))
    for one in np.unique(seen).tolist():
        at, k = np.flatnonzero(seen == one), one.bit_count()
        listed, begin = _by_size(one)
        of_size = np.array([comb(k, size) for size in range(k + 1)])
        size = 1 + draw(np.full(len(at), k))
        sets[at] = listed[begin[size] + draw(of_size[size])]
        weights[at] = k * of_size[size]
    return sets, weights
