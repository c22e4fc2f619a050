"""Evaluation of predictions by bins of predicted means, by site and overall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import factorial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.special import expit

from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.inference.discrimination import (
    LEVEL,
    Discrimination,
    confusion_counts,
    confusion_rates,
    discrimination,
    roc_points,
)
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import plot_calibration, plot_roc
from fedstat.inference.recalibration import Recalibration
from fedstat.inference.summary import Report
from fedstat.inference.tables import Sheet, number
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.typing import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ----------------------------------------------------------------------------------------------------
# Bins of predictions, in which sites count their rows.

STEP, FURTHEST = 0.05, 8.0
"""Width of a bin of log odds, and the start of the outer bins of a probability."""
LOGARITHMS = (-25.0, 30.0)
"""Range of the bins of the logarithm of a mean, in any units."""
HALF, BEND, BIN_WIDTHS = 80, 4.0, 10.0
"""Bins of other predictors on either side, how much wider the outer ones are, and how far they reach."""
OWN_ROWS = (
    "The model was fitted to these rows. Its figures are better here than on other rows, and the calibration "
    "slope is about 1 by construction: evaluate(partition) judges it on other rows."
)
NOTES = Catalogue(
    warning={
        "own_rows": OWN_ROWS,
    },
    info={
        "accuracy": "{source}",
        "recalibration": "{source}",
        "remark": "{remark}",
        "merged_bins": "Bins of fewer than {least} {counted} were merged with a neighbor.",
        "auc": "AUC from counts in {bins} bins of the prediction, where ties within a bin count one half. "
        "Intervals of 95 % are for its logit, with Student's t. Standard error: Hanley and McNeil (1982), "
        "with its two probabilities counted from the bins. The AUC of all sites also ranks rows of "
        "different sites against each other.",
        "auc_bounds": "From the bins, the AUC of these rows over all sites is between {low:.3f} and "
        "{high:.3f}; this is not an interval for other rows.",
        "brier": "Brier score, all sites: {score:.4f}, from sums over rows.",
    },
)


def bin_edges(distribution: DistributionSpec, center: float, width: float) -> Floats:
    """Ascending edges between the bins of a linear predictor, (B - 1,); they depend on no row.

    Probabilities, and means whose logarithm is linear, have the same edges for every model. Others have edges
    around a `center`, wider with the distance from it, in units of a `width`: those of the released model.
    """
    if distribution.name == "Binomial":
        log_odds = STEP * np.arange(-round(FURTHEST / STEP), round(FURTHEST / STEP) + 1)
        return np.unique(distribution.make().link(expit(log_odds)))
    if distribution.link == "Log":
        return np.arange(LOGARITHMS[0], LOGARITHMS[1] + STEP / 2.0, STEP)
    t = np.arange(-HALF, HALF + 1) / HALF
    return np.asarray(center + width * BIN_WIDTHS * np.sinh(BEND * t) / np.sinh(BEND))


def probabilities(edges: Floats, distribution: DistributionSpec) -> Floats:
    """Probabilities at edges of a linear predictor that ascend from minus infinity to infinity, (B + 1,)."""
    inner = np.asarray(distribution.make().link.inverse(edges[1:-1]))
    return np.concatenate([[0.0], inner.clip(0.0, 1.0), [1.0]])


def merge_small_bins(counts: Ints, least: int) -> Ints:
    """Return which bins a site counts together, so that no released bin holds 1 to ``least - 1`` rows.

    The smallest such bin joins its nearest occupied neighbor (of two, the smaller), and so on until none is
    left; the joint bin is released at the index of the fuller of the two. Every sum over bins is preserved,
    and with it the ratio of observed to expected. Rows that moved are counted in a bin that is not theirs.
    Compared with the rows they joined they count as ties; the order relative to the site's other rows is
    unchanged; relative to rows of other sites in the bins between, they may count on the wrong side. The
    bounds of the AUC allow for this if `Evaluation` receives `least`.

    From rows in each bin (B,), it returns the bin in which to count each one's rows, (B,); a site with rows,
    but fewer than `least`, is an error.

    Examples
    --------
    >>> merge_small_bins(np.array([40, 3, 0, 9, 2, 0]), 5)
    array([0, 0, 2, 3, 3, 5])
    """
    total = int(counts.sum())
    if 0 < total < least:
        raise EstimationError(f"expected at least {least} rows to count in bins, received {total}")
    held = {int(b): int(counts[b]) for b in np.flatnonzero(counts)}
    groups = np.arange(len(counts))
    while held and min(held.values()) < least:
        small = min(held, key=lambda b: held[b])
        neighbor = min((b for b in held if b != small), key=lambda b: (abs(b - small), held[b]))
        kept, gone = (small, neighbor) if held[small] > held[neighbor] else (neighbor, small)
        held[kept] += held.pop(gone)
        groups[groups == gone] = kept
    return groups


# ----------------------------------------------------------------------------------------------------
# Accuracy of predicted means for a numerical response, from sums over rows.

TINY = 1e-12
"""Share of the deviance of predictions below which a constant's deviance is rounding."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Accuracy:
    """Squared errors and deviance of predicted means, compared with those of a constant.

    Parameters
    ----------
    n, total : ndarray, shape (K,)
        Rows, and the sum of their responses, by site.
    squares : ndarray, shape (K,)
        Sums of squared differences between response and predicted mean, by site.
    spread : ndarray, shape (K,)
        Sums of squared differences between response and the site's own mean.
    deviance, null_deviance : float
        Over all rows, by the model's distribution: of the predicted means, and of the mean of all responses.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> found = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit().evaluate().accuracy
    >>> len(found.rmse), len(found.rsquared), bool(found.rsquared[-1] > 0.0), "Deviance" in found.note
    (5, 5, True, True)
    >>> bool(abs(found.deviance_explained - found.rsquared[-1]) < 1e-9)
    True
    """

    n: Floats
    total: Floats
    squares: Floats
    spread: Floats
    deviance: float
    null_deviance: float

    @property
    def rmse(self) -> Floats:
        """Root of the mean squared error, (K + 1,): by site, and of all rows."""
        n, squares = (np.append(part, part.sum()) for part in (self.n, self.squares))
        return np.asarray(np.sqrt(squares / n))

    @property
    def rsquared(self) -> Floats:
        """1 - squared errors / spread, (K + 1,): by site about its own mean, and over all about theirs.

        Negative if a constant, the mean of the same rows, is closer; nan if responses do not differ.
        """
        means = self.total / self.n
        between = float(self.n @ (means - self.total.sum() / self.n.sum()) ** 2)
        spread = np.append(self.spread, self.spread.sum() + between)
        squares = np.append(self.squares, self.squares.sum())
        share = np.divide(squares, spread, out=np.full_like(spread, np.nan), where=spread > 0.0)
        return np.asarray(1.0 - share)

    @property
    def deviance_explained(self) -> float:
        """Share of a constant's deviance that predictions explain.

        For a normal response it is R-squared, unless predictions were averaged before they were counted.
        """
        return (
            1.0 - self.deviance / self.null_deviance
            if self.null_deviance > TINY * abs(self.deviance)
            else float("nan")
        )

    @property
    def note(self) -> str:
        """Return the note below a summary."""
        share = self.deviance_explained
        explained = "" if np.isnan(share) else f"; {100.0 * share:.1f} % explained"
        return (
            f"Deviance, all entities: {number(self.deviance)}, for a constant {number(self.null_deviance)}"
            f"{explained}. R2 is 1 - squared errors / spread about the mean of the entities that are "
            "evaluated."
        )


# ----------------------------------------------------------------------------------------------------
# Discrimination and calibration from counts in bins of the prediction, not from rows.

ALL = "all sites"
ROUNDING = 1e-6
"""Rounding by which events may exceed rows: proportions times trials are not exact integers."""
WIDTHS: tuple[int, ...] = (24, 10, 10, 10, 8, 7, 7, 7, 7)
NUMBER_WIDTHS: tuple[int, ...] = (24, 10, 10, 10, 8, 11, 11)
POINTS, ROC = ["site", "point"], ["threshold", "fpr", "tpr"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evaluation(Report):
    """Discrimination and calibration of predictions, over sites.

    Parameters
    ----------
    edges : ndarray, shape (B + 1,)
        Ascending edges of the bins of the predicted mean, or of the linear predictor.
    sites : tuple of str, length K
    n : ndarray, shape (K, B)
        Rows (or trials) by site and bin.
    observed : ndarray, shape (K, B)
        Sums of the response: events if it is binary.
    expected : ndarray, shape (K, B)
        Sums of the predicted means.
    binary : bool
        Whether the response is an event indicator. Otherwise there is no AUC.
    least : int
        As passed to `merge_small_bins` at the sites; 0 without merging.
    means : ndarray, shape (B + 1,), optional
        Predicted means at the edges, if these are edges of the linear predictor.
    squares : ndarray, shape (K + 1,), optional
        Sums over rows of squared differences between event and predicted probability, by site and over all;
        nan for sites whose values were masked in the sum.
    recalibration : Recalibration, optional
        The response regressed on the linear predictor.
    accuracy : Accuracy, optional
        Squared errors and deviance of a numerical response.
    remarks : tuple of str
        Further notes of the summary.
    counted : str
        Contents of a bin, and where they were counted.
    own_rows : bool
        Whether the model was fitted to these rows.

    Raises
    ------
    ModelError
        Shapes do not match, edges do not ascend, a count is negative, or there are more events than rows.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> evaluation = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().evaluate()
    >>> round(evaluation.auc, 2), evaluation.auc_by_site.round(2).to_dict()
    (0.72, {'Cleveland': 0.67, 'Hungary': 0.69, 'Long Beach': 0.62, 'Switzerland': 0.55})
    >>> len(evaluation.to_frame()), evaluation.calibration().columns[:3].tolist(), round(evaluation.brier, 2)
    (5, ['low', 'high', 'n'], 0.21)
    >>> list(evaluation.discrimination), evaluation.roc().columns.tolist(), len(evaluation.thresholds) > 0
    (['Cleveland', 'Hungary', 'Long Beach', 'Switzerland', 'all sites'], ['threshold', 'fpr', 'tpr'], True)
    >>> evaluation.confusion(0.5).shape, "AUC" in evaluation.summary().as_text()
    ((5, 10), True)
    >>> bool(evaluation.plot_calibration().has_data()), bool(evaluation.plot_roc().has_data())
    (True, True)
    """

    edges: Floats
    sites: tuple[str, ...]
    n: Floats
    observed: Floats
    expected: Floats
    binary: bool = True
    least: int = 0
    means: Floats | None = None
    squares: Floats | None = None
    recalibration: Recalibration | None = None
    accuracy: Accuracy | None = None
    remarks: tuple[str, ...] = ()
    counted: str = "rows at a site"
    own_rows: bool = False

    def __post_init__(self) -> None:
        shape = (len(self.sites), len(self.edges) - 1)
        sums = {"n": self.n, "observed": self.observed, "expected": self.expected}
        wrong = [f"{what} of shape {sum_.shape}" for what, sum_ in sums.items() if sum_.shape != shape]
        if wrong:
            raise ModelError(f"evaluation: expected {shape} (sites, bins), received {', '.join(wrong)}")
        if not (np.diff(self.edges) > 0.0).all():
            raise ModelError("evaluation: expected ascending edges of the bins")
        # Sums come from sites: an impossible one must not become an AUC.
        bad = self.n < 0.0
        if self.binary:
            bad = bad | (self.observed < -ROUNDING) | (self.observed > self.n + ROUNDING)
        if bad.any():
            where = ", ".join(self.sites[k] for k in np.unique(np.nonzero(bad)[0]))
            raise ModelError(f"evaluation: expected 0 <= events <= rows in each bin; not so at {where}")

    @property
    def auc(self) -> float:
        """Area under the receiver operating characteristic over all pairs of rows, also across sites."""
        return self.discrimination[ALL].auc

    @property
    def auc_by_site(self) -> pd.Series:
        """The same within each site; nan if a site has only events, or none."""
        found = self.discrimination
        return pd.Series([found[site].auc for site in self.sites], index=list(self.sites), name="auc")

    @property
    def discrimination(self) -> dict[str, Discrimination]:
        """AUC with standard error and bounds: for each site, and over all.

        Raises
        ------
        NotAvailableError
            The response is not binary.
        """
        # All sites together: a model must also rank rows of different sites against each other.
        return {who: discrimination(*rows, self.least) for who, rows in self._outcomes().items()}

    @property
    def thresholds(self) -> Floats:
        """Predicted means at the edges of the bins, (B + 1,)."""
        return self.edges if self.means is None else self.means

    @property
    def brier(self) -> float:
        """Brier score over all rows: the mean squared difference of event and predicted probability.

        Raises
        ------
        NotAvailableError
            The response is not binary, or the sums of squares were not requested.
        """
        if not self.binary or self.squares is None:
            raise NotAvailableError(
                "no Brier score: the response is not binary, or the evaluation had recalibrate=False"
            )
        return float(self.squares[-1] / self.n.sum())

    def roc(self) -> pd.DataFrame:
        """Receiver operating characteristic of each site and over all, from counts in bins.

        Points are exact for their thresholds, the edges of the bins, except for bins with fewer rows than a
        site releases, which it merged with a neighbor. Between two points, the curve of the rows is inside
        the rectangle that they span.

        Returns
        -------
        DataFrame
            Index (site, point); ``threshold``, the predicted probability above which a row is positive, from
            the largest down; ``fpr``, the share of rows without the event that are positive; ``tpr``, the
            same for rows with it. Sites without both outcomes are left out.

        Raises
        ------
        NotAvailableError
            The response is not binary.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> evaluation = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().evaluate()
        >>> evaluation.roc().loc["all sites", ["fpr", "tpr"]].iloc[[0, -1]].to_numpy().tolist()
        [[0.0, 0.0], [1.0, 1.0]]
        """
        parts = {}
        for who, (events, others) in self._outcomes().items():
            if events.sum() > 0.0 and others.sum() > 0.0:
                parts[who] = pd.DataFrame(
                    roc_points(events.sum(axis=0), others.sum(axis=0), self.thresholds), columns=ROC
                )
        if not parts:
            return pd.DataFrame(columns=ROC, index=pd.MultiIndex.from_arrays([[], []], names=POINTS))
        return pd.concat(parts, names=POINTS)

    def confusion(self, threshold: float = 0.5) -> pd.DataFrame:
        """Confusion table of each site and of all at a threshold, from counts in bins.

        Parameters
        ----------
        threshold : float
            The predicted probability above which the event is predicted, between 0 and 1. The nearest edge of
            the bins is used, and reported in the table.

        Returns
        -------
        DataFrame
            Index site; ``threshold``, as used; rows ``tp``, ``fp``, ``fn``, ``tn``; ``sensitivity``,
            ``specificity``, ``ppv``, ``npv``, ``accuracy``, nan if the denominator is zero.

        Raises
        ------
        ModelError
            The threshold is not between 0 and 1.
        NotAvailableError
            The response is not binary.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> evaluation = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().evaluate()
        >>> evaluation.confusion(0.5).loc["all sites", ["threshold", "sensitivity"]].round(2).tolist()
        [0.5, 0.78]
        >>> round(evaluation.brier, 3), round(evaluation.recalibration.slope, 6)
        (0.211, 1.0)
        """
        outcomes = self._outcomes()
        if not 0.0 < threshold < 1.0:
            raise ModelError(f"confusion: expected a threshold between 0 and 1, received {threshold}")
        first = int(np.abs(self.thresholds - threshold).argmin())
        counts = np.array(
            [confusion_counts(x.sum(axis=0), y.sum(axis=0), first) for x, y in outcomes.values()]
        )
        named = dict(zip(("tp", "fp", "fn", "tn"), counts.T, strict=True))
        index = pd.Index(list(outcomes), name="site")
        table = {"threshold": float(self.thresholds[first]), **named, **confusion_rates(**named)}
        return pd.DataFrame(table, index=index)

    def _outcomes(self) -> dict[str, tuple[Floats, Floats]]:
        """Rows with and without the event, (sites, B) each, of each site and over all."""
        if not self.binary:
            remedy = Remedy("calibration()", "see {call}")
            raise NotAvailableError("no AUC: the response is not binary", remedy=remedy)
        others = self.n - self.observed
        rows = {site: slice(k, k + 1) for k, site in enumerate(self.sites)} | {ALL: slice(None)}
        return {who: (self.observed[at], others[at]) for who, at in rows.items()}

    def to_frame(self) -> pd.DataFrame:
        """One row per site, and one for all.

        Returns
        -------
        DataFrame
            ``n``, ``observed`` (events, or the sum of the response), ``expected``, ``ratio`` (observed over
            expected); for a binary response ``auc``, ``auc_std_error``, its 95 % interval ``auc_low``,
            ``auc_high``, and bounds ``auc_at_least``, ``auc_at_most`` for the AUC of these rows, which is
            known only up to bins; ``brier``, if its sums were requested. For a numerical response, over sites
            with different columns, ``rmse`` and ``rsquared``.
        """
        sums = {what: self._with_total(v.sum(axis=1)) for what, v in self._sums().items()}
        frame = pd.DataFrame(sums, index=pd.Index([*self.sites, ALL], name="site"))
        frame["ratio"] = _ratio(frame["observed"].to_numpy(), frame["expected"].to_numpy())
        if self.binary:
            found = self.discrimination.values()
            frame["auc"] = [d.auc for d in found]
            frame["auc_std_error"] = [d.std_error for d in found]
            frame["auc_low"], frame["auc_high"] = np.transpose([d.conf_int() for d in found])
            frame["auc_at_least"] = [d.at_least for d in found]
            frame["auc_at_most"] = [d.at_most for d in found]
        if self.binary and self.squares is not None:
            with np.errstate(invalid="ignore"):
                frame["brier"] = self.squares / frame["n"]
        if self.accuracy is not None:
            frame["rmse"], frame["rsquared"] = self.accuracy.rmse, self.accuracy.rsquared
        return frame

    def calibration(self) -> pd.DataFrame:
        """Predicted and observed means in each bin that holds rows, by site and over all.

        Returns
        -------
        DataFrame
            Index (site, bin); ``low``, ``high`` (edges; rows of merged bins may be outside), ``n``,
            ``events`` (``total`` if the response is not binary), ``mean_predicted``, ``observed`` (mean).
        """
        # The last row is all sites.
        stacked = {what: np.vstack([v, v.sum(axis=0)]) for what, v in self._sums().items()}
        k, b = np.nonzero(stacked["n"])
        n, observed, expected = (stacked[what][k, b] for what in ("n", "observed", "expected"))
        index = pd.MultiIndex.from_arrays([np.array([*self.sites, ALL])[k], b], names=["site", "bin"])
        total = "events" if self.binary else "total"
        columns = {"low": self.edges[b], "high": self.edges[b + 1], "n": n, total: observed}
        return pd.DataFrame(
            {**columns, "mean_predicted": expected / n, "observed": observed / n}, index=index
        )

    def tidy(self) -> pd.DataFrame:
        """One row per site and one for all, the columns of :meth:`to_frame`."""
        return self.to_frame().rename_axis("site").reset_index()

    def _glance(self) -> dict[str, Any]:
        return {"n_sites": len(self.sites), **self.to_frame().loc[ALL]}

    def _sheets(self) -> Iterator[Sheet]:
        """One line per site and one for all: rows, events, expected, ratio, AUC with its interval, or R2."""
        heads = ["n", "events" if self.binary else "observed", "expected", "ratio"]
        heads += ["AUC", "std err", *(f"{q:.3f}" for q in (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))] * self.binary
        heads += ["RMSE", "R2"] * (self.accuracy is not None)
        frame = self.to_frame().iloc[:, : len(heads)]
        rows = tuple(
            (str(site), *self._cells(values))
            for site, values in zip(frame.index, frame.to_numpy().tolist(), strict=True)
        )
        all_widths = WIDTHS if self.accuracy is None else NUMBER_WIDTHS
        aligns, widths = "l" + "r" * len(heads), all_widths[: len(heads) + 1]
        yield Sheet(("site", *heads), rows, aligns, widths, "Predictions and observations", wrap=True)
        if self.recalibration is not None:
            yield self.recalibration.sheet()

    def _cells(self, values: list[float]) -> list[str]:
        n, observed, expected, *rest = values
        cells = ["-" if np.isnan(value) else f"{value:.3f}" for value in rest]
        if self.binary:
            return [f"{n:,.0f}", f"{observed:,.0f}", f"{expected:,.1f}", *cells]
        for i, value in enumerate(rest[1:3], 1):
            cells[i] = number(value) if i == 1 or abs(value) >= 1e3 else cells[i]
        return [f"{n:,.0f}", number(observed), number(expected), *cells]

    def plot_calibration(self, ax: Axes | None = None, *, groups: int = 10) -> Axes:
        """Plot observed against predicted means, in groups of about equal size.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        groups : int
            Largest number of points of a curve; neighboring bins are joined.

        Returns
        -------
        matplotlib Axes
            All sites as points, with Wilson's 95 % intervals for a binary response; each site as a line. A
            strip above shows the rows by their prediction, and the events among them.
        """
        curves = {site: (self.n[k], self.observed[k], self.expected[k]) for k, site in enumerate(self.sites)}
        total = (self.n.sum(axis=0), self.observed.sum(axis=0), self.expected.sum(axis=0))
        return plot_calibration(curves, total, binary=self.binary, groups=groups, ax=ax)

    def plot_roc(self, ax: Axes | None = None) -> Axes:
        """Receiver operating characteristic of each site, and of all, as :meth:`roc`.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
            With the AUC of each in the legend.

        Raises
        ------
        NotAvailableError
            The response is not binary, or no site has both outcomes.
        """
        curves = self.roc()
        if not len(curves):
            raise NotAvailableError("no ROC: no site has rows with the event and rows without")
        return plot_roc(curves, {who: found.auc for who, found in self.discrimination.items()}, ax)

    def __repr__(self) -> str:
        auc = f", AUC {self.auc:.3f}" if self.binary else ""
        return f"<Evaluation: {len(self.sites)} sites, {self.n.sum():,.0f} rows{auc}; see .summary()>"

    def _sums(self) -> dict[str, Floats]:
        return {"n": self.n, "observed": self.observed, "expected": self.expected}

    def _with_total(self, values: Floats) -> Floats:
        return np.append(values, values.sum())

    def _summary_notes(self) -> Iterator[Note]:
        if self.own_rows:
            yield NOTES.note("own_rows")
        yield from self._binary_notes() if self.binary else ()
        if self.accuracy is not None:
            yield NOTES.note("accuracy", source=self.accuracy.note)
        if self.recalibration is not None:
            yield NOTES.note("recalibration", source=self.recalibration.note)
        yield from (NOTES.note("remark", remark=remark) for remark in self.remarks)
        if self.least > 1:
            yield NOTES.note("merged_bins", least=self.least, counted=self.counted)

    def _binary_notes(self) -> Iterator[Note]:
        all_ = self.discrimination[ALL]
        yield NOTES.note("auc", bins=len(self.edges) - 1)
        yield NOTES.note("auc_bounds", low=all_.at_least, high=all_.at_most)
        if self.squares is not None:
            yield NOTES.note("brier", score=self.brier)


def _ratio(observed: Floats, expected: Floats) -> Floats:
    return np.divide(observed, expected, out=np.full_like(expected, np.nan), where=expected != 0.0)


def shapley_values(worth: Mapping[int, float], K: int) -> Floats:
    """Return the mean increase in worth as each of K sites joins, over all orders in which they may, (K,).

    `worth` is that of every set of sites, whose members are the bits of its number; see Shapley (1953), "A
    value for n-person games", Contributions to the Theory of Games 2.
    """
    share = [factorial(j) * factorial(K - j - 1) / factorial(K) for j in range(K)]
    increase = [
        sum(share[s.bit_count()] * (worth[s | 1 << k] - worth[s]) for s in range(1 << K) if not s >> k & 1)
        for k in range(K)
    ]
    return np.array(increase)
