"""Steps of local linear approximation from an estimate: lassos with weights, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from pooled_path import glm_path

from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.coordinate_descent import gram_path
from fedstat.kernels.penalized.path import LinearSteps
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

LASSO = Penalty("lasso")
LAMBDAS = np.array([0.4, 0.2, 0.1, 0.05])


def scad_slope(b, lam, a=3.7):
    """Derivative of SCAD (Fan and Li 2001, equation 2.7), over lambda."""
    t = np.abs(b)
    return np.where(t <= lam, 1.0, np.clip(a * lam - t, 0.0, None) / ((a - 1.0) * lam))


def mcp_slope(b, lam, a=3.0):
    return np.clip(1.0 - np.abs(b) / (a * lam), 0.0, None)


SLOPES = {"scad": scad_slope, "mcp": mcp_slope}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(5)
    X = rng.normal(size=(400, 8)) + 0.5 * rng.normal(size=(400, 1))
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    b = np.array([0.9, -0.7, 0.4, 0.25, 0.0, 0.0, 0.1, 0.0])
    return X, X @ b + rng.normal(size=400), (rng.random(400) < 1.0 / (1.0 + np.exp(-X @ b))).astype(float)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("penalty", SLOPES)
def test_least_squares(rows, penalty, number):
    X, y, _ = rows
    G, c = X.T @ X / len(y), X.T @ y / len(y)
    start = np.linalg.solve(G, c)
    steps = LinearSteps(start, number)
    path = gram_path(
        G,
        c,
        Penalty(penalty),
        CoefficientGroups.single(8),
        lambdas=LAMBDAS,
        algorithm="lla",
        steps=steps,
        tol=1e-12,
    )
    for lam, found in zip(LAMBDAS, path.coefficients, strict=True):
        b = start
        for _ in range(number):
            weights = SLOPES[penalty](b, lam)
            (b,) = gram_path(
                G, c, LASSO, CoefficientGroups.single(8, weights), lambdas=np.array([lam]), tol=1e-13
            ).coefficients
        np.testing.assert_allclose(found, b, atol=1e-10)
    assert path.converged.all() and (path.coefficients == 0.0).any()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("penalty", SLOPES)
def test_a_binary_response(rows, penalty, number):
    X, _, y = rows
    Z, free = np.column_stack([np.ones(len(y)), X]), [0.0]
    start = sm.GLM(y, Z, family=sm.families.Binomial()).fit(tol=1e-14).params
    data, spec = Rows(Z, y), DistributionSpec.of(sm.families.Binomial())
    groups = CoefficientGroups.single(9, np.r_[free, np.ones(8)])
    steps = LinearSteps(start, number)
    given = {"lambdas": LAMBDAS, "algorithm": "lla", "steps": steps, "tol": 1e-11}
    path = glm_path(data, spec, Penalty(penalty), groups, **given)
    for lam, found in zip(LAMBDAS, path.coefficients, strict=True):
        b = start
        for _ in range(number):
            weighted = CoefficientGroups.single(9, np.r_[free, SLOPES[penalty](b[1:], lam)])
            (b,) = glm_path(data, spec, LASSO, weighted, lambdas=np.array([lam]), tol=1e-11).coefficients
        np.testing.assert_allclose(found, b, atol=1e-8)
    assert path.converged.all()


def test_the_certificate_is_that_of_the_last_lasso(rows):
    X, y, _ = rows
    G, c = X.T @ X / len(y), X.T @ y / len(y)
    start, lam = np.linalg.solve(G, c), 0.2
    given = {"lambdas": np.array([lam]), "algorithm": "lla", "tol": 1e-10}
    one = gram_path(G, c, Penalty("scad"), CoefficientGroups.single(8), steps=LinearSteps(start, 1), **given)
    (b,) = one.coefficients
    slack = np.abs(c - G @ b) - lam * scad_slope(start, lam)
    assert np.abs(slack[b != 0.0]).max() < 1e-9 and slack.max() < 1e-9
    fixed = gram_path(G, c, Penalty("scad"), CoefficientGroups.single(8), **given)
    assert np.abs(fixed.coefficients - b).max() > 1e-3, "one step ends before the fixed point"


def test_a_convex_penalty_has_nothing_to_approximate(rows):
    X, y, _ = rows
    G, c = X.T @ X / len(y), X.T @ y / len(y)
    given = {"lambdas": LAMBDAS, "algorithm": "lla"}
    steps = LinearSteps(np.linalg.solve(G, c), 1)
    ours = gram_path(G, c, LASSO, CoefficientGroups.single(8), steps=steps, **given)
    np.testing.assert_array_equal(
        ours.coefficients, gram_path(G, c, LASSO, CoefficientGroups.single(8), **given).coefficients
    )


@pytest.mark.parametrize("penalty", SLOPES)
def test_the_grid_begins_where_the_first_lasso_selects_nothing(rows, penalty):
    """An estimate that is large has a small weight: beyond the lambda of the lasso it is still selected."""
    X, y, binary = rows
    G, c = X.T @ X / len(y), X.T @ y / len(y)
    groups = CoefficientGroups.of(np.array([0, 0, 1, 2, 3, 4, 5, 6]))
    steps, given = LinearSteps(np.linalg.solve(G, c), 1), {"algorithm": "lla", "size": 8}
    path = gram_path(G, c, Penalty(penalty, l1_ratio=0.9), groups, steps=steps, **given)
    assert path.lambdas[0] > 1.03 * path.scale
    assert not path.coefficients[0].any() and path.converged.all()
    just_below = {"lambdas": path.lambdas[:1] * (1.0 - 1e-6), "tol": 1e-9}
    assert gram_path(
        G, c, Penalty(penalty, l1_ratio=0.9), groups, steps=steps, **given, **just_below
    ).coefficients.any()
    Z, spec = np.column_stack([np.ones(len(y)), X]), DistributionSpec.of(sm.families.Binomial())
    start = sm.GLM(binary, Z, family=sm.families.Binomial()).fit(tol=1e-14).params
    single = CoefficientGroups.single(9, np.r_[0.0, np.ones(8)])
    path = glm_path(Rows(Z, binary), spec, Penalty(penalty), single, steps=LinearSteps(start, 1), **given)
    assert not path.coefficients[0, 1:].any() and path.lambdas[0] > 1.03 * path.scale
