"""The coordinator's own parameters (a, s2), and the points of them that may be mixed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fedstat.typing import Floats

VANISHING = 1e-12


@dataclass(frozen=True, slots=True)
class EvaluatedResponse:
    """An evaluated point: a, s2, and by pattern v and the sums of z and z^2."""

    a: float
    s2: float
    v: Floats
    z1: Floats
    z2: Floats


@dataclass(frozen=True, slots=True)
class ResponseMove:
    """One M-step of (a, s2): from where, to where, and the full move of the centred intercept."""

    at: Floats
    image: Floats
    a_move: float


@dataclass(frozen=True, slots=True)
class ResponseScore:
    """Likelihood of the response at a point, the squared score norm, and the largest relative change."""

    log_likelihood: float
    score2: float
    change: float


@dataclass(slots=True)
class ResponsePoints:
    """Points (a, s2), aligned with those of the institutions.

    `counts` (G,) are the entities of each pattern, `memory` the earlier points that may be mixed; mean and
    variance of the response, `moments` (2,), are the first point.
    """

    counts: Floats
    memory: int
    moments: Floats
    points: list[Floats] = field(default_factory=list)
    evaluated: list[ResponseMove | None] = field(default_factory=list)
    base: ResponseMove | None = None
    current: Floats | None = None
    reference: float = 0.0

    def __post_init__(self) -> None:
        self.points, self.evaluated = [self.moments], [None]

    def mixed(self, weights: Floats) -> tuple[float, float]:
        """Mix the points to one (a, s2)."""
        a, s2 = np.tensordot(weights, self.points, 1)
        return float(a), float(s2)

    def vanishing(self, s2: float, v: Floats) -> bool:
        """Whether a variance is zero or below."""
        return bool(s2 <= VANISHING * self.moments[1] or (v <= 0.0).any())

    def score(self, at: EvaluatedResponse) -> ResponseScore:
        """Evaluate the likelihood and its score at (a, s2)."""
        n, a, s2 = self.counts.sum(), at.a, at.s2
        # v z^2 is r^2 / v, r the residual.
        log_likelihood = -0.5 * np.sum(self.counts * np.log(2.0 * np.pi * at.v) + at.v * at.z2)
        a_move, s2_move = self._moves(at)
        score2 = n * (a_move**2 / s2 + 0.5 * (s2_move / s2) ** 2)
        change = np.inf
        if self.current is not None:
            change = max(abs(a - self.current[0]) / np.sqrt(s2), abs(s2 - self.current[1]) / s2)
        self.current = np.array([a, s2])
        return ResponseScore(float(log_likelihood), float(score2), float(change))

    def _moves(self, at: EvaluatedResponse) -> tuple[float, float]:
        n, s2 = self.counts.sum(), at.s2
        # Expected squared errors: (s2 z)^2 of what is known of each, and s2 (v - s2) / v of what is not.
        new = s2 * s2 * at.z2.sum() / n + np.sum(self.counts * (at.v - s2) * s2 / at.v) / n
        return float(s2 * at.z1.sum() / n), float(new - s2)

    def take(self, evaluated: EvaluatedResponse, omega: float, recentring: float) -> Floats:
        """Enter the M-step of an evaluated point, and return the products of its move with the others.

        `omega` is the length of the step of the regression; `recentring` how far the centred intercept goes
        along with the means of the institutions' blocks.
        """
        a_move, s2_move = self._moves(evaluated)
        at = np.array([evaluated.a, evaluated.s2])
        image = at + np.array([omega * a_move + recentring, s2_move])
        self.points.append(image)
        self.evaluated.append(ResponseMove(at, image, a_move))
        if self.evaluated[0] is None or len(self.points) > self.memory + 1:
            del self.points[0], self.evaluated[0]
        self.reference = self.reference or evaluated.s2
        n = self.counts.sum()
        # The complete-data information of (a, s2), held fixed as that of the institutions is.
        metric = np.array([n / self.reference, 0.5 * n / self.reference**2])
        moves = [e.image - e.at for e in self.evaluated if e is not None]
        return np.array([np.sum(moves[-1] * metric * move) for move in moves])

    def shorten(self, point: int, omega: float, recentring: float) -> None:
        """Go back to an evaluated point (-1: that of the last call), and leave it by a shorter step."""
        self.base = base = self.evaluated[point] if point >= 0 else self.base
        assert base is not None
        self.points = [np.array([base.at[0] + omega * base.a_move + recentring, base.image[1]])]
        self.evaluated, self.current, self.reference = [None], base.at, 0.0
