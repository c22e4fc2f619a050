"""Checks of a secure product: its checksum and the fingerprints of its rows."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import numpy as np

from fedstat.errors import MessageError, SecurityError
from fedstat.federation.crypto.keys import encode_parts, keystream
from fedstat.federation.crypto.secure_product import MatrixProduct
from fedstat.typing import Array, Bools, Ints

# ----------------------------------------------------------------------------------------------------
# A checksum of a secure product: one number for every group, by which a wrong triple is found.
#
# Beside their columns, institutions A and B multiply one random combination of each, ``x_a = X_a r`` and
# ``x_b = X_b t`` modulo a prime, by a triple of one column from the same dealer. The coordinator is told r
# and t with the shares, when it is too late to choose an error by them, and holds ``r'(X_a'X_b)t`` against
# ``x_a'x_b`` (Freivalds 1979). An error in any element of a product passes with probability below 2^-19:
# the range of the products alone lets three out of four single ones pass. Nothing more is disclosed, since
# the checksum is a function of the product.
#
# Modulo 2^64 an error of 2^60 would pass one time in sixteen; a prime has no such divisors.
#
# References
# ----------
# Freivalds, R. (1979). Fast probabilistic algorithms. Mathematical Foundations of Computer Science, 57-69.

PRIME = 2**31 - 1
WEIGHTS = 2**20
"""Weights are below this, so that a combination of :data:`COLUMNS` columns fits into 64 bits."""
COLUMNS = 2**12
EXACT_ROWS = 2**22
"""Numbers below the prime of which a float64 holds the sum."""


@dataclass(frozen=True, slots=True)
class ChecksumOperand:
    """One site's combination x (n,) of its encoded columns, its weights (p,), and the dealer's seed."""

    product: MatrixProduct
    first: bool
    seed: bytes
    weights: Ints
    x: Ints

    @classmethod
    def of(cls, product: MatrixProduct, first: bool, seed: bytes, X: Ints, secret: bytes) -> ChecksumOperand:
        """Combine encoded columns (n, p) with weights that the two institutions' secret gives."""
        weights = _words(secret, b"A" if first else b"B", X.shape[1], WEIGHTS)
        return cls(product, first, seed, weights, combine_columns(X, weights))

    @property
    def bytes_opened(self) -> int:
        """Length of what either institution opens: 4 bytes for a row, in whole words of 8."""
        return opened_bytes(self.product.rows)

    def opened(self) -> bytes:
        """Return what the other institution is shown: the combination less a random column of the dealer."""
        shown = np.zeros(self.bytes_opened // 4, "<u4")
        shown[: len(self.x)] = (self.x - _column(self.product, self.seed, self.first)) % PRIME
        return shown.tobytes()

    def share(self, opened: bytes, group: Ints, Z_b: Ints, mask_seed: bytes) -> Ints:
        """Share of the checksum by group, (G,), from what the other site opened, and B's of the triple."""
        other = np.frombuffer(opened, "<u4")[: self.product.rows].astype(np.int64)
        mask = _words(mask_seed, b"check", self.product.groups)
        if self.first:
            return (
                _sum(self.product, self.x * other, group) + _share_a(self.product, self.seed) + mask
            ) % PRIME
        if Z_b.shape != mask.shape:
            raise MessageError("dealer: expected a share of a checksum for every group")
        own = _column(self.product, self.seed, False)
        return (_sum(self.product, other * own, group) + Z_b - mask) % PRIME


def opened_bytes(rows: int) -> int:
    """Length of what an institution opens for a checksum."""
    return 8 * ((rows + 1) // 2)


def deal_checksum(product: MatrixProduct, seed_a: bytes, seed_b: bytes, group: Ints) -> Ints:
    """Return B's share of a triple of one column, by group: (G,); beside :func:`product.deal`."""
    u, v = _column(product, seed_a, True), _column(product, seed_b, False)
    return (_sum(product, u * v, group) - _share_a(product, seed_a)) % PRIME


def check_product(product: MatrixProduct, total: Ints, checks: Ints, weights: tuple[Ints, Ints]) -> None:
    """Hold products by group (G, p, q), as integers, against the sum of both shares of the checksum (G,).

    A SecurityError where they differ: what was dealt, or a share, is wrong.
    """
    r, t = weights
    if (
        r.shape != (product.columns_a,)
        or t.shape != (product.columns_b,)
        or checks.shape != (product.groups,)
    ):
        raise MessageError(f"checksum of {product.client_a} and {product.client_b}: received another shape")
    left = (total % PRIME * (r % PRIME)[:, None] % PRIME).sum(axis=1)
    if ((left % PRIME * (t % PRIME) % PRIME).sum(axis=1) % PRIME != checks % PRIME).any():
        raise SecurityError(
            f"the product of the columns of {product.client_a} and {product.client_b} is not what its "
            "checksum says: what was dealt, or a share, is wrong; nothing of it is used"
        )


def combine_columns(X: Ints, weights: Ints) -> Ints:
    """Combine columns (n, p) modulo the prime: (n,)."""
    if X.size and (X.max() >= 2**31 or X.min() <= -(2**31)):
        X = X % PRIME
    out = np.zeros(len(X), np.int64)
    for j in range(0, X.shape[1], COLUMNS):
        out += X[:, j : j + COLUMNS] @ weights[j : j + COLUMNS] % PRIME
    return out % PRIME


def _sum(product: MatrixProduct, values: Ints, group: Ints) -> Ints:
    """Sum by group modulo the prime."""
    total = np.zeros(product.groups, np.int64)
    for start in range(0, len(values), EXACT_ROWS):
        rows = slice(start, start + EXACT_ROWS)
        sums = np.bincount(group[rows], weights=values[rows] % PRIME, minlength=product.groups)
        total += sums.astype(np.int64)
    return total % PRIME


def _column(product: MatrixProduct, seed: bytes, first: bool) -> Ints:
    return _words(seed, b"u" if first else b"v", product.rows)


def _share_a(product: MatrixProduct, seed_a: bytes) -> Ints:
    return _words(seed_a, b"z", product.groups)


def _words(seed: bytes, label: bytes, count: int, below: int = PRIME) -> Ints:
    return keystream(seed, label.ljust(12, b"\0"), count) % below


# ----------------------------------------------------------------------------------------------------
# Marks by which two sites compare what they were told of a product, and whose their rows are.

MARK = 16
"""Bytes of a keyed digest: who cannot compute it finds no two things of one mark."""


@dataclass(frozen=True, slots=True)
class RowFingerprints:
    """What one of two sites was told of a product, and who its rows are, under a key of these two alone.

    `told` and `entities` are marks; those of the other site must be the same. Both sites have records of
    `both` (n,) of the rows; `own` (n,) are this one's records, empty where that is the same.
    """

    told: bytes
    entities: bytes
    both: Bools
    own: Bools

    @classmethod
    def of(cls, key: bytes, digest: bytes, entities: Array, both: Bools, own: Bools) -> RowFingerprints:
        """Mark a product by its digest, and the entities of all rows, (n,) or (n, w), that both have."""
        told = keyed_digest(key, "product", digest, both.tobytes())
        return cls(told, keyed_digest(key, "entities", entities[both].tobytes()), both, own)

    @property
    def content(self) -> bytes:
        """What the other site is shown, under seal."""
        return self.told + self.entities + np.packbits(self.own).tobytes()

    def compare(self, content: bytes, site: str, peer: str) -> bytes:
        """Hold the other site's marks against these, and return what came after them.

        A SecurityError where it was told of another product, or of other groups, or its rows are of other
        entities.
        """
        # Sums over groups that differ at a few rows would tell of these rows.
        if not hmac.compare_digest(content[:MARK], self.told):
            raise SecurityError(
                f"{site}: was told of another product than '{peer}', or of other groups of the rows; nothing "
                "of it was released"
            )
        if not self.of_same_entities(content):
            raise SecurityError(
                f"{site}: the rows of this product are not of the same entities, in the same order, as those "
                f"of '{peer}'; nothing of it was released. Align the sites again"
            )
        return content[len(self.content) :]

    def of_same_entities(self, content: bytes) -> bool:
        """Whether rows are of the same entities in the same order: a product would mix them otherwise."""
        # Of an entity that both have, neither may be told that the other lacks it.
        shared = np.array_equal(self.own & read_own_rows(content, len(self.own)), self.both) or not len(
            self.own
        )
        return shared and hmac.compare_digest(content[MARK : 2 * MARK], self.entities)


def keyed_digest(key: bytes, *parts: str | bytes) -> bytes:
    """Return a keyed digest of some parts."""
    return hmac.digest(key, encode_parts(*parts), "sha256")[:MARK]


def read_own_rows(content: bytes, n: int) -> Bools:
    """Read which of n rows the other site has records of."""
    told = np.frombuffer(content[2 * MARK : 2 * MARK + (n + 7) // 8], dtype=np.uint8)
    return np.unpackbits(told, count=n).astype(np.bool_)
