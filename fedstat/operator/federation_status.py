"""How a federation stands at its coordinator, for people and for programs; no site is asked anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedstat.federation.carry.exchange.part import SitesPart
from fedstat.federation.carry.flare.analysis import ask_server
from fedstat.federation.carry.flare.kit import FLARE, SERVER
from fedstat.federation.carry.flare.provision import days_left
from fedstat.federation.partition.federation_file import FOLDER, FederationDescription, read_federation
from fedstat.operator import flare_commands
from fedstat.operator.enrolling.members import revoked_problems
from fedstat.operator.enrolling.rosters import accepted, collect, last_roster
from fedstat.operator.participant import is_running
from fedstat.operator.writing.screen import columns, heading, tell_problems, typed
from fedstat.records import to_plain

FORM = 1


@dataclass(frozen=True, slots=True)
class SiteSeen:
    """A site as its coordinator sees it.

    Whether it is connected (NVIDIA FLARE), how many questions wait for it (a folder), and which roster it has
    accepted; null where that is not known.
    """

    connected: bool | None
    waiting: int | None
    roster: int | None


@dataclass(frozen=True, slots=True)
class FederationStanding:
    """How a federation stands: of NVIDIA FLARE also the server, its certificates and what is open on it."""

    form: int
    federation: str
    carrier: str
    layout: str
    sites: dict[str, SiteSeen]
    revoked: list[str]
    roster: int | None
    server: bool | None
    certificate_days: int | None
    analyses: list[str] | None
    problems: list[str]


def status(folder: Path, as_json: bool = False) -> int:
    """Show how a federation stands; 0 where nothing is amiss."""
    federation = read_federation(folder)
    if federation.carrier == FLARE and not as_json:
        return flare_commands.status(folder)
    found = _standing(federation)
    if as_json:
        print(json.dumps(to_plain(found), indent=2))
        return 1 if found.problems else 0
    print(heading(f"Federation {found.federation}"))
    rows = [("site", "waiting", "roster accepted")]
    rows += [(name, _told(one.waiting), _told(one.roster)) for name, one in found.sites.items()]
    print(columns(rows, head=True, right=(1, 2)) + "\n")
    print(f"  Whether they answer is told by    fedstat federation test {typed(folder)}")
    return tell_problems(found.problems)


def _told(count: int | None) -> str:
    return "not known" if count is None else str(count)


def _standing(federation: FederationDescription) -> FederationStanding:
    folder, by_flare = federation.folder, federation.carrier == FLARE
    home = folder / FLARE
    has_kit = by_flare and (home / SERVER).exists()
    runs = has_kit and is_running(home)
    told = ask_server(folder) if runs else None
    roster = last_roster(federation)
    numbers = dict[str, int]()
    if roster is not None:
        collect(federation, roster)  # what is none of a site's is told by 'federation test'
        numbers = accepted(federation, roster)
    sites = {
        name: SiteSeen(
            connected=(told is not None and name in told.connected) if by_flare else None,
            waiting=_waiting(federation, name) if federation.carrier == FOLDER else None,
            roster=numbers.get(name),
        )
        for name in federation.sites
    }
    return FederationStanding(
        form=FORM,
        federation=federation.name,
        carrier=federation.carrier,
        layout=federation.layout,
        sites=sites,
        revoked=list(federation.revoked.values()),
        roster=None if roster is None else roster.number,
        server=runs if by_flare else None,
        certificate_days=days_left(home / SERVER) if has_kit else None,
        analyses=None if told is None else [str(job).lower() for job in told.jobs.values()],
        problems=[*revoked_problems(federation), *_problems(federation, sites, has_kit, runs)],
    )


def _problems(
    federation: FederationDescription, sites: dict[str, SiteSeen], has_kit: bool, runs: bool
) -> Iterator[str]:
    folder = typed(federation.folder)
    if not sites:
        yield f"no site has been added yet: fedstat federation join {folder} CARD"
    if federation.carrier == FOLDER:
        for name in (name for name, one in sites.items() if one.waiting is None):
            yield f"the part of {name} in '{federation.exchange}' is not there: it has not been started"
    if federation.carrier != FLARE:
        return
    renew = f"fedstat federation provision {folder}"
    if not has_kit:
        yield f"there are no kits yet: {renew}"
        return
    yield from flare_commands.certificate_problems(federation.folder / FLARE / SERVER, renew)
    if not runs:
        yield f"start the server by    fedstat federation serve {folder}"
        return
    for name in (name for name, one in sites.items() if not one.connected):
        yield f"{name} is not connected"


def _waiting(federation: FederationDescription, name: str) -> int | None:
    try:
        return len(SitesPart(Path(federation.exchange, name)).open_numbers()[0])
    except OSError:
        return None
