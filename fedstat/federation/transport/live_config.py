"""The configuration of a running site: changed files take effect without a restart."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from fedstat.codec import from_json, to_json
from fedstat.errors import EngineError, FedstatError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.ledger_file import ANSWERED_FILENAME, LEDGER_FILENAME
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
# Room on a site's disk: nothing leaves that cannot be written down first.

LEAST, PROBED = 8 * 2**20, 2**16
"""Bytes that a site wants free beside what it remembers of its answers; bytes by which a ledger is tried."""
GOES_ON = "Nothing leaves that is not entered in the ledger; it goes on by itself when there is room"


def full_disk(folder: Path) -> str:
    """Say that the disk of a site's folder is full, and how much room is needed; empty where it is not."""
    try:
        free = shutil.disk_usage(folder).free
        kept = (folder / ANSWERED_FILENAME).stat().st_size if (folder / ANSWERED_FILENAME).exists() else 0
    except OSError as error:
        return f"'{folder}' is out of reach ({error.strerror}). {GOES_ON}"
    needed = LEAST + 2 * kept  # the rows behind earlier answers are written anew beside the old ones
    if free >= needed:
        return ""
    return (
        f"the disk of '{folder}' is full: {free / 2**20:.1f} MB are free, and {needed / 2**20:.1f} MB are "
        f"needed. {GOES_ON}"
    )


def full_ledger(folder: Path) -> str:
    """Say why the ledger of a site, to which nobody writes now, cannot be added to; empty where it can."""
    path = folder / LEDGER_FILENAME
    try:
        size = path.stat().st_size
        try:
            with open(
                os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)), "ab", 0
            ) as file:
                if file.write(bytes(PROBED)) != PROBED:
                    return ledger_write_error(path, "no room for all of a line")
                os.fsync(file.fileno())
        finally:
            os.truncate(path, size)
    except OSError as error:
        return ledger_write_error(path, str(error.strerror))
    return ""


def ledger_write_error(path: Path, why: str) -> str:
    """Say that a ledger cannot be written."""
    return f"'{path}' cannot be written ({why}): {PROBED / 2**10:.0f} kB are needed. {GOES_ON}"


# ----------------------------------------------------------------------------------------------------
# What a site that runs goes by: its owner changes files while it answers, and need not start it again.
#
# ``site.toml``, ``policy.toml`` and ``columns.toml`` are read before every question, and taken over where
# their content is another: times tell too little, since a clock may be set back and a file put back. While
# one of them cannot be used, is gone, or may be read or written by others, nothing is answered, nor where
# the site has become another one (:data:`FIXED`). So nobody is answered by rules that are not those in the
# files.
#
# What is in force stands in ``in_force.json`` (mode 0600), for the owner's commands, whoever serves the
# site: a process over a folder, or one of NVIDIA FLARE.

IN_FORCE, RULES = "in_force.json", (POLICY, COLUMNS)
WATCHED = (DESCRIPTION, *RULES)
FIXED = ("name", "site_column", "seed")
"""Entries of ``site.toml`` that are not changed in a site that runs."""
ROOM, LONGEST_PROBLEM = 8192, 1000
SETTLED, RETRIED = 0.02, 60.0
"""Seconds after which a file that was being written is read again, and one that could not be used."""


class ClosedError(EngineError):
    """A site answers nothing for now; for its own log, and not for whoever asks.

    Examples
    --------
    >>> from fedstat.federation.transport.live_config import ClosedError
    >>> str(ClosedError("'policy.toml' is gone"))
    "'policy.toml' is gone"
    """


@dataclass(frozen=True, slots=True)
class ActiveRules:
    """The rules that a service goes by: digests of their files, when they were read, and what is wrong.

    Its records were read at the time `as_of`, empty where every answer reads them; `reloaded` says what
    became of the last wish that they be read anew.
    """

    digests: Mapping[str, str]
    read: str
    problem: str = ""
    as_of: str = ""
    reloaded: str = ""

    @classmethod
    def load(cls, folder: Path) -> ActiveRules | None:
        """Read what the last service wrote; None where there is nothing to be read."""
        try:
            content = (folder / IN_FORCE).read_bytes()
            return from_json(cls, content, f"'{folder / IN_FORCE}'")
        except (OSError, FedstatError):
            return None

    def differing(self, folder: Path) -> list[str]:
        """Names of the files that are not what is in force."""
        found = digests_of(folder)
        return [name for name in RULES if found[name] != self.digests.get(name, "")]


@dataclass(slots=True)
class LiveConfig:
    """The files of a site's owner, and the site that goes by them; `tell` takes a line for its log."""

    folder: Path
    tell: Callable[[str], None] = lambda _: None
    site: Site = field(init=False)
    description: SiteDescription = field(init=False)
    problem: str = ""
    has_failed: bool = False
    _held: dict[str, str] = field(init=False)
    _failed: tuple[object, ...] = ()
    _wish: str = ""
    _reloaded: str = ""

    def __post_init__(self) -> None:
        # before they are read: what changes between the two is taken over at the first question
        self._held, self._wish = digests_of(self.folder), _digest(self.folder / RELOAD)
        self.description = read_description(self.folder)
        self.site = open_site(self.folder)
        self._write()

    def heed(self) -> bool:
        """Take over what has changed; whether it is whom the owner trusts, or where questions come.

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
        # what failed is not tried again at every look: columns are held against all records
        attempt = (*found.values(), *modes, time.monotonic() // RETRIED)
        if attempt == self._failed:
            raise ClosedError(self.problem)
        try:
            moved = self._take_over(found, modes)
        except (FedstatError, OSError) as error:
            self._failed = attempt
            self.close(f"it cannot go by what its owner has changed: {error}")
        self._write()
        self._reload()
        return moved

    def close(self, problem: str) -> NoReturn:
        """Answer nothing for now: ClosedError. The log is told once, whatever the figures in it."""
        if _bare(problem) != _bare(self.problem):
            self.tell(f"answers nothing: {problem}")
        self.problem = problem
        self._write()
        raise ClosedError(problem)

    def check_written(self) -> None:
        """Let no answer go of which the account could not be written; what it says in memory is void then."""
        store = self.site.account.store
        if store is not None and store.broken:
            self.has_failed = True
            self.close(ledger_write_error(self.folder / LEDGER_FILENAME, store.broken))

    def open_again(self) -> None:
        """Open the site anew, with the account as it is on disk; ClosedError while it cannot be written."""
        problem = full_disk(self.folder) or full_ledger(self.folder)
        if problem:
            self.close(problem)
        if self.site.account.store is not None:  # held until now, so that no other process took it
            self.site.account.store.close()
        try:
            fresh = LiveConfig(self.folder, self.tell)
        except (FedstatError, OSError) as error:
            self.close(f"it cannot be opened again: {error}")
        self.site, self.description, self._held = fresh.site, fresh.description, fresh._held
        self.has_failed, self.problem = False, ""
        self.tell("has room again, and was opened anew; open sessions have ended")

    def _take_over(self, found: dict[str, str], modes: tuple[str, ...]) -> bool:
        while (again := _after_a_moment(self.folder)) != found:
            found = again
        gone = [name for name in WATCHED if self._held[name] and not found[name]]
        if gone:
            raise ClosedError(f"'{self.folder / gone[0]}' is gone, or cannot be read; put it back")
        for problem in modes:
            raise ClosedError(problem)
        description, policy = read_description(self.folder), read_site_policy(self.folder)
        other = [name for name in FIXED if getattr(description, name) != getattr(self.description, name)]
        if other:
            raise ClosedError(
                f"'{self.folder / DESCRIPTION}' has another {' and '.join(other)}: start the service "
                "again, or put back what stood there"
            )
        published = self.site.published
        if found[COLUMNS] != self._held[COLUMNS]:
            published = read_site_columns(self.folder, self.site.name, self.site.data.table)
        changed = [name for name in WATCHED if found[name] != self._held[name]]
        stricter = self.site.change_rules(policy, published)
        apply_trust(self.site, description)
        self.description, self._held, self.problem, self._failed = description, found, "", ()
        ends = f", stricter in {', '.join(stricter)}: open sessions have ended" if stricter else ""
        self.tell(f"goes by {', '.join(changed) or 'its files'} as it is now{ends}")
        return DESCRIPTION in changed

    def _reload(self) -> None:
        """Read the records anew where the owner asked for it; else, and where that fails, go on as it is."""
        wish = _digest(self.folder / RELOAD)
        if wish in ("", self._wish):
            return
        self._wish = wish
        try:
            self._reloaded = reload_records(self.folder, self.site)
        except (FedstatError, OSError, ImportError) as error:
            self._reloaded = f"did not read its records anew, and goes on with those that it has: {error}"
        self.tell(self._reloaded)
        self._write()

    def _write(self) -> None:
        rules = {name: self._held[name] for name in RULES}
        told_of = self.problem[:LONGEST_PROBLEM], self.site.account.as_of, self._reloaded[:LONGEST_PROBLEM]
        held = ActiveRules(rules, utc_text(time.time_ns()), *told_of)
        path, content = self.folder / IN_FORCE, to_json(held).encode().ljust(ROOM)
        with suppress(OSError):
            if not path.is_symlink() and path.exists() and path.stat().st_size == len(content):
                # in its place, for which there is room on a full disk as well
                with path.open("r+b") as file:
                    file.write(content)
            else:
                write_atomic(path, content)


def digests_of(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that an owner changes; empty for one that is absent."""
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
