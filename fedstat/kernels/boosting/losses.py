"""Losses of boosting: slopes, values, and bounds of curvature, as mboost has them (Hofner et al. 2014).

Predictors are those of the link of a generalized linear model. A step of mboost's Binomial is one on half of
the log odds, of a loss in bits: on the log odds its slope is that of the likelihood times 4 / log 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logit
from scipy.stats import norm

from fedstat.kernels.glm.distributions import COUNTS, EVENTS, REAL, Support
from fedstat.typing import Floats

BITS = 4.0 / np.log(2.0)


@dataclass(frozen=True, slots=True)
class BoostLoss:
    """A loss of a response y at a predictor f, arrays of one shape, with a `number` of its own.

    `slope` is minus the derivative in f, `value` the loss, `weight` how fast the slope falls at f, and
    `bound` the most of that at any f, None where there is none; `mean` takes predictors to what is predicted,
    `start` a mean and a standard deviation to a constant predictor.
    """

    slope: Callable[[Floats, Floats, float], Floats]
    value: Callable[[Floats, Floats, float], Floats]
    weight: Callable[[Floats, Floats, float], Floats]
    bound: float | None
    mean: Callable[[Floats], Floats]
    start: Callable[[Floats, float, float], Floats]
    support: Support = REAL


def huber_value(y: Floats, f: Floats, delta: float) -> Floats:
    """Half the squared residual, and beyond `delta` its tangent."""
    size = np.abs(y - f)
    return np.where(size <= delta, size**2 / 2.0, delta * (size - delta / 2.0))


LOSSES: Mapping[str, BoostLoss] = {
    "binomial": BoostLoss(
        lambda y, f, _: BITS * (y - expit(f)),
        lambda y, f, _: np.logaddexp(0.0, f) - y * f,
        lambda y, f, _: BITS * expit(f) * expit(-f),
        BITS / 4.0,
        expit,
        lambda mean, _, __: logit(mean),
        EVENTS,
    ),
    "poisson": BoostLoss(
        lambda y, f, _: y - np.exp(f),
        lambda y, f, _: np.exp(f) - y * f,
        lambda y, f, _: np.exp(f),
        None,
        np.exp,
        lambda mean, _, __: np.log(mean),
        COUNTS,
    ),
    "huber": BoostLoss(
        lambda y, f, delta: np.clip(y - f, -delta, delta),
        huber_value,
        lambda y, f, delta: (np.abs(y - f) <= delta).astype(float),
        1.0,
        lambda f: f,
        lambda mean, _, __: mean,
    ),
    "quantile": BoostLoss(
        lambda y, f, q: np.where(y > f, q, q - 1.0),
        lambda y, f, q: np.where(y > f, q * (y - f), (1.0 - q) * (f - y)),
        lambda y, f, q: np.zeros_like(f),
        0.0,
        lambda f: f,
        lambda mean, sd, q: mean + sd * norm.ppf(q),
    ),
}
"""By name; least squares need no slopes, since sums of products tell all."""
