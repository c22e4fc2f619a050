"""Likelihoods of distributions by half their mean deviance, and points at linear predictors.

The dispersion of the normal, gamma and inverse normal distribution is estimated: its maximum likelihood
estimate follows from the deviance alone (McCullagh and Nelder 1989, 8.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, expit, gammaln, xlog1py, xlogy

from fedstat.typing import Floats

Point: TypeAlias = Callable[[Floats, Floats], tuple[float, Floats, Floats]]
NEARLY_PERFECT = 1e-4
"""Half the mean deviance below which the gamma dispersion comes from its series; its error is 1e-13."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-likelihood of n entities: a part of their responses alone, and what the deviance determines.

    `saturated` is the part that neither coefficients nor dispersion change, from responses (n,) and the
    distribution's alpha. `term`, where a dispersion is estimated, is the rest per entity by half the mean
    deviance and dispersion, and `likeliest_scale` the dispersion at which it is largest. `point`, where the
    canonical link has a mean for every linear predictor, goes from these and responses (n,) to half the mean
    deviance, residuals and weights (n,).
    """

    saturated: Callable[[Floats, float | None], float] = lambda y, alpha: 0.0
    term: Callable[[float, float], float] | None = None
    likeliest_scale: Callable[[float], float] = lambda loss: 2.0 * loss
    point: Point | None = None


def _normal_point(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    residual = y - eta
    return float(np.mean(residual**2)) / 2.0, residual, np.ones(len(y))


def _normal_term(loss: float, scale: float) -> float:
    return -0.5 * float(np.log(2.0 * np.pi * scale)) - loss / scale


def _binomial_point(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    mean = expit(eta)
    return float(np.mean(np.logaddexp(0.0, eta) - y * eta)), y - mean, mean * expit(-eta)


def _poisson_point(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    # A mean beyond 1e304 is not a fit: the loss is then so large that no step leads there.
    mean = np.exp(np.minimum(eta, 700.0))
    return float(np.mean(xlogy(y, y) - y * eta - (y - mean))), y - mean, mean


def _poisson_saturated(y: Floats, alpha: float | None) -> float:
    return float(np.sum(xlogy(y, y) - y - gammaln(y + 1.0)))


def _negative_binomial_saturated(y: Floats, alpha: float | None) -> float:
    assert alpha is not None
    k = 1.0 / alpha
    counted = gammaln(y + k) - gammaln(k) - gammaln(y + 1.0)
    return float(np.sum(xlogy(y, y) - xlogy(y, y + k) - xlog1py(k, y / k) + counted))


def _gamma_term(loss: float, scale: float) -> float:
    k = 1.0 / scale
    return k * float(np.log(k)) - k - float(gammaln(k)) - k * loss


def _gamma_scale(loss: float) -> float:
    """Solve ``log k - digamma(k) = loss`` for the shape k, which lies between 1 / (2 loss) and 1 / loss."""
    if loss < NEARLY_PERFECT:  # where the difference is 1 / (2 k) + 1 / (12 k^2), and cancels
        return 12.0 * loss / (3.0 + float(np.sqrt(9.0 + 12.0 * loss)))
    return 1.0 / float(brentq(lambda k: np.log(k) - digamma(k) - loss, 0.4 / loss, 1.1 / loss, rtol=1e-12))


NORMAL = Likelihood(term=_normal_term, point=_normal_point)
BINOMIAL = Likelihood(point=_binomial_point)
POISSON = Likelihood(_poisson_saturated, point=_poisson_point)
NEGATIVE_BINOMIAL = Likelihood(_negative_binomial_saturated)
GAMMA = Likelihood(lambda y, alpha: -float(np.log(y).sum()), _gamma_term, _gamma_scale)
INVERSE_NORMAL = Likelihood(lambda y, alpha: -1.5 * float(np.log(y).sum()), _normal_term)
