"""The disclosure pipeline: the checks that a parsed request and its reply pass at a site, in order.

:meth:`fedstat.federation.disclosure.site.Site.answer` runs the checks :data:`ADMISSION` and :data:`BEFORE`,
runs the step, whose facts pass :data:`FACT_CHECKS` in the order in which it reports them, runs the checks
:data:`AFTER`, masks the reply and records it. The order is the security argument. Decisions from the request
and the policy come before a row is read, so that such a refusal reveals nothing. Decisions that depend on
rows come before any release, and these refusals are filtered and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fedstat.errors import (
    ConsentError,
    DescriptionError,
    DisclosureError,
    MessageError,
    PolicyError,
    Remedy,
    SecurityError,
    SessionError,
)
from fedstat.federation.audit.event_log import NO_SUBJECT, AnswerRecord, SessionChain, Subject
from fedstat.federation.audit.release_counts import BITS_PER_NUMBER, numbers_per_entity
from fedstat.federation.crypto.masks import Masker
from fedstat.federation.disclosure import differencing, facts, row_checks
from fedstat.federation.disclosure.approval import admit, formula_of
from fedstat.federation.disclosure.column_sums import check_column_sums, own_fit_problem
from fedstat.federation.disclosure.differencing import check_products
from fedstat.federation.disclosure.leverage import check_fitted_means, check_group_shares, check_leverage
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseMechanism, NoiseRequired, RepeatedRelease
from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.disclosure.request_checks import (
    PER_ENTITY,
    check_columns,
    check_counts,
    check_dealer,
    check_evaluation,
    check_factors,
    check_order,
    check_sampled_sites,
    refusals,
)
from fedstat.federation.disclosure.rules import toml_line
from fedstat.federation.disclosure.state import SESSION_END_REASONS, SiteData, State
from fedstat.federation.disclosure.weighted_sums import check_weighted_sums, unknown_weights_problem
from fedstat.federation.message import Reply, Request, Step, check_arrays
from fedstat.federation.tables.aligned_table import AlignedTable
from fedstat.federation.tables.table import LabeledTable
from fedstat.typing import Array

NO_REPLY = Reply("", {})
UNNAMED_PROBLEM = "not shown"


@dataclass(frozen=True, slots=True)
class FailedOwnFit(AnswerRecord):
    """A model whose own fit failed at a site."""

    model: str


@dataclass(slots=True)
class RequestContext:
    """A request at a site, with everything that a check may use.

    Parameters
    ----------
    data : SiteData
        Site, policy, table, ledger and release history.
    request : Request
    step : Step
    state : State
        Of the session.
    client : str
        Fingerprint of the client that sends the request.
    chain : SessionChain
        The site's ledger of the session.
    ended : str
        Why the site no longer knows the session; empty if it knows it.
    receipt, analysis : bool
        Whether it requests a statement on the ledger, which holds no data, and whether it is part of an
        analysis.
    noise : NoiseMechanism
    reply : Reply
        After the step: the reply before masks.
    sent : Reply
        The reply as it leaves.
    masker : Masker or None
        Masks the reply, if it is masked.
    costs : mapping of str to str
        Charge to the privacy budget, by array.
    released : ReleasedSums or None
        Release history before the step.
    written : str
        Time of the client's signature, as it states it.
    """

    data: SiteData
    request: Request
    step: Step
    state: State
    client: str
    chain: SessionChain
    ended: str
    receipt: bool
    analysis: bool
    noise: NoiseMechanism
    reply: Reply = NO_REPLY
    sent: Reply = NO_REPLY
    masker: Masker | None = None
    costs: Mapping[str, str] = field(default_factory=dict)
    released: ReleasedSums | None = None
    written: str = ""

    @property
    def policy(self) -> Policy:
        """What the owner of the site allows."""
        return self.data.policy

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites that mask the reply."""
        return () if self.masker is None else self.masker.sites

    def describe(self) -> None:
        """Note in the ledger what the session is about so far."""
        state, purpose, earlier = self.state, self.request.purpose, self.chain.subject
        requested = {name for fact in state.requested for one in fact.factors for name in one.columns}
        columns = tuple(sorted(state.used_columns | requested))
        state.subject = Subject(
            client=self.client,
            written=self.written,
            person=purpose.person,
            study=purpose.study,
            purpose=purpose.purpose,
            role=state.admitted.name(columns),
            formula=formula_of(self.request) or earlier.formula,
            columns=columns or earlier.columns,
            plan=state.analysis.digest if state.analysis.begun else "",
        )
        self.chain.describe(state.subject)

    @property
    def where(self) -> str:
        """Site and step, for messages."""
        return f"{self.data.name}, step '{self.request.step}'"


Check: TypeAlias = Callable[[RequestContext], None]


# ----------------------------------------------------------------------------------------------------
# Admission: to whom a message belongs, before its session is read.

FOREIGN_SESSION = (
    "another coordinator, person or study began this session. Make the model again with from_formula, and do "
    "not change person, study or purpose of a partition"
)


def is_foreign(data: SiteData, request: Request, client: str) -> bool:
    """Return whether another client, person or study opened the session of a request."""
    chain = data.site_ledger.find(request.session) if request.session else None
    stated = request.purpose
    who = (client, stated.person, stated.study, stated.purpose)
    return chain is not None and bool(chain.entries) and chain.subject.who not in (NO_SUBJECT.who, who)


def check_address(data: SiteData, request: Request, client: str) -> None:
    """Require a message to this site."""
    if request.site != data.name:
        raise MessageError(f"{data.name}: received a message that is addressed to '{request.site}'")


def check_session_owner(data: SiteData, request: Request, client: str) -> None:
    """Require the client, person and study that opened the session."""
    if is_foreign(data, request, client):
        raise SecurityError(f"{data.name}: {FOREIGN_SESSION}")


def check_turn(data: SiteData, request: Request, client: str) -> None:
    """Answer no request twice, and none of a session whose requests are partly unknown here."""
    if request.turn is None:
        return
    ledger, session = data.site_ledger, request.session
    seen, resumed = ledger.rounds(session), ledger.resumed(session)
    if request.turn > seen + 1 or (resumed and request.turn == seen):
        raise SessionError(f"{data.name}: {SESSION_END_REASONS['restart']}")
    if request.turn <= seen:
        raise SecurityError(
            f"{data.name}: request {request.turn} of a session with {seen} answered requests is refused: "
            "somebody repeated an old request, or a copy of the analysis is running"
        )


def check_ledger_complete(data: SiteData, request: Request, client: str) -> None:
    """Answer nothing while the ledger lacks what the site has signed."""
    data.site_ledger.check_undisputed(data.name)


ADMISSION: tuple[Callable[[SiteData, Request, str], None], ...] = (
    # A message for another site is no matter of this one.
    check_address,
    # Before anything of the session is read: masks and plan belong to the client that opened it.
    check_session_owner,
    # An old request would be answered with what the session knows now.
    check_turn,
    # Earlier releases are not known: nothing can be compared with them.
    check_ledger_complete,
)
"""Checks of a message before its session is opened; their refusals belong to no session in the ledger."""


# ----------------------------------------------------------------------------------------------------
# Before any row is read.


def check_request_arrays(context: RequestContext) -> None:
    """Require the arrays that the step declares."""
    check_arrays(context.where, context.step.takes, context.request.arrays)


def check_role(context: RequestContext) -> None:
    """Require a study of this coordinator, and a role of this person that has the family."""
    trust, request = context.data.trust, context.request
    try:
        admitted = admit(
            context.data.name, trust.studies, trust.roles, context.client, request.purpose, request.family
        )
    except ConsentError:
        context.describe()  # a refusal is recorded with the person and the study as well
        raise
    table = context.data.table
    context.state.admitted = replace(admitted, label=table.name if isinstance(table, LabeledTable) else "")
    context.describe()


def check_refusals_left(context: RequestContext) -> None:
    """Answer no client whose requests were refused too often."""
    most, refused = context.policy.max_refusals, context.data.site_ledger.refusals
    if most and not context.receipt and refused.get(context.client, 0) >= most:
        raise PolicyError.of_rule(
            "maximum refusals",
            context.data.name,
            f"has refused {most} requests for reasons that depend on its rows, and answers this client no "
            "more",
            remedy=Remedy(
                "fedstat site answer-again FOLDER", "The owner reads the log and can continue with '{call}'"
            ),
        )


def check_declared_release(context: RequestContext) -> None:
    """Compare what the step declares to release with the policy."""
    if not context.receipt:
        for error in refusals(context.data.name, context.policy, context.request, context.step):
            raise error


def check_session_known(context: RequestContext) -> None:
    """Require that the site still has what the session stored here."""
    if context.ended and not context.receipt:
        raise SessionError(f"{context.data.name}: {context.ended}")


def check_session_aligned(context: RequestContext) -> None:
    """Require that the order of the rows was agreed in this session."""
    if context.analysis and isinstance(context.data.table, AlignedTable):
        context.data.table.check_session(context.request.session)


def check_step_order(context: RequestContext) -> None:
    """Require an order of steps that a protocol has."""
    last = context.state.last
    check_order(context.data.name, context.policy, context.request, context.step, last)


def check_masks(context: RequestContext) -> None:
    """Require sites for the masks of a reply whose sum the policy allows, alone and after earlier ones."""
    if context.request.masked is None:
        return
    step = context.request.step
    absent = f"step '{step}': a masked reply needs keys, which the sites have not agreed on in this session"
    context.masker = context.state.use("masker", Masker, absent)
    differencing.check_masked_sites(context.data, context.sites)


def check_plan_approved(context: RequestContext) -> None:
    """Require that the owner has approved a plan with this request, if the policy requires approval."""
    if context.analysis and context.policy.approval == "owner":
        context.state.analysis.admit(context.data.approvals, context.request, context.step)


BEFORE: tuple[Check, ...] = (
    # First: who may not send the request learns nothing from the checks that follow. It reads no array.
    check_role,
    # So that a malformed request has its own error, and no later check meets a missing array or a NaN.
    check_request_arrays,
    # A client that has used up its refusals learns nothing from the checks that follow.
    check_refusals_left,
    # The policy is compared with declarations alone: this refusal is shown in full, since it reveals no row.
    check_declared_release,
    # The history of a lost session is gone: continuing it would escape the checks against differencing.
    check_session_known,
    # Rows in another order than agreed would be products of different persons.
    check_session_aligned,
    # In another order, replies could be compared that no fit compares.
    check_step_order,
    # Who masks a sum is public: from sums over other sites the part of one would follow by subtraction.
    check_masks,
    # Last, since it uses up the owner's approval: a request that is refused anyway must not cost one run.
    check_plan_approved,
)
"""Checks of a request before any row is read; none of their refusals depends on rows."""


class AlternativeReply(Exception):  # noqa: N818 (it is no error: a part of the protocol)
    """The reply that a step releases if its sums may not be released.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    text : str
    reason : str
        For the owner's log if the reply depends on rows and counts as a refusal; otherwise empty.
    """

    def __init__(self, arrays: Mapping[str, Array], text: str = "", reason: str = "") -> None:
        super().__init__()
        self.arrays, self.text, self.reason = arrays, text, reason


def check_working_weights(data: SiteData, state: State, fact: facts.WorkingWeights) -> None:
    """Require that weights at coefficients spread; otherwise release the step's alternative, or nothing."""
    if row_checks.working_weights_spread(data, fact.each, fact.totals, fact.flat):
        return
    if fact.instead is not None:
        raise AlternativeReply(fact.instead)
    raise row_checks.refusal(
        data,
        "minimum count",
        f"requires at least {data.min_count} rows behind sums at any coefficients; at these, nearly all "
        f"weight is on fewer{row_checks.max_share_text(data)}. In a fit, outcomes are then nearly separated, "
        "or tails are very long: leave out the term that separates them, or transform it",
    )


def check_group_sums(data: SiteData, state: State, fact: facts.GroupSums) -> None:
    """Require groups that are large enough, also for columns of few values, and no large share of a row."""
    row_checks.check_groups(data, state, fact)
    row_checks.check_cardinality(data, fact)
    if fact.summed is not None:
        check_group_shares(data, state, fact.summed)


def check_level_counts(data: SiteData, state: State, fact: facts.LevelRowCounts) -> None:
    """Require enough rows of every level, whether the fit knows it or not."""
    if fact.known:
        row_checks.check_levels(data, fact.column, fact.counts, fact.numbers)
    else:
        row_checks.check_unknown_levels(data, fact.column, fact.counts)


def check_score_and_information(data: SiteData, state: State, fact: facts.ScoreAndInformation) -> None:
    """Require that sums at all coefficients of a session single out no few rows, alone and with others."""
    # Where all weights are known, nothing remains for the comparison of means.
    if not check_weighted_sums(data, state, fact):
        check_fitted_means(data, state, fact)


def check_own_fit(data: SiteData, state: State, fact: facts.OwnFit) -> None:
    """Release the fit of a site's own rows only if it has enough of them."""
    if problem := own_fit_problem(data, fact):
        raise AlternativeReply(*fact.instead(problem))
    if fact.weighted is None:
        return
    if (error := unknown_weights_problem(data, state, fact.weighted)) is not None:
        found = facts.OwnFitProblem(str(error), fact.sums.weights, fact.instead)
        check_own_fit_problem(data, state, found)
        raise AlternativeReply(*fact.instead("not shown: few rows have a combination of levels"))


def check_own_fit_problem(data: SiteData, state: State, fact: facts.OwnFitProblem) -> None:
    """Return one text for every reason that depends on rows, and count it once as a refusal."""
    if data.policy.reasons == "sent" and data.policy.privacy is None:
        return
    this, earlier = FailedOwnFit(fact.model), data.site_ledger.records(FailedOwnFit)
    reason = "" if this in earlier else f"own fit not shown: {fact.problem}"
    data.site_ledger.remember(this)
    raise AlternativeReply(*fact.instead(UNNAMED_PROBLEM), reason)


def check_factors_requested(data: SiteData, state: State, fact: facts.FactorsRequested) -> None:
    """Require simple factors, and comparisons with which no search finds a value."""
    check_factors(data, state, fact)
    # Under a budget only noise is released, and a refusal that counts rows would not be paid for.
    if data.policy.privacy is None:
        row_checks.check_cuts(data, fact)


FACT_CHECKS: Mapping[type, Callable[[SiteData, State, Any], None]] = {
    facts.KeyAlignmentRequest: row_checks.check_alignment,
    facts.ExternalKeyList: row_checks.check_key_list,
    facts.FactorsRequested: check_factors_requested,
    facts.ModelEvaluation: check_evaluation,
    facts.ProductDealer: check_dealer,
    facts.CountedProduct: row_checks.check_counted_product,
    facts.SampledSites: check_sampled_sites,
    facts.DescentPoint: differencing.check_descent,
    NoiseRequired: lambda data, state, fact: state.check_noise(),
    RepeatedRelease: lambda data, state, fact: None,  # held against the ledger when noise is added
    facts.EntityCount: row_checks.check_entities,
    facts.RowCount: row_checks.check_rows,
    facts.UnequalWeights: row_checks.check_unequal_weights,
    facts.RowsUsed: differencing.check_row_difference,
    facts.LevelsRequested: differencing.check_level_difference,
    facts.RowGroups: differencing.check_row_groups,
    facts.GroupSums: check_group_sums,
    facts.SummedColumns: check_group_shares,
    facts.ExcludedEntities: row_checks.check_excluded_entities,
    facts.ClusterRowCounts: row_checks.check_clusters,
    facts.ClusterProducts: row_checks.check_cluster_products,
    facts.ClusterCounts: row_checks.check_cluster_counts,
    facts.OutcomeCounts: row_checks.check_events,
    facts.LevelRowCounts: check_level_counts,
    facts.AbsorbedLevels: row_checks.check_absorbed_levels,
    facts.IndicatorCounts: row_checks.check_indicators,
    facts.ColumnVariation: row_checks.check_variation,
    facts.DesignDirections: check_leverage,
    facts.SummedProducts: check_products,
    facts.CaseWeights: row_checks.check_case_weights,
    facts.ExternalWeights: row_checks.check_external_weights,
    facts.WeightedEstimates: differencing.check_weighted_estimates,
    facts.WorkingWeights: check_working_weights,
    facts.ScoreAndInformation: check_score_and_information,
    facts.ColumnSums: check_column_sums,
    facts.OwnFit: check_own_fit,
    facts.OwnFitProblem: check_own_fit_problem,
}
"""Checks of facts, run as soon as a step reports one. A fact that is not listed cannot be declared or
reported.

A check raises PolicyError with site, rule and remedy, or AlternativeReply if another reply is released.
"""


def check_reply_arrays(context: RequestContext) -> None:
    """Require the arrays that the step declares to release."""
    check_arrays(context.where, context.step.gives, context.reply.arrays)


def check_weights_received(context: RequestContext) -> None:
    """Examine all arrays of the request that are declared as weights of rows."""
    for name, declared in context.step.takes.items():
        if declared.weighs and name in context.request.arrays:
            context.state.report(facts.ExternalWeights(context.request.arrays[name], declared.weighs))


def check_facts_reported(context: RequestContext) -> None:
    """Require all facts that are declared behind what leaves; a DisclosureError if the step forgot one."""
    given = context.step.given
    for name in context.reply.released:
        # The state counts entities by itself: none counted are none there are.
        missing = set(given[name].behind) - context.state.reported - {facts.EntityCount}
        if missing:
            reported = ", ".join(sorted(fact.__name__ for fact in missing))
            raise DisclosureError(
                f"{context.where}: array '{name}' does not leave: {reported} is declared to stand behind it, "
                "and the step did not report it. Nothing was released. The author of the family must report "
                "this fact"
            )


def check_role_columns(context: RequestContext) -> None:
    """Require a role of this person that has all columns of the session."""
    context.state.admitted.check_columns(context.state.used_columns)


def check_column_limit(context: RequestContext) -> None:
    """Require that the session has opened no more columns than the policy allows."""
    check_columns(context.data.name, context.policy, context.request, context.state.columns)


def check_entities_behind(context: RequestContext) -> None:
    """Require enough entities behind every array."""
    names, entities = context.reply.released, context.state.entities
    check_counts(context.data.name, context.policy, context.request, context.step, names, entities)


def check_released_alone(context: RequestContext) -> None:
    """Require enough rows of the site behind a sum that would be released without a mask."""
    least, masked = context.policy.min_own_rows, context.request.masked is not None
    if masked or context.state.entities >= least:
        return
    for name in context.reply.released:
        declared = context.step.given[name]
        if declared.maskable and facts.RowCount in declared.behind:
            raise PolicyError.of_rule(
                "minimum rows of an own fit",
                context.data.name,
                f"releases array '{name}' of step '{context.request.step}' without a mask for at least "
                f"{least} rows (min_own_rows); there are {context.state.entities}",
                remedy=Remedy("fit(..., masked=True)", "Fit with {arguments}"),
            )


def check_row_level_values(context: RequestContext) -> None:
    """Require that the numbers per entity, with those of earlier releases, are at most the allowed number."""
    most, before, given = context.policy.per_entity, context.data.site_ledger.vectors, context.step.given
    shapes = [array.shape for name, array in context.reply.arrays.items() if given[name].kind == PER_ENTITY]
    now = sum(map(numbers_per_entity, shapes))
    if most == "any" or not now or before + now <= most:
        return
    line = toml_line("per_entity", max(2 * most, before + 40))
    raise DescriptionError.of_rule(
        "per entity",
        context.data.name,
        f"releases {most} numbers for each entity over all analyses, and has released {before}: "
        f"{before * BITS_PER_NUMBER:,} bits about each entity. As many numbers as there are columns "
        f"determine the rows. The owner can allow more with  {line}  in policy.toml",
    )


def charge_noise(context: RequestContext) -> None:
    """Charge the privacy budget, which refuses what exceeds it, and add the noise."""
    owed, arrays = context.state.owed, context.reply.arrays
    arrays, context.costs = context.noise.add(context.request, context.step, owed, arrays)
    context.reply = replace(context.reply, arrays=arrays)


def check_plan_kept(context: RequestContext) -> None:
    """Require the columns and sizes of the approved plan; before a plan, note the request."""
    if context.analysis and context.policy.approval == "owner":
        analysis, arrays = context.state.analysis, context.reply.arrays
        n_sites = len(context.sites)
        analysis.hold(context.data.approvals, context.request, arrays, context.state.used_columns, n_sites)


AFTER: tuple[Check, ...] = (
    # All checks below, the masks and the ledger rely on the declared kinds and dimensions.
    check_reply_arrays,
    # After the step, which knows how many weights there must be: a malformed request is named as such.
    check_weights_received,
    # After the weights, which are facts too: an array whose facts are incomplete was not examined.
    check_facts_reported,
    # Columns that a step used without a formula; those of formulas were checked before a row was read.
    check_role_columns,
    # What the step has opened counts even if this reply has none of it.
    check_column_limit,
    # Every array by its kind, whatever facts the step reported.
    check_entities_behind,
    # Unmasked sums are the site's own: the same minimum as for its own fit.
    check_released_alone,
    # The sum over all sessions, which no step knows.
    check_row_level_values,
    # After all checks that can refuse because of rows: a charge is final, and pays for a real release.
    charge_noise,
    # Last, on the final content, before masks change its shape.
    check_plan_kept,
)
"""Checks of a reply before it is masked; their refusals may depend on rows, and are filtered and counted."""
