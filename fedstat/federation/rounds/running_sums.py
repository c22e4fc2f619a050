"""Running sums of institutions' columns with one institution's numbers: what is asked to begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstat.federation.crypto import product as secure
from fedstat.federation.crypto import running_sums as running
from fedstat.federation.message import Ask
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.product_steps import Part, as_bytes
from fedstat.federation.rounds.products import Conversation
from fedstat.federation.rounds.running_steps import NO_GROUPS
from fedstat.kernels.ring import fractional_bits
from fedstat.records import to_json
from fedstat.typing import Array, Ints


@dataclass(frozen=True, slots=True)
class RunningSums:
    """Columns of `widths` of institutions whose entities are at `rows`, with numbers of `holder`.

    Numbers of `n` entities, in `rounds` rounds at most.
    """

    conversation: Conversation
    holder: str
    rows: Mapping[str, Ints]
    widths: Mapping[str, int]
    n: int
    rounds: int

    def dealers(self, sites: Sequence[str]) -> dict[str, str]:
        """Who deals for each institution and the holder; a ModelError where nobody can."""
        return {k: self.conversation.dealer(k, self.holder, sites) for k in self.rows}

    def part(self, k: str, dealer: str, first: bool) -> Part:
        """Describe the sums of one institution to one side."""
        product = running.of_rounds(k, self.holder, len(self.rows[k]), self.widths[k], self.rounds)
        return Part(
            number=f"sums of {k}",
            product=product,
            bits=fractional_bits(self.n),
            columns="",
            first=first,
            peer=self.holder if first else k,
            dealer=dealer,
        )

    def deal(self, part: Part) -> tuple[Array, Array]:
        """Deal at the coordinator, who sits at no institution."""
        seeds = secure.new_seed(), secure.new_seed()
        digest = part.product.digest("", part.number, part.bits, NO_GROUPS)
        share = running.deal(part.product, *(secure.bind_seed(seed, digest) for seed in seeds))
        return as_bytes(seeds[0]), as_bytes(seeds[1] + share.tobytes())

    def deal_asks(self, dealers: Mapping[str, str]) -> list[Ask]:
        """Ask institutions for the triples."""
        return [
            self.conversation.ask(dealer, "deal_sums", to_json(self.part(k, dealer, True)))
            for k, dealer in dealers.items()
            if dealer
        ]

    def begin(self, dealers: Mapping[str, str]) -> Rounds[None]:
        """Deal, and open the columns; keys are agreed, and columns are ready."""
        replies = iter((yield self.deal_asks(dealers)))
        dealt = {}
        for k, dealer in dealers.items():
            if dealer:
                arrays = next(replies).arrays
                dealt[k] = arrays["for_a"], arrays["for_b"]
            else:
                dealt[k] = self.deal(self.part(k, "", True))
        ask = self.conversation.ask
        opened = yield [
            ask(k, "open_columns", to_json(self.part(k, dealers[k], True)), dealt=dealt[k][0]) for k in dealt
        ]
        yield [
            ask(
                self.holder,
                "take_columns",
                to_json(self.part(k, dealers[k], False)),
                dealt=dealt[k][1],
                opened=reply.arrays["opened"],
                rows=self.rows[k],
            )
            for k, reply in zip(dealt, opened, strict=True)
        ]
