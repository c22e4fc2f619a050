"""Penalized GLMs on rows against stored solutions, the ordinary fit, and the conditions of a minimum."""

import numpy as np
import pytest
from penalized_cases import cases, groups_of, penalty_of, stored, with_intercept
from pooled_path import GLMSolver, Hessian, glm_path, search_line

from fedstat.errors import EstimationError, ModelError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.local_fit import fit_local
from fedstat.kernels.glm.sums import Rows, evaluate
from fedstat.kernels.penalized.coordinate_descent import gram_path, proximal_step
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.kernels.row_products import weighted_sums

FAMILIES = {
    "Gaussian": DistributionSpec("Gaussian", "Identity"),
    "Binomial": DistributionSpec("Binomial", "Logit"),
    "Poisson": DistributionSpec("Poisson", "Log"),
}
NOT_GAUSSIAN = [case for case in cases.cases() if case[1] != "Gaussian"]
NAMES = [Penalty("lasso"), Penalty("elastic_net", l1_ratio=0.4), Penalty("scad"), Penalty("mcp")]


def rows_of(family, design="independent"):
    X, y = cases.data(family, design)
    return Rows(np.column_stack([np.ones(len(y)), X]), y)


def penalizing(p):
    """Groups of one after an intercept."""
    return with_intercept(CoefficientGroups.single(p))


def objective(rows, family, terms, b):
    return evaluate([rows], b, family).deviance / (2.0 * rows.count) + terms.value(b)


def violation(rows, family, terms, b):
    """Distance from the subdifferential by the score that the unpenalized fit uses; groups of one."""
    g = -evaluate([rows], b, family).score / rows.count
    slope = terms.derivatives(np.maximum(abs(b), 1e-100))[0]
    return np.max(np.where(b == 0.0, np.maximum(abs(g) - terms.cut, 0.0), abs(g + np.sign(b) * slope)))


@pytest.mark.parametrize("case", NOT_GAUSSIAN, ids=" ".join)
def test_the_solution_is_that_of_skglm(case):
    name, family, design = case
    rows, spec = rows_of(family, design), FAMILIES[family]
    penalty, groups = penalty_of(name), with_intercept(groups_of(name, rows.X.shape[1] - 1))
    lambdas, theirs = stored(case)
    path = glm_path(rows, spec, penalty, groups, lambdas=lambdas, tol=1e-11)
    assert path.converged.all() and path.kkt.max() < 1e-8
    if name in cases.CONVEX:
        np.testing.assert_allclose(path.coefficients, theirs, atol=1e-6)
        return
    solver = GLMSolver(rows, spec, groups)
    everything = np.ones(len(groups.weights), dtype=bool)
    for lam, b in zip(lambdas, theirs, strict=True):
        # A nonconvex problem has several stationary points: from theirs, nothing is to be gained.
        terms = penalty.at(lam, groups)
        at = solver.solve(terms, solver.start(b), everything, 1e-10)
        np.testing.assert_allclose(at.b, b, atol=1e-6)
        assert objective(rows, spec, terms, at.b) == pytest.approx(objective(rows, spec, terms, b), abs=1e-10)


@pytest.mark.parametrize("penalty", NAMES, ids=str)
@pytest.mark.parametrize("algorithm", ["descent", "lla"])
@pytest.mark.parametrize("family", ["Binomial", "Poisson"])
def test_the_certificate_is_the_violation_by_definition(penalty, algorithm, family):
    rows, groups = rows_of(family, "correlated"), penalizing(30)
    path = glm_path(
        rows, FAMILIES[family], penalty, groups, size=12, ratio=0.02, algorithm=algorithm, tol=1e-9
    )
    assert path.converged.all()
    for lam, b, kkt in zip(path.lambdas, path.coefficients, path.kkt, strict=True):
        left = violation(rows, FAMILIES[family], penalty.at(lam, groups), b) / path.scale
        assert left <= 1e-9
        assert kkt == pytest.approx(left, abs=1e-12)


@pytest.mark.parametrize("penalty", NAMES, ids=str)
def test_of_least_squares_it_is_the_path_of_the_gram(penalty):
    X, y = cases.data("Gaussian", "correlated")
    gram = gram_path(
        X.T @ X / len(y), X.T @ y / len(y), penalty, CoefficientGroups.single(30), size=10, tol=1e-10
    )
    rows = Rows(np.column_stack([np.ones(len(y)), X]), y + 5.0)
    path = glm_path(rows, FAMILIES["Gaussian"], penalty, penalizing(30), size=10, tol=1e-10)
    np.testing.assert_allclose(path.lambdas, gram.lambdas, rtol=1e-9)
    np.testing.assert_allclose(path.coefficients[:, 1:], gram.coefficients, atol=1e-7)
    np.testing.assert_allclose(path.coefficients[:, 0], 5.0, atol=1e-7)
    np.testing.assert_allclose(path.loss, gram.loss + y @ y / (2 * len(y)), rtol=1e-9)


def positive_rows(family):
    draw = np.random.default_rng(4)
    X = np.column_stack([np.ones(300), draw.uniform(-1.0, 1.0, (300, 6))])
    eta = 2.0 + X[:, 1] - 0.7 * X[:, 2]
    mean = {"Gamma": 1.0 / eta, "InverseGaussian": eta**-0.5, "NegativeBinomial": np.exp(eta / 2)}[family]
    if family == "NegativeBinomial":
        return Rows(X, draw.poisson(mean * draw.gamma(2.0, 0.5, 300)) * 1.0)
    return Rows(X, mean * draw.gamma(8.0, 1 / 8.0, 300))


@pytest.mark.filterwarnings("ignore:The .* link function does not respect")
@pytest.mark.parametrize(
    "family",
    [
        DistributionSpec("Gamma", "InversePower"),
        DistributionSpec("InverseGaussian", "InverseSquared"),
        DistributionSpec("NegativeBinomial", "Log", alpha=0.5),
    ],
    ids=str,
)
def test_other_families(family):
    rows, groups = positive_rows(family.name), penalizing(6)
    path = glm_path(rows, family, Penalty("scad"), groups, size=8, ratio=0.01, tol=1e-9)
    assert path.converged.all()
    for lam, b in zip(path.lambdas, path.coefficients, strict=True):
        assert violation(rows, family, Penalty("scad").at(lam, groups), b) / path.scale < 1e-8
    free = glm_path(rows, family, Penalty("lasso"), groups, lambdas=np.array([0.0]), tol=1e-9)
    np.testing.assert_allclose(free.coefficients[0], fit_local(lambda: [rows], family).beta, atol=1e-6)


def test_weights_count_rows_and_offsets_are_added():
    rows = rows_of("Poisson")
    draw = np.random.default_rng(6)
    times, offset = draw.integers(1, 4, len(rows)), draw.normal(size=len(rows)) / 3.0
    at = np.repeat(np.arange(len(rows)), times)
    weighted = Rows(rows.X, rows.y, offset=offset, freq=times * 1.0)
    repeated = Rows(rows.X[at], rows.y[at], offset=offset[at])
    options = {"size": 6, "ratio": 0.05, "tol": 1e-10}
    paths = [
        glm_path(one, FAMILIES["Poisson"], Penalty("mcp"), penalizing(20), **options)
        for one in (weighted, repeated)
    ]
    np.testing.assert_allclose(paths[0].lambdas, paths[1].lambdas, rtol=1e-10)
    np.testing.assert_allclose(paths[0].coefficients, paths[1].coefficients, atol=1e-8)
    for lam, b in zip(paths[0].lambdas, paths[0].coefficients, strict=True):
        terms = Penalty("mcp").at(lam, penalizing(20))
        assert violation(weighted, FAMILIES["Poisson"], terms, b) / paths[0].scale <= 1e-9


def test_trials_are_rows():
    rows = rows_of("Binomial")
    X = np.repeat(rows.X[:75], 2, axis=0)
    single = Rows(X, rows.y)
    pairs = Rows(rows.X[:75], rows.y.reshape(75, 2).mean(axis=1), trials=np.full(75, 2.0))
    lambdas = np.array([0.1, 0.03])
    model = (FAMILIES["Binomial"], Penalty("lasso"), penalizing(20))
    one = glm_path(single, *model, lambdas=lambdas, tol=1e-10)
    # A pair of trials is one row of N, so that its loss is twice as large.
    two = glm_path(
        pairs, FAMILIES["Binomial"], Penalty("lasso"), penalizing(20), lambdas=2 * lambdas, tol=1e-10
    )
    np.testing.assert_allclose(one.coefficients, two.coefficients, atol=1e-8)


def test_steps_from_sums_alone_reach_the_same_solution():
    rows, family, groups = rows_of("Binomial", "correlated"), FAMILIES["Binomial"], penalizing(30)
    halves = [rows.part(slice(0, 90)), rows.part(slice(90, None))]
    terms = Penalty("lasso").at(0.03, groups)
    b = np.zeros(31)
    for _ in range(12):
        sums = evaluate(halves, b, family)
        H, score = sums.information / sums.weight, sums.score / sums.weight
        step = proximal_step(H, score, b, terms, tol=1e-12)
        current = sums.deviance / (2.0 * sums.weight) + terms.value(b)

        def along(t, b=b, step=step):
            return objective(rows, family, terms, b + t * (step.b - b))

        b = b + search_line(along, current, step.decrease) * (step.b - b)
    path = glm_path(rows, family, Penalty("lasso"), groups, lambdas=np.array([0.03]), tol=1e-11)
    np.testing.assert_allclose(b, path.coefficients[0], atol=1e-9)


def test_the_promised_decrease_is_that_of_the_model():
    draw = np.random.default_rng(2)
    A = draw.normal(size=(30, 6))
    H, score, b = A.T @ A / 30, draw.normal(size=6), draw.normal(size=6)
    terms = Penalty("scad").at(0.3, CoefficientGroups.single(6))
    step = proximal_step(H, score, b, terms, tol=1e-12)

    def model(x):
        return -score @ (x - b) + (x - b) @ H @ (x - b) / 2.0 + terms.value(x)

    assert step.decrease == pytest.approx(model(b) - model(step.b), abs=1e-12)
    assert step.decrease > 0.0


def test_the_line_is_searched_until_the_objective_falls():
    assert search_line(lambda t: (t - 0.3) ** 2, 0.09, 0.1) == 0.5
    assert search_line(lambda t: np.inf if t > 0.2 else -t, 0.0, 1.0) == 0.125
    assert search_line(lambda t: 1.0 + t, 1.0, 1.0) == 0.0


def test_a_far_start_finds_the_way_back():
    rows, family, groups = rows_of("Poisson"), FAMILIES["Poisson"], penalizing(20)
    solver = GLMSolver(rows, family, groups)
    terms = Penalty("lasso").at(0.05, groups)
    everything = np.ones(21, dtype=bool)
    near = solver.solve(terms, solver.null(), everything, 1e-10)
    far = solver.solve(terms, solver.start(np.full(21, 1.5)), everything, 1e-10)
    np.testing.assert_allclose(far.b, near.b, atol=1e-8)


def test_a_hessian_grows_by_the_columns_that_come_in():
    draw = np.random.default_rng(8)
    X, w, hessian = draw.normal(size=(5_000, 9)), draw.normal(size=5_000), Hessian()
    before, after = np.array([0, 2, 3, 5, 7]), np.array([0, 1, 3, 5, 7, 8])
    hessian.renew(before, X[:, before], w)
    assert not hessian.grow(np.arange(9), X)
    np.testing.assert_array_equal(hessian.known, before)
    assert not hessian.grow(after, X[:, after])
    after = np.array([0, 2, 3, 4, 7])
    assert hessian.grow(after, X[:, after])
    full = (X.T * w) @ X
    np.testing.assert_allclose(hessian.take(after), full[np.ix_(after, after)], rtol=1e-10, atol=1e-10)
    fewer = after[1:]
    assert hessian.grow(fewer, X[:, fewer])
    np.testing.assert_allclose(hessian.take(fewer), full[np.ix_(fewer, fewer)], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("penalty", ["lasso", "scad", "mcp"])
@pytest.mark.parametrize("grouped", [False, True], ids=["single", "grouped"])
@pytest.mark.parametrize("family", ["Poisson", "Gamma"])
def test_along_a_path_it_is_of_one_point_whatever_columns_came_in(family, grouped, penalty):
    draw = np.random.default_rng(9)
    X = np.column_stack([np.ones(400), draw.uniform(-1.0, 1.0, (400, 24))])
    mean = np.exp(X[:, :12] @ np.r_[1.0, np.linspace(0.5, -0.4, 11)])
    y = draw.poisson(mean) * 1.0 if family == "Poisson" else mean * draw.gamma(3.0, 1 / 3.0, 400)
    rows, spec = Rows(X, y, freq=draw.integers(1, 4, 400) * 1.0), DistributionSpec(family, "Log")
    groups = with_intercept(CoefficientGroups.of(np.arange(24) // (2 if grouped else 1)))
    solver, grown = GLMSolver(rows, spec, groups), []

    class Watched(Hessian):
        def grow(self, at, X):
            fits = super().grow(at, X)
            grown.append(fits and self.known is at)
            return fits

    hessian = solver.hessian = Watched()
    at, nothing = solver.null(), np.zeros(len(groups.weights), dtype=bool)
    for lam in np.abs(at.gradient).max() * 0.9 ** np.arange(30):
        at = solver.solve(Penalty(penalty).at(lam, groups), at, nothing, 1e-9)
        assert at.violation <= 1e-9
        if not len(hessian.known):
            continue
        expected = weighted_sums(X[:, hessian.known], hessian.w, hessian.w)[1]
        np.testing.assert_allclose(hessian.H, expected, rtol=1e-11, atol=1e-13)
    assert sum(grown) > 3


def test_what_has_no_estimate_or_is_not_finished_is_reported():
    rows = rows_of("Binomial")
    separated = Rows(rows.X, (rows.X[:, 1] > 0.0) * 1.0)
    forced = CoefficientGroups.single(21, np.r_[0.0, 0.0, np.ones(19)])
    with pytest.raises(EstimationError, match="2 unpenalized columns"):
        glm_path(separated, FAMILIES["Binomial"], Penalty("lasso"), forced)
    hasty = glm_path(rows, FAMILIES["Binomial"], Penalty("lasso"), penalizing(20), most_steps=1, tol=1e-11)
    assert not hasty.converged.all() and hasty.kkt[~hasty.converged].min() > 1e-11
    with pytest.raises(ModelError, match=r"expected a design \(150, 20\)"):
        glm_path(rows, FAMILIES["Binomial"], Penalty("lasso"), CoefficientGroups.single(20))


@pytest.mark.filterwarnings("ignore:The .* link function does not respect")
def test_outside_the_domain_the_loss_is_infinite():
    rows = positive_rows("Gamma")
    solver = GLMSolver(rows, DistributionSpec("Gamma", "InversePower"), penalizing(6))
    assert np.isfinite(solver.null().loss)
    assert solver.start(-solver.null().b).loss == np.inf
