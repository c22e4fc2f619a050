"""Penalized least squares against stored solutions, closed forms and a general minimizer."""

import numpy as np
import pytest
from penalized_cases import cases, groups_of, penalty_of, stored
from penalty_values import prox, slope
from scipy import optimize

from fedstat.errors import ModelError
from fedstat.kernels.penalized.coordinate_descent import GramSolver, gram_path, newton_step
from fedstat.kernels.penalized.path import follow_path, lambda_grid, lambda_max, strong_set
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

GAUSSIAN = [case for case in cases.cases() if case[1] == "Gaussian"]
NAMES = [Penalty("lasso"), Penalty("elastic_net", l1_ratio=0.4), Penalty("scad"), Penalty("mcp")]
FOLDED = [Penalty("scad"), Penalty("mcp"), Penalty("mcp", a=6.0, l1_ratio=0.8)]


def moments(X, y):
    return X.T @ X / len(y), X.T @ y / len(y)


def correlated(p=40, n=120, rho=0.6, seed=2):
    draw = np.random.default_rng(seed)
    X = np.sqrt(1 - rho) * draw.normal(size=(n, p)) + np.sqrt(rho) * draw.normal(size=(n, 1))
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    y = X[:, :5] @ [1.0, -0.8, 0.6, -0.4, 0.3] + draw.normal(size=n)
    return moments(X, y - y.mean())


def objective(G, c, terms, b):
    return b @ G @ b / 2.0 - c @ b + terms.value(b)


def violation(G, c, terms, b):
    """Distance from the subdifferential, coefficient by coefficient, by the definition; groups of one."""
    g = G @ b - c
    slope = terms.derivatives(np.maximum(abs(b), 1e-100))[0]
    return np.max(np.where(b == 0.0, np.maximum(abs(g) - terms.cut, 0.0), abs(g + np.sign(b) * slope)))


@pytest.mark.parametrize("case", GAUSSIAN, ids=" ".join)
def test_the_solution_is_that_of_skglm(case):
    name, _, design = case
    G, c = moments(*cases.data("Gaussian", design))
    penalty, groups = penalty_of(name), groups_of(name, len(c))
    lambdas, theirs = stored(case)
    path = gram_path(G, c, penalty, groups, lambdas=lambdas, tol=1e-12)
    assert path.converged.all() and path.kkt.max() < 1e-8
    if name in cases.CONVEX:
        np.testing.assert_allclose(path.coefficients, theirs[:, 1:], atol=1e-6)
        return
    solver = GramSolver(G, c, groups)
    everything = np.ones(len(groups.weights), dtype=bool)
    for lam, b in zip(lambdas, theirs[:, 1:], strict=True):
        # A nonconvex problem has several stationary points: from theirs, nothing is to be gained.
        terms = penalty.at(lam, groups)
        at = solver.solve(terms, solver.start(b), everything, 1e-11)
        np.testing.assert_allclose(at.b, b, atol=1e-6)
        assert objective(G, c, terms, at.b) == pytest.approx(objective(G, c, terms, b), abs=1e-10)


@pytest.mark.parametrize("penalty", FOLDED, ids=str)
@pytest.mark.parametrize("algorithm", ["descent", "lla"])
def test_of_orthonormal_columns_the_solution_has_a_closed_form(penalty, algorithm):
    c = np.array([0.05, -0.3, 0.5, -0.7, 1.1, 2.0, -4.0])
    lambdas = np.array([4.0, 1.0, 0.45, 0.2])
    path = gram_path(
        np.eye(7), c, penalty, CoefficientGroups.single(7), lambdas=lambdas, algorithm=algorithm, tol=1e-12
    )
    closed = [[prox(penalty, lam, np.array([z]))[0] for z in c] for lam in lambdas]
    np.testing.assert_allclose(path.coefficients, closed, atol=1e-10)


SMOOTH = 1e-6


def smoothed_minimum(G, c, terms, b):
    """The least objective with ``sqrt(||b_g||^2 + e^2)`` for each norm, as e falls to SMOOTH."""

    def value_and_slope(b, e):
        t = np.sqrt(terms.groups.norms(b) ** 2 + e * e)
        pull = np.repeat(terms.cut / t + terms.ridge, terms.groups.sizes) * b
        ridge = terms.ridge @ terms.groups.norms(b) ** 2 / 2.0
        return b @ G @ b / 2.0 - c @ b + terms.cut @ t + ridge, G @ b - c + pull

    for e in (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, SMOOTH):
        found = optimize.minimize(
            value_and_slope, b, args=(e,), jac=True, method="BFGS", options={"gtol": 1e-9}
        )
        b = found.x
    return found.fun


@pytest.mark.parametrize("penalty", NAMES[:2], ids=str)
def test_a_general_minimizer_finds_nothing_lower(penalty):
    G, c = correlated(p=8)
    groups = CoefficientGroups.of(np.array([0, 1, 1, 1, 2, 3, 3, 4]), np.array([1.0, 0.7, 0.0, 1.5, 1.0]))
    path = gram_path(G, c, penalty, groups, size=4, ratio=0.02, tol=1e-11)
    draw = np.random.default_rng(0)
    for lam, b in zip(path.lambdas, path.coefficients, strict=True):
        terms = penalty.at(lam, groups)
        best = min(smoothed_minimum(G, c, terms, draw.normal(size=8)) for _ in range(3))
        # Smoothing raises the objective, by no more than SMOOTH times the sum of the levels.
        assert best - SMOOTH * terms.cut.sum() - 1e-10 <= objective(G, c, terms, b) <= best


@pytest.mark.parametrize("penalty", NAMES, ids=str)
@pytest.mark.parametrize("algorithm", ["descent", "lla"])
def test_the_certificate_is_the_violation_by_definition(penalty, algorithm):
    G, c = correlated()
    groups = CoefficientGroups.single(40, 0.5 + np.arange(40) % 3 / 2.0)
    path = gram_path(G, c, penalty, groups, size=20, algorithm=algorithm, tol=1e-10)
    assert path.converged.all()
    for lam, b, kkt in zip(path.lambdas, path.coefficients, path.kkt, strict=True):
        left = violation(G, c, penalty.at(lam, groups), b)
        assert left / path.scale <= 1e-10
        assert kkt == pytest.approx(left / path.scale, abs=1e-13)


@pytest.mark.parametrize("penalty", FOLDED, ids=str)
def test_lla_is_a_fixed_point_of_weighted_lassos(penalty):
    G, c = correlated()
    groups = CoefficientGroups.single(40)
    path = gram_path(G, c, penalty, groups, size=12, ratio=0.05, algorithm="lla", tol=1e-11)
    for lam, b in zip(path.lambdas, path.coefficients, strict=True):
        weights = np.array([slope(penalty, lam, abs(t)) - (1 - penalty.l1_ratio) * lam * abs(t) for t in b])
        ridge = (1.0 - penalty.l1_ratio) * lam
        lasso = gram_path(
            G + ridge * np.eye(40),
            c,
            Penalty("lasso"),
            CoefficientGroups.single(40, weights),
            lambdas=np.array([1.0]),
            tol=1e-12,
        )
        np.testing.assert_allclose(lasso.coefficients[0], b, atol=1e-8)


def test_lla_starts_from_the_lasso():
    G, c = correlated(rho=0.8)
    penalty, groups = Penalty("mcp", a=1.5), CoefficientGroups.single(40)
    options = {"size": 10, "ratio": 0.03, "tol": 1e-10}
    path = gram_path(G, c, penalty, groups, algorithm="lla", **options)
    for lam, b in zip(path.lambdas, path.coefficients, strict=True):
        by_hand = np.zeros(40)
        for _ in range(300):
            weights = CoefficientGroups.single(40, np.array([slope(penalty, lam, abs(t)) for t in by_hand]))
            lasso = gram_path(G, c, Penalty("lasso"), weights, lambdas=np.ones(1), tol=1e-12)
            by_hand, before = lasso.coefficients[0], by_hand
            if abs(by_hand - before).max() < 1e-12:
                break
        np.testing.assert_allclose(b, by_hand, atol=1e-7)
    # Here the starting point decides which of several stationary points is reached.
    assert abs(gram_path(G, c, penalty, groups, **options).coefficients - path.coefficients).max() > 0.01


@pytest.mark.parametrize("penalty", NAMES, ids=str)
def test_at_lambda_max_the_first_column_is_about_to_enter(penalty):
    G, c = correlated()
    groups = CoefficientGroups.of(np.arange(40) // 2, np.r_[0.0, np.linspace(0.5, 2.0, 19)])
    path = gram_path(G, c, penalty, groups, size=5, tol=1e-10)
    free = np.linalg.solve(G[:2, :2], c[:2])
    np.testing.assert_allclose(path.coefficients[0], np.r_[free, np.zeros(38)], atol=1e-9)
    below = gram_path(G, c, penalty, groups, lambdas=path.lambdas[:1] * 0.999, tol=1e-10)
    assert np.count_nonzero(below.coefficients[0, 2:]) == 2
    np.testing.assert_allclose(path.lambdas[1:] / path.lambdas[:-1], 1e-3 ** (1 / 4))


def test_without_lambda_it_is_least_squares():
    G, c = correlated()
    path = gram_path(
        G, c, Penalty("mcp"), CoefficientGroups.single(40), lambdas=np.array([0.1, 0.0]), tol=1e-11
    )
    np.testing.assert_allclose(path.coefficients[1], np.linalg.solve(G, c), atol=1e-8)
    everything_free = gram_path(
        G, c, Penalty("lasso"), CoefficientGroups.single(40, np.zeros(40)), lambdas=np.array([0.1])
    )
    np.testing.assert_allclose(everything_free.coefficients[0], np.linalg.solve(G, c), atol=1e-8)


@pytest.mark.parametrize("penalty", NAMES, ids=str)
def test_strong_correlation_does_not_stall(penalty):
    G, c = correlated(p=60, n=90, rho=0.99)
    path = gram_path(G, c, penalty, CoefficientGroups.single(60), tol=1e-9)
    assert path.converged.all()
    assert path.iterations.max() < 1000


def test_what_the_strong_rule_leaves_out_wrongly_is_taken_in_again():
    G, c = correlated()
    groups, penalty = CoefficientGroups.single(40), Penalty("lasso")
    solver = GramSolver(G, c, groups)
    null = solver.null()
    terms = penalty.at(0.1 * lambda_max(null.gradient, penalty, groups), groups)
    full = solver.solve(terms, null, np.ones(40, dtype=bool), 1e-11)
    none = solver.solve(terms, null, np.zeros(40, dtype=bool), 1e-11)
    np.testing.assert_allclose(none.b, full.b, atol=1e-9)
    assert np.count_nonzero(full.b) > 5
    kept = strong_set(groups, null, terms.cut, penalty.at(1.0, groups).cut)
    np.testing.assert_array_equal(kept, abs(null.gradient) >= 2 * terms.cut - 1.0)


def test_a_column_of_zeros_stays_out():
    G, c = correlated(p=5)
    G[2], G[:, 2], c[2] = 0.0, 0.0, 0.0
    path = gram_path(G, c, Penalty("scad"), CoefficientGroups.single(5), size=10)
    assert path.converged.all()
    assert not path.coefficients[:, 2].any()


def test_what_is_not_finished_is_reported():
    G, c = correlated(rho=0.9)
    path = gram_path(G, c, Penalty("lasso"), CoefficientGroups.single(40), most_sweeps=3, tol=1e-12)
    assert not path.converged.all()
    assert path.kkt[~path.converged].min() > 1e-12
    assert path.iterations.max() <= 3


def test_arguments_without_a_meaning():
    G, c = correlated(p=5)
    groups = CoefficientGroups.single(5)
    with pytest.raises(ModelError, match="4 coefficients"):
        gram_path(G, c, Penalty("lasso"), CoefficientGroups.single(4))
    with pytest.raises(ModelError, match="finite"):
        gram_path(G * np.nan, c, Penalty("lasso"), groups)
    with pytest.raises(ModelError, match="descend"):
        gram_path(G, c, Penalty("lasso"), groups, lambdas=np.array([0.1, 0.2]))
    with pytest.raises(ModelError, match="no algorithm 'adam'"):
        follow_path(GramSolver(G, c, groups), Penalty("scad"), groups, None, np.ones(1), algorithm="adam")
    with pytest.raises(ModelError, match="lambda_max"):
        lambda_grid(0.0)


def test_a_step_of_newton_that_would_change_a_sign_ends_at_zero():
    G = np.array([[1.0, 0.6], [0.6, 1.0]])
    c, b = np.array([1.0, 0.3]), np.array([0.5, 0.1])
    terms = Penalty("lasso").at(0.1, CoefficientGroups.single(2))
    # Without the bend at zero the step would end at G^-1 (c - 0.1), whose second number is negative.
    np.testing.assert_allclose(np.linalg.solve(G, c - 0.1), [1.21875, -0.53125])
    np.testing.assert_allclose(newton_step(G, c - G @ b, b, terms), [1.21875, 0.0], atol=1e-12)
    assert newton_step(G, c, np.zeros(2), terms) is None
