"""Limits of the privacy arithmetic: the last argument that is allowed, and the first that is not."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from noisy_counts import cell_counts
from scipy.stats import binom, norm

from fedstat.errors import ModelError
from fedstat.privacy.discrete_gaussian import discrete_gaussian
from fedstat.privacy.gaussian_dp import (
    GaussianAccountant,
    delta_of,
    epsilon_of,
    largest_auc,
    mu_interval,
    mu_of,
    record_epsilon,
)
from fedstat.privacy.sensitivity import (
    clip_rows,
    gram_sensitivity,
    moments_sensitivity,
)
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget, rho_of_noise, round_to_grid

HALF = Fraction(1, 2)
JUST = Fraction(1, 10**30)
ALLOWED = {
    "noise of the largest variance": lambda: discrete_gaussian(Fraction(2**100), 1),
    "noise of a small variance": lambda: discrete_gaussian(Fraction(1, 100), 1),
    "no numbers": lambda: discrete_gaussian(Fraction(1), 0),
    "a delta just above 0": lambda: epsilon_of(1.0, 1e-300),
    "a delta just below 1": lambda: epsilon_of(1.0, 1.0 - 1e-9),
    "no release": lambda: epsilon_of(0.0, 1e-6),
    "a budget of epsilon 0": lambda: mu_of(0.0, 1e-6),
    "a release of no sensitivity": lambda: GaussianAccountant().add(0.0, 0.0, 0),
    "one answer": lambda: record_epsilon(1, 1e-9),
    "no hits": lambda: mu_interval(0, 1, 0.05),
    "all hits": lambda: mu_interval(1, 1, 0.05),
    "a radius above 0": lambda: gram_sensitivity([JUST, 1]),
    "a radius of one half": lambda: moments_sensitivity([HALF, HALF]),
    "the longest rows": lambda: clip_rows(np.ones((1, 1)), 2**40 - 1, 10),
    "free noise": lambda: rho_of_noise(0, JUST),
    "zCDP of nothing": lambda: epsilon_of_zcdp(Fraction(0), 1e-6),
    "a budget without delta": lambda: rho_of_budget(1.0, 0.0),
}
REFUSED = {
    "noise beyond the largest variance": lambda: discrete_gaussian(2**100 + JUST, 1),
    "noise of variance 0": lambda: discrete_gaussian(Fraction(0), 1),
    "a delta of 0": lambda: epsilon_of(1.0, 0.0),
    "a delta of 1": lambda: epsilon_of(1.0, 1.0),
    "a delta of 1 for a budget": lambda: mu_of(1.0, 1.0),
    "a mu below 0": lambda: epsilon_of(-1e-9, 1e-6),
    "an infinite mu": lambda: epsilon_of(np.inf, 1e-6),
    "an epsilon below 0": lambda: mu_of(-1e-9, 1e-6),
    "an infinite epsilon": lambda: mu_of(np.inf, 1e-6),
    "a sensitivity below 0": lambda: GaussianAccountant().add(-1e-9, 1.0),
    "a deviation below 0": lambda: GaussianAccountant().add(1.0, -1e-9),
    "fewer than no releases": lambda: GaussianAccountant().add(1.0, 1.0, -1),
    "no answers": lambda: record_epsilon(0, 1.0),
    "answers of epsilon 0": lambda: record_epsilon(1, 0.0),
    "answers at a delta of 0": lambda: record_epsilon(1, 1.0, 0.0),
    "answers at a delta of 1": lambda: record_epsilon(1, 1.0, 1.0),
    "no trials": lambda: mu_interval(0, 0, 0.05),
    "more hits than trials": lambda: mu_interval(2, 1, 0.05),
    "fewer than no hits": lambda: mu_interval(-1, 1, 0.05),
    "a level of 0": lambda: mu_interval(1, 2, 0.0),
    "a level of 1": lambda: mu_interval(1, 2, 1.0),
    "no radius": lambda: gram_sensitivity([]),
    "a radius of 0": lambda: gram_sensitivity([1, 0]),
    "a radius of 0, first": lambda: gram_sensitivity([0, 1]),
    "no radius of moments": lambda: moments_sensitivity([]),
    "a radius below one half": lambda: moments_sensitivity([1, HALF - JUST]),
    "rows beyond the longest": lambda: clip_rows(np.ones((1, 1)), 2**40, 10),
    "no noise": lambda: rho_of_noise(1, Fraction(0)),
    "a squared sensitivity below 0": lambda: rho_of_noise(-JUST, Fraction(1)),
    "zCDP at a delta of 1": lambda: epsilon_of_zcdp(Fraction(1), 1.0),
    "zCDP at a delta of 0": lambda: epsilon_of_zcdp(Fraction(1), 0.0),
    "an infinite rho": lambda: epsilon_of_zcdp(math.inf, 1e-6),
    "a rho below 0": lambda: epsilon_of_zcdp(-JUST, 1e-6),
    "an infinite budget": lambda: rho_of_budget(math.inf, 1e-6),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_the_last_argument_that_is_allowed_gives_finite_numbers(case):
    found = ALLOWED[case]()
    numbers = getattr(found, "squared", getattr(found, "coordinator", found))
    if case == "all hits":
        assert found == (0.0, np.inf)
    elif found is not None:
        assert np.isfinite(np.asarray(numbers, dtype=np.float64)).all()


@pytest.mark.parametrize("case", REFUSED)
def test_the_first_argument_that_is_not_allowed_is_named(case):
    with pytest.raises(ModelError, match=r"expected|above 0|radius|bounds|64 bits"):
        REFUSED[case]()


def test_an_epsilon_without_meaning_is_infinite():
    assert epsilon_of(1.04e6, 1e-6) == pytest.approx(1.04e6**2 / 2.0, rel=1e-4)
    assert epsilon_of(1.1e6, 1e-6) == np.inf
    assert epsilon_of(0.1, 0.9) == 0.0 and delta_of(0.0, 0.1) < 0.9


@pytest.mark.parametrize("rho", [Fraction(1), Fraction(1, 3)])
def test_the_epsilon_of_zcdp_is_the_least_over_all_orders(rho):
    a = 1.0 + np.exp(np.linspace(-6.0, 6.0, 200_001))
    wanted = a * float(rho) + (a * np.log1p(-1.0 / a) - np.log(a - 1.0) - math.log(1e-6)) / (a - 1.0)
    assert epsilon_of_zcdp(rho, 1e-6) == pytest.approx(wanted.min(), rel=1e-8)


def test_costs_are_multiples_of_the_grid_on_the_safe_side():
    third = Fraction(1, 3)
    assert round_to_grid(third) == Fraction(2**64 // 3, 2**64)
    assert round_to_grid(third, up=True) == Fraction(2**64 // 3 + 1, 2**64)


@pytest.mark.parametrize("answers", [1, 2, 7])
def test_the_epsilon_of_randomized_answers_is_the_root_of_all_terms(answers):
    """Every term of theorem 3.3 of Kairouz, Oh and Viswanath (2017), at the epsilon that is found."""
    a, delta = 0.5, 1e-3
    epsilon = record_epsilon(answers, a, delta)
    k, q = np.arange(answers + 1), 1.0 / (1.0 + math.exp(-a))
    terms = binom.pmf(k, answers, q) * np.maximum(0.0, 1.0 - np.exp(epsilon - (2 * k - answers) * a))
    assert terms.sum() == pytest.approx(delta, rel=1e-9)
    assert record_epsilon(answers, a, 1.0 - 1e-9) == 0.0


@pytest.mark.parametrize(
    ("hits", "low", "high"), [(0, 0.0, 0.3085), (50, 0.3983, 0.6017), (100, 0.9638, 1.0)]
)
def test_the_interval_of_mu_is_that_of_clopper_and_pearson(hits, low, high):
    """Shares of 100 from tables, as mu = 2 Phi^-1(share), none below 0."""
    found = mu_interval(hits, 100, 0.05)
    assert found[0] == pytest.approx(max(0.0, 2.0 * norm.ppf(low)), abs=5e-3)
    expected = 0.0 if hits == 0 else np.inf if hits == 100 else 2.0 * norm.ppf(high)
    assert found[1] == pytest.approx(expected, abs=5e-3)


def test_both_ends_of_the_interval_of_mu_above_zero():
    low, high = mu_interval(70, 100, 0.05)
    assert (norm.cdf(low / 2.0), norm.cdf(high / 2.0)) == pytest.approx((0.6002, 0.7876), abs=5e-5)


def test_the_largest_area_is_one_half_without_a_release():
    assert largest_auc(0.0) == 0.5
    assert largest_auc(0.5) == pytest.approx(norm.cdf(1.0 / math.sqrt(2.0)))


def test_missing_scores_count_as_zero_and_no_row_is_longer_than_its_radius():
    assert clip_rows(np.array([[np.nan, 0.5]]), 1, 10).tolist() == [[0, 512]]
    # The root of this radius rounds to one, which is too long by one unit.
    places, unit = 27, 2**27
    cut = clip_rows(np.array([[2.0], [-2.0], [0.25]]), Fraction(unit**2 - 1, unit**2), places)
    assert cut.ravel().tolist() == [unit - 1, 1 - unit, unit // 4]


@pytest.mark.parametrize("code", [-1, 0, 2, 3])
def test_a_code_counts_in_its_cell_or_nowhere(code):
    counts = cell_counts(np.array([code]), 3)
    assert counts.values.tolist() == [int(code == cell) for cell in range(3)] and counts.squared == 2
    assert cell_counts(np.array([[code, 1]]), 3).values[3:].tolist() == [0, 1, 0]
    assert cell_counts(np.array([[code, 1]]), 3).squared == 4


@pytest.mark.parametrize("epsilon", [1e-6, 0.03, 0.09])
def test_a_small_epsilon_is_not_taken_for_zero(epsilon):
    """Below the first hundredths the mechanism still costs something, and exactly that is reported."""
    assert epsilon_of(mu_of(epsilon, 1e-6), 1e-6) == pytest.approx(epsilon, rel=1e-6)
    # One answer of epsilon a: delta = q - (1 - q) e^eps, q = 1 / (1 + e^-a).
    q = 1.0 / (1.0 + math.exp(-epsilon))
    assert record_epsilon(1, epsilon, 1e-9) == pytest.approx(math.log((q - 1e-9) / (1.0 - q)), rel=1e-6)


def test_the_epsilon_of_many_answers_is_sought_up_to_their_sum():
    """At a delta below the chance that all four answers are right, epsilon is close to 4 a, above a."""
    q = 1.0 / (1.0 + math.exp(-3.0))
    expected = math.log((q**4 - 1e-6) / (1.0 - q) ** 4)
    assert record_epsilon(4, 3.0, 1e-6) == pytest.approx(expected, rel=1e-9)


def test_small_sensitivities_and_deviations_are_charged():
    """A release is free only without sensitivity, and costs everything only without noise."""
    ledger = GaussianAccountant()
    ledger.add(0.05, 0.05)
    assert ledger.squared == 1.0
    assert ledger.epsilon() == ledger.epsilon(1e-6) == epsilon_of(1.0, 1e-6)


def test_a_site_with_between_a_third_and_half_of_the_length_has_the_exact_sensitivity():
    """4 R^2 (T - R^2) up to R^2 = T / 2, above it T^2."""
    assert gram_sensitivity([2, 3]).sites == (24, 25)
    assert gram_sensitivity([2, 2]).sites == (16, 16)
