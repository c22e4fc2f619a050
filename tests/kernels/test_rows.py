"""Each kernel against its numpy twin."""

import numpy as np
import pytest

from fedstat.kernels import row_products


@pytest.fixture
def block():
    generator = np.random.default_rng(4)
    n = 3 * row_products.BLOCK + 17
    return generator.normal(size=(n, 5)), generator.normal(size=n), generator.integers(0, 4, size=n)


def test_row_dots(block):
    X, _, _ = block
    b = np.arange(5.0)
    np.testing.assert_allclose(row_products.row_dots(X, b), X @ b, rtol=1e-12, atol=1e-12)


def test_column_sums(block):
    X, w, _ = block
    np.testing.assert_allclose(row_products.column_sums(X, w), X.T @ w, rtol=1e-11)


def test_gram(block):
    X, w, _ = block
    np.testing.assert_allclose(row_products.gram(X, w), (X.T * w) @ X, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("p", [1, 4, 7])
def test_gram_of_any_layout(p):
    X = np.random.default_rng(p).normal(size=(500, 2 * p))
    for part in (X[:, :p], np.asfortranarray(X[:, :p]), X[::3, ::2]):
        w = np.linspace(-1.0, 2.0, len(part))
        np.testing.assert_allclose(row_products.gram(part, w), (part.T * w) @ part, rtol=1e-11, atol=1e-11)
