"""A site's ledger on disk: its lines, appending and reading, and recovery after a declared loss."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedstat.codec import from_plain, to_plain
from fedstat.errors import EngineError, Remedy, SecurityError
from fedstat.federation.audit import event_log
from fedstat.federation.audit.budget_charges import RHO_PATTERN, Charge
from fedstat.federation.audit.checkpoints import (
    SignedCheckpoint,
    digest_with_line,
    first_ledger_digest,
    utc_text,
)
from fedstat.federation.audit.earlier_records import read_earlier_records
from fedstat.federation.crypto.keys import Identity, PublicIdentity
from fedstat.federation.files import (
    lock_file,
    open_regular,
    read_arrays,
    read_private,
    write_atomic,
    write_private,
)
from fedstat.federation.state_formats import LEDGER, LEDGER_KEY, NUMBER, WRITER
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# The lines of a site's stored ledger, and how they are read.
#
# Every line is one JSON object in canonical form. The digest of a line is of all lines before as well, and
# the last of those that were written at once has ``"signed"``: when, and the site's signature over that
# digest. Lines after the last signature are what a crash cut, and their answer has not left.

LEDGER_FILENAME, CHECKPOINT_FILENAME, SECRET_FILENAME, ANSWERED_FILENAME = (
    "ledger.jsonl",
    "ledger.head",
    "ledger.key",
    "answered.npz",
)
SIGNATURE_FIELD = b'"signed":{'
"""Occurs in a line only as the name of its signature: within a text its quotes are escaped."""


SUBJECT_TEXTS = tuple(one.name for one in fields(event_log.Subject) if one.name != "columns")
LINES: Mapping[str, Mapping[str, type]] = {
    "entry": {"ordinal": int, "entry": list, "mark": str},
    "formula": {"of": int, "columns": list, **dict.fromkeys(SUBJECT_TEXTS, str)},
    "session": {"session": str, "ordinal": int, "previous": str, "as_of": str},
    "columns": {"columns": list, "entities": int},
    "remembered": {"remembered": str, "record": dict},
    "spent": {"spent": str},
    "refused": {"client": str, "refused": int},
    "proposed": {"plan": str, "client": str, "written": str, "proposed": int},
    "verdict": {"plan": str, "verdict": str, "who": str, "when": int},
    "charged": {"charged": int, "rho": str, "what": str, "question": str, "answer": str},
    "kept": {"kept": str, "run": str, "part": str, "shape": list, "content": str},
    "answered": {"answered": str, "rows": int},
    "begun": {"begun": int, "secret": str},
    "disputed": {"disputed": str},
    "lost": {"lost": int, "reason": str, "aside": str},
    "policy": {"policy": int, "rules": str},
    NUMBER: {NUMBER: int, WRITER: str},
}
"""Fields of every kind of line, by the field that only this kind has.

``entry``: an entry of the session with this ordinal number, the mark of its content, and on the last line of
an answer the head of the chain. ``formula``: what the following entries of a session are about: person,
study, purpose, formula and columns. ``session``: a session was opened, over records that were read at a time
(empty if they are read for every answer). ``columns``: columns that were used in any session, and most
entities behind an answer. ``remembered``: something that was answered, by its class; ``spent``: the same as
text, as versions before format 3 wrote it. ``refused``: number of refusals because of the rows, by analyst.
``proposed``: a plan waits for the owner. ``verdict``: the owner's decision about a plan. ``charged``: a
charge to the privacy budget. ``kept``: a noisy array that was charged, for repetitions of its request.
``answered``: SHA-256 of the file of rows behind earlier answers (empty for none), and their number.
``begun``: the ledger was begun, with a secret that has this SHA-256. ``disputed``: why the ledger does not
hold what the site signed. ``lost``: the owner declared that the ledger before was lost, when and why, and
where its files are. ``policy``: the rules of the site from a time on. ``format``: the format of the following
lines, and who wrote them.
"""


@dataclass(slots=True)
class LedgerReading:
    """The content of a ledger's lines so far; `heads` are the signed ones, by number of lines.

    `answered` and `rows` are those of the latest line ``answered``, `number` is the number of the format.
    `shown` is the head in the file next to the ledger, which is older after a crash.
    """

    site: str
    keys: PublicIdentity
    secret: bytes
    site_ledger: event_log.SiteLedger = field(init=False)
    digest: bytes = field(init=False)
    lines: int = 0
    lost: tuple[int, ...] = ()
    answered: str = ""
    rows: int = 0
    number: int = 0
    shown: SignedCheckpoint | None = None
    heads: dict[int, SignedCheckpoint] = field(default_factory=dict)
    _chains: dict[int, event_log.SessionChain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.site_ledger, self.digest = event_log.SiteLedger(self.secret), first_ledger_digest(self.keys)

    @property
    def head(self) -> SignedCheckpoint:
        """The newest."""
        return self.heads[self.lines]

    def take(self, text: bytes) -> None:
        """Read one line; some error is raised if it is not part of a ledger, EngineError if it is too new."""
        line = json.loads(text)
        signed, head = line.pop("signed", None), None
        self.digest, self.lines = (
            digest_with_line(self.digest, event_log.canonical_json(line)),
            self.lines + 1,
        )
        kind = next(kind for kind in LINES if kind in line)
        if kind == "entry":
            head = line.pop("head", None)
        if kind == NUMBER:  # before its fields are checked: a later version may have more of them
            self.number = LEDGER.read(line, f"'{LEDGER_FILENAME}', line {self.lines}")
        if {name: type(value) for name, value in line.items()} != LINES[kind]:
            raise TypeError(kind)
        if any(type(value) is int and value < 0 for value in line.values()):
            raise ValueError("a negative number")
        self._apply(kind, line, head)
        if signed is not None:
            self.heads[self.lines] = SignedCheckpoint(
                self.lines, self.digest.hex(), signed["time"], self.lost, signed["signature"]
            )

    def _apply(self, kind: str, line: dict[str, Any], head: str | None) -> None:
        """Repeat what was recorded by a line."""
        site_ledger = self.site_ledger
        match kind:
            case "entry":
                chain = self._chains[line["ordinal"]]
                chain.restore(event_log.read_site_entry(line["entry"]), line["mark"])
                if head not in (None, chain.head):
                    raise ValueError("head")
            case "formula":
                chain = self._chains[line.pop("of")]
                chain.restore_subject(from_plain(event_log.Subject, line, LEDGER_FILENAME, SecurityError))
            case "session":
                chain = self._chains[line["ordinal"]] = site_ledger.open(
                    self.site, self.keys, line["session"]
                )
                if (chain.ordinal, chain.previous) != (line["ordinal"], line["previous"]):
                    raise ValueError("session")
                chain.as_of = line["as_of"]
            case "columns":
                if not all(type(name) is str for name in line["columns"]):
                    raise TypeError("columns")
                site_ledger.record_columns(set(line["columns"]), line["entities"])
            case "remembered":
                site_ledger.restore_record(line["remembered"], line["record"])
            case "spent":
                for name, record in read_earlier_records(line["spent"]):
                    site_ledger.restore_record(name, record)
            case "refused":
                site_ledger.refusals[line["client"]] = line["refused"]
            case "proposed":
                site_ledger.propose(from_plain(event_log.PlanProposal, line, LEDGER_FILENAME, SecurityError))
            case "verdict":
                site_ledger.decide(from_plain(event_log.PlanDecision, line, LEDGER_FILENAME, SecurityError))
            case "charged":
                if not RHO_PATTERN.fullmatch(line["rho"]):
                    raise ValueError("charged")
                site_ledger.charges.take(Charge(**line))
            case "kept":
                site_ledger.restore_release(line)
            case "answered":
                self.answered, self.rows = line["answered"], line["rows"]
            case "begun":
                if self.lines != 1 or line["secret"] != hashlib.sha256(self.secret).hexdigest():
                    raise ValueError("begun")
            case "policy":
                site_ledger.policies.append(event_log.PolicyRecord(**line))
            case "disputed":
                site_ledger.disputed = line["disputed"]
            case "lost":
                self.lost = (*self.lost, line["lost"])
                site_ledger.disputed = ""
                site_ledger.losses.append((utc_text(line["lost"]), line["reason"]))

    def first_unsigned(self) -> int:
        """Return the line of the first invalid signature; 0 if the newest is valid, since it covers all."""
        if self.lines in self.heads and self.head.is_of(self.keys):
            return 0
        return next((number for number, head in self.heads.items() if not head.is_of(self.keys)), self.lines)


def complete_lines(content: bytes) -> list[bytes]:
    """Split a ledger into its lines, without those after the last signature."""
    lines = content.split(b"\n")[:-1]
    while lines and SIGNATURE_FIELD not in lines[-1]:
        lines.pop()
    return lines


def read_lines(folder: Path, site: str, keys: PublicIdentity, secret: bytes) -> LedgerReading:
    """Read a ledger, and check every line against chain and signatures.

    SecurityError names a line that is not what was written, or was written under other keys. EngineError if a
    later version wrote it.
    """
    reading, path = LedgerReading(site, keys, secret), folder / LEDGER_FILENAME
    with open_regular(path) as file:
        lines = complete_lines(file.read())
    for number, text in enumerate(lines, 1):
        try:
            reading.take(text)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            StopIteration,
            RecursionError,
            SecurityError,
        ):
            raise altered_line_error(path, number) from None
    if wrong := reading.first_unsigned():
        raise altered_line_error(path, wrong)
    return reading


def altered_line_error(path: Path, number: int) -> SecurityError:
    """Error about a line."""
    return SecurityError(
        f"'{path}', line {number}: not what this site wrote with the keys that it has now",
        remedy=recovery(path.parent),
    )


def recovery(folder: Path) -> Remedy:
    """Return how a site with an incomplete ledger can continue."""
    return Remedy(
        "fedstat site declare-loss {folder} --reason TEXT",
        "The site answers no requests until its owner restores the files, or declares the loss, which the "
        "others are informed of: {call}",
    ).filled(folder=shlex.quote(str(folder)))


# ----------------------------------------------------------------------------------------------------
# A site's ledger on disk: extended before every release, and continued after a restart.
#
# ::
#
#     ledger.jsonl    one line per session opened, per entry of its chain, and per change of what was in play
#     ledger.head     the newest signed head (mode 0600): a ledger that lacks it was cut
#     ledger.key      secret from which the keys of all commitments are drawn, for its owner alone (mode 0600)
#     answered.npz    the rows behind earlier answers, so that a restart does not forget them (mode 0600)
#
# The ledger starts with the site's folder. From then on the site refuses to run if the file is absent, cut,
# altered or restored to an earlier state. The same holds for a file of earlier replies that is not the one
# named in the ledger: otherwise a reply could be requested again over a few rows fewer. Only the effects of a
# crash are repaired: lines without a signature at the end, whose reply has not left, and a head that is older
# than the ledger.

ANSWERED_NEXT = "answered.next"
HistoryCheck: TypeAlias = Callable[[Mapping[str, Array], int], str]
"""Returns why earlier replies over this number of rows cannot be compared with new ones.

Empty if they can.
"""
SECRET_BYTES, MAX_CHECKPOINT_BYTES = 32, 2048
LOCK_TIMEOUT = 10.0
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class LedgerFile:
    """The file that a site's entries are appended to; EngineError where another process serves the site.

    A process that is about to end is waited for, `patience` seconds. A ledger that is absent, or no plain
    file, is a SecurityError.
    """

    def __init__(self, folder: str | Path, patience: float = LOCK_TIMEOUT) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LEDGER_FILENAME
        try:
            self._file = open(os.open(self.path, os.O_RDWR | os.O_APPEND | NO_FOLLOW), "ab", 0)  # noqa: SIM115
        except OSError:
            raise missing_file_error(self.path) from None
        self._broken: OSError | None = None
        self.followed: Callable[[], None] = lambda: None
        """Called after every line."""
        until = time.monotonic() + patience
        while not lock_file(self._file):
            if time.monotonic() > until:
                self._file.close()
                raise EngineError(
                    f"another process serves the site in '{folder}'; stop it first: two would write two "
                    "histories of one site"
                )
            time.sleep(0.05)
        self.found = self.stamp()

    def stamp(self) -> tuple[int, int]:
        """Size of the file, and the time of its last change, which a person who writes files cannot set."""
        now = os.fstat(self._file.fileno())
        return now.st_size, now.st_ctime_ns

    def go_on(self, identity: Identity, reading: LedgerReading) -> None:
        """Continue a ledger that was read, and sign new entries."""
        self._identity, self._read_as = identity, (reading.site, reading.keys, reading.secret)
        self._lines, self._digest, self.lost = reading.lines, reading.digest, reading.lost
        self._signed = {lines: head.digest for lines, head in reading.heads.items()}
        self._size, self._left = self.path.stat().st_size, self.stamp()
        if reading.lines and reading.shown == reading.head:
            self.head = reading.head
        elif reading.lines:
            self._show(reading.head)

    @property
    def broken(self) -> str:
        """Why nothing can be written any more; empty where it can."""
        return "" if self._broken is None else str(self._broken.strerror or self._broken)

    def close(self) -> None:
        """Let another process write."""
        self._file.close()

    def answered(self, arrays: Mapping[str, Array], n_rows: int) -> None:
        """Replace the rows behind earlier answers.

        The ledger names the new file before it takes the place of the old one: whenever a crash comes, one of
        the two is what the ledger names.
        """
        content = io.BytesIO()
        np.savez_compressed(content, **dict(arrays))  # type: ignore[arg-type]
        try:
            write_atomic(self.folder / ANSWERED_NEXT, content.getvalue())
        except OSError as error:
            self._broken = error
            raise self._full(error) from error
        digest = hashlib.sha256(content.getvalue()).hexdigest()
        self.append([{"answered": digest, "rows": n_rows}])
        (self.folder / ANSWERED_NEXT).replace(self.folder / ANSWERED_FILENAME)

    def holds(self, head: SignedCheckpoint) -> bool:
        """Return whether the ledger on disk had this head.

        It is read again only if it is not as the last line left it; the time would grow with its length.
        """
        now = self.stamp()
        if now != self._left or not self._is_in_place():
            try:
                found = read_lines(self.folder, *self._read_as).heads
            except (SecurityError, OSError):
                return False
            self._signed, self._left = {lines: one.digest for lines, one in found.items()}, now
        return self._signed.get(head.lines) == head.digest

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write lines, the last of them signed, and the new head next to them."""
        # After a line that may be cut no other is valid: the first error is repeated until a restart.
        if self._broken is not None:
            raise self._full(self._broken) from self._broken
        self._check_untouched()
        untouched, digest = self.stamp() == self._left, self._digest
        for line in lines:
            digest = digest_with_line(digest, event_log.canonical_json(line))
        # A clock that was set back does not make a head older than the one before.
        now = max(time.time_ns(), self.head.time + 1 if self._lines else 0)
        head = SignedCheckpoint(self._lines + len(lines), digest.hex(), now, self.lost).sign(self._identity)
        signed = {**lines[-1], "signed": {"time": now, "signature": head.signature}}
        content = "".join(event_log.canonical_json(line) + "\n" for line in [*lines[:-1], signed]).encode()
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
            self._lines, self._digest, self._size = head.lines, digest, self._size + len(content)
            self._signed[head.lines] = head.digest
            if untouched:
                self._left = self.stamp()
            self._show(head)
            self.followed()
        except OSError as error:
            self._broken = error
            raise self._full(error) from error

    def _show(self, head: SignedCheckpoint) -> None:
        """Replace the head; without waiting, since an older head is repaired."""
        self.head = head
        flags = os.O_WRONLY | os.O_CREAT | NO_FOLLOW
        with open(os.open(self.folder / CHECKPOINT_FILENAME, flags, 0o600), "wb", 0) as file:
            file.write(LEDGER.write_record(head).encode().ljust(MAX_CHECKPOINT_BYTES))

    def _check_untouched(self) -> None:
        """Refuse to go on where somebody else wrote, cut or exchanged the file since the last line."""
        if not self._is_in_place():
            raise SecurityError(
                f"'{self.path}' was changed while the site was served, and not by it",
                remedy=recovery(self.folder),
            )

    def _is_in_place(self) -> bool:
        """Return whether the open file is the one in the folder, and as long as the site has written it."""
        held = os.fstat(self._file.fileno())
        found = self.path.stat() if self.path.exists() else None
        return found is not None and (found.st_ino, found.st_size) == (held.st_ino, self._size)

    def _full(self, error: OSError) -> EngineError:
        return EngineError(
            f"the ledger in the site's folder cannot be written ({error.strerror}), and nothing leaves that "
            "is not written down; its owner makes room and starts the site again"
        )


def begin_ledger(folder: str | Path, identity: Identity) -> None:
    """Start the ledger of a site that has answered nothing yet; FileExistsError if there is one."""
    begin_ledger_file(Path(folder), identity).close()


def begin_ledger_file(folder: Path, identity: Identity) -> LedgerFile:
    """Start a ledger, and keep its file open."""
    write_private(folder / LEDGER_FILENAME, b"")
    if not (folder / SECRET_FILENAME).exists():
        write_private(folder / SECRET_FILENAME, _secret_text(secrets.token_bytes(SECRET_BYTES)))
    store, secret = LedgerFile(folder), _secret(folder)
    store.go_on(identity, LedgerReading("", identity.public, secret))
    begun = {"begun": time.time_ns(), "secret": hashlib.sha256(secret).hexdigest()}
    store.append([begun, LEDGER.stamp()])
    return store


def open_ledger(
    folder: str | Path,
    site: str,
    identity: Identity,
    fits: HistoryCheck | None = None,
    patience: float = LOCK_TIMEOUT,
) -> event_log.SiteLedger:
    """Open a site's ledger, and continue it.

    EngineError if another process runs the site, or a later version wrote the ledger or the release history.
    SecurityError if the ledger is incomplete, was written under
    other keys, or has replies over rows that cannot be recognized among the present ones (`fits`).
    """
    store, reading = open_ledger_file(folder, site, identity, patience)
    site_ledger = reading.site_ledger
    try:
        site_ledger.check_undisputed(site)
        site_ledger.recalled = read_answered_rows(store.folder, reading.answered)
        if site_ledger.recalled and fits is not None and (why := fits(site_ledger.recalled, reading.rows)):
            raise SecurityError(f"{site}: {why}")
    except SecurityError as error:
        store.close()
        raise SecurityError(str(error), remedy=recovery(store.folder)) from error
    except EngineError:
        store.close()
        raise
    site_ledger.store, site_ledger.is_earlier = store, reading.number < LEDGER.number
    return site_ledger


def open_ledger_file(
    folder: str | Path, site: str, identity: Identity, patience: float = LOCK_TIMEOUT
) -> tuple[LedgerFile, LedgerReading]:
    """Open the file of a ledger with complete lines, and read it."""
    store = LedgerFile(folder, patience)
    try:
        _drop_unsigned_lines(store.path)
        reading = _read_checked(store.folder, site, identity.public)
    except (SecurityError, EngineError):
        store.close()
        raise
    store.go_on(identity, reading)
    return store, reading


def read_ledger(folder: str | Path, site: str, keys: PublicIdentity) -> event_log.SiteLedger:
    """Read a site's ledger, and check it against its chains, its signatures and its head.

    SecurityError where it is absent or cut, or a line is not what was written under these keys.
    """
    return _read_checked(Path(folder), site, keys).site_ledger


def _read_checked(folder: Path, site: str, keys: PublicIdentity) -> LedgerReading:
    if not (folder / LEDGER_FILENAME).exists():
        raise missing_file_error(folder / LEDGER_FILENAME)
    # The head first: a site that serves meanwhile writes it last, and what is read then has it.
    head = _read_checkpoint(folder, keys)
    reading = read_lines(folder, site, keys, _secret(folder))
    reading.shown = head
    if head.lines not in reading.heads or reading.heads[head.lines].digest != head.digest:
        raise SecurityError(
            f"'{folder / LEDGER_FILENAME}' ends before what this site wrote last: it was cut, or put back to "
            "an earlier state",
            remedy=recovery(folder),
        )
    return reading


def _read_checkpoint(folder: Path, keys: PublicIdentity) -> SignedCheckpoint:
    path = folder / CHECKPOINT_FILENAME
    try:
        head = LEDGER.read_record(
            SignedCheckpoint, read_private(path, MAX_CHECKPOINT_BYTES), f"'{path}'", SecurityError
        )
    except FileNotFoundError:
        raise missing_file_error(path) from None
    if not head.is_of(keys):
        raise SecurityError(f"'{path}' is not signed with the keys of this site", remedy=recovery(folder))
    return head


def missing_file_error(path: Path) -> SecurityError:
    """Return the error for a file that a complete ledger needs."""
    return SecurityError(
        f"'{path}' is absent: it was removed, or is that of an earlier version", remedy=recovery(path.parent)
    )


def _drop_unsigned_lines(path: Path) -> None:
    """Drop lines whose signature was not written: their answer has not left."""
    content = path.read_bytes()
    complete = sum(len(line) + 1 for line in complete_lines(content))
    if 0 < complete < len(content):
        os.truncate(path, complete)


def read_answered_rows(folder: Path, named: str) -> dict[str, Array]:
    """Read the rows behind earlier answers, which have to be those that the ledger names."""
    path = folder / ANSWERED_FILENAME
    if not named:
        if path.exists():
            raise SecurityError(f"'{path}' is not from this site, which remembers no answers")
        return {}
    for place in (folder / ANSWERED_NEXT, path):
        content = read_private(place) if place.exists() else b""
        if hashlib.sha256(content).hexdigest() == named:
            kept = read_arrays(content)
            place.replace(path)
            return kept
    raise SecurityError(
        f"'{path}' is {'altered' if path.exists() else 'absent'}: what this site has answered is not known "
        "any more, and a difference of two answers could disclose a few rows"
    )


def row_count_problem(then: int, now: int) -> str:
    """Say that earlier answers were over another number of rows; empty where they were not."""
    if then == now:
        return ""
    return (
        f"there are {now:,} rows, but earlier replies used {then:,}. The two cannot be compared, and the "
        "difference of two replies could disclose a few rows"
    )


def _secret(folder: Path) -> bytes:
    """Read the secret of the commitments."""
    path = folder / SECRET_FILENAME
    if not path.exists():
        raise missing_file_error(path)
    content = read_private(path)
    if len(content) == SECRET_BYTES:  # format 0: the bytes alone
        return content
    where = f"'{path}'"
    try:
        found = bytes.fromhex(LEDGER_KEY.read_record(LedgerKey, content, where, SecurityError).secret)
    except (SecurityError, ValueError):
        found = b""
    if len(found) != SECRET_BYTES:
        raise SecurityError(f"{where} does not hold {SECRET_BYTES} bytes", remedy=recovery(folder))
    return found


@dataclass(frozen=True, slots=True, repr=False)
class LedgerKey:
    """The secret of the commitments as its file has it, in hexadecimal digits."""

    secret: str


def _secret_text(secret: bytes) -> bytes:
    return LEDGER_KEY.write_record(LedgerKey(secret.hex())).encode()


def mark_upgrade(site_ledger: event_log.SiteLedger) -> None:
    """Write into a ledger of an earlier version that the following lines have the present format."""
    if isinstance(site_ledger.store, LedgerFile) and site_ledger.is_earlier:
        folder = site_ledger.store.folder
        write_atomic(folder / SECRET_FILENAME, _secret_text(_secret(folder)))
        site_ledger.store.append([LEDGER.stamp()])
        site_ledger.is_earlier = False


# ----------------------------------------------------------------------------------------------------
# Recovery of a site with an incomplete ledger: its owner declares the loss, in the ledger itself.
#
# Lost replies cannot be compared with new ones: two replies that differ by a few rows may then both be
# released. The owner has to decide about this risk, and the others have to know it: the times of all
# declarations are in every statement of the site.

NO_BUDGET = Fraction(0)
LOST_CHARGES = "all possible charges before the loss of the ledger"


@dataclass(frozen=True, slots=True)
class DeclaredLoss:
    """A declaration: why the ledger was incomplete, and the files that were set aside, with their new place.

    New replies are not compared with `forgotten` ones; `charged` is whether the complete privacy budget
    counts as spent, since the earlier charges are unknown.
    """

    found: str
    forgotten: bool
    aside: Path
    files: tuple[str, ...]
    charged: bool = False


def record_declared_loss(
    folder: str | Path,
    site: str,
    identity: Identity,
    reason: str,
    fits: HistoryCheck,
    complete: Fraction = NO_BUDGET,
) -> DeclaredLoss:
    """Declare that what a site has answered is not all known any more.

    A ledger with complete lines is continued; any other is set aside and started again. Earlier replies are
    kept if their file is the one named in the ledger, and its rows `fits` the present ones. If charges to a
    privacy budget may be lost, the `complete` of it is charged. EngineError if a process runs the site.
    """
    folder, forgotten, files, charged = Path(folder), True, list[str](), False
    aside = _new_folder(folder)
    try:
        store, reading = open_ledger_file(folder, site, identity)
    except SecurityError as error:
        # The secret as well: the person who altered the rest had it.
        found, files = (
            str(error),
            _set_aside(
                folder,
                aside,
                (LEDGER_FILENAME, CHECKPOINT_FILENAME, ANSWERED_FILENAME, ANSWERED_NEXT, SECRET_FILENAME),
            ),
        )
        store, charged = begin_ledger_file(folder, identity), complete > 0
    else:
        problem = _history_problem(folder, reading, fits)
        found, forgotten = reading.site_ledger.disputed or problem, bool(problem)
        if forgotten:
            files = _set_aside(folder, aside, (ANSWERED_FILENAME, ANSWERED_NEXT))
            store.append([{"answered": "", "rows": 0}])
    if charged:
        charge = Charge(time.time_ns(), str(complete), LOST_CHARGES, "", secrets.token_hex(32))
        store.append([to_plain(charge)])
    _append_declaration(store, reason, aside.name if files else "")
    return DeclaredLoss(
        found or "nothing is amiss with the files themselves", forgotten, aside, tuple(files), charged
    )


def _history_problem(folder: Path, reading: LedgerReading, fits: HistoryCheck) -> str:
    """Return why earlier replies cannot be compared with new ones; empty if they can."""
    try:
        kept = read_answered_rows(folder, reading.answered)
    except SecurityError as error:
        return str(error)
    return fits(kept, reading.rows) if kept else ""


def _append_declaration(store: LedgerFile, reason: str, aside: str) -> None:
    # Not before any head that was signed here: the heads of others are forgiven up to this time.
    now = max(time.time_ns(), store.head.time + 1)
    store.lost = (*store.lost, now)
    store.append([{"lost": now, "reason": reason, "aside": aside}])
    store.close()


def _new_folder(folder: Path) -> Path:
    stamp = utc_text(time.time_ns()).replace(":", "").replace("-", "")
    return next(
        place for number in range(1, 1000) if not (place := folder / f"lost-{stamp}-{number}").exists()
    )


def _set_aside(folder: Path, aside: Path, names: tuple[str, ...]) -> list[str]:
    """Move existing files to a folder of their own, for a later investigation."""
    there = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        aside.mkdir(mode=0o700)
    for name in there:
        (folder / name).rename(aside / name)
    return there
