"""The horizontal layout: one table per site, with the same columns and different rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import DataWarning, PartitionError, Remedy, warn
from fedstat.federation.tables import checks as check
from fedstat.federation.tables.columns import HeldTable, inner_table, kind_problems
from fedstat.federation.tables.curve_columns import AnyCurve, CurveTable, curve_problems, with_curves
from fedstat.federation.tables.keys import Alignment
from fedstat.federation.tables.sources import one_row_per_entity
from fedstat.federation.tables.sql_table import SqlTable
from fedstat.federation.tables.table import FrameTable, ParquetTable, Table, table_curves
from fedstat.typing import Ints

SiteCurve: TypeAlias = AnyCurve | Mapping[str, AnyCurve]
"""How all sites hold a curve, or each of them."""


class RowRanges(Mapping[str, Ints]):
    """Positions of the rows if the sites' rows are stacked; computed on demand."""

    def __init__(self, n_rows: Mapping[str, int]) -> None:
        ends = np.cumsum([0, *n_rows.values()]).tolist()
        self._ranges = {site: range(a, b) for site, a, b in zip(n_rows, ends[:-1], ends[1:], strict=True)}

    def __getitem__(self, site: str) -> Ints:
        found = self._ranges[site]
        rows = np.arange(found.start, found.stop, dtype=np.int64)
        rows.flags.writeable = False
        return rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)


def with_counts(
    tables: Mapping[str, Any], counts: str | Mapping[str, str] | None, layout: str, on: object
) -> Mapping[str, Any]:
    """Give tables of counts one row for each entity; `tables` has an empty name for one that is divided."""
    if counts is None:
        return tables
    if layout == "vertical" or on is not None:
        left_out = "on" if layout == "horizontal" else "counts"
        raise PartitionError(
            "counts is for sites with different rows, without a key: a row with a key represents one entity",
            remedy=Remedy("ClientPartition.from_frame(..., {name}=None)", "Leave {name}= out.").filled(
                name=left_out
            ),
        )
    by_site = dict.fromkeys(tables, counts) if isinstance(counts, str) else dict(counts)
    unknown = [site for site in by_site if site not in tables]
    check.raise_problems(f"counts names {site!r}, which is no site." for site in unknown)
    return {
        site: one_row_per_entity(f"site {site!r}" if site else "the table", table, by_site[site])
        if site in by_site
        else table
        for site, table in tables.items()
    }


def with_site_curves(
    tables: Mapping[str, HeldTable], curves: Mapping[str, SiteCurve], key: Sequence[str]
) -> dict[str, HeldTable]:
    """Replace the columns of curves by the curves, chunk by chunk for a streamed table."""
    made: dict[str, HeldTable] = {}
    for site, table in tables.items():
        by_site = {name: one.get(site) if isinstance(one, Mapping) else one for name, one in curves.items()}
        own = {name: one for name, one in by_site.items() if one is not None}
        if isinstance(table, CurveTable) or not own:
            made[site] = table
        elif isinstance(table, pd.DataFrame):
            made[site] = with_curves(f"site {site!r}", table, own, key)
        else:
            made[site] = CurveTable(f"site {site!r}", table, own)
    held = {
        site: table_curves(FrameTable(table) if isinstance(table, pd.DataFrame) else table)
        for site, table in made.items()
    }
    check.raise_problems(curve_problems(held))
    return made


def stack_tables(tables: Mapping[str, HeldTable], key: Sequence[str]) -> Alignment:
    """Take the rows of all tables, one after the other, as the entities.

    They are called by the key where there is one and all tables are in memory.
    """
    held: dict[str, Table] = {site: _drop_key(table, key) for site, table in tables.items()}
    n_rows = {site: table.n_rows for site, table in held.items()}
    frames = [table for table in tables.values() if isinstance(table, pd.DataFrame)]
    entities: pd.Index[Any] = pd.RangeIndex(sum(n_rows.values()))
    # keys of streamed tables stay in their files: their entities are numbers
    if key and len(frames) == len(tables):
        keys = pd.concat([frame[list(key)] for frame in frames], ignore_index=True)
        entities = keys.set_index(list(key)).index
    return Alignment(entities, held, RowRanges(n_rows), dict.fromkeys(tables, 0))


def repeated_keys(entities: pd.Index[Any], rows: Mapping[str, Ints]) -> int:
    """Count the rows (n,) whose key another site has, from the places of each site's rows."""
    if isinstance(entities, pd.RangeIndex):
        return 0
    key, site = pd.factorize(entities)[0], np.empty(len(entities), dtype=np.int64)
    for number, here in enumerate(rows.values()):
        site[here] = number
    apart = np.unique(np.column_stack([key, site]), axis=0)[:, 0]
    return int((np.bincount(apart)[key] > 1).sum())


def warn_of_repeated(repeated: int, n_rows: int) -> None:
    """Warn of people at two sites, whose rows are not independent."""
    if repeated:
        warn(
            f"{repeated:,} of {n_rows:,} rows have a key that another site has: if equal keys are one "
            "person, rows are not independent, and standard errors of models are too small",
            DataWarning,
        )


def common_columns(columns: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Columns that every site has, in the order of the first."""
    first, *others = columns
    return tuple(name for name in first if all(name in names for names in others))


def row_problems(
    tables: Mapping[str, HeldTable], key: Sequence[str], site_column: str, *, new_data: bool
) -> Iterator[str]:
    """Problems of one table per site that hold different rows.

    For streamed tables names, types and length are checked, but no row.
    """
    columns = {site: _columns_without_key(table, key) for site, table in tables.items()}
    for site, table in tables.items():
        yield from _key_problems(site, table, key)
        if site_column in columns[site]:
            yield (
                f"site {site!r} has a column {site_column!r}, and this name is reserved for the name of the "
                "site. Rename or drop the column, or give site_column='another name'."
            )
        yield from _content_problems(site, table, columns[site], new_data=new_data)
    common = common_columns(columns.values())
    if not common and all(columns.values()):
        yield (
            "no column is at every site. In the horizontal layout all tables hold the same columns: check "
            "that they are spelled alike, or link different columns by on=... in the vertical layout."
        )
    for name in (*key, *common):
        having = {site: table for site, table in tables.items() if _has_column(table, name)}
        yield from kind_problems(having, name)


def _key_problems(site: str, table: HeldTable, key: Sequence[str]) -> Iterator[str]:
    absent = [name for name in key if not _has_column(table, name)]
    if absent:
        yield (
            f"site {site!r} has no key column {', '.join(map(repr, absent))}. Rename its key, change "
            "`on`, or leave `on` out: rows need no key here."
        )
    elif streams_query(table) and set(key) & set(table.columns):
        yield (
            f"site {site!r}: its table shows the key. Open it without, by "
            "fedstat.federation.tables.sources.open_source or SqlTable(..., leave_out=key)."
        )
    elif key and isinstance(table, pd.DataFrame):
        yield from check.unfit_key_problems(f"site {site!r}", table, key)


def _content_problems(
    site: str, table: HeldTable, columns: Sequence[str], *, new_data: bool
) -> Iterator[str]:
    where = f"site {site!r}"
    if isinstance(table, pd.DataFrame):
        for name in columns:
            yield from check.infinity_problems(where, table[name], name)
        if not new_data:
            yield from check.emptiness_problems(where, table, columns)
    elif not new_data:
        yield from check.size_problems(where, table.n_rows, columns)


def _columns_without_key(table: HeldTable, key: Sequence[str]) -> list[str]:
    return [name for name in table.columns if name not in key]


def _has_column(table: HeldTable, name: str) -> bool:
    if isinstance(table, CurveTable):
        return name in table.columns or _has_column(inner_table(table), name)
    if isinstance(table, SqlTable):
        return name in table.kinds
    return name in (table.schema.names if isinstance(table, ParquetTable) else table.columns)


def streams_query(table: HeldTable | Table) -> bool:
    """Return whether rows are read from a database for each request."""
    return isinstance(inner_table(table) if isinstance(table, CurveTable) else table, SqlTable)


def _drop_key(table: HeldTable, key: Sequence[str]) -> Table:
    if isinstance(table, CurveTable):
        return table.without(key)
    if isinstance(table, ParquetTable):
        return ParquetTable(table.path, table.rows_per_chunk, leave_out=key) if key else table
    if isinstance(table, SqlTable):
        return table
    # a shallow copy: columns that the caller adds to his frame later are not the site's
    return FrameTable(table[check.non_key_columns(table, key)] if key else table.copy(deep=False))
