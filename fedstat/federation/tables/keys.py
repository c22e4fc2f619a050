"""Linkage of tables by their keys: alignment, and the hashed form of the keys."""

from __future__ import annotations

import hmac
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedstat.errors import DesignError, PartitionError, SecurityError
from fedstat.federation.crypto.keys import encode_parts
from fedstat.federation.tables.checks import key_kind, key_problems, non_key_columns, raise_problems
from fedstat.federation.tables.table import FrameTable, Table
from fedstat.typing import Array, Bools, Ints

# ----------------------------------------------------------------------------------------------------
# Linking of tables by their keys: keys become positions, rows become records.

DTYPE_OF_KIND: dict[str, Any] = {"whole numbers": "int64", "text": "str"}


@dataclass(frozen=True, slots=True)
class AlignedBlock:
    """One site's records in the order of the entities: `frame` (m, p) without the key, and positions.

    `rows` (m,) int64 is the position of each record's entity, ascending; `n_empty` counts the rows of the
    table that held a key and nothing else.
    """

    frame: pd.DataFrame
    rows: Ints
    n_empty: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """All sites' records over one index of entities; the fields of :class:`AlignedBlock` by site."""

    entities: pd.Index[Any]
    tables: Mapping[str, Table]
    rows: Mapping[str, Ints]
    empty_rows: Mapping[str, int]


def _alignment(entities: pd.Index[Any], blocks: Mapping[str, AlignedBlock]) -> Alignment:
    for block in blocks.values():
        block.rows.flags.writeable = False
    return Alignment(
        entities,
        {c: FrameTable(block.frame, block.rows) for c, block in blocks.items()},
        {c: block.rows for c, block in blocks.items()},
        {c: block.n_empty for c, block in blocks.items()},
    )


def link_tables(
    tables: Mapping[str, pd.DataFrame],
    key: Sequence[str],
    numbered: tuple[pd.Index[Any], Mapping[str, Ints]] | None = None,
) -> Alignment:
    """Vertical layout: one table per site, linked by the key, or as `numbered` says (see :func:`align`)."""
    entities, positions = align(tables, key) if numbered is None else numbered
    blocks = {
        client: align_block(frame[non_key_columns(frame, key)], positions[client])
        for client, frame in tables.items()
    }
    return _alignment(entities, blocks)


def split_columns(table: pd.DataFrame, columns: Mapping[str, Sequence[str]], key: Sequence[str]) -> Alignment:
    """Vertical layout: the columns of one table; without a key every row is an entity."""
    if key:
        entities, positions = align({"": table}, key)
        rows = positions[""]
    else:
        entities, rows = pd.RangeIndex(len(table)), np.arange(len(table))
    return _alignment(entities, {c: align_block(table[list(names)], rows) for c, names in columns.items()})


def split_rows(table: pd.DataFrame, by: str, key: Sequence[str]) -> Alignment:
    """Horizontal layout: the rows of one table; every row is an entity."""
    (content,) = FrameTable(table).chunks(non_key_columns(table, [*key, by]))
    blocks = {}
    for site, rows in rows_by_site(table[by]).items():
        frame = content.take(rows)
        frame.index = pd.RangeIndex(len(rows))
        blocks[site] = AlignedBlock(frame, rows, 0)
    entities = table.set_index(list(key)).index if key else pd.RangeIndex(len(table))
    return _alignment(entities, blocks)


def align(frames: Mapping[str, pd.DataFrame], key: Sequence[str]) -> tuple[pd.Index[Any], dict[str, Ints]]:
    """Sorted union of all keys (a MultiIndex for several), and int64 position of each row's key in it."""
    coded = [_code_key(frames, name) for name in key]
    levels = [level for _, level in coded]
    position, codes = coded[0][0], [np.arange(len(levels[0]))]
    for code, level in coded[1:]:
        # combine the columns before and this one into one number, renumbered each time so that it stays small
        pairs = position * len(level) + code
        unique, position = np.unique(pairs, return_inverse=True)
        codes = [c[unique // len(level)] for c in codes] + [unique % len(level)]
    ends = np.cumsum([len(frame) for frame in frames.values()])[:-1]
    return _key_index(levels, codes), dict(
        zip(frames, np.split(position.astype(np.int64, copy=False), ends), strict=True)
    )


def _key_index(levels: list[pd.Index[Any]], codes: list[Any]) -> pd.Index[Any]:
    if len(levels) == 1:
        return levels[0]
    make: Any = pd.MultiIndex  # its stubs know lists of lists only
    index: pd.Index[Any] = make(levels=levels, codes=codes, names=[level.name for level in levels])
    return index


def _code_key(frames: Mapping[str, pd.DataFrame], name: str) -> tuple[Ints, pd.Index[Any]]:
    """Code all sites' values of one key column by its sorted values."""
    # an empty table has no type, and would turn the keys of the others into objects
    filled = [frame for frame in frames.values() if len(frame)] or list(frames.values())
    stacked = pd.concat([plain_key(frame[name]) for frame in filled], ignore_index=True)
    codes, values = pd.factorize(stacked, sort=True)
    return codes, pd.Index(values, name=name)


def plain_key(column: pd.Series[Any]) -> pd.Series[Any]:
    """Convert a key to the one dtype of its kind, so that equal keys of two sites are equal."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(column.cat.categories.dtype)
    dtype = DTYPE_OF_KIND.get(key_kind(column) or "")
    return column if dtype is None else column.astype(dtype)


def seen_rows(frame: pd.DataFrame) -> Bools:
    """Rows with at least one value, shape (len(frame),)."""
    seen = np.zeros(len(frame), dtype=bool)
    for name in frame.columns:
        seen |= frame[name].notna().to_numpy()
        if seen.all():
            break
    return seen


def align_block(frame: pd.DataFrame, positions: Ints) -> AlignedBlock:
    """Drop rows that hold no value and sort the others by entity."""
    seen = seen_rows(frame)
    n_empty = len(frame) - int(seen.sum())
    if n_empty:
        frame, positions = frame[seen], positions[seen]
    if np.any(np.diff(positions) < 0):
        order = np.argsort(positions)
        frame, positions = frame.take(order), positions[order]
    return AlignedBlock(frame.reset_index(drop=True), positions, n_empty)


def rows_by_site(column: pd.Series[Any]) -> dict[str, Ints]:
    """Rows of each site, by the site's name in `column`, in sorted or categorical order."""
    sites = column.astype("category").cat
    codes = sites.codes.to_numpy()
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes, np.arange(len(sites.categories) + 1), sorter=order)
    found = [
        (str(name), order[start:end])
        for name, start, end in zip(sites.categories, ends, ends[1:], strict=False)
        if start < end
    ]
    by_name = dict(found)
    if len(by_name) < len(found):
        raise PartitionError(
            f"column {column.name!r} names sites by values of several types. Convert it to text."
        )
    return by_name


# ----------------------------------------------------------------------------------------------------
# The keys by which a site's records are linked, and their hashed and raised forms.
#
# A key is hashed to 32 bytes with a salt, and these are taken as the x-coordinate u of a point P to be
# multiplied by a site's secret scalar a: X25519(a, u) of RFC 7748, section 5, which is x(aP).
#
# * *Any 32 bytes are valid.* The ladder uses the curve's coefficient only, never the other coordinate. Every
#   u (top bit dropped, modulo 2^255 - 19) is on the curve v^2 = u^3 + 486662 u^2 + u or of its
#   twist. The order of the first is 8 times, that of the second 4 times a prime, and discrete logarithms are
#   hard in both (Bernstein 2006, doi:10.1007/11745853_14).
# * *Clamping.* Scalars are 2^254 + 8m with m < 2^251. As multiples of 8 they map every point into the
#   subgroup of prime order, for any cofactor. None is a multiple of either prime, so that the map is
#   one-to-one on the subgroups: different points stay different. A point of small order gives zero, which is
#   refused.
# * *Order does not matter.* x(a(bP)) = x(b(aP)), because x(-P) = x(P).
# * *One bit remains.* A multiple of a point of the curve is on the curve, and of the twist on the twist.
#   Anyone with the salt can determine which of the two a key's hash belongs to. The sites therefore share the
#   salt, and the coordinator does not have it.

POINT_BYTES = 32
SALT_BYTES = 32


class KeyTable:
    """The keys of a site's records, for linking them with those of others; it shows no column.

    The written form of a key is part of it: 1 and "1" are different keys, and so are "Ann" and "ann".
    Integers of any width are equal; decimal numbers are compared as doubles, and times without a zone are
    UTC. A text that is empty, begins or ends with white space, or is not in Unicode's form NFC is refused,
    since its missing match could not be explained. Errors contain counts, and no key.

    `kinds` are the kinds of the key columns; empty text if there is no row.
    """

    def __init__(self, site: str, frame: pd.DataFrame, key: Sequence[str]) -> None:
        raise_problems(key_problems({site: frame}, key))
        raise_problems(line for name in key for line in _text_problems(site, frame[name]))
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
        label = encode_parts("fedstat key 1", *self.kinds)
        hashed = [hmac.digest(salt, label + encode_parts(*row), "sha256") for row in zip(*parts, strict=True)]
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
    """Interpret bytes as curve points, (n, 32)."""
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
