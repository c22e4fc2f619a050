"""Figures from sums with noise: without noise they are those of the rows, with it their errors are right."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from statsmodels.duration.survfunc import SurvfuncRight
from statsmodels.stats.proportion import proportion_confint

from fedstat.inference.noisy_tables import (
    UNIT,
    RunningCounts,
    consistent_counts,
    count_limits,
    last_known,
    log_survival_noise,
    noise_at_ends,
    noisy_correlation,
    noisy_moments,
    noisy_quantiles,
    noisy_survival_counts,
    price,
    propagate_noise,
    running_weights,
    share_limits,
    squared_length,
)
from fedstat.inference.survival_curves import log_rank, product_limit

SIZES = (1, 2, 3, 17, 64, 257)


def running(counts, variance=0.0, noise=0.0):
    """Running counts from exact counts (..., J) and noise on their sums."""
    return RunningCounts.of_sums(counts @ running_weights(counts.shape[-1]).T + noise, variance)


@pytest.mark.parametrize("J", SIZES)
def test_running_counts_are_exact_without_noise(J):
    counts = np.random.default_rng(J).integers(0, 2**20, (3, J))
    found = running(counts)
    np.testing.assert_allclose(found.upto, counts.cumsum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.counts, counts, rtol=0, atol=1e-5)


@pytest.mark.parametrize("J", SIZES)
def test_the_weights_are_the_square_root_of_running_sums(J):
    root = running_weights(J) / UNIT
    np.testing.assert_allclose(root @ root, np.tril(np.ones((J, J))), atol=J / UNIT)
    assert squared_length(running_weights(J)) == (running_weights(J)[:, 0] ** 2).sum()


def test_noise_on_running_counts_is_less_than_that_of_counts_and_of_a_tree():
    """Largest variance of a running count at the same charge, next to two textbook mechanisms."""
    J = 64
    covariance = running(np.zeros((1, J)), squared_length(running_weights(J))).covariance
    tree = np.vstack([np.kron(np.eye(J // w), np.ones(w)) for w in (1, 2, 4, 8, 16, 32, 64)])
    lower = np.tril(np.ones((J, J)))
    of_tree = lower @ np.linalg.inv(tree.T @ tree) @ lower.T * len((1, 2, 4, 8, 16, 32, 64))
    assert np.diag(covariance).max() < 0.62 * np.diag(of_tree).max() < 0.15 * J


@pytest.mark.parametrize(("J", "share"), [(64, 0.75), (256, 0.6)])
def test_distribution_functions_are_nearer_than_those_of_a_plain_histogram(J, share):
    """Largest error of a distribution function, next to Gaussian and Laplace counts of the same charge."""
    random, n, rho, errors = np.random.default_rng(5), 5_000, 0.018, []
    weights = running_weights(J)
    variance = squared_length(weights) / (2.0 * rho)
    for _ in range(40):
        cells = np.minimum((random.beta(2.0, 5.0, n) * J).astype(int), J - 1)
        counts = np.bincount(cells, minlength=J)
        own = RunningCounts.of_sums(
            counts @ weights.T + random.normal(size=J) * np.sqrt(variance), variance
        ).ascending
        plain = (counts + random.normal(size=J) / np.sqrt(2.0 * rho)).cumsum()
        # Laplace noise of scale 1 / epsilon costs rho = epsilon^2 / 2.
        laplace = (counts + random.laplace(size=J) / np.sqrt(2.0 * rho)).cumsum()
        errors.append([np.abs(one / one[-1] - counts.cumsum() / n).max() for one in (own, plain, laplace)])
        assert (np.diff(own) >= 0.0).all() and own[0] >= 0.0
    found = np.mean(errors, axis=0)
    assert found[0] < share * found[1:].min()


def test_the_covariance_is_that_of_the_noise():
    J, draws = 12, 40_000
    noise = np.random.default_rng(1).normal(size=(draws, J)) * 300.0
    found = running(np.zeros((draws, J)), 300.0**2, noise)
    np.testing.assert_allclose(np.cov(found.upto.T), found.covariance, atol=0.05 * found.covariance.max())


def test_consistent_counts_add_up():
    random = np.random.default_rng(2)
    for noisy in (random.normal(3.0, 9.0, (4, 5)), random.normal(-9.0, 1.0, (3, 3)), np.zeros((1, 1))):
        found = consistent_counts(noisy, 1.0, 10_000)
        assert found.dtype == np.int64 and found.min() >= 0
        assert found.sum() == max(round(noisy.sum()), 0)
        assert consistent_counts(noisy, 1.0, 20).sum() <= 20
    exact = random.integers(0, 50, (6, 2))
    np.testing.assert_array_equal(consistent_counts(exact.astype(float), 0.0, int(exact.sum())), exact)
    # All rows, unless more are missing than the noise of all counts explains: 2 x 1 x 4^1/2.
    counts = np.array([30.0, 20.0, 40.0, 10.0])
    assert [int(consistent_counts(counts, 1.0, rows).sum()) for rows in (90, 103, 104, 120)] == [
        *(90, 103),
        *(100, 100),
    ]
    # The nearest vector on the simplex, by its optimality condition: cells above zero are shifted alike.
    noisy = random.normal(40.0, 60.0, 30)
    found = consistent_counts(noisy, 0.0, 100_000)
    shift = (noisy - found)[found > 0]
    assert np.ptp(shift) < 2.0 and noisy[found == 0].max() < shift.max() + 1.0


def test_limits_of_counts_and_shares_without_noise():
    low, high = count_limits(np.array([0.0, 5.0]), 0.0, 0.05)
    assert low.tolist() == [0.0, 5.0] and high.tolist() == [0.0, 5.0]
    counts = np.array([[30.0, 50.0, 20.0], [0.0, 1.0, 9.0]])
    share, low, high = share_limits(counts, 0.0, 0.05)
    for g in range(2):
        n = counts[g].sum()
        wilson = np.array([proportion_confint(int(x), int(n), method="wilson") for x in counts[g]]).T
        np.testing.assert_allclose(share[g], counts[g] / n)
        np.testing.assert_allclose([low[g], high[g]], wilson, atol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 400])
def test_quantiles_are_those_of_the_counts(n):
    edges, shares = np.linspace(0.0, 10.0, 41), np.array([0.1, 0.5, 0.9])
    x = np.random.default_rng(3).uniform(0.0, 10.0, n)
    counts = np.bincount(np.searchsorted(edges, x), minlength=42)
    found = noisy_quantiles(running(counts), edges, shares, 0.05)
    if not n:
        assert np.isnan(found).all()
        return
    assert (found[1] <= found[0]).all() and (found[0] <= found[2]).all()
    ordered = np.sort(x)
    nearest = ordered[np.minimum(np.ceil(shares * n).astype(int), n) - 1]
    assert np.abs(found[0] - nearest).max() <= 0.25 + 1e-9


def test_quantiles_outside_of_the_range_are_at_its_end():
    edges = np.array([0.0, 1.0, 2.0])
    found = noisy_quantiles(running(np.array([80, 0, 0, 20])), edges, np.array([0.25, 0.9]), 0.05)
    assert found[0].tolist() == [0.0, 2.0]


def test_moments_are_those_of_the_numbers():
    x = np.random.default_rng(4).uniform(-1.0, 1.0, 300)
    found = noisy_moments(np.array([[300.0, x.sum(), (x**2).sum()], [0.0, 0.0, 0.0]]), 0.0)
    np.testing.assert_allclose(found.mean[0], x.mean(), rtol=1e-12)
    np.testing.assert_allclose(found.variance[0], x.var(ddof=1), rtol=1e-10)
    np.testing.assert_allclose(found.error[0], stats.sem(x), rtol=1e-10)
    assert np.isnan(found.mean[1])


def test_correlations_are_those_of_the_columns():
    X = np.random.default_rng(5).normal(size=(200, 3)) @ np.array([[1, 0.5, 0], [0, 1, 0.3], [0, 0, 1]]) + 0.3
    r, low, high = noisy_correlation(200.0, X.sum(axis=0), X.T @ X, 0.0, 0.05)
    np.testing.assert_allclose(r, np.corrcoef(X.T), atol=1e-12)
    ends = stats.pearsonr(X[:, 0], X[:, 1]).confidence_interval(0.95)
    np.testing.assert_allclose([low[0, 1], high[0, 1]], ends, atol=1e-10)
    # Limits of noise alone are Fieller's: the largest and the smallest ratio that noise allows.
    of_noise = noisy_correlation(1e9, np.zeros(2), 1e9 * np.array([[1.0, 0.5], [0.5, 1.0]]), 5e7, 0.05)
    for c in (of_noise[1][0, 1], of_noise[2][0, 1]):
        assert abs(0.5 - c) == pytest.approx(
            stats.norm.isf(0.025) * 0.05 * np.sqrt(1.0 + c**2 / 2.0), rel=1e-3
        )
    # A column that noise hides has no correlation.
    r, low, high = noisy_correlation(200.0, X.sum(axis=0), np.diag([200.0, 200.0, 0.1]), 5.0, 0.05)
    assert np.isnan(r[2]).all() and np.isfinite(r[0, 1]) and np.isnan(low[2, 2])


@pytest.mark.parametrize(("p", "radius", "r"), [(2, 6.0, 0.5), (4, 14.0, 0.6)])
def test_shortened_rows_are_corrected(p, radius, r):
    X = np.random.default_rng(11).multivariate_normal(np.zeros(p), np.eye(p) * (1 - r) + r, 200_000)
    X *= np.minimum(1.0, np.sqrt(radius) / np.linalg.norm(X, axis=1))[:, None]
    plain, corrected = (
        noisy_correlation(2e5, X.sum(axis=0), X.T @ X, 0.0, 0.05, at)[0][0, 1] for at in (np.inf, radius)
    )
    assert plain < r - 0.01 and corrected == pytest.approx(r, abs=0.006)


def survival(n, seed=6, J=24):
    random = np.random.default_rng(seed)
    time, until = np.ceil(random.exponential(15.0, n)), np.ceil(random.uniform(4.0, 30.0, n))
    t, event = np.minimum(time, until), time <= until
    cell = np.minimum(2 * t - 1, 2 * J).astype(int)  # whole times are ends of intervals
    return t, event, *(np.bincount(cell[which], minlength=2 * J + 1)[None] for which in (event, ~event))


def test_curves_are_product_limit_estimates_without_noise():
    t, event, d, c = survival(400)
    times = np.arange(1.0, 25.0)
    counts = noisy_survival_counts(running(d), running(c), times)
    frame = product_limit(counts, 0.05, "log-log")[0]
    other = SurvfuncRight(t, event)
    at = np.searchsorted(other.surv_times, frame["time"], side="right") - 1
    np.testing.assert_allclose(frame["survival"], np.append(1.0, other.surv_prob)[at + 1], atol=1e-8)
    np.testing.assert_allclose(frame["std_error"], np.append(0.0, other.surv_prob_se)[at + 1], atol=1e-8)
    assert last_known(counts, noise_at_ends(running(d).covariance, 24)).tolist() == [24]


def test_curves_are_monotone_whatever_the_noise():
    _, _, d, c = survival(60)
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(size=(2, 1, 49)) * 20.0 * UNIT
        events, censored = (running(x, 400.0 * UNIT**2, e) for x, e in zip((d, c), noise, strict=True))
        counts = noisy_survival_counts(events, censored, np.arange(1.0, 25.0))
        assert min(counts.events.min(), counts.censored.min(), counts.beyond.min()) >= 0.0
        assert (np.diff(counts.at_start) <= 1e-9).all()
        with np.errstate(all="ignore"):
            survival_probability = np.cumprod(1.0 - counts.events / counts.at_risk, axis=1)[0]
        known = last_known(counts, noise_at_ends(events.covariance, 24))[0]
        assert (np.diff(survival_probability[:known]) <= 1e-12).all()


def test_noise_on_curves_is_that_of_numerical_derivatives_and_of_draws():
    _, _, d, c = survival(3000)
    variance = (3.0 * UNIT) ** 2
    events, censored = running(d, variance), running(c, variance)
    counts = noisy_survival_counts(events, censored, np.arange(1.0, 25.0))

    def log_survival(given):
        return np.cumsum(np.log1p(-given.events[0] / given.at_risk[0]))

    covariance = noise_at_ends(events.covariance, 24)
    found = log_survival_noise(counts, covariance)[0]
    np.testing.assert_allclose(propagate_noise(log_survival, counts, covariance), found, rtol=1e-4)
    random, draws = np.random.default_rng(7), []
    for _ in range(1500):
        noisy = (running(x, variance, random.normal(size=(1, 49)) * 3.0 * UNIT) for x in (d, c))
        draws.append(log_survival(noisy_survival_counts(*noisy, counts.times)))
    np.testing.assert_allclose(np.var(draws, axis=0), np.diag(found), rtol=0.2)


def test_noise_on_a_test_is_that_of_draws():
    groups = [survival(1500, seed)[2:] for seed in (8, 9)]
    d, c = (np.vstack([one[k] for one in groups]) for k in (0, 1))
    variance, times = (4.0 * UNIT) ** 2, np.arange(1.0, 25.0)
    events, censored = running(d, variance), running(c, variance)

    def score(given):
        sums = log_rank(given.events, given.at_risk)
        return sums.observed - sums.expected

    counts = noisy_survival_counts(events, censored, times)
    found = propagate_noise(score, counts, noise_at_ends(events.covariance, 24))
    random, draws = np.random.default_rng(10), []
    for _ in range(800):
        noisy = (running(x, variance, random.normal(size=(2, 49)) * 4.0 * UNIT) for x in (d, c))
        draws.append(score(noisy_survival_counts(*noisy, times)))
    assert np.var(draws, axis=0)[0] == pytest.approx(found[0, 0], rel=0.2)


def test_the_price_is_a_ratio_of_errors():
    assert price(np.array([1.0, 4.0, 9.0]), np.array([3.0, 12.0, 27.0])) == 2.0
    assert price(np.array([1.0]), np.array([0.0])) == 1.0 and price(np.zeros(0), np.zeros(0)) == np.inf
