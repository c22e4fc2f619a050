"""The coordinator's end of a bucket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fedstat.errors import EngineError, FedstatWarning, SecurityError, warn
from fedstat.federation.carry.bucket.store import Bucket, SitesObjects
from fedstat.federation.carry.exchange.notes import UNTRUSTED, open_note, untrusted
from fedstat.federation.carry.exchange.part import BUCKET, Pace
from fedstat.federation.carry.signed import open_answer, sign_question
from fedstat.federation.crypto.keys import Identity

NOTES_EVERY = 8
"""Looks for an answer between two looks for a note."""


@dataclass(slots=True)
class BucketCarrier:
    """Puts the coordinator's questions into a bucket and waits for the answers.

    A site, of those whose `fingerprints` are known, counts as silent after `timeout` seconds; `poll` seconds
    pass between two looks, and more when an answer takes long.
    """

    bucket: Bucket
    identity: Identity
    fingerprints: Mapping[str, str]
    timeout: float = 3600.0
    poll: float = 0.1
    bundles: ClassVar[bool] = True

    def carry(self, site: str, request: bytes) -> bytes:
        """Put one question, and read its answer.

        EngineError where the site was silent for too long or does not take this coordinator's questions, or
        the store cannot be used.
        """
        number, question = sign_question(self.identity, site, request)
        wait = _BucketWait(self, site, self.bucket.at(site), number, question)
        # the answer may be there: an analysis that was interrupted asks the same question again
        answer = wait.look()
        return wait.wait() if answer is None else answer


@dataclass(slots=True)
class _BucketWait:
    """One question of a carrier."""

    carrier: BucketCarrier
    site: str
    part: SitesObjects
    number: str
    question: bytes
    _told: set[str] = field(default_factory=set)

    def wait(self) -> bytes:
        """Ask, and look until the answer is there."""
        pace, until, looks = Pace(self.carrier.poll), time.monotonic() + self.carrier.timeout, 0
        self._ask()
        while (answer := self.look(ask_again=True)) is None:
            looks += 1
            if looks % NOTES_EVERY == 1:
                self._read_note()
            if time.monotonic() > until:
                place = f"{BUCKET}{self.part.bucket.name}/{self.part.asks}"
                raise EngineError(
                    f"'{self.site}' did not answer within {self.carrier.timeout:g} s; its question waits in "
                    f"'{place}'. Is 'fedstat site serve' running there?"
                )
            pace.rest()
        return answer

    def look(self, ask_again: bool = False) -> bytes | None:
        """Read the answer; None where it is absent. What is none is put aside, and asked for again."""
        key = self.part.reply(self.number)
        found = self.part.bucket.open(key)
        if found is None:
            return None
        with found:
            try:
                with self.part.bucket.named(key):
                    return open_answer(found, self._pinned, self.site, self.number, f"'{key}'")
            except EngineError as error:  # it broke off, and is read again at the next look
                self._say(str(error))
                return None
            except SecurityError as error:
                self._say(f"What lay in the place of its answer was none ({error}); it was put aside.")
        self.part.put_aside(key)
        if ask_again:
            self._ask()
        return None

    def _ask(self) -> None:
        self.part.bucket.put(self.part.new_ask(self.number), self.question)

    @property
    def _pinned(self) -> str:
        return self.carrier.fingerprints[self.site]

    def _read_note(self) -> None:
        """Heed what the site says of this question; EngineError where it does not take it."""
        key = self.part.note(self.number)
        found = self.part.bucket.open(key)
        if found is None:
            return
        with found:
            try:
                with self.part.bucket.named(key):
                    note = open_note(found, self._pinned, self.site, self.number, self.question, f"'{key}'")
            except SecurityError as error:
                self._say(f"What lay in the place of its note was none ({error}); it was put aside.")
                self.part.put_aside(key)
                return
            except EngineError:
                return
        if note is None:
            return
        if note.why == UNTRUSTED:
            raise untrusted(self.site, self._pinned, self.carrier.identity)
        self._say("It says that it answers nothing for now: its owner finds why in the site's log.")

    def _say(self, said: str) -> None:
        if said not in self._told:
            self._told.add(said)
            warn(f"'{self.site}': {said}", FedstatWarning)
