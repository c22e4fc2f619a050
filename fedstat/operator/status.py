"""The status file of a process that serves, and what the owner is shown of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstat.errors import EngineError, PartitionError, SecurityError
from fedstat.federation.account.chain import SiteAccount
from fedstat.federation.account.head import told
from fedstat.federation.account.ledger_file import LedgerFile, read_account
from fedstat.federation.carry.in_force import RULES, InForce
from fedstat.federation.carry.site_folder import (
    SiteDescription,
    load_identity,
    read_description,
    read_site_policy,
)
from fedstat.federation.door.owner.charging import budget_spent
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.files import write_whole
from fedstat.federation.message import VERSION
from fedstat.operator.running.standing import COUNTED, STATUS, counted, told_of
from fedstat.operator.writing.screen import columns, heading, typed


def now() -> str:
    """Time in UTC, to the second."""
    return told(time.time_ns())


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
    if FAMILIES:  # another process loads them where another carrier starts one
        content["families"] = ", ".join(sorted(FAMILIES))
    with suppress(OSError):  # on a full disk; what is full stands where the rules in force do
        write_whole(home / STATUS, json.dumps(content, indent=2).encode())


def counts(account: SiteAccount) -> dict[str, Any]:
    """Count what is in a site's account, for people."""
    found = counted(account)
    found["last_question"] = found["last_question"] or "none"
    return {name.replace("_", " "): found[name] for name in COUNTED if name != "entries"}


def budget(folder: Path, site: str) -> dict[str, str]:
    """Say how the privacy budget of a site stands by its account; nothing where it has none."""
    try:
        policy = read_site_policy(folder)
    except PartitionError:
        return {"privacy budget": "not known: the policy cannot be read"}
    if policy.privacy is None:
        return {}
    try:
        account = read_account(folder, site, load_identity(folder).public)
    except SecurityError:
        return {"privacy budget": f"not known, see fedstat site check {typed(folder)}"}
    return {"privacy budget": str(budget_spent(policy, account))}


def read_status(
    folder: Path,
    home: Path,
    is_served: Callable[[Path], bool],
    more: Callable[[SiteDescription], Mapping[str, Any]],
) -> tuple[dict[str, Any], bool]:
    """Read what the status file in `home` says of a site, and `more` of it; whether it is served."""
    description = read_description(folder)
    content = told_of(home)
    if not content:
        how = f"has not been started yet; start it with    fedstat site serve {typed(folder)}"
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
    return content | {**more(description), **rules(folder)}, running


def show_status(content: Mapping[str, Any], running: bool) -> int:
    """Show what was read of the status of a site; 0 while it is served."""
    print(heading(f"Site {content['site']}"))
    print(columns([(name, str(value)) for name, value in content.items() if name != "site"]))
    return 0 if running else 1


def rules(folder: Path) -> dict[str, str]:
    """Say by which rules a site is served, and over records of when; nothing where it is not."""
    held = InForce.load(folder) if is_served(folder) else None
    if held is None:
        return {}
    problems = list(rule_problems(folder))
    found = {"rules": "; ".join(problems) or f"those of {' and '.join(RULES)}, read {held.read}"}
    records = {"records as of": held.as_of, "last reload": held.reloaded}
    return found | {name: text for name, text in records.items() if text}


def rule_problems(folder: Path) -> Iterator[str]:
    """Say where a site that is served goes by other rules than those in its files."""
    held = InForce.load(folder) if is_served(folder) else None
    if held is not None and held.problem:
        yield f"the service that runs answers nothing: {held.problem}"
    elif held is not None and (differing := held.differing(folder)):
        yield (
            f"the service that runs goes by another {' and '.join(differing)} than the folder's, read "
            f"{held.read}; it reads them again before its next question"
        )


def is_served(folder: Path) -> bool:
    """Whether a process holds the ledger."""
    try:
        LedgerFile(folder, patience=0.0).close()
    except EngineError:
        return True
    except SecurityError:  # there is none, which the site will say when it is started
        return False
    return False
