"""Fits with many or nearly collinear columns: the start by EM, and solutions with the information."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedstat.errors import EstimationError
from fedstat.models.vertical.joint_normal import fit as joint
from fedstat.models.vertical.joint_normal import model as joint_model
from fedstat.models.vertical.joint_normal import products as by_products
from fedstat.models.vertical.joint_normal.edges import edges_between
from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalPoint,
    differentiate_joint_normal,
    joint_normal_likelihood,
)
from fedstat.models.vertical.joint_normal.model import JointNormalModel
from fedstat.models.vertical.joint_normal.products import InformationProducts
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


# ---- the information as products with directions, compared with the matrix ------------------------


def small_moments(seed: int = 0) -> PatternMoments:
    """Sums by four patterns of seven columns at three sites, of entities that lack blocks at random."""
    rng = np.random.default_rng(seed)
    sizes, P, n = (2, 3, 2), 7, 500
    A = rng.normal(size=(P + 1, P + 1))
    rows = np.column_stack([np.ones(n), rng.normal(size=(n, P + 1)) @ (0.4 * A + np.eye(P + 1))])
    patterns = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=bool)
    seen = patterns[:, np.repeat([0, 1, 2], sizes)]
    code = rng.integers(0, 4, n)
    rows[:, 1:-1] *= seen[code]
    grams = np.array([rows[code == g].T @ rows[code == g] for g in range(4)])
    unit = np.ones(P + 1)
    names = tuple(f"x{j}" for j in range(P))
    raw = PatternMoments(("A", "B", "C"), sizes, names, seen, grams[:, 0, 0], grams, 0.0 * unit, unit)
    return raw.standardized()


@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize("effects", [0, 3, 7])
@pytest.mark.parametrize("between", ["free", "independent", "few"])
def test_products_and_solutions_are_those_of_the_information(between, effects, expected):
    moments, rng = small_moments(), np.random.default_rng(1)
    edges = edges_between(moments, "independent" if between == "independent" else "free")
    if between == "few":  # pairs that form no separate sets
        edges[0, 6] = edges[6, 0] = edges[1, 4] = edges[4, 1] = False
    moves = FreeParameters(edges, np.arange(7) < effects)
    Q = np.linalg.inv(np.cov(rng.normal(size=(7, 40)))) * edges + np.eye(7)
    point = JointNormalPoint(0.1 * rng.normal(size=7), 0.05, 0.2 * rng.normal(size=7) * moves.effects, 0.8, Q)
    matrix = differentiate_joint_normal(moments, point, moves, expected=expected).information
    products = InformationProducts(moments, point, moves, expected=expected)
    right = rng.normal(size=(len(matrix), 3))
    np.testing.assert_allclose(products.product(right), matrix @ right, rtol=1e-12, atol=1e-10)
    complete = products.precondition(np.eye(len(matrix)))
    np.testing.assert_allclose(complete, complete.T, rtol=1e-12, atol=1e-16)
    assert np.linalg.eigvalsh(complete)[0] > 0.0
    if np.linalg.eigvalsh(matrix)[0] <= 0.0:
        with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
            products.solve(np.linalg.eigh(matrix)[1][:, 0])
        return
    wanted = np.linalg.solve(matrix, right)
    np.testing.assert_allclose(products.solve(right), wanted, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(products.solve(right[:, 0]), wanted[:, 0], rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(products.inverse_between(right), right.T @ wanted, rtol=1e-9, atol=1e-10)


def test_a_preconditioner_of_complete_data_is_their_inverse_information():
    moments = small_moments()
    every = np.ones((1, 7), dtype=bool)
    gram = np.diag([500.0] * 9)[None]
    full = replace(moments, seen=every, n=gram[:, 0, 0], grams=gram)
    Q = np.eye(7) + 0.2
    moves = FreeParameters(np.ones((7, 7), dtype=bool), np.ones(7, dtype=bool))
    point = JointNormalPoint(np.zeros(7), 0.0, np.linspace(-0.3, 0.3, 7), 0.9, Q)
    matrix = differentiate_joint_normal(full, point, moves, expected=True).information
    found = InformationProducts(full, point, moves, expected=True).precondition(matrix)
    np.testing.assert_allclose(found, np.eye(len(matrix)), atol=1e-12)


@pytest.mark.parametrize("between", ["free", "independent"])
def test_of_many_parameters_estimates_and_errors_are_the_same(monkeypatch, between):
    moments = moments_of(near=0.3)
    standard = StandardizedMoments(moments)
    edges = edges_between(standard.moments, between)
    formed = joint.fit_joint_normal(standard, edges)
    whole = joint.estimates_covariance(formed)[:54, :54]
    robust, freedom = joint.sandwich_covariance(formed, halves(moments))
    monkeypatch.setattr(joint_model, "MOST_FORMED", 0)
    monkeypatch.setattr(joint_model, "MAX_FULL_INVERSE", 0)
    monkeypatch.setattr(by_products, "AT_ONCE", 5)
    never = joint.fit_joint_normal(standard, edges)
    assert never.converged and len(never.trace) == len(formed.trace)
    np.testing.assert_allclose(never.params, formed.params, rtol=1e-8, atol=1e-10)
    assert never.log_likelihood == pytest.approx(formed.log_likelihood, rel=1e-12)
    np.testing.assert_allclose(joint.estimates_covariance(never), whole, rtol=1e-7, atol=1e-12)
    other, same = joint.sandwich_covariance(never, halves(moments))
    assert same == freedom
    np.testing.assert_allclose(other, robust[:54, :54], rtol=1e-6, atol=1e-12)


def halves(moments: PatternMoments) -> PatternMoments:
    """Six groups of each pattern but the last, whose sums differ."""
    share = np.array([0.1, 0.12, 0.2, 0.15, 0.25, 0.18])
    grams = [s * (1.0 + 0.02 * (k % 3)) * m for m in moments.grams[:-1] for k, s in enumerate(share)]
    grams = np.array([*grams, moments.grams[-1]])
    seen = np.vstack([np.repeat(moments.seen[:-1], len(share), axis=0), moments.seen[-1:]])
    return PatternMoments(
        moments.sites,
        moments.sizes,
        moments.names,
        seen,
        grams[:, 0, 0],
        grams,
        moments.center,
        moments.scale,
    )


def test_far_from_the_maximum_the_step_is_scoring_with_many_parameters_too(monkeypatch):
    moments = small_moments()
    moves = FreeParameters(np.ones((7, 7), dtype=bool), np.ones(7, dtype=bool))
    model = JointNormalModel(moments, moves)
    far = JointNormalPoint(np.full(7, 2.0), -1.0, np.full(7, 2.0), 9.0, 0.05 * np.eye(7))
    kind, formed = model.direction(far, model.differentiate(far))
    assert kind == "scoring"
    again = model.direction(far, model.differentiate(far, information=False))
    assert again[0] == "scoring"
    np.testing.assert_allclose(again[1], formed, rtol=1e-5, atol=1e-6)
