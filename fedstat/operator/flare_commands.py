"""Commands over NVIDIA FLARE: startup kits, processes of server and sites, and the job of an analysis."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstat.errors import EngineError, PartitionError, Remedy
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
    ANALYSIS_FILE,
    AUTHORITY,
    FLARE,
    FOLDER,
    KIT,
    SERVER,
    SIMULATED_SERVER,
    accept_kit,
    check_flare_name,
    create_kit_request,
    days_left,
    enter_kit,
    grant_kit,
    prepare_server,
    refuse_certificates,
    remove_stale_jobs,
    write_analysis_job,
    write_simulator,
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
from fedstat.operator.config_files import toml_quoted
from fedstat.operator.flare_process import FlareProcess, is_running
from fedstat.operator.site_status import describe_budget, describe_counts, read_service_status
from fedstat.operator.terminal import format_columns, print_problems, shell_path, underlined

KITS, REQUEST, GRANTED = "kits", ".request", ".kit"
SOON = 30
"""Number of days before the end of a certificate at which it is reported as a problem."""


def has_kit(folder: Path) -> bool:
    """Return whether a site has its kit."""
    return (folder / FLARE / KIT).exists()


def uses_flare(folder: Path) -> bool:
    """Return whether a site runs over FLARE: it has a kit, and no folder for requests."""
    return has_kit(folder) and not read_description(folder).exchange


def request_kit(folder: Path) -> int:
    """Draw the key of a site for FLARE, and write the request for its certificate."""
    name = read_description(folder).name
    path = folder / f"{name}{REQUEST}"
    write_atomic(path, create_kit_request(folder, name, load_identity(folder)))
    print(
        f"'{path}' requests the certificate of {name}. It contains nothing secret and is signed by {name}.\n"
    )
    print(
        f"Next: give it to the coordinator; then    fedstat site join-kit {shell_path(folder)} "
        f"{name}{GRANTED}"
    )
    return 0


def join_kit(folder: Path, kit: Path) -> int:
    """Make the kit of a site from the file that the coordinator sent."""
    description = read_description(folder)
    require_coordinator(folder, description)
    path = kit / KITS / f"{description.name}{GRANTED}" if kit.is_dir() else kit
    if is_running(folder / FLARE):
        raise EngineError(f"{description.name} is running; stop it first")
    kit = accept_kit(folder, path.read_bytes(), description.name, description.coordinator, str(path))
    # A relative path, so that the folder of the site can be moved.
    (kit / "local" / FOLDER).symlink_to(Path(*[os.pardir] * 3), target_is_directory=True)
    print(f"{description.name} has its kit. The kit runs only the code of the installed package.")
    print(f"Its private key was made here and stays here. Certificate: {_lasts(kit)}.\n")
    if description.exchange:
        print(
            f"'{folder / DESCRIPTION}' still has an 'exchange'; remove that line to run the site over FLARE."
        )
    print(f"Next: fedstat site check {shell_path(folder)}, then    fedstat site serve {shell_path(folder)}")
    return 0


def use_site_kit(folder: Path, kit: Path) -> int:
    """Enter a site into a kit of a FLARE federation that others provision."""
    description = read_description(folder)
    require_coordinator(folder, description)
    _enter(folder, kit, description.name)
    return 0


def use_server_kit(folder: Path, kit: Path) -> int:
    """Enter the coordinator into the kit of a FLARE server that others provision."""
    coordinator_identity(folder)
    _enter(folder, kit, read_federation(folder).name)
    return 0


def _enter(folder: Path, kit: Path, name: str) -> None:
    added = enter_kit(kit, folder)
    print(f"'{kit / 'local' / FOLDER}' leads to the folder of {name}.")
    if added:
        print(f"'{kit / 'local' / 'resources.json'}' now allows {' and '.join(added)}.")
    print("Restart FLARE with this kit, in an environment that has fedstat.")


def prepare_simulator(folder: Path, workspace: Path, sites: Sequence[Path]) -> int:
    """Enter the folders of a coordinator and of sites into a workspace of FLARE's simulator."""
    coordinator_identity(folder)
    names = {read_description(place).name: place for place in sites}
    write_simulator(workspace, {SIMULATED_SERVER: folder, **names})
    there = f"-n {len(names)} -t {len(names)} -c {','.join(names)}"
    print(f"  nvflare simulator JOB -w {shell_path(workspace)} {there}")
    return 0


def write_flare_job(
    folder: Path, job: Path, analysis: str, formula: str, purpose: str, without: Sequence[str] = ()
) -> int:
    """Write a job folder with one analysis of the sites of a federation."""
    federation = read_federation(folder)
    if unknown := [name for name in without if name not in federation.sites]:
        raise PartitionError(f"not among the sites: {', '.join(unknown)}")
    sites = [check_flare_name(name) for name in federation.sites if name not in without]
    lines = [("analysis", analysis), ("formula", formula), ("purpose", purpose)]
    text = "".join(f"{name} = {toml_quoted(value)}\n" for name, value in lines) + ANALYSIS_TABLES
    write_analysis_job(job, sites, text, federation.timeout)
    print(
        f"'{job}' is a job for {', '.join(sites)}. Its analysis: '{job / 'app' / 'config' / ANALYSIS_FILE}'\n"
    )
    print(f"  nvflare job submit -j {shell_path(job)}")
    return 0


ANALYSIS_TABLES = """
[arguments]  # of from_formula

[fit]        # of fit, such as masked = true
"""


def provision(folder: Path, requests: Sequence[Path]) -> int:
    """Make or renew the kits of server and analyst, and certify the sites that have requested it."""
    federation = _flare_federation(folder)
    identity = coordinator_identity(folder)
    server = folder / FLARE / SERVER
    if not server.exists() or days_left(server) < SOON:
        if is_running(folder / FLARE):
            raise EngineError("the server is running; stop it before you renew its certificate")
        prepare_server(folder, federation.host, federation.port)
        print(f"The server has its kit. Sites will reach it at {federation.host}:{federation.port}.")
        print(f"'{folder / FLARE / AUTHORITY}' certifies the participants; keep it secret.")
    (folder / KITS).mkdir(exist_ok=True)
    for path in requests:
        path = _request_in(path)
        name, granted = grant_kit(folder, path.read_bytes(), federation.sites, identity, f"'{path}'")
        write_atomic(folder / KITS / f"{name}{GRANTED}", granted)
        print(f"{name} is certified: '{folder / KITS / f'{name}{GRANTED}'}', which contains nothing secret.")
    lacking = [name for name in federation.sites if not (folder / KITS / f"{name}{GRANTED}").exists()]
    if lacking:
        print(f"\nWithout a kit: {', '.join(lacking)}. Each requests one with    fedstat site request FOLDER")
    print("\nNext: send every site its kit, which it enters with    fedstat site join-kit FOLDER KIT")
    print(f"      start the server with    fedstat federation serve {shell_path(folder)}")
    return 0


def serve_site(folder: Path) -> int:
    """Run the FLARE client of a site until SIGTERM."""
    description, kit = read_description(folder), folder / FLARE / KIT
    # what a job will need is checked now, while somebody watches
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
    """Require that a site trusts a coordinator."""
    if not description.coordinators:
        raise PartitionError(
            f"'{folder / DESCRIPTION}' trusts no coordinator, so the site would answer no requests",
            remedy=Remedy("fedstat site pin {folder} CARD", "pin one with '{call}'").filled(
                folder=shell_path(folder)
            ),
        )


def serve_server(folder: Path) -> int:
    """Run the FLARE server until SIGTERM."""
    federation = _flare_federation(folder)
    kit = folder / FLARE / SERVER
    if not kit.exists():
        raise PartitionError(
            "the server has no kit yet",
            remedy=Remedy("fedstat federation provision {folder}", "make it with    {call}").filled(
                folder=shell_path(folder)
            ),
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
    """Have a running server refuse removed sites; a server that starts reads the list itself."""
    federation = read_federation(folder)
    out = _taken_out(federation)
    if federation.transport != FLARE or not is_running(folder / FLARE):
        return
    admit_sites(folder, federation.sites, out)
    print(f"The server refuses the certificates of: {', '.join(out) or 'no site'}.")


def _taken_out(federation: FederationDescription) -> list[str]:
    """Return the names whose certificates are refused: FLARE knows only names, so none that has a new key."""
    return sorted(set(federation.revoked.values()) - set(federation.sites))


def start_analysis(folder: Path) -> int:
    """Start the job that serves an analysis, unless one is running."""
    federation = _flare_federation(folder)
    analysis = open_transport(federation)
    begun = isinstance(analysis, Analysis) and analysis.started_here
    print(f"An analysis {'is open now' if begun else 'was open before'}; new connections join it.")
    print(f"End it with    fedstat federation stop {shell_path(folder)}")
    return 0


def stop_analysis(folder: Path) -> int:
    """End the job that serves an analysis, and all other jobs of the server."""
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
        print(f"  has no kits yet; make them with    fedstat federation provision {shell_path(folder)}")
        return 1
    problems = _server_problems(folder)
    rows = [("server", "running" if is_running(home) else "not running")]
    rows += [("address", f"{federation.host}:{federation.port}"), ("certificates", _lasts(home / SERVER))]
    rows += [(name, "removed, its kit is refused") for name in _taken_out(federation)]
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
        problems.append(f"start the server with    fedstat federation serve {shell_path(folder)}")
    print(format_columns(rows))
    return print_problems(problems)


def show_flare_site_status(folder: Path) -> tuple[dict[str, Any], bool]:
    """Show whether a site is running over FLARE, and what it has done."""
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
    """List the problems of a site that runs over FLARE."""
    if not has_kit(folder):
        return [
            f"it has no kit for NVIDIA FLARE; request one with    fedstat site request {shell_path(folder)}"
        ]
    renew = f"fedstat site request {shell_path(folder)}, and join the new kit"
    return certificate_problems(folder / FLARE / KIT, renew)


def _server_problems(folder: Path) -> list[str]:
    """Return one line if the certificates of server and analyst end soon."""
    return certificate_problems(folder / FLARE / SERVER, f"fedstat federation provision {shell_path(folder)}")


def certificate_problems(kit: Path, remedy: str) -> list[str]:
    """Return one line if the certificates of a kit end soon."""
    days = days_left(kit)
    if days >= SOON:
        return []
    return [
        f"the certificate {'has expired' if days < 0 else f'expires in {days} days'}; renew it with    "
        f"{remedy}"
    ]


def _lasts(kit: Path) -> str:
    days = days_left(kit)
    return f"valid for {days:,} more days" if days >= 0 else "expired"


def _request_in(path: Path) -> Path:
    """Return the request at a path, or the one in the folder of a site."""
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
            f"'{folder / FEDERATION_FILENAME}': this step is for NVIDIA FLARE, and the transport is "
            f'"{federation.transport}". For NVIDIA FLARE, the file has transport = "flare", host and port'
        )
    return federation
