"""Quasi-Newton steps with parameters that stay distributed over the sites, and Anderson acceleration.

The two-loop recursion of L-BFGS (Nocedal 1980, doi:10.1090/S0025-5718-1980-0572855-7) forms its direction
from the steps s_j, the changes of the score y_j and the score g. It needs only their inner products. Sites
therefore send the products of their own parts, which add up, and receive the coefficients of the combination
(Chen, Wang and Zhou 2014, "Large-scale L-BFGS using MapReduce", NeurIPS 27, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from fedstat.typing import Floats

Scaling: TypeAlias = Callable[[Floats], Floats]
"""Multiply scores, (r, d), by H, a positive definite inverse of the site's own information."""

MIN_CURVATURE = 1e-12


@dataclass(slots=True)
class QuasiNewtonMemory:
    """One site's part of the latest steps and of the resulting changes of the score.

    `size` steps are kept; `point` and `score` (d,) are the accepted point and its score, empty before the
    first step.
    """

    size: int
    point: Floats = field(default_factory=lambda: np.empty(0))
    score: Floats = field(default_factory=lambda: np.empty(0))
    steps: list[Floats] = field(default_factory=list)
    changes: list[Floats] = field(default_factory=list)

    def take(self, point: Floats, score: Floats) -> None:
        """Record an accepted point and the score of the site's own parameters there."""
        if len(self.score):
            self.steps.append(point - self.point)
            self.changes.append(self.score - score)
        del self.steps[: -self.size], self.changes[: -self.size]
        self.point, self.score = point, score

    def products(self, scaling: Scaling) -> tuple[Floats, Floats]:
        """Products S'[Y, g], (q, q + 1), and [Y, g]'H[Y, g], (q + 1, q + 1)."""
        Y = np.array([*self.changes, self.score])
        S = np.array(self.steps).reshape(len(self.steps), len(self.score))
        return S @ Y.T, Y @ scaling(Y).T

    def direction(self, weights: DirectionWeights, scaling: Scaling) -> Floats:
        """Combine the site's part of the direction."""
        combined = weights.scores @ np.array([*self.changes, self.score])
        out: Floats = scaling(combined[None, :])[0]
        for weight, step in zip(weights.steps, self.steps, strict=True):
            out = out + weight * step
        return out


@dataclass(frozen=True, slots=True)
class DirectionWeights:
    """Coefficients of a direction: of the steps (q,), and of H times changes and score (q + 1,)."""

    steps: Floats
    scores: Floats


def quasi_newton(sy: Floats, yhy: Floats) -> tuple[DirectionWeights, float]:
    """Combine a direction of ascent from inner products, and the slope of the log-likelihood along it.

    `sy` (q, q + 1) and `yhy` (q + 1, q + 1) are sums over the sites of :meth:`QuasiNewtonMemory.products`.
    """
    q = len(sy)
    curvature, length = np.diag(sy[:, :q]), np.diag(yhy)[:q]
    # A step that hardly changes the score would make the direction infinite.
    use = [j for j in range(q) if curvature[j] > MIN_CURVATURE * length[j] > 0.0]
    scores, steps, alpha = np.zeros(q + 1), np.zeros(q), np.zeros(q)
    scores[q] = 1.0
    for j in reversed(use):
        alpha[j] = sy[j] @ scores / curvature[j]
        scores[j] -= alpha[j]
    if use:
        # The first approximation H is scaled by s'y / y'Hy of the latest step, so that a length of one is
        # usual.
        scores *= curvature[use[-1]] / length[use[-1]]
    for j in use:
        steps[j] += alpha[j] - (yhy[j] @ scores + sy[:, j] @ steps) / curvature[j]
    return DirectionWeights(steps, scores), float(yhy[q] @ scores + sy[:, q] @ steps)


# ----------------------------------------------------------------------------------------------------
# Anderson acceleration of a fixed-point iteration, from inner products alone.


LARGEST_WEIGHT = 1e4


def one_hot(index: int, size: int) -> Floats:
    """Weights that select one point unchanged."""
    weights = np.zeros(size)
    weights[index] = 1.0
    return weights


def anderson_weights(gram: Floats) -> Floats:
    """Affine weights (q,) that make the mixed move shortest (Anderson 1965; Walker and Ni 2011, (2.2)).

    From the inner products (q, q) of the moves, newest last. The weights sum to one; old points are left out
    while the weights are too large to be reliable.
    """
    size = len(gram)
    for first in range(size):
        part = gram[first:, first:]
        scale = 1.0 / np.sqrt(np.diag(part))
        R = part * np.outer(scale, scale)
        ridge = 1e-14 * np.eye(len(R))
        # The shortest affine combination solves G w = 1, up to its sum; nearly equal moves make G singular.
        weights = np.linalg.lstsq(R + ridge, scale, rcond=1e-14)[0] * scale
        total = weights.sum()
        if np.isfinite(total) and total > 0.0:
            weights /= total
            if np.abs(weights).sum() < LARGEST_WEIGHT:
                return np.concatenate([np.zeros(first), weights])
    return one_hot(size - 1, size)
