"""Requests of a synthesis and their privacy cost; this module plans all noise."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import combinations, pairwise
from typing import Annotated, TypeAlias

import numpy as np

from fedstat.codec import Minimum, to_json
from fedstat.errors import MessageError
from fedstat.federation.audit.budget_charges import RHO_PATTERN
from fedstat.federation.crypto.masks import COUNTS
from fedstat.federation.disclosure.privacy_budget import NoiseShares
from fedstat.kernels.copula import scores_of_codes
from fedstat.models.copula.margins import MISSING, Bins, Margin, tables_of
from fedstat.privacy.sensitivity import clip_rows, gram_sensitivity
from fedstat.privacy.zcdp import share_of_noise
from fedstat.typing import Floats, Ints

FINE, MOST_SCALE = 4, 64
"""Binary digits of the multipliers of patterns, and the largest multiplier.

With it, products of 390,000 entities fit into 64 bits.
"""
MOST_GROUPS = 4096
PLACES = 16
"""Binary digits of scores: truncation changes a correlation by less than 1e-4."""
ALL = "all sites"
"""Holder of the columns where sites hold different rows of them: only sums over all sites are released."""
CUT = Fraction(6, 5)
"""Squared length per column to which a site's part of a row of scores is cut."""
FAR = 20.0
"""Deviations of noise for which a masked sum has room."""
OF_MARGINS = Fraction(3, 10)
"""Share of the budget for the margins, in equal parts; the rest is for the products."""


def squared_radius(columns: int) -> Fraction:
    """Return R^2, the squared length to which this number of scores of one site is cut."""
    return CUT * columns


def squared_of_own(radius: Fraction, columns: int) -> Fraction:
    """Return the squared sensitivity of a site's own products above the diagonal: (R^2)^2, or 0."""
    if columns < 2:
        return Fraction(0)
    units = radius * 4**PLACES
    squared: Fraction = units * units
    return squared


def squared_of_cross(radius: Fraction, other: Fraction) -> Fraction:
    """Return the squared sensitivity of products with another site: the row moves by 2 R.

    The other is R' long.
    """
    return radius * other * Fraction(4 * 16**PLACES)


def squared_of_moments(radius: Fraction) -> Fraction:
    """Return the amount that squares and sums of a site's scores add to the squared sensitivity."""
    return (5 * radius + 1) * Fraction(16**PLACES)


Blocks: TypeAlias = Sequence[tuple[Fraction, int]]
"""Squared lengths to which parts of a row of scores are cut, and their numbers of scores."""


def squared_of_row(blocks: Blocks, gaps: int, digits: int) -> Fraction:
    """Return the squared sensitivity of products above the diagonal to a row, or none in its place.

    A part u of squared length R^2 moves its own products by (R^4 - sum u_j^4) / 2 at most, two parts theirs
    by R^2 R'^2. A row without values has ones at the indicators of missing cells, `gaps` of them; these are
    never negative, so that squares add up.
    """
    own = sum((r * r * Fraction(scores - 1, 2 * scores) for r, scores in blocks), Fraction(0))
    both = sum((r * other for (r, _), (other, _) in combinations(blocks, 2)), Fraction(0))
    return max((own + both + Fraction(gaps * (gaps - 1), 2)) * Fraction(16**digits), Fraction(1))


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of the same columns at several sites: their numbers, and how many sites may collude."""

    records: Mapping[str, int]
    colluding: int

    @property
    def n(self) -> int:
        """Number of rows."""
        return sum(self.records.values())

    @property
    def honest(self) -> int:
        """Number of shares of noise that count; 1 if each site adds all of it."""
        return max(len(self.records) - self.colluding, 1)

    @property
    def observers(self) -> str:
        """The largest coalition against which the noise protects, in words."""
        if self.honest < 2:
            return "all others together"
        return f"the coordinator and {self.colluding} of {len(self.records)} sites together"

    @property
    def masked_at(self) -> tuple[str, ...]:
        """Sites that add the noise of masked sums together; none if each adds all of it."""
        return tuple(self.records) if self.honest > 1 else ()

    @property
    def expected_shares(self) -> NoiseShares | None:
        """Shares of the noise as the sites will agree on them, without marks of their records."""
        return NoiseShares(dict.fromkeys(self.records, 0), self.colluding) if self.honest > 1 else None

    def noise_of(self, variance: Fraction | int) -> Fraction:
        """Return the variance of the noise of all sites on a sum, if `variance` is left after collusion."""
        return len(self.records) * share_of_noise(variance, self.honest)


@dataclass(frozen=True, slots=True)
class MarginsRequest:
    """Counts of columns by bins, and the variance of the noise on counts of levels and of trees."""

    bins: tuple[Bins, ...]
    of_levels: Annotated[int, Minimum(1)]
    of_trees: Annotated[int, Minimum(1)]

    def check(self) -> None:
        """Require different columns."""
        if len({one.name for one in self.bins}) < len(self.bins) or not self.bins:
            raise MessageError("margins: expected different columns, one or more")


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """The margins, and what the site is charged by the later requests of the same analysis, as a fraction.

    Sums over sites may have their noise in `shares`.
    """

    margins: MarginsRequest
    later: str = "0"
    shares: NoiseShares | None = None

    def check(self) -> None:
        """Require a fraction."""
        self.margins.check()
        if not RHO_PATTERN.fullmatch(self.later):
            raise MessageError("margins: expected the later charges as a fraction")


@dataclass(frozen=True, slots=True)
class GramRequest:
    """Sums of products of scores by group, the variance of their noise, and the sites of the other columns.

    `peers` has the number of scores of each other site. `extra` has by site, this one included, how many
    scores it has beyond one for each column, and `gaps` the columns of this site with a score for a missing
    cell.
    """

    peers: Mapping[str, int]
    groups: Annotated[int, Minimum(1)]
    variance: Annotated[int, Minimum(1)]
    extra: Mapping[str, Annotated[int, Minimum(0)]] = field(default_factory=dict, kw_only=True)
    gaps: tuple[Annotated[int, Minimum(0)], ...] = field(default=(), kw_only=True)

    def check(self) -> None:
        """Require columns of every peer."""
        own = [site for site in self.extra if site not in self.peers]
        if len(own) > 1 or any(scores <= self.extra.get(peer, 0) for peer, scores in self.peers.items()):
            raise MessageError("products: expected at least one column of every other site")
        if self.groups > MOST_GROUPS:
            raise MessageError(f"products: expected at most {MOST_GROUPS:,} groups")

    @property
    def agreed(self) -> str:
        """Return what both sites of a product must agree on, since each is charged on this basis.

        This is the kind of scores and their numbers, which determine the radii, and the scales. Products are
        numbered with this text. A site releases no share of a product that the other site numbered
        differently.
        """
        extra = [dict(sorted(self.extra.items()))] if self.extra else []
        return to_json(["rank scores", *self.scales.tolist(), *extra])

    @property
    def own_extra(self) -> int:
        """Number of scores of this site beyond one for each column."""
        return sum(count for site, count in self.extra.items() if site not in self.peers)

    def check_at(self, site: str) -> None:
        """Require that the request is meant for this site."""

    def width(self, columns: int) -> int:
        """Return the number of scores of this number of data columns."""
        return columns + self.own_extra

    def radius(self, scores: int) -> Fraction:
        """Return R^2 of this site's scores, for this number of scores."""
        return squared_radius(scores - self.own_extra)

    def peer_radius(self, peer: str) -> Fraction:
        """Return R^2 of the scores of another site."""
        return squared_radius(self.peers[peer] - self.extra.get(peer, 0))

    @property
    def scales(self) -> Ints:
        """Multipliers of the sums of each group before noise is added: (groups,)."""
        return np.ones(self.groups, dtype=np.int64)

    @property
    def with_moments(self) -> bool:
        """Whether squares and sums of scores are requested as well."""
        return False

    def together(self, peer: str) -> list[int]:
        """Return the groups whose entities another site has as well."""
        return list(range(self.groups))

    def squared(self, scores: int, held: Sequence[int], unknown: Collection[str] = ()) -> Fraction:
        """Return the squared sensitivity of all sums to a record's part here, which is in one of the groups.

        Own products above the diagonal move by R^2 together; with a diagonal of scores up to sqrt(3) and sums
        of scores they move by the root of R^4 + 5 R^2 + 1. In products with others the site's row moves by 2
        R, and the other row is at most R' long: 2 R R'. Squares are added, since the holder of the other
        columns may have seen earlier replies. Sums with a site whose noise is `unknown` have that noise as
        well.
        """
        radius = self.radius(scores)
        own = squared_of_own(radius, scores) + (squared_of_moments(radius) if self.with_moments else 0)
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

    def score(self, margins: Sequence[Margin], codes: Ints, digits: int = PLACES) -> Ints:
        """Return the scores of rows by their bins (n, p), cut, in units of 2^-digits: (n, q).

        A column with an order has a rank score, others an indicator of each level, and columns with missing
        cells one of those. Only one of an indicator of a missing cell, a level and a rank score differs from
        0, and squares of rank scores are 1 in the mean, so that the radius is that of the columns.
        """
        if max(self.gaps, default=0) >= len(margins):
            raise MessageError("products: expected missing cells of the requested columns")
        if not self.gaps and not any(margin.bins.nominal for margin in margins):
            scores = scores_of_codes(codes, tables_of(margins)[1])
        else:
            tables = [score_table(margin, j in self.gaps) for j, margin in enumerate(margins)]
            scores = np.hstack([table[code] for table, code in zip(tables, codes.T, strict=True)])
        if scores.shape[1] != self.width(len(margins)):
            raise MessageError("products: expected as many scores as the columns have")
        return clip_scores(scores, squared_radius(len(margins)), digits)

    def squared_alone(self, columns: int, digits: int) -> Fraction:
        """Return the squared sensitivity of the products of all sites' rows to one row, or none instead."""
        return squared_of_row(self.blocks(columns), len(self.gaps), digits)

    def blocks(self, columns: int) -> Blocks:
        """Return the parts of a row of this site that are cut together."""
        scores = self.width(columns)
        return [(self.radius(scores), scores)]


def clip_scores(scores: Floats, radius: Fraction, digits: int) -> Ints:
    """Cut rows of scores to a squared length, in units of 2^-digits.

    Fewer digits than usual are rounded to the nearest one, so that errors of many rows cancel.
    """
    return clip_rows(scores, radius, digits, nearest=digits < PLACES)


@dataclass(frozen=True, slots=True)
class RowProductsRequest:
    """Sums of products over the rows of all sites, which all receive alike.

    `bins` are those of the margins, `digest` is that of their probabilities, and `sums` the
    :class:`GramRequest` of a family as text. Scores have `digits` binary digits. Noise may be in `shares`.
    """

    bins: tuple[Bins, ...]
    digest: str
    sums: str
    digits: Annotated[int, Minimum(0)]
    shares: NoiseShares | None = None

    def check(self) -> None:
        """Require different columns, and digits that 64 bits hold."""
        MarginsRequest(self.bins, 1, 1).check()
        if self.digits > PLACES:
            raise MessageError(f"products: expected at most {PLACES} digits")


def score_table(margin: Margin, gap: bool) -> Floats:
    """Return the scores of a column by the bins of its margin, no bin, and a missing cell: (k + 2, q).

    The last two are at the codes of :mod:`fedstat.models.copula.margins`, -2 and -1.
    """
    k = margin.bins.count
    found = np.eye(k) if margin.bins.nominal else margin.scores[:, None]
    table = np.zeros((k + 2, found.shape[1] + gap))
    table[:k, : found.shape[1]] = found
    if gap:
        table[MISSING, -1] = 1.0
    return table


@dataclass(frozen=True, slots=True)
class PatternRequest:
    """A missing pattern: the other sites that have its entities.

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
        """Require a pattern of other sites for every group."""
        super(PatternSumsRequest, self).check()
        known = all(set(one.peers) <= set(self.peers) for one in self.patterns)
        if len(self.patterns) != self.groups or not known:
            raise MessageError("products: expected a pattern of the other sites for every group")

    @property
    def scales(self) -> Ints:
        """Multipliers of the sums of each pattern before noise is added."""
        return np.array([one.scale for one in self.patterns], dtype=np.int64)

    @property
    def with_moments(self) -> bool:
        """Whether squares and sums of scores are requested as well."""
        return self.moments

    def together(self, peer: str) -> list[int]:
        """Return the patterns with another site."""
        return [g for g, one in enumerate(self.patterns) if peer in one.peers]


@dataclass(frozen=True)
class NoisePlan:
    """How a budget rho is divided among margins and products, and the charge of each site.

    `columns` are the bins of every site, `gaps` the positions of those with missing cells, as the released
    margins show. All else depends on public facts only: the numbers of columns and entities, and the bounds.
    Gaps cost nothing. With `rows` the columns are those of all sites together, which add noise to sums over
    their rows.
    """

    rho: Fraction
    columns: Mapping[str, tuple[Bins, ...]] = field(default_factory=dict)
    gaps: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)
    rows: PooledRows | None = field(default=None, kw_only=True)

    @cached_property
    def p(self) -> int:
        """Number of all columns."""
        return sum(map(len, self.columns.values()))

    @staticmethod
    def of_column(rho: Fraction, p: int) -> Fraction:
        """Return the budget of one of p margins."""
        return rho * OF_MARGINS / p

    def margins_requested(self, site: str) -> MarginsRequest:
        """Return the request for a site's margins."""
        bins, each = self.columns[site], self.of_column(self.rho, self.p)
        # A column's cost is squared / (2 variance), and integers rounded to the safe side make draws fast.
        most = {
            levels: max(
                (self.squared_of_counts(one) for one in bins if bool(one.levels) is levels), default=2
            )
            for levels in (True, False)
        }
        return MarginsRequest(bins, math.ceil(most[True] / (2 * each)), math.ceil(most[False] / (2 * each)))

    def squared_of_counts(self, bins: Bins) -> int:
        """Return the squared sensitivity of the counts of a column."""
        return bins.squared_sensitivity if self.rows is None else bins.squared_alone

    def noise_of(self, variance: int, shares: int) -> Fraction:
        """Return the variance of the noise on a sum to which `shares` sites, or all with rows, add."""
        if self.rows is None:
            return Fraction(shares * variance)
        return self.rows.noise_of(variance)

    def count_deviation(self, site: str, place: int) -> float:
        """Return the deviation of the noise on the counts of a site's column."""
        request = self.margins_requested(site)
        variance = request.of_levels if request.bins[place].levels else request.of_trees
        return math.sqrt(self.noise_of(variance, 1))

    @cached_property
    def gram_variance(self) -> int:
        """Variance of one site's noise on every sum of products, in squared units of the products.

        It is as small as the budget allows against every observer: the coordinator, or all other sites at
        one.
        """
        views = [self._complete() / (self.rho - self.all_margins_cost())]
        views += [self._charged(site) / (self.rho - self.margins_cost(site)) for site in self.columns]
        return math.ceil(max(views) / 2)

    def _complete(self) -> Fraction:
        """Squared sensitivity to a whole record, in units of one share's noise."""
        if self.rows is not None:
            gaps = len(self.gaps.get(ALL, ()))
            return squared_of_row(self.blocks(), gaps, self.digits)
        return gram_sensitivity([self.radius(site) * 4**PLACES for site in self.columns]).coordinator

    def blocks(self) -> Blocks:
        """Return the parts of a row of all sites' columns that are cut together."""
        return [(self.radius(ALL), self.width(ALL))]

    @property
    def digits(self) -> int:
        """Binary digits of scores; masked sums over many rows carry products of fewer ones."""
        if self.rows is None or self.rows.honest < 2:
            return PLACES
        K = len(self.rows.records)
        largest = float(self.radius(ALL)) * (self.rows.n + FAR * math.sqrt(K / self.rho))
        return min(PLACES, math.floor(math.log2(COUNTS.limit(K) / largest) / 2.0))

    def gram_requested(self, site: str, groups: int) -> GramRequest:
        """Return the request for a site's part of the Gram matrix."""
        return GramRequest(
            self._peers(site),
            groups,
            self.gram_variance,
            extra=self.extra(),
            gaps=tuple(self.gaps.get(site, ())),
        )

    def widths(self, site: str) -> list[int]:
        """Return the number of scores of each of a site's columns."""
        gaps = self.gaps.get(site, ())
        return [
            (bins.count if bins.nominal else 1) + (j in gaps) for j, bins in enumerate(self.columns[site])
        ]

    def width(self, site: str) -> int:
        """Return the number of scores of a site."""
        return sum(self.widths(site))

    def extra(self) -> dict[str, int]:
        """Return the numbers of scores beyond one for each column, by site; empty if there are none."""
        found = {site: self.width(site) - len(bins) for site, bins in self.columns.items()}
        return found if any(found.values()) else {}

    def radius(self, site: str) -> Fraction:
        """Return R^2 of the scores of a site."""
        return squared_radius(len(self.columns[site]))

    def places(self) -> dict[str, slice]:
        """Positions of each site's scores among all scores."""
        ends = np.cumsum([0, *map(self.width, self.columns)]).tolist()
        return {site: slice(a, b) for site, (a, b) in zip(self.columns, pairwise(ends), strict=True)}

    def _peers(self, site: str) -> dict[str, int]:
        return {name: self.width(name) for name in self.columns if name != site}

    def _charged(self, site: str, unknown: Collection[str] = ()) -> Fraction:
        """Return the sum of squared sensitivities of all sums of products to which a site adds its noise."""
        if self.rows is not None:
            return self._complete()
        own = self.radius(site)
        crosses = (
            squared_of_cross(own, self.radius(peer)) / (2 if peer in unknown else 1)
            for peer in self._peers(site)
        )
        return squared_of_own(own, self.width(site)) + sum(crosses, Fraction(0))

    # ---- what it costs ---------------------------------------------------------------------------

    def margins_cost(self, site: str) -> Fraction:
        """Return the cost of a site's margins."""
        request = self.margins_requested(site)
        variances = [request.of_levels if one.levels else request.of_trees for one in request.bins]
        costs = map(Fraction, map(self.squared_of_counts, request.bins), [2 * v for v in variances])
        return sum(costs, Fraction(0))

    def all_margins_cost(self) -> Fraction:
        """Return the cost of the margins of all sites."""
        return sum(map(self.margins_cost, self.columns), Fraction(0))

    def products_cost(self, site: str, unknown: Collection[str] = ()) -> Fraction:
        """Return the cost of a site's part of the products."""
        return self._charged(site, unknown) / (2 * self.gram_variance)

    def site_cost(self, site: str, unknown: Collection[str] = ()) -> Fraction:
        """Return the charge of a site against all others, which know their own noise."""
        return self.margins_cost(site) + self.products_cost(site, unknown)

    def coordinator_cost(self) -> Fraction:
        """Return the cost of a whole record against the coordinator, who knows no site's noise."""
        return self.all_margins_cost() + self._complete() / (2 * self.gram_variance)

    def product_deviation(self, shares: int) -> float:
        """Return the deviation of the noise on a sum of products of two scores, from `shares` shares."""
        return math.sqrt(self.noise_of(self.gram_variance, shares)) / 4.0**self.digits


@dataclass(frozen=True)
class GramPlan:
    """The noise on sums of products by missing pattern; a pattern is a tuple of sites, in order.

    The noise is as small as the budget allows against every observer: the coordinator at a whole record, or
    all other sites together at one site's part of it. Patterns are disjoint sets of entities, so each of them
    has the whole budget that margins leave.
    """

    noise: NoisePlan
    patterns: tuple[tuple[str, ...], ...]
    moments: bool = False

    @classmethod
    def of_all(cls, noise: NoisePlan) -> GramPlan:
        """Plan sums over all entities that two sites have, whatever else is missing."""
        return cls(noise, (tuple(noise.columns),))

    @cached_property
    def needed(self) -> tuple[Fraction, ...]:
        """Variance of one site's noise that each pattern needs, in squares of 4^-PLACES."""
        plan = self.noise
        out = []
        for g, pattern in enumerate(self.patterns):
            views = [self._complete(pattern) / (plan.rho - plan.all_margins_cost())]
            for site in pattern if plan.rows is None else ():
                request = self._request(site, 1, (1,) * len(self.patterns))
                squared = request.squared(plan.width(site), [g])
                views.append(squared / (plan.rho - plan.margins_cost(site)))
            out.append(max(views) / 2)
        return tuple(out)

    def _complete(self, pattern: Sequence[str]) -> Fraction:
        """Squared sensitivity to a whole record, in units of one share's noise.

        Let rows u and v have diagonals D and sums of scores, and the product c. The square is at most ``T^2 /
        2 + sum R_k^4 / 2 - c^2 / 2 + D / 2 + 2 T - 2 c`` with ``D <= 6 T``; c = -2 is the worst case.
        """
        if self.noise.rows is not None:
            return self.noise._complete()
        radii = [self.noise.radius(site) for site in pattern]
        more = 5 * sum(radii, Fraction(0)) + 2 if self.moments else 0
        return (gram_sensitivity(radii).coordinator + more) * Fraction(16**PLACES)

    @cached_property
    def variance(self) -> int:
        """Variance of the noise on the multiplied sums."""
        fine = 4**FINE if len(self.patterns) > 1 else 1
        return math.ceil(max(self.needed) * fine)

    @cached_property
    def scales(self) -> tuple[int, ...]:
        """Multipliers of the sums of each pattern, rounded down, so that no pattern has too little noise."""
        return tuple(
            min(math.isqrt(math.floor(self.variance / needed)), MOST_SCALE) for needed in self.needed
        )

    def requested(self, site: str) -> PatternSumsRequest:
        """Return the request for a site's part of the sums."""
        return self._request(site, self.variance, self.scales)

    def _request(self, site: str, variance: int, scales: Sequence[int]) -> PatternSumsRequest:
        plan = self.noise
        peers = {name: plan.width(name) for name in plan.columns if name != site}
        patterns = tuple(
            PatternRequest(tuple(k for k in pattern if k != site), scale)
            for pattern, scale in zip(self.patterns, scales, strict=True)
        )
        return PatternSumsRequest(
            peers,
            len(patterns),
            variance,
            patterns,
            self.moments,
            extra=plan.extra(),
            gaps=tuple(plan.gaps.get(site, ())),
        )

    def deviation(self, group: int, shares: int) -> float:
        """Return the standard deviation of the noise on a sum of products of scores, from `shares` shares."""
        variance = self.noise.noise_of(self.variance, shares)
        return math.sqrt(variance) / self.scales[group] / 4.0**self.noise.digits

    # ---- what it costs ---------------------------------------------------------------------------

    @property
    def columns(self) -> Mapping[str, tuple[Bins, ...]]:
        """Bins of every site's columns."""
        return self.noise.columns

    def products_cost(self, site: str, unknown: Collection[str] = ()) -> Fraction:
        """Return the cost of a site's part of the sums."""
        if self.noise.rows is not None:
            return self.noise.products_cost(site)
        held = [g for g, pattern in enumerate(self.patterns) if site in pattern]
        return self.requested(site).squared(self.noise.width(site), held, unknown) / (2 * self.variance)

    def site_cost(self, site: str, unknown: Collection[str] = ()) -> Fraction:
        """Return the charge of a site; see :meth:`NoisePlan.site_cost`."""
        return self.noise.margins_cost(site) + self.products_cost(site, unknown)

    def coordinator_cost(self) -> Fraction:
        """Return the cost of a whole record against the coordinator, who knows no site's noise."""
        pairs = zip(self.patterns, self.scales, strict=True)
        squared = max(scale**2 * self._complete(pattern) for pattern, scale in pairs)
        return self.noise.all_margins_cost() + squared / (2 * self.variance)
