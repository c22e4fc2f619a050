"""Remedies that errors of VFEM name: each is carried out."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, FormulaError, ModelError


def sites(table, **holds):
    return fs.ClientPartition.from_frames({k: table[["id", *v]] for k, v in holds.items()}, on="id")


@pytest.fixture
def table():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(300, 4)), columns=["y", "a", "b", "c"])
    return frame.assign(id=range(300), w=1.0 + np.arange(300) % 3)


def test_more_columns_than_entities(table):
    rng = np.random.default_rng(1)
    wide = pd.DataFrame(rng.normal(size=(60, 81)), columns=["y", *[f"x{j}" for j in range(80)]]).assign(
        id=range(60)
    )
    partition = sites(wide, A=["y", *[f"x{j}" for j in range(40)]], B=[f"x{j}" for j in range(40, 80)])
    for method, remedy in (
        ("vfem", "leave out columns or sites"),
        ("cc", "leave out columns or sites, or use method='vfem'"),
    ):
        with pytest.raises(EstimationError, match=f"81 coefficients need more; {remedy}$"):
            fs.VFEMRegression.from_formula("y ~ .", partition).fit(method=method)
    few = fs.VFEMRegression.from_formula("y ~ x0 + x1 + x40", partition).fit()
    assert few.converged


def test_small_patterns_can_be_fitted_by_iteration():
    rng = np.random.default_rng(1)
    table = pd.DataFrame(rng.normal(size=(40, 3)), columns=["y", "a", "b"]).assign(id=range(40))
    table.loc[:3, "b"] = np.nan
    partition = sites(table, A=["y"], B=["a"], C=["b"])
    with pytest.raises(EstimationError, match=r"between='independent'\) and fit\(exchange='iterative'\)"):
        fs.VFEMRegression.from_formula("y ~ a + b", partition).fit()
    fit = fs.VFEMRegression.from_formula("y ~ a + b", partition, between="independent").fit(
        exchange="iterative"
    )
    assert fit.converged and fit.nobs == 40


def test_the_causes_of_a_missing_response_are_told_apart(table):
    table.loc[:9, "w"] = 0.0
    zero = sites(table, A=["y", "w"], B=["a"])
    with pytest.raises(DesignError, match="the record of 10 has no value or has a weight of zero"):
        fs.VFEMRegression.from_formula("y ~ a", zero, freq_weights="w")
    assert fs.VFEMRegression.from_formula("y ~ a", zero, freq_weights="w", missing="drop").fit().converged
    table.loc[:4, "y"] = np.nan
    frames = {"A": table[["id", "y", "c"]].iloc[:290], "B": table[["id", "a"]]}
    both = fs.ClientPartition.from_frames(frames, on="id")
    with pytest.raises(
        DesignError,
        match=r"missing for 15 of 300 entities: 10 have no record there.*; the record of 5 has no value\.",
    ):
        fs.VFEMRegression.from_formula("y ~ a", both)
    assert fs.VFEMRegression.from_formula("y ~ a", both, missing="drop").fit().nobs == 285


def test_rows_that_represent_several_entities(table):
    table["d"] = (table["y"] > 0).astype(int)
    binomial = sm.families.Binomial()
    with pytest.raises(ModelError, match="a row and a key of its own, at all sites"):
        fs.VFEMGLM.from_formula(
            "d ~ a", sites(table, A=["d", "w"], B=["a"]), family=binomial, freq_weights="w"
        )
    every = table.loc[table.index.repeat(table["w"].astype(int))].assign(id=range(int(table["w"].sum())))
    fit = fs.VFEMGLM.from_formula("d ~ a", sites(every, A=["d"], B=["a"]), family=binomial).fit()
    pooled = smf.glm("d ~ a", table, family=binomial, freq_weights=table["w"]).fit()
    np.testing.assert_allclose(fit.params, pooled.params, atol=1e-5)


@pytest.mark.parametrize("kind", ["vfem", "glm", "selection", "rows"])
def test_a_column_with_the_name_of_the_constant(table, kind):
    named = table.rename(columns={"a": "Intercept"}).assign(
        d=(table["y"] > 0).astype(int), site=np.arange(300) % 3
    )
    partition = sites(named, A=["y", "d"], B=["Intercept", "b"])
    make = {
        "vfem": lambda text: fs.VFEMRegression.from_formula(text, partition),
        "glm": lambda text: fs.VFEMGLM.from_formula(
            text.replace("y", "d", 1), partition, family=sm.families.Binomial()
        ),
        "selection": lambda text: fs.VerticalGLM.from_formula(text, partition),
        "rows": lambda text: fs.FederatedOLS.from_formula(
            text, fs.ClientPartition.from_frame(named, by="site")
        ),
    }[kind]
    with pytest.raises(FormulaError, match="rename the column, or leave it out: '- Intercept'"):
        make("y ~ b + Intercept")
    assert make("y ~ b").fit() is not None
    if kind == "vfem":
        assert make("y ~ . - Intercept - d").fit().params.index.tolist() == ["Intercept", "b"]


@pytest.mark.parametrize("argument", ["subset", "drop_cols", "eval_env"])
def test_arguments_of_statsmodels_about_rows_and_columns(table, argument):
    with pytest.raises(ModelError, match=f"^{argument}: "):
        fs.VFEMRegression.from_formula("y ~ a", sites(table, A=["y"], B=["a"]), **{argument: table["a"] > 0})
    part = sites(table[table["a"] > 0], A=["y"], B=["a"])
    assert fs.VFEMRegression.from_formula("y ~ a", part).fit().nobs == (table["a"] > 0).sum()
