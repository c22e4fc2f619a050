"""The published selection study: what its description promises, checked on a large draw."""

import numpy as np
import pytest
from scipy.special import expit

from fedstat import datasets
from fedstat.datasets.selection import _draw_latent, _latent_correlations
from fedstat.errors import ModelError


@pytest.fixture(scope="module")
def drawn():
    return datasets.make_selection(40_000, "binomial", seed=1)


def test_sites_columns_and_coefficients(drawn):
    assert [frame.shape[1] for frame in drawn.frames.values()] == [22, 21, 21, 21, 21]
    assert "y" in drawn.frames["Client 1"]
    truth = drawn.truth
    assert (truth["type"].value_counts() == 25).all()
    for _, block in truth.groupby("client"):
        coef = block["coef"].to_numpy()
        np.testing.assert_allclose(coef[:12], np.tile([-1 / 3, 1 / 3], 6))
        assert (coef[12:] == 0.0).all()
    X = drawn.complete[truth.index]
    for site, frame in drawn.frames.items():
        names = truth.index[truth["client"] == site]
        np.testing.assert_array_equal(frame[names], X[names])


def test_latent_columns_are_the_mixture():
    """Its covariance is that of the parts, weighted, and of their means: .6 between all columns."""
    U = _draw_latent(200_000, np.random.default_rng(0))
    expected = np.tensordot([0.4, 0.3, 0.3], _latent_correlations(), axes=1) + 0.6
    assert np.abs(U.mean(axis=0)).max() < 0.015
    np.testing.assert_allclose(np.cov(U.T), expected, atol=0.025)
    within, between = expected[0, 19], expected[0, 99]
    assert within == pytest.approx(0.4 * 0.3 + 0.6, abs=1e-4)
    assert between == pytest.approx(0.4 * 0.1 + 0.6, abs=1e-4)


def test_types_have_their_values_and_slopes(drawn):
    X, types = drawn.complete[drawn.truth.index], drawn.truth["type"]
    assert set(np.unique(X.loc[:, types == "binary"])) == {0.0, 1.0}
    assert set(np.unique(X.loc[:, types == "class"])) == {0.0, 1.0, 2.0}
    counts = X.loc[:, types == "count"]
    assert (counts == counts.round()).all(axis=None) and abs(counts.mean(axis=None) - 2.0) < 0.02
    # By quadrature over u, the mixture of N(0, 1), N(-1, 1) and N(1, 1), all with S1's correlation 1.
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    u = np.concatenate([nodes, nodes - 1, nodes + 1])
    w = np.concatenate([0.4 * weights, 0.3 * weights, 0.3 * weights])
    odds = np.exp(np.outer(u, [0.0, 0.5, 1.0]))
    shares = w @ (odds / odds.sum(axis=1, keepdims=True))
    for c in range(3):
        assert (X.loc[:, types == "class"] == c).mean(axis=None) == pytest.approx(shares[c], abs=0.005)
    assert X.loc[:, types == "binary"].mean(axis=None) == pytest.approx(w @ expit(0.5 * u), abs=0.005)


def test_the_response_follows_its_probabilities(drawn):
    eta = drawn.complete[drawn.truth.index] @ drawn.truth["coef"]
    probability, y = expit(eta), drawn.complete["y"]
    for low in (0.05, 0.25, 0.5, 0.75):
        here = probability.between(low, low + 0.2)
        error = np.sqrt(0.25 / here.sum())
        assert y[here].mean() == pytest.approx(probability[here].mean(), abs=4 * error)


def test_standardized_columns_and_normal_response():
    data = datasets.make_selection(3_000, standardize=True, seed=2)
    X = data.complete[data.truth.index]
    np.testing.assert_allclose(X.mean(), 0.0, atol=1e-12)
    np.testing.assert_allclose(X.std(ddof=0), 1.0)
    noise = data.complete["y"] - X @ data.truth["coef"]
    assert noise.var() == pytest.approx(1.0, abs=0.12)
    with pytest.raises(ModelError, match="received 'poisson'"):
        datasets.make_selection(100, "poisson")


def test_published_errors_are_below_what_the_published_misses_cost():
    """With effects of 1/3, a missed share of the 60 active columns costs sqrt(.6 (1 - s)) / 3 at least."""
    published = datasets.load_selection_published()
    c = 1.5 * published["fdr"] / (1 - published["fdr"])
    found = (1 - np.sqrt(1 - 4 * c * published["gmean"] ** 2)) / (2 * c)
    np.testing.assert_allclose(found * (1 - c * found), published["gmean"] ** 2)
    assert (published["rmse"] < np.sqrt(0.6 * (1 - found)) / 3).all()
