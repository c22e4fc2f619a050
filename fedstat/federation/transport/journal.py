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
from fedstat.federation.audit.checkpoints import SignedCheckpoint
from fedstat.federation.audit.receipt import Receipt
from fedstat.federation.crypto.keys import normalize_fingerprint
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.files import lock_file, write_atomic
from fedstat.federation.message import Request, pack_request, unpack_request

# ----------------------------------------------------------------------------------------------------
# Heads of the sites' accounts, as the coordinator keeps them beside its federation.
#
# ::
#
#     heads.json    the newest head that each site has signed, with the key that it was signed with (mode
# 0600)
#
# A site's files can be put back to an earlier state with all their signatures, which the site cannot see by
# itself. What the coordinator keeps of it can, and no other than the site can make it: see
# :mod:`fedstat.federation.audit.checkpoints`. What a site signed since is not covered, up to its next
# statement.

HEADS = "heads.json"


@dataclass(frozen=True, slots=True)
class LedgerCheckpoint:
    """A head, and the fingerprint of the key that it was signed with."""

    key: str
    head: SignedCheckpoint


@dataclass(frozen=True, slots=True)
class LedgerCheckpoints:
    """The file in the coordinator's folder; `fingerprints` are those of the sites' keys."""

    folder: Path
    fingerprints: Mapping[str, str]

    def known(self) -> dict[str, SignedCheckpoint]:
        """Heads of the sites whose key is still the one that is pinned."""
        kept = self._read()
        return {
            site: kept[site].head
            for site, key in self.fingerprints.items()
            if site in kept and kept[site].key == normalize_fingerprint(key)
        }

    def take(self, receipt: Receipt) -> None:
        """Keep the heads that the statements of a run told of.

        SecurityError where one is not signed by its site.
        """
        heads = dict[str, SignedCheckpoint]()
        for site, statement in receipt.statements.items():
            if statement.account is None or site not in self.fingerprints:
                continue
            right = statement.keys.digest.hex() == normalize_fingerprint(self.fingerprints[site])
            if not right or not statement.account.is_of(statement.keys):
                raise SecurityError(f"{site}: the head of its account is not signed with its key")
            heads[site] = statement.account
        self.keep(heads)

    def keep(self, heads: Mapping[str, SignedCheckpoint]) -> None:
        """Keep those that are newer than what is there."""
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
            write_atomic(self.folder / HEADS, to_json(kept | newer).encode())
        except OSError as error:
            raise EngineError(f"'{self.folder / HEADS}' cannot be written ({error.strerror})") from error

    def _read(self) -> dict[str, LedgerCheckpoint]:
        path = self.folder / HEADS
        if not path.exists():
            return {}
        where = f"'{path}' (take it from a backup; without it an account that was put back is not found)"
        return from_json(dict[str, LedgerCheckpoint], path.read_bytes(), where, SecurityError)


# ----------------------------------------------------------------------------------------------------
# Answers that were received, kept so that an interrupted analysis goes on.
#
# ::
#
#     lock                      held by the process whose analysis this is
#     lost.json                 sessions that a site no longer knows
#     run-0002/00003.json       who was asked what in a round, written before anybody is asked
#     run-0002/00003-001.ask    a question that carried drawn numbers, which must not be drawn twice
#     run-0002/00003-001.reply  an answer, or a refusal, written before the protocol sees it
#     void-1/run-0002           a run in a lost session
#
# The keys of masks belong to a session. A site that has lost it draws new ones in a new session, so that
# all runs of the lost session are asked anew, and no answer under old masks meets one under new masks.

T = TypeVar("T")
LOCK, LOST = "lock", "lost.json"
LEAST_REPLACED = 16
_HELD: dict[Path, tuple[IO[bytes], object]] = {}
"""Journals that this process holds, each with whoever opened it last."""


class JournalEntry(NamedTuple):
    """One question of a round, by its address and a digest of what it said."""

    site: str
    family: str
    step: str
    session: str
    digest: str

    @classmethod
    def of(cls, ask: Request) -> JournalEntry:
        """Take down a question."""
        return cls(ask.site, ask.family, ask.step, ask.session, digest_of(ask))


@dataclass(slots=True)
class Journal:
    """Answers that were received, in a folder that only its owner can read.

    What is found there is handed out again, in the order of runs. EngineError where another process has it
    open.
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
        # a lock binds open files, not processes: opened once more, this process would shut out itself
        if place in _HELD and (place / LOCK).exists():
            _HELD[place] = (_HELD[place][0], self)
            return
        file = open(place / LOCK, "ab")  # noqa: SIM115
        if not lock_file(file):
            file.close()
            raise EngineError(
                f"the journal '{self.folder}' is in use by another process, and two analyses would mix their "
                "answers. Wait until it has ended, or give another folder"
            )
        _HELD[place] = (file, self)

    def _check_held(self) -> None:
        if _HELD[self.folder.resolve()][1] is not self:
            raise EngineError(
                f"the journal '{self.folder}' was opened again since this partition was made; use the newer "
                "one"
            )

    @property
    def kept(self) -> str:
        """Where a refusal is kept, and how to be rid of it."""
        return f"kept in the journal '{self.folder}'; to ask again after a change at the site, give another"

    def begin_run(self) -> None:
        """Open the folder of the next run of a protocol; one in a lost session is set aside first."""
        self._check_held()
        self.runs += 1
        self._run = self.folder / f"run-{self.runs:04d}"
        try:
            if self._run.exists() and self._sessions_of(self._run) & self._lost():
                self._run.rename(self._place_aside(self._run.name))
            self._run.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def begin_round(self, number: int, asks: Sequence[Request]) -> list[Request]:
        """Write down who is asked what; of a round that was begun before, take the sessions of then.

        EngineError where other questions were asked then.
        """
        self._check_held()
        path = self._run / f"{number:05d}.json"
        if path.exists():
            return self._begun_before(number, asks, self._read(path, tuple[JournalEntry, ...]))
        for ask in asks:
            self._sessions.setdefault(ask.session, ask.session)
        asks = [self._as_then(ask) for ask in asks]
        # before anybody is asked: a site answers a turn once, and what was drawn is gone with the process
        for place, ask in enumerate(asks):
            if _drawn(ask) & ask.arrays.keys():
                self._write(self._path(number, place, "ask"), pack_request(ask))
        self._write(path, to_json(tuple(map(JournalEntry.of, asks))).encode())
        return asks

    def _begun_before(
        self, number: int, asks: Sequence[Request], then: Sequence[JournalEntry]
    ) -> list[Request]:
        """Take sessions and drawn numbers of then, and hold all else against what was asked."""
        for ask, asked in zip(asks, then, strict=False):
            if self._sessions.setdefault(ask.session, asked.session) != asked.session:
                raise EngineError(f"the journal '{self.folder}' mixes two attempts; give another folder")
        asks = [self._as_then(ask) for ask in asks]
        now = tuple(map(JournalEntry.of, asks))
        if now != then:
            places = range(max(len(now), len(then)))
            place = next(i for i in places if now[i : i + 1] != then[i : i + 1])
            before, today = ([list(row[:3]) for row in rows[place : place + 1]] for rows in (then, now))
            what = f"now {today} is asked"
            if before == today:
                what = "now with other numbers or texts (an analysis that draws random numbers needs a seed)"
            raise EngineError(
                f"the journal '{self.folder}' belongs to another analysis: round {number + 1} of run "
                f"{self.runs} asked {before}, {what}. Give another folder"
            )
        for place, ask in enumerate(asks):
            if _drawn(ask) & ask.arrays.keys():
                asks[place] = unpack_request(self._path(number, place, "ask").read_bytes())
        return asks

    def _as_then(self, ask: Request) -> Request:
        """Put the session of then in the place of the present one."""
        session = self._sessions.get(ask.session, ask.session)
        # Sessions are random; the agreement on keys names its own in its text.
        text = ask.text.replace(ask.session, session) if len(session) >= LEAST_REPLACED else ask.text
        return replace(ask, session=session, text=text)

    def read(self, number: int, place: int) -> bytes | None:
        """Return an answer that was kept."""
        path = self._path(number, place)
        if not path.exists():
            return None
        self.taken_up += 1
        return path.read_bytes()

    def keep(self, number: int, place: int, answer: bytes) -> None:
        """Keep an answer."""
        self._write(self._path(number, place), answer)

    def lose(self, sessions: Set[str]) -> None:
        """Hand out no run in these sessions again."""
        self._write(self.folder / LOST, to_json(sorted(self._lost() | sessions)).encode())

    def lose_run(self) -> None:
        """Hand out no run in the sessions of this one again: an owner who agrees changes the answers."""
        self.lose(self._sessions_of(self._run))

    def _lost(self) -> set[str]:
        path = self.folder / LOST
        return set(self._read(path, tuple[str, ...])) if path.exists() else set()

    def _sessions_of(self, run: Path) -> set[str]:
        rounds = (self._read(path, tuple[JournalEntry, ...]) for path in run.glob("[0-9]*.json"))
        return {asked.session for asks in rounds for asked in asks}

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
        where = f"'{path}' is damaged; start over with another folder as the journal"
        return from_json(kind, path.read_bytes(), where, EngineError)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_atomic(path, content)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> EngineError:
        return EngineError(
            f"the journal '{self.folder}' cannot be written ({error.strerror}); what it holds is whole. "
            "Make room, and run the analysis again"
        )


def digest_of(ask: Request) -> str:
    """SHA-256 of a question without what may have been drawn for it."""
    arrays = {name: array for name, array in ask.arrays.items() if name not in _drawn(ask)}
    return hashlib.sha256(pack_request(replace(ask, arrays=arrays, turn=None))).hexdigest()


def _drawn(ask: Request) -> set[str]:
    """Names of the arrays of a question that the coordinator may have drawn: what is sealed looks random."""
    step = FAMILIES.get(ask.family, {}).get(ask.step)
    return set() if step is None else {n for n, line in step.takes.items() if line.kind == "sealed"}
