"""A site: its data, its policy, the request families it answers, and the limit on its refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pandas as pd

from fedstat.errors import (
    ConsentError,
    DescriptionError,
    FedstatError,
    FormulaError,
    MessageError,
    NotAvailableError,
    PolicyError,
    SecurityError,
    SessionError,
)
from fedstat.federation.audit.budget_charges import BudgetSpent
from fedstat.federation.audit.event_log import SessionChain, SiteLedger
from fedstat.federation.audit.ledger import Ledger, released_by
from fedstat.federation.audit.ledger_file import HistoryCheck
from fedstat.federation.crypto.masks import Masker
from fedstat.federation.disclosure.approval import APPROVAL_FAMILY, AnalysisPlan, Approvals, PlanStore
from fedstat.federation.disclosure.checks import (
    AlternativeReply,
    FamilyRegistry,
    check_fact,
    check_facts_reported,
    report_external_weights,
)
from fedstat.federation.disclosure.differencing import check_masked_sites
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseMechanism, NoiseRequired, read_budget_spent
from fedstat.federation.disclosure.protocol_order import bind_common, check_order, mask_reply, record_step
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.request_checks import (
    check_columns,
    check_counts,
    check_per_entity_numbers,
    check_request,
)
from fedstat.federation.disclosure.rules import stricter_rules
from fedstat.federation.disclosure.state import MAX_SESSIONS, SESSION_END_REASONS, SiteData, SiteTrust, State
from fedstat.federation.message import RUNS, Reply, Request, Step, check_arrays, pack_reply, unpack_request
from fedstat.federation.tables.aligned_table import AlignedTable
from fedstat.federation.tables.published import Published, PublishedColumn
from fedstat.federation.tables.table import FrameTable, LabelledTable, Table

# ----------------------------------------------------------------------------------------------------
# The families of this installation, for a site that is asked from outside.
#
# In one process a family is there once its model has been named. A site in a process of its own names no
# model, and loads them all.

FEDERATION_FAMILIES = (
    "design.horizontal_steps",
    "design.vertical_design",
    "protocols.linkage",
    "protocols.plan_approval",
    "protocols.margins",
    "protocols.schema",
    "protocols.receipts",
)
"""Modules of federation/ that enter steps into :data:`fedstat.federation.disclosure.site.FAMILIES`."""

MODELS_PACKAGE = "fedstat.models"
"""Whose ``INSTALLED`` names the folders of families: by name, since models/ comes after this room."""


def load_families() -> None:
    """Enter the steps of all installed families."""
    for module in FEDERATION_FAMILIES:
        import_module(f"fedstat.federation.{module}")
    for family in import_module(MODELS_PACKAGE).INSTALLED:
        import_module(f"{MODELS_PACKAGE}.{family}")


# ----------------------------------------------------------------------------------------------------
# Refusals of a site: what leaves of them, what stays in its log, and when it stops answering.
#
# A refusal that depends on rows is a bit about them. Whoever may ask as often as wanted finds any value by
# bisection, whatever the text says: so under ``reasons = "logged"`` the text is one word and the rule, and
# after ``max_refusals`` of them whoever asked gets no more answers until the owner says so.

MAX_REASONS_KEPT = 100
"""Reasons that a process keeps in memory for its owner."""
DATA_INDEPENDENT_ERRORS = (ConsentError, DescriptionError, FormulaError, SecurityError)
"""Errors that follow from question, policy, public description and keys alone, and leave in full."""

UNNAMED_RULE = "the rows do not admit it"
"""Rule of a refusal that depends on rows, but on no rule of the policy: a singular design, for instance."""


@dataclass(slots=True)
class RefusalLog:
    """What a site's refusals say, and to whom how many went.

    Parameters
    ----------
    site : str
    account : SiteLedger
        Counts them beyond the life of the process.
    log : callable, optional
        Takes one line for the owner; by default the latest are kept in :attr:`reasons`.
    """

    site: str
    account: SiteLedger
    log: Callable[[str], None] | None = None
    reasons: list[str] = field(default_factory=list)

    def check_patience(self, policy: Policy, asker: str) -> None:
        """Answer nobody whose questions were refused too often.

        Raises
        ------
        PolicyError
            They were.
        """
        most = policy.max_refusals
        if most and self.account.refusals.get(asker, 0) >= most:
            raise PolicyError.of_rule(
                "maximum refusals",
                self.site,
                f"has refused {most} questions because of its rows, and answers no more of whoever asked "
                "them. Its owner reads the log, and may go on by 'fedstat site answer-again'",
            )

    def outward(self, policy: Policy, error: FedstatError, asker: str) -> FedstatError:
        """Turn an error that a step raised, which may depend on rows, into what leaves."""
        if isinstance(error, DATA_INDEPENDENT_ERRORS):
            return error
        if policy.max_refusals:
            self.account.count_refusal(asker)
        # Under a budget nothing pays for a reason.
        if policy.reasons == "told" and policy.privacy is None:
            return error
        self.note(str(error))
        rule = (error.rule if isinstance(error, PolicyError) else "") or UNNAMED_RULE
        why = f"{self.site}: refused; its policy ({rule}). Why stands in the log of its owner"
        return PolicyError(why, rule=rule, site=self.site)

    def note(self, reason: str) -> None:
        """Tell the owner, and nobody else."""
        if self.log is not None:
            self.log(reason)
        self.reasons = [*self.reasons[1 - MAX_REASONS_KEPT :], reason]


# ----------------------------------------------------------------------------------------------------
# One institution: its data, its owner's policy, and the only door out.
#
# ``Site.answer`` is the one function that returns a value from an institution: policy check, step, ledger,
# reply. A step cannot be reached in any other way, and only steps of installed families run.

FAMILIES = FamilyRegistry()
"""Steps by family; a family enters its own when it is imported."""

NOT_COPIED_MESSAGE = (
    "a site is not pickled or copied, nor is a model, which asks it; results and partitions can be"
)
RECEIPT_FAMILY = "receipt"
"""Family that asks for a site's statement on what has passed: it holds no data, and no policy refuses it."""
UNALIGNED_FAMILIES = ("schema", "secure", "align", APPROVAL_FAMILY)
"""Families that ask nothing of which the order of the records matters, and no part of an analysis."""


class PreparedReply:
    """An answer before masks, as it leaves, packed, over how many sites it is a sum, and what it cost."""

    def __init__(self, clear: Reply, reply: Reply, n_sites: int, costs: Mapping[str, str]) -> None:
        self.clear, self.reply, self.n_sites, self.costs = clear, reply, n_sites, costs
        self.packed = pack_reply(reply)


class Site:
    """One institution.

    Parameters
    ----------
    name : str
        The institution.
    table : DataFrame or Table
        Its records, one row per entity, without the key.
    policy : Policy, optional
        What may leave; the default allows every installed family.
    shared_seed : int, optional
        See :attr:`SiteData.common_seed`.
    site_column : str
        Column under which steps find the site's own name, the same in every row; none by default.
    trust : Trust, optional
        New keys by default.
    account : SiteLedger, optional
        The account of an earlier process, to be continued.
    published : mapping of str to PublishedColumn, optional
        What the owner has published of the columns.
    log : callable, optional
        Takes the reason of every refusal that does not leave; for the owner.
    plans : PlanStore, optional
        Where plans wait for the owner beyond the life of this process.
    """

    def __init__(
        self,
        name: str,
        table: pd.DataFrame | Table,
        policy: Policy | None = None,
        shared_seed: int | None = None,
        site_column: str = "",
        trust: SiteTrust | None = None,
        account: SiteLedger | None = None,
        published: Published | None = None,
        log: Callable[[str], None] | None = None,
        plans: PlanStore | None = None,
    ) -> None:
        self.name = name
        self.policy = policy if policy is not None else Policy()
        held = FrameTable(table) if isinstance(table, pd.DataFrame) else table
        if site_column:
            held = LabelledTable(held, site_column, name)
        account = SiteLedger() if account is None else account
        # every site has a level of its own, which is its name
        self._label = {site_column: PublishedColumn("category", levels=(name,))} if site_column else {}
        self.approvals = Approvals(name, account, plans)
        self._data = SiteData(
            name,
            held,
            shared_seed,
            self.policy,
            trust=trust or SiteTrust(),
            account=account,
            published={**(published or {}), **self._label},
            approvals=self.approvals,
        )
        self._noise = NoiseMechanism(name, self.policy, account, held, lambda: self.trust.identity)
        self.refusals = RefusalLog(name, account, log)
        self.states: dict[str, State] = {}
        self._put_out: dict[str, str] = {}

    @property
    def data(self) -> SiteData:
        """What steps are handed."""
        return self._data

    @property
    def trust(self) -> SiteTrust:
        """The site's keys, and those that its owner has pinned."""
        return self._data.trust

    @property
    def ledger(self) -> Ledger:
        """Ledger of all arrays that left the site, without statements on what has left."""
        return released_by(self.account, RECEIPT_FAMILY)

    @property
    def account(self) -> SiteLedger:
        """The site's own account of all that passed its door."""
        return self._data.account

    @property
    def pending(self) -> Mapping[str, AnalysisPlan]:
        """Plans of analyses that wait for the owner's consent, by digest."""
        return self.approvals.pending

    def approve(self, digest: str, who: str = "owner") -> None:
        """Consent, as the owner, to one run of a plan, by its digest or the beginning of it."""
        self.approvals.decide(digest, "approved", who)

    def deny(self, digest: str, who: str = "owner") -> None:
        """Deny a plan, as the owner."""
        self.approvals.decide(digest, "denied", who)

    def remember(self, remembered: ReleaseHistory) -> None:
        """Hold new answers against those of an earlier process as well."""
        self._data = replace(self._data, memory=remembered)

    def change_rules(self, policy: Policy, published: Published) -> tuple[str, ...]:
        """Take over what the owner has changed; which rules are stricter now, and so end the open sessions.

        What was judged when a session was opened, a formula for instance, would not be judged again. Account,
        budget, consents and the memory of earlier answers go on.
        """
        stricter = stricter_rules(self.policy, policy)
        held = {name: one for name, one in self.published.items() if name not in self._label}
        if any(published.get(name) != one for name, one in held.items()):
            stricter = (*stricter, "columns")
        self.policy = self._noise.policy = policy
        self._data = replace(self._data, policy=policy, published={**published, **self._label})
        if stricter:
            self._end_sessions("rules")
        return stricter

    def change_records(self, table: Table, fits: HistoryCheck) -> None:
        """Go on with records that were read anew and have changed; see :meth:`SiteData.with_records`."""
        self._data = self._data.with_records(table, fits)
        self._noise.take(self._data.table)
        self._end_sessions("records")

    def _end_sessions(self, why: str) -> None:
        self._put_out |= dict.fromkeys(self.states, SESSION_END_REASONS[why])
        self.states.clear()

    @property
    def published(self) -> Published:
        """What the owner publishes of the columns."""
        return self._data.published

    @property
    def privacy(self) -> BudgetSpent | None:
        """How its privacy budget stands; None where it has none."""
        return read_budget_spent(self.policy, self.account)

    @property
    def fingerprint(self) -> str:
        """Of the site's keys."""
        return self.trust.identity.public.fingerprint

    def __repr__(self) -> str:
        n_columns = len(self._data.table.columns) - len(self._label)
        return f"Site({self.name!r}, {self._data.table.n_rows} records, {n_columns} columns)"

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotAvailableError(f"{self.name}: {NOT_COPIED_MESSAGE}")

    def answer(self, request: bytes, asker: str = "") -> bytes:
        """Answer a packed :class:`~fedstat.federation.message.Request` by a packed Reply.

        `asker` is the fingerprint of who asks, as far as whoever carried the question knows it.

        Raises
        ------
        MessageError
            The ask is malformed, names an unknown step, or is meant for another site.
        PolicyError
            The site's owner does not allow it; nothing was computed or released.
        """
        ask = Request(self.name, "", "")
        try:
            ask = unpack_request(request)
            self._check_address(ask)
            self._check_turn(ask)
        except FedstatError as error:
            self._begin_entries("").refusal(replace(ask, site=self.name), error)
            raise
        chain = self._begin_entries(ask.session)
        try:
            return self._answer(ask, chain, asker)
        except FedstatError as error:
            chain.refusal(ask, error)
            raise

    def _begin_entries(self, session: str) -> SessionChain:
        """Chain of a session, ready for one more ask; "" for what belongs to none."""
        chain = self.account.chain(self.name, self.trust.identity.public, session)
        chain.begin()
        return chain

    def _answer(self, ask: Request, chain: SessionChain, asker: str) -> bytes:
        """Answer an ask that is addressed to this site, and enter what passes."""
        step = self._find_step(ask)
        self.account.check_undisputed(self.name)
        chain.ask(ask, step)
        check_arrays(f"{self.name}, step '{ask.step}'", step.takes, ask.arrays)
        state = self.states.get(ask.session, State(self.name))
        if ask.family != RECEIPT_FAMILY:
            self.refusals.check_patience(self.policy, asker)
            check_request(self.name, self.policy, ask, step)
            self._check_not_forgotten(ask, chain)
            self._check_aligned(ask)
        check_order(self.name, self.policy, ask, step, state.last)
        if self._asks_owner(ask):
            state.analysis.admit(self.approvals, ask, step)
        memory = self._data.memory
        memory.follow(self._data.table, self._data.mark_key)
        before = memory.released
        answer = self._answer_or_undo(ask, step, state, asker)
        self.account.note(state.in_play, state.entities)
        if memory.released is not before and self.account.store is not None:
            kept = memory.to_arrays(self._data.table, self._data.mark_key)
            self.account.keep_answered(kept, self._data.table.n_rows)
        chain.reply(ask, step, answer.reply, answer.clear.arrays, answer.n_sites, answer.costs)
        if ask.family == RECEIPT_FAMILY:
            return answer.packed
        record_step(state, ask, step)
        self._keep_state(ask.session, state)
        return answer.packed

    def _asks_owner(self, ask: Request) -> bool:
        """Whether a question is part of an analysis to which the owner wants to consent."""
        return self.policy.approval == "owner" and ask.family not in (RECEIPT_FAMILY, *UNALIGNED_FAMILIES)

    def _answer_or_undo(self, ask: Request, step: Step, state: State, asker: str) -> PreparedReply:
        """Prepare an answer; one that does not leave leaves no trace: the next one counts from here."""
        earlier, released = state.copy(), self._data.memory.released
        try:
            answer = self._prepare(ask, step, state)
            if self._asks_owner(ask):
                state.analysis.hold(self.approvals, ask, answer.clear.arrays, state.in_play)
            return answer
        except FedstatError as error:
            state.restore(earlier)
            self._data.memory.released = released
            # A statement is on the account, a plan on what will be asked, and neither on rows.
            about_rows = ask.family not in (RECEIPT_FAMILY, APPROVAL_FAMILY)
            outward = self.refusals.outward(self.policy, error, asker) if about_rows else error
            if outward is error:
                raise
            # Without its cause: a traceback that is sent on would quote what the text does not.
            raise outward from None

    def _prepare(self, ask: Request, step: Step, state: State) -> PreparedReply:
        """Run a step, hold its answer against declaration and policy, and hide what is to be hidden."""
        where = f"{self.name}, step '{ask.step}'"
        masker = None if ask.masked is None else self._masker(ask, state)
        state.begin(lambda fact: self._judge(ask, state, fact), () if masker is None else masker.sites)
        try:
            reply = self._run(ask, step, state)
        except AlternativeReply as instead:
            reply = Reply(self.name, instead.arrays, "", state.entities)
        except FedstatError:
            raise
        except Exception as error:
            # What went wrong may quote values: its type is all that is told.
            raise MessageError(
                f"{where}: failed ({type(error).__name__}); the question is out of turn, or its arrays do "
                "not fit what this site holds of the fit"
            ) from error
        check_arrays(where, step.gives, reply.arrays)
        # After the step, which knows how many weights there must be: a malformed question is called that.
        report_external_weights(state, step, ask.arrays)
        check_facts_reported(where, step, state, reply.released)
        check_columns(self.name, self.policy, ask, state.columns)
        check_counts(self.name, self.policy, ask, step, reply.released, state.entities)
        check_per_entity_numbers(self.name, self.policy, step, reply.arrays, self.account.vectors)
        arrays, costs = self._noise.add(ask, step, state.owed, reply.arrays)
        reply = replace(reply, arrays=arrays)
        if masker is None:
            return PreparedReply(reply, reply, 1, costs)
        hidden = replace(reply, arrays=mask_reply(masker, ask, step, arrays, bind_common(state, ask, step)))
        return PreparedReply(reply, hidden, len(masker.sites), costs)

    def _judge(self, ask: Request, state: State, fact: Any) -> None:
        """Hold what a step tells against the owner's policy."""
        if isinstance(fact, NoiseRequired):
            self._noise.check(ask, state.owed.values())
        else:
            check_fact(self._data, state, fact)

    def _check_address(self, ask: Request) -> None:
        if ask.site != self.name:
            raise MessageError(f"{self.name}: received a message that is addressed to '{ask.site}'")

    def _check_turn(self, ask: Request) -> None:
        """Answer no question twice, and none of a session of which some questions are not known here."""
        if ask.turn is None:
            return
        seen, resumed = self.account.rounds(ask.session), self.account.resumed(ask.session)
        if ask.turn > seen + 1 or (resumed and ask.turn == seen):
            raise SessionError(f"{self.name}: {SESSION_END_REASONS['restart']}")
        if ask.turn <= seen:
            raise SecurityError(
                f"{self.name}: question {ask.turn} of a session in which it has answered {seen} is not "
                "answered anew: somebody repeated an old question, or a copy of the analysis runs"
            )

    def _check_not_forgotten(self, ask: Request, chain: SessionChain) -> None:
        if not ask.session or ask.session in self.states:
            return
        if chain.resumed:
            raise SessionError(f"{self.name}: {SESSION_END_REASONS['restart']}")
        if ask.session in self._put_out:
            raise SessionError(f"{self.name}: {self._put_out[ask.session]}")

    def _check_aligned(self, ask: Request) -> None:
        if isinstance(self._data.table, AlignedTable) and ask.family not in UNALIGNED_FAMILIES:
            self._data.table.check_session(ask.session)

    def _find_step(self, ask: Request) -> Step:
        steps = FAMILIES.get(ask.family)
        if steps is None:
            raise MessageError(
                f"{self.name}: unknown family '{ask.family}'; installed are {sorted(FAMILIES)} ({RUNS})"
            )
        if ask.step not in steps:
            raise MessageError(
                f"{self.name}: family '{ask.family}' has no step '{ask.step}'; it has {sorted(steps)} "
                f"({RUNS})"
            )
        step = steps[ask.step]
        if ask.text and step.text_in is None:
            raise MessageError(f"{self.name}, step '{ask.step}': received a text, expected arrays only")
        return step

    def _masker(self, ask: Request, state: State) -> Masker:
        """Return the masker of this session, where the policy allows a sum over so many sites."""
        absent = f"step '{ask.step}': asked for masked, and the sites have not agreed on keys in this session"
        masker = state.use("masker", Masker, absent)
        check_masked_sites(self._data, self.policy, masker.sites)
        return masker

    def _keep_state(self, session: str, state: State) -> None:
        """Keep what a session left here; one that was never answered puts no other out."""
        if session not in self.states:
            while len(self.states) >= MAX_SESSIONS:
                del self.states[oldest := next(iter(self.states))]
                self._put_out[oldest] = SESSION_END_REASONS["newer"]
            self.states[session] = state

    def _run(self, ask: Request, step: Step, state: State) -> Reply:
        if step.text_in is None and step.text_out is None:
            return Reply(self.name, step.run(self._data, state, **ask.arrays), "", state.entities)
        arrays, text = step.run(self._data, state, ask.text, **ask.arrays)
        return Reply(self.name, arrays, text, state.entities)
