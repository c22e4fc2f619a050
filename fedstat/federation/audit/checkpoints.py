"""The signed checkpoint of a site's ledger, by which the site detects that its ledger was rolled back.

An attacker who can replace files in a site's folder cannot sign, but can restore an earlier state with all
its signatures. The newest head is therefore in every statement of the site; the coordinator keeps it, and
sends it when it connects again. A site whose ledger does not contain this signed head answers nothing more,
until its owner has declared the loss (:mod:`fedstat.federation.audit.ledger_file`).
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
    """Digest before the first line of the ledger of these keys."""
    return hashlib.sha256(encode_parts(CHECKPOINT_FORMAT, keys.digest)).digest()


def digest_with_line(digest: bytes, line: str) -> bytes:
    """Digest after one more line, in canonical form and without its signature."""
    return hashlib.sha256(digest + line.encode()).digest()


@dataclass(frozen=True, slots=True)
class SignedCheckpoint:
    """The state of a ledger after a number of lines, signed by its site.

    `digest` covers all lines and their order. Each head has its own `time`. `lost` are the times at which the
    owner has declared that the earlier ledger was lost.
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
