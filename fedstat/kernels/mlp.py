"""Small dense networks: forward, gradients and Adam's steps, on arrays of (units, rows).

Every inner loop runs over the rows of a batch and vectorises; a network of ten units would spend its time in
the dispatch of a library's operators. The parameters of a network are one vector: for each layer its matrix
(out, in), row by row, and its biases (out,). Hidden layers are rectified, the last is linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import REORDER
from fedstat.typing import Floats, Ints

BLOCK = 256
"""Rows that are gone through at once: those of all layers stay in the nearest cache."""
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

    Five rows at once: d is read once for all of them, and their sums do not wait for one another.
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


@njit(cache=True, nogil=True, fastmath=REORDER)
def forward(theta: Floats, widths: Ints, X: Floats) -> Floats:
    """Activations of all layers below one another, from columns X (p, rows): (sum of widths, rows)."""
    rows = X.shape[1]
    A = np.empty((widths.sum(), rows))
    A[: widths[0]] = X
    last = len(widths) - 2
    for start in range(0, rows, BLOCK):
        end = min(start + BLOCK, rows)
        at, base = 0, 0
        for layer in range(last + 1):
            a, b = widths[layer], widths[layer + 1]
            biases = at + a * b
            for r in range(b):
                out = A[base + a + r, start:end]
                out[:] = theta[biases + r]
                add_products(out, theta, at + r * a, 1, A, base, start, a)
                if layer < last:
                    for i in range(len(out)):
                        out[i] = max(out[i], 0.0)
            at, base = biases + b, base + a
    return A


@njit(cache=True, nogil=True, fastmath=REORDER)
def gradient(
    theta: Floats, widths: Ints, A: Floats, D: Floats, columns: bool = True
) -> tuple[Floats, Floats]:
    """Differentiate a loss by parameters, and by columns where these are asked for: (q,) and (p, rows).

    A are the activations of :func:`forward`, D (d, rows) the derivatives by the last of them.
    """
    rows = A.shape[1]
    g, of_columns = np.zeros_like(theta), np.empty((widths[0] if columns else 0, rows))
    for start in range(0, rows, BLOCK):
        end = min(start + BLOCK, rows)
        at, base = len(theta), A.shape[0]
        above = D[:, start:end].copy()
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
            if layer == 0 and not columns:
                break
            E = np.zeros((a, end - start))
            for c in range(a):
                e = E[c]
                add_products(e, theta, at + c, a, above, 0, 0, b)
                if layer > 0:
                    x = A[below + c, start:end]
                    for i in range(len(e)):
                        e[i] = 0.0 if x[i] <= 0.0 else e[i]
            above = E
        if columns:
            of_columns[:, start:end] = above
    return g, of_columns


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
