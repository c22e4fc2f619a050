"""Degenerate cases: what VFEM is where nothing is missing, or what is missing is left out or filled in."""

from __future__ import annotations

from dataclasses import dataclass

import formulaic
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from oracle import ITERATIVE, Study, packed, simulate
from scipy import stats

import fedstat as fs
from fedstat.spline_names import count_from_zero

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TIGHT = ITERATIVE | {"tol": 1e-12, "cross_products": "exact"}


@dataclass(frozen=True)
class OLS:
    """Ordinary least squares by statsmodels."""

    results: sm.regression.linear_model.RegressionResults

    @classmethod
    def of(cls, y, X):
        return cls(sm.OLS(np.asarray(y), np.column_stack([np.ones(len(X)), X])).fit())

    def agrees(self, result, rtol=1e-8):
        """Compare estimates, errors and criteria."""
        np.testing.assert_allclose(result.params, self.results.params, rtol=rtol)
        np.testing.assert_allclose(result.bse, self.results.bse, rtol=rtol)
        cov = self.results.cov_params()
        np.testing.assert_allclose(result.cov_params(), cov, rtol=rtol, atol=rtol * cov.max())
        assert result.scale == pytest.approx(self.results.scale, rel=rtol)
        assert result.llf == pytest.approx(self.results.llf, rel=rtol)
        assert result.aic == pytest.approx(self.results.aic, rel=rtol)
        assert result.bic == pytest.approx(self.results.bic, rel=rtol)
        assert result.rsquared == pytest.approx(self.results.rsquared, rel=rtol)
        assert result.rsquared_adj == pytest.approx(self.results.rsquared_adj, rel=rtol)
        assert result.nobs == self.results.nobs
        assert result.df_resid == self.results.df_resid
        return True


@pytest.fixture(scope="module")
def mixed():
    """Complete data of two clients and a response holder, with a factor at each client."""
    rng = np.random.default_rng(5)
    n = 300
    table = pd.DataFrame(
        {"a": rng.normal(size=n), "b": rng.exponential(size=n) + 0.5, "c": rng.normal(size=n)}
    )
    table["sex"] = rng.choice(["f", "m"], n)
    table["region"] = rng.choice(["east", "north", "west"], n)
    effect = {"east": 0.0, "north": 1.0, "west": -0.5}
    table["y"] = (
        table["a"] * (table["sex"] == "m")
        + np.log(table["b"])
        + table["c"] ** 2
        + table["region"].map(effect)
        + rng.normal(size=n)
    )
    return Study(table, {"Clinic": ["a", "b", "sex"], "Office": ["c", "region"]}, "Registry")


def only(study, site, holder):
    names = study.columns[site]
    return Study(study.table[["y", *names]], {site: names}, holder)


@pytest.mark.parametrize("holder", ["Court", "Registry"])
def test_one_site_without_missing_records_is_ordinary_least_squares(holder):
    study = only(simulate(seed=2, n=300, missing="none"), "Court", holder)
    result = study.model(coordinator=holder).fit(**packed(**TIGHT))
    ols = OLS.of(study.table["y"], study.table[study.covariates])
    assert ols.agrees(result)
    np.testing.assert_allclose(result.fittedvalues, ols.results.fittedvalues, rtol=1e-8)
    np.testing.assert_allclose(result.resid, ols.results.resid, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(result.conf_int(alpha=0.1), ols.results.conf_int(0.1), rtol=1e-7)
    np.testing.assert_allclose(result.tvalues, ols.results.tvalues, rtol=1e-7)
    np.testing.assert_allclose(result.pvalues, ols.results.pvalues, rtol=1e-6)


def test_predictions_of_one_site_are_those_of_least_squares():
    study = only(simulate(seed=2, n=300, missing="none"), "Court", "Registry")
    new = study.table[study.covariates].iloc[:40] + 1.0
    ols = OLS.of(study.table["y"], study.table[study.covariates])
    X = np.column_stack([np.ones(40), new])
    partition = fs.ClientPartition.from_frames(
        {"Court": new.rename_axis("id").reset_index()}, on="id", new_data=True
    )
    frame = study.model().fit(**packed(**TIGHT)).get_prediction(partition).summary_frame(alpha=0.1)
    np.testing.assert_allclose(frame["mean"], X @ ols.results.params, rtol=1e-8)
    var = np.einsum("ij,jk,ik->i", X, ols.results.cov_params(), X)
    np.testing.assert_allclose(frame["mean_se"], np.sqrt(var), rtol=1e-7)
    upper = frame["mean"] + stats.t(ols.results.df_resid).ppf(0.95) * np.sqrt(var + ols.results.scale)
    np.testing.assert_allclose(frame["obs_ci_upper"], upper, rtol=1e-7)


@pytest.mark.parametrize("cov_type", ["observed", "sem"])
@pytest.mark.parametrize("method", ["vfem", "cc", "impute"])
def test_complete_data_of_several_sites_are_ordinary_least_squares(method, cov_type):
    study = simulate(seed=3, n=300, missing="none")
    result = study.model().fit(**packed(method=method, cov_type=cov_type, **TIGHT))
    ols = OLS.of(study.table["y"], study.table[study.covariates])
    np.testing.assert_allclose(result.params, ols.results.params, rtol=1e-8)
    np.testing.assert_allclose(result.bse, ols.results.bse, rtol=1e-8 if cov_type == "observed" else 1e-6)
    assert result.llf == pytest.approx(ols.results.llf, rel=1e-10)


def test_robust_errors_of_complete_data_are_white_s():
    """The sandwich HC0; the blocks' own parameters do not enter the regression where nothing is missing."""
    study = simulate(seed=3, n=300, missing="none", holder="Registry")
    result = study.model().fit(**packed(cov_type="robust", **TIGHT))
    ols = OLS.of(study.table["y"], study.table[study.covariates])
    np.testing.assert_allclose(result.bse[1:], ols.results.HC0_se[1:], rtol=1e-7)


@pytest.mark.parametrize(
    "right",
    [
        "a + b + sex + c + region",
        "a * sex + log(b) + C(region, Treatment('north'))",
        "bs(a, df=4) + poly(c, 2) + region",
        "scale(a) + center(b):sex + c:region",
        "(a + b) ^ 2 + c",
    ],
)
def test_formulas_on_complete_data_are_those_of_the_pooled_table(mixed, right):
    result = mixed.model(f"y ~ {right}").fit(**packed(**TIGHT))
    pooled = formulaic.model_matrix(right.replace("'", '"'), mixed.table)
    ols = OLS.of(mixed.table["y"], pooled.drop(columns="Intercept"))
    names = ["Intercept", *count_from_zero(pooled.columns[1:])]
    by_name = dict(zip(names, zip(ols.results.params, ols.results.bse, strict=True), strict=True))
    assert set(result.params.index) == set(by_name)
    for name in by_name:
        assert (result.params[name], result.bse[name]) == pytest.approx(by_name[name], rel=1e-7, abs=1e-9), (
            name
        )
    assert result.llf == pytest.approx(ols.results.llf, rel=1e-10)


@pytest.mark.parametrize("holder", ["Bank", "Registry"])
def test_complete_cases_are_least_squares_on_the_complete_rows(holder):
    study = simulate(seed=4, n=600, holder=holder)
    result = study.model().fit(**packed(method="cc", **TIGHT))
    complete = study.table.dropna()
    ols = OLS.of(complete["y"], complete[study.covariates])
    assert ols.agrees(result)
    assert list(result.fittedvalues.index) == list(complete.index)
    np.testing.assert_allclose(result.fittedvalues, ols.results.fittedvalues, rtol=1e-7)
    assert result.nobs_by_site.tolist() == [len(complete)] * 3
    assert f"{600 - len(complete)} entities with a response were left out" in " ".join(
        result.summary().as_text().split()
    )


@pytest.mark.parametrize("holder", ["Bank", "Registry"])
def test_imputation_is_least_squares_on_the_table_with_means(holder):
    study = simulate(seed=4, n=600, holder=holder)
    result = study.model().fit(**packed(method="impute", **TIGHT))
    filled = study.table.fillna(study.table.mean())
    ols = OLS.of(filled["y"], filled[study.covariates])
    assert ols.agrees(result)
    np.testing.assert_allclose(result.fittedvalues, ols.results.fittedvalues, rtol=1e-7)
    assert result.nobs_by_site.tolist() == study.table[["bank0", "court0", "tax0"]].notna().sum().tolist()


def test_single_is_least_squares_on_the_response_holders_rows():
    study = simulate(seed=4, n=600, holder="Bank")
    result = study.model().fit(**packed(method="single", **TIGHT))
    own = study.table[["y", *study.columns["Bank"]]].dropna()
    assert OLS.of(own["y"], own[study.columns["Bank"]]).agrees(result)
    assert set(result.coef_sites) == {"", "Bank"}
    assert set(result.ledger.to_frame()["sender"]) <= {"coordinator", "Court", "Tax"}
    assert not (result.ledger.to_frame()["kind"] == "per entity").any()


@pytest.mark.parametrize("method", ["cc", "impute"])
def test_baselines_hold_with_the_response_at_a_site_that_lacks_records(method):
    """Robust and supplemented EM errors of the baselines are those of least squares too."""
    study = simulate(seed=4, n=600, holder="Bank")
    table = study.table.dropna() if method == "cc" else study.table.fillna(study.table.mean())
    ols = OLS.of(table["y"], table[study.covariates])
    model = study.model()
    sem = model.fit(**packed(method=method, cov_type="sem", **TIGHT))
    np.testing.assert_allclose(sem.bse, ols.results.bse, rtol=1e-6)
    robust = model.fit(**packed(method=method, cov_type="robust", **TIGHT))
    np.testing.assert_allclose(robust.bse[1:], ols.results.HC0_se[1:], rtol=1e-6)


def test_partly_filled_rows_can_be_filled_with_means():
    """partial="mean": a client that has some columns of an entity has it, at the mean of the others."""
    study = simulate(seed=6, n=300, missing="none", holder="Registry")
    study.table.loc[study.table.index[::7], "court1"] = np.nan
    filled = study.table.fillna(study.table.mean())
    model = fs.VFEMRegression.from_formula("y ~ .", study.partition(partial="mean"), between="independent")
    result = model.fit(**packed(**TIGHT))
    assert OLS.of(filled["y"], filled[study.covariates]).agrees(result)


def test_entities_without_a_response_are_left_out_and_counted():
    study = simulate(seed=6, n=300, missing="none", holder="Bank")
    study.table.loc[study.table.index[::5], "y"] = np.nan
    result = study.model(missing="drop").fit(**packed(**TIGHT))
    there = study.table.dropna()
    assert OLS.of(there["y"], there[study.covariates]).agrees(result)
    assert list(result.resid.index) == list(there.index)
    assert "60 entities without a response were left out" in " ".join(result.summary().as_text().split())
