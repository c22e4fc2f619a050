"""Adequacy of knots: sums for twice as many knots, those of the given knots from them, and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from scipy.linalg import block_diag, null_space

from fedstat.kernels.curves import spline_refinement
from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.learning.learners import INTERCEPT, Learner
from fedstat.models.boost.learning.moments import CurveMoments, CurveSums
from fedstat.models.boost.learning.prepared_learners import BoostDesign
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Splines on some equidistant knots are combinations of those with one more knot in each interval. Sums of
# products for the latter therefore contain those for the former, and boosting with the given knots follows
# the same path. What the added splines explain beyond the given ones is tested.


def doubled(learner: Learner) -> Learner:
    """Return a learner with one more knot in each interval; one without penalized splines as it is."""
    splines = learner.kind in ("bsignal", "bbs")
    return replace(learner, knots=2 * learner.knots + 1) if splines else learner


def refinement(learner: Learner, width: int) -> Floats:
    """Matrix from the columns of a doubled learner to those of the learner, of which there are `width`."""
    if doubled(learner) is learner:
        return np.eye(width)
    return spline_refinement(learner.knots, learner.degree)


@dataclass(frozen=True, slots=True, eq=False)
class DoubledKnots:
    """Sums by fold, learners and bases with twice as many knots; as in `CurveMoments` and `BoostDesign`."""

    S: Annotated[Floats, "f w w"]
    T: Annotated[Floats, "f w v"]
    Q: Annotated[Floats, "f v v"]
    starts: tuple[int, ...]
    basis: Annotated[Floats, "g v"]

    @classmethod
    def of(cls, fine: Boosting) -> DoubledKnots:
        """Keep what differs from boosting with the given knots."""
        sums = fine.moments
        assert isinstance(sums, CurveMoments)
        return cls(sums.S, sums.T, sums.Q, fine.design.starts, fine.basis)

    def boosting(self, given: Boosting) -> Boosting:
        """Return boosting with doubled knots."""
        assert isinstance(given.moments, CurveMoments)
        moments = replace(given.moments, S=self.S, T=self.T, Q=self.Q)
        time = None if given.design.time is None else doubled(given.design.time)
        design = replace(
            given.design,
            learners=tuple(map(doubled, given.design.learners)),
            starts=self.starts,
            time=time,
        )
        return replace(given, moments=moments, design=design, basis=self.basis)


def given_knots(fine: Boosting, design: BoostDesign, basis: Floats) -> Boosting:
    """Compute what sums for doubled knots are for the knots of `design`."""
    C, along = refinements(design)
    sums = fine.moments
    assert isinstance(sums, CurveMoments)
    S, T, Q = C.T @ sums.S @ C, C.T @ sums.T @ along, along.T @ sums.Q @ along
    return replace(fine, moments=replace(sums, S=S, T=T, Q=Q), design=design, basis=basis)


def refinements(design: BoostDesign) -> tuple[Floats, Floats]:
    """Matrices from columns, and from functions along the response, with doubled knots to the given ones."""
    ends = design.starts
    parts = [refinement(one, ends[p + 1] - ends[p]) for p, one in enumerate(design.learners)]
    return block_diag(*parts), np.eye(1) if design.time is None else refinement(design.time, 0)


@dataclass(frozen=True, slots=True, eq=False)
class KnotSums:
    """Sums for two tests of one learner: whether some columns, at `place`, have no effect on a response.

    `learner` is its label; `along` is "s" for its own knots, or "t" for those along the response.
    """

    learner: str
    along: str
    sums: CurveSums
    place: slice


def knot_sums(fine: CurveSums, design: BoostDesign, gram: Floats, chosen: Sequence[int]) -> list[KnotSums]:
    """Collect what is tested of each chosen learner.

    Along "s": whether its columns with doubled knots explain the response beyond all given columns. Along
    "t": whether its given columns explain the part of the response that the doubled basis along it has, and
    the given basis lacks; `gram` is that of the doubled basis at the response's points.
    """
    C, along = refinements(design)
    fine_ends = np.cumsum(
        [0, *(_rows(one, k) for one, k in zip(design.learners, _widths(design), strict=True))]
    )
    places = [p for p, one in enumerate(design.learners) if one.kind == INTERCEPT or p in chosen]
    given = np.column_stack([C[:, design.columns(p)] for p in places])
    beyond = null_space(along.T @ gram) if design.time is not None else np.zeros((1, 0))
    out = []
    first = 0
    for p in places:
        one, k = design.learners[p], design.starts[p + 1] - design.starts[p]
        if doubled(one) is not one:
            own = np.eye(len(C))[:, fine_ends[p] : fine_ends[p + 1]]
            columns = np.column_stack([given, own])
            place = slice(given.shape[1], columns.shape[1])
            out.append(KnotSums(one.label, "s", _turned(fine, columns, along), place))
        if one.kind != INTERCEPT and beyond.shape[1]:
            place = slice(first, first + k)
            out.append(KnotSums(one.label, "t", _turned(fine, given, beyond), place))
        first += k
    return out


def _turned(sums: CurveSums, columns: Floats, response: Floats) -> CurveSums:
    T, Q = columns.T @ sums.T @ response, response.T @ sums.Q @ response
    return replace(sums, S=columns.T @ sums.S @ columns, T=T, Q=Q)


def _widths(design: BoostDesign) -> list[int]:
    return np.diff(design.starts).tolist()


def _rows(learner: Learner, width: int) -> int:
    return width + doubled(learner).knots - learner.knots
