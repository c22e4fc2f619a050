"""A site's mailbox in an exchange folder: its layout, its notes, and the site's side of it."""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

from fedstat.codec import from_json, to_json
from fedstat.errors import EngineError, Remedy, SecurityError
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
# A site's part of an exchange folder: where requests, replies and notes are, and where they go afterwards.
#
# ::
#
#     <folder>/<site>/asks/<number>.ask        signed by the coordinator
#     <folder>/<site>/replies/<number>.reply   signed by the site
#     <folder>/<site>/replies/<number>.note    signed by the site when it does not reply: see `notes`
#     <folder>/<site>/done/<ab>/<number>.ask   a request that has a reply, next to this reply
#     <folder>/<site>/odd/<number>.<token>     a file found where a reply should be, but is not one
#
# A request with its reply is moved to `done`, where the service of the site removes it after some months. The
# ledger is the record of all releases. Both sides list only what is open, however long they run. The folders
# in `done` are named by the first two digits of the number and not by days. A reply can then be found by its
# number at any time. Days are in the signed messages and in the times of the files.
#
# Two accounts of the operating system can share a folder by its group. If the folder passes its group on
# (setgid), the group can read new files; otherwise only their owner can.

ASK, REPLY, NOTE = ".ask", ".reply", ".note"
DONE, SECONDS_PER_DAY = "done", 86_400.0
LONGEST_REST, REST_SHARE = 0.8, 1 / 75
"""Seconds between two looks if nothing has come for a minute, and their share of the time until then."""
NUMBER_LENGTH = 32
NUMBER = re.compile(f"[0-9a-f]{{{NUMBER_LENGTH}}}")
"""Pattern of the names of requests; a file with another name is not a request."""


BUCKET = "s3://"
"""Prefix of an exchange that is a bucket of an object store instead of a folder."""


def is_bucket(exchange: str) -> bool:
    """Return whether an exchange is a bucket."""
    return exchange.startswith(BUCKET)


def resolve_exchange(exchange: str, base: Path) -> str:
    """Return the address of an exchange; a relative path is resolved against `base`."""
    return exchange if is_bucket(exchange) else str(base / exchange)


@dataclass(frozen=True, slots=True)
class SiteMailbox:
    """The part of one site, at `<folder>/<site>`."""

    place: Path

    @property
    def requests(self) -> Path:
        """Folder of the requests."""
        return self.place / "asks"

    @property
    def replies(self) -> Path:
        """Folder of the replies."""
        return self.place / "replies"

    def request(self, number: str) -> Path:
        """Return the path of a request."""
        return self.requests / f"{number}{ASK}"

    def reply(self, number: str) -> Path:
        """Return the path of its reply."""
        return self.replies / f"{number}{REPLY}"

    def note(self, number: str) -> Path:
        """Return the path of the note that is written instead of a reply."""
        return self.replies / f"{number}{NOTE}"

    def done(self, number: str) -> Path:
        """Return the path of a reply that was read; its request is in the same folder."""
        return self.place / DONE / number[:2] / f"{number}{REPLY}"

    def make(self) -> None:
        """Make the two folders to which both sides write."""
        for place in (self.requests, self.replies):
            make_folders(place)

    def check(self) -> None:
        """Refuse a part in which a folder is a link to another place: SecurityError."""
        for place in (self.place, self.requests, self.replies):
            check_folder(place)

    def open_numbers(self) -> tuple[list[str], list[str]]:
        """Return the numbers of requests without a reply, in order, and of those with one."""
        # replies last: if a pair is moved between the two listings, its request is moved first
        request, answered = _numbers(self.requests, ASK), _numbers(self.replies, REPLY)
        return sorted(request - answered), list(answered)

    def settle(self, number: str) -> bool:
        """Move a request and its reply to `done`; return False if they cannot be moved. They then stay.

        The request is moved first, so that no look finds it without its reply and takes it for an open one.
        """
        place = self.done(number)
        if not self.place.exists():  # an unmounted share is not replaced by a new folder
            return False
        try:
            for folder in (place.parents[1], place.parent):
                check_folder(folder)
            make_folders(place.parent)
            _move(self.request(number), place.with_suffix(ASK))
            _move(self.reply(number), place)
            self.note(number).unlink(missing_ok=True)
        except (OSError, SecurityError):
            return False
        return True

    def put_aside(self, path: Path) -> bool:
        """Move away a file with the name of a reply that is not one.

        Return False if it cannot be moved.
        """
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
    """Seconds between two looks: `shortest` while messages come, longer the longer nothing comes."""

    shortest: float
    _since: float = field(default_factory=lambda: time.monotonic())

    def rest(self, busy: bool = False) -> None:
        """Sleep until the next look, unless this look found something."""
        if busy:
            self._since = time.monotonic()
            return
        idle = time.monotonic() - self._since
        time.sleep(max(self.shortest, min(LONGEST_REST, idle * REST_SHARE)))


def _move(old: Path, new: Path) -> None:
    """Move a file if it exists; an earlier file at the target is kept, since it is part of the record."""
    if old.exists() or old.is_symlink():
        if new.exists():
            new.rename(new.with_name(f"{new.name}.{secrets.token_hex(4)}"))
        old.rename(new)


def _numbers(folder: Path, kind: str) -> set[str]:
    with os.scandir(folder) as found:
        return set(_named(found, kind))


def _sent(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:  # moved after it was listed
        return 0


def _named(found: Iterator[os.DirEntry[str]], kind: str) -> Iterator[str]:
    for entry in found:
        number, dot, suffix = entry.name.partition(".")
        if dot + suffix == kind and NUMBER.fullmatch(number):
            yield number


# ----------------------------------------------------------------------------------------------------
# Notes of a site that does not reply, so that the coordinator learns the reason at once.
#
# A note has fixed words. The site signs it together with the digest of one signed request. A note that an
# intruder wrote is therefore not believed, and an old one does not hold when a request is sent again. Its
# number differs from that of a reply, so that neither can replace the other. A sender without a reply learns
# only that the site takes no request signed with this key.

UNTRUSTED: Literal["untrusted"] = "untrusted"
CLOSED: Literal["closed"] = "closed"
BUSY: Literal["busy"] = "busy"
STATUS_OF_NOTES = {
    CLOSED: "It answers no requests for now; its owner finds the reason in the site's log.",
    BUSY: "All its sessions are in use by other analyses. This one waits for its turn, and continues by "
    "itself. If this happens often, the owner of the site can raise 'sessions' in site.toml.",
}
"""What the analyst reads while a request waits."""


class BusyError(EngineError):
    """All sessions of a site are in use, so that a request that begins one has to wait.

    Examples
    --------
    >>> from fedstat.federation.transport.mailbox import BusyError
    >>> str(BusyError("all sessions are in use"))
    'all sessions are in use'
    """


@dataclass(frozen=True, slots=True)
class ErrorNote:
    """Why a request has no reply: its key is not that of the coordinator, or the site is paused or busy.

    `question` is the digest of the signed bytes, `key` the fingerprint of the key that signed them.
    """

    why: Literal["untrusted", "closed", "busy"]
    question: str
    key: str

    @classmethod
    def on(cls, question: bytes | IO[bytes], coordinator: str, where: str) -> ErrorNote:
        """Create the note on a request; SecurityError if the request has no valid signature."""
        keys, digest = signer_of(question, where)
        known = bool(coordinator) and normalize_fingerprint(coordinator) == keys.digest.hex()
        return cls(CLOSED if known else UNTRUSTED, digest, keys.fingerprint)

    def sign(self, identity: Identity, site: str, number: str) -> bytes:
        """Return the bytes of the note, signed by the site."""
        return sign_envelope(identity, Envelope(site, COORDINATOR, _numbered(number), to_json(self).encode()))


def open_note(
    data: bytes | IO[bytes], fingerprint: str, site: str, number: str, question: bytes, where: str
) -> ErrorNote | None:
    """Read a site's note on a request; None if it belongs to an earlier request of the same number.

    SecurityError if the site did not sign it.
    """
    envelope = open_envelope(data, fingerprint, where)
    if (envelope.sender, envelope.number) != (site, _numbered(number)):
        raise SecurityError(f"{where}: this note belongs to another request")
    note = from_json(ErrorNote, envelope.payload, where, SecurityError)
    # Check the key as well: another key can sign the bytes that this coordinator signed and replace its
    # request.
    keys, digest = signer_of(question, where)
    return note if (note.question, note.key) == (digest, keys.fingerprint) else None


SERVED = Remedy("fedstat site serve FOLDER", "Is '{call}' running there?")
"""What helps if a site does not answer."""


def untrusted_note(site: str, fingerprint: str, coordinator: Identity) -> EngineError:
    """Return the error text for a site that has pinned the key of another coordinator."""
    return EngineError(
        f"'{site}', whose key is {fingerprint}, refuses requests that are signed with the key of this "
        f"coordinator, {coordinator.public.fingerprint}: its owner has pinned another key",
        remedy=Remedy(
            "fedstat site pin FOLDER CARD",
            "Compare this fingerprint by telephone; then run at the site: {call}, with the card of this "
            "coordinator",
        ),
    )


def _numbered(number: str) -> str:
    return f"note on {number}"


# ----------------------------------------------------------------------------------------------------
# A site's end of an exchange folder: it finds requests, has the site answer them, and writes the replies.

NOTES_AT_ONCE, MOST_NOTES = 4, 100
"""Largest number of notes for unknown senders in one look, and in all: they may send requests without end."""
SETTLED, FULL_LOOK, LISTING_SHARE = 0.1, 0.7, 0.01
"""Seconds after a change in which a second change may have the same file time.

Seconds after which a folder with an unchanged time is listed again, since a share may report changes late;
largest share of the time for this.
"""
OLD, SWEEPING = 3600.0, 0.02
"""Seconds after which a reply that is still open is moved to `done`, and how many are moved in one look."""


class AnsweringSite(Protocol):
    """A site as its inbox needs it."""

    def answer(self, question: bytes | IO[bytes], where: str, number: str) -> bytes:
        """Answer a request of its coordinator; SecurityError for any other sender, BusyError if it waits."""
        ...

    def note(self, question: bytes | IO[bytes], where: str, number: str, why: str) -> bytes | None:
        """Sign a note on a request; None if its key is not the reason for the missing reply."""
        ...


ALIVE = "alive"


def show_alive(exchange: Path, site: str) -> str:
    """Show in the exchange folder that the service of a site runs, by the time of a file without content.

    Return why the file cannot be written, or an empty text.
    """
    path = exchange / site / ALIVE
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644))
        os.utime(path, follow_symlinks=False)
    except OSError as error:
        return str(error.strerror)
    return ""


def last_alive(exchange: Path, site: str) -> float | None:
    """Return the seconds since a service was seen in the exchange folder; None if it never was."""
    try:
        return max(0.0, time.time() - (exchange / site / ALIVE).lstat().st_mtime)
    except OSError:
        return None


@dataclass(slots=True)
class Inbox:
    """The requests in one site's part of an exchange folder.

    `refused` is called once for every file that was skipped or cannot be written, with the reason. Answered
    requests and their replies are removed after `keep_days`.
    """

    part: SiteMailbox
    refused: Callable[[str], None]
    keep_days: float = math.inf
    _passed: set[tuple[str, int]] = field(default_factory=set)
    _noted: set[tuple[tuple[str, int], str]] = field(default_factory=set)
    _reported: set[str] = field(default_factory=set)
    _notes: int = 0
    _waiting: list[str] = field(default_factory=list)
    _answered: list[str] = field(default_factory=list)
    _times: tuple[int, ...] = ()
    _changed: float = 0.0
    _listed: float = 0.0
    _due: float = 0.0
    _took: float = 0.0
    _cleaned: float = -math.inf

    def poll(self, site: AnsweringSite) -> bool:
        """Answer the open requests; return whether there were any."""
        busy, notes = False, NOTES_AT_ONCE
        for number in self._find():
            path = self.part.request(number)
            try:
                # with its time, so that a corrected file is read again
                look = (number, path.lstat().st_mtime_ns)
                if look in self._passed:
                    continue
                if self._answer(site, path, number):
                    busy = True
            except FileNotFoundError:  # moved after it was listed
                continue
            except BusyError:  # a later look answers it, and the others go on
                self._say_once(site, path, look, BUSY)
            except OSError as error:
                self._report_once(
                    number, f"'{path}' cannot be read ({error.strerror}){shared_folder_hint(path, error)}"
                )
            except SecurityError as error:
                self._passed.add(look)
                self._report_once(number, str(error))
                if notes and self._notes < MOST_NOTES and self._note(site, path, number, UNTRUSTED):
                    notes, self._notes = notes - 1, self._notes + 1
        if not busy:
            self._sweep()
            self._clean()
        return busy

    def say_closed(self, site: AnsweringSite) -> None:
        """Leave notes for the coordinator: the site is paused and answers no request."""
        for number in self._find()[: 2 * NOTES_AT_ONCE]:
            path = self.part.request(number)
            try:
                look = (number, path.lstat().st_mtime_ns)
            except OSError:
                continue
            if look not in self._passed:
                self._say_once(site, path, look, CLOSED)

    def _say_once(self, site: AnsweringSite, path: Path, look: tuple[str, int], why: str) -> None:
        if (look, why) not in self._noted:
            self._noted.add((look, why))
            self._note(site, path, look[0], why)

    def _find(self) -> list[str]:
        """Return the numbers of requests without a reply, in order; none while a folder is out of reach."""
        try:
            self.part.check()
            self._list()
        except SecurityError as error:
            self._report_once("", str(error))
            return []
        except OSError as error:
            remedy = shared_folder_hint(self.part.place, error)
            self._report_once("", f"'{self.part.place}' cannot be read or created ({error.strerror}){remedy}")
            return []
        # The oldest first, at every site: analyses that wait for a session then wait in the same order.
        return sorted(self._waiting, key=lambda number: (_sent(self.part.request(number)), number))

    def _list(self) -> None:
        """List the open requests if the folder may have changed; most looks find nothing new."""
        now = time.monotonic()
        if not self._times:
            self.part.make()
        times = tuple(place.stat().st_mtime_ns for place in (self.part.requests, self.part.replies))
        if times != self._times:
            self._times, self._changed = times, now
        if self._listed > self._changed + SETTLED and now < self._due:
            return
        self._waiting, self._answered = self.part.open_numbers()
        self._listed, self._took = now, time.monotonic() - now
        self._due = now + max(FULL_LOOK, self._took / LISTING_SHARE)

    def _answer(self, site: AnsweringSite, path: Path, number: str) -> bool:
        """Have one request answered, unless it was answered before."""
        reply = self.part.reply(number)
        if reply.exists():
            return False
        with open_regular(path) as file:
            content = site.answer(file, f"'{path.name}'", number)
        try:
            write_shared(reply, content)
        except OSError as error:
            # The server keeps the reply; a later look writes it.
            self._report_once(
                number,
                f"'{path.name}': its reply cannot be written yet ({error.strerror})"
                f"{shared_folder_hint(reply, error)}",
            )
            return False
        return True

    def _note(self, site: AnsweringSite, path: Path, number: str, why: str) -> bool:
        """Leave a note on a request; return False if there is no reason to state or no place for the note."""
        try:
            with open_regular(path) as file:
                note = site.note(file, f"'{path.name}'", number, why)
            if note is not None:
                write_shared(self.part.note(number), note)
        except (OSError, SecurityError):
            return False
        return note is not None

    def _sweep(self) -> None:
        """Move pairs that were answered long ago and that a coordinator has left behind."""
        # at most as long as a listing takes, since the next look has to list again
        until, old = time.monotonic() + max(SWEEPING, self._took), time.time() - OLD
        while self._answered and time.monotonic() < until:
            number = self._answered.pop()
            try:
                if self.part.reply(number).lstat().st_mtime < old and not self.part.settle(number):
                    self._answered.clear()
            except OSError:
                continue

    def _clean(self) -> None:
        """Remove, once an hour, answered requests that are older than the owner wants to keep them."""
        if math.isinf(self.keep_days) or time.monotonic() - self._cleaned < OLD:
            return
        self._cleaned, old = time.monotonic(), time.time() - self.keep_days * SECONDS_PER_DAY
        with suppress(OSError, SecurityError):
            check_folder(self.part.place / DONE)
            for folder in (self.part.place / DONE).iterdir():
                check_folder(folder)
                for path in folder.iterdir():
                    if NUMBER.fullmatch(path.name.partition(".")[0]) and path.lstat().st_mtime < old:
                        path.unlink()

    def _report_once(self, name: str, problem: str) -> None:
        # Outsiders can change a file without end; they must not fill the log.
        if name not in self._reported:
            self._reported.add(name)
            self.refused(problem)
