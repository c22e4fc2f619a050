"""ADMM with noise in every round: the optimum without noise, and what its account counts."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from noisy_admm import noisy_admm
from pooled_path import glm_path

from fedstat.errors import ModelError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.privacy.gaussian_dp import delta_of

FAMILIES = {
    "Gaussian": sm.families.Gaussian(),
    "Binomial": sm.families.Binomial(),
    "Poisson": sm.families.Poisson(),
}


def make(family, n=300, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 9)) * [1, 10, 0.1, 1, 1, 5, 1, 1, 1] + 3.0
    eta = 0.6 * (X[:, 0] - 3.0) - 0.5 * (X[:, 4] - 3.0)
    mean = FAMILIES[family].link.inverse(eta)
    draw = {"Gaussian": rng.normal, "Binomial": lambda m: rng.random(n) < m, "Poisson": rng.poisson}
    return [X[:, :3], X[:, 3:5], X[:, 5:]], np.asarray(draw[family](mean), dtype=float)


def fit(blocks, y, family, penalty="lasso", noise=0.0, **options):
    return noisy_admm(
        blocks,
        y,
        DistributionSpec.of(FAMILIES[family]),
        Penalty(penalty),
        noise=noise,
        random=np.random.default_rng(1),
        **options,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_without_noise_it_is_the_fit_of_pooled_rows(family):
    blocks, y = make(family)
    # The response is standardized: so are its lambdas.
    unit = y.std() if family == "Gaussian" else 1.0
    found = fit(blocks, y, family, lambdas=np.array([0.2, 0.1]), rounds=300, clip=50.0)
    X = np.hstack(blocks)
    Z = np.column_stack([np.ones(len(y)), (X - X.mean(axis=0)) / X.std(axis=0)])
    groups = CoefficientGroups.single(10, np.r_[0.0, np.ones(9)])
    spec, lambdas = DistributionSpec.of(FAMILIES[family]), unit * found.lambdas
    pooled = glm_path(Rows(Z, y), spec, Penalty("lasso"), groups, lambdas=lambdas, tol=1e-10)
    np.testing.assert_allclose(found.coefficients * X.std(axis=0), pooled.coefficients[:, 1:], atol=1e-5)
    intercepts = pooled.coefficients[:, 0] - found.coefficients @ X.mean(axis=0)
    np.testing.assert_allclose(found.intercepts, intercepts, atol=1e-4)
    assert found.epsilon() == found.row_epsilon() == np.inf


def test_the_ledger_is_that_of_all_rounds_and_of_all_predictors():
    blocks, y = make("Gaussian")
    found = fit(blocks, y, "Gaussian", noise=40.0, rounds=10, n_lambdas=4, clip=2.0)
    assert found.site_ledger.releases == 40
    mu = np.sqrt(40 * 300) * 4.0 / 40.0
    assert found.site_ledger.mu == pytest.approx(mu)
    assert delta_of(found.epsilon(1e-6), mu) == pytest.approx(1e-6)
    assert delta_of(found.row_epsilon(1e-6, rounds=1), 0.1) == pytest.approx(1e-6)
    assert found.row_epsilon() < found.epsilon()


def test_one_record_moves_the_predictors_of_the_others():
    """An account by rows cannot see this: a record that outweighs all others brings theirs to zero."""
    n, clip, cut = 400, 0.5, []
    for record in (-1.0, 1e4):
        X = np.where(np.arange(n) % 2, 1.0, -1.0)[:, None]
        y, X[0] = 4.0 * X[:, 0], record
        other = np.random.default_rng(3).normal(size=(n, 1))
        found = fit([X, other], y, "Gaussian", clip=clip, rounds=2)
        cut.append(np.clip(found.coefficients[-1, 0] / y.std() * (X[:, 0] - X.mean()), -clip, clip))
    change = np.linalg.norm((cut[1] - cut[0])[1:])
    assert 2.0 * clip < 0.7 * clip * np.sqrt(n) < change <= 2.0 * clip * np.sqrt(n)


def test_noise_that_keeps_to_a_budget_leaves_nothing_to_select():
    blocks, y = make("Gaussian", 600)
    clean = fit(blocks, y, "Gaussian", "scad", rounds=40)
    assert set(np.flatnonzero(clean.coefficients[clean.chosen])) >= {0, 4}
    noisy = fit(blocks, y, "Gaussian", "scad", noise=60.0, rounds=40)
    assert noisy.epsilon() > 100.0
    error = [np.abs(one.coefficients[one.chosen] * np.hstack(blocks).std(axis=0)) for one in (clean, noisy)]
    assert np.abs(error[1] - error[0]).max() > 0.3
    again = fit(blocks, y, "Gaussian", "scad", noise=60.0, rounds=40)
    np.testing.assert_array_equal(again.coefficients, noisy.coefficients)


def test_arguments_without_a_meaning_are_refused():
    blocks, y = make("Binomial")
    with pytest.raises(ModelError, match="clip > 0"):
        fit(blocks, y, "Binomial", clip=0.0)
    probit = DistributionSpec.of(sm.families.Binomial(sm.families.links.Probit()))
    with pytest.raises(ModelError, match="canonical"):
        noisy_admm(blocks, y, probit, Penalty("lasso"), noise=1.0, random=np.random.default_rng(0))
