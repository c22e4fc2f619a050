"""Everything that each party of a fit has seen: messages at the coordinator, and those a site opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.crypto.secure_product import opened_bytes
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.typing import Array


@dataclass
class Wire:
    """Messages of a run, in order, and the sealed ones by who opened them."""

    passed: list[tuple[Request, Reply]] = field(default_factory=list)
    opened: list[tuple[str, str, bytes]] = field(default_factory=list)

    def sent_by(self, site: str, step: str, name: str) -> list[Array]:
        """Arrays of one name that a site released, in order."""
        return [
            r.arrays[name] for a, r in self.passed if (a.site, a.step) == (site, step) and name in r.arrays
        ]

    def handed_to(self, site: str, step: str, name: str) -> list[Array]:
        """Arrays of one name that a site was asked with, in order."""
        return [
            a.arrays[name] for a, _ in self.passed if (a.site, a.step) == (site, step) and name in a.arrays
        ]

    def per_entity(self, rows: int, site: str | None = None) -> Array:
        """Everything with one number or more per entity that the coordinator holds: (rows, columns).

        Floats are unchanged. 8-byte words (masked, sealed) are read as fixed point: an attacker tries all.

        Parameters
        ----------
        rows : int
            Entities of the attacked client.
        site : str, optional
            Whose replies; everybody's by default.
        """
        columns = [np.empty((rows, 0))]
        for request, reply in self.passed:
            if site is not None and request.site != site:
                continue
            columns += [as_columns(array, rows) for array in reply.arrays.values()]
        return np.column_stack(columns)

    def opened_by(self, site: str, rows: int) -> Array:
        """The same for the values that a site received from others, in a request or sealed."""
        columns = [np.empty((rows, 0))]
        for request, _ in self.passed:
            if request.site == site:
                # Bytes are sealed: what is in them counts once they are opened.
                plain = (array for array in request.arrays.values() if array.dtype != np.uint8)
                columns += [as_columns(array, rows) for array in plain]
        for receiver, _, message in self.opened:
            if receiver == site:
                head = 32 + opened_bytes(rows)  # digest and checksum stand before the columns
                fits = len(message) > head and not (len(message) - head) % (8 * rows)
                content = message[head:] if fits else message
                columns.append(as_columns(np.frombuffer(content, dtype=np.uint8), rows))
        return np.column_stack(columns)


def as_columns(array: Array, rows: int) -> Array:
    """Read an array as columns of one number per entity, where its size allows."""
    nothing = np.empty((rows, 0))
    if array.dtype == np.uint8:
        array = np.frombuffer(array.tobytes()[: array.size // 8 * 8], dtype=np.int64)
        spare = array.size % rows
        array = array[spare:]  # a header in front
    if array.dtype == np.int64:
        array = np.ldexp(array.astype(float), -40)
    if array.dtype != np.float64 or array.size < rows or array.size % rows:
        return nothing
    if array.ndim == 2 and array.shape[1] == rows:
        return array.T
    return array.reshape(rows, -1)


class TappedEngine(LocalEngine):
    """A local engine whose coordinator keeps all that it carries."""

    def __init__(self, sites, wire: Wire) -> None:
        super().__init__(sites)
        self.wire = wire

    def _send(self, request: Request, ledger: Ledger) -> Reply:
        reply = super()._send(request, ledger)
        self.wire.passed.append((request, reply))
        return reply


@contextmanager
def tapped(model) -> Iterator[Wire]:
    """Listen to a model's runs."""
    wire = Wire()
    engine, original = model.engine, SealedChannel.open

    def listen(channel: SealedChannel, box: bytes) -> bytes:
        message = original(channel, box)
        wire.opened.append((channel.site, channel.peer, message))
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SealedChannel, "open", listen)
        model.engine = TappedEngine(model.partition.sites, wire)
        try:
            yield wire
        finally:
            model.engine = engine
