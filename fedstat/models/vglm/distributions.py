"""Distributions of the response in a vertical fit: derivatives, dispersion, log-likelihood.

The dispersion of the normal, gamma and inverse normal family is estimated. Standard errors and the
log-likelihood of a fit use Pearson's statistic divided by the residual degrees of freedom, as statsmodels
does. Criteria along a path use the maximum likelihood estimate, which follows from the deviance alone.

References
----------
McCullagh, P. and Nelder, J. (1989). Generalized Linear Models, 2nd edition. Chapman and Hall; 2.3, 8.3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import ModelError
from fedstat.kernels.glm.distributions import DISTRIBUTIONS, DistributionSpec, Likelihood, Point
from fedstat.kernels.glm.sums import in_domain
from fedstat.typing import Floats

OUTSIDE = 1e300
"""Loss if a linear predictor has no mean: no step leads there."""
POINTS: Mapping[str, Point] = {
    name: one.likelihood.point
    for name, one in DISTRIBUTIONS.items()
    if one.likelihood is not None and one.likelihood.point is not None
}
"""Distributions whose canonical link has a mean for every linear predictor, as ADMM requires."""


def check_distribution(distribution: DistributionSpec) -> None:
    """Require a distribution and link that a vertical fit supports."""
    if distribution.link not in distribution.entry.vertical_links:
        taken = {name: one.vertical_links for name, one in DISTRIBUTIONS.items() if one.vertical_links}
        listed = ", ".join(f"{name} ({' or '.join(links)})" for name, links in taken.items())
        raise ModelError(f"family: expected one of {listed}; received {distribution}")


def likelihood_of(distribution: str) -> Likelihood:
    """Return the likelihood of a distribution that a vertical fit supports."""
    found = DISTRIBUTIONS[distribution].likelihood
    assert found is not None
    return found


def respond_at(
    distribution: DistributionSpec, eta: Floats, y: Floats, case: Floats | None = None
) -> tuple[float, Floats, Floats]:
    """Compare responses with linear predictors, (n,) each.

    Returns half the mean deviance, OUTSIDE if a linear predictor has no mean; and for every entity's
    log-likelihood with dispersion one, by its linear predictor, the first derivative (n,) and minus the
    expected second derivative (n,), which for a canonical link is the observed one. All are times `case`, the
    weights of the entities, with a mean of one.
    """
    if case is None and distribution.name in POINTS and distribution.canonical:
        return POINTS[distribution.name](eta, y)
    made = distribution.make()
    with np.errstate(all="ignore"):
        mean, gain, weight = _means(distribution, eta)
        residual = (y - mean) * gain
        weights = {} if case is None else {"freq_weights": case}
        loss = float(made.deviance(y, mean, **weights)) / len(y) / 2.0
    finite = np.isfinite(residual) & np.isfinite(weight)
    if not (finite & in_domain(eta, mean, distribution)).all() or not loss < OUTSIDE:
        return OUTSIDE, np.zeros(len(y)), np.zeros(len(y))
    return (loss, residual, weight) if case is None else (loss, case * residual, case * weight)


def _means(distribution: DistributionSpec, eta: Floats) -> tuple[Floats, Floats, Floats]:
    """Means, derivative of the natural parameter by the linear predictor, and weights: (n,) each."""
    made = distribution.make()
    mean = np.asarray(made.fitted(eta), dtype=np.float64)
    slope, variance = made.link.deriv(mean), made.variance(mean)
    return mean, 1.0 / (slope * variance), 1.0 / (slope**2 * variance)


def own_units(distribution: DistributionSpec, square: float, weight: Floats) -> tuple[float, float]:
    """Units of linear predictors, and of residuals by them, at the mean response: mean square, weights (n,).

    For the gamma and the inverse normal family, both depend on the unit of the response. In its own unit a
    linear predictor has a weight of one, as in least squares. Penalties that are not convex, and masks of a
    fixed precision, then give the same result for any unit of the response.
    """
    if not distribution.estimates_scale:
        return 1.0, 1.0
    unit = 1.0 / float(np.sqrt(np.mean(weight)))
    return unit, unit * float(np.sqrt(square))


def means_of(distribution: DistributionSpec, eta: Floats) -> Floats:
    """Return the means of linear predictors, nan if there is none: (n,) -> (n,)."""
    with np.errstate(all="ignore"):
        mean = np.asarray(distribution.make().link.inverse(eta), dtype=np.float64)
    sign = distribution.link_entry.sign
    return mean if sign is None else np.where(sign * eta > 0.0, mean, np.nan)


# ---- log-likelihood and dispersion -----------------------------------------------------------------


def saturated(distribution: DistributionSpec, y: Floats) -> Floats:
    """Part of every log-likelihood that depends on neither coefficients nor dispersion: (n,)."""
    return likelihood_of(distribution.name).saturated(y, distribution.alpha)


def log_likelihood(
    distribution: str, loss: float, n: float, constant: float, scale: float | None = None
) -> float:
    """Log-likelihood of n entities at half a mean deviance; `constant` is :func:`saturated` divided by n.

    `scale` is the dispersion, if it is estimated; the default is that of maximum likelihood, which the normal
    distribution always uses, as in statsmodels.
    """
    likelihood = likelihood_of(distribution)
    if likelihood.term is None:
        return n * (constant - loss)
    if scale is None or distribution == "Gaussian":
        scale = likelihood.likeliest_scale(loss)
    return n * (constant + likelihood.term(loss, scale))


def minus_twice(distribution: str, loss: Floats, n: float) -> Floats:
    """Minus twice the largest log-likelihood at half mean deviances, up to a constant: (L,) -> (L,).

    A quadratic model may predict a negative deviance, for which a dispersion has no estimate: infinite there.
    """
    if likelihood_of(distribution).term is None:
        return 2.0 * n * loss
    values = [-2.0 * log_likelihood(distribution, float(v), n, 0.0) if v > 0.0 else np.inf for v in loss]
    return np.array(values)
