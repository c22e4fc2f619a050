"""Likelihood of a response with a normal linear predictor: adaptive quadrature and numerical derivatives."""

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import expit, gammaln, log_ndtr

from fedstat.kernels.glm import quadrature
from fedstat.kernels.glm.quadrature import (
    BY_M,
    BY_MM,
    BY_MV,
    BY_V,
    BY_VV,
    LOG,
    LOG_P,
    LOGIT,
    PROBIT,
    marginal_likelihood,
    marginal_mean,
)

COUNTS = (0.0, 1.0, 7.0, 300.0)
RESPONSES = {LOGIT: (0.0, 1.0), PROBIT: (0.0, 1.0), LOG: COUNTS}
FAMILIES = [LOGIT, PROBIT, LOG]
VARIANCES = (0.01, 0.3, 1.0, 4.0, 25.0)
MEANS = (-3.0, 0.0, 0.7, 4.0)


def log_mass(family, y, eta):
    """Written so that the far tails are exact: -log(1 + exp(-eta)), log Phi(eta), and the Poisson's."""
    sign = 1.0 if y == 1.0 else -1.0
    if family == LOGIT:
        return -np.logaddexp(0.0, -sign * eta)
    if family == PROBIT:
        return log_ndtr(sign * eta)
    return y * eta - np.exp(eta) - gammaln(y + 1.0)


def exact(family, y, m, v):
    """Log of the integral, piece by piece about the largest value of the integrand."""

    def height(e):
        return log_mass(family, y, m + e) - 0.5 * e * e / v

    center = minimize_scalar(lambda e: -height(e), bounds=(-40.0, 40.0), method="bounded").x
    top, cuts = height(center), center + np.sqrt(v) * np.linspace(-12.0, 12.0, 61)
    parts = [
        quad(lambda e: np.exp(height(e) - top), *ends, epsabs=1e-14, epsrel=1e-11)[0]
        for ends in pairwise(cuts)
    ]
    return top + np.log(sum(parts)) - 0.5 * np.log(2.0 * np.pi * v)


def at(family, y, m, v):
    return marginal_likelihood(family, *(np.atleast_1d(np.asarray(x, dtype=float)) for x in (y, m, v)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("v", VARIANCES)
def test_likelihood_is_the_integral(family, v):
    for y in RESPONSES[family]:
        for m in MEANS:
            assert at(family, y, m, v)[LOG_P, 0] == pytest.approx(exact(family, y, m, v), abs=2e-9)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("v", VARIANCES)
def test_derivatives_are_those_of_the_likelihood(family, v):
    y = np.repeat(RESPONSES[family], len(MEANS))
    m = np.tile(MEANS, len(RESPONSES[family]))
    here = at(family, y, m, np.full(len(y), v))
    h = 1e-4 * min(1.0, v)
    for direction, first, seconds in (
        ((h, 0.0), BY_M, {BY_M: BY_MM, BY_V: BY_MV}),
        ((0.0, h), BY_V, {BY_V: BY_VV}),
    ):
        up, down = (
            at(family, y, m + s * direction[0], np.full(len(y), v) + s * direction[1]) for s in (1, -1)
        )
        slopes = (up - down) / (2.0 * h)
        scale = 1.0 + np.abs(here[first])
        np.testing.assert_allclose(slopes[LOG_P] / scale, here[first] / scale, atol=1e-6)
        for row, second in seconds.items():
            scale = 1.0 + np.abs(here[second])
            np.testing.assert_allclose(slopes[row] / scale, here[second] / scale, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_missing_is_the_density_and_the_limit(family):
    y = np.repeat(RESPONSES[family], len(MEANS))
    m = np.tile(MEANS, len(RESPONSES[family]))
    none, little = at(family, y, m, np.zeros(len(y))), at(family, y, m, np.full(len(y), 1e-9))
    expected = [log_mass(family, *pair) for pair in zip(y, m, strict=True)]
    np.testing.assert_allclose(none[LOG_P], expected, rtol=1e-12)
    scale = 1.0 + np.abs(none)
    np.testing.assert_allclose(little / scale, none / scale, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_of_all_responses_sum_to_one(family):
    m, v = np.array([-1.0, 0.5, 2.0]), np.array([0.2, 1.0, 3.0])
    responses = (0.0, 1.0) if family != LOG else np.arange(6000.0)
    total = sum(np.exp(at(family, np.full(3, y), m, v)[LOG_P]) for y in responses)
    # Counts beyond the last are as rare as a linear predictor beyond log 6000.
    rest = stats.norm.sf((np.log(6000.0) - m) / np.sqrt(v)) if family == LOG else np.zeros(3)
    np.testing.assert_allclose(total, 1.0 - rest, atol=1e-5 if family == LOG else 1e-11)


@pytest.mark.parametrize("y", [0.0, 1.0])
def test_far_tails_stay_finite_and_continuous(y):
    sign = 1.0 if y == 0.0 else -1.0
    m = sign * np.array([24.9, 25.1, 60.0, 300.0])
    for family in (LOGIT, PROBIT):
        found = at(family, np.full(4, y), m, np.zeros(4))
        assert np.isfinite(found).all()
        expected = [log_mass(family, y, one) for one in m]
        np.testing.assert_allclose(found[LOG_P], expected, rtol=1e-9)
    near = sign * np.array([25.0 - 1e-9, 25.0 + 1e-9])  # where the series takes over
    pair = at(PROBIT, [y, y], near, [0.0, 0.0])
    np.testing.assert_allclose(pair[:, 0], pair[:, 1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_marginal_mean_and_its_derivatives(family):
    inverse = {LOGIT: expit, PROBIT: stats.norm.cdf, LOG: np.exp}[family]
    for v in (0.0, 0.01, 1.0, 4.0, 25.0):
        for m in MEANS:
            found = marginal_mean(family, np.array([m]), np.array([v]))[:, 0]
            integrand = lambda z, m=m, v=v: stats.norm.pdf(z) * inverse(m + np.sqrt(v) * z)  # noqa: E731
            reach = 12.0 + np.sqrt(v)
            expected = (
                quad(integrand, -reach, reach, epsabs=0, epsrel=1e-11, limit=400)[0] if v else inverse(m)
            )
            assert found[0] == pytest.approx(expected, rel=1e-9)
            h = 1e-5
            ups = [
                marginal_mean(family, np.array([m + h]), np.array([v]))[0, 0],
                marginal_mean(family, np.array([m]), np.array([v + h]))[0, 0],
            ]
            downs = [marginal_mean(family, np.array([m - h]), np.array([v]))[0, 0], found[0]]
            assert found[1] == pytest.approx((ups[0] - downs[0]) / (2 * h), rel=1e-6, abs=1e-9)
            assert found[2] == pytest.approx((ups[1] - downs[1]) / h, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("family", [LOGIT, LOG])
def test_the_most_that_is_allowed_is_finite(family):
    m, v = quadrature.LARGEST_MEAN, quadrature.LARGEST_VARIANCE
    for y in (0.0, 1.0):
        for mean in (-m, m):
            assert np.isfinite(at(family, y, mean, v)).all()


def test_the_mode_is_where_the_integrand_is_largest():
    for family in (LOGIT, LOG):
        for y in RESPONSES[family]:
            mode, sd = quadrature.find_mode(family, y, 0.5, 2.0)
            height = lambda e, f=family, y=y: log_mass(f, y, 0.5 + e) - 0.25 * e * e  # noqa: E731
            assert height(mode) > max(height(mode - 0.05 * sd), height(mode + 0.05 * sd))
