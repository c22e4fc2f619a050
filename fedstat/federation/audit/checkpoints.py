"""The signed checkpoint of a site's ledger, by which the site detects that its ledger was rolled back.

Whoever can replace files in a site's folder cannot sign, but can put back an earlier state with all its
signatures. So the newest head goes with every statement of the site; the coordinator keeps it, and shows it
when it connects again. A site whose account does not hold what it signed answers nothing more, until its
owner has declared the loss (:mod:`fedstat.federation.audit.ledger_file`).
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

from fedstat.codec import Minimum
from fedstat.federation.crypto.keys import Identity, PublicIdentity, encode_parts

CHECKPOINT_FORMAT = "fedstat account 1"
NANOSECONDS_PER_SECOND = 10**9
Nanoseconds: TypeAlias = Annotated[int, Minimum(0)]
"""Since 1970, in UTC."""


def first_ledger_digest(keys: PublicIdentity) -> bytes:
    """Digest before the first line of the account of these keys."""
    return hashlib.sha256(encode_parts(CHECKPOINT_FORMAT, keys.digest)).digest()


def digest_with_line(digest: bytes, line: str) -> bytes:
    """Digest after one more line, in canonical form and without its signature."""
    return hashlib.sha256(digest + line.encode()).digest()


@dataclass(frozen=True, slots=True)
class SignedCheckpoint:
    """An account after so many lines, signed by its site.

    `digest` stands for all lines and their order. No head has the `time` of another. `lost` are the times at
    which the owner has declared that the account before was lost.
    """

    lines: Annotated[int, Minimum(1)]
    digest: str
    time: Nanoseconds
    lost: tuple[Nanoseconds, ...] = ()
    signature: str = ""

    def sign(self, identity: Identity) -> SignedCheckpoint:
        """Return it with the signature of its site."""
        return replace(self, signature=identity.signing.sign(self._message(identity.public)).hex())

    def is_of(self, keys: PublicIdentity) -> bool:
        """Whether the site with these keys signed it."""
        try:
            signature = bytes.fromhex(self.signature)
        except (TypeError, ValueError):
            return False
        return keys.has_signed(self._message(keys), signature)

    def _message(self, keys: PublicIdentity) -> bytes:
        return encode_parts(
            CHECKPOINT_FORMAT, keys.digest, self.digest, *map(str, (self.lines, self.time, *self.lost))
        )


def utc_text(nanoseconds: int) -> str:
    """Time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(nanoseconds // NANOSECONDS_PER_SECOND))
