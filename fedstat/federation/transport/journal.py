"""The coordinator's journal: received replies, and checkpoints of the sites' ledgers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from fedstat.codec import from_json, to_json
from fedstat.errors import EngineError, SecurityError
from fedstat.federation import state_formats
from fedstat.federation.audit.checkpoints import SignedCheckpoint
from fedstat.federation.audit.receipt import Receipt
from fedstat.federation.crypto.keys import normalize_fingerprint
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.files import lock_file, write_atomic
from fedstat.federation.message import Request, pack_request, unpack_request

# ----------------------------------------------------------------------------------------------------
# Heads of the sites' ledgers, which the coordinator keeps next to its federation.
#
# ::
#
# heads.json    the newest signed head of each site, with the fingerprint of its key (mode 0600)
#
# A site's files can be restored to an earlier state with all their signatures, and the site itself cannot
# notice this. The head that the coordinator keeps can show it, and only the site can sign a head: see
# :mod:`fedstat.federation.audit.checkpoints`. Entries after the site's latest statement are not covered until
# its next statement.

HEADS = "heads.json"


@dataclass(frozen=True, slots=True)
class LedgerCheckpoint:
    """A head, and the fingerprint of the key that signed it."""

    key: str
    head: SignedCheckpoint


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """What the file has: a head by site."""

    heads: Mapping[str, LedgerCheckpoint]


@dataclass(frozen=True, slots=True)
class LedgerCheckpoints:
    """The file in the coordinator's folder; `fingerprints` are those of the sites' keys."""

    folder: Path
    fingerprints: Mapping[str, str]

    def known(self) -> dict[str, SignedCheckpoint]:
        """Return the heads of the sites whose key is still the pinned one."""
        kept = self._read()
        return {
            site: kept[site].head
            for site, key in self.fingerprints.items()
            if site in kept and kept[site].key == normalize_fingerprint(key)
        }

    def take(self, receipt: Receipt) -> None:
        """Keep the heads in the statements of a run.

        SecurityError if its site did not sign one.
        """
        heads = dict[str, SignedCheckpoint]()
        for site, statement in receipt.statements.items():
            if statement.site_ledger is None or site not in self.fingerprints:
                continue
            right = statement.keys.digest.hex() == normalize_fingerprint(self.fingerprints[site])
            if not right or not statement.site_ledger.is_of(statement.keys):
                raise SecurityError(f"{site}: the head of its ledger is not signed with its key")
            heads[site] = statement.site_ledger
        self.keep(heads)

    def keep(self, heads: Mapping[str, SignedCheckpoint]) -> None:
        """Keep the heads that are newer than the stored ones."""
        kept = self._read()
        newer = {
            site: LedgerCheckpoint(normalize_fingerprint(self.fingerprints[site]), head)
            for site, head in heads.items()
            if site not in kept
            or kept[site].key != normalize_fingerprint(self.fingerprints[site])
            or kept[site].head.time < head.time
        }
        if not newer:
            return
        try:
            write_atomic(
                self.folder / HEADS, state_formats.HEADS.write_record(StoredHeads(kept | newer)).encode()
            )
        except OSError as error:
            raise EngineError(f"'{self.folder / HEADS}' cannot be written ({error.strerror})") from error

    def _read(self) -> dict[str, LedgerCheckpoint]:
        path = self.folder / HEADS
        if not path.exists():
            return {}
        where = (
            f"'{path}' (restore it from a backup; without it a ledger that was reset to an earlier "
            "state is not detected)"
        )
        content = path.read_bytes()
        if state_formats.HEADS.is_earlier(path):  # format 0: the heads alone
            return from_json(dict[str, LedgerCheckpoint], content, where, SecurityError)
        return dict(state_formats.HEADS.read_record(StoredHeads, content, where, SecurityError).heads)


# ----------------------------------------------------------------------------------------------------
# Received replies, kept so that an interrupted analysis can continue.
#
# ::
#
#     lock                      held by the process of this analysis
#     lost.json                 sessions that a site no longer knows
#     run-0002/00003.json       the requests of a round, written before they are sent
#     run-0002/00003-001.ask    a request with random numbers, which must not be drawn twice
#     run-0002/00003-001.reply  a reply, or a refusal, written before the protocol sees it
#     void-1/run-0002           a run in a lost session
#
# The keys of masks belong to a session. A site that has lost a session draws new keys in a new one. All runs
# of the lost session are therefore repeated, so that no reply under old masks is combined with one under new
# masks.

T = TypeVar("T")
LOCK, LOST = "lock", "lost.json"
LEAST_REPLACED = 16
_HELD: dict[Path, tuple[IO[bytes], object]] = {}
"""Journals that this process holds, each with the object that opened it last."""


class JournalEntry(NamedTuple):
    """One request of a round: its address and a digest of its content."""

    site: str
    family: str
    step: str
    session: str
    digest: str

    @classmethod
    def of(cls, request: Request) -> JournalEntry:
        """Describe a request."""
        return cls(request.site, request.family, request.step, request.session, digest_of(request))


@dataclass(slots=True)
class Journal:
    """Received replies, in a folder that only its owner can read.

    Stored replies are returned again, in the order of runs. EngineError if another process uses the folder.
    """

    folder: Path
    runs: int = 0
    taken_up: int = 0
    _run: Path = Path()
    _sessions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._hold()
        except OSError as error:
            raise self._unwritable(error) from error

    def _hold(self) -> None:
        place = self.folder.resolve()
        # a lock belongs to an open file, not to a process: opening it twice would block this process
        if place in _HELD and (place / LOCK).exists():
            _HELD[place] = (_HELD[place][0], self)
            return
        file = open(place / LOCK, "ab")  # noqa: SIM115
        if not lock_file(file):
            file.close()
            raise EngineError(
                f"the journal '{self.folder}' is in use by another process. Two analyses would mix their "
                "replies. Wait until it has ended, or use another folder"
            )
        _HELD[place] = (file, self)

    def _check_held(self) -> None:
        if _HELD[self.folder.resolve()][1] is not self:
            raise EngineError(
                f"the journal '{self.folder}' was opened again after this partition was made; use the newer "
                "one"
            )

    @property
    def kept(self) -> str:
        """Say where a refusal is stored, and how to repeat the request."""
        return (
            f"stored in the journal '{self.folder}'; to repeat the request after a change at the site, use "
            "another"
        )

    def begin_run(self) -> None:
        """Open the folder of the next run of a protocol; a run in a lost session is set aside first."""
        self._check_held()
        self.runs += 1
        self._run = self.folder / f"run-{self.runs:04d}"
        try:
            if self._run.exists() and self._sessions_of(self._run) & self._lost():
                self._run.rename(self._place_aside(self._run.name))
            self._run.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def begin_round(self, number: int, requests: Sequence[Request]) -> list[Request]:
        """Record the requests of a round; for a round that was begun before, use its earlier sessions.

        EngineError if the earlier requests were different.
        """
        self._check_held()
        path = self._run / f"{number:05d}.json"
        if path.exists():
            return self._begun_before(number, requests, self._read(path, tuple[JournalEntry, ...]))
        for request in requests:
            self._sessions.setdefault(request.session, request.session)
        requests = [self._as_then(request) for request in requests]
        # before sending: a site answers a turn once, and the random numbers are lost with the process
        for place, request in enumerate(requests):
            if _drawn(request) & request.arrays.keys():
                self._write(self._path(number, place, "ask"), pack_request(request))
        self._write(path, to_json(tuple(map(JournalEntry.of, requests))).encode())
        return requests

    def _begun_before(
        self, number: int, requests: Sequence[Request], then: Sequence[JournalEntry]
    ) -> list[Request]:
        """Restore the earlier sessions and random numbers, and compare the rest with the earlier requests."""
        for request, requested in zip(requests, then, strict=False):
            if self._sessions.setdefault(request.session, requested.session) != requested.session:
                raise EngineError(f"the journal '{self.folder}' mixes two attempts; use another folder")
        requests = [self._as_then(request) for request in requests]
        now = tuple(map(JournalEntry.of, requests))
        if now != then:
            places = range(max(len(now), len(then)))
            place = next(i for i in places if now[i : i + 1] != then[i : i + 1])
            before, today = ([list(row[:3]) for row in rows[place : place + 1]] for rows in (then, now))
            what = f"now the request is {today}"
            if before == today:
                what = "now with other numbers or texts (an analysis that draws random numbers needs a seed)"
            raise EngineError(
                f"the journal '{self.folder}' belongs to another analysis: round {number + 1} of run "
                f"{self.runs} requested {before}, {what}. Use another folder"
            )
        for place, request in enumerate(requests):
            if _drawn(request) & request.arrays.keys():
                requests[place] = unpack_request(self._path(number, place, "ask").read_bytes())
        return requests

    def _as_then(self, request: Request) -> Request:
        """Replace the present session by the earlier one."""
        session = self._sessions.get(request.session, request.session)
        # Session names are random; the agreement on keys has its own in its text.
        text = (
            request.text.replace(request.session, session) if len(session) >= LEAST_REPLACED else request.text
        )
        return replace(request, session=session, text=text)

    def read(self, number: int, place: int) -> bytes | None:
        """Return a stored reply."""
        path = self._path(number, place)
        if not path.exists():
            return None
        self.taken_up += 1
        return path.read_bytes()

    def keep(self, number: int, place: int, answer: bytes) -> None:
        """Store a reply."""
        self._write(self._path(number, place), answer)

    def lose(self, sessions: Set[str]) -> None:
        """Never return a run in these sessions again."""
        self._write(self.folder / LOST, to_json(sorted(self._lost() | sessions)).encode())

    def lose_run(self) -> None:
        """Never return a run in this run's sessions again: an owner's decision changes the replies."""
        self.lose(self._sessions_of(self._run))

    def _lost(self) -> set[str]:
        path = self.folder / LOST
        return set(self._read(path, tuple[str, ...])) if path.exists() else set()

    def _sessions_of(self, run: Path) -> set[str]:
        rounds = (self._read(path, tuple[JournalEntry, ...]) for path in run.glob("[0-9]*.json"))
        return {request.session for requests in rounds for request in requests}

    def _place_aside(self, name: str) -> Path:
        for number in count(1):
            aside = self.folder / f"void-{number}"
            if not (aside / name).exists():
                aside.mkdir(mode=0o700, exist_ok=True)
                return aside / name
        raise AssertionError

    def _path(self, number: int, place: int, kind: str = "reply") -> Path:
        return self._run / f"{number:05d}-{place:03d}.{kind}"

    def _read(self, path: Path, kind: type[T]) -> T:
        where = f"'{path}' is damaged; start again with another journal folder"
        return from_json(kind, path.read_bytes(), where, EngineError)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_atomic(path, content)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> EngineError:
        return EngineError(
            f"the journal '{self.folder}' cannot be written ({error.strerror}); its entries are complete. "
            "Free disk space and run the analysis again"
        )


def digest_of(request: Request) -> str:
    """Return the SHA-256 of a request without its random parts."""
    arrays = {name: array for name, array in request.arrays.items() if name not in _drawn(request)}
    return hashlib.sha256(pack_request(replace(request, arrays=arrays, turn=None))).hexdigest()


def _drawn(request: Request) -> set[str]:
    """Names of a request's arrays that the coordinator may have drawn: encrypted values look random."""
    step = FAMILIES.get(request.family, {}).get(request.step)
    return set() if step is None else {n for n, line in step.takes.items() if line.kind == "sealed"}
