"""Secure products of several pairs of sites, computed side by side.

Keys, triples, openings, shares: :mod:`fedstat.federation.crypto.secure_product` says what each is for, and
who must not collude with whom.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import ModelError, Remedy
from fedstat.federation.crypto import secure_product as secure
from fedstat.federation.crypto.secure_product import check_product
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.product_steps import (
    ProductPart,
    as_bytes,
    deal_part,
)
from fedstat.federation.tables.supports import PER_COLUMN
from fedstat.kernels.ring import fractional_bits
from fedstat.typing import Array, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class ProductOperand:
    """Columns of one site that take part in products, as its family names them.

    `place` is their position in the matrix of products; `rows` (m,) are the positions of its entities among
    those of the fit, ascending; `code` (m,) the pattern of each by which products are summed, -1 for those
    that count as missing here. `own` (m,) is true for records of the site, or None if all are; the others
    have means filled in, and the site does not know their entities. `supports`
    (:mod:`fedstat.federation.tables.supports`) is the number behind the columns, by default as in a design.
    """

    site: str
    columns: str
    place: slice
    rows: Ints
    code: Ints
    own: Bools | None = None
    supports: int | None = None

    @property
    def width(self) -> int:
        """How many columns."""
        return int(self.place.stop - self.place.start)

    @property
    def n_supports(self) -> int:
        """How many supports."""
        return PER_COLUMN * self.width if self.supports is None else self.supports

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
    """The family and the session of the products, and the site of the coordinator, which limits the dealers.

    `otherwise` is the family's alternative if no site can deal; it ends the error. Sites in `least` require
    that products of fewer rows are counted and refused, see :func:`least_rows`.
    """

    family: str
    session: str
    at: str | None
    otherwise: str = ""
    least: Mapping[str, int] = field(default_factory=dict)

    def request(self, site: str, step: str, text: str = "", **arrays: Any) -> Request:
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

        All `sites` agree on new keys, and may deal; a ModelError if none can deal for two of them.
        Products are summed by `groups` patterns of the `n` entities of the fit; columns have `bits`
        fractional bits, by default as many as standardized ones can have. Products are numbered after what
        has been `agreed`, so that none is released if two sites received different descriptions.
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
        opened = yield from compare_counts(runs, opened)
        shares = yield [one for run, both in pair_replies(runs, opened) for one in run.share_requests(both)]
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
        yield [one for run, both in pair_replies(runs, opened) for one in run.share_requests(both, step)]


@dataclass(frozen=True, slots=True)
class ProductRun:
    """One secure product on its way; of the m entities that both have, rows at either side and pattern.

    Where means are filled in, `both` (m,) are the entities of which both have a record. With `least` its rows
    are counted first, and the counts compared with that number.
    """

    product_session: SecureProductSession
    number: str
    sides: tuple[ProductOperand, ProductOperand]
    dealer: str
    product: secure.MatrixProduct
    bits: int
    rows: tuple[Ints, Ints]
    group: Ints
    both: Bools | None = None
    least: int = 0

    @classmethod
    def of(
        cls,
        requester: SecureProductSession,
        number: str,
        sides: tuple[ProductOperand, ProductOperand],
        dealer: str,
        groups: int,
        bits: int,
    ) -> ProductRun:
        """Find the entities that both have."""
        a, b = sides
        common, at_a, at_b = shared_positions(a.present, b.present)
        # Positions among the rows of each site; some rows may count as missing.
        rows = np.flatnonzero(a.code >= 0)[at_a], np.flatnonzero(b.code >= 0)[at_b]
        filled = not (a.own is None and b.own is None)
        product = secure.MatrixProduct(a.site, b.site, len(common), a.width, b.width, groups)
        return cls(
            product_session=requester,
            number=number,
            sides=sides,
            dealer=dealer,
            product=product,
            bits=bits,
            rows=rows,
            group=a.code[rows[0]],
            least=max(requester.least.get(one.site, 0) for one in sides),
            both=a.owns(rows[0]) & b.owns(rows[1]) if filled else None,
        )

    def describe(self, first: bool) -> str:
        """Describe one site's part of it."""
        return to_json(self._part(first))

    def _part(self, first: bool) -> ProductPart:
        own, peer = self.sides if first else self.sides[::-1]
        return ProductPart(
            number=self.number,
            product=self.product,
            bits=self.bits,
            columns=own.columns,
            first=first,
            peer=peer.site,
            dealer=self.dealer,
            least=self.least,
            supports=(self.sides[0].n_supports, self.sides[1].n_supports) if self.least else (0, 0),
        )

    def deal_request(self) -> Request:
        """Ask a third site for a triple."""
        return self.product_session.request(
            self.dealer, "deal_product", self.describe(True), group=self.group
        )

    def dealt(self, reply: Reply) -> tuple[Array, Array]:
        """Take what a third site dealt both sites."""
        return reply.arrays["for_a"], reply.arrays["for_b"]

    def deal(self) -> tuple[Array, Array]:
        """Deal a triple at the coordinator, who sits at no site."""
        part, seeds = self._part(True), (secure.new_seed(), secure.new_seed())
        Z_b = deal_part(part, part.digest_in("", self.group), seeds, self.group)
        return as_bytes(seeds[0]), as_bytes(seeds[1] + Z_b)

    def open_requests(self, dealt: tuple[Array, Array]) -> list[Request]:
        """Ask both sites for what they show each other."""
        texts = self.describe(True), self.describe(False)
        shared: dict[str, Array] = {} if self.both is None else {"both": self.both}
        if self.group.any():
            shared["group"] = self.group
        requests = []
        for side, text, rows, one in zip(self.sides, texts, self.rows, dealt, strict=True):
            own = shared if len(rows) == len(side.code) else {"rows": rows, **shared}
            requests.append(self.product_session.request(side.site, "open_product", text, dealt=one, **own))
        return requests

    def share_requests(self, opened: tuple[Reply, Reply], step: str = "share_product") -> list[Request]:
        """Hand each site what the other showed, and ask for its share, or that it keeps it."""
        number = json.dumps(self.number)
        return [
            self.product_session.request(side.site, step, number, opened=other.arrays["opened"])
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


def shared_positions(a: Ints, b: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the entities that are in both of two ascending lists, and where they are in each."""
    if np.array_equal(a, b):
        return a, (every := np.arange(len(a))), every
    return np.intersect1d(a, b, assume_unique=True, return_indices=True)


def open_runs(runs: Sequence[ProductRun]) -> FitProtocol[list[Reply]]:
    """Deal triples, and let all sites open their columns."""
    sealed = iter((yield [run.deal_request() for run in runs if run.dealer]))
    dealt = [run.dealt(next(sealed)) if run.dealer else run.deal() for run in runs]
    opened = yield [one for run, both in zip(runs, dealt, strict=True) for one in run.open_requests(both)]
    return list(opened)


def compare_counts(runs: Sequence[ProductRun], opened: Sequence[Reply]) -> FitProtocol[list[Reply]]:
    """Let sites compare the counts of rows with a minimum; what they opened last, in the same order.

    Every site is asked once in a round, for all of its products.
    """
    boxes = [reply.arrays["opened"] for reply in opened]
    places = [place for run, place in zip(runs, range(0, len(boxes), 2), strict=True) if run.least]
    own: dict[str, list[int]] = {}
    for place in places:
        for side, at in zip(runs[place // 2].sides, (place, place + 1), strict=True):
            own.setdefault(side.site, []).append(at)
    for step in ("open_comparison", "share_comparison") if places else ():
        requests = []
        for site, held in own.items():
            received = [boxes[at ^ 1] for at in held]  # of the other site
            numbers = json.dumps([runs[at // 2].number for at in held])
            lengths = np.array([len(box) for box in received])
            given = {"opened": np.concatenate(received), "lengths": lengths}
            requests.append(runs[held[0] // 2].product_session.request(site, step, numbers, **given))
        replies = yield requests
        for held, reply in zip(own.values(), replies, strict=True):
            ends = np.cumsum(reply.arrays["lengths"])[:-1]
            for at, box in zip(held, np.split(reply.arrays["opened"], ends), strict=True):
                boxes[at] = box
    return [replace(reply, arrays={"opened": box}) for reply, box in zip(opened, boxes, strict=True)]


def least_rows(policies: Mapping[str, Policy]) -> dict[str, int]:
    """Return the fewest rows of a product at every site that has them counted."""
    counted = {name: one for name, one in policies.items() if one.products == "counted"}
    return {name: one.min_level_count for name, one in counted.items() if one.min_level_count > 1}


def pair_replies(
    runs: Sequence[ProductRun], replies: Sequence[Reply]
) -> Iterator[tuple[ProductRun, tuple[Reply, Reply]]]:
    """Give every run the answers of its two sites."""
    return zip(runs, zip(replies[::2], replies[1::2], strict=True), strict=True)


def choose_dealer(a: str, b: str, sites: Sequence[str], at: str | None, otherwise: str = "") -> str:
    """Choose who deals for two sites: a third one, or else the coordinator where it is at none ('').

    A ModelError where there are two sites, and the coordinator sits at one of them.
    """
    third = [site for site in sites if site not in (a, b)]
    if not third and at is None:
        return ""
    if not third:
        raise ModelError(
            f"the coordinator sits at '{at}', and there is no third site to deal the random numbers "
            f"for products of '{a}' and '{b}'",
            remedy=Remedy(
                "from_formula(..., coordinator='apart').fit(...)", "say {arguments}{otherwise}"
            ).filled(otherwise=otherwise),
        )
    # The site of the coordinator learns the sums as well: if there is another site, that one deals.
    return next((site for site in third if site != at), third[0])
