"""Distributions of the response in VFEM, other than the normal distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, xlogy

from fedstat.errors import ModelError
from fedstat.kernels.glm.distributions import DISTRIBUTIONS, DistributionSpec
from fedstat.kernels.glm.negative_binomial import marginal_counts
from fedstat.kernels.glm.quadrature import BY_M, BY_MM, LOG_P, marginal_likelihood
from fedstat.typing import Floats

NORMAL = DistributionSpec("Gaussian", "Identity")
ALPHAS = (np.log(1e-4), np.log(1e4))
"""Where log alpha is looked for; below, counts vary no more than those of Poisson."""


def kernel_of(spec: DistributionSpec) -> int:
    """Which compiled likelihood a distribution and its link have; ModelError where none."""
    found = DISTRIBUTIONS[spec.name].integrals.get(spec.link)
    if found is None:
        listed = [f"{name} ({link})" for name, entry in DISTRIBUTIONS.items() for link in entry.integrals]
        raise ModelError(f"family: expected Gaussian (Identity), {', '.join(listed)}; received {spec}")
    return found


def observed_likelihood(spec: DistributionSpec, y: Floats, m: Floats, v: Floats) -> Floats:
    """Log-likelihood of each entity and its derivatives: the rows of the compiled likelihood."""
    if spec.alpha is not None:
        return marginal_counts(y, m, v, spec.alpha)
    return marginal_likelihood(kernel_of(spec), y, m, v)


def marginal_moments(spec: DistributionSpec, m: Floats, v: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of counts whose linear predictor has mean m and variance v, (n,) each."""
    mean = np.exp(m + 0.5 * v)
    squares = np.exp(v) * mean**2  # E mu^2
    return mean, mean + (1.0 + (spec.alpha or 0.0)) * squares - mean**2


def null_log_likelihood(spec: DistributionSpec, y: Floats, estimates_alpha: bool = False) -> float:
    """Log-likelihood of the model with an intercept only, at its maximum, over alpha as well if wanted."""
    if spec.alpha is not None:
        level, zero = np.full(len(y), np.log(y.mean())), np.zeros(len(y))

        def loss(log_alpha: float) -> float:
            return -float(marginal_counts(y, level, zero, float(np.exp(log_alpha)))[LOG_P].sum())

        if estimates_alpha:
            return -float(minimize_scalar(loss, bounds=ALPHAS, method="bounded").fun)
        return -loss(np.log(spec.alpha))
    n, mean = len(y), y.mean()
    if spec.name == "Binomial":
        return float(n * (xlogy(mean, mean) + xlogy(1.0 - mean, 1.0 - mean)))
    return float(np.sum(xlogy(y, mean) - mean - gammaln(y + 1.0)))


def null_with_offset(
    spec: DistributionSpec, y: Floats, offset: Floats, estimates_alpha: bool
) -> tuple[float, float]:
    """Mean at an offset of zero, and log-likelihood, of intercept and offset alone, over alpha if wanted."""
    zero = np.zeros(len(y))

    def climb(at: DistributionSpec) -> tuple[float, float]:
        a = float(at.make().link(np.array([y.mean()]))[0]) - float(np.mean(offset))
        for _ in range(100):
            terms = observed_likelihood(at, y, a + offset, zero)
            step = float(terms[BY_M].sum() / -terms[BY_MM].sum())
            a += float(np.clip(step, -1.0, 1.0))
            if abs(step) < 1e-12:
                break
        return a, float(observed_likelihood(at, y, a + offset, zero)[LOG_P].sum())

    if estimates_alpha:
        found = minimize_scalar(
            lambda log_alpha: -climb(replace(spec, alpha=float(np.exp(log_alpha))))[1],
            bounds=ALPHAS,
            method="bounded",
        )
        spec = replace(spec, alpha=float(np.exp(found.x)))
    a, log_likelihood = climb(spec)
    return float(spec.make().link.inverse(np.array([a]))[0]), log_likelihood
