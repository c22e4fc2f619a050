"""Fixed point and wrapping products, against Python's integers and numpy."""

import numpy as np
import pytest

from fedstat.errors import EstimationError
from fedstat.kernels import ring


def integers(generator, *shape):
    return generator.integers(-(2**63), 2**63, shape, dtype=np.int64)


def product_by_group(A, B, group, n_groups):
    """The same modulo 2^64 in Python's unbounded integers."""
    total = np.zeros((n_groups, A.shape[1], B.shape[1]), object)
    for a, b, g in zip(A.astype(object), B.astype(object), group, strict=True):
        total[g] += np.outer(a, b)
    return ((total + 2**63) % 2**64 - 2**63).astype(np.int64)


@pytest.mark.parametrize("n, p, q, n_groups", [(1, 1, 1, 1), (7, 1, 4, 3), (40, 5, 1, 2), (300, 3, 4, 9)])
def test_products_wrap_as_unbounded_integers_do(n, p, q, n_groups):
    generator = np.random.default_rng(n)
    A, B, group = integers(generator, n, p), integers(generator, n, q), generator.integers(0, n_groups, n)
    expected = product_by_group(A, B, group, n_groups)
    np.testing.assert_array_equal(ring.grouped_gram(A, B, group, n_groups), expected)


@pytest.mark.parametrize("extra", [-1, 0, 1, 17])
def test_blocks_of_rows_are_seamless(extra):
    generator = np.random.default_rng(3)
    n = 2 * ring.BLOCK + extra
    A, B, group = integers(generator, n, 3), integers(generator, n, 2), generator.integers(0, 2, n)
    expected = np.stack([A[group == g].T @ B[group == g] for g in range(2)])
    np.testing.assert_array_equal(ring.grouped_gram(A, B, group, 2), expected)


def test_a_group_without_rows_is_zero():
    A = np.ones((4, 2), np.int64)
    gram = ring.grouped_gram(A, A, np.array([0, 2, 2, 2]), 4)
    np.testing.assert_array_equal(gram[:, 0, 0], [1, 0, 3, 0])


def test_no_rows_give_zeros():
    gram = ring.grouped_gram(np.empty((0, 2), np.int64), np.empty((0, 3), np.int64), np.empty(0, np.int64), 2)
    np.testing.assert_array_equal(gram, np.zeros((2, 2, 3)))


def test_the_order_of_rows_does_not_matter():
    generator = np.random.default_rng(8)
    A, B, group = integers(generator, 500, 2), integers(generator, 500, 3), generator.integers(0, 4, 500)
    order = generator.permutation(500)
    np.testing.assert_array_equal(
        ring.grouped_gram(A, B, group, 4), ring.grouped_gram(A[order], B[order], group[order], 4)
    )


def test_memory_layout_does_not_matter():
    generator = np.random.default_rng(9)
    A, B, group = integers(generator, 50, 4), integers(generator, 50, 3), generator.integers(0, 2, 50)
    frozen = B.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(
        ring.grouped_gram(np.asfortranarray(A), frozen, np.repeat(group, 2)[::2], 2),
        ring.grouped_gram(A, B, group, 2),
    )


@pytest.mark.parametrize("group", [[0, 0], [0, 1, 2], [0, -1, 0]])
def test_groups_outside_the_array_are_refused(group):
    with pytest.raises(ValueError, match="groups"):
        ring.grouped_gram(np.ones((3, 1), np.int64), np.ones((3, 1), np.int64), np.array(group), 2)


def test_encoding_rounds_to_the_nearest():
    X = np.random.default_rng(0).normal(size=(1000, 3))
    encoded, squares = ring.encode(X, 20)
    np.testing.assert_array_equal(encoded, np.rint(X * 2**20))
    np.testing.assert_allclose(squares, (encoded.astype(float) ** 2).sum(0), rtol=1e-12)
    np.testing.assert_array_equal(ring.decode(encoded, 20), np.rint(X * 2**20) / 2**20)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300, 2.0**45])
def test_what_does_not_fit_shows_in_the_squares_of_its_column(bad):
    X = np.ones((3, 2))
    X[1, 1] = bad
    _, squares = ring.encode(X, 20)
    assert squares[0] == 3 * 4.0**20
    assert not squares[1] <= ring.LARGEST_SQUARES


@pytest.mark.parametrize("n", [1, 2, 200, 166_207, 2**18, 2**18 + 1, 1_600_000])
def test_the_worst_standardized_columns_stay_in_range(n):
    """Equal columns of constant size, and all weight in one row: both attain Cauchy and Schwarz's bound."""
    f = ring.fractional_bits(n)
    for rows, value in ((n, 1.0), (1, np.sqrt(n))):
        X = np.full((rows, 1), value)
        encoded, squares = ring.encode(X, f)
        assert squares[0] <= ring.LARGEST_SQUARES
        gram = ring.grouped_gram(encoded, -encoded, np.zeros(rows, np.int64), 1)
        np.testing.assert_allclose(ring.decode(gram, 2 * f)[0, 0, 0], -n, rtol=2.0 ** (1 - f))


def test_columns_that_pass_cannot_wrap():
    """Just below the largest squares, one bit more of f would be refused."""
    n = 2**18
    f = ring.fractional_bits(n)
    assert not ring.encode(np.ones((n, 1)), f + 1)[1][0] <= ring.LARGEST_SQUARES
    assert ring.LARGEST_SQUARES < 2.0**63


def test_spread_costs_its_own_bits():
    assert ring.fractional_bits(166_207) == 22
    assert ring.fractional_bits(166_207, spread=5) == 17
    X = np.full((1000, 1), 31.9)
    assert ring.encode(X, ring.fractional_bits(1000, spread=5))[1][0] <= ring.LARGEST_SQUARES


def test_too_few_bits_are_an_error():
    with pytest.raises(EstimationError, match=r"fewer than 10.*standardize"):
        ring.fractional_bits(166_207, spread=13)


def as_integers(words):
    """Integers of several words, (limbs, n), in Python's unbounded ones."""
    return sum(limb.astype(object) * 2 ** (64 * place) for place, limb in enumerate(words))


@pytest.mark.parametrize("limbs", [1, 2, 6])
@pytest.mark.parametrize("terms", [1, 2, 40])
def test_sums_of_words_carry_as_unbounded_integers_do(limbs, terms):
    generator = np.random.default_rng(limbs)
    drawn = integers(generator, terms, limbs, 9).view(np.uint64)
    drawn[:, :, :3] = 2**64 - 1  # each limb carries into the next
    drawn[:, 1:, 3] = 0
    expected = sum(as_integers(one) for one in drawn) % 2 ** (64 * limbs)
    assert (as_integers(ring.sum_words(drawn)) == expected).all()


def test_sums_of_no_numbers_are_empty():
    assert ring.sum_words(np.zeros((3, 2, 0), np.uint64)).shape == (2, 0)
