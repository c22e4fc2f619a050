"""Secure products of several pairs of sites, computed side by side.

Keys, triples, openings, shares: :mod:`fedstat.federation.crypto.secure_product` says what each is for, and
who must not collude with whom.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import ModelError
from fedstat.federation.crypto import secure_product as secure
from fedstat.federation.crypto.secure_product import check_product
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.product_steps import ProductPart, as_bytes, deal_shares
from fedstat.kernels.ring import fractional_bits
from fedstat.typing import Array, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class ProductOperand:
    """Columns of one site that take part in products, as its family names them.

    `place` is where they stand in the matrix of products; `rows` (m,) are the positions of its entities among
    those of the fit, ascending; `code` (m,) the pattern of each by which products are summed, -1 for those
    that count as missing here. `own` (m,) tells which are records of the site, all where it is None: in the
    others means are filled in, and it cannot say which entities they are.
    """

    site: str
    columns: str
    place: slice
    rows: Ints
    code: Ints
    own: Bools | None = None

    @property
    def width(self) -> int:
        """How many columns."""
        return int(self.place.stop - self.place.start)

    @property
    def present(self) -> Ints:
        """Positions of the entities that do not count as missing."""
        return self.rows[self.code >= 0]

    def owns(self, rows: Ints) -> Bools:
        """Which of some of its rows are its own."""
        return np.ones(len(rows), dtype=np.bool_) if self.own is None else self.own[rows]


@dataclass(frozen=True, slots=True)
class PairProduct:
    """A product of two sides, (groups, p, q), and who dealt; empty for the coordinator."""

    a: ProductOperand
    b: ProductOperand
    products: Floats
    dealer: str


@dataclass(frozen=True, slots=True)
class SecureProductSession:
    """Whose steps are asked in which session, and where the coordinator sits: it matters for who may deal.

    `otherwise` is what else the family offers where nobody can; it ends the error.
    """

    family: str
    session: str
    at: str | None
    otherwise: str = ""

    def ask(self, site: str, step: str, text: str = "", **arrays: Any) -> Request:
        """Address one step."""
        given = {name: np.asarray(array) for name, array in arrays.items()}
        return Request(site, self.family, step, given, self.session, text)

    def dealer(self, a: str, b: str, sites: Sequence[str]) -> str:
        """Choose which of the sites deals for two of them; a ModelError where none can."""
        return choose_dealer(a, b, sites, self.at, self.otherwise)

    def multiply(
        self,
        pairs: Sequence[tuple[ProductOperand, ProductOperand]],
        sites: Sequence[str],
        groups: int,
        n: int,
        bits: int | None = None,
        agreed: str = "",
    ) -> FitProtocol[list[PairProduct]]:
        """Run the products of pairs of sides at different sites: keys, triples, openings, shares.

        All `sites` agree on new keys, and may deal; a ModelError where nobody can deal for two of them.
        Products are summed by `groups` patterns of the `n` entities of the fit; columns have `bits`
        fractional bits, by default as many as standardised ones can have. Products are numbered behind what
        has been `agreed`, so that none passes where two institutions were told otherwise.
        """
        if not pairs:
            return []
        bits = fractional_bits(n) if bits is None else bits
        runs = [
            ProductRun.of(self, f"{agreed}{number}", (a, b), self.dealer(a.site, b.site, sites), groups, bits)
            for number, (a, b) in enumerate(pairs)
        ]
        yield from agree_keys(sites, self.session)
        opened = yield from open_runs(runs)
        shares = yield [one for run, both in pair_replies(runs, opened) for one in run.share_asks(both)]
        return [run.combine(*both) for run, both in pair_replies(runs, shares)]

    def keep_shares(
        self,
        pairs: Sequence[tuple[ProductOperand, ProductOperand]],
        sites: Sequence[str],
        groups: int,
        bits: int,
        agreed: str,
        step: str,
    ) -> FitProtocol[None]:
        """Run products of pairs of sides of which each keeps its share, in a `step` of the family.

        Keys are those that were agreed on for products before.
        """
        runs = [
            ProductRun.of(self, f"{agreed}{number}", (a, b), self.dealer(a.site, b.site, sites), groups, bits)
            for number, (a, b) in enumerate(pairs)
        ]
        opened = yield from open_runs(runs)
        yield [one for run, both in pair_replies(runs, opened) for one in run.share_asks(both, step)]


@dataclass(frozen=True, slots=True)
class ProductRun:
    """One secure product on its way; of the m entities that both have, rows at either side and pattern.

    Where means are filled in, `both` (m,) are the entities of which both have a record.
    """

    conversation: SecureProductSession
    number: str
    sides: tuple[ProductOperand, ProductOperand]
    dealer: str
    product: secure.MatrixProduct
    bits: int
    rows: tuple[Ints, Ints]
    group: Ints
    both: Bools | None = None

    @classmethod
    def of(
        cls,
        asking: SecureProductSession,
        number: str,
        sides: tuple[ProductOperand, ProductOperand],
        dealer: str,
        groups: int,
        bits: int,
    ) -> ProductRun:
        """Find the entities that both have."""
        a, b = sides
        common, at_a, at_b = np.intersect1d(a.present, b.present, assume_unique=True, return_indices=True)
        # Positions among the rows of each site, of which some may count as missing.
        rows = np.flatnonzero(a.code >= 0)[at_a], np.flatnonzero(b.code >= 0)[at_b]
        filled = not (a.own is None and b.own is None)
        product = secure.MatrixProduct(a.site, b.site, len(common), a.width, b.width, groups)
        return cls(
            conversation=asking,
            number=number,
            sides=sides,
            dealer=dealer,
            product=product,
            bits=bits,
            rows=rows,
            group=a.code[rows[0]],
            both=a.owns(rows[0]) & b.owns(rows[1]) if filled else None,
        )

    def describe(self, first: bool) -> str:
        """Describe one institution's part of it."""
        own, peer = self.sides if first else self.sides[::-1]
        part = ProductPart(
            number=self.number,
            product=self.product,
            bits=self.bits,
            columns=own.columns,
            first=first,
            peer=peer.site,
            dealer=self.dealer,
        )
        return to_json(part)

    def deal_ask(self) -> Request:
        """Ask a third institution for a triple."""
        return self.conversation.ask(self.dealer, "deal_product", self.describe(True), group=self.group)

    def dealt(self, reply: Reply) -> tuple[Array, Array]:
        """Take what a third institution dealt both institutions."""
        return reply.arrays["for_a"], reply.arrays["for_b"]

    def deal(self) -> tuple[Array, Array]:
        """Deal a triple at the coordinator, who sits at no institution."""
        seed_a, seed_b = secure.new_seed(), secure.new_seed()
        digest = self.product.digest("", self.number, self.bits, self.group)
        bound_a, bound_b = (secure.bind_seed(seed, digest) for seed in (seed_a, seed_b))
        Z_b = deal_shares(self.product, bound_a, bound_b, self.group)
        return as_bytes(seed_a), as_bytes(seed_b + Z_b)

    def open_asks(self, dealt: tuple[Array, Array]) -> list[Request]:
        """Ask both institutions for what they show each other."""
        texts = self.describe(True), self.describe(False)
        more = {} if self.both is None else {"both": self.both}
        asked = zip(self.sides, texts, self.rows, dealt, strict=True)
        return [
            self.conversation.ask(
                side.site, "open_product", text, rows=rows, group=self.group, dealt=one, **more
            )
            for side, text, rows, one in asked
        ]

    def share_asks(self, opened: tuple[Reply, Reply], step: str = "share_product") -> list[Request]:
        """Hand each institution what the other showed, and ask for its share, or that it keeps it."""
        number = json.dumps(self.number)
        return [
            self.conversation.ask(side.site, step, number, opened=other.arrays["opened"])
            for side, other in zip(self.sides, opened[::-1], strict=True)
        ]

    def combine(self, a: Reply, b: Reply) -> PairProduct:
        """Put both shares together, in the units of the columns."""
        products = secure.combine(self.product, a.arrays["share"], b.arrays["share"], self.bits)
        if "check" in a.arrays:  # a share with noise comes without
            check_product(
                self.product,
                a.arrays["share"] + b.arrays["share"],
                a.arrays["check"] + b.arrays["check"],
                (a.arrays["weights"], b.arrays["weights"]),
            )
        if "units" in a.arrays:
            products = products * np.outer(a.arrays["units"], b.arrays["units"])
        return PairProduct(*self.sides, products, self.dealer)


def open_runs(runs: Sequence[ProductRun]) -> FitProtocol[list[Reply]]:
    """Deal triples, and let all institutions open their columns."""
    sealed = iter((yield [run.deal_ask() for run in runs if run.dealer]))
    dealt = [run.dealt(next(sealed)) if run.dealer else run.deal() for run in runs]
    opened = yield [one for run, both in zip(runs, dealt, strict=True) for one in run.open_asks(both)]
    return list(opened)


def pair_replies(
    runs: Sequence[ProductRun], replies: Sequence[Reply]
) -> Iterator[tuple[ProductRun, tuple[Reply, Reply]]]:
    """Give every run the answers of its two institutions."""
    return zip(runs, zip(replies[::2], replies[1::2], strict=True), strict=True)


def choose_dealer(a: str, b: str, sites: Sequence[str], at: str | None, otherwise: str = "") -> str:
    """Choose who deals for two institutions: a third one, or else the coordinator where it is at none ('').

    A ModelError where there are two institutions, and the coordinator sits at one of them.
    """
    third = [site for site in sites if site not in (a, b)]
    if not third and at is None:
        return ""
    if not third:
        raise ModelError(
            f"the coordinator sits at '{at}', and there is no third institution to deal the random numbers "
            f"for products of '{a}' and '{b}'; say coordinator='apart'{otherwise}"
        )
    # The institution where the coordinator sits is told the sums as well: where there is another, that one
    # deals.
    return next((site for site in third if site != at), third[0])
