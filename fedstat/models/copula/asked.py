"""What sites are asked for, as it travels, and what it costs: the one place where noise is planned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Annotated

from fedstat.errors import MessageError
from fedstat.models.copula.margins import Bins
from fedstat.privacy.sensitivity import gram_sensitivity
from fedstat.records import Least

PLACES = 16
"""Binary places of scores: what truncation takes off a correlation is below 1e-4."""
CUT = Fraction(6, 5)
"""Squared length, for each of its columns, to which an institution's part of a row of scores is cut."""
OF_MARGINS = Fraction(3, 10)
"""Share of the budget for the margins, in equal parts; the rest is for the products."""


def squared_radius(columns: int) -> Fraction:
    """Return R^2, to which the squared length of so many scores of one institution is cut."""
    return CUT * columns


def squared_of_own(columns: int) -> Fraction:
    """Square of the sensitivity of an institution's own products above the diagonal: (R^2)^2, or none."""
    if columns < 2:
        return Fraction(0)
    radius = squared_radius(columns) * 4**PLACES
    squared: Fraction = radius * radius
    return squared


def squared_of_cross(columns: int, others: int) -> Fraction:
    """Return that of its products with another's columns: its row moves by 2 R, and theirs is at most R'."""
    return squared_radius(columns) * squared_radius(others) * Fraction(4 * 16**PLACES)


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


@dataclass(frozen=True)
class NoisePlan:
    """How a budget rho is shared among margins and products, and what each site is charged.

    `columns` are the bins of every institution. All is settled by what is public: the numbers of columns and
    entities, and the bounds.
    """

    rho: Fraction
    columns: Mapping[str, tuple[Bins, ...]] = field(default_factory=dict)

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
        return gram_sensitivity(
            [squared_radius(len(bins)) * 4**PLACES for bins in self.columns.values()]
        ).coordinator

    def gram_asked(self, client: str, groups: int) -> GramAsked:
        """Ask a client for its part of the Gram matrix."""
        peers = {name: len(bins) for name, bins in self.columns.items() if name != client}
        return GramAsked(peers, groups, self.gram_variance)

    def _charged(self, client: str) -> Fraction:
        """Sum of the squared sensitivities of all sums of products to which a client adds its noise."""
        own = len(self.columns[client])
        peers = (len(bins) for name, bins in self.columns.items() if name != client)
        return squared_of_own(own) + sum((squared_of_cross(own, others) for others in peers), Fraction(0))

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


def owners_of(columns: Mapping[str, Sequence[Bins]]) -> list[str]:
    """Institution of each column, in the order of the columns."""
    return [client for client, bins in columns.items() for _ in bins]
