"""The keys by which a site's records are linked, and their hashed and raised forms.

A key is hashed to 32 bytes with a salt, and these are taken as the x-coordinate u of a point P to be
multiplied by a site's secret scalar a: X25519(a, u) of RFC 7748, section 5, which is x(aP).

* *Any 32 bytes will do.* The ladder uses the curve's coefficient only, never the other coordinate. Every u
  (top bit dropped, modulo 2^255 - 19) belongs to a point of the curve v^2 = u^3 + 486662 u^2 + u or of its
  twist; the order of the one is 8 times, of the other 4 times a prime, and discrete logarithms are hard in
  both (Bernstein 2006, doi:10.1007/11745853_14).
* *Clamping.* Scalars are 2^254 + 8m with m < 2^251. As multiples of 8 they take every point into the
  subgroup of prime order, whatever the cofactor; none is a multiple of either prime, so that on the subgroups
  raising is one-to-one: different points stay different. A point of small order gives zero, which is refused.
* *Order does not matter.* x(a(bP)) = x(b(aP)), because x(-P) = x(P).
* *One bit stays.* A multiple of a point of the curve is on the curve, and of the twist on the twist; whoever
  knows the salt can tell which of the two a key's hash belongs to. The salt is therefore shared by the sites
  and kept from the coordinator.
"""

from __future__ import annotations

import hmac
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedstat.errors import DesignError, PartitionError, SecurityError
from fedstat.federation.crypto.keys import encode
from fedstat.federation.tables.checks import key_kind, key_problems, refuse
from fedstat.federation.tables.keys import plain_key
from fedstat.typing import Array, Ints

POINT_BYTES = 32
SALT_BYTES = 32


class KeyTable:
    """The keys of a site's records, for linking them with those of others; it shows no column.

    What a key is written as is part of it: 1 and "1" are different keys, and so are "Ann" and "ann". Whole
    numbers of any width are the same; decimal numbers are compared as doubles, and points of time without a
    zone are taken as UTC. A text that is empty, begins or ends with white space, or is not in Unicode's form
    NFC is refused: nobody could see why it finds no partner. Errors tell counts, and no key.

    `kinds` says what each key column holds; empty text where there is no row to tell by.
    """

    def __init__(self, site: str, frame: pd.DataFrame, key: Sequence[str]) -> None:
        refuse(key_problems({site: frame}, key))
        refuse(line for name in key for line in _text_problems(site, frame[name]))
        self.site, self.key, self.n_rows = site, tuple(key), len(frame)
        self.kinds = tuple(key_kind(frame[name]) or "" for name in key)
        self.columns: tuple[str, ...] = ()
        self._places: Ints | None = None
        self._values = [plain_key(frame[name]).reset_index(drop=True) for name in key]

    def __repr__(self) -> str:
        return f"KeyTable({self.site!r}, {self.n_rows} keys)"

    @property
    def places(self) -> Ints:
        """Number of each row's entity, (n_rows,) int64; PartitionError before an alignment has given it."""
        if self._places is None:
            raise PartitionError(f"{self.site}: its keys have not been aligned with those of the others yet")
        return self._places

    def accept(self, places: Ints) -> None:
        """Take the number of each row's entity from an alignment."""
        self._places = places

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield rows without a column."""
        if columns:
            raise DesignError(f"{self.site}: this table holds keys to align by, and shows no column")
        yield pd.DataFrame(index=pd.RangeIndex(self.n_rows))

    def points(self, salt: bytes) -> Array:
        """Hash every key: HMAC-SHA256 under the salt, over kinds and values; (n_rows, 32) bytes."""
        parts = [BYTES_OF[kind](values) for kind, values in zip(self.kinds, self._values, strict=True)]
        # the kinds are hashed along, so that the number 1 and the text "1" are different keys
        label = encode("fedstat key 1", *self.kinds)
        hashed = [hmac.digest(salt, label + encode(*row), "sha256") for row in zip(*parts, strict=True)]
        return as_points(b"".join(hashed))


def _text_problems(site: str, column: pd.Series[Any]) -> Iterator[str]:
    if key_kind(column) != "text":
        return
    texts = plain_key(column)
    faults = {
        "are empty, or begin or end with white space": sum(
            text != text.strip() or not text for text in texts
        ),
        "are not in Unicode's form NFC": sum(not unicodedata.is_normalized("NFC", text) for text in texts),
    }
    for fault, count in faults.items():
        if count:
            yield (
                f"{site}, key column {column.name!r}: {count:,} keys {fault}. Clean them, in the same way "
                "as at the other sites: what is not written alike is not found."
            )


def _bytes_of_dates(column: pd.Series[Any]) -> list[bytes]:
    # in UTC: the same moment written in two zones is one key
    moments = pd.to_datetime(column, utc=True).astype("datetime64[ns, UTC]")
    return [value.to_bytes(8, "big", signed=True) for value in moments.astype("int64").tolist()]


BYTES_OF: Mapping[str, Callable[[pd.Series[Any]], list[bytes]]] = MappingProxyType(
    {
        "": lambda column: [],
        "whole numbers": lambda column: [v.to_bytes(8, "big", signed=True) for v in column.tolist()],
        "text": lambda column: [value.encode() for value in column],
        # plus zero: -0.0 and 0.0 are one number
        "decimal numbers": lambda column: [struct.pack(">d", float(value) + 0.0) for value in column],
        "true/false": lambda column: [bytes([bool(value)]) for value in column],
        "dates": _bytes_of_dates,
    }
)


def as_points(data: bytes) -> Array:
    """Take bytes as points, shape (n, 32)."""
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, POINT_BYTES)


def raise_points(where: str, points: Array, scalar: X25519PrivateKey) -> Array:
    """Multiply every point, (n, 32) bytes, by a secret scalar, in the order in which they are.

    SecurityError where a point is of small order; `where` says whose points they are.
    """
    data, load = points.tobytes(), X25519PublicKey.from_public_bytes
    pieces = (data[i : i + POINT_BYTES] for i in range(0, len(data), POINT_BYTES))
    try:
        return as_points(b"".join([scalar.exchange(load(piece)) for piece in pieces]))
    except ValueError:
        raise SecurityError(f"{where}: a point of small order, which no hash of a key is") from None


def as_tokens(points: Array) -> Array:
    """Write points as fixed strings of bytes, shape (n,), which compare and sort."""
    # numpy drops zero bytes at the end, which makes no two strings of one length equal
    return np.ascontiguousarray(points).view(f"S{POINT_BYTES}").ravel()
