"""What sites are asked for, as it travels, and what it costs: the one place where noise is planned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import numpy as np

from fedstat.errors import MessageError
from fedstat.models.copula.margins import Bins, Margin, tables_of
from fedstat.privacy.sensitivity import cut_rows, gram_sensitivity
from fedstat.records import Least
from fedstat.typing import Ints

PLACES = 16
"""Binary places of scores: what truncation takes off a correlation is below 1e-4."""
CUT = Fraction(6, 5)
"""Squared length, for each of its columns, to which an institution's part of a row of scores is cut."""
OF_MARGINS = Fraction(3, 10)
"""Share of the budget for the margins, in equal parts; the rest is for the products."""


def squared_radius(columns: int) -> Fraction:
    """Return R^2, to which the squared length of so many scores of one institution is cut."""
    return CUT * columns


def squared_of_own(radius: Fraction, columns: int) -> Fraction:
    """Square of the sensitivity of an institution's own products above the diagonal: (R^2)^2, or none."""
    if columns < 2:
        return Fraction(0)
    units = radius * 4**PLACES
    squared: Fraction = units * units
    return squared


def squared_of_cross(radius: Fraction, other: Fraction) -> Fraction:
    """Return that of its products with another's columns: its row moves by 2 R, and theirs is at most R'."""
    return radius * other * Fraction(4 * 16**PLACES)


@dataclass(frozen=True, slots=True)
class MarginsAsked:
    """Counts of columns by bins, and the variance of the noise on those of levels and on those of trees."""

    bins: tuple[Bins, ...]
    of_levels: Annotated[int, Least(1)]
    of_trees: Annotated[int, Least(1)]

    def check(self) -> None:
        """Require different columns."""
        if len({one.name for one in self.bins}) < len(self.bins) or not self.bins:
            raise MessageError("margins: expected different columns, one or more")


@dataclass(frozen=True, slots=True)
class GramAsked:
    """Sums of products of scores by group, the variance of their noise, and whose columns they go with.

    `peers` says how many columns each other institution has.
    """

    peers: Mapping[str, int]
    groups: Annotated[int, Least(1)]
    variance: Annotated[int, Least(1)]

    def check(self) -> None:
        """Require columns of every peer."""
        if any(columns < 1 for columns in self.peers.values()):
            raise MessageError("products: expected a column or more of every other institution")

    @property
    def agreed(self) -> str:
        """What both institutions of a product have to be told alike, for radii to be what they are taken for.

        Products are numbered with it, and no share of one leaves that was numbered otherwise at the other.
        """
        return ""

    def radius(self, columns: int) -> Fraction:
        """Return R^2 of this institution's scores, so many columns."""
        return squared_radius(columns)

    def peer_radius(self, peer: str) -> Fraction:
        """Return R^2 of the scores of another institution."""
        return squared_radius(self.peers[peer])

    def score(self, margins: Sequence[Margin], codes: Ints) -> Ints:
        """Score rows by their bins (n, p), -1 for none, and cut them, in units of 2^-PLACES: (n, q)."""
        scores = tables_of(margins)[1]
        found = np.take_along_axis(scores.T, np.maximum(codes, 0), axis=0)
        return cut_rows(np.where(codes >= 0, found, 0.0), squared_radius(len(margins)), PLACES)


@dataclass(frozen=True)
class NoisePlan:
    """How a budget rho is shared among margins and products, and what each site is charged.

    `columns` are the bins of every institution. All is settled by what is public: the numbers of columns and
    entities, and the bounds.
    """

    rho: Fraction
    columns: Mapping[str, tuple[Bins, ...]] = field(default_factory=dict)

    @property
    def agreed(self) -> str:
        """What all clients are told alike; see :attr:`GramAsked.agreed`."""
        return ""

    @cached_property
    def p(self) -> int:
        """Columns in all."""
        return sum(map(len, self.columns.values()))

    @staticmethod
    def of_column(rho: Fraction, p: int) -> Fraction:
        """Return what one of p margins may cost."""
        return rho * OF_MARGINS / p

    def margins_asked(self, client: str) -> MarginsAsked:
        """Ask a client for its margins."""
        bins, each = self.columns[client], self.of_column(self.rho, self.p)
        depth = max((one.depth for one in bins), default=1) or 1
        # A column's cost is squared / (2 variance), and whole numbers on the safe side make draws fast.
        return MarginsAsked(bins, math.ceil(1 / each), math.ceil(depth / each))

    @cached_property
    def gram_variance(self) -> int:
        """Variance of one institution's noise on every sum of products, in squared units of the products.

        As small as the budget lets it be, whoever looks: the coordinator, or all others at one client.
        """
        margins = sum(map(self.margins_cost, self.columns), Fraction(0))
        views = [self._whole() / (self.rho - margins)]
        views += [self._charged(client) / (self.rho - self.margins_cost(client)) for client in self.columns]
        return math.ceil(max(views) / 2)

    def _whole(self) -> Fraction:
        """Square of the sensitivity to a whole record, in units of one share's noise."""
        return gram_sensitivity([self.radius(client) * 4**PLACES for client in self.columns]).coordinator

    def gram_asked(self, client: str, groups: int) -> GramAsked:
        """Ask a client for its part of the Gram matrix."""
        return GramAsked(self._peers(client), groups, self.gram_variance)

    def width(self, client: str) -> int:
        """Return how many scores a client has."""
        return len(self.columns[client])

    def radius(self, client: str) -> Fraction:
        """Return R^2 of the scores of a client."""
        return squared_radius(self.width(client))

    def places(self) -> dict[str, slice]:
        """Where the scores of each client stand among all."""
        ends = np.cumsum([0, *map(self.width, self.columns)]).tolist()
        return {client: slice(a, b) for client, (a, b) in zip(self.columns, pairwise(ends), strict=True)}

    def _peers(self, client: str) -> dict[str, int]:
        return {name: self.width(name) for name in self.columns if name != client}

    def _charged(self, client: str) -> Fraction:
        """Sum of the squared sensitivities of all sums of products to which a client adds its noise."""
        own = self.radius(client)
        crosses = (squared_of_cross(own, self.radius(peer)) for peer in self._peers(client))
        return squared_of_own(own, self.width(client)) + sum(crosses, Fraction(0))

    # ---- what it costs ---------------------------------------------------------------------------

    def margins_cost(self, client: str) -> Fraction:
        """Return what a client's margins cost it."""
        asked = self.margins_asked(client)
        return sum(
            (
                Fraction(one.squared_sensitivity, 2 * (asked.of_levels if one.levels else asked.of_trees))
                for one in asked.bins
            ),
            Fraction(0),
        )

    def products_cost(self, client: str) -> Fraction:
        """Return what a client's part of the products costs it."""
        return self._charged(client) / (2 * self.gram_variance)

    def site_cost(self, client: str) -> Fraction:
        """Return what a client is charged: against all others together, whose noise does not count."""
        return self.margins_cost(client) + self.products_cost(client)

    def coordinator_cost(self) -> Fraction:
        """Return what a whole record costs against the coordinator, who knows nobody's noise."""
        margins = sum(map(self.margins_cost, self.columns), Fraction(0))
        return margins + self._whole() / (2 * self.gram_variance)

    def product_deviation(self, shares: int) -> float:
        """Return the deviation of the noise on a sum of products of two scores, of so many shares."""
        return math.sqrt(shares * self.gram_variance) / 4.0**PLACES
