"""Every statement against statsmodels, by name; what does not exist says why."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.models.results import CoefficientResults, EstimateRecord

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def results_of(estimate):
    return CoefficientResults(EstimateRecord(estimate=estimate))


@pytest.mark.parametrize("what", ["params", "bse", "tvalues", "pvalues"])
def test_series_equal_statsmodels(result, reference, what):
    pd.testing.assert_series_equal(getattr(result, what), getattr(reference, what), **TIGHT)


@pytest.mark.parametrize("what", ["llf", "aic", "bic", "rsquared", "nobs", "df_model", "df_resid"])
def test_figures_equal_statsmodels(result, reference, what):
    assert_allclose(getattr(result, what), getattr(reference, what), rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.05, 0.32])
def test_intervals_equal_statsmodels(result, reference, alpha):
    pd.testing.assert_frame_equal(result.conf_int(alpha), reference.conf_int(alpha), **TIGHT)


def test_covariance_and_aliases(result, reference):
    pd.testing.assert_frame_equal(result.cov_params(), reference.cov_params(), **TIGHT)
    pd.testing.assert_series_equal(result.zvalues, result.tvalues)
    assert not result.use_t
    assert result.converged


def test_alpha_outside_the_unit_interval_is_refused(result):
    with pytest.raises(ModelError, match="alpha between 0 and 1"):
        result.conf_int(95)


def test_criteria_count_the_parameters_that_the_family_counts(make, reference):
    counted = make(n_parameters=20)
    assert_allclose(counted.aic, -2 * reference.llf + 40)
    assert_allclose(counted.bic, -2 * reference.llf + 20 * np.log(reference.nobs))


def test_tidy_is_the_summary_frame(result, reference):
    tidy = result.tidy(0.1)
    assert list(tidy["term"]) == list(reference.params.index)
    limits = reference.conf_int(0.1)
    expected = [reference.params, reference.bse, reference.tvalues, reference.pvalues, limits[0], limits[1]]
    assert_allclose(tidy.iloc[:, 2:].to_numpy(), np.column_stack(expected), **TIGHT)
    assert tidy.set_index("term").loc["C(race)[T.x-1]", "site"] == "Judicial_Organ"


def test_lr_test_equals_statsmodels(result, reference, restricted, restricted_reference):
    expected = reference.compare_lr_test(restricted_reference)
    assert_allclose(result.compare_lr_test(restricted), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response": "z"}, "same response, received 'y' and 'z'"),
        ({"nobs": 399}, "same number of entities, received 400 and 399"),
        ({"density_of": ("y", "x1")}, "same variables in the likelihood"),
    ],
)
def test_lr_test_refuses_other_data(result, restricted, changes, message):
    other = results_of(dataclasses.replace(restricted.estimate, **changes))
    with pytest.raises(ModelError, match=message):
        result.compare_lr_test(other)


def test_lr_test_refuses_what_is_not_nested_or_not_a_maximum(result, restricted, make):
    with pytest.raises(ModelError, match="not in this fit: C\\(race\\)"):
        restricted.compare_lr_test(result)
    with pytest.raises(ModelError, match="not in this fit: none; coefficients: 7 here, 7"):
        result.compare_lr_test(make())
    renamed = dataclasses.replace(restricted.estimate, names=("Intercept", "sex[T.male]", "x1", "x9"))
    with pytest.raises(ModelError, match="not in this fit: x9;"):
        result.compare_lr_test(results_of(renamed))
    better = results_of(dataclasses.replace(restricted.estimate, llf=result.llf + 1))
    with pytest.raises(EstimationError, match="larger log-likelihood"):
        result.compare_lr_test(better)
    silent = dataclasses.replace(restricted.estimate, llf=None, reasons={"llf": "not sent"})
    with pytest.raises(NotAvailableError, match="not sent"):
        result.compare_lr_test(results_of(silent))


STATEMENTS = {
    "bse": lambda r: r.bse,
    "pvalues": lambda r: r.pvalues,
    "conf_int": lambda r: r.conf_int(),
    "cov_params": lambda r: r.cov_params(),
    "t_test": lambda r: r.t_test("x1 = 0"),
    "wald_test": lambda r: r.wald_test("x1 = 0"),
    "wald_test_terms": lambda r: r.wald_test_terms(),
}


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
def test_without_a_covariance_every_statement_says_why(make, statement):
    bare = make(cov=None, reasons={"cov_params": "averaging has no covariance"})
    with pytest.raises(NotAvailableError, match="averaging has no covariance"):
        statement(bare)


def test_tidy_without_a_covariance_keeps_the_estimates(make, reference):
    tidy = make(cov=None, reasons={"cov_params": "because"}).tidy()
    assert_allclose(tidy["estimate"], reference.params)
    assert tidy.iloc[:, 4:].isna().all(axis=None)
    assert tidy.attrs["note"] == "because"


@pytest.mark.parametrize("what", ["llf", "aic", "bic", "rsquared"])
def test_figures_that_do_not_exist_say_why(make, what):
    bare = make(llf=None, rsquared=None, reasons={"llf": "no density", "rsquared": "no density"})
    with pytest.raises(NotAvailableError, match="no density"):
        getattr(bare, what)


def test_a_nan_row_leaves_the_other_coefficients_alone(make, reference):
    cov = reference.cov_params().to_numpy().copy()
    cov[4], cov[:, 4] = np.nan, np.nan
    holed = make(cov=cov)
    known = [name for name in holed.bse.index if name != "x1"]
    assert np.isnan(holed.bse["x1"])
    assert_allclose(holed.pvalues[known], reference.pvalues[known], rtol=1e-12)
    assert_allclose(
        holed.t_test("x1 = 0, sex[T.male] = 0").pvalue, [np.nan, reference.pvalues["sex[T.male]"]]
    )
    expected = reference.wald_test("C(race)[T.x-1] = sex[T.male]", scalar=True)
    assert_allclose(holed.wald_test("C(race)[T.x-1] = sex[T.male]").pvalue, expected.pvalue)
    with pytest.raises(NotAvailableError, match="x1 = 0"):
        holed.wald_test("x1 = 0")


def test_a_negative_variance_is_nan_and_silent(make, reference):
    cov = reference.cov_params().to_numpy().copy()
    cov[0, 0] = -1.0
    assert np.isnan(make(cov=cov).bse["Intercept"])


def test_estimate_refuses_lengths_that_do_not_agree(make):
    with pytest.raises(EstimationError, match=r"7 unique names .* 2 clients and a covariance of shape"):
        make(sites=("a", "b"), cov=np.eye(2))
    with pytest.raises(EstimationError, match="a repeated name"):
        make(names=("x1",) * 7)


def test_ledger_is_handed_out_or_missed(result, restricted):
    assert result.ledger.rounds == 65
    with pytest.raises(NotAvailableError, match="no ledger"):
        _ = restricted.ledger


def test_repr_is_one_line(result, make):
    assert repr(result) == "<CoefficientResults: y, 7 coefficients, 400 entities; see .summary()>"
    assert "NOT CONVERGED" in repr(make(converged=False))


def test_exponentials_are_those_of_the_estimates_and_their_limits(result):
    plain, ratios = result.tidy(), result.tidy(exponentiate=True)
    for column in ("estimate", "conf_low", "conf_high"):
        np.testing.assert_allclose(ratios[column], np.exp(plain[column]))
    np.testing.assert_array_equal(ratios["std_error"], plain["std_error"])
