"""The command ``fedstat``: its subcommands, their arguments, and the functions that run them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from fedstat.errors import FedstatError
from fedstat.federation.message import RUNS
from fedstat.federation.transport.flare.provision import FLARE
from fedstat.operator import (
    cards,
    deployment,
    dictionaries,
    disclosure_commands,
    federation_commands,
    flare_commands,
    rosters,
    service,
    site_commands,
)

# ----------------------------------------------------------------------------------------------------
# The declaration of a command: what it does, the function that runs it, and its arguments.

Argument: TypeAlias = tuple[tuple[str, ...], Mapping[str, Any]]


def make_argument(*names: str, **options: Any) -> Argument:
    """Keep one argument of a command, as :meth:`argparse.ArgumentParser.add_argument` takes it."""
    return names, options


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it does, the function that runs it, and its arguments in addition to the folder.

    The function takes ``folder`` and the arguments by their names, and returns the exit code. A command that
    makes a folder takes the path of a new one.
    """

    name: str
    what: str
    run: Callable[..., int]
    arguments: tuple[Argument, ...] = ()
    is_new: bool = False


def number_type(
    name: str, convert: Callable[[str], float], least: float, most: float
) -> Callable[[str], float]:
    """Return the type of an argument that is a number between two bounds; errors state its name."""

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
    """Read the mode of a file in octal digits; modes that let others write are refused."""
    value = int(text, 8)
    if not 0o400 <= value <= 0o777 or value & 0o022:
        raise ValueError("mode")
    return value


JSON = make_argument("--json", dest="as_json", action="store_true", help="print JSON with stable keys")


# ----------------------------------------------------------------------------------------------------
# Commands that run and monitor a site.

INTO = make_argument("into", type=Path, help="folder for the two files; existing files are not overwritten")

SERVICE = (
    Command(
        "serve",
        "Answer requests until SIGTERM or Ctrl-C.",
        service.serve_site_folder,
        (
            make_argument("--once", action="store_true", help="answer the waiting requests, then stop"),
            make_argument(
                "--poll",
                type=parse_seconds,
                default=service.POLL,
                help="seconds between two checks of the folder",
            ),
            make_argument("--metrics", type=Path, help="file for metrics in Prometheus' text format"),
            make_argument("--metrics-mode", type=parse_mode, default=0o600, help="mode of it (default: 600)"),
            make_argument("--log", type=Path, help="log file (default: standard error)"),
            make_argument(
                "--log-megabytes",
                type=parse_megabytes,
                default=10.0,
                help="size at which the log file is rotated (10)",
            ),
            make_argument(
                "--log-count", type=parse_count, default=5, help="number of older log files to keep (5)"
            ),
        ),
    ),
    Command(
        "status",
        "Show whether the site is running, and what it has done (exit code 0 while it is running).",
        service.show_site_status,
        (JSON,),
    ),
    Command(
        "health",
        "For monitors: print in one line whether the site is running and can answer (exit code 0 if so).",
        service.show_health,
        (
            make_argument(
                "--patience",
                type=parse_seconds,
                default=600.0,
                help="longest duration of one request, in seconds (default: 600)",
            ),
        ),
    ),
    Command(
        "unit",
        "Print a systemd unit for the service, with the paths of this machine.",
        deployment.site_unit,
    ),
    Command(
        "compose",
        "Write a Dockerfile and a compose.yaml for the service, with the paths of this machine.",
        deployment.site_compose,
        (INTO,),
    ),
    Command(
        "kubernetes",
        "Print Kubernetes manifests for the service, with the paths of this machine.",
        deployment.site_kubernetes,
        (make_argument("--image", required=True, help="image with fedstat, by its digest or tag"),),
    ),
)

SERVER = (
    Command(
        "unit",
        "NVIDIA FLARE: print a systemd unit for the server, with the paths of this machine.",
        deployment.federation_unit,
    ),
    Command(
        "compose",
        "NVIDIA FLARE: write a Dockerfile and a compose.yaml for the server, with the paths of this machine.",
        deployment.federation_compose,
        (INTO,),
    ),
)


# ----------------------------------------------------------------------------------------------------
# The command ``fedstat``: its subcommands, and the function that each of them runs.
#
# Exit codes: 0 no problems, 1 a problem (its description is printed), 2 the command is not valid.

NEW_FOLDER = "path of a new or an empty folder"

TRANSPORT = make_argument(
    "--transport",
    choices=["folder", FLARE],
    default="folder",
    help="how requests reach the sites: as signed files in a folder (default), or over NVIDIA FLARE",
)

DIGEST = make_argument(
    "digest", help="digest of the plan, or its first digits, as 'fedstat site pending' shows it"
)

REPLACE = make_argument(
    "--replace",
    metavar="FINGERPRINT",
    default="",
    help="current fingerprint, if a new key replaces it (first ask its owner by telephone)",
)

SITE = (
    Command(
        "init",
        "Make the folder of a site: keys, a public card, and the files site.toml and policy.toml to fill in.",
        site_commands.init_site,
        (
            make_argument("--name", required=True, help="name of the site in formulas and results"),
            make_argument("--data", help="CSV or Parquet file with the data (default: fill in site.toml)"),
            make_argument("--exchange", default="exchange", help="folder for requests and replies"),
            make_argument(
                "--key",
                nargs="+",
                default=(),
                metavar="COLUMN",
                help="columns that identify an entity, if sites hold different columns (vertical layout)",
            ),
            TRANSPORT,
        ),
        is_new=True,
    ),
    Command(
        "check",
        "Show what others see of the site, what its policy allows to be released, and any problems.",
        site_commands.check_site,
    ),
    Command(
        "reload",
        "Read the data again after they have changed. The service continues to run.",
        site_commands.reload_site,
    ),
    Command(
        "describe",
        "Propose a public description of the columns (columns.toml), or compare the data with it.",
        disclosure_commands.describe_columns,
    ),
    Command(
        "dictionary",
        "Show the data dictionary of the study. With --accept, the site reads and describes its data by it.",
        dictionaries.accept_dictionary,
        (
            make_argument(
                "dictionary",
                type=Path,
                nargs="?",
                help="dictionary.json (default: the one in the exchange folder)",
            ),
            make_argument("--accept", action="store_true", help="use the dictionary at this site"),
        ),
    ),
    Command(
        "answer-again",
        "Reset the count of refusals that depended on the data, so that the site answers again.",
        disclosure_commands.reset_refusals,
    ),
    Command(
        "exposure",
        "Show the largest share of one row in all releases so far, by column.",
        disclosure_commands.show_exposure,
    ),
    Command("threats", "Show who can learn what under the site's policy.", disclosure_commands.show_threats),
    Command(
        "pending", "Show the plans of analyses that wait for approval.", disclosure_commands.show_pending
    ),
    Command("approve", "Approve one run of a plan.", disclosure_commands.approve_plan, (DIGEST,)),
    Command("deny", "Deny a plan.", disclosure_commands.deny_plan, (DIGEST,)),
    Command(
        "declare-loss",
        "Declare that the ledger of the site, or its history of releases, was lost. Receipts show this to "
        "all.",
        disclosure_commands.declare_ledger_loss,
        (make_argument("--reason", required=True, help="what happened, for the ledger; it is not sent"),),
    ),
    Command(
        "pin",
        "Trust the coordinator or the other site that a card describes.",
        cards.pin_card,
        (make_argument("card", type=Path, help="card.toml of the coordinator or of the other site"), REPLACE),
    ),
    Command(
        "accept",
        "Show the roster of a federation. With its fingerprint: trust the coordinator and all sites in it.",
        rosters.accept_roster,
        (
            make_argument(
                "roster", type=Path, nargs="?", help="roster.json (default: the one in the exchange folder)"
            ),
            make_argument(
                "--fingerprint", default="", help="fingerprint of the roster, compared by telephone"
            ),
            make_argument(
                "--replace",
                metavar="FINGERPRINT",
                action="append",
                default=[],
                help="a current fingerprint that a new key replaces (first ask its owner by telephone)",
            ),
        ),
    ),
    Command(
        "study",
        "Let another coordinator send requests, for a study of its own at the same table.",
        site_commands.add_study,
        (
            make_argument("card", type=Path, help="card.toml of the coordinator"),
            make_argument("--name", required=True, help="name of the study, as its coordinator states it"),
            make_argument("--exchange", required=True, help="folder for its requests and replies"),
        ),
    ),
    Command(
        "add-table",
        "Make the folder of one more table, which the same service answers for.",
        site_commands.add_table,
        (
            make_argument("name", help="name of the table"),
            make_argument("--data", type=Path, required=True, help="CSV or Parquet file with the data"),
            make_argument("--exchange", default="exchange", help="folder for requests and replies"),
        ),
    ),
    Command(
        "revoke",
        "Stop trusting a site, the coordinator, or the coordinator of a study.",
        site_commands.revoke_trust,
        (make_argument("name", help="name of the site or of the study, or 'coordinator'"),),
    ),
    Command(
        "seed",
        "Draw the secret that all sites share, for random projections and for labels that several sites "
        "hold.",
        site_commands.draw_seed,
    ),
    Command(
        "consent",
        "Vertical layout: allow one alignment of the keys of this site with those of other sites.",
        site_commands.consent_alignment,
        (make_argument("names", nargs="+", metavar="SITE", help="the other sites of the alignment"),),
    ),
    *SERVICE,
    Command(
        "request",
        "NVIDIA FLARE: draw a private key, and write the request for a certificate.",
        flare_commands.request_kit,
    ),
    Command(
        "join-kit",
        "NVIDIA FLARE: make the kit of the site from the file that the coordinator sent.",
        flare_commands.join_kit,
        (make_argument("kit", type=Path, help="the file NAME.kit from the coordinator"),),
    ),
    Command(
        "use-kit",
        "NVIDIA FLARE: enter the site into the startup kit of a federation that others have provisioned.",
        flare_commands.use_site_kit,
        (make_argument("kit", type=Path, help="startup kit of the FLARE client"),),
    ),
    Command(
        "page",
        "Show status, plans, releases and policy in a browser on this machine, until Ctrl-C.",
        service.serve_owner_page,
        (
            make_argument(
                "--port", type=parse_port, default=0, help="port on 127.0.0.1 (default: any free port)"
            ),
            make_argument(
                "--open", dest="in_browser", action="store_true", help="open the page in a browser"
            ),
        ),
    ),
    Command(
        "ledger",
        "Show what the site released, to whom and when, from its own ledger.",
        disclosure_commands.show_ledger,
        (
            make_argument("--session", help="show one session only"),
            make_argument("--json", dest="as_json", action="store_true", help="print each entry as one line"),
        ),
    ),
    Command(
        "export",
        "Export what was released, to whom and why, from the ledgers of all tables: as CSV, or as a page to "
        "print.",
        disclosure_commands.export_audit,
        (
            make_argument(
                "--from", dest="since", default="", metavar="DAY", help="first day, YYYY-MM-DD (UTC)"
            ),
            make_argument("--to", dest="until", default="", metavar="DAY", help="last day, YYYY-MM-DD (UTC)"),
            make_argument("--study", default="", help="releases of this study only"),
            make_argument("--person", default="", help="releases to this person only"),
            make_argument("--formula", default="", help="releases of formulas with this text only"),
            make_argument("--column", default="", help="releases about this column only"),
            make_argument("--out", type=Path, help="file that ends in .csv or .html (default: print CSV)"),
        ),
    ),
    Command(
        "summary",
        "Write one page on a quarter, for a data protection officer: who requested what, what was released "
        "by column, what was refused, changes of the policy, exposure.",
        disclosure_commands.summarize_quarter,
        (
            make_argument(
                "--quarter", default="", metavar="YEAR-Qn", help="such as 2026-Q4 (default: the present one)"
            ),
            make_argument("--out", type=Path, help="file that ends in .html (default: SITE-QUARTER.html)"),
        ),
    ),
)

FEDERATION = (
    Command(
        "new",
        "Make the folder of a coordinator: keys, federation.toml and a public card.",
        federation_commands.new_federation,
        (
            make_argument("--name", help="name of the federation (default: the name of the folder)"),
            make_argument(
                "--exchange", help="folder for requests and replies (default: 'exchange' in the folder)"
            ),
            make_argument(
                "--layout",
                choices=["horizontal", "vertical"],
                default="horizontal",
                help="whether sites hold different rows (default) or different columns of the same entities",
            ),
            TRANSPORT,
            make_argument("--host", help="NVIDIA FLARE: host name of the server, as sites reach it"),
            make_argument("--port", type=int, help="NVIDIA FLARE: port of the server"),
        ),
        is_new=True,
    ),
    Command(
        "join",
        "Add the site that a public card describes.",
        federation_commands.join_site,
        (
            make_argument("card", type=Path, help="card.toml of the site"),
            REPLACE,
            make_argument("--again", action="store_true", help="allow a key that was removed before"),
        ),
    ),
    Command(
        "remove",
        "Remove a site. Its key is listed as revoked, and the next roster is without the site.",
        federation_commands.remove_site,
        (make_argument("name", help="name of the site"),),
    ),
    Command(
        "roster",
        "Sign the list of all sites (the roster), which each site accepts with 'fedstat site accept'.",
        rosters.make_roster,
    ),
    Command(
        "dictionary",
        "Sign the data dictionary of the study (dictionary.toml), which each site accepts with 'fedstat site "
        "dictionary'.",
        dictionaries.sign_dictionary,
    ),
    Command(
        "accept",
        "Record that a site has accepted the roster, if there is no exchange folder.",
        rosters.take_acceptance,
        (make_argument("path", type=Path, metavar="accepted", help="the file NAME.accepted from the site"),),
    ),
    Command(
        "test",
        "Request the columns of every site, and measure the time of each reply.",
        federation_commands.test_federation,
        (make_argument("--timeout", type=parse_seconds, default=20.0, help="seconds to wait for each site"),),
    ),
    Command(
        "align",
        "Vertical layout: link the entities that the sites share, once for all models. No key leaves a site.",
        federation_commands.align_sites,
        (make_argument("--timeout", type=parse_seconds, help="seconds to wait for each reply of a site"),),
    ),
    Command(
        "provision",
        "NVIDIA FLARE: make the kit of the server, and certify the sites that have requested it.",
        flare_commands.provision,
        (
            make_argument(
                "requests",
                type=Path,
                nargs="*",
                metavar="request",
                help="the file NAME.request from a site",
            ),
        ),
    ),
    Command(
        "use-kit",
        "NVIDIA FLARE: enter the coordinator into the startup kit of a server that others have provisioned.",
        flare_commands.use_server_kit,
        (make_argument("kit", type=Path, help="startup kit of the server"),),
    ),
    Command(
        "simulator",
        "NVIDIA FLARE: prepare a workspace of the simulator for the folders of sites on this machine.",
        flare_commands.prepare_simulator,
        (
            make_argument("workspace", type=Path, help="workspace of the simulator (its option -w)"),
            make_argument("sites", type=Path, nargs="+", metavar="SITE", help="folders of the sites"),
        ),
    ),
    Command(
        "job",
        "NVIDIA FLARE: write a job folder with one analysis, for 'nvflare job submit' or the simulator.",
        flare_commands.write_flare_job,
        (
            make_argument("job", type=Path, help="folder of the job, which is made"),
            make_argument("--analysis", required=True, help="model or function, such as FederatedOLS"),
            make_argument("--formula", default="", help="formula of the model"),
            make_argument("--purpose", default="", help="what the analysis is for; owners see it"),
            make_argument("--without", nargs="*", default=(), help="sites that take no part"),
        ),
    ),
    Command("serve", "NVIDIA FLARE: run the server until SIGTERM or Ctrl-C.", flare_commands.serve_server),
    Command(
        "start",
        "NVIDIA FLARE: start an analysis at the sites. Connecting does this as well.",
        flare_commands.start_analysis,
    ),
    Command(
        "stop",
        "NVIDIA FLARE: end the running analysis and all other jobs.",
        flare_commands.stop_analysis,
    ),
    Command(
        "status",
        "Show the sites and their waiting requests; with NVIDIA FLARE also server, certificates and analysis "
        "(exit code 0 if there are no problems).",
        federation_commands.show_federation_status,
        (JSON,),
    ),
    Command(
        "page",
        "Show sites, waiting approvals and analyses in a browser on this machine, until Ctrl-C.",
        service.serve_federation_page,
        (
            make_argument(
                "--port", type=parse_port, default=0, help="port on 127.0.0.1 (default: any free port)"
            ),
            make_argument(
                "--open", dest="in_browser", action="store_true", help="open the page in a browser"
            ),
        ),
    ),
    *SERVER,
)

ROOMS = (
    ("site", "commands for the owner of the data of a site", "folder of the site", SITE),
    (
        "federation",
        "commands for the coordinator, which sends requests",
        "folder of the coordinator",
        FEDERATION,
    ),
)


@cache
def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="fedstat",
        description="Run a site that answers requests about its data, or manage a federation of sites.",
        epilog="Exit codes: 0 no problems, 1 a problem was found, 2 the command is not valid.",
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
        code = run(**given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has seen enough; Python would flush again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FedstatError, OSError, ImportError) as error:
        print(f"fedstat: {error}", file=sys.stderr)
        return 1
