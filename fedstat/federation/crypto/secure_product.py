"""Secure products: products of two sites' columns from masked numbers, with their checks."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError, MessageError, ModelError, SecurityError
from fedstat.federation.crypto.keys import LARGEST_STREAM, WORD_BYTES, encode_parts, keystream
from fedstat.federation.crypto.keys import encode_parts as join
from fedstat.kernels import ring
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Secure multiplication: the product ``X_a' X_b`` of two sites' columns, once or repeatedly.

# ----------------------------------------------------------------------------------------------------
# The product ``X_a' X_b`` of two sites' columns; each site sends only masked numbers.
#
# Site A holds X_a (n, p), site B holds X_b (n, q), with the rows aligned. The coordinator obtains ``X_a'
# X_b`` summed over the rows of each group (each missing pattern), and nothing else; neither site obtains
# anything. All arithmetic is in Z_2^64 on fixed-point numbers, so that the result is the product of the
# encoded columns to the last bit. With matrix triples (Beaver 1991; Mohassel and Zhang 2017, section IV):
#
# ====  =====================  ======================================================================
# step  who                    what
# ====  =====================  ======================================================================
# 0     dealer to A            a seed, from which A expands U (n, p) and Z_a (groups, p, q)
# 0     dealer to B            a seed, from which B expands V (n, q); and ``Z_b = U'V - Z_a`` (:func:`deal`)
# 1     A to B                 ``E = X_a - U`` (:func:`open_a`), and the seed of a mask R (groups, p, q)
# 1     B to A                 ``F = X_b - V`` (:func:`open_b`)
# 2     A to coordinator       ``X_a'F + Z_a + R`` (:func:`share_a`)
# 2     B to coordinator       ``E'V + Z_b - R`` (:func:`share_b`)
# 3     coordinator            the sum of the two shares: ``X_a'(X_b - V) + (X_a - U)'V + U'V = X_a'X_b``
# ====  =====================  ======================================================================
#
# A diagonal weight needs no protocol: the site that knows W multiplies its own columns by it and encodes
# these; a weight that is constant within the groups is applied to the result.
#
# **Adversary.** Semi-honest: every party follows the protocol and may keep and analyze what it sees.
#
# * The dealer must collude with neither A nor B: ``F + V`` is X_b, and ``E + U`` is X_a. It is the
#   coordinator or a third site. E and F must therefore be sealed: a dealer that transfers them and can
#   read them has both.
# * A and B each see uniform numbers that are independent of the other's columns. The coordinator sees two
#   shares that are uniform except for their sum. R ensures this also if the coordinator is the dealer, who
#   could otherwise remove Z_a and hold q equations ``X_a'V`` about every column of A.
# * The RESULT is not protected from its recipients. The coordinator together with B knows ``X_a'X_b`` and
# X_b, which determine X_a in a group with no more rows than X_b has independent columns: the smallest group
# that is released has to be well above the number of columns. * n, p, q, the groups of the rows and the names
# of the columns are known to all. A site that deviates from the protocol can choose its columns at will, and
# so spoil the result or select rows, as it can in any computation of a product. It learns about the other's
# columns only with the help of the coordinator.
#
# Every seed is for ONE product: two openings with the same U differ by the difference of the data. The
# expanded seed is therefore a hash of the dealer's seed and of all agreed terms
# (:meth:`MatrixProduct.digest`, :func:`bind_seed`). The same seed under another number, session or division
# of the rows gives another U, and a party that received other groups obtains noise. The sites also compare
# this digest, and a keyed digest of the entities in their rows, which a coordinator may have aligned
# differently. Uniform means: expanded by ChaCha20 (RFC 8439), hence indistinguishable from uniform if that
# cipher is secure.
#
# References
# ----------
# Beaver, D. (1991). Efficient multiparty protocols using circuit randomization. CRYPTO '91, 420-432.
# De Cock, M., Dowsley, R., Nascimento, A. and Newman, S. (2015). Fast, privacy preserving linear regression
# over distributed datasets based on pre-distributed data. AISec, 3-14.
# Gascon, A. et al. (2017). Privacy-preserving distributed linear regression on high-dimensional data.
# Proceedings on Privacy Enhancing Technologies 2017(4), 345-364.
# Mohassel, P. and Zhang, Y. (2017). SecureML: a system for scalable privacy-preserving machine learning.
# IEEE Symposium on Security and Privacy, 19-38.
# Nir, Y. and Langley, A. (2018). ChaCha20 and Poly1305 for IETF protocols. RFC 8439.

SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """The terms on which the two sites, the dealer and the coordinator agree before a row is read.

    `rows` are aligned: the entities that both sites have. `columns_a` and `columns_b` are p and q; products
    are summed separately over each of `groups` groups of rows. ModelError if a number is not valid, or there
    are too many rows for one stream.
    """

    site_a: str
    site_b: str
    rows: int
    columns_a: int
    columns_b: int
    groups: int = 1

    def __post_init__(self) -> None:
        where = f"product of {self.site_a} and {self.site_b}"
        if self.rows < 0 or min(self.columns_a, self.columns_b, self.groups) < 1:
            raise ModelError(f"{where}: expected rows, and at least one column of each and one group")
        if WORD_BYTES * self.rows * max(self.columns_a, self.columns_b) > LARGEST_STREAM:
            raise ModelError(f"{where}: {self.rows} rows are too many for one product; split the rows")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a share and of the result: (groups, p, q)."""
        return self.groups, self.columns_a, self.columns_b

    @property
    def shape_a(self) -> tuple[int, int]:
        """Shape of X_a, U and E: (n, p)."""
        return self.rows, self.columns_a

    @property
    def shape_b(self) -> tuple[int, int]:
        """Shape of X_b, V and F: (n, q)."""
        return self.rows, self.columns_b

    def digest(self, session: str, number: str, bits: int, group: Ints) -> bytes:
        """SHA-256 of all terms that the sites and the dealer must share, including groups (n,)."""
        shape = (self.rows, self.columns_a, self.columns_b, self.groups, bits)
        reported = (session, number, self.site_a, self.site_b, *map(str, shape))
        groups = group.astype("<i8").tobytes() if self.groups > 1 else b""
        return hashlib.sha256(join("fedstat product 1", *reported, groups)).digest()


@dataclass(frozen=True, slots=True)
class Stream:
    """Uniform words of 64 bits, expanded from a seed: rows of an int64 array, never complete in memory.

    Element (i, j) is the little-endian word number ``i columns + j`` of the ChaCha20 key stream (RFC 8439,
    counter from 0) under the seed of 32 bytes, with the label, which is what the words are for, filled up
    with zeros to 12 bytes, as the nonce.
    """

    seed: bytes
    label: bytes
    shape: tuple[int, int]

    def __getitem__(self, rows: slice) -> Ints:
        """Return some consecutive rows: (m, columns)."""
        start, stop, _ = rows.indices(self.shape[0])
        length = max(stop - start, 0)
        nonce = self.label.ljust(12, b"\0")
        words = keystream(self.seed, nonce, length * self.shape[1], start * self.shape[1])
        return words.reshape(length, self.shape[1])


def new_seed() -> bytes:
    """Return a fresh seed from the operating system: 32 bytes, for ONE product."""
    return secrets.token_bytes(SEED_BYTES)


def bind_seed(seed: bytes, digest: bytes) -> bytes:
    """Return the seed of one product, from a dealer's and from what the product is."""
    return hashlib.sha256(join("fedstat triple 1", digest, seed)).digest()


def encode_columns(X: Floats, f: int, site: str, columns: Sequence[str] | None = None) -> Ints:
    """Return a site's columns in fixed point, rounded to the nearest: (n, p) -> (n, p).

    The site does this once, for its products with all other sites. It should compute its own block
    ``X_a'X_a`` from the same integers (:func:`fedstat.kernels.ring.grouped_gram`): the complete matrix of
    moments is then exactly that of one data matrix. The site has standardized the columns; f fractional bits
    are those of :func:`fedstat.kernels.ring.fractional_bits`. EstimationError, with the column's name if
    names are given, for values that are missing, infinite or too large for f.
    """
    encoded, squares = ring.encode(X, f)
    missing, large = ~np.isfinite(squares), squares > ring.LARGEST_SQUARES
    if missing.any():
        what = "values that are missing or infinite; leave out these entities or the column"
        raise EstimationError(f"{site}: {_column(missing, columns)} has {what}")
    if large.any():
        what = f"values too large for {f} fractional bits; standardize it, or agree on a larger spread"
        raise EstimationError(f"{site}: {_column(large, columns)} has {what}")
    return encoded


def _column(wrong: Bools, columns: Sequence[str] | None) -> str:
    j = int(np.flatnonzero(wrong)[0])
    return f"column {j + 1} of {len(wrong)}" if columns is None else f"column {columns[j]!r}"


def deal_triple(product: MatrixProduct, seed_a: bytes, seed_b: bytes, group: Ints) -> Ints:
    """Return B's share ``Z_b = U'V - Z_a`` of the dealer's triple: (groups, p, q) int64.

    Of the two fresh seeds A receives the first, from which it expands its share, and B the second. Groups
    (n,) or seeds without the agreed form raise MessageError.
    """
    U, V = stream_u(product, seed_a), _stream_v(product, seed_b)
    Z = ring.grouped_gram(U, V, _groups(product, group, "dealer"), product.groups)
    return Z - share_of_triple(product, seed_a)


def open_a(product: MatrixProduct, seed_a: bytes, X_a: Ints) -> Ints:
    """Return what A sends to B: ``E = X_a - U``, (n, p) int64 from encoded columns of the same shape."""
    return _difference(
        check_agreed(X_a, product.shape_a, product.site_a, "columns"), stream_u(product, seed_a)
    )


def open_b(product: MatrixProduct, seed_b: bytes, X_b: Ints) -> Ints:
    """Return what B sends to A: ``F = X_b - V``, (n, q) int64 from encoded columns of the same shape."""
    return _difference(
        check_agreed(X_b, product.shape_b, product.site_b, "columns"), _stream_v(product, seed_b)
    )


def share_a(product: MatrixProduct, seed_a: bytes, X_a: Ints, F: Ints, group: Ints, mask_seed: bytes) -> Ints:
    """Return what A sends to the coordinator: ``X_a'F + Z_a + R``, (groups, p, q) int64.

    It uses A's seed of the dealer, its encoded columns X_a (n, p), B's opened F (n, q), the group of each row
    (n,), and a fresh seed of the mask that only A and B share. MessageError if one of them does not have the
    agreed form.
    """
    X_a = check_agreed(X_a, product.shape_a, product.site_a, "columns")
    F = check_agreed(F, product.shape_b, product.site_b, "opened columns")
    gram = ring.grouped_gram(X_a, F, _groups(product, group, product.site_a), product.groups)
    return gram + share_of_triple(product, seed_a) + _mask(product, mask_seed)


def share_b(product: MatrixProduct, seed_b: bytes, E: Ints, Z_b: Ints, group: Ints, mask_seed: bytes) -> Ints:
    """Return what B sends to the coordinator: ``E'V + Z_b - R``.

    As :func:`share_a`, from B's seed, what A opened (n, p) and B's share of the triple (groups, p, q).
    """
    E = check_agreed(E, product.shape_a, product.site_a, "opened columns")
    Z_b = check_agreed(Z_b, product.shape, "dealer", "share of the triple")
    V = _stream_v(product, seed_b)
    gram = ring.grouped_gram(E, V, _groups(product, group, product.site_b), product.groups)
    return gram + Z_b - _mask(product, mask_seed)


def combine(product: MatrixProduct, a: Ints, b: Ints, f: int) -> Floats:
    """Return ``X_a'X_b`` of every group from the two shares: (groups, p, q).

    It is the exact product of the encoded columns, of f fractional bits each, rounded once to float64.
    SecurityError if the sum is out of the range of encoded columns: seeds, rows or groups did not agree. Such
    a mistake passes in one element with probability 3/4; a checksum covers all elements
    (:mod:`fedstat.federation.crypto.secure_product`).
    """
    a = check_agreed(a, product.shape, product.site_a, "share of the product")
    b = check_agreed(b, product.shape, product.site_b, "share of the product")
    total = a + b  # modulo 2^64: the masks R and the shares of the triple wrap around and are gone
    if (np.abs(total.astype(np.float64)) > ring.LARGEST_SQUARES).any():
        raise SecurityError(
            f"the shares of {product.site_a} and {product.site_b} do not match: the sites and the "
            "dealer must use the same rows, groups and seeds"
        )
    return ring.decode(total, 2 * f)


def stream_u(product: MatrixProduct, seed_a: bytes) -> Stream:
    """Return U: (n, p)."""
    return Stream(_seed(seed_a, product.site_a), b"U", product.shape_a)


def _stream_v(product: MatrixProduct, seed_b: bytes) -> Stream:
    return Stream(_seed(seed_b, product.site_b), b"V", product.shape_b)


def share_of_triple(product: MatrixProduct, seed_a: bytes) -> Ints:
    """Return Z_a: (groups, p, q)."""
    return _words(product, Stream(_seed(seed_a, product.site_a), b"Z", _flat(product)))


def _mask(product: MatrixProduct, mask_seed: bytes) -> Ints:
    """Return R: (groups, p, q)."""
    sites = f"{product.site_a} and {product.site_b}"
    return _words(product, Stream(_seed(mask_seed, sites), b"R", _flat(product)))


def _flat(product: MatrixProduct) -> tuple[int, int]:
    return product.groups, product.columns_a * product.columns_b


def _words(product: MatrixProduct, stream: Stream) -> Ints:
    return stream[: stream.shape[0]].reshape(product.shape)


def _difference(X: Ints, stream: Stream) -> Ints:
    """Return ``X - stream`` modulo 2^64, block by block, since the stream of a table may be large."""
    out = np.empty(X.shape, np.int64)
    for start in range(0, len(X), ring.BLOCK):
        rows = slice(start, start + ring.BLOCK)
        np.subtract(X[rows], stream[rows], out=out[rows])
    return out


def _seed(seed: bytes, site: str) -> bytes:
    if not isinstance(seed, bytes) or len(seed) != SEED_BYTES:
        raise MessageError(f"{site}: expected a seed of {SEED_BYTES} bytes from new_seed()")
    return seed


def _groups(product: MatrixProduct, group: Array, who: str) -> Ints:
    if group.shape != (product.rows,) or group.dtype.kind not in "iu":
        raise MessageError(
            f"{who}: expected the groups of {product.rows} rows as integers, received {group.dtype}"
            f" of shape {group.shape}"
        )
    group = group.astype(np.int64, copy=False)
    if len(group) and not 0 <= group.min() <= group.max() < product.groups:
        raise MessageError(f"{who}: expected groups numbered from 0 to {product.groups - 1}")
    return group


def check_agreed(array: Array, shape: tuple[int, ...], who: str, what: str) -> Ints:
    """Return an array that has the agreed form; a MessageError where it has not."""
    if array.shape != shape or array.dtype != np.int64:
        raise MessageError(
            f"{who}: expected {what} as int64 of shape {shape}, received {array.dtype} of shape {array.shape}"
        )
    return array


# ----------------------------------------------------------------------------------------------------
# Sums ``X'z_t`` of site A's columns with numbers z_t that site B makes one round after the other.
#
# A learns the sums, and nothing else of z_t; B and the coordinator learn nothing. A's columns are opened
# once: with the random table U (n, p + 1) of A and columns v_t (n,) of B that one dealer has dealt for all
# rounds,
#
# ====  =====================  ======================================================================
# step  who                    what
# ====  =====================  ======================================================================
# 0     dealer to A            a seed, from which A expands U and Z_a (p + 1, T)
# 0     dealer to B            a seed, from which B expands all v_t; and ``Z_b = U'V - Z_a`` (:func:`deal`)
# 1     A to B, once           ``E = (X, Xr) - U`` with secret random weights r (:func:`append_check_column`)
# t     B to A                 ``f = z_t - v_t`` and ``s = E'v_t + Z_b[:, t]`` (:func:`show`)
# t     A                      ``(X, Xr)'f + Z_a[:, t] + s = (X, Xr)'z_t`` (:func:`add_up`)
# ====  =====================  ======================================================================
#
# All is in Z_2^64, as in :mod:`fedstat.federation.crypto.secure_product`, with the same adversary: the dealer
# must collude with neither, and messages between A and B are encrypted. U may serve many v_t, since E is
# opened once and every v_t serves one z_t. s reveals nothing to A beyond the sum, from which it follows.
#
# The last sum is the check of the others: an error e that a wrong deal adds to them passes where ``r'e =
# e_check`` modulo 2^64, which with r unknown to all but A has a probability of 2^-(64 - k) for errors that
# 2^k divides; large k is out of the range that sums have. A fit asks again in every round.

CHECK = 1
"""Number of columns in addition to A's own."""


@dataclass(frozen=True, slots=True)
class RoundColumns:
    """The columns v_t (n, T), each expanded by itself: one is had without the others."""

    seed: bytes
    shape: tuple[int, int]

    def column(self, t: int, rows: slice = slice(None)) -> Ints:
        """Expand some rows of one column."""
        start, stop, _ = rows.indices(self.shape[0])
        return keystream(self.seed, b"v%d" % t + bytes(11 - len(str(t))), stop - start, start)

    def __getitem__(self, rows: slice) -> Ints:
        return np.asarray(np.column_stack([self.column(t, rows) for t in range(self.shape[1])]))


def describe_rounds(a: str, b: str, rows: int, columns: int, rounds: int) -> MatrixProduct:
    """Describe what A, B and the dealer agree on: A's rows and columns, and rounds at most."""
    return MatrixProduct(a, b, rows, columns + CHECK, rounds)


def deal_round_triples(product: MatrixProduct, seed_a: bytes, seed_b: bytes) -> Ints:
    """Return B's share of the triples of all rounds, ``U'V - Z_a``: (p + 1, T)."""
    V, one = RoundColumns(seed_b, product.shape_b), np.zeros(product.rows, dtype=np.int64)
    Z = ring.grouped_gram(stream_u(product, seed_a), V, one, 1) - share_of_triple(product, seed_a)
    return np.asarray(Z[0])


def append_check_column(X: Ints) -> tuple[Ints, Ints]:
    """Append a secret random combination to encoded columns (n, p); return them and the weights (p,)."""
    weights = np.frombuffer(secrets.token_bytes(8 * X.shape[1]), dtype=np.int64)
    return np.column_stack([X, (X * weights).sum(axis=1)]), weights


def mask_round_values(
    product: MatrixProduct, seed_b: bytes, E: Ints, Z_b: Ints, z: Ints, t: int
) -> tuple[Ints, Ints]:
    """Return what B shows A of encoded numbers z (n,) in round t: f (n,) and s (p + 1,)."""
    E, name = check_agreed(E, product.shape_a, product.site_a, "opened columns"), product.site_b
    Z_b = check_agreed(Z_b, product.shape[1:], "dealer", "share of the triples")
    v = RoundColumns(seed_b, product.shape_b).column(t)
    s = ring.grouped_gram(E, v[:, None], np.zeros(len(v), dtype=np.int64), 1)[0, :, 0]
    return check_agreed(z, (product.rows,), name, "numbers") - v, s + Z_b[:, t]


def unmask_round_sums(
    product: MatrixProduct, seed_a: bytes, X: Ints, weights: Ints, shown: tuple[Ints, Ints], t: int
) -> Ints:
    """Return A's sums X'z_t (p,), from X (n, p + 1) and weights of :func:`append_check_column`.

    SecurityError where they do not fit their check: what was dealt, or shown, is wrong.
    """
    f, s = shown
    f = check_agreed(f, (product.rows,), product.site_b, "shown numbers")
    total = ring.grouped_gram(X, f[:, None], np.zeros(len(f), dtype=np.int64), 1)[0, :, 0]
    total = total + share_of_triple(product, seed_a)[0, :, t] + s
    sums = total[:-CHECK]
    wrong = (sums * weights).sum() != total[-1]
    if wrong or (np.abs(sums.astype(np.float64)) > ring.LARGEST_SQUARES).any():
        raise SecurityError(
            f"{product.site_a}: sums of its columns with numbers of {product.site_b} do not fit their "
            "check: what was dealt, or shown, is wrong; nothing of it is used"
        )
    return np.asarray(sums)


# ----------------------------------------------------------------------------------------------------
# Checks of a secure product: its checksum and the fingerprints of its rows.

# ----------------------------------------------------------------------------------------------------
# A checksum of a secure product: one number for every group, by which a wrong triple is found.
#
# In addition to their columns, sites A and B multiply one random combination of each, ``x_a = X_a r`` and
# ``x_b = X_b t`` modulo a prime, by a triple of one column from the same dealer. The coordinator receives r
# and t with the shares, too late to choose an error by them, and compares ``r'(X_a'X_b)t`` with ``x_a'x_b``
# (Freivalds 1979). An error in any element of a product passes with probability below 2^-19; the range of the
# products alone detects only one of four single errors. The checksum is a function of the product, so it
# discloses nothing more.
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
        """Combine encoded columns (n, p) with weights from the secret of the two sites."""
        weights = _checksum_words(secret, b"A" if first else b"B", X.shape[1], WEIGHTS)
        return cls(product, first, seed, weights, combine_columns(X, weights))

    @property
    def bytes_opened(self) -> int:
        """Length of what either site opens: 4 bytes per row, in words of 8."""
        return opened_bytes(self.product.rows)

    def opened(self) -> bytes:
        """Return the message to the other site: the combination minus a random column of the dealer."""
        shown = np.zeros(self.bytes_opened // 4, "<u4")
        shown[: len(self.x)] = (self.x - _checksum_column(self.product, self.seed, self.first)) % PRIME
        return shown.tobytes()

    def share(self, opened: bytes, group: Ints, Z_b: Ints, mask_seed: bytes) -> Ints:
        """Share of the checksum by group, (G,), from what the other site opened, and B's of the triple."""
        other = np.frombuffer(opened, "<u4")[: self.product.rows].astype(np.int64)
        mask = _checksum_words(mask_seed, b"check", self.product.groups)
        if self.first:
            return (
                _sum(self.product, self.x * other, group) + _share_a(self.product, self.seed) + mask
            ) % PRIME
        if Z_b.shape != mask.shape:
            raise MessageError("dealer: expected a share of a checksum for every group")
        own = _checksum_column(self.product, self.seed, False)
        return (_sum(self.product, other * own, group) + Z_b - mask) % PRIME


def opened_bytes(rows: int) -> int:
    """Length of what a site opens for a checksum."""
    return 8 * ((rows + 1) // 2)


def deal_checksum(product: MatrixProduct, seed_a: bytes, seed_b: bytes, group: Ints) -> Ints:
    """Return B's share of a triple of one column, by group: (G,); see also :func:`product.deal`."""
    u, v = _checksum_column(product, seed_a, True), _checksum_column(product, seed_b, False)
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
        raise MessageError(f"checksum of {product.site_a} and {product.site_b}: received another shape")
    left = (total % PRIME * (r % PRIME)[:, None] % PRIME).sum(axis=1)
    if ((left % PRIME * (t % PRIME) % PRIME).sum(axis=1) % PRIME != checks % PRIME).any():
        raise SecurityError(
            f"the product of the columns of {product.site_a} and {product.site_b} is not what its "
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


def _checksum_column(product: MatrixProduct, seed: bytes, first: bool) -> Ints:
    return _checksum_words(seed, b"u" if first else b"v", product.rows)


def _share_a(product: MatrixProduct, seed_a: bytes) -> Ints:
    return _checksum_words(seed_a, b"z", product.groups)


def _checksum_words(seed: bytes, label: bytes, count: int, below: int = PRIME) -> Ints:
    return keystream(seed, label.ljust(12, b"\0"), count) % below


# ----------------------------------------------------------------------------------------------------
# Marks by which two sites compare the terms of a product, and the entities of their rows.

MARK = 16
"""Bytes of a keyed digest: who cannot compute it finds no two things of one mark."""


@dataclass(frozen=True, slots=True)
class RowFingerprints:
    """The terms of a product at one of two sites, and its rows' entities, under a key of these two alone.

    `reported` and `entities` are marks; those of the other site must be the same. Both sites have records of
    `both` (n,) of the rows; `own` (n,) are this one's records, empty where that is the same.
    """

    reported: bytes
    entities: bytes
    both: Bools
    own: Bools

    @classmethod
    def of(cls, key: bytes, digest: bytes, entities: Array, both: Bools, own: Bools) -> RowFingerprints:
        """Mark a product by its digest, and the entities of all rows, (n,) or (n, w), that both have."""
        reported = keyed_digest(key, "product", digest, both.tobytes())
        return cls(reported, keyed_digest(key, "entities", entities[both].tobytes()), both, own)

    @property
    def content(self) -> bytes:
        """The values for the other site, sealed."""
        return self.reported + self.entities + np.packbits(self.own).tobytes()

    def compare(self, content: memoryview, site: str, peer: str) -> memoryview:
        """Compare the other site's digests with these, and return the content after them.

        A SecurityError if that site received another product or other groups, or has rows of other entities.
        """
        # Sums over groups that differ at a few rows would reveal these rows.
        if not hmac.compare_digest(content[:MARK], self.reported):
            raise SecurityError(
                f"{site}: '{peer}' received another product, or other groups of the rows; nothing "
                "of the product was released"
            )
        if not self.of_same_entities(content):
            raise SecurityError(
                f"{site}: the rows of this product are not of the same entities, in the same order, as those "
                f"of '{peer}'; nothing of it was released. Align the sites again"
            )
        return content[len(self.content) :]

    def of_same_entities(self, content: memoryview) -> bool:
        """Whether rows are of the same entities in the same order: a product would mix them otherwise."""
        # If both have an entity, neither may learn that the other lacks it.
        shared = np.array_equal(self.own & read_own_rows(content, len(self.own)), self.both) or not len(
            self.own
        )
        return shared and hmac.compare_digest(content[MARK : 2 * MARK], self.entities)


def keyed_digest(key: bytes, *parts: str | bytes) -> bytes:
    """Return a keyed digest of some parts."""
    return hmac.digest(key, encode_parts(*parts), "sha256")[:MARK]


def read_own_rows(content: memoryview, n: int) -> Bools:
    """Read which of n rows the other site has records of."""
    reported = np.frombuffer(content[2 * MARK : 2 * MARK + (n + 7) // 8], dtype=np.uint8)
    return np.unpackbits(reported, count=n).astype(np.bool_)
