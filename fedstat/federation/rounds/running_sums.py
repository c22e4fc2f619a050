"""Running sums of institutions' columns with one institution's numbers: what is asked to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedstat.federation.crypto import product as secure
from fedstat.federation.crypto import running_sums as running
from fedstat.federation.message import Ask
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.product_steps import Part, as_bytes
from fedstat.federation.rounds.products import Conversation
from fedstat.federation.rounds.running_steps import NO_GROUPS, name_of
from fedstat.kernels.ring import fractional_bits
from fedstat.records import to_json
from fedstat.typing import Array, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """Columns of an institution, `width` in number, that are opened once for some `rounds` of sums.

    `columns` is what its family calls them; they are of its entities at positions `only` (m,) among its own,
    and at `rows` (m,) among those of the fit.
    """

    site: str
    columns: str
    width: int
    only: Ints
    rows: Ints
    rounds: int


@dataclass(frozen=True, slots=True)
class RunningSums:
    """What is opened for sums with numbers of `holder`, of `n` entities."""

    conversation: Conversation
    holder: str
    openings: Sequence[Opening]
    n: int

    def dealers(self, sites: Sequence[str]) -> dict[str, str]:
        """Who deals for each institution and the holder; a ModelError where nobody can."""
        owners = dict.fromkeys(one.site for one in self.openings)
        return {k: self.conversation.dealer(k, self.holder, sites) for k in owners}

    def begin(self, dealers: Mapping[str, str]) -> Rounds[None]:
        """Deal, and open the columns; keys are agreed, and columns are ready."""
        parts = [self._part(one, dealers[one.site]) for one in self.openings]
        replies = iter((yield list(self._deal_asks(parts))))
        dealt = [self._dealt(next(replies).arrays) if part.dealer else deal(part) for part in parts]
        ask, together = self.conversation.ask, list(zip(self.openings, parts, dealt, strict=True))
        opened = yield [
            ask(one.site, "open_columns", to_json(part), only=one.only, dealt=for_a)
            for one, part, (for_a, _) in together
        ]
        yield [
            ask(
                self.holder,
                "take_columns",
                to_json(self._part(one, part.dealer, first=False)),
                dealt=for_b,
                opened=reply.arrays["opened"],
                rows=one.rows,
            )
            for (one, part, (_, for_b)), reply in zip(together, opened, strict=True)
        ]

    def _part(self, one: Opening, dealer: str, first: bool = True) -> Part:
        """Describe one opening to one side."""
        return Part(
            number=name_of(one.columns, one.site),
            product=running.of_rounds(one.site, self.holder, len(one.rows), one.width, one.rounds),
            bits=fractional_bits(self.n),
            columns=one.columns,
            first=first,
            peer=self.holder if first else one.site,
            dealer=dealer,
        )

    def _deal_asks(self, parts: Sequence[Part]) -> Iterator[Ask]:
        for part in parts:
            if part.dealer:
                yield self.conversation.ask(part.dealer, "deal_sums", to_json(part))

    def _dealt(self, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
        return arrays["for_a"], arrays["for_b"]


def deal(part: Part) -> tuple[Array, Array]:
    """Deal at the coordinator, who sits at no institution."""
    seeds = secure.new_seed(), secure.new_seed()
    digest = part.product.digest("", part.number, part.bits, NO_GROUPS)
    share = running.deal(part.product, *(secure.bind_seed(seed, digest) for seed in seeds))
    return as_bytes(seeds[0]), as_bytes(seeds[1] + share.tobytes())
