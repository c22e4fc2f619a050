"""NB2 sums against statsmodels, and against arithmetic with a hundred digits where that loses its own."""

from decimal import Decimal, getcontext
from math import prod

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import special

from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.negative_binomial import evaluate_nb2, nb2_rows
from fedstat.kernels.glm.sums import Rows, evaluate

# A second difference by alpha loses 48 of them: 1/alpha = 1e6, over the square of a step of 1e-21.
getcontext().prec = 100
BETA = np.array([0.8, 0.4, -0.3])


@pytest.fixture
def rows():
    generator = np.random.default_rng(7)
    X = np.column_stack([np.ones(80), generator.normal(size=(80, 2))])
    y = generator.poisson(np.exp(X @ BETA) * generator.gamma(2.0, 0.5, size=80)) * 1.0
    return Rows(X, y)


def exact_log_likelihood(y, mu, alpha):
    """Sum of log(1 + alpha j), j < y, less log y!, plus y log mu, less (y + 1/alpha) log(1 + alpha mu)."""
    head = prod(((1 + alpha * j) / (j + 1) for j in range(y)), start=Decimal(1))
    return head.ln() + y * mu.ln() - (y + 1 / alpha) * (1 + alpha * mu).ln()


def exact_parts(y, eta, alpha):
    """Log-likelihood and its derivatives by eta and alpha, by central differences."""
    h = Decimal("1e-15")

    def f(i, k):
        return exact_log_likelihood(y, (eta + i * h).exp(), alpha * (1 + k * h))

    step = alpha * h
    middle = f(0, 0)
    gradient = (f(1, 0) - f(-1, 0)) / (2 * h), (f(0, 1) - f(0, -1)) / (2 * step)
    twice_eta = (f(1, 0) - 2 * middle + f(-1, 0)) / h**2
    cross = (f(1, 1) - f(1, -1) - f(-1, 1) + f(-1, -1)) / (4 * h * step)
    twice_alpha = (f(0, 1) - 2 * middle + f(0, -1)) / step**2
    return np.array([float(part) for part in (*gradient, -twice_eta, -cross, -twice_alpha, middle)])


@pytest.mark.parametrize("alpha", [1e-6, 0.0999, 0.1001, 30.0])
@pytest.mark.parametrize(
    "y, mu", [(0, 0.3), (0, 40.0), (1, 1.05), (2, 9.0), (7, 6.9), (40, 2.5), (1500, 1400.0), (1500, 3.0)]
)
def test_every_part_has_its_digits(y, mu, alpha):
    eta = np.log(mu)
    ours = nb2_rows(np.array([float(y)]), np.array([eta]), alpha)[:, 0]
    exact = exact_parts(y, Decimal(float(eta)), Decimal(alpha))
    np.testing.assert_allclose(ours, exact, rtol=2e-11)


@pytest.mark.parametrize("alpha", [0.05, 0.1001, 0.5, 3.0])
def test_sums_are_those_of_statsmodels(rows, alpha):
    model = sm.NegativeBinomial(rows.y, rows.X)
    model._transparams = False
    theta = np.append(BETA, alpha)
    ours = evaluate_nb2([rows.part(slice(0, 30)), rows.part(slice(30, None))], BETA, alpha)
    np.testing.assert_allclose(ours.score, model.score(theta), rtol=1e-9)
    np.testing.assert_allclose(ours.information, -model.hessian(theta), rtol=1e-9)
    np.testing.assert_allclose(ours.log_likelihood, model.loglike(theta), rtol=1e-12)


def test_the_score_vanishes_at_statsmodels_estimate(rows):
    result = sm.NegativeBinomial(rows.y, rows.X).fit(disp=0, method="newton", maxiter=200, tol=1e-12)
    ours = evaluate_nb2([rows], result.params[:-1], result.params[-1])
    np.testing.assert_allclose(ours.score, 0.0, atol=1e-6)
    np.testing.assert_allclose(np.sqrt(np.diag(np.linalg.inv(ours.information))), result.bse, rtol=1e-5)


def test_weights_repeat_rows_and_offsets_enter(rows):
    freq = np.arange(80) % 3 * 1.0
    offset = np.linspace(-1, 1, 80)
    weighted = Rows(rows.X, rows.y, offset, freq)
    again = np.repeat(np.arange(80), freq.astype(int))
    repeated = Rows(np.column_stack([rows.X, offset])[again], rows.y[again])
    ours = evaluate_nb2([weighted], BETA, 0.4)
    theirs = evaluate_nb2([repeated], np.append(BETA, 1.0), 0.4)
    keep = [0, 1, 2, 4]
    np.testing.assert_allclose(ours.score, theirs.score[keep], rtol=1e-12)
    np.testing.assert_allclose(ours.information, theirs.information[np.ix_(keep, keep)], rtol=1e-12)
    np.testing.assert_allclose(ours.log_likelihood, theirs.log_likelihood, rtol=1e-12)


def test_without_dispersion_it_is_poisson(rows):
    ours = evaluate_nb2([rows], BETA, 1e-12)
    poisson = evaluate([rows], BETA, DistributionSpec("Poisson", "Log"))
    mu = np.exp(rows.X @ BETA)
    np.testing.assert_allclose(ours.score[:3], poisson.score, rtol=1e-9)
    np.testing.assert_allclose(ours.information[:3, :3], poisson.information, rtol=1e-9)
    np.testing.assert_allclose(ours.score[3], np.sum((rows.y - mu) ** 2 - rows.y) / 2, rtol=1e-9)


@pytest.mark.parametrize("y", [0.2, 1.5, 900.5, 1023.0, 1024.0, 1e6])
def test_counts_need_not_be_whole_or_small(y):
    alpha, mu, theta = 0.4, 2.7, 2.5
    beside = np.array([y, 1024.0, 2.0])  # so that a table of counts is in use
    ours = nb2_rows(beside, np.full(3, np.log(mu)), alpha)[:, 0]
    llf = special.gammaln(y + theta) - special.gammaln(theta) - special.gammaln(y + 1.0)
    llf += y * np.log(alpha * mu) - (y + theta) * np.log1p(alpha * mu)
    slope = special.digamma(y + theta) - special.digamma(theta) - np.log1p(alpha * mu)
    slope = -(theta**2) * (slope - (y - mu) / (mu + theta))
    np.testing.assert_allclose(ours[[5, 1]], [llf, slope], rtol=1e-9)


def test_a_mean_that_is_no_number_is_minus_infinity(rows):
    ours = evaluate_nb2([rows], np.array([800.0, 0.0, 0.0]), 0.5)
    assert ours.log_likelihood == -np.inf and not ours.score.any() and not ours.information.any()


def test_a_dispersion_of_zero_is_an_error(rows):
    with pytest.raises(ValueError, match="alpha"):
        evaluate_nb2([rows], BETA, 0.0)
