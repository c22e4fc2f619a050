"""Columns of a table: their kinds, and their values as float64 numbers or categories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import DesignError
from fedstat.federation.tables.checks import all_finite, control_problems, count_infinite
from fedstat.federation.tables.curve_columns import CurveTable
from fedstat.federation.tables.curves import CurveDtype
from fedstat.federation.tables.sql_table import OTHER, SqlTable
from fedstat.federation.tables.table import FrameTable, LabeledTable, ParquetTable, Table, plain_columns
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Kinds of the columns of a table, recognized by their types.

HeldTable: TypeAlias = pd.DataFrame | ParquetTable | SqlTable | CurveTable

CURVES = "curves"
WHOLE = {"whole numbers": "numbers"}
OBJECT_KINDS = {
    "string": "text",
    "boolean": "true/false",
    "integer": "numbers",
    "floating": "numbers",
    "mixed-integer-float": "numbers",
    "decimal": "numbers",
    "datetime64": "dates",
    "datetime": "dates",
    "date": "dates",
}


def kind_problems(tables: Mapping[str, HeldTable], name: str) -> Iterator[str]:
    """One line if a column that all tables have holds something else at one site than at another.

    For a streamed table only the types are read, not the rows.
    """
    kinds = {site: kind for site, table in tables.items() if (kind := object_kind(table, name)) is not None}
    if len(set(kinds.values())) > 1:
        # a column without a value is read as numbers, whatever it would hold
        kinds = {site: kind for site, kind in kinds.items() if not _has_no_value(tables[site], name)}
    for a, b in pairwise(kinds):
        if kinds[a] != kinds[b]:
            yield (
                f"column {name!r} holds {kinds[a]} at site {a!r} and {kinds[b]} at site {b!r}. "
                "Convert it at one of them, or drop it there."
            )
            return


def text_problems(where: str, table: Table) -> Iterator[str]:
    """Problems of characters in the names and texts of a table; texts of a streamed one are read once."""
    yield from control_problems(where, "names of columns", table.columns)
    for name in _text_columns(table):
        texts: set[object] = set()
        for chunk in table.chunks([name]):
            column = chunk[name]
            held = column.cat.categories if isinstance(column.dtype, pd.CategoricalDtype) else column
            if pd.api.types.is_object_dtype(held.dtype) or pd.api.types.is_string_dtype(held.dtype):
                texts.update(one for one in _different_values(held) if isinstance(one, str))
        yield from control_problems(f"{where}, column {name!r}", "values", texts)


def _different_values(column: pd.Series[Any] | pd.Index[Any]) -> list[object]:
    try:
        return column.unique().tolist()
    except TypeError:  # lists cannot be compared by their hashes
        return column.tolist()


def _text_columns(table: Table) -> list[str]:
    """Return the columns that can hold text, by their types."""
    if isinstance(table, LabeledTable):
        return [name for name in _text_columns(table.table) if name != table.name]
    if isinstance(table, FrameTable):
        kinds = zip(table.columns, table.frame.dtypes, strict=True)
        # Numbers, truth values and times of numpy are no text.
        other = {name: kind for name, kind in kinds if not isinstance(kind, np.dtype) or kind.kind == "O"}
        return [name for name, kind in other.items() if not isinstance(kind, CurveDtype)]
    streamed = inner_table(table) if isinstance(table, CurveTable) else table
    names = plain_columns(table)
    if not isinstance(streamed, ParquetTable | SqlTable):
        return list(names)
    return [name for name in names if object_kind(streamed, name) in (None, "text")]


def object_kind(table: HeldTable, name: str) -> str | None:
    """Say what a column holds; None where there is nothing to judge by."""
    if isinstance(table, CurveTable):
        return CURVES if name in table.curves else object_kind(inner_table(table), name)
    if isinstance(table, ParquetTable | SqlTable) and name in table.conversions:
        return table.conversions[name].kind
    if isinstance(table, ParquetTable):
        return arrow_kind(table.schema.field(name).type)
    if isinstance(table, SqlTable):
        return WHOLE.get(str(table.kinds[name]), table.kinds[name])
    return kind(table[name])


def inner_table(table: CurveTable) -> ParquetTable | SqlTable:
    """Table below one with curves."""
    if not isinstance(table.table, ParquetTable | SqlTable):
        raise TypeError("curves are streamed from Parquet files and queries")
    return table.table


def kind(column: pd.Series[Any]) -> str | None:
    """Say what a column in memory holds."""
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _as_categories(kind(pd.Series(dtype.categories)))
    if isinstance(dtype, CurveDtype):
        return CURVES
    # before numbers, among which pandas counts true/false
    if pd.api.types.is_bool_dtype(dtype):
        return "true/false"
    if pd.api.types.is_numeric_dtype(dtype):
        return "numbers"
    if pd.api.types.is_datetime64_any_dtype(dtype):
        return "dates"
    if not pd.api.types.is_object_dtype(dtype) and pd.api.types.is_string_dtype(dtype):
        return "text"
    inferred = pd.api.types.infer_dtype(column, skipna=True)
    return None if inferred == "empty" else OBJECT_KINDS.get(inferred, OTHER)


def arrow_kind(arrow_type: Any) -> str | None:
    """Say what a column of a Parquet file holds."""
    from pyarrow import types  # noqa: PLC0415

    if types.is_dictionary(arrow_type):
        return _as_categories(arrow_kind(arrow_type.value_type))
    if types.is_null(arrow_type):
        return None
    if str(arrow_type) in ("string", "large_string", "string_view"):
        return "text"
    by_kind = {
        "true/false": (types.is_boolean,),
        "numbers": (types.is_integer, types.is_floating, types.is_decimal),
        "dates": (types.is_date, types.is_timestamp),
    }
    found = (kind for kind, tests in by_kind.items() if any(test(arrow_type) for test in tests))
    return next(found, OTHER)


def _as_categories(kind: str | None) -> str | None:
    """Text is text, also where it is stored as categories; categories of numbers are no numbers."""
    return kind if kind in (None, "text") else f"{kind} as categories"


def _has_no_value(table: HeldTable, name: str) -> bool:
    return isinstance(table, pd.DataFrame) and bool(table[name].isna().all())


# ----------------------------------------------------------------------------------------------------
# The columns of one site in two forms: float64 numbers and categories.

LevelValue: TypeAlias = str | int | float | bool
ColumnKind: TypeAlias = Literal["number", "category"]

MAX_SHOWN = 10

_FORMS: Mapping[str, ColumnKind] = {"numbers": "number", "text": "category", "true/false": "category"}
"""Form in a design of each kind of column in :mod:`fedstat.federation.tables.columns`."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of the n_seen entities: float64 `numbers`, and `categories` with their agreed levels."""

    numbers: Mapping[str, Floats]
    categories: Mapping[str, pd.Categorical]


def at_column(client: str, column: str) -> str:
    """Return the location: the column and, unless it is empty, the site."""
    return f"column {column!r}" + (f" at site {client!r}" if client else "")


TEXT_OF_NUMBERS = (
    "Its values are text that reads as numbers: convert it at its source, with decimal points for commas, "
    "for example by pd.to_numeric"
)
MOST_WORDS = 0.1
"""Share of levels that need not read as numbers, such as "unknown" or "<5"."""


def reads_as_numbers(levels: Sequence[LevelValue]) -> bool:
    """Whether nearly all of many levels are text that reads as a number, with a decimal point or comma."""
    texts = [level.strip().replace(",", ".") for level in levels if isinstance(level, str)]
    if len(texts) <= MAX_SHOWN:
        return False
    read = pd.to_numeric(pd.Series(texts), errors="coerce").notna()
    return bool(read.mean() >= 1.0 - MOST_WORDS)


def pick_columns(frame: pd.DataFrame, names: Iterable[str], client: str) -> dict[str, pd.Series]:
    """Return series by name; DesignError if a column is absent or occurs twice in the table."""
    picked = {}
    held = frame.columns.tolist()
    for name in names:
        count = held.count(name)
        if count != 1:
            found = "not in its table" if count == 0 else f"{count} times in its table"
            raise DesignError(f"{at_column(client, name)}: expected once, {found}; rename or add the column.")
        picked[name] = frame[name]
    return picked


def column_kind(series: pd.Series, client: str, name: str) -> ColumnKind:
    """Separate numbers from categories (also text and true/false); refuse other types, such as dates."""
    dtype = series.dtype
    if dtype.kind in "iuf":
        return "number"
    if isinstance(dtype, CurveDtype):
        raise DesignError(
            f"{at_column(client, name)} holds curves, which FedFunctionBoost takes and this model does not"
        )
    # before numbers, among which pandas counts true/false
    if isinstance(dtype, pd.CategoricalDtype) or pd.api.types.is_bool_dtype(dtype):
        return "category"
    if pd.api.types.is_complex_dtype(dtype):
        raise _unsupported(client, name, str(dtype))
    if pd.api.types.is_numeric_dtype(dtype):
        return "number"
    if not (pd.api.types.is_object_dtype(dtype) or pd.api.types.is_string_dtype(dtype)):
        raise _unsupported(client, name, str(dtype))
    inferred = pd.api.types.infer_dtype(series, skipna=True)
    if inferred == "empty":
        raise DesignError(f"{at_column(client, name)} has no value in any of its rows. Leave it out.")
    form = _FORMS.get(OBJECT_KINDS.get(inferred, ""))
    if form is None:
        raise _unsupported(client, name, f"{dtype} ({inferred})")
    return form


def as_numbers(series: pd.Series, client: str, name: str) -> Floats:
    """Column as float64 numbers (n,), NaN where missing; infinite ones are refused, and only counted."""
    values: Floats = series.to_numpy(dtype=np.float64, na_value=np.nan)
    if infinite := count_infinite(values):
        raise DesignError(
            f"{at_column(client, name)} has {infinite:,} infinite value(s) among {len(values):,}; expected "
            "finite numbers. Correct them or set them to missing."
        )
    return values


def read_numbers(series: pd.Series) -> Floats:
    """Return the column as float64 numbers (n,), NaN for a value that is not a number, without an error.

    Each value is read separately: one text value in a file turns a complete column into text, and would
    otherwise change all other values.
    """
    if pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_complex_dtype(series):
        return series.to_numpy(dtype=np.float64, na_value=np.nan)
    return np.array([_number(x) for x in series.to_numpy(dtype=object)], dtype=np.float64)


def read_days(series: pd.Series) -> Floats:
    """Return dates as days since 1970-01-01, (n,), NaN for others; numbers are such days already."""
    if pd.api.types.is_numeric_dtype(series):
        return read_numbers(series)
    dates = pd.to_datetime(series, errors="coerce", utc=True, format="mixed")
    days = (dates.dt.tz_localize(None) - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    return np.floor(days.to_numpy(dtype=np.float64, na_value=np.nan))


def read_codes(series: pd.Series, levels: Sequence[LevelValue]) -> Ints:
    """Return the position of every value among levels, (n,), -1 for others; as :func:`read_numbers`.

    Numbers and their text are the same level, unless two levels are the same number.
    """
    place: dict[object, int] = {level: i for i, level in enumerate(levels)}
    place = {str(level): i for level, i in place.items() if isinstance(level, bool)} | place
    numbers = [_number(level) for level in levels]
    by_number = {x: i for i, x in enumerate(numbers) if not math.isnan(x) and numbers.count(x) == 1}

    def code(value: object) -> int:
        return place.get(value, by_number.get(_number(value), -1))

    held: Array
    if isinstance(series.dtype, np.dtype) and series.dtype.kind in "iufb":
        held = series.to_numpy()
    else:
        cells = (x if isinstance(x, _CELLS) else None for x in series.to_numpy(dtype=object))
        held = np.fromiter(cells, dtype=object, count=len(series))
    codes, found = pd.factorize(held)
    return np.array([*map(code, found), -1], dtype=np.int64)[codes]


_CELLS = (str, int, float, Decimal, np.number, np.bool_)
"""Largest number of values of a column that can be a number or a level."""


def _number(value: object) -> float:
    if not isinstance(value, _CELLS) or isinstance(value, complex | np.complexfloating):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    except (TypeError, ValueError):
        return math.nan


def find_levels(series: pd.Series) -> tuple[LevelValue, ...]:
    """Levels of a column without missing values: a category's own order without unused ones, else sorted."""
    if isinstance(series.dtype, pd.CategoricalDtype):
        return tuple(map(_plain, series.cat.remove_unused_categories().cat.categories))
    return tuple(map(_plain, sorted(series.unique().tolist())))


def level_places(values: pd.Series | Array, levels: Sequence[LevelValue]) -> Ints:
    """Return the place of each value (n,) among levels, -1 for others."""
    # Each distinct value is looked up once.
    codes, distinct = pd.factorize(values)
    found = pd.Index(list(levels), dtype=object).get_indexer(pd.Index(distinct, dtype=object))
    return np.append(found, -1)[codes].astype(np.int64)


def as_categories(series: pd.Series, levels: Sequence[LevelValue], client: str, name: str) -> pd.Categorical:
    """Code a column without missing values by agreed levels, in their order; refuse any other level."""
    if isinstance(series.dtype, pd.CategoricalDtype):
        plain = [_plain(level) for level in series.cat.categories]
        position = pd.Index(list(levels), dtype=object).get_indexer(pd.Index(plain, dtype=object))
        found = series.cat.codes.to_numpy()
        codes = np.where(found < 0, -1, np.append(position, -1)[found])
    else:
        codes = level_places(series, levels)
    unknown = codes < 0
    if unknown.any():
        new = [level for level in find_levels(series[unknown]) if level not in levels]
        # fractions are measurements that came to the wrong column, not names of levels
        listed = "other numbers" if any(isinstance(level, float) for level in new) else list_levels(new)
        raise DesignError(
            f"{at_column(client, name)}: {int(unknown.sum()):,} of {len(series):,} entities have "
            f"{listed}, not known when the model was fitted (known: {list_levels(levels)}). "
            "Merge it into a known level, or leave these entities out."
        )
    index: pd.Index[Any] = pd.Index(list(levels))
    return pd.Categorical.from_codes(codes, categories=index)


def list_levels(levels: Sequence[LevelValue], counts: Sequence[int] | None = None) -> str:
    """List levels, with entities per level if given; only count them if they may be identifiers."""
    if len(levels) > MAX_SHOWN:
        return f"{len(levels):,} levels"
    if counts is None:
        shown = ", ".join(map(repr, levels))
    else:
        shown = ", ".join(f"{level!r} ({count})" for level, count in zip(levels, counts, strict=True))
    return f"level{'s' if len(levels) != 1 else ''} {shown}"


def missing_cells(series: Iterable[pd.Series], n_rows: int) -> Bools:
    """Table of what is missing, bool (n_rows, n_columns)."""
    columns = list(series)
    cells = np.zeros((n_rows, len(columns)), dtype=bool)
    for j, one in enumerate(columns):
        if one.dtype != np.float64 or not all_finite(one.to_numpy()):
            cells[:, j] = one.isna()
    return cells


def number_units(seen: Bools, owner: Ints) -> Ints:
    """Give columns of one site that are seen in the same rows one number, by their first ones: (P,)."""
    kinds = np.column_stack([owner, seen.T])
    _, first, unit = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[unit.ravel()], dtype=np.int64)


def _plain(level: object) -> LevelValue:
    item = getattr(level, "item", None)
    level = item() if callable(item) else level
    return level if isinstance(level, str | int | float | bool) else str(level)


def _unsupported(client: str, name: str, found: str) -> DesignError:
    return DesignError(
        f"{at_column(client, name)} is of type {found}; expected numbers, text, categories or true/false. "
        "Convert it first: a date for instance to a number of days, a mixed column to one type."
    )
