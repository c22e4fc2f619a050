"""The owner's command that runs when a plan waits for approval, for example to send a message."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from fedstat.errors import FedstatError, PartitionError
from fedstat.federation.disclosure.approval import AnalysisPlan

# ----------------------------------------------------------------------------------------------------
# The command is a line of site.toml, and is run without a shell. Nothing of a plan is an argument or a
# variable of the environment except its digest: names, formula and purpose come from elsewhere, and could
# contain commands. They are in one line of JSON on standard input, without values of the data.

TIMEOUT = 60.0
"""Seconds after which the command is ended."""
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME")
"""Variables that the command receives: others may hold the address of a database."""
Notify = Callable[[str, AnalysisPlan], None]


def split_command(command: str) -> list[str]:
    """Split a command into its words; PartitionError if a quote is not closed."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise PartitionError(f"on_pending: '{command}' is not a command: {error}") from None


def notify_owner(folder: Path, command: str, report: Callable[[str], None], plan: AnalysisPlan) -> None:
    """Run the command once for a new plan, without waiting for it; a failure is only a line of the log."""
    if words := split_command(command):
        Thread(target=_run, args=(folder, words, report, plan), daemon=True).start()


def _run(folder: Path, words: list[str], report: Callable[[str], None], plan: AnalysisPlan) -> None:
    held = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    fields = ("person", "study", "purpose", "call", "formula")
    message = {"site": plan.site, "plan": plan.digest} | {name: getattr(plan, name) for name in fields}
    try:
        with subprocess.Popen(
            words,
            cwd=folder,
            env=held | {"FEDSTAT_PLAN": plan.digest},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                process.communicate((json.dumps(message) + "\n").encode(), TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        problem = f"exit code {process.returncode}" if process.returncode else ""
    except (OSError, ValueError, FedstatError) as error:
        problem = type(error).__name__
    if problem:
        report(f"the command on_pending failed ({problem}); plan {plan.digest:.12} waits for the owner")
