"""The data of one analysis: which institution holds which rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from narwhals.typing import IntoDataFrame

from fedstat.documented import described_in
from fedstat.errors import PartitionError
from fedstat.federation.carry.remote import Carrier
from fedstat.federation.design.observed import Partial
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.partition.connect import connect
from fedstat.federation.partition.copies import copied_parts
from fedstat.federation.partition.describe import Layout
from fedstat.federation.partition.local_sites import PartitionOptions, PartitionParts
from fedstat.federation.partition.row_tables import SiteCurve, row_problems, stack_tables, with_site_curves
from fedstat.federation.partition.views import PartitionViews
from fedstat.federation.tables import checks as check
from fedstat.federation.tables.curves.declared import (
    AnyCurve,
    apart_with_curves,
    same_everywhere,
    with_curves,
)
from fedstat.federation.tables.keys import link_tables, split_columns, split_rows
from fedstat.federation.tables.published import IntoPublished
from fedstat.federation.tables.reading import (
    NA_VALUES,
    IntoTable,
    named_row_tables,
    named_table,
    named_tables,
    open_table,
    read_table,
)
from fedstat.federation.tables.table import plain_columns


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ClientPartition(PartitionViews):
    """Tables of several institutions over one set of entities.

    Make one with :meth:`from_frames`, :meth:`from_frame` or :meth:`from_files`, or reach sites in other
    processes with :meth:`connect`. In the *vertical*
    layout institutions hold different columns of overlapping entities; in the *horizontal* layout they
    hold the same columns of different entities.

    It can be pickled and copied where its rows are in this process or in Parquet files. The copy's sites have
    keys and accounts of their own, and do not know what was asked of the others, or spent of their budgets.

    Attributes
    ----------
    layout : {"vertical", "horizontal"}
    key : tuple of str
        Columns that tell entities apart; empty where rows are the entities.
    entities : Index, (n_entities,)
        All entities: vertical, the sorted union of the institutions' keys (a MultiIndex for several
        keys), and a RangeIndex without a key; horizontal, one entry per row, a RangeIndex without a
        key or where a table is streamed.
    sites : mapping of str to Site
        One site per institution.
    rows : mapping of str to int64 array
        ``rows[c][j]`` is the position in ``entities`` of record ``j`` of institution ``c``, ascending.
    columns : mapping of str to tuple of str
        Columns of each institution, without the key and without curves.
    pooled_columns : tuple of str
        Horizontal: columns that every institution has, in the order of the first; vertical: none.
    partial : {"condition", "drop", "error", "mean"}
        What a design does with an entity whose columns are only partly filled at an institution.
    min_count : int
        Fewest entities of a category level in a design.
    empty_rows : mapping of str to int
        Rows of each institution's table that held a key and nothing else, and were left out.
    site_column : str
        Horizontal: the name by which a formula may ask for the institution itself; vertical: empty.
    coordinator : str
        Connected to, vertical: the institution at which the coordinator is, or "apart". Empty where
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
    >>> sme.layout, sme.n_entities, len(sme.clients)
    ('vertical', 5000, 6)
    >>> fs.ClientPartition.connect("federation.toml")  # which is not here
    Traceback (most recent call last):
    fedstat.errors.PartitionError: ...
    """

    @classmethod
    def from_frames(
        cls,
        frames: Mapping[str, IntoTable],
        on: str | Sequence[str] | None = None,
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
        curves: Mapping[str, SiteCurve] | None = None,
    ) -> ClientPartition:
        """Take one table per institution: linked by a key (vertical), or stacked (horizontal).

        Vertical: a row that holds its key alone is no record; the institution does not have that entity.
        Horizontal: every row is a record, and models use the columns that all institutions have.

        Parameters
        ----------
        frames : mapping of str to pandas, polars or pyarrow table
            One per institution. Vertical: no column but the key may be at two. Horizontal: also what
            :func:`fedstat.federation.tables.sources.open_source` gives: Parquet and queries are streamed.
        on : str or sequence of str, optional
            Key columns, the same in every table. Vertical: required; whole numbers of any width match
            each other. Horizontal: no model sees them, and no two rows of an institution in memory have the
            same.
        layout : {"vertical", "horizontal"}
            Different columns or rows.
        align : {"clear", "private"}
            Vertical: put the keys side by side, or link them by
            :mod:`fedstat.federation.rounds.alignment`, in which no institution shows a key. The records are
            linked alike; `entities` are then numbers, in an order drawn anew every time, because nobody knows
            all keys. It takes 43 microseconds a key, times the squared number of institutions in one process.
        site_column : str
            Horizontal: the name by which a formula may ask for the institution, as in ``C(site)``.
        partial : {"condition", "drop", "error", "mean"}
            What a design does with an entity whose columns are only partly filled at an institution:
            use what there is, take the institution not to have it, refuse it, or fill in the institution's
            means. To "condition" on any set of columns, :class:`VFEMRegression` does with sums that are
            exchanged once; other fits take such entities as "drop" does, and warn of the values.
        min_count : int
            Fewest entities of a category level in a design.
        policy : Policy or path, optional
            What the owners of the institutions allow to leave: a policy, or a file of
            :meth:`Policy.from_toml`. The default is ``Policy()``.
        policies : mapping of str to Policy or path, optional
            Policies of single institutions, in the place of the common one.
        shared_seed : int, optional
            Secret that the institutions share, from which common sketches are drawn; give one to repeat a fit
            number for number. Drawn from the operating system, 128 bits, when not given: a short number can
            be found by trying, which matters where sites are served, and is refused there.
        new_data : bool
            True for entities that are only predicted for: institutions may lack rows, or all values.
        published : mapping of str to path or mapping, optional
            By institution, what its owner publishes of its columns: a ``columns.toml``, or what such a file
            says. By default proposed from the institution's table where its policy judges questions from it.
        curves : mapping of str to Curve, LongCurve, or mapping of str to these by institution, optional
            By name, the columns of each table that hold a curve, such as
            ``{"ecg": fs.Curve("ecg_*", domain=(0, 24))}``; vertical: of the one table that has them. A curve
            takes the place of its columns; models of curves ask for it by its name.

        Raises
        ------
        PartitionError
            If the tables cannot be linked or used; all problems are listed.
        """
        options = PartitionOptions(partial, min_count, policy, policies, shared_seed, new_data, published)
        check.refuse(check.layout_problems(layout, on, site_column))
        check.refuse(check.align_problems(align, layout))
        key = check.key_names(on)
        if layout == "vertical":
            site_column = ""
            tables = apart_with_curves(named_tables(frames, key), same_everywhere(curves or {}))
            check.refuse(check.linked_problems(tables, key, new_data=new_data))
            numbered = options.align_privately(tables, key) if align == "private" else None
            alignment = link_tables(tables, key, numbered)
        else:
            stacked = with_site_curves(named_row_tables(frames, key), curves or {}, key)
            check.refuse(row_problems(stacked, key, site_column, new_data=new_data))
            alignment = stack_tables(stacked, key)
        return cls._of(PartitionParts(layout, key, alignment, options, {}, site_column).opened())

    @classmethod
    @described_in(from_frames)
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
    ) -> ClientPartition:
        """Split one table among institutions, as in a simulation.

        Parameters
        ----------
        frame : pandas, polars or pyarrow table
        columns : mapping of str to sequence of str, optional
            Columns of each institution (vertical layout), which has no entity of which all are missing; those
            that are not named are left out.
        by : str, optional
            The column that names each row's institution (horizontal layout), the ``site_column``;
            institutions come in sorted or categorical order and hold all other columns.
        on : str or sequence of str, optional
            Key columns; without them every row is an entity.
        partial, min_count, policy, policies, shared_seed, new_data, published, curves
            As in :meth:`from_frames`.

        Raises
        ------
        PartitionError
            If not exactly one of ``columns`` and ``by`` is given, or the table cannot be used.
        """
        options = PartitionOptions(partial, min_count, policy, policies, shared_seed, new_data, published)
        if (columns is None) == (by is None):
            raise PartitionError(
                "give either columns={client: [...]} (institutions hold different columns) "
                "or by='column' (institutions hold different rows), and not both."
            )
        key = check.key_names(on)
        table = named_table(frame, key)
        if by is None:
            layout: Layout = "vertical"
            table = with_curves("the table", table, curves or {}, key)
            check.refuse(check.column_split_problems(table, columns or {}, key, new_data=new_data))
            alignment = split_columns(table, columns or {}, key)
        else:
            layout = "horizontal"
            table = with_curves("the table", table, curves or {}, key)
            check.refuse(check.row_split_problems(table, by, key, new_data=new_data))
            alignment = split_rows(table, by, key)
        return cls._of(PartitionParts(layout, key, alignment, options, {}, by or "").opened())

    @classmethod
    @described_in(from_frames)
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
        curves: Mapping[str, SiteCurve] | None = None,
    ) -> ClientPartition:
        """Take one CSV, TSV or Parquet file per institution.

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
            What a missing cell of a text file looks like; a level called "None" stays a level.
        dtype : mapping of str to str, optional
            Types of columns of text files, e.g. ``{"id": "str"}`` for keys with leading zeros.
        partial, min_count, policy, policies, shared_seed, new_data, published, curves
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
        check.refuse(check.client_problems(paths))
        read = open_table if layout == "horizontal" else read_table
        return cls.from_frames(
            {client: read(client, path, na_values, dtype) for client, path in paths.items()},
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
        )

    @classmethod
    def connect(
        cls,
        path: str | Path = "federation.toml",
        journal: str | Path | None = None,
        *,
        without: Sequence[str] = (),
        quorum: int = 0,
        carrier: Carrier | None = None,
    ) -> ClientPartition:
        """Connect to sites that run in processes of their own.

        They are asked for names and types of their columns, the number of their rows, and their policy. No
        row comes: views that need rows raise :class:`~fedstat.errors.NotAvailableError`. In the vertical
        layout they have been aligned once, by 'fedstat federation align'. Entities are then numbers, in an
        order that tells nothing, and the coordinator sits apart from all sites unless the file says at which
        of them; `coordinator` of a model goes before both.

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
            Fewest sites among which a horizontal fit of a GLM, or of federated averaging, is begun anew where
            others are lost; by default none is. The lost ones' parts of earlier sums follow by subtraction,
            which owners' policies may refuse (`apart`).
        carrier : Carrier, optional
            What brings questions to the sites; by default the file names a folder or NVIDIA FLARE, of which
            the job that is open is joined, and one is begun where none is; see :meth:`close`.

        Raises
        ------
        PartitionError
            The file cannot be used, tables do not fit together, or a site is in the order of no alignment or
            of another than the coordinator; all problems are listed.
        EngineError
            A site did not answer; names it.
        SecurityError
            An answer is not signed by the site's key, or its account does not hold what it signed earlier.
        PolicyError
            A site has too few rows, or its owner does not allow the question.
        """
        return cls._of(connect(path, journal, without, carrier, quorum))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy tables and settings, of which :meth:`_again` makes sites with keys of their own."""
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
        )
