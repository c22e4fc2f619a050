"""Commands of a coordinator: make its folder, add sites, see whether they answer."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from fedstat.errors import FedstatError, PartitionError
from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.carry.flare.kit import FLARE
from fedstat.federation.carry.flare.provision import check_address, check_flare_name
from fedstat.federation.carry.remote import Carrier, Closing, RemoteSite
from fedstat.federation.carry.site_folder import IDENTITY
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.door.families import load_families
from fedstat.federation.partition.connect import (
    FEDERATION,
    coordinator_identity,
    open_carrier,
    read_federation,
    schema_problems,
)
from fedstat.federation.partition.connect_vertical import alignment_problems
from fedstat.federation.rounds.engine import LocalEngine
from fedstat.federation.rounds.lasting_alignment import load_alignment
from fedstat.federation.rounds.schema import TableSchema, ask_schemas
from fedstat.operator.alignment_commands import alignment_table
from fedstat.operator.cards import FILE, SITE, Card, read_card
from fedstat.operator.entries import quoted, set_entry
from fedstat.operator.screen import columns, heading, typed
from fedstat.operator.site_commands import make_folder
from fedstat.operator.templates import BY_FLARE, BY_FOLDER, COLUMNS, ROWS
from fedstat.operator.templates import FEDERATION as TEMPLATE

LAYOUTS = {"horizontal": ROWS, "vertical": COLUMNS}


def by_folder(exchange: str | None) -> str:
    """Entries of federation.toml that say which folder carries the messages."""
    place = "exchange" if exchange is None else str(Path(exchange).resolve())
    return BY_FOLDER.format(exchange=quoted(place))


def by_flare(host: str | None, port: int | None) -> str:
    """Entries of federation.toml that say where the FLARE server is."""
    if host is None or port is None:
        raise PartitionError("NVIDIA FLARE needs --host and --port, at which the sites will reach its server")
    check_address(host, port)
    return BY_FLARE.format(host=quoted(host), port=port)


def new(folder: Path, name: str, carried: str, layout: str = "horizontal") -> int:
    """Make a coordinator's folder: keys, federation.toml with the entries of its carrier, and public card."""
    make_folder(folder, FEDERATION)
    identity = Identity.generate()
    identity.save(folder / IDENTITY)
    text = TEMPLATE.format(folder=folder, name=quoted(name), layout=LAYOUTS[layout], carried=carried)
    (folder / FEDERATION).write_text(text, encoding="utf-8")
    card = Card(name, COORDINATOR, identity.public.fingerprint).write(folder)
    print(f"'{folder}' is the folder of the coordinator of {name}.\n")
    rows = [
        (IDENTITY, "private keys, for this account alone; whoever has them asks in your name"),
        (FEDERATION, "the sites, and how they are reached"),
        (FILE, "name and fingerprint, for the sites"),
    ]
    print(columns(rows))
    print(f"\nFingerprint  {identity.public.fingerprint}")
    print(f"\nNext: give '{card}' to every site, which enters it by    fedstat site pin FOLDER {FILE}")
    print(f"      add the card of every site by    fedstat federation join {typed(folder)} CARD")
    return 0


def join(folder: Path, path: Path) -> int:
    """Add the site of a card."""
    federation, card = read_federation(folder), read_card(path)
    if card.role != SITE:
        raise PartitionError(f"'{path}' is the card of a coordinator; sites are added here")
    if federation.carrier == FLARE:
        check_flare_name(card.name)
    known = federation.sites.get(card.name)
    if known == card.fingerprint:
        print(f"{card.name} was added before.")
        return 0
    if known is not None:
        raise PartitionError(
            f"there is a site '{card.name}' with another key; where it has new keys, take its old line out "
            f"of '{folder / FEDERATION}' first"
        )
    set_entry(folder / FEDERATION, "sites", card.name, card.fingerprint)
    if federation.layout == "vertical" and load_alignment(federation.folder) is not None:
        print(f"Its entities have to be aligned:    fedstat federation align {typed(folder)}\n")
    print(f"{card.name} is site {len(federation.sites) + 1} of {federation.name}:\n\n  {card.fingerprint}\n")
    print("Compare it by telephone with what they read out: a card can be exchanged on its way.")
    if federation.carrier == FLARE:
        print(f"Then certify it by    fedstat federation provision {typed(folder)} {card.name}.request")
    return 0


def test(folder: Path, timeout: float) -> int:
    """Ask every site for its schema, and time it."""
    load_families()
    federation = read_federation(folder)
    if not federation.sites:
        raise PartitionError(f"no site has been added yet: fedstat federation join {folder} CARD")
    coordinator_identity(federation.folder)
    carrier = open_carrier(federation, timeout)
    print(heading(f"Federation {federation.name}"))
    rows, problems, schemas = [("site", "answers", "seconds", "rows", "columns")], [], {}
    for site in federation.sites:
        began = time.monotonic()
        try:
            schema = _ask(carrier, site)
        except FedstatError as error:
            problems.append(str(error))
            rows.append((site, "no", "", "", ""))
            continue
        schemas[site] = schema
        seconds = f"{time.monotonic() - began:.2f}"
        rows.append((site, "yes", seconds, f"{schema.n_rows:,}", str(len(schema.columns))))
    if isinstance(carrier, Closing):
        carrier.close()
    print(columns(rows, head=True, right=(2, 3, 4)) + "\n")
    problems += schema_problems(schemas, federation.layout) if schemas else ()
    if federation.layout == "vertical":
        print(alignment_table(folder, schemas) + "\n")
        problems += alignment_problems(folder, load_alignment(folder), schemas)
    for problem in problems:
        print(f"  - {problem}")
    if not problems:
        print(f'  In Python:    partition = fedstat.ClientPartition.connect("{folder / FEDERATION}")')
    return 1 if problems else 0


def _ask(carrier: Carrier, site: str) -> TableSchema:
    engine = LocalEngine({site: RemoteSite(site, carrier)})
    return engine.run(ask_schemas((site,), secrets.token_hex(8)), Ledger())[site]
