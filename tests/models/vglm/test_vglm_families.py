"""Binomial and Poisson responses: the optimum of pooled rows, few rounds, and refusals of the sites."""

from __future__ import annotations

import json

import numpy as np
import pytest
import statsmodels.api as sm
from pooled_path import glm_path
from vglm_study import COLUMNS, make_model, make_table, pooled_columns

from fedstat.errors import EstimationError, MessageError, ModelError, NotAvailableError, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request, pack_request
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

FAMILIES = {"binary": sm.families.Binomial(), "count": sm.families.Poisson()}
TABLES = {response: make_table(400, 1, response) for response in FAMILIES}


def model_of(response, **options):
    return make_model(TABLES[response], family=FAMILIES[response], **options)


def pooled_path(response, names, penalty, **options):
    table = TABLES[response]
    X = pooled_columns(table, names)
    Z = np.column_stack([np.ones(len(X)), (X - X.mean(axis=0)) / X.std(axis=0)])
    groups = CoefficientGroups.single(len(names) + 1, np.concatenate([[0.0], np.ones(len(names))]))
    rows = Rows(Z, table["y"].to_numpy())
    return glm_path(rows, DistributionSpec.of(FAMILIES[response]), penalty, groups, **options), X.std(axis=0)


@pytest.mark.parametrize("response", FAMILIES)
@pytest.mark.parametrize("coordinator", [None, "apart"])
def test_without_a_penalty_it_is_maximum_likelihood(response, coordinator):
    result = model_of(response, coordinator=coordinator).fit(lam=0.0)
    table = TABLES[response]
    X = sm.add_constant(pooled_columns(table, result.params.index[1:]))
    glm = sm.GLM(table["y"], X, family=FAMILIES[response]).fit(tol=1e-14)
    np.testing.assert_allclose((result.params.to_numpy() - glm.params) / glm.bse, 0.0, atol=1e-7)
    np.testing.assert_allclose(result.bse, glm.bse, rtol=1e-7)
    assert result.llf == pytest.approx(glm.llf, abs=1e-8)
    assert result.llnull == pytest.approx(glm.llnull, abs=1e-8)


@pytest.mark.parametrize("response", FAMILIES)
def test_the_exact_path_of_the_lasso_is_that_of_pooled_rows(response):
    result = model_of(response, penalty="lasso").fit(path="exact", n_lambdas=8)
    pooled, scale = pooled_path(response, result.params.index[1:], Penalty("lasso"), size=8, tol=1e-10)
    np.testing.assert_allclose(result.path.index, pooled.lambdas, rtol=1e-7)
    np.testing.assert_allclose(result.path_params.iloc[:, 1:] * scale, pooled.coefficients[:, 1:], atol=2e-4)
    chosen = result.path.index.get_loc(result.lam)
    np.testing.assert_allclose(result.params[1:] * scale, pooled.coefficients[chosen, 1:], atol=1e-6)


@pytest.mark.parametrize("response", FAMILIES)
@pytest.mark.parametrize("penalty", ["lasso", "scad", "mcp"])
def test_the_chosen_fit_is_the_optimum_of_pooled_rows(response, penalty):
    result = model_of(response, penalty=penalty).fit()
    names, lambdas = list(result.params.index[1:]), result.path.index.to_numpy()
    chosen = int(np.flatnonzero(lambdas == result.lam)[0])
    pooled, scale = pooled_path(response, names, Penalty(penalty), lambdas=lambdas[: chosen + 1], tol=1e-10)
    np.testing.assert_allclose(result.params[1:] * scale, pooled.coefficients[-1, 1:], atol=1e-6)
    assert result.path["kkt"].iloc[chosen] <= 1e-7
    assert result.converged


def test_the_quadratic_path_takes_few_linear_predictors_and_chooses_as_the_exact_one():
    model = model_of("binary", penalty="mcp")
    fits = {path: model.fit(path=path, algorithm="descent") for path in ("quadratic", "exact")}
    assert _points(fits["quadratic"]) <= 25
    assert fits["exact"].path["converged"].all()
    assert (fits["quadratic"].params != 0.0).equals(fits["exact"].params != 0.0)


def _points(fit):
    frame = fit.ledger.to_frame()
    sent = frame[(frame["array"] == "linear_predictor") & (frame["sender"] != "coordinator")]
    return len(sent) // sent["sender"].nunique()


def test_refitted_standard_errors_are_those_of_the_selected_columns():
    result = model_of("binary", penalty="scad").fit()
    names = list(result.params.index[1:][result.params[1:] != 0.0])
    X = sm.add_constant(pooled_columns(TABLES["binary"], names))
    glm = sm.GLM(TABLES["binary"]["y"], X, family=FAMILIES["binary"]).fit(tol=1e-14)
    np.testing.assert_allclose(result.refit.params, glm.params, atol=1e-7)
    np.testing.assert_allclose(result.refit.bse, glm.bse, rtol=1e-7)
    np.testing.assert_allclose(result.bse[names], glm.bse[1:], rtol=1e-7)
    assert result.bse[result.params == 0.0].isna().all()


def test_groups_adaptive_weights_and_free_columns():
    model = model_of("binary", penalty="lasso", group_terms=True, unpenalized=["x8"], adaptive=1.0)
    path = model.fit(path="exact", n_lambdas=8).path_params
    levels = path[["f[T.b]", "f[T.c]", "f[T.d]"]] != 0.0
    assert (levels.all(axis=1) | ~levels.any(axis=1)).all() and levels.any(axis=None)
    assert (path["x8"] != 0.0).all()
    X = sm.add_constant(pooled_columns(TABLES["binary"], ["x8"]))
    alone = sm.GLM(TABLES["binary"]["y"], X, family=FAMILIES["binary"]).fit(tol=1e-14)
    np.testing.assert_allclose(path.iloc[0][["Intercept", "x8"]], alone.params, atol=1e-4)


def test_linear_predictors_travel_masked_only():
    policy = Policy(masked_only=True)
    result = model_of("binary", partition={"policy": policy}).fit(lam=0.05)
    frame = result.ledger.to_frame()
    sent = frame[frame["array"] == "linear_predictor"]
    assert len(sent) and sent["masked"].all()
    clear = model_of("binary").fit(lam=0.05, masked=False)
    np.testing.assert_allclose(clear.params, result.params, atol=1e-7)
    with pytest.raises(PolicyError, match="masked only"):
        model_of("binary", partition={"policy": policy}).fit(lam=0.05, masked=False)
    with pytest.raises(PolicyError, match="masked only"):
        result.predict()


def test_a_holder_without_columns_and_two_sites():
    complete = model_of("binary").fit(lam=0.04)
    apart = {"Holder": ["y"], "Bank": COLUMNS["Bank"][1:], "Rest": [*COLUMNS["Clinic"], *COLUMNS["Registry"]]}
    for columns in (apart, {"Bank": COLUMNS["Bank"], "Rest": apart["Rest"]}):
        other = make_model(TABLES["binary"], columns, family=FAMILIES["binary"]).fit(lam=0.04)
        np.testing.assert_allclose(other.params[complete.params.index], complete.params, atol=1e-6)


def staged_site():
    """A site in the middle of a fit, and how to ask it."""
    model = model_of("binary")
    model.fit(lam=0.05)
    site = model.partition.sites["Registry"]

    def put(step, text="", **arrays):
        arrays = ({"columns": np.arange(4)} if step == "weigh" else {}) | arrays
        arrays = {name: np.asarray(a) for name, a in arrays.items()}
        return site.answer(pack_request(Request("Registry", "vglm", step, arrays, model._session, text)))

    return model, put


def test_the_site_refuses_weights_and_residuals_that_pick_entities():
    model, put = staged_site()
    one = np.zeros(400)
    one[7] = 1.0
    for step, array in (("weigh", "weight"), ("sum_scores", "residual")):
        with pytest.raises(PolicyError, match="concentrate on fewer"):
            put(step, **{array: one})
        with pytest.raises(MessageError):
            put(step, **{array: one[:-1]})
    with pytest.raises(MessageError, match="not negative"):
        put("weigh", weight=-np.ones(400))
    with pytest.raises(PolicyError, match="1 Gram matrix of 4 columns at least 10; there are 9"):
        put("weigh", weight=(np.arange(400) < 9).astype(float))
    put("stage_block", keep=model.layout.keep["Registry"])
    most = 400 // (2 * (4 + 1))
    for _ in range(most):
        put("weigh", weight=np.ones(400))
    with pytest.raises(PolicyError, match=f"{most + 1} Gram matrices"):
        put("weigh", weight=np.ones(400))


def test_the_site_refuses_folds_that_are_too_small_or_out_of_range():
    _, put = staged_site()
    code = np.zeros(400, dtype=np.int64)
    code[:6] = 1
    with pytest.raises(PolicyError, match="there are 6"):
        put("sum_products", code=code, groups=2)
    with pytest.raises(MessageError, match="folds from 0 to 0"):
        put("sum_products", code=code, groups=1)
    with pytest.raises(MessageError):
        put("open_product", json.dumps({"columns": "secret"}), rows=code, dealt=np.zeros(4, np.uint8))


def test_columns_that_separate_the_response_are_reported():
    table = TABLES["binary"].assign(y=(TABLES["binary"]["x0"] > 3.0).astype(float))
    model = make_model(table, family=FAMILIES["binary"])
    with pytest.raises((EstimationError, PolicyError), match="separate the response"):
        model.fit(lam=0.0)


def test_with_few_entities_there_is_no_gram_left_for_standard_errors():
    result = make_model(
        TABLES["binary"].iloc[45:90], family=FAMILIES["binary"], partition={"min_count": 3}
    ).fit(lam=0.05)
    with pytest.raises(NotAvailableError, match="than the number of entities allows"):
        _ = result.bse
    assert result.selection_report()["std_err"].isna().all()
    assert "conditional on selection" in str(result.summary())


def test_responses_of_another_kind_are_refused():
    table = TABLES["count"].assign(y=TABLES["count"]["y"] + 0.5)
    with pytest.raises(EstimationError, match="counts: whole numbers"):
        make_model(table, family=FAMILIES["count"]).fit()
    with pytest.raises(EstimationError, match="zeros and ones"):
        make_model(table, family=FAMILIES["binary"]).fit()
    with pytest.raises(ModelError, match="exchange='admm' does not release"):
        model_of("binary").fit(select="cv", exchange="admm")


def test_products_for_standard_errors_are_those_of_selected_columns_alone():
    model = model_of("binary", penalty="lasso")
    result = model.fit(lam=0.05)
    chosen = result.params.index[result.params != 0.0].drop("Intercept")
    assert 0 < len(chosen) < 12
    frame = result.ledger.to_frame()
    grams = frame[(frame["step"] == "weigh") & (frame["array"] == "gram")]
    assert set(grams["sender"]) == {"Clinic", "Registry"}  # the coordinator's own site sends nothing
    for site, shapes in grams.groupby("sender")["shape"]:
        # At first of all, at the estimate of those that were selected: none of a site without any.
        selected = sum(name.split("[")[0] in COLUMNS[site] for name in chosen)
        sizes = [shape[0] for shape in shapes]
        assert sizes[0] == dict(zip(model.layout.sites, model.layout.sizes, strict=True))[site]
        assert sizes[0] > selected
        assert sizes[-1] == (selected or sizes[0])
    # Standard errors are those of the likelihood on these columns.
    X = sm.add_constant(pooled_columns(TABLES["binary"], list(chosen)))
    pooled = sm.GLM(TABLES["binary"]["y"].to_numpy(), X, family=sm.families.Binomial()).fit(tol=1e-12)
    np.testing.assert_allclose(result.refit.bse[["Intercept", *chosen]], pooled.bse, rtol=1e-6)


def test_the_site_refuses_columns_that_it_lacks_or_that_repeat():
    _, put = staged_site()
    for columns in ([0, 0], [1, 0], [-1], [4]):
        with pytest.raises(MessageError, match="array 'columns' must ascend from 0 to 3"):
            put("weigh", weight=np.ones(400), columns=np.array(columns))
