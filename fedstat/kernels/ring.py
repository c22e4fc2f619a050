"""Fixed-point arithmetic modulo 2^64, sums of products that wrap around, and integers of several words.

A real number x is stored as the integer nearest to ``x 2^f``. Sums and products of int64 are computed modulo
2^64. They are exact if the RESULT is between -2^63 and 2^63, for any intermediate values, and do not depend
on the order of the rows. An integer of several words of 64 bits occupies one column of an array (limbs, n),
the least significant word first, in two's complement.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fedstat.errors import EstimationError
from fedstat.kernels import as_kernel_array
from fedstat.typing import Bools, Floats, Ints

BLOCK = 4096
"""Number of rows of a streamed factor that are held at once."""

LARGEST_SQUARES = 1.5 * 2.0**62
"""Largest sum of squares of an encoded column: by Cauchy and Schwarz, the products of two such columns
add up to less than 2^63 over any set of rows."""

FEWEST_BITS = 10


class IntRows(Protocol):
    """Rows of integers that can be read one block at a time: an int64 array (n, p), or a stream."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""

    def __getitem__(self, rows: slice, /) -> Ints:
        """Return some rows: (m, p)."""


def fractional_bits(n: int, spread: int = 0) -> int:
    """Return ``f = floor((62 - log2 n) / 2) - spread``, at which no product of two columns overflows.

    A column whose squares sum to at most ``n 4^spread`` has, encoded, squares that sum to ``2^62``; by Cauchy
    and Schwarz, the products of two such columns sum to at most 2^62 over any set of rows. A column that its
    site standardized over at most n rows satisfies this with ``spread`` 0, for any tails, so that no site has
    to declare a largest value; n is no less than the rows of any site. For other columns ``2^spread``, one
    number for all sites, is no less than their root mean square. f is 22 for 166,207 entities; an
    EstimationError if it is below 10.
    """
    f = math.floor((62 - math.log2(max(n, 1))) / 2) - spread
    if f < FEWEST_BITS:
        raise EstimationError(
            f"{n} rows with columns of a root mean square up to 2^{spread} leave {f} fractional bits, fewer"
            f" than {FEWEST_BITS}: standardize the columns (spread 0)"
        )
    return f


def encode(X: Floats, f: int) -> tuple[Ints, Floats]:
    """Return the integers nearest to ``X 2^f`` (n, p), and the sums of their squares by column (p,).

    Values that do not fit become 0. A column can be used if its sum is at most ``LARGEST_SQUARES``; the sum
    is NaN or infinite if an element is.
    """
    out, squares = np.empty(X.shape, np.int64), np.zeros(X.shape[1])
    for start in range(0, len(X), BLOCK):
        rows = slice(start, start + BLOCK)
        scaled = X[rows] * 2.0**f
        np.rint(scaled, out=scaled)
        own = np.einsum("ij,ij->j", scaled, scaled)
        if not (own < 2.0**124).all():
            # Beyond 2^62 the conversion is undefined; the sum of squares reports it to the caller.
            scaled = np.where(np.abs(scaled) < 2.0**62, scaled, 0.0)
        out[rows], squares = scaled, squares + own
    return out, squares


def decode(S: Ints, f: int) -> Floats:
    """Return ``S / 2^f``, correctly rounded: int64 array -> float64 array of the same shape."""
    decoded: Floats = np.ldexp(S.astype(np.float64), -f)
    return decoded


def grouped_gram(A: IntRows, B: IntRows, group: Ints, n_groups: int) -> Ints:
    """Return ``A_g' B_g`` modulo 2^64 for every group g of rows, in one pass: (n_groups, p, q) int64.

    A (n, p) and B (n, q) are int64 arrays or streams of them, `group` (n,) numbers from 0; a group without
    rows has zeros. Raises ValueError if the lengths differ, or there is another group.
    """
    n, p = A.shape
    if B.shape[0] != n or group.shape != (n,):
        raise ValueError(f"{n} rows at the left, {B.shape[0]} at the right, groups of {len(group)}")
    if n and not 0 <= group.min() <= group.max() < n_groups:
        raise ValueError(f"groups must be between 0 and {n_groups - 1}")

    sums = np.zeros((n_groups, p, B.shape[1]), np.uint64)
    for start in range(0, n, BLOCK):
        rows = slice(start, start + BLOCK)
        _add_rows(sums, _words(A[rows]), _words(B[rows]), as_kernel_array(group[rows], np.int64))
    return sums.view(np.int64)


def _words(block: Ints) -> NDArray[np.uint64]:
    return as_kernel_array(as_kernel_array(block, np.int64).view(np.uint64), np.uint64)


@njit(cache=True, nogil=True)
def _add_rows(sums: NDArray[np.uint64], A: NDArray[np.uint64], B: NDArray[np.uint64], group: Ints) -> None:
    """Add ``a_i b_i'`` to ``sums[group_i]``; unsigned, because wrapping round is defined for it."""
    for i in range(A.shape[0]):
        g = group[i]
        for j in range(A.shape[1]):
            a = A[i, j]
            for k in range(B.shape[1]):
                sums[g, j, k] += a * B[i, k]


# ----------------------------------------------------------------------------------------------------
# Fixed-point integers of several words: encoding of floats, addition and subtraction.

Words = NDArray[np.uint64]
HALF_WORD, HALF_BITS = np.uint64(2**32 - 1), np.uint64(32)


def encode_floats(values: Floats, first: float, words: Words) -> None:
    """Write the integers nearest to the values times a power of 2: (n,) into (limbs, n).

    `first` is the power by which the value is scaled so that the most significant word holds its integer
    part.
    """
    scaled = np.abs(values) * first
    for limb in words[:0:-1]:
        complete = np.floor(scaled)
        limb[:] = complete
        scaled = (scaled - complete) * 2.0**64
    words[0] = np.rint(scaled)
    negative = values < 0.0
    send = negative
    for limb in words:
        limb[:] = np.where(negative, ~limb + send, limb)
        send = send & (limb == 0)


def add_words(total: Words, other: Words) -> None:
    """Add in place, modulo 2^64 per word, and carry: (limbs, n)."""
    send: Bools | None = None
    for limb, added in zip(total, other, strict=True):
        limb += added
        over = limb < added
        if send is not None:
            limb += send
            over |= limb < send
        send = over


def sum_words(terms: Words) -> Words:
    """Return the sum of integers modulo 2^(64 limbs): (k, limbs, n) -> (limbs, n)."""
    low, high = (terms & HALF_WORD).sum(axis=0), (terms >> HALF_BITS).sum(axis=0)
    carried = np.zeros(low.shape[1:], np.uint64)
    for below, above in zip(low, high, strict=True):  # halves of a limb, which do not wrap around
        below += carried
        above += below >> HALF_BITS
        below &= HALF_WORD
        carried = above >> HALF_BITS
    return np.asarray(low | (high << HALF_BITS))


def subtract_words(total: Words, other: Words) -> None:
    """Subtract in place, modulo 2^64 per word, and borrow: (limbs, n)."""
    borrow: Bools | None = None
    for limb, less in zip(total, other, strict=True):
        under = limb < less
        limb -= less
        if borrow is not None:
            under |= limb < borrow
            limb -= borrow
        borrow = under
