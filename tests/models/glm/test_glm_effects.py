"""Effects along a numeric column: those of statsmodels on the joined table, coded by formulaic."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pictures import WIDTHS, faults, page

import fedstat as fs

KNOTS = "knots=(45.0, 55.0, 65.0), lower_bound=25.0, upper_bound=80.0"
SPLINES = {
    "bs": "bs(age, knots=(55.0,), degree=2, lower_bound=25.0, upper_bound=80.0)",
    "cr": f"cr(age, {KNOTS}, constraints='center')",
    "poly": "poly(age, 3)",
    "both": "age + age:sex",
}
X = np.linspace(30.0, 75.0, 7)


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def table():
    return fs.datasets.make_hospitals()[["hospital", "num", "age", "sex", "cp"]].dropna()


def fitted(table, terms, family=fs.GLORE, response="num > 0"):
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    return family.from_formula(f"{response} ~ {terms} + sex + C(cp)", partition).fit(local=False)


@pytest.mark.parametrize("family", [fs.GLORE, fs.FederatedOLS])
@pytest.mark.parametrize("spline", list(SPLINES))
def test_effects_are_those_of_the_joined_table(table, family, spline):
    binary = family is fs.GLORE
    result = fitted(table, SPLINES[spline], family, "num > 0" if binary else "num")
    design = model_matrix(f"{SPLINES[spline]} + sex + C(cp)", table)
    y = (table["num"] > 0).astype(float) if binary else table["num"]
    distribution = sm.families.Binomial() if binary else sm.families.Gaussian()
    pooled = sm.GLM(y.to_numpy(), design.to_numpy(), distribution).fit(tol=1e-14, maxiter=100)
    rows = table.head(1).loc[[table.index[0]] * (len(X) + 1)].assign(age=[*X, 50.0], sex=1.0)
    coded = design.model_spec.get_model_matrix(rows).to_numpy()
    contrast = coded[:-1] - coded[-1]
    found = result.effect("age", X, reference=50.0, at={"sex": 1.0})
    np.testing.assert_allclose(found["estimate"], contrast @ pooled.params, rtol=1e-8, atol=1e-8)
    variance = np.diag(contrast @ pooled.cov_params() @ contrast.T)
    np.testing.assert_allclose(found["std_error"], np.sqrt(variance), rtol=1e-8, atol=1e-8)
    half = result._test_distribution.isf(0.025) * found["std_error"]
    np.testing.assert_allclose(found["conf_high"] - found["estimate"], half, atol=1e-12)
    ratios = result.effect("age", X, reference=50.0, at={"sex": 1.0}, exponentiate=True)
    for name in ("estimate", "conf_low", "conf_high"):
        np.testing.assert_allclose(ratios[name], np.exp(found[name]), rtol=1e-12)


@pytest.mark.parametrize("term", ["age", "center(age)", "scale(age)", "poly(age, 2)"])
def test_a_column_without_bounds_ranges_over_two_deviations(table, term):
    found = fitted(table, term).effect("age")
    mean, sd = table["age"].mean(), table["age"].std(ddof=0)
    ends = [found["value"].min(), found.attrs["reference"], found["value"].max()]
    np.testing.assert_allclose(ends, [mean - 2.0 * sd, mean, mean + 2.0 * sd], rtol=2e-3)


@pytest.mark.parametrize("spline", ["bs", "cr"])
def test_a_spline_gives_the_range(table, spline):
    found = fitted(table, SPLINES[spline]).effect("age")
    assert (found["value"].min(), found["value"].max(), found.attrs["reference"]) == (25.0, 80.0, 52.5)


def test_errors_say_what_to_give(table):
    result = fitted(table, "log(age) * sex")
    for arguments, message in [
        ({"column": "chol"}, "no column 'chol'"),
        ({"column": "cp"}, "'cp' holds categories"),
        ({"column": "age"}, "at={'sex': ...}"),
        ({"column": "age", "at": {"sex": 1}}, "Give values of 'age'"),
        ({"column": "age", "at": {"sex": 1, "weight": 1}}, "other columns of the model"),
        ({"column": "age", "at": {"sex": np.nan}, "values": X}, "not missing"),
        ({"column": "age", "at": {"sex": 1}, "values": []}, "finite numbers"),
    ]:
        with pytest.raises(fs.errors.ModelError) as error:
            result.effect(**arguments)
        assert message in str(error.value)
    with pytest.raises(fs.errors.DesignError, match="outside the range"):
        fitted(table, SPLINES["bs"]).effect("age", [20.0, 40.0])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("exponentiate", [False, True])
def test_the_picture_is_legible(table, width, exponentiate):
    result = fitted(table, "poly(age, 2) * sex")
    ax = result.plot_effect("age", ax=page(width, 3.0), at={"sex": 1}, exponentiate=exponentiate)
    frame = result.effect("age", at={"sex": 1}, exponentiate=exponentiate)
    np.testing.assert_array_equal(ax.lines[-1].get_ydata(), frame["estimate"])
    assert not faults(ax.figure)
