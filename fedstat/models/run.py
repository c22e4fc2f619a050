"""How a fit is run: progress, consent, masked sums, receipt, ledger, and the sites that remain.

A model's ``fit`` parses its arguments and calls :func:`run_fit` with the function that estimates. That
function builds protocols and runs them by :meth:`FitAttempt.run`, the only place where the protocol of a fit
reaches the engine.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import scipy.linalg  # noqa: F401  its BLAS is loaded before threads are limited
from threadpoolctl import ThreadpoolController

from fedstat.errors import (
    AliasedColumnsError,
    DataWarning,
    DisclosureWarning,
    EngineError,
    FedstatError,
    SessionError,
    warn,
    without_internal_frames,
)
from fedstat.federation.audit.event_log import AbsentSite
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import TWO_SITES
from fedstat.federation.disclosure.approval import AnalysisPlan
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DryRunEnded, DryRunEngine, DrySite
from fedstat.federation.dry_run.expected_releases import (
    AnalysisDescription,
    ExpectedReleases,
    IterationLoop,
    PlanBuilder,
)
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Fit, FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.protocols.plan_approval import propose_plans
from fedstat.federation.protocols.receipts import with_receipt
from fedstat.models.explain import Explainable, learned_in, owners_consulted, propose
from fedstat.progress_line import progress

P = ParamSpec("P")
Results = TypeVar("Results")
AnyModel = TypeVar("AnyModel", bound=Explainable)
PLAIN = (str, bool, int, float, type(None))


@dataclass(frozen=True, slots=True)
class Call:
    """A method of a model and its arguments that are not the defaults: what owners consent to."""

    method: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, method: Callable[..., Any], values: Mapping[str, Any]) -> Call:
        """Read the arguments of a call from the local variables with which its method begins."""
        given = {
            name: values[name]
            for name, parameter in inspect.signature(method).parameters.items()
            if not is_same(values[name], parameter.default)
        }
        return cls(method.__name__, given)


def is_same(value: object, default: object) -> bool:
    """Whether a value is the default; arrays compare entry by entry and never are."""
    return value is default or (
        isinstance(value, PLAIN) and type(value) is type(default) and value == default
    )


@dataclass(frozen=True, slots=True)
class FitAttempt:
    """One attempt at a fit: a model among the sites that take part, and the ledger of this attempt."""

    model: Explainable
    ledger: Ledger

    def run(self, protocol: FitProtocol[Fit], masked_at: Sequence[str] = ()) -> Fit:
        """Run a protocol and enter what it releases into the ledger; sums over `masked_at` are masked."""
        model, ledger = self.model, self.ledger
        by_rows = model.partition.layout == "horizontal"
        # 1. Sites mask their parts of sums.
        if masked_at:
            if len(masked_at) == 2 and not by_rows:
                warn(TWO_SITES, DisclosureWarning)
            protocol = masked_protocol(protocol, masked_at, model._session, sums_only=by_rows)
        # 2. Transforms that need an owner's consent are agreed on in the same run, before anything else.
        protocol = model._after_transforms(protocol, ledger)
        # 3. The sites sign what their own ledgers say of the run.
        protocol = with_receipt(protocol, tuple(model.partition.sites), model._session, ledger)
        # 4. The engine carries requests and replies, and enters every array into the ledger.
        return model.engine.run(protocol, ledger)


@cache
def blas_libraries() -> ThreadpoolController:
    """Return the linear algebra libraries of this process.

    Fits limit them to one thread. Matrices of a fit are small, so several threads cost more than they save:
    up to four times the CPU seconds, and never fewer seconds of wall time.
    """
    return ThreadpoolController()


def run_fit(
    model: AnyModel,
    call: Call,
    estimate: Callable[Concatenate[AnyModel, FitAttempt, P], Results],
    *args: P.args,
    **options: P.kwargs,
) -> Results:
    """Run a fit from the owners' consent to its results.

    Parameters
    ----------
    model : Explainable
        Model of the fit.
    call : Call
        The method as the analyst called it.
    estimate : callable
        ``estimate(model, attempt, *args, **options)`` builds protocols, runs them by ``attempt.run`` and
        returns results. It is called again with the model among the remaining sites where a site is lost.
    *args, **options
        Parsed arguments of the fit.

    Raises
    ------
    ConsentError
        Not all owners who are asked have consented.
    EngineError, SessionError
        A site is lost, and the model or the partition's quorum does not allow a fit without it.
    """
    started, is_dry_run = model, isinstance(model.engine, DryRunEngine)
    # Later fits go on among the sites that remained; a dry run asks none of them.
    if not is_dry_run:
        model = model._rest or model
    with progress(call.arguments.get("progress")), blas_libraries().limit(limits=1, user_api="blas"):
        while True:
            # Two fits of one model must not enter each other's ledger: each begins with the agreement's.
            attempt = FitAttempt(model, copy.deepcopy(model._agreement))
            try:
                # First of all: nothing else may be requested before all owners have consented.
                if not is_dry_run and (owners := owners_consulted(model.partition)):
                    propose(model, owners, call.arguments, call.method)
                result: Any = estimate(model, attempt, *args, **options)
                if getattr(result, "_model", result) is None:
                    result._model = model
                if hasattr(result, "_call"):
                    result._call = call
                return cast(Results, result)
            except AliasedColumnsError as error:
                # What the attempt released stays in the ledger; the sites code the rows again without them.
                model._agreement = attempt.ledger
                if not model._drop_columns(error.columns):
                    raise
            except (EngineError, SessionError) as error:
                model = started._rest = model._without_lost(error, attempt.ledger)


# ----------------------------------------------------------------------------------------------------
# Quorum: a fit starts again among the remaining sites where one is lost, with keys of their own.
#
# A masked sum needs the part of every site that agreed on its masks, and the other sites do not know the
# secret of a lost one: the rest agree on new keys in a new session, and the fit starts again. Its estimates
# are those of a fit without the lost site, to the bit; the rounds before the loss are spent.
#
# What this discloses: the coordinator knows sums with the lost site and the same sums without it, and so by
# subtraction the part of that site. The same holds where the reply of a site came late, or where a
# coordinator falsely reports it as lost. Double masks (Bonawitz et al. 2017) would prevent both sums of one
# round from being known, for a second request to every site in every round and shares of secrets. They would
# not prevent a comparison of the sums of two successive rounds, between which coefficients hardly move.
# Owners forbid both by their policies (`apart`, in :mod:`fedstat.federation.disclosure.differencing`).

MOST_RESTARTS = 3
"""Times that a fit starts again because a site was restarted; a site that loses every session is no help."""


def rest_after(
    partition: ClientPartition, error: EngineError | SessionError, ledger: Ledger
) -> ClientPartition:
    """Return the partition among which a fit starts again, and enter the absent sites into the ledger.

    Raises
    ------
    EngineError, SessionError
        The same error, where the fit has to end.
    """
    lost = error.sites if isinstance(error, EngineError) else ()
    left = [site for site in partition.sites if site not in lost]
    again = isinstance(error, SessionError)
    if not partition.quorum or not (lost or again):
        raise error
    if len(left) < partition.quorum:
        raise EngineError(f"{error}. Fewer are left than the quorum of {partition.quorum} sites")
    if again and sum(one.back for one in ledger.absent) >= MOST_RESTARTS:
        raise error
    names = lost or tuple(error.sites)
    absent = tuple(AbsentSite(name, ledger.rounds, again) for name in names)
    ledger.absent += absent
    warn(f"{'; '.join(map(str, absent))} ({len(left)} of {len(partition.sites)} sites)", DataWarning)
    return partition._among(left) if lost else partition


# ----------------------------------------------------------------------------------------------------
# Analyses after a fit: predictions, evaluations, scores. Owners consent to each by itself.


@dataclass(frozen=True, slots=True)
class PostFitAnalysis:
    """An analysis after a fit, such as a prediction or an evaluation, as proposed to owners.

    `call`, `formula` and `distribution` describe it; `invent` makes sites without data that can answer it,
    under the policies of the real ones; `columns` names the columns that it reads, by site. `loops` are
    rounds whose number depends on the data, and `guessed` steps of unknown size. Only owners of sites that
    receive a request consent.
    """

    partition: ClientPartition
    call: str
    formula: str
    distribution: str
    invent: Callable[[Mapping[str, Policy]], Mapping[str, DrySite]]
    columns: Mapping[str, Sequence[str]]
    loops: Sequence[IterationLoop] = ()
    guessed: frozenset[str] = frozenset()

    def plans(
        self, owners: Sequence[str], protocol: FitProtocol[Any], ledger: Ledger
    ) -> dict[str, AnalysisPlan]:
        """Plan a protocol for the owners of these sites, from a dry run of it."""
        policies = {name: site.policy for name, site in self.partition.sites.items()}
        dry_run = DryRunEngine(self.invent(policies))
        try:
            dry_run.run(protocol, Ledger(at=ledger.at))
        except DryRunEnded:
            expected = ExpectedReleases(dry_run.dry_run(), self.loops)
        learned = tuple(f"{who}: {sentence}" for who, sentence in learned_in(expected))
        words = AnalysisDescription(self.call, self.formula, self.distribution, learned)
        maker = PlanBuilder(expected, words, self.guessed, self.partition.layout == "horizontal")
        request = {one.site for one in expected.dry_run.requested}
        return {site: maker.plan(site, self.columns.get(site, ())) for site in owners if site in request}


def run_analysis(
    analysis: PostFitAnalysis,
    protocol: Callable[[], FitProtocol[Fit]],
    ledger: Ledger,
    dry_run: Callable[[], FitProtocol[Fit]] | None = None,
) -> Fit:
    """Run an analysis after a fit in one session, once the owners who are asked have consented.

    `dry_run` makes the protocol for sites without data, where that is another one.

    Raises
    ------
    ConsentError
        Not all have consented; names sites, digests and commands.
    """
    try:
        running = protocol()
        if owners := owners_consulted(analysis.partition):
            plans = analysis.plans(owners, (dry_run or protocol)(), ledger)
            running = proposing(plans, running)
        return analysis.partition.engine.run(running, ledger)
    except FedstatError as error:
        raise without_internal_frames(error) from error.__cause__


def proposing(plans: Mapping[str, AnalysisPlan], protocol: FitProtocol[Fit]) -> FitProtocol[Fit]:
    """Propose plans in the session of a protocol, and go on with it where all owners have consented."""
    requests = next(protocol)
    yield from propose_plans(plans, requests[0].session)
    try:
        while True:
            requests = protocol.send((yield requests))
    except StopIteration as ended:
        fit: Fit = ended.value
        return fit
