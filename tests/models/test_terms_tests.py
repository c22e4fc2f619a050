"""Tests of terms of types 2 and 3, and of nonlinear effects, against statsmodels and nested fits."""

import numpy as np
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError

pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = fs.datasets.make_survival().assign(
    sex=lambda t: np.random.default_rng(1).integers(0, 2, len(t)),
    height=lambda t: np.random.default_rng(2).normal(170.0, 10.0, len(t)),
)
FORMULAS = (
    "months ~ age * sex + C(stage) * sex",
    "months ~ age * sex * C(arm)",
    "months ~ C(stage, Sum) * C(arm, Sum) + age",
    "months ~ age + C(stage)",
)


def sites(table=TABLE):
    return fs.ClientPartition.from_frame(table, by="hospital")


@pytest.mark.parametrize("typ", [2, 3])
@pytest.mark.parametrize("formula", FORMULAS)
def test_f_tests_are_those_of_an_analysis_of_variance(formula, typ):
    found = fs.FederatedOLS.from_formula(formula, sites()).fit().terms_test(typ).table
    expected = sm.stats.anova_lm(smf.ols(formula, TABLE).fit(), typ=typ).drop(
        index=["Intercept", "Residual"], errors="ignore"
    )
    assert set(found.index) == set(expected.index)
    expected = expected.loc[found.index]
    np.testing.assert_allclose(found["statistic"], expected["F"], rtol=1e-7)
    np.testing.assert_allclose(found["pvalue"], expected["PR(>F)"], rtol=1e-6)
    np.testing.assert_array_equal(found["df_constraint"], expected["df"])


def test_chi_squared_tests_are_differences_of_walds_statistics():
    formula = "died ~ age * C(arm) + C(stage)"
    fit = fs.GLORE.from_formula(formula, sites()).fit()
    pooled = smf.glm(formula, TABLE, family=sm.families.Binomial()).fit(tol=1e-13)

    def wald(*names):
        R = np.eye(len(pooled.params))[pooled.params.index.isin(names)]
        return float(pooled.wald_test(R, scalar=True).statistic)

    found, product = fit.terms_test(2).table, "age:C(arm)[T.surgery]"
    assert found.loc["C(stage)", "statistic"] == pytest.approx(
        wald("C(stage)[T.II]", "C(stage)[T.III]"), rel=1e-5
    )
    assert found.loc["age:C(arm)", "statistic"] == pytest.approx(wald(product), rel=1e-5)
    assert found.loc["age", "statistic"] == pytest.approx(wald("age", product) - wald(product), rel=1e-5)
    three = fit.terms_test(3).table
    assert three.loc["age", "statistic"] == pytest.approx(float(pooled.tvalues["age"] ** 2), rel=1e-5)
    assert three["df_constraint"].tolist() == [1, 1, 2, 1]


def test_all_families_of_coefficients_have_tests_of_terms():
    poisson = {"family": sm.families.Poisson()}
    for name, formula, settings in (
        ("FederatedCox", "Surv(months, died) ~ age * C(arm) + C(stage)", {}),
        ("FederatedAFT", "Surv(months, died) ~ age * C(arm) + C(stage)", {"distribution": "lognormal"}),
        ("FederatedMixed", "months ~ age * C(arm) + C(stage) + (1 | hospital)", {}),
        ("FederatedGLM", "months ~ age * C(arm) + C(stage)", poisson),
        ("FederatedOrdinal", "C(stage, levels=['I', 'II', 'III']) ~ age * C(arm) + sex", {}),
        ("FederatedMultinomial", "C(stage, levels=['I', 'II', 'III']) ~ age * C(arm) + sex", {}),
    ):
        fit = getattr(fs, name).from_formula(formula, sites(), **settings).fit()
        table = fit.terms_test().table
        assert list(table.index)[:2] == ["age", "C(arm)"] and table["pvalue"].between(0.0, 1.0).all()
        last = fit.wald_test_terms().table.loc["age:C(arm)"]
        assert table.loc["age:C(arm)", "statistic"] == pytest.approx(last["statistic"], rel=1e-9)


def test_a_type_is_two_or_three():
    fit = fs.FederatedOLS.from_formula("months ~ age", sites()).fit()
    with pytest.raises(ModelError, match="typ: expected"):
        fit.terms_test(1)


SPLINES = (
    "cr(age, knots=(55, 62, 70), lower_bound=20, upper_bound=100, constraints='center')",
    "bs(age, knots=(60,), lower_bound=20, upper_bound=100)",
    "poly(age, 3)",
    "age + I(age ** 2)",
)


@pytest.mark.parametrize("spline", SPLINES)
def test_nonlinearity_is_the_f_test_against_a_line(spline):
    whole = fs.FederatedOLS.from_formula(f"months ~ {spline} + sex", sites()).fit()
    line = fs.FederatedOLS.from_formula("months ~ age + sex", sites()).fit()
    found, expected = whole.test_nonlinearity("age"), whole.compare_f_test(line)
    assert found.df_num == expected.df_diff
    assert float(found.statistic) == pytest.approx(expected.statistic, rel=1e-6)
    assert float(found.pvalue) == pytest.approx(expected.pvalue, rel=1e-6)


def test_nonlinearity_of_a_logistic_and_a_cox_model():
    for name, left in (("GLORE", "died"), ("FederatedCox", "Surv(months, died)")):
        whole = getattr(fs, name).from_formula(f"{left} ~ {SPLINES[0]} + sex", sites()).fit()
        line = getattr(fs, name).from_formula(f"{left} ~ age + sex", sites()).fit()
        found, ratio = whole.test_nonlinearity("age"), whole.compare_lr_test(line)
        assert float(found.statistic) == pytest.approx(ratio.statistic, abs=0.3)
        assert found.df_denom == ratio.df_diff


def test_nonlinearity_at_a_level_of_a_product_and_of_a_line():
    fit = fs.FederatedOLS.from_formula("months ~ age * sex + I(age ** 2):sex + I(age ** 2)", sites()).fit()
    at = fit.test_nonlinearity("age", at={"sex": 0})
    assert at.df_num == 1
    square = [name for name in fit.params.index if "2" in name and ":" not in name]
    assert float(at.statistic) == pytest.approx(fit.tvalues[square[0]] ** 2, rel=1e-5)
    with pytest.raises(ModelError, match="interacts with other columns"):
        fit.test_nonlinearity("age")
    with pytest.raises(ModelError, match="a straight line in this model"):
        fs.FederatedOLS.from_formula("months ~ age + sex", sites()).fit().test_nonlinearity("age")


RATIOS = {
    "odds_ratio": ("GLORE", "died ~ age + sex", {}),
    "hazard_ratio": ("FederatedCox", "Surv(months, died) ~ age + sex", {}),
    "time_ratio": ("FederatedAFT", "Surv(months, died) ~ age + sex", {}),
    "ratio": ("FederatedGLM", "months ~ age + sex", {"family": "poisson"}),
}


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_are_exponentials_without_constants(name):
    kind, formula, settings = RATIOS[name]
    fit = getattr(fs, kind).from_formula(formula, sites(), **settings).fit()
    found, expected = fit.ratios(0.1), fit.tidy(0.1, exponentiate=True).set_index("term").loc[["age", "sex"]]
    assert found.columns.tolist() == [name, "conf_low", "conf_high"]
    np.testing.assert_allclose(found, expected[["estimate", "conf_low", "conf_high"]], rtol=1e-12)
    if name == "odds_ratio":
        assert fit.odds_ratios(0.1).equals(found)
    else:
        with pytest.raises(NotAvailableError, match="logit link only"):
            fit.odds_ratios()


def test_ratios_of_categories_have_no_constants_and_of_means_there_are_none():
    left = "C(stage, levels=['I', 'II', 'III'])"
    ordinal = fs.FederatedOrdinal.from_formula(f"{left} ~ age", sites()).fit()
    assert ordinal.odds_ratios().index.tolist() == ["age"]
    multinomial = fs.FederatedMultinomial.from_formula(f"{left} ~ age", sites()).fit()
    assert multinomial.odds_ratios().index.tolist() == ["II: age", "III: age"]
    with pytest.raises(NotAvailableError, match="exponentials of the coefficients are ratios with"):
        fs.FederatedOLS.from_formula("months ~ age", sites()).fit().ratios()
