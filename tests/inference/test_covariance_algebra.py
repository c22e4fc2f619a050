"""Covariance algebra against identities and simulation."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedstat.errors import EstimationError
from fedstat.inference.covariance import delta_method, invert_information, nearest_psd, symmetrize


@pytest.fixture
def info():
    A = np.random.default_rng(3).normal(size=(6, 6))
    return A @ A.T + np.eye(6)


def test_delta_method_of_a_linear_map_is_its_sample_covariance():
    rng = np.random.default_rng(0)
    sample = rng.normal(size=(50, 3))
    J = rng.normal(size=(2, 3))
    expected = np.cov(sample @ J.T, rowvar=False)
    assert_allclose(delta_method(np.cov(sample, rowvar=False), J), expected)
    assert_allclose(delta_method(np.cov(sample, rowvar=False), J[0]), expected[:1, :1])


def test_symmetrize_measures_what_it_takes_away(info):
    assert symmetrize(info)[1] == 0.0
    antisymmetric = np.array([[0.0, 1.0], [-1.0, 0.0]])
    sym, asymmetry = symmetrize(antisymmetric)
    assert_allclose(sym, 0.0)
    assert asymmetry == 1.0
    assert symmetrize(np.zeros((2, 2)))[1] == 0.0


def test_nearest_psd_clips_negative_eigenvalues_only(info):
    same, moved = nearest_psd(info)
    assert_allclose(same, info)
    assert moved == 0.0
    Q = np.linalg.qr(info)[0]
    A = Q @ np.diag([5, 4, 3, 2, 1, -0.5]) @ Q.T
    A_psd, moved = nearest_psd(A)
    assert_allclose(np.linalg.eigvalsh(A_psd), [0, 1, 2, 3, 4, 5], atol=1e-12)
    assert_allclose(moved, 0.5 / np.linalg.norm(A))
    assert_allclose(A_psd, A_psd.T, rtol=0)


def test_inverse_does_not_depend_on_units(info):
    units = 10.0 ** np.array([-8, -4, 0, 2, 5, 8])
    cov = invert_information(info, list("abcdef"))
    assert_allclose(cov, np.linalg.inv(info), rtol=1e-10)
    scaled = invert_information(info * np.outer(units, units), list("abcdef"))
    assert_allclose(scaled * np.outer(units, units), cov, rtol=1e-9)
    assert_allclose(cov, cov.T, rtol=0, atol=0)


def test_flat_direction_is_named(info):
    X = np.random.default_rng(1).normal(size=(40, 4))
    X[:, 3] = X[:, 0] - 2 * X[:, 2]
    with pytest.raises(EstimationError, match=r"1 direction.*'ROA' with 'AGE' with 'ROE'") as error:
        invert_information(X.T @ X, ["ROA", "SEX", "AGE", "ROE"])
    assert "'SEX'" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "message"), [(np.nan, "is not finite at 'b'"), (0.0, "is not positive at 'b'"), (-1.0, "'b'")]
)
def test_bad_diagonal_is_named(entry, message):
    with pytest.raises(EstimationError, match=message):
        invert_information(np.diag([1.0, entry, 2.0]), ["a", "b", "c"])


def test_indefinite_information_is_refused():
    with pytest.raises(EstimationError, match="'a' with 'b'"):
        invert_information(np.array([[1.0, 2.0], [2.0, 1.0]]), ["a", "b"])


def test_shape_is_checked():
    with pytest.raises(EstimationError, match=r"2 x 2 .* received shape \(3, 3\)"):
        invert_information(np.eye(3), ["a", "b"])
