"""A site's part of an exchange folder: where questions, answers and notes lie, and where they go afterwards.

::

    <folder>/<site>/asks/<number>.ask        signed by the coordinator
    <folder>/<site>/replies/<number>.reply   signed by the site
    <folder>/<site>/replies/<number>.note    signed by the site, where it does not answer: see `notes`
    <folder>/<site>/done/<ab>/<number>.ask   a question that was answered, beside its answer
    <folder>/<site>/odd/<number>.<token>     what lay in the place of an answer, and was none

An answered pair is moved to `done`, where it stays: the folder is the record of what passed, and both sides
list what is open and nothing else, however long they run. The folders in `done` are named by the first two
digits of the number and not by days, so that an answer is found by its number at once, whoever asks again and
whenever; days stand in the signed messages, and in the times of the files.

Two accounts of the operating system share a folder by its group: where the folder hands its group on
(setgid), what is written into it can be read by the group; everywhere else, by its owner alone.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedstat.errors import SecurityError
from fedstat.federation.files import check_folder, make_folders

ASK, REPLY, NOTE = ".ask", ".reply", ".note"
LONGEST_REST, REST_SHARE = 0.8, 1 / 75
"""Seconds between two looks when nothing has come for a minute, and their share of the time until then."""
NUMBER_LENGTH = 32
NUMBER = re.compile(f"[0-9a-f]{{{NUMBER_LENGTH}}}")
"""Names that questions have; a file of another name is nobody's question."""


BUCKET = "s3://"
"""How an exchange begins that is a bucket of an object store, and no folder."""


def is_bucket(exchange: str) -> bool:
    """Whether an exchange is a bucket."""
    return exchange.startswith(BUCKET)


def place_of(exchange: str, base: Path) -> str:
    """Return an exchange as it is given beside a folder: a path is relative to that."""
    return exchange if is_bucket(exchange) else str(base / exchange)


@dataclass(frozen=True, slots=True)
class SitesPart:
    """The part of one site, at `<folder>/<site>`."""

    place: Path

    @property
    def asks(self) -> Path:
        """Where questions come."""
        return self.place / "asks"

    @property
    def replies(self) -> Path:
        """Where answers go."""
        return self.place / "replies"

    def ask(self, number: str) -> Path:
        """Place of a question."""
        return self.asks / f"{number}{ASK}"

    def reply(self, number: str) -> Path:
        """Place of its answer."""
        return self.replies / f"{number}{REPLY}"

    def note(self, number: str) -> Path:
        """Place of a note in its stead."""
        return self.replies / f"{number}{NOTE}"

    def done(self, number: str) -> Path:
        """Place of an answer that was read; its question is beside it."""
        return self.place / "done" / number[:2] / f"{number}{REPLY}"

    def make(self) -> None:
        """Make the two folders that both sides write to."""
        for place in (self.asks, self.replies):
            make_folders(place)

    def check(self) -> None:
        """Refuse a part in which a folder is a link to another place: SecurityError."""
        for place in (self.place, self.asks, self.replies):
            check_folder(place)

    def open_numbers(self) -> tuple[list[str], list[str]]:
        """Numbers of questions without an answer, in their order, and of those with one."""
        # answers last: who moves a pair between the two listings takes the question first
        asked, answered = _numbers(self.asks, ASK), _numbers(self.replies, REPLY)
        return sorted(asked - answered), list(answered)

    def settle(self, number: str) -> bool:
        """Move a question and its answer to `done`; False where they cannot be moved, and stay.

        The question first: no look finds it without its answer, as one that waits.
        """
        place = self.done(number)
        if not self.place.exists():  # a share that is gone is not made anew in its empty place
            return False
        try:
            for folder in (place.parents[1], place.parent):
                check_folder(folder)
            make_folders(place.parent)
            _move(self.ask(number), place.with_suffix(ASK))
            _move(self.reply(number), place)
            self.note(number).unlink(missing_ok=True)
        except (OSError, SecurityError):
            return False
        return True

    def put_aside(self, path: Path) -> bool:
        """Put aside what lies in the place of an answer and is none; False where it cannot be moved."""
        odd = self.place / "odd"
        try:
            check_folder(odd)
            make_folders(odd)
            path.rename(odd / f"{path.name}.{secrets.token_hex(4)}")
        except (OSError, SecurityError):
            return False
        return True


@dataclass(slots=True)
class Pace:
    """Seconds between two looks: `shortest` while something comes, and more the longer nothing has."""

    shortest: float
    _since: float = field(default_factory=lambda: time.monotonic())

    def rest(self, busy: bool = False) -> None:
        """Sleep until the next look, unless this one found something."""
        if busy:
            self._since = time.monotonic()
            return
        idle = time.monotonic() - self._since
        time.sleep(max(self.shortest, min(LONGEST_REST, idle * REST_SHARE)))


def _move(old: Path, new: Path) -> None:
    """Move a file, where there is one; what was in its place is part of the record as well."""
    if old.exists() or old.is_symlink():
        if new.exists():
            new.rename(new.with_name(f"{new.name}.{secrets.token_hex(4)}"))
        old.rename(new)


def _numbers(folder: Path, kind: str) -> set[str]:
    with os.scandir(folder) as found:
        return set(_named(found, kind))


def _named(found: Iterator[os.DirEntry[str]], kind: str) -> Iterator[str]:
    for entry in found:
        number, dot, suffix = entry.name.partition(".")
        if dot + suffix == kind and NUMBER.fullmatch(number):
            yield number
