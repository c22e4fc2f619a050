"""Shape of a skewed column, told by one sum: that of the logarithm's inverse with the same signed squares.

The mean of z |z| of a standardised column is zero where it is symmetric. Of a log-normal column, exp(s Z)
with normal Z, it is 2 U / V - 1 with V = exp(2 s^2) - exp(s^2), the variance, and U its part above the mean,

    U = exp(2 s^2) Phi(3 s / 2) - 2 exp(s^2) Phi(s / 2) + exp(s^2) Phi(-s / 2),

for exp(s Z) lies above its mean exp(s^2 / 2) where Z lies above s / 2. A column that is skewed to the left is
such a column with the sign changed.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from fedstat.typing import Floats

MOST = 2.0
"""Largest standard deviation of a logarithm: the skewness is then 414."""


def signed_squares_of(log_sd: Floats) -> Floats:
    """Give the mean of z |z| of log-normal columns, by positive standard deviations of logarithms."""
    square = np.exp(log_sd**2)
    above = square**2 * ndtr(1.5 * log_sd) - 2.0 * square * ndtr(0.5 * log_sd) + square * ndtr(-0.5 * log_sd)
    return np.asarray(2.0 * above / (square**2 - square) - 1.0)


_GRID = np.linspace(0.01, MOST, 400)
_SHAPES = np.concatenate([[0.0], signed_squares_of(_GRID)])


def log_sd_of(shape: Floats) -> Floats:
    """Give the standard deviation of the logarithm, with the sign of the skewness; zero of shape nan."""
    known = np.nan_to_num(shape)
    return np.asarray(np.sign(known) * np.interp(np.abs(known), _SHAPES, np.concatenate([[0.0], _GRID])))


def skewness_of(shape: Floats) -> Floats:
    """Give the skewness of the log-normal column of this shape."""
    square = np.exp(log_sd_of(shape) ** 2)
    return np.asarray(np.sign(np.nan_to_num(shape)) * (square + 2.0) * np.sqrt(square - 1.0))
