"""SCAD and MCP in one or a few steps from the estimate without a penalty (Zou and Li 2008)."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from penalty_values import slope
from pooled_path import glm_path
from test_vglm_em import MISSING, TABLE
from test_vglm_em import model_of as blocks_model
from vglm_study import make_model, make_table, pooled_columns

from fedstat.errors import EstimationError, ModelError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

FAMILIES = {
    "normal": sm.families.Gaussian(),
    "binary": sm.families.Binomial(),
    "count": sm.families.Poisson(),
}
TABLES = {response: make_table(400, 1, response) for response in FAMILIES}


def model_of(response, **options):
    return make_model(TABLES[response], family=FAMILIES[response], **options)


def standardized(table, names):
    X = pooled_columns(table, names)
    return np.column_stack([np.ones(len(X)), (X - X.mean(axis=0)) / X.std(axis=0)]), X.std(axis=0)


def by_hand(response, names, penalty, lam, number):
    """Lassos of pooled rows, each with the slopes of the penalty at the one before: (1 + p,)."""
    (Z, _), y = standardized(TABLES[response], names), TABLES[response]["y"].to_numpy()
    b = sm.GLM(y, Z, family=FAMILIES[response]).fit(tol=1e-14).params
    data, spec, given = Rows(Z, y), DistributionSpec.of(FAMILIES[response]), {"lambdas": np.array([lam])}
    for _ in range(number):
        slopes = [slope(Penalty(penalty), lam, abs(t)) / lam for t in b[1:]]
        groups = CoefficientGroups.single(len(b), np.r_[0.0, slopes])
        b = glm_path(data, spec, Penalty("lasso"), groups, tol=1e-11, **given).coefficients[0]
    return b


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("penalty", ["scad", "mcp"])
@pytest.mark.parametrize("response", FAMILIES)
def test_the_chosen_fit_is_that_of_pooled_rows(response, penalty, number):
    result = model_of(response, penalty=penalty).fit(steps=number)
    names = list(result.params.index[1:])
    b = by_hand(response, names, penalty, result.lam, number)
    scale = standardized(TABLES[response], names)[1]
    np.testing.assert_allclose(result.params[1:] * scale, b[1:], atol=1e-6)
    assert 0 < np.count_nonzero(b[1:]) < len(names)
    assert result.converged and 0.0 < result.path["kkt"].loc[result.lam] <= 1e-7
    assert any(f"{number} local linear approximation" in note for note in result.notes)


@pytest.mark.parametrize("response", ["binary", "count"])
def test_every_fit_of_the_exact_path_is_that_of_pooled_rows(response):
    result = model_of(response).fit(steps=2, path="exact", n_lambdas=6, ratio=0.05)
    names = list(result.params.index[1:])
    scale = standardized(TABLES[response], names)[1]
    for lam, row in result.path_params.iterrows():
        b = by_hand(response, names, "scad", lam, 2)
        np.testing.assert_allclose(row.iloc[1:] * scale, b[1:], atol=1e-6 if lam == result.lam else 1e-3)


@pytest.mark.parametrize("response", FAMILIES)
def test_a_ridge_part_stays_what_it_is(response):
    """The stationarity conditions, written out: slopes at the estimate before, and the ridge part."""
    result, alpha, lam = model_of(response, l1_ratio=0.8).fit(steps=1, lam=0.1), 0.8, 0.1
    names, y = list(result.params.index[1:]), TABLES[response]["y"].to_numpy()
    Z, scale = standardized(TABLES[response], names)
    start = sm.GLM(y, Z, family=FAMILIES[response]).fit(tol=1e-14).params[1:]
    b = result.params[1:].to_numpy() * scale
    eta = result.params.iloc[0] + pooled_columns(TABLES[response], names) @ result.params[1:].to_numpy()
    mean = FAMILIES[response].link.inverse(eta)
    slopes = np.array([slope(Penalty("scad"), alpha * lam, abs(t)) for t in start])
    gradient = Z[:, 1:].T @ (y - mean) / len(y) - (1.0 - alpha) * lam * b
    np.testing.assert_allclose(gradient[b != 0.0], (slopes * np.sign(b))[b != 0.0], atol=2e-7)
    assert (np.abs(gradient) <= slopes + 2e-7).all() and (b == 0.0).any()


def test_the_quadratic_path_chooses_as_the_exact_one():
    model = model_of("binary")
    quadratic, exact = model.fit(steps=2), model.fit(steps=2, path="exact")
    assert quadratic.lam == pytest.approx(exact.lam)
    np.testing.assert_allclose(quadratic.params, exact.params, atol=1e-5)
    assert quadratic.ledger.rounds < exact.ledger.rounds / 2


@pytest.mark.parametrize("response", ["binary", "count"])
def test_a_response_of_noise_selects_nothing(response):
    """The solution at the largest lambda is the null model itself: a point that is known twice."""
    table = TABLES[response].copy()
    table["y"] = np.random.default_rng(3).permutation(table["y"].to_numpy())
    result = make_model(table, family=FAMILIES[response]).fit(steps=1)
    exact = make_model(table, family=FAMILIES[response]).fit(steps=1, path="exact")
    assert not exact.params[1:].any() and not result.params[1:].any()
    assert result.converged and np.isfinite(result.path["bic"]).all()


def test_missing_blocks():
    arguments = {"n_lambdas": 8, "select": "ebic", "steps": 2}
    ours, ordinary = blocks_model(TABLE).fit(**arguments), make_model(TABLE).fit(**arguments)
    columns = pooled_columns(TABLE, ours.params.index[1:]).std(axis=0) / TABLE["y"].std()
    difference = ours.path_params.to_numpy() - ordinary.path_params.to_numpy()
    np.testing.assert_allclose(difference[:, 1:] * columns, 0.0, atol=1e-6)
    assert blocks_model(MISSING).fit(**arguments).converged


@pytest.mark.parametrize("response", FAMILIES)
def test_folds_start_from_estimates_of_their_own(response):
    """Cross-validated deviances next to refits of pooled rows from the estimate of the other folds."""
    model = model_of(response)
    result = model.fit(steps=1, select="cv", folds=4, n_lambdas=10, ratio=0.05, seed=3)
    names, y = list(result.params.index[1:]), TABLES[response]["y"].to_numpy()
    family, errors = FAMILIES[response], []
    code = np.random.default_rng(3).permutation(np.arange(len(y)) % 4)
    chosen = result.path.index.get_loc(result.lam)
    for fold in range(4):
        here = code == fold
        X = pooled_columns(TABLES[response], names)
        scale = X[~here].std(axis=0) if response == "normal" else X.std(axis=0)
        Z = np.column_stack([np.ones(len(y)), (X - X[~here].mean(axis=0)) / scale])
        start = sm.GLM(y[~here], Z[~here], family=family).fit(tol=1e-14).params
        slopes = [slope(Penalty("scad"), result.lam, abs(t)) / result.lam for t in start[1:]]
        groups = CoefficientGroups.single(len(start), np.r_[0.0, slopes])
        rows, spec = Rows(Z[~here], y[~here]), DistributionSpec.of(family)
        given = {"lambdas": np.array([result.lam]), "tol": 1e-10}
        b = glm_path(rows, spec, Penalty("lasso"), groups, **given).coefficients[0]
        errors.append(family.deviance(y[here], family.link.inverse(Z[here] @ b)) / here.sum())
    exact = 1e-9 if response == "normal" else 5e-3
    assert result.path["cv"].iloc[chosen] == pytest.approx(np.mean(errors), rel=exact)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"penalty": "lasso"}, {"steps": 1}, "of SCAD and MCP.*leave steps out with penalty='lasso'"),
        ({}, {"steps": 1, "algorithm": "descent"}, "algorithm='lla'"),
        ({}, {"steps": 0}, "steps: expected a whole number, 1 or more"),
        ({}, {"steps": 1, "exchange": "admm"}, "exchange='products'"),
    ],
)
def test_what_has_no_steps_is_said(options, arguments, message):
    with pytest.raises(ModelError, match=message):
        model_of("binary", **options).fit(**arguments)


def test_no_estimate_to_start_from_is_said():
    table = TABLES["binary"].copy()
    table["y"] = (table["x0"] > table["x0"].median()).astype(float)
    with pytest.raises(EstimationError, match=r"no unpenalized estimate.*Leave out adaptive and steps"):
        make_model(table, family=FAMILIES["binary"]).fit(steps=1)


def test_without_a_penalty_steps_do_nothing():
    model = model_of("count")
    np.testing.assert_array_equal(model.fit(lam=0.0, steps=2).params, model.fit(lam=0.0).params)
