"""Areas under the ROC curve and operating points of a classifier, from counts in bins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from fedstat.inference.estimate import takes_alpha
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Operating points of a classifier from counts in bins.


def roc_points(events: Floats, others: Floats, thresholds: Floats) -> Floats:
    """Threshold, false and true positive rate by threshold from the largest down, (points, 3).

    From rows with and without the event by bin (B,), and the predicted mean at the edges of bins (B + 1,). A
    row is positive above the threshold. Between points with the same counts the first is given.
    """
    tp, fp = (np.append(np.cumsum(counts[::-1]), counts.sum()) for counts in (events, others))
    tp, fp = np.append(0.0, tp[:-1]), np.append(0.0, fp[:-1])
    keep = np.append(True, (np.diff(tp) > 0.0) | (np.diff(fp) > 0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        points = np.column_stack([thresholds[::-1], fp / others.sum(), tp / events.sum()])
    return np.asarray(points[keep])


def confusion_counts(events: Floats, others: Floats, first: int) -> Floats:
    """Rows tp, fp, fn, tn where those of the bins (B,) from `first` on are positive."""
    tp, fp = events[first:].sum(), others[first:].sum()
    return np.array([tp, fp, events.sum() - tp, others.sum() - fp])


def confusion_rates(tp: Floats, fp: Floats, fn: Floats, tn: Floats) -> dict[str, Floats]:
    """Shares from a confusion table; nan if the denominator is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "sensitivity": tp / (tp + fn),
            "specificity": tn / (tn + fp),
            "ppv": tp / (tp + fp),
            "npv": tn / (tn + fn),
            "accuracy": (tp + tn) / (tp + fp + fn + tn),
        }


# ----------------------------------------------------------------------------------------------------
# Areas under receiver operating characteristics from counts in bins.

TINY = 1e-9
LEVEL = 0.95
"""Level of the intervals that a summary prints."""


@dataclass(frozen=True, slots=True)
class Discrimination:
    """Area under the receiver operating characteristic, from counts in bins; nan without both outcomes.

    By the trapezoid rule: within a bin, an event and a non-event count as a tie, one half. The standard error
    is that of Hanley and McNeil (1982), equation 1, see `discrimination`. The AUC of the rows is between
    `at_least` and `at_most`: within each bin all events are ranked below, or above, all non-events. This is
    not an interval for the AUC of the population. `df` are the degrees of freedom of its interval.

    Examples
    --------
    >>> import fedstat as fs
    >>> low, high = fs.results.Discrimination(0.9, 0.02).conf_int()
    >>> print(f"{low:.3f} to {high:.3f}")
    0.853 to 0.933
    """

    auc: float = float("nan")
    std_error: float = float("nan")
    at_least: float = float("nan")
    at_most: float = float("nan")
    df: float = float("inf")

    @takes_alpha
    def conf_int(self, alpha: float = 1.0 - LEVEL) -> tuple[float, float]:
        """Return the interval of level 1 - alpha: for the logit of the AUC, with Student's t on `df`.

        An interval that is symmetric about the AUC is too high too often, the more the closer the AUC is to
        one (Pepe 2003, section 5.2.5). Quantiles of Student's t allow for few events (Brunner and Munzel
        2000). An AUC of 0 or 1 has standard error zero and no interval of positive length.

        References
        ----------
        Brunner, E. and Munzel, U. (2000). The nonparametric Behrens-Fisher problem. Biometrical Journal 42,
        17-25.
        Pepe, M. S. (2003). The Statistical Evaluation of Medical Tests for Classification and Prediction.
        Oxford University Press.

        Examples
        --------
        >>> import fedstat as fs
        >>> low, high = fs.results.Discrimination(0.9, 0.02).conf_int()
        >>> print(f"{low:.3f} to {high:.3f}")
        0.853 to 0.933
        """
        spread = self.auc * (1.0 - self.auc)
        if not spread > 0.0:
            return self.auc, self.auc
        half = float(stats.t.isf(alpha / 2.0, self.df)) * self.std_error / spread
        low, high = special.expit(special.logit(self.auc) + np.array([-half, half])).tolist()
        return low, high


def discrimination(events: Floats, others: Floats, least: int = 0) -> Discrimination:
    """AUC of predictions that are known up to their bin, from rows with and without the event, (K, B).

    Bins ascend with the prediction. `least` is the size to which sites merged bins, 0 without merging. With
    merging, a row may come from any of the empty bins next to its own, and the bounds allow for this.

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
    # Satterthwaite's degrees of freedom of the ranks of events among non-events, and the reverse.
    of_events, of_others = max(Q2 - A**2, 0.0) / n1, max(Q1 - A**2, 0.0) / n0
    spread = of_events**2 / max(n1 - 1.0, TINY) + of_others**2 / max(n0 - 1.0, TINY)
    df = (of_events + of_others) ** 2 / spread if spread > 0.0 else np.inf
    return Discrimination(A, max(variance, 0.0) ** 0.5, low, high, max(float(df), 1.0))


def _bounds(events: Floats, others: Floats, least: int) -> Floats:
    """Pairs in which the event is certainly above, and in which it may be above, the non-event.

    Shape (2,).
    """
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
    """`_bounds` of rows that are between two bins, both included."""
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
