"""Response functions of fits whose columns are at several sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.federation.design.block import apply_block
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.derivatives import Direction, levels_by_reference, typical_values
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema
from fedstat.federation.design.site_rows import RowsRequest, design_matrix
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.effects import AT_MEAN, Means, join
from fedstat.inference.hypotheses import DegreesOfFreedom
from fedstat.models.margins import Change, mean_jet, mean_words
from fedstat.models.vertical.prediction.marginal_effects import FittedMean, ProjectedEntities, site_directions
from fedstat.typing import Floats, Ints

OVER_ENTITIES = "Averages over the entities that every site has"
GIVEN_ROWS = Remedy("{method}(..., at={{{name!r}: 0.0}})", "give rows, as in {arguments}")


@dataclass(frozen=True, eq=False)
class ColumnsResponse:
    """Means as functions of rows (1, x); see :class:`~fedstat.models.effects.ResponseFunctions`.

    Parameters
    ----------
    of : FittedMean
    specs : mapping of str to BlockSpec
        Coding of the columns, by site.
    sites : tuple of str
        Site of each coefficient, (p + 1,).
    df : float, (p + 1,) array or None
    project : callable
        Requests linear predictors and columns of all entities.
    """

    of: FittedMean
    specs: Mapping[str, BlockSpec]
    sites: tuple[str, ...]
    df: DegreesOfFreedom
    project: Callable[[Floats], ProjectedEntities]

    outcomes: Sequence[Any] = ("",)
    heading: str = "group"
    further: tuple[str, ...] = ()
    over_rows: str = OVER_ENTITIES

    @property
    def cov(self) -> Floats:
        """Covariance of the coefficients; a column that a penalty left out has none."""
        out = self.of.cov.copy()
        left_out = np.isnan(np.diag(out)) & (self.of.params == 0.0)
        out[left_out], out[:, left_out] = 0.0, 0.0
        return out

    @property
    def link(self) -> str:
        """Link of the mean."""
        return self.of.distribution.link

    @property
    def mean_words(self) -> str:
        """What the mean is."""
        return mean_words(self.of.distribution.name)

    @property
    def why_no_average(self) -> str:
        """Why there are no averages."""
        if self.of.roles:
            return f"predictions of this fit leave out its {' and '.join(self.of.roles)}"
        return ""

    @cached_property
    def parts(self) -> list[tuple[RowsSchema, RowsDesign, Ints]]:
        """Coding of each site, and the places of its columns."""
        out, of = [], np.array(self.sites)
        for site, spec in self.specs.items():
            place = np.flatnonzero(of == site)
            question = RowsRequest("", (), spec.terms, spec.columns, intercept=False)
            mean = np.full(len(place), np.nan) if self.of.means is None else self.of.means[place - 1]
            design = RowsDesign(
                spec.names, spec.term_names, False, np.zeros(0, dtype=np.int64), mean, np.ones(len(place))
            )
            out.append((RowsSchema(question, spec, ()), design, place))
        return out

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Columns of all sites."""
        return tuple(dict.fromkeys(name for spec in self.specs.values() for name in spec.columns))

    @cached_property
    def levels(self) -> Mapping[str, tuple[LevelValue, ...]]:
        """Levels of the categories, the reference level first."""
        parts = [levels_by_reference(agreement, design) for agreement, design, _ in self.parts]
        return {name: levels for one in parts for name, levels in one.items()}

    @cached_property
    def typical(self) -> Mapping[str, LevelValue]:
        """Means and most frequent levels, as far as they are known."""
        found = [typical_values(agreement, design) for agreement, design, _ in self.parts]
        return {
            name: value
            for one in found
            for name, value in one.items()
            if not (isinstance(value, float) and np.isnan(value))
        }

    def coded(self, frame: pd.DataFrame) -> Floats:
        """Return the design (m, p + 1) of rows."""
        X = np.ones((len(frame), len(self.sites)))
        for agreement, _, place in self.parts:
            block = apply_block(frame, agreement.spec)
            if not block.seen.all():
                raise ModelError("at: expected rows without missing values")
            X[:, place] = block.X
        return X

    def at(self, X: Floats, eta: Floats | None = None) -> Means:
        """Return the means of design rows; their predictors may have more than the columns."""
        mean, first, _ = mean_jet(X @ self.of.params if eta is None else eta, self.of.distribution)
        return Means(mean, first * X[:, None, :])

    def means(self, frame: pd.DataFrame) -> Means:
        """Return the means of rows."""
        return self.at(self.coded(frame))

    def _along(self, X: Floats, D: Floats, eta: Floats) -> Means:
        _, first, second = mean_jet(eta, self.of.distribution)
        along = (D @ self.of.params)[:, None]
        return Means(
            first[..., 0] * along, first * D[:, None, :] + second[..., 0] * along[..., None] * X[:, None, :]
        )

    def derivatives(self, frame: pd.DataFrame, name: str) -> Means:
        """Return the derivatives of the means of rows by a number."""
        X, D = self.coded(frame), np.zeros((len(frame), len(self.sites)))
        for agreement, _, place in self.parts:
            if name in agreement.spec.columns:
                D[:, place] = design_matrix(frame, agreement.question, agreement.spec, "", name).X
        return self._along(X, D, X @ self.of.params)

    def linear(self, frame: pd.DataFrame) -> tuple[Sequence[Any], Means]:
        """Return the linear predictors of rows."""
        X = self.coded(frame)
        return ("",), Means((X @ self.of.params)[:, None], X[:, None, :])

    @property
    def inverse(self) -> tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]:
        """Inverse link and its derivative."""
        link = self.of.distribution.make().link
        return link.inverse, link.inverse_deriv

    def averages(self, call: str, changes: Sequence[Change]) -> Means:
        """Return averages over the entities whose columns the coordinator receives from all sites."""
        if any(change.by for change in changes):
            raise NotAvailableError(f"{call}: by: the categories of entities stay at their sites")
        found = self.project(np.eye(len(self.sites)))
        if not found.complete.any():
            raise EstimationError(
                f"{call}: no entity is at every site", remedy=AT_MEAN.filled(method=call.removesuffix("()"))
            )
        eta, X = found.linear[found.complete], found.projection[found.complete]
        weights = np.full((1, len(X)), 1.0 / len(X))
        return join([self._change(call, one, X, eta).combined(weights) for one in changes])

    def _change(self, call: str, change: Change, X: Floats, eta: Floats) -> Means:
        """Return the change of the mean of each entity."""
        unknown = NotAvailableError(
            f"{call}: {change.variable!r}: its change is no function of the columns, whose values stay at "
            "the sites",
            remedy=GIVEN_ROWS.filled(method=call.removesuffix("()"), name=change.variable),
        )
        if not change.variable:
            return self.at(X, eta)
        own = [one for one in self._directions if one.variable == change.variable and not one.problem]
        Z = np.column_stack([np.ones(len(X)), X])
        if change.high is None:
            if not own or own[0].A is None:
                raise unknown
            return self._along(X, Z @ own[0].A, eta)

        def placed(value: Any) -> Means:
            Y = X.copy()
            if change.variable not in self.levels:
                if not own or own[0].plain is None:
                    raise unknown
                Y[:, own[0].plain] = value + (Y[:, own[0].plain] if change.added else 0.0)
            else:
                maps = {
                    level: one
                    for found in own
                    if found.levels is not None and found.ends is not None
                    for level, one in zip(found.levels, found.ends, strict=True)
                }
                if value not in maps:
                    raise unknown
                Y = X + Z @ maps[value]
            return self.at(Y, eta + (Y - X) @ self.of.params)

        high = placed(change.high)
        if change.low is None:
            return high
        low = placed(change.low)
        return Means(high.values - low.values, high.slopes - low.slopes)

    @cached_property
    def _directions(self) -> list[Direction]:
        """Return how rows change with each variable."""
        return [
            one
            for agreement, _, place in self.parts
            for one in site_directions(agreement.spec, place, len(self.sites), False)
        ]
