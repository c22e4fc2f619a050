"""Prediction for any pattern of missing blocks, against conditioning in the joint normal law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from oracle import ITERATIVE, Pooled, Study, packed, simulate
from scipy import stats
from statsmodels.tools.numdiff import approx_fprime_cs

import fedstat as fs
from fedstat.errors import DesignError, ModelError, NotAvailableError
from fedstat.models.vfem.results import VFEMResults

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TIGHT = ITERATIVE | {"tol": 1e-11, "cross_products": "exact"}


@dataclass(frozen=True)
class Fitted:
    study: Study
    result: VFEMResults
    pooled: Pooled
    theta: np.ndarray
    covariance: np.ndarray


@pytest.fixture(scope="module")
def fitted():
    study = simulate(seed=12, n=400, holder="Registry")
    model = study.model()
    result = model.fit(**packed(**TIGHT))
    pooled, theta = study.pooled(), study.theta(model, result)
    return Fitted(study, result, pooled, theta, np.linalg.inv(-pooled.hessian(theta)))


@pytest.fixture(scope="module")
def new():
    """Other entities, whose response no site knows; all eight patterns."""
    study = simulate(seed=13, n=150, holder="Registry")
    assert len(np.unique(study.pooled().seen, axis=0)) == 8
    return study


def partition_of(study, sites=("Bank", "Court", "Tax"), **options):
    """A partition of covariates alone; entities that no site has are not in it."""
    frames = study.frames()
    return fs.ClientPartition.from_frames({k: frames[k] for k in sites}, on="id", new_data=True, **options)


def known(study, columns=None):
    """The rows that at least one client has, as conditioned on."""
    X = study.table[study.covariates]
    if columns is not None:
        X = X.where(X.columns.isin(columns))
    return X.dropna(how="all")


def test_means_and_variances_are_those_of_the_conditional_law(fitted, new):
    prediction = fitted.result.get_prediction(partition_of(new))
    X = known(new)
    mean, variance = fitted.pooled.predict(fitted.theta, X.to_numpy())
    assert list(prediction.predicted_mean.index) == list(X.index)
    np.testing.assert_allclose(prediction.predicted_mean, mean, rtol=1e-9)
    np.testing.assert_allclose(prediction.var_resid, variance, rtol=1e-8)
    np.testing.assert_allclose(fitted.result.predict(partition_of(new)), mean, rtol=1e-9)


def test_standard_errors_of_the_mean_are_those_of_the_delta_method(fitted, new):
    X = known(new).to_numpy()
    gradient = approx_fprime_cs(fitted.theta, lambda theta: fitted.pooled.predict(theta, X)[0])
    expected = np.sqrt(np.einsum("ij,jk,ik->i", gradient, fitted.covariance, gradient))
    prediction = fitted.result.get_prediction(partition_of(new))
    np.testing.assert_allclose(prediction.se_mean, expected, rtol=1e-5)


def test_intervals_are_built_from_both(fitted, new):
    prediction = fitted.result.get_prediction(partition_of(new))
    frame = prediction.summary_frame(alpha=0.2)
    half = stats.norm.ppf(0.9) * np.sqrt(prediction.se_mean**2 + prediction.var_resid)
    np.testing.assert_allclose(frame["obs_ci_upper"] - frame["mean"], half, rtol=1e-10)
    np.testing.assert_allclose(frame["mean"] - frame["obs_ci_lower"], half, rtol=1e-10)
    half = stats.norm.ppf(0.9) * prediction.se_mean
    np.testing.assert_allclose(frame["mean_ci_upper"] - frame["mean"], half, rtol=1e-10)
    np.testing.assert_allclose(prediction.conf_int(alpha=0.2), frame[["mean_ci_lower", "mean_ci_upper"]])
    with pytest.raises(ModelError, match="alpha between 0 and 1"):
        prediction.conf_int(alpha=1.5)


def test_intervals_are_wider_where_more_is_missing(fitted, new):
    """The variance of a response grows by beta'Sigma beta of every block that is missing."""
    X = known(new)
    variance = fitted.result.get_prediction(partition_of(new)).var_resid
    expected = np.full(len(X), fitted.result.scale)
    for site, names in new.columns.items():
        expected += fitted.result._fit.t[site] * X[names].isna().all(axis=1)
    np.testing.assert_allclose(variance, expected, rtol=1e-9)


@pytest.mark.parametrize("method", ["vfem", "cc", "impute"])
def test_a_site_may_be_absent(fitted, new, method):
    """Its block is missing for all; the order of the others does not matter."""
    result = (
        fitted.result
        if method == "vfem"
        else fitted.result.model.fit(**packed(method=method, cov_type="none", **ITERATIVE))
    )
    complete = partition_of(new)
    some = partition_of(new, ("Tax", "Bank"))
    rest = study_without(new, "Court")
    assert len(rest) < complete.n_entities
    predicted = result.predict(some)
    assert list(predicted.index) == list(rest.index)
    frames = new.frames()
    frames["Court"].iloc[:, 1:] = np.nan
    blanked = {k: frames[k] for k in ("Bank", "Court", "Tax")}
    same = fs.ClientPartition.from_frames(blanked, on="id", new_data=True)
    np.testing.assert_allclose(result.predict(same).reindex(rest.index), predicted, rtol=1e-12)


def study_without(study, site):
    names = [name for k, names in study.columns.items() if k != site for name in names]
    return study.table[names].dropna(how="all")


def test_an_absent_site_is_integrated_out(fitted, new):
    prediction = fitted.result.get_prediction(partition_of(new, ("Bank", "Tax")))
    X = study_without(new, "Court").reindex(columns=new.covariates)
    mean, variance = fitted.pooled.predict(fitted.theta, X.to_numpy())
    np.testing.assert_allclose(prediction.predicted_mean, mean, rtol=1e-9)
    np.testing.assert_allclose(prediction.var_resid, variance, rtol=1e-8)


def test_entities_that_no_site_has_get_the_mean_of_all(fitted):
    frame = pd.DataFrame({"id": [1, 2], "y": [0.0, 1.0]})
    partition = fs.ClientPartition.from_frames(
        {"Registry": frame, "Bank": pd.DataFrame({"id": [3], "bank0": [1.0], "bank1": [0.0]})},
        on="id",
        new_data=True,
    )
    prediction = fitted.result.get_prediction(partition)
    mean, C = fitted.pooled.joint_moments(fitted.theta)
    np.testing.assert_allclose(prediction.predicted_mean.loc[[1, 2]], mean[-1], rtol=1e-9)
    np.testing.assert_allclose(prediction.var_resid.loc[[1, 2]], C[-1, -1], rtol=1e-9)


def test_order_of_rows_and_sites_does_not_matter(fitted, new):
    frames = new.frames()
    shuffled = {k: frames[k].sample(frac=1.0, random_state=1) for k in ("Tax", "Bank", "Court")}
    other = fs.ClientPartition.from_frames(shuffled, on="id", new_data=True)
    one = fitted.result.get_prediction(partition_of(new)).summary_frame()
    two = fitted.result.get_prediction(other).summary_frame()
    pd.testing.assert_frame_equal(one, two, rtol=1e-12)


def test_the_partition_of_the_fit_is_the_default(fitted):
    fitted_values = fitted.result.predict()
    np.testing.assert_allclose(fitted_values, fitted.pooled.predict(fitted.theta)[0], rtol=1e-9)
    np.testing.assert_allclose(fitted.result.get_prediction().predicted_mean, fitted_values, rtol=1e-9)
    np.testing.assert_allclose(fitted.result.predict(fitted.result.model.partition), fitted_values, rtol=1e-9)


def test_intervals_of_new_responses_cover(fitted):
    """Pattern by pattern, with records missing at random; the standard error of a coverage is about .01."""
    study = simulate(seed=14, n=4_000, missing="none")
    rng = np.random.default_rng(5)
    table = study.table.copy()
    for names in study.columns.values():
        table.loc[rng.random(len(table)) < 0.4, names] = np.nan
    frames = Study(table, study.columns, "Registry").frames()
    partition = fs.ClientPartition.from_frames(frames, on="id", new_data=True)
    frame = fitted.result.get_prediction(partition).summary_frame()
    covered = frame["obs_ci_lower"].lt(table["y"]) & table["y"].lt(frame["obs_ci_upper"])
    pattern = table[["bank0", "court0", "tax0"]].isna() @ [1, 2, 4]
    assert covered.mean() == pytest.approx(0.95, abs=0.015)
    assert covered.groupby(pattern).mean().between(0.91, 0.985).all()
    width = (frame["obs_ci_upper"] - frame["obs_ci_lower"]).groupby(pattern).mean()
    assert width[7] > 1.2 * width[0]


@pytest.fixture(scope="module")
def by_region():
    rng = np.random.default_rng(2)
    table = pd.DataFrame({"x": rng.normal(size=90) + 5.0, "region": ["east", "north", "west"] * 30})
    table["y"] = np.log(table["x"]) + (table["region"] == "west") + rng.normal(size=90)
    study = Study(table, {"Office": ["x", "region"]}, "Registry")
    model = study.model("y ~ scale(log(x)) + bs(x, df=4) + region", coordinator="Registry")
    return study, model.fit(**packed(**ITERATIVE))


def office(**columns):
    return fs.ClientPartition.from_frames({"Office": pd.DataFrame(columns)}, on="id", new_data=True)


def test_new_rows_are_coded_as_those_of_the_fit(by_region):
    """Transforms keep their state: a single row is coded as it was among ninety."""
    study, result = by_region
    row = study.table.iloc[[7]]
    partition = office(id=[7], x=row["x"].to_numpy(), region=row["region"].to_numpy())
    assert result.predict(partition)[7] == pytest.approx(result.fittedvalues[7], rel=1e-9)


def test_an_unknown_level_is_named(by_region):
    with pytest.raises(DesignError, match=r"column 'region' at site 'Office': .*'south'"):
        by_region[1].predict(office(id=[1], x=[5.0], region=["south"]))


def test_a_column_that_is_absent_is_named(by_region):
    with pytest.raises(DesignError, match="region"):
        by_region[1].predict(office(id=[1, 2], x=[5.0, 5.5]))


def test_a_partly_filled_row_is_taken_as_missing(by_region):
    result = by_region[1]
    partition = office(id=[1, 2], x=[5.0, 5.5], region=["east", None])
    mean = result.predict(partition)
    assert mean[2] == pytest.approx(result._fit.a)
    assert mean[1] != pytest.approx(result._fit.a)


def test_rsquared_of_predictions_is_that_of_complete_entities(fitted):
    other = simulate(seed=15, n=300, holder="Registry")
    complete = other.table.dropna()
    predicted = fitted.pooled.predict(fitted.theta, complete[other.covariates].to_numpy())[0]
    error, deviation = complete["y"] - predicted, complete["y"] - complete["y"].mean()
    expected = 1.0 - (error @ error) / (deviation @ deviation)
    assert fitted.result.prediction_rsquared(other.partition()) == pytest.approx(expected, rel=1e-8)


def test_a_partition_that_does_not_fit_is_refused(fitted):
    table = pd.DataFrame({"bank0": [1.0, 2.0], "bank1": [1.0, 2.0], "hospital": ["a", "b"]})
    with pytest.raises(ModelError, match="vertical"):
        fitted.result.predict(fs.ClientPartition.from_frame(table, by="hospital", new_data=True))
    with pytest.raises(ModelError, match="at least one of the sites Bank, Court, Tax"):
        fitted.result.predict(office(id=[1], x=[1.0]))


def test_without_covariance_there_are_means_only(fitted, new):
    result = fitted.result.model.fit(**packed(cov_type="none", **ITERATIVE))
    prediction = result.get_prediction(partition_of(new))
    assert prediction.predicted_mean.notna().all()
    with pytest.raises(NotAvailableError, match="no standard error of the mean"):
        prediction.summary_frame()


def test_means_need_linear_predictors_alone_and_errors_disclose_columns(fitted, new):
    for request, expected in (
        (lambda: fitted.result._prediction(partition_of(new), mean_only=True), {"per entity"}),
        (lambda: fitted.result.get_prediction(partition_of(new)), {"per entity", "raw columns"}),
    ):
        frame = request().ledger.to_frame()
        left = frame[frame["sender"] != "coordinator"]
        assert set(left["kind"]) - {"presence", "schema"} == expected
