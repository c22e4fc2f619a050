"""Probabilities of classes, and of labels that are randomised."""

from __future__ import annotations

import numpy as np

from fedstat.typing import Floats


def softmax(F: Floats) -> Floats:
    """Probabilities (classes, rows) from scores."""
    E = np.exp(F - F.max(axis=0))
    return np.asarray(E / E.sum(axis=0))


def of_scores(F: Floats, classes: int) -> Floats:
    """Probabilities (rows, classes) from scores (classes, rows); means (rows, 1) of a normal response."""
    return (softmax(F) if classes else F).T


def flip_matrix(classes: int, epsilon: float) -> Floats:
    """Probabilities of randomised response over so many classes, (classes, classes), rows the true one.

    The ratio of any two in a column is exp(epsilon) at most (Warner 1965; Kairouz, Oh and Viswanath 2016,
    equation 9).
    """
    other = 1.0 / (np.exp(epsilon) + classes - 1.0)
    out = np.full((classes, classes), other)
    np.fill_diagonal(out, np.exp(epsilon) * other)
    return out
