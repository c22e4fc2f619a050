"""The records of one site: a table in memory, or one that is streamed from a file.

A step over rows uses :class:`Table` only: it reads the chunks and sums. It needs memory for one chunk, for a
table of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pandas as pd

from fedstat.errors import DesignError
from fedstat.federation.tables.curves import CurveArray, CurveDtype, curves_of
from fedstat.typing import Array

ResultT = TypeVar("ResultT")
ROWS_PER_CHUNK = 262_144
NO_PYARROW = "Parquet files are read by pyarrow: pip install fedstat[parquet]"
READ_BUFFER = 1 << 16  # bytes per column


class Table(Protocol):
    """Rows of named columns, read in chunks."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        ...

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        ...

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Iterate over the rows in order, with columns in the requested order.

        Names are different ones of ``columns``; none gives frames of rows only, an unknown one is a
        DesignError. Every frame, (m, len(columns)), has a RangeIndex from 0; a table without rows gives one
        frame or none. The categories of a column may differ from one frame to the next.
        """
        ...


MOST_KEPT, MOST_NUMBERS_KEPT = 8, 2**17
"""Results that a table in memory keeps, and its largest number of cells with which it keeps any."""


class FrameTable:
    """A table in memory, its own single chunk; `frame` (n_rows, p) is not copied, and under a RangeIndex.

    `entities` identifies the entity of each row, (n_rows,) or (n_rows, w), equally at all sites; by default
    by the position of the row. `as_of` is the time at which the rows were read, empty if unknown.
    `key_columns` (n_rows, k) has the columns of a key, which no model sees, if the source names one.
    """

    as_of = ""
    key_columns: pd.DataFrame | None = None

    def __init__(self, frame: pd.DataFrame, entities: Array | None = None) -> None:
        # rows are meant by position: with an index of the caller's own pandas would align by label
        in_order = pd.RangeIndex(len(frame))
        same = isinstance(frame.index, pd.RangeIndex) and frame.index.equals(in_order)
        if not same:
            frame = frame.copy(deep=False)
            frame.index = in_order
        self.frame = frame
        self.columns: tuple[str, ...] = tuple(frame.columns)
        self.n_rows = len(frame)
        self._entities = entities
        self._results: tuple[pd.DataFrame, dict[Hashable, Any]] = frame, {}

    @property
    def keeps_results(self) -> bool:
        """Whether the table is small enough to keep results."""
        return self.n_rows * len(self.columns) <= MOST_NUMBERS_KEPT

    def kept_result(self, key: Hashable, compute: Callable[[], ResultT]) -> ResultT:
        """Return what was computed of the records under this key before, or compute it."""
        if not self.keeps_results:
            return compute()
        if self._results[0] is not self.frame:  # its records came into another order
            self._results = self.frame, {}
        results = self._results[1]
        if key not in results:
            result = compute()
            while len(results) >= MOST_KEPT:
                del results[next(iter(results))]
            results[key] = result
        found: ResultT = results[key]
        return found

    @property
    def entities(self) -> Array:
        """The entity of each row, (n_rows,) or (n_rows, w), written alike at all sites."""
        return np.arange(self.n_rows) if self._entities is None else self._entities

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield the one frame; see :meth:`Table.chunks`."""
        check_columns(self.columns, columns)
        if tuple(columns) == self.columns:
            yield self.frame
            return
        # frame[list] would copy; each column by itself does not
        parts: dict[str, Any] = {name: self.frame[name] for name in columns}
        yield pd.DataFrame(parts, index=self.frame.index, copy=False)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What the values of a column become as its chunks pass, and of which kind they then are."""

    kind: str
    convert: Callable[[pd.Series[Any]], pd.Series[Any]]


def with_conversions(frame: pd.DataFrame, conversions: Mapping[str, Conversion]) -> pd.DataFrame:
    """Convert the columns of a chunk that are declared in another form."""
    parts = {name: one.convert(frame[name]) for name, one in conversions.items() if name in frame.columns}
    return frame.assign(**parts) if parts else frame


class ParquetTable:
    """A Parquet file; only the requested columns are read, chunk by chunk.

    A chunk has at most `rows_per_chunk` rows, and also ends where a row group of the file does. `columns`
    lacks what is left out, such as a key, and an index that pandas stored (`index_columns`); `schema` has
    all. `conversions` are applied to the chunks. OSError or pyarrow.ArrowInvalid (a ValueError) where the
    file is absent or no Parquet file.
    """

    def __init__(
        self,
        path: str | Path,
        rows_per_chunk: int = ROWS_PER_CHUNK,
        leave_out: Sequence[str] = (),
        conversions: Mapping[str, Conversion] | None = None,
    ) -> None:
        self.conversions = dict(conversions or {})
        self.path = Path(path)
        self.rows_per_chunk = rows_per_chunk
        with self._open() as file:
            self.n_rows: int = file.metadata.num_rows
            self.schema: Any = file.schema_arrow
        # an entry for a RangeIndex is a dict and has no column in the file
        stored = (self.schema.pandas_metadata or {}).get("index_columns", [])
        self.index_columns = tuple(name for name in stored if isinstance(name, str))
        self.left_out = tuple(leave_out)
        masked = {*self.index_columns, *leave_out}
        self.columns = tuple(name for name in self.schema.names if name not in masked)

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield the frames; DesignError where the file has another number of rows than it had."""
        check_columns(self.columns, columns)
        if not columns:
            yield from rows_only(self.n_rows, self.rows_per_chunk)
            return
        with self._open() as file:
            if file.metadata.num_rows != self.n_rows:
                raise DesignError(
                    f"the Parquet file has {file.metadata.num_rows:,} rows, and had {self.n_rows:,} when the "
                    "partition was made. Make the partition again."
                )
            for batch in file.iter_batches(self.rows_per_chunk, columns=list(columns)):
                # selected again: a batch comes in the order of the file
                yield with_conversions(frame_of(batch.select(list(columns))), self.conversions)

    def _open(self) -> Any:
        try:
            import pyarrow.parquet as pq  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ImportError(NO_PYARROW) from error
        # with pre_buffer, or without a buffer's size, the complete compressed file comes into memory
        return pq.ParquetFile(self.path, buffer_size=READ_BUFFER, pre_buffer=False)


class LabeledTable:
    """A table with one more column at its end: the site's `label`, a categorical of one level."""

    def __init__(self, table: Table, name: str, label: str) -> None:
        if name in table.columns:
            raise DesignError(
                f"{label}: the table has a column {name!r} of its own. Rename it, or give the column that "
                "names the site another name"
            )
        self.table = table
        self.name = name
        self.label = label
        self.columns = (*table.columns, name)
        self.n_rows = table.n_rows

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield the frames; see :meth:`Table.chunks`."""
        if self.name not in columns:
            yield from self.table.chunks(columns)
            return
        place = list(columns).index(self.name)
        for frame in self.table.chunks([name for name in columns if name != self.name]):
            # a byte a row, and not the text in every one
            code = np.zeros(len(frame), dtype=np.int8)
            labeled = frame.copy(deep=False)
            constant = pd.Categorical.from_codes(code, pd.Index([self.label]))
            labeled.insert(place, self.name, pd.Series(constant, index=frame.index))
            yield labeled


def keep_result(table: Table, key: Hashable, compute: Callable[[], ResultT]) -> ResultT:
    """Return a result that a table in memory keeps, see :meth:`FrameTable.kept_result`, or compute it."""
    held = _in_memory(table)
    return compute() if held is None else held.kept_result(key, compute)


def keeps_results(table: Table) -> bool:
    """Whether :func:`keep_result` keeps what it returns, which then must not be changed."""
    held = _in_memory(table)
    return held is not None and held.keeps_results


def in_memory(table: Table) -> bool:
    """Whether the records are in memory, in one chunk."""
    return _in_memory(table) is not None


def _in_memory(table: Table) -> FrameTable | None:
    held = table.table if isinstance(table, LabeledTable) else table
    return held if isinstance(held, FrameTable) else None


def read_at(table: Table) -> str:
    """Return when the records of a table were read; empty where they are read for every answer."""
    inner = table.table if isinstance(table, LabeledTable) else table
    return str(getattr(getattr(inner, "table", inner), "as_of", ""))


def entities_of(table: Table) -> Array:
    """Return the entity of each row, see :class:`FrameTable`; its position if the table is streamed."""
    held = table.table if isinstance(table, LabeledTable) else table
    return held.entities if isinstance(held, FrameTable) else np.arange(held.n_rows)


def plain_columns(table: Table) -> tuple[str, ...]:
    """Columns of a table that hold no curves."""
    curves = table_curves(table)
    return tuple(name for name in table.columns if name not in curves)


def table_curves(table: Table) -> dict[str, CurveArray]:
    """Curves of a table by their names; none where it is streamed."""
    inner = table.table if isinstance(table, LabeledTable) else table
    if not isinstance(inner, FrameTable):
        reported: dict[str, CurveArray] = getattr(
            inner, "curves", {}
        )  # for a table in another process, without rows
        return reported
    kinds = zip(inner.columns, inner.frame.dtypes, strict=True)
    return {name: curves_of(inner.frame[name]) for name, kind in kinds if isinstance(kind, CurveDtype)}


def frame_of(rows: Any) -> pd.DataFrame:
    """Frame of an Arrow table or batch, whose columns are not copied where that can be."""
    frame: pd.DataFrame = rows.to_pandas(ignore_metadata=True, split_blocks=True, types_mapper=_dtype_of)
    return frame


def _dtype_of(arrow_type: Any) -> Any:
    """Keep arrays, and true/false in chunks with missing values what it is in the others; else None."""
    if str(arrow_type).startswith(("list<", "large_list<", "fixed_size_list<")):
        return pd.ArrowDtype(arrow_type)
    return pd.BooleanDtype() if str(arrow_type) == "bool" else None


def check_columns(held: Sequence[str], request: Sequence[str], where: str = "the table") -> None:
    """Require that a table has the requested columns."""
    absent = [name for name in request if name not in held]
    if absent:
        raise DesignError(
            f"{where} has no column {', '.join(map(repr, absent))}. Check the spelling in the formula."
        )


def rows_only(n_rows: int, rows_per_chunk: int) -> Iterator[pd.DataFrame]:
    """Frames of rows without a column: a formula without one still asks how many rows there are."""
    for start in range(0, n_rows, rows_per_chunk):
        yield pd.DataFrame(index=pd.RangeIndex(min(rows_per_chunk, n_rows - start)))
