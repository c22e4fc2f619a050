"""Covariance of (a, s2, beta, mu) from pattern moments: inverse observed or expected information.

The profile likelihood of :mod:`fedstat.models.vertical.likelihood` has Sigma_1..Sigma_K maximised out, so the
inverse of its information is the covariance with every nuisance parameter accounted for.
"""

from __future__ import annotations

import numpy as np

from fedstat.inference.covariance import delta_method, invert_information
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.likelihood import evaluate, residuals
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Floats


def information_inverse(fit: MomentsFit, *, expected: bool = False) -> Floats:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...) in the units of the data.

    The fit has to have converged. With `expected`, cross-products between institutions are at their
    expectation, zero. An EstimationError where the information is not positive definite.
    """
    information = centred_information(fit)
    if expected:
        beta = fit.standard.places[0]
        information[beta, beta] -= products_between(fit)
    cov = invert_information(information, names_of(fit.moments))
    order = client_order(fit.moments)
    return in_units(fit.moments, cov[np.ix_(order, order)])


def origin_covariance(fit: MomentsFit) -> Floats:
    """Covariance (1 + P, 1 + P) of the intercept at the origin of the columns and the coefficients."""
    (beta, mu, _), P = fit.standard.places, fit.standard.P
    J = np.zeros((1 + P, 2 + 2 * P))
    # a - sum mu'beta: the means are estimates as well, and their errors are those of the intercept.
    J[0, 0] = 1.0
    J[0, beta], J[0, mu] = -fit.mu, -fit.beta
    J[1:, beta] = np.eye(P)
    return delta_method(information_inverse(fit), J[:, client_order(fit.moments)])


def centred_information(fit: MomentsFit) -> Floats:
    """Observed information of (a, s2, beta, mu, lambda) of standardised columns."""
    standard, point = fit.standard, fit.point
    information = evaluate(standard, point).information
    beta, mu, _ = standard.places
    A = np.eye(len(information))  # d(b, log s2, ...) / d(a, s2, ...); b = a - sum mu'beta
    A[0, beta], A[0, mu] = -point.mu, -point.beta
    A[1, 1] = np.exp(-point.log_s2)
    return np.asarray(A.T @ information @ A)


def products_between(fit: MomentsFit) -> Floats:
    """Sum of u_j u_k'/v over the entities that two sites both have, u = x - mu; zero within sites."""
    standard, moments, mu = fit.standard, fit.moments, fit.point.mu
    h = 1.0 / residuals(standard, fit.point).v
    means = moments.seen * mu
    # Sums of u_j u_k' from those of x_j, x_k and x_j x_k', each pattern weighted by its 1/v.
    mixed = (moments.grams[:, 0, 1:-1] * h[:, None]).T @ means
    products = np.tensordot(h, moments.grams[:, 1:-1, 1:-1], 1) - mixed - mixed.T
    products += (means * (h * moments.n)[:, None]).T @ means
    return np.asarray(products * (1.0 - standard.within))


def names_of(moments: PatternMoments) -> list[str]:
    """Name each parameter of the information, for messages."""
    owners = [moments.clients[k] for k in moments.owner]
    columns = [f"{name} ({client})" for name, client in zip(moments.names, owners, strict=True)]
    means = [f"mean of {column}" for column in columns]
    variances = [f"variance of the block of {client}" for client in moments.clients]
    return ["Intercept", "residual variance", *columns, *means, *variances]


def client_order(moments: PatternMoments) -> list[int]:
    """Places of (a, s2, beta_1, mu_1, beta_2, ...) in (a, s2, beta, mu)."""
    P, columns = len(moments.names), np.arange(len(moments.names))
    by_client = [columns[moments.places(k)] for k in range(len(moments.sizes))]
    return [0, 1, *[int(i) for own in by_client for i in (*(2 + own), *(2 + P + own))]]


def in_units(moments: PatternMoments, cov: Floats) -> Floats:
    """Bring a covariance of (a, s2, beta_1, mu_1, ...) of standardised columns to the units of the data."""
    x, y = moments.scale[:-1], moments.scale[-1]
    factor = np.concatenate([[y, y**2], y / x, x])[client_order(moments)]
    return np.asarray(cov * np.outer(factor, factor))
