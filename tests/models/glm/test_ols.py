"""Least squares over sites against statsmodels' OLS and WLS on the stacked table, to 1e-8."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import partition, table
from statsmodels.iolib.summary2 import summary_col

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError

FRAME = table()
RIGHT = "x + z + C(g)"
CASES = {
    "ols": (RIGHT, {}, {}),
    "not robust to anything, normal tests": (RIGHT, {}, {"use_t": False}),
    "no constant": ("0 + x + z", {}, {}),
    "constant of levels": ("0 + C(g) + x", {}, {}),
    "intercept alone": ("1", {}, {}),
    "wls": (RIGHT, {"var_weights": "v"}, {}),
    "wls with a constant of levels": ("0 + C(g) + x", {"var_weights": "v"}, {}),
    "HC0": (RIGHT, {}, {"cov_type": "HC0"}),
    "HC1": (RIGHT, {}, {"cov_type": "HC1"}),
    "HC1 wls": (RIGHT, {"var_weights": "v"}, {"cov_type": "HC1"}),
    "HC1, normal tests": (RIGHT, {}, {"cov_type": "HC1", "use_t": False}),
    "clusters, normal tests": (
        RIGHT,
        {},
        {"cov_type": "cluster", "cov_kwds": {"groups": "ward", "correction": "CR1"}, "use_t": False},
    ),
    "clusters": (RIGHT, {}, {"cov_type": "cluster", "cov_kwds": {"groups": "ward", "correction": "CR1"}}),
}
NUMBERS = (
    *(
        "nobs",
        "df_model",
        "df_resid",
        "scale",
        "rsquared",
        "rsquared_adj",
        "fvalue",
        "f_pvalue",
        "llf",
        "aic",
    ),
    *("bic", "ssr", "ess", "centered_tss", "uncentered_tss", "mse_model", "mse_resid", "mse_total"),
)


def pooled(right, roles, fit):
    X = model_matrix(right, FRAME) if right != "1" else FRAME[["x"]].assign(x=1.0)
    kwds = dict(fit)
    if "cov_kwds" in kwds:
        kwds["cov_kwds"] = {"groups": FRAME["ward"].astype("category").cat.codes}
    weights = {"weights": FRAME[roles["var_weights"]].to_numpy()} if roles else {}
    X = np.asarray(X, dtype=float)
    return (sm.WLS if roles else sm.OLS)(FRAME["gauss"].to_numpy(), X, **weights).fit(
        **({"use_t": True} | kwds)
    )


def federated(right, roles, fit):
    return fs.FederatedOLS.from_formula(f"gauss ~ {right}", partition(FRAME), labels=["ward"], **roles).fit(
        local=False, **fit
    )


@pytest.mark.parametrize("case", CASES)
def test_all_numbers_are_those_of_statsmodels(case):
    right, roles, fit = CASES[case]
    theirs, ours = pooled(right, roles, fit), federated(right, roles, fit)
    for name in NUMBERS:
        np.testing.assert_allclose(
            getattr(ours, name), getattr(theirs, name), rtol=1e-8, atol=1e-12, err_msg=name
        )
    for name in ("params", "bse", "tvalues", "pvalues", "conf_int"):
        mine, other = (getattr(result, name) for result in (ours, theirs))
        mine, other = (mine(), other()) if callable(mine) else (mine, other)
        np.testing.assert_allclose(mine, other, rtol=1e-8, atol=1e-12, err_msg=name)
    assert ours.use_t == theirs.use_t


def test_wald_tests_are_f_tests():
    theirs = pooled(RIGHT, {}, {})
    ours = federated(RIGHT, {}, {})
    R = np.eye(5)[2:4]
    found, expected = ours.wald_test(R), theirs.wald_test(R, scalar=True)
    assert found.distribution == "F"
    np.testing.assert_allclose([float(found.statistic), found.pvalue], [expected.statistic, expected.pvalue])
    smaller = fs.FederatedOLS.from_formula("gauss ~ x", partition(FRAME)).fit()
    exog = sm.add_constant(FRAME["x"].to_numpy())
    expected = theirs.compare_f_test(sm.OLS(FRAME["gauss"].to_numpy(), exog).fit())
    np.testing.assert_allclose(ours.compare_f_test(smaller), expected, rtol=1e-8)


def test_a_row_of_weight_two_stands_for_two_rows():
    ours = federated("x + z", {"freq_weights": "w"}, {})
    rows = FRAME.loc[FRAME.index.repeat(FRAME["w"].astype(int))]
    theirs = sm.OLS(rows["gauss"].to_numpy(), sm.add_constant(rows[["x", "z"]].to_numpy())).fit()
    for name in set(NUMBERS) - {"nobs"}:
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-8, err_msg=name)


def test_intervals_of_new_responses():
    theirs, ours = pooled("x + z", {}, {}), federated("x + z", {}, {})
    new = FRAME.head(7)
    exog = sm.add_constant(new[["x", "z"]].to_numpy())
    expected = theirs.get_prediction(exog).summary_frame(0.1)
    found = ours.get_prediction(new).summary_frame(0.1)
    assert list(found) == list(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    both = ours.augment(new, interval="prediction", alpha=0.1)[["conf_low", "conf_high"]]
    np.testing.assert_allclose(both, expected[["obs_ci_lower", "obs_ci_upper"]], rtol=1e-8)
    logistic = fs.GLORE.from_formula("binary ~ x", partition(FRAME)).fit()
    with pytest.raises(NotAvailableError, match="the response is binary"):
        logistic.augment(new, interval="prediction")


def test_summary_has_the_lines_of_ols(tmp_path):
    ours = federated(RIGHT, {}, {})
    text = str(ours.summary())
    for label in ("R-squared", "Adj. R-squared", "F-statistic", "Prob (F)", "Least Squares"):
        assert label in text
    assert "nan" not in text and "Pseudo" not in text and "P>|t|" in text
    assert "R-squared refers to zero" in str(federated("0 + x", {}, {}).summary())
    ours.save(tmp_path / "ols.fed")
    again = fs.load(tmp_path / "ols.fed")
    assert type(again) is type(ours) and again.f_pvalue == ours.f_pvalue
    row = ours.glance().loc[0]
    assert (row["r_squared"], row["statistic"], row["p_value"]) == (ours.rsquared, ours.fvalue, ours.f_pvalue)
    assert row["sigma"] == pytest.approx(ours.scale**0.5)


def test_summary_col_shows_r_squared_without_nan():
    ours = federated(RIGHT, {}, {})
    shown = summary_col([ours, pooled(RIGHT, {}, {})], model_names=["ours", "pooled"]).tables[0]
    assert shown.loc["R-squared", "ours"] == shown.loc["R-squared", "pooled"] != "nan"
    assert shown.loc["R-squared Adj.", "ours"] == shown.loc["R-squared Adj.", "pooled"]


def test_what_least_squares_has_not_is_refused():
    for settings in ({"family": sm.families.Poisson()}, {"offset": "x"}):
        with pytest.raises(ModelError, match="FederatedGLM"):
            fs.FederatedOLS.from_formula("gauss ~ z", partition(FRAME), **settings)


def test_no_more_clusters_than_coefficients_have_no_f_statistic():
    for correction, df in (("CR1", 3.0), ("CR2", None)):
        kwds = {"groups": "site", "correction": correction}
        ours = federated(RIGHT, {}, {"cov_type": "cluster", "cov_kwds": kwds})
        assert np.isnan(ours.fvalue) and np.isnan(ours.f_pvalue) and ours.use_t
        assert ours.df_inference == (df or ours.df.min())
