"""Gaussian differential privacy: accounting, bounds on membership inference, and empirical audits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, log_ndtr, ndtr, ndtri
from scipy.stats import beta, binom

from fedstat.errors import ModelError

# ----------------------------------------------------------------------------------------------------
# Differential privacy of Gaussian noise, exactly, over any number of releases.
#
# One record changes the Euclidean length of a value by at most Delta. Noise with standard deviation sigma on
# the value then makes two data sets that differ in the record as hard to distinguish as N(0, 1) and N(mu, 1),
# mu = Delta / sigma. Successive releases, each chosen after the earlier ones, add up: mu^2 = sum mu_m^2
# (Dong, Roth and Su 2022). So one number is the complete account. Nothing here is asymptotic or a bound. The
# guarantee of discrete samplers, which is slightly weaker, is in :mod:`fedstat.privacy.zcdp`; a budget is
# charged by it.
#
# References
# ----------
# Balle, B. and Wang, Y.-X. (2018). Improving the Gaussian mechanism for differential privacy: analytical
# calibration and optimal denoising. ICML. arXiv 1805.06530.
# Dong, J., Roth, A. and Su, W. (2022). Gaussian differential privacy. Journal of the Royal Statistical
# Society B 84, 3-37. arXiv 1905.02383.

LARGEST = 1e12


def delta_of(epsilon: float, mu: float) -> float:
    """Return the smallest delta at an epsilon: ``Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)``.

    mu is the sensitivity over the standard deviation, 0 where nothing was released; Balle and Wang (2018),
    theorem 8.
    """
    if mu == 0.0:
        return 0.0
    # In logarithms: at large epsilon both terms vanish in floating point, and their difference with them.
    first = log_ndtr(mu / 2.0 - epsilon / mu)
    second = epsilon + log_ndtr(-mu / 2.0 - epsilon / mu)
    return float(max(0.0, -np.exp(first) * np.expm1(min(second - first, 0.0))))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest epsilon at a delta in (0, 1); infinite where it is beyond any meaning.

    mu is the sensitivity over the standard deviation. A ModelError where an argument is out of its range.
    """
    _check(delta, mu)
    # The noise is so large that epsilon = 0 holds already, and there is no root above it.
    if delta_of(0.0, mu) <= delta:
        return 0.0
    return _root(lambda epsilon: delta_of(epsilon, mu) - delta)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu that keeps to an epsilon and delta: noise is the sensitivity over it.

    A ModelError where an argument is out of its range.
    """
    _check(delta, epsilon)
    return _root(lambda mu: delta - delta_of(epsilon, mu))


def _check(delta: float, other: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ModelError(f"delta: expected a number between 0 and 1, received {delta!r}")
    if not 0.0 <= other < np.inf:
        raise ModelError(f"expected a finite number of zero or more, received {other!r}")


def _root(difference: Callable[[float], float]) -> float:
    """Return where a function that falls from above zero to below has its root."""
    high = 1.0
    while difference(high) > 0.0:
        high *= 2.0
        if high > LARGEST:
            return float(np.inf)
    return float(brentq(difference, 0.0, high, xtol=1e-13, rtol=1e-13))


@dataclass(slots=True)
class GaussianAccountant:
    """What Gaussian releases about the same record have cost so far.

    `squared` is the sum of (sensitivity / standard deviation)^2.
    """

    squared: float = 0.0
    releases: int = 0

    def add(self, sensitivity: float, deviation: float, times: int = 1) -> None:
        """Record that a value was released `times` times; without noise it costs everything.

        The sensitivity is its largest Euclidean change when one record is replaced, the deviation that of the
        noise on each number of it. Raises a ModelError if one of these is negative.
        """
        if not (sensitivity >= 0.0 and deviation >= 0.0 and times >= 0):
            raise ModelError(
                f"expected numbers of zero or more, received a sensitivity of {sensitivity!r}, a deviation "
                f"of {deviation!r}, {times!r} times"
            )
        self.releases += times
        if sensitivity > 0.0 and times:
            self.squared += times * (sensitivity / deviation) ** 2 if deviation > 0.0 else np.inf

    @property
    def mu(self) -> float:
        """The account as one number."""
        return float(np.sqrt(self.squared))

    def epsilon(self, delta: float = 1e-6) -> float:
        """Epsilon of all releases together at a delta."""
        return float(np.inf) if np.isinf(self.squared) else epsilon_of(self.mu, delta)


# ----------------------------------------------------------------------------------------------------
# The exact joint cost of randomized answers to yes-or-no questions about one record.
#
# A published mechanism for ranks flips every comparison of two records with probability 1 / (1 + e^a) and
# calls that a budget of a. A record takes part in n - 1 comparisons of every column, each of which is in a
# released sum: its budget is that of all of them.
#
# References
# ----------
# Kairouz, P., Oh, S. and Viswanath, P. (2017). The composition theorem for differential privacy. IEEE
# Transactions on Information Theory 63, 4037-4049. arXiv 1311.0776.

FAR = 12.0
"""Standard deviations, beyond which a number of answers has a probability below any delta."""


def record_epsilon(answers: int, answer_epsilon: float, delta: float = 1e-6) -> float:
    """Return the smallest epsilon, at a delta, of a number of randomized answers about one record.

    Each has `answer_epsilon`, a. In the worst case replacing the record changes every answer; then delta is
    sum_k Bin(answers, q)(k) max(0, 1 - exp(eps - (2k - answers) a)), q = 1 / (1 + e^-a): Kairouz, Oh and
    Viswanath (2017), theorem 3.3, of pure answers. Raises a ModelError if an argument is out of its range.
    """
    if not (answers >= 1 and answer_epsilon > 0.0 and 0.0 < delta < 1.0):
        raise ModelError(
            f"expected at least one answer, epsilon above 0 and delta between 0 and 1; received {answers!r}, "
            f"{answer_epsilon!r} and {delta!r}"
        )
    q = float(expit(answer_epsilon))
    middle, far = answers * q, FAR * np.sqrt(answers * q * (1.0 - q)) + 20.0
    k = np.arange(max(0, int(middle - far)), min(answers, int(middle + far)) + 1)
    share, loss = binom.pmf(k, answers, q), (2.0 * k - answers) * answer_epsilon

    def excess(epsilon: float) -> float:
        return float(share @ np.maximum(0.0, -np.expm1(np.minimum(epsilon - loss, 0.0)))) - delta

    if excess(0.0) <= 0.0:
        return 0.0
    return float(brentq(excess, 0.0, answers * answer_epsilon))


# ----------------------------------------------------------------------------------------------------
# A lower bound on how well two data sets are distinguished, from the guesses of a test over many releases.
#
# References
# ----------
# Dong, J., Roth, A. and Su, W. (2022). Gaussian differential privacy. Journal of the Royal Statistical
# Society B 84, 3-37. arXiv 1905.02383.
# Nasr, M. et al. (2023). Tight auditing of differentially private machine learning. USENIX Security.


def mu_interval(hits: int, trials: int, alpha: float) -> tuple[float, float]:
    """Bound the mu that a test has shown, from its number of right guesses of fair coins.

    A mechanism that is mu-GDP lets no test be right with a probability above Phi(mu / 2). By Clopper and
    Pearson, each end is wrong with a probability of at most alpha / 2; an end below zero is 0. The lower one
    bounds mu from below for any test, the upper one bounds only what this test shows. Raises a ModelError if
    an argument is out of its range.
    """
    if not (0 <= hits <= trials and trials > 0 and 0.0 < alpha < 1.0):
        raise ModelError(f"expected hits of trials and alpha in (0, 1), received {hits}, {trials}, {alpha!r}")
    low = float(beta.ppf(alpha / 2.0, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1.0 - alpha / 2.0, hits + 1, trials - hits)) if hits < trials else 1.0
    return max(0.0, 2.0 * float(ndtri(low))), max(0.0, 2.0 * float(ndtri(high)))


# ----------------------------------------------------------------------------------------------------
# Information of a budget on whether a record is behind a release.


def largest_auc(rho: float) -> float:
    """Return the largest area under the ROC curve of a test for whether a record is behind a release.

    Noise on sums at rho is as hard to see through as N(0, 1) against N(mu, 1), mu = sqrt(2 rho) (Dong, Roth
    and Su 2022), with an area of Phi(mu / sqrt(2)). Discrete noise of any use differs by far less than
    is printed.
    """
    return float(ndtr(math.sqrt(rho)))
