"""Engines: they carry the requests of a protocol to the sites, and the replies back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from fedstat.errors import EngineError, FedstatError, MessageError, PolicyError, SessionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, RECEIPT_FAMILY
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
                try:
                    replies = self._round(requests, ledger)
                except PolicyError as refusal:
                    requests = protocol.throw(refusal)
                    continue
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


class LocalEngine(RoundEngine):
    """All sites in one process; every message is packed to bytes and back."""

    def __init__(self, sites: Mapping[str, SiteEndpoint]) -> None:
        self._answer_functions: dict[str, Callable[[bytes], bytes]] = {n: s.answer for n, s in sites.items()}
        policies = [getattr(site, "policy", None) for site in sites.values()]
        self.setting = one_process_note(policy for policy in policies if isinstance(policy, Policy))

    def _round(self, requests: Sequence[Request], ledger: Ledger) -> list[Reply]:
        return [self._send(request, ledger) for request in requests]

    def _send(self, request: Request, ledger: Ledger) -> Reply:
        if request.site not in self._answer_functions:
            raise MessageError(f"no site '{request.site}'; there are {sorted(self._answer_functions)}")
        try:
            reply = unpack_reply(self._answer_functions[request.site](pack_request(request)))
        except FedstatError as error:
            # The account has refused questions as well: the site's own chain counts them, and both are
            # compared.
            enter(request, error, ledger)
            if isinstance(error, EngineError | SessionError):
                error.sites = (request.site,)
            raise
        enter(request, reply, ledger)
        return reply


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
