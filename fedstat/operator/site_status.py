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
from fedstat.federation.state_formats import NUMBER
from fedstat.federation.state_formats import STATUS as STATUS_FORMAT
from fedstat.federation.transport.live_config import RULES, ActiveRules
from fedstat.federation.transport.site_folder import (
    SiteDescription,
    load_identity,
    read_description,
    read_site_policy,
)
from fedstat.operator.terminal import format_columns, shell_path, underlined

# ----------------------------------------------------------------------------------------------------
# The status of a site, under keys that programs can rely on (``fedstat site status --json``).
#
# The keys are stable, and new ones may be added; `form` changes if one changes its meaning. A value that is
# not known or does not apply is null. Only the owner can read the status: it shows nothing that is not in the
# site's own ledger and folder.

STATUS, BEAT = "status.json", 5.0
"""The status file of a service, and the number of seconds after which the service touches it."""
FORM, NEVER, KILLED = 1, "never started", "killed"
LEDGER_COUNTS = ("sessions", "requests", "refused", "arrays_released", "entries", "last_request")
FOR_GOOD = 3
"""Exit code of a service that must not be started again without a look at its problem."""


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """A privacy budget: epsilon at delta, the charges and the number of releases, and the share left."""

    epsilon: float
    delta: float
    epsilon_spent: float
    share_left: float
    releases: int


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """The status of one site, read from its folder.

    `transport` is "folder", "bucket" or "flare". `state` is "running", "stopped", "failed", "killed" or
    "never started". `ledger_is_held` is true if a process holds the lock of the site. `heartbeat` is the time
    at which the service was seen last. `version` is that of the service, and `installed` that of the command.
    `problem` is the reason for which a running service answers no requests, or for which the last start
    failed, or empty; `reload_problem` is why the last reload failed. `exchange_problem` says why a folder for
    requests and replies cannot be written, and `clock` when the clock of the machine was set. `refusals_left`
    is the number of further refusals until a coordinator gets no more answers. `policy_weakened` says when
    the policy became weaker the last time, and in which rules. Times are in UTC.
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
    requests: int | None
    refused: int | None
    arrays_released: int | None
    entries: int | None
    last_request: str | None
    passed_over: int | None
    waiting: int | None
    plans_waiting: int | None
    certificate_days: int | None
    budget: BudgetStatus | None
    reload_problem: str = ""
    exchange_problem: str = ""
    clock: str = ""
    refusals_left: int | None = None
    policy_weakened: str = ""


def write_heartbeat(home: Path) -> None:
    """Show that a service is alive; this needs no free disk space."""
    with suppress(OSError):
        os.utime(home / STATUS)


def heartbeat_age(home: Path) -> float | None:
    """Return the seconds since the service of a folder was seen; None if it never was.

    They are negative if the clock has been set back since.
    """
    try:
        return time.time() - (home / STATUS).stat().st_mtime
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
    """Read the status of a site.

    `waiting` counts requests and plans, `days` those until the certificate ends. The `site_ledger` is read
    unless it is given.
    """
    words = read_status_file(home)
    held = ActiveRules.load(folder) if served else None
    site_ledger, problem = (site_ledger, "") if site_ledger is not None else _site_ledger(folder, site)
    if site_ledger is not None and site_ledger.disputed:
        problem = f"{site_ledger.disputed}. Nothing is answered until its owner has declared the loss"
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
        problem=str(words.get("problem", "")) if held is None else held.problem,
        reload_problem="" if held is None else held.reload_problem,
        exchange_problem=str(words.get("exchange problem", "")) if served else "",
        clock=str(words.get("clock", "")),
        refusals_left=_refusals_left(folder, site_ledger),
        policy_weakened="" if held is None else held.weakened,
        records_as_of=(held.as_of or None) if held is not None else None,
        site_ledger=problem or "complete",
        **(dict.fromkeys(LEDGER_COUNTS) if site_ledger is None else count_ledger(site_ledger)),
        passed_over=words.get("passed over"),
        waiting=waiting[0],
        plans_waiting=waiting[1],
        certificate_days=days,
        budget=_budget(folder, site_ledger),
    )


def read_status_file(home: Path) -> dict[str, Any]:
    """Read the status file of a service; empty if it is absent or not valid."""
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
    except (SecurityError, EngineError) as error:
        return None, str(error)


def count_ledger(site_ledger: SiteLedger) -> dict[str, Any]:
    """Count the entries of a ledger, under :data:`COUNTED`."""
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


def _refusals_left(folder: Path, site_ledger: SiteLedger | None) -> int | None:
    with suppress(PartitionError):  # the policy cannot be read, which commands that need it report
        most = read_site_policy(folder).max_refusals
        if most and site_ledger is not None:
            return max(0, most - max(site_ledger.refusals.values(), default=0))
    return None


def _budget(folder: Path, site_ledger: SiteLedger | None) -> BudgetStatus | None:
    if site_ledger is None:
        return None
    try:
        spent = read_budget_spent(read_site_policy(folder), site_ledger)
    except PartitionError:  # the policy cannot be read, which commands that need it report
        return None
    if spent is None:
        return None
    left = float(spent.left / Fraction(spent.total))
    return BudgetStatus(spent.epsilon, spent.delta, spent.epsilon_spent, left, spent.releases)


# ----------------------------------------------------------------------------------------------------
# The status file of a running process, and its presentation to the owner.


def utc_now() -> str:
    """Time in UTC, to the second."""
    return utc_text(time.time_ns())


def write_status(home: Path, state: str, name: str, began: str, more: Mapping[str, Any]) -> None:
    """Write the status of this process, which calls itself `name` and began at this time."""
    content = {
        "state": state,
        "site": name,
        "process": os.getpid(),
        "since": began,
        "fedstat": VERSION,
        NUMBER: STATUS_FORMAT.number,
        **more,
    }
    if FAMILIES:  # with NVIDIA FLARE, another process loads them
        content["families"] = ", ".join(sorted(FAMILIES))
    with suppress(OSError):  # on a full disk; the rules in force report it
        write_atomic(home / STATUS, json.dumps(content, indent=2).encode())


def describe_counts(site_ledger: SiteLedger) -> dict[str, Any]:
    """Count the entries of a ledger, for people."""
    found = count_ledger(site_ledger)
    found["last_request"] = found["last_request"] or "none"
    return {name.replace("_", " "): found[name] for name in LEDGER_COUNTS if name != "entries"}


def describe_budget(folder: Path, site: str) -> dict[str, str]:
    """Return the state of the privacy budget from the ledger; empty if there is no budget."""
    try:
        policy = read_site_policy(folder)
    except PartitionError:
        return {"privacy budget": "not known: the policy cannot be read"}
    if policy.privacy is None:
        return {}
    try:
        site_ledger = read_ledger(folder, site, load_identity(folder).public)
    except (SecurityError, EngineError):
        return {"privacy budget": f"not known, see fedstat site check {shell_path(folder)}"}
    return {"privacy budget": str(read_budget_spent(policy, site_ledger))}


def read_service_status(
    folder: Path,
    home: Path,
    is_served: Callable[[Path], bool],
    more: Callable[[SiteDescription], Mapping[str, Any]],
) -> tuple[dict[str, Any], bool]:
    """Read from the status file in `home` whether a site is running, and what it reports, with `more`."""
    description = read_description(folder)
    content = read_status_file(home)
    content.pop(NUMBER, None)
    if not content:
        how = f"has not been started yet; start it with    fedstat site serve {shell_path(folder)}"
        return {"site": description.name, "state": how, **more(description)}, False
    # the process that wrote the file may have been killed since: the lock shows whether it is alive
    running = is_served(home)
    if not running:
        if content["state"] == "running":
            content["state"] = "ended without a message (killed, or the machine stopped); start it again"
        if "connected" in content:
            content["connected"] = "no"
        del content["process"]
    if content.get("fedstat", VERSION) != VERSION:
        content["fedstat"] += f" (installed is {VERSION}: start it again)"
    return content | {**more(description), **describe_rules(folder)}, running


def show_status(content: Mapping[str, Any], running: bool) -> int:
    """Show the status of a site; return 0 while it is running."""
    print(underlined(f"Site {content['site']}"))
    print(format_columns([(name, str(value)) for name, value in content.items() if name != "site"]))
    return 0 if running else 1


def describe_rules(folder: Path) -> dict[str, str]:
    """Return the rules in force and the time of the data; empty if the site is not running."""
    held = ActiveRules.load(folder) if ledger_is_held(folder) else None
    if held is None:
        return {}
    problems = list(rule_problems(folder))
    found = {"rules": "; ".join(problems) or f"those of {' and '.join(RULES)}, read {held.read}"}
    records = {
        "policy made weaker": held.weakened,
        "data as of": held.as_of,
        "last reload": held.reloaded,
    }
    return found | {name: text for name, text in records.items() if text}


def rule_problems(folder: Path) -> Iterator[str]:
    """Report if the running service uses other rules than those in the files of its site."""
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
    except SecurityError:  # there is none, which the site will report when it starts
        return False
    return False
