"""Sites in other processes: doors at a distance, and a journal from which a run is taken up again.

A carrier takes the bytes of a question to a site and brings those of the answer. What the sites answered is
kept, where a journal is given, before the protocol sees it, and so is what the coordinator draws for a site.
An interrupted analysis that is run again is handed what was kept, and goes on where it stopped.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol, runtime_checkable

from fedstat.errors import ConsentError, EngineError, FedstatError, MessageError, SessionError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.carry.heads import KeptHeads
from fedstat.federation.carry.journal import Journal
from fedstat.federation.door.site import SESSIONS_KEPT, Site
from fedstat.federation.message import Ask, Reply, pack_ask, pack_refusal, unpack_ask, unpack_reply
from fedstat.federation.rounds.engine import Fit, RoundEngine, Rounds, enter

NUMBER_LENGTH = 32
UNNUMBERED = "a question without its turn is the only one of its session; ask by a RemoteEngine"


def number_of(request: bytes) -> str:
    """Name a question for its way: the same question has the same number, whatever the clock says."""
    return hashlib.sha256(request).hexdigest()[:NUMBER_LENGTH]


class Carrier(Protocol):
    """Brings questions to sites."""

    def carry(self, site: str, request: bytes) -> bytes:
        """Return the site's answer; EngineError where it was not reached, or did not answer in time."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A carrier that has something to end."""

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteSite:
    """An institution in another process."""

    name: str
    carrier: Carrier

    def answer(self, request: bytes) -> bytes:
        """Have one packed ask answered."""
        return self.carrier.carry(self.name, request)


class SiteServer:
    """A site behind a carrier: answers everything, with a refusal where it must, and nothing twice."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._last: dict[str, tuple[bytes, bytes]] = {}
        self._lock = Lock()

    def answer(self, request: bytes, asker: str = "") -> bytes:
        """Answer who has this fingerprint; the last question of a session again gets the same answer."""
        digest = hashlib.sha256(request).digest()
        with self._lock:
            try:
                ask = unpack_ask(request)
            except MessageError:
                return self._answer(request, asker)  # the site says why, and enters it
            asked, kept = self._last.get(ask.session, (b"", b""))
            if asked == digest:
                return kept
            # what entered no account was not answered, and is computed when it comes again
            before = self.site.account.rounds(ask.session)
            if ask.turn is None and before:
                return pack_refusal(self.site.name, MessageError(f"{self.site.name}: {UNNUMBERED}"))
            answer = self._answer(request, asker)
            if self.site.account.rounds(ask.session) > before:
                self._keep(ask.session, digest, answer)
            return answer

    def _keep(self, session: str, digest: bytes, answer: bytes) -> None:
        self._last.pop(session, None)
        while len(self._last) >= SESSIONS_KEPT:
            del self._last[next(iter(self._last))]
        self._last[session] = (digest, answer)

    def _answer(self, request: bytes, asker: str) -> bytes:
        try:
            return self.site.answer(request, asker)
        except FedstatError as error:
            return pack_refusal(self.site.name, error)
        except Exception as error:
            # What went wrong may quote values: its type is all that is told.
            where = f"{self.site.name}: failed ({type(error).__name__}) outside any step; see its own log"
            return pack_refusal(self.site.name, MessageError(where))


class RemoteEngine(RoundEngine):
    """Sites in other processes; those of one round are asked side by side.

    Every question has its turn in its session, and a site answers each turn once. Where it is not known
    whether a question was answered, its session has ended here; with a journal the same analysis goes on.
    The heads of the sites' accounts are kept after every run.
    """

    def __init__(
        self,
        sites: Mapping[str, RemoteSite],
        journal: Journal | None = None,
        heads: KeptHeads | None = None,
    ) -> None:
        self._sites = dict(sites)
        self._journal = journal
        self._heads = heads
        self._number = 0
        self._turns: Counter[tuple[str, str]] = Counter()
        self._open: set[tuple[str, str]] = set()
        # Kept between rounds: a carrier may hold one connection per thread.
        self._pool = ThreadPoolExecutor(max_workers=max(len(self._sites), 1), thread_name_prefix="site")

    def run(self, protocol: Rounds[Fit], ledger: Ledger) -> Fit:
        """Run a protocol; see :meth:`RoundEngine.run`."""
        try:
            fit = super().run(protocol, ledger)
        except ConsentError:
            if self._journal is not None:
                self._journal.lose_run()
            raise
        if self._heads is not None and ledger.receipt is not None:
            self._heads.take(ledger.receipt)
        return fit

    def close(self) -> None:
        """Close the carriers that can be closed, such as the job of an analysis over NVIDIA FLARE."""
        # one carrier may serve many sites
        for carrier in {id(site.carrier): site.carrier for site in self._sites.values()}.values():
            if isinstance(carrier, Closing):
                carrier.close()

    def _begin_run(self) -> None:
        if self._journal is not None:
            self._journal.begin_run()
        self._number = 0

    def _round(self, asks: Sequence[Ask], ledger: Ledger) -> list[Reply]:
        if self._journal is not None:
            asks = self._journal.begin_round(self._number, asks)
        places = self._by_site(asks)
        outcomes: dict[int, Reply | FedstatError] = {}

        def visit(site: str) -> None:
            # One site's questions of a round in their order; after a failure the rest are not asked.
            for place in places[site]:
                try:
                    outcomes[place] = self._one(asks[place], place)
                except FedstatError as error:
                    outcomes[place] = error
                    return

        list(self._pool.map(visit, places))
        replies, errors = list[Reply](), list[tuple[Ask, FedstatError]]()
        for place, outcome in sorted(outcomes.items()):
            # All that was answered is entered, whoever else did not answer.
            enter(asks[place], outcome, ledger)
            if isinstance(outcome, FedstatError):
                errors.append((asks[place], outcome))
            else:
                replies.append(outcome)
        if errors:
            raise self._explained(errors)
        self._number += 1
        return replies

    def _by_site(self, asks: Sequence[Ask]) -> dict[str, list[int]]:
        """Places of each site's questions in a round, all of which may be asked."""
        places, left_open = dict[str, list[int]](), {session for session, _ in self._open}
        for place, ask in enumerate(asks):
            if ask.site not in self._sites:
                raise MessageError(f"no site '{ask.site}'; there are {sorted(self._sites)}")
            # its site may have answered: the same turn again would be refused there, or answered twice
            if ask.session in left_open:
                raise EngineError(
                    f"'{ask.site}': an earlier question of this model was left open; {self._how_to_go_on()}"
                )
            places.setdefault(ask.site, []).append(place)
        return places

    def _one(self, ask: Ask, place: int) -> Reply:
        """Have one question answered, by the journal or by the site."""
        key = (ask.session, ask.site)
        kept = None if self._journal is None else self._journal.read(self._number, place)
        # open until an answer is read whole: a failure in between leaves it unknown whether the site answered
        self._open.add(key)
        if kept is None:
            answer = self._sites[ask.site].answer(pack_ask(replace(ask, turn=self._turns[key] + 1)))
        else:
            answer = kept
        refusal: FedstatError | None = None
        try:
            reply = unpack_reply(answer)
        except FedstatError as error:
            if isinstance(error, EngineError | SessionError):
                raise  # the site cannot go on in this session, and would not say the same again
            refusal = error if self._journal is None else type(error)(f"{error} ({self._journal.kept})")
        if kept is None and self._journal is not None:
            self._journal.keep(self._number, place, answer)
        self._turns[key] += 1
        self._open.discard(key)
        if refusal is not None:
            raise refusal
        return reply

    def _explained(self, errors: Sequence[tuple[Ask, FedstatError]]) -> FedstatError:
        """Say of a failed round how to go on; runs in a session that a site has lost are given up."""
        lost = {ask.session for ask, error in errors if isinstance(error, SessionError)}
        if lost and self._journal is not None:
            self._journal.lose(lost)
        # a lost session goes first: no other error tells that the runs in it are void
        first = next((e for _, e in errors if isinstance(e, SessionError)), errors[0][1])
        if isinstance(first, SessionError) and self._journal is not None:
            return SessionError(
                f"{first}: run the same analysis again with the journal '{self._journal.folder}', where the "
                "runs of this session are set aside; they are asked anew, and all others taken up"
            )
        if isinstance(first, EngineError):
            return EngineError(f"{first} (round {self._number + 1}); {self._how_to_go_on()}")
        return first

    def _how_to_go_on(self) -> str:
        gone = "without a site that is gone for good by ClientPartition.connect(..., without=[...])"
        if self._journal is None:
            return f"no journal was given, so that the model must be made again with from_formula; {gone}"
        return (
            f"{self._number} rounds of this run are kept in '{self._journal.folder}': run the same analysis "
            f"again with this journal to go on; {gone} and another journal"
        )
