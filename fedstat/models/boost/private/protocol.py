"""The release behind a private boosting: who is complete, then all products with noise, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.models.boost.private.asked import CurvesPlan
from fedstat.models.boost.private.path import NoisySums
from fedstat.models.copula.protocol import FEWEST, SumsByGroup, ask_present, gather_sums
from fedstat.records import to_json
from fedstat.typing import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedCurves:
    """Sums over `n` entities that are complete everywhere; `entities` are the complete ones of each site.

    `products` (q + 1, q + 1) of (1, u) in the order of the sites, with noise; the response is not weighted.
    """

    plan: CurvesPlan
    products: Floats
    n: int
    entities: Mapping[str, int]


def release_curves(
    asking: Conversation,
    plan: CurvesPlan,
    rows: Mapping[str, Ints],
    sites: Sequence[str],
    n_entities: int,
) -> Rounds[ReleasedCurves]:
    """Ask for all that boosting takes; `rows` are positions among all entities, `sites` may deal."""
    clients = list(plan.parts)
    asked = {client: to_json(plan.parts[client]) for client in clients}
    found = yield from ask_present(asking, asked, rows, n_entities)
    entities = {client: found.count(client) for client in clients}
    used, present = found.everywhere()
    n = int(np.count_nonzero(used))
    if n < FEWEST:
        raise EstimationError(
            f"fewer than {FEWEST} entities are complete at all of {', '.join(clients)}: {n:,}. Leave one out"
        )
    group = {client: np.where(present.seen[client], 0, -1) for client in clients}
    asks = {client: plan.gram_asked(client, 1) for client in clients}
    replies = yield [
        asking.ask(client, "release_gram", to_json(asks[client]), group=group[client]) for client in clients
    ]
    sums = yield from gather_sums(asking, plan, asks, replies, group, present, sites)
    return ReleasedCurves(plan, _products(plan, sums, n), n, entities)


def _products(plan: CurvesPlan, sums: SumsByGroup, n: int) -> Floats:
    """Products of (1, u), the weight of the response taken off."""
    products, totals = sums.products[0].copy(), sums.totals[0]
    np.fill_diagonal(products, sums.squares[0])
    out = np.block([[np.full((1, 1), float(n)), totals[None, :]], [totals[:, None], products]])
    scale = np.append(1.0, np.where(plan.is_response(), 1.0 / plan.weight, 1.0))
    return np.asarray(out * np.outer(scale, scale))


def sort_sums(released: ReleasedCurves, owners: Sequence[str], widths: Sequence[int]) -> NoisySums:
    """Sort products into those of learners, the intercept first, and of the response.

    `owners` (P,) and `widths` (P,) are of the learners in the order of the formula; at each institution its
    own stand in that order.
    """
    plan, first = released.plan, {k: place.start + 1 for k, place in released.plan.places().items()}
    columns = [0]
    for client, width in list(zip(owners, widths, strict=True))[1:]:
        columns += range(first[client], first[client] + width)
        first[client] += width
    response = np.flatnonzero(plan.is_response()) + 1
    K = np.array(columns)
    Q = released.products[np.ix_(response, response)]
    shares = np.array([1.0 if owner == plan.holder else 2.0 for owner in owners])
    return NoisySums(
        n=released.n,
        S=released.products[np.ix_(K, K)],
        T=released.products[np.ix_(K, response)],
        yy=float(np.trace(Q)),
        sd=plan.deviation,
        sd_response=np.sqrt(shares) * plan.deviation / plan.weight,
        starts=tuple(np.cumsum([0, *widths]).tolist()),
        owners=tuple(list(plan.parts).index(owner) for owner in owners),
    )
