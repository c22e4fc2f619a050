"""What sites are asked for, as it travels, and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated

import numpy as np

from fedstat.errors import MessageError
from fedstat.models.boost.private.public import PublicPart
from fedstat.models.copula.asked import PLACES, GramAsked, NoisePlan, squared_of_cross, squared_radius
from fedstat.privacy.sensitivity import moments_sensitivity
from fedstat.records import Least, to_json
from fedstat.typing import Bools

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
class CurvesSummed(GramAsked):
    """Sums of products of scores of this institution's columns, the response of its `holder` the last.

    `peers` has the columns of each other institution, those of the response among them; `response` is how
    many these are. `site` is the institution that is asked, and `parts` are its own.
    """

    site: str
    holder: str
    response: Annotated[int, Least(1)]
    parts: tuple[PublicPart, ...]

    def check(self) -> None:
        """Require columns, and a response at an institution that there is."""
        super(CurvesSummed, self).check()
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

    def gram_asked(self, client: str, groups: int) -> CurvesSummed:
        """Ask an institution for its part of the sums."""
        return self._asked(client, self.gram_variance)

    def _asked(self, client: str, variance: int) -> CurvesSummed:
        return CurvesSummed(
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
