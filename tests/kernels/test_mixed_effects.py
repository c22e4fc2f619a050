"""Marginal likelihoods of clusters: brute force, dense matrices and numerical derivatives as oracles."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.integrate import quad
from scipy.special import gammaln

from fedstat.kernels.mixed_effects import (
    GAMMA,
    LOG,
    LOGIT,
    NEGATIVE_BINOMIAL,
    cluster_products,
    integrate,
    jet_length,
    marginal_score,
    pair_index,
)

RNG = np.random.default_rng(5)
SIZES = np.array([1, 4, 2, 6, 3, 5])
BEGIN = np.append(0, np.cumsum(SIZES))
N = int(BEGIN[-1])
X = np.column_stack([np.ones(N), RNG.normal(size=N)])
BETA = np.array([0.3, -0.5])
CODE, OUTER = np.repeat(np.arange(6), SIZES), np.array([0, 0, 0, 1, 1, 1])
Y = RNG.normal(size=N)


def nested(tau):
    """Integrate slopes of clusters (3 parameters) and intercepts of their groups (1)."""
    T = np.zeros((jet_length(3), 2, 2))
    T[0] = [[tau[0], tau[1]], [tau[1], tau[2]]]
    for k, (a, b) in enumerate([(0, 0), (1, 0), (1, 1)]):
        T[1 + k, a, b] = T[1 + k, b, a] = 1.0
    W = np.ascontiguousarray(np.column_stack([X, np.ones(N), X, Y]))
    S = cluster_products(W, np.ones(N), CODE, 6)
    S, inner, _ = integrate(S, T, 0, OUTER, 2)
    U = np.zeros((jet_length(4), 1, 1))
    U[0, 0, 0], U[4, 0, 0] = tau[3], 1.0
    S, outer, _ = integrate(S, U, 3, np.zeros(2, dtype=np.int64), 1)
    logdet = outer.copy()
    places = [0, 1, 2, 3, *(pair_index(k, m, 4) for k in range(3) for m in range(k, 3))]
    logdet[places] += inner
    return logdet, S[0]


def dense(tau):
    T = np.array([[tau[0], tau[1]], [tau[1], tau[2]]])
    one = OUTER[CODE]
    V = np.eye(N) + (CODE[:, None] == CODE) * (X @ T @ X.T) + tau[3] * (one[:, None] == one)
    R = np.column_stack([X, Y])
    return np.array([np.linalg.slogdet(V)[1], *(R.T @ np.linalg.solve(V, R)).ravel()])


def test_nested_integrals_and_their_derivatives_are_those_of_dense_matrices():
    tau = np.array([0.8, 0.2, 0.5, 0.6])
    logdet, products = nested(tau)
    found = np.column_stack([logdet, products.reshape(len(products), -1)])
    assert_allclose(found[0], dense(tau), rtol=1e-12)
    h = 1e-4
    step = np.eye(4) * h
    for k in range(4):
        assert_allclose(
            found[1 + k], (dense(tau + step[k]) - dense(tau - step[k])) / (2 * h), rtol=2e-6, atol=1e-6
        )
        for m in range(k, 4):
            there = [nested(tau + sign * step[m]) for sign in (1.0, -1.0)]
            slopes = [np.append(d[1 + k], p[1 + k].ravel()) for d, p in there]
            assert_allclose(
                found[pair_index(k, m, 4)], (slopes[0] - slopes[1]) / (2 * h), rtol=2e-6, atol=1e-6
            )


def test_a_covariance_of_zero_leaves_the_products_as_they_are():
    logdet, products = nested(np.zeros(4))
    R = np.column_stack([X, Y])
    assert logdet[0] == 0.0
    assert_allclose(products[0], R.T @ R, rtol=1e-12)


def likelihood(kind, y, parameters, nodes, shape=1.0):
    entries = [(0, 0)] if len(parameters) == 3 else [(0, 0), (1, 0), (1, 1)]
    q = 1 if len(entries) == 1 else 2
    L = np.zeros((q, q))
    for place, value in zip(entries, parameters[2:], strict=True):
        L[place] = value
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    Z = np.ascontiguousarray(X[:, :q])
    rest = BEGIN, x, w, np.zeros((6, q)), np.zeros(N)
    llf, slopes = marginal_score(kind, shape, y, np.ones(N), X @ parameters[:2], Z @ L, *rest)
    factor = Z.T @ slopes[:, 1:-1]
    return llf, np.array([*(slopes[:, 0] @ X), *(factor[place] for place in entries), slopes[:, -1].sum()])


RESPONSES = {
    LOGIT: (RNG.random(N) < 0.5).astype(float),
    LOG: RNG.poisson(1.5, N).astype(float),
    NEGATIVE_BINOMIAL: RNG.negative_binomial(2.0, 0.4, N).astype(float),
    GAMMA: RNG.gamma(2.0, 0.8, N),
}
SHAPE = 1.7


def log_density(kind, y, eta):
    """Up to parts that depend on neither eta nor the shape."""
    if kind == LOGIT:
        return y * eta - np.logaddexp(0.0, eta)
    if kind == LOG:
        return y * eta - np.exp(eta)
    if kind == NEGATIVE_BINOMIAL:
        return y * eta - (y + SHAPE) * np.log1p(np.exp(eta) / SHAPE)
    return -SHAPE * (eta + y * np.exp(-eta))


@pytest.mark.parametrize("kind", RESPONSES)
@pytest.mark.parametrize(("parameters", "nodes"), [(3, 1), (3, 2), (3, 9), (5, 1)])
def test_scores_are_derivatives_of_the_approximation(kind, parameters, nodes):
    at = np.array([0.3, -0.5, 0.8, 0.2, 0.5])[:parameters]
    _, score = likelihood(kind, RESPONSES[kind], at, nodes, SHAPE)
    h = 1e-5
    for j, step in enumerate(np.eye(parameters + 1) * h):
        ends = [
            likelihood(kind, RESPONSES[kind], at + sign * step[:-1], nodes, SHAPE + sign * step[-1])[0]
            for sign in (1.0, -1.0)
        ]
        assert score[j] == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kind", RESPONSES)
def test_many_nodes_are_the_integral(kind):
    y, sd = RESPONSES[kind], 0.8
    total = 0.0
    for c in range(6):
        part = slice(BEGIN[c], BEGIN[c + 1])

        def density(u, part=part):
            log = log_density(kind, y[part], X[part] @ BETA + sd * u)
            return np.exp(log.sum() - u**2 / 2.0) / np.sqrt(2.0 * np.pi)

        total += np.log(quad(density, -10.0, 10.0, epsabs=1e-13)[0])
    found, _ = likelihood(kind, y, np.array([*BETA, sd]), 25, SHAPE)
    assert found == pytest.approx(total, abs=1e-9)


def test_without_variance_it_is_the_likelihood_of_independent_rows():
    y = RESPONSES[LOG]
    eta = X @ BETA
    expected = (y * eta - np.exp(eta) - gammaln(y + 1.0)).sum()
    for nodes in (1, 9):
        found, score = likelihood(LOG, y, np.array([*BETA, 0.0]), nodes)
        assert found - gammaln(y + 1.0).sum() == pytest.approx(expected, abs=1e-12)
        assert_allclose(score, [*(X.T @ (y - np.exp(eta))), 0.0, 0.0], atol=1e-10)
