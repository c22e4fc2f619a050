"""Connecting to sites in other processes, in the horizontal or the vertical layout."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedstat.errors import (
    DataWarning,
    EngineError,
    FedstatError,
    NotAvailableError,
    PartitionError,
    Remedy,
    VersionWarning,
    warn,
)
from fedstat.federation import state_formats
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.site import load_families
from fedstat.federation.files import write_atomic
from fedstat.federation.message import NO_PURPOSE, Purpose
from fedstat.federation.partition.describe import Layout
from fedstat.federation.partition.federation_file import (
    APART,
    FEDERATION_FILENAME,
    FOLDER_TRANSPORT,
    FederationDescription,
    coordinator_identity,
    join_remedy,
    open_transport,
    read_federation,
)
from fedstat.federation.partition.local_sites import PartitionOptions, PartitionParts
from fedstat.federation.partition.row_tables import RowRanges, common_columns
from fedstat.federation.protocols.engine import Engine, side_by_side
from fedstat.federation.protocols.linkage import PersistentAlignment, align_persistently, load_alignment
from fedstat.federation.protocols.receipts import request_ledger_heads, with_receipt
from fedstat.federation.protocols.schema import TableSchema, change_remarks, request_schemas, version_remarks
from fedstat.federation.protocols.shared_keys import request_shared_keys
from fedstat.federation.tables.checks import raise_problems, shared_column_problems
from fedstat.federation.tables.curve_columns import curve_problems
from fedstat.federation.tables.dictionary import read_accepted
from fedstat.federation.tables.keys import Alignment
from fedstat.federation.tables.table import Table
from fedstat.federation.transport.analysis_notes import NoteKeeper
from fedstat.federation.transport.journal import Journal, LedgerCheckpoints
from fedstat.federation.transport.mailbox import last_alive
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite, Transport
from fedstat.federation.transport.site_folder import IDENTITY

SEEN_AGAIN = 15.0
"""Seconds within which a service that runs, and is not busy, is seen again."""

# ----------------------------------------------------------------------------------------------------
# Connecting to sites that hold different columns: the alignment that they and the coordinator keep.


def align_connected_sites(engine: Engine, sites: Sequence[str], folder: Path) -> PersistentAlignment:
    """Align the entities of all sites, and keep what the coordinator knows of it.

    The earlier alignment is removed: sessions that depend on it are refused.
    """
    alignment = engine.run(align_persistently(sites, secrets.token_hex(8), secrets.token_hex(8)), Ledger())
    alignment.save(folder)
    return alignment


def load_linked_tables(
    folder: Path, schemas: Mapping[str, TableSchema], tables: Mapping[str, Table]
) -> tuple[Alignment, str]:
    """Take the alignment of a federation and its name, without the sites that are not connected to.

    Entities are numbers. PartitionError lists every site that is in the order of another alignment or of
    none, and tables that do not fit together, with what to do.
    """
    complete = load_alignment(folder)
    raise_problems(list(vertical_problems(schemas)))
    raise_problems(list(alignment_problems(folder, complete, schemas)))
    assert complete is not None
    found = complete.among(tuple(schemas))
    rows = {site: found.rows(site) for site in schemas}
    for numbers in rows.values():
        numbers.flags.writeable = False
    empty = {site: int((~found.seen[site]).sum()) for site in schemas}
    return Alignment(pd.RangeIndex(found.n_entities), tables, rows, empty), found.name


def vertical_problems(schemas: Mapping[str, TableSchema]) -> Iterator[str]:
    """One line per reason why the tables of the sites cannot be linked."""
    for site, schema in schemas.items():
        if schema.link is None:
            yield (
                f"{site}: it names no key to link its records by. Its owner writes key = [...] into the "
                "section [data] of its site.toml, takes site_column out, and starts the site again."
            )
    yield from shared_column_problems({site: tuple(schema.columns) for site, schema in schemas.items()})


def alignment_problems(
    folder: Path, known: PersistentAlignment | None, schemas: Mapping[str, TableSchema]
) -> Iterator[str]:
    """One line per reason why the sites do not answer in the order that the coordinator knows."""
    links = {site: schema.link for site, schema in schemas.items() if schema.link is not None}
    remedy = f"run 'fedstat federation align {folder}'"
    if known is None:
        yield f"the entities of the sites have not been aligned yet; {remedy}."
        return
    for site, link in links.items():
        if link.changed:
            yield (
                f"{site}: its keys, or which of them have a record, are no longer those that were aligned; "
                f"{remedy}, which ends the sessions of everybody, or connect without it."
            )
        elif site not in known.listed:
            yield f"{site}: it has joined since the entities were aligned; {remedy}, or connect without it."
        elif link.alignment != known.name:
            held = "another alignment than the coordinator" if link.alignment else "no alignment any more"
            yield (
                f"{site}: it holds {held}; {remedy}, or connect without it. A journal of an earlier "
                "alignment cannot be gone on with."
            )
        elif schemas[site].n_rows != int(known.seen[site].sum()):
            yield f"{site}: it has another number of records than when it was aligned; {remedy}."


def alignment_status(known: PersistentAlignment | None, site: str, schema: TableSchema) -> str:
    """Return in a few words whether a site has the alignment that the coordinator knows."""
    if schema.link is None:
        return "it has no key"
    if schema.link.changed:
        return "its keys have changed"
    if known is None or not schema.link.alignment:
        return "not yet"
    return "yes" if schema.link.alignment == known.name and site in known.listed else "with others"


# ----------------------------------------------------------------------------------------------------
# A partition whose sites are other processes, and the requests for the connection.


class ConnectedSite:
    """A site of a connected partition: its name, its fingerprint, and its own description.

    Policy and description serve a dry run; the site itself enforces them.
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
            "process of its own",
            remedy=Remedy("fedstat site check FOLDER", "Ask its owner ('{call}' shows what may leave)"),
        )


class ConnectedTable:
    """The description of a table at another machine: columns and number of rows, but no rows."""

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
    transport: Transport | None = None,
    quorum: int = 0,
    purpose: Purpose = NO_PURPOSE,
) -> PartitionParts:
    """Ask the sites of a federation for the schema of their tables, once they hold what they signed."""
    load_families()
    federation = read_federation(path)
    purpose = federation.stated_purpose(purpose)
    fingerprints = _selected_sites(federation, without)
    _check_quorum(federation, quorum, len(fingerprints))
    if transport is None:
        _check_alive(federation, tuple(fingerprints))
        transport = open_transport(federation, sites=tuple(fingerprints))
    remote = {name: RemoteSite(name, transport) for name in fingerprints}
    heads = LedgerCheckpoints(federation.folder, fingerprints)
    notes = NoteKeeper(federation.folder, purpose)
    engine = RemoteEngine(remote, None if journal is None else Journal(Path(journal)), heads, purpose, notes)
    # Heads last: the set of known heads changes, and a journal identifies the other requests by position.
    request = side_by_side(
        request_schemas(tuple(fingerprints), secrets.token_hex(8)),
        request_ledger_heads(heads.known(), secrets.token_hex(8)),
    )
    schemas, now = engine.run(request, Ledger())
    heads.keep(now)
    engine.installed = {name: schema.release for name, schema in schemas.items()}
    for remark in version_remarks(schemas):
        warn(remark, VersionWarning)
    for remark in (*change_remarks(schemas), *_dictionary_remarks(federation, schemas)):
        warn(remark, DataWarning)
    tables = {name: ConnectedTable(name, schema) for name, schema in schemas.items()}
    sites = {name: ConnectedSite(name, key, schemas[name]) for name, key in fingerprints.items()}
    options = PartitionOptions("condition", federation.min_count)
    if federation.layout == "horizontal":
        alignment, site_column = _stack_connected(schemas, tables)
        parts = PartitionParts("horizontal", (), alignment, options, sites, site_column, engine)
        found = _count_shared_keys(federation, RemoteEngine(remote, None, heads, purpose), schemas)
        return replace(parts, quorum=quorum, shared_keys=found)
    alignment, aligned_as = load_linked_tables(federation.folder, schemas, tables)
    key = next(schema.link.key for schema in schemas.values() if schema.link is not None)
    # at a site that is left out the coordinator has no one to answer in place
    at = federation.coordinator if federation.coordinator in sites else APART
    return PartitionParts(
        "vertical", key, alignment, options, sites, engine=engine, aligned_as=aligned_as, coordinator=at
    )


SHARED_KEYS = "shared_keys.json"


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """About how many keys several sites have, and of which tables: number of rows and time of the change."""

    tables: Mapping[str, tuple[int, str]]
    keys: int


def _count_shared_keys(
    federation: FederationDescription, engine: RemoteEngine, schemas: Mapping[str, TableSchema]
) -> int:
    """Return about how many keys several sites have, and warn of them; the sites count once for their tables.

    Sites without keys, without a common secret, or whose owner approves each analysis, take no part.
    """
    tables = {site: (one.n_rows, one.changed) for site, one in schemas.items() if one.compares_keys}
    if len(tables) < 2:
        return 0
    path = federation.folder / SHARED_KEYS
    try:
        known = state_formats.SHARED_KEYS.read_record(SharedKeys, path.read_bytes(), f"'{path}'")
    except (OSError, FedstatError):
        known = None
    if known is None or dict(known.tables) != tables:
        names, session, ledger = tuple(tables), secrets.token_hex(8), Ledger()
        counting = request_shared_keys(names, sum(n for n, _ in tables.values()), session)
        try:
            found = engine.run(with_receipt(counting, names, session, ledger), ledger)
        except FedstatError as error:
            warn(f"the keys of the sites were not compared: {error}", DataWarning)
            return 0
        known = SharedKeys(tables, found or 0)
        with suppress(OSError):  # they count again at the next connection
            write_atomic(path, state_formats.SHARED_KEYS.write_record(known).encode())
    if known.keys:
        warn(
            f"about {known.keys:,} keys are at several sites: if equal keys are one person, rows are not "
            "independent, and standard errors of models are too small",
            DataWarning,
        )
    return known.keys


def _dictionary_remarks(
    federation: FederationDescription, schemas: Mapping[str, TableSchema]
) -> Iterator[str]:
    """Yield in what descriptions of the sites differ from the dictionary of the study, if there is one."""
    if not (federation.folder / IDENTITY).exists():  # a caller's own transport needs no keys
        return
    key = coordinator_identity(federation.folder).public.fingerprint
    dictionary = read_accepted(federation.folder, key)
    if dictionary is None or federation.layout != "horizontal":
        return
    found = {site: dictionary.departures(schema.published) for site, schema in schemas.items()}
    lines = [
        f"{site}: {', '.join(f'{name!r} ({how})' for name, how in differ.items())}"
        for site, differ in found.items()
        if differ
    ]
    if lines:
        yield (
            f"descriptions of columns differ from the dictionary of the study. {'; '.join(lines)}. Owners "
            "see this by 'fedstat site check', and correct columns.toml"
        )


def _stack_connected(
    schemas: Mapping[str, TableSchema], tables: Mapping[str, ConnectedTable]
) -> tuple[Alignment, str]:
    """Rows of one site after those of another, and the name that all have for the site itself."""
    raise_problems(schema_problems(schemas))
    n_rows = {name: table.n_rows for name, table in tables.items()}
    entities = pd.RangeIndex(sum(n_rows.values()))
    (site_column,) = {schema.site_column for schema in schemas.values()}
    return Alignment(entities, tables, RowRanges(n_rows), dict.fromkeys(tables, 0)), site_column


def _selected_sites(federation: FederationDescription, without: Sequence[str]) -> dict[str, str]:
    """Fingerprints of the sites that are not left out."""
    if isinstance(without, str):
        raise PartitionError(f"without: expected a list of sites, received a text; write [{without!r}]")
    unknown = sorted(set(without) - set(federation.sites))
    if unknown:
        there = ", ".join(federation.sites) or "none"
        raise PartitionError(f"without: there is no site {', '.join(unknown)}; there are {there}")
    request = {name: key for name, key in federation.sites.items() if name not in without}
    if not request:
        raise PartitionError(
            f"'{federation.folder / FEDERATION_FILENAME}' lists no site to ask",
            remedy=join_remedy(federation.folder),
        )
    return request


def _check_alive(federation: FederationDescription, names: Sequence[str]) -> None:
    """Give up on sites that were last seen longer ago than a reply may take, and are not seen again soon."""
    if federation.transport != FOLDER_TRANSPORT:
        return
    until, exchange = time.monotonic() + SEEN_AGAIN, Path(federation.exchange)
    while True:
        silent = {
            name: age for name in names if (age := last_alive(exchange, name) or 0.0) > federation.timeout
        }
        if not silent:
            return
        if time.monotonic() > until:
            break
        time.sleep(SEEN_AGAIN / 30)
    ages = {
        name: f"{age:.0f} seconds" if age < 120 else f"{age / 60:,.0f} minutes"
        for name, age in silent.items()
    }
    seen = ", ".join(f"{name} {age} ago" for name, age in ages.items())
    raise EngineError(
        f"the services of these sites were seen last: {seen}. Ask their owners for  fedstat site status",
        remedy=Remedy(
            "ClientPartition.connect(..., without={sites})", ", or connect without them: {arguments}"
        ).filled(sites=list(silent)),
    )


def _check_quorum(federation: FederationDescription, quorum: object, n_sites: int) -> None:
    if not isinstance(quorum, int) or isinstance(quorum, bool) or not 0 <= quorum <= n_sites:
        raise PartitionError(
            f"quorum: expected a whole number up to the {n_sites} sites, received {quorum!r}"
        )
    if quorum and federation.layout != "horizontal":
        raise PartitionError(
            "quorum: in the vertical layout no fit can continue without a site, because only this site has "
            "its columns. Connect without this site, and fit a model without its columns",
            remedy=Remedy("ClientPartition.connect(..., quorum=0)", ", or wait for it with {arguments}"),
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
        reported = ", ".join(f"{site!r}: {schema.site_column!r}" for site, schema in schemas.items())
        yield f"the sites have different names for the site itself ({reported}); agree on one site_column"
    common = common_columns([tuple(schema.columns) for schema in schemas.values()])
    if not common:
        yield "no column is at every site. Check that all sites spell their columns in the same way."
    yield from curve_problems(
        {site: {name: one.empty() for name, one in s.curves.items()} for site, s in schemas.items()}
    )
    for name in common:
        kinds = {site: s.columns[name] for site, s in schemas.items() if s.columns[name] is not None}
        # one kind: integers with missing cells are read as decimals
        plain = {site: "numbers" if kind == "whole numbers" else kind for site, kind in kinds.items()}
        if len(set(plain.values())) > 1:
            reported = ", ".join(f"{kind} at {site!r}" for site, kind in kinds.items())
            yield f"column {name!r} holds {reported}. One of the sites converts it, or leaves it out."
