"""The published training on raw columns: its loss and its scores."""

import numpy as np
import pytest
import table1_raw as raw

from fedstat.models.laser.training import assemble


@pytest.mark.parametrize("seen", [0b1111, 0b1011, 0b0100])
def test_one_set_of_each_head_and_size_stands_for_all(seen):
    """In expectation every head has weight 1/|J| for each set J within the sites that are present."""
    assembly, rng, draws = assemble("laser", raw.K, "client"), np.random.default_rng(0), 6000
    sites = np.array([task.sites for task in assembly.tasks])
    sizes = np.array([task.sites.bit_count() for task in assembly.tasks])
    total, weights = np.zeros(len(sizes)), np.zeros(len(sizes))
    for _ in range(draws):
        raw.choose_tasks(weights, sites, assembly.head_of, sizes, seen, True, rng)
        assert (weights > 0).sum() == seen.bit_count() ** 2
        total += weights
    expected = np.where(sites & seen == sites, 1.0 / sizes, 0.0)
    np.testing.assert_allclose(total / draws, expected, atol=5 * np.sqrt(3 / draws) / 2)


@pytest.mark.parametrize("method", raw.SCHEDULES)
def test_scores_of_decisions(method):
    """Right ones have 100; where a standard network guesses, F1 is that of a coin."""
    rng = np.random.default_rng(1)
    y = (rng.random(60_000) < 0.22).astype(int)
    assembly = assemble(method, raw.K, "client")
    decided = np.tile(y, (len(assembly.tasks), 1)).astype(bool)
    assert raw.score(method, assembly, decided, y, 0.0, rng) == pytest.approx(100.0)
    found = raw.score(method, assembly, decided, y, 0.9, rng)
    assert found == pytest.approx(200 * 0.11 / (0.5 + 0.22) if method == "standard" else 100.0, abs=1.0)


@pytest.mark.slow
def test_training_learns():
    """A response that two sites' columns predict together, and neither site alone."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(4000, 20))
    y = (X[:, 0] + X[:, 6] > 0).astype(int)
    assembly, theta, phi = raw.fit("laser", X, y, 0.1, 0, plan=(200, 0.0, 1.0))
    right = (raw.decide(assembly, theta, phi, X) == y).mean(axis=1)
    both = [t for t, task in enumerate(assembly.tasks) if task.sites == 0b0011]
    alone = [t for t, task in enumerate(assembly.tasks) if task.sites == 0b0001]
    assert right[both].min() > 0.9 > 0.8 > right[alone].max() > 0.7
