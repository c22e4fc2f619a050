"""Responses of one institution's rows, and what they add up to beside the columns of learners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedstat.federation.tables.curves.array import CurveArray
from fedstat.kernels.boosting.banded import curve_weights, overlapping, sum_rows, weighted_grams
from fedstat.kernels.boosting.bases import spline_basis
from fedstat.models.boost.learning.learners import Learner
from fedstat.typing import Array, Floats, Ints

EVEN = ("gram", "score", "spread", "totals")
UNEVEN = ("gram", "banded", "score", "totals")
"""Arrays that a site sums where curves of the response have common points, and where not."""


@dataclass(frozen=True, slots=True, eq=False)
class EvenResponse:
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
        return {name: np.stack(found) for name, found in zip(EVEN, zip(*parts, strict=True), strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class UnevenResponse:
    """Curves on points (N,) of their own, and splines there (N, L); `lengths` (n,) by curve.

    `pairs` are splines that overlap; `uneven` (n,) are curves that were not measured at all common points.
    """

    values: Floats
    basis: Floats
    lengths: Ints
    pairs: tuple[Ints, Ints]
    uneven: Array

    @classmethod
    def of(cls, curves: CurveArray, time: Learner, offset: Floats | None = None) -> UnevenResponse:
        """Take curves less an offset, (2, m) points and values, between which it is linear."""
        points, values, lengths = curves.flat()
        if offset is not None:
            values = values - np.interp(points, *offset)
        basis = spline_basis(points, time.low, time.high, time.knots, time.degree)
        return cls(values, basis, lengths, overlapping(basis.shape[1], time.degree), curves.uneven)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Numbers that are held of a row, in the mean."""
        return -(-self.basis.size // max(len(self), 1))

    @property
    def scores(self) -> Floats:
        """Products with the splines, (n, L)."""
        return sum_rows(self.basis * self.values[:, None], self.lengths)

    @property
    def weights(self) -> Floats:
        """Weights of every curve, (n, r)."""
        return curve_weights(self.basis, self.lengths, self.pairs)

    def products(self, Z: Floats, fold: Ints, folds: int) -> dict[str, Array]:
        """Sum products of the columns Z (n, K) and of the response, by fold."""
        C, W, upper, parts = self.scores, self.weights, np.triu_indices(Z.shape[1]), []
        squares = np.column_stack([self.lengths, sum_rows(self.values[:, None] ** 2, self.lengths)])
        for f in range(folds):
            z, w, c, own = (A if folds == 1 else A[fold == f] for A in (Z, W, C, squares))
            parts.append(((z.T @ z)[upper], weighted_grams(z, w), z.T @ c, own.sum(axis=0)))
        return {name: np.stack(found) for name, found in zip(UNEVEN, zip(*parts, strict=True), strict=True)}


Response: TypeAlias = EvenResponse | UnevenResponse
