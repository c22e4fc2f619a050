"""What a boosting model requires of a provider of moments, and the options of a fit."""

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
from fedstat.models.checks import check_choice, check_positive, check_whole
from fedstat.models.explain import Explainable
from fedstat.models.run import FitAttempt, is_same
from fedstat.typing import Floats

Select: TypeAlias = Literal["cv", "aicc"] | None


@dataclass(frozen=True, slots=True, eq=False)
class BoostOptions:
    """Arguments of a fit; see :meth:`fedstat.FedFunctionBoost.fit`."""

    steps: int | None = None
    nu: float | None = None
    select: Select = None
    folds: int | Literal["site"] | None = None
    offset: Literal["mean", "smooth"] | float | Sequence[float] | Floats = "mean"
    every: int | None = None
    aggregation: Aggregation = "exact"
    masked: bool | None = None
    random_state: int | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that differ from their defaults."""
        return tuple(one.name for one in fields(self) if not is_same(getattr(self, one.name), one.default))


class MomentSource(Explainable):
    """A provider of the moments that boosting follows: sums over the sites of one layout.

    A subclass names in `settings` the arguments of ``from_formula`` that it takes, in `options` those of
    ``fit``, and in `where` the situation that it is for.
    """

    where: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]]
    default_steps: ClassVar[int] = 100
    default_nu: ClassVar[float] = 0.1
    selects: ClassVar[tuple[Select, ...]] = ("cv", None)
    boost: BoostFormula
    curves: Mapping[str, CurveArray]
    learners: tuple[Learner, ...]
    time: Learner | None
    penalty: PenaltyKind
    loss: LossSpec | None = None

    @classmethod
    def of_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Parse a formula, and make a provider."""
        raise NotImplementedError

    @classmethod
    def refuse_others(cls, given: Mapping[str, Any] | Sequence[str], known: Sequence[str]) -> None:
        """Raise a ModelError for the first argument that is not known here."""
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ModelError(f"{unknown[0]}: {cls.where} there are {', '.join(known)}")

    def checked(self, options: BoostOptions) -> tuple[int, float]:
        """Check the options that all providers share; return steps and step length."""
        self.refuse_others(options.given, self.options)
        steps = self.default_steps if options.steps is None else options.steps
        nu = self.default_nu if options.nu is None else options.nu
        check_whole("steps", steps, 1)
        check_positive("nu", nu)
        if nu > 1.0:
            raise ModelError(f"nu: expected a share of at most 1, received {nu!r}")
        check_choice("select", options.select, self.selects)
        check_aggregation(options.aggregation, options.masked, self.penalty)
        return int(steps), float(nu)

    def boosted(self, attempt: FitAttempt, options: BoostOptions) -> BoostResults | LocalBoosts:
        """Obtain the moments from the sites, and follow the path."""
        raise NotImplementedError

    def expected(self, options: BoostOptions) -> tuple[list[tuple[str, str]], list[str]]:
        """Who could learn what from a fit with these options, and notes; before any request."""
        raise NotImplementedError

    def _set_learners(
        self,
        time: str,
        penalty: PenaltyKind,
        ends: Callable[[Learner], tuple[float, float]],
        ranges: Callable[[str], tuple[float, float] | None],
    ) -> None:
        """Give all bases their ends: of curves by `ends`, of columns by the published `ranges`."""
        check_choice("penalty", penalty, PENALTIES)
        self.penalty = penalty
        basis = parse_time(time)
        response = self.boost.response
        self.time = with_domain(basis, self.curves[response].domain) if self.boost.functional else None
        self.learners = tuple(
            with_domain(one, ends(one)) if one.of_curve else with_bounds(one, ranges)
            for one in self.boost.learners
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """Places of each learner's columns among all."""
        raise NotImplementedError

    @property
    def _n_along(self) -> int:
        """Functions of the basis along the response; one of a number."""
        return 1 if self.time is None else self.time.knots + self.time.degree + 1

    @property
    def _n_columns(self) -> int:
        """Columns whose products are summed: of all learners, and of the response in its basis."""
        return self.starts[-1] + self._n_along

    @property
    def _points(self) -> Floats:
        """Points of the response, (G,); one for a number."""
        return self.curves[self.boost.response].grid if self.boost.functional else np.zeros(1)

    @property
    def read_curves(self) -> Sequence[str]:
        """Curves of the formula, the response among them."""
        raise NotImplementedError

    @property
    def _design(self) -> BoostDesign:
        return BoostDesign(self.learners, self.starts, self.time, self.penalty)

    @property
    def _basis(self) -> Floats:
        """Basis along the response at its points, (G, L)."""
        return time_basis(self.time, self._points)
