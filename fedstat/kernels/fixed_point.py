"""Fixed-point integers of several words of 64 bits: encoding of floats, addition and subtraction.

A number occupies one column of an array (limbs, n), the least significant word first, in two's complement.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fedstat.typing import Floats

Words = NDArray[np.uint64]


@njit(cache=True)
def encode_floats(values: Floats, first: float, words: Words) -> None:
    """Write the integers nearest to the values times a power of 2: (n,) into (limbs, n).

    `first` is the power by which the value is scaled so that the most significant word holds its integer
    part.
    """
    limbs = len(words)
    for i in range(len(values)):
        scaled = abs(values[i]) * first
        for limb in range(limbs - 1, 0, -1):
            complete = np.floor(scaled)
            words[limb, i] = np.uint64(complete)
            scaled = (scaled - complete) * 18446744073709551616.0
        words[0, i] = np.uint64(np.rint(scaled))
        if values[i] < 0.0:
            send = True
            for limb in range(limbs):
                words[limb, i] = ~words[limb, i] + np.uint64(send)
                send = send and words[limb, i] == np.uint64(0)


@njit(cache=True)
def add_words(total: Words, other: Words) -> None:
    """Add in place, modulo 2^64 per word, and carry: (limbs, n)."""
    for i in range(total.shape[1]):
        send = np.uint64(0)
        for limb in range(len(total)):
            word = total[limb, i] + other[limb, i]
            over = word < other[limb, i]
            word += send
            send = np.uint64(over or word < send)
            total[limb, i] = word


@njit(cache=True)
def subtract_words(total: Words, other: Words) -> None:
    """Subtract in place, modulo 2^64 per word, and borrow: (limbs, n)."""
    for i in range(total.shape[1]):
        borrow = np.uint64(0)
        for limb in range(len(total)):
            word, less = total[limb, i], other[limb, i]
            under = word < less
            word -= less
            total[limb, i] = word - borrow
            borrow = np.uint64(under or word < borrow)
