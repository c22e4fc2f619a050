"""Rubin's rules against mice (reference/mice/pool.R), and the test of several coefficients."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.inference.pooling import denominator

MICE = json.loads((Path(__file__).parents[1] / "reference" / "mice" / "pool.json").read_text())
COLUMNS = {
    "estimate": "estimate",
    "std_error": "std_error",
    "statistic": "statistic",
    "df": "df",
    "p_value": "p_value",
    "low": "low",
    "high": "high",
    "within": "within",
    "between": "between",
    "riv": "riv",
    "lambda": "lambda",
    "fmi": "fmi",
}


def analyses(case):
    """Estimates from mice's imputations, as any package might return them."""
    reported = MICE[case]
    p = len(reported["estimate"])
    params = np.array(reported["params"]).reshape(p, -1).T
    covs = np.array(reported["covs"]).reshape(len(params), p, p)
    names = [f"b{j}" for j in range(p)]
    return [
        SimpleNamespace(
            params=pd.Series(b, names),
            bse=pd.Series(np.sqrt(np.diag(V)), names),
            cov_params=lambda V=V: pd.DataFrame(V, names, names),
            df_resid=reported["df_resid"][0],
        )
        for b, V in zip(params, covs, strict=True)
    ]


@pytest.mark.parametrize("case", MICE)
def test_every_column_of_mice(case):
    pooled = fs.pool(analyses(case))
    frame = pooled.to_frame()
    for ours, theirs in COLUMNS.items():
        np.testing.assert_allclose(frame[ours], MICE[case][theirs], rtol=1e-8, err_msg=ours)
    np.testing.assert_allclose(np.diag(pooled.cov_params()), MICE[case]["total"], rtol=1e-8)


def test_one_coefficient_is_tested_as_by_its_t():
    pooled = fs.pool(analyses("linear"))
    for name in pooled.params.index:
        test = pooled.wald_test([name])
        assert test.fvalue == pytest.approx(pooled.tvalues[name] ** 2)
        assert test.pvalue == pytest.approx(pooled.pvalues[name])


def test_several_coefficients_by_hand():
    """Li, Raghunathan and Rubin (1991), equations 1.17 to 1.19 and 2.6, with an infinite complete sample."""
    results = analyses("linear")
    found = fs.pool(results, df_complete=np.inf).wald_test(["b1", "b2", "b3"])
    Q = np.array([one.params[["b1", "b2", "b3"]] for one in results])
    U = np.mean([one.cov_params().to_numpy()[1:, 1:] for one in results], axis=0)
    centered = Q - Q.mean(axis=0)
    B = centered.T @ centered / 4
    r = 1.2 * np.trace(B @ np.linalg.inv(U)) / 3
    D = Q.mean(axis=0) @ np.linalg.inv(U) @ Q.mean(axis=0) / (3 * (1 + r))
    assert found.fvalue == pytest.approx(D)
    assert found.df_denom == pytest.approx(4 + (12 - 4) * (1 + (1 - 2 / 12) / r) ** 2)
    same = fs.pool(results, df_complete=np.inf).wald_test("b1 = 0, b2 = 0, b3 = 0")
    assert same.pvalue == found.pvalue


@pytest.mark.parametrize("r", [0.05, 0.4, 2.0])
def test_few_complete_degrees_of_freedom_count_and_many_do_not(r):
    many = denominator(3, 10, r, 1e9)
    assert many == pytest.approx(denominator(3, 10, r, np.inf), rel=1e-5)
    assert denominator(3, 10, r, 60.0) < min(60.0, many)


def least_squares(y, X, names):
    """Estimates of an analysis of each imputation, without the time to parse thousands of formulas."""
    Z, names = np.column_stack([np.ones(len(X)), X]), ["Intercept", *names]
    inverse, df = np.linalg.inv(Z.T @ Z), len(Z) - Z.shape[1]
    b = inverse @ Z.T @ y
    V = inverse * ((y - Z @ b) ** 2).sum() / df
    return SimpleNamespace(
        params=pd.Series(b, names),
        bse=pd.Series(np.sqrt(np.diag(V)), names),
        cov_params=lambda: pd.DataFrame(V, names, names),
        df_resid=df,
    )


def test_least_squares_are_those_of_statsmodels():
    frame = pd.DataFrame(np.random.default_rng(0).standard_normal((80, 3)), columns=["y", "a", "b"])
    ours, theirs = least_squares(frame["y"], frame[["a", "b"]], ["a", "b"]), smf.ols("y ~ a + b", frame).fit()
    np.testing.assert_allclose(ours.params, theirs.params, rtol=1e-12)
    np.testing.assert_allclose(ours.cov_params(), theirs.cov_params(), rtol=1e-12, atol=1e-15)
    assert ours.df_resid == theirs.df_resid


@pytest.mark.slow
def test_the_joint_test_has_its_level():
    """Three tenths of two columns missing, imputed from their law; .05 of 300 has an error of .0126."""
    rng = np.random.default_rng(3)
    rejected = 0
    for _ in range(300):
        X = rng.standard_normal((80, 2))
        y = rng.standard_normal(80)
        lost = rng.random((80, 2)) < 0.3
        fits = []
        for _ in range(10):
            # independent of the response: a draw from the law given what is seen, parameters nearly known
            filled = np.where(lost, rng.standard_normal((80, 2)), X)
            fits.append(least_squares(y, filled, ["a", "b"]))
        rejected += fs.pool(fits).wald_test(["a", "b"]).pvalue < 0.05
    assert rejected / 300 < 0.05 + 3 * 0.0126


def test_fits_over_sites_are_pooled_as_those_of_statsmodels():
    rng = np.random.default_rng(2)
    frames = []
    for _ in range(3):
        x = rng.standard_normal(300)
        frames.append(pd.DataFrame({"site": np.repeat(list("abc"), 100), "x": x}))
        frames[-1]["y"] = (rng.random(300) < 1 / (1 + np.exp(-x))).astype(int)
    ours = fs.pool(
        [
            fs.GLORE.from_formula("y ~ x", fs.ClientPartition.from_frame(one, by="site")).fit()
            for one in frames
        ]
    )
    theirs = fs.pool([smf.glm("y ~ x", one, family=sm.families.Binomial()).fit() for one in frames])
    np.testing.assert_allclose(ours.to_frame(), theirs.to_frame(), rtol=1e-6)
    np.testing.assert_allclose(ours.cov_params(), theirs.cov_params(), rtol=1e-6)
    text = " ".join(ours.summary().as_text().split())
    assert "3 imputations" in text and "fmi" in text and "Barnard and Rubin" in text


def test_what_cannot_be_pooled_is_named():
    results = analyses("two")
    with pytest.raises(ModelError, match="at least 2 imputations, received 1"):
        fs.pool(results[:1])
    with pytest.raises(ModelError, match="positive df_complete"):
        fs.pool(results, df_complete=0.0)
    for one in results:
        del one.cov_params
    pooled = fs.pool(results)
    with pytest.raises(NotAvailableError, match="cov_params"):
        pooled.wald_test(["b1"])
    with pytest.raises(NotAvailableError, match="cov_params"):
        pooled.cov_params()
    with pytest.raises(ModelError, match="follows from the others"):
        fs.pool(analyses("two")).wald_test("b1 = 0, 2*b1 = 0")
