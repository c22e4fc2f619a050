"""Engines: they carry the requests of a protocol to the sites, and the replies back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache
from itertools import islice
from typing import Any, Protocol, TypeAlias, TypeVar

from fedstat.errors import EngineError, FedstatError, MessageError, PolicyError, SessionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, RECEIPT_FAMILY, Site
from fedstat.federation.disclosure.threat_statements import one_process_note
from fedstat.federation.message import Reply, Request, pack_request, unpack_reply
from fedstat.progress_line import ProgressLine

Fit = TypeVar("Fit")
Other = TypeVar("Other")
FitProtocol: TypeAlias = Generator[list[Request], list[Reply], Fit]
"""A protocol: yields one round of asks, is sent the replies in the same order, returns a fit."""


class Engine(Protocol):
    """The interface that a model needs of an engine."""

    def run(self, protocol: FitProtocol[Fit], ledger: Ledger) -> Fit:
        """Run a protocol to its end, entering every array into the ledger."""
        ...


class RoundEngine:
    """Runs protocols round by round; a subclass says how the questions of a round are answered."""

    setting = ""
    """The ledger's information on the place of the sites."""

    def run(self, protocol: FitProtocol[Fit], ledger: Ledger) -> Fit:
        """Run a protocol to its end, and return its value; a DisclosureError if a site refuses.

        A refusal is raised in the protocol, which may go on without that round; see :func:`attempt`.

        Replies are passed back in the order of the requests, never in the order of arrival, so that sums over
        sites are the same to the bit on every engine.

        The ledger is written as the messages pass. Messages between the coordinator and the site at which it
        runs (``ledger.at``) leave no site and are not entered, and neither are the sites' statements on their
        releases; the ledger of the site (``ledger.site_ledger``) has all of them.
        """
        ledger.setting = self.setting
        self._begin_run()
        line = ProgressLine("round", quiet=True)
        try:
            requests = next(protocol)
            while True:
                if any(leaves(request, ledger) for request in requests):
                    ledger.begin_round()
                asked = time.monotonic()
                try:
                    replies = self._round(requests, ledger)
                except PolicyError as refusal:
                    requests = protocol.throw(refusal)
                    continue
                finally:
                    ledger.waited += time.monotonic() - asked
                line.step()
                requests = protocol.send(replies)
        except StopIteration as stop:
            fit: Fit = stop.value
            return fit
        finally:
            line.close()

    def _begin_run(self) -> None:
        """Prepare for a run."""

    def _round(self, requests: Sequence[Request], ledger: Ledger) -> list[Reply]:
        """Have the questions of one round answered, in their order, and enter what passed."""
        raise NotImplementedError


def attempt(protocol: FitProtocol[Fit]) -> FitProtocol[Fit | PolicyError]:
    """Run a part of a protocol without which a fit can go on; its value, or the refusal of a site."""
    try:
        return (yield from protocol)
    except PolicyError as refusal:
        return refusal


def side_by_side(first: FitProtocol[Fit], second: FitProtocol[Other]) -> FitProtocol[tuple[Fit, Other]]:
    """Run two protocols at once if neither needs a reply to the other; return both values."""
    requests, ended = [list[Request](), list[Request]()], [list[Any](), list[Any]()]

    def go_on(which: int, protocol: FitProtocol[Any], replies: list[Reply] | None) -> None:
        try:
            requests[which] = next(protocol) if replies is None else protocol.send(replies)
        except StopIteration as stop:
            requests[which], ended[which] = [], [stop.value]

    go_on(0, first, None)
    go_on(1, second, None)
    while not (ended[0] and ended[1]):
        replies = yield requests[0] + requests[1]
        parts = replies[: len(requests[0])], replies[len(requests[0]) :]
        for which, protocol in enumerate((first, second)):
            if not ended[which]:
                go_on(which, protocol, parts[which])
    return ended[0][0], ended[1][0]


class SiteEndpoint(Protocol):
    """Function that answers a packed request: of a site, or of its connection."""

    def answer(self, request: bytes) -> bytes:
        """Return a packed reply."""
        ...


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def site_threads() -> ThreadPoolExecutor:
    """Return a thread for each processor; new ones in each round would keep memory of their own."""
    return ThreadPoolExecutor(processors(), "fedstat site")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=site_threads.cache_clear)

MANY_ROWS = 100_000
"""Rows of a site, on average, from which sites in one process answer in threads; with fewer, threads wait for
each other."""


class LocalEngine(RoundEngine):
    """All sites in one process; every message is packed to bytes and back.

    Sites of many rows answer in threads, as many as there are processors: replies and their order are those
    of one thread, to the bit. In turn, a round ends with the first refusal; in threads, all have answered.
    """

    def __init__(self, sites: Mapping[str, SiteEndpoint]) -> None:
        self._answer_functions: dict[str, Callable[[bytes], bytes]] = {n: s.answer for n, s in sites.items()}
        self._sites = [site for site in sites.values() if isinstance(site, Site)]
        policies = [getattr(site, "policy", None) for site in sites.values()]
        self.setting = one_process_note(policy for policy in policies if isinstance(policy, Policy))

    @property
    def _rows_of_a_site(self) -> float:
        return sum(site.data.table.n_rows for site in self._sites) / max(len(self._sites), 1)

    def _round(self, requests: Sequence[Request], ledger: Ledger) -> list[Reply]:
        by_site: dict[str, list[Request]] = {}
        for request in requests:
            by_site.setdefault(request.site, []).append(request)
        if min(processors(), len(by_site)) < 2 or self._rows_of_a_site < MANY_ROWS:
            return [self._send(request, ledger) for request in requests]
        asked = {
            site: site_threads().submit(copy_context().run, self._ask_in_turn, own)
            for site, own in by_site.items()
        }
        wait(asked.values())  # also where one of them fails
        outcomes = {site: iter(one.result()) for site, one in asked.items()}
        answered = [(request, one) for request in requests for one in islice(outcomes[request.site], 1)]
        for request, outcome in answered:
            enter(request, outcome, ledger)
        refused = [outcome for _, outcome in answered if isinstance(outcome, FedstatError)]
        if refused:
            raise refused[0]
        return [outcome for _, outcome in answered if isinstance(outcome, Reply)]

    def _send(self, request: Request, ledger: Ledger) -> Reply:
        outcome = self._ask(request)
        # The account has refused questions as well: the site's own chain counts them, and both are compared.
        enter(request, outcome, ledger)
        if isinstance(outcome, FedstatError):
            raise outcome
        return outcome

    def _ask_in_turn(self, requests: Sequence[Request]) -> list[Reply | FedstatError]:
        """Ask a site up to the first question that it refuses."""
        outcomes: list[Reply | FedstatError] = []
        for request in requests:
            outcomes.append(self._ask(request))
            if isinstance(outcomes[-1], FedstatError):
                break
        return outcomes

    def _ask(self, request: Request) -> Reply | FedstatError:
        if request.site not in self._answer_functions:
            raise MessageError(f"no site '{request.site}'; there are {sorted(self._answer_functions)}")
        try:
            return unpack_reply(self._answer_functions[request.site](pack_request(request)))
        except FedstatError as error:
            if isinstance(error, EngineError | SessionError):
                error.sites = (request.site,)
            return error


def leaves(request: Request, ledger: Ledger) -> bool:
    """Whether a ledger is about an ask: not within the coordinator's site, nor about the ledger."""
    return request.site != ledger.at and request.family != RECEIPT_FAMILY


def enter(request: Request, outcome: Reply | FedstatError, ledger: Ledger) -> None:
    """Write an ask and its outcome into the coordinator's account, and into the ledger what it is about.

    A question that was refused is in the account alone: nothing came of it. A MessageError where another site
    answered.
    """
    if isinstance(outcome, Reply) and outcome.site != request.site:
        raise MessageError(f"'{outcome.site}' answered instead of '{request.site}'")
    entries = ledger.log.enter(request, FAMILIES.get(request.family, {}).get(request.step), outcome)
    if isinstance(outcome, Reply) and leaves(request, ledger):
        ledger.enter(entries)
