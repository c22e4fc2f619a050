"""The released distribution of the columns: margins, Gaussian copula, and simulated releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import qmc

from fedstat.kernels.copula import code_latents, expand_steps, latent_correlations, nearest_correlation
from fedstat.models.copula.joint import draw_levels, fit_levels
from fedstat.models.copula.margins import Bins, Margin
from fedstat.models.copula_glm.design import WEIGHTS, ScoredDesign, ScoredResponse
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The released distribution of the columns: margins, a Gaussian copula, integration points.

POINTS = 2**15
"""Number of integration points; their error is below a tenth of a standard error of 10,000 entities."""
ROUNDS = 3
"""Number of rows in the simulation that corrects for the cut of long rows."""


def normal_points(d: int, seed: int, size: int = POINTS) -> Floats:
    """Sobol points (size, d), scrambled, as standard normals."""
    uniform = qmc.Sobol(d, seed=seed).random(size)
    return np.asarray(ndtri(np.clip(uniform, 1e-9, 1.0 - 1e-9)), dtype=np.float64)


@dataclass(frozen=True)
class ReleasedDistribution:
    """Margins and correlations of the copula (d, d), and standard normals (N, d) for integration.

    `levels` has the coefficients of the columns without an order, given the scores of the columns before, by
    column. Their latent normals are independent of all others, and choose the level.
    """

    design: ScoredDesign
    margins: tuple[Margin, ...]
    correlation: Floats
    points: Floats
    levels: Mapping[int, Floats] = field(default_factory=dict)

    @cached_property
    def tables(self) -> list[Floats]:
        """Scores by bin of every column of the design."""
        return self.design.tables(self.margins)

    @cached_property
    def latents(self) -> Floats:
        """Latent normals at the points."""
        return self.points @ np.linalg.cholesky(self.correlation).T

    @cached_property
    def codes(self) -> Ints:
        """Bins at the points."""
        return self.code(self.latents)

    @cached_property
    def scores(self) -> Floats:
        """Cut scores at the points: (N, p)."""
        return self.design.score(self.codes, self.tables)

    @cached_property
    def values(self) -> Floats:
        """Columns of the design at the points: (N, p)."""
        return self.design.values(self.latents, self.margins, self.codes)

    def code(self, latents: Floats) -> Ints:
        """Bins of latent normals."""
        codes = self._code_ordered(latents)
        for j, coefficients in self.levels.items():
            features = self._scores_before(codes, j)
            codes[:, j] = draw_levels(coefficients, features, np.asarray(ndtr(latents[:, j])))
        return codes

    def _scores_before(self, codes: Ints, column: int) -> Floats:
        """Return the scores of all columns before one without an order, (n, F): those with an order first."""
        sources, none = self.design.sources, np.ones((len(codes), 0))
        scores = (self.tables[i][codes[:, sources[i]]] for i in self.design.before(column))
        return np.column_stack([none, *scores])

    def _code_ordered(self, latents: Floats) -> Ints:
        """Bins of latent normals, as if all columns had an order."""
        bins = np.array([margin.bins.count for margin in self.margins], dtype=np.int64)
        thresholds = np.full((len(bins), bins.max() + 1), np.inf)
        for j, margin in enumerate(self.margins):
            thresholds[j, : bins[j] + 1] = margin.thresholds
        return code_latents(latents, thresholds, bins)

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        """Latent normals of n rows."""
        return rng.standard_normal((n, len(self.margins))) @ np.linalg.cholesky(self.correlation).T

    @classmethod
    def find(
        cls,
        design: ScoredDesign,
        margins: Sequence[Margin],
        products: Floats,
        points: Floats,
        noise: Floats | None = None,
        earlier: ReleasedDistribution | None = None,
    ) -> ReleasedDistribution:
        """Find the distribution with these mean products of cut scores, (p, p).

        Each pair of ordered data columns is estimated from the sum of the products of their scores, through
        Mehler's formula, as if no row had been cut; levels without an order by a multinomial logit
        (:func:`fedstat.models.copula.joint.fit_levels`), which allows for their `noise` (p, p). The effect of
        the cut on rows of this distribution is then subtracted. The logit starts from an `earlier`
        distribution.
        """
        ordered = np.array([not margin.bins.nominal for margin in margins])
        sums = np.equal.outer(np.arange(len(margins)), design.sources).astype(np.float64)
        tables = design.tables(margins)
        summed = [
            np.sum([t for t, source in zip(tables, design.sources, strict=True) if source == j], axis=0)
            for j in range(len(margins))
        ]
        coefficients = np.array([expand_steps(m.thresholds, t) for m, t in zip(margins, summed, strict=True)])
        means = np.array([m.probabilities @ t for m, t in zip(margins, summed, strict=True)])
        upper = np.triu_indices(len(margins), 1)
        of_ordered = (ordered[upper[0]] & ordered[upper[1]]).astype(np.float64)
        a, b = coefficients[upper[0]], coefficients[upper[1]]

        def solve(bias: Floats | float, before: ReleasedDistribution | None) -> ReleasedDistribution:
            found, uncut = np.eye(len(margins)), products - bias
            target = sums @ uncut @ sums.T - np.outer(means, means)
            r = latent_correlations(target[upper], a, b) * of_ordered
            found[upper], found.T[upper] = r, r
            made = cls(design, tuple(margins), nearest_correlation(found), points)
            return made if ordered.all() else made.with_levels(uncut, noise, before)

        distribution = solve(0.0, earlier)
        for _ in range(ROUNDS):
            full = np.column_stack(
                [t[distribution.codes[:, j]] for t, j in zip(tables, design.sources, strict=True)]
            )
            cut = distribution.scores
            distribution = solve((cut.T @ cut - full.T @ full) / len(full), distribution)
        return distribution

    def with_levels(
        self, products: Floats, noise: Floats | None, earlier: ReleasedDistribution | None
    ) -> ReleasedDistribution:
        """Add levels without an order, column by column, from mean products of full scores (p, p)."""
        found, codes = dict[int, Floats](), self._code_ordered(self.latents)
        uniforms = np.asarray(ndtr(self.latents))
        for j, margin in enumerate(self.margins):
            if not margin.bins.nominal:
                continue
            # The score of level m and above has two values: products with it give those with its indicator.
            own, before = self.design.of_source(j), self.design.before(j)
            low = np.array([self.tables[i][0] for i in own])
            rise = np.array([self.tables[i][-1] for i in own]) - low
            rise = np.where(rise > 0.0, rise, np.inf)
            features = self._scores_before(codes, j)
            mean = features.mean(axis=0)
            above = (products[np.ix_(own, before)] - np.outer(low, mean)) / rise[:, None]
            above = np.vstack([mean, above, np.zeros_like(mean)])
            each = np.zeros(len(before))
            if noise is not None:
                each = np.sqrt(2.0 * ((noise[np.ix_(own, before)] / rise[:, None]) ** 2).mean(axis=0))
            start = None if earlier is None else earlier.levels.get(j)
            found[j] = fit_levels(features, margin.probabilities, above[:-1] - above[1:], each, start)
            codes[:, j] = draw_levels(found[j], features, uniforms[:, j])
        return replace(self, levels=found)


# ----------------------------------------------------------------------------------------------------
# A release in the estimator's form, and the same for simulated rows.


@dataclass(frozen=True, slots=True, eq=False)
class ReleaseNoise:
    """Standard deviations of the noise on the counts of each column and the response, and on mean products.

    `counts` (d,) are for the columns, `response` for the response, `products` (p + 1, p + 1) for means over n
    rows, with the response last.
    """

    counts: Floats
    response: float
    products: Floats

    def scaled(self, share: float) -> ReleaseNoise:
        """Return the noise for another number of rows with the same ratio to their sampling error.

        `share` is that number over n. Noise on counts is multiplied by `share` ** .5, noise on means divided
        by it.
        """
        root = float(np.sqrt(share))
        return ReleaseNoise(self.counts * root, self.response * root, self.products / root)


@dataclass(frozen=True, slots=True, eq=False)
class MomentRelease:
    """Margins of the columns (d,), the response with its margin, mean products of scores (p + 1, p + 1).

    The response is last; its score is divided by its weight. `noise` (p, p) has the deviations of the noise
    on mean products of scores of columns, None without noise.
    """

    margins: tuple[Margin, ...]
    response: ScoredResponse
    products: Floats
    noise: Floats | None = None


def release_rows(
    design: ScoredDesign,
    family: str,
    response: Bins,
    codes: Ints,
    y: Ints,
    noise: ReleaseNoise | None = None,
    rng: np.random.Generator | None = None,
) -> MomentRelease:
    """Release rows of codes (n, d) and the bins y (n,) of their responses, with simulated noise or none."""
    n = len(codes)

    def margin(bins: Bins, code: Ints, sd: float) -> Margin:
        counts = bins.tally(code).astype(np.float64)
        noisy = counts if rng is None else counts + sd * rng.standard_normal(len(counts))
        return Margin.of_counts(bins, noisy, n, sd)

    sds = np.zeros(len(design.bins)) if noise is None else noise.counts
    margins = tuple(margin(b, code, sd) for b, code, sd in zip(design.bins, codes.T, sds, strict=True))
    scored = ScoredResponse(family, margin(response, y, 0.0 if noise is None else noise.response))
    V = np.column_stack([design.score(codes, design.tables(margins)), WEIGHTS[family] * scored.table[y]])
    G = V.T @ V / n
    if noise is not None and rng is not None:
        G = np.triu(G, 1) + np.triu(rng.standard_normal(G.shape) * noise.products, 1)
        G = G + G.T
    of_columns = None if noise is None else noise.products[:-1, :-1]
    return MomentRelease(margins, scored, unweighted(G, family), of_columns)


def unweighted(G: Floats, family: str) -> Floats:
    """Divide the products with the response, which is last, by its weight."""
    weight = np.ones(len(G))
    weight[-1] = WEIGHTS[family]
    return G / np.outer(weight, weight)
