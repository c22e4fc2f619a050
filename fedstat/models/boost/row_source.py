"""Moments when sites hold different rows: horizontal sums, of squares or of scores of other losses."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedstat.errors import FormulaError, ModelError, Remedy
from fedstat.federation.design.formula.terms import parse_term, term_columns
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.design.spline_knots import splines_without_knots
from fedstat.federation.design.vertical_design import MissingRule
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.synthetic import SyntheticRows, coded_names
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.partition.row_tables import common_columns
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.curves import SHOWN, all_points, measured_differently
from fedstat.models.boost.arguments import (
    FOLDS,
    SumsSize,
    bands,
    check_every,
    check_loss,
    check_points,
    check_site_folds,
    check_size,
    common_curves,
    given_offset,
    plain_formula,
    published_range,
    split_folds,
)
from fedstat.models.boost.explain import (
    BASELINE_ROUNDS,
    ONE_ROUND,
    OWN_SUMS,
    UNEVEN_MASKS,
    traced_columns,
    tracing_sentence,
)
from fedstat.models.boost.learning.baselines import site_boostings
from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.learning.columns import CurveSumsRequest
from fedstat.models.boost.learning.learners import (
    BoostFormula,
    Learner,
    check_coded,
    parse_boost_formula,
)
from fedstat.models.boost.learning.losses import loss_of
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.boost.learning.prepared_learners import Moments, PenaltyKind
from fedstat.models.boost.learning.varying import VaryingMoments, coefficients_along, varying_of
from fedstat.models.boost.protocol import (
    ScoreRounds,
    plan_scores,
    take_moments,
    take_own_moments,
    take_varying_moments,
)
from fedstat.models.boost.results import BoostResults, LocalBoosts
from fedstat.models.boost.source import BoostOptions, MomentSource
from fedstat.models.boost.steps import FAMILY
from fedstat.models.checks import (
    check_integer,
    check_masked,
)
from fedstat.models.explain import DryRunPlan
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.results import RowsBasis
from fedstat.models.horizontal.session import RULES_ON_ROWS
from fedstat.models.run import FitAttempt
from fedstat.progress_line import open_line
from fedstat.typing import Floats

SEED_BITS = 53


class RowSource(MomentSource, HorizontalModel):
    """Sums over sites that hold different rows: one round, or repeated scores (losses other than squares)."""

    model_name: ClassVar[str] = "Federated functional boosting"
    where = "where sites hold different rows"
    settings = ("time", "penalty", "family", "loss", "delta", "q", "missing", "labels", "check_knots")
    options = tuple(one.name for one in fields(BoostOptions))
    selects = ("cv", "aicc", None)

    def __init__(
        self,
        boost: BoostFormula,
        partition: ClientPartition,
        *,
        time: str = "bbs(t, knots=10, df=4)",
        penalty: PenaltyKind = "separable",
        family: Any = None,
        loss: Literal["huber", "quantile"] | None = None,
        delta: float | None = None,
        q: float | None = None,
        missing: MissingRule = "drop",
        labels: Sequence[str] = (),
        check_knots: bool = False,
    ) -> None:
        self.check_knots = check_knots
        self.loss, distribution = loss_of(family, loss, delta, q)
        self.boost, self.curves = boost, common_curves(partition)
        self._set_learners(time, penalty, self._along, partial(published_range, partition))
        held = {site: curves.get(boost.response) for site, curves in partition.curves.items()}
        self._responses = {site: curve for site, curve in held.items() if curve is not None}
        self._uneven = boost.functional and measured_differently(list(self._responses.values()))
        if check_knots and (self.loss or self._uneven or varying_of(self.learners)):
            raise ModelError(
                "check_knots: needs squared loss, curves of the response at the same points, and no learner "
                "that varies along the response"
            )
        check_points(self.learners, partition.curves)
        super().__init__(
            plain_formula(boost, partition),
            partition,
            family=distribution.make(),
            missing=missing,
            labels=labels,
        )
        terms = coded_names(self.agreement).term_names
        check_coded(self.learners, {term: terms.count(term) for term in terms}, self._has_levels)

    @classmethod
    def of_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """See :meth:`MomentSource.of_formula`."""
        curves = common_columns(map(tuple, partition.curves.values()))
        return cls(parse_boost_formula(formula, curves), partition, **settings)

    def expected(self, options: BoostOptions) -> tuple[list[tuple[str, str]], list[str]]:
        """See :meth:`MomentSource.expected`."""
        steps, _ = self.checked(options)
        weighted = bands(self.time) if self._uneven and self.time is not None else 0
        n = {row.site: float(row.n) for row in self.agreement.sites}
        plan = plan_scores(
            self.loss,
            len(n),
            steps=steps,
            every=options.every,
            folds=split_folds(options.folds)[0],
            select=options.select,
        )
        scores, along = plan.n_scores if self.loss else 0, coefficients_along(self.learners)
        columns = traced_columns(self.starts[-1], self._n_along, weighted, scores, along)
        notes = [f"{ONE_ROUND}; its sums do not depend on steps and learning_rate."]
        if self.loss:
            notes = [
                f"Sums of products in one round, and {plan.n_exchanges:,} exchanges of scores; coefficients "
                "are sent to the sites at each of them."
            ]
        learned = [
            ("Coordinator", f"membership inference: {tracing_sentence(columns, sum(n.values()), weighted)}.")
        ]
        if options.aggregation != "exact":
            learned = [("Coordinator", OWN_SUMS)]
            learned += [
                ("Coordinator", f"membership inference at {site}: {tracing_sentence(columns, rows)}.")
                for site, rows in n.items()
            ]
            notes.append(BASELINE_ROUNDS)
        return learned, [*notes, *([UNEVEN_MASKS] if weighted else []), RULES_ON_ROWS]

    def boosted(self, attempt: FitAttempt, options: BoostOptions) -> BoostResults | LocalBoosts:
        """Request the sums in one round, or exchange scores, and compute the path."""
        steps, learning_rate = self.checked(options)
        select, offset, masked = options.select, options.offset, options.masked
        folds, together = split_folds(options.folds)
        if together and together not in self.question.labels:
            raise ModelError(
                f"folds: expected a number, 'site' or a column of the model's labels, received {together!r}",
                remedy=Remedy(
                    "from_formula(..., labels=[{name!r}]).fit(..., folds={name!r})",
                    "name it twice: {call}",
                ).filled(name=together),
            )
        aggregation, exact = options.aggregation, options.aggregation == "exact"
        by_site = isinstance(folds, str)
        if by_site:
            masked = check_site_folds(masked, len(self.sites), self._masks_wanted)
        folds = (FOLDS if select == "cv" else 1) if folds is None else folds
        own_folds = 1 if isinstance(folds, str) else folds  # to which a site assigns its rows
        check_integer("folds", own_folds, 2 if select == "cv" and not by_site else 1)
        seed = secrets.randbits(SEED_BITS) if options.seed is None else options.seed
        check_integer("seed", seed, 0)
        every = check_every(options.every, self.loss)
        given = given_offset(offset, self._points, functional=self.time is not None)
        smooth = isinstance(offset, str) and offset == "smooth"
        if not exact and (self._uneven or varying_of(self.learners)):
            raise ModelError(
                f"aggregation: {aggregation!r} needs all curves of the response at the same points, and no "
                "learner that varies along it"
            )
        if not exact and (
            self.check_knots or by_site or select == "aicc" or smooth or given is not None or self.loss
        ):
            raise ModelError(
                f"aggregation: {aggregation!r} needs squared loss about means, and has neither AICc, nor "
                "sites as folds, nor check_knots"
            )
        check_loss(self.loss, select, self.learners, uneven=self._uneven)
        masked = exact and check_masked(masked, len(self.sites), self._masks_wanted)
        reported = None if given is None or not self._uneven else (tuple(self._points), tuple(given))
        request = CurveSumsRequest(
            self.learners, self.time, int(own_folds), int(seed), reported, self.loss, together
        )
        starts, design, basis = self.starts, self._design, self._basis
        plan = plan_scores(self.loss, len(self.sites), steps=steps, every=every, folds=folds, select=select)
        self._check_size(starts[-1] + 1 + coefficients_along(self.learners), int(own_folds), masked)
        if self.loss:
            self._check_size(starts[-1] + 1, 1, masked, plan.n_scores * self._n_along)
        session, rows = self._open_session(FAMILY, masked), RowsBasis.of(self)
        if self.loss:
            empty = Boosting(
                CurveMoments.none(), design, basis, learning_rate, smooth_offset=smooth, given=given
            )
            with open_line("step", plan.steps) as line:
                rounds = ScoreRounds(session, request, self.loss, plan, empty, line)
                scored = attempt.run(rounds.run(), session.masked_sites)
            return BoostResults._of(
                self, rows, scored, steps, select, masked=masked, together=together, ledger=attempt.ledger
            )
        if exact:
            taking: FitProtocol[tuple[Moments, VaryingMoments | None]]
            if varying_of(self.learners):
                taking = take_varying_moments(
                    session, request, basis, self._points, uneven=self._uneven, by_site=by_site
                )
            else:
                taking = take_moments(session, request, basis, uneven=self._uneven, by_site=by_site)
            moments, varying = attempt.run(taking, session.masked_sites)
            boosting = Boosting(
                moments, design, basis, learning_rate, smooth_offset=smooth, given=given, varying=varying
            )
            return BoostResults._of(
                self, rows, boosting, steps, select, masked=masked, together=together, ledger=attempt.ledger
            )
        own = attempt.run(take_own_moments(session, request), session.masked_sites)
        found = site_boostings(own, design, basis, learning_rate, aggregation, self.sites)
        fits = {
            one.site: BoostResults._of(self, rows, one, steps, select, ledger=attempt.ledger) for one in found
        }
        return LocalBoosts(fits) if aggregation == "local" else fits[""]

    @property
    def _points(self) -> Floats:
        """Points of the response, (G,), or points at which it is shown; one for a number."""
        if self.time is None:
            return np.zeros(1)
        grids = [curve.grid for curve in self._responses.values()]
        if all(map(len, grids)):
            return all_points(grids) if self._uneven else grids[0]
        return np.linspace(
            self.time.low, self.time.high, max(SHOWN, 2 * (self.time.knots + self.time.degree))
        )

    def _has_levels(self, term: str) -> bool:
        return any(name in self.agreement.spec.levels for name in term_columns(parse_term(term)))

    @property
    def read_curves(self) -> Sequence[str]:
        """Curves of the formula, including the response."""
        return self.question.read_curves

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions of each learner's columns among all."""
        terms = coded_names(self.agreement).term_names
        widths = [one.width(terms.count(one.of)) for one in self.learners]
        return tuple(np.cumsum([0, *widths]).tolist())

    def _along(self, learner: Learner) -> tuple[float, float]:
        """Domain of a learner's curve.

        If the learner varies along the response, it must be the response's.
        """
        ends, response = self.curves[learner.of].domain, self.boost.response
        if not learner.varying:
            return ends
        if ends != (along := self.curves[response].domain):
            raise FormulaError(
                f"formula: {learner.label} uses '{learner.of}' at or before each point of '{response}', but "
                f"their domains differ: {ends[0]:g} to {ends[1]:g}, and {along[0]:g} to {along[1]:g}. "
                "Declare one domain for both, or use bsignal()"
            )
        return ends

    def _check_size(self, columns: int, folds: int, masked: bool, slopes: int = 0) -> None:
        """Require rows for the columns of all learners, by fold, as the owners do.

        The error names remedies.
        """
        policies = {name: site.policy for name, site in self.partition.sites.items()}
        weighed = [name for name, one in self._responses.items() if one.gaps] if self._uneven else []
        time = self.time if self._uneven else None
        request = SumsSize(columns + slopes, folds, self.learners, time, slopes)
        check_size(request, self.agreement.sites, policies, weighed, masked=masked)

    def _question(self, offset: str | None, labels: Sequence[str], complete: Sequence[str]) -> RowsRequest:
        response = self.boost.response if self.boost.functional else ""
        (terms,) = self.formula.sites
        if isinstance(labels, str):
            raise ModelError(f"labels: expected a list of columns, received a text; write [{labels!r}]")
        for name in (*self.formula.response_columns, *terms.columns):
            self._check_held("formula", name)
        for name in labels:
            self._check_held("labels", name)
        question = RowsRequest(
            "" if response else self.formula.response,
            self.formula.response_columns,
            terms.terms,
            terms.columns,
            curves=self.boost.curves,
            curve_response=response,
            labels=tuple(dict.fromkeys(labels)),
        )
        if splines := splines_without_knots(question):
            raise FormulaError(
                f"formula: {splines[0].text!r} needs knots=..., lower_bound=... and upper_bound=...; a "
                "smooth effect is bbs(x)"
            )
        return question

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        return SyntheticRows(self.agreement, self.distribution, curves=self.curves).sites(policies)
