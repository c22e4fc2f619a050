"""The mean baseline hazard of the sites, and survival that follows from it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import FedstatWarning, ModelError, warn
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.predicted_survival import MOST_TIMES, PredictedSurvival, survival_table
from fedstat.inference.summary import WIDTH, DerivedReport
from fedstat.inference.survival_curves import KnownCurve
from fedstat.inference.tables import Sheet, number
from fedstat.models.checks import HeldRows
from fedstat.models.horizontal.prediction import held_rows, predict_rows
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTES = Catalogue(
    info={
        "common_baseline": "All sites are assumed to have the same baseline hazard.",
        "mean_of_sites": "The sites have baseline hazards of their own. This is their mean, weighted by "
        "rows: survival at a site can differ from the predictions.",
    },
)


class BaselineHazard(DerivedReport):
    """Cumulative baseline hazard at the ends of intervals: the mean over sites, weighted by their rows.

    With ``fit(baseline="common")`` it is that of all sites. It is the hazard of a row whose columns are zero,
    or at their reference levels.

    Attributes
    ----------
    times, hazard : (J,) array
        Ends of the intervals, and the cumulative hazard there.

    Examples
    --------
    >>> import fedstat as fs, pandas as pd
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ center(age)", partition).fit()
    >>> baseline = fit.baseline_hazard([12, 24, 36])
    >>> baseline.tidy().round(2)
       time  hazard  std_error
    0  12.0    0.21       0.02
    1  24.0    0.48       0.03
    2  36.0    0.80       0.05
    >>> baseline.times.tolist(), baseline.hazard.shape, baseline.glance()["intervals"].tolist()
    ([12.0, 24.0, 36.0], (3,), [3])
    """

    def __init__(
        self,
        times: Floats,
        hazard: Floats,
        variance: Floats,
        centers: Floats,
        params: Floats,
        cov: Floats,
        agreement: RowsSchema,
        design: RowsDesign,
        *,
        common: bool = False,
        sources: Iterable[object],
    ) -> None:
        super().__init__(sources)
        self.times, self.hazard = times, hazard
        self._variance, self._centers, self._params, self._cov = variance, centers, params, cov
        self._agreement, self._design, self._common = agreement, design, common

    def _errors(self, X: Floats) -> Floats:
        """Return standard errors of the cumulative hazard over exp(x'b), for rows (m, p): (m, J)."""
        # The derivative by the coefficients is x times the hazard, less the hazard times the mean at risk.
        d = X[:, None, :] * self.hazard[:, None] - self._centers
        return np.asarray(np.sqrt(self._variance + np.einsum("mjp,pq,mjq->mj", d, self._cov, d)))

    def hazard_at(self, times: Floats) -> Floats:
        """Return the cumulative hazard at times (m,).

        It is known at the ends of intervals, and between two ends at which it is the same; otherwise NaN.

        Raises
        ------
        ModelError
            A time is after the last interval.

        Warns
        -----
        FedstatWarning
            A time is between two ends; the warning names them.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ center(age)", partition).fit()
        >>> fit.baseline_hazard(12, until=48).hazard_at([12, 24]).round(2).tolist()
        [0.21, 0.48]
        """
        found, problem = self._look_up(np.asarray(times, dtype=np.float64))
        if problem:
            warn(problem, FedstatWarning)
        return found

    def _look_up(self, points: Floats) -> tuple[Floats, str]:
        """Return the cumulative hazard at points (m,), and in words where it is not known, if anywhere."""
        if points.max() > self.times[-1]:
            raise ModelError(f"times: the baseline hazard ends at {self.times[-1]:g}; choose earlier times")
        curve = KnownCurve(self.times, np.repeat(self.hazard[:, None], 3, axis=1), 0.0)
        found = curve.at(points)[:, 0]
        unknown = np.isnan(found)
        where = curve.between(points[unknown]) if unknown.any() else ""
        return found, f"times: the baseline hazard is not known {where}" if where else ""

    def _part(self, times: Floats) -> BaselineHazard:
        """Return the hazard at some of its times alone, (m,)."""
        place = np.searchsorted(self.times, times)
        known = place < len(self.times)
        if not known.all() or not np.allclose(self.times[place], times):
            ends = ", ".join(f"{one:g}" for one in self.times)
            raise ModelError(f"times: a common baseline hazard is known at the ends of its intervals: {ends}")
        part = copy.copy(self)
        part.times, part.hazard = self.times[place], self.hazard[place]
        part._variance, part._centers = self._variance[place], self._centers[place]
        return part

    def tidy(self) -> pd.DataFrame:
        """One row per interval: ``time``, cumulative ``hazard``, ``std_error``."""
        error = self._errors(np.zeros((1, len(self._params))))[0]
        return pd.DataFrame({"time": self.times, "hazard": self.hazard, "std_error": error})

    @takes_alpha
    def survival(self, frame: HeldRows, alpha: float = 0.05) -> pd.DataFrame:
        """Predict survival of rows that the caller holds, with intervals.

        The intervals are symmetric on the scale of the logarithm of the cumulative hazard, and account for
        the coefficients and the hazard of these sites, not for differences between sites.

        Parameters
        ----------
        frame : DataFrame
            With the columns of the model.
        alpha : float

        Returns
        -------
        DataFrame
            ``row`` (the index of `frame`), ``time``, ``survival``, ``conf_low``, ``conf_high``.

        Raises
        ------
        ModelError
            A row lacks a column of the model.
        DesignError
            A column is absent, of another type, or holds a level that the fit did not know.

        Examples
        --------
        >>> import fedstat as fs, pandas as pd
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.baseline_hazard([12, 24]).survival(pd.DataFrame({"age": [60]})).round(3)
           row  time  survival  conf_low  conf_high
        0    0  12.0     0.823     0.795      0.848
        1    0  24.0     0.638     0.601      0.673
        """
        frame = held_rows(frame)
        found = predict_rows(self._agreement, self._design, self._params, frame)
        if not found.complete.all() or found.linear.isna().any():
            raise ModelError("survival: expected rows without missing values")
        ratio = np.exp(found.linear.to_numpy())[:, None]
        total = ratio * self.hazard
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.exp(stats.norm.isf(alpha / 2.0) * self._errors(found.X) / self.hazard)
        spread = np.where(self.hazard > 0.0, spread, 1.0)
        low, high = np.exp(-total * spread), np.exp(-total / spread)
        return survival_table(frame.index, self.times, np.exp(-total), low, high)

    @takes_alpha
    def plot(self, frame: HeldRows, ax: Axes | None = None, *, alpha: float = 0.05) -> Axes:
        """Draw predicted survival of rows, with their intervals; the index of `frame` names them.

        Examples
        --------
        >>> import fedstat as fs, pandas as pd
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> ages = pd.DataFrame({"age": [50, 70]}, index=["age 50", "age 70"])
        >>> fit.baseline_hazard(3, until=48).plot(ages).get_ylabel()
        'survival'
        """
        return self._curves(frame, alpha).plot(ax)

    def _curves(self, frame: HeldRows, alpha: float) -> PredictedSurvival:
        """Return predicted survival of rows as curves."""
        table = self.survival(frame, alpha)
        (note,) = self._summary_notes()
        return PredictedSurvival(
            table, alpha=alpha, steps=True, note=str(note), sources=(*self._sources, self)
        )

    def _glance(self) -> Mapping[str, float]:
        return {
            "intervals": len(self.times),
            "until": float(self.times[-1]),
            "hazard": float(self.hazard[-1]),
        }

    def _sheets(self) -> Iterator[Sheet]:
        every = -(-len(self.times) // MOST_TIMES)
        rows = tuple(
            (f"{time:g}", number(hazard), number(error))
            for time, hazard, error in self.tidy().iloc[every - 1 :: every].itertuples(index=False)
        )
        title = "Cumulative baseline hazard" + (", all sites" if self._common else ", mean over sites")
        yield Sheet(("time", "hazard", "std err"), rows, "lrr", (WIDTH - 28, 13, 13), title)

    def _summary_notes(self) -> Iterator[Note]:
        if self._common:
            yield NOTES.note("common_baseline")
            return
        yield NOTES.note("mean_of_sites")

    def __repr__(self) -> str:
        return f"<Baseline hazard at {len(self.times)} times up to {self.times[-1]:g}; see .summary()>"


def known_hazard(baseline: BaselineHazard, times: Floats) -> Floats:
    """Return the cumulative hazard at times (m,) of an evaluation.

    Raises
    ------
    ModelError
        The hazard is not known at one of them.
    """
    hazard, problem = baseline._look_up(times)
    if problem:
        raise ModelError(problem)
    return hazard
