"""Repeated releases of two neighboring data sets through real sites, for an audit.

Where sites hold different columns, a record is replaced by another one, and the likelihood ratio of a release
follows from its plan. Where they hold different rows, a row is there or missing, and the ratio is that of the
sums which the sites have computed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from fedstat.codec import to_json
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseMechanism, NoiseRequired, RepeatedRelease
from fedstat.federation.disclosure.site import Site
from fedstat.federation.disclosure.state import State
from fedstat.federation.message import Reply, Request, Step
from fedstat.federation.protocols.engine import Fit, FitProtocol, LocalEngine
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.copula.margins import Bins, Margin
from fedstat.models.copula.protocol import Participation, SumsByGroup, request_margins, request_pattern_sums
from fedstat.models.copula.request import ALL, PLACES, GramPlan, GramRequest, NoisePlan
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The two records that a release distinguishes best, and the records of all others, from bins alone.


@dataclass(frozen=True)
class UnmaskedSums:
    """Sums of products over all entities at once, as an independent noise plan requests them."""

    noise: NoisePlan
    moments: bool = False

    @property
    def columns(self) -> Mapping[str, tuple[Bins, ...]]:
        """Bins of every site's columns."""
        return self.noise.columns

    def requested(self, site: str) -> GramRequest:
        """Return the request for a site's part of the sums."""
        return self.noise.gram_requested(site, 1)

    def deviation(self, group: int, shares: int) -> float:
        """Return the standard deviation of the noise on a sum of products, from `shares` sites' shares."""
        return self.noise.product_deviation(shares)

    def site_cost(self, site: str) -> Fraction:
        """Return the charge of a site."""
        return self.noise.site_cost(site)

    def coordinator_cost(self) -> Fraction:
        """Return the cost of a whole record against the coordinator."""
        return self.noise.coordinator_cost()


Sums: TypeAlias = GramPlan | UnmaskedSums


@dataclass(frozen=True, eq=False)
class LeastPrivatePair:
    """Two records as bins of all columns, (2, p), and two further ones.

    All other entities are copies of these.

    `view` is empty if the coordinator observes. Otherwise it is the site whose part is to be distinguished by
    all others together, and only this site has noise. There are `n` entities; the first is one of the two
    records.
    """

    sums: Sums
    view: str
    n: int
    records: Ints
    others: Ints

    @classmethod
    def of(cls, sums: Sums, view: str, n: int) -> LeastPrivatePair:
        """Search for the pair by the number of scores whose sign differs, site by site.

        Orthogonal parts of rows of full length attain the bound on the products: half of the signs of a part
        with an even number of columns are changed. The margins of all columns move as well.
        """
        looked = [view] if view else list(sums.columns)
        turned = {site: len(sums.columns[site]) // (1 if view else 2) for site in looked}
        best = cls._with(sums, view, n, turned)
        for site in looked:
            for number in range(len(sums.columns[site]) + 1):
                other = cls._with(sums, view, n, turned | {site: number})
                if other.attained > best.attained * (1.0 + 1e-9):
                    best, turned = other, turned | {site: number}
        return best

    @classmethod
    def _with(cls, sums: Sums, view: str, n: int, turned: Mapping[str, int]) -> LeastPrivatePair:
        """Change the signs of the first scores of some sites."""
        columns = []
        for site, bins in sums.columns.items():
            moves = not view or site == view
            for j, one in enumerate(bins):
                inner = np.arange(one.count) if one.levels else one.leaf_codes
                first, last, half = int(inner[0]), int(inner[-1]), len(inner) // 2
                at = int(inner[half]), int(inner[(len(inner) - 1) // 2])
                if j < turned.get(site, 0):  # opposite ends; all other entities are in the middle
                    columns.append((first, last, at[1], at[0]))
                else:  # two bins below all others; the scores of both are at the lower end
                    second = min(at[0], int(inner[-2]))
                    columns.append((first, second if moves else first, last, last))
        codes = np.array(columns, dtype=np.int64).T
        return cls(sums, view, n, codes[:2], codes[2:])

    @property
    def bins(self) -> list[Bins]:
        """Bins of all columns."""
        return [one for group in self.sums.columns.values() for one in group]

    @property
    def copies(self) -> Ints:
        """Return how many of the others are copies of each of the two: (2,)."""
        return np.array([self.n // 2, self.n - 1 - self.n // 2], dtype=np.int64)

    def frames(self, which: int) -> dict[str, pd.DataFrame]:
        """Return the table of every site; the first row is one of the records."""
        codes = np.vstack([self.records[[which]], np.repeat(self.others, self.copies, axis=0)])
        columns = [
            pd.Series(one.values(code) if one.levels else one.middles[code], name=one.name)
            for one, code in zip(self.bins, codes.T, strict=True)
        ]
        return {site: pd.concat(columns[place], axis=1) for site, place in self.places().items()}

    def places(self) -> dict[str, slice]:
        """Return the positions of each site's columns, which may have more or fewer scores."""
        ends = np.cumsum([0, *map(len, self.sums.columns.values())]).tolist()
        return {c: slice(a, b) for c, (a, b) in zip(self.sums.columns, pairwise(ends), strict=True)}

    # ---- what is expected of a release -----------------------------------------------------------

    def counts(self, site: str, kind: str) -> tuple[Floats, float]:
        """Return expected counts with either record, (2, m), as a site releases them, and their variance."""
        place, request = self.places()[site], self.sums.noise.margins_requested(site)
        tallies = [np.zeros((2, 0))]
        for j, one in enumerate(request.bins, start=place.start):
            if bool(one.levels) is (kind == "levels"):
                rest = self.copies @ [one.tally(self.others[[g], j]) for g in (0, 1)]
                tallies.append(np.array([rest + one.tally(self.records[[r], j]) for r in (0, 1)], float))
        variance = request.of_levels if kind == "levels" else request.of_trees
        return np.hstack(tallies), float(variance)

    def margins(self) -> dict[str, list[Margin]]:
        """Return the margins of the first record's table, without noise."""
        out: dict[str, list[Margin]] = {site: [] for site in self.sums.columns}
        for site, place in self.places().items():
            for j, one in enumerate(self.sums.columns[site], start=place.start):
                rest = self.copies @ [one.tally(self.others[[g], j]) for g in (0, 1)]
                counts = np.asarray(rest + one.tally(self.records[[0], j]), dtype=np.float64)
                out[site].append(Margin.of_counts(one, counts, self.n))
        return out

    def scores(self, margins: Mapping[str, Sequence[Margin]]) -> Ints:
        """Return the scores of both records and both others, by released margins: (4, p), in units."""
        codes = np.vstack([self.records, self.others])
        return np.hstack(
            [self.sums.requested(c).score(margins[c], codes[:, place]) for c, place in self.places().items()]
        )

    def products(self, margins: Mapping[str, Sequence[Margin]]) -> tuple[Floats, Floats]:
        """Return expected sums of products (2, q, q) and of scores (2, q) with either record, by margins."""
        S = np.ldexp(self.scores(margins).astype(np.float64), -PLACES)
        rest = S[2:].T @ (S[2:] * self.copies[:, None])
        return np.array([rest + np.outer(row, row) for row in S[:2]]), self.copies.astype(float) @ S[2:] + S[
            :2
        ]

    def variances(self) -> tuple[Floats, Floats]:
        """Return variances of the noise on products within sites, and between two: (q, q), or inf.

        Only entries above the diagonal count. The observer knows the noise of all sites except the observed
        one.
        """
        widths = list(map(self.sums.noise.width, self.sums.columns))
        owner = np.repeat(np.arange(len(widths)), widths)
        same = owner[:, None] == owner
        upper = np.triu(np.ones_like(same), 1)
        one = self.sums.deviation(0, 1) ** 2
        return np.where(same & upper, one, np.inf), np.where(
            ~same & upper, one if self.view else 2.0 * one, np.inf
        )

    @property
    def claimed(self) -> float:
        """The largest mu by the plan: sqrt(2 rho), from the charge of a record or its part."""
        cost = self.sums.site_cost(self.view) if self.view else self.sums.coordinator_cost()
        return math.sqrt(2.0 * float(cost))

    @property
    def attained(self) -> float:
        """The mu by which this pair can be distinguished when margins are free of noise."""
        squared = 0.0
        for site in self.sums.columns:
            for kind in ("levels", "trees"):
                counts, variance = self.counts(site, kind)
                squared += float(np.square(counts[0] - counts[1]).sum()) / variance
        products, totals = self.products(self.margins())
        moved = np.square(products[0] - products[1])
        if self.sums.moments:
            by_score = np.diag(moved) + np.square(totals[0] - totals[1])
            squared += float(by_score.sum()) / self.sums.deviation(0, 1) ** 2
        return math.sqrt(squared + sum(float((moved / one).sum()) for one in self.variances()))

    def share(self, margins: Mapping[str, Sequence[Margin]]) -> float:
        """Return the largest share of R^2 of a row of scores at a site; a value above 1 is a fault."""
        S, places = self.scores(margins).astype(object), self.sums.noise.places()
        radius = self.sums.noise.radius
        return max(
            float(max((S[:, place] ** 2).sum(axis=1)) / (radius(c) * 4**PLACES))
            for c, place in places.items()
        )


# ----------------------------------------------------------------------------------------------------
# Releases of one of two records through real sites, and the statistics that distinguish the two.

PARTS = ("margins", "own products", "products of two", "squares and sums")
"""Parts of the observation; squares and sums of scores only if they are released."""
CHARGED_SHORT = 1e-12


class NoiseRevealingMechanism(NoiseMechanism):
    """Replies of a site that reveals its noise to the observer, who can then remove it."""

    def add(
        self,
        request: Request,
        step: Step,
        owed: Mapping[str, NoiseRequired | RepeatedRelease],
        arrays: Mapping[str, Array],
    ) -> tuple[dict[str, Array], dict[str, str]]:
        """Charge, and remove the noise again."""
        return dict(arrays), super().add(request, step, owed, arrays)[1]


class ColludingSite(Site):
    """A site that colludes with the observer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        own = self._noise
        self._noise = NoiseRevealingMechanism(own.site, own.policy, own.site_ledger, own.table, own.keys)


@dataclass(frozen=True, slots=True, eq=False)
class ObservedRelease:
    """The observation of one release: margins, sums of products, noisy counts by site and kind.

    And faults.
    """

    margins: Mapping[str, list[Margin]]
    sums: SumsByGroup
    counts: Mapping[tuple[str, str], Floats]
    short: tuple[str, ...]

    def log_ratios(self, pair: LeastPrivatePair) -> Floats:
        """Return the log likelihood ratio of the first record to the second, by :data:`PARTS`: (4,).

        Margins come first; the distribution of the products is conditional on the released margins.
        """
        margins, moments, sums = 0.0, 0.0, self.sums
        for (site, kind), counts in self.counts.items():
            expected, variance = pair.counts(site, kind)
            margins += _ratio(counts, expected, variance)
        products, totals = pair.products(self.margins)
        both = [_ratio(sums.products[0], products, variance) for variance in pair.variances()]
        if pair.sums.moments:
            # The others know their own values without noise, and these do not move.
            at = pair.sums.noise.places()[pair.view] if pair.view else slice(None)
            squares, of_one = np.diagonal(products, axis1=1, axis2=2), pair.sums.deviation(0, 1) ** 2
            moments = _ratio(sums.squares[0][at], squares[:, at], of_one)
            moments += _ratio(sums.totals[0][at], totals[:, at], of_one)
        return np.array([margins, *both, moments])


def _ratio(found: Floats, expected: Floats, variance: Floats | float) -> float:
    """Return the log likelihood ratio of two normal distributions with the same variance."""
    moved, middle = expected[0] - expected[1], 0.5 * (expected[0] + expected[1])
    return float((moved * (found - middle) / variance).sum())


@dataclass(frozen=True, eq=False)
class Releases:
    """Makes releases of either record, each by new sites with new keys and a budget for one release."""

    pair: LeastPrivatePair
    policy: Policy
    family: str

    @cached_property
    def tables(self) -> list[dict[str, pd.DataFrame]]:
        """Tables of all sites, with either record."""
        return [self.pair.frames(which) for which in (0, 1)]

    def make(self, which: int) -> ObservedRelease:
        """Release a table with the first or the second record."""
        pair = self.pair
        sites = _acquainted(
            (ColludingSite if pair.view not in ("", client) else Site)(client, frame, self.policy)
            for client, frame in self.tables[which].items()
        )
        replies: list[Reply] = []
        requester = SecureProductSession(self.family, secrets.token_hex(8), None)
        margins, sums = LocalEngine(sites).run(_kept(self._protocol(requester), replies), Ledger())
        counts = {
            (reply.site, kind): reply.arrays[kind].astype(np.float64)
            for reply in replies
            if "levels" in reply.arrays
            for kind in ("levels", "trees")
        }
        return ObservedRelease(margins, sums, counts, _charged_short(sites, pair.sums.site_cost))

    def _protocol(
        self, requester: SecureProductSession
    ) -> FitProtocol[tuple[dict[str, list[Margin]], SumsByGroup]]:
        """Request everything that a synthesis releases; its later computations cost nothing."""
        sums, n = self.pair.sums, self.pair.n
        names = {site: tuple(one.name for one in bins) for site, bins in sums.columns.items()}
        yield [requester.request(site, "find_complete", to_json(some)) for site, some in names.items()]
        every = {site: np.arange(n) for site in names}
        present = Participation(n, every, {site: np.ones(n, dtype=np.bool_) for site in names})
        margins = yield from request_margins(requester, sums.noise, present, sums.site_cost)
        requests = {site: sums.requested(site) for site in names}
        group = {site: np.zeros(n, dtype=np.int64) for site in names}
        found = yield from request_pattern_sums(
            requester, sums.noise, requests, group, present, margins, tuple(names)
        )
        return margins, found


def _acquainted(sites: Iterable[Site]) -> dict[str, Site]:
    """Return sites by name, each of which knows the keys of the others."""
    named = {site.name: site for site in sites}
    fingerprints = {name: site.fingerprint for name, site in named.items()}
    for site in named.values():
        site.trust.pinned.update(fingerprints)
    return named


def _charged_short(sites: Mapping[str, Site], cost: Callable[[str], Fraction]) -> tuple[str, ...]:
    """Return the sites that were charged less than a release costs."""
    return tuple(
        name
        for name, site in sites.items()
        if float(site.site_ledger.charges.spent) < float(cost(name)) - CHARGED_SHORT
    )


def _kept(protocol: FitProtocol[Fit], replies: list[Reply]) -> FitProtocol[Fit]:
    """Run a protocol, and keep the replies."""
    requests: Sequence[Request] = next(protocol)
    while True:
        got = yield list(requests)
        replies += got
        try:
            requests = protocol.send(got)
        except StopIteration as stop:
            fit: Fit = stop.value
            return fit


# ----------------------------------------------------------------------------------------------------
# Releases over the rows of several sites, one of which has values or is missing.

ROW_PARTS = ("margins", "products")


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedSum:
    """An array of one site: what was owed, and the sums without and with noise."""

    name: str
    request: Request
    step: Step
    owed: NoiseRequired
    exact: Floats
    noisy: Floats


class RecordingMechanism(NoiseMechanism):
    """Replies of a site whose sums are recorded for the audit."""

    recorded: list[ReleasedSum]

    def add(
        self,
        request: Request,
        step: Step,
        owed: Mapping[str, NoiseRequired | RepeatedRelease],
        arrays: Mapping[str, Array],
    ) -> tuple[dict[str, Array], dict[str, str]]:
        """Charge, add noise, and record the arrays."""
        out = super().add(request, step, owed, arrays)
        for name, one in owed.items():
            if isinstance(one, NoiseRequired) and arrays[name].size:
                both = (held[name].astype(np.float64) for held in (arrays, out[0]))
                self.recorded.append(ReleasedSum(name, request, step, one, *both))
        return out


class RecordingSite(Site):
    """A site of an audit over rows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        own = self._noise
        noise = RecordingMechanism(own.site, own.policy, own.site_ledger, own.table, own.keys)
        noise.recorded = self.recorded = list[ReleasedSum]()
        self._noise = noise


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The log likelihood ratio of the first record by parts, and what an audit checks of a release.

    `noise` is in standard deviations by array, `squared` is the square of the distance of both tables in
    standard deviations, `longest` the largest squared length of a row over that which is charged.
    """

    log_ratios: Floats
    noise: Mapping[str, Floats]
    squared: float
    longest: float
    short: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RowReleases:
    """Makes releases over rows, by new sites with new keys and a budget for one release each.

    One row of the first site has the last bin of every column, or no value. All other rows are in the two
    middle bins. The observer has the sums of all sites, knows all other rows, and the noise of as many sites
    as may collude.
    """

    plan: NoisePlan
    policy: Policy
    family: str
    release: Callable[..., FitProtocol[Any]]

    @cached_property
    def tables(self) -> list[dict[str, pd.DataFrame]]:
        """Tables of all sites, with values in the first row, and without."""
        assert self.plan.rows is not None
        n, out = self.plan.rows.n, list[dict[str, pd.DataFrame]]()
        for has_values in (True, False):
            columns = {}
            for bins in self.plan.columns[ALL]:
                inner = np.arange(bins.count) if bins.levels else bins.leaf_codes
                codes = inner[(len(inner) - np.arange(n) % 2) // 2]
                codes[0] = inner[-1]
                values = pd.Series(bins.values(codes) if bins.levels else bins.middles[codes], dtype=object)
                columns[bins.name] = values.where(has_values | (np.arange(n) > 0), None)
            table, ends = pd.DataFrame(columns), np.cumsum([0, *self.plan.rows.records.values()]).tolist()
            parts = zip(self.plan.rows.records, pairwise(ends), strict=True)
            out.append({site: table.iloc[a:b].reset_index(drop=True) for site, (a, b) in parts})
        return out

    def make(self, which: int) -> Observation:
        """Release a table with the values of the row (0), or without (1), and compare both."""
        assert self.plan.rows is not None
        recording = [RecordingSite(*held, self.policy) for held in self.tables[which].items()]
        sites = _acquainted(recording)
        session, masked = secrets.token_hex(8), self.plan.rows.masked_at
        protocol = self.release(
            SecureProductSession(self.family, session, None), self.plan, dict.fromkeys(sites, self.policy)
        )
        if masked:
            protocol = masked_protocol(protocol, masked, session, sums_only=True)
        LocalEngine(sites).run(protocol, Ledger())
        honest = self.plan.rows.honest
        first, *others = [site.recorded for site in recording[:honest]]
        name, table = next(iter(self.tables[1 - which].items()))
        other = Site(name, table, self.policy).data
        ratios, noise, squared, longest = np.zeros(len(ROW_PARTS)), {}, 0.0, 0.0
        for place, one in enumerate(first):
            arrays, _ = one.step.run(other, State(name), one.request.text, **one.request.arrays)
            moved = (one.exact - arrays[one.name]) * (1.0 if which == 0 else -1.0)
            added = one.noisy - one.exact + sum(held[place].noisy - held[place].exact for held in others)
            variance = float(one.owed.variance) * honest
            length = float(moved @ moved)
            # From the middle between both tables.
            middle = added + moved * (0.5 if which == 0 else -0.5)
            ratios[ROW_PARTS.index("products" if one.name == "products" else "margins")] += (
                moved @ middle / variance
            )
            noise[f"{one.name} of all sites"] = added / math.sqrt(variance)
            squared += length / variance
            longest = max(longest, length / float(one.owed.squared))
        # Shares of the noise are rounded up, so that the charge is a little less than planned.
        cost = sum(
            (Fraction(one.owed.squared) / (2 * honest * one.owed.variance) for one in first), Fraction()
        )
        return Observation(ratios, noise, squared, longest, _charged_short(sites, lambda _: cost))
