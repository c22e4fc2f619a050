"""The command ``fedstat``: its words, and the function that each of them runs.

Exit codes: 0 in order, 1 a problem was found (it is named), 2 the command was not understood.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedstat.errors import FedstatError
from fedstat.federation.carry.flare.kit import FLARE
from fedstat.federation.message import RUNS
from fedstat.operator import (
    account,
    description_commands,
    federation_commands,
    federation_status,
    flare_commands,
    serve,
    site_commands,
)
from fedstat.operator.enrolling import pins, rosters
from fedstat.operator.service_words import SERVER, SERVICE
from fedstat.operator.writing.words import JSON, Command, argument, port, seconds

NEW_FOLDER = "a folder that is new or empty"

CARRIER = argument(
    "--carrier",
    choices=["folder", FLARE],
    default="folder",
    help="what brings questions to sites: signed files in a folder (default), or NVIDIA FLARE",
)

DIGEST = argument("digest", help="of the plan, or the first digits of it, as 'fedstat site pending' shows it")

REPLACE = argument(
    "--replace",
    metavar="FINGERPRINT",
    default="",
    help="the fingerprint that is known, where a new key takes its place (ask them by telephone)",
)

SITE = (
    Command(
        "init",
        "Make a site's folder: keys, site.toml and policy.toml to fill in, and a public card.",
        site_commands.init,
        (
            argument(
                "--name", required=True, help="of the institution, as formulas and results will have it"
            ),
            argument("--data", help="CSV or Parquet file with the records (default: fill in site.toml)"),
            argument("--exchange", default="exchange", help="folder for questions and answers"),
            argument(
                "--key",
                nargs="+",
                default=(),
                metavar="COLUMN",
                help="columns that tell entities apart, where institutions hold different columns (vertical "
                "layout)",
            ),
            CARRIER,
        ),
        is_new=True,
    ),
    Command(
        "check",
        "Show what others would see, what the policy lets leave, and what is not in order.",
        site_commands.check,
    ),
    Command(
        "reload",
        "Read the records anew, after they have changed, without an end to the service.",
        site_commands.reload,
    ),
    Command(
        "describe",
        "Propose what is published of the columns (columns.toml), or hold the records against it.",
        description_commands.describe,
    ),
    Command(
        "answer-again",
        "Answer those again whose questions were refused too often because of the records.",
        description_commands.answer_again,
    ),
    Command("threats", "Show who can learn what under the site's policy.", description_commands.threats),
    Command("pending", "Show the plans of analyses that wait for consent.", description_commands.pending),
    Command("approve", "Consent to one run of a plan.", description_commands.approve, (DIGEST,)),
    Command("deny", "Refuse a plan.", description_commands.deny, (DIGEST,)),
    Command(
        "declare-loss",
        "Declare that the site's account, or its memory of earlier answers, was lost; the others are told.",
        account.declare,
        (argument("--reason", required=True, help="what happened, for the account; it stays here"),),
    ),
    Command(
        "pin",
        "Trust the coordinator, or the other site, of a card.",
        pins.pin,
        (argument("card", type=Path, help="card.toml of the coordinator or of the other site"), REPLACE),
    ),
    Command(
        "accept",
        "Show the roster of a federation; with its fingerprint, trust the coordinator and all sites in it.",
        rosters.accept,
        (
            argument(
                "roster", type=Path, nargs="?", help="roster.json (default: the one in the exchange folder)"
            ),
            argument("--fingerprint", default="", help="of the roster, as you have compared it by telephone"),
            argument(
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
        site_commands.revoke,
        (argument("name", help="of the site, or 'coordinator'"),),
    ),
    Command(
        "seed",
        "Draw the secret that all sites share, for random projections and labels that several sites hold.",
        site_commands.seed,
    ),
    Command(
        "consent",
        "Vertical layout: consent to one alignment of the site's keys with those of other sites.",
        site_commands.consent,
        (argument("names", nargs="+", metavar="SITE", help="the other sites of the alignment"),),
    ),
    *SERVICE,
    Command(
        "request",
        "NVIDIA FLARE: draw a private key, and write the request for its certificate.",
        flare_commands.request,
    ),
    Command(
        "join-kit",
        "NVIDIA FLARE: make the site's kit of what the coordinator sent.",
        flare_commands.join_kit,
        (argument("kit", type=Path, help="NAME.kit, as the coordinator sent it"),),
    ),
    Command(
        "page",
        "Show all this in a browser on this machine, and approve or deny there, until Ctrl-C.",
        serve.page,
        (
            argument("--port", type=port, default=0, help="on 127.0.0.1 (default: any that is free)"),
            argument("--open", dest="in_browser", action="store_true", help="open it in a browser"),
        ),
    ),
    Command(
        "ledger",
        "Show what left, to whom and when, from the site's own ledger.",
        account.ledger,
        (
            argument("--session", help="one session only"),
            argument("--json", dest="as_json", action="store_true", help="every entry, one line each"),
        ),
    ),
)

FEDERATION = (
    Command(
        "new",
        "Make a coordinator's folder: keys, federation.toml and a public card.",
        federation_commands.new,
        (
            argument("--name", help="of the federation (default: that of the folder)"),
            argument(
                "--exchange", help="folder for questions and answers (default: 'exchange' in the folder)"
            ),
            argument(
                "--layout",
                choices=["horizontal", "vertical"],
                default="horizontal",
                help="whether sites hold different rows (default) or different columns of entities that they "
                "share",
            ),
            CARRIER,
            argument("--host", help="NVIDIA FLARE: machine of the server, as the sites reach it"),
            argument("--port", type=int, help="NVIDIA FLARE: port of the server"),
        ),
        is_new=True,
    ),
    Command(
        "join",
        "Add a site by its public card.",
        federation_commands.join,
        (
            argument("card", type=Path, help="card.toml of the site"),
            REPLACE,
            argument("--again", action="store_true", help="although its key was taken out before"),
        ),
    ),
    Command(
        "remove",
        "Take a site out: its key is listed, and the next roster is without it.",
        federation_commands.remove,
        (argument("name", help="of the site"),),
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
        (argument("path", type=Path, metavar="accepted", help="NAME.accepted, as the site sent it"),),
    ),
    Command(
        "test",
        "Ask every site for its columns, and time it.",
        federation_commands.test,
        (argument("--timeout", type=seconds, default=20.0, help="seconds to wait for each site"),),
    ),
    Command(
        "align",
        "Vertical layout: number the entities that the sites share, once for all models; no key is shown.",
        federation_commands.align,
        (argument("--timeout", type=seconds, help="seconds to wait for each answer of a site"),),
    ),
    Command(
        "provision",
        "NVIDIA FLARE: make the server's kit, and certify the sites that ask.",
        flare_commands.provision,
        (
            argument(
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
        flare_commands.start,
    ),
    Command(
        "stop", "NVIDIA FLARE: end the analysis that is open, and whatever else runs.", flare_commands.stop
    ),
    Command(
        "status",
        "Show sites and what waits for them; of NVIDIA FLARE also server, certificates and analysis (exit "
        "code 0 where all is there).",
        federation_status.status,
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
