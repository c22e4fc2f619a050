"""Draws of sets of sites: their expectation is the sum over all sets, over every draw there is."""

from math import comb

import numpy as np
import pytest

from fedstat.kernels.split_networks import (
    draw_subset_per_row,
    draw_subset_per_size,
    subsets_of_size,
    subsets_within,
)


def every_draw(choose):
    """All outcomes of a function of a draw, with their probabilities: a walk through every answer."""
    waiting = [((), 1.0)]
    while waiting:
        answers, probability = waiting.pop()
        left, request = list(answers), []

        def draw(n, left=left, request=request):
            request.append(n)
            return left.pop(0) if left else 0

        found = choose(draw)
        if len(request) == len(answers):
            yield found, probability
            continue
        n = request[len(answers)]
        waiting += [((*answers, i), probability / n) for i in range(n)]


def several(draw):
    """Draws of several numbers, one after the other."""
    return lambda bounds: np.array([draw(int(n)) for n in bounds])


def one_set(seen, draw):
    (found,), (weight,) = draw_subset_per_row(np.array([seen]), several(draw))
    return {int(found): float(weight)}


@pytest.mark.parametrize("draws", [draw_subset_per_size, one_set])
@pytest.mark.parametrize("seen", [0b1, 0b101, 0b11011, 0b111111])
def test_the_expectation_of_a_draw_is_the_sum_over_all_sets(draws, seen):
    if draws is draw_subset_per_size and seen.bit_count() > 4:
        seen = 0b1111  # the draws of six sizes are millions
    expected = dict.fromkeys(subsets_within(seen), 0.0)
    total = 0.0
    for found, probability in every_draw(lambda draw: draws(seen, draw)):
        total += probability
        for s, weight in found.items():
            expected[s] += probability * weight
    assert total == pytest.approx(1.0)
    assert expected == pytest.approx(dict.fromkeys(subsets_within(seen), 1.0))


def test_the_expectation_of_sets_of_several_patterns():
    seen = np.array([0b101, 0b11, 0b10, 0b101])
    expected = [dict.fromkeys(subsets_within(int(one)), 0.0) for one in seen]
    for (sets, weights), probability in every_draw(lambda draw: draw_subset_per_row(seen, several(draw))):
        for own, s, weight in zip(expected, sets.tolist(), weights, strict=True):
            own[s] += probability * weight
    assert expected == [pytest.approx(dict.fromkeys(own, 1.0)) for own in expected]


def test_sets_of_a_size():
    assert len(subsets_within(0b10110)) == 7
    for size in (1, 2, 3):
        found = subsets_of_size(0b10110, size)
        assert len(set(found)) == len(found) == comb(3, size)
        assert all(s & 0b10110 == s and s.bit_count() == size for s in found)
