"""Discrimination and calibration from counts in bins of the prediction, not from rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.inference.evaluation.calibration import plot_calibration
from fedstat.inference.tables import Sheet, SheetSummary, number
from fedstat.typing import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALL = "all sites"
ROUNDING = 1e-6
"""By how much events may exceed rows: proportions times trials are not whole in floating point."""
WIDTHS = (24, 10, 10, 10, 8, 7, 7, 7, 7)
LEVEL = 0.95
"""Of the intervals that a summary prints."""


def merge_small_bins(counts: Ints, least: int) -> Ints:
    """Say which bins a site counts together, so that none of those released holds 1 to ``least - 1`` rows.

    The smallest such bin joins its nearest occupied neighbour (of two, the smaller), and so on until none is
    left; the joint bin is released in the place of the fuller of the two. Every sum over bins is preserved,
    and with it the ratio of observed to expected. Rows that moved are counted in a bin that is not theirs:
    against the rows they joined they count as ties, and against the site's other rows as before; against
    rows of other sites in the bins between they may count on the wrong side. The bounds of the AUC allow for
    it where `Evaluation` is told of `least`.

    From rows in each bin (B,) it returns the bin in which to count each one's rows, (B,); a site that has
    rows, but fewer than `least`, is an error.

    Examples
    --------
    >>> merge_small_bins(np.array([40, 3, 0, 9, 2, 0]), 5)
    array([0, 0, 2, 3, 3, 5])
    """
    total = int(counts.sum())
    if 0 < total < least:
        raise EstimationError(f"expected {least} rows or more to count in bins, received {total}")
    held = {int(b): int(counts[b]) for b in np.flatnonzero(counts)}
    groups = np.arange(len(counts))
    while held and min(held.values()) < least:
        small = min(held, key=lambda b: held[b])
        neighbour = min((b for b in held if b != small), key=lambda b: (abs(b - small), held[b]))
        kept, gone = (small, neighbour) if held[small] > held[neighbour] else (neighbour, small)
        held[kept] += held.pop(gone)
        groups[groups == gone] = kept
    return groups


@dataclass(frozen=True, slots=True)
class Discrimination:
    """Area under the receiver operating characteristic, from counts in bins; nan without both outcomes.

    By the trapezoid rule: within a bin an event and a non-event count as a tie, one half. The standard error
    is that of Hanley and McNeil (1982), equation 1, see `discrimination`. The AUC of the rows lies from
    `at_least` to `at_most`, which is no interval for that of the population: within each bin all events are
    ranked below, or above, all non-events.
    """

    auc: float = float("nan")
    std_error: float = float("nan")
    at_least: float = float("nan")
    at_most: float = float("nan")

    def conf_int(self, alpha: float = 1.0 - LEVEL) -> tuple[float, float]:
        """Give the normal interval of level 1 - alpha, within 0 and 1.

        Examples
        --------
        >>> low, high = Discrimination(0.9, 0.02).conf_int()
        >>> print(f"{low:.3f} to {high:.3f}")
        0.861 to 0.939
        """
        half = float(stats.norm.isf(alpha / 2.0)) * self.std_error
        return max(self.auc - half, 0.0), min(self.auc + half, 1.0)


def discrimination(events: Floats, others: Floats, least: int = 0) -> Discrimination:
    """AUC of predictions that are known to their bin, from rows with and without the event, (K, B).

    Bins ascend with the prediction. `least` is what sites merged by, 0 where they merged nothing: otherwise a
    row may come from any of the empty bins next to its own, and the bounds allow for it.

    The variance is ``(A (1 - A) + (n1 - 1)(Q1 - A^2) + (n0 - 1)(Q2 - A^2)) / (n1 n0)`` with Q1 (Q2) the
    probability that two events (two non-events) are ranked above (below) one non-event (event). Q1 and Q2 are
    counted from the bins as in table II of the paper, not taken from its negative exponential approximation.

    References
    ----------
    Hanley, J. A. and McNeil, B. J. (1982). The meaning and use of the area under a receiver operating
    characteristic (ROC) curve. Radiology 143, 29-36.
    """
    x, y = events.sum(axis=0), others.sum(axis=0)
    n1, n0 = float(x.sum()), float(y.sum())
    if n1 <= 0.0 or n0 <= 0.0:
        return Discrimination()
    # Events in higher bins, and non-events in lower ones, than each bin.
    above, below = n1 - np.cumsum(x), np.cumsum(y) - y
    A = float(x @ (below + y / 2.0)) / (n1 * n0)
    Q1 = float(y @ (above**2 + above * x + x**2 / 3.0)) / (n0 * n1**2)
    Q2 = float(x @ (below**2 + below * y + y**2 / 3.0)) / (n1 * n0**2)
    variance = (A * (1.0 - A) + (n1 - 1.0) * (Q1 - A**2) + (n0 - 1.0) * (Q2 - A**2)) / (n1 * n0)
    low, high = (_bounds(events, others, least) / (n1 * n0)).tolist()
    return Discrimination(A, max(variance, 0.0) ** 0.5, low, high)


def _bounds(events: Floats, others: Floats, least: int) -> Floats:
    """Pairs in which the event is surely above, and in which it may be above, the non-event; shape (2,)."""
    n = events + others
    bins = np.broadcast_to(np.arange(n.shape[1]), n.shape)
    first, last = _spans(n) if least > 1 else (bins, bins)
    pairs = _pairs(events, others, first, last)
    for k in range(len(n)):  # merging keeps the order of a site's own rows
        own = slice(k, k + 1)
        pairs += _pairs(events[own], others[own], bins[own], bins[own])
        pairs -= _pairs(events[own], others[own], first[own], last[own])
    return pairs


def _pairs(events: Floats, others: Floats, first: Ints, last: Ints) -> Floats:
    """`_bounds` of rows that lie somewhere between two bins, both included."""
    B = events.shape[1]
    ends = np.bincount(last.ravel(), others.ravel(), B)
    starts = np.bincount(first.ravel(), others.ravel(), B)
    surely, maybe = np.cumsum(ends) - ends, np.cumsum(starts)
    return np.array([(events * surely[first]).sum(), (events * maybe[last]).sum()], dtype=np.float64)


def _spans(n: Floats) -> tuple[Ints, Ints]:
    """First and last bin from which the rows of a bin may come, (K, B): up to the next occupied one."""
    K, B = n.shape
    before = np.maximum.accumulate(np.where(n > 0, np.arange(B), -1), axis=1)
    after = np.minimum.accumulate(np.where(n > 0, np.arange(B), B)[:, ::-1], axis=1)[:, ::-1]
    first = np.hstack([np.full((K, 1), -1), before[:, :-1]]) + 1
    last = np.hstack([after[:, 1:], np.full((K, 1), B)]) - 1
    return first, last


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evaluation:
    """How well predictions rank and how well they agree with what was observed, over sites.

    Parameters
    ----------
    edges : ndarray, shape (B + 1,)
        Ascending edges of the bins of the predicted mean, or of the linear predictor.
    sites : tuple of str, length K
    n : ndarray, shape (K, B)
        Rows (or trials) by site and bin.
    observed : ndarray, shape (K, B)
        Sums of the response: events where it is binary.
    expected : ndarray, shape (K, B)
        Sums of the predicted means.
    binary : bool
        Whether the response is an event or none. Otherwise there is no AUC.
    least : int
        As given to `merge_small_bins` at the sites; 0 where they merged nothing.

    Raises
    ------
    ModelError
        Shapes do not agree, edges do not ascend, a count is negative, or there are more events than rows.
    """

    edges: Floats
    sites: tuple[str, ...]
    n: Floats
    observed: Floats
    expected: Floats
    binary: bool = True
    least: int = 0

    def __post_init__(self) -> None:
        shape = (len(self.sites), len(self.edges) - 1)
        sums = {"n": self.n, "observed": self.observed, "expected": self.expected}
        wrong = [f"{what} of shape {sum_.shape}" for what, sum_ in sums.items() if sum_.shape != shape]
        if wrong:
            raise ModelError(f"evaluation: expected {shape} (sites, bins), received {', '.join(wrong)}")
        if not (np.diff(self.edges) > 0.0).all():
            raise ModelError("evaluation: expected ascending edges of the bins")
        # Sums come from sites: one that is impossible must not become an AUC.
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
        """The same within each site; nan where a site has only events, or none."""
        found = self.discrimination
        return pd.Series([found[site].auc for site in self.sites], index=list(self.sites), name="auc")

    @property
    def discrimination(self) -> dict[str, Discrimination]:
        """AUC with standard error and bounds: of each site, and of all.

        Raises
        ------
        NotAvailableError
            The response is not binary.
        """
        if not self.binary:
            raise NotAvailableError("no AUC: the response is not binary; see calibration()")
        # All sites together: a model must also rank rows of one site against those of another.
        others = self.n - self.observed
        rows = {site: slice(k, k + 1) for k, site in enumerate(self.sites)} | {ALL: slice(None)}
        return {who: discrimination(self.observed[at], others[at], self.least) for who, at in rows.items()}

    def to_frame(self) -> pd.DataFrame:
        """One row per site, and one for all.

        Returns
        -------
        DataFrame
            ``n``, ``observed`` (events, or the sum of the response), ``expected``, ``ratio`` (observed over
            expected); for a binary response ``auc``, ``auc_std_error``, its 95 % interval ``auc_low``,
            ``auc_high``, and ``auc_at_least``, ``auc_at_most``, between which the AUC of these rows lies,
            as far as bins tell.
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
        return frame

    def calibration(self) -> pd.DataFrame:
        """Predicted against observed in each bin that holds rows, by site and for all.

        Returns
        -------
        DataFrame
            Index (site, bin); ``low``, ``high`` (edges; rows of merged bins may lie outside), ``n``,
            ``events`` (``total`` of a response that is not binary), ``mean_predicted``, ``observed`` (mean).
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

    def summary(self) -> SheetSummary:
        """One line per site and one for all: rows, events, expected, ratio, AUC with its interval."""
        heads = ["n", "events" if self.binary else "observed", "expected", "ratio"]
        heads += ["AUC", "std err", *(f"{q:.3f}" for q in (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))] * self.binary
        frame = self.to_frame().iloc[:, : len(heads)]
        rows = tuple(
            (str(site), *self._cells(values))
            for site, values in zip(frame.index, frame.to_numpy().tolist(), strict=True)
        )
        aligns, widths = "l" + "r" * len(heads), WIDTHS[: len(heads) + 1]
        sheet = Sheet(
            ("institution", *heads), rows, aligns, widths, "Predictions and observations", wrap=True
        )
        return SheetSummary([sheet], self._notes())

    def _cells(self, values: list[float]) -> list[str]:
        n, observed, expected, *rest = values
        sums = (
            [f"{observed:,.0f}", f"{expected:,.1f}"] if self.binary else [number(observed), number(expected)]
        )
        return [f"{n:,.0f}", *sums, *("-" if np.isnan(value) else f"{value:.3f}" for value in rest)]

    def plot_calibration(self, ax: Axes | None = None, *, groups: int = 10) -> Axes:
        """Observed against predicted means, in groups of about equal size.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        groups : int
            Most points of a curve; neighbouring bins are joined.

        Returns
        -------
        matplotlib Axes
            All sites as points, with Wilson's 95 % intervals for a binary response; each site as a line.
        """
        curves = {site: (self.n[k], self.observed[k], self.expected[k]) for k, site in enumerate(self.sites)}
        total = (self.n.sum(axis=0), self.observed.sum(axis=0), self.expected.sum(axis=0))
        return plot_calibration(curves, total, binary=self.binary, groups=groups, ax=ax)

    def __repr__(self) -> str:
        auc = f", AUC {self.auc:.3f}" if self.binary else ""
        return f"<Evaluation: {len(self.sites)} sites, {self.n.sum():,.0f} rows{auc}; see .summary()>"

    def _repr_html_(self) -> str:
        return self.summary().as_html()

    def _sums(self) -> dict[str, Floats]:
        return {"n": self.n, "observed": self.observed, "expected": self.expected}

    def _with_total(self, values: Floats) -> Floats:
        return np.append(values, values.sum())

    def _notes(self) -> list[str]:
        if not self.binary:
            return []
        all_ = self.discrimination[ALL]
        notes = [
            f"AUC from counts in {len(self.edges) - 1} bins of the prediction, where ties within a bin count "
            "one half, with a normal 95 % interval. Standard error: Hanley and McNeil (1982), its two "
            "probabilities counted from the bins. The AUC of all sites also ranks rows of different sites "
            "against each other.",
            f"By bins the AUC of these rows, all sites, is known to lie between {all_.at_least:.3f} and "
            f"{all_.at_most:.3f}; that is no interval for other rows.",
        ]
        if self.least > 1:
            notes.append(f"Bins of fewer than {self.least} rows at a site were counted with a neighbour.")
        return notes


def _ratio(observed: Floats, expected: Floats) -> Floats:
    return np.divide(observed, expected, out=np.full_like(expected, np.nan), where=expected != 0.0)
