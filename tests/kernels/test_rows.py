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


def test_cross_products(block):
    X, w, _ = block
    of = np.array([1, 4])
    np.testing.assert_allclose(
        row_products.cross_products(X, of, w), (X[:, of].T * w) @ X, rtol=1e-11, atol=1e-10
    )


def test_add_at(block):
    _, w, _ = block
    at = np.array([0, 5, 7])
    expected = w.copy()
    expected[at] += [1.0, 2.0, 3.0]
    row_products.add_at(w, at, np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(w, expected)


def test_weighted_rows(block):
    X, _, code = block
    H, w, less = np.ascontiguousarray(X.T), np.arange(5.0), np.arange(4.0)
    np.testing.assert_allclose(
        row_products.weighted_rows(H, w, less, code), w @ H - less[code], rtol=1e-12, atol=1e-12
    )


def test_standardized_residuals(block):
    X, y, code = block
    v = np.array([1.0, 2.0, 0.5, 4.0])
    z, z1, z2 = row_products.standardized_residuals(y, X[:, 0].copy(), code, 0.3, v)
    expected = (y - 0.3 - X[:, 0]) / v[code]
    np.testing.assert_allclose(z, expected, rtol=1e-13)
    np.testing.assert_allclose(z1, np.bincount(code, expected), rtol=1e-10)
    np.testing.assert_allclose(z2, np.bincount(code, expected**2), rtol=1e-10)
