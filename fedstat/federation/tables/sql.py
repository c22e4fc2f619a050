"""The rows of a query to a site's own database, as a table that is streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd

from fedstat.errors import DesignError
from fedstat.federation.tables.checks import name_problems, refuse
from fedstat.federation.tables.database import Batch, Database, single_query
from fedstat.federation.tables.table import ROWS_PER_CHUNK, check_columns, rows_only

ARRAYS = "arrays"
"""What curves are made of, and nothing else."""
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
TEXT = pd.Series(["a"]).dtype
"""What pandas takes text for; not the same in all its versions."""
SEVERAL, OTHER = "values of several types", "values of other types"


class SqlTable:
    """The rows of a query, streamed from the database whenever they are asked for, in the order of their key.

    When it is opened all rows are gone through once, to count them and to learn what each column holds
    (`kinds`, None without a value; also of columns that are left out): a column then has the same type in
    every chunk. Every later pass is held against the count, and against the passes before it. All chunks but
    the last have `rows_per_chunk` rows.
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
    ) -> None:
        self.site, self.rows_per_chunk = site, rows_per_chunk
        self._database, self._key = database, tuple(key)
        self._from = f"FROM (\n{single_query(site, query)}\n) AS records"
        self._checksums: dict[str, int] = {}
        self.kinds: dict[str, str | None] = {}
        self.n_rows, self._missing = self._look()
        self.columns = tuple(name for name in self.kinds if name not in set(leave_out))
        refuse(self._problems())

    def __repr__(self) -> str:
        return f"SqlTable({self.site!r}, {self.n_rows} rows, {len(self.columns)} columns)"

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield the frames; DesignError where the records changed since the table was opened."""
        check_columns(self.columns, columns, f"{self.site}: the table")
        if not columns:
            yield from rows_only(self.n_rows, self.rows_per_chunk)
            return
        wanted, order = (", ".join(map(_quoted, names)) for names in (columns, self._key))
        n_rows, sums = 0, dict.fromkeys(columns, 0)
        for rows in self._whole_chunks(f"SELECT {wanted} {self._from} ORDER BY {order}"):
            frame = self._frame(columns, rows)
            for name in columns:
                sums[name] = _checksum(sums[name], frame[name])
            n_rows += len(frame)
            yield frame
        # the first pass over a column sets what later ones are held against
        kept = {name: self._checksums.setdefault(name, value) for name, value in sums.items()}
        if n_rows != self.n_rows:
            raise self._changed(f"{n_rows:,} rows came, and there were {self.n_rows:,} when it was opened")
        if kept != sums:
            differ = ", ".join(repr(name) for name in columns if kept[name] != sums[name])
            raise self._changed(f"column {differ} has other values than in an earlier round")

    def _whole_chunks(self, statement: str) -> Iterator[list[tuple[Any, ...]]]:
        # of one length, however many rows the driver fetches: sums over chunks are then those of other
        # sources
        held: list[tuple[Any, ...]] = []
        for rows in self._database.rows(statement, []):
            held += rows
            while len(held) >= self.rows_per_chunk:
                yield held[: self.rows_per_chunk]
                held = held[self.rows_per_chunk :]
        if held:
            yield held

    def _look(self) -> tuple[int, set[str]]:
        """Count the rows, and learn the kind of every column and which have missing values."""
        names: list[str] = []
        types: list[set[type]] = []
        n_rows = 0
        for rows in self._database.rows(f"SELECT * {self._from}", names):
            n_rows += len(rows)
            found = [set(map(type, column)) for column in zip(*rows, strict=True)]
            types = [a | b for a, b in zip(types, found, strict=True)] if types else found
        refuse(name_problems(self.site, names))
        types = types or [set() for _ in names]
        self.kinds.update({name: _kind(found) for name, found in zip(names, types, strict=True)})
        return n_rows, {name for name, found in zip(names, types, strict=True) if type(None) in found}

    def _problems(self) -> Iterator[str]:
        for name, found in self.kinds.items():
            if found in (SEVERAL, OTHER):
                yield (
                    f"{self.site}, column {name!r}: expected numbers, text, true/false or dates, found "
                    f"{found}. Remedy: convert it in the query (CAST), or leave it out."
                )
        absent = [name for name in self._key if name not in self.kinds]
        if absent:
            yield (
                f"{self.site}: the query gives no key column {', '.join(map(repr, absent))}. It gives "
                f"{', '.join(map(repr, self.kinds))}."
            )
            return
        for name in self._key:
            if name in self._missing:
                yield f"{self.site}, key column {name!r}: rows have no key. Drop them in the query."
        key = ", ".join(map(_quoted, self._key))
        # counted by the database, which then sends no key
        distinct = f"SELECT count(*) FROM (SELECT DISTINCT {key} {self._from}) AS keys"
        ((count,),) = (row for rows in self._database.rows(distinct, []) for row in rows)
        if count != self.n_rows:
            yield (
                f"{self.site}: {self.n_rows - count:,} of {self.n_rows:,} rows repeat a key of another row "
                f"(key {', '.join(map(repr, self._key))}). Keep one row per entity, or add the column "
                "that tells them apart."
            )

    def _frame(self, columns: Sequence[str], rows: Batch) -> pd.DataFrame:
        parts: dict[str, Any] = {}
        for name, values in zip(columns, zip(*rows, strict=True), strict=True):
            kind = self.kinds[name]
            # in every chunk, also one without missing cells: a column has one type throughout
            if kind == "whole numbers" and name in self._missing:
                kind = "numbers"
            try:
                parts[name] = CONVERTERS[kind](values)
                continue
            except (TypeError, ValueError, OverflowError):
                pass
            # outside of the handler: the converter's own error may quote a value
            raise self._changed(f"column {name!r} is no longer of the type it had, or beyond 64 bits")
        return pd.DataFrame(parts, columns=list(columns), copy=False)

    def _changed(self, what: str) -> DesignError:
        return DesignError(
            f"{self.site}: the records changed while they were in use: {what}. Let the query read a table "
            "that stands still, and open it again."
        )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _kind(types: set[type]) -> str | None:
    kinds = {KIND_OF_TYPE.get(found, OTHER) for found in types - {type(None)}}
    if kinds == {"numbers", "whole numbers"}:
        return "numbers"
    return next(iter(kinds), None) if len(kinds) < 2 else SEVERAL


def _as_whole(values: tuple[Any, ...]) -> Any:
    array = np.array(values)
    if array.dtype != np.int64:
        raise ValueError
    return array


def _as_text(values: tuple[Any, ...]) -> Any:
    return pd.Series([str(v) if isinstance(v, UUID) else v for v in values], dtype=TEXT)


def _as_arrays(values: tuple[Any, ...]) -> Any:
    cells = [None if value is None else np.array(value, dtype=np.float64) for value in values]
    return pd.Series([*cells, None], dtype=object)[:-1]  # one more, or cells of one length become a table


def _as_dates(values: tuple[Any, ...]) -> Any:
    aware = any(getattr(value, "tzinfo", None) is not None for value in values)
    return pd.Series(pd.to_datetime(list(values), utc=aware)).astype(
        "datetime64[us, UTC]" if aware else "datetime64[us]"
    )


CONVERTERS: Mapping[str | None, Callable[[tuple[Any, ...]], Any]] = MappingProxyType(
    {
        None: lambda values: np.array(values, dtype=np.float64),
        "numbers": lambda values: np.array(values, dtype=np.float64),
        "whole numbers": _as_whole,
        "true/false": lambda values: pd.array(list(values), dtype="boolean"),
        "text": _as_text,
        "dates": _as_dates,
        ARRAYS: _as_arrays,
    }
)


def _checksum(before: int, column: pd.Series[Any]) -> int:
    """Go on with the checksum of a column, which depends on the values and their order."""
    if any(isinstance(cell, np.ndarray) for cell in column):
        column = pd.Series([None if cell is None else cell.tobytes().hex() for cell in column])
    hashes = pd.util.hash_pandas_object(column, index=False).to_numpy()
    # chained, so that rows in another order have another checksum
    return hash((before, hashes.tobytes()))
