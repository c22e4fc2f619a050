"""The response of a generalised linear model as it is scored: its mean score, and draws of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import expit, gammaln, ndtr

from fedstat.models.copula.margins import Bins, Margin
from fedstat.models.copula_glm.moments.columns import midpoints
from fedstat.typing import Floats, Ints

WEIGHTS = {"Binomial": 1.7, "Gaussian": 1.0, "Poisson": 1.0}
LARGEST = {"Binomial": 1.0, "Gaussian": 3.0, "Poisson": 3.0}
"""Weight of the response in a row of scores, and the largest score before it is weighted, by family."""
LARGEST_PREDICTOR = 30.0
KNOTS = 16
"""Of a spline through mean scores, within a standard deviation: errors are below 1e-6."""


class MeanScore(NamedTuple):
    """Mean score (n,), its derivative by the linear predictor, and by the logarithm of the scale."""

    mean: Floats
    slope: Floats
    by_scale: Floats


@dataclass(frozen=True)
class ScoredResponse:
    """Response of a family, "Binomial", "Gaussian" or "Poisson", with its released margin.

    Its score is its value, standardised by the margin and cut; of a binary one -1 or 1.
    """

    family: str
    margin: Margin

    @property
    def bins(self) -> Bins:
        """Bins of the response."""
        return self.margin.bins

    @property
    def has_scale(self) -> bool:
        """Whether there is a variance to estimate."""
        return self.family == "Gaussian"

    @cached_property
    def center(self) -> float:
        """Mean of the margin."""
        return float(self.margin.probabilities @ midpoints(self.bins))

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the margin."""
        squares = self.margin.probabilities @ (midpoints(self.bins) - self.center) ** 2
        return float(np.sqrt(max(float(squares), 1e-12)))

    @cached_property
    def table(self) -> Floats:
        """Score of every bin, before it is weighted: (k,)."""
        if self.family == "Binomial":
            return np.array([-1.0, 1.0])
        largest = LARGEST[self.family]
        scores: Floats = np.clip((midpoints(self.bins) - self.center) / self.spread, -largest, largest)
        return scores

    @property
    def mean_score(self) -> float:
        """Mean score under the margin."""
        return float(self.margin.probabilities @ self.table)

    @property
    def mean_square(self) -> float:
        """Mean squared score under the margin."""
        return float(self.margin.probabilities @ self.table**2)

    def start(self) -> tuple[float, float]:
        """Linear predictor at the mean response, and the scale there."""
        p = self.margin.probabilities
        if self.family == "Binomial":
            rate = float(np.clip(p[1], 1e-6, 1.0 - 1e-6))
            return float(np.log(rate / (1.0 - rate))), 1.0
        if self.family == "Poisson":
            return float(np.log(max(self.center, 1e-3))), 1.0
        return self.center, self.spread

    def mean(self, eta: Floats, scale: float, power: int = 1) -> MeanScore:
        """Mean score, or squared score, at linear predictors."""
        table = self.table**power
        if self.family == "Binomial":
            mu = expit(eta)
            rise = table[1] - table[0]
            return MeanScore(table[0] + rise * mu, rise * mu * (1.0 - mu), np.zeros_like(eta))
        if self.family == "Poisson":
            return self._mean_counts(eta, table)
        return self._mean_normal(eta, scale, table[:, None])[0]

    def both_means(self, eta: Floats, scale: float) -> list[MeanScore]:
        """Mean score and mean squared score of a normal response at linear predictors."""
        return self._mean_normal(eta, scale, np.column_stack([self.table, self.table**2]))

    def _mean_normal(self, eta: Floats, scale: float, tables: Floats) -> list[MeanScore]:
        """Mean scores by several tables, (k, q): smooth functions of one number, which a spline takes far."""
        low, high = float(eta.min()) - 0.1 * scale, float(eta.max()) + 0.1 * scale
        knots = (high - low) / scale * KNOTS + 4.0
        if not knots < len(eta) / 2:
            return self._integrals(eta, scale, tables)
        at = np.linspace(low, high, int(knots))
        exact = self._integrals(at, scale, tables)
        return [MeanScore(*CubicSpline(at, np.column_stack(one))(eta).T) for one in exact]

    def _integrals(self, eta: Floats, scale: float, tables: Floats) -> list[MeanScore]:
        # By parts: only the edges at which a score changes matter.
        rise = np.diff(tables, axis=0)
        here = (rise != 0.0).any(axis=1)
        edges, rise = self.bins.edges[1:-1][here], rise[here]
        z = (edges - eta[:, None]) / scale
        density = np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi)
        mean, slope = tables[-1] - ndtr(z) @ rise, density @ rise / scale
        by_scale = (density * z) @ rise
        return [MeanScore(*parts) for parts in zip(mean.T, slope.T, by_scale.T, strict=True)]

    def _mean_counts(self, eta: Floats, table: Floats) -> MeanScore:
        mu = np.exp(np.minimum(eta, LARGEST_PREDICTOR))
        scores = table[self._bins_of_counts]
        # Scores are cut: beyond some count they are all the same, however far bounds go.
        scores = scores[: 2 + int(np.flatnonzero(scores != scores[-1]).max(initial=-1))]
        counts = np.arange(len(scores))
        density = np.exp(np.outer(np.log(mu), counts) - mu[:, None] - gammaln(counts + 1.0))
        # What is left beyond the last count is scored as that is.
        mean = scores[-1] + density @ (scores - scores[-1])
        slope = mu * (density[:, :-1] @ np.diff(scores))
        return MeanScore(mean, slope, np.zeros_like(eta))

    @cached_property
    def _bins_of_counts(self) -> Ints:
        """Bin of every count up to the end of the bounds."""
        last = max(self.bins.levels) if self.bins.levels else self.bins.range[1]
        return self.code(np.arange(int(np.ceil(float(last))) + 1.0))

    def code(self, y: Floats) -> Ints:
        """Bin of every response: one beyond the bounds counts at their end."""
        edges = np.array(self.bins.levels, dtype=np.float64) if self.bins.levels else self.bins.edges[:-1]
        return np.clip(np.searchsorted(edges, y, side="right") - 1, 0, self.bins.count - 1)

    def weights(self, eta: Floats, scale: float) -> Floats:
        """Information of one entity about its linear predictor."""
        if self.family == "Binomial":
            mu = expit(eta)
            return np.asarray(mu * (1.0 - mu))
        if self.family == "Poisson":
            return np.exp(np.minimum(eta, LARGEST_PREDICTOR))
        return np.full(len(eta), scale**-2.0)

    def draw(self, eta: Floats, scale: float, rng: np.random.Generator) -> Ints:
        """Draw responses at linear predictors, and return their bins."""
        if self.family == "Binomial":
            return np.asarray(rng.uniform(size=len(eta)) < expit(eta), dtype=np.int64)
        if self.family == "Poisson":
            return self.code(rng.poisson(np.exp(np.minimum(eta, LARGEST_PREDICTOR))).astype(np.float64))
        return self.code(eta + scale * rng.standard_normal(len(eta)))
