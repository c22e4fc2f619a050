"""Accounting of Gaussian noise compared with published and independently computed values."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedstat.errors import ModelError
from fedstat.privacy.gaussian_dp import GaussianAccountant, delta_of, epsilon_of, mu_of


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
def test_delta_is_the_integral_of_the_densities_apart(epsilon, mu):
    """delta = int max(0, p - e^eps q), p and q the densities of N(mu, 1) and N(0, 1)."""
    start = epsilon / mu + mu / 2.0
    part, _ = quad(
        lambda x: norm.pdf(x - mu) - np.exp(epsilon) * norm.pdf(x), start, start + 40.0, epsabs=1e-15
    )
    assert delta_of(epsilon, mu) == pytest.approx(part, rel=1e-7, abs=1e-13)


@pytest.mark.parametrize(
    ("epsilon", "delta", "multiplier"),
    [(5.0, 1e-6, 0.98005), (1.0, 1e-5, 3.73), (2.0, 1e-6, 2.23), (8.0, 1e-6, 0.653), (10.0, 0.02, 0.3313)],
)
def test_noise_is_that_of_a_reference_implementation(epsilon, delta, multiplier):
    """Noise over sensitivity, by the closed form of dp-accounting 0.6.0, to the digits noted there."""
    assert 1.0 / mu_of(epsilon, delta) == pytest.approx(multiplier, rel=2e-3)
    assert epsilon_of(mu_of(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-9)


def test_the_classical_noise_does_not_keep_its_promise_at_large_epsilon():
    """sqrt(2 log(1.25 / delta)) / eps is proved for eps < 1; at (10, .02) the true delta is .0843."""
    mu = 10.0 / np.sqrt(2.0 * np.log(1.25 / 0.02))
    assert delta_of(10.0, mu) == pytest.approx(0.0843, abs=5e-5)
    assert epsilon_of(mu, 0.02) == pytest.approx(12.41, abs=5e-3)


def test_releases_add_up():
    """A hundred releases need ten times the noise; 226 is the cost of a hundred that claim (5, .05) each."""
    site_ledger = GaussianAccountant()
    site_ledger.add(1.0, 9.8005, times=100)
    assert site_ledger.releases == 100
    assert site_ledger.epsilon(1e-6) == pytest.approx(5.0, rel=1e-4)
    claimed = GaussianAccountant()
    claimed.add(1.0, np.sqrt(2.0 * np.log(1.25 / 0.05)) / 5.0, times=60)
    claimed.add(2.0, 2.0 * np.sqrt(2.0 * np.log(1.25 / 0.05)) / 5.0, times=40)
    assert claimed.epsilon(0.05) == pytest.approx(226.0, abs=0.5)


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    site_ledger = GaussianAccountant()
    assert site_ledger.epsilon() == 0.0
    site_ledger.add(0.0, 0.0)
    assert site_ledger.epsilon() == 0.0 and site_ledger.releases == 1
    site_ledger.add(1.0, 0.0)
    assert site_ledger.epsilon() == np.inf
    assert epsilon_of(1e9, 1e-6) == np.inf
    with pytest.raises(ModelError, match="zero or more"):
        site_ledger.add(-1.0, 1.0)
    with pytest.raises(ModelError, match="between 0 and 1"):
        epsilon_of(1.0, 0.0)
