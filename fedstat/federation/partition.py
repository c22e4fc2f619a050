"""The data of one analysis: which client holds which rows and columns."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pandas as pd
from narwhals.typing import IntoDataFrame

from fedstat.errors import PartitionError
from fedstat.federation import partition_align, partition_plots, partition_read
from fedstat.federation import partition_check as check
from fedstat.federation.partition_align import AlignedBlock, Alignment
from fedstat.federation.partition_dependence import BlockCorrelation, rank_correlation
from fedstat.federation.partition_describe import (
    Layout,
    PartitionDescription,
    describe_blocks,
    missing_cells,
    presence_matrix,
)
from fedstat.federation.site import Policy, Site
from fedstat.typing import Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Partial: TypeAlias = Literal["drop", "error", "mean"]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ClientPartition:
    """Tables of several clients over one set of entities.

    Make one with :meth:`from_frames`, :meth:`from_frame` or :meth:`from_files`. In the *vertical*
    layout clients hold different columns of overlapping entities; in the *horizontal* layout they
    hold the same columns of different entities.

    Attributes
    ----------
    layout : {"vertical", "horizontal"}
    key : tuple of str
        Columns that tell entities apart; empty where rows of one table are the entities.
    entities : Index, (n_entities,)
        All entities: vertical, the sorted union of the clients' keys (a MultiIndex for several
        keys), and a RangeIndex without a key; horizontal, one entry per row of the table.
    sites : mapping of str to Site
        One site per client.
    rows : mapping of str to int64 array
        ``rows[c][j]`` is the position in ``entities`` of record ``j`` of client ``c``, ascending.
    columns : mapping of str to tuple of str
        Columns of each client, without the key.
    partial : {"drop", "error", "mean"}
        What a design does with an entity whose columns are only partly filled at a client.
    min_count : int
        Fewest entities of a category level in a design.
    empty_rows : mapping of str to int
        Rows of each client's table that held a key and nothing else, and were left out.
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
    _frames: Mapping[str, pd.DataFrame] = field(repr=False)

    @classmethod
    def from_frames(
        cls,
        frames: Mapping[str, IntoDataFrame],
        on: str | Sequence[str],
        *,
        partial: Partial = "drop",
        min_count: int = 5,
        policies: Mapping[str, Policy] | None = None,
        shared_seed: int | None = None,
        new_data: bool = False,
    ) -> ClientPartition:
        """Link one table per client by a key (vertical layout).

        A row that holds its key and nothing else is no record: the client does not have that entity.

        Parameters
        ----------
        frames : mapping of str to pandas, polars or pyarrow table
            One table per client; no column but the key may be at two clients.
        on : str or sequence of str
            Key columns, the same in every table. Whole numbers of any width match each other.
        partial : {"drop", "error", "mean"}
            What a design does with an entity whose columns are only partly filled at a client:
            take the client not to have it, refuse it, or fill in the client's means.
        min_count : int
            Fewest entities of a category level in a design.
        policies : mapping of str to Policy, optional
            What the owners of some of the clients allow to leave.
        shared_seed : int, optional
            Secret that the clients share, from which common sketches are drawn; give one to
            repeat a fit number for number. Drawn from the operating system when not given.
        new_data : bool
            True for entities that are only to be predicted for: constant columns, columns without
            a value and clients without rows are then allowed.

        Raises
        ------
        PartitionError
            If the tables cannot be linked or used; all problems that were found are listed.
        """
        check.refuse(check.option_problems(partial, min_count))
        key = check.key_names(on)
        tables = partition_read.named_tables(frames, key)
        check.refuse(check.linked_problems(tables, key, new_data=new_data))
        alignment = partition_align.link_tables(tables, key)
        sites = _open_sites(alignment.blocks, policies, shared_seed)
        return cls._of_alignment("vertical", key, alignment, sites, partial, min_count)

    @classmethod
    def from_frame(
        cls,
        frame: IntoDataFrame,
        *,
        columns: Mapping[str, Sequence[str]] | None = None,
        by: str | None = None,
        on: str | Sequence[str] | None = None,
        partial: Partial = "drop",
        min_count: int = 5,
        policies: Mapping[str, Policy] | None = None,
        shared_seed: int | None = None,
        new_data: bool = False,
    ) -> ClientPartition:
        """Split one table among clients, as in a simulation.

        Parameters
        ----------
        frame : pandas, polars or pyarrow table
        columns : mapping of str to sequence of str, optional
            Columns of each client (vertical layout); columns that are not named are left out.
            A client whose columns are all missing in a row does not have that entity.
        by : str, optional
            The column that names each row's client (horizontal layout); clients come in sorted
            or categorical order and hold all other columns.
        on : str or sequence of str, optional
            Key columns; without them every row is an entity.
        partial, min_count, policies, shared_seed, new_data
            As in :meth:`from_frames`.

        Raises
        ------
        PartitionError
            If not exactly one of ``columns`` and ``by`` is given, or the table cannot be used.
        """
        check.refuse(check.option_problems(partial, min_count))
        if (columns is None) == (by is None):
            raise PartitionError(
                "give either columns={client: [...]} (clients hold different columns) "
                "or by='column' (clients hold different rows), and not both."
            )
        key = check.key_names(on)
        table = partition_read.named_table(frame, key)
        if by is None:
            layout: Layout = "vertical"
            check.refuse(check.column_split_problems(table, columns or {}, key, new_data=new_data))
            alignment = partition_align.split_columns(table, columns or {}, key)
        else:
            layout = "horizontal"
            check.refuse(check.row_split_problems(table, by, key, new_data=new_data))
            alignment = partition_align.split_rows(table, by, key)
        sites = _open_sites(alignment.blocks, policies, shared_seed)
        return cls._of_alignment(layout, key, alignment, sites, partial, min_count)

    @classmethod
    def from_files(
        cls,
        paths: Mapping[str, str | Path],
        on: str | Sequence[str],
        *,
        na_values: Sequence[str] = partition_read.NA_VALUES,
        dtype: Mapping[str, str] | None = None,
        partial: Partial = "drop",
        min_count: int = 5,
        policies: Mapping[str, Policy] | None = None,
        shared_seed: int | None = None,
        new_data: bool = False,
    ) -> ClientPartition:
        """Link one CSV, TSV or Parquet file per client by a key (vertical layout).

        Parameters
        ----------
        paths : mapping of str to path
            Files ending in ``.csv``, ``.tsv`` (either also with ``.gz``) or ``.parquet``; the last
            needs ``pip install fedstat[parquet]``.
        on : str or sequence of str
            Key columns.
        na_values : sequence of str
            What a missing cell of a text file looks like; only these. A level called "None" stays
            a level.
        dtype : mapping of str to str, optional
            Types of columns of text files, e.g. ``{"id": "str"}`` for keys with leading zeros.
        partial, min_count, policies, shared_seed, new_data
            As in :meth:`from_frames`.

        Raises
        ------
        PartitionError
            If a file is absent or unreadable, or the tables cannot be linked.
        """
        check.refuse(check.client_problems(paths))
        frames = {c: partition_read.read_table(c, path, na_values, dtype) for c, path in paths.items()}
        return cls.from_frames(
            frames,
            on,
            partial=partial,
            min_count=min_count,
            policies=policies,
            shared_seed=shared_seed,
            new_data=new_data,
        )

    @classmethod
    def _of_alignment(
        cls,
        layout: Layout,
        key: tuple[str, ...],
        alignment: Alignment,
        sites: Mapping[str, Site],
        partial: Partial,
        min_count: int,
    ) -> ClientPartition:
        blocks = alignment.blocks
        for block in blocks.values():
            block.rows.flags.writeable = False
        return cls(
            layout=layout,
            key=key,
            entities=alignment.entities,
            sites=MappingProxyType(dict(sites)),
            rows=MappingProxyType({c: block.rows for c, block in blocks.items()}),
            columns=MappingProxyType({c: tuple(block.frame.columns) for c, block in blocks.items()}),
            partial=partial,
            min_count=int(min_count),
            empty_rows=MappingProxyType({c: block.n_empty for c, block in blocks.items()}),
            _frames=MappingProxyType({c: block.frame for c, block in blocks.items()}),
        )

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients, in the order in which they were given."""
        return tuple(self.sites)

    @property
    def n_entities(self) -> int:
        """Number of entities that at least one client's table lists."""
        return len(self.entities)

    def presence(self) -> pd.DataFrame:
        """Which client has a record of which entity.

        Returns
        -------
        DataFrame of bool, (n_entities, n_clients)
            True where the client's record has at least one value.
        """
        return pd.DataFrame(
            presence_matrix(self.rows, self.n_entities), index=self.entities, columns=list(self.clients)
        )

    def describe(self) -> PartitionDescription:
        """Count what each client has, and the patterns in which records are missing."""
        return describe_blocks(
            self._frames,
            self.rows,
            self.n_entities,
            layout=self.layout,
            key=self.key,
            empty_rows=self.empty_rows,
        )

    def correlation(self, *, alpha: float = 0.05, threshold: float = 0.1) -> BlockCorrelation:
        """Spearman rank correlations within and between clients, with a test of independence.

        This puts columns of different clients beside each other. It is for simulation and for
        data that are in one process anyway, and does not exist for clients at a distance.

        Parameters
        ----------
        alpha : float
            Level of the test for a pair of clients, after Holm's adjustment.
        threshold : float
            Smallest absolute correlation that matters. A pair is flagged if its test rejects *and*
            one of its correlations exceeds the threshold, because among very many entities every
            test rejects.

        Raises
        ------
        PartitionError
            If the layout is horizontal or no client has a numeric column.
        """
        if self.layout == "horizontal":
            raise PartitionError(
                "correlation between clients' columns needs the vertical layout: "
                "in the horizontal layout all clients hold the same columns."
            )
        return rank_correlation(self._frames, self.rows, self.n_entities, alpha=alpha, threshold=threshold)

    def plot_missing(self, ax: Axes | None = None, max_patterns: int = 30) -> Axes:
        """Draw which records are missing together.

        Vertical: one row per pattern of present and missing records, most frequent first, with the
        number of entities at the right and each client's share of missing records on top.
        Horizontal: the share of missing cells of every column at every client.

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
        """
        if self.layout == "horizontal":
            return partition_plots.draw_missing_cells(missing_cells(self._frames), ax)
        return partition_plots.draw_patterns(self.describe(), ax, max_patterns)

    def plot_correlation(
        self, ax: Axes | None = None, *, alpha: float = 0.05, threshold: float = 0.1
    ) -> Axes:
        """Draw the rank correlations of :meth:`correlation` as a heat map.

        Dots mark correlations between clients whose independence is in doubt. As for
        :meth:`correlation`, columns of different clients come into one place here.

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
            As in :meth:`correlation`.
        """
        return partition_plots.draw_correlation(self.correlation(alpha=alpha, threshold=threshold), ax)

    def __repr__(self) -> str:
        key = f", key {', '.join(map(repr, self.key))}" if self.key else ""
        lines = [
            f"ClientPartition ({self.layout}): {self.n_entities:,} entities, {len(self.clients)} clients{key}"
        ]
        width = max(map(len, self.clients))
        for client, rows in self.rows.items():
            n_columns = len(self.columns[client])
            lines.append(f"  {client:<{width}}  {n_columns:>4} columns  {len(rows):>11,} entities")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.describe()._repr_html_()


def _open_sites(
    blocks: Mapping[str, AlignedBlock], policies: Mapping[str, Policy] | None, shared_seed: int | None
) -> dict[str, Site]:
    """One site per client, all with the same shared secret."""
    policies = policies or {}
    unknown = [client for client in policies if client not in blocks]
    if unknown:
        raise PartitionError(
            f"policies name clients that are not in the partition: {', '.join(map(repr, unknown))}. "
            f"Its clients are {', '.join(map(repr, blocks))}."
        )
    seed = secrets.randbits(63) if shared_seed is None else shared_seed
    return {c: Site(c, block.frame, policies.get(c), shared_seed=seed) for c, block in blocks.items()}
