"""Ordered and unordered levels: logs of probabilities, and slopes against central differences."""

import numpy as np
import pytest
from scipy.special import expit, log_softmax

from fedstat.kernels.item_responses import (
    nominal_derivatives,
    nominal_table,
    ordinal_derivatives,
    ordinal_table,
)
from fedstat.kernels.latent_factors import (
    GroupedLevels,
    _normalize,
    expected_counts,
    node_densities,
    node_means,
    node_weights,
    normal_nodes,
)

ETA = np.random.default_rng(0).standard_normal((11, 2))


def ordinal(theta, C):
    return ordinal_table(theta[:, : C - 1], theta[:, C - 1 :] @ ETA.T)


def nominal(theta, C):
    return nominal_table(theta[:, : C - 1, None] + theta[:, C - 1 :].reshape(len(theta), C - 1, 2) @ ETA.T)


def slopes(table, theta, C, counts):
    if table is nominal:
        return nominal_derivatives(nominal(theta, C), ETA, counts)
    return ordinal_derivatives(theta[:, : C - 1], theta[:, C - 1 :] @ ETA.T, ETA, counts)


CASES = {
    "binary": (ordinal, 2),
    "ordinal": (ordinal, 5),
    "nominal of two": (nominal, 2),
    "nominal": (nominal, 4),
}


def case(name):
    table, C = CASES[name]
    rng = np.random.default_rng(C)
    free = np.sort(rng.uniform(-2, 2, (3, C - 1)), axis=1)
    rows = C - 1 if table is nominal else 1
    return (
        table,
        C,
        np.column_stack([free, rng.standard_normal((3, 2 * rows))]),
        rng.uniform(0, 5, (3, C, 11)),
    )


@pytest.mark.parametrize("name", CASES)
def test_slopes_are_central_differences(name):
    table, C, theta, counts = case(name)

    def value(t):
        return np.einsum("pcg,pcg->p", counts, table(t, C))

    def score(t):
        return slopes(table, t, C, counts)[0]

    found, info = slopes(table, theta, C, counts)
    for j in range(theta.shape[1]):
        h = 1e-6 * (np.arange(theta.shape[1]) == j)
        up, down = theta + h, theta - h
        assert np.allclose((value(up) - value(down)) / 2e-6, found[:, j], rtol=1e-6, atol=1e-6)
        assert np.allclose(-(score(up) - score(down)) / 2e-6, info[:, :, j], rtol=1e-6, atol=1e-6)


def test_logs_of_probabilities_also_far_out():
    alpha, u = np.array([[-1.0, 0.5, 0.6]]), np.array([[-3.0, 0.0, 2.0]])
    F = np.column_stack([np.zeros(3), expit(alpha - u.T), np.ones(3)])
    assert np.allclose(np.exp(ordinal_table(alpha, u))[0].T, np.diff(F, axis=1), rtol=1e-13)
    far = ordinal_table(alpha, np.array([[-900.0, 900.0]]))
    assert far[0, 0, 1] == pytest.approx(-901.0, rel=1e-12) and far[0, -1, 0] == pytest.approx(
        -900.6, rel=1e-12
    )
    logits = np.random.default_rng(1).standard_normal((2, 3, 4))
    full = np.concatenate([np.zeros((2, 1, 4)), logits], axis=1)
    assert np.allclose(nominal_table(logits), log_softmax(full, axis=1))


@pytest.mark.parametrize("Q", [1, 2])
def test_nodes_integrate_polynomials_of_a_normal_law(Q):
    z, logs = normal_nodes(5, Q)
    w = np.exp(logs)
    assert w.sum() == pytest.approx(1.0, rel=1e-13)
    for power, moment in ((1, 0.0), (2, 1.0), (4, 3.0), (8, 105.0)):
        assert w @ z[:, -1] ** power == pytest.approx(moment, abs=1e-11)
    if Q == 2:
        assert w @ (z[:, 0] ** 2 * z[:, 1] ** 4) == pytest.approx(3.0, rel=1e-12)


def test_rows_at_nodes_are_their_numpy_twin():
    rng = np.random.default_rng(2)
    n, P, C, K, t, J = 30, 4, 3, 2, 5, 2
    group = rng.integers(0, J, n)
    codes = rng.integers(-1, C, (n, P))
    codes[0] = -1
    table, logs = 4 * np.log(rng.random((J, P, C, K * t))), np.log(rng.dirichlet(np.ones(t)))
    r, eta = rng.random((n, K)), rng.standard_normal((K * t, 2))
    rows = GroupedLevels(codes, group)
    a = np.zeros((n, K * t))
    for i in range(n):
        for p in np.flatnonzero(codes[i] >= 0):
            a[i] += table[group[i], p, codes[i, p]]
    a = np.exp(a.reshape(n, K, t) + logs)
    node = a / a.sum(axis=2, keepdims=True)
    assert np.allclose(node_densities(rows, table, logs, K), np.log(a.sum(axis=2)))
    e = np.einsum("nkt,ktq->nkq", node, eta.reshape(K, t, 2))
    assert np.allclose(node_means(rows, table, logs, eta, K), e)
    at = (r[:, :, None] * node).reshape(n, -1)
    counts = expected_counts(rows, r, table, logs)
    assert np.allclose(node_weights(rows, table, logs, K), node) and np.allclose(
        counts.f, np.log(a.sum(axis=2))
    )
    of = group[:, None] == np.arange(J)
    levels = np.einsum("nj,npc,ng->jpcg", of, codes[:, :, None] == np.arange(C), at)
    assert np.allclose(counts.levels, levels) and np.allclose(counts.nodes, at.sum(axis=0).reshape(K, t))


def test_exponentials_also_inside_loops_that_may_reorder():
    x = np.concatenate([np.linspace(-45.0, 0.0, 1001), [-1e300, -1e-300]])
    power = np.empty(len(x))
    weights, f = x.copy(), np.empty(1)
    _normalize(weights, len(x), np.ones(1), f, power, power.view(np.int64))
    exact = np.where(x > -40.0, np.exp(x), 0.0)
    assert f[0] == pytest.approx(np.log(exact.sum()), rel=1e-13)
    assert np.allclose(weights, exact / exact.sum(), rtol=2e-14, atol=0.0)
