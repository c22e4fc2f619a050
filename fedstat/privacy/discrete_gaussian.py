"""Exact samples of the discrete Gaussian distribution, from integers and random bytes.

The probability of an integer x is proportional to exp(-x^2 / (2 s^2)). No number is rounded anywhere:
floating-point noise has gaps and repetitions that reveal the values behind it (Mironov 2012). After
Canonne, Kamath and Steinke (2020), algorithms 1 to 3; a draw takes about twenty random words. The duration
depends on the drawn number, so a clock at the site itself would reveal something about it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedstat.errors import ModelError
from fedstat.kernels import discrete_gaussian as kernel
from fedstat.typing import Ints

RandomBytes: TypeAlias = Callable[[int], bytes]
"""Returns a number of random bytes, as ``os.urandom`` does."""
WORD = 8
BUFFER = 512
"""Words of 64 bits that are taken from the source at once, or more."""
A_DRAW, MAX_BUFFERED = 32, 2**16
"""Words for a draw, more than most take, and how many are held."""
VERSION = "2"
"""Version of the way from bytes to draws. Another version repeats a request with other noise."""
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
    if variance.denominator > 1 or variance > kernel.LARGEST:
        return np.array([_draw(variance, coins) for _ in range(size)], dtype=np.int64)
    return _draw_small(variance, size, coins)


class _Coins:
    """Uniform whole numbers, and coins of given probabilities, from random bytes."""

    def __init__(self, source: RandomBytes) -> None:
        self._source, self._held, self._place = source, b"", 0

    def below(self, n: int) -> int:
        """Draw one of 0 to n - 1, each as probable as another."""
        bits = (n - 1).bit_length()
        words = (bits + 63) // 64
        while True:
            # A number that is not below n is drawn again: a remainder would make small numbers more probable.
            found = int.from_bytes(self._take(words), "little") >> (64 * words - bits)
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

    def _take(self, words: int) -> bytes:
        self._hold(words)
        self._place += WORD * words
        return self._held[self._place - WORD * words : self._place]

    def peek(self, words: int) -> NDArray[np.uint64]:
        """Return the words that come next."""
        self._hold(words)
        return np.frombuffer(self._held, "<u8", words, self._place).astype(np.uint64, copy=False)

    def skip(self, words: int) -> None:
        """Count words as used."""
        self._place += WORD * words

    def _hold(self, words: int) -> None:
        lacking = WORD * words - (len(self._held) - self._place)
        if lacking > 0:
            self._held = self._held[self._place :] + self._source(max(WORD * BUFFER, lacking))
            self._place = 0


def _draw_small(variance: Fraction, size: int, coins: _Coins) -> Ints:
    """Draw numbers by the compiled twin of :func:`_draw`, which leaves some to it: (size,)."""
    a, parts, left = variance.numerator, [], size
    while left:
        words = coins.peek(min(A_DRAW * left, MAX_BUFFERED))
        found, used = kernel.draw_words(a, math.isqrt(a) + 1, words, left)
        coins.skip(used)
        parts.append(found if len(found) else np.array([_draw(variance, coins)], dtype=np.int64))
        left -= len(parts[-1])
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _draw(variance: Fraction, coins: _Coins) -> int:
    """One number: a draw of the discrete Laplace distribution, accepted with the ratio to the Gaussian."""
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
