"""Uniform words from a key: the ChaCha20 key stream (RFC 8439, section 2.4), read from any place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fedstat.typing import Ints

WORD_BYTES = 8
CIPHER_BLOCK = 64
LARGEST_STREAM = 2**38
"""Bytes of one stream: the cipher counts its blocks of 64 bytes with 32 bits."""


def keystream(key: bytes, nonce: bytes, count: int, start: int = 0) -> Ints:
    """Return words of 64 bits of the stream under a key of 32 bytes and a nonce of 12 bytes: (count,).

    Word number i, from `start`, is the little-endian word of bytes 8i to 8i + 7; the block counter is 0 at
    the first. One nonce serves one purpose: whoever sees two values under the same words has their
    difference.
    """
    block, skip = divmod(start * WORD_BYTES, CIPHER_BLOCK)
    cipher = Cipher(algorithms.ChaCha20(key, block.to_bytes(4, "little") + nonce), mode=None).encryptor()
    stream = cipher.update(bytes(skip + count * WORD_BYTES))
    return np.frombuffer(stream, "<i8")[skip // WORD_BYTES :].astype(np.int64, copy=False)


def random_bytes(key: bytes) -> Callable[[int], bytes]:
    """Return a source of random bytes that are the same for a key of 32 bytes, which serves nothing else."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda count: cipher.update(bytes(count))
