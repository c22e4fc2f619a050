"""Exponentials and logarithms by polynomials, which the compiler vectorizes in loops."""

from __future__ import annotations

import math

from numba import njit

from fedstat.typing import Floats, Ints

NEGLIGIBLE = -40.0
"""Logarithms below this count as zero: adding their exponential to one has no effect in double precision."""
LOG_2, LOG2_E = math.log(2.0), 1.0 / math.log(2.0)
ROOT_2 = math.sqrt(2.0)
ROUNDS = 1.5 * 2.0**52
"""Added to a number, leaves its nearest integer in the last bits."""


# Otherwise it would inherit the caller's permission to reorder, and the rounding sum would be canceled.
@njit(cache=True, nogil=True, fastmath=False)
def exponentials(x: Floats, power: Floats, bits: Ints) -> None:
    """Replace x by exp(x), or by zero below NEGLIGIBLE, without a branch; nan stays nan.

    `power` is a buffer of the length of x, and `bits` the same buffer read as integers.
    """
    for j in range(len(x)):
        least = NEGLIGIBLE if x[j] < NEGLIGIBLE else x[j]
        power[j] = least * LOG2_E + ROUNDS
    for j in range(len(x)):
        least = NEGLIGIBLE if x[j] < NEGLIGIBLE else x[j]
        r = least - (power[j] - ROUNDS) * LOG_2
        # In pairs of pairs, because a chain of twelve products would be slower.
        r2 = r * r
        r4 = r2 * r2
        low = 1.0 + r + r2 * (1.0 / 2.0 + r * (1.0 / 6.0))
        middle = 1.0 / 24.0 + r * (1.0 / 120.0) + r2 * (1.0 / 720.0 + r * (1.0 / 5040.0))
        high = 1.0 / 40320.0 + r * (1.0 / 362880.0) + r2 * (1.0 / 3628800.0 + r * (1.0 / 39916800.0))
        y = low + r4 * (middle + r4 * (high + r4 * (1.0 / 479001600.0)))
        x[j] = 0.0 if x[j] <= NEGLIGIBLE else y
    for j in range(len(x)):
        bits[j] = (bits[j] << 52) + (1023 << 52)
    for j in range(len(x)):
        x[j] *= power[j]


@njit(inline="always")
def log_one_plus(s: float) -> float:
    """Return log(1 + s), for s in [0, 1], to the last bits of one.

    It is log sqrt(2) and twice the inverse hyperbolic tangent of z = (1 + s - sqrt(2)) / (1 + s + sqrt(2)).
    """
    z = (1.0 + s - ROOT_2) / (1.0 + s + ROOT_2)
    q = z * z
    q2 = q * q
    q4 = q2 * q2
    low = 1.0 + q * (1.0 / 3.0) + q2 * (1.0 / 5.0 + q * (1.0 / 7.0))
    high = 1.0 / 9.0 + q * (1.0 / 11.0) + q2 * (1.0 / 13.0 + q * (1.0 / 15.0))
    high += q4 * (1.0 / 17.0 + q * (1.0 / 19.0))
    return 0.5 * LOG_2 + 2.0 * z * (low + q4 * high)
