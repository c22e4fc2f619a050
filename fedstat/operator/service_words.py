"""Commands that serve a site and watch it."""

from __future__ import annotations

from pathlib import Path

from fedstat.operator import deployment, serve
from fedstat.operator.writing.words import JSON, Command, argument, count, megabytes, mode, seconds

INTO = argument("into", type=Path, help="folder for the two files; none is written over")

SERVICE = (
    Command(
        "serve",
        "Answer questions until SIGTERM or Ctrl-C.",
        serve.serve,
        (
            argument("--once", action="store_true", help="answer what waits in the folder, and end"),
            argument(
                "--poll", type=seconds, default=serve.POLL, help="seconds between two looks at the folder"
            ),
            argument("--metrics", type=Path, help="file that is kept in Prometheus' text format"),
            argument("--metrics-mode", type=mode, default=0o600, help="its mode (default: 600)"),
            argument("--log", type=Path, help="file for its log (default: standard error)"),
            argument(
                "--log-megabytes", type=megabytes, default=10.0, help="size at which it is set aside (10)"
            ),
            argument("--log-count", type=count, default=5, help="how many older ones are kept (5)"),
        ),
    ),
    Command(
        "status",
        "Show whether the site is served, and what it has done (exit code 0 while it is served).",
        serve.status,
        (JSON,),
    ),
    Command(
        "health",
        "Say in one line whether the site is served and can answer (exit code 0 where it can), for monitors.",
        serve.health,
        (
            argument(
                "--patience",
                type=seconds,
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
