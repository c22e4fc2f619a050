"""Learners whose columns vary along the response: concurrent and historical effects.

Such a learner has columns d(t) of every row, one of a curve x(t), or the integrals of x(s) times splines over
s <= t, and splines b of its own along the response. Products of d x b, with one another, with the columns of
other learners and with the response, are summed over rows and points: a site may have measured the curve at
points of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

import numpy as np
import pandas as pd

from fedstat.federation.tables.curves import CurveArray, curves_of
from fedstat.kernels.curves import (
    difference_penalty,
    integrals_up_to,
    products_along,
    row_tensor,
    spline_basis,
)
from fedstat.models.boost.learning.columns import CurveSumsRequest, time_basis
from fedstat.models.boost.learning.learners import Learner
from fedstat.models.boost.learning.moments import CurveSums, full_matrices
from fedstat.typing import Array, Bools, Floats, Ints

VARYING = ("varying_gram", "varying_cross", "varying_score")
MEANS = "varying_means"
VALUES = 4_000_000
"""Numbers in memory at once."""


# -- columns -----------------------------------------------------------------------------------------------


def columns_along(learner: Learner, curves: CurveArray, t: Floats, lengths: Ints) -> Floats:
    """Columns of a learner at points t (N,) of the response, with a number for each curve: (N, k).

    A curve is linear between points at which it was measured.
    """
    m = int(lengths[0]) if len(lengths) else 0
    grid = t[:m]
    same = len(t) == m * len(lengths) and np.array_equal(np.broadcast_to(grid, (len(lengths), m)).ravel(), t)
    if curves.own or not same:
        ends = np.concatenate([[0], np.cumsum(lengths)])
        found = [
            _at(learner, s, x[None], t[lo:hi])
            for (s, x), (lo, hi) in zip(_each(curves), pairwise(ends), strict=True)
        ]
        return np.concatenate([one.reshape(-1, one.shape[2]) for one in found])
    values = curves.values
    if np.isnan(values).any():
        values = np.array([x for _, x in _each(curves)])
    return _at(learner, curves.grid, values, grid).reshape(len(t), -1)


def _at(learner: Learner, s: Floats, values: Floats, t: Floats) -> Floats:
    """Columns (n, len(t), k) of curves (n, m) at points s."""
    if learner.kind == "bconcurrent":
        if np.array_equal(s, t):
            return values[:, :, None]
        return np.array([np.interp(t, s, row) for row in values])[:, :, None]
    basis = spline_basis(s, learner.low, learner.high, learner.knots, learner.degree)
    return integrals_up_to(s, values, basis, t)


def _each(curves: CurveArray) -> Iterator[tuple[Floats, Floats]]:
    """Points and values of every curve; of common points those that were not measured are filled in."""
    points, values, lengths = curves.flat()
    for lo, hi in pairwise(np.concatenate([[0], np.cumsum(lengths)])):
        s, x = points[lo:hi], values[lo:hi]
        yield (s, x) if curves.own else (curves.grid, np.interp(curves.grid, s, x))


def basis_along(learner: Learner, t: Floats) -> Floats:
    """Splines of a learner along the response, (N, l)."""
    return spline_basis(t, learner.low, learner.high, learner.knots, learner.degree)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnsAlong:
    """Columns E (N, M) of such learners at all points of n curves, made of d (N, k) times splines.

    It has the response y (N,) and its basis (N, L) as well; every curve has `lengths` (n,) of the points.
    """

    E: Floats
    d: Floats
    y: Floats
    basis: Floats
    lengths: Ints

    @classmethod
    def of(
        cls, learners: Sequence[Learner], frame: pd.DataFrame, response: str, request: CurveSumsRequest
    ) -> ColumnsAlong:
        """Make them from the curves in `frame`."""
        t, y, lengths = curves_of(frame[response]).flat()
        if request.offset is not None:
            y = y - np.interp(t, *request.offset)
        d = [columns_along(one, curves_of(frame[one.of]), t, lengths) for one in learners]
        E = [row_tensor(own, basis_along(one, t)) for one, own in zip(learners, d, strict=True)]
        return cls(np.column_stack(E), np.column_stack(d), y, time_basis(request.time, t), lengths)

    def by_row(self, power: int = 1) -> Floats:
        """Add up over the points of a row, or squares: (n, M)."""
        first = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        return np.asarray(np.add.reduceat(self.E**power, first, axis=0))


def rows_at_once(learners: Sequence[Learner], points: int) -> int:
    """Return the number of rows whose columns at all their points are in memory."""
    width = sum(one.coefficients for one in learners)
    return max(1, VALUES // max(1, points * width))


# -- sums --------------------------------------------------------------------------------------------------


def varying_products(
    made: ColumnsAlong, Z: Floats, fold: Ints, folds: int, *, means: bool
) -> dict[str, Array]:
    """Sum by fold the columns times one another, times those of rows Z (n, K), and times the response.

    Where all curves have the same points, `means` asks for sums of d there, by which an offset is taken off.
    """
    upper, parts = np.triu_indices(made.E.shape[1]), []
    owner = np.repeat(fold, made.lengths)
    for f in range(folds):
        rows, cells = (slice(None), slice(None)) if folds == 1 else (fold == f, owner == f)
        own = made.lengths[rows]
        gram, cross, score = products_along(made.E[cells], Z[rows], made.basis[cells], made.y[cells], own)
        found = {VARYING[0]: gram[upper], VARYING[1]: cross, VARYING[2]: score}
        if means:
            d = made.d[cells]
            found[MEANS] = d.reshape(-1, int(made.lengths[0]), d.shape[1]).sum(axis=0)
        parts.append(found)
    return {name: np.stack([one[name] for one in parts]) for name in parts[0]}


@dataclass(frozen=True, slots=True, eq=False)
class VaryingMoments:
    """Sums by fold of the columns E (N, M) of learners that vary along the response.

    `gram` is E'E, `cross` their products with Z times the basis along the response, `score` those with the
    response. Where the response has common points `t`, `means` are the sums of d there; else there are none.
    """

    gram: Annotated[Floats, "f m m"]
    cross: Annotated[Floats, "f q l m"]
    score: Annotated[Floats, "f m"]
    means: Annotated[Floats, "f g d"]
    t: Annotated[Floats, "g"]

    @classmethod
    def of(cls, sums: Mapping[str, Array], t: Floats) -> VaryingMoments:
        """Unfold the sums that sites release."""
        F, M = sums[VARYING[2]].shape
        means = sums.get(MEANS, np.zeros((F, 0, 0)))
        return cls(
            full_matrices(sums[VARYING[0]], M), sums[VARYING[1]], sums[VARYING[2]], means, t[: means.shape[1]]
        )

    def over(self, folds: Bools) -> VaryingSums:
        """Add up over some of the folds, (F,)."""
        parts = (self.gram, self.cross, self.score, self.means)
        gram, cross, score, means = (part[folds].sum(axis=0) for part in parts)
        return VaryingSums(gram, cross, score, means, self.t)


@dataclass(frozen=True, slots=True, eq=False)
class VaryingSums:
    """The same over some rows."""

    gram: Floats
    cross: Floats
    score: Floats
    means: Floats
    t: Floats

    def about(self, offset: Floats, basis: Floats, learners: Sequence[Learner]) -> VaryingSums:
        """Subtract an offset (G,) from the response, at common points, or its part in the basis (G, L)."""
        if not len(self.t):
            o = np.linalg.lstsq(basis, offset, rcond=None)[0]
            return replace(self, score=self.score - o @ self.cross[0])
        ends = np.cumsum([0, *(1 if one.kind == "bconcurrent" else one.splines for one in learners)])
        moved = [
            offset @ row_tensor(self.means[:, lo:hi], basis_along(one, self.t))
            for one, (lo, hi) in zip(learners, pairwise(ends.tolist()), strict=True)
        ]
        return replace(self, score=self.score - np.concatenate(moved))

    def joined(self, A: Floats, parts: Sequence[Floats], learners: Sequence[Learner]) -> Floats:
        """Products A of other learners' columns and all of these, learner by learner, splines outermost."""
        L, M = self.cross.shape[1:]
        X = np.concatenate(
            [
                np.einsum("ka,klm->lam", part, self.cross[rows]).reshape(-1, M)
                for part, rows in zip(parts, _rows(parts), strict=True)
            ]
        )
        order = places(parts, learners, L)
        return np.block([[A, X], [X.T, self.gram]])[np.ix_(order, order)]

    def scores(self, t: Floats, parts: Sequence[Floats], learners: Sequence[Learner]) -> Floats:
        """Products with the response in the same order; `t` are those of the other learners."""
        return np.concatenate([t, self.score])[places(parts, learners, self.cross.shape[1])]


def places(parts: Sequence[Floats], learners: Sequence[Learner], L: int) -> Ints:
    """Places, learner by learner, among other learners' coefficients and, after these, varying ones."""
    first, second = 0, L * sum(part.shape[1] for part in parts)
    out = []
    for part, one in zip(parts, learners, strict=True):
        start, size = (second, one.coefficients) if one.varying else (first, L * part.shape[1])
        out.append(np.arange(start, start + size))
        first, second = (first, second + size) if one.varying else (first + size, second)
    return np.concatenate(out)


def even_products(sums: CurveSums, parts: Sequence[Floats], gram: Floats) -> Floats:
    """Products of all columns and all splines where points are common."""
    own = _rows(parts)
    A = [
        [np.kron(gram, c.T @ sums.S[rows, columns] @ d) for d, columns in zip(parts, own, strict=True)]
        for c, rows in zip(parts, own, strict=True)
    ]
    return np.block(A)


def even_scores(sums: CurveSums, parts: Sequence[Floats]) -> Floats:
    """Products of these with the response."""
    found = [(c.T @ sums.T[rows]).ravel(order="F") for c, rows in zip(parts, _rows(parts), strict=True)]
    return np.concatenate(found)


def _rows(parts: Sequence[Floats]) -> list[slice]:
    """Places of each learner's columns."""
    return [slice(lo, hi) for lo, hi in pairwise(np.cumsum([0, *map(len, parts)]).tolist())]


def varying_of(learners: Sequence[Learner]) -> list[Learner]:
    """Learners whose columns vary along the response."""
    return [one for one in learners if one.varying]


def coefficients_along(learners: Sequence[Learner]) -> int:
    """Coefficients of all learners that vary along the response."""
    return sum(one.coefficients for one in learners)


def varying_penalty(learner: Learner) -> Floats:
    """Penalty on a learner's coefficients, splines along the response slow, as in FDboost."""
    D = difference_penalty(learner.splines, learner.differences)
    if learner.kind == "bconcurrent":
        return D
    one = np.eye(learner.splines)
    return np.asarray(np.kron(D, one) + np.kron(one, D))
