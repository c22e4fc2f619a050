"""Response functions of fits over rows: means as functions of linear predictors of a coded row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, ModelError
from fedstat.federation.design.derivatives import levels_by_reference, typical_values
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema
from fedstat.federation.design.site_rows import design_matrix
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.effects import Means
from fedstat.inference.hypotheses import DegreesOfFreedom
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.horizontal.prediction import predict_rows
from fedstat.models.margins import Change, MeanJet
from fedstat.typing import Floats

OVER_ROWS = "Averages over all rows at the sites"


@dataclass(frozen=True, eq=False, kw_only=True)
class RowsResponse:
    """J means as functions of K linear predictors; see :class:`~fedstat.models.effects.ResponseFunctions`.

    Parameters
    ----------
    agreement, design
        How rows are coded.
    B : (K, p) array
        Coefficients of the predictors.
    map : (K p, q) array
        Derivatives of these by the parameters.
    jet : callable
        Returns means with derivatives from a design (m, p) and an offset (m,).
    sums : callable
        Requests averages (V, J) of changes with derivatives (V, J, q) from the sites.
    distribution : DistributionSpec, optional
        Of a single mean.
    linear_part : (k, K p) array, optional
        Rows of the predictors that are shown, by name in `linear_names`; all of one predictor by default.
    """

    agreement: RowsSchema
    design: RowsDesign
    B: Floats
    map: Floats
    jet: Callable[[Floats, Floats], MeanJet]
    sums: Callable[[str, Sequence[Change]], Means]
    cov: Floats
    df: DegreesOfFreedom
    mean_words: str
    distribution: DistributionSpec | None = None
    outcomes: Sequence[Any] = ("",)
    heading: str = "group"
    linear_names: Sequence[Any] = ("",)
    linear_rows: Sequence[int] = (0,)
    linear_constant: bool = True
    linear_sign: float = 1.0
    why_no_average: str = ""
    over_rows: str = OVER_ROWS

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Columns of the fixed terms, in the order of the formula."""
        return tuple(self.agreement.spec.part(self.agreement.question.terms).columns)

    @cached_property
    def levels(self) -> Mapping[str, tuple[LevelValue, ...]]:
        """Levels of the categories, the reference level first."""
        return levels_by_reference(self.agreement, self.design)

    @cached_property
    def typical(self) -> Mapping[str, LevelValue]:
        """Means and most frequent levels."""
        return typical_values(self.agreement, self.design)

    @property
    def further(self) -> tuple[str, ...]:
        """Columns of offset and exposure."""
        question = self.agreement.question
        own = [question.weights["exposure"]] if "exposure" in question.weights else []
        return tuple(
            name for name in dict.fromkeys([*question.offset_columns, *own]) if name not in self.variables
        )

    @property
    def link(self) -> str:
        """Link of a single mean."""
        return "" if self.distribution is None else self.distribution.link

    def coded(self, frame: pd.DataFrame) -> tuple[Floats, Floats]:
        """Return the design (m, p) of rows, and their offsets (m,)."""
        found = predict_rows(self.agreement, self.design, np.zeros(len(self.design.names)), frame)
        if not found.complete.all() or found.linear.isna().any():
            raise ModelError("at: expected rows without missing values")
        return found.X, found.linear.to_numpy()

    def derivative(self, frame: pd.DataFrame, name: str) -> Floats:
        """Return the derivatives (m, p) of coded rows by a number."""
        question = replace(self.agreement.question, effects=())
        D = design_matrix(frame, question, self.agreement.spec, "", name).X
        # A model of hazards opens an intercept, for which it has no coefficient.
        return D[:, int(question.intercept) - int(self.design.intercept) :]

    def means(self, frame: pd.DataFrame) -> Means:
        """Return the means of rows."""
        X, offset = self.coded(frame)
        mean, first, _ = self.jet(X, offset)
        return Means(mean, self._in_parameters(np.einsum("mjk,mp->mjkp", first, X)))

    def derivatives(self, frame: pd.DataFrame, name: str) -> Means:
        """Return the derivatives of the means of rows by a number."""
        (X, offset), D = self.coded(frame), self.derivative(frame, name)
        _, first, second = self.jet(X, offset)
        along = D @ self.B.T
        slopes = np.einsum("mjk,mp->mjkp", first, D)
        slopes = slopes + np.einsum("mjkl,ml,mp->mjkp", second, along, X)
        return Means(np.einsum("mjk,mk->mj", first, along), self._in_parameters(slopes))

    def _in_parameters(self, slopes: Floats) -> Floats:
        return slopes.reshape(*slopes.shape[:2], -1) @ self.map

    def linear(self, frame: pd.DataFrame) -> tuple[Sequence[Any], Means]:
        """Return the linear predictors of rows, without offsets and, if they have several, constants."""
        X, offset = self.coded(frame)
        if not self.linear_constant:
            X, offset = X * (np.arange(X.shape[1]) > 0), np.zeros_like(offset)
        X, offset = self.linear_sign * X, self.linear_sign * offset
        (m, p), K = X.shape, len(self.B)
        slopes = np.zeros((m, K, K, p))
        slopes[:, np.arange(K), np.arange(K)] = X[:, None, :]
        rows = list(self.linear_rows)
        values = X @ self.B.T + offset[:, None]
        return self.linear_names, Means(values[:, rows], self._in_parameters(slopes)[:, rows])

    @property
    def inverse(self) -> tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]:
        """Inverse link and its derivative."""
        assert self.distribution is not None
        link = self.distribution.make().link
        return link.inverse, link.inverse_deriv

    def averages(self, call: str, changes: Sequence[Change]) -> Means:
        """Request averages over the rows at the sites."""
        return self.sums(call, changes)


def divided(effects: Floats, slopes: Floats, counts: Floats, n: float) -> Means:
    """Return averages from sums over n rows, or over the rows of a level where their count is not zero."""
    by = np.where(counts > 0.0, counts, n)
    return Means(effects / by[:, None], slopes / by[:, None, None])


def check_groups(changes: Sequence[Change], counts: Floats) -> None:
    """Require rows in every level over which an average is requested."""
    empty = [f"{one.by} = {one.level}" for one, n in zip(changes, counts, strict=True) if one.by and not n]
    if empty:
        raise DesignError(f"by: no row has {', '.join(dict.fromkeys(empty))}")
