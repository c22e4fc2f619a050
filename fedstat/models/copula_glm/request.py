"""Requests for moments and for the score step, and their privacy cost."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np

from fedstat.codec import Minimum, to_json
from fedstat.errors import DescriptionError, MessageError
from fedstat.models.copula.margins import Margin
from fedstat.models.copula.request import ALL, PLACES, Blocks, GramRequest, NoisePlan, clip_scores
from fedstat.models.copula_glm.design import LARGEST, SQUARED_RADIUS, WEIGHTS, ScoredColumn, ScoredResponse
from fedstat.models.copula_glm.score import CUBE, SCORE_PLACES, ScoreSensitivity, SharedMean
from fedstat.typing import Ints

# ----------------------------------------------------------------------------------------------------
# Requests to sites: scores of design columns and of the response, and their cost.

FamilyName = Literal["Binomial", "Gaussian", "Poisson"]
SLACK = Fraction(1, 2**20)
"""Factor by which the weighted response may exceed its largest score, since it is a double."""


def radius_of(columns: int, family: str) -> Fraction:
    """Return R^2 of this number of column scores, and of the response if its family is given."""
    squared = SQUARED_RADIUS * columns
    if family:
        squared += (Fraction(WEIGHTS[family]) * Fraction(LARGEST[family])) ** 2 + SLACK
    return squared


def moment_blocks(columns: int, family: str) -> Blocks:
    """Return R^2 and numbers of scores of this number of columns, and of the response."""
    return [(radius_of(columns, ""), columns), (radius_of(0, family), 1)]


@dataclass(frozen=True, slots=True)
class MomentsRequest(GramRequest):
    """Sums of products of scores of design columns, and of the response at its `holder`, the last score.

    The columns are this site's. `source` has the positions of its data columns, of which the response is the
    last. `site` receives the request.
    """

    site: str
    holder: str
    response: FamilyName
    columns: tuple[ScoredColumn, ...] = field(default=())

    def check(self) -> None:
        """Require valid columns."""
        super(MomentsRequest, self).check()
        if not self.columns and self.site != self.holder:
            raise MessageError("products: expected columns of the design")

    @property
    def agreed(self) -> str:
        """The site with the response in its row, and the family, which determines its radius."""
        return to_json(["values", self.holder, self.response])

    def check_at(self, site: str) -> None:
        """Require that the request is meant for this site: this decides whether it holds the response."""
        if self.site != site:
            raise DescriptionError(f"{site}: the request is for products of '{self.site}'")

    def width(self, columns: int) -> int:
        """Return the number of scores: of design columns, and of the response at its holder."""
        return len(self.columns) + (self.site == self.holder)

    def radius(self, columns: int) -> Fraction:
        """Return R^2 of this site's scores."""
        return self._radius_at(self.site, columns)

    def blocks(self, columns: int) -> Blocks:
        """Return the parts of a row that are cut together: the columns, and the response."""
        return moment_blocks(len(self.columns), self.response)

    def peer_radius(self, peer: str) -> Fraction:
        """Return R^2 of the scores of another site."""
        return self._radius_at(peer, self.peers[peer])

    def _radius_at(self, site: str, columns: int) -> Fraction:
        holds = site == self.holder
        return radius_of(columns - holds, self.response if holds else "")

    def score(self, margins: Sequence[Margin], codes: Ints, digits: int = PLACES) -> Ints:
        """Return the scores of rows by bins (n, d), -1 for none.

        Columns are cut together, the response is not.
        """
        q, holds = len(self.columns), self.site == self.holder
        if any(not 0 <= column.source < len(margins) - holds for column in self.columns):
            raise DescriptionError(f"{self.site}: a design column does not come from a requested column")
        parts = []
        if q:
            sources = [column.source for column in self.columns]
            tables = [column.scores(margins[column.source]) for column in self.columns]
            found = np.column_stack(
                [
                    np.where(c >= 0, t[np.maximum(c, 0)], 0.0)
                    for t, c in zip(tables, codes.T[sources], strict=True)
                ]
            )
            parts.append(clip_scores(found, radius_of(q, ""), digits))
        if holds:
            table = WEIGHTS[self.response] * ScoredResponse(self.response, margins[-1]).table
            if len(table) != margins[-1].bins.count:  # otherwise rows would decide whether this fails
                raise DescriptionError(f"{self.site}: expected two bins for a binary response")
            scores = np.where(codes[:, -1] >= 0, table[np.maximum(codes[:, -1], 0)], 0.0)
            parts.append(clip_scores(scores[:, None], radius_of(0, self.response), digits))
        return np.hstack(parts)


@dataclass(frozen=True)
class MomentPlan(NoisePlan):
    """The plan of a generalized linear model: scores of design columns, by site, and a response.

    The response is the last of the data columns requested from its holder. `of_step` is reserved for a later
    step on the score.
    """

    design: Mapping[str, tuple[ScoredColumn, ...]] = field(default_factory=dict)
    holder: str = ""
    response: FamilyName = "Binomial"
    of_step: Fraction = Fraction(0)

    def site_cost(self, site: str, unknown: Collection[str] = ()) -> Fraction:
        """Return the charge of a site, including the reserve for a step."""
        return super().site_cost(site, unknown) + self.of_step

    def coordinator_cost(self) -> Fraction:
        """Return the cost of a whole record against the coordinator, including the reserve for a step."""
        return super().coordinator_cost() + self.of_step

    def width(self, site: str) -> int:
        """Return the number of scores of a site."""
        return len(self.design[site]) + (site == self.holder)

    def radius(self, site: str) -> Fraction:
        """Return R^2 of the scores of a site."""
        return radius_of(len(self.design[site]), self.response if site == self.holder else "")

    def blocks(self) -> Blocks:
        """Return the parts of a row of all sites' columns that are cut together."""
        return moment_blocks(len(self.design[ALL]), self.response)

    def gram_requested(self, site: str, groups: int) -> MomentsRequest:
        """Return the request for a site's part of the Gram matrix."""
        return MomentsRequest(
            peers=self._peers(site),
            groups=groups,
            variance=self.gram_variance,
            site=site,
            holder=self.holder,
            response=self.response,
            columns=self.design[site],
        )


# ----------------------------------------------------------------------------------------------------
# Requests of a step on the score, the cost for each site, and the terms that all sites must share.

PHASES: Mapping[int, tuple[str, ...]] = {1: ("score",), CUBE: ("power", "square", "score")}
"""Products of every two sites, one after the other, by the degree of the shared mean."""
LENGTH_OF_DIGEST = 32


@dataclass(frozen=True)
class ScoreTerms:
    """Terms that all sites receive alike: the sites, their numbers of columns, and the shared mean.

    `holder` has the response, and the column of ones.
    """

    sites: tuple[str, ...]
    widths: tuple[Annotated[int, Minimum(0)], ...]
    holder: str
    mean: SharedMean

    def check(self) -> None:
        """Require ranges of every site, and columns of all sites but the holder."""
        named = len(set(self.sites)) == len(self.sites) == len(self.widths) and self.holder in self.sites
        few = [k for k, q in zip(self.sites, self.widths, strict=False) if not q and k != self.holder]
        if not named or few or set(self.mean.halves) != set(self.sites):
            raise MessageError("a step on the score: expected columns and ranges of every site")

    @property
    def agreed(self) -> str:
        """Digest of the products; no product passes if two sites received different terms."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:LENGTH_OF_DIGEST] + " "

    @cached_property
    def radii(self) -> dict[str, float]:
        """Squared lengths to which each site's scores are cut."""
        return {k: float(radius_of(q, "")) for k, q in zip(self.sites, self.widths, strict=True) if q}

    @property
    def length(self) -> float:
        """Return the largest length of a row of scores, with its one."""
        return math.sqrt(1.0 + sum(self.radii.values()))

    def width(self, site: str) -> int:
        """Return the number of columns that are multiplied with residuals at a site."""
        return self.widths[self.sites.index(site)] + (site == self.holder)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Positions of each site's sums among all sums."""
        ends = np.cumsum([0, *(self.width(site) for site in self.sites)]).tolist()
        return {site: slice(a, b) for site, (a, b) in zip(self.sites, pairwise(ends), strict=True)}

    @property
    def size(self) -> int:
        """Number of sums."""
        return sum(self.widths) + 1

    @property
    def sum_places(self) -> int:
        """Binary digits of the sums."""
        return self.mean.places + SCORE_PLACES

    @cached_property
    def sensitivity(self) -> ScoreSensitivity:
        """Squared sensitivities of the sums, in real numbers."""
        return ScoreSensitivity.of(self.mean, self.radii, self.holder)

    def squared(self, site: str) -> int:
        """Squared sensitivity to a record's part at a site, in units of the sums."""
        return _in_units(self.sensitivity.parts[site], self.sum_places)


@dataclass(frozen=True)
class ScoreStepRequest:
    """A step on the score for `site`: coefficients of its columns, middle of its part, its noise."""

    terms: ScoreTerms
    site: str
    columns: tuple[ScoredColumn, ...]
    coefficients: tuple[float, ...]
    middle: float
    variance: Annotated[int, Minimum(1)]

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
        """The other sites."""
        return [site for site in self.terms.sites if site != self.site]


@dataclass(frozen=True)
class ScoreNoise:
    """The noise of a step with budget rho: each site's own noise pays for its part of a record.

    Together the noise pays for the whole record against the coordinator, and for the parts at several sites
    against all others.
    """

    terms: ScoreTerms
    rho: Fraction

    @cached_property
    def variances(self) -> dict[str, int]:
        """Variance of each site's noise, in squared units of the sums."""
        found = self.terms.sensitivity
        more = max(Fraction(1), Fraction(found.complete) / sum(map(Fraction, found.parts.values())))
        return {k: math.ceil(more * self.terms.squared(k) / (2 * self.rho)) for k in self.terms.sites}

    @property
    def deviation(self) -> float:
        """Return the deviation of the noise on every sum."""
        return math.ldexp(math.sqrt(sum(self.variances.values())), -self.terms.sum_places)

    def cost(self, site: str) -> Fraction:
        """Return the charge of a site, against all others together."""
        return Fraction(self.terms.squared(site), 2 * self.variances[site])


def _in_units(squared: float, places: int) -> int:
    scaled: Fraction = Fraction(squared) * 4**places
    return math.ceil(scaled)
