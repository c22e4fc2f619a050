"""Continuous columns: densities and maxima against what pooled programs and general minimizers find."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modality_cases import ascend, continuous, gaussian, objective
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture

from fedstat.errors import ModelError
from fedstat.models.m2sem.modality.gaussian import FLOOR, GaussianModality


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("covariates", [0, 2])
def test_densities_are_those_of_the_normal_law(missing, covariates):
    m, r = gaussian(n=40, missing=missing, covariates=covariates)
    ascend(m, r, steps=3)
    x, _, z = continuous(n=40, missing=missing, covariates=covariates)
    f = m.log_densities()
    mean = m.profile()
    slopes = m.B[:, 1:] * m._scale[:, None]
    cov = (m.L @ m.L.T + np.diag(m.psi)) * np.outer(m._scale, m._scale)
    for i in range(40):
        seen = ~np.isnan(x[i])
        if not seen.any():
            assert np.allclose(f[i], 0.0, atol=1e-12)
            continue
        for k in range(3):
            at = mean[k] + (slopes @ z[i] if covariates else 0.0)
            distribution = multivariate_normal(at[seen], cov[np.ix_(seen, seen)])
            assert f[i, k] == pytest.approx(distribution.logpdf(x[i, seen]), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    missing=st.sampled_from([0.0, 0.2, 0.5]),
    covariates=st.integers(0, 2),
    row=st.sampled_from([0.0, 1.0, 20.0]),
    means=st.sampled_from([0.0, 3.0, 40.0]),
    noise=st.sampled_from([0.02, 1.0]),
)
def test_no_step_lowers_the_objective(seed, missing, covariates, row, means, noise):
    m, r = gaussian(seed, n=60, missing=missing, covariates=covariates, noise=noise)
    rng = np.random.default_rng(seed)
    values = ascend(m, r * rng.uniform(0.0, 2.0, 60)[:, None], row * rng.random(m.P), means, steps=15)
    assert np.diff(values).min() > -1e-8 * np.abs(values).max()


def test_one_cluster_is_factor_analysis():
    x, _, _ = continuous(n=300, P=8, Q=2)
    m = GaussianModality(x, list("abcdefgh"), 2)
    m.begin(1)
    values = ascend(m, np.ones((300, 1)), steps=3000)
    peer = FactorAnalysis(2, tol=1e-12, max_iter=20_000, svd_method="lapack").fit(x)
    assert values[-1] == pytest.approx(300 * peer.score(x), abs=1e-4)


def test_identity_loadings_are_a_diagonal_mixture():
    """Of L = I in the columns' units the errors' variances and one add up: scikit-learn's tied mixture."""
    x, _, _ = continuous(n=150, P=2, Q=2)
    m = GaussianModality(x, ["a", "b"], 2)
    m.means, m.B = np.array([[-1.0, 0.5], [0.3, 0.2], [1.0, -1.0]]), np.zeros((2, 1))
    m.L, m.psi = np.diag(1.0 / m._scale), np.array([0.7, 1.3]) / m._scale**2
    peer = GaussianMixture(3, covariance_type="diag")
    peer.weights_, peer.means_ = np.full(3, 1 / 3), m.means + m._center
    peer.covariances_ = np.tile([1.7, 2.3], (3, 1))
    peer.precisions_cholesky_ = peer.covariances_**-0.5
    f = logsumexp(m.log_densities(), axis=1) - np.log(3)
    assert np.allclose(f, peer.score_samples(x), rtol=1e-10)


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_penalized_maximum_satisfies_its_conditions(missing):
    """Numerical slopes of the observed objective: zero where free, within the penalty where zero."""
    m, r = gaussian(1, n=120, P=8, missing=missing, noise=2.0)
    rows, means = np.array([2.0, 30.0, 2.0, 200.0, 2.0, 2.0, 2.0, 300.0]), 5.0
    ascend(m, r, rows, means, steps=3000)
    at, h = m.state(), 1e-5
    slopes = np.empty(len(at))
    for j in range(len(at)):
        pair = []
        for sign in (1, -1):
            m.restore(at + sign * h * (np.arange(len(at)) == j))
            pair.append((r * m.log_densities()).sum())
        slopes[j] = (pair[0] - pair[1]) / (2 * h)
    m.restore(at)
    by_column, by_means = slopes[: 8 * 4].reshape(8, 4), slopes[8 * 4 :].reshape(3, 2)
    assert np.abs(by_column[:, [0, 3]]).max() < 1e-3 and m.psi.min() > FLOOR
    norms = m.row_norms()
    assert (norms == 0.0).any() and (norms > 0.0).any()
    for p in range(8):
        if norms[p] == 0.0:
            assert np.linalg.norm(by_column[p, 1:3]) <= rows[p]
        else:
            assert np.allclose(by_column[p, 1:3], rows[p] * m.L[p] / norms[p], atol=2e-3)
    assert np.allclose(by_means, means * m.means / np.linalg.norm(m.means), atol=2e-3)


def test_means_are_zero_from_their_bound_on():
    m, r = gaussian(2)
    m.means = np.zeros_like(m.means)
    at = m.state()
    m.log_densities()
    N, e = r.sum(axis=0), m.factors_by_cluster()
    bound = np.linalg.norm(np.einsum("nk,nkq->kq", r, e))
    for factor, zero in ((1 + 1e-9, True), (1 - 1e-6, False)):
        m.restore(at)
        m.log_densities()
        m.improve(r, 0.0, factor * bound)
        assert np.any(m.means) != zero
    assert N.min() > 0


def test_a_state_comes_back():
    m, r = gaussian(1, missing=0.1)
    f = m.log_densities()
    kept = m.state()
    ascend(m, r, steps=2)
    m.restore(kept)
    assert np.array_equal(m.log_densities(), f)


def test_support_and_silence_are_kept():
    m, r = gaussian(1)
    m.support[2:] = False
    m.silent = True
    m.improve(r)
    m.improve(r)
    assert not m.L[2:].any() and m.L[:2].any() and not m.means.any()
    assert m.free_parameters() == 6 + 6 + 4 - 1
    m.silent = False
    m.improve(r)
    assert m.free_parameters() == 6 + 6 + 4 - 1 + 2 * 2


def test_separation_is_free_of_the_factors_coordinates():
    m, r = gaussian(5)
    ascend(m, r, steps=10)
    w = r.mean(axis=0)
    at = m.separation(w)
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 2)))[0]
    m.L, m.means = m.L @ turn, m.means @ turn + 3.0
    assert m.separation(w) == pytest.approx(at, rel=1e-10)
    m.L = m.L * 1e-4
    assert m.separation(w) < 1e-4


def test_errors_that_vanish_are_held_at_the_floor():
    x, r, _ = continuous(0)
    x[:, 1] = x[:, 0]
    m = GaussianModality(x, list("abcdef"), 2)
    m.begin(3)
    ascend(m, r, steps=200)
    assert m.psi.min() == FLOOR and set(m.at_floor) == {"a", "b"}
    assert np.isfinite(objective(m, r))


def test_columns_that_cannot_serve():
    x, _, _ = continuous(0)
    with pytest.raises(ModelError, match="at least as many columns as factors"):
        GaussianModality(x[:, :1], ["a"], 2)
    x[:, 1] = 4.0
    with pytest.raises(ModelError, match="that vary; received b"):
        GaussianModality(x, list("abcdef"), 2)
