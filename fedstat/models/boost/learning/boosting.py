"""Paths of component-wise boosting, for squared error and for other losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np

from fedstat.errors import EstimationError, NotAvailableError, Remedy
from fedstat.kernels.boosting import boost_blocks, boost_full, boost_shrunk
from fedstat.kernels.curves import smooth_curve
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.moments import CurveMoments, IrregularMoments, IrregularSums
from fedstat.models.boost.learning.prepared_learners import (
    BoostDesign,
    Moments,
    PreparedBlocks,
    PreparedLearners,
    Sums,
    all_products,
    all_scores,
    prepare_learners,
)
from fedstat.models.boost.learning.varying import VaryingMoments, VaryingSums, varying_of
from fedstat.progress_line import counted
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Paths of component-wise boosting from sums: steps, their number, importance.

Aggregation: TypeAlias = Literal["exact", "lsa", "average", "local"]
AGGREGATIONS = ("exact", "lsa", "average", "local")
NO_PRODUCTS = np.zeros((0, 0))
UNEVEN = (
    "if the response has missing or different points, its sums do not contain the correlation of errors "
    "along it, which intervals and tests need"
)
WITHOUT_GAPS = Remedy("Curve(..., max_gap=0)", "{call} leaves out all curves with gaps")
"""What helps where curves lack points."""
WITHOUT_ERRORS = Remedy("stability(q=1)", "{call} and cross-validation do not need it")

VARYING = (
    "the sums of {}, which varies along the response, do not contain the effect of errors that are "
    "correlated along the response, which intervals and tests need"
)


@dataclass(frozen=True, slots=True, eq=False)
class BoostPath:
    """Learner of every step, loss then and on other rows, (steps,) each; coefficients (K, k2) at last.

    `varying` (M,) are coefficients of learners whose columns vary along the response.
    """

    selected: Ints
    risk: Floats
    risk_test: Floats
    coef: Floats
    varying: Floats = field(default_factory=lambda: np.zeros(0))


def run_path(
    ready: PreparedLearners, sums: Sums, steps: int, nu: float, test: Sums | None = None
) -> BoostPath:
    """Take steps from sums of a response minus its offset; `test` are the sums over other rows."""
    selected, risk, risk_test = np.empty(steps, np.int64), np.empty(steps), np.full(steps, np.nan)
    rss = (float(sums.yy), 0.0 if test is None else float(test.yy))
    L, V = ready.L, ready.V

    def turned(one: Sums) -> tuple[Floats, Floats]:
        return np.ascontiguousarray(L.T @ one.S @ L), np.ascontiguousarray(L.T @ one.T @ V)

    S, T = turned(sums)
    S_test, T_test = (NO_PRODUCTS, NO_PRODUCTS) if test is None else turned(test)
    coef = np.zeros_like(T)
    run: Callable[..., None] = boost_full if ready.full else boost_shrunk
    tail = (S_test, T_test, rss[1], selected, risk, risk_test, coef)
    run(S, T, *ready.fit, ready.starts, nu, rss[0], *tail)
    return BoostPath(selected, risk, risk_test, L @ coef @ V.T)


def run_path_on_products(
    ready: PreparedBlocks,
    t: Floats,
    rss: float,
    steps: int,
    nu: float,
    test: tuple[Floats, Floats, float] | None,
) -> BoostPath:
    """Take steps from products t with a response minus its offset; `test` are all sums over other rows."""
    selected, risk, risk_test = np.empty(steps, np.int64), np.empty(steps), np.full(steps, np.nan)
    A_test, t_test, rss_test = test or (NO_PRODUCTS, NO_PRODUCTS.ravel(), 0.0)
    flat = np.zeros(len(ready.A))
    run: Callable[..., None] = boost_blocks
    head = (ready.A, t.copy(), *ready.fit, ready.starts, nu, rss)
    run(*head, A_test, t_test.copy(), rss_test, selected, risk, risk_test, flat)
    return BoostPath(selected, risk, risk_test, *_unfold(flat, ready))


def _unfold(flat: Floats, ready: PreparedBlocks) -> tuple[Floats, Floats]:
    """Coefficients (K, k2) of columns with splines along the response, and of those that vary along it."""
    coef, varying = [], []
    for part, (lo, hi) in zip(ready.parts, pairwise(ready.starts), strict=True):
        if part.size:
            coef.append(part @ flat[lo:hi].reshape(len(ready.V), part.shape[1]).T)
        else:
            varying.append(flat[lo:hi])
    return np.concatenate(coef), np.concatenate([*varying, np.zeros(0)])


@dataclass(frozen=True, slots=True, eq=False)
class Boosting:
    """Everything that follows from the sums: paths over all folds or some, less an offset.

    The offset is `given` at each point, or that of the rows of the path: their mean, or this smoothed. `site`
    is that of a local fit, whose sums these are alone.
    """

    moments: Moments
    design: BoostDesign
    basis: Annotated[Floats, "g l"]
    nu: float
    aggregation: Aggregation = "exact"
    site: str = ""
    smooth_offset: bool = False
    given: Annotated[Floats, "g"] | None = None
    varying: VaryingMoments | None = None

    @property
    def even(self) -> CurveMoments:
        """Return the sums of a response at common points for all learners; otherwise NotAvailableError."""
        along = [one.label for one in varying_of(self.design.learners)]
        if along:
            raise NotAvailableError(VARYING.format(along[0]), remedy=WITHOUT_ERRORS)
        if isinstance(self.moments, IrregularMoments):
            raise NotAvailableError(UNEVEN, remedy=WITHOUT_GAPS)
        return self.moments

    @property
    def gram(self) -> Floats:
        """Gram of the response's basis at its points."""
        return np.asarray(self.basis.T @ self.basis)

    def offset(self, sums: Sums) -> Floats:
        """Curve from which boosting of some rows starts, (G,)."""
        if self.given is not None:
            return self.given
        return self.smoothed(sums.mean) if self.smooth_offset else sums.mean

    def smoothed(self, curve: Floats) -> Floats:
        """Smooth a curve (G,) along the response."""
        return smooth_curve(curve, self.basis, self.design.along(self.basis.shape[1]))

    @property
    def n_scores(self) -> int:
        """Number of released products of the columns with slopes of a loss other than squares."""
        return 0

    @property
    def total_squares(self) -> float:
        """Squares of the response about its mean."""
        total = self.moments.total
        return float(total.about(total.mean, self.basis).yy)

    def start_risk(self) -> float:
        """Loss at the offset: squares."""
        total = self.moments.total
        return float(total.about(self.offset(total), self.basis).yy)

    def over(self, folds: Any, steps: int, test: Any = None) -> tuple[PreparedLearners, BoostPath]:
        """Follow a path over some folds, (F,) bool; its offset serves for those of `test` as well."""
        sums = self.moments.over(folds)
        offset = self.offset(sums)
        centered, along = self._about(folds, offset)
        if not float(centered.yy) > 0.0:
            raise EstimationError("the response does not vary about its mean: nothing is fitted")
        ready = prepare_learners(centered, self.design, self.gram, along)
        other, other_along = (None, None) if test is None else self._about(test, offset)
        if not isinstance(ready, PreparedBlocks):
            return ready, run_path(ready, centered, steps, self.nu, other)
        parts, design, held = ready.parts, self.design, None
        if other is not None:
            A = all_products(other, parts, self.gram, design, other_along)
            held = A, all_scores(other, parts, design, other_along), float(other.yy)
        t = all_scores(centered, parts, design, along)
        return ready, run_path_on_products(ready, t, float(centered.yy), steps, self.nu, held)

    def _about(self, folds: Any, offset: Floats) -> tuple[Sums, VaryingSums | None]:
        """Add up over some folds, of a response less an offset."""
        sums = self.moments.over(folds)
        centered: Sums = sums.about(offset, self.basis)
        if self.varying is None:
            return centered, None
        moved = offset - sums.reported if isinstance(sums, IrregularSums) else offset
        return centered, self.varying.over(folds).about(moved, self.basis, varying_of(self.design.learners))

    def cross_validate(self, steps: int) -> Floats:
        """Loss of every fold by the path of the others: (F, steps), a row and point."""
        F, out = self.moments.folds, []
        for f in counted(range(F), "fold"):
            test = np.arange(F) == f
            path = self.over(~test, steps, test)[1]
            out.append(path.risk_test / self.moments.over(test).cells)
        return np.array(out)


def first_steps(selected: Ints, P: int) -> list[int]:
    """Step, from 1, at which each learner is first taken; 0 for never."""
    return [int(np.argmax(selected == p)) + 1 if (selected == p).any() else 0 for p in range(P)]


def explained(selected: Ints, risk: Floats, start: float, P: int) -> Floats:
    """Share of each learner, (P,), in what the path explains."""
    gains = np.array([a - b for a, b in pairwise([start, *risk.tolist()])])
    total = np.bincount(selected, weights=gains, minlength=P)
    return np.asarray(total / gains.sum() if gains.sum() > 0.0 else total)


# ----------------------------------------------------------------------------------------------------
# Boosting of losses other than squares: paths from scores that are exchanged after several steps.
#
# Learners are fitted to slopes u of the loss by unweighted penalized least squares, as in mboost. The
# products S of the columns Z = [Z_1 .. Z_P] are therefore released once, and of the slopes only the scores
# Z'u b. Between two exchanges scores move by c S B G, where c bounds the loss's curvature: it is that of the
# quadratic bound of the loss.

NO_SQUARES = (
    "it follows from sums of products for squared loss; for this loss sites release only scores along one "
    "path and along those of left-out folds"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredBoosting(Boosting):
    """Boosting by exchanged scores, of P paths: that of all rows, and those without each fold.

    At exchange r, after r `every` steps, or after all: `scores` (Z'u b) and curvatures `bounds`, and losses
    summed over the rows of the path and over those left out, `risks`. `held` counts exchanges at which some
    site gave its last answer again, since a few rows alone would have changed it.
    """

    loss: LossSpec
    every: int
    taken: int
    scores: Annotated[Floats, "r p q l"]
    bounds: Annotated[Floats, "r p"]
    risks: Annotated[Floats, "r p 2"]
    held: int

    def offset(self, sums: Sums) -> Floats:
        """Predictor from which boosting of some rows starts, (G,)."""
        return first_predictor(self, self.loss, sums)

    @property
    def n_scores(self) -> int:
        """Those of every path at every exchange."""
        return int(self.risks.shape[0] * self.risks.shape[1])

    def start_risk(self) -> float:
        """Loss at the offset."""
        return float(self.risks[0, 0, 0])

    def over(self, folds: Any, steps: int, test: Any = None) -> tuple[PreparedLearners, BoostPath]:
        """Follow the path of all folds, or of all but one, again."""
        if steps > self.taken:
            raise NotAvailableError(f"scores were exchanged up to step {self.taken:,}, not {steps:,}")
        p = self._which(np.asarray(folds, dtype=bool))
        sums = self.moments.over(folds)
        ready = prepare_learners(sums, self.design, self.gram)
        parts, coef, risk = [], np.zeros(self.scores.shape[2:]), []
        risk_test = np.full(steps, np.nan)
        for r, first in enumerate(range(0, steps, self.every)):
            complete = min(self.every, self.taken - first)
            own = replace(sums, S=self.bounds[r, p] * sums.S, T=self.scores[r, p], yy=0.0)
            one = run_path(ready, own, complete, self.nu)
            risk.append(self._risk(one.risk, r, p))
            if first + complete <= steps:
                risk_test[first + complete - 1] = self.risks[r + 1, p, 1]
            else:
                one = run_path(ready, own, steps - first, self.nu)
            parts.append(one)
            coef += one.coef
        selected = np.concatenate([one.selected for one in parts])
        return ready, BoostPath(selected, np.concatenate(risk)[:steps], risk_test, coef)

    def _which(self, folds: Any) -> int:
        F, out = self.moments.folds, np.flatnonzero(~folds)
        if not len(out):
            return 0
        if len(out) > 1 or self.scores.shape[1] != F + 1:
            raise NotAvailableError(NO_SQUARES)
        return int(out[0]) + 1

    def _risk(self, squares: Floats, r: int, p: int) -> Floats:
        """Loss after each step between two exchanges with known loss, by the steps' shares of the gain."""
        start, end = float(self.risks[r, p, 0]), float(self.risks[r + 1, p, 0])
        complete = squares[-1]  # of the quadratic bounds, from zero
        share = squares / complete if complete < 0.0 else np.arange(1, len(squares) + 1) / len(squares)
        return np.asarray(start + share * (end - start))


def first_predictor(boosting: Boosting, loss: LossSpec, sums: Sums) -> Floats:
    """Predictor to start from: given, or by the mean of the response at each point, perhaps smoothed."""
    if boosting.given is not None:
        return boosting.given
    mean = sums.mean
    squares = float(sums.yy) - float(sums.cells / len(mean) * mean @ mean)
    found = loss.start(mean, float(np.sqrt(max(squares, 0.0) / sums.cells)))
    return boosting.smoothed(found) if boosting.smooth_offset else found
