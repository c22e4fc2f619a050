"""A partition whose sites are other processes, and what is asked to connect."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedstat.errors import NotAvailableError, PartitionError, VersionWarning, warn
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.carry.heads import KeptHeads
from fedstat.federation.carry.journal import Journal
from fedstat.federation.carry.remote import Carrier, RemoteEngine, RemoteSite
from fedstat.federation.door.families import load_families
from fedstat.federation.partition.connect_vertical import linked, vertical_problems
from fedstat.federation.partition.describe import Layout
from fedstat.federation.partition.federation_file import (
    APART,
    FEDERATION,
    FederationDescription,
    open_carrier,
    read_federation,
)
from fedstat.federation.partition.local_sites import PartitionOptions, PartitionParts
from fedstat.federation.partition.row_tables import RowRanges, common_columns
from fedstat.federation.rounds.engine import side_by_side
from fedstat.federation.rounds.schema import TableSchema, ask_schemas, version_remarks
from fedstat.federation.rounds.statements import ask_heads
from fedstat.federation.tables.checks import refuse
from fedstat.federation.tables.curves.declared import curve_problems
from fedstat.federation.tables.keys import Alignment


class ConnectedSite:
    """A site of a connected partition: its name, its fingerprint, and what it told of.

    Policy and description are for a forecast; it is the site that heeds them.
    """

    def __init__(self, name: str, fingerprint: str, schema: TableSchema) -> None:
        self.name, self.fingerprint = name, fingerprint
        self.policy, self.published, self.privacy = schema.policy, schema.published, schema.privacy

    def __repr__(self) -> str:
        return f"ConnectedSite({self.name!r})"

    def __getattr__(self, name: str) -> Any:
        raise NotAvailableError(
            # from __dict__, because a copy in the making has no name yet
            f"{self.__dict__.get('name', 'the site')}: its {name} is known at the site only, which runs in a "
            "process of its own. Ask its owner ('fedstat site check' shows what may leave)"
        )


class ConnectedTable:
    """What is known of a table elsewhere: columns and number of rows, and no row."""

    def __init__(self, site: str, schema: TableSchema) -> None:
        self.site, self.schema = site, schema
        self.columns: tuple[str, ...] = tuple(schema.columns)
        self.n_rows = schema.n_rows
        self.curves = {name: one.empty() for name, one in schema.curves.items()}

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Refuse: no row is here."""
        raise NotAvailableError(
            f"{self.site}: its rows are in a process of its own, and do not come here. Fit a model, which "
            "asks for sums over them"
        )


def connect(
    path: str | Path,
    journal: str | Path | None = None,
    without: Sequence[str] = (),
    carrier: Carrier | None = None,
    quorum: int = 0,
) -> PartitionParts:
    """Ask the sites of a federation for the schema of their tables, once they hold what they signed."""
    load_families()
    federation = read_federation(path)
    fingerprints = _asked_sites(federation, without)
    _check_quorum(federation, quorum, len(fingerprints))
    if carrier is None:
        carrier = open_carrier(federation, sites=tuple(fingerprints))
    remote = {name: RemoteSite(name, carrier) for name in fingerprints}
    heads = KeptHeads(federation.folder, fingerprints)
    engine = RemoteEngine(remote, None if journal is None else Journal(Path(journal)), heads)
    # Heads last: which of them are known changes, and a journal knows the other questions by their places.
    asked = side_by_side(
        ask_schemas(tuple(fingerprints), secrets.token_hex(8)),
        ask_heads(heads.known(), secrets.token_hex(8)),
    )
    schemas, now = engine.run(asked, Ledger())
    heads.keep(now)
    engine.installed = {name: schema.release for name, schema in schemas.items()}
    for remark in version_remarks(schemas):
        warn(remark, VersionWarning)
    tables = {name: ConnectedTable(name, schema) for name, schema in schemas.items()}
    sites = {name: ConnectedSite(name, key, schemas[name]) for name, key in fingerprints.items()}
    options = PartitionOptions("condition", federation.min_count)
    if federation.layout == "horizontal":
        alignment, site_column = _stacked(schemas, tables)
        parts = PartitionParts("horizontal", (), alignment, options, sites, site_column, engine)
        return replace(parts, quorum=quorum)
    alignment, aligned_as = linked(federation.folder, schemas, tables)
    key = next(schema.link.key for schema in schemas.values() if schema.link is not None)
    # at a site that is left out the coordinator has no one to answer in place
    at = federation.coordinator if federation.coordinator in sites else APART
    return PartitionParts(
        "vertical", key, alignment, options, sites, engine=engine, aligned_as=aligned_as, coordinator=at
    )


def _stacked(
    schemas: Mapping[str, TableSchema], tables: Mapping[str, ConnectedTable]
) -> tuple[Alignment, str]:
    """Rows of one site after those of another, and the name that all have for the site itself."""
    refuse(schema_problems(schemas))
    n_rows = {name: table.n_rows for name, table in tables.items()}
    entities = pd.RangeIndex(sum(n_rows.values()))
    (site_column,) = {schema.site_column for schema in schemas.values()}
    return Alignment(entities, tables, RowRanges(n_rows), dict.fromkeys(tables, 0)), site_column


def _asked_sites(federation: FederationDescription, without: Sequence[str]) -> dict[str, str]:
    """Fingerprints of the sites that are not left out."""
    if isinstance(without, str):
        raise PartitionError(f"without: expected a list of sites, received a text; write [{without!r}]")
    unknown = sorted(set(without) - set(federation.sites))
    if unknown:
        there = ", ".join(federation.sites) or "none"
        raise PartitionError(f"without: there is no site {', '.join(unknown)}; there are {there}")
    asked = {name: key for name, key in federation.sites.items() if name not in without}
    if not asked:
        raise PartitionError(
            f"'{federation.folder / FEDERATION}' lists no site to ask; add one with 'fedstat federation join "
            f"{federation.folder} CARD'"
        )
    return asked


def _check_quorum(federation: FederationDescription, quorum: object, n_sites: int) -> None:
    if not isinstance(quorum, int) or isinstance(quorum, bool) or not 0 <= quorum <= n_sites:
        raise PartitionError(
            f"quorum: expected a whole number up to the {n_sites} sites, received {quorum!r}"
        )
    if quorum and federation.layout != "horizontal":
        raise PartitionError(
            "quorum: in the vertical layout no fit goes on without a site, whose columns nobody else has. "
            "Connect without=[...] it, and fit a model without its columns"
        )


def schema_problems(schemas: Mapping[str, TableSchema], layout: Layout = "horizontal") -> Iterator[str]:
    """One line per reason why the tables of the sites cannot be taken as one."""
    if layout == "vertical":
        yield from vertical_problems(schemas)
        return
    for site, schema in schemas.items():
        if schema.link is not None:
            yield (
                f"{site}: it links its records by a key, as in the vertical layout; in the horizontal one "
                "its site.toml needs a site_column"
            )
    named = {schema.site_column for schema in schemas.values()}
    if len(named) > 1:
        told = ", ".join(f"{site!r}: {schema.site_column!r}" for site, schema in schemas.items())
        yield f"the sites have different names for the site itself ({told}); agree on one site_column"
    common = common_columns([tuple(schema.columns) for schema in schemas.values()])
    if not common:
        yield "no column is at every site. Check that all sites spell their columns in the same way."
    yield from curve_problems(
        {site: {name: one.empty() for name, one in s.curves.items()} for site, s in schemas.items()}
    )
    for name in common:
        kinds = {site: s.columns[name] for site, s in schemas.items() if s.columns[name] is not None}
        # one kind: beside missing cells whole numbers are read as decimal ones
        plain = {site: "numbers" if kind == "whole numbers" else kind for site, kind in kinds.items()}
        if len(set(plain.values())) > 1:
            told = ", ".join(f"{kind} at {site!r}" for site, kind in kinds.items())
            yield f"column {name!r} holds {told}. One of the sites converts it, or leaves it out."
