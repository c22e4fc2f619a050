"""Products of pairs of institutions' columns by secure multiplication, side by side.

Keys, triples, openings, shares: :mod:`fedstat.federation.crypto.product` says what each is for, and who must
not collude with whom.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.crypto import product as secure
from fedstat.federation.message import Ask, Reply
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.key_agreement import agree_keys
from fedstat.federation.rounds.product_steps import Part, as_bytes
from fedstat.kernels.ring import fractional_bits
from fedstat.records import to_json
from fedstat.typing import Array, Floats, Ints


@dataclass(frozen=True, slots=True)
class Side:
    """Columns of one client that take part in products, as its family names them.

    `place` is where they stand in the matrix of products; `rows` (m,) are the positions of its entities among
    those of the fit, ascending; `code` (m,) the pattern of each by which products are summed, -1 for those
    that count as missing here.
    """

    site: str
    columns: str
    place: slice
    rows: Ints
    code: Ints

    @property
    def width(self) -> int:
        """How many columns."""
        return int(self.place.stop - self.place.start)

    @property
    def present(self) -> Ints:
        """Positions of the entities that do not count as missing."""
        return self.rows[self.code >= 0]


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A product of two sides, (groups, p, q), and who dealt; empty for the coordinator."""

    a: Side
    b: Side
    products: Floats
    dealer: str


def multiply_sides(
    family: str,
    pairs: Sequence[tuple[Side, Side]],
    sites: Sequence[str],
    groups: int,
    n: int,
    session: str,
    at: str | None,
    otherwise: str = "",
) -> Rounds[list[Multiplied]]:
    """Run the products of pairs of sides side by side: keys, triples, openings, shares.

    Parameters
    ----------
    family : str
        Whose steps the institutions run.
    pairs : sequence of (Side, Side)
        At different institutions.
    sites : sequence of str
        Institutions that may deal; they agree on new keys.
    groups, n : int
        Patterns, and entities of the fit.
    session : str
    at : str or None
        Where the coordinator sits.
    otherwise : str
        What else the family offers where nobody can deal; ends the error.

    Raises
    ------
    ModelError
        There is nobody to deal for two institutions.
    """
    if not pairs:
        return []
    runs = [
        Run.of(family, number, a, b, choose_dealer(a.site, b.site, sites, at, otherwise), groups, n)
        for number, (a, b) in enumerate(pairs)
    ]
    yield from agree_keys(sites, session)
    dealt = yield [run.deal_ask(session) for run in runs if run.dealer]
    sealed = iter(dealt)
    for run in runs:
        if run.dealer:
            reply = next(sealed)
            run.for_a, run.for_b = reply.arrays["for_a"], reply.arrays["for_b"]
        else:
            run.deal()
    replies = yield [one for run in runs for one in run.open_asks(session)]
    shares = yield [
        one
        for run, a, b in zip(runs, replies[::2], replies[1::2], strict=True)
        for one in run.share_asks(session, a.arrays["opened"], b.arrays["opened"])
    ]
    return [run.combine(a, b) for run, a, b in zip(runs, shares[::2], shares[1::2], strict=True)]


@dataclass(slots=True)
class Run:
    """One secure product on its way."""

    family: str
    number: str
    a: Side
    b: Side
    dealer: str
    product: secure.MatrixProduct
    bits: int
    at_a: Ints
    at_b: Ints
    group: Ints
    for_a: Array
    for_b: Array

    @classmethod
    def of(
        cls,
        family: str,
        number: int,
        a: Side,
        b: Side,
        dealer: str,
        groups: int,
        n: int,
    ) -> Run:
        """Find the entities that both have."""
        common, at_a, at_b = np.intersect1d(a.present, b.present, assume_unique=True, return_indices=True)
        at_a, at_b = np.flatnonzero(a.code >= 0)[at_a], np.flatnonzero(b.code >= 0)[at_b]
        product = secure.MatrixProduct(a.site, b.site, len(common), a.width, b.width, groups)
        nothing = np.empty(0, dtype=np.uint8)
        bits = fractional_bits(n)
        group = a.code[at_a]
        return cls(family, str(number), a, b, dealer, product, bits, at_a, at_b, group, nothing, nothing)

    def describe(self, first: bool) -> str:
        """Describe one client's part of it."""
        side, peer = (self.a, self.b) if first else (self.b, self.a)
        part = Part(self.number, self.product, self.bits, side.columns, first, peer.site, self.dealer)
        return to_json(part)

    def deal_ask(self, session: str) -> Ask:
        """Ask a third institution for a triple."""
        return Ask(
            self.dealer, self.family, "deal_product", {"group": self.group}, session, self.describe(True)
        )

    def deal(self) -> None:
        """Deal a triple at the coordinator, who sits at no institution."""
        seed_a, seed_b = secure.new_seed(), secure.new_seed()
        Z_b = secure.deal(self.product, seed_a, seed_b, self.group)
        self.for_a, self.for_b = as_bytes(seed_a), as_bytes(seed_b + Z_b.tobytes())

    def open_asks(self, session: str) -> tuple[Ask, Ask]:
        """Ask both clients for what they show each other."""
        a = {"rows": self.at_a, "dealt": self.for_a}
        b = {"rows": self.at_b, "dealt": self.for_b}
        return (
            Ask(self.a.site, self.family, "open_product", a, session, self.describe(True)),
            Ask(self.b.site, self.family, "open_product", b, session, self.describe(False)),
        )

    def share_asks(self, session: str, from_a: Array, from_b: Array) -> tuple[Ask, Ask]:
        """Hand each client what the other showed, and ask for its share."""
        number = json.dumps(self.number)
        a, b = {"group": self.group, "opened": from_b}, {"group": self.group, "opened": from_a}
        return (
            Ask(self.a.site, self.family, "share_product", a, session, number),
            Ask(self.b.site, self.family, "share_product", b, session, number),
        )

    def combine(self, a: Reply, b: Reply) -> Multiplied:
        """Put both shares together, in the units of the columns."""
        products = secure.combine(self.product, a.arrays["share"], b.arrays["share"], self.bits)
        if "units" in a.arrays:
            products = products * np.outer(a.arrays["units"], b.arrays["units"])
        return Multiplied(self.a, self.b, products, self.dealer)


def choose_dealer(a: str, b: str, sites: Sequence[str], at: str | None, otherwise: str = "") -> str:
    """Choose who deals for two institutions: a third one, or the coordinator where it is at none ('').

    A ModelError where there are two institutions, and the coordinator sits at one of them.
    """
    if at is None:
        return ""
    third = [site for site in sites if site not in (a, b)]
    if not third:
        raise ModelError(
            f"the coordinator sits at '{at}', and there is no third institution to deal the random numbers "
            f"for products of '{a}' and '{b}'; use from_formula(..., coordinator='apart'){otherwise}"
        )
    return next((site for site in third if site != at), third[0])
