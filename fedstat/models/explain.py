"""Dry run of a fit: what the fit would request and release."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pandas as pd

from fedstat.errors import EngineError, NotAvailableError, PolicyError, SessionError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.audit.ledger import CoordinatorLog, Ledger
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.disclosure.approval import AnalysisPlan, PlannedStep
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.request_checks import PER_ENTITY
from fedstat.federation.disclosure.threat_statements import threats_beyond_one_fit
from fedstat.federation.dry_run.execution import DryRunEnded, DryRunEngine, DryRunRecord, DrySite
from fedstat.federation.dry_run.expected_releases import (
    AnalysisDescription,
    ExpectedArray,
    ExpectedReleases,
    IterationLoop,
    PlanBuilder,
    join_names,
    who_learns,
)
from fedstat.federation.message import Request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Engine, Fit, FitProtocol
from fedstat.federation.protocols.plan_approval import propose_plans
from fedstat.inference.explanation import Explanation
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.progress_line import progress

PLANNED = ("sender", "receiver", "step", "array", "kind", "what", "masked", "shape", "entities")
COUNTED = ("messages", "messages_low", "messages_high", "bytes", "bytes_low", "bytes_high")
JUDGED = ("guessed", "policed", "passes", "refused_by", "refusal")
COLUMNS = [*PLANNED, "rules", *COUNTED, *JUDGED]


class DryRunPlan:
    """What a family knows of its own fits before one runs; here, that nothing depends on the data."""

    guessed: ClassVar[frozenset[str]] = frozenset()
    """Steps whose shapes are not known in advance."""

    repeated: ClassVar[frozenset[str]] = frozenset()
    """Steps at the end of a fit that keep nothing; one dry reply counts for all of the same shape."""

    largest: Mapping[tuple[str, str], int] = MappingProxyType({})
    """Most numbers of an array, by step and array, where its size depends on the data."""

    checks: tuple[str, ...] = ()
    """Steps of tests of assumptions at the end of a fit, which stands if a site refuses them."""

    nested: tuple[str, ...] = ()
    """Columns of groups that have one level a site."""

    binary: tuple[str, ...] = ()
    """Labels that are 0 or 1, such as the column of a survival model that marks events."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        self.given = given

    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the rehearsal that are not those of the fit."""
        return {}

    def intended(self, request: Request) -> Request:
        """Return a request of the rehearsal as the fit would send it, where :meth:`arguments` differ."""
        return request

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the loops of which the data decide how often they are repeated."""
        return ()

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Say what else who could learn."""
        yield from ()

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """Say what a reader of the plan should know besides; iterations are explained for all families."""
        yield from ()


def settled(fit: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a fit with its defaults; a TypeError where the fit has no such argument."""
    bound = inspect.signature(fit).bind(**arguments)
    bound.apply_defaults()
    return dict(bound.arguments)


OF_RESULTS = (
    *(
        "params",
        "bse",
        "pvalues",
        "tvalues",
        "conf_int",
        "cov_params",
        "summary",
        "tidy",
        "glance",
        "predict",
    ),
    *("get_prediction", "plot_coefficients", "t_test", "wald_test", "llf", "aic", "bic", "coef_", "save"),
)
"""Names of results, which users of other packages read from a model after its fit."""


class Explainable:
    """A model that says what its fit would ask for; its family names the plan of its fits.

    Attributes
    ----------
    engine : Engine
        Engine that sends the requests; that of the partition.
    distribution : DistributionSpec
        Distribution and link of the response, for models that have one.
    """

    partition: ClientPartition
    engine: Engine
    formula: Formula
    coordinator: str
    _session: str
    _log: CoordinatorLog
    _agreement: Ledger
    """What making the model released; the ledger of every fit begins with it."""
    _rest: Self | None = None
    """The model among the sites that remained after a fit lost one."""
    fit: Callable[..., Any]
    distribution: DistributionSpec = DistributionSpec("Gaussian", "Identity")
    _plan: ClassVar[type[DryRunPlan] | None] = None

    def __repr__(self) -> str:
        text = getattr(getattr(self, "formula", None), "text", "")
        shown = [f"{text[:57]}..." if len(text) > 60 else text] if text else []
        if "distribution" in vars(self):
            shown.append(str(self.distribution))
        what = "rows" if self.partition.layout == "horizontal" else "entities"
        n, K = self.partition.n_entities, len(self.partition.sites)
        return f"<{type(self).__name__}: {', '.join([*shown, f'{n:,} {what}'])} of {K} sites; see .fit()>"

    if not TYPE_CHECKING:  # so that a misspelled name is still found by type checkers

        def __getattr__(self, name: str) -> Any:
            """State that a fit returns what the analyst requested."""
            if name in OF_RESULTS:
                raise AttributeError(
                    f"{type(self).__name__} has no {name!r}: it is a model. Its results have it: call .fit()"
                )
            return object.__getattribute__(self, name)

    def explain(self, **arguments: Any) -> Explanation:
        """Report the requests of :meth:`fit` and the releases of each site, without sending a request.

        The steps of the fit run here on synthetic designs: with the agreed columns and entities, and with
        random numbers. No record is read, and no message is sent.

        Parameters
        ----------
        **arguments
            As for :meth:`fit`.

        Returns
        -------
        Explanation
            Refusals, rounds and bytes, every array with the rules that apply to it, and what each party could
            learn.

        Raises
        ------
        NotAvailableError
            The model family has no dry run.
        ModelError, EstimationError
            As the fit, as far as it does not depend on the data.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> told = fs.GLORE.from_formula("num > 0 ~ age", partition).explain()
        >>> told.passes, told.totals().index.tolist()
        (True, ['coordinator', 'Cleveland', 'Hungary', 'Long Beach', 'Switzerland'])
        """
        if self._plan is None:
            raise NotAvailableError(
                f"no dry run for {type(self).__name__}; the ledger of a result lists what sites released"
            )
        given = settled(self.fit, arguments)
        model = self._with_columns_of(given)
        return explain_fit(model, self._plan(model, given), arguments)

    def _with_columns_of(self, arguments: Mapping[str, Any]) -> Self:
        """Return the model with the columns that arguments of the fit name, such as those of clusters."""
        return self

    @property
    def _description(self) -> str:
        """What is estimated, in words that an owner consents to: the formula."""
        return self.formula.text

    @property
    def _distribution_text(self) -> str:
        """Of what distribution, in words that an owner consents to."""
        return str(self.distribution)

    def _new_ledger(self) -> Ledger:
        """Start the ledger of one run."""
        return Ledger(None if self.coordinator == "apart" else self.coordinator, log=self._log)

    def _after_transforms(self, protocol: FitProtocol[Fit], ledger: Ledger) -> FitProtocol[Fit]:
        """Agree on transforms, where that is still to be done, before a protocol goes on."""
        return protocol

    def _without_lost(self, error: EngineError | SessionError, ledger: Ledger) -> Self:
        """Return the same model among the remaining sites; by default a fit ends with the error."""
        raise error

    def _drop_columns(self, columns: Sequence[str]) -> bool:
        """Leave columns out of the design, and return whether a fit starts again; by default it ends."""
        return False

    def _columns_read(self, site: str) -> Sequence[str]:
        """Name the columns of a site that the model reads."""
        raise NotImplementedError

    def _reported_afterwards(self, site: str) -> Iterator[PlannedStep]:
        """Plan what results may ask of a site in the session of their fit."""
        yield from ()

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        """Make sites with a synthetic design of this model."""
        raise NotImplementedError


def explain_fit(model: Explainable, plan: DryRunPlan, arguments: Mapping[str, Any]) -> Explanation:
    """Rehearse a fit with these arguments, and say what it would ask for."""
    dry_run = rehearse(model, plan, arguments)
    expected = ExpectedReleases(dry_run, plan.loops(dry_run), plan.checks)
    planned = expected.planned()
    return Explanation(
        call=call_of(model, arguments),
        table=as_table(planned, dry_run.at, plan.guessed),
        rounds=[(", ".join(steps), counts) for steps, counts in expected.rounds()],
        refused={site: by_rule(found) for site, found in expected.refusals().items()},
        learned=[*learned_from(plan, expected), *learned_beyond(model.partition)],
        notes=[
            *iteration_notes(expected),
            *plan.notes(expected),
            *check_notes(expected),
            *dry_run_notes(dry_run),
            *consent_notes(model),
            *vector_notes(model, planned),
        ],
    )


def call_of(model: Explainable, arguments: Mapping[str, Any], method: str = "fit") -> str:
    """Write a fit, or what another method asks, as it would be called."""
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{type(model).__name__}.{method.lstrip('_')}({call})"


def owners_consulted(partition: ClientPartition) -> list[str]:
    """List the sites whose owners consent to every analysis."""
    return [name for name, site in partition.sites.items() if site.policy.approval == "owner"]


def learned_in(expected: ExpectedReleases) -> list[tuple[str, str]]:
    """Say who could learn what from what passes: pairs of a party and a sentence."""
    dry_run = expected.dry_run
    return [*who_learns(expected.planned(), dry_run.at, dry_run.n_masked, dry_run.dealers)]


def learned_from(plan: DryRunPlan, expected: ExpectedReleases) -> list[tuple[str, str]]:
    """Say who could learn what: pairs of a party and a sentence."""
    return [*learned_in(expected), *plan.learned(expected)]


def learned_beyond(partition: ClientPartition) -> Iterator[tuple[str, str]]:
    """Say who could learn what by other means than this fit, under the policies that the sites have."""
    here = bool(getattr(partition.engine, "setting", ""))
    return threats_beyond_one_fit([site.policy for site in partition.sites.values()], here)


def propose(model: Explainable, sites: Sequence[str], arguments: Mapping[str, Any], method: str) -> None:
    """Propose the plan of a fit, or of another method, to the owners of these sites.

    A ConsentError where not all have consented.
    """
    if model._plan is not None:
        plans = plans_of(model, sites, arguments, method)
        model.engine.run(propose_plans(plans, model._session), model._new_ledger())


def plans_of(
    model: Explainable, sites: Sequence[str], arguments: Mapping[str, Any], method: str = "fit"
) -> dict[str, AnalysisPlan]:
    """Plan a fit, or another method, for the owners of these sites."""
    assert model._plan is not None
    plan = model._plan(model, settled(getattr(model, method), arguments))
    dry_run = rehearse(model, plan, arguments, method)
    expected = ExpectedReleases(dry_run, plan.loops(dry_run))
    learned = tuple(f"{who}: {sentence}" for who, sentence in learned_from(plan, expected))
    words = AnalysisDescription(
        call_of(model, arguments, method), model._description, model._distribution_text, learned
    )
    by_rows = model.partition.layout == "horizontal"
    maker = PlanBuilder(expected, words, plan.guessed, by_rows, plan.largest)
    return {
        site: maker.plan(site, model._columns_read(site), tuple(model._reported_afterwards(site)))
        for site in sites
    }


def rehearse(
    model: Explainable, plan: DryRunPlan, arguments: Mapping[str, Any], method: str = "fit"
) -> DryRunRecord:
    """Send a fit's own requests to sites with synthetic designs, as far as they are known in advance."""
    policies = {name: site.policy for name, site in model.partition.sites.items()}
    dry_run = DryRunEngine(model._invent_sites(plan, policies), plan.repeated, plan.intended)
    # The model keeps its own engine: only the copy addresses synthetic sites.
    double = copy.copy(model)
    double.engine = dry_run
    # Warnings of a fit to synthetic numbers do not apply to the real one.
    with warnings.catch_warnings(), progress(False):
        warnings.simplefilter("ignore")
        try:
            # A dry run reports no progress, even if the fit does.
            silent = {"progress": False} if "progress" in arguments else {}
            getattr(double, method)(**{**arguments, **plan.arguments(), **silent})
        except DryRunEnded:
            return dry_run.dry_run()
    raise NotAvailableError("no dry run: this fit sends no request through its engine")


def as_table(planned: Sequence[ExpectedArray], at: str | None, guessed: frozenset[str]) -> pd.DataFrame:
    """One row per array; a coordinator at a site appears under the name of the site."""
    # For readers of the table, a coordinator at a site is that site.
    table = pd.DataFrame([_cells(row) | {"guessed": row.step in guessed} for row in planned], columns=COLUMNS)
    if at is not None:
        for role in ("sender", "receiver"):
            table[role] = table[role].replace(COORDINATOR, at)
    return table


def _cells(row: ExpectedArray) -> dict[str, Any]:
    """One row of the table."""
    cells: dict[str, Any] = {name: getattr(row, name) for name in PLANNED}
    for name in ("messages", "bytes"):
        low, expected, high = getattr(row, name)
        cells |= {name: expected, f"{name}_low": low, f"{name}_high": high}
    return cells | {
        "rules": "; ".join(row.rules),
        "policed": row.sender != COORDINATOR,
        "passes": not row.refusals,
        "refused_by": ", ".join(dict.fromkeys(one.rule for one in row.refusals)),
        "refusal": " ".join(str(one) for one in row.refusals),
    }


def by_rule(refusals: Sequence[PolicyError]) -> dict[str, list[str]]:
    """Messages of refusals, each once, by rule."""
    out: dict[str, dict[str, None]] = {}
    for one in refusals:
        out.setdefault(one.rule, {})[str(one)] = None
    return {rule: list(messages) for rule, messages in out.items()}


def vector_notes(model: Explainable, planned: Sequence[ExpectedArray]) -> Iterator[str]:
    """Hold what a fit asks for of every entity against what owners let leave of all analyses together."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, site in model.partition.sites.items():
        most, rows = site.policy.per_entity, [row for row in planned if row.sender == name]
        each = [row.messages for row in rows if row.kind == PER_ENTITY]
        if each and isinstance(most, int) and most:
            alike.setdefault((most, *map(sum, zip(*each, strict=True))), []).append(name)
    for (most, low, usual, high), names in alike.items():
        releases = "releases" if len(names) == 1 else "each release"
        yield (
            f"{join_names(names)} {releases} {most:,} numbers for each entity, in all analyses (per_entity). "
            f"This fit requests {low:,} to {high:,}, about {usual:,}; requests beyond the limit are refused."
        )


def iteration_notes(expected: ExpectedReleases) -> Iterator[str]:
    """Say which rounds are repeated until the fit has converged, and how many are counted."""
    dry_run = expected.dry_run
    lengths = {loop.steps[0]: loop.lengths(dry_run) for loop in expected.loops if loop.done(dry_run)}
    open_ended = {step: each for step, each in lengths.items() if each[0] < each[2]}
    if open_ended:
        counts = "; ".join(
            f"'{step}' {usual:,}, {low:,} to {high:,}" for step, (low, usual, high) in open_ended.items()
        )
        yield (
            "The number of iterations depends on the data. Counts are those of a dry run on synthetic "
            f"data; in parentheses are those with one iteration and at the fit's limit: {counts}. Shortened "
            "steps add rounds."
        )


def check_notes(expected: ExpectedReleases) -> Iterator[str]:
    """Say which sites refuse the tests of assumptions, without which the fit stands."""
    against = expected.refusals()
    refused = {site: error for site, error in expected.unchecked().items() if site not in against}
    if refused:
        yield (
            f"The fit stands without its tests of assumptions, which {join_names([*refused])} "
            f"refuse{'s' * (len(refused) == 1)}: " + " ".join(dict.fromkeys(map(str, refused.values())))
        )


def consent_notes(model: Explainable) -> Iterator[str]:
    """Say whose owners have to consent first."""
    if owners := owners_consulted(model.partition):
        yield f"This waits for the consent of the owners of {join_names(owners)}: fit() proposes it to them."


def dry_run_notes(dry_run: DryRunRecord) -> Iterator[str]:
    """State the requests already sent when the model was made, and where the dry run ends."""
    kinds = dict.fromkeys(kind for found in dry_run.earlier.values() for kind in found)
    if kinds:
        yield f"Making the model has asked already, for values of these kinds: {', '.join(kinds)}."
    if dry_run.cut_short:
        yield f"Nothing is reported beyond the refusal of step '{dry_run.cut_short}'."
