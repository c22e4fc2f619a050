"""Dry run: the protocol of a fit runs with its own steps at sites without data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NoReturn, TypeAlias

import pandas as pd

from fedstat.errors import EstimationError, PolicyError
from fedstat.federation.audit.event_log import TEXT, Entry
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import Masker
from fedstat.federation.disclosure.approval import bound_content
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.request_checks import (
    check_columns,
    check_counts,
    check_mask,
    refusals,
    rules_in_force,
)
from fedstat.federation.disclosure.site import FAMILIES, RECEIPT_FAMILY, Site
from fedstat.federation.disclosure.state import State
from fedstat.federation.message import ArrayDeclaration, Reply, Request, Step, pack_request, unpack_reply
from fedstat.federation.protocols.engine import Fit, FitProtocol, enter, leaves
from fedstat.federation.protocols.product_steps import read_part
from fedstat.federation.tables.table import FrameTable
from fedstat.typing import Ints

# ----------------------------------------------------------------------------------------------------
# A site without data: real disclosure checks, a synthetic design, and all rules of its owner's policy.
#
# The checks of a site stop at the first rule that refuses. A dry run reports every such rule, and continues.
# Rules that depend on the request alone are listed by the functions that the site itself calls; the others
# are left to the site's checks. A refused request is repeated under a policy that allows all, to find what
# would follow.

ALLOW_ALL = Policy(min_count=0, min_events=0, min_level_count=0, max_parameters=1e9, remember="nothing")
"""A policy that allows all."""

COMMON_SEED = 1


class DrySite(Site):
    """A site with known name, policy and number of records, and a synthetic design.

    `instead` are steps, by family and name, that replace those that read records; `entities` (n_rows,) number
    those of the records.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        n_rows: int,
        instead: Mapping[tuple[str, str], Step] | None = None,
        entities: Ints | None = None,
        site_column: str = "",
    ) -> None:
        table = FrameTable(pd.DataFrame(index=range(n_rows)), entities)
        super().__init__(name, table, policy, COMMON_SEED, site_column)
        self.owners = policy  # :attr:`policy` is the one in force at the moment
        # The rules before a reply are off: else the first of them would hide what the steps have to say.
        self._counts = replace(ALLOW_ALL, **{name: getattr(policy, name) for name in REPLY_RULES})
        self._instead = instead or {}
        self._reported_columns = False
        self.refused: list[PolicyError] = []

    def open(self, session: str, state: State) -> None:
        """Open a synthetic design in a session."""
        self.states[session] = state

    @property
    def n_masked(self) -> int:
        """Most sites with which a session of it has agreed on masks."""
        maskers = [state.use("masker", Masker) for state in self.states.values() if "masker" in state]
        return max((len(masker.sites) for masker in maskers), default=0)

    def preview(self, request: Request, intended: Request) -> Reply:
        """Answer a request, and record in :attr:`refused` which of the owner's rules refuse the reply.

        `intended` is the request as the fit would send it.
        A PolicyError where not even a policy that allows all lets the answer pass.
        """
        step = FAMILIES[request.family][request.step]
        self.refused = list(refusals(self.name, self.owners, intended, step))
        if request.masked is not None:
            self._hold("", "", partial(check_mask, self.name, self.owners, self.n_masked))
        try:
            reply = self._request(request, self._counts)
        except PolicyError as error:
            self._note(error, "")
            reply = self._request(request, ALLOW_ALL)
        self._hold_reply(request, reply)
        return reply

    def _hold_reply(self, request: Request, reply: Reply) -> None:
        # Columns are open for the whole session; a refusal is reported once, not for every reply.
        columns = 0 if self._reported_columns else self.states.get(request.session, State(self.name)).columns
        if not self._hold(
            "maximum columns", "", partial(check_columns, self.name, self.owners, request, columns)
        ):
            self._reported_columns = True  # refused, they are not open
        step, there = FAMILIES[request.family][request.step], set(reply.released)
        for name in (name for name in step.given if name in there):
            check = partial(check_counts, self.name, self.owners, request, step, [name], reply.entities)
            self._hold("minimum count", name, check)

    def _hold(self, rule: str, array: str, check: Callable[[], object]) -> bool:
        try:
            check()
        except PolicyError as error:
            self._note(error, array, rule)
            return False
        return True

    def _note(self, error: PolicyError, array: str, rule: str = "") -> None:
        """Record a refusal; a rule that refused a reply is not repeated for one of its arrays."""
        message = str(error)
        earlier = [one for one in self.refused if str(one) != message]
        refused = PolicyError(message, rule=rule or error.rule, site=self.name, array=array)
        self.refused = [*earlier, refused]

    def _request(self, request: Request, policy: Policy) -> Reply:
        """Answer under some policy, which steps are handed with the data."""
        # Steps read the policy too, for instance for the number of rows behind a level.
        self.policy = policy
        return unpack_reply(self.answer(pack_request(request)))

    def _find_step(self, request: Request) -> Step:
        step = super()._find_step(request)
        return self._instead.get((request.family, request.step), step)


REPLY_RULES = (
    "min_count",
    "min_events",
    "min_level_count",
    "products",
    "max_parameters",
    "dealer",
    "discrete",
)
"""Rules of a policy that need the reply, or the complete request."""


# ----------------------------------------------------------------------------------------------------
# A fit without data: its own requests, answered by its own steps on synthetic designs.
#
# :class:`Rehearsal` is an engine whose sites are dry (:mod:`fedstat.federation.dry_run.execution`). Requests,
# replies, rounds, masks and texts are those of the fit, since the fit sends the requests and its steps answer
# them. Releases are recorded as an engine records them. Only the numbers are synthetic, and the results
# computed from them are discarded.

OPEN_PRODUCT_STEP = "open_product"
RequestSignature: TypeAlias = tuple[
    str, str, str, str, str, bool, tuple[tuple[str, str, tuple[int, ...]], ...]
]


class DryRunEnded(Exception):  # noqa: N818  (no error: the end of a fit that was not to be finished)
    """The protocol of a rehearsal has ended."""


@dataclass(frozen=True, slots=True)
class DryRunRequest:
    """One request of a dry run, with its text for the owner's consent and the numbers that it released."""

    site: str
    family: str
    step: str
    masked: bool
    text: str
    gave: Mapping[str, int]
    entities: int


@dataclass(frozen=True, slots=True)
class DryRunRecord:
    """What a rehearsal went through.

    `at` is the site of the coordinator; `entries` are those that the ledger of the fit would have; `rounds`
    are the steps of every round trip between sites. `declared` has, by site, step and array, the array's
    declaration and its policy; `refused` has the refusals of policies, by site and step. `n_masked` counts
    the sites of the masked sums, 0 without any; `dealers` name the dealer for the secure product of each two
    sites, empty for the coordinator. `earlier` are kinds of values that each site has already released when
    the model was made. `request` are all requests, including local ones at the coordinator's own site.
    `cut_short` is the step at which a refusal ended the dry run, because no policy could allow it.
    """

    at: str | None
    entries: tuple[Entry, ...]
    rounds: tuple[tuple[str, ...], ...]
    declared: Mapping[tuple[str, str, str], tuple[ArrayDeclaration, Policy]]
    refused: Mapping[tuple[str, str], tuple[PolicyError, ...]]
    n_masked: int
    dealers: Mapping[tuple[str, str], str]
    earlier: Mapping[str, tuple[str, ...]]
    cut_short: str
    requested: tuple[DryRunRequest, ...] = ()

    def rules(self, entry: Entry) -> tuple[str, ...]:
        """Rules of the sender's policy that an array meets; none for what the coordinator sends."""
        key = (entry.sender, entry.step, entry.array)
        if key not in self.declared:
            return ()
        declared, policy = self.declared[key]
        return tuple(rules_in_force(policy, declared, self.n_masked if entry.masked else 0))

    def refusals(self, entry: Entry) -> tuple[PolicyError, ...]:
        """Return the refusals that apply to an array: its own, and those of the complete reply."""
        found = self.refused.get((entry.sender, entry.step), ())
        return tuple(one for one in found if one.array in ("", entry.array))


class DryRunEngine:
    """An engine whose sites are dry.

    The steps in `repeated` end a fit, and keep nothing; the arrays that they release depend only on the
    shapes of their input. Requests with the same shapes are not run again: the first reply counts for all,
    and is recorded for each request. `intended` returns a request as the fit would send it, where the
    rehearsal has other values.
    """

    def __init__(
        self,
        sites: Mapping[str, DrySite],
        repeated: Collection[str] = (),
        intended: Callable[[Request], Request] = lambda request: request,
    ) -> None:
        self._sites = sites
        self._repeated = repeated
        self._intended = intended
        self._answers: dict[RequestSignature, Reply] = {}
        self._reused = False
        pinned = {name: site.fingerprint for name, site in sites.items()}
        for site in sites.values():
            site.trust.pinned.update(pinned)
        self._declared: dict[tuple[str, str, str], tuple[ArrayDeclaration, Policy]] = {}
        self._refused: dict[tuple[str, str], dict[tuple[str, str, str], PolicyError]] = {}
        self._rounds: list[tuple[str, ...]] = []
        self._ledger = Ledger()
        self._dealers: dict[tuple[str, str], str] = {}
        self._earlier: Mapping[str, tuple[str, ...]] = {}
        self._cut_short = ""
        self._request: list[DryRunRequest] = []

    def dry_run(self) -> DryRunRecord:
        """Return what the rehearsal went through."""
        # Sites that agreed on keys may have used them for sealed messages alone.
        any_masked = any(entry.masked for entry in self._ledger.entries)
        return DryRunRecord(
            at=self._ledger.at,
            entries=tuple(self._ledger.entries),
            rounds=tuple(self._rounds),
            declared=self._declared,
            refused={place: tuple(found.values()) for place, found in self._refused.items()},
            n_masked=max(site.n_masked for site in self._sites.values()) if any_masked else 0,
            dealers=self._dealers,
            earlier=self._earlier,
            cut_short=self._cut_short,
            requested=tuple(self._request),
        )

    def run(self, protocol: FitProtocol[Fit], ledger: Ledger) -> NoReturn:
        """Send a protocol's requests to the dry sites; it ends in :class:`Rehearsed`.

        The result of the protocol depends on synthetic numbers, and is not returned.
        """
        self._ledger, self._earlier = Ledger(at=ledger.at), ledger.kinds_by_site()
        try:
            requests = next(protocol)
            while True:
                if requests and all(request.family == RECEIPT_FAMILY for request in requests):
                    raise DryRunEnded  # what follows is the sites' statements on what has passed
                crossing = [request for request in requests if leaves(request, self._ledger)]
                if crossing:
                    self._ledger.begin_round()
                    self._rounds.append(tuple(dict.fromkeys(request.step for request in crossing)))
                requests = protocol.send([self._send(request) for request in requests])
        except StopIteration:
            raise DryRunEnded from None
        except EstimationError:
            # The same answer at every point has no derivative: what a fit makes of it at its end may fail.
            if not self._reused:
                raise
            raise DryRunEnded from None

    def _send(self, request: Request) -> Reply:
        same = request_signature(request) if request.step in self._repeated else None
        if same is not None and same in self._answers:
            self._reused, reply = True, self._answers[same]
        else:
            reply = self._hear(request)
        if same is not None:
            self._answers[same] = reply
        enter(request, reply, self._ledger)
        # A masked number is transferred as several words: the first axis is not part of its shape.
        gives = FAMILIES[request.family][request.step].gives
        hidden = {name for name in reply.arrays if request.masked is not None and gives[name].maskable}
        gave = {name: prod(array.shape[name in hidden :]) for name, array in reply.arrays.items()}
        gave |= {TEXT: 0} if reply.text else {}
        step = FAMILIES[request.family][request.step]
        masked, text = request.masked is not None, bound_content(self._intended(request), step)
        self._request.append(
            DryRunRequest(request.site, request.family, request.step, masked, text, gave, reply.entities)
        )
        return reply

    def _hear(self, request: Request) -> Reply:
        site = self._sites[request.site]
        try:
            reply = site.preview(request, self._intended(request))
        except PolicyError:
            self._cut_short = request.step
            raise DryRunEnded from None
        finally:
            found = self._refused.setdefault((request.site, request.step), {})
            for one in site.refused:
                found.setdefault((one.rule, one.array, str(one)), one)
        for name, declared in FAMILIES[request.family][request.step].given.items():
            self._declared[request.site, request.step, name] = (declared, site.owners)
        # Random numbers dealt by the coordinator are not messages; the requests to both sites name the
        # dealer.
        if request.step == OPEN_PRODUCT_STEP:
            part = read_part(request.text)
            self._dealers[part.product.site_a, part.product.site_b] = part.dealer
        return reply


def request_signature(request: Request) -> RequestSignature:
    """Return a request without the numbers in its arrays, and the round whose masks hide its reply."""
    shapes = tuple((name, array.dtype.str, array.shape) for name, array in request.arrays.items())
    return (
        request.site,
        request.family,
        request.step,
        request.session,
        request.text,
        request.masked is None,
        shapes,
    )
