"""The status of a site: its heartbeat, status file, and the report for owners and programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from fedstat.errors import EngineError, PartitionError, SecurityError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import REFUSAL, SiteLedger
from fedstat.federation.audit.ledger_file import LEDGER_FILENAME, LedgerFile, read_ledger
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.files import write_atomic
from fedstat.federation.message import VERSION
from fedstat.federation.transport.live_config import RULES, ActiveRules
from fedstat.federation.transport.site_folder import (
    SiteDescription,
    load_identity,
    read_description,
    read_site_policy,
)
from fedstat.operator.terminal import format_columns, shell_path, underlined

# ----------------------------------------------------------------------------------------------------
# How a site stands, under keys that programs may rely on (``fedstat site status --json``).
#
# The keys stay, and new ones may come; `form` is another number where one changes its meaning. What is not
# known or does not apply is null. All of it is the owner's: nothing is told that its own ledger does not
# tell.

STATUS, BEAT = "status.json", 5.0
"""The file in which a service says how it is, and seconds after which it touches it, so that it is seen."""
FORM, NEVER, KILLED = 1, "never started", "killed"
LEDGER_COUNTS = ("sessions", "questions", "refused", "arrays_left", "entries", "last_question")
FOR_GOOD = 3
"""Exit code of a service that is not to be started again before somebody has looked."""


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """A privacy budget: epsilon at delta, how much is charged by how many releases, and the share left."""

    epsilon: float
    delta: float
    epsilon_spent: float
    share_left: float
    releases: int


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """How one site stands, as its folder tells.

    `transport` is "folder", "bucket" or "flare"; `state` "running", "stopped", "failed", "killed" or "never
    started"; `ledger_is_held` whether a process holds the site's lock; `heartbeat` when the service was seen
    last. `version` is the service's, `installed` that of the command. `problem` says why a running service
    answers no requests, and is empty where it answers. Times are in UTC.
    """

    form: int
    site: str
    transport: str
    state: str
    is_served: bool
    process: int | None
    since: str | None
    heartbeat: str | None
    connected: bool | None
    version: str | None
    installed: str
    problem: str
    records_as_of: str | None
    site_ledger: str
    sessions: int | None
    questions: int | None
    refused: int | None
    arrays_left: int | None
    entries: int | None
    last_question: str | None
    passed_over: int | None
    waiting: int | None
    plans_waiting: int | None
    certificate_days: int | None
    budget: BudgetStatus | None


def write_heartbeat(home: Path) -> None:
    """Show that a service lives, for which a full disk has room as well."""
    with suppress(OSError):
        os.utime(home / STATUS)


def heartbeat_age(home: Path) -> float | None:
    """Seconds since the service of a folder was seen; None where it never was."""
    try:
        return max(0.0, time.time() - (home / STATUS).stat().st_mtime)
    except OSError:
        return None


def read_site_status(
    folder: Path,
    home: Path,
    transport: str,
    site: str,
    served: bool,
    waiting: tuple[int | None, int | None],
    days: int | None,
    site_ledger: SiteLedger | None = None,
) -> SiteStatus:
    """Read how a site stands.

    `waiting` counts questions and plans, `days` those of its certificate; the `site_ledger` is read unless
    given.
    """
    words = read_status_file(home)
    held = ActiveRules.load(folder) if served else None
    site_ledger, problem = (site_ledger, "") if site_ledger is not None else _site_ledger(folder, site)
    connected = words.get("connected")
    age = heartbeat_age(home)
    return SiteStatus(
        form=FORM,
        site=site,
        transport=transport,
        state=_state(words, served),
        is_served=served,
        process=words.get("process") if served else None,
        since=words.get("since"),
        heartbeat=None if age is None else utc_text(time.time_ns() - int(age * 1e9)),
        connected=None if connected is None else served and connected == "yes",
        version=words.get("fedstat"),
        installed=VERSION,
        problem="" if held is None else held.problem,
        records_as_of=(held.as_of or None) if held is not None else None,
        site_ledger=problem or "whole",
        **(dict.fromkeys(LEDGER_COUNTS) if site_ledger is None else count_ledger(site_ledger)),
        passed_over=words.get("passed over"),
        waiting=waiting[0],
        plans_waiting=waiting[1],
        certificate_days=days,
        budget=_budget(folder, site_ledger),
    )


def read_status_file(home: Path) -> dict[str, Any]:
    """Read the status file of a service; empty where there is none that can be read."""
    try:
        found = json.loads((home / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(words: dict[str, Any], served: bool) -> str:
    state = str(words.get("state", "running" if served else NEVER))
    return KILLED if state == "running" and not served else state


def _site_ledger(folder: Path, site: str) -> tuple[SiteLedger | None, str]:
    if not (folder / LEDGER_FILENAME).exists():
        return None, f"'{folder / LEDGER_FILENAME}' is absent"
    try:
        return read_ledger(folder, site, load_identity(folder).public), ""
    except SecurityError as error:
        return None, str(error)


def count_ledger(site_ledger: SiteLedger) -> dict[str, Any]:
    """Count what is in a site's account, under :data:`COUNTED`."""
    entries = [entry for chain in site_ledger.chains for entry in chain.entries]
    found = (
        len(site_ledger.chains),
        sum(chain.round for chain in site_ledger.chains),
        sum(entry.kind == REFUSAL for entry in entries),
        sum(entry.left for entry in entries),
        len(entries),
        max((entry.time for entry in entries), default=None),
    )
    return dict(zip(LEDGER_COUNTS, found, strict=True))


def _budget(folder: Path, site_ledger: SiteLedger | None) -> BudgetStatus | None:
    if site_ledger is None:
        return None
    try:
        spent = read_budget_spent(read_site_policy(folder), site_ledger)
    except PartitionError:  # the policy cannot be read, which is told by who needs it
        return None
    if spent is None:
        return None
    left = float(spent.left / Fraction(spent.total))
    return BudgetStatus(spent.epsilon, spent.delta, spent.epsilon_spent, left, spent.releases)


# ----------------------------------------------------------------------------------------------------
# The status file of a process that serves, and what the owner is shown of it.


def utc_now() -> str:
    """Time in UTC, to the second."""
    return utc_text(time.time_ns())


def write_status(home: Path, state: str, name: str, began: str, more: Mapping[str, Any]) -> None:
    """Write how this process is, which calls itself `name` and began then."""
    content = {
        "state": state,
        "site": name,
        "process": os.getpid(),
        "since": began,
        "fedstat": VERSION,
        **more,
    }
    if FAMILIES:  # another process loads them where another transport starts one
        content["families"] = ", ".join(sorted(FAMILIES))
    with suppress(OSError):  # on a full disk; what is full stands where the rules in force do
        write_atomic(home / STATUS, json.dumps(content, indent=2).encode())


def describe_counts(site_ledger: SiteLedger) -> dict[str, Any]:
    """Count what is in a site's account, for people."""
    found = count_ledger(site_ledger)
    found["last_question"] = found["last_question"] or "none"
    return {name.replace("_", " "): found[name] for name in LEDGER_COUNTS if name != "entries"}


def describe_budget(folder: Path, site: str) -> dict[str, str]:
    """Say how the privacy budget of a site stands by its account; nothing where it has none."""
    try:
        policy = read_site_policy(folder)
    except PartitionError:
        return {"privacy budget": "not known: the policy cannot be read"}
    if policy.privacy is None:
        return {}
    try:
        site_ledger = read_ledger(folder, site, load_identity(folder).public)
    except SecurityError:
        return {"privacy budget": f"not known, see fedstat site check {shell_path(folder)}"}
    return {"privacy budget": str(read_budget_spent(policy, site_ledger))}


def read_service_status(
    folder: Path,
    home: Path,
    is_served: Callable[[Path], bool],
    more: Callable[[SiteDescription], Mapping[str, Any]],
) -> tuple[dict[str, Any], bool]:
    """Read what the status file in `home` says of a site, and `more` of it; whether it is served."""
    description = read_description(folder)
    content = read_status_file(home)
    if not content:
        how = f"has not been started yet; start it with    fedstat site serve {shell_path(folder)}"
        return {"site": description.name, "state": how, **more(description)}, False
    # the file is the word of a process that may have been killed since: locks tell whether it lives
    running = is_served(home)
    if not running:
        if content["state"] == "running":
            content["state"] = "ended without a word (killed, or the machine went down); start it again"
        if "connected" in content:
            content["connected"] = "no"
        del content["process"]
    if content.get("fedstat", VERSION) != VERSION:
        content["fedstat"] += f" (installed is {VERSION}: start it again)"
    return content | {**more(description), **describe_rules(folder)}, running


def show_status(content: Mapping[str, Any], running: bool) -> int:
    """Show what was read of the status of a site; 0 while it is served."""
    print(underlined(f"Site {content['site']}"))
    print(format_columns([(name, str(value)) for name, value in content.items() if name != "site"]))
    return 0 if running else 1


def describe_rules(folder: Path) -> dict[str, str]:
    """Say by which rules a site is served, and over records of when; nothing where it is not."""
    held = ActiveRules.load(folder) if ledger_is_held(folder) else None
    if held is None:
        return {}
    problems = list(rule_problems(folder))
    found = {"rules": "; ".join(problems) or f"those of {' and '.join(RULES)}, read {held.read}"}
    records = {"records as of": held.as_of, "last reload": held.reloaded}
    return found | {name: text for name, text in records.items() if text}


def rule_problems(folder: Path) -> Iterator[str]:
    """Report where the running service uses other rules than those in the files of its site."""
    held = ActiveRules.load(folder) if ledger_is_held(folder) else None
    if held is not None and held.problem:
        yield f"the running service answers no requests: {held.problem}"
    elif held is not None and (differing := held.differing(folder)):
        yield (
            f"the running service uses an earlier {' and '.join(differing)}, read {held.read}; it reads the "
            "folder again before its next reply"
        )


def ledger_is_held(folder: Path) -> bool:
    """Whether a process holds the ledger."""
    try:
        LedgerFile(folder, patience=0.0).close()
    except EngineError:
        return True
    except SecurityError:  # there is none, which the site will say when it is started
        return False
    return False
