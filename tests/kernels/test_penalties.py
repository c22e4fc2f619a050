"""Penalties against their published formulas, numerical derivatives and minima found by brute force."""

import numpy as np
import pytest
from penalty_values import prox, slope, value
from scipy.integrate import quad

from fedstat.errors import ModelError
from fedstat.kernels.penalized.coordinate_descent import gram_path
from fedstat.kernels.penalized.penalties import (
    FORMS,
    MEMBERS,
    PENALTIES,
    CoefficientGroups,
    Lasso,
    Mcp,
    Penalty,
    Scad,
    check_form,
    orthonormalizer,
    slope_of,
    threshold_of,
    value_of,
)

ALL = [
    Penalty("lasso"),
    Penalty("elastic_net", l1_ratio=0.3),
    Penalty("ridge"),
    Penalty("scad"),
    Penalty("scad", a=2.2, l1_ratio=0.7),
    Penalty("mcp"),
    Penalty("mcp", a=1.4, l1_ratio=0.7),
]


def published_slope(penalty, lam, t):
    """Fan and Li (2001); Zhang (2010); both with ncvreg's ridge part."""
    level = penalty.selecting * lam
    if penalty.name == "scad":
        a = penalty.shape
        slope = level * ((t <= level) + max(a * level - t, 0.0) / ((a - 1.0) * level) * (t > level))
    elif penalty.name == "mcp":
        slope = max(level - t / penalty.shape, 0.0)
    else:
        slope = level
    return slope + (1.0 - penalty.selecting) * lam * t


@pytest.mark.parametrize("penalty", ALL, ids=str)
def test_slope_and_value_are_those_of_the_papers(penalty):
    lam = 0.7
    for t in (0.0, 0.2, 0.49, 0.5, 0.69, 0.7, 0.71, 1.0, 1.5, 2.0, 2.59, 2.6, 5.0):
        assert slope(penalty, lam, t) == pytest.approx(published_slope(penalty, lam, t), abs=1e-15)
        area = quad(lambda s: published_slope(penalty, lam, s), 0.0, t, epsabs=1e-12, limit=200)[0]
        assert value(penalty, lam, t) == pytest.approx(area, abs=1e-8)


@pytest.mark.parametrize("penalty", ALL, ids=str)
@pytest.mark.parametrize("step", [0.3, 1.0, 4.0])
def test_the_proximal_operator_finds_the_minimum(penalty, step):
    # With a step of 4 the sum is not convex for SCAD and MCP, and has two minima.
    lam, grid = 0.7, np.linspace(0.0, 12.0, 12_001)
    penalties = np.array([value(penalty, lam, t) for t in grid])
    for z in np.linspace(-11.0, 11.0, 87):
        t = prox(penalty, lam, np.array([z]), step=step)[0]
        least = np.min((grid - abs(z)) ** 2 / 2.0 + step * penalties)
        reached = (t - z) ** 2 / 2.0 + step * value(penalty, lam, abs(t))
        assert reached <= least + 1e-12
        assert t * z >= 0.0


@pytest.mark.parametrize("penalty", ALL, ids=str)
def test_a_group_shrinks_along_its_direction(penalty):
    z = np.array([0.9, -1.2])
    t = prox(penalty, 0.7, np.array([1.5]))[0]
    np.testing.assert_allclose(prox(penalty, 0.7, z), t * z / 1.5, atol=1e-15)


def test_thresholds_are_those_that_were_published():
    soft = max(1.2 - 0.5, 0.0)
    assert Lasso.threshold(0.0, 0.5, 1.0, 1.0, 1.2) == pytest.approx(soft)
    # Breheny and Huang (2011): firm thresholding of MCP, and the middle part of SCAD.
    assert Mcp.threshold(3.0, 0.5, 1.0, 1.0, 1.2) == pytest.approx(soft / (1.0 - 1.0 / 3.0))
    middle = (1.2 - 3.7 * 0.5 / 2.7) / (1.0 - 1.0 / 2.7)
    assert Scad.threshold(3.7, 0.5, 1.0, 1.0, 1.2) == pytest.approx(middle)
    assert Scad.threshold(3.7, 0.5, 1.0, 1.0, 0.9) == pytest.approx(0.4)
    assert Scad.threshold(3.7, 0.5, 1.0, 1.0, 1.9) == Mcp.threshold(3.0, 0.5, 1.0, 1.0, 1.9) == 1.9


def test_every_penalty_is_tested():
    assert {penalty.name for penalty in ALL} == set(PENALTIES)
    assert set(PENALTIES.values()) == set(FORMS)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_form_that_lacks_a_member_is_an_error(name):
    # Also where it would inherit the member from another penalty.
    incomplete = type("Incomplete", (Lasso,), {one: vars(Scad)[one] for one in MEMBERS if one != name})
    with pytest.raises(TypeError, match=f"Incomplete: define {name}$"):
        check_form(incomplete)


@pytest.mark.parametrize("kind", [-1, len(FORMS)])
def test_a_number_without_a_form_raises(kind):
    calls = [
        (value_of, (3.0, 0.5, 1.0)),
        (slope_of, (3.0, 0.5, 1.0)),
        (threshold_of, (3.0, 0.5, 1.0, 1.0, 1.2)),
    ]
    for function, arguments in calls:
        with pytest.raises(ValueError, match="no penalty has this number"):
            function(kind, *arguments)


@pytest.mark.parametrize("penalty", ALL, ids=str)
def test_compiled_code_takes_the_form_of_its_number(penalty):
    kind, a = penalty.at(1.0, CoefficientGroups.single(1)).kind, penalty.shape
    for t in (0.1, 0.6, 1.2, 3.0):
        assert value_of(kind, a, 0.5, t) == penalty.form.value(a, 0.5, t)
        assert slope_of(kind, a, 0.5, t) == penalty.form.slope(a, 0.5, t)
        assert threshold_of(kind, a, 0.5, 1.0, 1.1, t) == penalty.form.threshold(a, 0.5, 1.0, 1.1, t)


@pytest.mark.parametrize("penalty", ALL, ids=str)
def test_the_level_of_a_slope_is_the_smallest(penalty):
    a, form = penalty.shape, penalty.form
    for t in (0.0, 0.3, 1.0, 2.5):
        for wanted in (0.05, 0.4, 1.0):
            (level,) = form.level_of_slope(a, np.array([wanted]), np.array([t]))
            assert form.slope(a, level, t) >= wanted - 1e-12
            assert form.slope(a, level * (1.0 - 1e-6), t) < wanted


@pytest.mark.parametrize("penalty", ALL, ids=str)
def test_solutions_are_optimal(penalty):
    """The negative gradient of the loss is in the subdifferential, by differences of the penalty's value."""
    draw = np.random.default_rng(3)
    X = draw.normal(size=(90, 8)) + 0.7 * draw.normal(size=(90, 1))
    y = X @ [1.5, -1.0, 0.6, 0.2, 0.0, 0.0, 0.0, 0.0] + draw.normal(size=90)
    G, c, w = X.T @ X / 90, X.T @ y / 90, np.array([0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0])
    path = gram_path(G, c, penalty, CoefficientGroups.single(8, w), size=12, tol=1e-11)
    assert path.converged.all()
    chosen = (path.coefficients != 0.0).sum(axis=1)
    assert chosen[-1] > chosen[3] >= 1 if penalty.selecting else (chosen == 8).all()
    h = 1e-6
    for lam, b in zip(path.lambdas, path.coefficients, strict=True):
        gradient = G @ b - c
        for j in range(8):
            if b[j] == 0.0:
                assert abs(gradient[j]) <= w[j] * value(penalty, lam, h) / h + 1e-6
            else:
                rise = value(penalty, lam, abs(b[j]) + h) - value(penalty, lam, abs(b[j]) - h)
                assert gradient[j] + w[j] * np.sign(b[j]) * rise / (2.0 * h) == pytest.approx(0.0, abs=2e-6)


@pytest.fixture(name="grouped")
def grouped_terms():
    labels = np.array([0, 1, 1, 1, 2, 2, 3])
    groups = CoefficientGroups.of(labels, np.array([0.0, 1.0, 0.4, 2.0]))
    b = np.array([0.4, 0.2, -0.5, 0.3, 0.9, -0.8, 0.05])
    return groups, b


@pytest.mark.parametrize("penalty", ALL, ids=str)
def test_value_and_derivatives_of_groups(penalty, grouped):
    groups, b = grouped
    terms = penalty.at(0.6, groups)
    norms = [0.4, np.sqrt(0.38), np.sqrt(1.45), 0.05]
    by_hand = [
        w * value(penalty, 0.6 * m, t)
        for w, m, t in zip([0.0, 1.0, 0.4, 2.0], np.sqrt([1.0, 3.0, 2.0, 1.0]), norms, strict=True)
    ]
    assert terms.value(b) == pytest.approx(sum(by_hand), abs=1e-14)
    gradient, hessian = terms.derivatives(b)
    h = 1e-5
    for j, e in enumerate(np.eye(7) * h):
        assert gradient[j] == pytest.approx((terms.value(b + e) - terms.value(b - e)) / (2 * h), abs=1e-8)
        slope = (terms.derivatives(b + e)[0] - terms.derivatives(b - e)[0]) / (2 * h)
        np.testing.assert_allclose(hessian[j], slope, atol=1e-7)


@pytest.mark.parametrize("penalty", ALL, ids=str)
def test_a_violation_is_the_slope_that_is_left(penalty, grouped):
    groups, b = grouped
    terms = penalty.at(0.6, groups)
    pull = terms.derivatives(b)[0]
    np.testing.assert_allclose(terms.violations(b, -pull), 0.0, atol=1e-15)
    assert terms.violations(b, -pull + np.eye(7)[4] * 0.1)[2] == pytest.approx(0.1)
    # A group of zeros may have a gradient as long as w_g times the level, and no longer.
    b[1:4] = 0.0
    level = penalty.selecting * 0.6 * np.sqrt(3.0)
    gradient = -terms.derivatives(np.where(b == 0.0, 1e-100, b))[0]
    gradient[1:4] = np.array([0.6, 0.0, -0.8]) * level
    assert terms.violations(b, gradient)[1] == pytest.approx(0.0, abs=1e-15)
    gradient[1:4] *= 1.5
    assert terms.violations(b, gradient)[1] == pytest.approx(level / 2.0)


@pytest.mark.parametrize("penalty", ALL, ids=str)
def test_the_linear_approximation_touches_and_lies_above(penalty, grouped):
    groups, b = grouped
    terms = penalty.at(0.6, groups)
    lasso = terms.linearized(b)
    offset = terms.value(b) - lasso.value(b)
    draw = np.random.default_rng(1)
    for _ in range(200):
        other = draw.normal(size=7)
        assert lasso.value(other) + offset >= terms.value(other) - 1e-12


def test_groups_of_some_columns():
    groups = CoefficientGroups.of(np.array(["a", "b", "b", "c", "c", "c"]), np.array([1.0, 0.0, 2.0]))
    which = np.array([True, False, True])
    np.testing.assert_array_equal(groups.columns(which), [0, 3, 4, 5])
    part = groups.take(which)
    np.testing.assert_array_equal(part.starts, [0, 1, 4])
    np.testing.assert_allclose(part.multipliers, [1.0, np.sqrt(3.0)])
    np.testing.assert_array_equal(groups.penalized, which)


def test_in_orthonormal_columns_the_coding_does_not_matter():
    draw = np.random.default_rng(5)
    X = draw.normal(size=(80, 6))
    X[:, 4] = X[:, 2] + X[:, 3]  # a group of three columns with rank two
    y = X @ [1.0, 0.5, 0.8, 0.0, 0.0, 0.1] + draw.normal(size=80)
    labels = np.array([0, 0, 1, 1, 1, 2])
    coding = np.eye(6)
    coding[2:5, 2:5] = draw.normal(size=(3, 3))
    fitted = []
    for Z in (X, X @ coding):
        T, groups = orthonormalizer(Z.T @ Z / 80, CoefficientGroups.of(labels))
        O = Z @ T
        np.testing.assert_allclose(O[:, :2].T @ O[:, :2] / 80, np.eye(2), atol=1e-12)
        np.testing.assert_allclose(groups.multipliers, np.sqrt([2.0, 2.0, 1.0]))
        path = gram_path(O.T @ O / 80, O.T @ y / 80, Penalty("mcp"), groups, size=8, tol=1e-11)
        assert path.converged.all()
        fitted.append(path.coefficients @ T.T @ Z.T)
    np.testing.assert_allclose(fitted[0], fitted[1], atol=1e-8)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"name": "rigid"}, "no penalty 'rigid'"),
        ({"name": "ridge", "l1_ratio": 0.5}, "l1_ratio = 1 for lasso and ridge"),
        ({"name": "lasso", "l1_ratio": 0.5}, "elastic_net"),
        ({"name": "elastic_net"}, "l1_ratio below one"),
        ({"name": "lasso", "a": 3.0}, "no shape"),
        ({"name": "scad", "a": 2.0}, "a > 2"),
        ({"name": "mcp", "a": 1.0}, "a > 1"),
        ({"name": "mcp", "l1_ratio": 0.0}, r"\(0, 1\]"),
        ({"name": "mcp", "a": float("nan")}, "a > 1"),
    ],
)
def test_penalties_without_a_meaning(arguments, words):
    with pytest.raises(ModelError, match=words):
        Penalty(**arguments)


def test_groups_without_a_meaning():
    with pytest.raises(ModelError, match="side by side"):
        CoefficientGroups.of(np.array([0, 1, 0]))
    with pytest.raises(ModelError, match="expected 2 finite weights"):
        CoefficientGroups.of(np.array([0, 1, 1]), np.array([1.0, -1.0]))
    with pytest.raises(ModelError, match="expected 2 finite weights"):
        CoefficientGroups.of(np.array([0, 1, 1]), np.ones(3))
