"""Paths of component-wise boosting from sums: steps, their number, importance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.kernels.boosting.bases import smooth_curve
from fedstat.kernels.boosting.path import follow_blocks, follow_full, follow_shrunk
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.boost.learning.ready import (
    BlockReady,
    BoostDesign,
    Moments,
    Ready,
    Sums,
    all_products,
    all_scores,
    make_ready,
)
from fedstat.models.boost.learning.uneven import UnevenMoments, UnevenSums
from fedstat.models.boost.learning.varying import (
    VaryingMoments,
    VaryingSums,
    varying_of,
)
from fedstat.progress_line import counted
from fedstat.typing import Floats, Ints

Aggregation: TypeAlias = Literal["exact", "lsa", "average", "local"]
AGGREGATIONS = ("exact", "lsa", "average", "local")
NOTHING = np.zeros((0, 0))
UNEVEN = (
    "the sums of a response with missing points, or points of its own, do not tell how its errors are "
    "correlated along it, which intervals and tests need; stability() needs no errors. Curve(..., max_gap=0) "
    "leaves such curves out"
)

VARYING = (
    "the sums of {}, which varies along the response, do not tell what errors that are correlated along it "
    "do to its effect, which intervals and tests need; stability() and cross-validation need no errors"
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


def follow(ready: Ready, sums: Sums, steps: int, nu: float, test: Sums | None = None) -> BoostPath:
    """Take so many steps from sums of a response less its offset; `test` are those over other rows."""
    selected, risk, risk_test = np.empty(steps, np.int64), np.empty(steps), np.full(steps, np.nan)
    rss = (float(sums.yy), 0.0 if test is None else float(test.yy))
    L, V = ready.L, ready.V

    def turned(one: Sums) -> tuple[Floats, Floats]:
        return np.ascontiguousarray(L.T @ one.S @ L), np.ascontiguousarray(L.T @ one.T @ V)

    S, T = turned(sums)
    S_test, T_test = (NOTHING, NOTHING) if test is None else turned(test)
    coef = np.zeros_like(T)
    run: Callable[..., None] = follow_full if ready.full else follow_shrunk
    tail = (S_test, T_test, rss[1], selected, risk, risk_test, coef)
    run(S, T, *ready.fit, ready.starts, nu, rss[0], *tail)
    return BoostPath(selected, risk, risk_test, L @ coef @ V.T)


def follow_products(
    ready: BlockReady, t: Floats, rss: float, steps: int, nu: float, test: tuple[Floats, Floats, float] | None
) -> BoostPath:
    """Take so many steps from products t with a response less its offset; `test` are all over other rows."""
    selected, risk, risk_test = np.empty(steps, np.int64), np.empty(steps), np.full(steps, np.nan)
    A_test, t_test, rss_test = test or (NOTHING, NOTHING.ravel(), 0.0)
    flat = np.zeros(len(ready.A))
    run: Callable[..., None] = follow_blocks
    head = (ready.A, t.copy(), *ready.fit, ready.starts, nu, rss)
    run(*head, A_test, t_test.copy(), rss_test, selected, risk, risk_test, flat)
    return BoostPath(selected, risk, risk_test, *_unfold(flat, ready))


def _unfold(flat: Floats, ready: BlockReady) -> tuple[Floats, Floats]:
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
        """Sums of a response at common points, of which all learners are; else a NotAvailableError."""
        along = [one.label for one in varying_of(self.design.learners)]
        if along:
            raise NotAvailableError(VARYING.format(along[0]))
        if isinstance(self.moments, UnevenMoments):
            raise NotAvailableError(UNEVEN)
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
        """How many products of the columns with slopes of a loss that is no square were told."""
        return 0

    def start_risk(self) -> float:
        """Loss at the offset: squares."""
        total = self.moments.total
        return float(total.about(self.offset(total), self.basis).yy)

    def over(self, folds: Any, steps: int, test: Any = None) -> tuple[Ready, BoostPath]:
        """Follow a path over some folds, (F,) bool; its offset serves for those of `test` as well."""
        sums = self.moments.over(folds)
        offset = self.offset(sums)
        centred, along = self._about(folds, offset)
        if not float(centred.yy) > 0.0:
            raise EstimationError("the response does not vary about its mean: nothing is fitted")
        ready = make_ready(centred, self.design, self.gram, along)
        other, other_along = (None, None) if test is None else self._about(test, offset)
        if not isinstance(ready, BlockReady):
            return ready, follow(ready, centred, steps, self.nu, other)
        parts, design, held = ready.parts, self.design, None
        if other is not None:
            A = all_products(other, parts, self.gram, design, other_along)
            held = A, all_scores(other, parts, design, other_along), float(other.yy)
        t = all_scores(centred, parts, design, along)
        return ready, follow_products(ready, t, float(centred.yy), steps, self.nu, held)

    def _about(self, folds: Any, offset: Floats) -> tuple[Sums, VaryingSums | None]:
        """Add up over some folds, of a response less an offset."""
        sums = self.moments.over(folds)
        centred: Sums = sums.about(offset, self.basis)
        if self.varying is None:
            return centred, None
        moved = offset - sums.told if isinstance(sums, UnevenSums) else offset
        return centred, self.varying.over(folds).about(moved, self.basis, varying_of(self.design.learners))

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
