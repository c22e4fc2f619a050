"""A table in the order of the common entities, and fingerprints of its rows."""

from __future__ import annotations

import hashlib
import io
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstat.codec import from_json, to_json
from fedstat.errors import EngineError, MessageError, PartitionError, Remedy
from fedstat.federation import state_formats
from fedstat.federation.files import read_arrays, read_private, write_atomic
from fedstat.federation.tables.checks import non_key_columns
from fedstat.federation.tables.curve_columns import CurveTable
from fedstat.federation.tables.curves import is_curve
from fedstat.federation.tables.keys import KeyTable, align_block, as_tokens, seen_rows
from fedstat.federation.tables.sql_table import SqlTable, hash_keys
from fedstat.federation.tables.table import FrameTable, LabeledTable, ParquetTable, Table
from fedstat.typing import Array, Bools, Ints

# ----------------------------------------------------------------------------------------------------
# A site's records in the entity order of a persistent alignment.
#
# A site in its own process keeps the numbers of its entities next to its data, so that it is aligned once and
# not for every model. Keys identify the entities in any order of rows::
#
#     alignment.npz    name of the alignment, numbers by key, and a fingerprint of the keys (mode 0600)

ALIGNMENT = "alignment.npz"
ALIGNED_BY = Remedy("fedstat federation align FOLDER", "the coordinator runs '{call}'")
NAME = re.compile(r"[0-9a-f]{16}")


class AlignedTable(FrameTable):
    """Records in memory, in the order of their entities' numbers once an alignment has given these.

    Rows with a key but no value do not count as records (`seen`); their keys are aligned with the others. The
    alignment is kept in `folder`, or in memory without one. `alignment` is its name, empty for none, and
    `changed` means that the stored alignment was made from other keys.
    """

    def __init__(
        self, site: str, frame: pd.DataFrame, key: Sequence[str], folder: str | Path | None = None
    ) -> None:
        self.site = site
        self.keys = KeyTable(site, frame, key)
        self._rows = frame[non_key_columns(frame, key)].reset_index(drop=True)
        self.seen: Bools = seen_rows(self._rows)
        self._order: Ints | None = None
        self.alignment, self.changed = "", False
        self._path = None if folder is None else Path(folder, ALIGNMENT)
        super().__init__(self._rows[self.seen])
        if self._path is not None and self._path.exists():
            self._take_up(self._path)

    def __repr__(self) -> str:
        return f"LinkedTable({self.site!r}, {self.n_rows} records)"

    def keep(self, alignment: str, numbers: Ints) -> None:
        """Keep an alignment's numbers, one int64 per row that has a key, and put the records in their order.

        EngineError where the folder cannot be written; the earlier alignment, where there is one, still
        holds.
        """
        if not NAME.fullmatch(alignment):
            raise MessageError(f"{self.site}: expected an alignment named by 16 hexadecimal digits")
        if self._path is not None:
            self._write(self._path, alignment, numbers)
        self._bring_in_order(alignment, numbers)

    @property
    def entities(self) -> Array:
        """Digests of the records' keys, (n_rows, 32), for this process alone: they are without a salt."""
        if self._entities is None:
            digests = self.keys.points(b"")[self.seen]
            self._entities = digests if self._order is None else digests[self._order]
        return self._entities

    def check_session(self, session: str) -> None:
        """Require that a session rests on the alignment that the records are in the order of."""
        if not self.alignment:
            raise PartitionError(f"{self.site}: {self.why_unaligned}", remedy=ALIGNED_BY)
        if alignment_of(session) != self.alignment:
            raise PartitionError(
                f"{self.site}: its entities have been aligned again since this session began, or the "
                "session has no alignment. Connect again, and make the model again"
            )

    @property
    def why_unaligned(self) -> str:
        """Say why the records are in the order of no alignment."""
        if self.changed:
            return "its keys, or which of them have a record, are no longer those that were aligned"
        return "its entities have not been aligned with those of the others yet"

    def _bring_in_order(self, alignment: str, numbers: Ints) -> None:
        self.frame = align_block(self._rows, numbers).frame
        self._order, self._entities = np.argsort(numbers[self.seen]), None
        self.alignment, self.changed = alignment, False

    def _write(self, path: Path, alignment: str, numbers: Ints) -> None:
        # drawn again: the stored values then match no list of earlier hashes
        salt = secrets.token_bytes(32)
        order, fingerprint = self._fingerprint(salt)
        content = io.BytesIO()
        # in the order of the hashed keys, because the rows may come in another one next time
        arrays: dict[str, Any] = {"numbers": numbers[order]}
        arrays |= state_formats.ALIGNMENT.stamp_arrays() | {
            name: np.frombuffer(data, dtype=np.uint8)
            for name, data in (("name", alignment.encode()), ("salt", salt), ("fingerprint", fingerprint))
        }
        np.savez(content, **arrays)
        try:
            write_atomic(path, content.getvalue())
        except OSError as error:
            raise EngineError(
                f"{self.site}: the alignment cannot be written into the site's folder ({error.strerror}), "
                "and is not taken. Its owner makes room, and all are aligned again"
            ) from error

    def _take_up(self, path: Path) -> None:
        content = read_private(path)
        try:
            kept = read_arrays(content)
            state_formats.ALIGNMENT.read_arrays(kept, f"'{path}'")
            alignment = kept["name"].tobytes().decode()
            order, fingerprint = self._fingerprint(kept["salt"].tobytes())
            self.changed = fingerprint != kept["fingerprint"].tobytes()
            numbers = kept["numbers"].astype(np.int64, casting="safe")
            fits = self.changed or numbers.shape == (self.keys.n_rows,)
        except (ValueError, LookupError, TypeError):
            fits = False
        if not fits:
            raise PartitionError(
                f"'{path}' is no alignment of this site, and has to be removed", remedy=ALIGNED_BY
            )
        if not self.changed:
            by_row = np.empty(len(numbers), dtype=np.int64)
            by_row[order] = numbers
            self._bring_in_order(alignment, by_row)

    def _fingerprint(self, salt: bytes) -> tuple[Ints, bytes]:
        """Order of the rows by their hashed keys, and a hash of these and of which have a record."""
        digests = self.keys.points(salt)
        order = np.argsort(as_tokens(digests))
        hashed = hashlib.sha256(salt + digests[order].tobytes() + self.seen[order].tobytes())
        return order, hashed.digest()


def alignment_of(session: str) -> str:
    """Name of the alignment that a session rests on; empty for none."""
    name, dash, _ = session.partition("-")
    return name if dash else ""


def new_session(alignment: str) -> str:
    """Draw a session that rests on an alignment, or on none where the name is empty."""
    drawn = secrets.token_hex(8)
    return f"{alignment}-{drawn}" if alignment else drawn


# ----------------------------------------------------------------------------------------------------
# Fingerprints of rows, which identify them again after a table has grown or changed its order.
#
# A mark is a keyed digest of a complete record, and begins with a digest of its key if records have one. A
# corrected record has another mark. It counts as one removed and one new record, since sums before and after
# the correction differ by it. Marks are compared over the columns that the table had earlier (their form), so
# that a new column changes no record. If no record has its earlier mark under the same keys, a column has
# changed in all records, and they are recognized by keys alone. Without a key, two equal records are
# distinguished by their order, which affects no sum.

MARK_BYTES, KEY_MARK = 16, 8


@dataclass(frozen=True, slots=True)
class MarkForm:
    """What marks were computed from: the columns of the table, and whether records had a key."""

    columns: tuple[str, ...]
    by_key: bool

    @classmethod
    def of(cls, table: Table) -> MarkForm:
        """Return the form of the marks of a table."""
        table = unlabeled(table)
        return cls(tuple(table.columns), row_keys(table) is not None)

    def to_array(self) -> Array:
        """Return the form as bytes, for a file."""
        return np.frombuffer(to_json(self).encode(), dtype=np.uint8)

    @classmethod
    def from_array(cls, content: Array) -> MarkForm:
        """Restore the result of :meth:`to_array`; ValueError if it is not a form."""
        try:
            return from_json(cls, content.tobytes(), "the form of the marks", PartitionError)
        except PartitionError as error:
            raise ValueError("the release history is not complete") from error

    def lacking(self, table: Table) -> list[str]:
        """Return the columns that a table no longer has; those of its key count as there."""
        held = {*unlabeled(table).columns, *_key_columns(table)}
        return [name for name in self.columns if name not in held]


def row_fingerprints(table: Table, secret: bytes, form: MarkForm | None = None) -> Array:
    """Mark every row: (n_rows, 16) bytes; in another form to compare them with marks of that form."""
    # The labels of a table are not part of its records.
    table = unlabeled(table)
    form = MarkForm.of(table) if form is None else form
    keys = row_keys(table) if form.by_key else None
    rows = _rows(_with_key_columns(table, form.columns), form.columns)
    if keys is None:
        return _digests(_numbered(rows), secret)
    # without the count of its like, which would move where another record changes
    keys, held = (_digests(one, secret) for one in (keys, rows))
    return np.hstack([keys[:, :KEY_MARK], held[:, KEY_MARK:]])


def recognize_rows(known: Array, form: MarkForm, table: Table, secret: bytes) -> Ints:
    """Find the rows of a table among earlier marks (m, 16) of a form: (n_rows,), -1 for new ones.

    ValueError if the table has no key but the marks have, or if a column of unkeyed records is gone.
    """
    lacking = form.lacking(table)
    if (form.by_key and row_keys(table) is None) or (lacking and not form.by_key):
        raise ValueError("records cannot be compared with those of earlier releases")
    if not lacking:
        return places_of(known, row_fingerprints(table, secret, form))
    marks = row_fingerprints(table, secret)
    return _positions(known[:, :KEY_MARK], marks[:, :KEY_MARK])


def has_keys(table: Table) -> bool:
    """Return whether records have a key; no record is read."""
    table = unlabeled(table)
    if isinstance(table, SqlTable):
        return table.key_hashes is not None
    return isinstance(table, AlignedTable) or bool(_key_columns(table))


def row_keys(table: Table) -> Array | None:
    """Return digests of the keys of the rows, (n_rows,) or (n_rows, w); None if records have no key."""
    table = unlabeled(table)
    if isinstance(table, AlignedTable):
        return table.entities
    if isinstance(table, SqlTable):
        return table.key_hashes
    names = _key_columns(table)
    if not names:
        return None
    chunks = _with_key_columns(table, names).chunks(names)
    return np.concatenate([np.zeros(0, dtype=np.uint64), *map(hash_keys, chunks)])


def unlabeled(table: Table) -> Table:
    """Return the records of a table without the column of its site."""
    return table.table if isinstance(table, LabeledTable) else table


def _key_columns(table: Table) -> list[str]:
    """Return the columns of the key that are not columns for models."""
    table = unlabeled(table)
    table = table.table if isinstance(table, CurveTable) else table
    if isinstance(table, FrameTable):
        return [] if table.key_columns is None else list(table.key_columns.columns)
    return list(table.left_out) if isinstance(table, ParquetTable) else []


def _with_key_columns(table: Table, names: Sequence[str]) -> Table:
    """Return a table that also has the columns of its key, if they are among these names."""
    if all(name in table.columns for name in names):
        return table
    inner = table.table if isinstance(table, CurveTable) else table
    if isinstance(inner, ParquetTable):
        return ParquetTable(inner.path, inner.rows_per_chunk, conversions=inner.conversions)
    if isinstance(inner, FrameTable) and inner.key_columns is not None:
        return FrameTable(pd.concat([inner.frame, inner.key_columns.reset_index(drop=True)], axis=1))
    return table


def _digests(rows: Array, secret: bytes) -> Array:
    """Digest every row of an array: (n, 16) bytes."""
    reported, width = (
        np.ascontiguousarray(rows).tobytes(),
        rows.itemsize * (rows.shape[1] if rows.ndim > 1 else 1),
    )
    pieces = (reported[i : i + width] for i in range(0, len(reported), max(width, 1)))
    marks = b"".join(hashlib.blake2b(one, digest_size=MARK_BYTES, key=secret).digest() for one in pieces)
    return np.frombuffer(marks, dtype=np.uint8).reshape(-1, MARK_BYTES)


def content_fingerprint(table: Table, secret: bytes) -> bytes:
    """Keyed digest of all that a table holds, whatever the order of its rows."""
    table = unlabeled(table)
    rows = _rows(table)
    whose = table.entities if isinstance(table, AlignedTable) else np.empty((table.n_rows, 0), dtype=np.uint8)
    reported = np.hstack([whose, rows.astype("<u8").reshape(-1, 1).view(np.uint8)])
    in_order = reported[np.lexsort(reported.T[::-1])] if len(reported) else reported
    digest = hashlib.blake2b(repr(table.columns).encode(), digest_size=32, key=secret)
    digest.update(np.ascontiguousarray(in_order).tobytes())
    return digest.digest()


def order_fingerprint(table: Table) -> bytes:
    """Digest of all that a table holds in the order of its rows, to compare it with what it was."""
    table = unlabeled(table)
    digest = hashlib.blake2b(repr((table.columns, table.n_rows, order_of(table))).encode())
    for chunk in table.chunks(table.columns) if table.columns else ():
        digest.update(_hashed(chunk).tobytes())
    keys = row_keys(table)
    digest.update(b"" if keys is None else keys.tobytes())
    return digest.digest()


def places_of(known: Array, marks: Array) -> Ints:
    """Find marks among known ones: (m, 16), (n, 16) -> (n,), -1 for new ones."""
    found = _positions(known, marks)
    return _positions(known[:, :KEY_MARK], marks[:, :KEY_MARK]) if (found < 0).all() else found


def _positions(known: Array, marks: Array) -> Ints:
    if not len(known):
        return np.full(len(marks), -1, dtype=np.int64)
    held, request = (np.ascontiguousarray(one).view(f"S{one.shape[1]}").ravel() for one in (known, marks))
    order = np.argsort(held)
    at = order[np.minimum(np.searchsorted(held, request, sorter=order), len(held) - 1)]
    return np.where(held[at] == request, at, -1)


def order_of(table: Table) -> str:
    """Name the order of the rows: that of the alignment where there is one, which may change."""
    return table.alignment if isinstance(table, AlignedTable) else ""


def _numbered(rows: Array) -> Array:
    """Count which of its like each hashed row is: (n_rows,) -> (n_rows, 2)."""
    which = pd.Series(rows).groupby(rows).cumcount().to_numpy(dtype=np.uint64)
    return np.column_stack([rows, which])


def _rows(table: Table, columns: Sequence[str] | None = None) -> Array:
    """Hash what each row holds, in these columns or all: (n_rows,)."""
    columns = table.columns if columns is None else columns
    parts = [_hashed(chunk) for chunk in table.chunks(columns)] if columns else []
    return np.concatenate(parts) if parts else np.zeros(table.n_rows, dtype=np.uint64)


def _hashed(chunk: pd.DataFrame) -> Array:
    # As doubles: an integer column becomes one if a later value is missing.
    plain = {
        name: column if is_curve(column) else column.astype(_form(column)) for name, column in chunk.items()
    }
    return pd.util.hash_pandas_object(pd.DataFrame(plain), index=False).to_numpy(dtype=np.uint64)


def _form(column: pd.Series[Any]) -> Any:
    return "float64" if pd.api.types.is_numeric_dtype(column) else "string"
