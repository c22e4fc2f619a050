"""Sources of a site's records: data frames, text files, Parquet files and database queries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import narwhals as nw
import numpy as np
import pandas as pd
from narwhals.typing import IntoDataFrame

from fedstat.codec import from_plain
from fedstat.errors import PartitionError
from fedstat.federation.files import read_private
from fedstat.federation.tables import checks as check
from fedstat.federation.tables.checks import name_problems, raise_problems, site_problems
from fedstat.federation.tables.columns import HeldTable, arrow_kind, kind, object_kind
from fedstat.federation.tables.curve_columns import CurveTable, LongCurve, with_curves
from fedstat.federation.tables.curves import Curve
from fedstat.federation.tables.database import SECONDS, open_database
from fedstat.federation.tables.sql_table import MEGABYTES, SqlTable
from fedstat.federation.tables.table import NO_PYARROW, Conversion, FrameTable, ParquetTable, Table
from fedstat.federation.tables.text_files import (
    NA_VALUES,
    PANDAS_OPTIONS,
    Proposal,
    TextFormat,
    UnreadableTextError,
    read_text,
)
from fedstat.typing import Ints

# ----------------------------------------------------------------------------------------------------
# From tables and files of any kind to pandas frames.

T = TypeVar("T")
StreamedT = TypeVar("StreamedT", ParquetTable, SqlTable)
IntoTable: TypeAlias = IntoDataFrame | FrameTable | ParquetTable | SqlTable | CurveTable
TableReader: TypeAlias = Callable[[Path, TextFormat, Any], pd.DataFrame]


def to_pandas(where: str, table: IntoTable) -> pd.DataFrame:
    """Return a pandas frame unchanged, and convert any other table in memory."""
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


def advise_analyst(found: Proposal) -> str:
    """Return what an analyst can do about a file that cannot be read."""
    if not found.entries:
        return "Check its separator, encoding and `dtype`, or read it yourself and use from_frames."
    options = ", ".join(f"{PANDAS_OPTIONS[name]}={value!r}" for name, value in found.entries.items())
    return f"Read it by  pandas.read_csv(path, {options})  and use from_frames."


def advise_owner(found: Proposal) -> str:
    """Return what the owner of a site can do about a file that cannot be read."""
    if not found.entries:
        return "Correct the file, or export it again."
    return f"Write  {found.text}  under [data] in site.toml; 'fedstat site describe FOLDER' does it."


def read_table(
    client: str,
    path: str | Path,
    form: TextFormat,
    dtype: Any,
    advise: Callable[[Proposal], str] = advise_analyst,
) -> pd.DataFrame:
    """Read one site's file into memory, by the ending of its name."""
    reader = _reader_of(client, Path(path))
    return _guarded(client, Path(path), lambda file: reader(file, form, dtype), advise)


def open_table(client: str, path: str | Path, form: TextFormat, dtype: Any) -> pd.DataFrame | ParquetTable:
    """Open one site's file: Parquet is streamed from disk, text is read."""
    if _reader_of(client, Path(path)) is _read_parquet:
        return _guarded(client, Path(path), ParquetTable, advise_analyst)
    return read_table(client, path, form, dtype)


def _reader_of(client: str, file: Path) -> TableReader:
    reader = next((read for end, read in READERS.items() if file.name.lower().endswith(end)), None)
    if reader is None:
        raise PartitionError(f"site {client!r}: expected a file ending in {', '.join(READERS)}: {file}")
    if not file.is_file():
        raise PartitionError(f"site {client!r}: there is no file {file}")
    return reader


def _guarded(client: str, file: Path, read: Callable[[Path], T], advise: Callable[[Proposal], str]) -> T:
    """Read a file; an error describes the problem without quoting it."""
    try:
        return read(file)
    except ImportError as error:
        raise ImportError(NO_PYARROW) from error
    except UnreadableTextError as error:
        problem, found = f": {error}", error.found
    except (ValueError, OSError) as error:
        # the reader's own message may quote a cell of the file
        problem, found = f" ({type(error).__name__})", Proposal()
    raise PartitionError(f"site {client!r}: {file} could not be read{problem}. {advise(found)}")


def _read_parquet(file: Path, form: TextFormat, dtype: Any) -> pd.DataFrame:
    return pd.read_parquet(file)


READERS: dict[str, TableReader] = {
    ".csv": read_text,
    ".csv.gz": read_text,
    ".tsv": read_text,
    ".tsv.gz": read_text,
    ".txt": read_text,
    ".txt.gz": read_text,
    ".parquet": _read_parquet,
}
"""How a file is read into memory, by the ending of its name."""


def named_row_tables(frames: Mapping[str, IntoTable], key: Sequence[str]) -> dict[str, HeldTable]:
    """Tables of the horizontal layout, in memory or streamed, whose columns have names of their own."""
    raise_problems(site_problems(frames))
    kinds = (ParquetTable, SqlTable, CurveTable)
    streamed = {c: table for c, table in frames.items() if isinstance(table, kinds)}
    for client, table in streamed.items():
        # including unused columns of a file, which a reader would have to distinguish
        names = table.schema.names if isinstance(table, ParquetTable) else table.columns
        raise_problems(name_problems(f"site {client!r}", names))
    held = {client: table for client, table in frames.items() if client not in streamed}
    tables = streamed | (named_tables(held, key) if held else {})
    return {client: tables[client] for client in frames}


def named_tables(frames: Mapping[str, IntoTable], key: Sequence[str]) -> dict[str, pd.DataFrame]:
    """All sites' tables as pandas frames with column names of their own."""
    raise_problems(site_problems(frames))
    tables = {c: with_key_columns(to_pandas(f"site {c!r}", frame), key) for c, frame in frames.items()}
    raise_problems(
        line for c, frame in tables.items() for line in name_problems(f"site {c!r}", frame.columns)
    )
    return tables


def named_table(frame: IntoDataFrame, key: Sequence[str]) -> pd.DataFrame:
    """One table as a pandas frame whose columns have names of their own."""
    table = with_key_columns(to_pandas("the table", frame), key)
    raise_problems(name_problems("the table", table.columns))
    return table


# ----------------------------------------------------------------------------------------------------
# Tables of counts, whose rows represent several entities. Only the owner of a table can declare the column of
# their number. The table then has one row for each of them, so that every rule of a policy counts entities. A
# column that an analyst names as weights counts as many rows as there are: a large number in it is no person.

MOST_ENTITIES = 10_000_000
COPY = "number of the entity in its row"
"""Column that distinguishes the entities of a row, which have its key in common."""


def count_problems(where: str, frame: pd.DataFrame, counts: str) -> Iterator[str]:
    """Problems of the column with the number of entities that each row represents."""
    if counts not in frame.columns:
        yield f"{where} has no column {counts!r}, which counts names. Check the spelling."
        return
    column = frame[counts]
    if not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        yield f"{where}, column {counts!r}: counts are whole numbers of entities. Convert the column."
        return
    numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = int((~np.isfinite(numbers) | (numbers < 0.0) | (numbers % 1.0 != 0.0)).sum())
    if wrong:
        yield (
            f"{where}, column {counts!r}: {wrong:,} values are no whole numbers of entities. Correct them; "
            "weights of other kinds belong into var_weights of a model."
        )
    elif numbers.sum() > MOST_ENTITIES:
        yield (
            f"{where}, column {counts!r}: its rows represent more than {MOST_ENTITIES:,} entities, which do "
            "not fit into memory. Leave counts out, and give the column as freq_weights of a model."
        )


def rows_of_counts(where: str, frame: pd.DataFrame, counts: str) -> Ints:
    """Return the row of each entity that a table of counts represents, (n_entities,)."""
    raise_problems(count_problems(where, frame, counts))
    return np.repeat(np.arange(len(frame)), frame[counts].to_numpy(dtype=np.int64))


def one_row_per_entity(where: str, table: IntoTable, counts: str) -> pd.DataFrame:
    """Return a table with one row for each entity, without the column of their number."""
    if isinstance(table, ParquetTable | SqlTable | CurveTable):
        frame = pd.concat(list(table.chunks(table.columns)), ignore_index=True)
    else:
        frame = to_pandas(where, table).reset_index(drop=True)
    rows = rows_of_counts(where, frame, counts)
    return frame.drop(columns=[counts]).take(rows).reset_index(drop=True)


# ----------------------------------------------------------------------------------------------------
# Sources of one site's records: a text file, a Parquet file, or a query to its own database.
#
# The owner of a site writes a :class:`Source`; no message can. A database is asked by
# :mod:`fedstat.federation.tables.database`, which makes sure that it is only read.

TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "numbers": ("numbers", "whole numbers"),
        "whole numbers": ("whole numbers",),
        "text": ("text",),
        "true/false": ("true/false",),
        "dates": ("dates",),
    }
)
"""Declared types of a column, and the types that may then occur in it."""

LONGEST_FILE = 4096
STREAMED = (ParquetTable, SqlTable)


@dataclass(frozen=True, slots=True)
class DeclaredColumn:
    """The declared type of a column.

    Parameters
    ----------
    type : {"numbers", "whole numbers", "text", "true/false", "dates"}
    unit : str
        Such as ``"mg/l"``; compared with the ``unit`` in the metadata of a Parquet column, if it has one.
        Text files and databases have no unit.
    since : str
        Public origin of dates, such as ``"2020-01-01"``: the column holds the days since then.
    codes : mapping of str to str
        Names of the values as the source has them, such as ``{"1" = "male", "2" = "female"}``. Other
        values stay as they are.
    """

    type: str
    unit: str = ""
    since: str = ""
    codes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a site's records are, as its owner describes it.

    Parameters
    ----------
    site : str
        The site; errors begin with it.
    kind : {"csv", "parquet", "sql"}
    path : str
        File, unless the kind is "sql".
    query : str
        One SELECT, or WITH ... SELECT.
    env, file : str
        Name of the environment variable, or private file (mode 0600), with the connection string, such as
        ``postgresql://reader:secret@host/ward``, ``sqlite:////srv/ward.db`` or
        ``duckdb:////srv/ward.duckdb``. The string is stored nowhere else, and is in no message and no error.
    memory : int
        Megabytes of a query's rows that are held in memory; more are kept, sealed, in the site's folder.
    timeout : int
        Seconds that a database may work on one statement.
    key : tuple of str
        Columns that identify entities; no model sees them. A query needs them: its rows are read in their
        order.
    schema : mapping of str to Expected
        Columns that must be there, and what they hold; others may be there too.
    na_values : tuple of str
        How a missing cell of a text file is written.
    separator, decimal, thousands, encoding, skip_lines, date_format
        How a text file is written: see :class:`fedstat.federation.tables.text_files.TextFormat`.
    curves : mapping of str to Curve or LongCurve
        Columns that hold curves, or for a text file long tables of them, by their paths.
    dictionary : mapping of str to DeclaredColumn
        How the dictionary of the study reads columns, unless `schema` declares them.
    counts : str
        Column with the number of entities that a row represents, if the table is one of counts; horizontal
        layout only. The table then has one row for each entity, and does not show the column.

    Raises
    ------
    PartitionError
        The description is not complete, or contradicts itself; all that is wrong is listed.
    """

    site: str
    kind: str
    path: str = ""
    query: str = ""
    env: str = ""
    file: str = ""
    key: tuple[str, ...] = ()
    schema: Mapping[str, DeclaredColumn] = field(default_factory=dict)
    na_values: tuple[str, ...] = NA_VALUES
    separator: str = ""
    decimal: str = ""
    thousands: str = ""
    encoding: str = ""
    skip_lines: int | None = None
    date_format: str = ""
    memory: int = MEGABYTES
    timeout: int = SECONDS
    curves: Mapping[str, Curve | LongCurve] = field(default_factory=dict)
    dictionary: Mapping[str, DeclaredColumn] = field(default_factory=dict)
    counts: str = ""

    def __post_init__(self) -> None:
        check.raise_problems(_description_problems(self))

    @classmethod
    def from_mapping(cls, site: str, description: Mapping[str, Any]) -> Source:
        """Read a description, such as a table of a TOML file.

        It holds the parameters of :class:`Source` besides `site`. ``key`` may be one name; an entry of
        ``schema`` is a type, or a mapping with ``type`` and ``unit``. PartitionError as :class:`Source`, or
        where an entry is unknown or of another type.
        """
        known = [part.name for part in fields(cls) if part.name not in ("site", "dictionary")]
        # only names are shown: the value of an unknown entry may be a misplaced connection string
        if unknown := sorted(map(repr, description.keys() - set(known))):
            raise PartitionError(
                f"{site}: its source has unknown entries {', '.join(unknown)}; known are {', '.join(known)}. "
                "A connection string or password belongs into the environment variable that env names, or "
                "the file that file names."
            )
        given: dict[str, Any] = {n: list(v) if isinstance(v, tuple) else v for n, v in description.items()}
        key, schema = given.get("key"), given.get("schema")
        if isinstance(key, str | list):
            given["key"] = list(check.key_names(key))
        if isinstance(schema, Mapping):
            given["schema"] = {n: {"type": v} if isinstance(v, str) else v for n, v in schema.items()}
        return from_plain(cls, {"site": site, **given}, f"{site}: its source", PartitionError, defaults=True)

    @property
    def text_format(self) -> TextFormat:
        """How a text file is written."""
        return TextFormat(**{part.name: getattr(self, part.name) for part in fields(TextFormat)})

    @property
    def units(self) -> dict[str, str]:
        """Unit of each column that declares one."""
        return {name: column.unit for name, column in self.schema.items() if column.unit}


def open_source(source: Source, folder: Path | None = None) -> Table:
    """Open a site's records without their key, as the table of a site in the horizontal layout.

    Parquet files are streamed: what they need in memory is one chunk. The rows of a query are read once, and
    kept, sealed, in the site's folder where they are many. A text file is held in memory; write one that is
    too large for it to Parquet. PartitionError where the records are not there,
    cannot be read, or are not what the schema declares, or the query is one that writes; SecurityError where
    others may read the file with the connection string; ImportError names the extra that is not installed.
    """
    entities = {curve.entity for curve in source.curves.values() if isinstance(curve, LongCurve)}
    key = [name for name in source.key if name not in entities]
    table = SOURCE_KINDS[source.kind].open(source, key, folder)
    if source.counts:
        table = _one_row_per_entity(source, table)
    if isinstance(table, FrameTable) and source.curves:
        curves = FrameTable(with_curves(source.site, table.frame, source.curves))
        curves.key_columns = table.key_columns
        return curves
    return (
        CurveTable(source.site, table, source.curves)
        if isinstance(table, STREAMED) and source.curves
        else table
    )


def _one_row_per_entity(source: Source, table: Any) -> FrameTable:
    made = FrameTable(one_row_per_entity(source.site, table, source.counts))
    keys = getattr(table, "key_columns", None)
    if keys is not None:
        rows = rows_of_counts(source.site, table.frame, source.counts)
        copies = pd.Series(rows).groupby(rows).cumcount()
        made.key_columns = (
            keys.reset_index(drop=True).take(rows).reset_index(drop=True).assign(**{COPY: copies})
        )
    return made


def read_source(source: Source, folder: Path | None = None) -> pd.DataFrame:
    """Read a site's records into memory, (n_rows, p) with the key, to be linked to those of others."""
    table = SOURCE_KINDS[source.kind].open(source, (), folder)
    return pd.concat(list(table.chunks(table.columns)), ignore_index=True)


def _connection(source: Source) -> tuple[str, str]:
    """Address of a site's database, from where its owner put it, and where that is."""
    if source.env:
        text, where = os.environ.get(source.env, ""), f"the environment variable {source.env}"
    else:
        text, where = _private_text(source), f"the file '{source.file}'"
    if not text.strip():
        raise PartitionError(
            f"{source.site}: expected the connection string of its database in {where}, which is absent or "
            "empty. Put it there, for instance postgresql://user:password@host/database"
        )
    # an editor ends a file with a line break, which no driver takes
    return text.strip(), where


def _private_text(source: Source) -> str:
    try:
        remedy = ", and change the password if somebody may have read it"
        content = read_private(source.file, LONGEST_FILE, f"{source.site}: ", remedy)
        return content.decode("utf-8", "replace")
    except OSError:
        return ""


def _open_in_memory(source: Source, leave_out: Sequence[str], folder: Path | None) -> FrameTable:
    # declared text keeps its leading zeros; all else is read as what it looks like, and then checked
    declared = {**source.dictionary, **source.schema}
    dtype = {name: "str" for name, column in declared.items() if column.type == "text"}
    frame = read_table(source.site, source.path, source.text_format, dtype, advise_owner)
    check.raise_problems(check.name_problems(source.site, frame.columns))
    _check_present(source, frame.columns)
    declared = {name: column for name, column in declared.items() if name in frame.columns}
    for name, column in declared.items():
        if column.type == "dates" and kind(frame[name]) == "text":
            dates = pd.to_datetime(frame[name], format="ISO8601", errors="coerce")
            # all or none: a text that is no date is then found to be text, and refused
            if dates.notna().sum() == frame[name].notna().sum():
                frame[name] = dates
    check.raise_problems(check.unfit_key_problems(source.site, frame, source.key) if source.key else ())
    _check_schema(replace(source, schema=declared), lambda name: _kind_in_memory(frame[name]))
    for name, one in _conversions(declared, lambda name: kind(frame[name])).items():
        frame[name] = one.convert(frame[name])
    table = FrameTable(frame.drop(columns=list(leave_out)))
    table.key_columns = frame[list(source.key)] if source.key else None
    return table


def _conversions(
    declared: Mapping[str, DeclaredColumn], kind_of: Callable[[str], str | None]
) -> dict[str, Conversion]:
    """Return how columns with dates become days, and codes get their names."""
    found: dict[str, Conversion] = {}
    for name, column in declared.items():
        if column.since and kind_of(name) == "dates":
            found[name] = Conversion("numbers", partial(_days_since, since=column.since))
        elif column.codes:
            found[name] = Conversion("text", partial(_named_codes, codes=column.codes))
    return found


def _days_since(column: pd.Series[Any], since: str) -> pd.Series[Any]:
    dates = pd.to_datetime(column, utc=isinstance(column.dtype, pd.DatetimeTZDtype))
    zoneless = dates.dt.tz_localize(None) if isinstance(dates.dtype, pd.DatetimeTZDtype) else dates
    return (zoneless - pd.Timestamp(since)) / pd.Timedelta(days=1)


def _named_codes(column: pd.Series[Any], codes: Mapping[str, str]) -> pd.Series[Any]:
    """Replace codes by their names; a number is compared by its shortest written form."""
    column = column.astype(object)
    written = column.map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))
    named = written.map(codes)
    return named.where(named.notna(), written).where(column.notna(), None)


def _open_parquet(source: Source, leave_out: Sequence[str], folder: Path | None) -> ParquetTable:
    if not Path(source.path).is_file():
        raise PartitionError(f"{source.site}: there is no file {source.path}")
    problem = ""
    try:
        table = ParquetTable(source.path, leave_out=leave_out)
    except (ValueError, OSError) as error:
        problem = type(error).__name__
    if problem:
        raise PartitionError(f"{source.site}: {source.path} could not be read as Parquet ({problem})")
    check.raise_problems(check.name_problems(source.site, table.schema.names))
    _check_present(source, table.schema.names)
    _check_schema(source, lambda name: _kind_in_file(table, name))
    check.raise_problems(_unit_problems(source, table))
    return _with_declared(source, table)


def _open_sql(source: Source, leave_out: Sequence[str], folder: Path | None) -> SqlTable:
    database = open_database(source.site, *_connection(source), source.timeout)
    table = SqlTable(
        source.site,
        database,
        source.query,
        source.key,
        leave_out=leave_out,
        memory=source.memory,
        folder=folder,
    )
    _check_present(source, tuple(table.kinds))
    _check_schema(source, table.kinds.__getitem__)
    return _with_declared(source, table)


def _with_declared(source: Source, table: StreamedT) -> StreamedT:
    """Convert the declared columns of a streamed table, as far as it has them."""
    declared = {n: one for n, one in {**source.dictionary, **source.schema}.items() if n in table.columns}
    table.conversions |= _conversions(declared, lambda name: object_kind(table, name))
    return table


@dataclass(frozen=True, slots=True)
class SourceKind:
    """How records of a kind are opened, what to do about a wrong type, and how the names of files end."""

    open: Callable[[Source, Sequence[str], Path | None], Table]
    remedy: str
    endings: tuple[str, ...] = ()


TEXT = "csv"
"""Kind of text files."""
SOURCE_KINDS: Mapping[str, SourceKind] = MappingProxyType(
    {
        TEXT: SourceKind(
            _open_in_memory,
            "say under [data] how missing cells, decimals and dates are written (na_values, decimal, "
            "date_format), correct the file, or declare what is there",
            tuple(end for end, reader in READERS.items() if reader is read_text),
        ),
        "parquet": SourceKind(
            _open_parquet, "write the file again with this type, or declare what is there", (".parquet",)
        ),
        "sql": SourceKind(_open_sql, "convert it in the query (CAST), or declare what is there"),
    }
)
"""The kinds of sources; without endings, a query to a database."""


def kind_of_file(path: str) -> str:
    """Kind of the source that a file can be; "csv" where no ending fits, whose errors then name them."""
    return next((name for name, kind in SOURCE_KINDS.items() if path.lower().endswith(kind.endings)), TEXT)


def _description_problems(source: Source) -> Iterator[str]:
    where = f"{source.site}: its source"
    if source.kind not in SOURCE_KINDS:
        yield f"{where} is of kind {source.kind!r}; expected one of {', '.join(map(repr, SOURCE_KINDS))}."
    elif not (endings := SOURCE_KINDS[source.kind].endings):
        yield from _query_problems(where, source)
    else:
        if not source.path.lower().endswith(endings):
            yield f"{where} of kind {source.kind!r} needs a path that ends in {', '.join(endings)}."
        if source.query or source.env or source.file:
            yield f"{where} of kind {source.kind!r} takes no query, env or file; those are for kind 'sql'."
    yield from (f"{where}: {problem}" for problem in source.text_format.problems())
    of_text = replace(source.text_format, na_values=NA_VALUES).given
    if of_text and source.kind in SOURCE_KINDS and source.kind != TEXT:
        yield f"{where} of kind {source.kind!r}: {', '.join(of_text)} are for text files."
    for name, column in source.schema.items():
        if column.type not in TYPES:
            yield (
                f"{source.site}, column {name!r}: its declared type is unknown; expected one of "
                f"{', '.join(map(repr, TYPES))}."
            )
        if column.since and not (column.type == "dates" and _is_date(column.since)):
            yield (
                f'{source.site}, column {name!r}: since needs type = "dates" and a date such as "2020-01-01".'
            )


def _is_date(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def _query_problems(where: str, source: Source) -> Iterator[str]:
    if not source.query.strip() or source.path:
        yield f"{where} of kind 'sql' takes a query, and no path."
    if bool(source.env) == bool(source.file):
        yield (
            f"{where} needs to know where the connection string is: give env='NAME_OF_A_VARIABLE' or "
            "file='a private file', and not both."
        )
    if source.memory < 0 or source.timeout < 1:
        yield f"{where}: expected megabytes of 'memory' from 0, and seconds of 'timeout' from 1."
    if not source.key:
        yield (
            f"{where} needs a key: the rows of a query have no fixed order, and are read in the order of "
            "the key. Name the columns that identify entities."
        )


def _check_present(source: Source, names: Sequence[str] | pd.Index[Any]) -> None:
    absent = [name for name in dict.fromkeys((*source.key, *source.schema)) if name not in names]
    if absent:
        raise PartitionError(
            f"{source.site}: its records have no column {', '.join(map(repr, absent))}, which its source "
            f"declares. They have {', '.join(map(repr, names))}."
        )


def _check_schema(source: Source, kind_of: Callable[[str], str | None]) -> None:
    """Compare the columns with their declarations; a column without a value may have any type."""
    lines = []
    for name, column in source.schema.items():
        found = kind_of(name)
        if found is not None and found not in TYPES[column.type]:
            lines.append(
                f"{source.site}, column {name!r}: expected {column.type}, found {found}. "
                f"Remedy: {SOURCE_KINDS[source.kind].remedy}."
            )
    check.raise_problems(lines)


def _kind_in_memory(column: pd.Series[Any]) -> str | None:
    present = column.dropna()
    if present.empty:
        return None
    found = kind(column)
    # integers with missing cells are read as decimals
    return "whole numbers" if found == "numbers" and bool((present % 1 == 0).all()) else found


def _kind_in_file(table: ParquetTable, name: str) -> str | None:
    arrow_type = table.schema.field(name).type
    found = arrow_kind(arrow_type)
    complete = found == "numbers" and "int" in str(arrow_type)
    return "whole numbers" if complete else found


def _unit_problems(source: Source, table: ParquetTable) -> Iterator[str]:
    for name, unit in source.units.items():
        stored = (table.schema.field(name).metadata or {}).get(b"unit", b"").decode("utf-8", "replace")
        if stored and stored != unit:
            yield (
                f"{source.site}, column {name!r}: expected the unit {unit!r}, found {stored!r}. Remedy: "
                "convert the column, or declare the unit that is there."
            )
