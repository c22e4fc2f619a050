"""Weights of rows by the probability of their arm, from a propensity model that was fitted before.

A request names the fitted model by its coefficients, as other requests name weights by a column. Each site
computes the weights of its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.block import code_rows
from fedstat.federation.design.coding import BlockSpec, read_terms
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.tables.columns import LevelValue, at_column, level_places
from fedstat.kernels.treatment import (
    BALANCE,
    ESTIMANDS,
    FLAT,
    PROPENSITY,
    PROPENSITY_LINKS,
    TreatmentEquations,
    arm_probabilities,
)
from fedstat.typing import Floats, Ints

INTERCEPT = "Intercept"
CUTS = "cuts by probabilities of arms"
"""Name under which the rows on either side of a cut are remembered."""
FAR = {"logit": 100.0, "probit": 20.0}
"""Linear predictors beyond which no propensity model of overlapping arms has any row, by link."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightedArms:
    """Rows with a propensity model: its standardized columns (n, c), arm and weight of each (n,).

    `probabilities` (n, J) are those of the arms.
    By arm but the first, `slopes` (n, J - 1) are derivatives of the logarithm of a weight by the predictors,
    `residuals` (n, J - 1) those of the log-likelihood, and `information` (n, J - 1, J - 1) minus the second
    ones.
    """

    columns: Floats
    arm: Ints
    probabilities: Floats
    weights: Floats
    slopes: Floats
    residuals: Floats
    information: Floats

    @property
    def by_arm(self) -> Floats:
        """Weights in the column of the arm of each row, zero in others, (n, J)."""
        inside = self.arm[:, None] == np.arange(self.probabilities.shape[1])
        return np.asarray(inside * self.weights[:, None])

    def is_flat(self) -> bool:
        """Return whether the probabilities are 0 or 1 at nearly all rows: weights are then those of a cut."""
        E = self.probabilities
        mass = E.sum(axis=0)
        return bool((1.0 - (E**2).sum(axis=1)).sum() < FLAT * (mass.sum() - mass.max()))

    def by_column(self, factors: Floats) -> Floats:
        """Return factors (n, J - 1) times the columns, by arm: (n, (J - 1) c)."""
        return (factors[:, :, None] * self.columns[:, None]).reshape(len(factors), -1)


@dataclass(frozen=True, slots=True)
class PropensityWeights:
    """A fitted propensity model, and the estimand of its weights; plain values.

    Parameters
    ----------
    arm : str
        Column of the treatment.
    levels : tuple of str or number, (J,)
        The control first.
    spec : BlockSpec
        How the columns of the model are coded.
    names : tuple of str, (c,)
        Columns of the design, the constant first.
    shift, scale : tuple of float, (c,)
        By which they are standardized.
    coefficients : tuple of float, ((J - 1) c,)
        Of the standardized columns, by arm but the first.
    estimand : str
        One of :data:`fedstat.kernels.treatment.ESTIMANDS`.
    link : str
        One of :data:`fedstat.kernels.treatment.PROPENSITY_LINKS`.
    formula : str
        What the analyst wrote.
    """

    arm: str
    levels: tuple[LevelValue, ...]
    spec: BlockSpec
    names: tuple[str, ...]
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    coefficients: tuple[float, ...]
    estimand: str
    link: str = "logit"
    formula: str = ""

    def check(self) -> None:
        """Refuse parts that do not belong together."""
        c = len(self.names)
        finite = np.isfinite([*self.shift, *self.scale, *self.coefficients]).all()
        if (
            len(self.levels) < 2
            or self.estimand not in ESTIMANDS
            or self.link not in PROPENSITY_LINKS
            or (self.link == "probit" and len(self.levels) > 2)
            or self.names[:1] != (INTERCEPT,)
            or (len(self.shift), len(self.scale)) != (c, c)
            or len(self.coefficients) != (len(self.levels) - 1) * c
            or not finite
            or min(self.scale) <= 0.0
            or self.arm in self.spec.columns
        ):
            raise MessageError("weights: the propensity model has parts that do not belong together")
        self.spec.check()

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns that are read."""
        return (self.arm, *self.spec.columns)

    def read_terms(self) -> tuple[Term, ...]:
        """Read the terms of the propensity model, and the arm, again, checked."""
        arm = f"C({quoted_name(self.arm)})"
        return read_terms((*self.spec.terms, arm), self.needed)

    @property
    def text(self) -> str:
        """Estimand and formula, as in a summary."""
        return f"{self.estimand}, {self.formula}"

    def design(self, frame: pd.DataFrame, site: str) -> Floats:
        """Return the columns of the propensity model in the units of the data, (n, c)."""
        by_name: dict[str, Floats] = {INTERCEPT: np.ones(len(frame))}
        if self.spec.terms:
            series: Mapping[str, pd.Series] = {name: frame[name] for name in self.spec.columns}
            coded = code_rows(series, self.read_terms()[:-1], self.spec, len(frame), site)
            by_name |= dict(zip(coded.names, coded.X.T, strict=True))
        if set(by_name) != set(self.names):
            raise MessageError(f"{site}: weights: the columns of the propensity model are others")
        return np.column_stack([by_name[name] for name in self.names])

    def arms_of(self, frame: pd.DataFrame, site: str) -> Ints:
        """Return the arm of each row, (n,)."""
        arm = level_places(frame[self.arm], self.levels)
        if unknown := int((arm < 0).sum()):
            raise DesignError(
                f"{at_column(site, self.arm)}: {unknown:,} rows are in an arm that the propensity model does "
                "not have. Leave them out, or fit that model with them."
            )
        return arm

    def rows(self, frame: pd.DataFrame, site: str) -> WeightedArms:
        """Return complete rows of a site with their weights."""
        return self.at(self.design(frame, site), self.arms_of(frame, site))

    def at(self, design: Floats, arm: Ints) -> WeightedArms:
        """Return rows with their weights, from columns (n, c) in the units of the data and arms (n,)."""
        columns, J = (design - np.array(self.shift)) / np.array(self.scale), len(self.levels)
        # Within a range in which no weight is zero or infinite: such rows would be left out by themselves.
        eta, far = columns @ np.array(self.coefficients).reshape(J - 1, -1).T, FAR[self.link]
        eta = np.clip(eta, -far, far)
        equations = TreatmentEquations(J, BALANCE, self.estimand, propensity=self.link)
        w, dw, _, _ = equations.weights(eta, arm)
        _, residuals, second = equations.residuals(eta, arm, np.zeros(len(arm)), PROPENSITY)
        return WeightedArms(
            columns, arm, arm_probabilities(eta, self.link), w, dw / w[:, None], residuals, -second
        )
