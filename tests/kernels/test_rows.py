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


@pytest.mark.parametrize("q", [1, 2, 3, 6])
def test_invert(q):
    """Matrices of either sign, some of which need another row as pivot."""
    signs, draw = set(), np.random.default_rng(q)
    for k in range(12):
        A = draw.normal(size=(q, q))
        A[0, 0] *= 1e-12 if k % 2 and q > 1 else 1.0
        sign, expected = np.linalg.slogdet(A)
        inverse, V = np.linalg.inv(A), np.empty((q, q))
        found = row_products.invert(A.copy(), V)
        np.testing.assert_allclose(V, inverse, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found, expected if sign > 0.0 else np.nan, rtol=1e-10, atol=1e-12)
        signs.add(sign)
    assert signs == {-1.0, 1.0}
