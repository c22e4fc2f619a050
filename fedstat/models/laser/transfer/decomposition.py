"""Singular vectors of the columns of all institutions, from secure products, over the entities in common.

Products of columns of two institutions come from secure multiplication; vectors follow from the sums of
products, and the joint representation of an entity is a sum of projections, one of each institution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.masked_sums import masked
from fedstat.federation.rounds.products import Conversation
from fedstat.models.vertical.exchange.protocol import list_sides, mirrored, multiply_apart
from fedstat.models.vertical.exchange.steps import BLOCK
from fedstat.models.vertical.layout import Layout
from fedstat.typing import Floats, Ints

DEPENDENT = 1e-9
"""Share of the largest eigenvalue below which there is no direction."""


@dataclass(frozen=True, slots=True, eq=False)
class JointRepresentation:
    """Left singular vectors (m, r) of standardised columns of `entities` (m,), at a mean square of one.

    They are the columns times `weights` (p, r).
    """

    entities: Ints
    vectors: Floats
    weights: Floats


def singular_weights(gram: Floats, m: int, width: int) -> Floats:
    """Weights (p, r) that make singular vectors of columns with these sums of products (p, p).

    The vectors are those of the `width` largest singular values, or of as many as there are, at a mean square
    of one over the m rows; of each the largest weight is positive.
    """
    values, V = np.linalg.eigh(gram)
    values, V = values[::-1], V[:, ::-1]
    kept = min(width, int((values > DEPENDENT * values[0]).sum()))
    V = V[:, :kept] * np.sign(V[np.abs(V[:, :kept]).argmax(axis=0), np.arange(kept)])
    return np.ascontiguousarray(V * np.sqrt(m / values[:kept]))


def decompose(
    layout: Layout, entities: Ints, width: int, conversation: Conversation
) -> Rounds[JointRepresentation]:
    """Decompose the staged columns over those of some entities that every institution has (Chai et al. 2022).

    Raises
    ------
    EstimationError
        Fewer than two entities have all institutions.
    ModelError
        Nobody can deal for two institutions.
    """
    chosen = np.zeros(layout.n, dtype=np.bool_)
    complete = np.logical_not(layout.missing.any(axis=1))
    chosen[entities] = complete[layout.code[entities]]
    common, p = np.flatnonzero(chosen), layout.p
    if len(common) < 2:
        raise EstimationError(
            f"method='vfedtrans' decomposes the columns of entities that all institutions have; there are "
            f"{len(common)} to learn from. Use method='laser' or 'local'"
        )
    every = np.ones((1, len(layout.clients)), dtype=np.bool_)
    sides = list_sides(layout, BLOCK, np.where(chosen, 0, -1), every)
    replies = yield [conversation.ask(s.site, "sum_products", code=s.code, groups=1) for s in sides]
    products = np.zeros((1, p + 1, p + 1))
    for side, reply in zip(sides, replies, strict=True):
        products[:, side.place, side.place] = reply.arrays["grams"]
    yield from multiply_apart(layout, sides, products, conversation)
    weights = singular_weights(mirrored(products)[0, 1:, 1:], len(common), width)
    projected = _project(layout, common, weights, conversation)
    if hides(len(layout.clients)):
        projected = masked(projected, layout.clients, conversation.session)
    return JointRepresentation(common, (yield from projected), weights)


def _project(layout: Layout, common: Ints, weights: Floats, conversation: Conversation) -> Rounds[Floats]:
    """Add up the institutions' projections of their columns, (m, r)."""
    replies = yield [
        conversation.ask(
            k, "project_columns", rows=np.searchsorted(layout.kept[k], common), weights=weights[at]
        )
        for k, at in layout.places().items()
    ]
    return np.asarray(np.sum([reply.arrays["projection"] for reply in replies], axis=0))
