"""Differential privacy of Gaussian noise, exactly, over any number of releases.

Noise with standard deviation sigma on a value of which one record changes the Euclidean length by at most
Delta makes two data sets that differ in it as hard to tell apart as N(0, 1) and N(mu, 1), mu = Delta / sigma.
Releases that follow each other, each chosen after the ones before, add up: mu^2 = sum mu_m^2 (Dong, Roth and
Su 2022). So one number is the whole account. Nothing here is asymptotic or a bound. What discrete samplers
guarantee, which is a little less, is in :mod:`fedstat.privacy.zcdp`; it is what a budget is charged.

References
----------
Balle, B. and Wang, Y.-X. (2018). Improving the Gaussian mechanism for differential privacy: analytical
calibration and optimal denoising. ICML. arXiv 1805.06530.
Dong, J., Roth, A. and Su, W. (2022). Gaussian differential privacy. Journal of the Royal Statistical Society
B 84, 3-37. arXiv 1905.02383.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedstat.errors import ModelError

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
class GaussianAccount:
    """What Gaussian releases about the same record have cost so far.

    `squared` is the sum of (sensitivity / standard deviation)^2.
    """

    squared: float = 0.0
    releases: int = 0

    def add(self, sensitivity: float, deviation: float, times: int = 1) -> None:
        """Write down that a value left so many times; without noise it costs everything.

        The sensitivity is its largest Euclidean change when one record is replaced, the deviation that of the
        noise on each number of it. A ModelError where one of these is negative.
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
