"""Score, likelihood ratio and Wald tests, VIF and predictions, against statsmodels on the stacked table."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import fit_pooled, partition, table
from scipy import stats
from statsmodels.stats.outliers_influence import variance_inflation_factor

import fedstat as fs
from fedstat.errors import DataWarning, EstimationError, ModelError

FRAME = table(seed=5)


def fit(formula="binary ~ x + z", family=None, frame=FRAME, use_t=None, **roles):
    return fs.FederatedGLM.from_formula(
        formula, partition(frame), family=family or sm.families.Binomial(), **roles
    ).fit(use_t=use_t, local=False)


def test_likelihood_ratio_is_that_of_the_stacked_table():
    full, small = fit("binary ~ x + z + C(g)"), fit("binary ~ x + z")
    pooled = [fit_pooled(f"binary ~ {r}", FRAME, sm.families.Binomial()) for r in ("x + z + C(g)", "x + z")]
    test = full.compare_lr_test(small)
    assert test.statistic == pytest.approx(2 * (pooled[0].llf - pooled[1].llf), rel=1e-8)
    assert test.df_diff == 2


@pytest.mark.parametrize("terms", ["C(g)", "days", "C(g) + days"])
def test_score_test_is_that_of_statsmodels(terms):
    small = fit_pooled("binary ~ x + z", FRAME, sm.families.Binomial())
    extra = np.asarray(model_matrix(terms, FRAME))[:, 1:]
    expected = small.model.score_test(small.params, exog_extra=extra)
    ours = fit("binary ~ x + z").score_test(terms)
    np.testing.assert_allclose(ours[:2], np.ravel(expected[:2]), rtol=1e-6)


def test_score_test_with_estimated_dispersion_uses_that_of_the_fit():
    small = fit_pooled("gauss ~ x", FRAME, sm.families.Gaussian())
    X = np.asarray(model_matrix("x + z", FRAME))
    r = FRAME["gauss"].to_numpy() - np.asarray(small.fittedvalues)
    expected = (X.T @ r) @ np.linalg.solve(X.T @ X, X.T @ r) / small.scale
    ours = fit("gauss ~ x", sm.families.Gaussian()).score_test("z")
    assert ours.statistic == pytest.approx(expected, rel=1e-8)
    assert ours.pvalue == pytest.approx(stats.chi2.sf(expected, 1))


def test_score_test_names_rows_that_lack_the_new_column():
    frame = FRAME.assign(days=FRAME["days"].where(np.arange(len(FRAME)) > 60))
    with pytest.warns(DataWarning), pytest.raises(ModelError, match="lack a column of 'days'"):
        fit("binary ~ x", frame=frame).score_test("days")
    with pytest.raises(ModelError, match="add no coefficient"):
        fit("binary ~ x").score_test("x")


def test_vif_of_single_columns_is_that_of_the_design():
    X = np.asarray(model_matrix("x + z + days", FRAME))
    expected = [variance_inflation_factor(X, j) for j in (1, 2, 3)]
    ours = fit("gauss ~ x + z + days", sm.families.Gaussian()).vif()
    np.testing.assert_allclose(ours["GVIF"], expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("formula", "family", "roles"),
    [
        ("binary ~ x + scale(z) + C(g)", sm.families.Binomial(), {}),
        ("count ~ x + C(g)", sm.families.Poisson(), {"exposure": "days"}),
        ("gamma ~ z", sm.families.Gamma(sm.families.links.Log()), {"offset": "x"}),
    ],
)
def test_predictions_are_those_of_statsmodels(formula, family, roles):
    ours = fit(formula, family, use_t=False, **roles)
    offset = FRAME["x"].to_numpy() if "offset" in roles else None
    theirs = fit_pooled(formula, FRAME, family, offset=offset, exposure=roles.get("exposure"))
    known = {name: FRAME[column].to_numpy() for name, column in roles.items()}
    expected = theirs.get_prediction(theirs.model.exog, **known).summary_frame()
    frame = ours.get_prediction(FRAME).summary_frame()
    np.testing.assert_allclose(frame, expected, rtol=1e-7)
    np.testing.assert_allclose(ours.predict(FRAME), theirs.fittedvalues, rtol=1e-8)


def test_rows_that_lack_a_column_are_predicted_as_missing():
    new = FRAME.head(5).copy()
    new.loc[new.index[1], "x"] = np.nan
    predicted = fit().predict(new)
    assert predicted.isna().tolist() == [False, True, False, False, False]
    assert isinstance(predicted, pd.Series) and predicted.index.equals(new.index)


def test_auc_from_counts_is_that_of_the_rows():
    from sklearn.metrics import roc_auc_score

    result = fit("binary ~ x + z + C(g)")
    evaluation = result.evaluate()
    exact = roc_auc_score(FRAME["binary"], result.predict(FRAME))
    found = evaluation.discrimination["all sites"]
    assert found.at_least <= exact <= found.at_most
    assert result.auc == pytest.approx(exact, abs=0.01)
    assert evaluation.to_frame().loc["all sites", "observed"] == FRAME["binary"].sum()
    kinds = {kind for row in result.evaluation_ledger.kinds_by_site().values() for kind in row}
    assert kinds <= {"control", "schema", "aggregate"}


def test_new_rows_are_evaluated_with_the_levels_of_the_fit():
    result = fit("binary ~ x + C(g)")
    other = partition(table(seed=9))
    evaluation = result.evaluate(other)
    assert evaluation.n.sum() == 600
    assert 0.5 < evaluation.auc < 0.9


def test_models_with_and_without_a_column_are_fitted_to_the_same_rows():
    frame = FRAME.assign(days=FRAME["days"].where(np.arange(len(FRAME)) > 60))
    with pytest.warns(DataWarning):
        small = fit("binary ~ x", frame=frame, complete=["days"])
    assert small.nobs == len(FRAME) - 61
    with pytest.warns(DataWarning):
        full = fit("binary ~ x + days", frame=frame)
    assert full.compare_lr_test(small).df_diff == 1


def test_score_test_of_a_collinear_term_is_named():
    with pytest.raises(EstimationError, match="collinear"):
        fit("binary ~ center(x)").score_test("x")


def test_rows_with_a_variance_weight_of_zero_are_no_rows():
    """As R's glm, and unlike statsmodels, which counts them in the degrees of freedom."""
    none = np.arange(len(FRAME)) % 7 == 0
    frame = FRAME.assign(v=np.where(none, 0.0, 1.0 + FRAME["z"].abs()))
    ours = fs.FederatedGLM.from_formula("gauss ~ x + C(g)", partition(frame), var_weights="v").fit()
    theirs = fit_pooled("gauss ~ x + C(g)", frame[~none], sm.families.Gaussian(), var="v")
    assert (ours.nobs, ours.df_resid) == (theirs.nobs, theirs.df_resid)
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-8)
    np.testing.assert_allclose(ours.llf, theirs.llf, rtol=1e-10)
