"""Families of the response: what they allow, their points, dispersion and log-likelihood.

The dispersion of the normal, gamma and inverse normal family is estimated. Standard errors and the
log-likelihood of a fit take it as statsmodels does, Pearson's statistic over the residual degrees of freedom;
criteria along a path take the one of maximum likelihood, which follows from the deviance alone.

References
----------
McCullagh, P. and Nelder, J. (1989). Generalized Linear Models, 2nd edition. Chapman and Hall; 2.3, 8.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, expit, gammaln, xlog1py, xlogy

from fedstat.errors import ModelError
from fedstat.kernels.glm.rows import in_domain
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.typing import Floats

LINKS: Mapping[str, tuple[str, ...]] = {
    "Gaussian": ("Identity",),
    "Binomial": ("Logit",),
    "Poisson": ("Log",),
    "Gamma": ("InversePower", "Log"),
    "InverseGaussian": ("InverseSquared", "Log"),
    "NegativeBinomial": ("NegativeBinomial", "Log"),
}
"""Links of each family, the canonical one first."""
BOUNDED = {"InversePower": 1.0, "InverseSquared": 1.0, "NegativeBinomial": -1.0}
"""Links at which only linear predictors of this sign have a mean."""
OUTSIDE = 1e300
"""Loss where a linear predictor has no mean: no step leads there."""
NEARLY_PERFECT = 1e-4
"""Half the mean deviance below which the gamma dispersion comes from its series; its error is 1e-13."""


def check_family(family: DistributionSpec) -> None:
    """Require a family and link that a vertical fit takes.

    Raises
    ------
    ModelError
        Lists them.
    """
    if family.link not in LINKS.get(family.name, ()):
        listed = ", ".join(f"{name} ({' or '.join(links)})" for name, links in LINKS.items())
        raise ModelError(f"family: expected one of {listed}; received {family}")


# ---- points ----------------------------------------------------------------------------------------


def _normal(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    residual = y - eta
    return float(np.mean(residual**2)) / 2.0, residual, np.ones(len(y))


def _binomial(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    mean = expit(eta)
    return float(np.mean(np.logaddexp(0.0, eta) - y * eta)), y - mean, mean * expit(-eta)


def _poisson(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    # A mean beyond 1e304 is not a fit: the loss is then so large that no step leads there.
    mean = np.exp(np.minimum(eta, 700.0))
    return float(np.mean(xlogy(y, y) - y * eta - (y - mean))), y - mean, mean


POINTS = {"Gaussian": _normal, "Binomial": _binomial, "Poisson": _poisson}
"""Families whose links have a mean for every linear predictor."""


def respond_at(family: DistributionSpec, eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    """Compare responses with linear predictors, (n,) each.

    Returns
    -------
    float
        Half the mean deviance; OUTSIDE where a linear predictor has no mean.
    (n,) array
        First derivative of every entity's log-likelihood for dispersion one by its linear predictor.
    (n,) array
        Minus its expected second derivative, which of a canonical link is the observed one.
    """
    point = POINTS.get(family.name)
    if point is not None:
        return point(eta, y)
    made = family.make()
    with np.errstate(all="ignore"):
        mean, gain, weight = _means(family, eta)
        residual = (y - mean) * gain
        loss = float(made.deviance(y, mean)) / len(y) / 2.0
    finite = np.isfinite(residual) & np.isfinite(weight)
    if not (finite & in_domain(eta, mean, family)).all() or not loss < OUTSIDE:
        return OUTSIDE, np.zeros(len(y)), np.zeros(len(y))
    return loss, residual, weight


def _means(family: DistributionSpec, eta: Floats) -> tuple[Floats, Floats, Floats]:
    """Means, derivative of the natural parameter by the linear predictor, and weights: (n,) each."""
    made = family.make()
    mean = np.asarray(made.fitted(eta), dtype=np.float64)
    slope, variance = made.link.deriv(mean), made.variance(mean)
    return mean, 1.0 / (slope * variance), 1.0 / (slope**2 * variance)


def recover_response(family: DistributionSpec, eta: Floats, residual: Floats) -> Floats:
    """Find the response, to the last digits, from linear predictor and residual: (n,) -> (n,)."""
    mean, gain, _ = _means(family, eta)
    y = mean + residual / gain
    if family.name in ("Gaussian", "Gamma", "InverseGaussian"):
        return y
    return np.asarray(np.round(y))


def own_units(family: DistributionSpec, residual: Floats, weight: Floats) -> tuple[float, float]:
    """Units of linear predictors, and of residuals by them, at the mean response: residuals and weights (n,).

    Of the gamma and the inverse normal family both depend on the unit of the response. In its own unit a
    linear predictor has a weight of one, as in least squares: penalties that are not convex, and masks of a
    fixed precision, then treat a response alike whatever its unit.
    """
    if not family.estimates_scale:
        return 1.0, 1.0
    unit = 1.0 / float(np.sqrt(np.mean(weight)))
    return unit, unit * float(np.sqrt(np.mean(residual**2)))


def means_of(family: DistributionSpec, eta: Floats) -> Floats:
    """Return the means of linear predictors, nan where there is none: (n,) -> (n,)."""
    with np.errstate(all="ignore"):
        mean = np.asarray(family.make().link.inverse(eta), dtype=np.float64)
    return np.where(mean > 0.0, mean, np.nan) if family.link in BOUNDED else mean


# ---- log-likelihood and dispersion -----------------------------------------------------------------


def saturated(family: DistributionSpec, y: Floats) -> float:
    """Part of the log-likelihood that neither coefficients nor dispersion change."""
    if family.name == "Poisson":
        return float(np.sum(xlogy(y, y) - y - gammaln(y + 1.0)))
    if family.name == "NegativeBinomial":
        assert family.alpha is not None
        k = 1.0 / family.alpha
        counted = gammaln(y + k) - gammaln(k) - gammaln(y + 1.0)
        return float(np.sum(xlogy(y, y) - xlogy(y, y + k) - xlog1py(k, y / k) + counted))
    power = {"Gamma": 1.0, "InverseGaussian": 1.5}.get(family.name)
    return 0.0 if power is None else -power * float(np.log(y).sum())


def _normal_term(loss: float, scale: float) -> float:
    return -0.5 * float(np.log(2.0 * np.pi * scale)) - loss / scale


def _gamma_term(loss: float, scale: float) -> float:
    k = 1.0 / scale
    return k * float(np.log(k)) - k - float(gammaln(k)) - k * loss


def _gamma_scale(loss: float) -> float:
    """Solve ``log k - digamma(k) = loss`` for the shape k, which lies between 1 / (2 loss) and 1 / loss."""
    if loss < NEARLY_PERFECT:  # where the difference is 1 / (2 k) + 1 / (12 k^2), and cancels
        return 12.0 * loss / (3.0 + float(np.sqrt(9.0 + 12.0 * loss)))
    return 1.0 / float(brentq(lambda k: np.log(k) - digamma(k) - loss, 0.4 / loss, 1.1 / loss, rtol=1e-12))


TERMS: Mapping[str, Callable[[float, float], float]] = {
    "Gaussian": _normal_term,
    "Gamma": _gamma_term,
    "InverseGaussian": _normal_term,
}
"""Of families with a dispersion: log-likelihood per entity by half the mean deviance and dispersion."""


def likeliest_scale(family: str, loss: float) -> float:
    """Dispersion of maximum likelihood at half a mean deviance."""
    return _gamma_scale(loss) if family == "Gamma" else 2.0 * loss


def log_likelihood(family: str, loss: float, n: int, constant: float, scale: float | None = None) -> float:
    """Log-likelihood of n entities.

    Parameters
    ----------
    family : str
    loss : float
        Half the mean deviance.
    n : int
    constant : float
        :func:`saturated` over n.
    scale : float, optional
        Dispersion, where it is estimated; by default that of maximum likelihood, which the normal family
        takes always, as in statsmodels.
    """
    if family not in TERMS:
        return n * (constant - loss)
    if scale is None or family == "Gaussian":
        scale = likeliest_scale(family, loss)
    return n * (constant + TERMS[family](loss, scale))


def minus_twice(family: str, loss: Floats, n: int) -> Floats:
    """Minus twice the largest log-likelihood at half mean deviances, up to a constant: (L,) -> (L,).

    A quadratic model may promise a deviance below zero, where a dispersion has no estimate: infinite there.
    """
    if family not in TERMS:
        return 2.0 * n * loss
    values = [-2.0 * log_likelihood(family, float(v), n, 0.0) if v > 0.0 else np.inf for v in loss]
    return np.array(values)


def pearson_scale(residual: Floats, weight: Floats, df: int) -> float:
    """Pearson's statistic over its degrees of freedom, from residuals and weights of the entities."""
    return float(np.sum(residual**2 / weight)) / df
