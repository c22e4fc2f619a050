"""Steps of a site for private boosting, their requests, and their privacy cost."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, TypeAlias

import numpy as np
import pandas as pd

from fedstat.codec import Minimum, from_json, to_json
from fedstat.errors import DescriptionError, MessageError
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.privacy_budget import NoiseRequired
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, check_lengths
from fedstat.models.boost.private.public_curves import PublicPart
from fedstat.models.copula import steps as noisy_products
from fedstat.models.copula.request import PLACES, GramRequest, NoisePlan, squared_of_cross, squared_radius
from fedstat.models.copula.steps import (
    by_question,
    declare_columns,
    digest_of,
    fewest,
    noisy,
    read_question,
    recall_sums,
    sum_scores,
)
from fedstat.privacy.sensitivity import clip_rows, moments_sensitivity
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Requests to the sites, in serialized form, and their cost.

RESPONSE = Fraction(9, 4)
"""Squared length per column to which a response's part of a row is cut."""
WEIGHT = Fraction(49, 100)
"""Factor of the squares of a response, times the ratio of the numbers of other columns to its own.

The response's part of a row is then as long as that of all others, and its products have less noise.
"""


def response_weight(columns: int, response: int) -> float:
    """Return the multiplier of a response's scores, for this number of other columns at all sites."""
    return float(np.sqrt(float(WEIGHT * columns / response)))


def radius_with(columns: int, others: int, response: int) -> Fraction:
    """Return R^2 of a site with this number of columns of the right side, among `others` in all.

    The site has `response` columns of the response, 0 if another site holds it.
    """
    own = squared_radius(columns)
    return own + (RESPONSE * WEIGHT * others if response else 0)


@dataclass(frozen=True, slots=True)
class CurveGramRequest(GramRequest):
    """Sums of products of scores of this site's columns; the response of its `holder` is the last.

    `peers` has the columns of each other site, including those of the response; `response` is the number of
    these. `site` receives the request, and `parts` are its own.
    """

    site: str
    holder: str
    response: Annotated[int, Minimum(1)]
    parts: tuple[PublicPart, ...]

    def check(self) -> None:
        """Require columns, and a response at an existing site."""
        super(CurveGramRequest, self).check()
        if self.groups != 1 or not self.parts or self.holder not in (self.site, *self.peers):
            raise MessageError("products: expected columns, and the response at one of the sites")
        if (self.holder != self.site and self.peers[self.holder] < self.response) or self.own < 0:
            raise MessageError("products: expected all columns of the response at its holder")

    @property
    def holds(self) -> bool:
        """Whether the response is at this site."""
        return self.site == self.holder

    @property
    def width_here(self) -> int:
        """Number of scores of this site."""
        return sum(part.width for part in self.parts)

    @property
    def own(self) -> int:
        """Number of scores of the right side at this site."""
        return self.width_here - self.response * self.holds

    @property
    def others(self) -> int:
        """Number of columns of the right side at all sites."""
        return self.width_here + sum(self.peers.values()) - self.response

    @property
    def agreed(self) -> str:
        """Values that determine the radii."""
        return to_json(["curves", self.holder, self.response, self.others])

    @property
    def with_moments(self) -> bool:
        """Squares and sums of scores are requested as well."""
        return True

    def radius(self, columns: int) -> Fraction:
        """Return R^2 of this site's scores."""
        return radius_with(self.own, self.others, self.response * self.holds)

    def peer_radius(self, peer: str) -> Fraction:
        """Return R^2 of the scores of another site."""
        holds = peer == self.holder
        return radius_with(self.peers[peer] - self.response * holds, self.others, self.response * holds)

    def squared_here(self, unknown: Collection[str] = ()) -> Fraction:
        """Return the squared sensitivity of all sums to a record's part here: own products, and those across.

        Products with a site whose noise is `unknown` have that noise as well.
        """
        radius = self.radius(self.width_here)
        own = moments_sensitivity([radius]).sites[0] * Fraction(16**PLACES)
        return own + sum(
            (
                squared_of_cross(radius, self.peer_radius(peer)) / (2 if peer in unknown else 1)
                for peer in self.peers
            ),
            Fraction(0),
        )


@dataclass(frozen=True)
class CurvesPlan(NoisePlan):
    """The plan of a private boosting: scores of the public parts of every site; `columns` has no margins.

    The response is the last of the parts of its `holder`, with its own number of scores.
    """

    parts: Mapping[str, tuple[PublicPart, ...]] = field(default_factory=dict)
    holder: str = ""
    response: int = 1

    @property
    def others(self) -> int:
        """Number of columns of the right side at all sites."""
        return sum(map(self.width, self.parts)) - self.response

    def width(self, site: str) -> int:
        """Return the number of scores of a site."""
        return sum(part.width for part in self.parts[site])

    def radius(self, site: str) -> Fraction:
        """Return R^2 of the scores of a site."""
        response = self.response * (site == self.holder)
        return radius_with(self.width(site) - response, self.others, response)

    def gram_requested(self, site: str, groups: int) -> CurveGramRequest:
        """Return the request for a site's part of the sums."""
        return self._request(site, self.gram_variance)

    def _request(self, site: str, variance: int) -> CurveGramRequest:
        return CurveGramRequest(
            peers=self._peers(site),
            groups=1,
            variance=variance,
            site=site,
            holder=self.holder,
            response=self.response,
            parts=self.parts[site],
        )

    def _complete(self) -> Fraction:
        """Squared sensitivity to a whole record, in units of one share's noise."""
        return moments_sensitivity(list(map(self.radius, self.parts))).coordinator * Fraction(16**PLACES)

    def _charged(self, site: str, unknown: Collection[str] = ()) -> Fraction:
        return self._request(site, 1).squared_here(unknown)

    def margins_cost(self, site: str) -> Fraction:
        """Return 0: no margins are released."""
        return Fraction(0)

    @property
    def deviation(self) -> float:
        """Deviation of one share's noise on a sum of products."""
        return self.product_deviation(1)

    @property
    def weight(self) -> float:
        """Multiplier of the response's scores."""
        return response_weight(self.others, self.response)

    def is_response(self) -> Bools:
        """Which scores belong to the response: (q,) of bool."""
        place = self.places()[self.holder]
        out = np.zeros(sum(map(self.width, self.parts)), dtype=np.bool_)
        out[place.stop - self.response : place.stop] = True
        return out


# ----------------------------------------------------------------------------------------------------
# A site's replies for private boosting: complete rows, and its part of the noisy products.
#
# The products, their noise and its price are those of private synthesis (:mod:`fedstat.models.copula.steps`).
# The scores depend on public facts about curves and columns only, so that nothing is released before the
# products.

FAMILY = "boost_private"
COMPLETE = "rows that have all curves and columns"
ReadScores: TypeAlias = Callable[[SiteData, tuple[PublicPart, ...]], Floats]


@step(
    FAMILY,
    releases=noisy_products.COMPLETE,
    requests=ArrayDeclaration("control", "what is public of columns"),
    begins=True,
)
def find_complete(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Return which rows have all requested values, curves without a long gap: ``seen`` (n_rows,)."""
    parts = read_question(tuple[PublicPart, ...], text, f"{data.name}: the requested columns")
    declare_columns(data, state, [part.name for part in parts])
    seen = np.ones(data.table.n_rows, dtype=np.bool_)
    for part, column in zip(parts, _columns(data, parts), strict=True):
        seen &= ~part.missing(column)
    state.keep(COMPLETE, (parts, seen))
    return {"seen": seen}, ""


def _columns(data: SiteData, parts: tuple[PublicPart, ...]) -> list[pd.Series]:
    return [data.frame[part.name] for part in parts]


def read_scores(data: SiteData, parts: tuple[PublicPart, ...]) -> Floats:
    """Scores of every row, (n_rows, q)."""
    return np.hstack([part.scores(column) for part, column in zip(parts, _columns(data, parts), strict=True)])


def cut_scores(request: CurveGramRequest, scores: Floats) -> Ints:
    """Cut a row's part of the right side, and its response, to their lengths, in units of 2^-PLACES."""
    x, y = np.split(scores, [request.own], axis=1)
    cut = [clip_rows(x, squared_radius(request.own), PLACES)] if request.own else []
    if request.holds:
        radius = radius_with(0, request.others, request.response)
        cut.append(clip_rows(response_weight(request.others, request.response) * y, radius, PLACES))
    return np.hstack(cut)


@step(
    FAMILY,
    "find_complete recall_gram",
    takes={"group": noisy_products.GROUP},
    releases={
        "grams": noisy("sums of products of scores of the site's own columns, and of these, with noise", 2)
    },
    requests=ArrayDeclaration("control", "what is public of the columns, variance of the noise"),
)
def release_gram(
    data: SiteData, state: State, text: str, group: Ints, *, read: ReadScores = read_scores
) -> tuple[dict[str, Array], str]:
    """Sum products, squares and the scores themselves: ``grams`` (1, q (q - 1) / 2 + 2 q).

    `group` (n_rows,) is 0 for rows that take part, and -1 for others. The scores are kept for the products
    with other sites, whose noise is charged here as well.
    """
    request, question = read_gram(data, state, text, group)
    canonical = f"{question} {secrets.token_hex(16)}"
    variance = Fraction(request.variance)
    owed = NoiseRequired("grams", canonical, request.squared_here(), variance, kept=(question, "grams"))
    state.report(EntityCount(fewest(group)), owed)
    scores = cut_scores(request, read(data, request.parts))
    return {"grams": sum_scores(state, request, scores, group, question, canonical)}, ""


@step(
    FAMILY,
    "find_complete",
    takes={"group": noisy_products.GROUP},
    releases=noisy_products.RECALLED,
    requests=ArrayDeclaration("control", "what is public of the columns, variance of the noise"),
)
def recall_gram(data: SiteData, state: State, text: str, group: Ints) -> tuple[dict[str, Array], str]:
    """Release again what an equal request over the same records got, as in a synthesis."""
    request, question = read_gram(data, state, text, group)

    def score() -> Ints:
        return cut_scores(request, read_scores(data, request.parts))

    return recall_sums(state, request, question, score, group), ""


def read_gram(data: SiteData, state: State, text: str, group: Ints) -> tuple[CurveGramRequest, str]:
    """Check a request for products: return it, and its canonical form."""
    request = read_question(CurveGramRequest, text, f"{data.name}: the requested products")
    with by_question():
        check_lengths(data.name, group=(group, data.table.n_rows))
        parts, seen = state.use(COMPLETE, tuple, "the complete rows come first; request 'find_complete'")
    if (
        parts != request.parts
        or request.site != data.name
        or (group[~seen] >= 0).any()
        or group.max(initial=-1) > 0
    ):
        raise DescriptionError(f"{data.name}: expected products of the requested columns over complete rows")
    return request, f"{to_json(request)} {digest_of(group)}"


def invented_complete(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Return all rows of a simulated site as complete."""
    seen = np.ones(data.table.n_rows, dtype=np.bool_)
    state.keep(COMPLETE, (from_json(tuple[PublicPart, ...], text, data.name), seen))
    return {"seen": seen}, ""


def invented_scores(data: SiteData, parts: tuple[PublicPart, ...]) -> Floats:
    """Draw scores for the rows of a simulated site."""
    q = sum(part.width for part in parts)
    return np.random.default_rng(0).normal(size=(data.table.n_rows, q))


PRODUCTS = ("deal_product", "open_product", "share_product")
include(FAMILY, {name: FAMILIES[noisy_products.FAMILY][name] for name in PRODUCTS})
RUNS: Mapping[str, Callable[..., object]] = {
    "find_complete": invented_complete,
    "release_gram": partial(release_gram, read=invented_scores),
}
DRY_RUN_STEPS = {(FAMILY, name): replace(FAMILIES[FAMILY][name], run=run) for name, run in RUNS.items()}
"""Steps that replace those that read rows, for simulated sites."""
