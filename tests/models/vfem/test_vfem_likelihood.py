"""Optimum, standard errors and log-likelihood against brute force on the pooled data."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from oracle import ITERATIVE, Pooled, Study, packed, simulate
from scipy.stats import multivariate_normal

import fedstat as fs

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TIGHT = ITERATIVE | {"tol": 1e-11, "cross_products": "exact"}


@dataclass(frozen=True)
class Solved:
    study: Study
    model: fs.VFEMRegression
    pooled: Pooled
    theta: np.ndarray
    information: np.ndarray
    fits: dict = field(default_factory=dict)

    def fit(self, cov_type, **options):
        """Each fit once: the tests look at it, and change nothing."""
        request = (cov_type, *options.items())
        if request not in self.fits:
            self.fits[request] = self.model.fit(**packed(cov_type=cov_type, **(TIGHT | options)))
        return self.fits[request]

    def standard_errors(self, covariance):
        return np.sqrt(np.diag(covariance)[self.pooled.reported])


@pytest.fixture(scope="module", params=["Bank", "Registry"])
def solved(request):
    """A fit and its numerical information: the response with columns at its own site, or alone."""
    study = simulate(holder=request.param)
    model = study.model()
    result = model.fit(**packed(cov_type="none", **TIGHT))
    pooled, theta = study.pooled(), study.theta(model, result)
    return Solved(study, model, pooled, theta, -pooled.hessian(theta))


def centered(pooled, theta):
    """Jacobian of theta by (a, ...), a = beta0 + sum mu'beta."""
    J = np.eye(len(theta))
    p = sum(pooled.sizes)
    J[0, 2 : 2 + p], J[0, 2 + p : 2 + 2 * p] = -theta[2 + p : 2 + 2 * p], -theta[2 : 2 + p]
    return J


def cross_terms(pooled, theta):
    """Sum of u_j u_k'/v over the entities that two clients both have, at the places of beta in theta."""
    _, s2, betas, mus, Sigmas = pooled.unpack(theta)
    t = np.array([b @ S @ b for b, S in zip(betas, Sigmas, strict=True)])
    v = s2 + ~pooled.seen @ t
    U = np.nan_to_num(np.column_stack([X - m for X, m in zip(pooled.blocks, mus, strict=True)]))
    out = np.zeros((len(theta), len(theta)))
    site = np.repeat(np.arange(len(pooled.sizes)), pooled.sizes)
    between = site[:, None] != site
    out[2 : 2 + len(site), 2 : 2 + len(site)] = (U.T / v) @ U * between
    return out


def test_the_factored_likelihood_is_the_joint_normal_one(solved):
    """The oracle itself: p(seen columns, y) of each entity from the joint law of all columns."""
    pooled, theta = solved.pooled, solved.theta * 1.01
    mean, C = pooled.joint_moments(theta)
    rows = np.column_stack([*pooled.blocks, pooled.y])
    direct = []
    for row in rows:
        has = np.flatnonzero(~np.isnan(row))
        direct.append(multivariate_normal.logpdf(row[has], mean[has], C[np.ix_(has, has)]))
    np.testing.assert_allclose(pooled.loglike_obs(theta), direct, rtol=1e-10)


def test_score_vanishes_in_every_parameter(solved):
    assert len(np.unique(solved.pooled.seen, axis=0)) == 8
    assert solved.pooled.relative_score(solved.theta, solved.information) < 1e-6
    elsewhere = solved.theta * (1.0 + 1e-4)
    assert solved.pooled.relative_score(elsewhere, solved.information) > 1e-3


def test_default_tolerances_reach_the_optimum_too(solved):
    result = solved.model.fit(**packed(cov_type="none", **ITERATIVE))
    assert solved.pooled.relative_score(solved.study.theta(solved.model, result), solved.information) < 1e-6


def test_optimum_is_a_maximum(solved):
    assert np.linalg.eigvalsh(solved.information).min() > 0.0
    rng = np.random.default_rng(3)
    root = np.linalg.cholesky(np.linalg.inv(solved.information))
    best = solved.pooled.loglike(solved.theta)
    for step in 0.5 * rng.normal(size=(20, len(solved.theta))):
        assert solved.pooled.loglike(solved.theta + root @ step) < best


def test_observed_covariance_is_the_inverse_numerical_hessian(solved):
    result = solved.fit("observed")
    V = np.linalg.inv(solved.information)
    np.testing.assert_allclose(result.bse, solved.standard_errors(V), rtol=1e-5)
    at = np.ix_(solved.pooled.reported, solved.pooled.reported)
    scale = np.sqrt(np.diag(V[at]))
    np.testing.assert_allclose(
        result.cov_params() / np.outer(scale, scale), V[at] / np.outer(scale, scale), atol=1e-6
    )


def test_covariance_of_means_and_variance_is_that_of_the_hessian(solved):
    """The covariance object holds (a, s2, beta_k, mu_k, ...) by client."""
    psi = solved.fit("observed").covariance.psi
    J = np.linalg.inv(centered(solved.pooled, solved.theta))
    V = J @ np.linalg.inv(solved.information) @ J.T
    p = sum(solved.pooled.sizes)
    edges = 2 + np.cumsum([0, *solved.pooled.sizes])
    places = [0, 1]
    for start, stop in pairwise(edges):
        places += [*range(start, stop), *range(start + p, stop + p)]
    V = V[np.ix_(places, places)]
    scale = np.sqrt(np.diag(V))
    np.testing.assert_allclose(psi / np.outer(scale, scale), V / np.outer(scale, scale), atol=1e-6)


def test_robust_covariance_is_the_sandwich_of_the_scores_of_entities(solved):
    scores = solved.pooled.scores(solved.theta)
    np.testing.assert_allclose(scores.sum(axis=0), solved.pooled.score(solved.theta), atol=1e-6)
    bread = np.linalg.inv(solved.information)
    sandwich = solved.standard_errors(bread @ scores.T @ scores @ bread)
    np.testing.assert_allclose(solved.fit("robust").bse, sandwich, rtol=1e-5)
    assert np.abs(sandwich / solved.standard_errors(bread) - 1.0).max() > 0.01


def test_sem_covariance_is_the_observed_one(solved):
    sem, observed = solved.fit("sem"), solved.fit("observed")
    np.testing.assert_allclose(sem.bse, observed.bse, rtol=1e-4)
    assert sem.covariance.asymmetry < 1e-6


def test_expected_covariance_leaves_out_the_products_between_sites(solved):
    """The numerical information of (a, ...), with the sums of u_j u_k'/v between clients taken out."""
    result = solved.fit("expected")
    J = centered(solved.pooled, solved.theta)
    information = J.T @ solved.information @ J - cross_terms(solved.pooled, solved.theta)
    V = J @ np.linalg.inv(information) @ J.T
    np.testing.assert_allclose(result.bse, solved.standard_errors(V), rtol=1e-5)
    assert result.covariance.how == "none"
    np.testing.assert_allclose(result.bse, solved.fit("observed").bse, rtol=0.05)


def test_expected_covariance_asks_for_no_products(solved):
    steps = set(solved.fit("expected").ledger.to_frame()["step"])
    assert "information" in steps
    assert not steps & {"sketch", "release_columns", "multiply_columns"}


@pytest.mark.parametrize("kind", ["structured", "gaussian"])
def test_sketched_standard_errors_approach_the_exact_ones(solved, kind):
    exact = solved.fit("observed").bse
    size = 4_000
    sketched = solved.fit("observed", cross_products="sketch", sketch=kind, sketch_size=size)
    assert 0.0 < np.abs(sketched.bse / exact - 1.0).max() < 3.0 * np.sqrt(2.0 / size)
    assert sketched.covariance.how == "sketch" and sketched.covariance.size >= size
    assert sketched.covariance.error < 3.0 / np.sqrt(size)


@pytest.mark.parametrize("kind", ["structured", "gaussian"])
def test_sketches_find_the_products_of_correlated_sites(kind):
    """Where they matter: "expected" errors, which take them as zero, are far off."""
    study = simulate(seed=21, n=400, holder="Registry", missing="none")
    for name, other in {"court0": "bank0", "tax1": "court2"}.items():
        study.table[name] = study.table[name] / study.table[name].std() + study.table[other]
    model = study.model()
    exact = model.fit(**packed(cross_products="exact", **ITERATIVE)).bse
    sketched = model.fit(**packed(cross_products="sketch", sketch=kind, sketch_size=4_000, **ITERATIVE)).bse
    assert np.abs(sketched / exact - 1.0).max() < 0.08
    assert np.abs(model.fit(cov_type="expected").bse / exact - 1.0).max() > 0.2


def test_llf_is_the_likelihood_less_its_largest_value_for_the_blocks(solved):
    result = solved.fit("none")
    pooled = solved.pooled
    assert result.llf == pytest.approx(pooled.loglike(solved.theta) - pooled.saturated(), rel=1e-10)
    k = 1 + sum(pooled.sizes)
    assert result.aic == pytest.approx(-2 * result.llf + 2 * k)
    assert result.bic == pytest.approx(-2 * result.llf + k * np.log(len(pooled.y)))


def test_rsquared_is_that_of_an_entity_with_every_block(solved):
    _, s2, betas, _, Sigmas = solved.pooled.unpack(solved.theta)
    explained = sum(b @ S @ b for b, S in zip(betas, Sigmas, strict=True))
    result = solved.fit("none")
    assert result.rsquared == pytest.approx(1 - s2 / (s2 + explained), rel=1e-9)
    n, p = len(solved.pooled.y), sum(solved.pooled.sizes)
    assert result.rsquared_adj == pytest.approx(1 - (1 - result.rsquared) * (n - 1) / (n - p - 1))
    assert result.scale == pytest.approx(s2)


def test_fitted_values_and_residuals_are_conditional_means(solved):
    result = solved.fit("none")
    mean, _ = solved.pooled.predict(solved.theta)
    np.testing.assert_allclose(result.fittedvalues, mean, rtol=1e-8)
    np.testing.assert_allclose(result.resid, solved.pooled.y - mean, rtol=1e-7, atol=1e-8)
    assert list(result.fittedvalues.index) == list(solved.study.table.index)


def test_estimates_are_near_the_truth_though_missingness_depends_on_the_response():
    study = simulate(seed=11, n=20_000, holder="Registry")
    result = study.model().fit(cov_type="observed")
    truth = [1.0, 0.5, -0.3, 0.4, 0.0, -0.6, 0.05, 3.0]
    z = (result.params - truth) / result.bse
    assert np.abs(z).max() < 3.5
    complete = study.model().fit(method="cc", cov_type="observed")
    assert np.abs((complete.params - truth) / complete.bse).max() > 5.0
