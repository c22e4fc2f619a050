"""Tests of MCAR and of independence between clients, against published figures, statsmodels and the rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from moments_cases import four_clients, moments_of, theta_of
from pattern_moments import complete, moments_of_arrays
from scipy import stats
from statsmodels.multivariate.cancorr import CanCorr
from statsmodels.tools.numdiff import approx_fprime

from fedstat.errors import NotAvailableError
from fedstat.models.vertical.joint_normal.assumption_tests import (
    bartlett_factor,
    independence_lr_test,
    independence_tests,
    little_test,
    unrestricted_normal,
)
from fedstat.models.vertical.joint_normal.fit import fit_joint_model
from fedstat.models.vertical.joint_normal.likelihood import em_step
from fedstat.models.vertical.moments import PatternMoments

# Upper triangles of the sums of (1, x, y)(1, x, y)' of R's data set airquality, by who is seen of Ozone and
# Solar.R; x = Ozone, Solar.R, ten times Wind, Month, Day, and y = Temp.
AIR = {
    (
        False,
        False,
    ): "2 0 0 223 10 32 113 0 0 0 0 0 0 0 0 0 0 0 26849 1115 2875 12568 50 160 565 754 1819 6385",
    (
        False,
        True,
    ): "35 0 6633 3572 225 584 2770 0 0 0 0 0 0 1518521 695959 42453 98367 529912 403648 22981 58982 "
    "279845 1477 3770 17927 12606 45522 221526",
    (
        True,
        False,
    ): "5 214 0 407 34 32 398 12498 0 15663 1607 1128 17791 0 0 0 0 0 39315 2602 2575 31166 242 205 "
    "2764 234 2501 32022",
    (
        True,
        True,
    ): "111 4673 20513 11033 801 1770 8635 318531 979803 384717 34492 74350 387893 4704801 1993549 "
    "146932 322057 1623865 1235871 78495 177631 839745 6019 12760 62936 36564 136812 681731",
}


@pytest.fixture(scope="module")
def air():
    grams = np.zeros((4, 7, 7))
    for gram, sums in zip(grams, AIR.values(), strict=True):
        gram[np.triu_indices(7)] = np.array(sums.split(), dtype=float)
        gram += np.triu(gram, 1).T
    has = np.array([[*seen, True, True, True] for seen in AIR])
    names = ("Ozone", "Solar.R", "Wind", "Month", "Day")
    sites = ("one", "two", "three")
    return PatternMoments(sites, (1, 1, 3), names, has, grams[:, 0, 0], grams, np.zeros(6), np.ones(6))


@pytest.fixture(scope="module")
def study():
    return four_clients(seed=9, n=600)


@pytest.fixture(scope="module")
def fit(study):
    return fit_joint_model(moments_of(study), "independent")


def in_units(fit, joint):
    scale = fit.moments.scale
    return fit.moments.center + scale * joint.point.mean, joint.point.cov * np.outer(scale, scale)


def test_little_s_test_of_air_quality_is_that_of_naniar(air):
    """mcar_test(airquality) prints: statistic 35.1, df 14, p.value 0.00142, missing.patterns 4."""
    fit = fit_joint_model(air, "independent")
    test = little_test(fit, unrestricted_normal(fit))
    assert f"{test.statistic:.1f}" == "35.1"
    assert f"{test.pvalue:.5f}" == "0.00142"
    assert (test.df, test.patterns) == (14, 4)


def test_the_model_s_law_is_the_joint_one_of_the_estimates(study, fit):
    mean, cov = in_units(fit, fit)
    expected = study.pooled().joint_moments(theta_of(study, fit))
    np.testing.assert_allclose(mean, expected[0], rtol=1e-9)
    np.testing.assert_allclose(cov, expected[1], rtol=1e-9, atol=1e-10)


def little_by_rows(study, mean, cov):
    rows = study.table[[*study.covariates, "y"]].to_numpy()
    seen = ~np.isnan(rows)
    d2, df = 0.0, -rows.shape[1]
    for pattern in np.unique(seen, axis=0):
        own = rows[(seen == pattern).all(axis=1)][:, pattern]
        d = own.mean(axis=0) - mean[pattern]
        d2 += len(own) * d @ np.linalg.solve(cov[np.ix_(pattern, pattern)], d)
        df += pattern.sum()
    return d2, df


def test_little_s_statistic_is_that_of_the_rows(study, fit):
    for joint in (fit, unrestricted_normal(fit)):
        test = little_test(fit, joint)
        d2, df = little_by_rows(study, *in_units(fit, joint))
        assert test.statistic == pytest.approx(d2, rel=1e-8)
        assert test.df == df
        assert test.pvalue == pytest.approx(stats.chi2.sf(d2, df))


def test_little_s_test_finds_missingness_that_depends_on_the_response(fit):
    assert little_test(fit).pvalue < 1e-6
    assert little_test(fit, unrestricted_normal(fit)).pvalue < 1e-6


def test_little_s_test_keeps_its_level():
    """60 studies missing completely at random."""
    studies = (four_clients(seed=seed, n=400, missing="mcar") for seed in range(60))
    pvalues = [little_test(fit_joint_model(moments_of(study), "independent")).pvalue for study in studies]
    assert stats.kstest(pvalues, "uniform").pvalue > 0.01
    assert 0.01 < np.mean(np.array(pvalues) < 0.05) < 0.1


def test_little_s_test_needs_two_patterns(fit):
    with pytest.raises(NotAvailableError, match="all entities have the same one"):
        little_test(fit_joint_model(complete(fit.moments), "independent"))


def normal_log_likelihood(study, fit, theta):
    """Mean and lower triangle of the covariance of the rows in standardized units."""
    moments = fit.moments
    rows = (study.table[[*study.covariates, "y"]].to_numpy() - moments.center) / moments.scale
    size = rows.shape[1]
    cov = np.zeros((size, size))
    cov[np.tril_indices(size)] = theta[size:]
    cov = cov + np.tril(cov, -1).T
    seen, total = ~np.isnan(rows), 0.0
    for pattern in np.unique(seen, axis=0):
        own = rows[(seen == pattern).all(axis=1)][:, pattern]
        total += stats.multivariate_normal.logpdf(
            own, theta[:size][pattern], cov[np.ix_(pattern, pattern)]
        ).sum()
    return total


def test_the_unrestricted_model_is_the_maximum_likelihood_of_the_rows(study, fit):
    joint = unrestricted_normal(fit)
    at = joint.point
    theta = np.concatenate([at.mean, at.cov[np.tril_indices(len(at.mean))]])
    assert joint.joint == pytest.approx(normal_log_likelihood(study, fit, theta), rel=1e-10)
    score = approx_fprime(theta, lambda x: normal_log_likelihood(study, fit, x), centered=True)
    assert np.abs(score).max() / np.sqrt(fit.moments.nobs) < 1e-4
    theta = np.concatenate([fit.point.mean, fit.point.cov[np.tril_indices(len(at.mean))]])
    assert fit.joint == pytest.approx(normal_log_likelihood(study, fit, theta), rel=1e-10)


def test_independence_by_likelihood_ratio_of_complete_data_is_wilks_determinant():
    study = four_clients(seed=3, n=1_000)
    fit = fit_joint_model(complete(moments_of(study)), "independent")
    X = study.table[study.covariates].dropna().to_numpy()
    R = np.corrcoef(X.T)
    edges = np.cumsum([0, *fit.moments.sizes])
    blocks = [R[a:b, a:b] for a, b in pairwise(edges)]
    p = np.array(fit.moments.sizes)
    d = 1.5 + (p.sum() ** 3 - (p**3).sum()) / (3 * (p.sum() ** 2 - (p**2).sum()))  # Anderson (2003, 9.4)
    logs = sum(np.linalg.slogdet(B)[1] for B in blocks) - np.linalg.slogdet(R)[1]
    expected = len(X) * logs / (1.0 + d / len(X))
    test = independence_lr_test(fit)
    assert test.statistic == pytest.approx(expected, rel=1e-8)
    assert test.df_diff == 2 * 1 + 2 * 3 + 2 * 2 + 1 * 3 + 1 * 2 + 3 * 2
    assert test.pvalue == pytest.approx(stats.chi2.sf(expected, test.df_diff))


def test_bartlett_factor_is_the_mean_likelihood_ratio_with_missing_blocks():
    ratios, factors = [], []
    for run in range(150):
        rng = np.random.default_rng(run)
        X = rng.normal(size=(120, 6))
        y = X.sum(axis=1) + rng.normal(size=120)
        for k, share in enumerate((0.2, 0.3, 0.4)):
            X[rng.random(120) < share, 2 * k : 2 * k + 2] = np.nan
        fit = fit_joint_model(moments_of_arrays(X, y, [2, 2, 2]), "independent")
        between = np.kron(1 - np.eye(3), np.ones((2, 2))).astype(bool)
        factors.append(bartlett_factor(fit.moments, between))
        ratios.append(independence_lr_test(fit).statistic * factors[-1] / 12)
    noise = np.std(ratios) / np.sqrt(len(ratios))
    assert np.mean(ratios) == pytest.approx(np.mean(factors), abs=2.5 * noise)
    assert np.mean(factors) - 1.0 > 2.0 * noise


def test_pairs_are_tested_on_the_entities_that_both_have(study, fit):
    tests = independence_tests(moments_of(study))
    assert [(t.first, t.second) for t in tests] == [(j, k) for j in "ABCD" for k in "ABCD" if j < k]
    for test in tests:
        names = study.columns[test.first], study.columns[test.second]
        both = study.table[[*names[0], *names[1]]].dropna()
        p, q, n = len(names[0]), len(names[1]), len(both)
        R = np.corrcoef(both.to_numpy().T)
        logs = [np.linalg.slogdet(B)[1] for B in (R, R[:p, :p], R[p:, p:])]
        expected = -(n - 1 - (p + q + 1) / 2) * (logs[0] - logs[1] - logs[2])
        assert (test.n, test.df) == (n, p * q)
        assert test.statistic == pytest.approx(expected, rel=1e-7)
        assert test.pvalue == pytest.approx(stats.chi2.sf(expected, p * q))
        assert test.mean_abs == pytest.approx(np.abs(R[:p, p:]).mean(), rel=1e-9)
        if min(p, q) > 1:
            canonical = CanCorr(both[names[0]].to_numpy(), both[names[1]].to_numpy()).cancorr
            assert test.canonical == pytest.approx(canonical.max(), rel=1e-7)


def test_a_common_factor_of_all_sites_is_found():
    independent = fit_joint_model(moments_of(four_clients(seed=5, n=4_000)), "independent")
    related = fit_joint_model(moments_of(four_clients(seed=5, n=4_000, between=0.4)), "independent")
    assert independence_lr_test(related).pvalue < 1e-50
    assert independence_lr_test(independent).pvalue > 0.01
    assert max(t.pvalue for t in independence_tests(related.moments)) < 1e-4


def test_only_the_likelihood_ratio_sees_through_selection_by_the_response():
    """Both clients have the entities with a large response: there alone their columns correlate."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(3_000, 2))
    y = X.sum(axis=1) + rng.normal(size=3_000)
    lacks = rng.integers(2, size=3_000)
    X[np.flatnonzero(y < 0.5), lacks[y < 0.5]] = np.nan
    fit = fit_joint_model(moments_of_arrays(X, y, [1, 1]), "independent")
    assert independence_tests(fit.moments)[0].pvalue < 1e-10
    assert independence_lr_test(fit).pvalue > 0.05


def test_pairs_without_enough_entities_have_no_test():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4))
    X[3:30, :2], X[30:, 2:] = np.nan, np.nan  # three entities have both
    moments = moments_of_arrays(X, rng.normal(size=60), [2, 2])
    (test,) = independence_tests(moments)
    assert (test.n, test.df) == (3, 4) and np.isnan(test.statistic) and np.isnan(test.pvalue)
    X[:3, :2] = np.nan
    apart = moments_of_arrays(X, rng.normal(size=60), [2, 2])
    assert independence_tests(apart)[0].n == 0
    with pytest.raises(NotAvailableError, match="no two sites share enough entities"):
        independence_lr_test(fit_joint_model(apart, "independent"))


@pytest.mark.parametrize("both", [0, 1, 4])
def test_two_sites_that_share_few_entities_have_no_covariance_of_their_own(both):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200, 12))
    X[both:100, :6], X[100:, 6:] = np.nan, np.nan
    fit = fit_joint_model(
        moments_of_arrays(X, rng.normal(size=200), [6, 6], sites=["Bank", "Court"]), "independent"
    )
    joint = unrestricted_normal(fit)
    assert np.abs(np.linalg.inv(joint.point.cov[:-1, :-1])[:6, 6:]).max() < 1e-12
    assert joint.joint == pytest.approx(fit.joint, rel=1e-12)


def test_one_em_step_from_anywhere_ends_at_the_moments_of_complete_data():
    moments = complete(moments_of(four_clients(seed=3, n=200))).standardized()
    mean, cov = em_step(moments, np.full(9, 0.3), np.eye(9) + 0.1)
    np.testing.assert_allclose(mean, 0.0, atol=1e-9)
    np.testing.assert_allclose(cov, moments.grams[0, 1:, 1:] / moments.nobs, atol=1e-9)
