"""Weighted sums of products of all columns, for a step of Newton's method."""

from __future__ import annotations

import numpy as np

from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.models.vertical.exchange.protocol import list_sides, mirrored, multiply_apart
from fedstat.models.vertical.layout import Layout
from fedstat.models.vglm.newton.steps import WEIGHTED
from fedstat.typing import Floats


def weighted_gram(
    layout: Layout, weight: Floats, conversation: Conversation
) -> Rounds[tuple[Floats, dict[tuple[str, str], str]]]:
    """Obtain ``(1, X)' W (1, X) / n``, (p + 1, p + 1), with X standardised; returns as well who dealt."""
    every = np.ones((1, len(layout.clients)), dtype=bool)
    sides = list_sides(layout, WEIGHTED, np.zeros(layout.n, dtype=np.int64), every)
    products = np.zeros((1, layout.p + 1, layout.p + 1))
    products[0, 0, 0] = weight.sum()
    # Of a canonical link weights follow from linear predictors alone, and tell nothing of the response.
    replies = yield [conversation.ask(side.site, "weigh", weight=weight) for side in sides]
    for side, reply in zip(sides, replies, strict=True):
        products[0, 0, side.place] = reply.arrays["sums"]
        products[0, side.place, side.place] = reply.arrays["gram"]
    dealers = yield from multiply_apart(layout, sides, products, conversation)
    return mirrored(products)[0] / layout.n, dealers
