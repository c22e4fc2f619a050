"""Networks in training: parameters, Adam moments, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import EstimationError, MessageError, Remedy
from fedstat.kernels.split_networks import adam_step, count_parameters, draw_parameters, forward, gradient
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Probabilities of classes, and of labels that are randomized.


def softmax(F: Floats) -> Floats:
    """Probabilities (classes, rows) from scores."""
    E = np.exp(F - F.max(axis=0))
    return np.asarray(E / E.sum(axis=0))


def of_scores(F: Floats, classes: int) -> Floats:
    """Probabilities (rows, classes) from scores (classes, rows); means (rows, 1) for a normal response."""
    return (softmax(F) if classes else F).T


def flip_matrix(classes: int, epsilon: float) -> Floats:
    """Probabilities of randomized response, (classes, classes), rows the true class.

    The ratio of any two in a column is at most exp(epsilon) (Warner 1965; Kairouz, Oh and Viswanath 2016,
    equation 9).
    """
    other = 1.0 / (np.exp(epsilon) + classes - 1.0)
    out = np.full((classes, classes), other)
    np.fill_diagonal(out, np.exp(epsilon) * other)
    return out


# ----------------------------------------------------------------------------------------------------
# Networks in training: parameters and the moments of Adam, at a site or at the holder of the response.

ADAM = 4
"""Number of arrays that training stores for each parameter."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Learning rate and L2 penalty of Adam."""

    learning_rate: float
    decay: float

    def check(self) -> None:
        """Require positive numbers."""
        if not (0.0 < self.learning_rate < np.inf and 0.0 <= self.decay < np.inf):
            raise MessageError("expected a positive learning rate, and an L2 penalty of zero or more")


@dataclass
class Networks:
    """Several networks of the same widths: `theta` (m, q), and the moments of Adam for each."""

    widths: Ints
    theta: Floats
    optimizer: Optimizer
    first: Floats = field(init=False)
    second: Floats = field(init=False)
    steps: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.first, self.second = np.zeros_like(self.theta), np.zeros_like(self.theta)
        self.steps = np.zeros(len(self.theta), dtype=np.int64)

    @classmethod
    def draw(cls, widths: Sequence[int], m: int, optimizer: Optimizer, seeds: Sequence[int]) -> Networks:
        """Draw the parameters of m networks."""
        rng = np.random.default_rng(list(seeds))
        theta = np.array([draw_parameters(widths, rng) for _ in range(m)])
        return cls(np.array(widths, dtype=np.int64), theta, optimizer)

    def state(self, best: Floats | None) -> Floats:
        """Return the state of the training, and the best validation parameters, (m, 4 q + 1)."""
        best = self.theta if best is None else best
        return np.hstack([self.theta, self.first, self.second, best, self.steps[:, None]])

    def restore(self, state: Floats) -> Floats:
        """Restore the output of :meth:`state`; return the best validation parameters."""
        m, q = self.theta.shape
        if state.shape != (m, 4 * q + 1):
            raise MessageError("a state of other networks")
        self.theta, self.first, self.second, best = np.split(np.ascontiguousarray(state[:, :-1]), 4, axis=1)
        self.theta, self.first, self.second = map(np.ascontiguousarray, (self.theta, self.first, self.second))
        self.steps = state[:, -1].astype(np.int64)
        return np.ascontiguousarray(best)

    def activate(self, i: int, X: Floats) -> Floats:
        """Activations of one network on columns (p, rows), all layers concatenated."""
        return forward(self.theta[i], self.widths, X)

    def output(self, A: Floats) -> Floats:
        """Last layer of activations, (d, rows)."""
        return A[-int(self.widths[-1]) :]

    def learn(self, i: int, g: Floats) -> None:
        """Take a step of Adam with one network."""
        # In new arrays, because a refused release restores the former ones.
        self.theta, self.first, self.second = self.theta.copy(), self.first.copy(), self.second.copy()
        self.steps = self.steps.copy()
        self.steps[i] += 1
        o = self.optimizer
        adam_step(
            self.theta[i], g, self.first[i], self.second[i], int(self.steps[i]), o.learning_rate, o.decay
        )

    def back(self, i: int, A: Floats, D: Floats) -> Floats:
        """Differentiate a loss by the parameters of one network; see the kernel."""
        return gradient(self.theta[i], self.widths, A, D, False)[0]


def diverged(site: str, what: str, networks: Networks) -> EstimationError:
    """Return the error that training diverged."""
    return EstimationError(
        f"{site}: {what} are not finite with a learning rate of {networks.optimizer.learning_rate:g}",
        remedy=Remedy("fit(..., learning_rate=0.001)", "use a smaller one, as in {arguments}"),
    )


def evaluate(theta: Floats, widths: Sequence[int], X: Floats) -> Floats:
    """Return the outputs of some networks, (m, q), on rows (n, p): (n, m, d)."""
    if theta.ndim != 2 or theta.shape[1] != count_parameters(widths) or X.shape[1] != widths[0]:
        raise MessageError("a network of other widths than its parameters or columns")
    of = np.array(widths, dtype=np.int64)
    parts = [forward(one, of, X.T)[-widths[-1] :].T for one in theta]
    return np.ascontiguousarray(np.stack(parts, axis=1))
