"""Surfaces with intervals and tests, fitted again to the sums of boosting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import norm

from fedstat.errors import ModelError
from fedstat.inference.tables import Sheet, SheetSummary
from fedstat.models.boost.inference.refit import FEW, Refitted, band, refit
from fedstat.models.boost.inference.response import BoostPrediction, error_variances, mean_variances
from fedstat.models.boost.report.plots import draw_surface
from fedstat.models.boost.report.prediction import HeldCurves, new_columns
from fedstat.models.boost.report.surfaces import learner_points
from fedstat.typing import Bools, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SELECTED = (
    "Intervals and p-values are conditional on the learners that boosting selected from the same rows, and "
    "too favourable where it chose among many: split() selects and estimates on different rows."
)
HALVES = "Learners were selected by one half of the folds, and estimated from the other."
GIVEN = "Learners were given; where they were chosen by these rows, intervals and p-values do not know of it."
DRAWS = 500
COLUMNS = ("learner", "columns", "edf", "F", "df", "df resid", "p")
WIDTHS = (43, 8, 8, 11, 6, 9, 7)


class SurfaceFit:
    """Learners fitted again by generalised least squares, with errors that are correlated along the response.

    Attributes
    ----------
    tests : DataFrame
        By learner: columns, effective coefficients ``edf``, and a test of no effect: ``F`` of Wilks' lambda,
        with its degrees of freedom ``df`` and ``df_resid``, and ``p_value``. It knows of no smoothness.
    conditions : str
        What intervals and tests are conditional on.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> found = model.fit(steps=20, folds=6).refit()
    >>> learner = found.summary().as_text().count("age") > 0
    >>> len(found.surface("sex")), bool(found.plot("sex").has_data()), "sex" in found.summary().as_text()
    (1, True, True)
    >>> found.get_prediction(table.head(2)).summary_frame().shape
    (2, 6)
    """

    def __init__(
        self, held: HeldCurves, fitted: Refitted, start: Floats, conditions: str, random_state: int
    ) -> None:
        self._held, self._fitted, self._random_state = held, fitted, random_state
        self._start = start  # mean of the response, (G,), around which learners were fitted
        self.conditions = conditions
        fits = list(zip(fitted.learners, fitted.places, fitted.tests, strict=True))[1:]  # without intercept
        labels = [held.boosting.design.learners[p].label for p, _, _ in fits]
        width = fitted.B.shape[1]
        self.tests = pd.DataFrame(
            {
                "columns": [width * (place.stop - place.start) for _, place, _ in fits],
                "edf": [float(fitted.edf[fitted.rows_of(p)].sum()) for p, _, _ in fits],
                "F": [one.statistic for _, _, one in fits],
                "df": [one.df for _, _, one in fits],
                "df_resid": [one.df_resid for _, _, one in fits],
                "p_value": [one.p_value for _, _, one in fits],
            },
            index=pd.Index(labels, name="learner"),
        )

    def surface(self, learner: str, level: float = 0.95) -> pd.DataFrame:
        """Effect of a learner with intervals.

        Parameters
        ----------
        learner : str
            Its label, or what it is of.
        level : float

        Returns
        -------
        DataFrame
            As :meth:`BoostResults.surface`, and ``se``, ``lower`` and ``upper`` of each point, ``band_lower``
            and ``band_upper`` of a band that holds the whole effect with this probability.
        """
        design = self._held.boosting.design
        place = design.place(learner)
        if place not in self._fitted.learners:
            known = ", ".join(map(repr, self.tests.index))
            raise ModelError(f"learner: expected one of those fitted, {known}; received {learner!r}")
        name, points, at = learner_points(self._held, place)
        random = np.random.default_rng([self._random_state, place])
        found = band(self._fitted, place, at, self._held.boosting.basis, level, DRAWS, random)
        G = found.estimate.shape[1]
        columns: dict[str, object] = {name: [point for point in points for _ in range(G)]}
        if design.time is not None:
            columns["t"] = np.tile(self._held.t, len(points))
        z = float(norm.isf((1.0 - level) / 2.0))
        columns |= {"estimate": found.estimate.ravel(), "se": found.se.ravel()}
        for prefix, factor in (("", z), ("band_", found.factor)):
            columns[f"{prefix}lower"] = (found.estimate - factor * found.se).ravel()
            columns[f"{prefix}upper"] = (found.estimate + factor * found.se).ravel()
        return pd.DataFrame(columns)

    def get_prediction(self, new: pd.DataFrame) -> BoostPrediction:
        """Predict the response of rows that you hold, with intervals.

        Of the mean, and of a response that was not observed: the errors' covariance along a curve follows
        from the fit. They are conditional on what `conditions` says.

        Parameters
        ----------
        new : DataFrame
            Rows with columns as the sites have them.

        Returns
        -------
        BoostPrediction
            Its ``summary_frame(alpha=0.05)`` has statsmodels' names.
        """
        fitted, design, basis = self._fitted, self._held.boosting.design, self._held.boosting.basis
        whole, _, columns = new_columns(self._held, new)
        chosen = zip(fitted.learners, fitted.parts, strict=True)
        Z = np.column_stack([columns[:, design.columns(p)] @ part for p, part in chosen])
        mean = np.full((len(new), len(basis)), np.nan)
        variances = mean.copy()
        mean[whole] = self._start + Z @ fitted.B @ basis.T
        variances[whole] = mean_variances(fitted, Z, basis)
        t = None if design.time is None else self._held.t
        df, errors = fitted.rows - len(fitted.B), error_variances(fitted, basis)
        return BoostPrediction(mean, variances, errors, df, self.conditions, new.index, t)

    def plot(self, learner: str, ax: Axes | None = None) -> Axes:
        """Draw an effect, of one argument with its intervals."""
        return draw_surface(self.surface(learner), learner, self._held.formula.response, ax)

    def summary(self) -> SheetSummary:
        """Print the tests, and what they are conditional on."""
        rows = tuple(
            (
                str(label),
                f"{one['columns']:.0f}",
                f"{one['edf']:.1f}",
                f"{one['F']:.2f}",
                f"{one['df']:.0f}",
                f"{one['df_resid']:.0f}",
                f"{one['p_value']:.3f}",
            )
            for label, one in self.tests.iterrows()
        )
        sheet = Sheet(COLUMNS, rows, "lrrrrrr", WIDTHS, "Learners fitted again by generalised least squares")
        return SheetSummary([sheet], tuple(self._notes()), "")

    def _notes(self) -> list[str]:
        notes = [
            self.conditions,
            "Intervals hold for effects that the bases can hold; they are undersmoothed (a hundredth of the "
            "smoothing parameters of REML, or less), so that bias is small beside the error.",
        ]
        q, n = self._fitted.B.shape[0], self._fitted.rows
        if n < FEW * q:
            notes.append(
                f"{n:,.0f} rows for {q} columns: below {FEW} rows a column simultaneous bands cover less "
                "than they say, since the errors' covariance is estimated."
            )
        return notes

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.tests)} learners; see .summary()>"

    def _repr_html_(self) -> str:
        return self.summary().as_html()


def fit_surfaces(
    held: HeldCurves, folds: Bools, learners: Sequence[int], conditions: str, random_state: int
) -> SurfaceFit:
    """Fit learners to the sums of some folds, (F,)."""
    boosting = held.boosting
    sums = boosting.even.over(folds)
    centred = sums.about(sums.mean, boosting.basis)
    fitted = refit(centred, boosting.design, boosting.gram, learners)
    return SurfaceFit(held, fitted, sums.mean, conditions, random_state)
