"""Sums where curves of the response were measured at different points: missing ones, or points of their own.

A curve then weighs the products of other columns by those of the splines at its points (see
:mod:`fedstat.kernels.boosting.banded`), and what a learner has along the response is no factor of its sums:
the path goes through products of all columns with all splines, which follow from the weighted ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

import numpy as np
from scipy.linalg import block_diag

from fedstat.kernels.boosting.banded import overlapping, spread_out, whole_gram
from fedstat.models.boost.learning.moments import full_matrices
from fedstat.typing import Array, Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class UnevenMoments:
    """Sums by fold where curves of the response have points of their own.

    `S` and `T` are as in :class:`CurveMoments`; `banded` are weighted products, one for each pair of splines
    that overlap; `cells` counts points, `yy` are their squares. `basis` are the splines at points at which
    the response is shown, `told` is the offset there that sites took off already.
    """

    S: Annotated[Floats, "f q q"]
    banded: Annotated[Floats, "f r u"]
    T: Annotated[Floats, "f q l"]
    cells: Annotated[Floats, "f"]
    yy: Annotated[Floats, "f"]
    basis: Annotated[Floats, "g l"]
    told: Annotated[Floats, "g"]
    degree: int

    @classmethod
    def of(cls, sums: Mapping[str, Array], basis: Floats, degree: int, told: Floats | None) -> UnevenMoments:
        """Unfold the sums that sites release."""
        told = np.zeros(len(basis)) if told is None else told
        S = full_matrices(sums["gram"], sums["score"].shape[1])
        totals = sums["totals"]
        return cls(S, sums["banded"], sums["score"], totals[:, 0], totals[:, 1], basis, told, degree)

    @property
    def weighted(self) -> int:
        """Sums of products beside `S` in which rows weigh differently."""
        return int(self.banded.shape[1])

    @property
    def folds(self) -> int:
        """Number of folds."""
        return len(self.yy)

    def over(self, folds: Bools) -> UnevenSums:
        """Add up over some of the folds, (F,)."""
        S, banded, T = (part[folds].sum(axis=0) for part in (self.S, self.banded, self.T))
        pairs = overlapping(T.shape[1], self.degree)
        grams = full_matrices(banded, len(S))
        cells, yy = float(self.cells[folds].sum()), float(self.yy[folds].sum())
        return UnevenSums(S, grams, T, cells, yy, self.basis, self.told, pairs)

    @property
    def total(self) -> UnevenSums:
        """Sums over all folds."""
        return self.over(np.ones(self.folds, dtype=bool))


@dataclass(frozen=True, slots=True, eq=False)
class UnevenSums:
    """The same over some rows; weighted products `grams` (r, q, q). The first column is one."""

    S: Floats
    grams: Floats
    T: Floats
    cells: float
    yy: float
    basis: Floats
    told: Floats
    pairs: tuple[Ints, Ints]

    @property
    def n(self) -> float:
        """Rows."""
        return float(self.S[0, 0])

    @property
    def along(self) -> Floats:
        """Gram of the splines over all points of all curves, (L, L)."""
        return spread_out(self.grams[:, 0, 0], self.pairs, self.T.shape[1])

    @property
    def mean(self) -> Floats:
        """Mean curve of the response in the span of the splines, by least squares, at its points: (G,)."""
        return np.asarray(self.told + self.basis @ np.linalg.lstsq(self.along, self.T[0], rcond=None)[0])

    def about(self, offset: Floats, basis: Floats) -> UnevenSums:
        """Take an offset (G,) from the response, as far as it is in the span of the splines."""
        o = np.linalg.lstsq(basis, offset - self.told, rcond=None)[0]
        by_column = spread_out(self.grams[:, 0].T, self.pairs, len(o))  # (q, L, L)
        yy = self.yy - 2.0 * float(o @ self.T[0]) + float(o @ self.along @ o)
        return replace(self, T=self.T - by_column @ o, yy=yy, told=offset)

    def turned(self, parts: Sequence[Floats]) -> tuple[Floats, Floats]:
        """All products, and those with the response, of learners' columns, splines outermost.

        `parts` take a learner's columns to those that are fitted.
        """
        C = block_diag(*parts)
        order = self._order(parts)
        A = whole_gram(self.grams, self.pairs, C, self.T.shape[1])
        return A[np.ix_(order, order)], self.turned_scores(parts)

    def turned_scores(self, parts: Sequence[Floats]) -> Floats:
        """Products with the response alone."""
        return (block_diag(*parts).T @ self.T).ravel(order="F")[self._order(parts)]

    def _order(self, parts: Sequence[Floats]) -> Ints:
        """Places, learner by learner, among all columns with the splines outermost."""
        ends = np.cumsum([0, *(part.shape[1] for part in parts)])
        first = np.arange(self.T.shape[1]) * ends[-1]
        return np.concatenate([np.add.outer(first, np.arange(lo, hi)).ravel() for lo, hi in pairwise(ends)])
