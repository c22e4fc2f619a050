"""Generalized variance inflation against statsmodels, published figures, and the columns themselves."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.testing import assert_allclose
from statsmodels.stats.outliers_influence import variance_inflation_factor

from fedstat.errors import NotAvailableError
from fedstat.inference.covariance import gvif

# Duncan (1961), as in R's carData: type of occupation, income, education, prestige.
TYPES = [*"ppppppppwppppppwppppwwwwbbbbbbbbbbbbbbbbbbbbb"]
INCOME = """
62 72 75 55 64 21 64 80 67 72 42 76 76 41 48 76 53 60 42 78 29 48 55 29 21 47 81 36 22 44
15 7 42 9 21 21 16 16 9 14 12 17 7 34 8
"""
EDUCATION = """
86 76 92 90 86 84 93 100 87 86 74 98 97 84 91 34 45 56 44 82 72 55 71 50 23 39 28 32 22 25
29 7 26 19 15 20 26 28 17 22 30 25 20 47 32
"""
PRESTIGE = """
82 83 90 76 90 87 93 90 52 88 57 89 97 59 73 38 76 81 45 92 39 34 41 16 33 53 67 57 26 29
10 15 19 10 13 24 20 7 3 16 6 11 8 41 10
"""


def duncan():
    columns = {"income": INCOME, "education": EDUCATION, "prestige": PRESTIGE}
    numbers = {name: np.array(text.split(), dtype=float) for name, text in columns.items()}
    return pd.DataFrame(numbers | {"type": TYPES})


def of(fit):
    names = list(fit.params.index)
    return gvif(fit.cov_params().to_numpy(), names, [name.split("[")[0] for name in names])


def test_published_figures():
    """The example of R's car::vif (Fox and Weisberg)."""
    found = of(smf.ols("prestige ~ income + education + type", duncan()).fit())
    assert_allclose(found.loc["income"], [2.209178, 1, 1.486330], atol=5e-7)
    assert_allclose(found.loc["education"], [5.297584, 1, 2.301648], atol=5e-7)
    assert_allclose(found.loc["type"], [5.098592, 2, 1.502666], atol=5e-7)


def test_one_column_terms_equal_statsmodels():
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(200, 4)) @ rng.normal(size=(4, 4)) * [1, 1e4, 1e-5, 1] + 3
    X = sm.add_constant(Z)
    fit = sm.OLS(rng.normal(size=200), pd.DataFrame(X, columns=["Intercept", *"abcd"])).fit()
    found = of(fit)
    assert_allclose(found["GVIF"], [variance_inflation_factor(X, j) for j in range(1, 5)], rtol=1e-9)
    assert_allclose(found["GVIF^(1/(2 df))"], np.sqrt(found["GVIF"]))


def test_a_linear_model_has_the_factors_of_its_columns():
    """Fox and Monette (1992): the same determinants, of the correlation matrix of the columns."""
    data = duncan()
    X = pd.get_dummies(data.drop(columns="prestige"), drop_first=True).to_numpy(dtype=float)
    R, own = np.corrcoef(X.T), [2, 3]
    expected = np.linalg.det(R[np.ix_(own, own)]) * np.linalg.det(R[:2, :2]) / np.linalg.det(R)
    found = of(smf.ols("prestige ~ income + education + type", data).fit())
    assert_allclose(found.loc["type", "GVIF"], expected, rtol=1e-9)


def test_coding_of_a_factor_does_not_matter():
    data = duncan().assign(high=lambda d: (d["prestige"] > 50) * 1.0)
    fits = [
        smf.glm(f"high ~ income + education + C(type, {coding})", data, family=sm.families.Binomial()).fit()
        for coding in ("Treatment", "Sum")
    ]
    assert_allclose(*(of(fit).to_numpy() for fit in fits), rtol=1e-6)


def test_orthogonal_terms_are_not_inflated():
    found = gvif(np.diag([4.0, 1.0, 9.0, 2.0]), ["Intercept", "a", "b1", "b2"], ["Intercept", "a", "b", "b"])
    assert_allclose(found["GVIF"], 1.0)
    assert list(found["df"]) == [1, 2]


@pytest.mark.parametrize(
    ("cov", "names", "message"),
    [
        (np.eye(2), ["Intercept", "a"], "expected two terms or more, received 1"),
        (np.diag([1.0, np.nan, 1.0]), ["Intercept", "a", "b"], "'a' has no variance"),
        (np.ones((3, 3)), ["Intercept", "a", "b"], "of a, b is singular"),
    ],
)
def test_what_has_no_factors_is_refused(cov, names, message):
    with pytest.raises(NotAvailableError, match=message):
        gvif(cov, names, names)
