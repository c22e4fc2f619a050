"""Distributions of log-linear times, ``log T = x'b + sigma W``: log-densities, survival, quantiles and means.

Terms are functions of ``z = (log t - x'b) / sigma``: the logarithm of the density of W for an event, that of
its survival function for a censored row. Both are concave for all distributions here, so that the likelihood
is concave in ``b / sigma`` and ``1 / sigma`` (Burridge 1981).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import digamma, expit, gammaln, log_ndtr, logit, ndtri

from fedstat.typing import Floats

Derivatives: TypeAlias = tuple[Floats, Floats, Floats]
"""Values, and their first and second derivatives."""
LOG_ROOT = 0.5 * float(np.log(2.0 * np.pi))


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Distribution of W.

    Parameters
    ----------
    terms : callable
        Takes z (n,) and events (n,), which are 0 or 1, to the terms of the log-likelihood by z.
    quantile : callable
        Takes probabilities to quantiles of W.
    mean : callable
        Takes sigma to the logarithm of the mean of exp(sigma W), and its derivative; infinite without a mean.
    moments : (float, float)
        Mean and standard deviation of W.
    words : str
    fixed : bool
        Whether sigma is one.
    proportional : bool
        Whether hazards are proportional.
    """

    terms: Callable[[Floats, Floats], Derivatives]
    quantile: Callable[[float], float]
    mean: Callable[[float], tuple[float, float]]
    moments: tuple[float, float]
    words: str
    fixed: bool = False
    proportional: bool = False

    def survival(self, z: Floats) -> Derivatives:
        """Return the probabilities that W exceeds z, and two derivatives by z."""
        log, first, second = self.terms(z, np.zeros_like(z))
        share = np.exp(log)
        return share, share * first, share * (first**2 + second)


def _smallest_value(z: Floats, event: Floats) -> Derivatives:
    hazard = np.exp(z)
    return np.where(event > 0.0, z, 0.0) - hazard, event - hazard, -hazard


def _normal(z: Floats, event: Floats) -> Derivatives:
    log_survival = log_ndtr(-z)
    log_density = -0.5 * z**2 - LOG_ROOT
    hazard = np.exp(log_density - log_survival)
    died = event > 0.0
    return (
        np.where(died, log_density, log_survival),
        np.where(died, -z, -hazard),
        np.where(died, -1.0, -hazard * (hazard - z)),
    )


def _logistic(z: Floats, event: Floats) -> Derivatives:
    share, twice = expit(z), 1.0 + event
    value = np.where(event > 0.0, z, 0.0) - twice * np.logaddexp(0.0, z)
    return value, event - twice * share, -twice * share * (1.0 - share)


def _exponential_mean(sigma: float) -> tuple[float, float]:
    return float(gammaln(1.0 + sigma)), float(digamma(1.0 + sigma))


def _logistic_mean(sigma: float) -> tuple[float, float]:
    if sigma >= 1.0:
        return np.inf, np.nan
    turn = np.pi * sigma
    return float(np.log(turn / np.sin(turn))), float(1.0 / sigma - np.pi / np.tan(turn))


def _smallest_quantile(p: float) -> float:
    return float(np.log(-np.log1p(-p)))


SMALLEST_MOMENTS = -float(np.euler_gamma), float(np.pi / np.sqrt(6.0))
LIFETIMES: Mapping[str, Lifetimes] = {
    "weibull": Lifetimes(
        _smallest_value,
        _smallest_quantile,
        _exponential_mean,
        SMALLEST_MOMENTS,
        "Weibull",
        proportional=True,
    ),
    "exponential": Lifetimes(
        _smallest_value,
        _smallest_quantile,
        _exponential_mean,
        SMALLEST_MOMENTS,
        "exponential",
        fixed=True,
        proportional=True,
    ),
    "lognormal": Lifetimes(
        _normal,
        lambda p: float(ndtri(p)),
        lambda sigma: (sigma**2 / 2.0, sigma),
        (0.0, 1.0),
        "log-normal",
    ),
    "loglogistic": Lifetimes(
        _logistic,
        lambda p: float(logit(p)),
        _logistic_mean,
        (0.0, float(np.pi / np.sqrt(3.0))),
        "log-logistic",
    ),
}
"""By name: the distributions of R's ``survreg``."""
