"""Evaluation of predicted survival from sums over sites: AUC, Brier score and calibration at given times.

Rows that are censored before a time are represented by others: a row with an event at T has the weight
1 / G(T-), one that is followed for longer than t the weight 1 / G(t), where G is Kaplan and Meier's estimate
of the time of censoring (Graf et al. 1999; Uno et al. 2007).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import WIDTH, Report
from fedstat.inference.tables import Sheet, number
from fedstat.plotting import COLORS, axes_for, label_y, plain_legend, set_headline
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTES = Catalogue(
    warning={
        "own_rows": "The model was fitted to these rows. Its figures are better here than on other rows: "
        "evaluate(partition, times=...) judges it on other rows.",
    },
    info={
        "integrated": "Integrated Brier score from {first:g} to {last:g}: {score:.4f}.",
        "censoring": "Censored rows are represented by others, with weights from Kaplan and Meier's "
        "estimate of the time of censoring. Censoring is assumed to be independent of the columns.",
        "errors": "AUC and Brier scores have no standard errors here: the weights are estimated, and errors "
        "that ignore this would be wrong.",
        "merged_bins": "Bins of the linear predictor with fewer than {least} rows at a site were merged "
        "with a neighbor; the AUC counts rows of a bin as ties.",
    },
)


def censoring_survival(events: Floats, censored: Floats, beyond: float) -> Floats:
    """Return G before each interval and after the last, (J + 1,), from counts by interval (J,).

    Events of an interval come before its censored rows, as in R's prodlim.
    """
    leaving = events + censored
    at_risk = leaving[::-1].cumsum()[::-1] + beyond - events
    stays = np.divide(censored, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0.0)
    return np.append(1.0, np.cumprod(1.0 - stays))


def survival_at_ends(events: Floats, censored: Floats, beyond: float) -> Floats:
    """Return Kaplan and Meier's survival after each interval, (J,), from counts by interval (J,)."""
    at_risk = (events + censored)[::-1].cumsum()[::-1] + beyond
    share = np.divide(events, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0.0)
    return np.asarray(np.cumprod(1.0 - share), dtype=np.float64)


def concordance_index(pairs: Floats, squares: Floats) -> tuple[float, float]:
    """Return Harrell's concordance and its standard error by the infinitesimal jackknife, as R's survival.

    `pairs` (4,) and sums of `squares` (3,) are those of
    :func:`fedstat.kernels.partial_likelihood.concordance`; without pairs both are nan.
    """
    agree, disagree, tied, _ = pairs.tolist()
    total = agree + disagree + tied
    if not total:
        return float("nan"), float("nan")
    share = (agree - disagree) / total
    ss, sn, nn = squares.tolist()
    error = float(np.sqrt(max(ss - 2.0 * share * sn + share**2 * nn, 0.0)) / (2.0 * total))
    return (agree + tied / 2.0) / total, error


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalSums:
    """Sums over all sites, for times (m,) and B bins of the linear predictor.

    Parameters
    ----------
    events, censored : (m, B) array
        Rows with and without an event whose time ends between the time before and this one.
    weights : (m, B) array
        Weights 1 / G of the events.
    beyond : (B,) array
        Rows that are followed for longer than the last time.
    rows : (B,) array
        All rows.
    predicted : (m, B) array
        Predicted probability of an event up to each time.
    squares : (m,) array
        Weighted squared differences between survival and its prediction.
    """

    events: Floats
    censored: Floats
    weights: Floats
    beyond: Floats
    rows: Floats
    predicted: Floats
    squares: Floats

    @property
    def controls(self) -> Floats:
        """Rows that are followed for longer than each time, (m, B)."""
        later = (self.events + self.censored)[::-1].cumsum(axis=0)[::-1]
        return np.vstack([later[1:], np.zeros((1, later.shape[1]))]) + self.beyond

    @property
    def cases(self) -> Floats:
        """Weights of the events up to each time, (m, B)."""
        return self.weights.cumsum(axis=0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SurvivalEvaluation(Report):
    """Discrimination, accuracy and calibration of predicted survival at given times.

    Parameters
    ----------
    times : (m,) array
    sums : SurvivalSums
    free : (m,) array
        Probability that a row is not censored up to each time.
    survival : (m,) array
        Kaplan and Meier's estimate at each time, the prediction without a model.
    least : int
        Rows below which a site merged bins.
    own_rows : bool
        Whether the model was fitted to these rows.

    References
    ----------
    Graf, Schmoor, Sauerbrei and Schumacher, "Assessment and comparison of prognostic classification schemes
    for survival data", Statistics in Medicine 18 (1999).

    Uno, Cai, Tian and Wei, "Evaluating prediction rules for t-year survivors with censored regression
    models", JASA 102 (2007), equation 6.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(stage)", partition).fit()
    >>> evaluation = fit.evaluate(times=[12, 24, 36])
    >>> evaluation.tidy()[["time", "auc", "brier", "null_brier"]].round(2)
       time   auc  brier  null_brier
    0  12.0  0.71   0.14        0.16
    1  24.0  0.71   0.20        0.24
    2  36.0  0.71   0.22        0.25
    >>> round(evaluation.integrated_brier, 2), evaluation.auc.shape, evaluation.brier.shape
    (0.19, (3,), (3,))
    >>> evaluation.calibration(24, groups=4)[["predicted", "observed"]].round(1).values.tolist()
    [[0.2, 0.2], [0.3, 0.3], [0.4, 0.4], [0.7, 0.7]]
    >>> evaluation.null_brier.round(2).tolist(), evaluation.plot_auc().get_xlabel()
    ([0.16, 0.24, 0.25], 'time')
    >>> evaluation.plot_calibration(24).get_xlabel()
    'predicted probability of an event by 24'
    """

    times: Floats
    sums: SurvivalSums
    free: Floats
    survival: Floats
    least: int = 0
    own_rows: bool = False

    @property
    def auc(self) -> Floats:
        """Probability that a row with an event up to t has the higher hazard of it and one without, (m,)."""
        cases, controls = self.sums.cases, self.sums.controls
        below = np.cumsum(controls, axis=1) - controls / 2.0
        pairs = cases.sum(axis=1) * controls.sum(axis=1)
        missing = np.full(len(pairs), np.nan)
        found = np.divide((cases * below).sum(axis=1), pairs, out=missing, where=pairs > 0.0)
        return np.asarray(found)

    @property
    def brier(self) -> Floats:
        """Mean squared difference of survival and its prediction at each time, (m,)."""
        return np.asarray(self.sums.squares / self.sums.rows.sum())

    @property
    def null_brier(self) -> Floats:
        """Return the same for Kaplan and Meier's estimate as the prediction of every row, (m,)."""
        cases, controls = (part.sum(axis=1) for part in (self.sums.cases, self.sums.controls))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = cases * self.survival**2 + controls / self.free * (1.0 - self.survival) ** 2
        return np.asarray(found / self.sums.rows.sum())

    @property
    def integrated_brier(self) -> float:
        """Mean of the Brier score between the first and the last time, by the trapezoid rule.

        Raises
        ------
        NotAvailableError
            There is one time.
        """
        if len(self.times) < 2:
            raise NotAvailableError("integrated_brier: it needs two times or more")
        widths, brier = np.diff(self.times), self.brier
        return float(widths @ (brier[1:] + brier[:-1]) / 2.0 / widths.sum())

    def calibration(self, time: float, groups: int = 10) -> pd.DataFrame:
        """Predicted and observed probability of an event up to a time, in groups of about equal size.

        The observed one weights events by the inverse probability of not being censored; over all rows it is
        one minus Kaplan and Meier's estimate.

        Parameters
        ----------
        time : float
            One of the times of the evaluation.
        groups : int
            Most groups; bins of the linear predictor are joined.

        Returns
        -------
        DataFrame
            ``rows``, ``predicted``, ``observed``.

        Raises
        ------
        ModelError
            The model was not evaluated at this time.
        """
        place = np.flatnonzero(self.times == time)
        if not len(place):
            known = ", ".join(f"{one:g}" for one in self.times)
            raise ModelError(f"time: the model was evaluated at {known}, received {time!r}")
        n = self.sums.rows
        group = np.minimum((np.cumsum(n) - n / 2.0) / n.sum() * groups, groups - 1).astype(np.int64)
        sums = [n, self.sums.predicted[place[0]], self.sums.cases[place[0]]]
        rows, predicted, observed = (np.bincount(group, one, minlength=groups) for one in sums)
        kept = rows > 0.0
        found = {"rows": rows[kept], "predicted": (predicted / np.where(kept, rows, 1.0))[kept]}
        return pd.DataFrame({**found, "observed": (observed / np.where(kept, rows, 1.0))[kept]})

    def tidy(self) -> pd.DataFrame:
        """One row per time: ``time``, counts, mean ``predicted`` and ``observed`` risk, and scores."""
        n = self.sums.rows.sum()
        return pd.DataFrame(
            {
                "time": self.times,
                "events": self.sums.events.sum(axis=1).cumsum(),
                "at_risk": self.sums.controls.sum(axis=1),
                "predicted": self.sums.predicted.sum(axis=1) / n,
                "observed": 1.0 - self.survival,
                "auc": self.auc,
                "brier": self.brier,
                "null_brier": self.null_brier,
            }
        )

    def plot_auc(self, ax: Axes | None = None) -> Axes:
        """Draw the AUC at the times."""
        ax = axes_for(ax, 5.5, 3.4)
        ax.plot(self.times, self.auc, marker="o", color=COLORS[0], linewidth=1.6)
        ax.axhline(0.5, color="0.6", linewidth=0.8, linestyle=":")
        ax.set_ylim(min(0.45, float(np.nanmin(self.auc)) - 0.03), 1.0)
        ax.set_xlim(0.0, float(self.times[-1]) * 1.05)
        label_y(ax, "AUC")
        ax.set_xlabel("time")
        set_headline(ax, "Discrimination", "events up to the time against rows followed for longer")
        return ax

    def plot_calibration(self, time: float, ax: Axes | None = None, *, groups: int = 10) -> Axes:
        """Draw observed against predicted probabilities of an event up to a time, in groups."""
        found = self.calibration(time, groups)
        ax = axes_for(ax, 4.2, 4.0)
        top = min(1.0, 1.08 * float(found[["predicted", "observed"]].to_numpy().max()))
        ax.plot([0.0, top], [0.0, top], color="0.6", linewidth=0.8, linestyle=":", label="perfect")
        ax.plot(
            found["predicted"], found["observed"], marker="o", color=COLORS[0], linewidth=1.2, label="groups"
        )
        ax.set_xlim(0.0, top)
        ax.set_ylim(0.0, top)
        ax.set_xlabel(f"predicted probability of an event by {time:g}")
        label_y(ax, "observed")
        plain_legend(ax, loc="upper left")
        set_headline(ax, "Calibration", f"{len(found)} groups of equal size")
        return ax

    def _glance(self) -> Mapping[str, float]:
        last = self.tidy().iloc[-1]
        return {"rows": float(self.sums.rows.sum()), **{str(name): float(last[name]) for name in last.index}}

    def _sheets(self) -> Iterator[Sheet]:
        headers = ("time", "events", "at risk", "predicted", "observed", "AUC", "Brier", "without model")
        rows = tuple(
            (f"{time:g}", f"{events:,.0f}", f"{at_risk:,.0f}", *(number(one, 3) for one in others))
            for time, events, at_risk, *others in self.tidy().itertuples(index=False)
        )
        widths = (WIDTH - 7 * 12, *[11] * 6, 14)
        yield Sheet(headers, rows, "l" + "r" * 7, widths, "Predicted survival and observations")

    def _summary_notes(self) -> Iterator[Note]:
        if self.own_rows:
            yield NOTES.note("own_rows")
        if len(self.times) > 1:
            yield NOTES.note(
                "integrated", first=self.times[0], last=self.times[-1], score=self.integrated_brier
            )
        yield NOTES.note("censoring")
        yield NOTES.note("errors")
        if self.least > 1:
            yield NOTES.note("merged_bins", least=self.least)

    def __repr__(self) -> str:
        return f"<Survival evaluation at {len(self.times)} times; see .summary()>"
