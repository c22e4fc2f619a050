"""Designs of the agreed shape with drawn numbers: normal columns, and a response that mildly depends on them.

Invented is what a site holds once its columns are coded. Names, institutions, entities and missing patterns
are those that have been agreed on, and all that the shape of an answer can depend on; no kind, level or
transform of a column has to be known for it, nor does any value matter.
"""

from __future__ import annotations

import numpy as np

from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.typing import Floats

SEED = 20_240_229
EXPLAINED = 0.5
"""Variance of the linear predictor of columns of variance one."""

MILD = 0.3
"""By how much the logarithm of a mean moves with it; a probability stays within 0.2 and 0.8."""

SHAPE = 4.0
"""Of positive responses: their variance is the squared mean over it."""


def generator() -> np.random.Generator:
    """Return the same random numbers for every forecast."""
    return np.random.default_rng(SEED)


def draw_effects(p: int) -> Floats:
    """Coefficients of p standardised columns, falling from the first: (p,)."""
    falling = 1.0 / (1.0 + np.arange(p))
    size = np.sqrt((falling @ falling) / EXPLAINED) if p else 1.0
    return np.asarray(falling * np.where(np.arange(p) % 2, -1.0, 1.0) / size)


def draw_response(distribution: DistributionSpec, predictor: Floats, rng: np.random.Generator) -> Floats:
    """Draw responses that a distribution can have, with means that move with a linear predictor: (n,).

    The link is not that of the distribution: means stay well inside the range of every link.
    """
    if distribution.least_squares:
        return np.asarray(rng.normal(predictor))
    near = MILD * np.clip(predictor, -2.0, 2.0)
    mean, n = np.exp(near), len(near)
    match distribution.name:
        case "Gaussian":
            return np.asarray(rng.normal(mean, MILD / SHAPE))
        case "Binomial":
            return (rng.random(n) < 0.5 * (1.0 + near)).astype(float)
        case "Poisson":
            return rng.poisson(mean).astype(float)
        case "NegativeBinomial":
            alpha = max(float(distribution.alpha or 1.0), 1.0 / SHAPE)
            return rng.poisson(mean * rng.gamma(1.0 / alpha, alpha, n)).astype(float)
        case "InverseGaussian":
            return np.asarray(rng.wald(mean, SHAPE * mean))
        case _:
            return np.asarray(mean * rng.gamma(SHAPE, 1.0 / SHAPE, n))
