"""What sites are asked for in a step on the score, what it costs each, and what all must be told alike."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import numpy as np

from fedstat.errors import MessageError
from fedstat.models.copula_glm.moments.asked import radius_of
from fedstat.models.copula_glm.moments.columns import ScoredColumn
from fedstat.models.copula_glm.score.mean import CUBE, SCORE_PLACES, ScoreSensitivity, SharedMean
from fedstat.records import Least, to_json

PHASES: Mapping[int, tuple[str, ...]] = {1: ("score",), CUBE: ("power", "square", "score")}
"""Products of every two institutions, one after the other, by the degree of the shared mean."""
LENGTH_OF_DIGEST = 32


@dataclass(frozen=True)
class ScoreTerms:
    """What all institutions are told alike: who they are, how many columns each has, and the shared mean.

    `holder` has the response, and the column of ones.
    """

    sites: tuple[str, ...]
    widths: tuple[Annotated[int, Least(0)], ...]
    holder: str
    mean: SharedMean

    def check(self) -> None:
        """Require ranges of every institution, and columns of all but the holder."""
        named = len(set(self.sites)) == len(self.sites) == len(self.widths) and self.holder in self.sites
        few = [k for k, q in zip(self.sites, self.widths, strict=False) if not q and k != self.holder]
        if not named or few or set(self.mean.halves) != set(self.sites):
            raise MessageError("a step on the score: expected columns and ranges of every institution")

    @property
    def agreed(self) -> str:
        """Number of the products, by which none passes where two institutions were told otherwise."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:LENGTH_OF_DIGEST] + " "

    @cached_property
    def radii(self) -> dict[str, float]:
        """Squared lengths to which the scores of each are cut."""
        return {k: float(radius_of(q, "")) for k, q in zip(self.sites, self.widths, strict=True) if q}

    @property
    def length(self) -> float:
        """Return the largest length of a row of scores, with its one."""
        return math.sqrt(1.0 + sum(self.radii.values()))

    def width(self, site: str) -> int:
        """Return how many columns residuals are multiplied by at an institution."""
        return self.widths[self.sites.index(site)] + (site == self.holder)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where the sums of each stand among all."""
        ends = np.cumsum([0, *(self.width(site) for site in self.sites)]).tolist()
        return {site: slice(a, b) for site, (a, b) in zip(self.sites, pairwise(ends), strict=True)}

    @property
    def size(self) -> int:
        """How many sums there are."""
        return sum(self.widths) + 1

    @property
    def sum_places(self) -> int:
        """Binary places of the sums."""
        return self.mean.places + SCORE_PLACES

    @cached_property
    def sensitivity(self) -> ScoreSensitivity:
        """Squares of the sensitivities of the sums, in real numbers."""
        return ScoreSensitivity.of(self.mean, self.radii, self.holder)

    def squared(self, site: str) -> int:
        """Square of the sensitivity to a record's part at an institution, in units of the sums."""
        return _in_units(self.sensitivity.parts[site], self.sum_places)


@dataclass(frozen=True)
class ScoreAsked:
    """A step on the score, asked of `site`: coefficients of its columns, middle of its part, its noise."""

    terms: ScoreTerms
    site: str
    columns: tuple[ScoredColumn, ...]
    coefficients: tuple[float, ...]
    middle: float
    variance: Annotated[int, Least(1)]

    def check(self) -> None:
        """Require a number for every column."""
        terms = self.terms
        known = self.site in terms.sites and len(self.columns) == len(self.coefficients)
        if not known or terms.widths[terms.sites.index(self.site)] != len(self.columns):
            raise MessageError("a step on the score: expected a coefficient of every column")
        if not np.isfinite([self.middle, *self.coefficients]).all():
            raise MessageError("a step on the score: expected finite coefficients")

    @property
    def peers(self) -> list[str]:
        """The other institutions."""
        return [site for site in self.terms.sites if site != self.site]


@dataclass(frozen=True)
class ScoreNoise:
    """The noise of a step of a budget rho: each institution's own pays for its part of a record.

    Together they pay for the whole record against the coordinator, and for what several institutions have
    of it against all others.
    """

    terms: ScoreTerms
    rho: Fraction

    @cached_property
    def variances(self) -> dict[str, int]:
        """Variance of each institution's noise, in squared units of the sums."""
        found = self.terms.sensitivity
        more = max(Fraction(1), Fraction(found.whole) / sum(map(Fraction, found.parts.values())))
        return {k: math.ceil(more * self.terms.squared(k) / (2 * self.rho)) for k in self.terms.sites}

    @property
    def deviation(self) -> float:
        """Return the deviation of the noise on every sum."""
        return math.ldexp(math.sqrt(sum(self.variances.values())), -self.terms.sum_places)

    def cost(self, site: str) -> Fraction:
        """Return what an institution is charged, against all others together."""
        return Fraction(self.terms.squared(site), 2 * self.variances[site])

    @property
    def whole_cost(self) -> Fraction:
        """Return what a whole record costs against the coordinator, who knows nobody's noise."""
        whole = _in_units(self.terms.sensitivity.whole, self.terms.sum_places)
        return Fraction(whole, 2 * sum(self.variances.values()))


def _in_units(squared: float, places: int) -> int:
    scaled: Fraction = Fraction(squared) * 4**places
    return math.ceil(scaled)
