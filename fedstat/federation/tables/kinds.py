"""Kinds of the columns of a table, told by their types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import pandas as pd

from fedstat.federation.tables.curves.array import CurveDtype
from fedstat.federation.tables.curves.streamed import CurveTable
from fedstat.federation.tables.sql import OTHER, SqlTable
from fedstat.federation.tables.table import ParquetTable

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

    Of a table that is streamed the types are looked at, not the rows.
    """
    kinds = {site: kind for site, table in tables.items() if (kind := held_kind(table, name)) is not None}
    if len(set(kinds.values())) > 1:
        # a column without a value is read as numbers, whatever it would hold
        kinds = {site: kind for site, kind in kinds.items() if not _has_no_value(tables[site], name)}
    for a, b in pairwise(kinds):
        if kinds[a] != kinds[b]:
            yield (
                f"column {name!r} holds {kinds[a]} at institution {a!r} and {kinds[b]} at institution {b!r}. "
                "Convert it at one of them, or drop it there."
            )
            return


def held_kind(table: HeldTable, name: str) -> str | None:
    """Say what a column holds; None where there is nothing to judge by."""
    if isinstance(table, CurveTable):
        return CURVES if name in table.curves else held_kind(inner_table(table), name)
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
