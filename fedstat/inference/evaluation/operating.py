"""Operating points of a classifier from counts in bins."""

from __future__ import annotations

import numpy as np

from fedstat.typing import Floats


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


def rates(tp: Floats, fp: Floats, fn: Floats, tn: Floats) -> dict[str, Floats]:
    """Shares that a confusion table tells; nan where there is nothing to take a share of."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "sensitivity": tp / (tp + fn),
            "specificity": tn / (tn + fp),
            "ppv": tp / (tp + fp),
            "npv": tn / (tn + fn),
            "accuracy": (tp + tn) / (tp + fp + fn + tn),
        }
