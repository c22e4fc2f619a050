"""Marks by which two sites compare what they were told of a product, and whose their rows are."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import numpy as np

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import encode
from fedstat.typing import Array, Bools

MARK = 16
"""Bytes of a keyed digest: who cannot compute it finds no two things of one mark."""


@dataclass(frozen=True, slots=True)
class RowMarks:
    """What one of two sites was told of a product, and who its rows are, under a key of these two alone.

    `told` and `entities` are marks; those of the other site must be the same. Both sites have records of
    `both` (n,) of the rows; `own` (n,) are this one's records, empty where that is the same.
    """

    told: bytes
    entities: bytes
    both: Bools
    own: Bools

    @classmethod
    def of(cls, key: bytes, digest: bytes, entities: Array, both: Bools, own: Bools) -> RowMarks:
        """Mark a product by its digest, and the entities of all rows, (n,) or (n, w), that both have."""
        told = mark(key, "product", digest, both.tobytes())
        return cls(told, mark(key, "entities", entities[both].tobytes()), both, own)

    @property
    def content(self) -> bytes:
        """What the other site is shown, under seal."""
        return self.told + self.entities + np.packbits(self.own).tobytes()

    def compare(self, content: bytes, site: str, peer: str) -> bytes:
        """Hold the other site's marks against these, and return what came after them.

        A SecurityError where it was told of another product, or of other groups, or its rows are of other
        entities.
        """
        # Sums over groups that differ at a few rows would tell of these rows.
        if not hmac.compare_digest(content[:MARK], self.told):
            raise SecurityError(
                f"{site}: was told of another product than '{peer}', or of other groups of the rows; nothing "
                "of it was released"
            )
        if not self.of_same_entities(content):
            raise SecurityError(
                f"{site}: the rows of this product are not of the same entities, in the same order, as those "
                f"of '{peer}'; nothing of it was released. Align the sites again"
            )
        return content[len(self.content) :]

    def of_same_entities(self, content: bytes) -> bool:
        """Whether rows are of the same entities in the same order: a product would mix them otherwise."""
        # Of an entity that both have, neither may be told that the other lacks it.
        shared = np.array_equal(self.own & read_own(content, len(self.own)), self.both) or not len(self.own)
        return shared and hmac.compare_digest(content[MARK : 2 * MARK], self.entities)


def mark(key: bytes, *parts: str | bytes) -> bytes:
    """Return a keyed digest of some parts."""
    return hmac.digest(key, encode(*parts), "sha256")[:MARK]


def read_own(content: bytes, n: int) -> Bools:
    """Read which of n rows the other site has records of."""
    told = np.frombuffer(content[2 * MARK : 2 * MARK + (n + 7) // 8], dtype=np.uint8)
    return np.unpackbits(told, count=n).astype(np.bool_)
