"""The configuration of a running site: changed files take effect without a restart."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from fedstat.errors import EngineError, FedstatError, PartitionError
from fedstat.federation import state_formats
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import PolicyRecord
from fedstat.federation.audit.ledger_file import ANSWERED_FILENAME, LEDGER_FILENAME
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.rules import lines_not_in, rules_text, stricter_rules
from fedstat.federation.disclosure.site import Site
from fedstat.federation.files import write_atomic
from fedstat.federation.transport.site_folder import (
    COLUMNS,
    DESCRIPTION,
    POLICY,
    RELOAD,
    SiteDescription,
    apply_trust,
    mode_problems,
    open_site,
    read_description,
    read_site_columns,
    read_site_policy,
    reload_records,
)

# ----------------------------------------------------------------------------------------------------
# How the rules of a site changed, from the ledger, which records them each time.


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """A change of a site's policy: its time, and the rules that became weaker or stricter, in words."""

    when: int
    weaker: tuple[str, ...]
    stricter: tuple[str, ...]

    def __str__(self) -> str:
        return f"{utc_text(self.when)}: {', '.join(self.weaker)}"


def policy_changes(recorded: Sequence[PolicyRecord]) -> list[PolicyChange]:
    """Compare each policy that a ledger has recorded with the one before."""
    changes = []
    for earlier, later in pairwise(recorded):
        try:
            old, new = (Policy.from_text("a recorded policy", one.rules) for one in (earlier, later))
        except PartitionError:  # of a version with other rules
            continue
        found = [
            tuple(f"{name} from {getattr(old, name)} to {getattr(new, name)}" for name in names)
            for names in (stricter_rules(new, old), stricter_rules(old, new))
        ]
        if any(found):
            changes.append(PolicyChange(later.policy, *found))
    return changes


# ----------------------------------------------------------------------------------------------------
# Space on a site's disk: nothing is released that cannot be recorded first.

LEAST, PROBED = 8 * 2**20, 2**16
"""Bytes that must be free in addition to the stored replies; bytes of a trial write to a ledger."""
GOES_ON = "The site releases nothing that the ledger cannot record. It continues by itself when space is free"


def full_disk(folder: Path) -> str:
    """Return the error text for a full disk with the space needed.

    Empty if there is space.
    """
    try:
        free = shutil.disk_usage(folder).free
        kept = (folder / ANSWERED_FILENAME).stat().st_size if (folder / ANSWERED_FILENAME).exists() else 0
    except OSError as error:
        return f"'{folder}' is out of reach ({error.strerror}). {GOES_ON}"
    needed = LEAST + 2 * kept  # rows behind earlier replies are rewritten next to the old ones
    if free >= needed:
        return ""
    return (
        f"the disk of '{folder}' is full: {free / 2**20:.1f} MB are free, and {needed / 2**20:.1f} MB are "
        f"needed. {GOES_ON}"
    )


def full_ledger(folder: Path) -> str:
    """Return why the ledger of a site cannot be extended while no process writes to it; empty if it can."""
    path = folder / LEDGER_FILENAME
    try:
        size = path.stat().st_size
        try:
            with open(
                os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)), "ab", 0
            ) as file:
                if file.write(bytes(PROBED)) != PROBED:
                    return ledger_write_error(path, "no space for a complete line")
                os.fsync(file.fileno())
        finally:
            os.truncate(path, size)
    except OSError as error:
        return ledger_write_error(path, str(error.strerror))
    return ""


def ledger_write_error(path: Path, why: str) -> str:
    """Return the error text for a ledger that cannot be written."""
    return f"'{path}' cannot be written ({why}): {PROBED / 2**10:.0f} kB are needed. {GOES_ON}"


# ----------------------------------------------------------------------------------------------------
# Files that a running site follows: its owner changes them while the site runs, without a restart.
#
# ``site.toml``, ``policy.toml`` and ``columns.toml`` are read before every request and take effect if their
# content has changed. File times are not enough: a clock may be set back and a file be restored. The site
# answers nothing while one of the files is invalid, missing, or readable or writable by others, or if it
# describes another site (:data:`FIXED`). So every reply follows the rules in the files.
#
# The rules in force are written to ``in_force.json`` (mode 0600) for the owner's commands. This holds for
# both kinds of service: a process over a folder, or a job of NVIDIA FLARE.

IN_FORCE, RULES = "in_force.json", (POLICY, COLUMNS)
WATCHED = (DESCRIPTION, *RULES)
FIXED = ("name", "site_column", "seed")
"""Entries of ``site.toml`` that cannot change while a site runs."""
ROOM, LONGEST_PROBLEM = 8192, 1000
SETTLED, RETRIED = 0.02, 60.0
"""Seconds until the next reading of a file that was being written, and of one that was invalid."""


class ClosedError(EngineError):
    """The site answers nothing for now; the reason is for its own log and not for the analyst.

    Examples
    --------
    >>> from fedstat.federation.transport.live_config import ClosedError
    >>> str(ClosedError("'policy.toml' is gone"))
    "'policy.toml' is gone"
    """


@dataclass(frozen=True, slots=True)
class ActiveRules:
    """Rules that a service follows: digests of their files, the time of reading, and what is wrong.

    The site's rows were read at the time `as_of`, which is empty if every reply reads them. `reloaded`
    describes the outcome of the owner's last request to read them again, and `reload_problem` is why it
    failed. `weakened` says when the service took over a policy that allows more, and in which rules.
    """

    digests: Mapping[str, str]
    read: str
    problem: str = ""
    as_of: str = ""
    reloaded: str = ""
    reload_problem: str = ""
    weakened: str = ""

    @classmethod
    def load(cls, folder: Path) -> ActiveRules | None:
        """Read what the last service wrote; None if there is nothing to read."""
        try:
            content = (folder / IN_FORCE).read_bytes()
            return state_formats.RULES.read_record(cls, content, f"'{folder / IN_FORCE}'")
        except (OSError, FedstatError):
            return None

    def differing(self, folder: Path) -> list[str]:
        """Return the names of the files that differ from what is in force."""
        found = digests_of(folder)
        return [name for name in RULES if found[name] != self.digests.get(name, "")]


@dataclass(slots=True)
class LiveConfig:
    """The files of a site's owner, and the site that follows them; `report` receives lines for its log."""

    folder: Path
    report: Callable[[str], None] = lambda _: None
    site: Site = field(init=False)
    description: SiteDescription = field(init=False)
    problem: str = ""
    weakened: str = ""
    has_failed: bool = False
    _held: dict[str, str] = field(init=False)
    _failed: tuple[object, ...] = ()
    _wish: str = ""
    _reloaded: str = ""
    _reload_problem: str = ""

    def __post_init__(self) -> None:
        # digests before content: a change between the two is noticed at the first request
        self._held, self._wish = digests_of(self.folder), _digest(self.folder / RELOAD)
        self.description = read_description(self.folder)
        earlier = ActiveRules.load(self.folder)
        self.site = open_site(self.folder, self.report)
        if (
            not self.site.site_ledger.policies
            and earlier is not None
            and POLICY in earlier.differing(self.folder)
        ):
            self.report(f"'{POLICY}' was changed while the site was stopped; its earlier rules are not known")
        self._record_policy(", changed while the site was stopped")
        self._write()

    def reload_if_changed(self) -> bool:
        """Apply the changes; return whether the pinned coordinator or the place of the requests changed.

        Raises
        ------
        ClosedError
            A file cannot be used now.
        """
        if full := full_disk(self.folder):
            self._failed = ()
            self.close(full)
        found, modes = digests_of(self.folder), tuple(mode_problems(self.folder))
        if found == self._held and not modes and not self.problem:
            self._reload()
            return False
        # a failed change is not tried again at every look: the check of columns reads all rows
        attempt = (*found.values(), *modes, time.monotonic() // RETRIED)
        if attempt == self._failed:
            raise ClosedError(self.problem)
        try:
            moved = self._take_over(found, modes)
        except (FedstatError, OSError) as error:
            self._failed = attempt
            self.close(f"the changed files cannot be used: {error}")
        self._write()
        self._reload()
        return moved

    def close(self, problem: str) -> NoReturn:
        """Answer nothing for now: raise ClosedError.

        The log receives the problem once, even if its figures change.
        """
        if _bare(problem) != _bare(self.problem):
            self.report(f"answers no requests: {problem}")
        self.problem = problem
        self._write()
        raise ClosedError(problem)

    def check_written(self) -> None:
        """Withhold a reply whose ledger entry could not be written; the ledger in memory is then invalid."""
        store = self.site.site_ledger.store
        if store is not None and store.broken:
            self.has_failed = True
            self.close(ledger_write_error(self.folder / LEDGER_FILENAME, store.broken))

    def open_again(self) -> None:
        """Open the site again with the ledger on disk; ClosedError while the ledger cannot be written."""
        problem = full_disk(self.folder) or full_ledger(self.folder)
        if problem:
            self.close(problem)
        if self.site.site_ledger.store is not None:  # held until now, so that no other process could take it
            self.site.site_ledger.store.close()
        try:
            fresh = LiveConfig(self.folder, self.report)
        except (FedstatError, OSError) as error:
            self.close(f"the site cannot be opened again: {error}")
        self.site, self.description, self._held = fresh.site, fresh.description, fresh._held
        self.has_failed, self.problem = False, ""
        self.report("has disk space again and was reopened; open sessions have ended")

    def _take_over(self, found: dict[str, str], modes: tuple[str, ...]) -> bool:
        while (again := _after_a_moment(self.folder)) != found:
            found = again
        gone = [name for name in WATCHED if self._held[name] and not found[name]]
        if gone:
            raise ClosedError(f"'{self.folder / gone[0]}' is missing or cannot be read; restore it")
        for problem in modes:
            raise ClosedError(problem)
        description, policy = read_description(self.folder), read_site_policy(self.folder)
        other = [name for name in FIXED if getattr(description, name) != getattr(self.description, name)]
        if other:
            raise ClosedError(
                f"'{self.folder / DESCRIPTION}' has another {' and '.join(other)}: restart the service "
                "or restore the earlier entry"
            )
        published = self.site.published
        if found[COLUMNS] != self._held[COLUMNS]:
            published = read_site_columns(self.folder, self.site.name, self.site.data.table)
        changed = [name for name in WATCHED if found[name] != self._held[name]]
        stricter = self.site.change_rules(policy, published)
        apply_trust(self.site, description)
        self.description, self._held, self.problem, self._failed = description, found, "", ()
        ends = f", stricter in {', '.join(stricter)}; open sessions have ended" if stricter else ""
        self.report(f"now uses {', '.join(changed) or 'its files'}{ends}")
        self._record_policy()
        return DESCRIPTION in changed

    def _record_policy(self, how: str = "") -> None:
        """Enter the rules into the ledger, and name those that became weaker."""
        site_ledger = self.site.site_ledger
        before = len(site_ledger.policies)
        if before and (new := lines_not_in(self.site.policy, site_ledger.policies[-1].rules)):
            self.report(f"rules are in force that this site did not have before: {', '.join(new)}")
        site_ledger.record_policy(rules_text(self.site.policy))
        changes = policy_changes(site_ledger.policies)
        self.weakened = next((str(one) for one in reversed(changes) if one.weaker), "")
        if len(site_ledger.policies) > max(before, 1):
            newest = policy_changes(site_ledger.policies[-2:])
            for one in (one for one in newest if one.weaker):
                self.report(f"the policy is weaker than before{how}: {', '.join(one.weaker)}")

    def _reload(self) -> None:
        """Read the rows again if the owner requested it; otherwise, or if it fails, keep the current rows."""
        wish = _digest(self.folder / RELOAD)
        if wish in ("", self._wish):
            return
        self._wish = wish
        try:
            self._reloaded, self._reload_problem = reload_records(self.folder, self.site), ""
        except (FedstatError, OSError, ImportError) as error:
            self._reloaded = f"could not read its rows again and keeps the current ones: {error}"
            self._reload_problem = self._reloaded
        self.report(self._reloaded)
        self._write()

    def _write(self) -> None:
        rules = {name: self._held[name] for name in RULES}
        reported_of = (
            self.problem[:LONGEST_PROBLEM],
            self.site.site_ledger.as_of,
            self._reloaded[:LONGEST_PROBLEM],
            self._reload_problem[:LONGEST_PROBLEM],
            self.weakened[:LONGEST_PROBLEM],
        )
        held = ActiveRules(rules, utc_text(time.time_ns()), *reported_of)
        path, content = self.folder / IN_FORCE, state_formats.RULES.write_record(held).encode().ljust(ROOM)
        with suppress(OSError):
            if not path.is_symlink() and path.exists() and path.stat().st_size == len(content):
                # overwritten in place, which works on a full disk as well
                with path.open("r+b") as file:
                    file.write(content)
            else:
                write_atomic(path, content)


def digests_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digests of the files that an owner changes; empty for an absent file."""
    return {name: _digest(folder / name) for name in WATCHED}


def _bare(problem: str) -> str:
    return re.sub(r"[0-9.]+ MB|cannot be written \([^)]*\)", "", problem)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _after_a_moment(folder: Path) -> dict[str, str]:
    time.sleep(SETTLED)
    return digests_of(folder)
