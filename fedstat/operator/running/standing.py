"""How a site stands, under keys that programs may rely on (``fedstat site status --json``).

The keys stay, and new ones may come; `form` is another number where one changes its meaning. What is not
known or does not apply is null. All of it is the owner's: nothing is told that its own ledger does not tell.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.account.chain import SiteAccount
from fedstat.federation.account.entry import REFUSAL
from fedstat.federation.account.head import told
from fedstat.federation.account.ledger_file import read_account
from fedstat.federation.account.ledger_lines import LEDGER
from fedstat.federation.carry.in_force import InForce
from fedstat.federation.carry.site_folder import load_identity, read_site_policy
from fedstat.federation.door.owner.charging import budget_spent
from fedstat.federation.message import VERSION

STATUS, BEAT = "status.json", 5.0
"""The file in which a service says how it is, and seconds after which it touches it, so that it is seen."""
FORM, NEVER, KILLED = 1, "never started", "killed"
COUNTED = ("sessions", "questions", "refused", "arrays_left", "entries", "last_question")
FOR_GOOD = 3
"""Exit code of a service that is not to be started again before somebody has looked."""


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """A privacy budget: epsilon at delta, how much is charged by how many releases, and the share left."""

    epsilon: float
    delta: float
    epsilon_spent: float
    share_left: float
    releases: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How one site stands, as its folder tells.

    `carrier` is "folder", "bucket" or "flare"; `state` "running", "stopped", "failed", "killed" or "never
    started"; `is_served` whether a process holds the site's lock; `heartbeat` when the service was seen last.
    `version` is the service's, `installed` that of the command. `problem` says why a service that runs
    answers nothing, and is empty where it answers. Times are in UTC.
    """

    form: int
    site: str
    carrier: str
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
    account: str
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
    budget: BudgetStanding | None


def beat(home: Path) -> None:
    """Show that a service lives, for which a full disk has room as well."""
    with suppress(OSError):
        os.utime(home / STATUS)


def beaten(home: Path) -> float | None:
    """Seconds since the service of a folder was seen; None where it never was."""
    try:
        return max(0.0, time.time() - (home / STATUS).stat().st_mtime)
    except OSError:
        return None


def standing_of(
    folder: Path,
    home: Path,
    carrier: str,
    site: str,
    served: bool,
    waiting: tuple[int | None, int | None],
    days: int | None,
    account: SiteAccount | None = None,
) -> Standing:
    """Read how a site stands.

    `waiting` counts questions and plans, `days` those of its certificate; the `account` is read unless given.
    """
    words = told_of(home)
    held = InForce.load(folder) if served else None
    account, problem = (account, "") if account is not None else _account(folder, site)
    connected = words.get("connected")
    age = beaten(home)
    return Standing(
        form=FORM,
        site=site,
        carrier=carrier,
        state=_state(words, served),
        is_served=served,
        process=words.get("process") if served else None,
        since=words.get("since"),
        heartbeat=None if age is None else told(time.time_ns() - int(age * 1e9)),
        connected=None if connected is None else served and connected == "yes",
        version=words.get("fedstat"),
        installed=VERSION,
        problem="" if held is None else held.problem,
        records_as_of=(held.as_of or None) if held is not None else None,
        account=problem or "whole",
        **(dict.fromkeys(COUNTED) if account is None else counted(account)),
        passed_over=words.get("passed over"),
        waiting=waiting[0],
        plans_waiting=waiting[1],
        certificate_days=days,
        budget=_budget(folder, account),
    )


def told_of(home: Path) -> dict[str, Any]:
    """Read the status file of a service; empty where there is none that can be read."""
    try:
        found = json.loads((home / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(words: dict[str, Any], served: bool) -> str:
    state = str(words.get("state", "running" if served else NEVER))
    return KILLED if state == "running" and not served else state


def _account(folder: Path, site: str) -> tuple[SiteAccount | None, str]:
    if not (folder / LEDGER).exists():
        return None, f"'{folder / LEDGER}' is absent"
    try:
        return read_account(folder, site, load_identity(folder).public), ""
    except SecurityError as error:
        return None, str(error)


def counted(account: SiteAccount) -> dict[str, Any]:
    """Count what is in a site's account, under :data:`COUNTED`."""
    links = [link for chain in account.chains for link in chain.links]
    found = (
        len(account.chains),
        sum(chain.round for chain in account.chains),
        sum(link.entry.kind == REFUSAL for link in links),
        sum(link.entry.left for link in links),
        len(links),
        max((link.time for link in links), default=None),
    )
    return dict(zip(COUNTED, found, strict=True))


def _budget(folder: Path, account: SiteAccount | None) -> BudgetStanding | None:
    if account is None:
        return None
    try:
        spent = budget_spent(read_site_policy(folder), account)
    except PartitionError:  # the policy cannot be read, which is told by who needs it
        return None
    if spent is None:
        return None
    left = float(spent.left / Fraction(spent.total))
    return BudgetStanding(spent.epsilon, spent.delta, spent.epsilon_spent, left, spent.releases)
