"""Commands over NVIDIA FLARE: startup kits, processes of server and sites, and the job of an analysis."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstat.errors import EngineError, PartitionError
from fedstat.federation.audit.ledger_file import LEDGER_FILENAME, read_ledger
from fedstat.federation.files import write_atomic
from fedstat.federation.partition.federation_file import (
    FEDERATION_FILENAME,
    FederationDescription,
    coordinator_identity,
    open_transport,
    read_federation,
)
from fedstat.federation.transport.flare.analysis import Analysis, admit_sites, end_analysis, query_server
from fedstat.federation.transport.flare.provision import (
    AUTHORITY,
    FLARE,
    FOLDER,
    KIT,
    SERVER,
    accept_kit,
    create_kit_request,
    days_left,
    grant_kit,
    prepare_server,
    refuse_certificates,
    remove_stale_jobs,
)
from fedstat.federation.transport.site_folder import (
    DESCRIPTION,
    SiteDescription,
    load_identity,
    open_records,
    read_description,
    read_site_columns,
    read_site_policy,
)
from fedstat.operator.flare_process import FlareProcess, is_running
from fedstat.operator.site_status import describe_budget, describe_counts, read_service_status
from fedstat.operator.terminal import format_columns, print_problems, shell_path, underlined

KITS, REQUEST, GRANTED = "kits", ".request", ".kit"
SOON = 30
"""Days before the end of a certificate from which on it is a problem."""


def has_kit(folder: Path) -> bool:
    """Whether a site has its kit."""
    return (folder / FLARE / KIT).exists()


def uses_flare(folder: Path) -> bool:
    """Whether a site is served over FLARE: it has a kit, and no folder for questions."""
    return has_kit(folder) and not read_description(folder).exchange


def request_kit(folder: Path) -> int:
    """Draw a site's key for FLARE, and write the request for its certificate."""
    name = read_description(folder).name
    path = folder / f"{name}{REQUEST}"
    write_atomic(path, create_kit_request(folder, name, load_identity(folder)))
    print(
        f"'{path}' asks for {name}'s certificate. It holds nothing secret and is signed with {name}'s key.\n"
    )
    print(
        f"Next: give it to the coordinator; then    fedstat site join-kit {shell_path(folder)} "
        f"{name}{GRANTED}"
    )
    return 0


def join_kit(folder: Path, kit: Path) -> int:
    """Make a site's kit of what the coordinator sent."""
    description = read_description(folder)
    require_coordinator(folder, description)
    path = kit / KITS / f"{description.name}{GRANTED}" if kit.is_dir() else kit
    if is_running(folder / FLARE):
        raise EngineError(f"{description.name} is served now; stop it first")
    kit = accept_kit(folder, path.read_bytes(), description.name, description.coordinator, str(path))
    # From local up to the site's folder, wherever that is moved to.
    (kit / "local" / FOLDER).symlink_to(Path(*[os.pardir] * 3), target_is_directory=True)
    print(f"{description.name} has its kit, which runs no code but the installed package's.")
    print(f"Its private key was drawn here, and has not left. Certificate: {_lasts(kit)}.\n")
    if description.exchange:
        print(
            f"'{folder / DESCRIPTION}' still has an 'exchange'; take that line out to be served over FLARE."
        )
    print(f"Next: fedstat site check {shell_path(folder)}, then    fedstat site serve {shell_path(folder)}")
    return 0


def provision(folder: Path, requests: Sequence[Path]) -> int:
    """Make the kits of server and analyst, or renew them, and certify the sites that ask."""
    federation = _flare_federation(folder)
    identity = coordinator_identity(folder)
    server = folder / FLARE / SERVER
    if not server.exists() or days_left(server) < SOON:
        if is_running(folder / FLARE):
            raise EngineError("the server runs now; stop it before its certificate is renewed")
        prepare_server(folder, federation.host, federation.port)
        print(f"The server has its kit; sites will reach it at {federation.host}:{federation.port}.")
        print(f"'{folder / FLARE / AUTHORITY}' certifies who takes part: it is for this account alone.")
    (folder / KITS).mkdir(exist_ok=True)
    for path in requests:
        path = _request_in(path)
        name, granted = grant_kit(folder, path.read_bytes(), federation.sites, identity, f"'{path}'")
        write_atomic(folder / KITS / f"{name}{GRANTED}", granted)
        print(f"{name} is certified: '{folder / KITS / f'{name}{GRANTED}'}', which holds nothing secret.")
    lacking = [name for name in federation.sites if not (folder / KITS / f"{name}{GRANTED}").exists()]
    if lacking:
        print(f"\nStill without a kit: {', '.join(lacking)}. Each asks by    fedstat site request FOLDER")
    print("\nNext: give every site its kit, which it enters by    fedstat site join-kit FOLDER KIT")
    print(f"      start the server by    fedstat federation serve {shell_path(folder)}")
    return 0


def serve_site(folder: Path) -> int:
    """Run a site's FLARE client until SIGTERM."""
    description, kit = read_description(folder), folder / FLARE / KIT
    # what a job will need is required now, while somebody is looking
    require_coordinator(folder, description)
    load_identity(folder)
    read_site_policy(folder)
    read_site_columns(folder, description.name, open_records(folder, description))
    client = json.loads((kit / "startup" / "fed_client.json").read_text())
    host, _, port = client["servers"][0]["service"]["target"].rpartition(":")
    address = host, int(port)
    home = folder / FLARE

    def remarks() -> list[str]:
        return flare_site_problems(folder)

    return FlareProcess("client", description.name, home, kit.resolve(), address, remarks).run()


def require_coordinator(folder: Path, description: SiteDescription) -> None:
    """Require that a site trusts somebody."""
    if not description.coordinator:
        raise PartitionError(
            f"'{folder / DESCRIPTION}' trusts no coordinator, and nobody's questions are answered; pin one "
            f"with 'fedstat site pin {shell_path(folder)} CARD'"
        )


def serve_server(folder: Path) -> int:
    """Run the FLARE server until SIGTERM."""
    federation = _flare_federation(folder)
    kit = folder / FLARE / SERVER
    if not kit.exists():
        raise PartitionError(
            f"there is no server's kit yet: fedstat federation provision {shell_path(folder)}"
        )
    address = federation.host, federation.port
    name = f"the server of {federation.name}"

    def remarks() -> list[str]:
        return _server_problems(folder)

    def prepare() -> None:
        remove_stale_jobs(kit)
        refuse_certificates(kit, _taken_out(read_federation(folder)))

    def conclude() -> None:
        end_analysis(folder, coordinator_identity(folder))

    process = FlareProcess("server", name, folder / FLARE, kit.resolve(), address, remarks)
    process.prepare, process.conclude = prepare, conclude
    return process.run()


def enforce_revocations(folder: Path) -> None:
    """Have the server, where it runs, refuse who was taken out; one that is started reads it by itself."""
    federation = read_federation(folder)
    out = _taken_out(federation)
    if federation.transport != FLARE or not is_running(folder / FLARE):
        return
    admit_sites(folder, federation.sites, out)
    print(f"The server refuses the certificates of: {', '.join(out) or 'nobody'}.")


def _taken_out(federation: FederationDescription) -> list[str]:
    """Names whose certificates are refused: FLARE knows names alone, so none that has a new key."""
    return sorted(set(federation.revoked.values()) - set(federation.sites))


def start_analysis(folder: Path) -> int:
    """Start the job that serves an analysis, unless one runs."""
    federation = _flare_federation(folder)
    analysis = open_transport(federation)
    begun = isinstance(analysis, Analysis) and analysis.started_here
    print(f"An analysis {'is open now' if begun else 'was open before'}; whoever connects joins it.")
    print(f"End it by    fedstat federation stop {shell_path(folder)}")
    return 0


def stop_analysis(folder: Path) -> int:
    """End the job that serves an analysis, and whatever else runs on the server."""
    _flare_federation(folder)
    ended = end_analysis(folder, coordinator_identity(folder))
    print(f"Ended: {', '.join(ended)}." if ended else "No analysis was open.")
    return 0


def show_flare_status(folder: Path) -> int:
    """Show whether the server runs, who is connected, and how long the certificates last."""
    federation = _flare_federation(folder)
    print(underlined(f"Federation {federation.name}"))
    home = folder / FLARE
    if not (home / SERVER).exists():
        print(f"  has no kits yet: fedstat federation provision {shell_path(folder)}")
        return 1
    problems = _server_problems(folder)
    rows = [("server", "running" if is_running(home) else "not running")]
    rows += [("address", f"{federation.host}:{federation.port}"), ("certificates", _lasts(home / SERVER))]
    rows += [(name, "taken out, its kit is refused") for name in _taken_out(federation)]
    if is_running(home):
        reported = query_server(folder)
        rows += [
            (name, "connected" if name in reported.connected else "not connected")
            for name in federation.sites
        ]
        rows += [("analysis", ", ".join(reported.jobs.values()).lower() or "none is open")]
        problems += [
            f"{name} is not connected" for name in federation.sites if name not in reported.connected
        ]
    else:
        problems.append(f"start the server by    fedstat federation serve {shell_path(folder)}")
    print(format_columns(rows))
    return print_problems(problems)


def show_flare_site_status(folder: Path) -> tuple[dict[str, Any], bool]:
    """Tell whether a site is served over FLARE, and what it has done."""
    home = folder / FLARE

    def more(site: SiteDescription) -> dict[str, object]:
        site_ledger = {}
        if (folder / LEDGER_FILENAME).exists():
            site_ledger = describe_counts(read_ledger(folder, site.name, load_identity(folder).public))
        return (
            site_ledger
            | describe_budget(folder, site.name)
            | {"certificate": "; ".join(flare_site_problems(folder)) or _lasts(home / KIT)}
        )

    return read_service_status(folder, home, is_running, more)


def flare_site_problems(folder: Path) -> list[str]:
    """List what is not in order at a site that is served over FLARE."""
    if not has_kit(folder):
        return [
            f"it has no kit for NVIDIA FLARE; ask for one by    fedstat site request {shell_path(folder)}"
        ]
    renew = f"fedstat site request {shell_path(folder)}, and join the new kit"
    return certificate_problems(folder / FLARE / KIT, renew)


def _server_problems(folder: Path) -> list[str]:
    """One line where the certificates of server and analyst are near their end."""
    return certificate_problems(folder / FLARE / SERVER, f"fedstat federation provision {shell_path(folder)}")


def certificate_problems(kit: Path, remedy: str) -> list[str]:
    """One line where the certificates of a kit are near their end."""
    days = days_left(kit)
    if days >= SOON:
        return []
    return [
        f"the certificate {'has expired' if days < 0 else f'expires in {days} days'}; renew it by    {remedy}"
    ]


def _lasts(kit: Path) -> str:
    days = days_left(kit)
    return f"valid for {days:,} more days" if days >= 0 else "expired"


def _request_in(path: Path) -> Path:
    """Return the request of a path; of a site's folder, the one in it."""
    if not path.is_dir():
        return path
    found = sorted(path.glob(f"*{REQUEST}"))
    if len(found) != 1:
        raise PartitionError(f"'{path}': expected one request (NAME{REQUEST}), found {len(found)}")
    return found[0]


def _flare_federation(folder: Path) -> FederationDescription:
    federation = read_federation(folder)
    if federation.transport != FLARE:
        raise PartitionError(
            f"'{folder / FEDERATION_FILENAME}': its transport is \"{federation.transport}\", which needs no "
            "such step; "
            'over NVIDIA FLARE the file has transport = "flare", host and port'
        )
    return federation
