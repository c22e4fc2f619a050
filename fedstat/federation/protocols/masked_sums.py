"""Masked sums: a protocol whose sums over sites are masked, without a change in the protocol.

:func:`masked` is between a protocol and its engine. If a round sends the same step to every site, and the
step declares arrays of which only the sum is needed, the sites hide them by pairwise masks
(:mod:`fedstat.federation.crypto.masks`). The protocol receives the sum in the first reply and zeros in the
others. Its sums are the same, and the coordinator has received no value of a single site. Sites agree on keys
in two rounds, many sites in three, the last together with the protocol's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from fedstat.errors import MessageError, PolicyError
from fedstat.federation.crypto.masks import unmask_sums
from fedstat.federation.disclosure.level_products import SEALING
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import LAST, Peers, agree_keys

Fit = TypeVar("Fit")
DESIGN, TAKING, BOXES, SIZES = "design", "take_levels", "boxes", "sizes"
"""The step that takes messages that were sealed by another one, and its arrays."""


def masked_protocol(
    protocol: FitProtocol[Fit], sites: Sequence[str], session: str, sums_only: bool = False
) -> FitProtocol[Fit]:
    """Run a protocol with masked sums over two sites or more; return its value.

    Of arrays that are declared maskable the protocol may use only sums over all of `sites`. If keys are used
    for `sums_only`, each of many sites agrees on them with its neighbors. Raises a MessageError for a
    protocol that requests parts of a sum from only some sites, and a SecurityError if sites could not agree
    on keys, or if masks do not cancel.
    """
    try:
        requests = next(protocol)
        agreement = agree_keys(sites, session, sums_only)
        about_keys, carried = next(agreement), list[Request]()
        peers: dict[str, tuple[str, ...]] = {}
        number = 0
        while True:
            groups = masked_groups(requests, sites)
            # Sums need keys: the agreement is brought to its last round, which goes along with the sums.
            while groups and about_keys and about_keys[0].step not in LAST:
                about_keys = go_on(agreement, (yield about_keys), peers)
            rounds = {i: number + g for g, places in enumerate(groups) for i in places}
            # Masks of a round are used once: the same stream under two sums would give away their difference.
            number += len(groups)
            numbered = [replace(request, masked=rounds.get(i)) for i, request in enumerate(requests)]
            try:
                replies = yield [*about_keys, *carried, *numbered]
            except PolicyError as refusal:
                if about_keys:
                    raise  # keys are agreed on in this round: nothing can be masked without it
                # The masks of this round are spent. Without the refused part no sum of it can be unmasked.
                requests, carried = protocol.throw(refusal), []  # taken before the request that was refused
                continue
            reported, replies = replies[: len(about_keys)], replies[len(about_keys) + len(carried) :]
            about_keys = go_on(agreement, reported, peers) if about_keys else []
            carried = carry_boxes(numbered, replies, peers)
            for places in groups:
                masked = add_up(requests[places[0]], [replies[i] for i in places])
                for i, reply in zip(places, masked, strict=True):
                    replies[i] = reply
            requests = protocol.send(replies)
    except StopIteration as stop:
        fit: Fit = stop.value
        return fit


def go_on(
    agreement: FitProtocol[Peers], replies: list[Reply], peers: dict[str, tuple[str, ...]]
) -> list[Request]:
    """Next round of an agreement; no requests after the last, when the `peers` of all sites are known."""
    try:
        return agreement.send(replies)
    except StopIteration as stop:
        peers |= stop.value
        return []


def carry_boxes(
    requests: Sequence[Request], replies: Sequence[Reply], peers: Mapping[str, tuple[str, ...]]
) -> list[Request]:
    """Hand what sites have sealed for each other to the receivers, with the next round."""
    sealed = {
        (reply.site, peer): box
        for request, reply in zip(requests, replies, strict=True)
        if request.step == SEALING and BOXES in reply.arrays
        for peer, box in zip(peers[reply.site], reply.arrays[BOXES], strict=True)
    }
    if not sealed:
        return []
    # A site that reports nothing does not compare its rows with those of others.
    reporting = {site for site, _ in sealed}
    session, out = next(request.session for request in requests if request.step == SEALING), list[Request]()
    for site, senders in peers.items():
        if site not in reporting:
            continue
        boxes = [sealed.get((sender, site), np.zeros(0, dtype=np.uint8)) for sender in senders]
        sizes = np.array([len(box) for box in boxes], dtype=np.int64)
        out.append(Request(site, DESIGN, TAKING, {BOXES: np.concatenate(boxes), SIZES: sizes}, session))
    return out


def masked_groups(requests: Sequence[Request], sites: Sequence[str]) -> list[list[int]]:
    """Places of the asks that belong to one sum, in the order in which they stand."""
    groups: list[list[int]] = []
    by_step: dict[tuple[str, str], list[list[int]]] = {}
    for i, request in enumerate(requests):
        step = FAMILIES[request.family][request.step]
        if not any(declared.maskable for declared in step.gives.values()):
            continue
        started = by_step.setdefault((request.family, request.step), [])
        # A protocol may ask a step of every site several times in one round: each time is a sum of its own.
        open_one = next((g for g in started if request.site not in {requests[j].site for j in g}), None)
        if open_one is None:
            open_one = []
            started.append(open_one)
            groups.append(open_one)
        open_one.append(i)
    for group in groups:
        if sorted(requests[i].site for i in group) != sorted(sites):
            request = requests[group[0]]
            raise MessageError(
                f"step '{request.step}' of family '{request.family}' is asked of "
                f"{[requests[i].site for i in group]}; a masked sum needs all of {list(sites)}"
            )
    return groups


def add_up(request: Request, replies: Sequence[Reply]) -> list[Reply]:
    """Put the sums into the first reply, and zeros into the others.

    An array that some site left out has no sum, and is left out of all.
    """
    gives = FAMILIES[request.family][request.step].gives
    summed = [name for name, declared in gives.items() if declared.maskable]
    sums = unmask_sums(
        {
            name: [reply.arrays[name] for reply in replies]
            for name in summed
            if all(name in reply.arrays for reply in replies)
        }
    )
    out = []
    for place, reply in enumerate(replies):
        clear = {name: array for name, array in reply.arrays.items() if not gives[name].maskable}
        out.append(
            replace(reply, arrays=clear | {n: a if place == 0 else np.zeros_like(a) for n, a in sums.items()})
        )
    return out
