"""The sampler compared with exact probabilities, from a source that is the same in every run."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, norm

import fedstat
from fedstat.errors import ModelError
from fedstat.kernels import discrete_gaussian as kernel
from fedstat.privacy import discrete_gaussian as sampler
from fedstat.privacy.discrete_gaussian import discrete_gaussian


def source(seed):
    """SHAKE-256 of a seed and a counter: as good as random, and always the same."""
    count = iter(range(10**9))
    return lambda length: hashlib.shake_256(f"{seed} {next(count)}".encode()).digest(length)


def probabilities(variance, x):
    far = np.arange(-int(60 * float(variance) ** 0.5) - 60, int(60 * float(variance) ** 0.5) + 61)
    weights = np.exp(-(far.astype(float) ** 2) / (2.0 * float(variance)))
    return np.exp(-(x.astype(float) ** 2) / (2.0 * float(variance))) / weights.sum()


def p_value(draws, variance):
    """P-value of a chi-square test of fit; cells with fewer than ten expected draws are merged."""
    reach = int(np.abs(draws).max()) + 20
    x = np.arange(-reach, reach + 1)
    expected = probabilities(variance, x) * len(draws)
    found = np.bincount(draws + reach, minlength=len(x))
    inside = expected >= 10
    rest = [len(draws) - expected[inside].sum()], [len(draws) - found[inside].sum()]
    expected, found = np.append(expected[inside], rest[0]), np.append(found[inside], rest[1])
    return chisquare(found[expected > 0], expected[expected > 0]).pvalue


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(1), Fraction(9, 2), Fraction(100, 3)])
def test_draws_have_the_exact_probabilities(variance):
    draws = discrete_gaussian(variance, 12_000, source(1))
    assert p_value(draws, variance) > 1e-3
    # And the test would see another scale.
    if variance >= 1:
        assert min(p_value(draws, variance * k) for k in (Fraction(9, 10), Fraction(10, 9))) < 1e-3


def test_large_noise_is_nearly_normal():
    variance = Fraction(10**14, 7)
    draws = discrete_gaussian(variance, 3_000, source(2))
    assert kstest(draws / float(variance) ** 0.5, norm.cdf).pvalue > 1e-3
    assert kstest(draws / (1.2 * float(variance) ** 0.5), norm.cdf).pvalue < 1e-2


@pytest.mark.parametrize("x, y", [(0, 1), (1, 3), (1, 1), (5, 2)])
def test_a_coin_falls_with_its_probability(x, y):
    coins = sampler._Coins(source(3))
    n = 20_000
    heads = sum(coins.exponential(x, y) for _ in range(n))
    p = np.exp(-x / y)
    assert abs(heads - n * p) <= 3.3 * np.sqrt(n * p * (1.0 - p)) + 1e-9


@pytest.mark.parametrize("n", [1, 2, 7, 256, 257])
def test_numbers_below_a_bound_are_equally_probable(n):
    coins = sampler._Coins(source(4))
    draws = np.bincount([coins.below(n) for _ in range(40 * n)], minlength=n)
    assert len(draws) == n and (n == 1 or chisquare(draws).pvalue > 1e-3)


def test_a_source_decides_all_and_the_default_is_the_operating_systems():
    one, same = (discrete_gaussian(Fraction(50), 100, source(5)) for _ in range(2))
    np.testing.assert_array_equal(one, same)
    assert (one != discrete_gaussian(Fraction(50), 100, source(6))).any()
    assert (discrete_gaussian(Fraction(50), 100) != discrete_gaussian(Fraction(50), 100)).any()


@pytest.mark.parametrize("variance", [Fraction(0), Fraction(-1), Fraction(2**101)])
def test_a_variance_without_meaning_is_refused(variance):
    with pytest.raises(ModelError, match="variance"):
        discrete_gaussian(variance, 1)


@pytest.mark.parametrize("file", ["privacy/discrete_gaussian.py", "federation/disclosure/privacy_budget.py"])
def test_no_noise_comes_from_a_generator_that_can_be_announced(file):
    text = (Path(fedstat.__file__).parent / file).read_text()
    assert "np.random" not in text and "import random\n" not in text


def stream(seed, zeros=range(0)):
    """Words of a generator, for every kind of request; some of them are 0."""
    words = np.random.default_rng(seed).integers(2**64, size=200_000, dtype=np.uint64)
    words[list(zeros)] = 0
    content, place = words.tobytes(), [0]

    def take(length):
        place[0] += length
        return content[place[0] - length : place[0]]

    return take


@pytest.mark.parametrize("variance", [1, 2, 75_000, kernel.LARGEST])
def test_compiled_draws_are_those_of_the_loops_in_whole_numbers(variance):
    drawn = discrete_gaussian(Fraction(variance), 2_500, stream(7))
    coins = sampler._Coins(stream(7))
    assert drawn.tolist() == [sampler._draw(Fraction(variance), coins) for _ in range(2_500)]


@pytest.mark.parametrize("zeros", [range(40, 70), range(40, 3_000), range(40, 70_000)])
def test_a_draw_that_leaves_64_bits_or_the_words_at_hand_is_the_same(zeros):
    """Coins of zeros fall on one side for ever: proposals go far, and series on."""
    small = Fraction(kernel.LARGEST)
    drawn = discrete_gaussian(small, 50, stream(8, zeros))
    coins = sampler._Coins(stream(8, zeros))
    assert drawn.tolist() == [sampler._draw(small, coins) for _ in range(50)]


@pytest.mark.parametrize(("found", "ends"), [(2**60, False), (2**60 + 1, True), (2**60 + 2, True)])
def test_compiled_comparisons_are_of_whole_numbers(found, ends):
    """In double precision, 2^60 and 2^60 + 1 are one number."""
    words = np.array([found << 3], dtype=np.uint64)  # 61 bits are drawn
    words.setflags(write=False)
    at = np.zeros(1, np.int64)
    expected = 1 if ends else kernel.OUT  # the first round ends, or the second needs more than 62 bits
    assert kernel._at_most_one(2**60 + 1, 2**61, words, at) == expected
    assert at[0] == 1


def test_compiled_draws_are_compiled_for_one_type_each():
    variance, words = 1000, np.arange(1, 400, dtype=np.uint64) << np.uint64(54)
    kernel.draw_words(variance, 32, words, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel._draws._cache, "save_overload", lambda *_: None)
        kernel._draws.recompile()  # a function of the cache has not loaded its parts
    for function in (kernel._below, kernel._at_most_one, kernel._exponential):
        types = {tuple(map(str, signature[:-2])) for signature in function.signatures}
        assert types == {("int64", "int64")}, function
