"""The sharing form of ADMM: the optimum of the other exchange."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.optimize import minimize_scalar
from vglm_study import make_model, make_table, pooled_columns

from fedstat.errors import ConvergenceWarning, PolicyError
from fedstat.federation.message import Request, pack_request
from fedstat.models.vglm.distributions import POINTS
from fedstat.models.vglm.steps import nearest

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

FAMILIES = {"normal": None, "binary": sm.families.Binomial(), "count": sm.families.Poisson()}
LAMBDAS = {"normal": 0.5, "binary": 0.1, "count": 0.1}


@pytest.mark.parametrize(
    ("response", "eps", "close"), [("count", 1e-5, 1e-4), *((response, 1e-7, 1e-6) for response in FAMILIES)]
)
def test_the_optimum_is_that_of_newtons_method(response, eps, close):
    table = make_table(300, 2, response)
    model = make_model(table, family=FAMILIES[response], penalty="lasso")
    newton = model.fit(lam=LAMBDAS[response])
    shared = model.fit(lam=LAMBDAS[response], exchange="admm", tol=eps)
    sd = pooled_columns(table, newton.params.index[1:]).std(axis=0) / (
        table["y"].std() if response == "normal" else 1.0
    )
    np.testing.assert_allclose(shared.params[1:] * sd, newton.params[1:] * sd, atol=close)
    assert shared.converged and shared.path["kkt"].max() <= 20 * eps
    # At a penalized estimate the likelihood is not flat: it changes as the coefficients do.
    assert shared.llf == pytest.approx(newton.llf, rel=close)
    np.testing.assert_allclose(shared.refit.bse, newton.refit.bse, rtol=1e-5)
    assert shared.llnull == pytest.approx(newton.llnull, abs=1e-6)


def test_a_nonconvex_penalty_by_its_tangents_along_a_path():
    model = make_model(make_table(300, 2, "binary"), family=FAMILIES["binary"], penalty="scad")
    shared = model.fit(lambdas=[0.15, 0.1], exchange="admm", tol=1e-7)
    assert shared.path["converged"].all()
    for lam in (0.15, 0.1):
        alone = model.fit(lam=lam)
        np.testing.assert_allclose(shared.path_params.loc[lam], alone.params, atol=1e-5)


def test_no_coefficient_reaches_the_coordinator_on_the_way_and_predictors_are_masked():
    result = make_model(make_table(300, 2)).fit(lam=0.5, exchange="admm", tol=1e-3)
    frame = result.ledger.to_frame()
    sent = frame[frame["array"] == "linear_predictor"]
    assert sent["masked"].all()
    sites = result.coef_sites[1:].nunique() - 1
    assert (frame["step"] == "admm_coefficients").sum() <= 2 * sites


def test_the_site_refuses_residuals_that_pick_entities():
    model = make_model(make_table(300, 2))
    model.fit(lam=0.5, exchange="admm", tol=1e-3)
    one = np.zeros(300)
    one[7] = 1.0
    for step in ("admm_largest", "admm_certify"):
        request = Request("Registry", "vglm", step, {"residual": one}, model._session)
        with pytest.raises(PolicyError, match="concentrate on fewer"):
            model.partition.sites["Registry"].answer(pack_request(request))


@pytest.mark.parametrize(
    ("response", "options"),
    [
        ("normal", {"adaptive": 1.0}),
        ("binary", {"unpenalized": ["x8", "f"]}),
        ("binary", {"adaptive": 0.5, "group_terms": True}),
    ],
    ids=str,
)
def test_weights_of_the_penalty_are_those_of_the_other_exchange(response, options):
    table = make_table(300, 2, response)
    model = make_model(table, family=FAMILIES[response], penalty="lasso", **options)
    shared = model.fit(exchange="admm", n_lambdas=2, ratio=0.4, tol=1e-6)
    newton = model.fit(lambdas=shared.path.index.to_numpy(), path="exact", tol=1e-8)
    grid = model.fit(n_lambdas=2, ratio=0.4, path="exact").path.index
    np.testing.assert_allclose(shared.path.index, grid, rtol=1e-4)
    sd = pooled_columns(table, newton.params.index[1:]).std(axis=0)
    sd /= table["y"].std() if response == "normal" else 1.0
    difference = (shared.path_params.to_numpy() - newton.path_params.to_numpy())[:, 1:] * sd
    np.testing.assert_allclose(difference, 0.0, atol=1e-4)
    assert shared.path["converged"].all()
    selected = shared.path_params.iloc[0, 1:] != 0.0
    assert selected.sum() <= (4 if "unpenalized" in options else 0)


def test_an_unfinished_fit_before_the_path_is_reported():
    model = make_model(make_table(300, 2), penalty="lasso", adaptive=1.0)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        result = model.fit(lam=1e3, exchange="admm", maxiter=2)
    assert not result.converged


def test_it_says_so_where_it_stops_too_early():
    model = make_model(make_table(300, 2, "binary"), family=FAMILIES["binary"], penalty="lasso")
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        result = model.fit(lam=0.02, exchange="admm", maxiter=3)
    assert not result.converged


@pytest.mark.parametrize("family", ["Gaussian", "Binomial", "Poisson"])
def test_the_step_of_an_entity_is_the_minimum(family):
    a, y = np.array([-2.0, 0.3, 5.0, 1.0]), np.array([1.0, 0.0, 0.0, 1.0])
    found = nearest(family, a, y, 4, 0.3)

    def value(z, i):
        return POINTS[family](np.array([4 * z]), y[i : i + 1])[0] + 4 * 0.3 * (z - a[i]) ** 2 / 2

    for i in range(4):
        best = minimize_scalar(value, args=(i,), bounds=(-20, 20), method="bounded", options={"xatol": 1e-12})
        assert found[i] == pytest.approx(best.x, abs=1e-6)


@pytest.mark.parametrize("family", ["Binomial", "Poisson"])
def test_entities_whose_step_is_found_wait_at_it_for_the_others(family, monkeypatch):
    rng, evaluated = np.random.default_rng(0), []

    def point(t, y):
        evaluated.append(t)
        return POINTS[family](t, y)

    monkeypatch.setattr("fedstat.models.vglm.steps.POINTS", {family: point})
    y = rng.integers(0, 2, 400).astype(float)
    nearest(family, rng.normal(size=400), y, 3, 0.3)
    assert len(evaluated) < 30
