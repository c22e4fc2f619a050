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
                for c in range(a):
                    w, x = theta[at + r * a + c], A[base + c, start:end]
                    for i in range(len(x)):
                        out[i] += w * x[i]
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
            E = np.zeros((a, end - start))
            for r in range(b):
                d = above[r]
                s = 0.0
                for i in range(len(d)):
                    s += d[i]
                g[biases + r] += s
                for c in range(a):
                    w, x, e = theta[at + r * a + c], A[below + c, start:end], E[c]
                    s = 0.0
                    if layer > 0 or columns:
                        for i in range(len(d)):
                            s += d[i] * x[i]
                            e[i] += w * d[i]
                    else:
                        for i in range(len(d)):
                            s += d[i] * x[i]
                    g[at + r * a + c] += s
            if layer > 0:
                for c in range(a):
                    e, x = E[c], A[below + c, start:end]
                    for i in range(len(e)):
                        if x[i] <= 0.0:
                            e[i] = 0.0
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
