"""Commands of a coordinator: make its folder, add sites, test connections, and report the status."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fedstat.codec import to_json, to_plain
from fedstat.errors import FedstatError, MessageError, PartitionError, PinError, PolicyError, Remedy
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.site import load_families
from fedstat.federation.files import write_atomic
from fedstat.federation.message import NO_PURPOSE, Purpose, Request
from fedstat.federation.partition.connect import (
    align_connected_sites,
    alignment_problems,
    alignment_status,
    schema_problems,
)
from fedstat.federation.partition.federation_file import (
    FEDERATION_FILENAME,
    FOLDER_TRANSPORT,
    FederationDescription,
    coordinator_identity,
    join_remedy,
    open_transport,
    read_federation,
)
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import FAMILY, KeysAnnounced, KeysRequest
from fedstat.federation.protocols.linkage import PersistentAlignment, load_alignment
from fedstat.federation.protocols.schema import (
    TableSchema,
    request_schemas,
    request_versions,
    version_remarks,
)
from fedstat.federation.transport.bucket import given_exchange
from fedstat.federation.transport.flare.analysis import query_server
from fedstat.federation.transport.flare.provision import (
    FLARE,
    SERVER,
    check_address,
    check_flare_name,
    days_left,
)
from fedstat.federation.transport.mailbox import SiteMailbox, is_bucket, last_alive
from fedstat.federation.transport.remote import ClosableTransport, RemoteEngine, RemoteSite, Transport
from fedstat.federation.transport.site_folder import IDENTITY
from fedstat.operator import flare_commands, rosters
from fedstat.operator.cards import (
    COMPARE,
    SITE,
    Card,
    check_replaced_pin,
    make_folder,
    read_card,
    same_fingerprint,
)
from fedstat.operator.config_files import (
    BY_BUCKET,
    BY_FLARE,
    BY_FOLDER,
    COLUMNS,
    ROWS,
    set_entry,
    toml_quoted,
)
from fedstat.operator.config_files import FEDERATION as TEMPLATE
from fedstat.operator.flare_commands import enforce_revocations
from fedstat.operator.flare_process import is_running
from fedstat.operator.rosters import (
    accepted_numbers,
    collect_acceptances,
    last_roster,
    revoked_problems,
    roster_remarks,
)
from fedstat.operator.terminal import format_columns, print_problems, shell_path, underlined

# ----------------------------------------------------------------------------------------------------
# A test of the agreement on keys, which finds the sites that have not pinned each other.


def pair_problems(transport: Transport, sites: Sequence[str], purpose: Purpose = NO_PURPOSE) -> Iterator[str]:
    """Yield one line for each site that cannot agree on keys with the others, with the names of these.

    Each site receives alone the request that starts every masked sum: a fit would end at the first refusal.
    Sites whose policy refuses masked sums are not listed.
    """
    if len(sites) < 2:
        return
    session = secrets.token_hex(8)
    engines = {site: RemoteEngine({site: RemoteSite(site, transport)}, purpose=purpose) for site in sites}

    def request(site: str, questions: dict[str, str]) -> list[str] | FedstatError:
        requests = [Request(site, FAMILY, step, {}, session, text) for step, text in questions.items()]
        try:
            return engines[site].run(_one_round(requests), Ledger())
        except FedstatError as error:
            return error

    def request_all(questions: Callable[[str], dict[str, str]]) -> dict[str, list[str] | FedstatError]:
        with ThreadPoolExecutor(max_workers=len(sites)) as pool:
            return dict(zip(sites, pool.map(lambda site: request(site, questions(site)), sites), strict=True))

    # Among those that show their key: an owner may refuse masked sums on purpose.
    shown = request_all(lambda _: {"introduce": "{}"})
    public = {site: one[0] for site, one in shown.items() if isinstance(one, list)}
    if len(public) < 2:
        return
    requested = to_json(KeysRequest(session, tuple(public)))
    reported = request_all(lambda site: {"announce": requested} if site in public else {})
    announced = {site: one[0] for site, one in reported.items() if isinstance(one, list) and one}
    content = to_json(KeysAnnounced(public, announced))
    ended = request_all(lambda site: {"finish": content} if site in announced else {})
    errors = [
        one[site] for site in sites for one in (shown, reported, ended) if isinstance(one[site], FedstatError)
    ]
    # the others cannot finish either then, and their errors add nothing
    pins = [error for error in errors if isinstance(error, PinError)]
    yield from (str(error) for error in pins or errors if not isinstance(error, PolicyError))


def _one_round(requests: list[Request]) -> FitProtocol[list[str]]:
    replies = yield requests
    return [reply.text for reply in replies]


# ----------------------------------------------------------------------------------------------------
# The status of a federation at its coordinator, for people and for programs; no request is sent to a site.

FORM = 1


@dataclass(frozen=True, slots=True)
class SiteReport:
    """The status of a site, as the coordinator knows it.

    Whether it is connected (NVIDIA FLARE), the number of waiting requests (folder), and the roster that it
    accepted last; `seen` is the number of seconds since the service was seen in the exchange folder. Null
    where this is not known.
    """

    connected: bool | None
    waiting: int | None
    roster: int | None
    seen: float | None = None


PATIENCE = 120.0
"""Seconds after which a service that was not seen in the exchange folder is reported."""


@dataclass(frozen=True, slots=True)
class FederationStatus:
    """The status of a federation; with NVIDIA FLARE also server, certificates and open analysis."""

    form: int
    federation: str
    transport: str
    layout: str
    sites: dict[str, SiteReport]
    revoked: list[str]
    roster: int | None
    server: bool | None
    certificate_days: int | None
    analyses: list[str] | None
    problems: list[str]


def show_federation_status(folder: Path, as_json: bool = False) -> int:
    """Show the status of a federation; return 0 if there are no problems."""
    federation = read_federation(folder)
    if federation.transport == FLARE and not as_json:
        return flare_commands.show_flare_status(folder)
    found = _standing(federation)
    if as_json:
        print(json.dumps(to_plain(found), indent=2))
        return 1 if found.problems else 0
    print(underlined(f"Federation {found.federation}"))
    rows = [("site", "waiting", "roster accepted")]
    rows += [
        (name, _server_report(one.waiting), _server_report(one.roster)) for name, one in found.sites.items()
    ]
    print(format_columns(rows, head=True, right=(1, 2)) + "\n")
    print(f"  To test whether they answer:    fedstat federation test {shell_path(folder)}")
    return print_problems(found.problems)


def federation_status(folder: Path) -> FederationStatus:
    """Return the status of a federation, without a request to a site."""
    return _standing(read_federation(folder))


def test_sites(folder: Path, timeout: float = 20.0) -> tuple[dict[str, TableSchema], list[str]]:
    """Request the schema of every site, all at the same time; return the problems of the others."""
    load_families()
    federation = read_federation(folder)
    transport = open_transport(federation, timeout)

    def request(site: str) -> TableSchema | FedstatError:
        engine = RemoteEngine({site: RemoteSite(site, transport)}, purpose=federation.stated_purpose())
        try:
            return engine.run(request_schemas((site,), secrets.token_hex(8)), Ledger())[site]
        except FedstatError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(len(federation.sites), 1)) as pool:
        found = dict(zip(federation.sites, pool.map(request, federation.sites), strict=True))
    if isinstance(transport, ClosableTransport):
        transport.close()
    schemas = {site: one for site, one in found.items() if isinstance(one, TableSchema)}
    return schemas, [str(one) for one in found.values() if isinstance(one, FedstatError)]


def _server_report(count: int | None) -> str:
    return "not known" if count is None else str(count)


def _standing(federation: FederationDescription) -> FederationStatus:
    folder, by_flare = federation.folder, federation.transport == FLARE
    home = folder / FLARE
    has_kit = by_flare and (home / SERVER).exists()
    runs = has_kit and is_running(home)
    reported = query_server(folder) if runs else None
    roster = last_roster(federation)
    numbers = dict[str, int]()
    if roster is not None:
        collect_acceptances(federation, roster)  # 'federation test' reports files that are not valid
        numbers = accepted_numbers(federation, roster)
    sites = {
        name: SiteReport(
            connected=(reported is not None and name in reported.connected) if by_flare else None,
            waiting=_waiting(federation, name) if federation.transport == FOLDER_TRANSPORT else None,
            roster=numbers.get(name),
            seen=last_alive(Path(federation.exchange), name)
            if federation.transport == FOLDER_TRANSPORT
            else None,
        )
        for name in federation.sites
    }
    return FederationStatus(
        form=FORM,
        federation=federation.name,
        transport=federation.transport,
        layout=federation.layout,
        sites=sites,
        revoked=list(federation.revoked.values()),
        roster=None if roster is None else roster.number,
        server=runs if by_flare else None,
        certificate_days=days_left(home / SERVER) if has_kit else None,
        analyses=None if reported is None else [str(job).lower() for job in reported.jobs.values()],
        problems=[*revoked_problems(federation), *_problems(federation, sites, has_kit, runs)],
    )


def _problems(
    federation: FederationDescription, sites: dict[str, SiteReport], has_kit: bool, runs: bool
) -> Iterator[str]:
    folder = shell_path(federation.folder)
    if not sites:
        yield f"no site has been added yet: fedstat federation join {folder} CARD"
    if federation.transport == FOLDER_TRANSPORT:
        for name in (name for name, one in sites.items() if one.waiting is None):
            yield f"{name} has no folder in '{federation.exchange}': the site has not been started"
        for name, one in sites.items():
            if one.seen is None and one.waiting:
                yield (
                    f"{name}: {one.waiting} requests wait, and its service was never seen. Ask its owner "
                    "for  fedstat site status"
                )
            if one.seen is not None and one.seen > PATIENCE:
                yield (
                    f"{name} was seen {one.seen:,.0f} s ago: its service is not running, or a request "
                    "takes long. Ask its owner for  fedstat site status"
                )
    if federation.transport != FLARE:
        return
    renew = f"make them with    fedstat federation provision {folder}"
    if not has_kit:
        yield f"there are no kits yet: {renew}"
        return
    yield from flare_commands.certificate_problems(federation.folder / FLARE / SERVER, renew)
    if not runs:
        yield f"the server is not running; start it with    fedstat federation serve {folder}"
        return
    for name in (name for name, one in sites.items() if not one.connected):
        yield f"{name} is not connected"


def _waiting(federation: FederationDescription, name: str) -> int | None:
    try:
        return len(SiteMailbox(Path(federation.exchange, name)).open_numbers()[0])
    except OSError:
        return None


# ----------------------------------------------------------------------------------------------------
# Commands of a coordinator: make its folder, add sites, test whether they answer.

LAYOUTS = {"horizontal": ROWS, "vertical": COLUMNS}


def new_federation(
    folder: Path,
    name: str | None,
    exchange: str | None,
    layout: str,
    transport: str,
    host: str | None,
    port: int | None,
) -> int:
    """Make the folder of a coordinator: keys, federation.toml and public card."""
    carried = _by_flare(host, port) if transport == FLARE else _by_folder(exchange)
    name = name or folder.name
    fingerprint = make_folder(folder, FEDERATION_FILENAME).public.fingerprint
    text = TEMPLATE.format(folder=folder, name=toml_quoted(name), layout=LAYOUTS[layout], carried=carried)
    write_atomic(folder / FEDERATION_FILENAME, text.encode())
    files = [
        (IDENTITY, "private keys; keep them secret: requests signed with them are in your name"),
        (FEDERATION_FILENAME, "the sites, and how requests reach them"),
    ]
    Card(name, COORDINATOR, fingerprint).hand_out(folder, files)
    print(f"\nNext: add the card of every site with    fedstat federation join {shell_path(folder)} CARD")
    print(f"      then sign the list of sites with   fedstat federation roster {shell_path(folder)}")
    return 0


def _by_folder(exchange: str | None) -> str:
    """Return the entries of federation.toml for a folder or a bucket."""
    place = "exchange" if exchange is None else given_exchange(exchange)
    return (BY_BUCKET if is_bucket(place) else BY_FOLDER).format(exchange=toml_quoted(place))


def _by_flare(host: str | None, port: int | None) -> str:
    """Return the entries of federation.toml for NVIDIA FLARE."""
    if host is None or port is None:
        raise PartitionError(
            "NVIDIA FLARE needs --host and --port: the address at which sites reach the server"
        )
    check_address(host, port)
    return BY_FLARE.format(host=toml_quoted(host), port=port)


def join_site(folder: Path, card: Path, replace: str = "", again: bool = False) -> int:
    """Add the site that a card describes."""
    federation, reported = read_federation(folder), read_card(card)
    if reported.role != SITE:
        raise PartitionError(f"'{card}' is the card of a coordinator; expected the card of a site")
    if federation.transport == FLARE:
        check_flare_name(reported.name)
    known = federation.sites.get(reported.name, "")
    if known and same_fingerprint(known, reported.fingerprint):
        print(f"{reported.name} is a site of this federation already.")
        return 0
    other = [site for site, key in federation.sites.items() if same_fingerprint(key, reported.fingerprint)]
    if other:
        raise PartitionError(
            f"the key on this card is that of site {other[0]}",
            remedy=Remedy(
                "fedstat federation remove {folder} {site}",
                "remove that site before it joins under another name: {call}, then join with --again",
            ).filled(folder=shell_path(folder), site=shell_path(Path(other[0]))),
        )
    check_replaced_pin(f"site {reported.name}", known, reported.fingerprint, replace)
    rosters.check_not_revoked(folder, federation, reported, again)
    set_entry(folder / FEDERATION_FILENAME, "sites", reported.name, reported.fingerprint)
    if again:
        enforce_revocations(folder)
    if federation.layout == "vertical" and load_alignment(federation.folder) is not None:
        print(f"Next, align its entities:    fedstat federation align {shell_path(folder)}\n")
    place = [*federation.sites, *([] if known else [reported.name])].index(reported.name) + 1
    print(f"{reported.name} is site {place} of {federation.name}:\n\n  {reported.fingerprint}\n")
    print(COMPARE)
    if federation.transport == FLARE:
        print(
            f"Then certify it with    fedstat federation provision {shell_path(folder)} "
            f"{reported.name}.request"
        )
    return 0


def remove_site(folder: Path, name: str) -> int:
    """Remove a site; over NVIDIA FLARE the server then refuses its certificate."""
    code = rosters.revoke_member(folder, name)
    enforce_revocations(folder)
    return code


def test_federation(folder: Path, timeout: float) -> int:
    """Request the schema of every site, and measure the time of each reply."""
    load_families()
    federation = read_federation(folder)
    if not federation.sites:
        raise PartitionError("no site has been added yet", remedy=join_remedy(folder))
    coordinator_identity(federation.folder)
    transport = open_transport(federation, timeout)
    print(underlined(f"Federation {federation.name}"))
    purpose = federation.stated_purpose()
    schemas, problems = _request_all(transport, federation.sites, purpose)
    problems += pair_problems(transport, tuple(schemas), purpose)
    problems += rosters.revoked_problems(federation)
    if isinstance(transport, ClosableTransport):
        transport.close()
    problems += schema_problems(schemas, federation.layout) if schemas else ()
    if federation.layout == "vertical":
        print(alignment_table(folder, schemas) + "\n")
        problems += alignment_problems(folder, load_alignment(folder), schemas)
    for remark in version_remarks(schemas):
        print(f"  Note: {remark}.\n")
    for remark in roster_remarks(folder):
        print(f"  {remark}\n")
    if not problems:
        print(
            f'  In Python:    partition = fedstat.ClientPartition.connect("{folder / FEDERATION_FILENAME}")'
        )
    return print_problems(problems)


def _request_all(
    transport: Transport, sites: Iterable[str], purpose: Purpose
) -> tuple[dict[str, TableSchema], list[str]]:
    """Print which sites answer and how fast; return their schemas, and the problems of the others."""
    rows, problems, schemas = (
        [("site", "answers", "seconds", "rows", "columns", "fedstat", "families")],
        [],
        {},
    )
    for site in sites:
        began = time.monotonic()
        # one by one: a common round would end with the first site that does not answer
        engine = RemoteEngine({site: RemoteSite(site, transport)}, purpose=purpose)
        try:
            schema = engine.run(request_schemas((site,), secrets.token_hex(8)), Ledger())[site]
        except FedstatError as error:
            problems.append(str(error))
            rows.append((site, "no", "", "", "", _version_of(engine, site, error), ""))
            continue
        schemas[site] = schema
        seconds = f"{time.monotonic() - began:.2f}"
        counts = f"{schema.n_rows:,}", str(len(schema.columns))
        release = schema.release
        rows.append((site, "yes", seconds, *counts, release.version, str(len(release.families))))
    print(format_columns(rows, head=True, right=(2, 3, 4, 6)) + "\n")
    return schemas, problems


def _version_of(engine: RemoteEngine, site: str, error: FedstatError) -> str:
    """Return the version of a site that answers in another way; empty if it does not answer."""
    if not isinstance(error, MessageError):
        return ""
    try:
        found = engine.run(request_versions((site,), secrets.token_hex(8)), Ledger())[site]
    except FedstatError:
        return ""
    return f"{found.version or 'not known'} (messages {found.messages})"


def align_sites(folder: Path, timeout: float | None) -> int:
    """Align the entities of all sites of a federation, once for all models."""
    load_families()
    federation = read_federation(folder)
    if federation.layout != "vertical":
        raise PartitionError(
            f"'{folder}' has the horizontal layout, in which no records are linked: there is nothing to align"
        )
    if len(federation.sites) < 2:
        raise PartitionError(
            f"an alignment needs at least 2 sites; there are {len(federation.sites)}",
            remedy=join_remedy(folder),
        )
    earlier = load_alignment(federation.folder)
    transport = open_transport(federation, timeout)
    remote = {site: RemoteSite(site, transport) for site in federation.sites}
    engine = RemoteEngine(remote, purpose=federation.stated_purpose())
    began = time.monotonic()
    try:
        alignment = align_connected_sites(engine, tuple(federation.sites), federation.folder)
    finally:
        engine.close()
    print(underlined(f"Federation {federation.name}: aligned as {alignment.name}"))
    print(_sizes(alignment))
    print(f"\n  {alignment.n_entities:,} entities, in {time.monotonic() - began:.1f} s")
    if earlier is not None:
        print(
            f"  Sites refuse requests that use the previous alignment, {earlier.name}. Make such models "
            "again."
        )
    return 0


def _sizes(alignment: PersistentAlignment) -> str:
    """Keys and records of every site."""
    rows = [("site", "keys", "with a record")]
    rows += [
        (site, f"{len(numbers):,}", f"{int(alignment.seen[site].sum()):,}")
        for site, numbers in alignment.listed.items()
    ]
    return format_columns(rows, head=True, right=(1, 2))


def alignment_table(folder: Path, schemas: Mapping[str, TableSchema]) -> str:
    """Report for every site that answers whether it has the alignment that the coordinator knows."""
    known = load_alignment(folder)
    rows = [("site", "key", "aligned")]
    for site, schema in schemas.items():
        key = ", ".join(schema.link.key) if schema.link is not None else ""
        rows.append((site, key, alignment_status(known, site, schema)))
    return format_columns(rows, head=True)
