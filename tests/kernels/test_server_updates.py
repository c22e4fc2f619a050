"""Coefficient updates of the coordinator, compared with the published algorithms."""

import numpy as np
import pytest

from fedstat.errors import EstimationError
from fedstat.kernels.glm.fedavg import fair_update, momentum_step, sample_sites

RNG = np.random.default_rng(0)
BETA = RNG.normal(size=4)
BETAS = BETA + RNG.normal(scale=0.1, size=(3, 4))
LOSSES = np.array([0.4, 0.7, 1.3])


def printed_fair_step(w, ws, F, q, L):
    """Li et al. 2020, Algorithm 2, line by line."""
    numerator, denominator = np.zeros_like(w), 0.0
    for w_k, F_k in zip(ws, F, strict=True):
        dw = L * (w - w_k)
        numerator += F_k**q * dw
        denominator += q * F_k ** (q - 1) * np.dot(dw, dw) + L * F_k**q
    return w - numerator / denominator


def fair_step(w, ws, F, q, L, reference=1.0):
    """Update of the coordinator from the sites' parts."""
    parts = [fair_update(w, w_k, float(F_k), q, L, reference) for w_k, F_k in zip(ws, F, strict=True)]
    return w - sum(move for move, _ in parts) / sum(h for _, h in parts)


def test_no_momentum_is_the_average():
    beta, velocity = momentum_step(BETA, BETAS[0], np.full(4, 9.0), momentum=0.0)
    np.testing.assert_allclose(beta, BETAS[0], rtol=1e-14)
    np.testing.assert_array_equal(velocity, BETA - BETAS[0])


@pytest.mark.parametrize("dampening", [0.0, 0.5, 0.9])
def test_momentum_sums_past_moves_geometrically(dampening):
    """With dampening 0.9, the momentum, weights of past moves add up to 1: an average of moves."""
    moves = np.random.default_rng(1).normal(size=(6, 4))
    beta, velocity = BETA, np.zeros(4)
    for move in moves:
        beta, velocity = momentum_step(beta, beta - move, velocity, 0.9, dampening)
    powers = 0.9 ** np.arange(6)
    np.testing.assert_allclose(velocity, (1.0 - dampening) * (powers[::-1] @ moves), rtol=1e-12)
    so_far = [powers[: 6 - t].sum() for t in range(6)]
    np.testing.assert_allclose(beta, BETA - (1.0 - dampening) * (so_far @ moves), rtol=1e-12)


@pytest.mark.parametrize("L", [1.0, 10.0])
@pytest.mark.parametrize("q", [0.1, 1.0, 2.5])
def test_fair_step_is_the_printed_algorithm(q, L):
    expected = printed_fair_step(BETA, BETAS, LOSSES, q, L)
    for reference in (1.0, 0.3, 7.0):
        found = fair_step(BETA, BETAS, LOSSES, q, L, reference)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("L", [1.0, 10.0])
def test_without_fairness_every_site_counts_once(L):
    mean = BETAS.mean(axis=0)
    np.testing.assert_allclose(fair_step(BETA, BETAS, LOSSES, 0.0, L), mean, rtol=1e-14)
    np.testing.assert_allclose(fair_step(BETA, BETAS, LOSSES, 1e-9, L), mean, rtol=1e-7)
    np.testing.assert_allclose(fair_step(BETA, BETAS, np.zeros(3), 0.0, L), mean, rtol=1e-14)


def test_fairness_turns_the_step_towards_the_site_with_the_highest_loss():
    direction = BETAS[2] - BETA
    cosines = []
    for q in (0.0, 1.0, 10.0):
        step = fair_step(BETA, BETAS, LOSSES, q, 1.0) - BETA
        cosines.append(step @ direction / np.linalg.norm(step) / np.linalg.norm(direction))
    assert cosines[0] < cosines[1] < cosines[2]
    assert cosines[2] > 0.999


def test_large_powers_stay_finite():
    losses, q = 1_000.0 * LOSSES, 300.0
    move = BETA - BETAS[2]
    only_the_worst = BETA - move / (q * move @ move / losses[2] + 1.0)
    found = fair_step(BETA, BETAS, losses, q, 1.0, reference=losses.mean())
    np.testing.assert_allclose(found, only_the_worst, rtol=1e-12)


@pytest.mark.parametrize("bad", [0.0, -0.2, np.nan])
def test_losses_must_be_positive(bad):
    with pytest.raises(EstimationError, match="which is not positive; set q = 0"):
        fair_step(BETA, BETAS, np.array([0.4, bad, 1.3]), 1.0, 1.0)


@pytest.mark.parametrize(
    "n_clients, fraction, size", [(10, 0.37, 4), (10, 0.0, 1), (3, 0.5, 2), (7, 1.0, 7), (1, 0.1, 1)]
)
def test_sample_has_the_size_requested(n_clients, fraction, size):
    drawn = sample_sites(n_clients, fraction, np.random.default_rng(0))
    assert drawn.dtype == np.int64
    assert len(drawn) == size == len(set(drawn))
    assert (np.diff(drawn) > 0).all()
    assert 0 <= drawn.min() <= drawn.max() < n_clients


def test_sites_are_equally_likely():
    rng = np.random.default_rng(2)
    counts = sum(np.bincount(sample_sites(5, 0.4, rng), minlength=5) for _ in range(4_000))
    np.testing.assert_allclose(counts / 4_000, 0.4, atol=4 * np.sqrt(0.24 / 4_000))
