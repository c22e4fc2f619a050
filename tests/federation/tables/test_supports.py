"""Supports of columns: levels of factors in any coding, zeros of numbers, cells of several factors."""

import numpy as np
import pytest

from fedstat.federation.tables.supports import supports_of_columns

Z = np.array([2.0, 0.0, 1.5, 4.0, 0.5, 3.0, 7.0, 6.0])
A = np.array([1, 0, 0, 1, 0, 1, 0, 0.0])
LEVELS = np.array([0, 1, 2, 0, 1, 2, 0, 1])


def sets(X, terms=None, factors=None):
    """The supports that are not empty, as sets of rows."""
    X = np.asarray(X, dtype=float).reshape(len(X), -1)
    terms = [f"x{j}" for j in range(X.shape[1])] if terms is None else terms
    found = supports_of_columns(X, terms, terms, factors)
    assert set(np.unique(found.columns)) <= {0, 1}
    assert len(found.names) == found.columns.shape[1]
    return {tuple(np.flatnonzero(one)) for one in found.columns.T if one.any()}, found.columns.shape[1]


def by_level(values):
    return {tuple(np.flatnonzero(values == v)) for v in np.unique(values)}


@pytest.mark.parametrize("coded", [A, 1.0 + A, A - A.mean(), -3.0 * A + 2.0])
def test_a_column_of_two_values_in_any_units(coded):
    assert sets(coded) == (by_level(A), 2)


def test_a_number_with_zeros_and_one_without():
    assert sets(Z) == ({(0, 2, 3, 4, 5, 6, 7)}, 2)
    assert sets(Z + 1.0) == (set(), 2)


@pytest.mark.parametrize(
    "contrasts",
    [[[0, 0], [1, 0], [0, 1]], [[1, 0], [0, 1], [-1, -1]], [[-1, -1], [1, -1], [0, 2]]],
    ids=["treatment", "sum", "helmert"],
)
def test_a_factor_in_any_coding_has_its_levels(contrasts):
    X = np.array(contrasts, dtype=float)[LEVELS]
    assert sets(X, ["g", "g"]) == (by_level(LEVELS), 4)


@pytest.mark.parametrize("move", [0.0, A.mean()])
def test_a_factor_times_a_number(move):
    """Also where the factor is centered, and the product is zero nowhere."""
    found, width = sets((A - move) * Z, ["a:z"], {"a:z": [A[:, None], Z[:, None]]})
    assert found == {(0, 3, 5), (2, 4, 6, 7)}
    assert width == 4


def test_two_factors_have_all_cells():
    b = np.array([1, 1, 0, 0, 1, 0, 1, 0.0])
    found, width = sets((A - A.mean()) * (b - b.mean()), ["a:b"], {"a:b": [A[:, None], b[:, None]]})
    assert found == by_level(2 * A + b)
    assert width == 4


def test_factors_that_are_not_known_leave_the_columns():
    found, width = sets(A * Z, ["a:z"], {"a:z": [None, None]})
    assert found == {(0, 3, 5)}
    assert width == 4


def test_rows_that_lack_a_value_are_in_no_support():
    X = np.column_stack([np.where(Z > 5.0, np.nan, A), np.where(A == 1.0, np.nan, Z)])
    found, _ = sets(X)
    assert found == {(0, 3, 5), (1, 2, 4), (2, 4, 6, 7)}


def test_the_number_of_supports_does_not_depend_on_the_rows():
    for X in (A, Z, Z + 1.0, np.zeros(8), np.full(8, np.nan)):
        assert sets(X)[1] == 2
    assert supports_of_columns(np.zeros((0, 3)), ["x"] * 3, ["x"] * 3).columns.shape == (0, 6)
