"""Options of a fit, grouped by topic, and their validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from fedstat.errors import ModelError, Remedy
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.penalties import Penalty
from fedstat.models.checks import check_choice, check_integer
from fedstat.models.vertical.exchange.patterns import SmallPatterns
from fedstat.models.vertical.exchange.protocol import open_values
from fedstat.models.vertical.group_folds import GroupFolds
from fedstat.models.vertical.joint_normal.edges import Between
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.pattern_merging import PatternRule
from fedstat.models.vglm.path_setup import PathSetup, Select, assign_folds
from fedstat.typing import Floats, Ints

Inference: TypeAlias = Literal["conditional", "debiased", "split"]
FOLDS = 5
FEWEST_FOLDS_OF_HALVES = 4
FEWEST_FOLDS_OF_STABILITY = 6


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """Choice of a fit of the path, and inference on the columns that it selects.

    `by` is the column whose entities are in one fold; `draws` are pairs of halves of the folds for selection
    frequencies, `splits` those for p-values.
    """

    select: Select
    inference: Inference
    folds: int
    draws: int
    splits: int
    by: str = ""

    def __post_init__(self) -> None:
        check_choice("select", self.select, get_args(Select))
        check_choice("inference", self.inference, get_args(Inference))
        check_integer("folds", self.folds, 2)
        check_integer("draws", self.draws, 0)
        check_integer("splits", self.splits, 1)

    @property
    def split(self) -> bool:
        """Whether one half of the entities selects, and the other estimates."""
        return self.inference == "split"

    @property
    def cross_validates(self) -> bool:
        """Whether lambda is chosen by cross-validation."""
        return self.select in ("cv", "1se")

    @property
    def divides(self) -> bool:
        """Whether sums over parts of the entities are needed."""
        return self.cross_validates or self.draws > 0 or self.inference != "conditional"

    @property
    def parts(self) -> int:
        """Folds that are needed for the choice of lambda, and for many halves."""
        return self.folds if self.cross_validates or self.draws or self.splits > 1 else 1

    def check_folds(self, lambdas: Floats | None) -> None:
        """Require enough folds to be divided again, and for a split that its half selects something."""
        if self.split:
            self._check_split(lambdas)
        if (self.draws or self.splits > 1) and self.folds < FEWEST_FOLDS_OF_STABILITY:
            raise ModelError(
                f"draws, splits: expected {FEWEST_FOLDS_OF_STABILITY} folds or more, received {self.folds}"
            )

    def _check_split(self, lambdas: Floats | None) -> None:
        if lambdas is not None and not lambdas.any():
            raise ModelError(
                "inference='split': lam=0 selects no columns, and needs no second half",
                remedy=Remedy("fit(..., inference=None)", "leave it out"),
            )
        if self.draws:
            raise ModelError("draws: expected 0 with inference='split', which uses the halves of one split")
        if self.cross_validates and self.folds < FEWEST_FOLDS_OF_HALVES:
            raise ModelError(
                f"folds: expected {FEWEST_FOLDS_OF_HALVES} or more for select='cv' or '1se' in a half of the "
                f"entities; received {self.folds}"
            )


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """What sites exchange, and limits of the exchange; `use_masks`: linear predictors are masked."""

    exchange: Literal["products", "admm"]
    path: Literal["quadratic", "exact"]
    use_masks: bool
    tol: float
    maxiter: int

    def __post_init__(self) -> None:
        check_choice("path", self.path, ("quadratic", "exact"))
        check_choice("exchange", self.exchange, ("products", "admm"))
        check_integer("maxiter", self.maxiter, 1)


@dataclass(frozen=True, slots=True, eq=False)
class FitPlan:
    """The agreed model and method, before any request.

    `small` states the smallest number of entities in a sum, and for missing="em" which patterns are released;
    `between` states whether columns of two sites are correlated, or that their sums choose; `random` draws
    folds and halves; `groups` are kept in one fold; `opened` are values of entities that the fit requests:
    "weights", "offset".
    """

    layout: Layout
    distribution: DistributionSpec
    product_session: SecureProductSession
    small: SmallPatterns
    setup: PathSetup
    choice: ChoiceOptions
    passing: ExchangeOptions
    random: np.random.Generator
    between: Between | None = None
    groups: GroupFolds | None = None
    opened: tuple[str, ...] = ()

    def open_values(self) -> FitProtocol[Layout]:
        """Return the layout with the values of entities that the fit requests."""
        return (yield from open_values(self.layout, self.opened, self.product_session.session))

    def assign_folds(self, layout: Layout, parts: int) -> FitProtocol[Ints]:
        """Return the fold of each entity, (n,)."""
        if self.groups is None or parts == 1:
            return assign_folds(layout.n, parts, self.least, self.random)
        return (yield from self.groups.draw(layout, parts, self.least))

    @property
    def least(self) -> int:
        """Smallest number of entities in a fold."""
        layout = self.layout
        rule = PatternRule(
            self.small.min_count, layout.sizes, layout.details, layout.response_detail, each=layout.each
        )
        return rule.least((True,) * len(layout.sizes))


def check_steps(steps: int | None, penalty: Penalty, algorithm: str, exchange: str) -> None:
    """Require a penalty to linearize, and an exchange that knows the unpenalized estimate."""
    if steps is None:
        return
    check_integer("steps", steps, 1)
    if penalty.convex or algorithm != "lla":
        raise ModelError(
            "steps are local linear approximations of SCAD and MCP (algorithm='lla')",
            remedy=Remedy(
                "fit(..., steps=None)", "leave steps out with penalty='{penalty}', algorithm='{algorithm}'"
            ).filled(penalty=penalty.name, algorithm=algorithm),
        )
    if exchange != "products":
        raise ModelError(
            "steps need exchange='products'",
            remedy=Remedy("fit(..., steps=None)", "leave steps out with exchange='admm'"),
        )


def read_lambdas(lam: float | None, lambdas: Sequence[float] | Floats | None) -> Floats | None:
    """Return the given lambdas, largest first; None if there are none."""
    if lam is None and lambdas is None:
        return None
    if lam is not None and lambdas is not None:
        raise ModelError("lam, lambdas", remedy=Remedy("fit(..., lambdas=None)", ": give only one of them"))
    try:
        values = np.atleast_1d(np.asarray(lambdas if lam is None else lam, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ModelError("lam, lambdas: expected numbers") from error
    if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values >= 0.0)).all():
        raise ModelError("lam, lambdas: expected finite numbers of zero or more")
    return np.unique(values)[::-1].copy()
