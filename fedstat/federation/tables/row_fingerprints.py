"""Fingerprints of rows, which identify them again after a table has grown or changed its order.

A mark is a keyed digest of all that the record holds, and begins with one of its key where records have one.
A record that was corrected has another mark: it counts as one that is gone and one that is new, since sums
from before and after differ by it. Where all have other marks under the keys of before, the table has got
another column, and keys alone tell. Without a key two records that hold the same are told apart by which
comes first, which matters to no sum.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pandas as pd

from fedstat.federation.tables.aligned_table import AlignedTable
from fedstat.federation.tables.curves import is_curve
from fedstat.federation.tables.table import LabelledTable, Table
from fedstat.typing import Array, Ints

MARK_BYTES, KEY_MARK = 16, 8


def row_fingerprints(table: Table, secret: bytes) -> Array:
    """Mark every row: (n_rows, 16) bytes."""
    # What a table is labelled with is no part of its records.
    table = table.table if isinstance(table, LabelledTable) else table
    if not isinstance(table, AlignedTable):
        return _digests(_contents(table), secret)
    # without the count of its like, which would move where another record changes
    keys, held = (_digests(one, secret) for one in (table.entities, _rows(table)))
    return np.hstack([keys[:, :KEY_MARK], held[:, KEY_MARK:]])


def _digests(rows: Array, secret: bytes) -> Array:
    """Digest every row of an array: (n, 16) bytes."""
    told, width = (
        np.ascontiguousarray(rows).tobytes(),
        rows.itemsize * (rows.shape[1] if rows.ndim > 1 else 1),
    )
    pieces = (told[i : i + width] for i in range(0, len(told), max(width, 1)))
    marks = b"".join(hashlib.blake2b(one, digest_size=MARK_BYTES, key=secret).digest() for one in pieces)
    return np.frombuffer(marks, dtype=np.uint8).reshape(-1, MARK_BYTES)


def content_fingerprint(table: Table, secret: bytes) -> bytes:
    """Keyed digest of all that a table holds, whatever the order of its rows."""
    table = table.table if isinstance(table, LabelledTable) else table
    rows = _rows(table)
    whose = table.entities if isinstance(table, AlignedTable) else np.empty((table.n_rows, 0), dtype=np.uint8)
    told = np.hstack([whose, rows.astype("<u8").reshape(-1, 1).view(np.uint8)])
    in_order = told[np.lexsort(told.T[::-1])] if len(told) else told
    digest = hashlib.blake2b(repr(table.columns).encode(), digest_size=32, key=secret)
    digest.update(np.ascontiguousarray(in_order).tobytes())
    return digest.digest()


def order_fingerprint(table: Table) -> bytes:
    """Digest of all that a table holds in the order of its rows, to compare it with what it was."""
    table = table.table if isinstance(table, LabelledTable) else table
    digest = hashlib.blake2b(repr((table.columns, table.n_rows, order_of(table))).encode())
    for chunk in table.chunks(table.columns) if table.columns else ():
        digest.update(_hashed(chunk).tobytes())
    digest.update(table.entities.tobytes() if isinstance(table, AlignedTable) else b"")
    return digest.digest()


def places_of(known: Array, marks: Array) -> Ints:
    """Find marks among known ones: (m, 16), (n, 16) -> (n,), -1 for new ones."""
    found = _found(known, marks)
    return _found(known[:, :KEY_MARK], marks[:, :KEY_MARK]) if (found < 0).all() else found


def _found(known: Array, marks: Array) -> Ints:
    if not len(known):
        return np.full(len(marks), -1, dtype=np.int64)
    held, asked = (np.ascontiguousarray(one).view(f"S{one.shape[1]}").ravel() for one in (known, marks))
    order = np.argsort(held)
    at = order[np.minimum(np.searchsorted(held, asked, sorter=order), len(held) - 1)]
    return np.where(held[at] == asked, at, -1)


def order_of(table: Table) -> str:
    """Name the order of the rows: that of the alignment where there is one, which may change."""
    return table.alignment if isinstance(table, AlignedTable) else ""


def _contents(table: Table) -> Array:
    """Hash what each row holds, and count which of its like it is: (n_rows, 2)."""
    rows = _rows(table)
    which = pd.Series(rows).groupby(rows).cumcount().to_numpy(dtype=np.uint64)
    return np.column_stack([rows, which])


def _rows(table: Table) -> Array:
    """Hash what each row holds: (n_rows,)."""
    parts = [_hashed(chunk) for chunk in table.chunks(table.columns)] if table.columns else []
    return np.concatenate(parts) if parts else np.zeros(table.n_rows, dtype=np.uint64)


def _hashed(chunk: pd.DataFrame) -> Array:
    # As doubles: a column of whole numbers becomes one where a value is missing further down.
    plain = {
        name: column if is_curve(column) else column.astype(_form(column)) for name, column in chunk.items()
    }
    return pd.util.hash_pandas_object(pd.DataFrame(plain), index=False).to_numpy(dtype=np.uint64)


def _form(column: pd.Series[Any]) -> Any:
    return "float64" if pd.api.types.is_numeric_dtype(column) else "string"
