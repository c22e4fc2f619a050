"""The links of a site's chain: an entry with what the site alone knows of it, and the digests over them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstat.federation.account.charges import RHO
from fedstat.federation.account.entry import COORDINATOR, SIGNED_FIELDS, Content, Entry, read_entry, typed
from fedstat.federation.crypto.keys import PublicIdentity, encode

KNOWN_TO_THE_SITE = ("time", "numbers", "among", "commitment")
LINK_FIELDS = (*SIGNED_FIELDS, *KNOWN_TO_THE_SITE)
"""Fields of a link that are hashed, in this order."""
CHARGED = "charged"
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One entry of a site's chain, and what the site alone knows of it.

    `time` is UTC to the second. `numbers` are the distinct numbers that count as equations (see
    :mod:`fedstat.federation.account.released`), sums over `among` sites. `commitment` is to the content, and
    empty for a refusal. `charged` is what the site charged its privacy budget for the entry, as a fraction;
    it is signed where there is such a charge, and is empty for all else.
    """

    entry: Entry
    time: str
    numbers: int
    among: int
    commitment: str
    charged: str = ""

    @property
    def signed(self) -> list[Any]:
        """Values of :data:`LINK_FIELDS`, and of a charge where there is one: the next digest is of them."""
        known = self.time, self.numbers, self.among, self.commitment
        return [*self.entry.signed, *known, *([self.charged] if self.charged else [])]

    @property
    def named(self) -> dict[str, Any]:
        """Values by the name of their field."""
        return dict(zip((*LINK_FIELDS, CHARGED), [*self.signed, ""], strict=False))


def read_link(row: Sequence[Any]) -> ChainLink:
    """Rebuild a link from its signed values; see :func:`fedstat.federation.account.entry.read_entry`."""
    place, end = len(SIGNED_FIELDS), len(LINK_FIELDS)
    known = KNOWN_TO_THE_SITE + ((CHARGED,) if len(row) > end else ())
    link = ChainLink(read_entry(row[:place]), **typed(ChainLink, known, row[place:]))
    if link.numbers < 0 or link.among < 1:
        raise ValueError("a negative number")
    if len(row) > end and not RHO.fullmatch(link.charged):
        raise ValueError("a charge that is none")
    return link


def canonical(value: Any) -> str:
    """Write JSON in the one form that is hashed and signed."""
    return _CANONICAL.encode(value)


def genesis(site: str, keys: PublicIdentity, session: str, ordinal: int, previous: str) -> bytes:
    """Digest before the first entry."""
    parts = ("fedstat chain 1", site, keys.digest, session, str(ordinal), previous)
    return hashlib.sha256(encode(*parts)).digest()


def extend(digest: bytes, link: ChainLink) -> bytes:
    """Digest after one more entry."""
    return hashlib.sha256(digest + canonical(link.signed).encode()).digest()


def content_digest(content: Content) -> bytes:
    """SHA-256 of type, shape and numbers, or of a text; memory is read once and not copied."""
    if isinstance(content, str):
        return hashlib.sha256(encode("text", content)).digest()
    array = np.ascontiguousarray(content)
    digest = hashlib.sha256(encode(array.dtype.str, str(np.shape(content))))
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


@dataclass(slots=True)
class NumbersPassed:
    """Numbers that left, by how many sites they are sums over, and those that came in."""

    released: Counter[int] = field(default_factory=Counter)
    received: int = 0

    def add(self, links: Iterable[ChainLink]) -> NumbersPassed:
        """Count some more links."""
        for link in links:
            if link.entry.receiver != COORDINATOR:
                self.received += link.numbers
            elif link.numbers:
                self.released[link.among] += link.numbers
        return self

    def merge(self, other: NumbersPassed) -> None:
        """Add the numbers of another session."""
        self.released.update(other.released)
        self.received += other.received
