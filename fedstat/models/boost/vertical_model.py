"""Functional boosting when sites hold different columns: checks of the arguments, and the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedstat.errors import DataWarning, FormulaError, ModelError, warn
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.design.vertical_design import Design, MissingRule
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.synthetic_columns import synthetic_column_sites
from fedstat.federation.dry_run.synthetic_rows import synthetic_generator
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.boost.arguments import refuse_few_rows
from fedstat.models.boost.explain import VerticalBoostPlan
from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.learning.columns import time_basis
from fedstat.models.boost.learning.learners import (
    BoostFormula,
    Learner,
    parse_boost_formula,
    parse_time,
    with_bounds,
    with_domain,
)
from fedstat.models.boost.learning.prepared_learners import PENALTIES, BoostDesign, PenaltyKind
from fedstat.models.boost.private.model import PrivateFunctionBoost
from fedstat.models.boost.vertical.protocol import AgreedDesign, agree_columns, exchange_moments
from fedstat.models.boost.vertical.steps import FAMILY, POINTS, WIDTH, curves_by_owner, find_owners
from fedstat.models.boost.vertical_results import VerticalBoostResults
from fedstat.models.checks import check_call, check_choice, check_positive, check_whole, checks_arguments
from fedstat.models.explain import ForecastPlan
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.models.vertical.exchange.patterns import reuse_patterns
from fedstat.models.vertical.layout import Layout, complete_at, lay_out
from fedstat.models.vertical.model import VerticalModel
from fedstat.typing import Floats, Ints

Select = Literal["cv"] | None
FOLDS = 10
SETTINGS = ("time", "penalty", "missing", "coordinator")
PRIVATE_SETTINGS = ("epsilon", "public", "delta", "coordinator")


class VerticalFunctionBoost(VerticalModel):
    """Boosting with curves over institutions that hold different columns of the same entities.

    What :class:`fedstat.FedFunctionBoost` makes of a formula and a partition in the vertical layout, with the
    same learners, path and results. Every learner is of one institution. Sums of products of two
    institutions' columns come from secure multiplication, once. Entities without a response, or that an
    institution lacks, are left out, and counted.

    Attributes
    ----------
    learners : tuple of Learner
        Base learners, the intercept first.
    layout : Layout
        Institutions, columns and entities of the fits.
    """

    family: ClassVar[str] = FAMILY
    model_name: ClassVar[str] = "Federated functional boosting"
    _plan = VerticalBoostPlan

    def __init__(
        self,
        boost: BoostFormula,
        partition: ClientPartition,
        *,
        time: str = "bbs(t, knots=10, df=4)",
        penalty: PenaltyKind = "separable",
        missing: MissingRule = "drop",
        coordinator: str | None = None,
    ) -> None:
        check_choice("penalty", penalty, PENALTIES)
        self.boost, self.penalty = boost, penalty
        self.curves = curves_by_owner(partition)
        held = {client: tuple(own) for client, own in partition.curves.items()}
        self.apart = find_owners(boost, partition.columns, held)
        along = [one.label for one in boost.learners if one.varying]
        if along:
            raise FormulaError(
                f"formula: {along[0]} is of two curves at the same points, which institutions that hold "
                "different columns do not multiply; use bsignal()"
            )
        basis = parse_time(time)
        self.time = with_domain(basis, self.curves[boost.response].domain) if boost.functional else None
        published = {name: one for site in partition.sites.values() for name, one in site.published.items()}
        self.learners: tuple[Learner, ...] = tuple(
            with_domain(one, self.curves[one.of].domain)
            if one.of_curve
            else with_bounds(one, lambda name: published[name].range if name in published else None)
            for one in boost.learners
        )
        self.agreed: AgreedDesign
        super().__init__(self.apart.formula, partition, missing=missing, coordinator=coordinator)
        use = complete_at(self.design.blocks, self.design.n)
        layout = lay_out(self.design, self.design.blocks, use)
        self.layout: Layout = self._with_dealer(reuse_patterns(layout, partition, complete=True))
        self.widths = self.agreed.widths
        self._tell_of_left_out()

    @classmethod
    def of_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula; see :meth:`fedstat.FedFunctionBoost.from_formula`."""
        check_call(cls, partition, "vertical", settings)
        return cls(parse_boost_formula(formula, list(curves_by_owner(partition))), partition, **settings)

    @checks_arguments
    def fit(
        self,
        *,
        steps: int = 100,
        nu: float = 0.1,
        select: Select = None,
        folds: int | None = None,
        random_state: int | None = None,
    ) -> VerticalBoostResults:
        """Follow the path of boosting.

        Parameters
        ----------
        steps, nu, select, folds, random_state
            As in :meth:`fedstat.FedFunctionBoost.fit`; folds are of all entities.

        Returns
        -------
        VerticalBoostResults

        Raises
        ------
        ModelError
            An argument has no meaning here, or nobody is left to deal for two institutions.
        DesignError
            There are too few entities for the columns; names the knots that would pass.
        PolicyError
            An institution refuses.
        """
        call = Call.of(self.fit, locals())
        check_whole("steps", steps, 1)
        check_positive("nu", nu)
        if nu > 1.0:
            raise ModelError(f"nu: expected a share of at most 1, received {nu!r}")
        check_choice("select", select, ("cv", None))
        folds = (FOLDS if select else 1) if folds is None else folds
        check_whole("folds", folds, 2 if select else 1)
        self._check_size(folds)
        code = np.random.default_rng(random_state).permutation(np.arange(self.layout.n) % folds)
        return run_fit(
            self, call, VerticalFunctionBoost._estimate, code.astype(np.int64), int(steps), float(nu), select
        )

    def _estimate(
        self, attempt: FitAttempt, code: Ints, steps: int, nu: float, select: Select
    ) -> VerticalBoostResults:
        asking = SecureProductSession(FAMILY, self._session, self._agreement.at)
        protocol = exchange_moments(self.apart, self.learners, self.widths, self.layout, code, asking)
        found = attempt.run(protocol)
        design = BoostDesign(self.learners, self.starts, self.time, self.penalty)
        boosting = Boosting(found.moments, design, time_basis(self.time, self._points), nu)
        return VerticalBoostResults._of_exchange(self, boosting, found, steps, select, attempt.ledger)

    @property
    def starts(self) -> tuple[int, ...]:
        """Places of each learner's columns among all."""
        return tuple(np.cumsum([0, *self.widths]).tolist())

    @property
    def _points(self) -> Floats:
        """Points of the response, (G,); one for a number."""
        return self.curves[self.boost.response].grid if self.boost.functional else np.zeros(1)

    @property
    def _n_columns(self) -> int:
        """Columns whose products are summed: of all learners, and of the response in its basis."""
        return self.starts[-1] + (1 if self.time is None else self.time.knots + self.time.degree + 1)

    @property
    def question(self) -> RowsRequest:
        """What new rows are coded by, as those of one table."""
        formula = self.formula
        terms = [self.apart.terms(client) for client in self.apart.clients]
        return RowsRequest(
            "" if self.boost.functional else formula.response,
            () if self.boost.functional else formula.response_columns,
            tuple(text for one in terms for text in one.terms),
            tuple(name for one in terms for name in one.columns),
            curves=self.boost.curves,
            curve_response=self.boost.response if self.boost.functional else "",
        )

    def _agree(self, missing: MissingRule) -> FitProtocol[Design]:
        self.agreed = yield from agree_columns(
            self.apart,
            self.learners,
            self.time,
            self.partition.rows,
            self.partition.n_entities,
            self._session,
            missing=missing,
            partial=self.partition.partial,
            min_count=self.partition.min_count,
        )
        return self.agreed.design

    def _tell_of_left_out(self) -> None:
        without, lacking = self.design.n_dropped, self.layout.left_out
        if without or lacking:
            listed = ", ".join(f"{count:,} at {client}" for client, count in self.layout.absent.items())
            warn(
                f"left out {without:,} entities without a response, and {lacking:,} that an institution "
                f"lacks{f' ({listed})' if listed else ''}",
                DataWarning,
            )

    def _check_size(self, folds: int) -> None:
        """Require entities for the columns of all learners, by fold, as the owners do; name what passes."""
        n, columns = self.layout.n // folds, self.starts[-1] + 1
        clients = self.layout.clients
        allowed = {name: self.partition.sites[name].policy.max_parameters for name in clients}
        # Of a product of two institutions' columns its doors judge these, the response among them.
        *_, second, first = sorted([0, *self.layout.sizes])
        strictest = min(clients, key=lambda name: allowed[name])
        pairs = MIN_ENTITIES_PER_EQUATION * (first + second)
        least = max(int(np.ceil(columns / allowed[strictest])), pairs)
        if n < least:
            most = min(int(allowed[strictest] * n), columns - (pairs - n) // MIN_ENTITIES_PER_EQUATION)
            refuse_few_rows(strictest, n, least, self.learners, columns, most, folds)

    def _columns_read(self, site: str) -> Sequence[str]:
        return next((terms.columns for terms in self.formula.clients if terms.client == site), ()) + (
            self.formula.response_columns if site == self.apart.holder else ()
        )

    def _invent_sites(self, plan: ForecastPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        (own,) = (block for block in self.design.blocks if block.client == self.apart.holder)
        points = synthetic_generator().normal(size=(len(own.rows), len(self._points)))
        kept: dict[str, dict[str, Any]] = {client: {WIDTH: self.starts[-1]} for client in self.apart.clients}
        kept[self.apart.holder][POINTS] = points
        rows, session = self.partition.rows, self._session
        return synthetic_column_sites(self.design, rows, policies, self.distribution, session, kept)


def vertical_boost(
    formula: str, partition: ClientPartition, **settings: Any
) -> VerticalFunctionBoost | PrivateFunctionBoost:
    """Make a model over institutions that hold different columns.

    Parameters
    ----------
    formula : str
        As for :meth:`fedstat.FedFunctionBoost.from_formula`; every learner is of one institution, and none
        varies along the response (``bconcurrent``, ``bhist``).
    partition : ClientPartition
        In the vertical layout.
    **settings
        ``time``, ``penalty``, ``missing`` and ``coordinator``; or ``epsilon``, ``public``, ``delta`` and
        ``coordinator`` of :class:`~fedstat.models.boost.private.model.PrivateFunctionBoost`.

    Raises
    ------
    ModelError
        A setting is of the other layout: losses besides squares, for instance.
    """
    private = "epsilon" in settings
    known = PRIVATE_SETTINGS if private else SETTINGS
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ModelError(
            f"{unknown[0]}: where institutions hold different columns"
            f"{', with epsilon,' if private else ''} there are {', '.join(known)}"
        )
    made = PrivateFunctionBoost if private else VerticalFunctionBoost
    return made.of_formula(formula, partition, **settings)
