"""Requests of a synthesis and their privacy cost; all noise is planned here."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import numpy as np

from fedstat.codec import Minimum, to_json
from fedstat.errors import MessageError
from fedstat.kernels.copula import scores_of_codes
from fedstat.models.copula.margins import Bins, Margin, tables_of
from fedstat.privacy.sensitivity import clip_rows, gram_sensitivity
from fedstat.typing import Ints

FINE, MOST_SCALE = 4, 64
"""Binary places of the numbers by which patterns are multiplied, and the largest of these.

With it products of 390,000 entities fit into 64 bits.
"""
MOST_GROUPS = 4096
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


def squared_of_moments(radius: Fraction) -> Fraction:
    """Return what squares and sums of an institution's scores add to the square of its own products."""
    return (5 * radius + 1) * Fraction(16**PLACES)


@dataclass(frozen=True, slots=True)
class MarginsRequest:
    """Counts of columns by bins, and the variance of the noise on those of levels and on those of trees."""

    bins: tuple[Bins, ...]
    of_levels: Annotated[int, Minimum(1)]
    of_trees: Annotated[int, Minimum(1)]

    def check(self) -> None:
        """Require different columns."""
        if len({one.name for one in self.bins}) < len(self.bins) or not self.bins:
            raise MessageError("margins: expected different columns, one or more")


@dataclass(frozen=True, slots=True)
class GramRequest:
    """Sums of products of scores by group, the variance of their noise, and whose columns they go with.

    `peers` says how many columns each other institution has.
    """

    peers: Mapping[str, int]
    groups: Annotated[int, Minimum(1)]
    variance: Annotated[int, Minimum(1)]

    def check(self) -> None:
        """Require columns of every peer."""
        if any(columns < 1 for columns in self.peers.values()):
            raise MessageError("products: expected a column or more of every other institution")
        if self.groups > MOST_GROUPS:
            raise MessageError(f"products: expected at most {MOST_GROUPS:,} groups")

    @property
    def agreed(self) -> str:
        """What both institutions of a product have to be told alike: on it rests what each is charged.

        Which scores they are, of which radii follow, and the scales. Products are numbered with it, and no
        share of one leaves that was numbered otherwise at the other.
        """
        return to_json(["rank scores", *self.scales.tolist()])

    def check_at(self, site: str) -> None:
        """Require that the question is one to this institution."""

    def width(self, columns: int) -> int:
        """Return how many scores so many columns of the data have."""
        return columns

    def radius(self, columns: int) -> Fraction:
        """Return R^2 of this institution's scores, so many columns."""
        return squared_radius(columns)

    def peer_radius(self, peer: str) -> Fraction:
        """Return R^2 of the scores of another institution."""
        return squared_radius(self.peers[peer])

    @property
    def scales(self) -> Ints:
        """By what the sums of each group are multiplied before noise is added: (groups,)."""
        return np.ones(self.groups, dtype=np.int64)

    @property
    def with_moments(self) -> bool:
        """Whether squares and sums of scores are asked for as well."""
        return False

    def together(self, peer: str) -> list[int]:
        """Return the groups of which the entities have another institution too."""
        return list(range(self.groups))

    def squared(self, columns: int, held: Sequence[int], unknown: Collection[str] = ()) -> Fraction:
        """Square of the sensitivity of all sums to a record's part here, which is in one of some groups.

        Of own products above the diagonal, which move by R^2 together; with a diagonal of scores up to
        sqrt(3) and sums of scores by the root of R^4 + 5 R^2 + 1. Of products with others its row moves by
        2 R, and theirs is at most R' long: 2 R R'. Squares are added, since whoever holds the other columns
        may have seen what came before. Sums with an institution whose noise is `unknown` have that as well.
        """
        radius = self.radius(columns)
        own = squared_of_own(radius, columns) + (squared_of_moments(radius) if self.with_moments else 0)
        crosses = {
            peer: squared_of_cross(radius, self.peer_radius(peer)) / (2 if peer in unknown else 1)
            for peer in self.peers
        }
        return max(
            (
                Fraction(int(self.scales[g])) ** 2
                * (own + sum((one for k, one in crosses.items() if g in self.together(k)), Fraction(0)))
                for g in held
            ),
            default=Fraction(0),
        )

    def score(self, margins: Sequence[Margin], codes: Ints) -> Ints:
        """Score rows by their bins (n, p), -1 for none, and cut them, in units of 2^-PLACES: (n, q)."""
        scores = scores_of_codes(codes, tables_of(margins)[1])
        return clip_rows(scores, squared_radius(len(margins)), PLACES)


@dataclass(frozen=True, slots=True)
class PatternRequest:
    """A missing pattern: which other institutions its entities have.

    Its sums are multiplied by the scale before noise is added, so that patterns of fewer columns have less.
    """

    peers: tuple[str, ...]
    scale: Annotated[int, Minimum(1)]

    def check(self) -> None:
        """Require a scale at which sums fit into 64 bits."""
        if self.scale > MOST_SCALE:
            raise MessageError(f"products: expected a scale of at most {MOST_SCALE}")


@dataclass(frozen=True, slots=True)
class PatternSumsRequest(GramRequest):
    """Sums by missing pattern; with `moments`, squares and sums of scores as well."""

    patterns: tuple[PatternRequest, ...]
    moments: bool

    def check(self) -> None:
        """Require a pattern for every group, of other institutions."""
        super(PatternSumsRequest, self).check()
        known = all(set(one.peers) <= set(self.peers) for one in self.patterns)
        if len(self.patterns) != self.groups or not known:
            raise MessageError("products: expected a pattern of the other institutions for every group")

    @property
    def scales(self) -> Ints:
        """By what the sums of each pattern are multiplied before noise is added."""
        return np.array([one.scale for one in self.patterns], dtype=np.int64)

    @property
    def with_moments(self) -> bool:
        """Whether squares and sums of scores are asked for as well."""
        return self.moments

    def together(self, peer: str) -> list[int]:
        """Return the patterns with another institution."""
        return [g for g, one in enumerate(self.patterns) if peer in one.peers]


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

    def margins_asked(self, client: str) -> MarginsRequest:
        """Ask an institution for its margins."""
        bins, each = self.columns[client], self.of_column(self.rho, self.p)
        depth = max((one.depth for one in bins), default=1) or 1
        # A column's cost is squared / (2 variance), and whole numbers on the safe side make draws fast.
        return MarginsRequest(bins, math.ceil(1 / each), math.ceil(depth / each))

    @cached_property
    def gram_variance(self) -> int:
        """Variance of one institution's noise on every sum of products, in squared units of the products.

        As small as the budget lets it be, whoever looks: the coordinator, or all others at one institution.
        """
        views = [self._whole() / (self.rho - self.all_margins_cost())]
        views += [self._charged(client) / (self.rho - self.margins_cost(client)) for client in self.columns]
        return math.ceil(max(views) / 2)

    def _whole(self) -> Fraction:
        """Square of the sensitivity to a whole record, in units of one share's noise."""
        return gram_sensitivity([self.radius(client) * 4**PLACES for client in self.columns]).coordinator

    def gram_asked(self, client: str, groups: int) -> GramRequest:
        """Ask an institution for its part of the Gram matrix."""
        return GramRequest(self._peers(client), groups, self.gram_variance)

    def width(self, client: str) -> int:
        """Return how many scores an institution has."""
        return len(self.columns[client])

    def radius(self, client: str) -> Fraction:
        """Return R^2 of the scores of an institution."""
        return squared_radius(self.width(client))

    def places(self) -> dict[str, slice]:
        """Where the scores of each institution stand among all."""
        ends = np.cumsum([0, *map(self.width, self.columns)]).tolist()
        return {client: slice(a, b) for client, (a, b) in zip(self.columns, pairwise(ends), strict=True)}

    def _peers(self, client: str) -> dict[str, int]:
        return {name: self.width(name) for name in self.columns if name != client}

    def _charged(self, client: str, unknown: Collection[str] = ()) -> Fraction:
        """Sum of the squared sensitivities of all sums of products to which an institution adds its noise."""
        own = self.radius(client)
        crosses = (
            squared_of_cross(own, self.radius(peer)) / (2 if peer in unknown else 1)
            for peer in self._peers(client)
        )
        return squared_of_own(own, self.width(client)) + sum(crosses, Fraction(0))

    # ---- what it costs ---------------------------------------------------------------------------

    def margins_cost(self, client: str) -> Fraction:
        """Return what an institution's margins cost it."""
        asked = self.margins_asked(client)
        variances = [asked.of_levels if one.levels else asked.of_trees for one in asked.bins]
        costs = map(Fraction, [one.squared_sensitivity for one in asked.bins], [2 * v for v in variances])
        return sum(costs, Fraction(0))

    def all_margins_cost(self) -> Fraction:
        """Return what the margins of all institutions cost."""
        return sum(map(self.margins_cost, self.columns), Fraction(0))

    def products_cost(self, client: str, unknown: Collection[str] = ()) -> Fraction:
        """Return what an institution's part of the products costs it."""
        return self._charged(client, unknown) / (2 * self.gram_variance)

    def site_cost(self, client: str, unknown: Collection[str] = ()) -> Fraction:
        """Return what an institution is charged: against all others, whose noise is known but for some."""
        return self.margins_cost(client) + self.products_cost(client, unknown)

    def coordinator_cost(self) -> Fraction:
        """Return what a whole record costs against the coordinator, who knows nobody's noise."""
        return self.all_margins_cost() + self._whole() / (2 * self.gram_variance)

    def product_deviation(self, shares: int) -> float:
        """Return the deviation of the noise on a sum of products of two scores, of so many shares."""
        return math.sqrt(shares * self.gram_variance) / 4.0**PLACES


@dataclass(frozen=True)
class GramPlan:
    """The noise on sums of products by missing pattern: each a tuple of institutions, in their order.

    It is as small as the budget lets it be, whoever looks: the coordinator at a whole record, or all others
    together at the part of it at one institution. Patterns are disjoint sets of entities, so that each has
    what margins leave of the whole budget.
    """

    noise: NoisePlan
    patterns: tuple[tuple[str, ...], ...]
    moments: bool = False

    @classmethod
    def of_all(cls, noise: NoisePlan) -> GramPlan:
        """Plan sums over all entities that two institutions have, whatever else is missing."""
        return cls(noise, (tuple(noise.columns),))

    @cached_property
    def needed(self) -> tuple[Fraction, ...]:
        """Variance of one institution's noise that each pattern needs, in squares of 4^-PLACES."""
        plan = self.noise
        out = []
        for g, pattern in enumerate(self.patterns):
            views = [self._whole(pattern) / (plan.rho - plan.all_margins_cost())]
            for client in pattern:
                asked = self._asked(client, 1, (1,) * len(self.patterns))
                squared = asked.squared(plan.width(client), [g])
                views.append(squared / (plan.rho - plan.margins_cost(client)))
            out.append(max(views) / 2)
        return tuple(out)

    def _whole(self, pattern: Sequence[str]) -> Fraction:
        """Square of the sensitivity to a whole record, in units of one share's noise.

        With diagonals D and sums of scores of rows u and v, whose product is c, it is at most
        ``T^2 / 2 + sum R_k^4 / 2 - c^2 / 2 + D / 2 + 2 T - 2 c`` with ``D <= 6 T``, and c = -2 is the worst.
        """
        radii = [self.noise.radius(client) for client in pattern]
        more = 5 * sum(radii, Fraction(0)) + 2 if self.moments else 0
        return (gram_sensitivity(radii).coordinator + more) * Fraction(16**PLACES)

    @cached_property
    def variance(self) -> int:
        """Variance of the noise on the sums as they are multiplied."""
        fine = 4**FINE if len(self.patterns) > 1 else 1
        return math.ceil(max(self.needed) * fine)

    @cached_property
    def scales(self) -> tuple[int, ...]:
        """By what the sums of each pattern are multiplied, rounded down: none has too little noise."""
        return tuple(
            min(math.isqrt(math.floor(self.variance / needed)), MOST_SCALE) for needed in self.needed
        )

    def asked(self, client: str) -> PatternSumsRequest:
        """Ask an institution for its part of the sums."""
        return self._asked(client, self.variance, self.scales)

    def _asked(self, client: str, variance: int, scales: Sequence[int]) -> PatternSumsRequest:
        plan = self.noise
        peers = {name: plan.width(name) for name in plan.columns if name != client}
        patterns = tuple(
            PatternRequest(tuple(k for k in pattern if k != client), scale)
            for pattern, scale in zip(self.patterns, scales, strict=True)
        )
        return PatternSumsRequest(peers, len(patterns), variance, patterns, self.moments)

    def deviation(self, group: int, shares: int) -> float:
        """Return the deviation of the noise on a sum of products of scores, of so many sites' shares."""
        return math.sqrt(shares * self.variance) / self.scales[group] / 4.0**PLACES

    # ---- what it costs ---------------------------------------------------------------------------

    @property
    def columns(self) -> Mapping[str, tuple[Bins, ...]]:
        """Bins of every institution's columns."""
        return self.noise.columns

    def products_cost(self, client: str, unknown: Collection[str] = ()) -> Fraction:
        """Return what an institution's part of the sums costs it."""
        held = [g for g, pattern in enumerate(self.patterns) if client in pattern]
        return self.asked(client).squared(self.noise.width(client), held, unknown) / (2 * self.variance)

    def site_cost(self, client: str, unknown: Collection[str] = ()) -> Fraction:
        """Return what an institution is charged; as :meth:`NoisePlan.site_cost`."""
        return self.noise.margins_cost(client) + self.products_cost(client, unknown)

    def coordinator_cost(self) -> Fraction:
        """Return what a whole record costs against the coordinator, who knows nobody's noise."""
        pairs = zip(self.patterns, self.scales, strict=True)
        squared = max(scale**2 * self._whole(pattern) for pattern, scale in pairs)
        return self.noise.all_margins_cost() + squared / (2 * self.variance)
