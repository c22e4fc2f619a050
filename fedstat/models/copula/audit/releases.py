"""Releases of one of two records through the doors of sites made for each, and what tells the two apart."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fedstat.federation.account.ledger import Ledger
from fedstat.federation.door.owner.charging import NoiseOwed, NoisyAnswers
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.site import Site
from fedstat.federation.message import Ask, Reply, Step
from fedstat.federation.rounds.engine import Fit, LocalEngine, Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.models.copula.audit.pair import WorstPair
from fedstat.models.copula.margins import Margin
from fedstat.models.copula.protocol import Present, SumsByGroup, ask_margins, ask_sums
from fedstat.records import to_json
from fedstat.typing import Array, Floats

PARTS = ("margins", "own products", "products of two", "squares and sums")
"""What is seen; of squares and sums of scores only where they are released."""
CHARGED_SHORT = 1e-12


class NoiseKnown(NoisyAnswers):
    """Answers of a site that tells whoever looks its noise: what leaves is as if there were none."""

    def add(
        self, ask: Ask, step: Step, owed: Mapping[str, NoiseOwed], arrays: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, str]]:
        """Charge, and take the noise off again."""
        return dict(arrays), super().add(ask, step, owed, arrays)[1]


class ColludingSite(Site):
    """A site that has joined forces with whoever looks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        own = self._noise
        self._noise = NoiseKnown(own.site, own.policy, own.account, own.table, own.keys)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What is seen of one release: margins, sums of products, noisy counts by site and kind, and faults."""

    margins: Mapping[str, list[Margin]]
    sums: SumsByGroup
    counts: Mapping[tuple[str, str], Floats]
    short: tuple[str, ...]

    def log_ratios(self, pair: WorstPair) -> Floats:
        """Return the log likelihood ratio of the first record to the second, by :data:`PARTS`: (4,).

        Margins come first; the law of the products is that given the margins as released.
        """
        margins, moments, sums = 0.0, 0.0, self.sums
        for (client, kind), counts in self.counts.items():
            expected, variance = pair.counts(client, kind)
            margins += _ratio(counts, expected, variance)
        products, totals = pair.products(self.margins)
        both = [_ratio(sums.products[0], products, variance) for variance in pair.variances()]
        if pair.sums.moments:
            # What others have themselves is known without noise, and does not move.
            at = pair.sums.noise.places()[pair.view] if pair.view else slice(None)
            squares, of_one = np.diagonal(products, axis1=1, axis2=2), pair.sums.deviation(0, 1) ** 2
            moments = _ratio(sums.squares[0][at], squares[:, at], of_one)
            moments += _ratio(sums.totals[0][at], totals[:, at], of_one)
        return np.array([margins, *both, moments])


def _ratio(found: Floats, expected: Floats, variance: Floats | float) -> float:
    """Return the log likelihood ratio of two normal laws with the same variance."""
    moved, middle = expected[0] - expected[1], 0.5 * (expected[0] + expected[1])
    return float((moved * (found - middle) / variance).sum())


@dataclass(frozen=True, eq=False)
class Releases:
    """Makes releases of either record, each by new sites with new keys and a budget for one."""

    pair: WorstPair
    policy: Policy
    family: str

    @cached_property
    def tables(self) -> list[dict[str, pd.DataFrame]]:
        """Tables of all sites, with either record."""
        return [self.pair.frames(which) for which in (0, 1)]

    def make(self, which: int) -> Seen:
        """Release a table with the first or the second record."""
        pair, frames = self.pair, self.tables[which]
        sites = {
            client: (ColludingSite if pair.view not in ("", client) else Site)(client, frame, self.policy)
            for client, frame in frames.items()
        }
        fingerprints = {client: site.fingerprint for client, site in sites.items()}
        for site in sites.values():
            site.trust.pinned.update(fingerprints)
        replies: list[Reply] = []
        asking = Conversation(self.family, secrets.token_hex(8), None)
        margins, sums = LocalEngine(sites).run(_kept(self._protocol(asking), replies), Ledger())
        counts = {
            (reply.site, kind): reply.arrays[kind].astype(np.float64)
            for reply in replies
            if "levels" in reply.arrays
            for kind in ("levels", "trees")
        }
        short = tuple(
            client
            for client, site in sites.items()
            if float(site.account.charges.spent) < float(pair.sums.site_cost(client)) - CHARGED_SHORT
        )
        return Seen(margins, sums, counts, short)

    def _protocol(self, asking: Conversation) -> Rounds[tuple[dict[str, list[Margin]], SumsByGroup]]:
        """Ask for all that a synthesis releases; what it makes of that costs nothing."""
        sums, n = self.pair.sums, self.pair.n
        names = {client: tuple(one.name for one in bins) for client, bins in sums.columns.items()}
        yield [asking.ask(client, "find_complete", to_json(some)) for client, some in names.items()]
        every = {client: np.arange(n) for client in names}
        present = Present(n, every, {client: np.ones(n, dtype=np.bool_) for client in names})
        margins = yield from ask_margins(asking, sums.noise, present)
        asks = {client: sums.asked(client) for client in names}
        group = {client: np.zeros(n, dtype=np.int64) for client in names}
        found = yield from ask_sums(asking, sums.noise, asks, group, present, margins, tuple(names))
        return margins, found


def _kept(protocol: Rounds[Fit], replies: list[Reply]) -> Rounds[Fit]:
    """Run a protocol, and keep the replies."""
    asks: Sequence[Ask] = next(protocol)
    while True:
        got = yield list(asks)
        replies += got
        try:
            asks = protocol.send(got)
        except StopIteration as stop:
            fit: Fit = stop.value
            return fit
