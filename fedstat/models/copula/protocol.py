"""A synthesis, round by round: who is complete, margins, one Gram matrix in noisy shares, its inversion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Literal

import numpy as np

from fedstat.errors import EstimationError, SecurityError
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation, Side
from fedstat.federation.tables.published import PublishedColumn
from fedstat.models.copula.asked import PLACES, NoisePlan
from fedstat.models.copula.inversion import Inversion, invert_products
from fedstat.models.copula.margins import Bins, Margin, tree_depth
from fedstat.models.copula.steps import SCORES
from fedstat.records import to_json
from fedstat.typing import Bools, Floats, Ints

FAR = 6.0
"""Standard deviations of noise beyond which counts do not add up by chance."""
FEW = 0.01
"""Share of the entities that may be in no bin."""
FEWEST = 50
"""Entities of a pair of institutions below which nothing can be said of their columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Present:
    """Which entities take part: `rows` of each institution among all, and which of these are complete."""

    n_entities: int
    rows: Mapping[str, Ints]
    seen: Mapping[str, Bools]

    def table(self, clients: Sequence[str]) -> Bools:
        """Which entities each client has, complete: (n_entities, K)."""
        out = np.zeros((self.n_entities, len(clients)), dtype=np.bool_)
        for k, client in enumerate(clients):
            out[self.rows[client][self.seen[client]], k] = True
        return out

    def count(self, client: str) -> int:
        """Complete entities of a client."""
        return int(np.count_nonzero(self.seen[client]))


@dataclass(frozen=True, slots=True, eq=False)
class CopulaFit:
    """What a synthesis has released, and what was made of it.

    `margins` (p,) in the order of the columns, `products` (p, p) mean products of cut scores with their
    noise, `pairs` (p, p) entities behind each, `noise` (p, p) the deviation of the noise on each mean.
    """

    plan: NoisePlan
    margins: tuple[Margin, ...]
    products: Floats
    pairs: Ints
    noise: Floats
    inversion: Inversion
    method: Literal["complete", "pairs", "em"]
    entities: Mapping[str, int]
    n: int


def plan_columns(
    bounds: Mapping[str, Mapping[str, PublishedColumn]], counts: Mapping[str, int], rho: Fraction
) -> NoisePlan:
    """Choose the bins of all columns, by client, from bounds and numbers of entities."""
    p = sum(map(len, bounds.values()))
    each = float(NoisePlan.of_column(rho, p))
    columns = {
        client: tuple(
            Bins.of(name, column, tree_depth(counts[client], each)) for name, column in described.items()
        )
        for client, described in bounds.items()
    }
    return NoisePlan(rho, columns)


def fit_copula(
    asking: Conversation,
    bounds: Mapping[str, Mapping[str, PublishedColumn]],
    rows: Mapping[str, Ints],
    sites: Sequence[str],
    n_entities: int,
    rho: Fraction,
) -> Rounds[CopulaFit]:
    """Ask for all that a copula is made of.

    Parameters
    ----------
    asking : Conversation
    bounds : mapping
        Public descriptions of the columns of each client.
    rows : mapping of str to (n_k,) array
        Positions of each client's records among all entities.
    sites : sequence of str
        Those that may deal, the clients among them.
    n_entities : int
    rho : Fraction
        The budget.
    """
    clients = list(bounds)
    replies = yield [asking.ask(c, "find_complete", to_json(tuple(bounds[c]))) for c in clients]
    seen = {reply.site: reply.arrays["seen"] for reply in replies}
    present = Present(n_entities, rows, seen)
    counts = {client: present.count(client) for client in clients}
    plan = plan_columns(bounds, counts, rho)
    table = present.table(clients)
    require_pairs(table, clients)
    margins = yield from ask_margins(asking, plan, present)
    products, noise = yield from ask_products(asking, plan, present, margins, sites)
    pairs = _pairs(table, list(map(plan.width, clients)))
    np.divide(products, pairs, out=products)
    blocks = list(plan.places().values())
    flat = [margin for client in clients for margin in margins[client]]
    radii = [float(plan.radius(client)) for client in clients]
    used = int(np.count_nonzero(table.any(axis=1)))
    return CopulaFit(
        plan=plan,
        margins=tuple(flat),
        products=products,
        pairs=pairs,
        noise=noise / pairs,
        inversion=invert_products(products, flat, blocks, radii),
        method="complete" if table[table.any(axis=1)].all() else "pairs",
        entities=counts,
        n=used,
    )


def ask_margins(asking: Conversation, plan: NoisePlan, present: Present) -> Rounds[dict[str, list[Margin]]]:
    """Ask every client for its margins, and make them of the noisy counts."""
    asks = {client: plan.margins_asked(client) for client in plan.columns}
    replies = yield [
        asking.ask(client, "release_margins", to_json(asked), keep=present.seen[client])
        for client, asked in asks.items()
    ]
    out: dict[str, list[Margin]] = {}
    for reply in replies:
        asked, n = asks[reply.site], present.count(reply.site)
        held = {name: list(reply.arrays[name].astype(np.float64)) for name in ("levels", "trees")}
        found = []
        for bins in asked.bins:
            place, variance = ("levels", asked.of_levels) if bins.levels else ("trees", asked.of_trees)
            counts = np.array(held[place][: bins.released])
            del held[place][: bins.released]
            _check_total(reply.site, bins, counts, n, math.sqrt(variance))
            found.append(Margin.of_counts(bins, counts, n))
        out[reply.site] = found
    return out


def _check_total(site: str, bins: Bins, counts: Floats, n: int, deviation: float) -> None:
    """Require that the counts of all bins add up to all entities, as far as noise lets that be told.

    Values that are in no bin were not told by an error, which no budget would have paid for.
    """
    parts = counts if bins.levels else counts[:2]
    short = n - float(parts.sum())
    if short > max(FEW * n, FAR * deviation * math.sqrt(len(parts))):
        what = "levels that its bounds do not list" if bins.levels else "values that are no numbers"
        raise EstimationError(
            f"column '{bins.name}' at '{site}' has {what}, at about {short:,.0f} of {n:,} entities by the "
            "noisy counts. Bounds list all levels that there can be, written as in the table; what was "
            "charged for the margins stays charged, and asking for the same again is free"
        )


def ask_products(
    asking: Conversation,
    plan: NoisePlan,
    present: Present,
    margins: Mapping[str, Sequence[Margin]],
    sites: Sequence[str],
) -> Rounds[tuple[Floats, Floats]]:
    """Ask for sums of products of cut scores: own blocks at home, cross blocks by secure products.

    Returned are the matrix (q, q), symmetric, and the standard deviations of its noise.
    """
    clients = list(plan.columns)
    group = {client: np.where(present.seen[client], 0, -1) for client in clients}
    replies = yield [
        asking.ask(
            client,
            "release_gram",
            to_json(plan.gram_asked(client, 1)),
            probabilities=np.concatenate([margin.probabilities for margin in margins[client]]),
            group=group[client],
        )
        for client in clients
    ]
    places = plan.places()
    q = sum(map(plan.width, clients))
    upper = np.zeros((q, q))
    for reply in replies:
        place = places[reply.site]
        i, j = np.triu_indices(place.stop - place.start, 1)
        upper[place.start + i, place.start + j] = np.ldexp(
            reply.arrays["grams"][0].astype(np.float64), -2 * PLACES
        )
    sides = {
        client: Side(client, SCORES, places[client], present.rows[client], group[client])
        for client in clients
    }
    pairs = [(sides[a], sides[b]) for a, b in combinations(clients, 2)]
    multiplied = yield from asking.multiply(pairs, sites, 1, present.n_entities, PLACES, plan.agreed)
    for one in multiplied:
        upper[one.a.place, one.b.place] = one.products[0]
    owners = np.repeat(np.arange(len(clients)), list(map(plan.width, clients)))
    shares = np.where(owners[:, None] == owners, 1, 2)
    noise = np.sqrt(shares) * plan.product_deviation(1)
    # Shares that do not fit together add up to random words: far beyond any sum of cut scores.
    largest = float(max(map(plan.radius, clients)))
    if (np.abs(upper) > largest * present.n_entities + 10.0 * noise).any():
        raise SecurityError(
            "the shares of a product do not fit together: what was dealt, or a share, is wrong; nothing of "
            "it is used"
        )
    return upper + upper.T, noise


def _pairs(table: Bools, sizes: Sequence[int]) -> Ints:
    """Count the entities behind each pair of columns: (p, p)."""
    held = table.astype(np.int64)
    return np.repeat(np.repeat(held.T @ held, sizes, axis=0), sizes, axis=1)


def require_pairs(table: Bools, clients: Sequence[str]) -> None:
    """Require enough entities, (n, K) of bool, of every pair of clients."""
    held = table.astype(np.int64)
    both = held.T @ held
    few = [
        f"'{clients[a]}' and '{clients[b]}' ({both[a, b]:,})"
        for a, b in combinations(range(len(clients)), 2)
        if both[a, b] < FEWEST
    ]
    if few:
        raise EstimationError(
            f"fewer than {FEWEST} entities are complete at both of: {', '.join(few)}. Leave one of the two "
            "out"
        )
