"""When a maximization is at its maximum: one test for all loops of Newton and EM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.typing import Floats

ROUNDING = 2e-13
"""Rounding of a log-likelihood, relative to its size and the number of rows, with a margin."""


def rounding_error(log_likelihood: float, n: float) -> float:
    """Return the rounding error of a log-likelihood of `n` rows, with a margin."""
    return ROUNDING * (abs(log_likelihood) + n)


@dataclass(slots=True)
class ConvergenceTest:
    r"""Test whether a point is the maximum of the log-likelihood of `n` rows.

    With score g and information H, the Newton decrement :math:`\lambda = \sqrt{g' H^{-1} g}` (Boyd and
    Vandenberghe 2004, section 9.5.1) is the distance to the maximum in standard errors, and the
    log-likelihood will increase by :math:`\lambda^2 / 2`. A point is the maximum if

    * the decrement is at most `tol`, or
    * the decrement no longer decreases, and the increase that it predicts is below the rounding of the
      log-likelihood: :math:`\lambda^2 \le 2 \cdot 10^{-13} (|l| + n)`. If columns are nearly collinear,
      rounding of the score alone keeps the decrement above any tolerance.

    EM has no information: :func:`gains_little` compares the gain of a round, in place of the predicted
    increase.

    Parameters
    ----------
    n : float
        Number of rows or entities.
    tol : float
        Largest distance to the maximum, in standard errors.

    Examples
    --------
    >>> from fedstat.inference.convergence import ConvergenceTest
    >>> test = ConvergenceTest(n=1000, tol=1e-8)
    >>> [test.reached(-650.0, decrement) for decrement in (1e-2, 1e-4, 1e-9)]
    [False, False, True]
    >>> test = ConvergenceTest(n=1000, tol=1e-8)
    >>> [test.reached(-650.0, decrement) for decrement in (1e-2, 1e-6, 1e-6)]
    [False, False, True]
    >>> test.reason
    'the distance to the optimum is below the limit of rounding'
    """

    n: float
    tol: float
    reason: str = ""
    earlier: float = np.inf

    def reached(self, log_likelihood: float, decrement: float, *, at_rest: bool = True) -> bool:
        """Take the next point, and return whether it is the maximum.

        `at_rest` states whether the second condition may end the iteration.
        """
        limit = np.sqrt(rounding_error(log_likelihood, self.n))
        stands = self.earlier <= decrement <= limit and at_rest
        self.earlier = decrement
        if decrement <= self.tol or stands:
            what = "its tolerance" if decrement <= self.tol else "the limit of rounding"
            self.reason = f"the distance to the optimum is below {what}"
            return True
        return False


def last_digit(beta: Floats, information: Floats) -> float:
    """Return the decrement of a step by the last digit of coefficients (p,), with their information (p, p).

    The intercept of a response around 1e8 has no digits beyond it, however often a step is repeated.
    """
    return float(np.finfo(float).eps * np.sqrt(max(float(beta @ information @ beta), 0.0)))


def gains_little(gain: float, log_likelihood: float, n: float, least: float) -> bool:
    """Return whether a round of EM gains less than `least`, or than the rounding of the log-likelihood."""
    return gain < max(least, rounding_error(log_likelihood, n))
