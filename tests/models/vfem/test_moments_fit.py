"""The fit from moments is that of the iterative exchange, and a maximum of the likelihood of the rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from moments_cases import four_clients, moments_of, theta_of
from oracle import ITERATIVE, packed, simulate
from pattern_moments import complete, filled, moments_of_arrays

from fedstat.errors import EstimationError
from fedstat.models.vertical.joint_normal.blocks import (
    BlocksPoint,
    blocks_likelihood,
    differentiate_blocks,
    variance_information,
)
from fedstat.models.vertical.joint_normal.fit import all_effects, fit_joint_model
from fedstat.models.vertical.joint_normal.model import JointNormalModel
from fedstat.models.vertical.moments import StandardizedMoments
from fedstat.models.vfem.iteration.state import fit_by_site
from fedstat.models.vfem.submodels import leave_one_out

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TIGHT = ITERATIVE | {"tol": 1e-10, "cov_type": "expected"}
STUDIES = {
    "three clients, MAR": lambda: simulate(seed=3, n=500),
    "three clients, few": lambda: simulate(seed=4, n=90, holder="Registry"),
    "complete": lambda: simulate(seed=5, n=300, missing="none"),
    "four clients, MCAR": lambda: four_clients(seed=6, missing="mcar"),
    "four clients, MAR": lambda: four_clients(seed=7),
    "four correlated clients, MAR": lambda: four_clients(seed=8, between=1.0),
}


@pytest.fixture(scope="module", params=STUDIES)
def study(request):
    return STUDIES[request.param]()


@pytest.fixture(scope="module")
def mar():
    return four_clients(seed=7)


def divisor_ratio(result):
    """Variance with the divisor of maximum likelihood, relative to that of a fit by least squares."""
    return result.df_resid / result.nobs if result.use_t else 1.0


def test_the_fit_is_that_of_the_iterative_exchange(study):
    result, fit = study.model().fit(**packed(**TIGHT)), fit_joint_model(moments_of(study), "independent")
    assert result.converged and fit.converged
    assert np.abs((fit.params - result.params) / result.bse).max() < 1e-6
    assert fit.log_likelihood == pytest.approx(result.llf, rel=1e-11)
    # Least squares explains the sample's variance; otherwise that of the model with independent blocks.
    explained = 1.0 - fit.s2 / study.table["y"].var(ddof=0) if result.use_t else fit.rsquared
    assert explained == pytest.approx(result.rsquared, rel=1e-8)
    ours, theirs = fit_by_site(fit), result._fit
    assert (ours.a, ours.s2) == pytest.approx((theirs.a, theirs.s2), rel=1e-8)
    np.testing.assert_allclose(ours.response_moments, theirs.response_moments, rtol=1e-10)
    assert list(ours.beta) == list(theirs.beta)
    for site in study.columns:
        spread = study.table[study.columns[site]].std()
        np.testing.assert_allclose((ours.mu[site] - theirs.mu[site]) / spread, 0.0, atol=1e-8)
        assert ours.t[site] == pytest.approx(theirs.t[site], rel=1e-7)


def test_the_score_of_the_rows_vanishes_in_every_parameter(study):
    """Sigma included, which is maximized out."""
    pooled, theta = study.pooled(), theta_of(study, fit_joint_model(moments_of(study), "independent"))
    information = -pooled.hessian(theta)
    assert pooled.relative_score(theta, information) < 1e-7
    assert np.linalg.eigvalsh(information).min() > 0.0


def test_the_likelihood_of_moments_is_that_of_the_rows(study):
    fit, pooled = fit_joint_model(moments_of(study), "independent"), study.pooled()
    expected = pooled.loglike(theta_of(study, fit)) - pooled.saturated()
    assert fit.log_likelihood == pytest.approx(expected, rel=1e-11)


def random_point(standard, seed=0):
    P, K = standard.member.shape
    by = 0.4 * np.random.default_rng(seed).normal(size=2 + 2 * P + K)
    return BlocksPoint.start(standard).moved(by, np.ones(P, dtype=bool))


@pytest.mark.parametrize("zero", [[], [1, 4]])
def test_derivatives_are_those_of_central_differences(mar, zero):
    """Of all parameters, and of those that remain if some coefficients are fixed at zero."""
    standard, step = StandardizedMoments(moments_of(mar)), 1e-5
    P, K = standard.member.shape
    effects = np.isin(np.arange(P), zero, invert=True)
    point = random_point(standard).restricted(effects)
    at = differentiate_blocks(point, effects)

    def ends(function, i):
        by = np.zeros(2 + len(effects) - len(zero) + P + K)
        by[i] = step
        return [function(point.moved(sign * by, effects)) for sign in (1, -1)]

    score, information = [], []
    for i in range(len(at.score)):
        up, down = ends(blocks_likelihood, i)
        score.append((up - down) / (2 * step))
        up, down = ends(lambda p: differentiate_blocks(p, effects).score, i)
        information.append(-(up - down) / (2 * step))
    assert at.log_likelihood == blocks_likelihood(point)
    np.testing.assert_allclose(at.score, score, rtol=1e-6, atol=1e-6 * np.abs(score).max())
    np.testing.assert_allclose(at.information, information, atol=1e-7 * np.abs(information).max())
    expected = differentiate_blocks(point, effects, expected=True)
    assert np.linalg.eigvalsh(expected.information).min() > 0.0
    assert variance_information(point) == pytest.approx(expected.information[1, 1], rel=1e-12)


def test_a_first_step_changes_a_variance_at_most_by_a_factor_e(mar):
    moments = StandardizedMoments(moments_of(mar)).moments
    P, K = len(moments.names), len(moments.sizes)
    blocks = JointNormalModel(moments, all_effects(np.eye(P, dtype=bool)), profiled=True)
    for place, by, share in (
        (1, 4.0, 0.25),
        (1, 0.5, 1.0),
        (1, 0.0, 1.0),
        (-1, -2.0, 0.5),
        (-K, 2.0, 0.5),
        (-K - 1, 9.0, 1.0),
    ):
        direction = np.zeros(2 + 2 * P + K)
        direction[place] = by
        assert blocks.longest(direction) == share
        assert replace(blocks, profiled=False).longest(direction) == 1.0


@pytest.mark.parametrize("jointly", [False, True])
def test_the_likelihood_of_the_fitted_model_is_that_of_the_fit(mar, jointly):
    fit = fit_joint_model(moments_of(mar), "independent", jointly=jointly)
    assert fit.model.profiled is not jointly
    assert fit.model.log_likelihood(fit.point) == pytest.approx(fit.log_likelihood, rel=1e-12)
    assert fit.log_likelihood == pytest.approx(fit_joint_model(moments_of(mar), "independent").log_likelihood)


def test_sigma_is_the_largest_likelihood_given_the_rest(mar):
    """At a point that is no optimum: the score of Sigma vanishes, and the profile is the full likelihood."""
    moments = moments_of(mar)
    fit = fit_joint_model(moments, "independent", start=random_point(StandardizedMoments(moments)), maxiter=1)
    assert not fit.converged and len(fit.trace) == 1
    pooled, theta = mar.pooled(), theta_of(mar, fit)
    t = [b @ S @ b for b, S in zip(*np.array(pooled.unpack(theta), dtype=object)[[2, 4]], strict=True)]
    np.testing.assert_allclose(t, fit.t, rtol=1e-9)
    assert fit.log_likelihood == pytest.approx(pooled.loglike(theta) - pooled.saturated(), rel=1e-11)


def test_one_site_with_every_entity_is_least_squares():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3)) * [1.0, 50.0, 0.1] + [0.0, 7.0, 1.0]
    y = X @ [1.0, 0.02, 3.0] + rng.normal(size=200)
    fit, ols = (
        fit_joint_model(moments_of_arrays(X, y, [3]), "independent"),
        sm.OLS(y, sm.add_constant(X)).fit(),
    )
    np.testing.assert_allclose(fit.params, ols.params, rtol=1e-9)
    assert fit.log_likelihood == pytest.approx(ols.llf, rel=1e-12)
    assert fit.rsquared == pytest.approx(ols.rsquared, rel=1e-10)
    assert fit.s2 == pytest.approx(ols.ssr / 200, rel=1e-10)
    np.testing.assert_allclose(fit.mu, X.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(fit.cov[:-1, :-1], np.cov(X.T, bias=True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["cc", "impute"])
def test_complete_and_filled_moments_are_the_other_methods(mar, method):
    moments = moments_of(mar)
    fit = fit_joint_model(complete(moments) if method == "cc" else filled(moments), "independent")
    result = mar.model().fit(**packed(method=method, **TIGHT))
    assert np.abs((fit.params - result.params) / result.bse).max() < 1e-6
    assert fit.log_likelihood == pytest.approx(result.llf, rel=1e-10)
    assert fit.s2 == pytest.approx(result.scale * divisor_ratio(result), rel=1e-8)


def test_the_order_of_the_sites_does_not_matter(mar):
    order = ["C", "A", "D", "B"]
    turned = replace(mar, columns={site: mar.columns[site] for site in order})
    one, other = (
        fit_joint_model(moments_of(mar), "independent"),
        fit_joint_model(moments_of(turned), "independent"),
    )
    place = [mar.covariates.index(name) for name in turned.covariates]
    np.testing.assert_allclose(one.beta[place], other.beta, rtol=1e-9)
    np.testing.assert_allclose(one.cov[np.ix_(place, place)], other.cov[:-1, :-1], rtol=1e-9, atol=1e-12)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-13)


def test_few_steps_end_at_the_optimum_and_never_fall(study):
    fit = fit_joint_model(moments_of(study), "independent")
    heights = [row.log_likelihood for row in fit.trace]
    assert len(fit.trace) < 15 and fit.trace[-1].move == "newton"
    assert np.diff(heights).min() > -1e-9 * abs(heights[-1])
    assert fit.trace[-1].score <= 1e-9


def test_any_start_ends_there(mar):
    standard = StandardizedMoments(moments_of(mar))
    reference = fit_joint_model(standard, "independent")
    for seed in range(10):
        fit = fit_joint_model(standard, "independent", start=random_point(standard, seed))
        np.testing.assert_allclose(fit.params, reference.params, rtol=1e-7)
    assert len(fit_joint_model(standard, "independent", start=reference.point).trace) == 1


def test_a_fit_that_stops_early_says_so(mar):
    fit = fit_joint_model(moments_of(mar), "independent", maxiter=3)
    assert not fit.converged and "largest number" in fit.reason and len(fit.trace) == 3


def nearly_exact(n, noise, seed):
    """Blocks that explain all but little of the response, and are often missing."""
    study = simulate(seed=seed, n=n, holder="Registry", missing="none")
    X, beta = study.table[study.covariates], np.array([0.5, -0.3, 0.4, 0.0, -0.6, 0.05, 3.0])
    mean = 1.0 + X @ beta
    table = study.table.assign(y=mean + noise * (study.table["y"] - mean))
    rng = np.random.default_rng(seed)
    for names, share in zip(study.columns.values(), (0.5, 0.7, 0.6), strict=True):
        table.loc[rng.random(n) < share, names] = np.nan
    return replace(study, table=table)


@pytest.mark.parametrize(("noise", "seed"), [(0.1, 1), (0.1, 3), (0.01, 3)])
def test_blocks_that_explain_nearly_everything_converge(noise, seed):
    study = nearly_exact(400, noise, seed)
    fit = fit_joint_model(moments_of(study), "independent")
    assert fit.converged and len(fit.trace) < 30
    pooled, theta = study.pooled(), theta_of(study, fit)
    assert pooled.relative_score(theta, -pooled.hessian(theta)) < 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_a_likelihood_without_a_maximum_is_explained(seed):
    """Fewer complete entities than coefficients, which reproduce their response without error."""
    study = nearly_exact(60, 0.01, seed)
    with pytest.raises(EstimationError, match=r"variance goes to zero.*\d+ of the 60 entities are complete"):
        fit_joint_model(moments_of(study), "independent")


def test_columns_that_are_one_across_sites_are_refused():
    rng = np.random.default_rng(2)
    x, z = rng.normal(size=(2, 100))
    moments = moments_of_arrays(np.column_stack([x, z, x]), x + rng.normal(size=100), [2, 1])
    with pytest.raises(EstimationError, match="collinear across sites"):
        fit_joint_model(moments, "independent")


# ---- models within the one at hand -----------------------------------------------------------


@pytest.mark.parametrize("columns", [["a1", "b0", "c0", "c2", "d0", "d1"], ["a0", "c1"], ["b0", "d0", "d1"]])
def test_a_submodel_is_the_iterative_fit_of_its_formula(mar, columns):
    fit = fit_joint_model(moments_of(mar).submodel(columns), "independent")
    result = mar.model("y ~ " + " + ".join(columns)).fit(**packed(**TIGHT))
    assert np.abs((fit.params - result.params) / result.bse).max() < 1e-6
    assert fit.log_likelihood == pytest.approx(result.llf, rel=1e-11)


def test_leaving_out_each_column_compares_nested_fits(mar):
    left = leave_one_out(fit_joint_model(moments_of(mar), "independent"))
    full = mar.model().fit(**packed(**TIGHT))
    for j in (1, 2, 6):  # one of two columns, a client's only one, and another
        names = [name for name in mar.covariates if name != mar.covariates[j]]
        result = mar.model("y ~ " + " + ".join(names)).fit(**packed(**TIGHT))
        test = full.compare_lr_test(result)
        assert left.statistic[j] == pytest.approx(test.statistic, rel=1e-6)
        assert left.pvalue[j] == pytest.approx(test.pvalue, rel=1e-5)
        assert left.rsquared[j] == pytest.approx(result.rsquared, rel=1e-7)
        assert np.isnan(left.params[j]).nonzero()[0].tolist() == [1 + j]
        assert np.nanmax(np.abs(left.params[j][~np.isnan(left.params[j])] / result.params - 1.0)) < 1e-5
    frame = left.to_frame()
    assert list(frame.index) == mar.covariates and frame.loc["b0", "site"] == "B"
    assert frame["pvalue"].idxmax() == "c1"
