"""The command ``fedstat``.

Exit codes: 0 in order, 1 a problem was found (it is named), 2 the command was not understood.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedstat.errors import FedstatError
from fedstat.federation.carry.flare.kit import FLARE
from fedstat.operator import (
    account,
    alignment_commands,
    federation_commands,
    flare_commands,
    serve,
    site_commands,
)

SITE_FOLDER = "the site's folder"
COORDINATOR_FOLDER = "the coordinator's folder"


def parser() -> argparse.ArgumentParser:
    """Describe all commands."""
    top = argparse.ArgumentParser(
        prog="fedstat",
        description="Sites that answer questions about their records, and federations of them.",
        epilog="Exit codes: 0 in order, 1 a problem was found, 2 the command was not understood.",
    )
    rooms = top.add_subparsers(metavar="{site,federation}", required=True)
    _site(rooms.add_parser("site", help="for the owner of records").add_subparsers(required=True))
    about = rooms.add_parser("federation", help="for the coordinator, who asks the sites")
    _federation(about.add_subparsers(required=True))
    return top


def _command(
    commands: Any, name: str, what: str, folder: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what)
    command.add_argument("folder", type=Path, help=folder)
    command.set_defaults(run=run)
    return command


def _site(commands: Any) -> None:
    init = _command(
        commands,
        "init",
        "Make a site's folder: keys, site.toml and policy.toml to fill in, and a public card.",
        "a folder that is new or empty",
        _init_site,
    )
    init.add_argument(
        "--name", required=True, help="of the institution, as formulas and results will have it"
    )
    init.add_argument("--data", help="CSV or Parquet file with the records (default: fill in site.toml)")
    init.add_argument("--exchange", default="exchange", help="folder for questions and answers")
    init.add_argument(
        "--key",
        nargs="+",
        default=(),
        metavar="COLUMN",
        help="columns that tell entities apart, where institutions hold different columns (vertical layout)",
    )
    _carrier(init)
    _command(
        commands,
        "check",
        "Show what others would see, what the policy lets leave, and what is not in order.",
        SITE_FOLDER,
        lambda given: site_commands.check(given.folder),
    )
    pin = _command(
        commands,
        "pin",
        "Trust the coordinator, or the other site, of a card.",
        SITE_FOLDER,
        lambda given: site_commands.pin(given.folder, given.card),
    )
    pin.add_argument("card", type=Path, help="card.toml of the coordinator or of the other site")
    revoke = _command(
        commands,
        "revoke",
        "Trust a site, or the coordinator, no longer.",
        SITE_FOLDER,
        lambda given: site_commands.revoke(given.folder, given.name),
    )
    revoke.add_argument("name", help="of the site, or 'coordinator'")
    run = _command(
        commands,
        "serve",
        "Answer questions until SIGTERM or Ctrl-C.",
        SITE_FOLDER,
        _serve_site,
    )
    run.add_argument("--once", action="store_true", help="answer what waits in the folder, and end")
    run.add_argument(
        "--poll", type=_seconds, default=serve.POLL, help="seconds between two looks at the folder"
    )
    _command(
        commands,
        "request",
        "NVIDIA FLARE: draw a private key, and write the request for its certificate.",
        SITE_FOLDER,
        lambda given: flare_commands.request(given.folder),
    )
    kit = _command(
        commands,
        "join-kit",
        "NVIDIA FLARE: make the site's kit of what the coordinator sent.",
        SITE_FOLDER,
        lambda given: flare_commands.join_kit(given.folder, given.kit),
    )
    kit.add_argument("kit", type=Path, help="NAME.kit, as the coordinator sent it")
    _command(
        commands,
        "status",
        "Show whether the site is served, and what it has done (exit code 0 while it is served).",
        SITE_FOLDER,
        _site_status,
    )
    ledger = _command(
        commands,
        "ledger",
        "Show what left, to whom and when, from the site's own ledger.",
        SITE_FOLDER,
        lambda given: account.ledger(given.folder, given.session, given.json),
    )
    ledger.add_argument("--session", help="one session only")
    ledger.add_argument("--json", action="store_true", help="every entry, one line each")


def _federation(commands: Any) -> None:
    new = _command(
        commands,
        "new",
        "Make a coordinator's folder: keys, federation.toml and a public card.",
        "a folder that is new or empty",
        _new_federation,
    )
    new.add_argument("--name", help="of the federation (default: that of the folder)")
    new.add_argument(
        "--exchange", help="folder for questions and answers (default: 'exchange' in the folder)"
    )
    new.add_argument(
        "--layout",
        choices=["horizontal", "vertical"],
        default="horizontal",
        help="whether sites hold different rows (default) or different columns of entities that they share",
    )
    _carrier(new)
    new.add_argument("--host", help="NVIDIA FLARE: machine of the server, as the sites reach it")
    new.add_argument("--port", type=int, help="NVIDIA FLARE: port of the server")
    join = _command(
        commands,
        "join",
        "Add a site by its public card.",
        COORDINATOR_FOLDER,
        lambda given: federation_commands.join(given.folder, given.card),
    )
    join.add_argument("card", type=Path, help="card.toml of the site")
    test = _command(
        commands,
        "test",
        "Ask every site for its columns, and time it.",
        COORDINATOR_FOLDER,
        lambda given: federation_commands.test(given.folder, given.timeout),
    )
    align = _command(
        commands,
        "align",
        "Vertical layout: number the entities that the sites share, once for all models; no key is shown.",
        COORDINATOR_FOLDER,
        lambda given: alignment_commands.align(given.folder, given.timeout),
    )
    align.add_argument("--timeout", type=_seconds, help="seconds to wait for each answer of a site")
    test.add_argument("--timeout", type=_seconds, default=20.0, help="seconds to wait for each site")
    _over_flare(commands)


def _over_flare(commands: Any) -> None:
    provision = _command(
        commands,
        "provision",
        "NVIDIA FLARE: make the server's kit, and certify the sites that ask.",
        COORDINATOR_FOLDER,
        lambda given: flare_commands.provision(given.folder, given.requests),
    )
    provision.add_argument(
        "requests", type=Path, nargs="*", metavar="request", help="NAME.request of a site, as it was sent"
    )
    for name, what, run in (
        ("serve", "run the server until SIGTERM or Ctrl-C.", flare_commands.serve_server),
        ("start", "open an analysis at the sites, which connecting does as well.", flare_commands.start),
        ("stop", "end the analysis that is open, and whatever else runs.", flare_commands.stop),
        (
            "status",
            "show server, sites, certificates and analysis (exit code 0 where all is there).",
            flare_commands.status,
        ),
    ):
        _command(commands, name, f"NVIDIA FLARE: {what}", COORDINATOR_FOLDER, _on_folder(run))


def _on_folder(run: Callable[[Path], int]) -> Callable[[argparse.Namespace], int]:
    return lambda given: run(given.folder)


def _carrier(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--carrier",
        choices=["folder", FLARE],
        default="folder",
        help="what brings questions to sites: signed files in a folder (default), or NVIDIA FLARE",
    )


def _init_site(given: argparse.Namespace) -> int:
    exchange = None if given.carrier == FLARE else given.exchange
    return site_commands.init(given.folder, given.name, given.data, exchange, given.key)


def _new_federation(given: argparse.Namespace) -> int:
    if given.carrier == FLARE:
        carried = federation_commands.by_flare(given.host, given.port)
    else:
        carried = federation_commands.by_folder(given.exchange)
    return federation_commands.new(given.folder, given.name or given.folder.name, carried, given.layout)


def _serve_site(given: argparse.Namespace) -> int:
    if flare_commands.is_carried(given.folder):
        return flare_commands.serve_site(given.folder)
    return serve.serve(given.folder, given.once, given.poll)


def _site_status(given: argparse.Namespace) -> int:
    show = flare_commands.site_status if flare_commands.is_carried(given.folder) else serve.status
    return show(given.folder)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError("seconds")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    given = parser().parse_args(arguments)
    try:
        code: int = given.run(given)
    except (FedstatError, OSError, ImportError) as error:
        print(f"fedstat: {error}", file=sys.stderr)
        return 1
    return code
