"""Columns less the effects of levels, compared with least squares on their indicators."""

from __future__ import annotations

import numpy as np
import pytest

from fedstat.errors import EstimationError
from fedstat.kernels import absorption
from fedstat.kernels.absorption import absorbed_rank, level_differences, without_levels


def levels(rng: np.random.Generator, n: int, count: int) -> np.ndarray:
    return np.unique(rng.integers(0, count, n), return_inverse=True)[1]


def indicators(*codes: np.ndarray) -> np.ndarray:
    return np.column_stack([np.eye(code.max() + 1)[code] for code in codes])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("effects", [1, 2])
@pytest.mark.parametrize(("n", "first", "second"), [(1, 1, 1), (2, 1, 2), (200, 40, 10), (900, 300, 200)])
def test_what_is_left_are_the_residuals_of_indicators(n, first, second, effects, weighted):
    rng = np.random.default_rng(n + effects)
    codes = [levels(rng, n, first), levels(rng, n, second)][:effects]
    w = rng.uniform(0.5, 2.0, n) if weighted else np.ones(n)
    columns = rng.normal(size=(n, 3)) * [1.0, 100.0, 1e-3] + [0.0, 1e4, 5.0]
    D, root = indicators(*codes), np.sqrt(w)[:, None]
    expected = columns - D @ np.linalg.lstsq(root * D, root * columns, rcond=1e-12)[0]
    found = without_levels(columns, codes, w if weighted else None)
    np.testing.assert_allclose(found / [1.0, 100.0, 1e-3], expected / [1.0, 100.0, 1e-3], atol=2e-10)
    assert absorbed_rank(codes) == np.linalg.matrix_rank(D)


def test_what_the_levels_explain_is_exactly_zero():
    rng = np.random.default_rng(1)
    first, second = levels(rng, 300, 60), levels(rng, 300, 20)
    one = np.where(first == 3, rng.normal(size=300), first / 3.0)  # varies within one level alone
    columns = np.column_stack([first * 1.7 + 1e6, one])
    found = without_levels(columns, [first])
    assert not found[:, 0].any()
    assert (found[:, 1] != 0.0).tolist() == (first == 3).tolist()
    assert not without_levels((first * 1.7 + second * 0.3)[:, None], [first, second]).any()


def test_no_rows_have_no_levels():
    nothing = np.zeros(0, dtype=np.int64)
    assert absorbed_rank([nothing, nothing]) == 0


@pytest.mark.parametrize("n", [0, 1, 2, 60])
def test_differences_within_levels_have_the_same_products(n):
    rng = np.random.default_rng(2)
    code, X = rng.integers(0, max(n // 3, 1), n), rng.normal(size=(n, 2))
    found = level_differences(X, code)
    assert len(found) == n - len(np.unique(code))
    less = X - np.array([X[code == c].mean(axis=0) for c in code]).reshape(-1, 2)
    np.testing.assert_allclose(found.T @ found, less.T @ less, atol=1e-10)


def test_a_difference_of_two_rows_is_one_row():
    found = level_differences(np.array([[1.0], [5.0], [2.0], [2.0]]), np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(found, [[4.0 / 2**0.5], [0.0]])


def test_levels_that_few_rows_connect_are_an_error(monkeypatch):
    monkeypatch.setattr(absorption, "MOST_STEPS", 2)
    chain = np.arange(40)
    with pytest.raises(EstimationError, match="connected by few rows"):
        without_levels(np.random.default_rng(0).normal(size=(40, 1)), [chain // 2, (chain + 1) // 2])
