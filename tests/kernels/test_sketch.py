"""Common random projections: exact in expectation, as accurate as stated, useless without the seed."""

import numpy as np
import pytest
from scipy.linalg import hadamard as hadamard_matrix

from fedstat.kernels.sketch import BLOCK, SKETCHES, hadamard

N, P = 700, 3


@pytest.fixture(params=sorted(SKETCHES))
def sketch(request):
    return SKETCHES[request.param]


@pytest.fixture
def columns():
    generator = np.random.default_rng(8)
    common = generator.normal(size=(N, 1))
    return generator.normal(size=(N, P)) + common, generator.normal(size=(N, P)) + common


def lengths(X, Y):
    return np.outer(np.linalg.norm(X, axis=0), np.linalg.norm(Y, axis=0))


def test_hadamard_is_that_of_scipy():
    A = np.random.default_rng(0).normal(size=(64, 3))
    expected = hadamard_matrix(64) @ A
    hadamard(A)
    np.testing.assert_allclose(A, expected, atol=1e-12)


def test_products_are_exact_on_average(sketch, columns):
    X, Y = columns
    every = np.arange(N)
    products = [sketch(X, every, N, 256, seed).T @ sketch(Y, every, N, 256, seed) for seed in range(200)]
    error = (np.mean(products, axis=0) - X.T @ Y) / lengths(X, Y)
    # the mean of 200 has a standard deviation of about sqrt(2 / 256 / 200) = .006
    assert np.abs(error).max() < 0.025


def test_error_is_that_of_its_size(sketch, columns):
    X, Y = columns
    every = np.arange(N)
    for size in (100, 1600):
        errors = [
            (sketch(X, every, N, size, seed).T @ sketch(Y, every, N, size, seed) - X.T @ Y) / lengths(X, Y)
            for seed in range(20)
        ]
        rms = np.sqrt(np.mean(np.square(errors)))
        assert np.sqrt(0.7 / size) < rms < np.sqrt(2.0 / size)


def test_other_seeds_share_nothing(sketch, columns):
    X, _ = columns
    every = np.arange(N)
    products = [
        sketch(X, every, N, 256, seed).T @ sketch(X, every, N, 256, seed + 1000) for seed in range(50)
    ]
    assert np.abs(np.mean(products, axis=0) / lengths(X, X)).max() < 0.05


def test_absent_rows_count_as_zero(sketch, columns):
    X, _ = columns
    has = np.flatnonzero(np.random.default_rng(1).random(N) < 0.4)
    filled = np.zeros_like(X)
    filled[has] = X[has]
    np.testing.assert_allclose(
        sketch(X[has], has, N, 300, 5), sketch(filled, np.arange(N), N, 300, 5), atol=1e-11
    )


def test_every_block_of_entities_is_mixed_by_numbers_of_its_own(sketch):
    """Columns with a mean: the same numbers in every block would add the blocks' cross-products."""
    n = 2 * BLOCK + 100
    X = np.random.default_rng(2).normal(size=(n, 2)) + 2.0
    projected = sketch(X, np.arange(n), n, 500, 3)
    error = (projected.T @ projected - X.T @ X) / lengths(X, X)
    assert np.abs(error).max() < 5 * np.sqrt(2.0 / 500)


def test_a_structured_sketch_never_has_more_rows_than_half_the_entities():
    X = np.random.default_rng(2).normal(size=(100, 2))
    projected = SKETCHES["structured"](X, np.arange(100), 100, 320, 3)
    assert projected.shape == (350, 2)  # seven sketches of fifty rows
    parts = projected.reshape(7, 50, 2)
    assert len({part.tobytes() for part in parts}) == 7
