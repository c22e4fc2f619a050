"""Exact draws of the discrete Gaussian distribution whose values fit into 64 bits.

The loops of :mod:`fedstat.privacy.discrete_gaussian`, number for number on the same random words: integers
only, without rounding. Cases that might exceed 64 bits, or lack words, are left to the caller.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fedstat.kernels import as_kernel_array
from fedstat.typing import Ints

Whole: TypeAlias = int | np.int64

LARGEST = 2**22
"""Variance up to which almost all draws fit."""
MOST = 2**62
OUT = -1
"""Placeholder for a number: the words are used up, or a number would exceed 64 bits."""
FAR = 2**31
ONE = np.int64(1)
"""A literal 1 would be a type of its own, and a function is compiled once for each of its types."""


def draw_words(variance: int, t: int, words: NDArray[np.uint64], size: int) -> tuple[Ints, int]:
    """Draw up to `size` numbers from random words; return them, fewer if one fails, and the words used.

    `t` is the scale of the Laplace distribution that proposes: the root of the variance, rounded down, and 1.
    """
    out = np.empty(size, np.int64)
    at = np.zeros(1, np.int64)  # in the loop it would be compiled
    made, used = _draws(variance, t, as_kernel_array(words, np.uint64), at, out)
    return out[:made], int(used)


@njit(cache=True, nogil=True)
def _below(n: Whole, bits: Whole, words: NDArray[np.uint64], at: Ints) -> Whole:
    """Draw an integer from 0 to n - 1, with this number of bits."""
    if bits == 0:
        return 0
    while at[0] < words.shape[0]:
        # a signed number: of one without a sign and one with, numba makes a float
        found = np.int64(words[at[0]] >> np.uint64(64 - bits))
        at[0] += 1
        if found < n:
            return found
    return OUT


@njit(cache=True, nogil=True)
def _at_most_one(x: Whole, y: Whole, words: NDArray[np.uint64], at: Ints) -> Whole:
    """Return 1 with probability exp(-x/y), otherwise 0."""
    k, n, bits = ONE, y, np.int64(0)
    while n < MOST:
        while (1 << bits) < n:
            bits += 1
        found = _below(n, bits, words, at)
        if found == OUT:
            return OUT
        if found >= x:
            return k % 2
        k, n = k + 1, n + y
    return OUT


@njit(cache=True, nogil=True)
def _exponential(x: Whole, y: Whole, words: NDArray[np.uint64], at: Ints) -> Whole:
    while x > y:
        found = _at_most_one(ONE, ONE, words, at)
        if found != 1:
            return found
        x -= y
    return _at_most_one(x, y, words, at)


@njit(cache=True, nogil=True)
def _draws(a: int, t: int, words: NDArray[np.uint64], at: Ints, out: Ints) -> tuple[int, int]:
    bits = np.int64(0)
    while (1 << bits) < t:
        bits += 1
    for i in range(out.shape[0]):
        start = at[0]
        kept: Whole = 0
        while kept == 0:
            u = _below(t, bits, words, at)
            kept = OUT if u == OUT else _exponential(u, t, words, at)
            if kept != 1:
                continue
            x = u
            again: Whole = 1
            while again == 1:
                again = _at_most_one(ONE, ONE, words, at)
                x += t * again
            negative = _below(np.int64(2), ONE, words, at)
            apart = x * t - a
            if again == OUT or negative == OUT or apart > FAR:
                kept = OUT
            elif x == 0 and negative == 1:
                kept = 0
            else:
                kept = _exponential(apart * apart, 2 * a * t * t, words, at)
                out[i] = -x if negative == 1 else x
        if kept == OUT:
            return i, start
    return out.shape[0], at[0]
