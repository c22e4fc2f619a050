"""A site: its data, its policy, the request families it answers, and the limit on its refusals."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pandas as pd

from fedstat.errors import DisclosureError, FedstatError, MessageError, NotAvailableError
from fedstat.federation import message
from fedstat.federation.audit.budget_charges import BudgetSpent
from fedstat.federation.audit.event_log import SessionChain, SiteLedger
from fedstat.federation.audit.ledger import Ledger, released_by
from fedstat.federation.audit.ledger_file import HistoryCheck
from fedstat.federation.disclosure.approval import APPROVAL_FAMILY, AnalysisPlan, Approvals, PlanStore
from fedstat.federation.disclosure.checks import (
    ADMISSION,
    AFTER,
    BEFORE,
    FACT_CHECKS,
    AlternativeReply,
    RequestContext,
    is_foreign,
)
from fedstat.federation.disclosure.differencing import remember_masked_sites
from fedstat.federation.disclosure.policy import Policy, check_delta
from fedstat.federation.disclosure.privacy_budget import (
    NoiseMechanism,
    NoiseRequired,
    RepeatedRelease,
    read_budget_spent,
)
from fedstat.federation.disclosure.refusals import RefusalLog
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.request_checks import bind_common, mask_reply, record_step
from fedstat.federation.disclosure.rules import stricter_rules
from fedstat.federation.disclosure.state import (
    CONNECTING_FAMILY,
    MAX_SESSIONS,
    MOST_OVER,
    SESSION_END_REASONS,
    STALLED,
    SiteData,
    SiteTrust,
    State,
)
from fedstat.federation.tables.checks import control_problems, raise_problems
from fedstat.federation.tables.columns import text_problems
from fedstat.federation.tables.published import Published, PublishedColumn
from fedstat.federation.tables.table import FrameTable, LabeledTable, Table

# ----------------------------------------------------------------------------------------------------
# The families of this installation, for a site that receives requests from outside.
#
# In one process, a family is available once its model has been named. A site in a process of its own names no
# model, and loads them all.

FEDERATION_FAMILIES = (
    "design.horizontal_steps",
    "design.vertical_design",
    "protocols.linkage",
    "protocols.noise_shares",
    "protocols.plan_approval",
    "protocols.schema",
    "protocols.shared_keys",
    "protocols.receipts",
)
"""Modules of federation/ that enter steps into :data:`fedstat.federation.disclosure.site.FAMILIES`."""

NOISY_KIND: message.ArrayKind = "noisy aggregate"
UNCHARGED_KINDS: tuple[message.ArrayKind, ...] = ("presence", "sealed")
"""Kinds of which an array may be released without noise under a privacy budget."""
MODELS_PACKAGE = "fedstat.models"
"""Module whose ``INSTALLED`` names the folders of families: by name, because models/ is not imported here."""


def installed_families() -> tuple[str, ...]:
    """Return the folders of installed families of models."""
    return tuple(import_module(MODELS_PACKAGE).INSTALLED)


def load_families() -> None:
    """Enter the steps of all installed families."""
    for module in FEDERATION_FAMILIES:
        import_module(f"fedstat.federation.{module}")
    for family in installed_families():
        import_module(f"{MODELS_PACKAGE}.{family}")


# ----------------------------------------------------------------------------------------------------
# One site: ``Site.answer`` is the only function that releases a value: policy check, step, ledger, reply. A
# step cannot be reached in any other way, and only steps of installed families run.


class FamilyRegistry(dict[str, Mapping[str, message.Step]]):
    """Steps by family; a family with incomplete declarations does not install."""

    def __setitem__(self, family: str, steps: Mapping[str, message.Step]) -> None:
        for name, step in steps.items():
            check_declarations(f"family '{family}', step '{name}'", step)
        super().__setitem__(family, steps)


def check_declarations(where: str, step: message.Step) -> None:
    """Require that a step declares what is behind its releases, and which of its arguments weigh rows.

    Raises
    ------
    DisclosureError
        Names family, step and array.
    """
    for name, declared in step.given.items():
        if problem := _release_problem(declared):
            raise DisclosureError(f"{where}: array '{name}' {problem}")
    for name, declared in step.takes.items():
        if declared.kind == "per entity" and declared.weighs is None:
            raise DisclosureError(
                f"{where}: array '{name}' has a value per entity, and does not declare whether these weigh "
                "rows; its weighs is a description of them, empty if they enter no sum over rows"
            )


def _release_problem(declared: message.ArrayDeclaration) -> str:
    """Return what a declaration of a release lacks, or an empty text."""
    if declared.kind in message.COUNTED and not declared.behind:
        return (
            f"is declared '{declared.kind}', without the facts behind it, which are classes of "
            "fedstat.federation.disclosure.facts: EntityCount at least"
        )
    if unknown := [fact for fact in declared.behind if fact not in FACT_CHECKS]:
        return f"has {unknown[0].__name__} behind it, which no rule checks"
    if declared.unpaid and declared.kind not in UNCHARGED_KINDS:
        return (
            f"is of kind '{declared.kind}', which is released under a budget only with noise; only "
            f"{' and '.join(UNCHARGED_KINDS)} can be unpaid"
        )
    accounted = NoiseRequired in declared.behind or RepeatedRelease in declared.behind
    complete = accounted and declared.dtype == "int64"
    if (declared.noisy and not complete) or (declared.kind == NOISY_KIND and not declared.noisy):
        return (
            f"of kind '{declared.kind}' lacks the declarations for noise: noisy=True, dtype='int64', and "
            "NoiseRequired in behind=(...)"
        )
    return ""


FAMILIES = FamilyRegistry()
"""Steps by family; a family enters its own when it is imported."""

NOT_COPIED_MESSAGE = (
    "a site cannot be pickled or copied, and neither can a model, which uses it; results and partitions can"
)
RECEIPT_FAMILY = "receipt"
"""Family that requests a site's statement on its releases: it holds no data, and no policy refuses it."""
UNALIGNED_FAMILIES = ("schema", "secure", "align", APPROVAL_FAMILY)
"""Families whose requests do not depend on the order of the records, and are no part of an analysis."""


class Site:
    """One site.

    Parameters
    ----------
    name : str
        Name of the site.
    table : DataFrame or Table
        Its data, one row per entity, without the key.
    policy : Policy, optional
        What may be released; the default allows every installed family.
    shared_seed : int, optional
        See :attr:`SiteData.common_seed`.
    site_column : str
        Column under which steps find the name of the site, the same in every row; none by default.
    trust : SiteTrust, optional
        New keys by default.
    site_ledger : SiteLedger, optional
        The ledger of an earlier process, to be continued.
    published : mapping of str to PublishedColumn, optional
        What the owner has published of the columns.
    log : callable, optional
        Receives the reason of every refusal that is not sent; for the owner.
    plans : PlanStore, optional
        Where plans wait for the owner when this process ends.
    """

    def __init__(
        self,
        name: str,
        table: pd.DataFrame | Table,
        policy: Policy | None = None,
        shared_seed: int | None = None,
        site_column: str = "",
        trust: SiteTrust | None = None,
        site_ledger: SiteLedger | None = None,
        published: Published | None = None,
        log: Callable[[str], None] | None = None,
        plans: PlanStore | None = None,
    ) -> None:
        self.name = name
        policy = Policy() if policy is None else policy
        held = FrameTable(table) if isinstance(table, pd.DataFrame) else table
        if site_column:
            held = LabeledTable(held, site_column, name)
        raise_problems((*control_problems("a site", "names of sites", [name]), *text_problems(name, held)))
        check_delta(name, policy.privacy, held.n_rows)
        site_ledger = SiteLedger() if site_ledger is None else site_ledger
        # every site has a level of its own, which is its name
        self._label = {site_column: PublishedColumn("category", levels=(name,))} if site_column else {}
        self.approvals = Approvals(name, site_ledger, plans)
        self._data = SiteData(
            name,
            held,
            shared_seed,
            policy,
            trust=trust or SiteTrust(),
            site_ledger=site_ledger,
            published={**(published or {}), **self._label},
            approvals=self.approvals,
        )
        # By a weak reference: a cycle would keep the rows in memory when the site is no longer used.
        this: Site = weakref.proxy(self)
        self._noise = NoiseMechanism(name, policy, site_ledger, held, lambda: this.trust.identity)
        self.refusals = RefusalLog(name, site_ledger, log)
        self.states: dict[str, State] = {}
        self._put_out: dict[str, str] = {}
        self.max_sessions, self.lets_sessions_wait = MAX_SESSIONS, False

    @property
    def data(self) -> SiteData:
        """Data and settings that steps receive."""
        return self._data

    @property
    def policy(self) -> Policy:
        """What the owner allows to be released."""
        return self._data.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._data = replace(self._data, policy=policy)

    @property
    def trust(self) -> SiteTrust:
        """The site's keys, and those that its owner has pinned."""
        return self._data.trust

    @property
    def ledger(self) -> Ledger:
        """Ledger of all arrays that the site released, without statements on the ledger."""
        return released_by(self.site_ledger, RECEIPT_FAMILY)

    @property
    def site_ledger(self) -> SiteLedger:
        """The site's own ledger of all requests and releases."""
        return self._data.site_ledger

    @property
    def pending(self) -> Mapping[str, AnalysisPlan]:
        """Plans of analyses that wait for the owner's approval, by digest."""
        return self.approvals.pending

    def approve(self, digest: str, who: str = "owner") -> None:
        """Approve, as the owner, one run of a plan, by its digest or the first digits of it."""
        self.approvals.decide(digest, "approved", who)

    def deny(self, digest: str, who: str = "owner") -> None:
        """Deny a plan, as the owner."""
        self.approvals.decide(digest, "denied", who)

    def remember(self, remembered: ReleaseHistory, store: bool = True) -> None:
        """Compare new releases with those of an earlier process as well."""
        self._data = replace(self._data, memory=remembered)
        if store:
            self._keep_history()

    def change_rules(self, policy: Policy, published: Published) -> tuple[str, ...]:
        """Apply the owner's changes; return the rules that are stricter now, which end the open sessions.

        Checks of the beginning of a session, for example of a formula, would not be repeated otherwise.
        Ledger, budget, approvals and the release history continue.
        """
        stricter = stricter_rules(self.policy, policy)
        held = {name: one for name, one in self.published.items() if name not in self._label}
        if not all(name in published and published[name].includes(one) for name, one in held.items()):
            stricter = (*stricter, "columns")
        self._noise.policy = policy
        self._data = replace(self._data, policy=policy, published={**published, **self._label})
        if stricter:
            self._end_sessions("rules")
        return stricter

    def change_records(self, table: Table, fits: HistoryCheck) -> None:
        """Continue with data that were read again and have changed; see :meth:`SiteData.with_records`."""
        raise_problems(text_problems(self.name, table))
        self._data = self._data.with_records(table, fits)
        self._keep_history()
        self._noise.take(self._data.table)
        self._end_sessions("records")

    def _keep_history(self) -> None:
        """Store a release history that was compared with other records than those of its file."""
        if self._data.memory.is_new and self.site_ledger.store is not None:
            self._store_history(self._data)
            self._data.memory.is_new = False

    def _store_history(self, data: SiteData) -> None:
        self.site_ledger.keep_answered(data.memory.to_arrays(data.table, data.mark_key), data.table.n_rows)

    def _end_sessions(self, why: str) -> None:
        self._put_out |= dict.fromkeys(self.states, SESSION_END_REASONS[why])
        self.states.clear()

    @property
    def published(self) -> Published:
        """What the owner has published of the columns."""
        return self._data.published

    @property
    def privacy(self) -> BudgetSpent | None:
        """State of the privacy budget; None if there is none."""
        return read_budget_spent(self.policy, self.site_ledger)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the site's keys."""
        return self.trust.identity.public.fingerprint

    def __repr__(self) -> str:
        n_columns = len(self._data.table.columns) - len(self._label)
        return f"Site({self.name!r}, {self._data.table.n_rows} records, {n_columns} columns)"

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotAvailableError(f"{self.name}: {NOT_COPIED_MESSAGE}")

    def is_foreign(self, request: message.Request, client: str) -> bool:
        """Return whether another client, person or study opened the session of a request."""
        return is_foreign(self._data, request, client)

    def has_room(self, request: message.Request) -> bool:
        """Return whether a request begins no session that would replace one in which an analysis runs."""
        known = request.session in self.states or request.session in self._put_out
        known = known or not request.session or self.site_ledger.resumed(request.session)
        if known or request.family in (CONNECTING_FAMILY, RECEIPT_FAMILY):
            return True
        if len(self.states) < self.max_sessions or self._replaceable() is not None:
            return True
        latest = max(one.used for one in self.states.values())
        return len(self.states) < MOST_OVER * self.max_sessions and time.monotonic() - latest > STALLED

    def _replaceable(self) -> str | None:
        """Return the session that goes first: a connection, then an ended run, then one that is idle."""
        free = [name for name, one in self.states.items() if one.may_be_replaced]
        # The oldest of those that are equal: sessions are in the order of their latest request.
        order = {name: (not self.states[name].is_empty, not self.states[name].run_ended) for name in free}
        return min(free, key=order.__getitem__, default=None)

    def answer(self, request: bytes | message.RequestMessage, client: str = "", written: str = "") -> bytes:
        """Answer a packed :class:`~fedstat.federation.message.Request` by a packed Reply.

        `client` is the fingerprint of the client, as far as the transport knows it, and `written` the time
        of its signature.

        Raises
        ------
        MessageError
            The request is malformed, names an unknown step, or is addressed to another site.
        PolicyError
            The site's owner does not allow it; nothing was computed or released.
        """
        requested = message.Request(self.name, "", "")
        try:
            requested = message.unpack_request(request) if isinstance(request, bytes) else request.request
            for admit in ADMISSION:
                admit(self._data, requested, client)
        except FedstatError as error:
            self._begin_entries("").refusal(replace(requested, site=self.name), error)
            raise
        chain = self._begin_entries(requested.session)
        try:
            context = self._open(requested, chain, client, written)
            for check in BEFORE:
                check(context)
            packed = self._answer_or_undo(context)
            self._record(context)
        except FedstatError as error:
            chain.refusal(requested, error)
            raise
        return packed

    def _begin_entries(self, session: str) -> SessionChain:
        """Return the chain of a session, ready for one more request; "" for messages outside a session."""
        chain = self.site_ledger.chain(self.name, self.trust.identity.public, session)
        chain.begin()
        return chain

    def _open(
        self, request: message.Request, chain: SessionChain, client: str, written: str
    ) -> RequestContext:
        """Find the step of a request, and record what came with it."""
        step = self._find_step(request)
        chain.request(request, step)
        ended = ""
        if request.session and request.session not in self.states:
            ended = (
                SESSION_END_REASONS["restart"] if chain.resumed else self._put_out.get(request.session, "")
            )
        return RequestContext(
            self._data,
            request,
            step,
            self.states.get(request.session) or State(self.name),
            client,
            chain,
            ended,
            receipt=request.family == RECEIPT_FAMILY,
            analysis=request.family not in (RECEIPT_FAMILY, *UNALIGNED_FAMILIES),
            noise=self._noise,
            written=written,
        )

    def _answer_or_undo(self, context: RequestContext) -> bytes:
        """Prepare a reply; a refused one leaves no trace, and the next one counts from here."""
        data, state, memory = context.data, context.state, context.data.memory
        memory.follow(data.table, data.mark_key)
        earlier, context.released = state.copy(), memory.released
        try:
            # What a check counts as released is kept only if the reply is sent.
            with data.site_ledger.provisionally():
                return self._prepare(context)
        except BaseException as error:
            state.restore(earlier)
            memory.released = context.released
            # A statement depends on the ledger, a plan on future requests, and neither on rows.
            about_rows = context.request.family not in (RECEIPT_FAMILY, APPROVAL_FAMILY)
            if not isinstance(error, FedstatError) or not about_rows:
                raise
            outward = self.refusals.outward(self.data, state.requested, error, context.client)
            if outward is error:
                raise
            # Without its cause: a traceback that is sent would quote what the text does not.
            raise outward from None
        finally:
            state.end()

    def _prepare(self, context: RequestContext) -> bytes:
        """Run a step, check its reply, mask it, and return it packed."""
        request, step, state, data = context.request, context.step, context.state, context.data
        state.begin(
            lambda fact: FACT_CHECKS[type(fact)](data, state, fact),
            context.sites,
            lambda: self._noise.check(request, state.owed.values(), context.sites),
            lambda question, parts: self._noise.recall(request, question, parts),
            self._noise.mark,
        )
        context.reply = self._run(context)
        for check in AFTER:
            check(context)
        context.sent = context.reply
        if context.masker is not None:
            bound = bind_common(state, request, step)
            masked = mask_reply(context.masker, request, step, context.reply.arrays, bound)
            context.sent = replace(context.reply, arrays=masked)
            remember_masked_sites(data, context.sites)
        return message.pack_reply(context.sent)

    def _record(self, context: RequestContext) -> None:
        """Record a release in the ledger, and store the state of the session."""
        request, step, state = context.request, context.step, context.state
        self.site_ledger.record_columns(state.used_columns, state.entities)
        if context.data.memory.released is not context.released and self.site_ledger.store is not None:
            self._store_history(context.data)
        n_sites = len(context.sites) or 1
        context.describe()
        context.chain.reply(request, step, context.sent, context.reply.arrays, n_sites, context.costs)
        if not context.receipt:
            record_step(state, request, step)
            self._keep_state(request.session, state)
        elif request.session in self.states:
            self.states[request.session].run_ended = True

    def _find_step(self, request: message.Request) -> message.Step:
        steps = FAMILIES.get(request.family)
        if steps is None:
            raise MessageError(
                f"{self.name}: unknown family '{request.family}'; installed are {sorted(FAMILIES)} "
                f"({message.RUNS})"
            )
        if request.step not in steps:
            raise MessageError(
                f"{self.name}: family '{request.family}' has no step '{request.step}'; it has "
                f"{sorted(steps)} ({message.RUNS})"
            )
        step = steps[request.step]
        if request.text and step.text_in is None:
            raise MessageError(f"{self.name}, step '{request.step}': received a text, expected arrays only")
        return step

    def _keep_state(self, session: str, state: State) -> None:
        """Store the state of a session as the latest; one without a reply does not replace others.

        Sessions in which no analysis runs go first, then those that keep nothing for a later request, then
        those without requests for the longest time. A served site lets a new session wait instead.
        """
        self.states.pop(session, None)
        state.used, state.run_ended = time.monotonic(), False
        if state.is_connection and len(self.states) >= self.max_sessions and self._replaceable() is None:
            return
        while len(self.states) >= self.max_sessions:
            if self.lets_sessions_wait and self._replaceable() is None:
                break
            empty = (name for name, one in self.states.items() if one.is_empty)
            first = self._replaceable() or next(empty, None) or next(iter(self.states))
            del self.states[first]
            self._put_out[first] = SESSION_END_REASONS["newer"]
        self.states[session] = state

    def _run(self, context: RequestContext) -> message.Reply:
        request, step, state = context.request, context.step, context.state
        try:
            if step.text_in is None and step.text_out is None:
                arrays, text = step.run(self._data, state, **request.arrays), ""
            else:
                arrays, text = step.run(self._data, state, request.text, **request.arrays)
        except AlternativeReply as instead:
            if instead.reason:
                self.refusals.count(self.policy, instead.reason, context.client)
            arrays, text = instead.arrays, instead.text
        except FedstatError:
            raise
        except Exception as error:
            # The error may quote values: only its type is released.
            raise MessageError(
                f"{context.where}: failed ({type(error).__name__}); the request is out of order, or its "
                "arrays do not fit the state of the fit at this site"
            ) from error
        return message.Reply(self.name, arrays, text, state.entities)
