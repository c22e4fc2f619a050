"""A site's mailbox in an exchange folder: its layout, its notes, and the site's end."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

from fedstat.codec import from_json, to_json
from fedstat.errors import EngineError, SecurityError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.envelopes import Envelope, open_envelope, sign_envelope, signer_of
from fedstat.federation.crypto.keys import Identity, normalize_fingerprint
from fedstat.federation.files import (
    check_folder,
    make_folders,
    open_regular,
    shared_folder_hint,
    write_shared,
)

# ----------------------------------------------------------------------------------------------------
# A site's part of an exchange folder: where questions, answers and notes lie, and where they go afterwards.
#
# ::
#
#     <folder>/<site>/asks/<number>.ask        signed by the coordinator
#     <folder>/<site>/replies/<number>.reply   signed by the site
#     <folder>/<site>/replies/<number>.note    signed by the site, where it does not answer: see `notes`
#     <folder>/<site>/done/<ab>/<number>.ask   a question that was answered, beside its answer
#     <folder>/<site>/odd/<number>.<token>     what lay in the place of an answer, and was none
#
# An answered pair is moved to `done`, where it stays: the folder is the record of what passed, and both
# sides list what is open and nothing else, however long they run. The folders in `done` are named by the
# first two digits of the number and not by days, so that an answer is found by its number at once, whoever
# asks again and whenever; days stand in the signed messages, and in the times of the files.
#
# Two accounts of the operating system share a folder by its group: where the folder hands its group on
# (setgid), what is written into it can be read by the group; everywhere else, by its owner alone.

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


def resolve_exchange(exchange: str, base: Path) -> str:
    """Return an exchange as it is given beside a folder: a path is relative to that."""
    return exchange if is_bucket(exchange) else str(base / exchange)


@dataclass(frozen=True, slots=True)
class SiteMailbox:
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
class Backoff:
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


# ----------------------------------------------------------------------------------------------------
# Notes that a site leaves where it does not answer, so that whoever waits knows why at once.
#
# A note is in fixed words, and signed by the site about one question, as it was signed by whoever asked: a
# note that an intruder wrote is not believed, and an old one does not hold for a question that is asked
# again. Its number is not that of an answer, so that neither can be put in the place of the other. Whoever
# is not answered learns that the site takes no question that is signed with this key, and nothing else.

UNTRUSTED: Literal["untrusted"] = "untrusted"
CLOSED: Literal["closed"] = "closed"


@dataclass(frozen=True, slots=True)
class ErrorNote:
    """Why a question is not answered: its key is not that of the coordinator; or nothing is, for now.

    `question` is the digest of what was signed, `key` the fingerprint of who signed it.
    """

    why: Literal["untrusted", "closed"]
    question: str
    key: str

    @classmethod
    def on(cls, question: bytes | IO[bytes], coordinator: str, where: str) -> ErrorNote:
        """Make out the note on a question; SecurityError where nobody signed it."""
        keys, digest = signer_of(question, where)
        known = bool(coordinator) and normalize_fingerprint(coordinator) == keys.digest.hex()
        return cls(CLOSED if known else UNTRUSTED, digest, keys.fingerprint)

    def sign(self, identity: Identity, site: str, number: str) -> bytes:
        """Bytes of the note, under the site's signature."""
        return sign_envelope(identity, Envelope(site, COORDINATOR, _numbered(number), to_json(self).encode()))


def open_note(
    data: bytes | IO[bytes], fingerprint: str, site: str, number: str, question: bytes, where: str
) -> ErrorNote | None:
    """Read the note of a site on a question; None where it is on an earlier one of the same number.

    SecurityError where the site did not sign it.
    """
    envelope = open_envelope(data, fingerprint, where)
    if (envelope.sender, envelope.number) != (site, _numbered(number)):
        raise SecurityError(f"{where}: no note on this question")
    note = from_json(ErrorNote, envelope.payload, where, SecurityError)
    # the key as well: what this coordinator signed can be signed with another one, and put in its place
    keys, digest = signer_of(question, where)
    return note if (note.question, note.key) == (digest, keys.fingerprint) else None


def untrusted_note(site: str, fingerprint: str, coordinator: Identity) -> EngineError:
    """Say that a site, with this key, takes no questions of a coordinator."""
    return EngineError(
        f"'{site}', whose key is {fingerprint}, takes no questions that are signed with the key of this "
        f"coordinator, {coordinator.public.fingerprint}: its owner has pinned another one. Compare that "
        "fingerprint by telephone; then, at the institution: fedstat site pin FOLDER CARD, with the card of "
        "this coordinator"
    )


def _numbered(number: str) -> str:
    return f"note on {number}"


# ----------------------------------------------------------------------------------------------------
# A site's end of an exchange folder: questions are found, answered by the site, and answers written.

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

    part: SiteMailbox
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
                    number, f"'{path}' cannot be read ({error.strerror}){shared_folder_hint(path, error)}"
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
            remedy = shared_folder_hint(self.part.place, error)
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
                f"{shared_folder_hint(reply, error)}",
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
