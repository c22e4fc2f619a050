"""Declarations of sums that leave an institution, with what counts the entities behind them."""

from __future__ import annotations

from fedstat.federation.door.facts import Entities, GivenWeights
from fedstat.federation.message import Declared


def aggregate(what: str, ndim: int = 1) -> Declared:
    """Declare sums over entities."""
    return Declared("aggregate", what, ndim, behind=(Entities,))


def weighted(what: str, ndim: int = 1) -> Declared:
    """Declare sums over entities with weights that came in, which could single out a row."""
    return Declared("aggregate", what, ndim, behind=(Entities, GivenWeights))
