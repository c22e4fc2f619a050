"""Signed messages between the coordinator and a site, for carriers that authenticate nobody.

An envelope says who wrote to whom, under which number and when, and is signed with the writer's lasting
Ed25519 key (RFC 8032). It hides nothing: what must be hidden is sealed or masked before it goes in::

    magic | signing key, 32 | agreement key, 32 | signature, 64 | length of the header, 4 | header | payload

The signature is over keys and header, which holds length and SHA-512 of the payload. Whoever reads an
envelope looks at a few kilobytes of fixed layout first, and parses nothing that the pinned key did not sign:
a stranger's file costs no more than that, whatever its size.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import KEY_BYTES, SIGNATURE_BYTES, Identity, PublicIdentity, encode, pin

MAGIC = b"fedstat envelope 2\n"
LONGEST_HEADER = 4096
LENGTH_BYTES = 4
FIXED = len(MAGIC) + 2 * KEY_BYTES + SIGNATURE_BYTES + LENGTH_BYTES
"""Bytes in front of the header."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its address: institutions or "coordinator", and the number of the question.

    Its answer has the same number. `written` is the time in UTC, ISO 8601.
    """

    sender: str
    receiver: str
    number: str
    payload: bytes
    written: str = ""


def sign(identity: Identity, envelope: Envelope) -> bytes:
    """Bytes of an envelope, signed."""
    content = {
        "sender": envelope.sender,
        "receiver": envelope.receiver,
        "number": envelope.number,
        "written": envelope.written or datetime.now(UTC).isoformat(timespec="seconds"),
        "length": len(envelope.payload),
        "sha512": hashlib.sha512(envelope.payload).hexdigest(),
    }
    header = json.dumps(content).encode()
    if len(header) > LONGEST_HEADER:
        raise SecurityError("the names and the number on an envelope are longer than its header may be")
    keys = identity.public.signing + identity.public.agreement
    signature = identity.signing.sign(encode(MAGIC, keys, header))
    return MAGIC + keys + signature + len(header).to_bytes(LENGTH_BYTES, "little") + header + envelope.payload


def open_signed(data: bytes | IO[bytes], fingerprint: str, where: str) -> Envelope:
    """Check and read an envelope by the pinned fingerprint of its writer; `where` is for errors.

    Of a file no more is read than the header before its signature has been checked. SecurityError where the
    bytes are no envelope, are cut or altered, or another key signed them.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    header = _signed_header(file, fingerprint, where)
    try:
        content = json.loads(header)
        address = [str(content[name]) for name in ("sender", "receiver", "number", "written")]
        length, digest = int(content["length"]), str(content["sha512"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SecurityError(f"{where}: a signed message without its address") from error
    # One byte more than was signed, so that what was put behind it shows, and the rest of it is never read.
    payload = file.read(length + 1)
    if len(payload) != length or hashlib.sha512(payload).hexdigest() != digest:
        raise SecurityError(f"{where}: altered on its way: this is not what '{address[0]}' signed")
    sender, receiver, number, written = address
    return Envelope(sender, receiver, number, payload, written)


def signer_of(data: bytes | IO[bytes], where: str) -> tuple[PublicIdentity, str]:
    """Tell whose keys signed an envelope, whoever that is, and the digest of what they signed.

    Neither header nor payload is parsed. SecurityError where the keys that it names did not sign it.
    """
    keys, header = _signed_by(io.BytesIO(data) if isinstance(data, bytes) else data, None, where)
    return keys, hashlib.sha256(header).hexdigest()


def _signed_header(file: IO[bytes], fingerprint: str, where: str) -> bytes:
    return _signed_by(file, fingerprint, where)[1]


def _signed_by(file: IO[bytes], fingerprint: str | None, where: str) -> tuple[PublicIdentity, bytes]:
    """Read an envelope up to its payload, and check who signed it, anybody for None; nothing is parsed."""
    fixed = file.read(FIXED)
    length = int.from_bytes(fixed[-LENGTH_BYTES:], "little")
    if len(fixed) < FIXED or fixed[: len(MAGIC)] != MAGIC or length > LONGEST_HEADER:
        raise SecurityError(f"{where}: not a signed message")
    header = file.read(length)
    if len(header) < length:
        raise SecurityError(f"{where}: a signed message that was cut off")
    keys, signature = (
        fixed[len(MAGIC) :][: 2 * KEY_BYTES],
        fixed[-LENGTH_BYTES - SIGNATURE_BYTES : -LENGTH_BYTES],
    )
    public = PublicIdentity(keys[:KEY_BYTES], keys[KEY_BYTES:])
    if fingerprint is not None:  # an empty one is nobody's
        pin({where: fingerprint}, {where: public})
    if not public.has_signed(encode(MAGIC, keys, header), signature):
        raise SecurityError(f"{where}: altered on its way, or not signed with the key that it names")
    return public, header
