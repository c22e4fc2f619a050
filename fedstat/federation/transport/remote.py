"""Sites in other processes, and the engine that reaches them.

A transport takes the bytes of a request to a site and returns those of the reply. With a journal, the sites'
replies are stored before the protocol sees them, and so are the coordinator's random numbers for a site. An
interrupted analysis that is run again receives the stored replies, and continues where it stopped.

All requests of a round to one site are in one message (:mod:`fedstat.federation.message`), since a message
may take a night. A fit of GLORE with masks needs these messages:

==========================================================  ============================================
message to each site                                        requests in it
==========================================================  ============================================
connect                                                     schema; head of its ledger, if one is known
from_formula                                                levels (one more message for ``scale(x)``)
fit: keys                                                   identity, fresh key
fit: opening                                                others' keys, rows, moments, response, own fit
fit: iteration, once per evaluation                         scores and information
fit: final sums, separate if the last was not foreseen      likelihood
fit: receipt                                                statement
==========================================================  ============================================
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock
from typing import Protocol, runtime_checkable

from fedstat.errors import ConsentError, EngineError, FedstatError, MessageError, PolicyError, SessionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.site import RECEIPT_FAMILY, Site
from fedstat.federation.message import (
    NO_PURPOSE,
    RUNS,
    BundledReply,
    InstalledVersion,
    Purpose,
    Reply,
    Request,
    RequestMessage,
    bundle,
    pack_refusal,
    pack_request,
    unbundle,
    unpack_reply,
)
from fedstat.federation.protocols.engine import Fit, FitProtocol, RoundEngine, enter
from fedstat.federation.protocols.receipts import RECALL
from fedstat.federation.transport.analysis_notes import NoteKeeper
from fedstat.federation.transport.journal import Journal, LedgerCheckpoints
from fedstat.federation.transport.mailbox import NUMBER_LENGTH, BusyError
from fedstat.federation.transport.session_store import SessionFolder

UNNUMBERED = "a request without a turn number must be the only one of its session; use a RemoteEngine"


def request_number(request: bytes) -> str:
    """Return the number of a request: the same request has the same number at any time."""
    return hashlib.sha256(request).hexdigest()[:NUMBER_LENGTH]


class Transport(Protocol):
    """Brings requests to sites; a transport with `bundles` set takes several in one message."""

    def send(self, site: str, request: bytes) -> bytes:
        """Return the site's reply; EngineError if the site was not reached or did not answer in time."""
        ...


@runtime_checkable
class ClosableTransport(Protocol):
    """A transport that must be closed at the end."""

    def close(self) -> None:
        """Close the transport."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteSite:
    """A site in another process."""

    name: str
    transport: Transport

    def answer(self, request: bytes) -> bytes:
        """Answer one packed request."""
        return self.transport.send(self.name, request)

    def answer_all(self, requests: Sequence[bytes]) -> list[bytes]:
        """Answer packed requests in one message.

        Fewer replies are possible; the last is then a refusal.
        """
        return unbundle(self.transport.send(self.name, bundle(requests)))


class SiteServer:
    """A site behind a transport: it answers every request, with a refusal if necessary, and none twice."""

    def __init__(self, site: Site) -> None:
        self.site = site
        site.lets_sessions_wait = True
        self._last: dict[str, dict[bytes, BundledReply]] = {}
        self._sessions = SessionFolder.of(site)
        self._lock = Lock()

    def answer(self, request: bytes, client: str = "", written: str = "") -> bytes:
        """Answer the owner of this fingerprint; the last message of a session gets the same replies again.

        `written` is the time of the signature, as the client states it. BusyError if the message begins a
        session for which there is no room.
        """
        with self._lock:
            try:
                questions = unbundle(request)
            except MessageError as error:
                return pack_refusal(self.site.name, MessageError(f"{self.site.name}: {error}"))
            self._check_room(questions[0])
            answers, begun = list[bytes](), set[str]()
            for question in questions:
                answer = self._answer_one(question, (client, written), begun)
                answers.append(answer.packed)
                if answer.refused:
                    break
            if self._sessions is not None:  # before anything is released
                for session in begun:
                    self._sessions.keep(session, self._last[session])
            return bundle(answers) if len(questions) > 1 else answers[0]

    def _check_room(self, request: bytes) -> None:
        """Let a message wait that begins a session, rather than end the fit of another analyst."""
        try:
            requested = RequestMessage(request).request
        except MessageError:  # the site states the reason and records it
            return
        if not self.site.has_room(requested):
            raise BusyError(f"{self.site.name}: all {self.site.max_sessions} sessions are in use")

    def _answer_one(self, request: bytes, client: tuple[str, str], begun: set[str]) -> BundledReply:
        """Answer one request of a message, which has `begun` to answer in these sessions."""
        message, digest = RequestMessage(request), hashlib.sha256(request).digest()
        try:
            requested = message.request
        except MessageError:
            return self._query_site(message, client)  # the site states the reason and records it
        if self._sessions is not None and requested.session not in self._last:
            self._last.update(self._sessions.take_up(requested.session))
        kept = self._last.get(requested.session, {}).get(digest)
        # a session of another client is refused by the site, also where it repeats a request
        if kept is not None and not self.site.is_foreign(requested, client[0]):
            begun.add(requested.session)
            return kept
        # a request without a ledger entry has no reply, and is computed when it comes again
        before = self.site.site_ledger.rounds(requested.session)
        if requested.turn is None and before:
            return refusal(self.site.name, MessageError(f"{self.site.name}: {UNNUMBERED}"))
        answer = self._query_site(message, client)
        if self.site.site_ledger.rounds(requested.session) > before:
            self._keep(requested.session, digest, answer, begun)
        return answer

    def _keep(self, session: str, digest: bytes, answer: BundledReply, begun: set[str]) -> None:
        """Keep a reply together with the others of its message, and only those."""
        earlier = self._last.pop(session, {}) if session in begun else {}
        self._last.pop(session, None)
        while len(self._last) >= self.site.max_sessions:
            del self._last[next(iter(self._last))]
        begun.add(session)
        self._last[session] = {**earlier, digest: answer}

    def _query_site(self, message: RequestMessage, client: tuple[str, str]) -> BundledReply:
        try:
            return BundledReply(self.site.answer(message, *client))
        except FedstatError as error:
            return refusal(self.site.name, error)
        except Exception as error:
            # The error may quote values: only its type is released.
            where = f"{self.site.name}: failed ({type(error).__name__}) outside any step; see its own log"
            return refusal(self.site.name, MessageError(where))


def refusal(site: str, error: FedstatError) -> BundledReply:
    """Answer with an error."""
    return BundledReply(pack_refusal(site, error), True)


class RemoteEngine(RoundEngine):
    """Sites in other processes; the sites of one round are addressed in parallel.

    Every request has its turn in its session, and a site answers each turn once. If it is unknown whether a
    request was answered, its session has ended here; with a journal the same analysis can continue. The heads
    of the sites' ledgers are kept after every run.
    """

    def __init__(
        self,
        sites: Mapping[str, RemoteSite],
        journal: Journal | None = None,
        heads: LedgerCheckpoints | None = None,
        purpose: Purpose = NO_PURPOSE,
        notes: NoteKeeper | None = None,
    ) -> None:
        self._sites = dict(sites)
        self.installed: Mapping[str, InstalledVersion] = {}
        self._journal = journal
        self._heads = heads
        self.purpose = purpose
        self._notes = notes
        self._number = 0
        self._turns: Counter[tuple[str, str]] = Counter()
        self._open: set[tuple[str, str]] = set()
        # Kept between rounds: a transport may hold one connection per thread.
        self._pool = ThreadPoolExecutor(max_workers=max(len(self._sites), 1), thread_name_prefix="site")

    def run(self, protocol: FitProtocol[Fit], ledger: Ledger) -> Fit:
        """Run a protocol; see :meth:`RoundEngine.run`."""
        if self._notes is not None:
            self._notes.begin()
        try:
            fit = super().run(protocol, ledger)
        except FedstatError as error:
            if isinstance(error, ConsentError) and self._journal is not None:
                self._journal.lose_run()
            if self._notes is not None:
                self._notes.end(error)
            raise
        if self._notes is not None:
            self._notes.end()
        if self._heads is not None and ledger.receipt is not None:
            self._heads.take(ledger.receipt)
        return fit

    def close(self) -> None:
        """Close the transports that can be closed, such as the job of an analysis over NVIDIA FLARE."""
        # one transport may serve many sites
        for transport in {id(site.transport): site.transport for site in self._sites.values()}.values():
            if isinstance(transport, ClosableTransport):
                transport.close()

    def _begin_run(self) -> None:
        if self._journal is not None:
            self._journal.begin_run()
        self._number = 0

    def _round(self, requests: Sequence[Request], ledger: Ledger) -> list[Reply]:
        if self._journal is not None:
            kept = iter(
                self._journal.begin_round(
                    self._number, [request for request in requests if self._keeps(request)]
                )
            )
            requests = [next(kept) if self._keeps(request) else request for request in requests]
        places = self._by_site(requests)
        outcomes: dict[int, Reply | FedstatError] = {}

        def visit(site: str) -> None:
            # One site's requests of a round, in order; after a failure the rest are not sent.
            left = deque(places[site])
            try:
                for place, answer, kept in self._answers(site, requests, places[site]):
                    outcomes[place] = self._take(requests[place], place, answer, kept)
                    left.popleft()
                    if isinstance(outcomes[place], FedstatError):
                        break
            except FedstatError as error:
                outcomes[left[0]] = error
            else:
                self._open.difference_update((requests[place].session, site) for place in places[site])

        list(self._pool.map(visit, places))
        replies, errors = list[Reply](), list[tuple[Request, FedstatError]]()
        for place, outcome in sorted(outcomes.items()):
            # All replies are recorded, even if other sites did not answer.
            enter(requests[place], outcome, ledger)
            if isinstance(outcome, FedstatError):
                errors.append((requests[place], outcome))
            else:
                replies.append(outcome)
                if self._notes is not None:
                    self._notes.take(requests[place], outcome)
        if errors:
            if all(isinstance(error, PolicyError) for _, error in errors):
                self._number += 1  # a protocol may go on without this round, which is stored as refused
            raise self._explained(errors)
        self._number += 1
        return replies

    def _keeps(self, request: Request) -> bool:
        """Return whether replies come from the journal.

        It would also answer for a site restored meanwhile.
        """
        return self._journal is not None and (request.family, request.step) != (RECEIPT_FAMILY, RECALL)

    def _by_site(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Positions of each site's requests in a round, all of which may be sent."""
        places, left_open = dict[str, list[int]](), {session for session, _ in self._open}
        for place, request in enumerate(requests):
            if request.site not in self._sites:
                raise MessageError(f"no site '{request.site}'; there are {sorted(self._sites)}")
            self._check_installed(request)
            # its site may have answered: a repeated turn would be refused there, or answered twice
            if request.session in left_open:
                raise EngineError(
                    f"'{request.site}': an earlier request of this model has no known reply; "
                    f"{self._how_to_go_on()}"
                )
            places.setdefault(request.site, []).append(place)
        return places

    def _check_installed(self, request: Request) -> None:
        """Send no request if a site lacks the model family, according to its own list."""
        there = self.installed.get(request.site)
        if there is not None and request.family not in there.families:
            raise MessageError(
                f"{request.site}: its fedstat {there.version} has no family '{request.family}', which this "
                f"model needs; it has {', '.join(there.families)}. This process has {RUNS}: install it at "
                "the site as well, and restart the site's service"
            )

    def _answers(
        self, site: str, requests: Sequence[Request], places: Sequence[int]
    ) -> Iterator[tuple[int, bytes, bool]]:
        """Return a site's replies to its requests of a round, in order, and whether the journal had them."""
        new = []
        for place in places:
            journal = self._journal if self._keeps(requests[place]) else None
            kept = None if journal is None else journal.read(self._number, place)
            if kept is None:
                new.append(place)
            else:
                yield place, kept, True
        remote = self._sites[site]
        together = [new] if getattr(remote.transport, "bundles", False) else [[place] for place in new]
        for message in filter(None, together):
            turns, numbered = self._turns.copy(), []
            for place in message:
                key = (requests[place].session, site)
                # open until a reply is read: after a failure it is unknown whether the site answered
                self._open.add(key)
                turns[key] += 1
                request = replace(requests[place], turn=turns[key], purpose=self.purpose)
                numbered.append(pack_request(request))
            answers = self._reach(remote, numbered)
            yield from ((place, answer, False) for place, answer in zip(message, answers, strict=False))
            # nothing is read after a refusal
            if len(answers) < len(message):
                raise MessageError(f"'{site}' gave {len(answers)} replies to {len(message)} requests")

    def _take(self, request: Request, place: int, answer: bytes, kept: bool) -> Reply | FedstatError:
        """Read a reply, a result or a refusal, and store it."""
        outcome: Reply | FedstatError
        try:
            outcome = unpack_reply(answer)
        except (EngineError, SessionError):
            raise  # the site cannot continue this session, and would reply differently
        except FedstatError as error:
            if self._journal is not None:
                text = f"{error} ({self._journal.kept})"
                error = error.with_message(text)
            outcome = error
        if not kept and self._journal is not None and self._keeps(request):
            self._journal.keep(self._number, place, answer)
        self._turns[request.session, request.site] += 1
        return outcome

    def _reach(self, remote: RemoteSite, numbered: Sequence[bytes]) -> list[bytes]:
        """Send a message to a site; an error names the site that was not reached."""
        try:
            return remote.answer_all(numbered)
        except EngineError as error:
            error.sites = (remote.name,)
            raise

    def _explained(self, errors: Sequence[tuple[Request, FedstatError]]) -> FedstatError:
        """Explain after a failed round how to continue.

        Runs in a session that a site has lost are set aside.
        """
        lost = {request.session for request, error in errors if isinstance(error, SessionError)}
        if lost and self._journal is not None:
            self._journal.lose(lost)
        # a lost session goes first: no other error shows that its runs are void
        first = next((e for _, e in errors if isinstance(e, SessionError)), errors[0][1])
        if isinstance(first, SessionError):
            if self._journal is not None:
                first = SessionError(
                    f"{first}: run the same analysis again with the journal '{self._journal.folder}'. The "
                    "runs of this session are set aside there and repeated; all others are reused"
                )
            first.sites = tuple(request.site for request, error in errors if isinstance(error, SessionError))
        if isinstance(first, EngineError):
            explained = first.with_message(f"{first} (round {self._number + 1}); {self._how_to_go_on()}")
            away = [error.sites for _, error in errors if isinstance(error, EngineError)]
            # A local error, such as a full disk, does not mean that a site is absent.
            explained.sites = tuple(dict.fromkeys(chain.from_iterable(away))) if all(away) else ()
            return explained
        return first

    def _how_to_go_on(self) -> str:
        gone = (
            "If a site is lost for good, leave it out by ClientPartition.connect(..., without=[...]), or let "
            "a GLM or FedAvg go on without lost sites by connect(..., quorum=fewest remaining sites)"
        )
        if self._journal is None:
            return f"without a journal, make the model again with from_formula. {gone}"
        return (
            f"{self._number} rounds of this run are stored in '{self._journal.folder}'. Run the same "
            f"analysis again with this journal to continue. {gone}, and use another journal"
        )
