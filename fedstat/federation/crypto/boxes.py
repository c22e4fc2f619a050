"""Sealed messages from one site to another through a coordinator that cannot read or alter them.

Each direction of each channel has its own ChaCha20-Poly1305 key (RFC 8439, section 2.8), derived by HKDF from
the secret of the pair. The nonce is the number of the message, as in TLS 1.3 (RFC 8446, section 5.3): it only
ever counts up, and stops long before it could come round. Session, sender, receiver, step and number are
associated data, so that a message is valid in one place only.

The adversary is the coordinator, the network, and any other site, alone or together: they may alter, cut,
repeat, reorder, divert or withhold messages. All of it is noticed when the message, or after a withheld one
the next, is opened. Not protected: lengths, number and time of messages, and a message whose sender or
receiver colludes with the adversary. See :mod:`fedstat.federation.crypto`.
"""

from __future__ import annotations

import hashlib
import struct
from threading import Lock

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import KEY_BYTES, PairKeys, encode

MAGIC = b"FSB1"
HEADER = struct.Struct("<4s16sQQ")
"""Magic word, tag of session, sender, receiver and step, number of the message, bytes that follow."""
SEAL_BYTES = 16
OVERHEAD = HEADER.size + SEAL_BYTES
MOST_MESSAGES = 2**32
LONGEST_MESSAGE = 2**31 - 1024


class Channel:
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
        self._out = encode("fedstat box 1", keys.session, keys.site, peer, step)
        self._in = encode("fedstat box 1", keys.session, peer, keys.site, step)
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
        header = HEADER.pack(MAGIC, _tag(self._out), number, len(message) + SEAL_BYTES)
        key = ChaCha20Poly1305(self._outward)
        return header + key.encrypt(_nonce(number), message, encode(self._out, header))

    def open(self, box: bytes) -> bytes:
        """Open the next message from the peer.

        SecurityError where it was cut, altered, repeated, came out of order, or is not for this channel; its
        text says which where it can be told.
        """
        number = self._number(box)
        header, sealed = box[: HEADER.size], box[HEADER.size :]
        try:
            message = ChaCha20Poly1305(self._inward).decrypt(_nonce(number), sealed, encode(self._in, header))
        except InvalidTag:
            raise SecurityError(
                f"{self._where}: altered on its way, or sealed with other keys; nothing of it was used"
            ) from None
        # The number is believed only now that the seal has been found whole.
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
        if box[: len(MAGIC)] != MAGIC[: len(box)]:
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
