"""The ways to look at a partition: description, plots, dependence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError, PartitionError
from fedstat.federation.carry.remote import RemoteEngine
from fedstat.federation.design.observed import Partial
from fedstat.federation.door.site import Site
from fedstat.federation.partition import plots
from fedstat.federation.partition.dependence import BlockCorrelation, rank_correlation
from fedstat.federation.partition.describe import (
    Layout,
    PartitionDescription,
    describe_blocks,
    describe_rows,
    missing_shares,
    presence_matrix,
)
from fedstat.federation.partition.division import Division
from fedstat.federation.partition.local_sites import PartitionOptions
from fedstat.federation.partition.row_tables import RowRanges, common_columns
from fedstat.federation.rounds.engine import Engine, LocalEngine
from fedstat.federation.tables.curves.array import CurveArray
from fedstat.federation.tables.linked import new_session
from fedstat.federation.tables.published import PublishedColumn
from fedstat.federation.tables.table import FrameTable, Table, held_curves
from fedstat.typing import Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PartitionViews:
    """The fields of :class:`~fedstat.ClientPartition`, described there, with their descriptions and plots.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> partition.clients[:2], partition.n_entities, len(partition.pooled_columns)
    (('Cleveland', 'Hungary'), 920, 14)
    >>> partition.curves["Hungary"], partition.frames["Hungary"].shape
    ({}, (294, 14))
    >>> list(partition.fingerprints) == list(partition.clients), type(partition.engine).__name__
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
    division: Division = field(default_factory=Division, repr=False)
    quorum: int = 0

    @property
    def engine(self) -> Engine:
        """What carries questions to the sites: in this process, unless the partition was connected to."""
        return LocalEngine(self.sites) if self._engine is None else self._engine

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
        rows = RowRanges({site: table.n_rows for site, table in tables.items()})
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
    def clients(self) -> tuple[str, ...]:
        """Names of the institutions, in the order in which they were given."""
        return tuple(self.sites)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each institution's keys, by which its statement in a receipt is known."""
        return {client: site.fingerprint for client, site in self.sites.items()}

    @property
    def n_entities(self) -> int:
        """Number of entities that at least one institution's table lists."""
        return len(self.entities)

    @property
    def pooled_columns(self) -> tuple[str, ...]:
        """Columns that every institution has, in the order of the first; none in the vertical layout."""
        return common_columns(self.columns.values()) if self.layout == "horizontal" else ()

    @property
    def curves(self) -> dict[str, dict[str, CurveArray]]:
        """Curves by institution and name; see :class:`fedstat.Curve`."""
        return {client: held_curves(table) for client, table in self._tables.items()}

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """Tables of institutions in the memory of this process, for simulation; others are not in it."""
        return {c: table.frame for c, table in self._tables.items() if isinstance(table, FrameTable)}

    def presence(self) -> pd.DataFrame:
        """Which institution has a record of which entity.

        Returns
        -------
        DataFrame of bool, (n_entities, n_clients)
            True where the institution's record has at least one value.
        """
        return pd.DataFrame(
            presence_matrix(self.rows, self.n_entities), index=self.entities, columns=list(self.clients)
        )

    def describe(self) -> PartitionDescription:
        """Count what each institution has, and the patterns in which records are missing.

        Where entities have some of an institution's columns only, patterns are shown as a fit of all
        columns takes them, by `partial`; a fit merges those that are too small to be released, and its
        summary says which.

        Of streamed tables only what their metadata tell is known: columns and rows.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> described = partition.describe()
        >>> described.n_complete, described.clients.index.tolist()[:2], len(described.patterns)
        (3, ['Platform', 'Credit Agency'], 23)
        """
        if self.layout == "horizontal":
            pooled = (*self.pooled_columns, *common_columns(map(tuple, self.curves.values())))
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
        """List what the owners publish of their columns, from which questions are judged.

        Returns
        -------
        DataFrame
            One row per institution and column: ``kind``, ``low`` and ``high`` of the range or of a curve's
            domain, ``levels``,
            ``knots`` and ``unit``. A column that is not here cannot be asked for where formulas are "simple".
        """
        rows = [
            (client, name, one.kind, *_ends(one), one.levels, one.knots, one.unit)
            for client, site in self.sites.items()
            for name, one in site.published.items()
        ]
        columns = ["client", "column", "kind", "low", "high", "levels", "knots", "unit"]
        return pd.DataFrame(rows, columns=columns).set_index(["client", "column"])

    def correlation(self, *, alpha: float = 0.05, threshold: float = 0.1) -> BlockCorrelation:
        """Spearman rank correlations within and between institutions, with a test of independence.

        This puts columns of different institutions beside each other. It is for simulation and for
        data that are in one process anyway, and does not exist for institutions at a distance.

        Parameters
        ----------
        alpha : float
            Level of the test for a pair of institutions, after Holm's adjustment.
        threshold : float
            Smallest absolute correlation that matters. A pair is flagged if its test rejects *and*
            one of its correlations exceeds the threshold, because among very many entities every
            test rejects.

        Raises
        ------
        PartitionError
            If the layout is horizontal or no institution has a numeric column.
        NotAvailableError
            The institutions are in other processes.

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
                "correlation between institutions' columns needs the vertical layout: "
                "in the horizontal layout all institutions hold the same columns."
            )
        if len(self.frames) < len(self._tables):
            raise NotAvailableError(
                "correlations between institutions' columns need the rows of both in one place; these are in "
                "processes of their own; result.independence_tests() of VFEMRegression needs sums only"
            )
        return rank_correlation(self.frames, self.rows, self.n_entities, alpha=alpha, threshold=threshold)

    def plot_missing(self, ax: Axes | None = None, max_patterns: int = 30) -> Axes:
        """Draw which records are missing together.

        Vertical: one row per pattern of present and missing records (of records that are there in part, as
        a fit of all columns takes them by `partial`), most frequent first, with the
        number of entities at the right and each institution's share of missing records on top.
        Horizontal: the share of missing cells of every column at every institution whose table is in memory.

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
            n_streamed = len(self.clients) - len(self.frames)
            if not self.frames and self._engine is not None:
                raise NotAvailableError(
                    "missing cells are not counted at sites in other processes; a fit counts the rows that "
                    "it leaves out"
                )
            if not self.frames:
                raise PartitionError(
                    f"the tables of all {n_streamed} institutions are streamed from files, which are not "
                    "read to count missing cells. Read them with pandas first, and use from_frames."
                )
            return plots.draw_missing_cells(missing_shares(self.frames), ax, n_streamed)
        return plots.draw_patterns(self.describe(), ax, max_patterns)

    def plot_correlation(
        self, ax: Axes | None = None, *, alpha: float = 0.05, threshold: float = 0.1
    ) -> Axes:
        """Draw the rank correlations of :meth:`correlation` as a heat map.

        Dots mark correlations between institutions whose independence is in doubt. As for
        :meth:`correlation`, columns of different institutions come into one place here.

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
            If the layout is horizontal or no institution has a numeric column.

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
        counts = f"{self.n_entities:,} entities, {len(self.clients)} institutions"
        lines = [f"ClientPartition ({self.layout}): {counts}{key}"]
        width, elsewhere = max(map(len, self.clients)), "streamed" if self._engine is None else "connected"
        for client, table in self._tables.items():
            line = f"  {client:<{width}}  {len(table.columns):>4} columns  {table.n_rows:>11,} entities"
            lines.append(line if isinstance(table, FrameTable) else f"{line}, {elsewhere}")
        if self.layout == "horizontal":
            lines.append(f"  {len(self.pooled_columns)} columns are at every institution")
            curves = common_columns(map(tuple, self.curves.values()))
            if curves:
                lines.append(f"  curves at every institution: {', '.join(curves)}")
        else:
            held = [f"{', '.join(own)} at {client}" for client, own in self.curves.items() if own]
            lines += [f"  curves: {'; '.join(held)}"] if held else []
        return "\n".join([*lines, *self._setting()])

    def _repr_html_(self) -> str:
        return "\n".join([self.describe()._repr_html_(), *(f"<p>{line}</p>" for line in self._setting())])

    def _setting(self) -> list[str]:
        """Say that nothing is protected, where all is in one process."""
        return list(filter(None, [getattr(self.engine, "setting", "")]))


def _ends(column: PublishedColumn) -> tuple[float | None, float | None]:
    """Take the ends of a published range or domain."""
    return column.range or column.domain or (None, None)
