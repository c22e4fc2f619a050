"""Mehler's formula for scores that are step functions, against integrals of the bivariate normal law."""

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import multivariate_normal

from fedstat.kernels.copula import expand_steps, expected_products, latent_correlations


def uniform_scores(probabilities):
    F = np.concatenate([[0.0], np.cumsum(probabilities)])
    F[-1] = 1.0
    return ndtri(F), np.sqrt(3.0) * (F[:-1] + F[1:] - 1.0)


def integral(a, b, r):
    """E[s(Z) t(W)] from the probabilities of all rectangles."""
    (ta, sa), (tb, sb) = a, b
    x, y = np.clip(ta, -9, 9), np.clip(tb, -9, 9)
    joint = multivariate_normal(cov=[[1.0, r], [r, 1.0]], abseps=1e-12, releps=1e-12)
    F = np.array([[joint.cdf([u, v]) for v in y] for u in x])
    return sa @ (F[1:, 1:] - F[:-1, 1:] - F[1:, :-1] + F[:-1, :-1]) @ sb


COLUMNS = {
    "binary": uniform_scores([0.85, 0.15]),
    "ordinal": uniform_scores([0.1, 0.4, 0.3, 0.2]),
    "inflated by zeros": uniform_scores([0.6, *[0.4 / 12] * 12]),
    "continuous": uniform_scores([1 / 32] * 32),
}


@pytest.mark.parametrize("r", [-0.9, -0.3, 0.05, 0.7, 0.95])
@pytest.mark.parametrize("pair", [("binary", "ordinal"), ("inflated by zeros", "continuous")])
def test_expected_product_is_the_integral(pair, r):
    a, b = (COLUMNS[name] for name in pair)
    coefficients = [expand_steps(*column)[None] for column in (a, b)]
    assert expected_products(*coefficients, np.array([r]))[0] == pytest.approx(integral(a, b, r), abs=1e-6)


def by_arrays(thresholds, scores, order=200):
    """The recurrence over all thresholds at once, added in their order."""
    rises = np.diff(scores, prepend=0.0, append=0.0)
    at = np.isfinite(thresholds) & (rises != 0.0)
    t, rises = thresholds[at], (rises * np.exp(-0.5 * thresholds**2) / np.sqrt(2.0 * np.pi))[at]
    now, before, roots, out = np.ones(len(t)), np.zeros(len(t)), np.sqrt(np.arange(order + 1.0)), []
    for m in range(1, order + 1):
        out.append(np.cumsum(np.append(0.0, rises * now / roots[m]))[-1])
        now, before = (t * now - roots[m - 1] * before) / roots[m], now
    return np.array(out)


@pytest.mark.parametrize("column", [*COLUMNS.values(), (np.array([-np.inf, np.inf]), np.array([0.0]))])
def test_expansion_has_the_bits_of_its_recurrence(column):
    np.testing.assert_array_equal(expand_steps(*column), by_arrays(*column))


@pytest.mark.parametrize("r", [-0.9, -0.3, 0.05, 0.7, 0.9])
def test_inversion_finds_the_correlation_behind_an_integral(r):
    a, b = COLUMNS["binary"], COLUMNS["inflated by zeros"]
    coefficients = [expand_steps(*column)[None] for column in (a, b)]
    found = latent_correlations(np.array([integral(a, b, r)]), *coefficients)
    assert found[0] == pytest.approx(r, abs=1e-6)


def test_inversion_of_a_constant_score_and_of_an_impossible_product():
    a = expand_steps(*COLUMNS["continuous"])[None]
    nothing = np.zeros_like(a)
    assert latent_correlations(np.array([0.3]), a, nothing)[0] == 0.0
    assert latent_correlations(np.array([7.0]), a, a)[0] == pytest.approx(0.995, abs=1e-9)
