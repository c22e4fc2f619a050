"""Losses of a response of two or more classes, or a normal one, from the outputs of a head."""

from __future__ import annotations

import numpy as np

from fedstat.typing import Floats, Ints

SMALLEST = 1e-12


def softmax(F: Floats) -> Floats:
    """Probabilities (classes, rows) from scores."""
    E = np.exp(F - F.max(axis=0))
    return np.asarray(E / E.sum(axis=0))


def of_scores(F: Floats, classes: int) -> Floats:
    """Probabilities (rows, classes) from scores (classes, rows); means (rows, 1) of a normal response."""
    return (softmax(F) if classes else F).T


def log_loss(F: Floats, y: Ints, flip: Floats | None = None) -> tuple[Floats, Floats]:
    """Minus log-likelihood of classes y (rows,), and its derivatives by the scores F (classes, rows).

    `flip` (classes, classes) are probabilities that a class, by row, was recorded as another: the likelihood
    is that of what was recorded (Patrini et al. 2017, theorem 2, forward correction).
    """
    P, rows = softmax(F), np.arange(F.shape[1])
    if flip is None:
        loss = -np.log(np.maximum(P[y, rows], SMALLEST))
        P[y, rows] -= 1.0
        return loss, P
    of_recorded = flip[:, y]
    q = np.maximum((P * of_recorded).sum(axis=0), SMALLEST)
    return -np.log(q), P * (1.0 - of_recorded / q)


def squared_loss(F: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Half the squared errors of y (rows,), and their derivatives by F (1, rows)."""
    error = F - y
    return 0.5 * error[0] ** 2, error


def flip_matrix(classes: int, epsilon: float) -> Floats:
    """Probabilities of randomised response over so many classes, (classes, classes), rows the true one.

    The ratio of any two in a column is exp(epsilon) at most (Warner 1965; Kairouz, Oh and Viswanath 2016,
    equation 9).
    """
    other = 1.0 / (np.exp(epsilon) + classes - 1.0)
    out = np.full((classes, classes), other)
    np.fill_diagonal(out, np.exp(epsilon) * other)
    return out
