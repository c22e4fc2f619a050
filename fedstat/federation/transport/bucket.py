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
    BUSY,
    CLOSED,
    MOST_NOTES,
    NOTES_AT_ONCE,
    SERVED,
    STATUS_OF_NOTES,
    UNTRUSTED,
    AnsweringSite,
    Backoff,
    BusyError,
    is_bucket,
    open_note,
    untrusted_note,
)
from fedstat.federation.transport.signed import open_reply, sign_request

# ----------------------------------------------------------------------------------------------------
# A site's part of a bucket: where requests, replies and notes are.
#
# ::
#
#     <prefix>/<site>/asks/<time>-<number>    signed by the coordinator; the time in nanoseconds, 20 digits
#     <prefix>/<site>/replies/<number>        signed by the site
#     <prefix>/<site>/notes/<number>          signed by the site, when it does not reply
#     <prefix>/<site>/odd/<token>-<number>    an object found where a reply should be, but is not one
#
# Objects are written as a whole and never changed. Only objects that are not valid messages are moved. So the
# bucket is the record of all messages; its owner may delete old ones by a lifecycle rule. Keys of requests
# sort by time, and a site lists only keys after the last one that it knows. Old messages therefore cost
# nothing.
#
# A person with write access to the bucket can stop messages, but nothing else: only the first kilobytes of an
# object are read before the signature of the pinned key has been checked. A person with read access sees what
# readers of an exchange folder see: who sends requests to whom, when, how large, and all content that is
# neither masked nor encrypted.

ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9._=-]+)*)/?")
TIME_DIGITS = 20
REQUEST_KEY = re.compile(rf"([0-9]{{{TIME_DIGITS}}})-([0-9a-f]{{32}})")
ABSENT = ("404", "NoSuchKey", "NotFound")
LISTED_AT_ONCE = 1000


def open_bucket(exchange: str) -> Bucket:
    """Open the bucket of an address, s3://bucket/prefix, without a request to the store.

    boto3 finds credentials, region and endpoint: in its environment variables (``AWS_ENDPOINT_URL`` for a
    store other than Amazon's), the files in ``~/.aws``, or the role of the machine. PartitionError if the
    address is invalid, ImportError without boto3.
    """
    name, prefix = check_address(exchange)
    try:
        import boto3  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("messages over an object store need boto3: pip install fedstat[s3]") from error
    settings = Config(retries={"mode": "standard", "max_attempts": 4}, max_pool_connections=64)
    return Bucket(boto3.client("s3", config=settings), name, prefix)


def check_address(exchange: str) -> tuple[str, str]:
    """Split an address into bucket and prefix; PartitionError if it is invalid."""
    found = ADDRESS.fullmatch(exchange)
    if found is None:
        raise PartitionError(
            f"'{exchange}': expected s3://BUCKET/PREFIX, with a prefix of letters, digits and . _ = -"
        )
    return found[1], found[2].strip("/")


def given_exchange(exchange: str) -> str:
    """Return an exchange as a command line names it; relative paths start at the working folder."""
    if not is_bucket(exchange):
        return str(Path(exchange).resolve())
    check_address(exchange)
    return exchange


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, or its objects under a prefix; several threads may use it."""

    client: Any
    name: str
    prefix: str

    def at(self, site: str) -> SiteObjects:
        """Return the part of one site."""
        return SiteObjects(self, "/".join(part for part in (self.prefix, site) if part))

    def put(self, key: str, content: bytes) -> None:
        """Write an object as a whole."""
        with self.named(key):
            self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def open(self, key: str) -> IO[bytes] | None:
        """Open an object as a stream; None if it is absent.

        Read it under :meth:`named`, since a connection may fail while reading.
        """
        try:
            with self.named(key):
                found: IO[bytes] = self.client.get_object(Bucket=self.name, Key=key)["Body"]
                return found
        except FileNotFoundError:
            return None

    def has(self, key: str) -> bool:
        """Return whether an object exists."""
        try:
            with self.named(key):
                self.client.head_object(Bucket=self.name, Key=key)
        except FileNotFoundError:
            return False
        return True

    def move(self, key: str, other: str) -> None:
        """Move an object if it exists."""
        try:
            with self.named(key):
                self.client.copy_object(
                    Bucket=self.name, Key=other, CopySource={"Bucket": self.name, "Key": key}
                )
                self.client.delete_object(Bucket=self.name, Key=key)
        except FileNotFoundError:
            return

    def list_after(self, prefix: str, last: str) -> Iterator[str]:
        """Return the keys that begin with a prefix and come after `last`, in order."""
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
        """Raise an error with bucket, key and remedy if the store fails.

        FileNotFoundError without the object.
        """
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in ABSENT:
                raise FileNotFoundError(key) from error
            raise EngineError(
                f"'{BUCKET}{self.name}/{key}' cannot be used ({code}). Check the bucket's name and the "
                "permissions of these credentials: list, get and put, and delete for objects that are put "
                "aside"
            ) from error
        except BotoCoreError as error:
            raise EngineError(
                f"the object store of '{BUCKET}{self.name}' cannot be reached ({type(error).__name__}). "
                "Check network, credentials and AWS_ENDPOINT_URL"
            ) from error


@dataclass(frozen=True, slots=True)
class SiteObjects:
    """The objects of one site in the bucket."""

    bucket: Bucket
    place: str

    @property
    def requests(self) -> str:
        """Prefix of the requests."""
        return f"{self.place}/asks/"

    def new_request(self, number: str) -> str:
        """Return the key of a request that is sent now."""
        return f"{self.requests}{time.time_ns():0{TIME_DIGITS}d}-{number}"

    @property
    def replies(self) -> str:
        """Prefix of the replies."""
        return f"{self.place}/replies/"

    def reply(self, number: str) -> str:
        """Return the key of a reply."""
        return f"{self.replies}{number}"

    def note(self, number: str) -> str:
        """Return the key of the note that is written instead of a reply."""
        return f"{self.place}/notes/{number}"

    def put_aside(self, key: str) -> None:
        """Move away an object with the name of a reply or a note that is not one."""
        self.bucket.move(key, f"{self.place}/odd/{secrets.token_hex(4)}-{key.rpartition('/')[2]}")


@dataclass(slots=True)
class Cursor:
    """How far a site has read the requests of its part.

    A request may appear after one with a later key, by at most `late` nanoseconds. These keys are listed
    again and recognized. No key moves the cursor beyond the site's own clock.
    """

    part: SiteObjects
    late: int = 900 * 10**9
    _last: str = ""
    _known: set[str] = field(default_factory=set)
    _began: bool = False

    def new(self) -> list[tuple[str, str]]:
        """Return keys and numbers of the requests that have come since, in order."""
        found = []
        # Before the replies: a request that is repeated after its reply was put aside must count as open.
        requests = list(self.part.bucket.list_after(self.part.requests, self._last))
        # the first look lists every request ever sent, so its replies are listed by the thousand
        answered = set() if self._began else set(self.part.bucket.list_after(self.part.replies, ""))
        for key in requests:
            match = REQUEST_KEY.fullmatch(key)
            if match and match[2] in answered:
                self.pass_on(key)
            elif match and key not in self._known:
                found.append((key, match[2]))
        self._began = True
        return found

    def pass_on(self, key: str) -> None:
        """Mark a request as done."""
        self._known.add(key)
        newest = min(int(key[:TIME_DIGITS]), time.time_ns()) - self.late
        last = f"{max(newest, 0):0{TIME_DIGITS}d}"
        if last > self._last:
            self._last = last
            self._known = {one for one in self._known if one > last}


# ----------------------------------------------------------------------------------------------------
# The coordinator's end of a bucket.

NOTES_EVERY = 8
"""Number of looks for a reply between two looks for a note."""


@dataclass(slots=True)
class BucketTransport:
    """Writes the coordinator's requests to a bucket and waits for the replies.

    A site, one of those in `fingerprints`, counts as silent after `timeout` seconds. Two looks are `poll`
    seconds apart, and further apart when a reply takes long.
    """

    bucket: Bucket
    identity: Identity
    fingerprints: Mapping[str, str]
    timeout: float = 3600.0
    poll: float = 0.1
    bundles: ClassVar[bool] = True

    def send(self, site: str, request: bytes) -> bytes:
        """Write one request, and read its reply.

        EngineError if the site was silent for too long or refuses this coordinator's requests, or if the
        store cannot be used.
        """
        number, question = sign_request(self.identity, site, request)
        wait = _BucketWait(self, site, self.bucket.at(site), number, question)
        # the reply may exist: an interrupted analysis sends the same request again
        answer = wait.poll()
        return wait.wait() if answer is None else answer


@dataclass(slots=True)
class _BucketWait:
    """One request of a transport."""

    transport: BucketTransport
    site: str
    part: SiteObjects
    number: str
    question: bytes
    _reported: set[str] = field(default_factory=set)

    def wait(self) -> bytes:
        """Send the request, and look until the reply is there."""
        pace, until, looks = Backoff(self.transport.poll), time.monotonic() + self.transport.timeout, 0
        self._request()
        while (answer := self.poll(request_again=True)) is None:
            looks += 1
            if looks % NOTES_EVERY == 1:
                self._read_note()
            if time.monotonic() > until:
                place = f"{BUCKET}{self.part.bucket.name}/{self.part.requests}"
                raise EngineError(
                    f"'{self.site}' did not answer within {self.transport.timeout:g} s; its request waits in "
                    f"'{place}'",
                    remedy=SERVED,
                )
            pace.rest()
        return answer

    def poll(self, request_again: bool = False) -> bytes | None:
        """Read the reply; None if absent. An invalid object is put aside, and the request is sent again."""
        key = self.part.reply(self.number)
        found = self.part.bucket.open(key)
        if found is None:
            return None
        with found:
            try:
                with self.part.bucket.named(key):
                    return open_reply(found, self._pinned, self.site, self.number, f"'{key}'")
            except EngineError as error:  # the connection failed; the next look reads it again
                self._write_status(str(error))
                return None
            except SecurityError as error:
                self._write_status(
                    f"The object with the name of its reply was invalid ({error}) and was moved away."
                )
        self.part.put_aside(key)
        if request_again:
            self._request()
        return None

    def _request(self) -> None:
        self.part.bucket.put(self.part.new_request(self.number), self.question)

    @property
    def _pinned(self) -> str:
        return self.transport.fingerprints[self.site]

    def _read_note(self) -> None:
        """Act on the site's note on this request; EngineError if the site refuses the request."""
        key = self.part.note(self.number)
        found = self.part.bucket.open(key)
        if found is None:
            return
        with found:
            try:
                with self.part.bucket.named(key):
                    note = open_note(found, self._pinned, self.site, self.number, self.question, f"'{key}'")
            except SecurityError as error:
                self._write_status(
                    f"The object with the name of its note was invalid ({error}) and was moved away."
                )
                self.part.put_aside(key)
                return
            except EngineError:
                return
        if note is None:
            return
        if note.why == UNTRUSTED:
            raise untrusted_note(self.site, self._pinned, self.transport.identity)
        self._write_status(STATUS_OF_NOTES[note.why])

    def _write_status(self, said: str) -> None:
        if said not in self._reported:
            self._reported.add(said)
            warn(f"'{self.site}': {said}", FedstatWarning)


# ----------------------------------------------------------------------------------------------------
# A site's end of a bucket: it finds requests after a cursor, and writes replies.


@dataclass(slots=True)
class BucketInbox:
    """The requests in one site's part of a bucket.

    `refused` is called once for every object that was skipped, with the reason, and once when the store is
    out of reach.
    """

    part: SiteObjects
    refused: Callable[[str], None]
    _cursor: Cursor | None = None
    _reported: set[str] = field(default_factory=set)
    _noted: set[tuple[str, str]] = field(default_factory=set)
    _notes: int = 0

    def poll(self, site: AnsweringSite) -> bool:
        """Answer the open requests; return whether there were any."""
        busy, notes = False, NOTES_AT_ONCE
        try:
            for key, number in self._new():
                try:
                    busy |= self._answer(site, key, number)
                except BusyError:  # a later look answers it, and the others go on
                    self._say_once(site, key, number, BUSY)
                    continue
                except SecurityError as error:
                    self._report_once(key, str(error))
                    if notes and self._notes < MOST_NOTES and self._note(site, key, number, UNTRUSTED):
                        notes, self._notes = notes - 1, self._notes + 1
                self.cursor.pass_on(key)
        except EngineError as error:
            # The server keeps the reply; a later look writes it.
            self._report_once("", str(error))
        return busy

    def say_closed(self, site: AnsweringSite) -> None:
        """Leave notes for the coordinator: the site is paused and answers no request."""
        try:
            for key, number in self._new()[: 2 * NOTES_AT_ONCE]:
                self._say_once(site, key, number, CLOSED)
        except EngineError as error:
            self._report_once("", str(error))

    def _say_once(self, site: AnsweringSite, key: str, number: str, why: str) -> None:
        if (key, why) not in self._noted:
            self._noted.add((key, why))
            self._note(site, key, number, why)

    @property
    def cursor(self) -> Cursor:
        """How far the site has read."""
        if self._cursor is None:
            self._cursor = Cursor(self.part)
        return self._cursor

    def _new(self) -> list[tuple[str, str]]:
        return self.cursor.new()

    def _answer(self, site: AnsweringSite, key: str, number: str) -> bool:
        """Have one request answered, unless it was answered before."""
        bucket, reply = self.part.bucket, self.part.reply(number)
        if bucket.has(reply):
            return False
        question = bucket.open(self.part.requests + key)
        if question is None:
            return False
        with question, bucket.named(reply):
            answer = site.answer(question, f"'{key}'", number)
        bucket.put(reply, answer)
        return True

    def _note(self, site: AnsweringSite, key: str, number: str, why: str) -> bool:
        """Leave a note on a request; return False if there is no reason to state."""
        question = self.part.bucket.open(self.part.requests + key)
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

    def _report_once(self, name: str, problem: str) -> None:
        # Outsiders can write objects without end; they must not fill the log.
        if name not in self._reported:
            self._reported.add(name)
            self.refused(problem)
