"""Columns of splines are called as in statsmodels, whose formulas are those of patsy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import patsy
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from formulaic import model_matrix

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.spline_names import count_from_zero, short_names

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ["glm", "vfem"]
SPLINE = "bs(x, knots=(0,), lower_bound=-4, upper_bound=4)"


def draw():
    """Rows of the fits."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(size=90), "z": rng.normal(size=90)})
    return frame.assign(y=np.sin(frame["x"]) + frame["z"] + rng.normal(size=90))


@pytest.fixture(scope="module")
def fits():
    """One fit over rows, one over columns."""
    frame = draw()
    rows = fs.ClientPartition.from_frame(frame.assign(site=["A", "B"] * 45), by="site")
    frame["k"] = range(90)
    columns = fs.ClientPartition.from_frames({"A": frame[["k", "y", "x"]], "B": frame[["k", "z"]]}, on="k")
    return {
        "glm": fs.FederatedGLM.from_formula(f"y ~ {SPLINE} + z", rows).fit(local=False),
        "vfem": fs.VFEMRegression.from_formula(f"y ~ {SPLINE} + z", columns).fit(),
    }


def of_formulaic(formula, frame):
    """Least squares on the columns of formulaic, under its names."""
    right = model_matrix(formula.split("~")[1], frame)
    return sm.OLS(frame["y"], pd.DataFrame(np.asarray(right), columns=list(right.columns))).fit()


@pytest.mark.parametrize(
    "right",
    [
        f"{SPLINE} + z",
        f"z + g + {SPLINE}:g",
        "bs(np.log(x + 9), degree=1, knots=(2.2,), lower_bound=1, upper_bound=3)",
    ],
)
def test_columns_have_the_names_of_patsy_and_its_values(right):
    frame = draw().assign(g=np.resize(list("ab"), 90), site=np.resize(list("AB"), 90))
    theirs = smf.ols(f"y ~ {right}", frame).fit()
    ours = fs.FederatedGLM.from_formula(f"y ~ {right}", fs.ClientPartition.from_frame(frame, by="site")).fit()
    named = patsy.dmatrix(right, frame).design_info.column_names
    assert named == list(theirs.params.index)
    plain = [name.replace(", )", ",)") for name in named]  # patsy's blank in a tuple of one
    assert set(ours.params.index) == set(plain)
    np.testing.assert_allclose(ours.params[plain], theirs.params, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_compare_lines_up_with_pooled_fits_of_either_kind(fits, family):
    formula = f"y ~ {SPLINE} + z"
    pooled = {"patsy": smf.ols(formula, draw()).fit(), "formulaic": of_formulaic(formula, draw())}
    table = fs.compare({"ours": fits[family], **pooled}, stars=()).coefficients
    assert len(table) == 6 and (table != "").all(axis=None)
    assert (table["patsy"] == table["formulaic"]).all()


def test_a_polynomial_has_the_names_of_formulaic_which_alone_has_one():
    frame = draw().assign(site=np.resize(list("AB"), 90))
    ours = fs.FederatedGLM.from_formula(
        "y ~ poly(x, 2)", fs.ClientPartition.from_frame(frame, by="site")
    ).fit()
    theirs = of_formulaic("y ~ poly(x, 2)", frame)
    assert list(ours.params.index) == list(theirs.params.index)
    np.testing.assert_allclose(ours.params, theirs.params, rtol=1e-7)
    assert (fs.compare({"ours": ours, "theirs": theirs}, stars=()).coefficients != "").all(axis=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_plots_and_hypotheses_have_short_names(fits, family):
    fit = fits[family]
    assert f"{SPLINE}[0]" in fit.params.index
    text = fit.summary().as_text()
    assert "bs(x)[0]" in text and "knots=" not in text
    ax = fit.plot_coefficients()
    assert "bs(x)[3]" in {label.get_text() for label in ax.get_yticklabels()}
    short, long = (fit.t_test(f"{name}[1] = 0") for name in ("bs(x)", SPLINE))
    assert short.pvalue == long.pvalue and short.c_names == long.c_names == ["bs(x)[1] = 0"]
    terms = fit.wald_test_terms()
    assert "bs(x) " in str(terms) and "knots" not in str(terms) and SPLINE in terms.table.index


def test_splines_that_differ_in_options_alone_keep_them():
    names = ["bs(x, df=4)[0]", "bs(x, df=5)[0]:z", "cr(log(x), df=3)[1]", "Q('bs(a, b)')"]
    assert short_names(names) == (*names[:2], "cr(log(x))[1]", names[3])


def test_other_names_stay():
    names = ["x", "C(bs)[1]", "bs[1]", "abs(x)[1]", "poly(x, 2)[1]", "bs(x, df=4)[0]"]
    assert count_from_zero(names) == tuple(names)


def test_a_forest_takes_the_name_that_is_printed():
    rows = fs.ClientPartition.from_frame(draw().assign(site=["A", "B"] * 45), by="site")
    between = fs.FederatedOLS.from_formula(f"y ~ {SPLINE} + z", rows).fit().heterogeneity
    titles = {between.plot_forest(name).get_title(loc="left") for name in ("bs(x)[0]", f"{SPLINE}[0]")}
    assert len(titles) == 1
    with pytest.raises(ModelError, match=r"'age' is not a coefficient; there are: Intercept, bs\(x\)\[0\]"):
        between.plot_forest("age")
