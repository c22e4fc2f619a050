"""Description of a partition: counts of entities, rows, patterns and missing values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedstat.federation.audit.budget_charges import BudgetSpent
from fedstat.federation.tables.table import FrameTable, Table
from fedstat.typing import Array, Bools, Ints

Layout: TypeAlias = Literal["vertical", "horizontal"]

PATTERNS_SHOWN = 10
COLUMNS_SHOWN = 8
LEAST_SHOWN = 0.01
"""Smallest share of missing values with which a column is listed."""
UNKNOWN_COUNT = "unknown"
PATTERN_MARKS: Mapping[object, str] = {True: "x", False: ".", "all": "x", "some": "o", "none": "."}


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PartitionDescription:
    """Counts of a partition; prints as two tables.

    Attributes
    ----------
    layout : {"vertical", "horizontal"}
    key : tuple of str
    n_entities : int
    sites : DataFrame
        Indexed by site: ``columns``; ``entities`` with a record; of these ``complete`` and ``partly filled``;
        ``missing share`` of all entities without a record (vertical) or of cells without a value
        (horizontal). Vertical also ``empty rows``, which had a key but no value; horizontal also ``empty
        columns`` of that site. Missing if a table is streamed and would have to be read.
    patterns : DataFrame
        One bool column per site (has a record), ``count`` and ``share`` of the entities with
        that pattern, most frequent first.
    not_pooled : tuple of str
        Horizontal: columns that some sites lack.
    use : DataFrame or None
        Vertical, if entities have only some of a site's columns: the patterns of a fit of all columns by the
        partition's rule, before small ones are merged. One column each ("all", "some" or "none" of its
        columns), ``count`` and ``share``. With ``partial="condition"`` a fit that cannot condition treats
        "some" as "none".
    most_missing : tuple of (str, str, float)
        Site, column and share of the site's records without a value, for the columns that lack most; only
        of tables in memory.
    budgets : mapping of str to BudgetSpent
        State of the privacy budget of each site with a budget; for a site in another process, at the time of
        the connection.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> described = partition.describe()
    >>> described.title, described.n_complete
    ("Vertical partition: 5,000 entities, 6 sites, key 'enterprise_id'", 3)
    """

    layout: Layout
    key: tuple[str, ...]
    n_entities: int
    sites: pd.DataFrame
    patterns: pd.DataFrame
    not_pooled: tuple[str, ...] = ()
    use: pd.DataFrame | None = None
    most_missing: tuple[tuple[str, str, float], ...] = ()
    budgets: Mapping[str, BudgetSpent] = field(default_factory=dict)

    @property
    def n_complete(self) -> int:
        """Entities that have a record at every site."""
        marks = self.patterns.iloc[:, : len(self.sites)].to_numpy(dtype=bool)
        return int(self.patterns["count"].to_numpy()[marks.all(axis=1)].sum())

    @property
    def title(self) -> str:
        """One line that says what this is."""
        key = f", key {', '.join(map(repr, self.key))}" if self.key else ""
        counts = f"{self.n_entities:,} entities, {len(self.sites)} sites"
        return f"{self.layout.capitalize()} partition: {counts}{key}"

    def __str__(self) -> str:
        parts = [self.title, "", self._sites_shown().to_string()]
        if self.layout == "vertical":
            shown = self._patterns_shown().to_string(index=False)
            parts += ["", self._complete_line(), "", self._patterns_line(), shown]
        for line in self._row_lines():
            parts += ["", line]
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{escape(self.title)}</b></p>", self._sites_shown().to_html()]
        if self.layout == "vertical":
            parts += [f"<p>{self._complete_line()}</p>", f"<p>{self._patterns_line()}</p>"]
            parts.append(self._patterns_shown().to_html(index=False))
        parts += [f"<p>{escape(line)}</p>" for line in self._row_lines()]
        return "\n".join(parts)

    def _complete_line(self) -> str:
        share = self.n_complete / max(self.n_entities, 1)
        return f"{self.n_complete:,} entities ({share:.1%}) have a record at every site."

    def _patterns_line(self) -> str:
        n = len(self.patterns if self.use is None else self.use)
        first = f"the {PATTERNS_SHOWN} most frequent of {n}" if n > PATTERNS_SHOWN else f"all {n}"
        if self.use is None:
            return f"Patterns of records ({first}; x has a record, . has none):"
        return f"Patterns as a fit of all columns takes them ({first}; x all columns, o some, . none):"

    def _row_lines(self) -> list[str]:
        """State the columns and values that the table of sites does not show, and the state of budgets."""
        lines = []
        if self.not_pooled:
            shown = ", ".join(map(repr, self.not_pooled[:COLUMNS_SHOWN]))
            more = len(self.not_pooled) - COLUMNS_SHOWN
            lines.append(f"Some sites lack {shown}{f' and {more} more columns' if more > 0 else ''}.")
        if self.most_missing:
            listed = ", ".join(f"{100 * s:.0f} % of {name!r} ({site})" for site, name, s in self.most_missing)
            lines.append(f"Columns with most missing values, in the records of their site: {listed}.")
        lines += [f"Privacy budget of {site}: {spent}." for site, spent in self.budgets.items()]
        n_streamed = int(self.sites["complete"].isna().sum())
        if n_streamed:
            lines.append(
                f"The tables of {n_streamed} sites are streamed, or elsewhere; missing values are "
                "not known before they are read."
            )
        return lines

    def _sites_shown(self) -> pd.DataFrame:
        shown = self.sites.rename_axis(None).apply(_as_text)
        shown.index = pd.Index([f"{k}  {site}" for k, site in enumerate(shown.index, 1)])
        return shown

    def _patterns_shown(self) -> pd.DataFrame:
        shown = (self.patterns if self.use is None else self.use).head(PATTERNS_SHOWN)
        marks = shown.iloc[:, : len(self.sites)].map(
            {True: "x", False: "."}.get if self.use is None else PATTERN_MARKS.get
        )
        marks.columns = pd.Index([str(k) for k in range(1, len(self.sites) + 1)])
        return pd.concat([marks, shown[["count", "share"]].apply(_as_text)], axis=1)


def describe_blocks(
    tables: Mapping[str, Table],
    rows: Mapping[str, Ints],
    n_entities: int,
    *,
    key: tuple[str, ...],
    empty_rows: Mapping[str, int],
    partial: str,
) -> PartitionDescription:
    """Vertical layout: count every site's records and the patterns in which they are missing.

    `rows` (m_k,) are the positions of the records' entities, `empty_rows` the rows without a value that were
    left out; cells of tables in other processes are not counted. `partial` is the rule for entities with some
    of a site's columns.
    """
    counts = {site: _count_records(table) for site, table in tables.items()}
    sites = pd.DataFrame.from_dict(counts, orient="index").rename_axis("client")
    if sites["complete"].isna().any():
        sites = sites.astype("Int64")
    sites["missing share"] = 1 - sites["entities"] / max(n_entities, 1)
    sites["empty rows"] = pd.Series(empty_rows)
    presence = presence_matrix(rows, n_entities)
    patterns, use = count_patterns(presence, list(tables)), None
    frames = {site: table.frame for site, table in tables.items() if isinstance(table, FrameTable)}
    if len(frames) == len(tables) and sites["partly filled"].any():
        complete = presence_matrix(
            {site: rows[site][_complete(frames[site], tables[site].columns)] for site in tables},
            n_entities,
        )
        # Treatment of the entities with some of a site's columns.
        taken = {"drop": (complete, complete), "mean": (presence, presence)}.get(
            partial, (presence, complete)
        )
        use = count_patterns(np.concatenate(taken, axis=1), [*tables, *[f"all {k}" for k in tables]])
        use = _pattern_texts(use, list(tables))
    return PartitionDescription(
        "vertical", key, n_entities, sites, patterns, use=use, most_missing=_most_missing(tables)
    )


def _pattern_texts(patterns: pd.DataFrame, sites: list[str]) -> pd.DataFrame:
    """Describe how much of every site's columns a pattern has."""
    K = len(sites)
    some, every = patterns.iloc[:, :K].to_numpy(bool), patterns.iloc[:, K : 2 * K].to_numpy(bool)
    words = pd.DataFrame(np.select([every, some], ["all", "some"], "none"), columns=sites)
    return pd.concat([words, patterns[["count", "share"]]], axis=1)


def describe_rows(
    tables: Mapping[str, Table], pooled: Sequence[str], *, key: tuple[str, ...]
) -> PartitionDescription:
    """Horizontal layout: count every site's rows and missing cells; all have the `pooled` columns."""
    sites = pd.DataFrame({site: _count_rows(table) for site, table in tables.items()}).T
    # Int64 knows missing counts, which streamed tables have
    dtypes = {"missing share": "float64"} | dict.fromkeys(sites.columns.drop("missing share"), "Int64")
    if sites["complete"].notna().all():
        dtypes = {name: dtype.lower() for name, dtype in dtypes.items()}
    sizes = np.array([table.n_rows for table in tables.values()])
    order = [k for k in np.argsort(-sizes, kind="stable") if sizes[k]]
    patterns = pd.DataFrame(np.eye(len(sizes), dtype=bool)[order], columns=list(tables))
    patterns["count"] = sizes[order]
    patterns["share"] = sizes[order] / max(sizes.sum(), 1)
    named = dict.fromkeys(name for table in tables.values() for name in table.columns)
    return PartitionDescription(
        "horizontal",
        key,
        int(sizes.sum()),
        sites.astype(dtypes).rename_axis("client"),
        patterns,
        tuple(name for name in named if name not in pooled),
        most_missing=_most_missing(tables),
    )


def presence_matrix(rows: Mapping[str, Ints], n_entities: int) -> Bools:
    """Whether site k has a record of entity i, shape (n_entities, n_clients)."""
    presence = np.zeros((n_entities, len(rows)), dtype=bool)
    for k, positions in enumerate(rows.values()):
        presence[positions, k] = True
    return presence


def count_patterns(presence: Bools, sites: list[str]) -> pd.DataFrame:
    """Distinct rows of the presence matrix, most frequent first."""
    unique, counts = _unique_rows(presence)
    order = np.argsort(-counts, kind="stable")
    patterns = pd.DataFrame(unique[order], columns=sites)
    sizes = pd.DataFrame({"count": counts[order], "share": counts[order] / max(len(presence), 1)})
    return pd.concat([patterns, sizes], axis=1)


def missing_shares(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Share of missing cells of every column at every site, shape (n_clients, p).

    NaN where the site lacks the column.
    """
    columns = dict.fromkeys(name for frame in frames.values() for name in frame.columns)
    shares = {site: frame.isna().mean().reindex(list(columns)) for site, frame in frames.items()}
    return pd.DataFrame(shares).T


def _most_missing(tables: Mapping[str, Table]) -> tuple[tuple[str, str, float], ...]:
    """List the columns that lack most values: site, column, share of its records."""
    shares = [
        (site, str(name), float(share))
        for site, table in tables.items()
        if isinstance(table, FrameTable)
        for name, share in table.frame[list(table.columns)].isna().mean().items()
        if share >= LEAST_SHOWN
    ]
    return tuple(sorted(shares, key=lambda one: -one[2])[:COLUMNS_SHOWN])


def _count_records(table: Table) -> dict[str, Any]:
    """Count records and complete ones, which are not known of a table that is not in memory."""
    counts: dict[str, Any] = {"columns": len(table.columns), "entities": table.n_rows}
    if not isinstance(table, FrameTable):
        return counts | dict.fromkeys(("complete", "partly filled"))
    n_complete = int(_complete(table.frame, table.columns).sum())
    return counts | {"complete": n_complete, "partly filled": table.n_rows - n_complete}


def _complete(frame: pd.DataFrame, columns: Sequence[str]) -> Bools:
    """Which rows lack nothing."""
    complete = np.ones(len(frame), dtype=bool)
    for name in columns:  # one by one: a mask of all cells would be as large as the table
        complete &= frame[name].notna().to_numpy()
    return complete


def _count_rows(table: Table) -> dict[str, Any]:
    """Count records and missing cells."""
    cells: dict[str, Any] = dict.fromkeys(("missing share", "empty columns"))
    if isinstance(table, FrameTable):
        shares = table.frame.isna().mean()
        cells = {"missing share": shares.mean(), "empty columns": int((shares == 1).sum())}
    return _count_records(table) | cells


def _unique_rows(presence: Bools) -> tuple[Bools, Array]:
    """Distinct rows and their counts, from all present to none."""
    # eight sites to a byte: rows of bytes are sorted much faster than rows of bool
    packed = np.packbits(presence, axis=1)
    _, first, counts = np.unique(packed, axis=0, return_index=True, return_counts=True)
    # sorted from none to all present, and wanted the other way round
    return presence[first[::-1]], counts[::-1]


def _as_text(column: pd.Series[Any]) -> pd.Series[Any]:
    form = "{:.1%}" if column.dtype.kind == "f" else "{:,}"
    return column.map(lambda value: UNKNOWN_COUNT if pd.isna(value) else form.format(value))
