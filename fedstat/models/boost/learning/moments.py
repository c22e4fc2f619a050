"""Responses and their sums by fold, for regular and irregular curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, TypeAlias

import numpy as np
from scipy.linalg import block_diag

from fedstat.federation.tables.curves import CurveArray
from fedstat.kernels.curves import (
    curve_weights,
    dense_from_band,
    full_gram,
    overlapping_pairs,
    spline_basis,
    sum_points_by_row,
    weighted_grams,
)
from fedstat.models.boost.learning.learners import Learner
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Responses of one site's rows, and their sums with the columns of learners.

REGULAR_SUMS = ("gram", "score", "spread", "totals")
IRREGULAR_SUMS = ("gram", "banded", "score", "totals")
"""Arrays that a site sums where curves of the response have common points, and where not."""


@dataclass(frozen=True, slots=True, eq=False)
class RegularResponse:
    """Responses (n, G) at common points, or numbers, and the basis there (G, L)."""

    Y: Floats
    basis: Floats

    def __len__(self) -> int:
        return len(self.Y)

    @property
    def width(self) -> int:
        """Numbers that are held of a row."""
        return int(self.Y.shape[1])

    @property
    def scores(self) -> Floats:
        """Products with the basis, (n, L)."""
        return self.Y @ self.basis

    def products(self, Z: Floats, fold: Ints, folds: int) -> dict[str, Array]:
        """Sum products of the columns Z (n, K) and of the response, by fold."""
        C, upper = self.scores, np.triu_indices(Z.shape[1])
        upper2, parts = np.triu_indices(C.shape[1]), []
        for f in range(folds):
            z, c, y = (A if folds == 1 else A[fold == f] for A in (Z, C, self.Y))
            totals = np.append(y.sum(axis=0), (y * y).sum())
            parts.append(((z.T @ z)[upper], z.T @ c, (c.T @ c)[upper2], totals))
        return {
            name: np.stack(found) for name, found in zip(REGULAR_SUMS, zip(*parts, strict=True), strict=True)
        }


@dataclass(frozen=True, slots=True, eq=False)
class IrregularResponse:
    """Curves on points (N,) of their own, and splines there (N, L); `lengths` (n,) by curve.

    `pairs` are splines that overlap; `uneven` (n,) are curves that were not measured at all common points.
    """

    values: Floats
    basis: Floats
    lengths: Ints
    pairs: tuple[Ints, Ints]
    uneven: Array

    @classmethod
    def of(cls, curves: CurveArray, time: Learner, offset: Floats | None = None) -> IrregularResponse:
        """Take curves less an offset, (2, m) points and values, between which it is linear."""
        points, values, lengths = curves.flat()
        if offset is not None:
            values = values - np.interp(points, *offset)
        basis = spline_basis(points, time.low, time.high, time.knots, time.degree)
        return cls(values, basis, lengths, overlapping_pairs(basis.shape[1], time.degree), curves.uneven)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Numbers that are held of a row, in the mean."""
        return -(-self.basis.size // max(len(self), 1))

    @property
    def scores(self) -> Floats:
        """Products with the splines, (n, L)."""
        return sum_points_by_row(self.basis * self.values[:, None], self.lengths)

    @property
    def weights(self) -> Floats:
        """Weights of every curve, (n, r)."""
        return curve_weights(self.basis, self.lengths, self.pairs)

    def products(self, Z: Floats, fold: Ints, folds: int) -> dict[str, Array]:
        """Sum products of the columns Z (n, K) and of the response, by fold."""
        C, W, upper, parts = self.scores, self.weights, np.triu_indices(Z.shape[1]), []
        squares = np.column_stack([self.lengths, sum_points_by_row(self.values[:, None] ** 2, self.lengths)])
        for f in range(folds):
            z, w, c, own = (A if folds == 1 else A[fold == f] for A in (Z, W, C, squares))
            parts.append(((z.T @ z)[upper], weighted_grams(z, w), z.T @ c, own.sum(axis=0)))
        return {
            name: np.stack(found)
            for name, found in zip(IRREGULAR_SUMS, zip(*parts, strict=True), strict=True)
        }


Response: TypeAlias = RegularResponse | IrregularResponse


# ----------------------------------------------------------------------------------------------------
# CurveSums over all sites, by fold, and what follows from them without another round.


@dataclass(frozen=True, slots=True, eq=False)
class CurveMoments:
    """CurveSums by fold of products of columns Z (n, K) and of the response Y (n, G) in its basis, C = Y b.

    `S` is Z'Z, `T` is Z'C, `Q` is C'C, `y` the sum of Y at each point and `yy` the sum of its squares.
    """

    S: Annotated[Floats, "f q q"]
    T: Annotated[Floats, "f q l"]
    Q: Annotated[Floats, "f l l"]
    y: Annotated[Floats, "f g"]
    yy: Annotated[Floats, "f"]

    @classmethod
    def of(cls, sums: Mapping[str, Array]) -> CurveMoments:
        """Unfold the sums that sites release."""
        _, K, k2 = sums["score"].shape
        y = sums["totals"]
        return cls(
            full_matrices(sums["gram"], K),
            sums["score"],
            full_matrices(sums["spread"], k2),
            y[:, :-1],
            y[:, -1],
        )

    @classmethod
    def none(cls) -> CurveMoments:
        """Make an empty object for sums that are still to be requested."""
        return cls(*(np.zeros((0,) * ndim) for ndim in (3, 3, 3, 2, 1)))

    @classmethod
    def together(cls, parts: Sequence[CurveMoments]) -> CurveMoments:
        """Add up those of several sites."""
        return cls(*(np.sum([getattr(one, name) for one in parts], axis=0) for name in cls.__slots__))

    @property
    def weighted(self) -> int:
        """Number of sums of products with unequal row weights, in addition to `S`."""
        return 0

    @property
    def folds(self) -> int:
        """Number of folds."""
        return len(self.yy)

    def over(self, folds: Bools) -> CurveSums:
        """Add up over some of the folds, (F,)."""
        one = [part[folds].sum(axis=0) for part in (self.S, self.T, self.Q, self.y, self.yy)]
        return CurveSums(*one)

    @property
    def total(self) -> CurveSums:
        """CurveSums over all folds."""
        return self.over(np.ones(self.folds, dtype=bool))


@dataclass(frozen=True, slots=True, eq=False)
class CurveSums:
    """The same over some rows; the first column of Z is one."""

    S: Floats
    T: Floats
    Q: Floats
    y: Floats
    yy: float

    @property
    def n(self) -> float:
        """Rows."""
        return float(self.S[0, 0])

    @property
    def cells(self) -> float:
        """Points of all curves."""
        return self.n * len(self.y)

    @property
    def mean(self) -> Floats:
        """Mean of the response at each point, (G,)."""
        return self.y / self.n

    def about(self, offset: Floats, basis: Floats) -> CurveSums:
        """Take an offset (G,) from the response; `basis` (G, L) is that at its points."""
        o, t = offset @ basis, self.T[0]
        Q = self.Q - np.outer(o, t) - np.outer(t, o) + self.n * np.outer(o, o)
        yy = float(self.yy) - 2.0 * float(offset @ self.y) + self.n * float(offset @ offset)
        return CurveSums(self.S, self.T - np.outer(self.S[:, 0], o), Q, self.y - self.n * offset, yy)


def full_matrices(upper: Floats, k: int) -> Floats:
    """Symmetric matrices (F, k, k) from their upper triangles."""
    out = np.zeros((len(upper), k, k))
    rows, columns = np.triu_indices(k)
    out[:, rows, columns] = upper
    out[:, columns, rows] = upper
    return out


# ----------------------------------------------------------------------------------------------------
# Sums where curves of the response were measured at different points: missing ones, or points of their own.
#
# A curve then weighs the products of other columns by those of the splines at its points (see
# :mod:`fedstat.kernels.curves`), and what a learner has along the response is no factor of its sums:
# the path goes through products of all columns with all splines, which follow from the weighted ones.


@dataclass(frozen=True, slots=True, eq=False)
class IrregularMoments:
    """Sums by fold where curves of the response have points of their own.

    `S` and `T` are as in :class:`CurveMoments`; `banded` are weighted products, one for each pair of
    overlapping splines; `cells` counts points, `yy` are their squares. `basis` are the splines at points at
    which the response is shown, `reported` is the offset there that sites have subtracted already.
    """

    S: Annotated[Floats, "f q q"]
    banded: Annotated[Floats, "f r u"]
    T: Annotated[Floats, "f q l"]
    cells: Annotated[Floats, "f"]
    yy: Annotated[Floats, "f"]
    basis: Annotated[Floats, "g l"]
    reported: Annotated[Floats, "g"]
    degree: int

    @classmethod
    def of(
        cls, sums: Mapping[str, Array], basis: Floats, degree: int, reported: Floats | None
    ) -> IrregularMoments:
        """Unfold the sums that sites release."""
        reported = np.zeros(len(basis)) if reported is None else reported
        S = full_matrices(sums["gram"], sums["score"].shape[1])
        totals = sums["totals"]
        return cls(S, sums["banded"], sums["score"], totals[:, 0], totals[:, 1], basis, reported, degree)

    @property
    def weighted(self) -> int:
        """Number of sums of products with unequal row weights, in addition to `S`."""
        return int(self.banded.shape[1])

    @property
    def folds(self) -> int:
        """Number of folds."""
        return len(self.yy)

    def over(self, folds: Bools) -> IrregularSums:
        """Add up over some of the folds, (F,)."""
        S, banded, T = (part[folds].sum(axis=0) for part in (self.S, self.banded, self.T))
        pairs = overlapping_pairs(T.shape[1], self.degree)
        grams = full_matrices(banded, len(S))
        cells, yy = float(self.cells[folds].sum()), float(self.yy[folds].sum())
        return IrregularSums(S, grams, T, cells, yy, self.basis, self.reported, pairs)

    @property
    def total(self) -> IrregularSums:
        """Sums over all folds."""
        return self.over(np.ones(self.folds, dtype=bool))


@dataclass(frozen=True, slots=True, eq=False)
class IrregularSums:
    """The same over some rows; weighted products `grams` (r, q, q). The first column is one."""

    S: Floats
    grams: Floats
    T: Floats
    cells: float
    yy: float
    basis: Floats
    reported: Floats
    pairs: tuple[Ints, Ints]

    @property
    def n(self) -> float:
        """Rows."""
        return float(self.S[0, 0])

    @property
    def along(self) -> Floats:
        """Gram of the splines over all points of all curves, (L, L)."""
        return dense_from_band(self.grams[:, 0, 0], self.pairs, self.T.shape[1])

    @property
    def mean(self) -> Floats:
        """Mean curve of the response in the span of the splines, by least squares, at its points: (G,)."""
        return np.asarray(self.reported + self.basis @ np.linalg.lstsq(self.along, self.T[0], rcond=None)[0])

    def about(self, offset: Floats, basis: Floats) -> IrregularSums:
        """Subtract an offset (G,) from the response, as far as it is in the span of the splines."""
        o = np.linalg.lstsq(basis, offset - self.reported, rcond=None)[0]
        by_column = dense_from_band(self.grams[:, 0].T, self.pairs, len(o))  # (q, L, L)
        yy = self.yy - 2.0 * float(o @ self.T[0]) + float(o @ self.along @ o)
        return replace(self, T=self.T - by_column @ o, yy=yy, reported=offset)

    def turned(self, parts: Sequence[Floats]) -> tuple[Floats, Floats]:
        """All products, and those with the response, of learners' columns, splines outermost.

        `parts` take a learner's columns to those that are fitted.
        """
        C = block_diag(*parts)
        order = self._order(parts)
        A = full_gram(self.grams, self.pairs, C, self.T.shape[1])
        return A[np.ix_(order, order)], self.turned_scores(parts)

    def turned_scores(self, parts: Sequence[Floats]) -> Floats:
        """Products with the response alone."""
        return (block_diag(*parts).T @ self.T).ravel(order="F")[self._order(parts)]

    def _order(self, parts: Sequence[Floats]) -> Ints:
        """Places, learner by learner, among all columns with the splines outermost."""
        ends = np.cumsum([0, *(part.shape[1] for part in parts)])
        first = np.arange(self.T.shape[1]) * ends[-1]
        return np.concatenate([np.add.outer(first, np.arange(lo, hi)).ravel() for lo, hi in pairwise(ends)])
