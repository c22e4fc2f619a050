"""Transport through a bucket of an object store: the coordinator's end and a site's end."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from fedstat.errors import EngineError, FedstatWarning, PartitionError, SecurityError, warn
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.transport.mailbox import (
    BUCKET,
    CLOSED,
    MOST_NOTES,
    NOTES_AT_ONCE,
    UNTRUSTED,
    AnsweringSite,
    Backoff,
    is_bucket,
    open_note,
    untrusted_note,
)
from fedstat.federation.transport.signed import open_reply, sign_request

# ----------------------------------------------------------------------------------------------------
# A site's part of a bucket: where questions, answers and notes lie.
#
# ::
#
#     <prefix>/<site>/asks/<time>-<number>    signed by the coordinator; the time in nanoseconds, 20 digits
#     <prefix>/<site>/replies/<number>        signed by the site
#     <prefix>/<site>/notes/<number>          signed by the site, where it does not answer
#     <prefix>/<site>/odd/<token>-<number>    what lay in the place of an answer, and was none
#
# Objects are put whole and never altered, and nothing but what is none is moved: the bucket is the record
# of what passed, and a rule of its owner (a lifecycle rule) may end it after some months. Keys of questions
# sort by time, and a site lists what comes after the last that it knows, so that what has passed costs
# nothing.
#
# Whoever may write to the bucket can stop messages, and nothing else. Of an object no more is read than its
# first kilobytes before the signature of the pinned key has been checked. Who may read it sees what readers
# of an exchange folder see: who asks whom, when and how much, and what passes neither masked nor sealed.

ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9._=-]+)*)/?")
TIME_DIGITS = 20
REQUEST_KEY = re.compile(rf"([0-9]{{{TIME_DIGITS}}})-([0-9a-f]{{32}})")
ABSENT = ("404", "NoSuchKey", "NotFound")
LISTED_AT_ONCE = 1000


def open_bucket(exchange: str) -> Bucket:
    """Open the bucket of an address, s3://bucket/prefix; nothing is asked of it yet.

    Credentials, region and endpoint are those that boto3 finds: its environment variables (for a store that
    is not Amazon's, ``AWS_ENDPOINT_URL``), the files in ``~/.aws``, the role of the machine. PartitionError
    where the address is none, ImportError without boto3.
    """
    name, prefix = check_address(exchange)
    try:
        import boto3  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("an object store carries messages by boto3: pip install fedstat[s3]") from error
    settings = Config(retries={"mode": "standard", "max_attempts": 4}, max_pool_connections=64)
    return Bucket(boto3.client("s3", config=settings), name, prefix)


def check_address(exchange: str) -> tuple[str, str]:
    """Split an address into bucket and prefix; PartitionError where it is none."""
    found = ADDRESS.fullmatch(exchange)
    if found is None:
        raise PartitionError(
            f"'{exchange}': expected s3://BUCKET/PREFIX, with a prefix of letters, digits and . _ = -"
        )
    return found[1], found[2].strip("/")


def given_exchange(exchange: str) -> str:
    """Return an exchange as a command line names it, where paths are relative to where it was run."""
    if not is_bucket(exchange):
        return str(Path(exchange).resolve())
    check_address(exchange)
    return exchange


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, or what lies in it under a prefix; several threads may use it."""

    client: Any
    name: str
    prefix: str

    def at(self, site: str) -> SiteObjects:
        """Return the part of one site."""
        return SiteObjects(self, "/".join(part for part in (self.prefix, site) if part))

    def put(self, key: str, content: bytes) -> None:
        """Put an object, whole."""
        with self.named(key):
            self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def open(self, key: str) -> IO[bytes] | None:
        """Open an object, of which only what is asked for is read; None where it is absent.

        It is read under :meth:`named`: a connection may break off in the middle.
        """
        try:
            with self.named(key):
                found: IO[bytes] = self.client.get_object(Bucket=self.name, Key=key)["Body"]
                return found
        except FileNotFoundError:
            return None

    def has(self, key: str) -> bool:
        """Whether there is an object."""
        try:
            with self.named(key):
                self.client.head_object(Bucket=self.name, Key=key)
        except FileNotFoundError:
            return False
        return True

    def move(self, key: str, other: str) -> None:
        """Move an object, where there is one."""
        try:
            with self.named(key):
                self.client.copy_object(
                    Bucket=self.name, Key=other, CopySource={"Bucket": self.name, "Key": key}
                )
                self.client.delete_object(Bucket=self.name, Key=key)
        except FileNotFoundError:
            return

    def list_after(self, prefix: str, last: str) -> Iterator[str]:
        """Keys that begin with a prefix and come after the last one, in their order."""
        more: dict[str, Any] = {"StartAfter": prefix + last}
        while more:
            with self.named(prefix):
                page = self.client.list_objects_v2(
                    Bucket=self.name, Prefix=prefix, MaxKeys=LISTED_AT_ONCE, **more
                )
            yield from (one["Key"].removeprefix(prefix) for one in page.get("Contents", ()))
            more = {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else {}

    @contextmanager
    def named(self, key: str) -> Iterator[None]:
        """Name bucket, key and remedy where the store fails; FileNotFoundError without such an object."""
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in ABSENT:
                raise FileNotFoundError(key) from error
            raise EngineError(
                f"'{BUCKET}{self.name}/{key}' cannot be used ({code}); look at the bucket's name, and at "
                "what these credentials may do there: list, get, put, and delete for what is put aside"
            ) from error
        except BotoCoreError as error:
            raise EngineError(
                f"the object store of '{BUCKET}{self.name}' is not reached ({type(error).__name__}); look at "
                "network, credentials and AWS_ENDPOINT_URL"
            ) from error


@dataclass(frozen=True, slots=True)
class SiteObjects:
    """What lies in the bucket for one site."""

    bucket: Bucket
    place: str

    @property
    def asks(self) -> str:
        """Where questions come."""
        return f"{self.place}/asks/"

    def new_ask(self, number: str) -> str:
        """Key of a question that is asked now."""
        return f"{self.asks}{time.time_ns():0{TIME_DIGITS}d}-{number}"

    @property
    def replies(self) -> str:
        """Where answers go."""
        return f"{self.place}/replies/"

    def reply(self, number: str) -> str:
        """Key of an answer."""
        return f"{self.replies}{number}"

    def note(self, number: str) -> str:
        """Key of a note in its stead."""
        return f"{self.place}/notes/{number}"

    def put_aside(self, key: str) -> None:
        """Put aside what lies in the place of an answer or a note and is none."""
        self.bucket.move(key, f"{self.place}/odd/{secrets.token_hex(4)}-{key.rpartition('/')[2]}")


@dataclass(slots=True)
class Cursor:
    """How far a site has read the questions of its part.

    A question may appear later than one with a later key, by `late` nanoseconds at most: those are listed
    again, and known by their keys. No key moves the cursor beyond the site's own clock.
    """

    part: SiteObjects
    late: int = 900 * 10**9
    _last: str = ""
    _known: set[str] = field(default_factory=set)
    _began: bool = False

    def new(self) -> list[tuple[str, str]]:
        """Keys and numbers of questions that have come since, in their order."""
        found = []
        # Before the replies: a request that is repeated after its reply was put aside must count as open.
        asks = list(self.part.bucket.list_after(self.part.asks, self._last))
        # at first all that ever passed is listed: answers by the thousand, and not asked for one by one
        answered = set() if self._began else set(self.part.bucket.list_after(self.part.replies, ""))
        for key in asks:
            match = REQUEST_KEY.fullmatch(key)
            if match and match[2] in answered:
                self.pass_on(key)
            elif match and key not in self._known:
                found.append((key, match[2]))
        self._began = True
        return found

    def pass_on(self, key: str) -> None:
        """Take a question for done with."""
        self._known.add(key)
        newest = min(int(key[:TIME_DIGITS]), time.time_ns()) - self.late
        last = f"{max(newest, 0):0{TIME_DIGITS}d}"
        if last > self._last:
            self._last = last
            self._known = {one for one in self._known if one > last}


# ----------------------------------------------------------------------------------------------------
# The coordinator's end of a bucket.

NOTES_EVERY = 8
"""Looks for an answer between two looks for a note."""


@dataclass(slots=True)
class BucketTransport:
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
        number, question = sign_request(self.identity, site, request)
        wait = _BucketWait(self, site, self.bucket.at(site), number, question)
        # the answer may be there: an analysis that was interrupted asks the same question again
        answer = wait.look()
        return wait.wait() if answer is None else answer


@dataclass(slots=True)
class _BucketWait:
    """One question of a carrier."""

    carrier: BucketTransport
    site: str
    part: SiteObjects
    number: str
    question: bytes
    _told: set[str] = field(default_factory=set)

    def wait(self) -> bytes:
        """Ask, and look until the answer is there."""
        pace, until, looks = Backoff(self.carrier.poll), time.monotonic() + self.carrier.timeout, 0
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
                    return open_reply(found, self._pinned, self.site, self.number, f"'{key}'")
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
            raise untrusted_note(self.site, self._pinned, self.carrier.identity)
        self._say("It says that it answers nothing for now: its owner finds why in the site's log.")

    def _say(self, said: str) -> None:
        if said not in self._told:
            self._told.add(said)
            warn(f"'{self.site}': {said}", FedstatWarning)


# ----------------------------------------------------------------------------------------------------
# A site's end of a bucket: questions are found after a cursor, and answers put.


@dataclass(slots=True)
class BucketInbox:
    """The questions in one site's part of a bucket.

    `refused` is told once of every object that was passed over, and why, and once of a store that is out of
    reach.
    """

    part: SiteObjects
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
