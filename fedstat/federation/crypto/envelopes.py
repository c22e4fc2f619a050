"""Signed messages between coordinator and site, and sealed messages from site to site."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import IO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    PairKeys,
    PublicIdentity,
    check_fingerprints,
    encode_parts,
)

# ----------------------------------------------------------------------------------------------------
# Signed messages between the coordinator and a site, for transports without authentication.
#
# An envelope contains sender, receiver, number and time, and is signed with the sender's long-term Ed25519
# key (RFC 8032). It hides nothing: confidential content is encrypted or masked before::
#
#     magic | signing key, 32 | agreement key, 32 | signature, 64 | length of the header, 4 | header | payload
#
# The signature covers keys and header, which holds length and SHA-512 of the payload. A reader of an envelope
# checks a few kilobytes of fixed layout first, and parses nothing that the pinned key did not sign: a file
# from another sender costs no more than that, for any size.

SIGNED_MAGIC = b"fedstat envelope 2\n"
LONGEST_HEADER = 4096
LENGTH_BYTES = 4
FIXED = len(SIGNED_MAGIC) + 2 * KEY_BYTES + SIGNATURE_BYTES + LENGTH_BYTES
"""Bytes in front of the header."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its address: sites or "coordinator", and the number of the request.

    Its answer has the same number. `written` is the time in UTC, ISO 8601.
    """

    sender: str
    receiver: str
    number: str
    payload: bytes
    written: str = ""


def sign_envelope(identity: Identity, envelope: Envelope) -> bytes:
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
    signature = identity.signing.sign(encode_parts(SIGNED_MAGIC, keys, header))
    return (
        SIGNED_MAGIC
        + keys
        + signature
        + len(header).to_bytes(LENGTH_BYTES, "little")
        + header
        + envelope.payload
    )


def open_envelope(data: bytes | IO[bytes], fingerprint: str, where: str) -> Envelope:
    """Check and read an envelope by the pinned fingerprint of its writer; `where` is for errors.

    Only the header of a file is read before its signature has been checked. SecurityError if the bytes are
    not an envelope, are cut or altered, or another key signed them.
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
    """Return the keys that signed an envelope, of any sender, and the digest of the signed content.

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
    if len(fixed) < FIXED or fixed[: len(SIGNED_MAGIC)] != SIGNED_MAGIC or length > LONGEST_HEADER:
        raise SecurityError(f"{where}: not a signed message")
    header = file.read(length)
    if len(header) < length:
        raise SecurityError(f"{where}: a signed message that was cut off")
    keys, signature = (
        fixed[len(SIGNED_MAGIC) :][: 2 * KEY_BYTES],
        fixed[-LENGTH_BYTES - SIGNATURE_BYTES : -LENGTH_BYTES],
    )
    public = PublicIdentity(keys[:KEY_BYTES], keys[KEY_BYTES:])
    if fingerprint is not None:  # an empty one belongs to no key
        check_fingerprints({where: fingerprint}, {where: public})
    if not public.has_signed(encode_parts(SIGNED_MAGIC, keys, header), signature):
        raise SecurityError(f"{where}: altered on its way, or not signed with the key that it names")
    return public, header


# ----------------------------------------------------------------------------------------------------
# Sealed messages from one site to another through a coordinator that cannot read or alter them.
#
# Each direction of each channel has its own ChaCha20-Poly1305 key (RFC 8439, section 2.8), derived by HKDF
# from the secret of the pair. The nonce is the number of the message, as in TLS 1.3 (RFC 8446, section
# 5.3): it only ever counts up, and stops long before it could come round. Session, sender, receiver, step
# and number are associated data, so that a message is valid in one place only.
#
# The adversary is the coordinator, the network, and any other site, alone or together: they may alter, cut,
# repeat, reorder, divert or withhold messages. All of it is noticed when the message, or after a withheld
# one the next, is opened. Not protected: lengths, number and time of messages, and a message whose sender
# or receiver colludes with the adversary. See :mod:`fedstat.federation.crypto`.

SEALED_MAGIC = b"FSB1"
HEADER = struct.Struct("<4s16sQQ")
"""Magic word, tag of session, sender, receiver and step, number of the message, bytes that follow."""
SEAL_BYTES = 16
OVERHEAD = HEADER.size + SEAL_BYTES
MOST_MESSAGES = 2**32
LONGEST_MESSAGE = 2**31 - 1024


class SealedChannel:
    """Both directions between this site and one peer, for one step.

    The peer makes the same channel with the same step, which is what the messages are for. An error changes
    nothing: the right message may still be opened. No such peer, or a second channel of the kind, is a
    SecurityError.
    """

    def __init__(self, keys: PairKeys, peer: str, step: str) -> None:
        both = keys.secret(peer, f"box {step}", 2 * KEY_BYTES)
        # One key for each direction: both sides count from 0, and no nonce may meet a key twice.
        lower, upper = both[:KEY_BYTES], both[KEY_BYTES:]
        self.site, self.peer, self.step = keys.site, peer, step
        self._outward, self._inward = (lower, upper) if keys.site < peer else (upper, lower)
        self._out = encode_parts("fedstat box 1", keys.session, keys.site, peer, step)
        self._in = encode_parts("fedstat box 1", keys.session, peer, keys.site, step)
        self._sealed = self._opened = 0
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"Channel({self.site!r} with {self.peer!r}, step {self.step!r})"

    def seal(self, message: bytes) -> bytes:
        """Seal the next message to the peer; it is :data:`OVERHEAD` bytes longer.

        SecurityError where it is too long, or the channel has carried as many as one key may.
        """
        if len(message) > LONGEST_MESSAGE:
            raise SecurityError(
                f"{self._where}: {len(message)} bytes, at most {LONGEST_MESSAGE} in one message; send parts"
            )
        # Counted before it is used: whatever fails afterwards, no number serves twice.
        with self._lock:
            number = self._sealed
            if number >= MOST_MESSAGES:
                raise SecurityError(
                    f"{self._where}: {MOST_MESSAGES} messages were sealed with one key; start a new session"
                )
            self._sealed += 1
        header = HEADER.pack(SEALED_MAGIC, _tag(self._out), number, len(message) + SEAL_BYTES)
        key = ChaCha20Poly1305(self._outward)
        return header + key.encrypt(_nonce(number), message, encode_parts(self._out, header))

    def open(self, box: bytes) -> bytes:
        """Open the next message from the peer.

        SecurityError if it was cut, altered, repeated, came out of order, or is not for this channel; its
        text states which, if known.
        """
        number = self._number(box)
        header, sealed = box[: HEADER.size], memoryview(box)[HEADER.size :]
        try:
            message = ChaCha20Poly1305(self._inward).decrypt(
                _nonce(number), sealed, encode_parts(self._in, header)
            )
        except InvalidTag:
            raise SecurityError(
                f"{self._where}: altered on its way, or sealed with other keys; nothing of it was used"
            ) from None
        # The number is used only after the encryption was verified.
        with self._lock:
            if number < self._opened:
                raise SecurityError(f"{self._where}: replayed; message {number} was opened before")
            if number > self._opened:
                raise SecurityError(
                    f"{self._where}: out of order; message {number} came, expected {self._opened}"
                )
            self._opened += 1
        return message

    @property
    def _where(self) -> str:
        return f"{self.site}, sealed message of step '{self.step}' with '{self.peer}'"

    def _number(self, box: bytes) -> int:
        """Read the number that the header claims, where the header is that of this channel."""
        if box[: len(SEALED_MAGIC)] != SEALED_MAGIC[: len(box)]:
            raise SecurityError(f"{self._where}: {len(box)} bytes that are not a sealed message")
        if len(box) < OVERHEAD:
            raise SecurityError(f"{self._where}: truncated; {len(box)} bytes, expected at least {OVERHEAD}")
        _, tag, number, length = HEADER.unpack_from(box)
        if tag == _tag(self._out):
            raise SecurityError(f"{self._where}: foreign; this site's own message was sent back to it")
        if tag != _tag(self._in):
            raise SecurityError(
                f"{self._where}: foreign; it was sealed for another session, step, sender or receiver"
            )
        if len(box) - HEADER.size != length:
            came = len(box) - HEADER.size
            raise SecurityError(
                f"{self._where}: {'truncated' if came < length else 'altered'}; {came} bytes after the "
                f"header, expected {length}"
            )
        if length - SEAL_BYTES > LONGEST_MESSAGE:
            raise SecurityError(f"{self._where}: altered; longer than any message that is sealed")
        return int(number)


def _tag(context: bytes) -> bytes:
    return hashlib.sha256(context).digest()[:16]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
