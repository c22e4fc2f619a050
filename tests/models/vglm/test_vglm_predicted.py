"""Predictions with errors, and evaluations, of models over columns, against those of the rows."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy.special import expit
from sklearn.metrics import brier_score_loss, r2_score, roc_auc_score

import fedstat as fs
from fedstat.errors import DescriptionError, ModelError, NotAvailableError, PolicyError

N = 600
RNG = np.random.default_rng(4)
X = pd.DataFrame(RNG.normal(size=(N, 4)), columns=["a", "b", "c", "d"])
ETA = -0.4 + 0.9 * X["a"] - 0.7 * X["c"]
Y = {
    "binary": (RNG.random(N) < expit(ETA)).astype(float),
    "count": RNG.poisson(np.exp(0.5 * ETA)).astype(float),
    "gauss": ETA.to_numpy() + RNG.normal(size=N),
}
FAMILIES = {"binary": sm.families.Binomial(), "count": sm.families.Poisson(), "gauss": sm.families.Gaussian()}
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


def sites(rows=slice(None), policy=None, lacking=(), response="binary", **options):
    table = X.assign(id=np.arange(N), y=Y[response]).iloc[rows]
    frames = {"bank": table[["id", "y", "a", "b"]], "shop": table[["id", "c", "d"]]}
    frames["shop"] = frames["shop"][~frames["shop"]["id"].isin(lacking)]
    return fs.ClientPartition.from_frames(frames, on="id", policy=policy, **options)


def fit(response="binary", lam=0.0, partition=None, **options):
    model = fs.VerticalGLM.from_formula(
        "y ~ .", partition or sites(response=response), family=FAMILIES[response], **options
    )
    return model.fit(**({} if lam is None else {"lam": lam}))


@pytest.mark.parametrize("response", FAMILIES)
def test_without_a_penalty_predictions_are_those_of_statsmodels(response):
    found = fit(response).get_prediction().summary_frame()
    glm = sm.GLM(Y[response], sm.add_constant(X), family=FAMILIES[response]).fit(tol=1e-14)
    expected = glm.get_prediction().summary_frame()[list(found.columns)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_of_new_entities_too():
    found = fit().get_prediction(sites(slice(0, 40), new_data=True)).summary_frame(alpha=0.2)
    glm = sm.GLM(Y["binary"], sm.add_constant(X), family=FAMILIES["binary"]).fit(tol=1e-14)
    expected = glm.get_prediction(sm.add_constant(X)[:40]).summary_frame(alpha=0.2)
    np.testing.assert_allclose(found, expected[list(found.columns)], rtol=1e-5)


@pytest.mark.parametrize("penalty", ["scad", "lasso"])
def test_after_a_selection_errors_are_those_of_the_selected_columns(penalty):
    result = fit(lam=None, penalty=penalty)
    chosen = [name for name in result.refit.params.index if name != "Intercept"]
    assert 0 < len(chosen) < 4 or penalty == "lasso"
    found = result.get_prediction()
    glm = sm.GLM(Y["binary"], sm.add_constant(X[chosen]), family=FAMILIES["binary"]).fit(tol=1e-14)
    expected = glm.get_prediction()
    if penalty == "lasso":  # the refit is what has errors
        np.testing.assert_allclose(found.predicted_mean, expected.predicted, rtol=1e-4)
    else:
        np.testing.assert_allclose(found.predicted_mean, result.predict(), rtol=1e-10)
    np.testing.assert_allclose(found.se_mean, expected.se, rtol=1e-2 if penalty == "scad" else 1e-4)


def test_a_missing_block_has_its_mean_as_it_has_in_predict():
    partition = sites(lacking=range(0, N, 3), response="gauss")
    result = fit("gauss", partition=partition, missing="em")
    found = result.get_prediction()
    np.testing.assert_allclose(found.predicted_mean, result.predict(), rtol=1e-10)
    # A prediction from the mean of the block has the error of the intercept and of the present columns.
    names = list(result.params.index)
    means = pd.Series(dict(zip("cd", result._record.predictor.column_means["shop"], strict=True)))
    rows = X.assign(Intercept=1.0)
    rows.loc[::3, ["c", "d"]] = means[["c", "d"]].to_numpy()
    V = result.cov_params().to_numpy()
    expected = np.sqrt(np.einsum("ij,jk,ik->i", rows[names], V, rows[names]))
    np.testing.assert_allclose(found.se_linear, expected, rtol=1e-8)


def test_where_blocks_lack_and_nothing_stands_for_them_there_is_no_prediction():
    result = fit()
    found = result.get_prediction(sites(lacking=[3, 5], new_data=True))
    assert found.predicted_mean.isna().sum() == found.se_mean.isna().sum() == 2


def test_columns_do_not_leave_a_strict_site_for_errors():
    result = fit()
    with pytest.raises(PolicyError):
        result.get_prediction(
            sites(policy=fs.Policy(refused_kinds=frozenset({"raw columns"})), new_data=True)
        )


# -- marginal effects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [fs.VFEMGLM, fs.VerticalGLM])
@pytest.mark.parametrize("response", ["binary", "count"])
def test_marginal_effects_are_those_of_statsmodels(response, model):
    how = {"tol": 1e-10} if model is fs.VFEMGLM else {"lam": 0.0}
    partition = sites(response=response)
    result = model.from_formula("y ~ .", partition, family=FAMILIES[response]).fit(**how)
    for at, method in [
        ("mean", "dydx"),
        ("mean", "eyex"),
        ("overall", "dydx"),
        ("overall", "eydx"),
        ("zero", "dydx"),
    ]:
        # At the very coefficients of the fit, which are those of statsmodels to some digits less.
        glm = sm.GLM(Y[response], sm.add_constant(X), family=FAMILIES[response]).fit(tol=1e-15)
        glm = type(glm._results)(glm.model, result.params.to_numpy(), result.cov_params().to_numpy(), 1.0)
        expected, found = glm.get_margeff(at=at, method=method), result.get_margeff(at=at, method=method)
        np.testing.assert_allclose(found.margeff, expected.margeff, rtol=1e-8, err_msg=f"{at} {method}")
        np.testing.assert_allclose(found.margeff_se, expected.margeff_se, rtol=1e-8, err_msg=f"{at} {method}")
    assert "Averages over the 600 entities" in str(result.get_margeff())


def test_averages_are_over_the_entities_that_every_site_has():
    partition = sites(lacking=range(0, N, 3))
    result = fs.VFEMGLM.from_formula("y ~ .", partition, family=FAMILIES["binary"]).fit()
    eta = result.params["Intercept"] + X.to_numpy() @ result.params[1:].to_numpy()
    mu = expit(eta[np.arange(N) % 3 > 0])
    found = result.get_margeff()
    np.testing.assert_allclose(found.margeff, (mu * (1 - mu)).mean() * result.params[1:], rtol=1e-9)
    assert "over the 400 entities" in str(found) and found.margeff_se.between(0.001, 0.1).all()
    linear = fs.VFEMRegression.from_formula("y ~ .", partition).fit(cov_type="observed")
    np.testing.assert_array_equal(linear.get_margeff().margeff, linear.params[1:])
    np.testing.assert_allclose(linear.get_margeff().margeff_se, linear.bse[1:], rtol=1e-9)


def test_effects_after_a_selection_are_those_of_its_refit():
    result = fit(lam=0.05, penalty="lasso")
    chosen = [name for name in result.refit.params.index if name != "Intercept"]
    glm = sm.GLM(Y["binary"], sm.add_constant(X[chosen]), family=FAMILIES["binary"]).fit(tol=1e-14)
    for at in ("mean", "overall"):
        found, expected = result.get_margeff(at), glm.get_margeff(at=at)
        assert list(found.margeff.index) == chosen
        np.testing.assert_allclose(found.margeff, expected.margeff, rtol=1e-4)
        np.testing.assert_allclose(found.margeff_se, expected.margeff_se, rtol=1e-4)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"at": "all"}, "row-level values"),
        ({"method": "eyex"}, "use at='mean', or method='dydx'"),
        ({"dummy": True}, "FederatedGLM"),
    ],
)
def test_effects_that_cannot_be_had_say_what_can(arguments, words):
    with pytest.raises(NotAvailableError, match=words):
        fit().get_margeff(**arguments)


def test_averages_need_columns_and_means_do_not(tmp_path):
    strict = sites(policy=fs.Policy(refused_kinds=frozenset({"raw columns"})))
    result = fs.VFEMGLM.from_formula("y ~ .", strict, family=FAMILIES["binary"]).fit()
    with pytest.raises(PolicyError, match="raw columns"):
        result.get_margeff()
    request = strict.sites["shop"].site_ledger.entities
    at_means = result.get_margeff("mean")
    assert strict.sites["shop"].site_ledger.entities == request
    result.save(tmp_path / "fit")
    np.testing.assert_array_equal(fs.load(tmp_path / "fit").get_margeff("mean").margeff, at_means.margeff)


def test_effects_of_results_from_a_file_name_no_partition_that_could_be_given(tmp_path):
    fit().save(tmp_path / "fit")
    for at in ("mean", "overall"):
        with pytest.raises(NotAvailableError, match="fit the model again"):
            fs.load(tmp_path / "fit").get_margeff(at)
    with pytest.raises(ModelError, match="at: expected one of"):
        fit().get_margeff(["mean"])


# -- evaluation --------------------------------------------------------------------------------------


def check(evaluation, p, y):
    """Figures of all entities against those of the rows."""
    assert evaluation.n.sum() == len(y) and evaluation.observed.sum() == y.sum()
    assert evaluation.brier == pytest.approx(brier_score_loss(y, p), rel=1e-8)
    auc = evaluation.discrimination["all sites"]
    assert auc.at_least <= roc_auc_score(y, p) <= auc.at_most
    eta = np.log(p / (1.0 - p))
    slope = sm.GLM(y, sm.add_constant(eta), family=sm.families.Binomial()).fit(tol=1e-14)
    found = evaluation.recalibration
    np.testing.assert_allclose(found.params, slope.params, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found.cov, slope.cov_params(), rtol=1e-7)
    assert len(evaluation.roc().loc["all sites"]) > 10


def test_an_evaluation_is_that_of_the_rows():
    result = fit(lam=0.05, penalty="lasso")
    check(result.evaluate(), result.predict().to_numpy(), Y["binary"])
    assert result.evaluate().recalibration.slope > 1.0  # a lasso predicts too little


def test_vfem_is_evaluated_by_the_sites_that_entities_have():
    partition = sites(lacking=range(0, N, 3))
    model = fs.VFEMGLM.from_formula("y ~ .", partition, family=sm.families.Binomial())
    result = model.fit()
    evaluation = result.evaluate()
    assert evaluation.sites == ("bank", "bank + shop")
    assert evaluation.n.sum(axis=1).tolist() == [200, 400]
    check(evaluation, result.predict(partition).to_numpy(), Y["binary"])
    assert evaluation.auc_by_site["bank + shop"] > evaluation.auc_by_site["bank"]


@pytest.mark.parametrize("response", ["count", "gauss"])
def test_numbers_are_evaluated_by_squares_and_deviance(response):
    result = fit(response, lam=0.05, penalty="lasso")
    found, p, y = result.evaluate(), result.predict().to_numpy(), Y[response]
    row = found.to_frame().loc["all sites"]
    assert row["rsquared"] == pytest.approx(r2_score(y, p), rel=1e-9)
    assert row["rmse"] == pytest.approx(np.sqrt(np.mean((y - p) ** 2)), rel=1e-9)
    assert row[["observed", "expected"]].tolist() == pytest.approx([y.sum(), p.sum()])
    joint = FAMILIES[response]
    null = sm.GLM(y, np.ones(N), family=joint).fit(tol=1e-14).deviance
    assert found.accuracy.deviance == pytest.approx(joint.deviance(y, p), rel=1e-9)
    assert found.accuracy.null_deviance == pytest.approx(null, rel=1e-9)
    slope = sm.GLM(y, sm.add_constant(joint.link(p)), family=joint).fit(tol=1e-14)
    np.testing.assert_allclose(found.recalibration.params, slope.params, rtol=1e-7, atol=1e-9)
    text = " ".join(found.summary().as_text().split())
    assert "RMSE R2" in text and "% explained" in text and "(as bank counts them)" in text
    assert found.calibration().loc["all sites", "n"].min() >= 5
    with pytest.raises(NotAvailableError, match="not binary"):
        found.roc()


def test_vfem_of_a_number_is_evaluated_by_the_sites_that_entities_have():
    partition = sites(lacking=range(0, N, 3), response="gauss")
    result = fs.VFEMRegression.from_formula("y ~ .", partition).fit()
    frame = result.evaluate().to_frame()
    p, lacks = result.predict(partition).to_numpy(), np.arange(N) % 3 == 0
    for name, rows in {"bank": lacks, "bank + shop": ~lacks, "all sites": lacks | True}.items():
        assert frame.loc[name, "rsquared"] == pytest.approx(r2_score(Y["gauss"][rows], p[rows]), rel=1e-9)
    assert frame.loc["bank + shop", "rsquared"] > frame.loc["bank", "rsquared"]
    once = result.evaluate(sites(policy=fs.Policy(evaluation="once"), new_data=True, response="gauss"))
    exact = result.evaluate(sites(new_data=True, response="gauss"))
    # Averages of a few neighboring entities show the error of each, except for their random moves.
    assert once.to_frame()["rsquared"].iloc[-1] == pytest.approx(
        exact.to_frame()["rsquared"].iloc[-1], abs=0.01
    )
    assert once.accuracy.deviance == pytest.approx(exact.accuracy.deviance, rel=0.02)


def test_errors_of_averages_are_near_those_of_predictions_of_which_one_is_far_off():
    """Averaged with its neighbors one explains nothing of them, whatever a calibrated model would."""
    result, far = fit("count"), X.copy()
    far.loc[np.argmax(result.predict().to_numpy())] *= 4.0
    tables = {"bank": far[["a", "b"]].assign(y=Y["count"]), "shop": far[["c", "d"]]}
    tables = {name: table.assign(id=np.arange(N)) for name, table in tables.items()}
    exact, once = (
        result.evaluate(fs.ClientPartition.from_frames(tables, on="id", new_data=True, policy=policy))
        for policy in ("open", fs.Policy(evaluation="once"))
    )
    assert exact.accuracy.rsquared[-1] < -1.0
    np.testing.assert_allclose(once.accuracy.rmse, exact.accuracy.rmse, rtol=0.1)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_responses_that_do_not_differ_have_no_deviance_to_explain(value):
    tables = {"bank": X[["a", "b"]].assign(y=value), "shop": X[["c", "d"]]}
    tables = {name: table.assign(id=np.arange(N)) for name, table in tables.items()}
    found = fit("count").evaluate(fs.ClientPartition.from_frames(tables, on="id", new_data=True))
    assert found.accuracy.deviance > 0.0 and found.accuracy.null_deviance == pytest.approx(0.0, abs=1e-9)
    assert "Deviance, all entities" in str(found.summary()) and "nan" not in str(found.summary())


def test_predictions_beyond_all_bounds_are_evaluated():
    tables = {"bank": (1e4 * X[["a", "b"]]).assign(y=Y["count"]), "shop": X[["c", "d"]]}
    tables = {name: table.assign(id=np.arange(N)) for name, table in tables.items()}
    found = fit("count").evaluate(fs.ClientPartition.from_frames(tables, on="id", new_data=True))
    assert found.accuracy.rsquared[-1] < -1e6 and np.isfinite(found.accuracy.rmse).all()


def test_one_evaluation_is_of_averages_and_no_other_is_answered():
    result, once = fit(), sites(policy=fs.Policy(evaluation="once"), new_data=True)
    found, exact = result.evaluate(once), result.evaluate()
    assert found.auc == pytest.approx(exact.auc, abs=0.01)
    assert found.brier == pytest.approx(exact.brier, abs=0.005)
    assert found.recalibration.slope == pytest.approx(1.0, abs=0.05)
    with pytest.raises(DescriptionError, match='evaluation = "any"'):
        fit(lam=0.1, penalty="lasso").evaluate(once)


def test_what_cannot_be_evaluated_is_named():
    with pytest.raises(ModelError, match="'bank', which has the response"):
        partition = fs.ClientPartition.from_frames(
            {"shop": X.assign(id=np.arange(N))[["id", "c"]], "other": X.assign(id=np.arange(N))[["id", "d"]]},
            on="id",
            new_data=True,
        )
        model = fs.VFEMGLM.from_formula("y ~ .", sites(), family=sm.families.Binomial())
        model.fit().evaluate(partition)
