"""A site's end of a bucket: questions are found after a cursor, and answers put."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.carry.bucket.store import Cursor, SitesObjects
from fedstat.federation.carry.exchange.inbox import MOST_NOTES, NOTES_AT_ONCE, AnsweringSite
from fedstat.federation.carry.exchange.notes import CLOSED, UNTRUSTED


@dataclass(slots=True)
class BucketInbox:
    """The questions in one site's part of a bucket.

    `refused` is told once of every object that was passed over, and why, and once of a store that is out of
    reach.
    """

    part: SitesObjects
    refused: Callable[[str], None]
    _cursor: Cursor | None = None
    _told: set[str] = field(default_factory=set)
    _noted: set[str] = field(default_factory=set)
    _notes: int = 0

    def look(self, site: AnsweringSite) -> bool:
        """Have what waits answered; whether there was anything."""
        busy, notes = False, NOTES_AT_ONCE
        try:
            for key, number in self._new():
                try:
                    busy |= self._answer(site, key, number)
                except SecurityError as error:
                    self._tell_once(key, str(error))
                    if notes and self._notes < MOST_NOTES and self._note(site, key, number, UNTRUSTED):
                        notes, self._notes = notes - 1, self._notes + 1
                self.cursor.pass_on(key)
        except EngineError as error:
            # The server holds the answer: it is put at a later look.
            self._tell_once("", str(error))
        return busy

    def say_closed(self, site: AnsweringSite) -> None:
        """Leave notes for the coordinator that nothing is answered for now."""
        try:
            for key, number in self._new()[: 2 * NOTES_AT_ONCE]:
                if key not in self._noted:
                    self._noted.add(key)
                    self._note(site, key, number, CLOSED)
        except EngineError as error:
            self._tell_once("", str(error))

    @property
    def cursor(self) -> Cursor:
        """How far it has read."""
        if self._cursor is None:
            self._cursor = Cursor(self.part)
        return self._cursor

    def _new(self) -> list[tuple[str, str]]:
        return self.cursor.new()

    def _answer(self, site: AnsweringSite, key: str, number: str) -> bool:
        """Have one question answered, unless it was answered before."""
        bucket, reply = self.part.bucket, self.part.reply(number)
        if bucket.has(reply):
            return False
        question = bucket.open(self.part.asks + key)
        if question is None:
            return False
        with question, bucket.named(reply):
            answer = site.answer(question, f"'{key}'", number)
        bucket.put(reply, answer)
        return True

    def _note(self, site: AnsweringSite, key: str, number: str, why: str) -> bool:
        """Leave a note on a question; False where there is nothing to be said."""
        question = self.part.bucket.open(self.part.asks + key)
        if question is None:
            return False
        try:
            with question, self.part.bucket.named(key):
                note = site.note(question, f"'{key}'", number, why)
        except SecurityError:
            return False
        if note is not None:
            self.part.bucket.put(self.part.note(number), note)
        return note is not None

    def _tell_once(self, name: str, problem: str) -> None:
        # Strangers can put an object as often as they like; the log is not theirs to fill.
        if name not in self._told:
            self._told.add(name)
            self.refused(problem)
