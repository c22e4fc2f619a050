"""Exact accounting of discrete Gaussian noise, compared with published values and full enumeration."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.special import logsumexp

from fedstat.errors import ModelError
from fedstat.privacy.gaussian_dp import epsilon_of
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget, rho_of_noise, round_to_grid


@pytest.mark.parametrize(("epsilon", "rho"), [(1.0, 0.0244), (3.0, 0.185), (10.0, 1.54)])
def test_budgets_at_a_delta_of_one_in_a_million(epsilon, rho):
    """To the three digits that were noted where the formula was held against opendp 0.16.0."""
    assert float(rho_of_budget(epsilon, 1e-6)) == pytest.approx(rho, rel=5e-3)


def test_the_discrete_guarantee_is_a_little_weaker_than_the_gaussian():
    """At (5, 1e-6) it takes noise of 1.039 sensitivities instead of .980."""
    assert 1.0 / math.sqrt(2.0 * rho_of_budget(5.0, 1e-6)) == pytest.approx(1.039, abs=1e-3)
    for mu in (0.01, 0.5, 3.0, 50.0):
        exact, discrete = epsilon_of(mu, 1e-6), epsilon_of_zcdp(mu**2 / 2.0, 1e-6)
        assert exact < discrete < 1.35 * exact + 0.1


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 20.0, 1e3])
def test_both_directions_are_rounded_to_the_safe_side(epsilon, delta):
    """A budget's rho has no larger epsilon than it, and hardly a smaller one."""
    rho = rho_of_budget(epsilon, delta)
    back = epsilon_of_zcdp(rho, delta)
    assert back == pytest.approx(epsilon, rel=1e-12)
    assert back >= epsilon_of_zcdp(rho * (1 - Fraction(1, 10**14)), delta)
    # Every order is a bound: none of a fine grid gives a smaller epsilon.
    a = 1.0 + np.geomspace(1e-6, 1e9, 200_001)
    grid = a * float(rho) + (a * np.log1p(-1.0 / a) - np.log(a - 1.0) - np.log(delta)) / (a - 1.0)
    assert back <= grid.min() * (1.0 + 1e-9) and back >= grid.min() * (1.0 - 1e-6)


def hockey_stick(variance, shift, epsilon):
    """Delta of one discrete Gaussian and one that is shifted, by its definition."""
    x = np.arange(-400, 401)
    log_p = -((x - shift) ** 2) / (2.0 * variance)
    log_q = -(x**2) / (2.0 * variance)
    log_p, log_q = log_p - logsumexp(log_p), log_q - logsumexp(log_q)
    return float(np.maximum(0.0, np.exp(log_p) - np.exp(epsilon + log_q)).sum())


@pytest.mark.parametrize("variance", [Fraction(1, 2), Fraction(9, 2), Fraction(100)])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_what_is_claimed_is_no_less_than_what_is_true(variance, delta):
    epsilon = epsilon_of_zcdp(rho_of_noise(4, variance), delta)
    assert hockey_stick(float(variance), 2, epsilon) <= delta


def test_costs_add_up_without_a_rest():
    budget = rho_of_budget(1.0, 1e-6)
    spent = sum((budget / 7 for _ in range(7)), Fraction(0))
    assert spent == budget and spent + Fraction(1, 10**60) > budget
    share = round_to_grid(budget / 7)
    assert 0 <= budget - 7 * share < Fraction(8, 2**64) and round_to_grid(share, up=True) == share
    assert 0 < round_to_grid(budget / 7, up=True) - budget / 7 < Fraction(1, 2**64)


def test_nothing_costs_nothing_and_no_delta_buys_nothing():
    assert epsilon_of_zcdp(Fraction(0), 1e-6) == 0.0
    assert rho_of_budget(1.0, 0.0) == 0 and rho_of_budget(0.0, 1e-6) < 1e-11
    assert rho_of_noise(0, Fraction(1)) == 0
    for wrong in (lambda: rho_of_noise(1, Fraction(0)), lambda: rho_of_noise(-1, Fraction(1))):
        with pytest.raises(ModelError, match="zero or more"):
            wrong()
    with pytest.raises(ModelError, match="between 0 and 1"):
        epsilon_of_zcdp(Fraction(1), 1.0)
