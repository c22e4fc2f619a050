"""The rows of a database query as a table: read once, kept as Arrow in memory or in a file."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeAlias
from uuid import UUID

import numpy as np
import pandas as pd
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.tables.checks import name_problems, raise_problems
from fedstat.federation.tables.database import NO_SQL, Database, DatabaseSession, single_query
from fedstat.federation.tables.table import (
    ROWS_PER_CHUNK,
    Conversion,
    check_columns,
    frame_of,
    rows_only,
    with_conversions,
)
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# Rows of a query that are read once, as Arrow: in memory while they are few, else in a file of the site's.
#
# The file has no name: it disappears when the process ends in any way. Its content is encrypted (AES-256-GCM)
# under a key that was drawn for it and exists only in the memory of this process. A copy of the disk shows
# random bytes, and changed content is refused. Rows in memory, and memory that the operating system swaps to
# disk, are not encrypted.

MEGABYTES = 256
"""Megabytes of rows that are held in memory, if the owner does not set them."""
KEY_BITS, NONCE_BYTES = 256, 12
Pieces: TypeAlias = Mapping[str, Any]
"""Arrow arrays of one length, by column."""


class KeptRows:
    """Pieces of a table's rows, as they were read; at most `megabytes` of them in memory.

    More are in a file in `folder`, or in the system's temporary folder without one.
    """

    def __init__(self, site: str, megabytes: int, folder: Path | None = None) -> None:
        self.site, self._limit, self._folder = site, megabytes * 10**6, folder
        self.n_rows = 0
        self._lengths: list[int] = []
        self._held: list[Pieces] = []
        self._bytes = 0
        self._file: SealedFile | None = None

    @property
    def in_file(self) -> bool:
        """Whether they are in a file."""
        return self._file is not None

    def add(self, pieces: Pieces, length: int) -> None:
        """Keep some more rows; EngineError where the disk has no room for them."""
        self._lengths.append(length)
        self.n_rows += length
        self._held.append(pieces)
        self._bytes += sum(piece.nbytes for piece in pieces.values())
        if self._file is None and self._bytes > self._limit:
            self._file = SealedFile(self.site, self._folder)
        if self._file is not None:
            for one in self._held:
                self._file.append(one)
            self._held = []

    def tables(self, types: Mapping[str, Any], rows_per_chunk: int) -> Iterator[Any]:
        """Arrow tables of some columns, of these types, in chunks of a length; the last is shorter."""
        pa = arrow()
        schema = pa.schema(list(types.items()))
        held, n_held = [], 0
        for number, length in enumerate(self._lengths):
            pieces = self._file.read(number, list(types)) if self._file is not None else self._held[number]
            # not safe: integers with missing values, or with later decimals, are doubles
            arrays = [pieces[name].cast(of, safe=False) for name, of in types.items()]
            held.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
            n_held += length
            if n_held >= rows_per_chunk:
                table = pa.Table.from_batches(held)
                complete = n_held - n_held % rows_per_chunk
                for start in range(0, complete, rows_per_chunk):
                    yield table.slice(start, rows_per_chunk)
                held, n_held = table.slice(complete).to_batches(), n_held - complete
        if n_held:
            yield pa.Table.from_batches(held)


class SealedFile:
    """Arrow arrays in a file without a name, under a key that is nowhere else; read column by column."""

    def __init__(self, site: str, folder: Path | None) -> None:
        self.site = site
        self._cipher = AESGCM(AESGCM.generate_key(KEY_BITS))
        self._salt = secrets.token_bytes(NONCE_BYTES - 8)
        self._index: list[dict[str, tuple[int, int, int, Any]]] = []
        self._count = 0
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise self._full(error) from error

    def append(self, pieces: Pieces) -> None:
        """Seal one array of each column."""
        pa = arrow()
        places = {}
        for name, piece in pieces.items():
            batch = pa.RecordBatch.from_arrays([piece], [name])
            sealed = self._cipher.encrypt(
                self._nonce(self._count), memoryview(batch.serialize()).cast("B"), None
            )
            try:
                start = self._file.seek(0, 2)
                self._file.write(sealed)
                self._file.flush()
            except OSError as error:
                raise self._full(error) from error
            places[name] = start, len(sealed), self._count, batch.schema
            self._count += 1
        self._index.append(places)

    def read(self, number: int, names: Sequence[str]) -> Pieces:
        """Open the arrays of some columns; SecurityError where the file was altered."""
        pa = arrow()
        found = {}
        for name in names:
            start, length, count, schema = self._index[number][name]
            self._file.seek(start)
            try:
                content = self._cipher.decrypt(self._nonce(count), self._file.read(length), None)
            except InvalidTag:
                raise SecurityError(
                    f"{self.site}: the file in which its records were kept was altered; start the site again"
                ) from None
            found[name] = pa.ipc.read_record_batch(pa.py_buffer(content), schema).column(0)
        return found

    def _nonce(self, count: int) -> bytes:
        # every array has a number of its own under this key
        return self._salt + count.to_bytes(8, "little")

    def _full(self, error: OSError) -> EngineError:
        return EngineError(
            f"{self.site}: the records of its query cannot be kept in its folder ({error.strerror}); make "
            "room there, or raise 'memory' in its source"
        )


def arrow() -> Any:
    """Return pyarrow; ImportError says what to install."""
    try:
        import pyarrow  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(NO_SQL) from error
    return pyarrow


# ----------------------------------------------------------------------------------------------------
# The rows of a query to a site's own database, as a table that is read once and then stays fixed.

ARRAYS = "arrays"
"""Columns that belong to curves, and nothing else."""
KIND_OF_TYPE: Mapping[type, str] = MappingProxyType(
    {
        bool: "true/false",
        int: "whole numbers",
        float: "numbers",
        Decimal: "numbers",
        str: "text",
        UUID: "text",
        date: "dates",
        datetime: "dates",
        list: ARRAYS,
    }
)
SEVERAL, OTHER = "values of several types", "values of other types"
BEYOND = "values that are beyond 64 bits, or that no column of their type can hold"
REFUSED = (SEVERAL, OTHER, BEYOND)


class SqlTable:
    """The rows of a query, read once when the table is opened, in the order of their key, and kept.

    All rows come from one state of the database, that of `as_of`. Every pass over the table sees this state,
    even if the database changes. `key_hashes` (n_rows,) recognize a
    row at the next reading. `kinds` are the kinds of all columns, also of unused ones, None without a
    value. A column has one type in every chunk; all chunks but the last have `rows_per_chunk` rows.
    `conversions` are applied to the chunks. At most `memory` megabytes of rows are in memory; see
    :mod:`fedstat.federation.tables.sql_table` for the others.
    """

    def __init__(
        self,
        site: str,
        database: Database,
        query: str,
        key: Sequence[str],
        *,
        rows_per_chunk: int = ROWS_PER_CHUNK,
        leave_out: Sequence[str] = (),
        memory: int = MEGABYTES,
        folder: Path | None = None,
    ) -> None:
        self.site, self.rows_per_chunk = site, rows_per_chunk
        self._key = tuple(key)
        self._quoted_key = ", ".join(map(database.reader.quoted, key))
        self._from = f"FROM (\n{single_query(database, query)}\n) records"
        self._kept = KeptRows(site, memory, folder)
        self.conversions: dict[str, Conversion] = {}
        self.key_hashes = np.zeros(0, dtype=np.uint64)
        self._missing: set[str] = set()
        self._aware: set[str] = set()
        self.kinds: dict[str, str | None] = {}
        # before the first statement: what was written until then is in the records
        self.as_of = utc_timestamp()
        with database.session() as session:
            self._read(session, set(leave_out))
            self.n_rows = self._kept.n_rows
            raise_problems(self._problems(session))
        self.columns = tuple(name for name in self.kinds if name not in set(leave_out))

    def __repr__(self) -> str:
        return f"SqlTable({self.site!r}, {self.n_rows} rows, {len(self.columns)} columns)"

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield the frames; see :meth:`fedstat.federation.tables.table.Table.chunks`."""
        check_columns(self.columns, columns, f"{self.site}: the table")
        if not columns:
            yield from rows_only(self.n_rows, self.rows_per_chunk)
            return
        types = {name: self._arrow_type(name) for name in columns}
        for rows in self._kept.tables(types, self.rows_per_chunk):
            yield with_conversions(frame_of(rows), self.conversions)

    def _read(self, session: DatabaseSession, leave_out: set[str]) -> None:
        """Read all rows, and learn the kind of every column and which have missing values."""
        names: list[str] = []
        # names first: a missing key is reported before the query sorts by it
        list(session.rows(f"SELECT * {self._from} WHERE 1 = 0", names))
        raise_problems(name_problems(self.site, names))
        self.kinds.update(dict.fromkeys(names))
        raise_problems(self._key_problems())
        hashes = []
        for rows in session.batches(f"SELECT * {self._from} ORDER BY {self._quoted_key}"):
            if isinstance(rows, Sequence):
                pieces = dict(zip(names, map(self._piece, names, zip(*rows, strict=True)), strict=True))
            else:
                pieces = dict(zip(names, map(self._arrow_piece, names, rows.columns), strict=True))
            self._kept.add({name: pieces[name] for name in names if name not in leave_out}, len(rows))
            hashes.append(hash_keys(pd.DataFrame({name: pieces[name].to_pandas() for name in self._key})))
        self.key_hashes = np.concatenate(hashes) if hashes else self.key_hashes

    def _piece(self, name: str, values: tuple[Any, ...]) -> Any:
        """Arrow array of some values of a column; what its kind is, is known when all were read."""
        types = set(map(type, values))
        kind = _kind(types)
        try:
            piece = PIECES[kind](values)
            self._aware |= {name} if kind == "dates" and piece.type.tz else set()
        except (TypeError, ValueError, OverflowError, KeyError):
            # the converter's own error may quote a value
            kind, piece = kind if kind in REFUSED else BEYOND, PIECES[None](values)
        self._note(name, kind, type(None) in types)
        return piece

    def _arrow_piece(self, name: str, values: Any) -> Any:
        """Arrow array of some values of a column that came as Arrow."""
        kind = _arrow_kind(values.type) if values.null_count < len(values) else None
        self._note(name, kind, values.null_count > 0)
        return values

    def _note(self, name: str, kind: str | None, missing: bool) -> None:
        self.kinds[name] = _common(self.kinds[name], kind)
        self._missing |= {name} if missing else set()

    def _arrow_type(self, name: str) -> Any:
        """Type of a column in all chunks."""
        pa, kind = arrow(), self.kinds[name]
        if kind == "dates":
            return pa.timestamp("us", tz="UTC" if name in self._aware else None)
        # numbers as doubles where one is missing
        if kind in (None, "numbers") or (kind == "whole numbers" and name in self._missing):
            return pa.float64()
        return {
            "whole numbers": pa.int64(),
            "true/false": pa.bool_(),
            "text": pa.string(),
            ARRAYS: pa.list_(pa.float64()),
        }[kind]

    def _key_problems(self) -> Iterator[str]:
        absent = [name for name in self._key if name not in self.kinds]
        if absent:
            yield (
                f"{self.site}: the query gives no key column {', '.join(map(repr, absent))}. It gives "
                f"{', '.join(map(repr, self.kinds))}."
            )

    def _problems(self, session: DatabaseSession) -> Iterator[str]:
        for name, found in self.kinds.items():
            if found in REFUSED:
                yield (
                    f"{self.site}, column {name!r}: expected numbers, text, true/false or dates, found "
                    f"{found}. Remedy: convert it in the query (CAST), or leave it out."
                )
        for name in self._key:
            if name in self._missing:
                yield f"{self.site}, key column {name!r}: rows have no key. Drop them in the query."
        # counted by the database, for which two texts may be the same that are written in two ways
        distinct = f"SELECT count(*) FROM (SELECT DISTINCT {self._quoted_key} {self._from}) one_each"
        ((count,),) = (row for rows in session.rows(distinct, []) for row in rows)
        if count != self.n_rows:
            yield (
                f"{self.site}: {self.n_rows - count:,} of {self.n_rows:,} rows repeat a key of another row "
                f"(key {', '.join(map(repr, self._key))}). Keep one row per entity, or add the column that "
                "distinguishes them."
            )


def hash_keys(keys: pd.DataFrame) -> Array:
    """Hash the key of each row, (n,), from its written form: a column may be read as numbers or as text."""
    return pd.util.hash_pandas_object(keys.astype("string"), index=False).to_numpy(dtype=np.uint64)


def utc_timestamp() -> str:
    """Return a time in UTC, to the second, as in ledgers."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _arrow_kind(of: Any) -> str:
    """Kind of an Arrow type, one of few; see :data:`fedstat.federation.tables.database.PLAIN`."""
    text = str(of)
    complete = {"int16", "int32", "int64"}
    return (
        "whole numbers" if text in complete else {"bool": "true/false", "string": "text"}.get(text, "numbers")
    )


def _kind(types: set[type]) -> str | None:
    kinds = {KIND_OF_TYPE.get(found, OTHER) for found in types - {type(None)}}
    if kinds == {"numbers", "whole numbers"}:
        return "numbers"
    return next(iter(kinds), None) if len(kinds) < 2 else SEVERAL


def _common(one: str | None, other: str | None) -> str | None:
    """Kind of a column of which some values are of one kind and some of another."""
    if one == other or other is None:
        return one
    if one is None:
        return other
    return "numbers" if {one, other} == {"numbers", "whole numbers"} else SEVERAL


def _as_numbers(values: tuple[Any, ...]) -> Any:
    return arrow().array(np.array(values, dtype=np.float64))


def _as_whole(values: tuple[Any, ...]) -> Any:
    return arrow().array(values, arrow().int64())


def _as_text(values: tuple[Any, ...]) -> Any:
    return arrow().array([str(v) if isinstance(v, UUID) else v for v in values], arrow().string())


def _as_arrays(values: tuple[Any, ...]) -> Any:
    cells = [None if value is None else np.array(value, dtype=np.float64) for value in values]
    return arrow().array(cells, arrow().list_(arrow().float64()))


def _as_dates(values: tuple[Any, ...]) -> Any:
    aware = any(getattr(value, "tzinfo", None) is not None for value in values)
    dates = pd.Series(pd.to_datetime(list(values), utc=aware))
    return arrow().array(dates.astype("datetime64[us, UTC]" if aware else "datetime64[us]"))


PIECES: Mapping[str | None, Callable[[tuple[Any, ...]], Any]] = MappingProxyType(
    {
        None: lambda values: arrow().nulls(len(values)),
        "numbers": _as_numbers,
        "whole numbers": _as_whole,
        "true/false": lambda values: arrow().array(values, arrow().bool_()),
        "text": _as_text,
        "dates": _as_dates,
        ARRAYS: _as_arrays,
    }
)
"""How values of a kind become an Arrow array."""
