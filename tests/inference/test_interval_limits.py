"""Limits of intervals and of the notes that go with them: the last number of sites, tables or scores."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.inference.conformal import merge_upwards, threshold_bins
from fedstat.inference.covariance import gvif, nearest_psd, symmetrize
from fedstat.inference.heterogeneity import MaskedSiteSums
from fedstat.inference.heterogeneity import heterogeneity as compare_sites
from fedstat.inference.homogeneity_tests import (
    JointTest,
    SiteScores,
    SiteWelchTerms,
    joint_test,
    quadratic_form,
    welch_test,
)
from fedstat.inference.hypotheses import read_constraints, t_test, wald_test, wald_test_terms
from fedstat.inference.meta_analysis import (
    RandomEffectsOptions,
    SiteCoefficients,
    combine_sites,
    i2_interval,
)
from fedstat.inference.meta_analysis import (
    combine_factor as combine_coefficients,
)

heterogeneity = partial(compare_sites, sources=())
combine_factor = partial(combine_coefficients, sources=())

# ---- conformal prediction ----------------------------------------------------------------------------


def by_sorting(counts, alpha):
    """The bin of the k-th smallest score, k = ceil((n + 1)(1 - alpha)); all bins where there is none."""
    scores = np.repeat(np.arange(len(counts)), counts)
    k = int(np.ceil(round((len(scores) + 1) * (1.0 - alpha), 9)))
    return scores[k - 1] if k <= len(scores) else len(counts)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.5, 0.9])
def test_the_threshold_is_the_smallest_score_with_the_level(alpha):
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 4, (60, 7))
    found = threshold_bins(counts, alpha)
    assert found.tolist() == [by_sorting(one, alpha) for one in counts]


@pytest.mark.parametrize(
    ("n", "alpha", "bins"),
    [(0, 0.1, 3), (1, 0.5, 0), (1, 0.49, 3), (8, 0.1, 3), (9, 0.1, 0), (19, 0.05, 0), (18, 0.05, 3)],
)
def test_so_many_scores_are_needed_for_a_level(n, alpha, bins):
    """With n = 9 scores the largest is not exceeded with probability 9 / 10; with 8 none is sure enough."""
    assert threshold_bins(np.array([[n, 0, 0]]), alpha).tolist() == [bins]


def test_each_group_has_a_threshold_of_its_own():
    assert threshold_bins(np.array([[9, 0], [8, 1], [0, 9], [8, 0]]), 0.1).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("counts", "places"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([1, 0, 0], [0, 1, 2]),  # too few in all: nothing is merged
        ([4, 0, 0], [0, 1, 2]),
        ([5, 0, 0], [0, 1, 2]),
        ([4, 0, 1], [2, 2, 2]),
        ([5, 0, 5], [0, 2, 2]),
        ([5, 0, 4], [2, 2, 2]),
        ([5, 1, 0], [1, 1, 2]),
        ([0, 5, 5], [1, 1, 2]),
        ([6, 6, 6], [0, 1, 2]),
        ([4, 5, 0], [1, 1, 2]),
        ([3, 2, 1], [2, 2, 2]),
    ],
)
def test_groups_of_scores_reach_the_minimum_and_no_rest_is_left(counts, places):
    assert merge_upwards(np.array(counts), 5).tolist() == places


# ---- sites, tables and p-values -----------------------------------------------------------------------


def compared(m, **changes):
    """Compare `m` sites with equal estimates."""
    one = {"n": 100, "beta": np.zeros(1), "cov": np.eye(1), "problem": ""}
    each = [
        SimpleNamespace(site=f"S{k}", score=np.zeros(1), information=np.eye(1), own=None, **one | changes)
        for k in range(m)
    ]
    return heterogeneity(("x",), np.zeros(1), 1.0, each)


@pytest.mark.parametrize(("m", "few"), [(1, False), (2, True), (4, True), (5, False)])
def test_few_sites_are_noted(m, few):
    notes = " ".join(str(compared(m).summary()).split())
    assert (f"With {m} sites Q has little power" in notes) == few
    assert (f"with {m - 1} degree{'s' if m > 2 else ''} of freedom" in notes) == few


@pytest.mark.parametrize(("m", "tested"), [(1, False), (2, True)])
def test_one_site_is_compared_with_none(m, tested):
    table = compared(m).to_frame()
    assert table.loc["x", "df"] == m - 1 and np.isfinite(table.loc["x", "p_value"]) == tested


@pytest.mark.parametrize(("alpha", "fits"), [(0.0, False), (1e-9, True), (1.0 - 1e-9, True), (1.0, False)])
def test_the_level_of_a_comparison_lies_between_zero_and_one(alpha, fits):
    one = SimpleNamespace(
        site="S", n=9, beta=None, cov=None, problem="none", score=np.zeros(1), information=np.eye(1), own=None
    )
    if fits:
        assert heterogeneity(("x",), np.zeros(1), 1.0, [one], alpha=alpha).alpha == alpha
    else:
        with pytest.raises(ModelError, match="expected alpha between 0 and 1 and one site or more"):
            heterogeneity(("x",), np.zeros(1), 1.0, [one], alpha=alpha)
    with pytest.raises(ModelError, match="and 0 sites"):
        heterogeneity(("x",), np.zeros(1), 1.0, [])


@pytest.mark.parametrize("variance", [0.0, -1.0, np.nan, np.inf])
def test_an_estimate_without_a_variance_is_none(variance):
    assert compared(2, cov=np.array([[variance]])).estimates.isna().all(axis=None)
    assert not compared(2, cov=np.array([[1e-300]])).estimates.isna().any(axis=None)


@pytest.mark.parametrize("variance", [0.0, -1.0, np.nan])
def test_a_coefficient_of_a_factor_without_a_variance_is_none(variance):
    covariances = np.array([np.diag([1.0, variance]), np.eye(2), np.diag([variance, variance])])
    found = SiteCoefficients.of(np.zeros((3, 2)), covariances)
    assert found.which == ((0,), (0, 1)) and found.numbers == 3
    assert SiteCoefficients.of(np.array([[np.nan, 1.0]]), np.eye(2)[None]).which == ((1,),)


@pytest.mark.parametrize("m", [0, 1, 2])
def test_random_effects_need_two_sites(m):
    found = combine_sites(np.linspace(0.0, 1.0, m), np.full(m, 0.1))
    assert np.isfinite([found.re_low, found.re_high]).all() == (m >= 2)


@pytest.mark.parametrize("prediction", ["confidence", "t"])
@pytest.mark.parametrize(("m", "known"), [(2, False), (3, True)])
def test_the_interval_of_a_further_site_needs_three(prediction, m, known):
    how = RandomEffectsOptions(prediction=prediction)
    found = combine_sites(np.linspace(0.0, 1.0, m), np.full(m, 0.1), how=how)
    assert np.isfinite([found.pred_low, found.pred_high]).tolist() == [known] * 2


@pytest.mark.parametrize(
    ("Q", "m", "low", "high"),
    [
        (2.0, 2, np.nan, np.nan),
        (2.1, 2, 0.0, 0.8809),  # ln H has standard error 0.5 ln 2.1 / (sqrt 4.2 - 1)
        (2.0, 3, 0.0, 0.8960),  # and here sqrt((1 - 1 / 3) / 2)
        (3.0, 3, 0.0, 0.9307),
    ],
)
def test_the_interval_of_i2_by_hand(Q, m, low, high):
    np.testing.assert_allclose(i2_interval(Q, m), (low, high), atol=5e-5)


@pytest.mark.parametrize(("tables", "few"), [(2, True), (19, True), (20, False)])
def test_few_synthetic_tables_are_noted(tables, few):
    rng = np.random.default_rng(1)
    fits = [
        SimpleNamespace(params=pd.Series({"x": b}), bse=pd.Series({"x": 1.0}))
        for b in rng.normal(size=tables)
    ]
    assert ("Fewer than 20 tables" in " ".join(str(fs.combine(fits).summary()).split())) == few


@pytest.mark.parametrize("tables", [0, 1])
def test_one_table_is_not_combined(tables):
    fits = [SimpleNamespace(params=pd.Series({"x": 1.0}), bse=pd.Series({"x": 1.0}))] * tables
    with pytest.raises(ModelError, match=f"at least 2 tables, received {tables}"):
        fs.combine(fits)


def test_what_masked_sums_do_not_say_is_named():
    one = SimpleNamespace(site="S", n=9, beta=np.zeros(1), cov=np.eye(1), problem="", own=None)
    masked = MaskedSiteSums(np.zeros(1), np.eye(1), np.zeros(2))
    found = heterogeneity(("x",), np.zeros(1), 1.0, [one, one], masked=masked)
    for request in (lambda: found.left_out, lambda: found.change):
        with pytest.raises(NotAvailableError, match="no fit without each site"):
            request()
    assert compared(2).change.shape == compared(2).left_out.shape == (2, 1)


# ---- covariances and hypotheses -----------------------------------------------------------------------

NAMES = ["a", "b", "c"]


def test_the_share_that_is_lost_has_no_units_and_is_zero_of_nothing():
    assert symmetrize(np.zeros((2, 2)))[1] == 0.0
    assert symmetrize(np.array([[0.0, 1.0], [-1.0, 0.0]]))[1] == 1.0
    assert nearest_psd(np.zeros((2, 2)))[1] == 0.0
    lopsided = np.array([[1.0, 1.0], [0.0, 1.0]])
    for unit in (1e-9, 1.0, 1e9):
        assert symmetrize(unit * lopsided)[1] == pytest.approx(np.sqrt(0.5 / 3.0))
        assert nearest_psd(unit * np.diag([3.0, -4.0]))[1] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("at", "value"), [((1, 1), 0.0), ((1, 1), -1.0), ((1, 1), np.nan), ((0, 1), np.nan), ((0, 1), np.inf)]
)
def test_a_coefficient_without_a_variance_has_no_inflation(at, value):
    cov = np.eye(3)
    cov[at] = cov[at[::-1]] = value
    named = r"'a', 'b'" if at[0] != at[1] else "'b'"
    with pytest.raises(NotAvailableError, match=f"no variance inflation: {named} has no variance"):
        gvif(cov, NAMES, NAMES)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_inflation_does_not_depend_on_units(unit):
    R = np.full((3, 3), 0.5) + 0.5 * np.eye(3)
    np.testing.assert_allclose(gvif(unit * R, NAMES, NAMES)["GVIF"], 1.5, rtol=1e-9)
    singular = np.ones((3, 3)) + 1e-14 * np.eye(3)
    with pytest.raises(NotAvailableError, match="is singular"):
        gvif(unit * singular, NAMES, NAMES)


@pytest.mark.parametrize(("terms", "fits"), [(["a"], False), (["a", "b"], True)])
def test_inflation_needs_two_terms(terms, fits):
    if fits:
        np.testing.assert_allclose(gvif(np.eye(2), terms, terms)["GVIF"], 1.0)
    else:
        with pytest.raises(NotAvailableError, match="expected two terms or more, received 1"):
            gvif(np.eye(1), terms, terms)


def test_one_coefficient_without_a_variance_spoils_no_other_test():
    cov, params = np.diag([1.0, np.nan, 4.0]), np.array([1.0, 2.0, 3.0])
    both = read_constraints("a = 0, b = 0", NAMES)
    assert np.isnan(t_test(params, cov, both).sd).tolist() == [False, True]
    with pytest.raises(NotAvailableError, match=r"no Wald test of a = 0; b = 0: .*not determined"):
        wald_test(params, cov, both)
    assert float(wald_test(params, cov, read_constraints("a = 0, c = 0", NAMES)).statistic) == 3.25


@pytest.mark.parametrize(
    ("row", "label"), [([0, 1, 0], "b"), ([0, 2, 0], "c0"), ([1, 1, 0], "c0"), ([0, -1, 0], "c0")]
)
def test_a_row_of_a_matrix_is_named_after_the_one_coefficient_that_it_is(row, label):
    assert read_constraints([row], NAMES).labels == (label,)


@pytest.mark.parametrize("wrong", [[[1, 0]], [[1, 0, 0, 0]], [[0, 0, 0]], [[1, 0, 0], [0, 0, 0]]])
def test_a_matrix_has_a_column_for_each_coefficient_and_no_row_of_zeros(wrong):
    with pytest.raises(ModelError, match="a hypothesis matrix with 3 columns"):
        read_constraints(wrong, NAMES)
    with pytest.raises(ModelError, match=r"one value per constraint \(1\), received 2"):
        read_constraints(([[1, 0, 0]], [0.0, 1.0]), NAMES)


# ---- several coefficients together --------------------------------------------------------------------


def factor(m, **options):
    """Combine two coefficients; `m` of six sites determine the second one."""
    estimates = np.column_stack([np.linspace(0.0, 1.0, 6), np.where(np.arange(6) < m, 2.0, np.nan)])
    return combine_factor(("a", "b"), estimates, np.array([0.1 * np.eye(2)] * 6), **options)


@pytest.mark.parametrize("m", [0, 1])
def test_a_coefficient_of_fewer_than_two_sites_is_not_combined(m):
    with pytest.raises(EstimationError, match="fewer than two sites determine b"):
        factor(m)
    assert factor(2).Q_df == 6 + 2 - 2


@pytest.mark.parametrize(("test", "law"), [("z", "chi2"), ("knha", "f"), ("adhoc", "f")])
def test_the_law_of_several_coefficients_is_that_of_the_test(test, law):
    found = factor(6, test=test, alpha=0.1)
    W = float(found.estimate @ np.linalg.solve(found.cov, found.estimate))
    expected = stats.chi2.sf(W, 2) if law == "chi2" else stats.f.sf(W / 2.0, 2, 10)
    assert found.pvalue == pytest.approx(expected) and found.statistic == pytest.approx(W / 2.0)
    assert found.df_denom == (np.inf if law == "chi2" else 10)
    quantile = stats.norm.isf(0.05) if law == "chi2" else stats.t.isf(0.05, 10)
    table = found.to_frame()
    np.testing.assert_allclose(table["conf_high"] - table["estimate"], quantile * table["std_error"])
    np.testing.assert_allclose(table["estimate"] - table["conf_low"], quantile * table["std_error"])
    with pytest.raises(ModelError, match="expected test to be one of 'adhoc', 'knha', 'z', received 't'"):
        factor(6, test="t")


@pytest.mark.parametrize(("apart", "share"), [(0.0, 0.0), (1e-9, 0.0), (4.0, 1.0 - 4.0 / 64.0)])
def test_sites_that_agree_have_no_spread_beyond_chance(apart, share):
    """Q is that of two coefficients at three sites, of variance 1 each; at `apart` 4 it is 4 * 16."""
    estimates = np.array([[1.0, 2.0]] * 3) + np.array([-apart, 0.0, apart])[:, None]
    found = combine_factor(["a", "b"], estimates, np.array([np.eye(2)] * 3))
    np.testing.assert_allclose([found.Q, found.I2], [4.0 * apart**2, share], atol=1e-12)
    assert found.Q_df == 4


def test_nothing_has_no_random_effects():
    for wanted in ([], ["y"], ["x", "y"]):
        with pytest.raises(ModelError, match="no term and no coefficient; there are: x"):
            compared(2).random_effects_of(wanted)


@pytest.mark.parametrize(("with_own", "own_dispersions"), [(0, False), (2, False), (3, True)])
def test_each_site_has_its_own_dispersion_where_all_have_fits_of_their_own(with_own, own_dispersions):
    term = SiteWelchTerms(np.zeros(1), np.eye(1), 50)
    sites = [
        SimpleNamespace(
            site=f"S{k}",
            n=100,
            beta=np.zeros(1),
            cov=np.eye(1),
            problem="",
            score=np.zeros(1),
            information=np.eye(1),
            own=term if k < with_own else None,
        )
        for k in range(3)
    ]
    for estimated in (False, True):
        found = heterogeneity(("x",), np.zeros(1), 1.0, sites, estimated=estimated)
        assert found.joint.own_dispersions == (estimated and own_dispersions)
        assert found.one_dispersion == (estimated and not own_dispersions)


# ---- tests of equal coefficients ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "excess"),
    [
        (JointTest(10.0, 0.04, 4), 0.6),
        (JointTest(4.0, 0.4, 4), 0.0),
        (JointTest(3.0, 0.9, 4), 0.0),
        (JointTest(0.0, 1.0, 4), 0.0),
        (JointTest(2.0, np.nan, 0), 0.0),
        (JointTest(3.0, 0.1, 4, 12.0), 0.6),  # the mean of F is 12 / 10
        (JointTest(3.0, 0.1, 4, 3.0), 0.0),
        (JointTest(30.0, 0.1, 4, 3.0), 0.9),
        (JointTest(3.0, 0.1, 4, 1.5), 0.0),  # F has no mean
    ],
)
def test_the_excess_of_a_test_is_what_exceeds_its_mean(test, excess):
    assert test.excess == pytest.approx(excess)
    assert test.own_dispersions == np.isfinite(test.df_denom)


def least_squares_sites(seed=0, sizes=(12, 15, 20), p=3):
    """Columns and responses by site."""
    rng = np.random.default_rng(seed)
    sites = [(rng.normal(size=(n, p)), rng.normal(size=n)) for n in sizes]
    return sites, (np.concatenate(parts) for parts in zip(*sites, strict=True))


def parts_at(sites, beta):
    """Scores and informations of the sites for dispersion one."""
    return np.array([X.T @ (y - X @ beta) for X, y in sites]), np.array([X.T @ X for X, _ in sites])


@pytest.mark.parametrize("stopped", [0.0, 0.1])
def test_the_score_test_of_least_squares_is_chows(stopped):
    """The fall of the residual sum of squares from one vector of coefficients to one for each site."""
    sites, (X, y) = least_squares_sites()
    beta, common = np.linalg.lstsq(X, y, rcond=None)[:2]
    own = sum(np.linalg.lstsq(*site, rcond=None)[1][0] for site in sites)
    scores, informations = parts_at(sites, beta + stopped)
    expected = (common[0] - own) / 2.0
    test = SiteScores.of(scores, informations, 2.0, ["a", "b", "c"]).joint_test()
    assert (test.statistic, test.df) == (pytest.approx(expected), 6)
    assert test.pvalue == pytest.approx(stats.chi2.sf(expected, 6))
    form = sum(np.array(quadratic_form(*part)) for part in zip(scores, informations, strict=True))
    masked = joint_test(form, scores.sum(axis=0), informations.sum(axis=0), 2.0)
    assert masked == pytest.approx(test)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_a_direction_without_information_at_a_site_is_not_tested_there(unit):
    sites, (X, y) = least_squares_sites()
    first = sites[0][0]
    first[:, 2] = 0.0
    sites[1][0][:, 2] = sites[1][0][:, 1]
    for one, _ in sites:
        one[:, 1] *= unit
    X = np.concatenate([one for one, _ in sites])
    scores, informations = parts_at(sites, np.linalg.lstsq(X, y, rcond=None)[0])
    ranks = [quadratic_form(*part)[1] for part in zip(scores, informations, strict=True)]
    assert ranks == [2.0, 2.0, 3.0]
    assert quadratic_form(scores[0], 0.0 * informations[0]) == (0.0, 0.0)
    own = quadratic_form(scores[0], informations[0])[0]
    assert own == pytest.approx(scores[0, :2] @ np.linalg.solve(informations[0][:2, :2], scores[0, :2]))


def test_one_site_has_nothing_to_be_compared_with():
    sites, (X, y) = least_squares_sites(sizes=(20,))
    scores, informations = parts_at(sites, np.linalg.lstsq(X, y, rcond=None)[0])
    test = SiteScores.of(scores, informations, 1.0, ["a", "b", "c"]).joint_test()
    assert (test.statistic, test.df) == (pytest.approx(0.0, abs=1e-12), 0) and np.isnan(test.pvalue)
    test = welch_test([SiteWelchTerms(scores[0], informations[0], 17.0)])
    assert (test.statistic, test.df) == (0.0, 0) and np.isnan(test.pvalue)


def test_informations_that_do_not_sum_to_a_positive_definite_matrix_are_refused():
    with pytest.raises(EstimationError, match="a, b"):
        SiteScores.of(np.zeros((2, 2)), np.array([np.eye(2), -np.eye(2)]), 1.0, ["a", "b"])


def test_the_estimate_without_a_site_is_that_of_the_others():
    sites, (X, y) = least_squares_sites()
    beta = np.linalg.lstsq(X, y, rcond=None)[0]
    found = SiteScores.of(*parts_at(sites, beta), 2.0, ["a", "b", "c"])
    errors = np.sqrt(2.0 * np.diag(np.linalg.inv(X.T @ X)))
    np.testing.assert_allclose(found.std_errors, errors)
    estimates, changes = found.without_each(beta)
    for k in range(3):
        others = [np.concatenate(part) for part in zip(*(sites[:k] + sites[k + 1 :]), strict=True)]
        np.testing.assert_allclose(estimates[k], np.linalg.lstsq(*others, rcond=None)[0])
        np.testing.assert_allclose(changes[k], (estimates[k] - beta) / errors)


def test_a_coefficient_that_only_one_site_determines_is_lost_without_it():
    sites, (_, y) = least_squares_sites()
    for one, _ in sites[1:]:
        one[:, 2] = 0.0
    X = np.concatenate([one for one, _ in sites])
    beta = np.linalg.lstsq(X, y, rcond=None)[0]
    estimates, _ = SiteScores.of(*parts_at(sites, beta), 1.0, ["a", "b", "c"]).without_each(beta)
    assert np.isnan(estimates).tolist() == [[False, False, True], [False] * 3, [False] * 3]
    others = [np.concatenate(part) for part in zip(*sites[1:], strict=True)]
    np.testing.assert_allclose(estimates[0, :2], np.linalg.lstsq(others[0][:, :2], others[1], rcond=None)[0])


def test_one_coefficient_gives_welchs_test():
    """Welch (1951): means of groups with variances of their own; statistic and degrees of freedom by hand."""
    rng = np.random.default_rng(4)
    groups = [rng.normal(0.4 * k, 1.0 + k, 8 + 3 * k) for k in range(4)]
    w = np.array([len(one) / one.var(ddof=1) for one in groups])
    means, df = np.array([one.mean() for one in groups]), np.array([len(one) - 1.0 for one in groups])
    k, grand = len(groups), (w @ means) / w.sum()
    unequal = ((1.0 - w / w.sum()) ** 2 / df).sum()
    F = (w @ (means - grand) ** 2 / (k - 1)) / (1.0 + 2.0 * (k - 2) / (k**2 - 1) * unequal)
    parts = [
        SiteWelchTerms(np.array([a * (b - grand)]), np.array([[a]]), c)
        for a, b, c in zip(w, means, df, strict=True)
    ]
    test = welch_test(parts)
    assert (test.statistic, test.df) == (pytest.approx(F), 3)
    assert test.df_denom == pytest.approx((k**2 - 1) / (3.0 * unequal))
    assert test.pvalue == pytest.approx(stats.f.sf(F, 3, test.df_denom))


# ---- hypotheses with degrees of freedom ---------------------------------------------------------------


def test_with_degrees_of_freedom_tests_are_those_of_t_and_f():
    params, cov, names = np.array([1.0, 2.0, 3.0]), np.diag([1.0, 4.0, 2.0]), ["a", "b", "c"]
    found = t_test(params, cov, read_constraints("a = 0, c = 1", names), df=7.0)
    np.testing.assert_allclose(found.tvalue.ravel(), [1.0, np.sqrt(2.0)])
    np.testing.assert_allclose(found.pvalue.ravel(), 2.0 * stats.t.sf([1.0, np.sqrt(2.0)], 7.0))
    found = wald_test(params, cov, read_constraints("a = 0, b = 0", names), df=7.0)
    assert float(found.statistic) == pytest.approx(1.0)
    assert float(found.pvalue) == pytest.approx(stats.f.sf(1.0, 2, 7.0))


@pytest.mark.parametrize(("df", "statistic"), [(None, 2.0), (7.0, 1.0)])
def test_terms_are_tested_with_the_degrees_of_freedom(df, statistic):
    params, cov = np.array([5.0, 1.0, 2.0]), np.diag([1.0, 1.0, 4.0])
    found = wald_test_terms(params, cov, ["Intercept", "g[b]", "g[c]"], ["Intercept", "g", "g"], df=df)
    row = found.table.loc["g"]
    assert (row["statistic"], row["df_constraint"]) == (pytest.approx(statistic), 2)
    expected = stats.chi2.sf(2.0, 2) if df is None else stats.f.sf(1.0, 2, df)
    assert row["pvalue"] == pytest.approx(expected)
    assert ("df_denom" in found.table) == (df is not None)


@pytest.mark.parametrize(
    ("skip", "combine", "terms"),
    [
        (False, (), ["Intercept", "g", "x"]),
        (True, (), ["g"]),
        (True, ("x",), ["g", "x"]),
        (False, ("g",), ["Intercept", "g", "x", "g"]),
    ],
)
def test_terms_of_one_coefficient_are_left_out_on_request(skip, combine, terms):
    names, of = ["Intercept", "g[b]", "g[c]", "x"], ["Intercept", "g", "g", "x"]
    found = wald_test_terms(np.ones(4), np.eye(4), names, of, skip_single=skip, combine_terms=combine)
    assert found.table.index.tolist() == terms
