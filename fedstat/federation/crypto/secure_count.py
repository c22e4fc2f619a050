"""Secure counts: whether a count that two sites share is below a minimum without being zero, and no more.

Sites A and B hold columns of zeros and ones, S_a (n, p) and S_b (n, q), for the same rows. The elements of
``S_a'S_b``, by group of rows, count the rows in which a column of each is one. For every count c the sites
learn one bit, whether ``0 < c < k``, and the coordinator learns nothing:

====  =============  ============================================================================
step  who            what
====  =============  ============================================================================
0     dealer         sends A and B a seed. A expands U (n, p), Z_a and, for each count, u (k,) and w_a;
                     B expands V (n, q) and v (k,), and is sent ``Z_b = U'V - Z_a``, ``w_b = u'v - w_a``
1     A to B         ``S_a - U``
1     B to A         ``S_b - V``
2     A              ``c_a = S_a'(S_b - V) + Z_a``
2     B              ``c_b = (S_a - U)'V + Z_b``: ``c_a + c_b = c`` modulo 2^32
2     A to B         ``x - u``, ``x = r_a (1, c_a, ..., c_a^(k-1))``
2     B to A         ``y - v``, y = r_b times the coefficients of ``f(t + c_b)``, ``f(c) = (c-1)...(c-k+1)``
3     A to B         ``x'(y - v) + w_a``
3     B to A         ``(x - u)'v + w_b``
4     A and B        the sum of the two: ``r_a r_b f(c)``
====  =============  ============================================================================

Steps 0 to 2 are in the ring of 2^32 (Beaver 1991); the following steps are modulo the prime 2^31 - 1. A and B
draw r_a and r_b, which are not zero, for this count alone. The sum is zero if the count is forbidden, and
otherwise uniform over all numbers but zero, also for a site that knows one of the two factors. All earlier
messages to a site are uniform.

The shares of a count are taken from the ring to the prime one by one, as if ``c_a + c_b = c + 2^32``
(Mohassel and Zhang 2017, section IV.A). This is wrong with probability ``(c + 1) / 2^32``, and c then counts
as ``c - 2``: a forbidden count passes with probability below ``k / 2^32``.

The dealer must follow the protocol and collude with neither site. One that deals wrong numbers can make the
bit meaningless; it still learns nothing.

References
----------
Beaver, D. (1991). Efficient multiparty protocols using circuit randomization. CRYPTO '91, 420-432.
Mohassel, P. and Zhang, Y. (2017). SecureML: a system for scalable privacy-preserving machine learning. IEEE
Symposium on Security and Privacy, 19-38.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.crypto.keys import keystream
from fedstat.federation.crypto.secure_product import PRIME, MatrixProduct, new_seed
from fedstat.kernels import ring
from fedstat.typing import Array, Bools, Ints

WORD = "<u4"
"""Type of a number in a message."""
RING = 2**32

# ----------------------------------------------------------------------------------------------------
# Shares of the counts.


@dataclass(frozen=True, slots=True)
class _Table:
    """A random table of the dealer, (n, p); some consecutive rows are expanded at a time."""

    seed: bytes
    shape: tuple[int, int]

    def __getitem__(self, rows: slice) -> Ints:
        start, stop, _ = rows.indices(self.shape[0])
        # Blocks begin at an even row, so that each begins with a word of 64 bits.
        first, count = start * self.shape[1] // 2, (stop - start) * self.shape[1]
        words = keystream(self.seed, _nonce(b"count table"), (count + 1) // 2, first)
        return words.view(WORD)[:count].reshape(-1, self.shape[1]).astype(np.int64)


def deal_counts(product: MatrixProduct, seed_a: bytes, seed_b: bytes, group: Ints) -> Ints:
    """Return B's share ``Z_b = U'V - Z_a`` of the dealer's triple: (groups, p, q)."""
    U, V = _Table(seed_a, product.shape_a), _Table(seed_b, product.shape_b)
    return np.asarray(
        (ring.grouped_gram(U, V, group, product.groups) - _share_of_triple(product, seed_a)) % RING
    )


def open_supports(supports: Array, seed: bytes) -> bytes:
    """Return what the other site is shown: zeros and ones (n, p) less a random table."""
    table, out = _Table(seed, supports.shape), np.empty(supports.shape, WORD)
    for start in range(0, len(supports), ring.BLOCK):
        rows = slice(start, start + ring.BLOCK)
        out[rows] = (supports[rows] - table[rows]) % RING
    return out.tobytes()


def share_of_counts(
    product: MatrixProduct, first: bool, supports: Array, seed: bytes, shown: Array, dealt: Ints, group: Ints
) -> Ints:
    """Return a site's share of the counts, (groups, p, q), from what the other site has shown, (n, q).

    `supports` (n, p) are those of the site, `dealt` (groups, p, q) is Z_b, empty at A.
    """
    if first:
        return (
            ring.grouped_gram(supports, shown, group, product.groups) + _share_of_triple(product, seed)
        ) % RING
    own = ring.grouped_gram(shown, _Table(seed, product.shape_b), group, product.groups)
    return np.asarray((own + dealt.reshape(product.shape)) % RING)


def _share_of_triple(product: MatrixProduct, seed_a: bytes) -> Ints:
    cells = int(np.prod(product.shape))
    return (keystream(seed_a, _nonce(b"count z"), cells) % RING).reshape(product.shape)


# ----------------------------------------------------------------------------------------------------
# Comparison of the counts with a minimum.


def deal_comparison(product: MatrixProduct, least: int, seed_a: bytes, seed_b: bytes) -> Ints:
    """Return B's share ``w_b = u'v - w_a`` of the dealer's numbers, one for each count: (cells,)."""
    u, v = (_numbers(product, least, seed, first) for seed, first in ((seed_a, True), (seed_b, False)))
    return (_dots(u, v) - _share_of_dealer(product, seed_a)) % PRIME


@dataclass(frozen=True, slots=True)
class CountComparison:
    """One site's side of the comparison of counts with a minimum: its operand (cells, least) of each count.

    `share_of_dealer` (cells,) is w_a or w_b.
    """

    product: MatrixProduct
    first: bool
    seed: bytes
    operand: Ints
    share_of_dealer: Ints

    @classmethod
    def of(
        cls, product: MatrixProduct, first: bool, least: int, shares: Ints, seed: bytes, dealt: Ints
    ) -> CountComparison:
        """Make the operand from the site's shares of the counts, and B's numbers of the dealer, (cells,)."""
        counts = shares.reshape(-1) % PRIME
        if first:
            operand, dealt = _powers(counts, least), _share_of_dealer(product, seed)
        else:
            operand = _coefficients((counts - RING) % PRIME, least)
        if dealt.shape != counts.shape:
            raise MessageError("dealer: expected a share of a comparison for every count")
        factor = 1 + keystream(new_seed(), _nonce(b"factor"), len(counts)) % (PRIME - 1)
        return cls(product, first, seed, operand * factor[:, None] % PRIME, dealt)

    def opened(self) -> bytes:
        """Return what the other site is shown first: the operand less a random table of the dealer."""
        table = _numbers(self.product, self.operand.shape[1], self.seed, self.first)
        return _as_words(self.operand - table)

    def share(self, opened: bytes) -> bytes:
        """Return what the other site is shown then, from what that one opened: a share of the outcome."""
        other = _from_words(opened, self.operand.size).reshape(self.operand.shape)
        own = self.operand if self.first else _numbers(self.product, self.operand.shape[1], self.seed, False)
        return _as_words(_dots(own, other) + self.share_of_dealer)


def forbidden_counts(product: MatrixProduct, own: bytes, other: bytes) -> Bools:
    """Return which counts are above zero and below the minimum, (groups, p, q), from both shares."""
    cells = int(np.prod(product.shape))
    outcome = (_from_words(own, cells) + _from_words(other, cells)) % PRIME
    return np.asarray(outcome == 0).reshape(product.shape)


def _powers(counts: Ints, least: int) -> Ints:
    """Return ``(1, c, ..., c^(least - 1))`` of every count: (cells, least)."""
    out = np.ones((len(counts), least), dtype=np.int64)
    for i in range(1, least):
        out[:, i] = out[:, i - 1] * counts % PRIME
    return out


def _coefficients(counts: Ints, least: int) -> Ints:
    """Return the coefficients in t of ``(t + c - 1) ... (t + c - least + 1)``, ascending: (cells, least)."""
    out = np.zeros((len(counts), least), dtype=np.int64)
    out[:, 0] = 1
    for j in range(1, least):
        moved = np.roll(out, 1, axis=1)  # times t; the last coefficient is still zero
        out = (moved + out * ((counts - j) % PRIME)[:, None]) % PRIME
    return out


def _dots(a: Ints, b: Ints) -> Ints:
    """Return the inner products of rows modulo the prime: (cells,)."""
    return np.asarray((a * b % PRIME).sum(axis=1) % PRIME)


def _numbers(product: MatrixProduct, least: int, seed: bytes, first: bool) -> Ints:
    cells = int(np.prod(product.shape))
    return _uniform(seed, b"count u" if first else b"count v", cells * least).reshape(cells, least)


def _share_of_dealer(product: MatrixProduct, seed_a: bytes) -> Ints:
    return _uniform(seed_a, b"count w", int(np.prod(product.shape)))


def _uniform(seed: bytes, label: bytes, count: int) -> Ints:
    return keystream(seed, _nonce(label), count) % PRIME


def _nonce(label: bytes) -> bytes:
    return label.ljust(12, b"\0")


def _as_words(numbers: Ints) -> bytes:
    return (numbers % PRIME).astype(WORD).tobytes()


def _from_words(content: bytes, count: int) -> Ints:
    numbers = np.frombuffer(content, WORD).astype(np.int64)
    if numbers.shape != (count,) or (numbers >= PRIME).any():
        raise MessageError(f"expected {count:,} numbers below the prime for the comparison of counts")
    return numbers
