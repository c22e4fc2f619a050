"""A site's end of an exchange folder: questions are found, answered by the site, and answers written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from fedstat.errors import SecurityError
from fedstat.federation.carry.exchange.notes import CLOSED, UNTRUSTED
from fedstat.federation.carry.exchange.part import SitesPart
from fedstat.federation.files import group_remedy, open_regular, write_shared

NOTES_AT_ONCE, MOST_NOTES = 4, 100
"""Notes for strangers that are written in one look, and in all: they may ask without end."""
SETTLED, FULL_LOOK, LISTING_SHARE = 0.1, 0.7, 0.01
"""Seconds after a change in which a second one may bear the same time; seconds after which a folder is listed
that bears the time of before, since a share may tell of changes late; most of the time that this may take."""
OLD, SWEEPING = 3600.0, 0.02
"""Seconds after which an answer that nobody moved is moved, and for which this is done in one look."""


class AnsweringSite(Protocol):
    """A site as its inbox needs it."""

    def answer(self, question: bytes | IO[bytes], where: str, number: str) -> bytes:
        """Answer a question of its coordinator; SecurityError for any other."""
        ...

    def note(self, question: bytes | IO[bytes], where: str, number: str, why: str) -> bytes | None:
        """Sign a note on a question; None where that is not why it is not answered."""
        ...


@dataclass(slots=True)
class Inbox:
    """The questions in one site's part of an exchange folder.

    `refused` is told once of every file that was passed over or cannot be written, and why.
    """

    part: SitesPart
    refused: Callable[[str], None]
    _passed: set[tuple[str, int]] = field(default_factory=set)
    _noted: set[tuple[str, int]] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)
    _notes: int = 0
    _waiting: list[str] = field(default_factory=list)
    _answered: list[str] = field(default_factory=list)
    _times: tuple[int, ...] = ()
    _changed: float = 0.0
    _listed: float = 0.0
    _due: float = 0.0
    _took: float = 0.0

    def look(self, site: AnsweringSite) -> bool:
        """Have what waits answered; whether there was anything."""
        busy, notes = False, NOTES_AT_ONCE
        for number in self._find():
            path = self.part.ask(number)
            try:
                # with its time, so that a file which was mended is looked at again
                look = (number, path.lstat().st_mtime_ns)
                if look in self._passed:
                    continue
                if self._answer(site, path, number):
                    busy = True
            except FileNotFoundError:  # moved since it was listed
                continue
            except OSError as error:
                self._tell_once(
                    number, f"'{path}' cannot be read ({error.strerror}){group_remedy(path, error)}"
                )
            except SecurityError as error:
                self._passed.add(look)
                self._tell_once(number, str(error))
                if notes and self._notes < MOST_NOTES and self._note(site, path, number, UNTRUSTED):
                    notes, self._notes = notes - 1, self._notes + 1
        if not busy:
            self._sweep()
        return busy

    def say_closed(self, site: AnsweringSite) -> None:
        """Leave notes for the coordinator that nothing is answered for now."""
        for number in self._find()[: 2 * NOTES_AT_ONCE]:
            path = self.part.ask(number)
            try:
                look = (number, path.lstat().st_mtime_ns)
            except OSError:
                continue
            if look not in self._noted and look not in self._passed:
                self._noted.add(look)
                self._note(site, path, number, CLOSED)

    def _find(self) -> list[str]:
        """Numbers of questions without an answer, in their order; none while a folder is out of reach."""
        try:
            self.part.check()
            self._list()
        except SecurityError as error:
            self._tell_once("", str(error))
            return []
        except OSError as error:
            remedy = group_remedy(self.part.place, error)
            self._tell_once("", f"'{self.part.place}' cannot be read or made ({error.strerror}){remedy}")
            return []
        return list(self._waiting)

    def _list(self) -> None:
        """List what is open, where it may have changed: most looks find nothing new."""
        now = time.monotonic()
        if not self._times:
            self.part.make()
        times = tuple(place.stat().st_mtime_ns for place in (self.part.asks, self.part.replies))
        if times != self._times:
            self._times, self._changed = times, now
        if self._listed > self._changed + SETTLED and now < self._due:
            return
        self._waiting, self._answered = self.part.open_numbers()
        self._listed, self._took = now, time.monotonic() - now
        self._due = now + max(FULL_LOOK, self._took / LISTING_SHARE)

    def _answer(self, site: AnsweringSite, path: Path, number: str) -> bool:
        """Have one question answered, unless it was answered before."""
        reply = self.part.reply(number)
        if reply.exists():
            return False
        with open_regular(path) as file:
            content = site.answer(file, f"'{path.name}'", number)
        try:
            write_shared(reply, content)
        except OSError as error:
            # The server holds the answer: it is written at a later look.
            self._tell_once(
                number,
                f"'{path.name}': its answer cannot be written yet ({error.strerror})"
                f"{group_remedy(reply, error)}",
            )
            return False
        return True

    def _note(self, site: AnsweringSite, path: Path, number: str, why: str) -> bool:
        """Leave a note on a question; False where there is nothing to be said, or no place for it."""
        try:
            with open_regular(path) as file:
                note = site.note(file, f"'{path.name}'", number, why)
            if note is not None:
                write_shared(self.part.note(number), note)
        except (OSError, SecurityError):
            return False
        return note is not None

    def _sweep(self) -> None:
        """Move what was answered long ago, and what a coordinator that fell silent has left."""
        # as long as a listing takes, which the next look has to make anew
        until, old = time.monotonic() + max(SWEEPING, self._took), time.time() - OLD
        while self._answered and time.monotonic() < until:
            number = self._answered.pop()
            try:
                if self.part.reply(number).lstat().st_mtime < old and not self.part.settle(number):
                    self._answered.clear()
            except OSError:
                continue

    def _tell_once(self, name: str, problem: str) -> None:
        # Strangers can change a file as often as they like; the log is not theirs to fill.
        if name not in self._told:
            self._told.add(name)
            self.refused(problem)
