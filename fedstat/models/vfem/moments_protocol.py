"""One exchange of moments by missing pattern; everything after it happens at the coordinator.

Every client releases sums of its own columns and their products; products of two clients' columns come from
secure products, of which each client shows nothing but masked numbers. Patterns with few entities are never
released: their entities count as missing at a client that has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.engine import Rounds
from fedstat.federation.message import Ask
from fedstat.federation.secure import product as secure
from fedstat.federation.secure.steps import agree_keys
from fedstat.kernels.ring import fractional_bits
from fedstat.models.vfem.layout import Layout
from fedstat.models.vfem.moments import PatternMoments
from fedstat.models.vfem.moments_merge import MergePlan, plan_merges
from fedstat.models.vfem.moments_steps import BLOCK, RESPONSE, as_bytes
from fedstat.models.vfem.protocol import FAMILY, ask
from fedstat.typing import Array, Floats, Ints


@dataclass(frozen=True, slots=True)
class Side:
    """Columns of one client that take part in products: its place, its site, its entities and patterns.

    Parameters
    ----------
    site, columns : str
        The institution, and "block" or "response".
    place : slice
        Where the columns stand in the Gram matrix of (1, x, y).
    rows : (m,) array of int
        Positions of its entities among those of the fit, ascending.
    code : (m,) array of int
        Released pattern of each, -1 for those that count as missing here.
    """

    site: str
    columns: str
    place: slice
    rows: Ints
    code: Ints


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the exchange handed over.

    Parameters
    ----------
    moments : PatternMoments
    plan : MergePlan
    dealers : mapping of (str, str) to str
        Who dealt for each pair of institutions; empty for the coordinator.
    """

    moments: PatternMoments
    plan: MergePlan
    dealers: Mapping[tuple[str, str], str]


def exchange_moments(
    layout: Layout,
    names: Mapping[str, tuple[str, ...]],
    session: str,
    at: str | None,
    min_count: int,
) -> Rounds[Exchange]:
    """Obtain the moments of a fit.

    Parameters
    ----------
    layout : Layout
    names : mapping of str to tuple of str
        Columns of every client.
    session : str
    at : str or None
        Where the coordinator sits.
    min_count : int
        Fewest entities of a pattern that is released.

    Raises
    ------
    EstimationError
        More than 5 % of the entities have a pattern with too few.
    ModelError
        There is nobody to deal for two institutions.
    """
    plan = plan_merges(~layout.missing, layout.counts, min_count)
    code = plan.target[layout.code]
    sides = list_sides(layout, plan, code, names)
    G = len(plan.patterns)
    yield [_start_ask(layout, k, session) for k in layout.clients] + [
        ask(layout.active, "start_response", session, keep=layout.response_keep, code=layout.code)
    ]
    sizes = tuple(len(names[k]) for k in layout.clients)
    grams = np.zeros((G, sum(sizes) + 2, sum(sizes) + 2))
    grams[:, 0, 0] = np.bincount(code[code >= 0], minlength=G)
    centre, scale = np.zeros(sum(sizes) + 1), np.ones(sum(sizes) + 1)
    replies = yield [
        ask(s.site, "pattern_sums", session, code=s.code, groups=G, response=s.columns == RESPONSE)
        for s in sides
    ]
    for side, reply in zip(sides, replies, strict=True):
        enter(grams, slice(0, 1), side.place, reply.arrays["sums"][:, None, :])
        grams[:, side.place, side.place] = reply.arrays["grams"]
        here = slice(side.place.start - 1, side.place.stop - 1)
        centre[here], scale[here] = reply.arrays["units"]
    yield from own_products(sides, session, grams)
    dealers = yield from secure_products(sides, layout, session, at, grams)
    moments = PatternMoments(
        layout.clients,
        sizes,
        tuple(name for k in layout.clients for name in names[k]),
        plan.patterns,
        grams[:, 0, 0].copy(),
        grams,
        centre,
        scale,
    )
    return Exchange(moments, plan, dealers)


def _start_ask(layout: Layout, client: str, session: str) -> Ask:
    return ask(
        client,
        "stage_block",
        session,
        keep=layout.keep[client],
        rows=layout.kept[client],
        n=layout.n,
        filled=layout.filled,
    )


def list_sides(
    layout: Layout, plan: MergePlan, code: Ints, names: Mapping[str, tuple[str, ...]]
) -> list[Side]:
    """List what takes part: every client's block, and the response."""
    sides, at = [], 1
    for k, client in enumerate(layout.clients):
        rows = layout.rows[client]
        own = code[rows]
        seen = (own >= 0) & plan.patterns[own, k]
        sides.append(Side(client, BLOCK, slice(at, at + len(names[client])), rows, np.where(seen, own, -1)))
        at += len(names[client])
    return [*sides, Side(layout.active, RESPONSE, slice(at, at + 1), np.arange(layout.n), code)]


def enter(grams: Floats, rows: slice, columns: slice, products: Floats) -> None:
    """Write products into the Gram matrices, on both sides of the diagonal."""
    grams[:, rows, columns] = products
    grams[:, columns, rows] = products.transpose(0, 2, 1)


def own_products(sides: list[Side], session: str, grams: Floats) -> Rounds[None]:
    """Ask the institution that holds the response and a block for their products."""
    response = sides[-1]
    both = [side for side in sides[:-1] if side.site == response.site]
    replies = yield [
        ask(side.site, "sum_with_response", session, code=side.code, groups=len(grams), rows=side.rows)
        for side in both
    ]
    for side, reply in zip(both, replies, strict=True):
        enter(grams, side.place, response.place, reply.arrays["products"][:, :, None])


def secure_products(
    sides: list[Side], layout: Layout, session: str, at: str | None, grams: Floats
) -> Rounds[dict[tuple[str, str], str]]:
    """Run the products of all pairs of institutions side by side: keys, triples, openings, shares."""
    pairs = [(a, b) for a, b in combinations(sides, 2) if a.site != b.site]
    sites = list(dict.fromkeys(side.site for side in sides))
    if not pairs:
        return {}
    yield from agree_keys(sites, session)
    runs = [Run.of(number, a, b, sites, layout, at) for number, (a, b) in enumerate(pairs)]
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
    for run, a, b in zip(runs, shares[::2], shares[1::2], strict=True):
        products = secure.combine(run.product, a.arrays["share"], b.arrays["share"], run.bits)
        enter(grams, run.a.place, run.b.place, products)
    return {(run.a.site, run.b.site): run.dealer for run in runs}


@dataclass(slots=True)
class Run:
    """One secure product on its way."""

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
    def of(cls, number: int, a: Side, b: Side, sites: list[str], layout: Layout, at: str | None) -> Run:
        """Find the entities that both have, and who deals."""
        common, at_a, at_b = np.intersect1d(
            a.rows[a.code >= 0], b.rows[b.code >= 0], assume_unique=True, return_indices=True
        )
        at_a, at_b = np.flatnonzero(a.code >= 0)[at_a], np.flatnonzero(b.code >= 0)[at_b]
        group = a.code[at_a]
        width_a, width_b = a.place.stop - a.place.start, b.place.stop - b.place.start
        G = int(max(a.code.max(), b.code.max())) + 1
        product = secure.MatrixProduct(a.site, b.site, len(common), width_a, width_b, G)
        nothing = np.empty(0, dtype=np.uint8)
        dealer = choose_dealer(a.site, b.site, sites, at)
        bits = fractional_bits(layout.n)
        return cls(str(number), a, b, dealer, product, bits, at_a, at_b, group, nothing, nothing)

    def describe(self, first: bool) -> str:
        """Describe one client's part of it."""
        side, peer = (self.a, self.b) if first else (self.b, self.a)
        return json.dumps(
            {
                "number": self.number,
                "product": asdict(self.product),
                "bits": self.bits,
                "columns": side.columns,
                "first": first,
                "peer": peer.site,
                "dealer": self.dealer,
            }
        )

    def deal_ask(self, session: str) -> Ask:
        """Ask a third institution for a triple."""
        return Ask(self.dealer, FAMILY, "deal_product", {"group": self.group}, session, self.describe(True))

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
            Ask(self.a.site, FAMILY, "open_product", a, session, self.describe(True)),
            Ask(self.b.site, FAMILY, "open_product", b, session, self.describe(False)),
        )

    def share_asks(self, session: str, from_a: Array, from_b: Array) -> tuple[Ask, Ask]:
        """Hand each client what the other showed, and ask for its share."""
        number = json.dumps(self.number)
        a, b = {"group": self.group, "opened": from_b}, {"group": self.group, "opened": from_a}
        return (
            Ask(self.a.site, FAMILY, "share_product", a, session, number),
            Ask(self.b.site, FAMILY, "share_product", b, session, number),
        )


def choose_dealer(a: str, b: str, sites: list[str], at: str | None) -> str:
    """Choose who deals for two institutions: a third one, or the coordinator where it is at none ('').

    Raises
    ------
    ModelError
        There are two institutions, and the coordinator sits at one of them.
    """
    if at is None:
        return ""
    third = [site for site in sites if site not in (a, b)]
    if not third:
        raise ModelError(
            f"exchange='moments': the coordinator sits at '{at}', and there is no third institution to deal "
            f"for '{a}' and '{b}'; use from_formula(..., coordinator='apart')"
        )
    return next((site for site in third if site != at), third[0])
