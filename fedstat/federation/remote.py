"""Sites in other processes: doors at a distance, and a journal from which a run is taken up again.

A carrier takes the bytes of a question to a site and brings those of the answer. What the sites answered is
kept, where a journal is given, before the protocol sees it. A protocol draws nothing that its answers depend
on, so that an interrupted analysis that is run again is handed the kept answers and goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Protocol

from fedstat.errors import EngineError, FedstatError, MessageError
from fedstat.federation.engine import RoundEngine, enter, enter_refusal
from fedstat.federation.ledger import Ledger
from fedstat.federation.message import Ask, Reply, pack_ask, pack_refusal, unpack_reply
from fedstat.federation.site import Site

ANSWERS_KEPT = 64


class Carrier(Protocol):
    """Brings questions to sites."""

    def carry(self, site: str, request: bytes) -> bytes:
        """Return the site's answer.

        Raises
        ------
        EngineError
            The site was not reached, or did not answer in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class RemoteSite:
    """An institution in another process.

    Parameters
    ----------
    name : str
    carrier : Carrier
    """

    name: str
    carrier: Carrier

    def answer(self, request: bytes) -> bytes:
        """Have one packed ask answered."""
        return self.carrier.carry(self.name, request)


class SiteServer:
    """A site behind a carrier: answers everything, with a refusal where it must, and nothing twice.

    Parameters
    ----------
    site : Site
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self._answers: dict[str, bytes] = {}
        self._lock = Lock()

    def answer(self, number: str, request: bytes) -> bytes:
        """Answer a question; the same number again is handed the same answer, and nothing is computed."""
        key = hashlib.sha256(number.encode() + b"\0" + request).hexdigest()
        with self._lock:
            if key not in self._answers:
                while len(self._answers) >= ANSWERS_KEPT:
                    del self._answers[next(iter(self._answers))]
                self._answers[key] = self._answer(request)
            return self._answers[key]

    def _answer(self, request: bytes) -> bytes:
        try:
            return self.site.answer(request)
        except FedstatError as error:
            return pack_refusal(self.site.name, error)
        except Exception as error:
            # What went wrong may quote values: its type is all that is told.
            where = f"{self.site.name}: failed ({type(error).__name__}) outside any step; see its own log"
            return pack_refusal(self.site.name, MessageError(where))


@dataclass(slots=True)
class Journal:
    """Answers that were received, in a folder that only its owner can read.

    Parameters
    ----------
    folder : path
        Made where it is absent. Answers that are found there are handed out again, in the order of runs.
    """

    folder: Path
    runs: int = 0
    taken_up: int = 0
    _sessions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def next_run(self) -> Path:
        """Folder of the next run of a protocol."""
        self.runs += 1
        path = self.folder / f"run-{self.runs:04d}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def begin_round(self, run: Path, number: int, asks: Sequence[Ask]) -> list[Ask]:
        """Write down who is asked what; of a round that was begun before, take the sessions of then.

        Raises
        ------
        EngineError
            Other questions were asked then.
        """
        path = run / f"{number:05d}.json"
        now = [[ask.site, ask.family, ask.step, ask.session] for ask in asks]
        if path.exists():
            then = json.loads(path.read_text())
            if [line[:3] for line in then] != [line[:3] for line in now]:
                raise EngineError(
                    f"the journal '{self.folder}' belongs to another analysis: round {number + 1} of run "
                    f"{self.runs} asked {then[0][:3]}, now {now[0][:3]} is asked. Give another folder"
                )
            self._sessions.update({new[3]: old[3] for new, old in zip(now, then, strict=True)})
        asks = [replace(ask, session=self._sessions.get(ask.session, ask.session)) for ask in asks]
        if not path.exists():
            self._write(path, json.dumps([[a.site, a.family, a.step, a.session] for a in asks]).encode())
        return asks

    def read(self, run: Path, number: int, place: int) -> bytes | None:
        """Return an answer that was kept."""
        path = self._path(run, number, place)
        if not path.exists():
            return None
        self.taken_up += 1
        return path.read_bytes()

    def keep(self, run: Path, number: int, place: int, answer: bytes) -> None:
        """Keep an answer."""
        self._write(self._path(run, number, place), answer)

    def _path(self, run: Path, number: int, place: int) -> Path:
        return run / f"{number:05d}-{place:03d}.reply"

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content)
        except OSError as error:
            raise EngineError(
                f"the journal '{self.folder}' cannot be written ({error.strerror}); what it holds is whole. "
                "Make room, and run the analysis again"
            ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class RemoteEngine(RoundEngine):
    """Sites in other processes; those of one round are asked side by side.

    Parameters
    ----------
    sites : mapping of str to RemoteSite
    journal : Journal, optional
    """

    def __init__(self, sites: Mapping[str, RemoteSite], journal: Journal | None = None) -> None:
        self._sites = dict(sites)
        self._journal = journal
        self._run: Path | None = None
        self._number = 0
        # Kept between rounds: a carrier may hold one connection per thread.
        self._pool = ThreadPoolExecutor(max_workers=max(len(self._sites), 1), thread_name_prefix="site")

    def _begin_run(self) -> None:
        self._run = None if self._journal is None else self._journal.next_run()
        self._number = 0

    def _round(self, asks: Sequence[Ask], ledger: Ledger) -> list[Reply]:
        if self._journal is not None and self._run is not None:
            asks = self._journal.begin_round(self._run, self._number, asks)
        places: dict[str, list[int]] = {}
        for place, ask in enumerate(asks):
            if ask.site not in self._sites:
                raise MessageError(f"no site '{ask.site}'; there are {sorted(self._sites)}")
            places.setdefault(ask.site, []).append(place)
        outcomes: dict[int, Reply | FedstatError] = {}

        def visit(site: str) -> None:
            # One site's questions of a round in their order; after a failure the rest are not asked.
            for place in places[site]:
                try:
                    outcomes[place] = self._one(asks[place], place)
                except FedstatError as error:
                    outcomes[place] = self._explained(error)
                    return

        list(self._pool.map(visit, places))
        self._number += 1
        replies = []
        for place, outcome in sorted(outcomes.items()):
            if isinstance(outcome, FedstatError):
                enter_refusal(asks[place], outcome, ledger)
                raise outcome
            enter(asks[place], outcome, ledger)
            replies.append(outcome)
        return replies

    def _one(self, ask: Ask, place: int) -> Reply:
        journal, run = self._journal, self._run
        if journal is not None and run is not None:
            kept = journal.read(run, self._number, place)
            if kept is not None:
                return unpack_reply(kept)
        answer = self._sites[ask.site].answer(pack_ask(ask))
        reply = unpack_reply(answer)  # a refusal is raised, and not kept
        if journal is not None and run is not None:
            journal.keep(run, self._number, place, answer)
        return reply

    def _explained(self, error: FedstatError) -> FedstatError:
        if not isinstance(error, EngineError):
            return error
        if self._journal is None:
            how = (
                "no journal was given, so that the fit must be started again; without a site that is gone "
                "for good by ClientPartition.connect(..., without=[...])"
            )
        else:
            how = (
                f"{self._number} rounds of this run are kept in '{self._journal.folder}': run the same "
                "analysis again with this journal to go on"
            )
        return EngineError(f"{error} (round {self._number + 1}); {how}")
