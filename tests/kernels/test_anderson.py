"""Mixing by inner products alone, against the least-squares form on the moves themselves."""

import numpy as np

from fedstat.models.vfem.iteration.quasi_newton import LARGEST_WEIGHT, anderson_weights, one_hot


def test_weights_make_the_mixed_move_shortest():
    F = np.random.default_rng(0).normal(size=(6, 20))
    weights = anderson_weights(F @ F.T)
    differences = F[:-1] - F[-1]
    gamma = np.linalg.lstsq(differences.T, -F[-1], rcond=None)[0]
    np.testing.assert_allclose(weights, [*gamma, 1.0 - gamma.sum()], rtol=1e-6, atol=1e-9)
    assert np.isclose(weights.sum(), 1.0)


def test_moves_of_very_different_length_are_mixed():
    F = np.random.default_rng(1).normal(size=(5, 30)) * 10.0 ** -np.arange(5)[:, None]
    weights = anderson_weights(F @ F.T)
    assert np.linalg.norm(weights @ F) <= np.linalg.norm(F[-1])


def test_weights_that_explode_lose_the_oldest_points():
    f = np.random.default_rng(2).normal(size=20)
    F = np.array([f, f * (1.0 + 1e-9), f * (1.0 + 2e-9)])
    weights = anderson_weights(F @ F.T)
    assert np.isclose(weights.sum(), 1.0)
    assert np.abs(weights).sum() < LARGEST_WEIGHT


def test_one_hot_takes_one_point():
    np.testing.assert_array_equal(one_hot(1, 3), [0.0, 1.0, 0.0])
