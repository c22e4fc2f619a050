"""Interface of a boosting model to its source of moments, and the options of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.tables.curves import CurveArray
from fedstat.models.boost.learning.baselines import check_aggregation
from fedstat.models.boost.learning.boosting import Aggregation
from fedstat.models.boost.learning.columns import time_basis
from fedstat.models.boost.learning.knots import DoubledKnots, doubled, given_knots
from fedstat.models.boost.learning.learners import (
    BoostFormula,
    Learner,
    parse_time,
    with_bounds,
    with_domain,
)
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.prepared_learners import PENALTIES, BoostDesign, PenaltyKind
from fedstat.models.boost.results import BoostResults, LocalBoosts
from fedstat.models.checks import check_choice, check_integer, check_positive
from fedstat.models.explain import Explainable
from fedstat.models.run import FitAttempt, is_same
from fedstat.typing import Floats

Select: TypeAlias = Literal["cv", "aicc"] | None
Folds: TypeAlias = int | str | tuple[str, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class BoostOptions:
    """Arguments of a fit; see :meth:`fedstat.FedFunctionBoost.fit`."""

    steps: int | None = None
    learning_rate: float | None = None
    select: Select = None
    folds: Folds = None
    offset: Literal["mean", "smooth"] | float | Sequence[float] | Floats = "mean"
    every: int | None = None
    aggregation: Aggregation = "exact"
    masked: bool | None = None
    seed: int | None = 0

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that differ from their defaults."""
        return tuple(one.name for one in fields(self) if not is_same(getattr(self, one.name), one.default))


class MomentSource(Explainable):
    """A source of the moments for boosting: sums over the sites of one layout.

    A subclass lists the valid arguments of ``from_formula`` in `settings`, those of ``fit`` in `options`, and
    its situation in `where`.
    """

    where: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]]
    default_steps: ClassVar[int] = 100
    default_learning_rate: ClassVar[float] = 0.1
    selects: ClassVar[tuple[Select, ...]] = ("cv", None)
    boost: BoostFormula
    curves: Mapping[str, CurveArray]
    learners: tuple[Learner, ...]
    time: Learner | None
    penalty: PenaltyKind
    loss: LossSpec | None = None
    check_knots: bool = False
    given_learners: tuple[Learner, ...]
    given_time: Learner | None

    @classmethod
    def of_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Parse a formula, and make a source."""
        raise NotImplementedError

    @classmethod
    def refuse_others(cls, given: Mapping[str, Any] | Sequence[str], known: Sequence[str]) -> None:
        """Raise a ModelError for the first unknown argument."""
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ModelError(f"{unknown[0]}: {cls.where} the arguments are {', '.join(known)}")

    def checked(self, options: BoostOptions) -> tuple[int, float]:
        """Check the options that all sources share; return steps and step length."""
        self.refuse_others(options.given, self.options)
        steps = self.default_steps if options.steps is None else options.steps
        learning_rate = self.default_learning_rate if options.learning_rate is None else options.learning_rate
        check_integer("steps", steps, 1)
        check_positive("learning_rate", learning_rate)
        if learning_rate > 1.0:
            raise ModelError(f"learning_rate: expected a share of at most 1, received {learning_rate!r}")
        check_choice("select", options.select, self.selects)
        check_aggregation(options.aggregation, options.masked, self.penalty)
        return int(steps), float(learning_rate)

    def boosted(self, attempt: FitAttempt, options: BoostOptions) -> BoostResults | LocalBoosts:
        """Request the moments from the sites, and compute the path."""
        raise NotImplementedError

    def expected(self, options: BoostOptions) -> tuple[list[tuple[str, str]], list[str]]:
        """Return what each party could learn from a fit with these options, and notes; before any request."""
        raise NotImplementedError

    def _set_learners(
        self,
        time: str,
        penalty: PenaltyKind,
        ends: Callable[[Learner], tuple[float, float]],
        ranges: Callable[[str], tuple[float, float] | None],
    ) -> None:
        """Set the ends of all bases: of curves by `ends`, of columns by the published `ranges`."""
        check_choice("penalty", penalty, PENALTIES)
        self.penalty = penalty
        basis = parse_time(time)
        response = self.boost.response
        self.time = with_domain(basis, self.curves[response].domain) if self.boost.functional else None
        self.learners = tuple(
            with_domain(one, ends(one)) if one.of_curve else with_bounds(one, ranges)
            for one in self.boost.learners
        )
        self.given_learners, self.given_time = self.learners, self.time
        if self.check_knots:
            self.learners = tuple(map(doubled, self.learners))
            self.time = None if self.time is None else doubled(self.time)

    @property
    def given_design(self) -> BoostDesign:
        """The design with the knots of the formula; sums are of twice as many where these are checked."""
        pairs = zip(self.learners, self.given_learners, np.diff(self.starts).tolist(), strict=True)
        widths = [width - wide.knots + own.knots for wide, own, width in pairs]
        starts = tuple(np.cumsum([0, *widths]).tolist())
        return BoostDesign(self.given_learners, starts, self.given_time, self.penalty)

    def given_and_doubled(self, boosting: Any) -> tuple[Any, DoubledKnots | None]:
        """Return boosting with the knots of the formula, and with twice as many if these are checked."""
        if not self.check_knots:
            return boosting, None
        return given_knots(boosting, self.given_design, time_basis(self.given_time, self._points)), (
            DoubledKnots.of(boosting)
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions of each learner's columns among all."""
        raise NotImplementedError

    @property
    def _n_along(self) -> int:
        """Number of functions of the basis along the response; one for a number."""
        return 1 if self.time is None else self.time.knots + self.time.degree + 1

    @property
    def _n_columns(self) -> int:
        """Number of columns whose products are summed: of all learners, and of the response in its basis."""
        return self.starts[-1] + self._n_along

    @property
    def _points(self) -> Floats:
        """Points of the response, (G,); one for a number."""
        return self.curves[self.boost.response].grid if self.boost.functional else np.zeros(1)

    @property
    def read_curves(self) -> Sequence[str]:
        """Curves of the formula, including the response."""
        raise NotImplementedError

    @property
    def _design(self) -> BoostDesign:
        return BoostDesign(self.learners, self.starts, self.time, self.penalty)

    @property
    def _basis(self) -> Floats:
        """Basis along the response at its points, (G, L)."""
        return time_basis(self.time, self._points)
