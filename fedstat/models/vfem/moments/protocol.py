"""One exchange of moments by missing pattern; everything after it happens at the coordinator.

Every client releases sums of its own columns and their products; products of two clients' columns come from
secure products, of which each client shows nothing but masked numbers. Patterns with few entities are never
released: their entities count as missing at a client that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from fedstat.federation.message import Ask
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.vertical.merges import LARGEST_SHARE, MergePlan, Rule, keep_only, plan_merges
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.blocks.layout import Layout
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.moments.secure_product_steps import BLOCK, RESPONSE
from fedstat.models.vfem.moments.secure_products import Side, multiply_sides
from fedstat.typing import Bools, Floats, Ints

OTHERWISE = ", or fit with exchange='iterative', which releases values per entity"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the exchange handed over.

    Parameters
    ----------
    moments : PatternMoments
    plan : MergePlan
    dealers : mapping of (str, str) to str
        Who dealt for each pair of institutions; empty for the coordinator.
    released : mapping of str to (m,) array of bool
        Which of the entities that a client brought count as seen.
    numbers : mapping of str to int
        Different numbers, each a sum over the entities of a pattern, that hold columns of the institution.
    smallest : int
        Entities behind the smallest of these sums.
    """

    moments: PatternMoments
    plan: MergePlan
    dealers: Mapping[tuple[str, str], str]
    released: Mapping[str, Bools]
    numbers: Mapping[str, int]
    smallest: int


def exchange_moments(
    layout: Layout,
    names: Mapping[str, tuple[str, ...]],
    session: str,
    at: str | None,
    min_count: int,
    max_moved: float = LARGEST_SHARE,
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
        Fewest entities of a pattern that is released, beside :func:`~.pattern_merge.least_entities`.
    max_moved : float
        Largest share of the entities that may count as missing, or be left out, because their pattern is not.

    Raises
    ------
    EstimationError
        Too many entities have a pattern with too few.
    ModelError
        There is nobody to deal for two institutions.
    """
    sizes = tuple(len(names[k]) for k in layout.clients)
    rule = Rule(min_count, sizes)
    plan = plan_merges(~layout.missing, layout.counts, rule, largest_share=max_moved, otherwise=OTHERWISE)
    code = plan.target[layout.code]
    released = {k: plan.shows(code[layout.rows[k]], j) for j, k in enumerate(layout.clients)}
    layout, code = as_released(layout, plan, code, released)
    sides = list_sides(layout, plan, code, names)
    G = len(plan.patterns)
    yield [_start_ask(layout, k, session) for k in layout.clients] + [
        ask(layout.active, "start_response", session, keep=layout.response_keep, code=layout.code)
    ]
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
    return Exchange(
        moments,
        plan,
        dealers,
        released,
        count_numbers(sides, plan),
        int(moments.n.min()),
    )


def as_released(
    layout: Layout, plan: MergePlan, code: Ints, shown: Mapping[str, Bools]
) -> tuple[Layout, Ints]:
    """Lay out a fit of what released patterns show, and its patterns.

    Means over entities that count as missing would tell of these, beside the sums over all others.

    Parameters
    ----------
    layout : Layout
    plan : MergePlan
    code : (n,) array of int
        Released pattern of each entity, -1 for none.
    shown : mapping of str to array of bool
        Which of the entities that a client brought are in a pattern that shows it.
    """
    used = code >= 0
    if used.all() and all(own.all() for own in shown.values()):
        return layout, code
    place = np.cumsum(used) - 1
    kept = {k: place[layout.rows[k][own]] for k, own in shown.items()}
    return replace(
        layout,
        n=int(used.sum()),
        keep={k: keep_only(layout.keep[k], own) for k, own in shown.items()},
        kept=kept,
        rows=kept,
        response_keep=keep_only(layout.response_keep, used),
        code=code[used],
        missing=~plan.patterns,
        counts=np.bincount(code[used], minlength=len(plan.patterns)).astype(float),
    ), code[used]


def count_numbers(sides: list[Side], plan: MergePlan) -> dict[str, int]:
    """Count, by institution, the released sums of its columns and of their products with any column."""
    widths = np.array([side.place.stop - side.place.start for side in sides])
    shown = np.column_stack([plan.patterns, np.ones(len(plan.patterns), dtype=bool)])
    counts: dict[str, int] = {}
    for k, side in enumerate(sides):
        own, others = widths[k], shown @ widths - widths[k]
        each = own + own * (own + 1) // 2 + own * others
        counts[side.site] = counts.get(side.site, 0) + int(each[shown[:, k]].sum())
    for k, side in enumerate(sides[:-1]):  # products of block and response were counted twice
        if side.site == sides[-1].site:
            counts[side.site] -= int(widths[k] * shown[:, k].sum())
    return counts


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
        own = np.where(plan.shows(code[rows], k), code[rows], -1)
        sides.append(Side(client, BLOCK, slice(at, at + len(names[client])), rows, own))
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
    """Multiply the columns of all pairs of institutions that share entities; returns who dealt."""
    apart = [(a, b) for a, b in combinations(sides, 2) if a.site != b.site]
    pairs = [(a, b) for a, b in apart if np.isin(a.present, b.present, assume_unique=True).any()]
    sites = list(dict.fromkeys(side.site for side in sides))
    multiplied = yield from multiply_sides(pairs, sites, len(grams), layout.n, session, at)
    for one in multiplied:
        enter(grams, one.a.place, one.b.place, one.products)
    return {(min(one.a.site, one.b.site), max(one.a.site, one.b.site)): one.dealer for one in multiplied}
