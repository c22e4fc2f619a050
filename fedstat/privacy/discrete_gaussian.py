"""Exact samples of the discrete Gaussian distribution, in whole numbers and from random bytes alone.

The probability of an integer x is proportional to exp(-x^2 / (2 s^2)). No number is rounded anywhere:
floating-point noise has gaps and repetitions by which values behind it can be told (Mironov 2012). After
Canonne, Kamath and Steinke (2020), algorithms 1 to 3; a draw takes some fifty random bytes. How long it takes
depends on what is drawn, so that a clock at the site itself would tell something of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from fedstat.errors import ModelError
from fedstat.typing import Ints

RandomBytes: TypeAlias = Callable[[int], bytes]
"""Returns so many random bytes, as ``os.urandom`` does."""
BUFFER = 4096
LARGEST = 2**100
"""Variance, far above any use, at which a sum of draws would leave 64 bits."""


def discrete_gaussian(variance: Fraction, size: int, source: RandomBytes = os.urandom) -> Ints:
    """Draw independent numbers: (size,) int64.

    Parameters
    ----------
    variance : Fraction
        The parameter s^2; the variance itself is a little less, and the same to 16 digits from s = 2 on.
    size : int
    source : callable
        Of the randomness, which has to be cryptographic: the operating system's, or a key stream.

    Raises
    ------
    ModelError
        The variance is not above 0, or beyond any use.
    """
    if not 0 < variance <= LARGEST:
        raise ModelError(f"the variance of noise is above 0 and at most 2^100, received {variance}")
    coins = _Coins(source)
    return np.array([_draw(variance, coins) for _ in range(size)], dtype=np.int64)


class _Coins:
    """Uniform whole numbers, and coins of given probabilities, from random bytes."""

    def __init__(self, source: RandomBytes) -> None:
        self._source, self._held, self._place = source, b"", 0

    def below(self, n: int) -> int:
        """Draw one of 0 to n - 1, each as probable as another."""
        bits = (n - 1).bit_length()
        length = (bits + 7) // 8
        while True:
            # What is not below n is drawn again: a remainder would make small numbers more probable.
            found = int.from_bytes(self._take(length), "little") >> (8 * length - bits)
            if found < n:
                return found

    def exponential(self, x: int, y: int) -> bool:
        """Return true with probability exp(-x/y)."""
        while x > y:
            if not self._at_most_one(1, 1):
                return False
            x -= y
        return self._at_most_one(x, y)

    def _at_most_one(self, x: int, y: int) -> bool:
        """As :meth:`exponential` for x/y up to 1: by the series of exp, a term at a time."""
        k = 1
        while self.below(y * k) < x:
            k += 1
        return k % 2 == 1

    def _take(self, length: int) -> bytes:
        if self._place + length > len(self._held):
            self._held, self._place = self._source(max(BUFFER, length)), 0
        self._place += length
        return self._held[self._place - length : self._place]


def _draw(variance: Fraction, coins: _Coins) -> int:
    """One number: that of a discrete Laplace distribution, kept as often as the Gaussian has it beside it."""
    a, b = variance.numerator, variance.denominator
    t = math.isqrt(a // b) + 1
    while True:
        y = _laplace(t, coins)
        # exp(-(|y| - s^2/t)^2 / (2 s^2))
        if coins.exponential((abs(y) * b * t - a) ** 2, 2 * a * b * t * t):
            return y


def _laplace(t: int, coins: _Coins) -> int:
    """Draw an integer of probability proportional to exp(-|x| / t)."""
    while True:
        u = coins.below(t)
        if not coins.exponential(u, t):
            continue
        v = 0
        while coins.exponential(1, 1):
            v += 1
        x = u + t * v
        negative = coins.below(2)
        if x or not negative:  # else zero would be drawn by either sign
            return -x if negative else x
