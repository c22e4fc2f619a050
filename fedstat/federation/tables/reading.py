"""From tables and files of any kind to pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import narwhals as nw
import pandas as pd
from narwhals.typing import IntoDataFrame

from fedstat.errors import PartitionError
from fedstat.federation.tables.checks import client_problems, name_problems, refuse
from fedstat.federation.tables.curves.streamed import CurveTable
from fedstat.federation.tables.kinds import HeldTable
from fedstat.federation.tables.sql import SqlTable
from fedstat.federation.tables.table import NO_PYARROW, FrameTable, ParquetTable

NA_VALUES = ("", "NA", "NaN")
T = TypeVar("T")
IntoTable: TypeAlias = IntoDataFrame | FrameTable | ParquetTable | SqlTable | CurveTable
Reader: TypeAlias = Callable[[Path, Sequence[str], Any], pd.DataFrame]


def to_pandas(where: str, table: IntoTable) -> pd.DataFrame:
    """Hand back a pandas frame as it is, and convert any other table in memory."""
    if isinstance(table, pd.DataFrame):
        return table
    if isinstance(table, FrameTable):
        return table.frame
    if isinstance(table, ParquetTable | SqlTable | CurveTable):
        raise PartitionError(
            f"{where}: a streamed table needs layout='horizontal'. Read it with pandas first to link it by a "
            "key."
        )
    try:
        return nw.from_native(table, eager_only=True).to_pandas()
    except TypeError:
        raise PartitionError(
            f"{where}: expected a pandas, polars or pyarrow table, received {type(table).__name__}. "
            "A lazy table must be collected first."
        ) from None
    except ModuleNotFoundError as error:
        raise ImportError(
            "this kind of table is converted by pyarrow: pip install fedstat[parquet]"
        ) from error


def with_key_columns(frame: pd.DataFrame, key: Sequence[str]) -> pd.DataFrame:
    """Make columns of a key that came as the frame's index."""
    in_index = [name for name in key if name in frame.index.names and name not in frame.columns]
    return frame.reset_index(level=in_index) if in_index else frame


def read_table(client: str, path: str | Path, na_values: Sequence[str], dtype: Any) -> pd.DataFrame:
    """Read one institution's file by the ending of its name, into memory."""
    reader = _reader_of(client, Path(path))
    return _guarded(client, Path(path), lambda file: reader(file, na_values, dtype))


def open_table(
    client: str, path: str | Path, na_values: Sequence[str], dtype: Any
) -> pd.DataFrame | ParquetTable:
    """Open one institution's file: Parquet is left where it is and streamed, text is read."""
    if _reader_of(client, Path(path)) is _read_parquet:
        return _guarded(client, Path(path), ParquetTable)
    return read_table(client, path, na_values, dtype)


def _reader_of(client: str, file: Path) -> Reader:
    reader = next((read for end, read in READERS.items() if file.name.lower().endswith(end)), None)
    if reader is None:
        raise PartitionError(
            f"institution {client!r}: expected a file ending in {', '.join(READERS)}: {file}"
        )
    if not file.is_file():
        raise PartitionError(f"institution {client!r}: there is no file {file}")
    return reader


def _guarded(client: str, file: Path, read: Callable[[Path], T]) -> T:
    """Read a file, and tell what went wrong without quoting it."""
    try:
        return read(file)
    except ImportError as error:
        raise ImportError(NO_PYARROW) from error
    except (ValueError, OSError) as error:
        # the reader's own message may quote a cell of the file
        kind = type(error).__name__
    raise PartitionError(
        f"institution {client!r}: {file} could not be read ({kind}). Check its separator, encoding and "
        "`dtype`, or read it yourself and use from_frames."
    )


def _text_reader(separator: str) -> Reader:
    """Reader of text files; it takes whole columns to tell their types."""

    def read(file: Path, na_values: Sequence[str], dtype: Any) -> pd.DataFrame:
        # pandas' own list of missing cells also holds "None" and "null", which are levels in many surveys
        missing: dict[str, Any] = {"na_values": list(na_values), "keep_default_na": False}
        frame: pd.DataFrame = pd.read_csv(file, sep=separator, dtype=dtype, low_memory=False, **missing)
        return frame

    return read


def _read_parquet(file: Path, na_values: Sequence[str], dtype: Any) -> pd.DataFrame:
    return pd.read_parquet(file)


READERS: dict[str, Reader] = {
    ".csv": _text_reader(","),
    ".csv.gz": _text_reader(","),
    ".tsv": _text_reader("\t"),
    ".tsv.gz": _text_reader("\t"),
    ".parquet": _read_parquet,
}
"""How a file is read into memory, by the ending of its name."""


def named_row_tables(frames: Mapping[str, IntoTable], key: Sequence[str]) -> dict[str, HeldTable]:
    """Tables of the horizontal layout, in memory or streamed, whose columns have names of their own."""
    refuse(client_problems(frames))
    kinds = (ParquetTable, SqlTable, CurveTable)
    streamed = {c: table for c, table in frames.items() if isinstance(table, kinds)}
    for client, table in streamed.items():
        # of a file also the columns that are left out, which a reader would have to tell apart
        names = table.schema.names if isinstance(table, ParquetTable) else table.columns
        refuse(name_problems(f"institution {client!r}", names))
    held = {client: table for client, table in frames.items() if client not in streamed}
    tables = streamed | (named_tables(held, key) if held else {})
    return {client: tables[client] for client in frames}


def named_tables(frames: Mapping[str, IntoTable], key: Sequence[str]) -> dict[str, pd.DataFrame]:
    """All institutions' tables as pandas frames whose columns have names of their own."""
    refuse(client_problems(frames))
    tables = {c: with_key_columns(to_pandas(f"institution {c!r}", frame), key) for c, frame in frames.items()}
    refuse(line for c, frame in tables.items() for line in name_problems(f"institution {c!r}", frame.columns))
    return tables


def named_table(frame: IntoDataFrame, key: Sequence[str]) -> pd.DataFrame:
    """One table as a pandas frame whose columns have names of their own."""
    table = with_key_columns(to_pandas("the table", frame), key)
    refuse(name_problems("the table", table.columns))
    return table
