"""Marginal effects with standard errors by the delta method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError, Remedy
from fedstat.federation.design.derivatives import Direction
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.covariance import delta_method
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import STATEMENTS, DerivedReport, Shown
from fedstat.inference.tables import Sheet, SheetSummary, number
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.effects import ChangeSums, EffectSums, mean_derivatives
from fedstat.spline_names import short_names
from fedstat.typing import Floats

HEADINGS = {"dydx": "dy/dx", "eyex": "d(lny)/d(lnx)", "dyex": "dy/d(lnx)", "eydx": "d(lny)/dx"}
WIDTHS = (28, 14, 10, 9, 7, 10, 10)
NOTES = Catalogue(
    info={
        "conditions": "{note}",
    },
)


AT_MEAN = Remedy("get_margeff(at='mean')", "use {arguments}")
AT_OVERALL = Remedy("get_margeff(at='overall')", "use {arguments}")
BY_COLUMN = Remedy("get_margeff(..., columns=True)", "give {arguments} for the effects of single columns")
AT_OVERALL_OR_MEAN = Remedy("get_margeff(at='overall')", "Use {arguments} or at='mean'")


@dataclass(frozen=True, slots=True, eq=False)
class EffectPoint:
    """Coefficients with some columns held at values: what a row's linear predictor then is.

    The predictor is ``x'beta + constant``, where `beta` (p,) is zero at these columns; `place` (p + 1, p + 1)
    takes a constant and the columns to what they are with these values.
    """

    beta: Floats
    constant: float
    place: Floats

    @classmethod
    def of(cls, beta: Floats, held: Mapping[int, float]) -> EffectPoint:
        """Hold columns at values, by their places in the design."""
        rest, place = beta.copy(), np.eye(len(beta) + 1)
        for j, value in held.items():
            rest[j] = 0.0
            place[j + 1] = 0.0
            place[j + 1, 0] = value
        return cls(rest, float(sum(value * beta[j] for j, value in held.items())), place)

    def effects(self, sums: EffectSums, n: float) -> EffectSums:
        """Divide sums over the free columns by n, and put the held ones into their place."""
        products = len(sums.first) > 1
        left = self.place if products else np.eye(1)
        return EffectSums(left @ sums.first / n, left @ sums.second @ self.place.T / n)

    def changes(self, sums: ChangeSums, n: float) -> ChangeSums:
        """Do the same with changes."""
        return ChangeSums(sums.level / n, self.place @ sums.slope / n, sums.high / n)


def effects_of(beta: Floats, at: EffectSums, changes: Mapping[int, ChangeSums]) -> tuple[Floats, Floats]:
    """Effects of all columns, (p,), and their derivatives by the coefficients, (p, p), from averages.

    `changes` are those of each column from 0 to 1 with a requested discrete effect.
    """
    p = len(beta)
    slope, bend = at.first[1:], at.second[1:, 1:]
    if len(at.first) == 1:
        slope, bend = np.full(p, at.first[0]), np.tile(at.second[0, 1:], (p, 1))
    effects = beta * slope
    jacobian = np.diag(slope) + beta[:, None] * bend
    for j, change in changes.items():
        effects[j], jacobian[j] = change.level, change.slope[1:]
        jacobian[j, j] = change.high  # the column is one afterwards, and zero before
    return effects, jacobian


@dataclass(frozen=True, slots=True)
class Change:
    """A mean of rows, or its change with a variable.

    Parameters
    ----------
    variable : str
        Empty for the mean of the rows as they are.
    low, high : optional
        Values of the variable: the difference of two means; without `low` the mean at `high`; with neither
        the derivative.
    added : bool
        Whether the values are added to those of the rows.
    by, level : str and value
        Only rows with this level of a category count; all rows if `by` is empty.
    """

    variable: str
    low: LevelValue | None = None
    high: LevelValue | None = None
    added: bool = False
    by: str = ""
    level: LevelValue | None = None


@dataclass(frozen=True, slots=True)
class ChangesRequest:
    """Changes whose effects are requested; `logarithmic`: derivatives by the logarithms of the variables."""

    changes: tuple[Change, ...]
    logarithmic: bool = False


MeanJet: TypeAlias = tuple[Floats, Floats, Floats]
"""Means (m, J) of rows, with first (m, J, K) and second (m, J, K, K) derivatives by the K predictors."""


def mean_jet(eta: Floats, distribution: DistributionSpec, log: bool = False) -> MeanJet:
    """Return means at linear predictors (m,), or their logarithms, as of one outcome and one predictor."""
    mean, first, second = mean_derivatives(eta, distribution, log)
    return mean[:, None], first[:, None, None], second[:, None, None, None]


def mean_words(family: str) -> str:
    """Name the mean of a response in a table."""
    return "probability" if family == "Binomial" else "mean"


def change_at(
    one: Direction, row: Floats, place: Floats, B: Floats, jet: Callable[[Floats], MeanJet]
) -> tuple[Floats, Floats]:
    """Return the effects (J,) of a variable at a row (p,) of the design, and their slopes (J, K, p).

    `place` (p + 1, p + 1) puts fixed values into rows with a constant, and B (K, p) are the coefficients.
    """
    with np.errstate(all="ignore"):
        if one.ends is not None:
            low, high = ((place @ np.append(1.0, end))[1:] for end in one.rows(row))
            mean, first, _ = jet(np.array([low, high]))
            return mean[1] - mean[0], first[1][..., None] * high - first[0][..., None] * low
        x, d = (place @ np.append(1.0, row))[1:], one.derivative(row)
        _, first, second = jet(x[None, :])
        along = B @ d
        return first[0] @ along, first[0][..., None] * d + (second[0] @ along)[..., None] * x


def plain_places(directions: Sequence[Direction]) -> list[tuple[int, str]]:
    """Return position and name of the variables that are one column of the design."""
    return [(one.plain, one.name) for one in directions if one.plain is not None and not one.problem]


def at_one_row(directions: Sequence[Direction], at: str) -> list[Direction]:
    """Mark variables whose change does not follow from a row of the design."""
    why = f"at={at!r} is a row of the design, from which its derivative does not follow; use at='overall'"
    return [one if one.at_a_row or one.problem else replace(one, problem=why) for one in directions]


def shown_effects(found: Mapping[str, Any], directions: Sequence[Direction]) -> list[str]:
    """Return the names of effects in the order of the formula; a NotAvailableError if there are none."""
    shown = [one.name for one in directions if one.name in found] if directions else list(found)
    if not shown:
        raise NotAvailableError(
            f"get_margeff: no variable has an effect here.{directions_note(directions)} columns=True gives "
            "the effects of single columns"
        )
    return shown


def directions_note(directions: Sequence[Direction]) -> str:
    """Say which variables change several columns, and which have no effect; empty if neither."""
    text, shown = "", [one for one in directions if not one.problem]
    if levels := [one.name for one in shown if one.levels is not None]:
        text += f" Differences between levels: {', '.join(levels)}."
    if several := [one.name for one in shown if one.plain is None and one.levels is None]:
        text += f" Through all terms: {', '.join(several)}."
    for problem in dict.fromkeys(one.problem for one in directions if one.problem):
        names = ", ".join(one.name for one in directions if one.problem == problem)
        text += f" {names}: not shown, since {problem}."
    return text


class MarginalEffects(DerivedReport):
    """Marginal effects with statsmodels' names: pandas objects by the name of the column.

    Attributes
    ----------
    margeff, margeff_se : Series
        Effects and their standard errors, by the delta method.
    margeff_cov : DataFrame
    tvalues, pvalues : Series
    margeff_options : dict
        ``method`` and ``at``.

    Examples
    --------
    >>> import fedstat as fs
    >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> effects = fs.GLORE.from_formula("num > 0 ~ age + sex", hospitals).fit().get_margeff()
    >>> bool((effects.tvalues == effects.margeff / effects.margeff_se).all())
    True
    >>> bool((effects.pvalues < 0.05).all()), effects.conf_int().shape
    (True, (2, 2))
    >>> list(effects.summary_frame())[:2], "dy/dx" in str(effects.summary())
    (['dy/dx', 'Std. Err.'], True)
    """

    def __init__(
        self,
        names: Sequence[str],
        effects: Floats,
        jacobian: Floats,
        cov: Floats,
        *,
        test_distribution: Any,
        student: bool,
        options: Mapping[str, str],
        title: tuple[str, str],
        note: str,
        sources: Iterable[object],
    ) -> None:
        super().__init__(sources)
        index = list(names)
        self.margeff = pd.Series(effects, index=index)
        self.margeff_cov = pd.DataFrame(delta_method(cov, jacobian), index=index, columns=index)
        self.margeff_options = dict(options)
        self._test_distribution, self._student, self._title, self._note = (
            test_distribution,
            student,
            title,
            note,
        )

    @property
    def margeff_se(self) -> pd.Series:
        """Standard errors."""
        return pd.Series(np.sqrt(np.diag(self.margeff_cov)), index=self.margeff.index)

    @property
    def tvalues(self) -> pd.Series:
        """Effects over their standard errors."""
        return self.margeff / self.margeff_se

    @property
    def pvalues(self) -> pd.Series:
        """Two-sided p-values for each effect being zero, by the distribution of the fit's own tests."""
        return pd.Series(
            2.0 * self._test_distribution.sf(np.abs(self.tvalues.to_numpy())), index=self.margeff.index
        )

    @takes_alpha
    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Intervals of level ``1 - alpha``: column 0 the lower, column 1 the upper limit."""
        half = self._test_distribution.isf(alpha / 2.0) * self.margeff_se
        return pd.DataFrame({0: self.margeff - half, 1: self.margeff + half})

    @takes_alpha
    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """Table with statsmodels' columns, a row for each column of the design."""
        z = "t" if self._student else "z"
        limits = self.conf_int(alpha)
        return pd.DataFrame(
            {
                HEADINGS[self.margeff_options["method"]]: self.margeff,
                "Std. Err.": self.margeff_se,
                z: self.tvalues,
                f"Pr(>|{z}|)": self.pvalues,
                "Conf. Int. Low": limits[0],
                "Cont. Int. Hi.": limits[1],
            }
        )

    @takes_alpha
    def summary(
        self, alpha: float = 0.05, *, title: str | None = None, notes: Shown = "brief"
    ) -> SheetSummary:
        """Table for print: ``as_html()``, ``as_latex()``, ``as_csv()`` as any summary."""
        return self._lay_out(self._sheets(alpha), title, notes)

    @takes_alpha
    def tidy(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row for each column of the design, with broom's names.

        Returns
        -------
        DataFrame
            ``term``, ``estimate``, ``std_error``, ``statistic``, ``p_value``, ``conf_low``, ``conf_high``.
        """
        frame = self.summary_frame(alpha).set_axis(STATEMENTS, axis=1)
        return frame.rename_axis("term").reset_index()

    def _glance(self) -> dict[str, str]:
        return {"response": self._title[1], **self.margeff_options}

    def _summary_notes(self) -> Iterator[Note]:
        if self._note:
            yield NOTES.note("conditions", note=self._note)

    def _sheets(self, alpha: float = 0.05) -> Iterator[Sheet]:
        frame = self.summary_frame(alpha)
        z, method = "t" if self._student else "z", self.margeff_options["method"]
        headers = (
            "",
            HEADINGS[method],
            "std err",
            z,
            f"P>|{z}|",
            f"[{alpha / 2:.4g}",
            f"{1 - alpha / 2:.4g}]",
        )
        rows = tuple(
            (str(name), number(effect, 4, se), number(se), f"{t:.3f}", f"{p:.3f}", number(low), number(high))
            for name, (effect, se, t, p, low, high) in zip(
                short_names(list(frame.index)), frame.to_numpy().tolist(), strict=True
            )
        )
        model, response = self._title
        about = f"{response}: {method}, at {self.margeff_options['at']}"
        yield Sheet(headers, rows, "lrrrrrr", WIDTHS, f"{model} marginal effects ({about})")

    def __repr__(self) -> str:
        return self.summary().as_text()
