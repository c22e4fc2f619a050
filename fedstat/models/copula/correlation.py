"""Correlation matrix of the copula from noisy products, with and without missing blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedstat.kernels.copula import code_latents, latent_correlations, nearest_correlation, scores_of_codes
from fedstat.models.copula.margins import Margin, tables_of
from fedstat.models.copula.request import GramPlan, NoisePlan
from fedstat.models.vertical.joint_normal.likelihood import expected_moments
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# From a noisy Gram matrix of cut scores to the correlation matrix of the copula.

FEWEST_DRAWS, MOST_DRAWS, NUMBERS = 2**14, 2**17, 2**20
"""Largest number of rows in the simulation that corrects for the cut of long rows, and its limits."""
INVERSION_MAXITER = 25
INVERSION_TOL = 2e-4
"""Change of a correlation at which the iteration ends."""
INVERSION_SEED = 1


@dataclass(frozen=True, slots=True, eq=False)
class Inversion:
    """Correlation matrix (p, p) nearest to the pairwise correlations, and the distance between the two.

    `moved` (p,) is the root mean square change of each column's correlations.
    """

    correlation: Floats
    moved: Floats


def count_draws(p: int) -> int:
    """Return the number of simulated rows of p columns."""
    return int(np.clip(NUMBERS // p, FEWEST_DRAWS, MOST_DRAWS))


def invert_products(
    products: Floats,
    margins: Sequence[Margin],
    blocks: Sequence[slice],
    squared_radii: Sequence[float],
    *,
    standardize: bool = False,
) -> Inversion:
    """Find the copula whose expected products of cut scores are the given ones.

    Parameters
    ----------
    products : (p, p) symmetric
        Mean products of scores; its diagonal is not used.
    margins : sequence of Margin, (p,)
    blocks, squared_radii
        Columns of each site, and the squared length to which its part of a row is cut.
    standardize : bool
        Use the correlations of the scores, with variances from the margins. This is for covariances with
        means and variances of their own.

    Notes
    -----
    Correlations are first estimated pair by pair through Mehler's formula, as if no row had been cut. The
    effect of the cut on rows drawn from this copula is then subtracted from the products, and these are
    inverted again.
    """
    p = len(margins)
    upper = np.triu_indices(p, 1)
    coefficients = np.array([margin.coefficients for margin in margins])
    thresholds, scores, bins = tables_of(margins)
    n = count_draws(p)
    draws = np.random.default_rng(INVERSION_SEED).standard_normal((n, p))

    def solve(expected: Floats) -> Floats:
        found = np.eye(p)
        r = latent_correlations(expected[upper], coefficients[upper[0]], coefficients[upper[1]])
        found[upper], found.T[upper] = r, r
        return found

    deviations = np.sqrt([margin.variance for margin in margins])

    def in_units(found: Floats) -> Floats:
        own = np.sqrt(np.maximum(np.diag(found), 1e-12))
        scaled: Floats = found * np.outer(deviations / own, deviations / own)
        return scaled if standardize else found

    products = in_units(products)
    pairs = solve(products)
    correlation = nearest_correlation(pairs)
    for _ in range(INVERSION_MAXITER):
        codes = code_latents(draws @ np.linalg.cholesky(correlation).T, thresholds, bins)
        full = scores_of_codes(codes, scores)
        cut = np.hstack(
            [_cut(full[:, block], radius) for block, radius in zip(blocks, squared_radii, strict=True)]
        )
        pairs = solve(products - in_units(cut.T @ cut / n) + in_units(full.T @ full / n))
        earlier, correlation = correlation, nearest_correlation(pairs)
        if np.abs(correlation - earlier).max() < INVERSION_TOL:
            break
    moved = np.sqrt(((pairs - correlation) ** 2).sum(axis=0) / max(p - 1, 1))
    return Inversion(correlation, moved)


def _cut(rows: Floats, squared_radius: float) -> Floats:
    squares = np.einsum("ij,ij->i", rows, rows)
    factors: Floats = np.sqrt(np.minimum(1.0, squared_radius / np.maximum(squares, 1e-300)))
    return rows * factors[:, None]


# ----------------------------------------------------------------------------------------------------
# Missing blocks: the missing patterns that are summed separately, and maximum likelihood over them.
#
# It is public which site has which record, so that patterns are merged and a method is chosen by counts
# alone. The sums of a pattern have the noise of a whole budget. A small pattern loses its rarest site and
# joins the pattern that remains.

Method = Literal["complete", "pairs", "em"]
Missing = Literal["auto", "pairs", "em"]
METHODS = {
    "complete": "No site lacks an entity.",
    "pairs": "Missing blocks: each correlation and margin uses the entities that its sites have. This is "
    "valid if missing records do not depend on values (missing completely at random). Otherwise "
    "there is a bias, .03 to .05 in simulations, at any epsilon; missing='em' adjusts for observed "
    "values.",
    "em": "Missing blocks: maximum likelihood over the missing patterns. Correlations and margins are those "
    "of all entities, and valid if missing records depend on observed values only (missing at random).",
}
"""Descriptions of the treatments of missing blocks."""
FEWEST = 40
"""Least number of entities of a pattern that is summed separately."""
TIMES_NOISE = 8.0
"""Least ratio of a pattern's entities to the noise on its sums."""
SMALL = 0.02
"""Noise on mean products of the rarest site, over all patterns, up to which EM has smaller errors."""
FLOOR = 1e-2
EM_MAXITER = 500
EM_TOL = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class SummedPatterns:
    """Missing patterns that are summed separately, and the group of each entity, -1 for none: (n,)."""

    method: Method
    plan: GramPlan
    group: Ints

    @property
    def counts(self) -> Ints:
        """Entities of every group."""
        return np.bincount(self.group[self.group >= 0], minlength=len(self.plan.patterns))

    def of_site(self, site: str, held: Bools) -> Ints:
        """Return the group of each entity at a site, -1 if it takes no part: (n,)."""
        member = np.array([site in pattern for pattern in self.plan.patterns])
        return np.where(held & (self.group >= 0) & member[self.group], self.group, -1)

    def behind(self, table: Bools) -> Ints:
        """Count the entities behind products of two sites: (K, K), from the sites' presence (n, K)."""
        sites = list(self.plan.noise.columns)
        held = np.column_stack([self.of_site(c, table[:, k]) >= 0 for k, c in enumerate(sites)])
        return held.T.astype(np.int64) @ held.astype(np.int64)

    def noise(self, table: Bools) -> Floats:
        """Return the deviation of one site's noise on products of two, over all groups: (K, K)."""
        sites = list(self.plan.noise.columns)
        variance = np.zeros((len(sites), len(sites)))
        for g, pattern in enumerate(self.plan.patterns):
            member = np.array([site in pattern for site in sites])
            variance += np.outer(member, member) * self.plan.deviation(g, 1) ** 2
        return np.sqrt(variance)


def choose_groups(noise: NoisePlan, table: Bools, missing: Missing) -> SummedPatterns:
    """Choose the treatment of missing blocks from the sites' presence: (n, K)."""
    sites = list(noise.columns)
    used = table.any(axis=1)
    by_pairs = SummedPatterns("pairs", GramPlan.of_all(noise), np.where(used, 0, -1))
    if table[used].all():
        return SummedPatterns("complete", by_pairs.plan, by_pairs.group)
    if missing == "pairs":
        return by_pairs
    by_pattern = merge_patterns(noise, sites, table)
    if missing == "em" or (by_pattern.behind(table).min() and _rarest_noise(by_pattern, table) < SMALL):
        return by_pattern
    return by_pairs


def describe_choice(noise: NoisePlan, table: Bools) -> str:
    """State the reason for the choice of a method, and what the method omits, from presence (n, K)."""
    by_pattern = merge_patterns(noise, list(noise.columns), table)
    found = f"noise of {_rarest_noise(by_pattern, table):.2g} on mean products of the rarest site"
    if not by_pattern.behind(table).min():
        found = "two sites without a common entity, after small patterns are merged"
    return (
        f"missing='auto' depends on the noise alone, which is public: maximum likelihood would have {found} "
        f"(used below {SMALL}). It cannot know why records are missing. If this depends on observed values, "
        "pairs have the bias above, and missing='em' is worth up to as much noise."
    )


def _rarest_noise(groups: SummedPatterns, table: Bools) -> float:
    """Return the noise on the mean products of the site with the fewest entities, over all its patterns."""
    each = np.diag(groups.behind(table))
    k = int(each.argmin())
    return float(groups.noise(table)[k, k] / each[k]) if each[k] else math.inf


def merge_patterns(noise: NoisePlan, sites: Sequence[str], table: Bools) -> SummedPatterns:
    """Let small patterns lose their rarest site until each is large compared with the noise on its sums."""
    patterns, code = np.unique(table, axis=0, return_inverse=True)
    code = code.ravel()
    counts = dict(zip(map(tuple, patterns.tolist()), np.bincount(code).tolist(), strict=True))
    target = {pattern: pattern for pattern in counts}
    while True:
        live = [pattern for pattern in counts if any(pattern)]
        small = [one for one in live if sum(one) > 1 and counts[one] < _needed(noise, sites, one)]
        if not small:
            break
        one = min(small, key=lambda pattern: (counts[pattern], pattern))
        seen = [sum(n for p, n in counts.items() if p[k]) if one[k] else math.inf for k in range(len(sites))]
        rarest = int(np.argmin(seen))
        left = tuple(held and k != rarest for k, held in enumerate(one))
        counts[left] = counts.get(left, 0) + counts.pop(one)
        target = {old: left if new == one else new for old, new in target.items()} | {left: left}
    kept = [pattern for pattern in counts if any(pattern) and counts[pattern] >= FEWEST]
    number = np.array(
        [kept.index(target[p]) if target[p] in kept else -1 for p in map(tuple, patterns.tolist())]
    )
    names = tuple(tuple(c for c, held in zip(sites, one, strict=True) if held) for one in kept)
    return SummedPatterns("em", GramPlan(noise, names, moments=True), number[code])


def _needed(noise: NoisePlan, sites: Sequence[str], pattern: Sequence[bool]) -> float:
    names = tuple(c for c, held in zip(sites, pattern, strict=True) if held)
    return max(FEWEST, TIMES_NOISE * GramPlan(noise, (names,), moments=True).deviation(0, 1))


# ---- maximum likelihood ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPattern:
    """Moments of one pattern's scores: entities, observed columns (q,), means (q,), second moments (q, q)."""

    n: int
    observed: Ints
    mean: Floats
    second: Floats

    @classmethod
    def of_noisy(cls, n: int, observed: Ints, mean: Floats, second: Floats) -> ScoredPattern:
        """Make the covariance of noisy moments positive definite."""
        values, vectors = np.linalg.eigh(second - np.outer(mean, mean))
        covariance = (vectors * np.maximum(values, FLOOR)) @ vectors.T
        return cls(n, observed, mean, covariance + np.outer(mean, mean))


def fit_normal(moments: Sequence[ScoredPattern], p: int) -> tuple[Floats, Floats]:
    """Return mean (p,) and covariance (p, p) of a normal distribution by EM from moments by pattern.

    Valid if missingness depends on observed values only (missing at random).
    """
    n = np.array([one.n for one in moments], dtype=np.float64)
    seen, grams = np.zeros((len(n), p), dtype=bool), np.zeros((len(n), p + 1, p + 1))
    for g, one in enumerate(moments):
        seen[g, one.observed], grams[g, 0, 0] = True, one.n
        grams[g, 0, 1 + one.observed] = grams[g, 1 + one.observed, 0] = one.n * one.mean
        grams[g][np.ix_(1 + one.observed, 1 + one.observed)] = one.n * one.second
    mean, covariance = np.zeros(p), np.eye(p)
    for _ in range(EM_MAXITER):
        new, second = expected_moments(seen, n, grams, mean, covariance)
        values, vectors = np.linalg.eigh(second)
        found = (vectors * np.maximum(values, FLOOR)) @ vectors.T
        change = max(np.abs(new - mean).max(), np.abs(found - covariance).max())
        mean, covariance = new, found
        if change < EM_TOL:
            break
    return mean, covariance
