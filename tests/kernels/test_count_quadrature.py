"""Negative binomial counts whose linear predictor is normal: numerical derivatives of a quadrature."""

import numpy as np
import pytest
from scipy.special import gammaln
from statsmodels.tools.numdiff import approx_fprime_cs

from fedstat.kernels.glm.negative_binomial import marginal_counts

X = np.linspace(-14.0, 14.0, 4001)
LOG_W = -0.5 * X**2 - np.log(np.exp(-0.5 * X**2).sum())


def log_gamma(z):
    """Stirling's series far out, and the recursion down: complex steps pass."""
    shift = sum(np.log(z + j) for j in range(30))
    z = z + 30
    series = 1 / (12 * z) - 1 / (360 * z**3) + 1 / (1260 * z**5) - 1 / (1680 * z**7)
    return (z - 0.5) * np.log(z) - z + 0.5 * np.log(2 * np.pi) + series - shift


def log_likelihood(point, y):
    m, v, log_alpha = point
    alpha, eta = np.exp(log_alpha), m + np.sqrt(v) * X
    theta = 1.0 / alpha
    log_f = y * (eta + log_alpha) - (y + theta) * np.log(1.0 + alpha * np.exp(eta))
    constant = log_gamma(y + theta) - log_gamma(theta) - gammaln(y + 1.0)
    terms = LOG_W + log_f + constant
    top = terms.real.max()
    return top + np.log(np.exp(terms - top).sum())


@pytest.mark.parametrize("alpha", [0.02, 0.5, 3.0])
@pytest.mark.parametrize("y", [0.0, 1.0, 4.0, 25.0])
@pytest.mark.parametrize("m, v", [(0.3, 0.4), (-1.0, 1.5), (2.0, 0.1)])
def test_derivatives_are_those_of_the_integral(alpha, y, m, v):
    point = np.array([m, v, np.log(alpha)])
    found = marginal_counts(np.array([y]), np.array([m]), np.array([v]), alpha)[:, 0]
    assert found[0] == pytest.approx(log_likelihood(point, y), abs=1e-9)
    score = approx_fprime_cs(point, log_likelihood, args=(y,))
    np.testing.assert_allclose(found[[1, 2, 6]], score, atol=1e-8)
    second = [
        approx_fprime_cs(point + step, log_likelihood, args=(y,))
        - approx_fprime_cs(point - step, log_likelihood, args=(y,))
        for step in 1e-5 * np.eye(3)
    ]
    hessian = np.array(second) / 2e-5
    np.testing.assert_allclose(found[[3, 4, 7]], hessian[0], atol=1e-6)
    np.testing.assert_allclose(found[[5, 8]], hessian[1, 1:], atol=1e-6)
    assert found[9] == pytest.approx(hessian[2, 2], abs=1e-6)


def test_without_anything_missing_it_is_the_negative_binomial():
    from statsmodels.api import families

    y, eta = np.array([0.0, 2.0, 7.0]), np.array([0.1, -0.4, 1.5])
    family = families.NegativeBinomial(alpha=0.7)
    expected = family.loglike_obs(y, np.exp(eta))
    np.testing.assert_allclose(marginal_counts(y, eta, np.zeros(3), 0.7)[0], expected, atol=1e-10)


def test_a_small_alpha_is_poisson():
    y, m, v = np.array([0.0, 3.0]), np.array([0.5, 0.2]), np.array([0.3, 0.0])
    from fedstat.kernels.glm.quadrature import LOG, marginal_likelihood

    np.testing.assert_allclose(
        marginal_counts(y, m, v, 1e-9)[:6], marginal_likelihood(LOG, y, m, v), atol=1e-6
    )
