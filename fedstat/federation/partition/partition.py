"""The data of one analysis: which site holds which rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import pandas as pd
from narwhals.typing import IntoDataFrame

from fedstat.docstrings import inherits_params
from fedstat.errors import NotAvailableError, PartitionError, SpellingWarning, warn
from fedstat.federation.design.block import Partial
from fedstat.federation.design.imputed_cells import ImputedTable
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import Purpose
from fedstat.federation.partition import plots, row_tables
from fedstat.federation.partition.connect import connect
from fedstat.federation.partition.dependence import BlockCorrelation, rank_correlation
from fedstat.federation.partition.describe import (
    Layout,
    PartitionDescription,
    describe_blocks,
    describe_rows,
    missing_shares,
    presence_matrix,
)
from fedstat.federation.partition.local_sites import ExcludedRecords, PartitionOptions, PartitionParts
from fedstat.federation.protocols.engine import Engine, LocalEngine
from fedstat.federation.tables import checks as check
from fedstat.federation.tables import sources
from fedstat.federation.tables.aligned_table import new_session
from fedstat.federation.tables.curve_columns import (
    AnyCurve,
    same_everywhere,
    split_curve_columns,
    with_curves,
)
from fedstat.federation.tables.curves import CurveArray
from fedstat.federation.tables.keys import Alignment, link_tables, split_columns, split_rows
from fedstat.federation.tables.published import IntoPublished, PublishedColumn
from fedstat.federation.tables.table import FrameTable, Table, plain_columns, table_curves
from fedstat.federation.tables.text_files import NA_VALUES, TextFormat
from fedstat.federation.transport.remote import RemoteEngine, Transport
from fedstat.typing import Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------
# The ways to look at a partition: description, plots, dependence.


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PartitionViews:
    """The fields of :class:`~fedstat.ClientPartition`, described there, with their descriptions and plots.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> tuple(partition.sites)[:2], partition.n_entities, len(partition.pooled_columns)
    (('Cleveland', 'Hungary'), 920, 14)
    >>> partition.curves["Hungary"], partition.frames["Hungary"].shape
    ({}, (294, 14))
    >>> list(partition.fingerprints) == list(partition.sites), type(partition.engine).__name__
    (True, 'LocalEngine')
    >>> partition.presence().sum().tolist()
    [303, 294, 200, 123]
    >>> partition.published().loc["Hungary"].index.tolist()
    ['hospital']
    >>> bool(partition.plot_missing().has_data())
    True
    >>> partition.close()  # of no effect in one process
    """

    layout: Layout
    key: tuple[str, ...]
    entities: pd.Index[Any]
    sites: Mapping[str, Site]
    rows: Mapping[str, Ints]
    columns: Mapping[str, tuple[str, ...]]
    partial: Partial
    min_count: int
    empty_rows: Mapping[str, int]
    site_column: str
    _tables: Mapping[str, Table] = field(repr=False)
    _options: PartitionOptions = field(repr=False)
    _engine: Engine | None = field(default=None, repr=False)
    _aligned_as: str = field(default="", repr=False)
    coordinator: str = ""
    division: ExcludedRecords = field(default_factory=ExcludedRecords, repr=False)
    quorum: int = 0
    _imputed: ImputedTable | None = field(default=None, repr=False)
    """The imputed cells with which the rows are read, where sites hold rows."""
    _shared_keys: int = field(default=0, repr=False)
    """Number of keys at several sites, about, where the sites have counted them."""
    _repeated_rows: int = field(default=0, init=False, repr=False)
    """Number of rows whose key another site has, where sites hold rows."""

    @property
    def engine(self) -> Engine:
        """Engine that transfers requests to the sites: in this process, unless the partition is connected."""
        return LocalEngine(self.sites) if self._engine is None else self._engine

    def __post_init__(self) -> None:
        if self.layout == "horizontal":
            found = 2 * self._shared_keys or row_tables.repeated_keys(self.entities, self.rows)
            object.__setattr__(self, "_repeated_rows", found)

    def _warned(self) -> Self:
        """Warn of keys at several sites, unless the entities are new ones, on which no error depends."""
        if not self._options.new_data:
            row_tables.warn_of_repeated(self._repeated_rows, len(self.entities))
        return self

    def _new_session(self) -> str:
        """Draw a session, which names the alignment that the rows are numbered by where sites keep one."""
        return new_session(self._aligned_as)

    def _coordinator_at(self, holder: str) -> str | None:
        """Where the coordinator sits when it predicts: at the holder of the response, or as connected to."""
        at = self.coordinator or holder
        return at if at in self.sites else None

    def _among(self, sites: Sequence[str]) -> Self:
        """Return the same, in the horizontal layout, without the rows of other sites."""
        tables = {site: self._tables[site] for site in sites}
        rows = row_tables.RowRanges({site: table.n_rows for site, table in tables.items()})
        here = np.concatenate([self.rows[site] for site in sites])
        return replace(
            self,
            entities=self.entities[here] if self.key else pd.RangeIndex(len(here)),
            sites=MappingProxyType({site: self.sites[site] for site in sites}),
            rows=MappingProxyType(rows),
            columns=MappingProxyType({site: self.columns[site] for site in sites}),
            empty_rows=MappingProxyType({site: self.empty_rows[site] for site in sites}),
            _tables=MappingProxyType(tables),
        )

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each site's keys, which identifies its statement in a receipt."""
        return {client: site.fingerprint for client, site in self.sites.items()}

    @property
    def n_entities(self) -> int:
        """Number of entities that at least one site's table lists."""
        return len(self.entities)

    @property
    def pooled_columns(self) -> tuple[str, ...]:
        """Columns that every site has, in the order of the first; none in the vertical layout."""
        return row_tables.common_columns(self.columns.values()) if self.layout == "horizontal" else ()

    @property
    def curves(self) -> dict[str, dict[str, CurveArray]]:
        """Curves by site and name; see :class:`fedstat.Curve`."""
        return {site: table_curves(table) for site, table in self._tables.items()}

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """Tables of sites in the memory of this process, for simulation; others are not in it."""
        return {c: table.frame for c, table in self._tables.items() if isinstance(table, FrameTable)}

    def presence(self) -> pd.DataFrame:
        """Return which site has a record of which entity.

        Returns
        -------
        DataFrame of bool, (n_entities, n_clients)
            True where the site's record has at least one value.
        """
        return pd.DataFrame(
            presence_matrix(self.rows, self.n_entities), index=self.entities, columns=list(self.sites)
        )

    def describe(self) -> PartitionDescription:
        """Count what each site has, and the patterns in which records are missing.

        If entities have only some of a site's columns, patterns are shown as in a fit of all columns, by
        `partial`; a fit merges those that are too small to be released, and its summary lists them.

        For streamed tables only the metadata are known: columns and rows.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> described = partition.describe()
        >>> described.n_complete, described.sites.index.tolist()[:2], len(described.patterns)
        (3, ['Platform', 'Credit Agency'], 23)
        """
        if self.layout == "horizontal":
            pooled = (*self.pooled_columns, *row_tables.common_columns(map(tuple, self.curves.values())))
            found = describe_rows(self._tables, pooled, key=self.key)
        else:
            found = describe_blocks(
                self._tables,
                self.rows,
                self.n_entities,
                key=self.key,
                empty_rows=self.empty_rows,
                partial=self.partial,
            )
        budgets = {client: site.privacy for client, site in self.sites.items()}
        return replace(found, budgets={client: spent for client, spent in budgets.items() if spent})

    def published(self) -> pd.DataFrame:
        """List the owners' public descriptions of their columns, by which requests are checked.

        Returns
        -------
        DataFrame
            One row per site and column: ``kind``, ``low`` and ``high`` of the range or of a curve's
            domain, ``levels``,
            ``knots`` and ``unit``. A column that is not listed is not available if formulas are "simple".
        """
        rows = [
            (client, name, one.kind, *_range_ends(one), one.levels, one.knots, one.unit)
            for client, site in self.sites.items()
            for name, one in site.published.items()
        ]
        columns = ["client", "column", "kind", "low", "high", "levels", "knots", "unit"]
        return pd.DataFrame(rows, columns=columns).set_index(["client", "column"])

    def correlation(self, *, alpha: float = 0.05, threshold: float = 0.1) -> BlockCorrelation:
        """Spearman rank correlations within and between sites, with a test of independence.

        This brings columns of different sites together. It is for simulation and for data that are in one
        process anyway, and is not available for sites in other processes.

        Parameters
        ----------
        alpha : float
            Level of the test for a pair of sites, after Holm's adjustment.
        threshold : float
            Smallest absolute correlation that matters. A pair is flagged if its test rejects *and*
            one of its correlations exceeds the threshold, because among very many entities every
            test rejects.

        Raises
        ------
        PartitionError
            If the layout is horizontal or no site has a numeric column.
        NotAvailableError
            The sites are in other processes.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(300, seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> dependence = partition.correlation()
        >>> dependence.matrix.shape, dependence.in_doubt().shape
        ((8, 8), (8, 8))
        >>> bool(partition.plot_correlation().has_data())
        True
        """
        if self.layout == "horizontal":
            raise PartitionError(
                "correlation between sites' columns needs the vertical layout: "
                "in the horizontal layout all sites hold the same columns."
            )
        if len(self.frames) < len(self._tables):
            raise NotAvailableError(
                "correlations between sites' columns need the rows of both in one place; these are in "
                "processes of their own. The independence tests of a fitted VFEMRegression need sums only"
            )
        return rank_correlation(self.frames, self.rows, self.n_entities, alpha=alpha, threshold=threshold)

    def plot_missing(self, ax: Axes | None = None, max_patterns: int = 30) -> Axes:
        """Draw which records are missing together.

        Vertical: one row per pattern of present and missing records (of partly filled records, as in a fit of
        all columns by `partial`), most frequent first, with the number of entities on the right and each
        site's share of missing records on top. Horizontal: the share of missing cells of every column at
        every site whose table is in memory.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a figure of fitting size is made when not given.
        max_patterns : int
            Most rows to draw; what is left out is counted below the map.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        PartitionError
            If all tables are streamed: missing cells are not counted without reading them.
        """
        if self.layout == "horizontal":
            n_streamed = len(self.sites) - len(self.frames)
            if not self.frames and self._engine is not None:
                raise NotAvailableError(
                    "missing cells are not counted at sites in other processes; a fit counts the rows that "
                    "it leaves out"
                )
            if not self.frames:
                raise PartitionError(
                    f"the tables of all {n_streamed} sites are streamed from files, which are not "
                    "read to count missing cells. Read them with pandas first, and use from_frames."
                )
            return plots.draw_missing_cells(missing_shares(self.frames), ax, n_streamed)
        return plots.draw_patterns(self.describe(), ax, max_patterns)

    def plot_correlation(
        self, ax: Axes | None = None, *, alpha: float = 0.05, threshold: float = 0.1
    ) -> Axes:
        """Draw the rank correlations of :meth:`correlation` as a heat map.

        Dots mark correlations between sites whose independence is in doubt. As in :meth:`correlation`,
        columns of different sites are brought together here.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a figure of fitting size is made when not given.
        alpha, threshold : float
            As in :meth:`correlation`.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        PartitionError
            If the layout is horizontal or no site has a numeric column.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(300, seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> bool(partition.plot_correlation().has_data())
        True
        """
        return plots.draw_correlation(self.correlation(alpha=alpha, threshold=threshold), ax)

    def close(self) -> None:
        """End what :meth:`connect` began at the sites, which is the job of an analysis over NVIDIA FLARE.

        Nothing is ended where another analyst began it, nor over a folder or in one process. ``with`` does
        the same: ``with ClientPartition.connect(...) as partition:``.
        """
        if isinstance(self._engine, RemoteEngine):
            self._engine.close()

    def __copy__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        key = f", key {', '.join(map(repr, self.key))}" if self.key else ""
        counts = f"{self.n_entities:,} entities, {len(self.sites)} sites"
        lines = [f"ClientPartition ({self.layout}): {counts}{key}"]
        width, elsewhere = max(map(len, self.sites)), "streamed" if self._engine is None else "connected"
        for site, table in self._tables.items():
            line = f"  {site:<{width}}  {len(table.columns):>4} columns  {table.n_rows:>11,} entities"
            lines.append(line if isinstance(table, FrameTable) else f"{line}, {elsewhere}")
        if self.layout == "horizontal":
            lines.append(f"  {len(self.pooled_columns)} columns are at every site")
            curves = row_tables.common_columns(map(tuple, self.curves.values()))
            if curves:
                lines.append(f"  curves at every site: {', '.join(curves)}")
        else:
            held = [f"{', '.join(own)} at {site}" for site, own in self.curves.items() if own]
            lines += [f"  curves: {'; '.join(held)}"] if held else []
        return "\n".join([*lines, *self._setting()])

    def _repr_html_(self) -> str:
        return "\n".join([self.describe()._repr_html_(), *(f"<p>{line}</p>" for line in self._setting())])

    def _setting(self) -> list[str]:
        """Warn that no privacy protection applies within one process."""
        return list(filter(None, [getattr(self.engine, "setting", "")]))


def _range_ends(column: PublishedColumn) -> tuple[float | None, float | None]:
    """Take the ends of a published range or domain."""
    return column.range or column.domain or (None, None)


# ----------------------------------------------------------------------------------------------------
# Content of a pickle or a copy of a partition: tables and settings, from which sites are made again.

CONNECTED_MESSAGE = (
    "a partition that was connected to is not pickled or copied: its sites are other processes, and all that "
    "is here is the connection. Another process connects by ClientPartition.connect"
)
QUERIED_MESSAGE = (
    "a partition that streams a query is not pickled or copied, because of its connection to the database "
    "(at {}). Make it again in the other process"
)
RESULTS_MESSAGE = "; results of fits can be pickled, or saved by save()"


def copied_parts(partition: PartitionViews) -> PartitionParts:
    """Take a partition apart whose rows are in this process or in files; NotAvailableError for others."""
    if partition._engine is not None:
        raise NotAvailableError(CONNECTED_MESSAGE + RESULTS_MESSAGE)
    if streamed := [site for site, table in partition._tables.items() if row_tables.streams_query(table)]:
        raise NotAvailableError(QUERIED_MESSAGE.format(", ".join(map(repr, streamed))) + RESULTS_MESSAGE)
    rows, empty, tables = dict(partition.rows), dict(partition.empty_rows), dict(partition._tables)
    return PartitionParts(
        partition.layout,
        partition.key,
        Alignment(partition.entities, tables, rows, empty),
        partition._options,
        {},
        partition.site_column,
        division=partition.division,
        quorum=partition.quorum,
    )


# ----------------------------------------------------------------------------------------------------
# The data of one analysis: the rows and columns of each site.


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ClientPartition(PartitionViews):
    """Tables of several sites over one set of entities.

    Make one with :meth:`from_frames`, :meth:`from_frame` or :meth:`from_files`, or connect to sites in other
    processes with :meth:`connect`. In the *vertical* layout sites hold different columns of overlapping
    entities; in the *horizontal* layout they hold the same columns of different entities.

    It can be pickled and copied where its rows are in this process or in Parquet files. The copy's sites have
    keys and accounts of their own, and do not know what was asked of the others, or spent of their budgets.

    Attributes
    ----------
    layout : {"vertical", "horizontal"}
    key : tuple of str
        Columns that identify entities; empty if rows are the entities.
    entities : Index, (n_entities,)
        All entities: vertical, the sorted union of the sites' keys (a MultiIndex for several
        keys), and a RangeIndex without a key; horizontal, one entry per row, a RangeIndex without a
        key or where a table is streamed.
    sites : mapping of str to Site
        One ``Site`` object for each name of a site.
    rows : mapping of str to int64 array
        ``rows[c][j]`` is the position in ``entities`` of record ``j`` of site ``c``, ascending.
    columns : mapping of str to tuple of str
        Columns of each site, without the key and without curves.
    pooled_columns : tuple of str
        Horizontal: columns that every site has, in the order of the first; vertical: none.
    partial : {"condition", "drop", "error", "mean"}
        What a design does with an entity whose columns are only partly filled at a site.
    min_count : int
        Fewest entities of a category level in a design.
    empty_rows : mapping of str to int
        Rows of each site's table that held a key and nothing else, and were left out.
    site_column : str
        Horizontal: the name by which a formula may ask for the site itself; vertical: empty.
    coordinator : str
        Connected to, vertical: the site at which the coordinator is, or "apart". Empty where
        that follows from the formula.
    division : Division
        Records that are set aside, and entities that take no part.
    quorum : int
        Fewest sites among which fits go on; see :meth:`connect`.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital").layout
    'horizontal'
    >>> sme = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> sme.layout, sme.n_entities, len(sme.sites)
    ('vertical', 5000, 6)
    >>> fs.ClientPartition.connect("federation.toml")  # which is not here
    Traceback (most recent call last):
    fedstat.errors.PartitionError: ...
    """

    @classmethod
    def from_frames(
        cls,
        frames: Mapping[str, sources.IntoTable],
        on: str | Sequence[str] | Mapping[str, str] | None = None,
        *,
        layout: Layout = "vertical",
        align: Literal["clear", "private"] = "clear",
        site_column: str = "site",
        partial: Partial = "condition",
        min_count: int = 5,
        policy: Policy | str | Path | None = None,
        policies: Mapping[str, Policy | str | Path] | None = None,
        shared_seed: int | None = None,
        new_data: bool = False,
        published: Mapping[str, IntoPublished] | None = None,
        curves: Mapping[str, row_tables.SiteCurve] | None = None,
        counts: str | Mapping[str, str] | None = None,
    ) -> ClientPartition:
        """Take one table per site: linked by a key (vertical), or stacked (horizontal).

        Vertical: a row with only a key is not a record; the site does not have that entity. Horizontal: every
        row is a record, and models use the columns that all sites have.

        Parameters
        ----------
        frames : mapping of str to pandas, polars or pyarrow table
            One per site. Vertical: no column but the key may be at two. Horizontal: also what
            :func:`fedstat.federation.tables.sources.open_source` gives: Parquet and queries are streamed.
        on : str, sequence of str, or mapping of str to str, optional
            Key columns, the same in every table, or the name of the key at each site, as in
            ``{"Bank": "pid", "Shop": "id"}``. Vertical: required; integers of any width match each other.
            Horizontal: no model sees them, and no two rows of a site in memory have the same.
        layout : {"vertical", "horizontal"}
            Different columns or rows.
        align : {"clear", "private"}
            Vertical: compare the keys in one process, or link them by
            :mod:`fedstat.federation.protocols.linkage`, in which no site reveals a key. The records are
            linked equally; `entities` are then numbers, in an order drawn again every time, because no
            participant knows all keys. It takes 43 microseconds per key, times the squared number of sites in
            one process.
        site_column : str
            Horizontal: the name by which a formula refers to the site, as in ``C(site)``.
        partial : {"condition", "drop", "error", "mean"}
            Treatment in a design of an entity whose columns are only partly filled at a site: use the
            existing values, treat the entity as missing there, refuse it, or fill in the site's means.
            :class:`VFEMRegression` with sums that are exchanged once, and :class:`VFEMGLM` with
            ``between="free"``, can "condition" on any set of columns; other fits treat such entities as
            "drop" does, and warn.
        min_count : int
            Fewest entities of a category level in a design.
        policy : Policy or path, optional
            What the owners of the sites allow to be released: a policy, or a file of
            :meth:`Policy.from_toml`. The default is ``Policy()``.
        policies : mapping of str to Policy or path, optional
            Policies of single sites, instead of the common one.
        shared_seed : int, optional
            Secret that the sites share, from which common sketches are drawn; give one to repeat a fit
            exactly. By default 128 bits drawn from the operating system. A short number can be found by
            trying; running sites refuse it.
        new_data : bool
            True for entities to be predicted only: sites may lack rows, or all values.
        published : mapping of str to path or mapping, optional
            By site, the owner's public description of its columns: a ``columns.toml``, or the content of such
            a file. By default proposed from the site's table if its policy checks requests by it.
        curves : mapping of str to Curve, LongCurve, or mapping of str to these by site, optional
            By name, the columns of each table that hold a curve, such as
            ``{"ecg": fs.Curve("ecg_*", domain=(0, 24))}``; vertical: of the one table that has them. A curve
            takes the place of its columns; models of curves ask for it by its name.
        counts : str or mapping of str to str, optional
            Horizontal, for tables of counts: the column with the number of entities that a row represents, at
            all sites or by site. The site's table then has one row for each entity and no such column, so
            that policies and models count entities. Models need no ``freq_weights``.

        Raises
        ------
        PartitionError
            If the tables cannot be linked or used; all problems are listed.
        """
        options = PartitionOptions(partial, min_count, policy, policies, shared_seed, new_data, published)
        check.raise_problems(check.layout_problems(layout, on, site_column))
        check.raise_problems(check.align_problems(align, layout))
        frames = row_tables.with_counts(frames, counts, layout, on)
        if isinstance(on, Mapping):
            frames, on = check.one_key_name(sources.named_tables(frames, ()), on)
        key = check.key_names(on)
        if layout == "vertical":
            site_column = ""
            tables = split_curve_columns(sources.named_tables(frames, key), same_everywhere(curves or {}))
            check.raise_problems(check.linkage_problems(tables, key, new_data=new_data))
            if align == "clear":
                for line in check.similar_keys(tables, key):
                    warn(line, SpellingWarning)
            numbered = options.align_privately(tables, key) if align == "private" else None
            alignment = link_tables(tables, key, numbered)
        else:
            stacked = row_tables.with_site_curves(sources.named_row_tables(frames, key), curves or {}, key)
            check.raise_problems(row_tables.row_problems(stacked, key, site_column, new_data=new_data))
            alignment = row_tables.stack_tables(stacked, key)
        return cls._of(PartitionParts(layout, key, alignment, options, {}, site_column).opened())._warned()

    @classmethod
    @inherits_params(from_frames)
    def from_frame(
        cls,
        frame: IntoDataFrame,
        *,
        columns: Mapping[str, Sequence[str]] | None = None,
        by: str | None = None,
        on: str | Sequence[str] | None = None,
        partial: Partial = "condition",
        min_count: int = 5,
        policy: Policy | str | Path | None = None,
        policies: Mapping[str, Policy | str | Path] | None = None,
        shared_seed: int | None = None,
        new_data: bool = False,
        published: Mapping[str, IntoPublished] | None = None,
        curves: Mapping[str, AnyCurve] | None = None,
        counts: str | None = None,
    ) -> ClientPartition:
        """Divide one table among sites, as in a simulation.

        Parameters
        ----------
        frame : pandas, polars or pyarrow table
        columns : mapping of str to sequence of str, optional
            Columns of each site (vertical layout). A site does not have an entity if all of them are missing;
            columns that are not named are left out.
        by : str, optional
            The column that names each row's site (horizontal layout), the ``site_column``; sites are in
            sorted or categorical order and hold all other columns.
        on : str or sequence of str, optional
            Key columns; without them every row is an entity.
        partial, min_count, policy, policies, shared_seed, new_data, published, curves
            As in :meth:`from_frames`.
        counts : str, optional
            As in :meth:`from_frames`; with `by` only.

        Raises
        ------
        PartitionError
            If not exactly one of ``columns`` and ``by`` is given, or the table cannot be used.
        """
        options = PartitionOptions(partial, min_count, policy, policies, shared_seed, new_data, published)
        if (columns is None) == (by is None):
            raise PartitionError(
                "expected one of columns={client: [...]} (sites hold different columns) and by='column' "
                "(sites hold different rows), and not both."
            )
        key = check.key_names(on)
        table = sources.named_table(frame, (*key, *([] if by is None else [by])))
        if by is None:
            layout: Layout = "vertical"
            row_tables.with_counts({}, counts, layout, on)
            table = with_curves("the table", table, curves or {}, key)
            check.raise_problems(check.column_split_problems(table, columns or {}, key, new_data=new_data))
            alignment = split_columns(table, columns or {}, key)
        else:
            layout = "horizontal"
            table = row_tables.with_counts({"": table}, counts, layout, on)[""]
            table = with_curves("the table", table, curves or {}, key)
            check.raise_problems(check.row_split_problems(table, by, key, new_data=new_data))
            alignment = split_rows(table, by, key)
        return cls._of(PartitionParts(layout, key, alignment, options, {}, by or "").opened())._warned()

    @classmethod
    @inherits_params(from_frames)
    def from_files(
        cls,
        paths: Mapping[str, str | Path],
        on: str | Sequence[str] | None = None,
        *,
        layout: Layout = "vertical",
        site_column: str = "site",
        na_values: Sequence[str] = NA_VALUES,
        dtype: Mapping[str, str] | None = None,
        partial: Partial = "condition",
        min_count: int = 5,
        policy: Policy | str | Path | None = None,
        policies: Mapping[str, Policy | str | Path] | None = None,
        shared_seed: int | None = None,
        new_data: bool = False,
        published: Mapping[str, IntoPublished] | None = None,
        curves: Mapping[str, row_tables.SiteCurve] | None = None,
        counts: str | Mapping[str, str] | None = None,
    ) -> ClientPartition:
        """Take one CSV, TSV or Parquet file per site.

        In the horizontal layout Parquet files are not read here: their rows stream past whenever a model
        asks, in memory that does not grow with their length. All other files are read at once.

        Parameters
        ----------
        paths : mapping of str to path
            Files ending in ``.csv``, ``.tsv`` (either also with ``.gz``) or ``.parquet``; the last
            needs ``pip install fedstat[parquet]``.
        on, layout, site_column
            As in :meth:`from_frames`.
        na_values : sequence of str
            Text of a missing cell in a text file; a level called "None" stays a level.
        dtype : mapping of str to str, optional
            Types of columns of text files, e.g. ``{"id": "str"}`` for keys with leading zeros.
        partial, min_count, policy, policies, shared_seed, new_data, published, curves, counts
            As in :meth:`from_frames`.

        Raises
        ------
        PartitionError
            If a file is absent or unreadable, or the tables cannot be linked.

        Examples
        --------
        >>> import fedstat as fs
        >>> paths = fs.datasets.write_sme_sample("sme")
        >>> tables = {path.stem: path for path in paths}
        >>> fs.ClientPartition.from_files(tables, on="enterprise_id").n_entities
        5000
        """
        check.raise_problems(check.site_problems(paths))
        read = sources.open_table if layout == "horizontal" else sources.read_table
        return cls.from_frames(
            {site: read(site, path, TextFormat(na_values), dtype) for site, path in paths.items()},
            on,
            layout=layout,
            site_column=site_column,
            partial=partial,
            min_count=min_count,
            policy=policy,
            policies=policies,
            shared_seed=shared_seed,
            new_data=new_data,
            published=published,
            curves=curves,
            counts=counts,
        )

    @classmethod
    def connect(
        cls,
        path: str | Path = "federation.toml",
        journal: str | Path | None = None,
        *,
        without: Sequence[str] = (),
        quorum: int = 0,
        transport: Transport | None = None,
        person: str = "",
        study: str = "",
        purpose: str = "",
    ) -> ClientPartition:
        """Connect to sites that run in processes of their own.

        The sites report names and types of their columns, the number of their rows, and their policy, but no
        row: views that need rows raise :class:`~fedstat.errors.NotAvailableError`. In the vertical layout
        they have been aligned once, by 'fedstat federation align'. Entities are then numbers, in a random
        order. The coordinator is apart from all sites unless the file names its site; `coordinator` of a
        model overrides both.

        Parameters
        ----------
        path : path
            ``federation.toml``, or its folder; 'fedstat federation new' makes one.
        journal : path, optional
            Folder that keeps what sites answer, so that one interrupted analysis, run again, goes on.
        without : sequence of str
            Sites that are not asked, and whose rows are left out, such as one that is gone for good;
            vertical: with the entities that they alone have.
        quorum : int
            Fewest remaining sites with which a horizontal fit of a GLM, or of federated averaging, is
            repeated if other sites are lost; by default it is not repeated. The lost sites' parts of earlier
            sums follow by subtraction, which owners' policies may refuse (`apart`).
        transport : Transport, optional
            Transport of requests to the sites; by default the file names a folder or NVIDIA FLARE, whose open
            job is joined, or started if there is none; see :meth:`close`.
        person, study, purpose : str
            Who analyzes, in which study, and for what. The coordinator signs them with each request, owners
            see them before they approve a plan, and every site keeps them in its ledger. By default those of
            ``federation.toml``; the study is by default the name of the federation.

        Raises
        ------
        PartitionError
            The file cannot be used, tables do not fit together, or a site is in the order of no alignment or
            of another than the coordinator; all problems are listed.
        EngineError
            A site did not answer; names it.
        SecurityError
            A reply is not signed by the site's key, or its ledger does not contain its earlier signed state.
        PolicyError
            A site has too few rows, or its owner does not allow the request.
        """
        stated = Purpose(person, study, purpose)
        return cls._of(connect(path, journal, without, transport, quorum, stated))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy tables and settings, from which :meth:`_again` makes sites with new keys."""
        return ClientPartition._again, (copied_parts(self),)

    @classmethod
    def _again(cls, parts: PartitionParts) -> ClientPartition:
        for rows in parts.alignment.rows.values():
            rows.flags.writeable = False
        return cls._of(parts.opened())

    @classmethod
    def _of(cls, parts: PartitionParts) -> ClientPartition:
        """Put a partition together; its mappings cannot be written to."""
        alignment, tables = parts.alignment, parts.alignment.tables
        return cls(
            layout=parts.layout,
            key=parts.key,
            entities=alignment.entities,
            sites=MappingProxyType(dict(parts.sites)),
            rows=MappingProxyType(alignment.rows),
            columns=MappingProxyType({c: plain_columns(table) for c, table in tables.items()}),
            partial=parts.options.partial,
            min_count=int(parts.options.min_count),
            empty_rows=MappingProxyType(dict(alignment.empty_rows)),
            site_column=parts.site_column,
            _tables=MappingProxyType(dict(tables)),
            _options=parts.options,
            _engine=parts.engine,
            _aligned_as=parts.aligned_as,
            coordinator=parts.coordinator,
            division=parts.division,
            quorum=parts.quorum,
            _shared_keys=parts.shared_keys,
        )
