"""The command ``fedstat``: its subcommands, their arguments, and the functions that run them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fedstat.errors import FedstatError
from fedstat.federation.message import RUNS
from fedstat.federation.transport.flare.provision import FLARE
from fedstat.operator import (
    cards,
    deployment,
    disclosure_commands,
    federation_commands,
    flare_commands,
    rosters,
    service,
    site_commands,
)

# ----------------------------------------------------------------------------------------------------
# The words of a command: what each does, the function that does it, and its arguments.

Argument: TypeAlias = tuple[tuple[str, ...], Mapping[str, Any]]


def make_argument(*names: str, **options: Any) -> Argument:
    """Keep one argument of a command, in the words of :meth:`argparse.ArgumentParser.add_argument`."""
    return names, options


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it does, the function that does it, and its arguments besides the folder.

    The function takes ``folder`` and the arguments by their names, and returns the exit code; the folder of
    a command that makes one is new.
    """

    name: str
    what: str
    run: Callable[..., int]
    arguments: tuple[Argument, ...] = ()
    is_new: bool = False


def number_type(
    name: str, convert: Callable[[str], float], least: float, most: float
) -> Callable[[str], float]:
    """Return the type of an argument that is a number between two bounds; its name stands in errors."""

    def parse(text: str) -> float:
        if not least <= (value := convert(text)) <= most:
            raise ValueError(name)
        return value

    parse.__name__ = name
    return parse


parse_seconds = number_type("seconds", float, 1e-6, 1e6)
parse_megabytes = number_type("megabytes", float, 1e-6, 1e6)
parse_port = number_type("port", int, 0, 2**16 - 1)
parse_count = number_type("count", int, 0, 1000)


def parse_mode(text: str) -> int:
    """Read the mode of a file, in octal digits; none that others may write."""
    value = int(text, 8)
    if not 0o400 <= value <= 0o777 or value & 0o022:
        raise ValueError("mode")
    return value


JSON = make_argument("--json", dest="as_json", action="store_true", help="for programs: keys that stay")


# ----------------------------------------------------------------------------------------------------
# Commands that serve a site and watch it.

INTO = make_argument("into", type=Path, help="folder for the two files; none is written over")

SERVICE = (
    Command(
        "serve",
        "Answer questions until SIGTERM or Ctrl-C.",
        service.serve_site_folder,
        (
            make_argument("--once", action="store_true", help="answer what waits in the folder, and end"),
            make_argument(
                "--poll",
                type=parse_seconds,
                default=service.POLL,
                help="seconds between two looks at the folder",
            ),
            make_argument("--metrics", type=Path, help="file that is kept in Prometheus' text format"),
            make_argument("--metrics-mode", type=parse_mode, default=0o600, help="its mode (default: 600)"),
            make_argument("--log", type=Path, help="file for its log (default: standard error)"),
            make_argument(
                "--log-megabytes",
                type=parse_megabytes,
                default=10.0,
                help="size at which it is set aside (10)",
            ),
            make_argument(
                "--log-count", type=parse_count, default=5, help="how many older ones are kept (5)"
            ),
        ),
    ),
    Command(
        "status",
        "Show whether the site is served, and what it has done (exit code 0 while it is served).",
        service.show_site_status,
        (JSON,),
    ),
    Command(
        "health",
        "Say in one line whether the site is served and can answer (exit code 0 where it can), for monitors.",
        service.show_health,
        (
            make_argument(
                "--patience",
                type=parse_seconds,
                default=600.0,
                help="seconds that one question may take (default: 600)",
            ),
        ),
    ),
    Command(
        "unit",
        "Print a systemd unit for the service, with its true paths.",
        deployment.site_unit,
    ),
    Command(
        "compose",
        "Write a Dockerfile and compose.yaml for the service, with its true paths.",
        deployment.site_compose,
        (INTO,),
    ),
)

SERVER = (
    Command(
        "unit",
        "NVIDIA FLARE: print a systemd unit for the server, with its true paths.",
        deployment.federation_unit,
    ),
    Command(
        "compose",
        "NVIDIA FLARE: write a Dockerfile and compose.yaml for the server, with its true paths.",
        deployment.federation_compose,
        (INTO,),
    ),
)


# ----------------------------------------------------------------------------------------------------
# The command ``fedstat``: its words, and the function that each of them runs.
#
# Exit codes: 0 in order, 1 a problem was found (it is named), 2 the command was not understood.

NEW_FOLDER = "a folder that is new or empty"

TRANSPORT = make_argument(
    "--transport",
    choices=["folder", FLARE],
    default="folder",
    help="how requests reach the sites: as signed files in a folder (default), or over NVIDIA FLARE",
)

DIGEST = make_argument(
    "digest", help="of the plan, or the first digits of it, as 'fedstat site pending' shows it"
)

REPLACE = make_argument(
    "--replace",
    metavar="FINGERPRINT",
    default="",
    help="the fingerprint that is known, where a new key takes its place (ask them by telephone)",
)

SITE = (
    Command(
        "init",
        "Make a site's folder: keys, site.toml and policy.toml to fill in, and a public card.",
        site_commands.init_site,
        (
            make_argument(
                "--name", required=True, help="of the institution, as formulas and results will have it"
            ),
            make_argument("--data", help="CSV or Parquet file with the records (default: fill in site.toml)"),
            make_argument("--exchange", default="exchange", help="folder for questions and answers"),
            make_argument(
                "--key",
                nargs="+",
                default=(),
                metavar="COLUMN",
                help="columns that tell entities apart, where institutions hold different columns (vertical "
                "layout)",
            ),
            TRANSPORT,
        ),
        is_new=True,
    ),
    Command(
        "check",
        "Show what others would see, what the policy lets leave, and what is not in order.",
        site_commands.check_site,
    ),
    Command(
        "reload",
        "Read the records anew, after they have changed, without an end to the service.",
        site_commands.reload_site,
    ),
    Command(
        "describe",
        "Propose what is published of the columns (columns.toml), or hold the records against it.",
        disclosure_commands.describe_columns,
    ),
    Command(
        "answer-again",
        "Answer those again whose questions were refused too often because of the records.",
        disclosure_commands.reset_refusals,
    ),
    Command(
        "exposure",
        "Show the largest share of one row in what was released so far, by column.",
        disclosure_commands.show_exposure,
    ),
    Command("threats", "Show who can learn what under the site's policy.", disclosure_commands.show_threats),
    Command("pending", "Show the plans of analyses that wait for consent.", disclosure_commands.show_pending),
    Command("approve", "Consent to one run of a plan.", disclosure_commands.approve_plan, (DIGEST,)),
    Command("deny", "Refuse a plan.", disclosure_commands.deny_plan, (DIGEST,)),
    Command(
        "declare-loss",
        "Declare that the site's account, or its memory of earlier answers, was lost; the others are told.",
        disclosure_commands.declare_ledger_loss,
        (make_argument("--reason", required=True, help="what happened, for the account; it stays here"),),
    ),
    Command(
        "pin",
        "Trust the coordinator, or the other site, of a card.",
        cards.pin_card,
        (make_argument("card", type=Path, help="card.toml of the coordinator or of the other site"), REPLACE),
    ),
    Command(
        "accept",
        "Show the roster of a federation; with its fingerprint, trust the coordinator and all sites in it.",
        rosters.accept_roster,
        (
            make_argument(
                "roster", type=Path, nargs="?", help="roster.json (default: the one in the exchange folder)"
            ),
            make_argument(
                "--fingerprint", default="", help="of the roster, as you have compared it by telephone"
            ),
            make_argument(
                "--replace",
                metavar="FINGERPRINT",
                action="append",
                default=[],
                help="one that is known, where a new key takes its place (ask them by telephone)",
            ),
        ),
    ),
    Command(
        "revoke",
        "Trust a site, or the coordinator, no longer.",
        site_commands.revoke_trust,
        (make_argument("name", help="of the site, or 'coordinator'"),),
    ),
    Command(
        "seed",
        "Draw the secret that all sites share, for random projections and labels that several sites hold.",
        site_commands.draw_seed,
    ),
    Command(
        "consent",
        "Vertical layout: consent to one alignment of the site's keys with those of other sites.",
        site_commands.consent_alignment,
        (make_argument("names", nargs="+", metavar="SITE", help="the other sites of the alignment"),),
    ),
    *SERVICE,
    Command(
        "request",
        "NVIDIA FLARE: draw a private key, and write the request for its certificate.",
        flare_commands.request_kit,
    ),
    Command(
        "join-kit",
        "NVIDIA FLARE: make the site's kit of what the coordinator sent.",
        flare_commands.join_kit,
        (make_argument("kit", type=Path, help="NAME.kit, as the coordinator sent it"),),
    ),
    Command(
        "page",
        "Show all this in a browser on this machine, and approve or deny there, until Ctrl-C.",
        service.serve_owner_page,
        (
            make_argument(
                "--port", type=parse_port, default=0, help="on 127.0.0.1 (default: any that is free)"
            ),
            make_argument("--open", dest="in_browser", action="store_true", help="open it in a browser"),
        ),
    ),
    Command(
        "ledger",
        "Show what left, to whom and when, from the site's own ledger.",
        disclosure_commands.show_ledger,
        (
            make_argument("--session", help="one session only"),
            make_argument("--json", dest="as_json", action="store_true", help="every entry, one line each"),
        ),
    ),
)

FEDERATION = (
    Command(
        "new",
        "Make a coordinator's folder: keys, federation.toml and a public card.",
        federation_commands.new_federation,
        (
            make_argument("--name", help="of the federation (default: that of the folder)"),
            make_argument(
                "--exchange", help="folder for questions and answers (default: 'exchange' in the folder)"
            ),
            make_argument(
                "--layout",
                choices=["horizontal", "vertical"],
                default="horizontal",
                help="whether sites hold different rows (default) or different columns of entities that they "
                "share",
            ),
            TRANSPORT,
            make_argument("--host", help="NVIDIA FLARE: machine of the server, as the sites reach it"),
            make_argument("--port", type=int, help="NVIDIA FLARE: port of the server"),
        ),
        is_new=True,
    ),
    Command(
        "join",
        "Add a site by its public card.",
        federation_commands.join_site,
        (
            make_argument("card", type=Path, help="card.toml of the site"),
            REPLACE,
            make_argument("--again", action="store_true", help="although its key was taken out before"),
        ),
    ),
    Command(
        "remove",
        "Take a site out: its key is listed, and the next roster is without it.",
        federation_commands.remove_site,
        (make_argument("name", help="of the site"),),
    ),
    Command(
        "roster",
        "Sign who takes part, for the sites, which enter it by 'fedstat site accept'.",
        rosters.make_roster,
    ),
    Command(
        "accept",
        "Take a site's word that it has accepted the roster, where no exchange folder brings it.",
        rosters.take_acceptance,
        (make_argument("path", type=Path, metavar="accepted", help="NAME.accepted, as the site sent it"),),
    ),
    Command(
        "test",
        "Ask every site for its columns, and time it.",
        federation_commands.test_federation,
        (make_argument("--timeout", type=parse_seconds, default=20.0, help="seconds to wait for each site"),),
    ),
    Command(
        "align",
        "Vertical layout: number the entities that the sites share, once for all models; no key is shown.",
        federation_commands.align_sites,
        (make_argument("--timeout", type=parse_seconds, help="seconds to wait for each answer of a site"),),
    ),
    Command(
        "provision",
        "NVIDIA FLARE: make the server's kit, and certify the sites that ask.",
        flare_commands.provision,
        (
            make_argument(
                "requests",
                type=Path,
                nargs="*",
                metavar="request",
                help="NAME.request of a site, as it was sent",
            ),
        ),
    ),
    Command("serve", "NVIDIA FLARE: run the server until SIGTERM or Ctrl-C.", flare_commands.serve_server),
    Command(
        "start",
        "NVIDIA FLARE: open an analysis at the sites, which connecting does as well.",
        flare_commands.start_analysis,
    ),
    Command(
        "stop",
        "NVIDIA FLARE: end the analysis that is open, and whatever else runs.",
        flare_commands.stop_analysis,
    ),
    Command(
        "status",
        "Show sites and what waits for them; of NVIDIA FLARE also server, certificates and analysis (exit "
        "code 0 where all is there).",
        federation_commands.show_federation_status,
        (JSON,),
    ),
    *SERVER,
)

ROOMS = (
    ("site", "for the owner of records", "the site's folder", SITE),
    ("federation", "for the coordinator, who asks the sites", "the coordinator's folder", FEDERATION),
)


def parser() -> argparse.ArgumentParser:
    """Describe all commands."""
    top = argparse.ArgumentParser(
        prog="fedstat",
        description="Sites that answer questions about their records, and federations of them.",
        epilog="Exit codes: 0 in order, 1 a problem was found, 2 the command was not understood.",
    )
    top.add_argument("--version", action="version", version=RUNS)
    rooms = top.add_subparsers(metavar="{site,federation}", required=True)
    for room, about, folder, commands in ROOMS:
        words = rooms.add_parser(room, help=about).add_subparsers(required=True)
        for command in commands:
            word = words.add_parser(command.name, help=command.what, description=command.what)
            word.add_argument("folder", type=Path, help=NEW_FOLDER if command.is_new else folder)
            for names, options in command.arguments:
                word.add_argument(*names, **options)
            word.set_defaults(run=command.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    given = vars(parser().parse_args(arguments))
    run: Callable[..., int] = given.pop("run")
    try:
        return run(**given)
    except (FedstatError, OSError, ImportError) as error:
        print(f"fedstat: {error}", file=sys.stderr)
        return 1
