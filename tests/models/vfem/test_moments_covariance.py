"""Covariance from moments, against the iterative exchange and the numerical Hessian of the rows."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from moments_cases import four_clients, moments_of, theta_of
from oracle import ITERATIVE, packed, simulate
from pattern_moments import moments_of_arrays

from fedstat.errors import NotAvailableError
from fedstat.models.vertical.joint_normal.blocks import BlocksPoint
from fedstat.models.vertical.joint_normal.fit import fit_joint_model
from fedstat.models.vertical.joint_normal.likelihood import JointNormalPoint, em_step, m_step
from fedstat.models.vertical.moments import StandardizedMoments
from fedstat.models.vfem.covariance.from_moments import (
    moments_covariance,
    sem_covariance,
)
from fedstat.models.vfem.iteration.state import fit_by_site
from fedstat.models.vfem.outcome import origin_jacobian

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TIGHT = ITERATIVE | {"tol": 1e-11, "cross_products": "exact"}
CORRELATED = "four correlated clients, MAR"
STUDIES = {
    "three clients, MAR": lambda: simulate(seed=0, n=500),
    "four clients, MCAR": lambda: four_clients(seed=6, missing="mcar"),
    "four clients, MAR": lambda: four_clients(seed=7),
    CORRELATED: lambda: four_clients(seed=8, between=0.7),
}


@pytest.fixture(scope="module", params=STUDIES)
def study(request):
    return STUDIES[request.param]()


@pytest.fixture(scope="module")
def fit(study):
    return fit_joint_model(moments_of(study), "independent")


def assert_close(one, other, tolerance):
    scale = np.sqrt(np.diag(other))
    np.testing.assert_allclose(one / np.outer(scale, scale), other / np.outer(scale, scale), atol=tolerance)


@pytest.mark.parametrize(
    ("name", "cov_type"),
    [*((name, "observed") for name in STUDIES), (CORRELATED, "expected"), (CORRELATED, "sem")],
)
def test_every_type_is_that_of_the_iterative_exchange(name, cov_type):
    """Information of (a, s2, beta_1, mu_1, ...); the sites here allow small groups."""
    study = STUDIES[name]()
    fit = fit_joint_model(moments_of(study), "independent")
    expected = study.model().fit(**packed(cov_type=cov_type, **TIGHT)).covariance.psi
    assert_close(moments_covariance(fit, cov_type).psi, expected, 1e-6)


def test_observed_is_the_inverse_numerical_hessian_of_the_rows(study, fit):
    pooled = study.pooled()
    V = np.linalg.inv(-pooled.hessian(theta_of(study, fit)))
    J = origin_jacobian(fit_by_site(fit), tuple(study.columns))
    ours = J @ moments_covariance(fit).psi @ J.T
    assert_close(ours, V[np.ix_(pooled.reported, pooled.reported)], 1e-6)


def test_supplemented_em_is_the_observed_information(fit):
    """Its Jacobian is exact, so the two agree to rounding."""
    sem, observed = sem_covariance(fit), moments_covariance(fit)
    assert_close(sem.psi, observed.psi, 1e-9)
    assert sem.asymmetry < 1e-10
    assert sem.how == observed.how == "moments"


def test_expected_differs_where_sites_are_correlated():
    fit = fit_joint_model(moments_of(four_clients(seed=8, between=1.0)), "independent")
    observed, expected = (np.diag(moments_covariance(fit, t).psi) for t in ("observed", "expected"))
    assert np.abs(expected / observed - 1.0).max() > 0.2
    assert moments_covariance(fit, "expected").how == "none"


def test_one_site_with_every_entity_has_the_covariance_of_least_squares():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3)) * [1.0, 50.0, 0.1] + [0.0, 7.0, 1.0]
    y = X @ [1.0, 0.02, 3.0] + rng.normal(size=200)
    fit = fit_joint_model(moments_of_arrays(X, y, [3]), "independent")
    ols = sm.OLS(y, sm.add_constant(X)).fit()
    for cov_type in ("observed", "expected", "sem"):
        psi = moments_covariance(fit, cov_type).psi
        J = origin_jacobian(fit_by_site(fit), fit.moments.sites)
        np.testing.assert_allclose(J @ psi @ J.T, ols.cov_params() * ols.df_resid / 200, rtol=1e-8)
        assert psi[1, 1] == pytest.approx(2.0 * fit.s2**2 / 200, rel=1e-9)
        np.testing.assert_allclose(psi[5:, 5:], np.cov(X.T, bias=True) / 200, rtol=1e-8, atol=1e-14)


def test_robust_says_why_there_is_none(fit):
    with pytest.raises(NotAvailableError, match="random group"):
        moments_covariance(fit, "robust")


def test_the_estimate_is_a_fixed_point_of_the_exact_em_map(fit):
    at, edges = fit.point, fit.moves.edges
    mean, cov = em_step(fit.moments, at.mean, at.cov)
    Q, beta, s2 = m_step(cov, edges)
    for found, expected in ((mean, at.mean), (Q, at.Q), (beta, at.beta), (s2, at.s2)):
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_em_from_no_effects_climbs_to_the_estimate():
    moments = moments_of(simulate(seed=0, n=500))
    fit, standard = fit_joint_model(moments, "independent"), StandardizedMoments(moments)
    at = BlocksPoint.start(standard).with_concentration()
    for _ in range(300):
        mean, cov = em_step(fit.moments, at.mean, at.cov)
        Q, beta, s2 = m_step(cov, fit.moves.edges)
        at = JointNormalPoint(mean[:-1], mean[-1], beta, s2, Q)
    np.testing.assert_allclose(at.beta, fit.point.beta, atol=1e-8)
    np.testing.assert_allclose(at.covariates, fit.point.covariates, atol=1e-8)
    assert at.s2 == pytest.approx(fit.point.s2, rel=1e-8)
