"""Sealed messages between sites with different rows: which products of levels have enough rows behind them.

A site that masks its sums with others seals for each of them what it reports of its rows
(:mod:`fedstat.federation.disclosure.level_products`), when the rows are opened. The coordinator carries the
messages with the next round, and cannot read them. They name the request by which the rows were opened, since
masks cancel only among sites that opened rows by the same request.
"""

from __future__ import annotations

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.vertical_design import FAMILY
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.level_products import LevelSpace, reported_rows
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.disclosure.weighted_sums import (
    SPACES_KEY,
    examines_products,
    level_columns,
    opening_of,
)
from fedstat.federation.message import ArrayDeclaration, control
from fedstat.federation.protocols.key_agreement import keys_of
from fedstat.typing import Array

REPORTED = "products of levels that enough rows have"
BOXES = ArrayDeclaration(
    "sealed",
    f"{REPORTED}, for the other sites",
    2,
    dtype="uint8",
    optional=True,
    unpaid="it is encrypted, and no sum",
)


def seal_levels(data: SiteData, state: State) -> dict[str, Array]:
    """Seal for every peer what the site reports of its rows, if masks hide its sums: ``boxes`` (K', length).

    Peers are in the order of their names. Rows that are opened again have the same messages.
    """
    refused = "sealed" in data.policy.refused_kinds
    if refused or not hides(len(state.masked_among)) or not examines_products(data):
        return {}
    opening = opening_of(state)
    if (name := f"boxes {opening}") not in state:
        space = level_columns(data, state).space(reported_rows(data.policy.min_level_count), opening)
        boxes = [channel.seal(space.to_bytes()) for channel in _channels(state, opening)]
        state.keep(name, np.stack([np.frombuffer(box, dtype=np.uint8) for box in boxes]))
    return {"boxes": state.use(name, np.ndarray)}


def _channels(state: State, opening: str) -> tuple[SealedChannel, ...]:
    """Return channels to the peers, each for one message about the rows of an opening in either direction."""
    if (name := f"channels {opening}") not in state:
        keys = keys_of(state)
        state.keep(name, tuple(SealedChannel(keys, peer, f"levels {opening}") for peer in keys.peers))
    return state.use(name, tuple)


@step(
    FAMILY,
    "sum_columns count_labels take_levels",
    takes={
        "boxes": ArrayDeclaration("sealed", f"{REPORTED} at other sites", dtype="uint8"),
        "sizes": control("bytes of the message of each other site, 0 without one", 1),
    },
)
def take_levels(data: SiteData, state: State, boxes: Array, sizes: Array) -> dict[str, Array]:
    """Open what the peers report of their rows, one message after the other, and keep it for the checks."""
    opening = opening_of(state)
    if (name := f"{SPACES_KEY} {opening}") in state:
        return {}
    channels, ends = _channels(state, opening), np.cumsum(sizes).astype(np.int64)
    if len(sizes) != len(channels) or (sizes < 0).any() or ends[-1] != len(boxes):
        raise MessageError(f"{data.name}: expected a message of each of {len(channels)} sites")
    found = [
        LevelSpace.from_bytes(channel.open(box.tobytes()), f"{data.name}: the message of '{channel.peer}'")
        for channel, box in zip(channels, np.split(boxes, ends[:-1]), strict=True)
        if len(box)
    ]
    state.keep(name, [one for one in found if one.opening == opening])
    return {}
