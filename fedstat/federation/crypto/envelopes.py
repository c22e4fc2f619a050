"""Signed messages between the coordinator and a site, for carriers that authenticate nobody.

An envelope says who wrote to whom, under which number and when, and is signed with the writer's lasting
Ed25519 key (RFC 8032). It hides nothing: what must be hidden is sealed or masked before it goes in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import SIGNATURE_BYTES, Identity, PublicIdentity, encode, pin

MAGIC = b"fedstat envelope 1\n"
LONGEST_HEADER = 4096


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its address.

    Parameters
    ----------
    sender, receiver : str
        Institutions, or "coordinator".
    number : str
        Of the question; its answer has the same.
    payload : bytes
    written : str
        Time in UTC, ISO 8601.
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
        "key": identity.public.to_json(),
    }
    header = json.dumps(content).encode()
    signature = identity.signing.sign(encode(MAGIC, header, envelope.payload))
    return MAGIC + len(header).to_bytes(4, "little") + header + signature + envelope.payload


def open_signed(data: bytes, fingerprint: str, where: str) -> Envelope:
    """Check and read an envelope.

    Parameters
    ----------
    data : bytes
    fingerprint : str
        Of the writer's key, as it was pinned.
    where : str
        What is read, for errors.

    Raises
    ------
    SecurityError
        The bytes are no envelope, are cut or altered, or another key signed them.
    """
    start = len(MAGIC) + 4
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    end = start + length + SIGNATURE_BYTES
    if data[: len(MAGIC)] != MAGIC or length > LONGEST_HEADER or len(data) < end:
        raise SecurityError(f"{where}: {len(data)} bytes that are not a signed message")
    header, signature = data[start : start + length], data[start + length : end]
    try:
        content = json.loads(header)
        sender, receiver = str(content["sender"]), str(content["receiver"])
        number, written, key = str(content["number"]), str(content["written"]), content["key"]
        public = PublicIdentity.from_json(key)
    except (ValueError, KeyError, TypeError) as error:
        raise SecurityError(f"{where}: {len(data)} bytes that are not a signed message") from error
    pin({sender: fingerprint}, {sender: public})
    try:
        Ed25519PublicKey.from_public_bytes(public.signing).verify(
            signature, encode(MAGIC, header, data[end:])
        )
    except InvalidSignature:
        raise SecurityError(f"{where}: altered on its way, or not signed by '{sender}'") from None
    return Envelope(sender, receiver, number, data[end:], written)
