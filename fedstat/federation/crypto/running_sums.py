"""Sums ``X'z_t`` of site A's columns with numbers z_t that site B makes one round after the other.

A learns the sums, and nothing else of z_t; B and the coordinator learn nothing. A's columns are opened once:
with the random table U (n, p + 1) of A and columns v_t (n,) of B that one dealer has dealt for all rounds,

====  =====================  ======================================================================
step  who                    what
====  =====================  ======================================================================
0     dealer to A            a seed, from which A expands U and Z_a (p + 1, T)
0     dealer to B            a seed, from which B expands all v_t; and ``Z_b = U'V - Z_a`` (:func:`deal`)
1     A to B, once           ``E = (X, Xr) - U`` with secret random weights r (:func:`with_check`)
t     B to A                 ``f = z_t - v_t`` and ``s = E'v_t + Z_b[:, t]`` (:func:`show`)
t     A                      ``(X, Xr)'f + Z_a[:, t] + s = (X, Xr)'z_t`` (:func:`add_up`)
====  =====================  ======================================================================

All is in Z_2^64, as in :mod:`fedstat.federation.crypto.product`, whose adversary it shares: the dealer must
collude with neither, and what A and B send each other travels sealed. U serves many v_t without harm, since
E is opened once and every v_t serves one z_t. s tells A nothing beside the sum, from which it follows.

The last sum is the check of the others: an error e that a wrong deal adds to them passes where
``r'e = e_check`` modulo 2^64, which with r unknown to all but A has a probability of 2^-(64 - k) for errors
that 2^k divides; large k is out of the range that sums have. A fit asks again in every round.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keystream import keystream
from fedstat.federation.crypto.product import MatrixProduct, agreed, share_of_triple, stream_u
from fedstat.kernels import ring
from fedstat.typing import Ints

CHECK = 1
"""Columns beside A's own."""


@dataclass(frozen=True, slots=True)
class LaterColumns:
    """The columns v_t (n, T), each expanded by itself: one is had without the others."""

    seed: bytes
    shape: tuple[int, int]

    def column(self, t: int, rows: slice = slice(None)) -> Ints:
        """Expand some rows of one column."""
        start, stop, _ = rows.indices(self.shape[0])
        return keystream(self.seed, b"v%d" % t + bytes(11 - len(str(t))), stop - start, start)

    def __getitem__(self, rows: slice) -> Ints:
        return np.asarray(np.column_stack([self.column(t, rows) for t in range(self.shape[1])]))


def of_rounds(a: str, b: str, rows: int, columns: int, rounds: int) -> MatrixProduct:
    """Describe what A, B and the dealer agree on: A's rows and columns, and rounds at most."""
    return MatrixProduct(a, b, rows, columns + CHECK, rounds)


def deal(product: MatrixProduct, seed_a: bytes, seed_b: bytes) -> Ints:
    """Return B's share of the triples of all rounds, ``U'V - Z_a``: (p + 1, T)."""
    V, one = LaterColumns(seed_b, product.shape_b), np.zeros(product.rows, dtype=np.int64)
    Z = ring.grouped_gram(stream_u(product, seed_a), V, one, 1) - share_of_triple(product, seed_a)
    return np.asarray(Z[0])


def with_check(X: Ints) -> tuple[Ints, Ints]:
    """Append a secret random combination to encoded columns (n, p); return them and the weights (p,)."""
    weights = np.frombuffer(secrets.token_bytes(8 * X.shape[1]), dtype=np.int64)
    return np.column_stack([X, (X * weights).sum(axis=1)]), weights


def show(product: MatrixProduct, seed_b: bytes, E: Ints, Z_b: Ints, z: Ints, t: int) -> tuple[Ints, Ints]:
    """Return what B shows A of encoded numbers z (n,) in round t: f (n,) and s (p + 1,)."""
    E, name = agreed(E, product.shape_a, product.client_a, "opened columns"), product.client_b
    Z_b = agreed(Z_b, product.shape[1:], "dealer", "share of the triples")
    v = LaterColumns(seed_b, product.shape_b).column(t)
    s = ring.grouped_gram(E, v[:, None], np.zeros(len(v), dtype=np.int64), 1)[0, :, 0]
    return agreed(z, (product.rows,), name, "numbers") - v, s + Z_b[:, t]


def add_up(
    product: MatrixProduct, seed_a: bytes, X: Ints, weights: Ints, shown: tuple[Ints, Ints], t: int
) -> Ints:
    """Return A's sums X'z_t (p,), from X (n, p + 1) and weights of :func:`with_check`.

    SecurityError where they do not fit their check: what was dealt, or shown, is wrong.
    """
    f, s = shown
    f = agreed(f, (product.rows,), product.client_b, "shown numbers")
    total = ring.grouped_gram(X, f[:, None], np.zeros(len(f), dtype=np.int64), 1)[0, :, 0]
    total = total + share_of_triple(product, seed_a)[0, :, t] + s
    sums = total[:-CHECK]
    wrong = (sums * weights).sum() != total[-1]
    if wrong or (np.abs(sums.astype(np.float64)) > ring.LARGEST_SQUARES).any():
        raise SecurityError(
            f"{product.client_a}: sums of its columns with numbers of {product.client_b} do not fit their "
            "check: what was dealt, or shown, is wrong; nothing of it is used"
        )
    return np.asarray(sums)
