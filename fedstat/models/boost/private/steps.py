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
    sum_scores,
)
from fedstat.privacy.sensitivity import clip_rows, moments_sensitivity
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# What sites are asked for, as it travels, and what it costs.

RESPONSE = Fraction(9, 4)
"""Squared length, for each of its columns, to which a response's part of a row is cut."""
WEIGHT = Fraction(49, 100)
"""By it and the number of other columns over its own the squares of a response are multiplied.

The row's part of the response is then as long as that of all others, and its products have less noise.
"""


def response_weight(columns: int, response: int) -> float:
    """By what the scores of a response are multiplied, beside so many other columns of all institutions."""
    return float(np.sqrt(float(WEIGHT * columns / response)))


def radius_with(columns: int, others: int, response: int) -> Fraction:
    """Return R^2 of an institution with so many columns of the right side, among `others` in all.

    With `response` columns of the response, 0 where it is elsewhere.
    """
    own = squared_radius(columns)
    return own + (RESPONSE * WEIGHT * others if response else 0)


@dataclass(frozen=True, slots=True)
class CurveGramRequest(GramRequest):
    """Sums of products of scores of this institution's columns, the response of its `holder` the last.

    `peers` has the columns of each other institution, those of the response among them; `response` is how
    many these are. `site` is the institution that is asked, and `parts` are its own.
    """

    site: str
    holder: str
    response: Annotated[int, Minimum(1)]
    parts: tuple[PublicPart, ...]

    def check(self) -> None:
        """Require columns, and a response at an institution that there is."""
        super(CurveGramRequest, self).check()
        if self.groups != 1 or not self.parts or self.holder not in (self.site, *self.peers):
            raise MessageError("products: expected columns, and the response at one of the institutions")
        if (self.holder != self.site and self.peers[self.holder] < self.response) or self.own < 0:
            raise MessageError("products: expected all columns of the response at its holder")

    @property
    def holds(self) -> bool:
        """Whether the response is here."""
        return self.site == self.holder

    @property
    def width_here(self) -> int:
        """Scores of this institution."""
        return sum(part.width for part in self.parts)

    @property
    def own(self) -> int:
        """Scores of the right side here."""
        return self.width_here - self.response * self.holds

    @property
    def others(self) -> int:
        """Columns of the right side at all institutions."""
        return self.width_here + sum(self.peers.values()) - self.response

    @property
    def agreed(self) -> str:
        """Of what radii follow."""
        return to_json(["curves", self.holder, self.response, self.others])

    @property
    def with_moments(self) -> bool:
        """Squares and sums of scores are asked for as well."""
        return True

    def radius(self, columns: int) -> Fraction:
        """Return R^2 of this institution's scores."""
        return radius_with(self.own, self.others, self.response * self.holds)

    def peer_radius(self, peer: str) -> Fraction:
        """Return R^2 of the scores of another institution."""
        holds = peer == self.holder
        return radius_with(self.peers[peer] - self.response * holds, self.others, self.response * holds)

    def squared_here(self, unknown: Collection[str] = ()) -> Fraction:
        """Square of the sensitivity of all sums to a record's part here: of its own, and of those across.

        Those with an institution whose noise is `unknown` have that as well.
        """
        radius = self.radius(self.width_here)
        own = moments_sensitivity([radius]).institutions[0] * Fraction(16**PLACES)
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

    Of the parts of its `holder` the response is the last, of so many scores.
    """

    parts: Mapping[str, tuple[PublicPart, ...]] = field(default_factory=dict)
    holder: str = ""
    response: int = 1

    @property
    def others(self) -> int:
        """Columns of the right side at all institutions."""
        return sum(map(self.width, self.parts)) - self.response

    def width(self, client: str) -> int:
        """Return how many scores an institution has."""
        return sum(part.width for part in self.parts[client])

    def radius(self, client: str) -> Fraction:
        """Return R^2 of the scores of an institution."""
        response = self.response * (client == self.holder)
        return radius_with(self.width(client) - response, self.others, response)

    def gram_asked(self, client: str, groups: int) -> CurveGramRequest:
        """Ask an institution for its part of the sums."""
        return self._asked(client, self.gram_variance)

    def _asked(self, client: str, variance: int) -> CurveGramRequest:
        return CurveGramRequest(
            peers=self._peers(client),
            groups=1,
            variance=variance,
            site=client,
            holder=self.holder,
            response=self.response,
            parts=self.parts[client],
        )

    def _whole(self) -> Fraction:
        """Square of the sensitivity to a whole record, in units of one share's noise."""
        return moments_sensitivity(list(map(self.radius, self.parts))).coordinator * Fraction(16**PLACES)

    def _charged(self, client: str, unknown: Collection[str] = ()) -> Fraction:
        return self._asked(client, 1).squared_here(unknown)

    def margins_cost(self, client: str) -> Fraction:
        """Return 0: no margins are released."""
        return Fraction(0)

    @property
    def deviation(self) -> float:
        """Deviation of one share's noise on a sum of products."""
        return self.product_deviation(1)

    @property
    def weight(self) -> float:
        """By what the scores of the response are multiplied."""
        return response_weight(self.others, self.response)

    def is_response(self) -> Bools:
        """Which of all scores are the response's: (q,) of bool."""
        place = self.places()[self.holder]
        out = np.zeros(sum(map(self.width, self.parts)), dtype=np.bool_)
        out[place.stop - self.response : place.stop] = True
        return out


# ----------------------------------------------------------------------------------------------------
# What one institution answers for private boosting: who is complete, and its part of the noisy products.
#
# The products, their noise and its price are those of private synthesis
# (:mod:`fedstat.models.copula.steps`); the scores are of what is public of curves and columns, so that
# nothing is released before them.

FAMILY = "boost_private"
COMPLETE = "rows that have all curves and columns"
ReadScores: TypeAlias = Callable[[SiteData, tuple[PublicPart, ...]], Floats]


@step(
    FAMILY,
    releases=noisy_products.COMPLETE,
    asks=ArrayDeclaration("control", "what is public of columns"),
    begins=True,
)
def find_complete(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Tell which rows have all that is asked for, curves without a long gap: ``seen`` (n_rows,)."""
    parts = read_question(tuple[PublicPart, ...], text, f"{data.name}: the columns asked for")
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


def cut_scores(asked: CurveGramRequest, scores: Floats) -> Ints:
    """Cut a row's part of the right side, and its response, to their lengths, in units of 2^-PLACES."""
    x, y = np.split(scores, [asked.own], axis=1)
    cut = [clip_rows(x, squared_radius(asked.own), PLACES)] if asked.own else []
    if asked.holds:
        radius = radius_with(0, asked.others, asked.response)
        cut.append(clip_rows(response_weight(asked.others, asked.response) * y, radius, PLACES))
    return np.hstack(cut)


@step(
    FAMILY,
    "find_complete",
    takes={"group": noisy_products.GROUP},
    releases={
        "grams": noisy("sums of products of scores of the site's own columns, and of these, with noise", 2)
    },
    asks=ArrayDeclaration("control", "what is public of the columns, variance of the noise"),
)
def release_gram(
    data: SiteData, state: State, text: str, group: Ints, *, read: ReadScores = read_scores
) -> tuple[dict[str, Array], str]:
    """Sum products, squares and the scores themselves: ``grams`` (1, q (q - 1) / 2 + 2 q).

    `group` (n_rows,) is 0 of rows that take part, and -1 of others. The scores stay for the products with
    other institutions, whose noise is paid for here as well.
    """
    asked = read_question(CurveGramRequest, text, f"{data.name}: the products asked for")
    with by_question():
        check_lengths(data.name, group=(group, data.table.n_rows))
        parts, seen = state.use(COMPLETE, tuple, "who is complete comes first; ask 'find_complete'")
    if (
        parts != asked.parts
        or asked.site != data.name
        or (group[~seen] >= 0).any()
        or group.max(initial=-1) > 0
    ):
        raise DescriptionError(
            f"{data.name}: expected products of the columns that were asked for, of whole rows"
        )
    canonical = f"{to_json(asked)} {digest_of(group)} {secrets.token_hex(16)}"
    owed = NoiseRequired("grams", canonical, asked.squared_here(), Fraction(asked.variance))
    state.tell(EntityCount(fewest(group)), owed)
    scores = cut_scores(asked, read(data, asked.parts))
    return {"grams": sum_scores(state, asked, scores, group, canonical)}, ""


def invented_complete(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Say that all rows are complete which are not there."""
    seen = np.ones(data.table.n_rows, dtype=np.bool_)
    state.keep(COMPLETE, (from_json(tuple[PublicPart, ...], text, data.name), seen))
    return {"seen": seen}, ""


def invented_scores(data: SiteData, parts: tuple[PublicPart, ...]) -> Floats:
    """Draw scores of rows that are not there."""
    q = sum(part.width for part in parts)
    return np.random.default_rng(0).normal(size=(data.table.n_rows, q))


PRODUCTS = ("deal_product", "open_product", "share_product")
include(FAMILY, {name: FAMILIES[noisy_products.FAMILY][name] for name in PRODUCTS})
RUNS: Mapping[str, Callable[..., object]] = {
    "find_complete": invented_complete,
    "release_gram": partial(release_gram, read=invented_scores),
}
DRY_RUN_STEPS = {(FAMILY, name): replace(FAMILIES[FAMILY][name], run=run) for name, run in RUNS.items()}
"""Steps that stand for those that read rows where there are none."""
