"""Epsilon of many randomized answers, against enumeration and published figures."""

from itertools import product
from math import exp

import pytest

from fedstat.errors import ModelError
from fedstat.privacy.gaussian_dp import record_epsilon


def delta_by_enumeration(answers, a, epsilon):
    """Sum over all answers of the part of the one law that exp(epsilon) times the other leaves over."""
    p = 1.0 / (1.0 + exp(-a))
    total = 0.0
    for bits in product((0, 1), repeat=answers):
        ones = sum(bits)
        here = p**ones * (1.0 - p) ** (answers - ones)
        there = p ** (answers - ones) * (1.0 - p) ** ones
        total += max(0.0, here - exp(epsilon) * there)
    return total


@pytest.mark.parametrize(("answers", "a", "delta"), [(1, 0.7, 0.05), (6, 0.5, 1e-3), (9, 0.2, 0.01)])
def test_against_all_answers(answers, a, delta):
    assert delta_by_enumeration(answers, a, record_epsilon(answers, a, delta)) == pytest.approx(
        delta, rel=1e-9
    )


@pytest.mark.parametrize(
    ("answers", "epsilon"),
    [(999 * 20, 2_771), (2_999 * 20, 7_908), (4_999 * 20, 12_970), (10 * 999 * 20, 25_496)],
)
def test_one_unit_per_pair_of_a_comparison_and_a_margin_is_thousands_per_record(answers, epsilon):
    assert record_epsilon(answers, 0.5) == pytest.approx(epsilon, abs=0.6)


def test_one_answer_costs_its_own_epsilon_and_a_large_delta_nothing():
    assert record_epsilon(1, 0.3, 1e-12) == pytest.approx(0.3, abs=1e-10)
    assert record_epsilon(1, 0.1, 0.5) == 0.0
    with pytest.raises(ModelError, match="at least one answer"):
        record_epsilon(0, 1.0)
