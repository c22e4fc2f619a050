"""From tables and files of any kind to pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import narwhals as nw
import pandas as pd
from narwhals.typing import IntoDataFrame

from fedstat.errors import PartitionError
from fedstat.federation.partition_check import client_problems, name_problems, refuse

NA_VALUES = ("", "NA", "NaN")


def to_pandas(where: str, table: IntoDataFrame) -> pd.DataFrame:
    """Hand back a pandas frame as it is, and convert any other table.

    Raises
    ------
    PartitionError
        If the object is not a table in memory.
    ImportError
        If a polars table cannot be converted because pyarrow is not installed.
    """
    if isinstance(table, pd.DataFrame):
        return table
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
    """One client's file, read by the ending of its name.

    Raises
    ------
    PartitionError
        If the file is absent, of an unknown kind, or not readable.
    ImportError
        If it is a Parquet file and pyarrow is not installed.
    """
    file = Path(path)
    reader = next((read for end, read in READERS.items() if file.name.lower().endswith(end)), None)
    if reader is None:
        raise PartitionError(f"client {client!r}: expected a file ending in {', '.join(READERS)}: {file}")
    if not file.is_file():
        raise PartitionError(f"client {client!r}: there is no file {file}")
    try:
        return reader(file, na_values, dtype)
    except ImportError as error:
        raise ImportError("Parquet files are read by pyarrow: pip install fedstat[parquet]") from error
    except (ValueError, OSError) as error:
        # the reader's own message may quote a cell of the file
        kind = type(error).__name__
    raise PartitionError(
        f"client {client!r}: {file} could not be read ({kind}). Check its separator, encoding and `dtype`, "
        "or read it yourself and use from_frames."
    )


def _csv_options(na_values: Sequence[str], dtype: Any) -> dict[str, Any]:
    # pandas' own list of missing cells also holds "None" and "null", which are levels in many surveys
    return {"na_values": list(na_values), "keep_default_na": False, "dtype": dtype, "low_memory": False}


def _read_csv(file: Path, na_values: Sequence[str], dtype: Any) -> pd.DataFrame:
    frame: pd.DataFrame = pd.read_csv(file, **_csv_options(na_values, dtype))
    return frame


def _read_tsv(file: Path, na_values: Sequence[str], dtype: Any) -> pd.DataFrame:
    frame: pd.DataFrame = pd.read_csv(file, sep="\t", **_csv_options(na_values, dtype))
    return frame


def _read_parquet(file: Path, na_values: Sequence[str], dtype: Any) -> pd.DataFrame:
    return pd.read_parquet(file)


READERS: dict[str, Callable[[Path, Sequence[str], Any], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".tsv": _read_tsv,
    ".tsv.gz": _read_tsv,
    ".parquet": _read_parquet,
}


def named_tables(frames: Mapping[str, IntoDataFrame], key: Sequence[str]) -> dict[str, pd.DataFrame]:
    """All clients' tables as pandas frames whose columns have names of their own."""
    refuse(client_problems(frames))
    tables = {c: with_key_columns(to_pandas(f"client {c!r}", frame), key) for c, frame in frames.items()}
    refuse(line for c, frame in tables.items() for line in name_problems(f"client {c!r}", frame))
    return tables


def named_table(frame: IntoDataFrame, key: Sequence[str]) -> pd.DataFrame:
    """One table as a pandas frame whose columns have names of their own."""
    table = with_key_columns(to_pandas("the table", frame), key)
    refuse(name_problems("the table", table))
    return table
