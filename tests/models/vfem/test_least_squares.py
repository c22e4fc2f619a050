"""Fits that are least squares: complete cases, the holder's columns, imputed means, and nothing missing."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from pattern_moments import moments_of_arrays

import fedstat as fs
from fedstat.models.vfem.corrections import apply_correction
from fedstat.models.vfem.covariance.from_moments import MomentsOptions, estimate_from_moments

NAMES = [f"x{j}" for j in range(8)]
METHODS = ("cc", "impute", "single", "vfem")
ITERATIVE = {"exchange": "iterative", "iteration": fs.Iteration(tol=1e-11)}


def tables(n=120, seed=1):
    """The pooled table, a partition where B lacks entities, and the rows that each method fits."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 8)) + 0.5 * rng.normal(size=(n, 1))
    y = 2.0 + X @ np.linspace(-0.5, 0.5, 8) + rng.normal(size=n)
    pooled = pd.DataFrame(X, columns=NAMES).assign(
        y=y, id=range(n), cases=rng.integers(1, 4, n), known=1.0 + rng.random(n)
    )
    has = rng.random(n) < 0.6
    imputed = pooled.copy()
    imputed.loc[~has, NAMES[5:]] = pooled.loc[has, NAMES[5:]].mean().to_numpy()
    return pooled, has, {"cc": pooled[has], "impute": imputed, "single": pooled, "vfem": pooled}


def partition_of(pooled, has):
    frames = {
        "H": pooled[["id", "y", "cases", "known", *NAMES[:2]]],
        "A": pooled[["id", *NAMES[2:5]]],
        "B": pooled.loc[has, ["id", *NAMES[5:]]],
    }
    return fs.ClientPartition.from_frames(frames, on="id")


def assert_equals(fit, ols, tol=1e-8):
    names = fit.params.index
    for name in ("params", "bse", "tvalues", "pvalues"):
        np.testing.assert_allclose(getattr(fit, name), getattr(ols, name)[names], rtol=tol, atol=tol)
    np.testing.assert_allclose(fit.conf_int(0.1), ols.conf_int(0.1).loc[names], rtol=tol, atol=tol)
    for name in ("scale", "rsquared", "rsquared_adj", "df_resid", "llf", "aic", "bic"):
        assert getattr(fit, name) == pytest.approx(getattr(ols, name), rel=tol), name
    assert fit.use_t and fit.df_inference == ols.df_resid
    assert fit.f_test("x0 = 0, x1 = 0").pvalue == pytest.approx(
        float(ols.f_test("x0 = 0, x1 = 0").pvalue), rel=1e-6
    )


@pytest.mark.parametrize("exchange", ["moments", "iterative"])
@pytest.mark.parametrize("method", METHODS)
def test_equal_to_statsmodels_on_the_rows_of_the_method(method, exchange):
    pooled, has, rows = tables()
    partition = partition_of(pooled, has | (method == "vfem"))
    used = NAMES[:2] if method == "single" else NAMES
    between = "independent" if exchange == "iterative" else None
    model = fs.VFEMRegression.from_formula("y ~ " + " + ".join(NAMES), partition, between=between)
    fit = model.fit(method=method, **(ITERATIVE if exchange == "iterative" else {}))
    assert_equals(fit, smf.ols("y ~ " + " + ".join(used), rows[method]).fit())
    text = str(fit.summary())
    assert "P>|t|" in text and "ordinary least squares would report" not in text


@pytest.mark.parametrize("between", [None, "free", "independent"])
def test_predictions_and_smaller_fits_of_a_complete_table(between):
    pooled, has, _ = tables(seed=2)
    partition = partition_of(pooled, has | True)
    fit = fs.VFEMRegression.from_formula("y ~ . - cases - known", partition, between=between).fit()
    ols = smf.ols("y ~ " + " + ".join(NAMES), pooled).fit()
    frame, other = (
        one.summary_frame(0.1) for one in (fit.get_prediction(partition), ols.get_prediction(pooled))
    )
    np.testing.assert_allclose(frame, other[frame.columns], rtol=1e-7, atol=1e-7)
    smaller = smf.ols("y ~ " + " + ".join(NAMES[1:]), pooled).fit()
    assert fit.refit("y ~ . - x0").scale == pytest.approx(smaller.scale, rel=1e-8)
    assert fit.compare_lr_test(fit.refit("y ~ . - x0")).statistic == pytest.approx(
        ols.compare_lr_test(smaller)[0], rel=1e-6
    )


@pytest.mark.parametrize("between", ["free", "independent"])
def test_the_small_sample_correction_is_nothing_else(between):
    pooled, has, _ = tables(seed=3)
    model = fs.VFEMRegression.from_formula(
        "y ~ . - cases - known", partition_of(pooled, has | True), between=between
    )
    assert_equals(model.fit(correction="small-sample"), smf.ols("y ~ " + " + ".join(NAMES), pooled).fit())


def test_robust_errors_stay_normal_and_the_scale_unbiased():
    pooled, has, _ = tables(seed=4, n=600)
    partition = partition_of(pooled, has | True)
    model = fs.VFEMRegression.from_formula("y ~ . - cases - known", partition, between="independent")
    fit = model.fit(exchange="iterative", cov_type="robust", iteration=fs.Iteration(tol=1e-11))
    ols = smf.ols("y ~ " + " + ".join(NAMES), pooled).fit(cov_type="HC0")
    np.testing.assert_allclose(fit.bse, ols.bse[fit.params.index], rtol=1e-6)
    assert fit.use_t is False and fit.scale == pytest.approx(ols.scale)


@pytest.mark.parametrize("role", ["freq_weights", "var_weights"])
def test_weights(role):
    pooled, has, rows = tables(seed=5)
    name = {"freq_weights": "cases", "var_weights": "known"}[role]
    model = fs.VFEMRegression.from_formula("y ~ . - cases - known", partition_of(pooled, has), **{role: name})
    fit, formula = model.fit(method="cc"), "y ~ " + " + ".join(NAMES)
    if role == "freq_weights":
        ols = smf.ols(formula, rows["cc"].loc[rows["cc"].index.repeat(rows["cc"]["cases"])]).fit()
    else:
        ols = smf.wls(formula, rows["cc"], weights=rows["cc"]["known"]).fit()
    names = fit.params.index
    np.testing.assert_allclose(fit.bse, ols.bse[names], rtol=1e-7)
    np.testing.assert_allclose(fit.pvalues, ols.pvalues[names], rtol=1e-6)
    assert fit.scale == pytest.approx(ols.scale) and fit.df_inference == ols.df_resid


def test_one_degree_of_freedom_is_the_least():
    table = pd.DataFrame(
        {"id": range(4), "y": [1.0, 3.0, 2.0, 5.0], "a": [1.0, 2.0, 3.0, 5.0], "b": [0.0, 1.0, 1.0, 3.0]}
    )
    policy = fs.Policy(min_count=1, max_parameters=50)
    for columns in (["a", "b"], ["a"]):
        frames = {
            "H": table[["id", "y", *columns]].iloc[: len(columns) + 2],
            "B": table[["id"]].assign(c=table["b"]),
        }
        partition = fs.ClientPartition.from_frames(frames, on="id", min_count=1, policy=policy)
        formula = "y ~ " + " + ".join(columns)
        fit = fs.VFEMRegression.from_formula(formula, partition, missing="drop").fit(method="single")
        np.testing.assert_allclose(fit.pvalues, smf.ols(formula, frames["H"]).fit().pvalues, rtol=1e-7)
        assert fit.df_inference == 1
        fewer = {**frames, "H": frames["H"].iloc[:-1]}
        partition = fs.ClientPartition.from_frames(fewer, on="id", min_count=1, policy=policy)
        with pytest.raises(fs.errors.EstimationError, match="need more"):
            fs.VFEMRegression.from_formula(formula, partition, missing="drop").fit(method="single")


def test_the_small_sample_correction_of_independent_blocks_removes_the_bias():
    """The residual variance of maximum likelihood is too small, with half of one block missing."""
    maximum, corrected = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(60, 6))
        y = X @ np.full(6, 0.5) + rng.normal(size=60)
        X[rng.random(60) < 0.5, 3:] = np.nan
        moments = moments_of_arrays(X, y, [3, 3])
        fit = estimate_from_moments(moments, MomentsOptions("none", "independent", 200, jointly=True)).found
        maximum.append(fit.s2)
        corrected.append(apply_correction(fit, None, "small-sample").reported.s2)
    error = np.std(corrected) / np.sqrt(len(corrected))
    assert np.mean(maximum) < 0.85 and abs(np.mean(corrected) - 1.0) < 0.05 + 2.0 * error


def test_files_keep_the_degrees_of_freedom(tmp_path):
    pooled, has, _ = tables()
    fit = fs.VFEMRegression.from_formula("y ~ . - cases - known", partition_of(pooled, has)).fit(method="cc")
    fit.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed")
    pd.testing.assert_series_equal(again.pvalues, fit.pvalues)
    assert again.df_inference == fit.df_inference and again.scale == fit.scale


def test_the_level_of_tests_on_a_hundred_complete_rows():
    """A share .143 of true zeros had p < .05 at 96 rows and 35 columns when errors divided by n."""
    rng = np.random.default_rng(1)
    rejected = []
    for _ in range(8):
        table = pd.DataFrame(rng.normal(size=(96, 36)), columns=["y", *[f"x{j}" for j in range(35)]]).assign(
            id=range(96)
        )
        columns = table.columns[1:36]
        frames = {
            "H": table[["id", "y"]],
            "A": table[["id", *columns[:18]]],
            "B": table[["id", *columns[18:]]],
        }
        fit = fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(frames, on="id")).fit(
            method="cc"
        )
        rejected.append((fit.pvalues[1:] < 0.05).mean())
    # The binomial standard deviation of 280 tests is .013, and tests of one fit are nearly independent.
    assert np.mean(rejected) < 0.095
