"""Several questions to one site in one message, and its answers in one.

A site answers them one by one, in their order, each as if it had come alone. After a refusal it answers no
other: the bundle of answers ends with the refusal, and what was answered before it counts.

A bundle is a magic word, and each message with its length before it. No single message begins with the word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fedstat.errors import MessageError

MAGIC = b"fedstat bundle 1\n"
LENGTH_BYTES = 8


class Answered(NamedTuple):
    """An answer as it leaves, and whether it is a refusal."""

    packed: bytes
    refused: bool = False


def is_bundle(message: bytes) -> bool:
    """Whether a message is of several."""
    return message.startswith(MAGIC)


def bundle(messages: Sequence[bytes]) -> bytes:
    """Put messages into one; one alone stays what it is."""
    if len(messages) == 1:
        return messages[0]
    return MAGIC + b"".join(len(one).to_bytes(LENGTH_BYTES, "little") + one for one in messages)


def unbundle(message: bytes) -> list[bytes]:
    """Take the messages out of one; a MessageError where they are not whole."""
    return list(_parts(message)) if is_bundle(message) else [message]


def _parts(message: bytes) -> Iterator[bytes]:
    place = len(MAGIC)
    while place < len(message):
        begin = place + LENGTH_BYTES
        place = begin + int.from_bytes(message[place:begin], "little")
        if not begin < place <= len(message):
            raise MessageError(f"{len(message)} bytes that are not a whole bundle of messages")
        yield message[begin:place]
