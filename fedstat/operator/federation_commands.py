"""Commands of a coordinator: make its folder, add sites, see whether they answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedstat.errors import FedstatError, PartitionError
from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.carry.bucket.store import given_exchange
from fedstat.federation.carry.exchange.part import is_bucket
from fedstat.federation.carry.flare.kit import FLARE
from fedstat.federation.carry.flare.provision import check_address, check_flare_name
from fedstat.federation.carry.remote import Carrier, Closing, RemoteEngine, RemoteSite
from fedstat.federation.carry.site_folder import IDENTITY
from fedstat.federation.door.families import load_families
from fedstat.federation.files import write_whole
from fedstat.federation.partition.connect import schema_problems
from fedstat.federation.partition.connect_vertical import align_federation, alignment_problems, standing
from fedstat.federation.partition.federation_file import (
    FEDERATION,
    coordinator_identity,
    open_carrier,
    read_federation,
)
from fedstat.federation.rounds.engine import LocalEngine
from fedstat.federation.rounds.lasting_alignment import LastingAlignment, load_alignment
from fedstat.federation.rounds.schema import TableSchema, ask_schemas, version_remarks
from fedstat.operator.enrolling import members
from fedstat.operator.enrolling.cards import COMPARE, SITE, Card, make_folder, read_card
from fedstat.operator.enrolling.pairs import pair_problems
from fedstat.operator.enrolling.pins import check_replaced, same
from fedstat.operator.enrolling.rosters import roster_remarks
from fedstat.operator.flare_commands import heed_members
from fedstat.operator.writing.entries import quoted, set_entry
from fedstat.operator.writing.screen import columns, heading, tell_problems, typed
from fedstat.operator.writing.templates import BY_BUCKET, BY_FLARE, BY_FOLDER, COLUMNS, ROWS
from fedstat.operator.writing.templates import FEDERATION as TEMPLATE

LAYOUTS = {"horizontal": ROWS, "vertical": COLUMNS}


def new(
    folder: Path,
    name: str | None,
    exchange: str | None,
    layout: str,
    carrier: str,
    host: str | None,
    port: int | None,
) -> int:
    """Make a coordinator's folder: keys, federation.toml and public card."""
    carried = _by_flare(host, port) if carrier == FLARE else _by_folder(exchange)
    name = name or folder.name
    fingerprint = make_folder(folder, FEDERATION).public.fingerprint
    text = TEMPLATE.format(folder=folder, name=quoted(name), layout=LAYOUTS[layout], carried=carried)
    write_whole(folder / FEDERATION, text.encode())
    files = [
        (IDENTITY, "private keys, for this account alone; whoever has them asks in your name"),
        (FEDERATION, "the sites, and how they are reached"),
    ]
    Card(name, COORDINATOR, fingerprint).hand_out(folder, files)
    print(f"\nNext: add the card of every site by    fedstat federation join {typed(folder)} CARD")
    print(f"      then sign who takes part by      fedstat federation roster {typed(folder)}")
    return 0


def _by_folder(exchange: str | None) -> str:
    """Entries of federation.toml that say which folder or bucket carries the messages."""
    place = "exchange" if exchange is None else given_exchange(exchange)
    return (BY_BUCKET if is_bucket(place) else BY_FOLDER).format(exchange=quoted(place))


def _by_flare(host: str | None, port: int | None) -> str:
    """Entries of federation.toml that say where the FLARE server is."""
    if host is None or port is None:
        raise PartitionError("NVIDIA FLARE needs --host and --port, at which the sites will reach its server")
    check_address(host, port)
    return BY_FLARE.format(host=quoted(host), port=port)


def join(folder: Path, card: Path, replace: str = "", again: bool = False) -> int:
    """Add the site of a card."""
    federation, told = read_federation(folder), read_card(card)
    if told.role != SITE:
        raise PartitionError(f"'{card}' is the card of a coordinator; sites are added here")
    if federation.carrier == FLARE:
        check_flare_name(told.name)
    known = federation.sites.get(told.name, "")
    if known and same(known, told.fingerprint):
        print(f"{told.name} was added before.")
        return 0
    other = [site for site, key in federation.sites.items() if same(key, told.fingerprint)]
    if other:
        raise PartitionError(
            f"the key on this card is that of site {other[0]}; take that out before it joins under another "
            f"name: fedstat federation remove {typed(folder)} {typed(Path(other[0]))}, then join with --again"
        )
    check_replaced(f"site {told.name}", known, told.fingerprint, replace)
    members.check_again(folder, federation, told, again)
    set_entry(folder / FEDERATION, "sites", told.name, told.fingerprint)
    if again:
        heed_members(folder)
    if federation.layout == "vertical" and load_alignment(federation.folder) is not None:
        print(f"Its entities have to be aligned:    fedstat federation align {typed(folder)}\n")
    place = [*federation.sites, *([] if known else [told.name])].index(told.name) + 1
    print(f"{told.name} is site {place} of {federation.name}:\n\n  {told.fingerprint}\n")
    print(COMPARE)
    if federation.carrier == FLARE:
        print(f"Then certify it by    fedstat federation provision {typed(folder)} {told.name}.request")
    return 0


def remove(folder: Path, name: str) -> int:
    """Take a site out; over NVIDIA FLARE the server then refuses its certificate."""
    code = members.remove(folder, name)
    heed_members(folder)
    return code


def test(folder: Path, timeout: float) -> int:
    """Ask every site for its schema, and time it."""
    load_families()
    federation = read_federation(folder)
    if not federation.sites:
        raise PartitionError(f"no site has been added yet: fedstat federation join {folder} CARD")
    coordinator_identity(federation.folder)
    carrier = open_carrier(federation, timeout)
    print(heading(f"Federation {federation.name}"))
    schemas, problems = _ask_all(carrier, federation.sites)
    problems += pair_problems(carrier, tuple(schemas))
    problems += members.revoked_problems(federation)
    if isinstance(carrier, Closing):
        carrier.close()
    problems += schema_problems(schemas, federation.layout) if schemas else ()
    if federation.layout == "vertical":
        print(alignment_table(folder, schemas) + "\n")
        problems += alignment_problems(folder, load_alignment(folder), schemas)
    for remark in version_remarks(schemas):
        print(f"  Note: {remark}.\n")
    for remark in roster_remarks(folder):
        print(f"  {remark}\n")
    if not problems:
        print(f'  In Python:    partition = fedstat.ClientPartition.connect("{folder / FEDERATION}")')
    return tell_problems(problems)


def _ask_all(carrier: Carrier, sites: Iterable[str]) -> tuple[dict[str, TableSchema], list[str]]:
    """Print who answers, and how fast; the schemas of those, and why the others do not."""
    rows, problems, schemas = (
        [("site", "answers", "seconds", "rows", "columns", "fedstat", "families")],
        [],
        {},
    )
    for site in sites:
        began = time.monotonic()
        # one by one, not in one round, which would end with the first site that does not answer
        engine = LocalEngine({site: RemoteSite(site, carrier)})
        try:
            schema = engine.run(ask_schemas((site,), secrets.token_hex(8)), Ledger())[site]
        except FedstatError as error:
            problems.append(str(error))
            rows.append((site, "no", *5 * ("",)))
            continue
        schemas[site] = schema
        seconds = f"{time.monotonic() - began:.2f}"
        counts = f"{schema.n_rows:,}", str(len(schema.columns))
        release = schema.release
        rows.append((site, "yes", seconds, *counts, release.version, str(len(release.families))))
    print(columns(rows, head=True, right=(2, 3, 4, 6)) + "\n")
    return schemas, problems


def align(folder: Path, timeout: float | None) -> int:
    """Align the entities of all sites of a federation, once for all models."""
    load_families()
    federation = read_federation(folder)
    if federation.layout != "vertical":
        raise PartitionError(
            f"'{folder}' is of the horizontal layout, in which no records are linked: nothing to align"
        )
    if len(federation.sites) < 2:
        raise PartitionError(
            f"there are {len(federation.sites)} sites, and at least 2 are aligned; add one with 'fedstat "
            f"federation join {folder} CARD'"
        )
    earlier = load_alignment(federation.folder)
    carrier = open_carrier(federation, timeout)
    engine = RemoteEngine({site: RemoteSite(site, carrier) for site in federation.sites})
    began = time.monotonic()
    try:
        alignment = align_federation(engine, tuple(federation.sites), federation.folder)
    finally:
        engine.close()
    print(heading(f"Federation {federation.name}: aligned as {alignment.name}"))
    print(_sizes(alignment))
    print(f"\n  {alignment.n_entities:,} entities in all, in {time.monotonic() - began:.1f} s")
    if earlier is not None:
        print(f"  Models that rest on the alignment before, {earlier.name}, are answered no longer.")
    return 0


def _sizes(alignment: LastingAlignment) -> str:
    """Keys and records of every site."""
    rows = [("site", "keys", "with a record")]
    rows += [
        (site, f"{len(numbers):,}", f"{int(alignment.seen[site].sum()):,}")
        for site, numbers in alignment.listed.items()
    ]
    return columns(rows, head=True, right=(1, 2))


def alignment_table(folder: Path, schemas: Mapping[str, TableSchema]) -> str:
    """Say of every site that answers whether it is aligned as the coordinator knows it."""
    known = load_alignment(folder)
    rows = [("site", "key", "aligned")]
    for site, schema in schemas.items():
        key = ", ".join(schema.link.key) if schema.link is not None else ""
        rows.append((site, key, standing(known, site, schema)))
    return columns(rows, head=True)
