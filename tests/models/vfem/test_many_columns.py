"""Fits with many or nearly collinear columns: the start by EM, and the inverse of the information."""

from __future__ import annotations

import numpy as np
import pytest

from fedstat.errors import EstimationError
from fedstat.models.vertical.joint_normal import fit as joint
from fedstat.models.vertical.joint_normal.edges import edges_between
from fedstat.models.vertical.joint_normal.likelihood import joint_normal_likelihood
from fedstat.models.vertical.moments import PatternMoments, StandardizedMoments

SIZES = (13, 13)


def moments_of(near: float = 0.02, n: int = 1_500) -> PatternMoments:
    """Sums by three patterns of 26 columns, two of which differ by `near` standard deviations."""
    rng = np.random.default_rng(5)
    P = sum(SIZES)
    X = rng.normal(size=(n, P)) @ (np.eye(P) + 0.3 * rng.normal(size=(P, P)) / np.sqrt(P))
    X[:, 1] = X[:, 0] + near * X[:, 1]
    y = X[:, :3].sum(axis=1) + X[:, 20] + rng.normal(size=n)
    code = np.where(y + rng.normal(size=n) > 1.0, 2, rng.integers(0, 2, n))
    seen = np.array([[True, True], [True, False], [False, True]])[:, np.repeat([0, 1], SIZES)]
    rows = np.column_stack([np.ones(n), X, y])
    rows[:, 1:-1] *= seen[code]
    grams = np.array([rows[code == g].T @ rows[code == g] for g in range(3)])
    names = tuple(f"x{j}" for j in range(P))
    unit = np.ones(P + 1)
    return PatternMoments(("A", "B"), SIZES, names, seen, grams[:, 0, 0], grams, 0.0 * unit, unit)


@pytest.mark.parametrize("between", ["free", "independent"])
def test_every_step_of_em_increases_the_likelihood_and_the_maximum_is_the_same(monkeypatch, between):
    standard = StandardizedMoments(moments_of())
    edges = edges_between(standard.moments, between)
    P = standard.P
    point = joint.JointNormalPoint(np.zeros(P), 0.0, np.zeros(P), 1.0, standard.precision)
    far = joint.fit_joint_normal(standard, edges, start=point)
    heights = [joint_normal_likelihood(standard.moments, point.mean, point.cov)]
    monkeypatch.setattr(joint, "STEPS_OF_EM", 1)
    for _ in range(8):
        point = joint.em_start(standard.moments, edges, point)
        heights.append(joint_normal_likelihood(standard.moments, point.mean, point.cov))
    assert (np.diff(heights) > 0.0).all() and heights[-1] < far.joint
    # The maximum is a fixed point.
    same = joint.em_start(standard.moments, edges, far.point)
    np.testing.assert_allclose(same.beta, far.point.beta, atol=1e-7)
    np.testing.assert_allclose(same.cov, far.point.cov, atol=1e-7)
    monkeypatch.setattr(joint, "STEPS_OF_EM", 25)
    near = joint.fit_joint_normal(standard, edges)
    assert near.converged and len(near.trace) < len(far.trace)
    np.testing.assert_allclose(near.beta, far.beta, rtol=1e-6, atol=1e-8)


def test_em_leaves_a_point_unchanged_if_the_step_has_no_closed_form():
    standard = StandardizedMoments(moments_of())
    edges = np.ones((26, 26), dtype=bool)
    edges[0, 25] = edges[25, 0] = False  # correlated through the other columns only
    point = joint.JointNormalPoint(np.zeros(26), 0.0, np.zeros(26), 1.0, standard.precision)
    assert joint.em_start(standard.moments, edges, point) is point


def test_nearly_collinear_columns_of_a_site_have_standard_errors():
    fit = joint.fit_joint_normal(moments_of(near=5e-3), np.ones((26, 26), dtype=bool))
    assert fit.converged
    errors = np.sqrt(np.diag(joint.estimates_covariance(fit)))
    assert np.isfinite(errors).all() and len(errors) == 2 + 2 * 26 + 26 * 27 // 2


def test_an_inverse_whose_smallest_eigenvalue_is_near_rounding():
    n, c = 200, 1.0 - 4e-12
    information = (1.0 - c) * np.eye(n) + c
    names = [f"t{j}" for j in range(n)]
    expected = (np.eye(n) - c / (1.0 - c + n * c)) / (1.0 - c)
    # The diagonal of the information itself is known to 1e-16 only, 3e-5 of the smallest eigenvalue.
    np.testing.assert_allclose(
        joint.invert_or_factor(information, names) / 2.5e11, expected / 2.5e11, atol=1e-2
    )
    with pytest.raises(EstimationError, match="without information"):
        joint.invert_or_factor(np.ones((3, 3)), names[:3])
