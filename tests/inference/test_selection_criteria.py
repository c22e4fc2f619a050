"""Criteria against the log-likelihoods and criteria of statsmodels, and by hand."""

import math

import numpy as np
import pytest
import statsmodels.api as sm

from fedstat.errors import ModelError
from fedstat.inference import likelihood


@pytest.fixture(name="fits")
def two_fits():
    draw = np.random.default_rng(8)
    X = sm.add_constant(draw.normal(size=(90, 4)))
    y = X[:, :3] @ [1.0, 0.5, -0.4] + draw.normal(size=90) * 2.0
    return [sm.OLS(y, X[:, :k]).fit() for k in (3, 5)]


def test_differences_are_those_of_statsmodels(fits):
    small, large = fits
    ours = [likelihood.profile_deviance(fit.ssr, 90) for fit in fits]
    assert likelihood.aic(ours[1], 5) - likelihood.aic(ours[0], 3) == pytest.approx(large.aic - small.aic)
    assert likelihood.bic(ours[1], 5, 90) - likelihood.bic(ours[0], 3, 90) == pytest.approx(
        large.bic - small.bic
    )


def test_twice_the_loss_is_the_likelihood_of_a_known_dispersion():
    draw = np.random.default_rng(8)
    X = sm.add_constant(draw.normal(size=(90, 2)))
    y = draw.poisson(np.exp(X @ [0.2, 0.3, 0.0])) * 1.0
    small, large = (sm.GLM(y, X[:, :k], family=sm.families.Poisson()).fit() for k in (2, 3))
    loss = [fit.deviance / (2 * 90) for fit in (small, large)]
    ours = likelihood.bic(2 * 90 * loss[1], 3, 90) - likelihood.bic(2 * 90 * loss[0], 2, 90)
    assert ours == pytest.approx(large.bic_llf - small.bic_llf)


def test_the_extended_criterion_counts_the_ways_to_choose():
    ways = math.comb(50, 3)
    found = likelihood.ebic(100.0, 4.0, 200, chosen=3.0, candidates=50, gamma=0.7)
    assert found == pytest.approx(100.0 + 4.0 * math.log(200) + 1.4 * math.log(ways))
    assert likelihood.ebic(100.0, 4.0, 200, chosen=3.0, candidates=50, gamma=0.0) == pytest.approx(
        likelihood.bic(100.0, 4.0, 200)
    )
    along = likelihood.ebic(
        np.array([9.0, 8.0]), np.array([1.0, 2.0]), 10, chosen=np.arange(2.0), candidates=4
    )
    assert along.shape == (2,)
    with pytest.raises(ModelError, match="at most 2 columns"):
        likelihood.ebic(1.0, 1.0, 10, chosen=3.0, candidates=2)
    with pytest.raises(ModelError, match="gamma"):
        likelihood.ebic(1.0, 1.0, 10, chosen=1.0, candidates=2, gamma=1.5)
