"""Moments when sites hold different columns: sums over all entities, and secure products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from fedstat.errors import DataWarning, warn
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.horizontal_design import RowsSchema, SiteRowCounts
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.design.vertical_design import Design, MissingRule
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION, entities_per_equation
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.synthetic import synthetic_column_sites, synthetic_generator
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.inference.notes import Catalogue, Note
from fedstat.models.boost.arguments import FOLDS, refuse_few_rows
from fedstat.models.boost.explain import tracing_sentence
from fedstat.models.boost.learning.boosting import WITHOUT_GAPS, Boosting
from fedstat.models.boost.learning.learners import (
    BoostFormula,
    parse_boost_formula,
)
from fedstat.models.boost.learning.prepared_learners import PenaltyKind
from fedstat.models.boost.report.record import BlocksBasis
from fedstat.models.boost.results import BoostResults
from fedstat.models.boost.source import BoostOptions, MomentSource
from fedstat.models.boost.vertical.protocol import (
    DesignSchema,
    agree_columns,
    exchange_moments,
    without_response,
)
from fedstat.models.boost.vertical.steps import FAMILY, POINTS, WIDTH, curves_by_owner, find_owners
from fedstat.models.checks import check_integer
from fedstat.models.explain import DryRunPlan
from fedstat.models.run import FitAttempt
from fedstat.models.vertical.exchange.patterns import dealer_notes, dither_notes, reuse_patterns, sums_note
from fedstat.models.vertical.group_folds import GroupFolds, split_folds
from fedstat.models.vertical.layout import Layout, complete_at, lay_out, site_blocks
from fedstat.models.vertical.model import VerticalModel

INTERPOLATED = (
    "some curves of the response '{response}' lack points: single points are interpolated linearly between "
    "their neighbors, and curves with a longer gap are left out"
)
NOTES = Catalogue(
    warning={
        "small_folds": "Sums of products of up to {columns} columns were released over {entities:,} "
        "entities: a party that knows the columns of one site may be able to compute rows of another site. "
        "The owners allow it (max_parameters). Use fewer folds or knots.",
    },
)


class ColumnSource(MomentSource, VerticalModel):
    """Sums over sites that hold different columns of the same entities; secure products once.

    Entities without a response, or missing at a site, are left out and counted.
    """

    family: ClassVar[str] = FAMILY
    model_name: ClassVar[str] = "Federated functional boosting"
    where = "where sites hold different columns"
    settings = ("time", "penalty", "missing", "coordinator", "check_knots")
    options = ("steps", "learning_rate", "select", "folds", "seed")
    selects = ("cv", "aicc", None)

    def __init__(
        self,
        boost: BoostFormula,
        partition: ClientPartition,
        *,
        time: str = "bbs(t, knots=10, df=4)",
        penalty: PenaltyKind = "separable",
        missing: MissingRule = "drop",
        coordinator: str | None = None,
        check_knots: bool = False,
    ) -> None:
        self.check_knots = check_knots
        self.boost = boost
        self.curves = curves_by_owner(partition)
        held = {client: tuple(own) for client, own in partition.curves.items()}
        self.apart = find_owners(boost, partition.columns, held)
        published = {name: one for site in partition.sites.values() for name, one in site.published.items()}
        self._set_learners(
            time,
            penalty,
            lambda one: self.curves[one.of].domain,
            lambda name: published[name].range if name in published else None,
        )
        self.agreed: DesignSchema
        super().__init__(self.apart.formula, partition, missing=missing, coordinator=coordinator)
        use = complete_at(self.design.blocks, self.design.n)
        layout = lay_out(self.design, self.design.blocks, use)
        self.layout: Layout = self._with_dealer(reuse_patterns(layout, partition, complete=True))
        self.widths = self.agreed.widths
        self._report_left_out()

    @classmethod
    def of_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """See :meth:`MomentSource.of_formula`."""
        return cls(parse_boost_formula(formula, list(curves_by_owner(partition))), partition, **settings)

    def checked(self, options: BoostOptions) -> tuple[int, float]:
        """Check the options, and the number of entities by fold."""
        checked = super().checked(options)
        self._groups(options)
        check_integer("folds", self._n_folds(options), 2 if options.select == "cv" else 1)
        self._check_size(self._n_folds(options))
        return checked

    def expected(self, options: BoostOptions) -> tuple[list[tuple[str, str]], list[str]]:
        """See :meth:`MomentSource.expected`."""
        n, lacking = self.layout.n, self.layout.left_out
        notes = [
            "One exchange, whatever the number of steps; its sums do not depend on steps and learning_rate."
        ]
        if lacking:
            notes.append(
                f"{lacking:,} of {self.layout.n_design:,} entities with a response are incomplete at a "
                "site, and are left out."
            )
        return [("Coordinator", f"membership inference: {tracing_sentence(self._n_columns, n)}.")], notes

    def boosted(self, attempt: FitAttempt, options: BoostOptions) -> BoostResults:
        """Exchange the sums by fold, once, and compute the path."""
        steps, learning_rate = self.checked(options)
        n_folds, groups = self._n_folds(options), self._groups(options)
        if groups is None:
            folds = np.arange(self.layout.n) % n_folds
            code = np.random.default_rng(options.seed).permutation(folds).astype(np.int64)
        else:
            code = attempt.run(groups.draw(self.layout, n_folds, self.partition.min_count))
            self._check_size(n_folds, int(np.bincount(code).min()))
        requester = SecureProductSession(FAMILY, self._session, self._agreement.at, least=self.layout.least)
        found = attempt.run(
            exchange_moments(self.apart, self.learners, self.widths, self.layout, code, requester)
        )
        boosting = Boosting(found.moments, self._design, self._basis, learning_rate)
        basis = BlocksBasis(
            self.model_name,
            "",
            pooled_agreement(self.question, found.specs, self.layout.n, self.partition.n_entities),
            "",
            site_blocks(self.layout),
            tuple(exchange_notes(self.layout, found.dealers, int(np.bincount(code).min()))),
        )
        return BoostResults._of(
            self,
            basis,
            boosting,
            steps,
            options.select,
            together=split_folds(options.folds, FOLDS)[1],
            ledger=attempt.ledger,
        )

    def _groups(self, options: BoostOptions) -> GroupFolds | None:
        column = split_folds(options.folds, FOLDS)[1]
        return GroupFolds.of(column, self.partition, self._session, options.seed)

    @staticmethod
    def _n_folds(options: BoostOptions) -> Any:
        default = FOLDS if options.select == "cv" else 1
        return default if options.folds is None else split_folds(options.folds, FOLDS)[0]

    @property
    def read_curves(self) -> Sequence[str]:
        """Curves of the formula, including the response."""
        return self.question.read_curves

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions of each learner's columns among all."""
        return tuple(np.cumsum([0, *self.widths]).tolist())

    @property
    def question(self) -> RowsRequest:
        """Coding of new rows, as for one table."""
        formula = self.formula
        terms = [self.apart.terms(site) for site in self.apart.sites]
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

    def _report_left_out(self) -> None:
        without, lacking = self.design.n_dropped, self.layout.left_out
        holder = self.apart.holder
        if without or lacking:
            listed = ", ".join(f"{count:,} at {site}" for site, count in self.layout.absent.items())
            n, records = self.design.n, len(self.partition.rows[holder])
            parts = [without_response(holder, n + without, records, n)] if without else []
            parts += [f"{lacking:,} entities that are incomplete at a site ({listed})"] if lacking else []
            warn(f"left out {' and '.join(parts)}", DataWarning)
        if self.boost.functional and self.curves[self.boost.response].gaps:
            warn(INTERPOLATED.format(response=self.boost.response), DataWarning, WITHOUT_GAPS)

    def _check_size(self, folds: int, fewest: int | None = None) -> None:
        """Require entities for the columns of all learners, by fold, as the owners do.

        The error names remedies.
        """
        n, columns = self.layout.n // folds if fewest is None else fewest, self.starts[-1] + 1
        sites = self.layout.sites
        policies = {name: self.partition.sites[name].policy for name in sites}
        allowed = {name: policy.max_parameters for name, policy in policies.items()}
        strictest = min(sites, key=lambda name: allowed[name])
        each = max(map(entities_per_equation, policies.values()))
        pairs = int(np.ceil(each * two_largest(self.layout)))
        least = max(int(np.ceil(columns / allowed[strictest])), pairs)
        if n < least:
            most = min(int(allowed[strictest] * n), columns - int((pairs - n) // each))
            refuse_few_rows(strictest, n, least, self.learners, columns, most, folds, aicc=True)

    def _columns_read(self, site: str) -> Sequence[str]:
        return next((terms.columns for terms in self.formula.sites if terms.site == site), ()) + (
            self.formula.response_columns if site == self.apart.holder else ()
        )

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        (own,) = (block for block in self.design.blocks if block.site == self.apart.holder)
        points = synthetic_generator().normal(size=(len(own.rows), len(self._points)))
        kept: dict[str, dict[str, Any]] = {site: {WIDTH: self.starts[-1]} for site in self.apart.sites}
        kept[self.apart.holder][POINTS] = points
        rows, session = self.partition.rows, self._session
        return synthetic_column_sites(self.design, rows, policies, self.distribution, session, kept)


def two_largest(layout: Layout) -> int:
    """Return the largest number of columns in a product of two sites, including the response."""
    return sum(sorted(layout.sizes)[-2:])


def exchange_notes(layout: Layout, dealers: Mapping[tuple[str, str], str], fewest: int) -> Iterator[Note]:
    """State what was exchanged, who dealt random numbers, and whose columns were dithered.

    `fewest` is the number of entities in the smallest fold.
    """
    yield sums_note("", fewest)
    columns = two_largest(layout)
    if fewest < MIN_ENTITIES_PER_EQUATION * columns:
        yield NOTES.note("small_folds", columns=columns, entities=fewest)
    yield from dither_notes(layout)
    yield from dealer_notes(dealers, bystanders=layout.bystanders)


def pooled_agreement(
    question: RowsRequest, specs: tuple[BlockSpec, ...], n: int, n_entities: int
) -> RowsSchema:
    """Join the sites' codings to that of one table, by which new rows are coded."""
    spec = BlockSpec(
        terms=question.terms,
        columns=question.columns,
        kinds={name: kind for one in specs for name, kind in one.kinds.items()},
        levels={name: levels for one in specs for name, levels in one.levels.items()},
        state={name: state for one in specs for name, state in one.state.items()},
    )
    return RowsSchema(question, spec, (SiteRowCounts("", n_entities, n),))
