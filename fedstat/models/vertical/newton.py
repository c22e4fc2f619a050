"""Newton's method for a log-likelihood with exact derivatives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.inference.convergence import ConvergenceTest
from fedstat.typing import Floats

PointT = TypeVar("PointT")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One evaluation: log-likelihood, relative score norm, largest change, what was done, seconds."""

    iteration: int
    log_likelihood: float
    score: float
    change: float
    move: str
    seconds: float


class Derivatives(Protocol):
    """A log-likelihood at a point, and its score (d,)."""

    @property
    def log_likelihood(self) -> float:
        """Value at the point."""

    @property
    def score(self) -> Floats:
        """Derivatives by the parameters."""


DerivativesT = TypeVar("DerivativesT", bound=Derivatives)


@dataclass(frozen=True, slots=True)
class NewtonFit(Generic[PointT]):
    """Result of a maximization: the last point, the path, and whether it is a maximum."""

    point: PointT
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str


@dataclass(frozen=True, slots=True)
class NewtonAscent(Generic[PointT, DerivativesT]):
    """A log-likelihood of `n` entities to be maximized.

    `evaluate` computes derivatives at a point, `direct` returns the kind of the next step and the full step,
    and `move` follows it as long as the log-likelihood increases: it returns the point, the largest change of
    a parameter, and whether the step was shortened.
    """

    n: float
    evaluate: Callable[[PointT], DerivativesT]
    direct: Callable[[PointT, DerivativesT], tuple[str, Floats]]
    move: Callable[[PointT, DerivativesT, Floats], tuple[PointT, float, bool]]

    def ascend(self, point: PointT, tol: float, maxiter: int) -> NewtonFit[PointT]:
        """Maximize; :class:`~fedstat.inference.convergence.ConvergenceTest` ends the iteration."""
        trace: list[TraceRow] = []
        began, move, change = time.perf_counter(), "start", np.inf
        test = ConvergenceTest(self.n, tol)
        for iteration in range(1, maxiter + 1):
            at = self.evaluate(point)
            move_next, direction = self.direct(point, at)
            decrement = float(np.sqrt(np.maximum(at.score @ direction, 0.0)))
            seconds, score = time.perf_counter() - began, float(decrement / np.sqrt(self.n))
            trace.append(TraceRow(iteration, at.log_likelihood, score, float(change), move, seconds))
            if test.reached(at.log_likelihood, decrement, at_rest=move_next == "newton"):
                if move_next == "newton":
                    return NewtonFit(point, tuple(trace), True, test.reason)
                return NewtonFit(
                    point, tuple(trace), False, "a stationary point that is not a maximum was reached"
                )
            point, change, shortened = self.move(point, at, direction)
            move = "shortened" if shortened else move_next
        return NewtonFit(point, tuple(trace), False, "the largest number of iterations was reached")


def solve_information(information: Floats, right: Floats) -> Floats:
    """Solve with an information matrix (d, d) for (d,) or (d, m); a LinAlgError if it is not positive."""
    # Scaled to a unit diagonal: coefficients and logarithms of variances differ by orders of magnitude, and
    # whether a factorization exists must not depend on units.
    root = np.sqrt(np.maximum(np.abs(np.diag(information)), np.finfo(float).tiny))
    factor = cho_factor(information / np.outer(root, root), lower=True, overwrite_a=True)
    # Transposed, so that one and several right-hand sides are scaled alike.
    return np.asarray((cho_solve(factor, (right.T / root).T).T / root).T)
