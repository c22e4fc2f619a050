"""One coefficient over few sites: metafor's published numbers, likelihoods, draws, coverage."""

import numpy as np
import pytest
from few_sites import CASES, coverage
from numpy.testing import assert_allclose
from scipy import stats

from fedstat.inference.meta_analysis import (
    RandomEffectsOptions,
    combine_sites,
    i2_interval,
    prediction_interval,
    restricted_likelihood,
)


def test_statistics_follow_from_raw_estimates():
    b, v = np.array([0.1, 0.9, -0.4, 0.5, 1.4]), np.array([0.04, 0.09, 0.02, 0.3, 0.1])
    found, w = combine_sites(b, v, how=RandomEffectsOptions("DL", "adhoc", "t")), 1 / v
    mean = (w * b).sum() / w.sum()
    Q = (w * (b - mean) ** 2).sum()
    tau2 = (Q - 4) / (w.sum() - (w**2).sum() / w.sum())
    star = 1 / (v + tau2)
    center = (star * b).sum() / star.sum()
    spread = (star * (b - center) ** 2).sum() / 4
    se = np.sqrt(max(spread, 1.0) / star.sum())
    half = stats.t.ppf(0.975, 4) * np.sqrt(tau2 + se**2)
    assert_allclose([found.Q, found.I2, found.tau2], [Q, 1 - 4 / Q, tau2])
    assert_allclose([found.re_estimate, found.re_std_error], [center, se])
    assert_allclose([found.pred_low, found.pred_high], [center - half, center + half])


def test_i2_belongs_to_the_variance_by_moments():
    """metafor: I2 = tau2 / (tau2 + s2), s2 the typical variance of Higgins and Thompson (2002, eq. 9)."""
    b, v = np.array([0.1, 0.9, -0.4, 0.5, 1.4]), np.array([0.04, 0.09, 0.02, 0.3, 0.1])
    w = 1 / v
    typical = 4 * w.sum() / (w.sum() ** 2 - w @ w)
    for method in ("DL", "REML"):
        found = combine_sites(b, v, how=RandomEffectsOptions(method))
        moments = combine_sites(b, v, how=RandomEffectsOptions("DL")).tau2
        assert_allclose(found.I2, moments / (moments + typical))


def bcg():
    """Log risk ratios of 13 trials of BCG vaccine (Colditz et al. 1994), with their variances."""
    table = np.array(
        [
            *([4, 119, 11, 128], [6, 300, 29, 274], [3, 228, 11, 209], [62, 13536, 248, 12619]),
            *([33, 5036, 47, 5761], [180, 1361, 372, 1079], [8, 2537, 10, 619], [505, 87886, 499, 87892]),
            *([29, 7470, 45, 7232], [17, 1699, 65, 1600], [186, 50448, 141, 27197], [5, 2493, 3, 2338]),
            [27, 16886, 29, 17825],
        ],
        dtype=float,
    )
    ill, n = table[:, [0, 2]], np.column_stack([table[:, :2].sum(axis=1), table[:, 2:].sum(axis=1)])
    risk = np.log(ill / n)
    return risk[:, 0] - risk[:, 1], (1 / ill - 1 / n).sum(axis=1)


def test_random_effects_are_those_of_metafor():
    """README of metafor 4: ``rma(yi, vi, data=dat, test="knha")`` and ``predict(res, transf=exp)``.

    The normal interval is that of ``rma(yi, vi)`` in its help page.
    """
    y, v = bcg()
    found = combine_sites(y, v, how=RandomEffectsOptions("REML", "knha", "t"))
    assert_allclose(found.Q, 152.2330, atol=5e-5)
    assert_allclose([found.tau2, found.re_estimate, found.re_std_error], [0.3132, -0.7145, 0.1808], atol=5e-5)
    assert_allclose(found.re_estimate / found.re_std_error, -3.9522, atol=5e-5)
    assert_allclose([found.re_low, found.re_high], [-1.1084, -0.3206], atol=5e-5)
    assert_allclose(np.exp([found.pred_low, found.pred_high]), [0.14, 1.76], atol=5e-3)
    normal = combine_sites(y, v, how=RandomEffectsOptions("REML", "z"))
    assert_allclose(
        [normal.re_std_error, normal.re_low, normal.re_high], [0.1798, -1.0669, -0.3622], atol=5e-5
    )
    moments = combine_sites(y, v, how=RandomEffectsOptions("DL", "z"))
    assert_allclose(
        [moments.tau2, moments.re_estimate, moments.re_std_error], [0.3088, -0.7141, 0.1787], atol=5e-5
    )


@pytest.mark.parametrize("m", [2, 3, 8])
def test_restricted_likelihood_is_at_its_maximum(m):
    """Against the density of contrasts of the estimates, whose law knows no mean."""
    rng = np.random.default_rng(m)
    b, v = rng.normal(0, 1, m), rng.uniform(0.05, 0.5, m)
    contrasts = np.linalg.svd(np.ones((1, m)))[2][1:]
    grid = np.linspace(0, 10, 1001)
    laws = [stats.multivariate_normal(cov=contrasts @ np.diag(v + t) @ contrasts.T) for t in grid]
    best = grid[np.argmax([joint.logpdf(contrasts @ b) for joint in laws])]
    assert restricted_likelihood(b, v) == pytest.approx(best, abs=0.006)


def test_interval_of_a_further_site_is_that_of_draws():
    """Nagashima, Noma and Furukawa (2019) draw variances by their confidence, errors and effects."""
    b, v = np.array([0.1, 0.9, -0.4, 0.5, 1.4]), np.array([0.04, 0.09, 0.02, 0.3, 0.1])
    rng, n = np.random.default_rng(5), 200_000

    def q(tau2):
        w = 1 / (v + tau2[:, None])
        mean = (w @ b) / w.sum(axis=1)
        return mean, 1 / w.sum(axis=1), (w * (b - mean[:, None]) ** 2).sum(axis=1)

    grid = np.append(0.0, np.geomspace(1e-4, 1e4, 4000))
    # Confidence that the variance is at most tau2: Q there is chi-squared on 4 degrees of freedom.
    tau2 = np.interp(rng.uniform(size=n), stats.chi2.sf(q(grid)[2], 4), grid)
    mean, variance, _ = q(tau2)
    draws = mean + np.sqrt(variance) * rng.standard_t(4, n) + np.sqrt(tau2) * rng.normal(size=n)
    assert_allclose(prediction_interval(b, v, 0.05), np.quantile(draws, [0.025, 0.975]), atol=0.03)
    scaled = np.array(prediction_interval(1e-6 * b, 1e-12 * v, 0.05))
    assert_allclose(scaled, 1e-6 * np.array(prediction_interval(b, v, 0.05)), rtol=1e-9)


def test_intervals_over_few_sites_cover():
    """At 250 runs a share of .95 has standard error .014; the normal interval over five sites covers .87."""
    found = coverage(5, 0.25, runs=250)
    assert found["DL, normal", "mean"] < 0.91
    assert found["REML, t"].min() > 0.92


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case[1]])
def test_coverage_of_both_intervals(case):
    assert coverage(*case)["REML, t"].min() > 0.93


def test_equal_estimates_have_no_variance_between_sites():
    found = combine_sites(np.full(3, 0.7), np.array([0.1, 0.2, 0.4]))
    assert_allclose([found.Q, found.I2, found.tau2], 0.0, atol=1e-25)
    # Hartung's and Knapp's standard error would be zero here; that printed is never below the usual one.
    assert (
        combine_sites(
            np.full(3, 0.7), np.array([0.1, 0.2, 0.4]), how=RandomEffectsOptions(test="knha")
        ).re_std_error
        < 1e-9
    )
    assert_allclose([found.re_estimate, found.re_std_error], [0.7, (10 + 5 + 2.5) ** -0.5])


def test_interval_of_i2_is_the_published_one():
    """Harrer et al. (2021), Doing Meta-Analysis in R, chapter 5: Q = 45.50 of 18 studies, by R's meta."""
    assert_allclose(i2_interval(45.50, 18), [0.379, 0.775], atol=5e-4)
    assert_allclose(1 - 17 / 45.50, 0.626, atol=5e-4)


def test_interval_of_i2_where_studies_agree():
    """Higgins and Thompson (2002): below Q = m the standard error of ln H depends on m alone."""
    low, high = i2_interval(3.0, 5)
    upper = np.sqrt(3.0 / 4) * np.exp(stats.norm.ppf(0.975) * np.sqrt(1 / 6 * (1 - 1 / 27)))
    assert (low, high) == (0.0, pytest.approx(1 - 1 / upper**2))
    assert np.isnan(i2_interval(1.5, 2)).all()
    assert 0.0 <= i2_interval(9.0, 2)[0] < 1 - 1 / 9 < i2_interval(9.0, 2)[1] < 1.0


def test_a_variance_that_is_rounding_is_zero():
    """The likelihood decreases from zero on; very close to zero only its last digits differ."""
    for seed in (8, 14, 17):
        draw = np.random.default_rng(seed)
        m = draw.integers(3, 8)
        v = draw.uniform(0.01, 0.1, m)
        assert restricted_likelihood(draw.normal(size=m) * np.sqrt(v), v) == 0.0
