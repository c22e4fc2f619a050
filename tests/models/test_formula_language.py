"""Codings, cubic splines and I(): the pooled fit of statsmodels with patsy, in numbers and names."""

from __future__ import annotations

import numpy as np
import pandas as pd
import patsy
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import DesignError, FormulaError
from fedstat.federation.design.block import build_block
from fedstat.federation.design.formula.parse import parse_formula
from fedstat.federation.design.formula.syntax_tree import contrast_matrix

pytestmark = pytest.mark.filterwarnings("ignore")
N = 360
CR = "cr(x, knots=(-0.5, 0.6), lower_bound=-4, upper_bound=4, constraints='center')"
CC = "cc(x, knots=(-1, 0, 1), lower_bound=-4, upper_bound=4, constraints='center')"
CODED = [
    "C(g, Sum)",
    "C(g, Sum('b')) + z",
    "C(g, Sum(omit='b')) + z",
    "C(g, Helmert)",
    "C(g, Diff) + C(h, Sum)",
    "C(g, Poly)",
    "C(k, Poly)*z",
    "C(g, Treatment) + C(h, Treatment('q'))",
    "C(g, Sum)*C(h, Helmert)",
    "C(g, Sum):C(h, Helmert)",
    "z:C(g, Sum)",
    "h*C(g, Diff)",
    "I(x**2) + x",
    "I(x > 0.3)",
    "I(x > 0.3)*C(h, Sum)",
    "I(x * z) + I(-x)",
    "I(np.log(x + 9)) + I(g == 'a')",
    "I(x / z2 - 1)",
    "I(x > z):h",
    CR,
    f"{CC} + z",
    f"{CR}:h",
]
WITHOUT = [
    "0 + C(g, Sum)",
    "0 + C(g, Helmert) + z",
    "0 + C(g, Diff)",
    "0 + C(g, Poly)",
    "0 + h:C(g, Sum)",
    "0 + I(x > 0.3) + z",
    "0 + cr(x, knots=(-0.5, 0.6), lower_bound=-4, upper_bound=4)",
    "0 + cc(x, knots=(-1, 0, 1), lower_bound=-4, upper_bound=4) + z",
]


def draw():
    rng = np.random.default_rng(6)
    frame = pd.DataFrame(
        {
            "id": np.arange(N),
            "x": np.clip(rng.normal(size=N), -3.5, 3.5),
            "z": rng.normal(size=N),
            "z2": rng.uniform(1, 2, N),
            "g": rng.choice(list("abcd"), N),
            "h": rng.choice(list("pqr"), N),
            "k": rng.integers(1, 7, N),
            "site": np.repeat(list("ABC"), N // 3),
        }
    )
    frame["y"] = np.sin(frame["x"]) + frame["z"] + (frame["g"] == "b") + rng.normal(size=N)
    frame["n"] = rng.poisson(np.exp(0.3 * np.sin(frame["x"]) + 0.2 * (frame["h"] == "p")))
    return frame


FRAME = draw()
ROWS = fs.ClientPartition.from_frame(FRAME.drop(columns="id"), by="site")
COLUMNS = fs.ClientPartition.from_frames(
    {"A": FRAME[["id", "y", "z2", "k"]], "B": FRAME[["id", "x", "z", "g", "h"]]}, on="id"
)


def same(ours, theirs, rtol=1e-8):
    assert set(ours.params.index) == {name.replace(", )", ",)") for name in theirs.params.index}
    renamed = theirs.params.rename(lambda name: name.replace(", )", ",)"))
    np.testing.assert_allclose(ours.params[renamed.index], renamed, rtol=rtol, atol=1e-9)
    np.testing.assert_allclose(ours.bse[renamed.index], theirs.bse, rtol=max(rtol, 1e-7))


@pytest.mark.parametrize("right", [*CODED, *WITHOUT])
def test_rows_at_several_sites(right):
    theirs = smf.glm(f"y ~ {right}", FRAME).fit()
    same(fs.FederatedGLM.from_formula(f"y ~ {right}", ROWS, family=sm.families.Gaussian()).fit(), theirs)


@pytest.mark.parametrize("right", ["C(g, Sum)*C(h, Sum)", f"{CR} + I(z > 0)"])
def test_counts(right):
    theirs = smf.glm(f"n ~ {right}", FRAME, family=sm.families.Poisson()).fit(tol=1e-14)
    same(fs.FederatedGLM.from_formula(f"n ~ {right}", ROWS, family=sm.families.Poisson()).fit(), theirs, 1e-7)


AT_ONE = [right for right in CODED if "z2" not in right and "C(k" not in right]
OF_DATA = ["cr(x, df=4, constraints='center')", "cc(x, df=5, constraints='center') + C(g, Sum)"]


@pytest.mark.parametrize("right", [*AT_ONE, *OF_DATA])
def test_columns_at_several_sites(right):
    formula = f"y ~ z2 + {right}"
    theirs = smf.ols(formula, FRAME).fit()
    ours = fs.VFEMRegression.from_formula(formula, COLUMNS).fit()
    plain = [name.replace(", )", ",)") for name in theirs.params.index]
    assert set(ours.params.index) == set(plain)
    # Products of two sites' columns pass in fixed point: 3e-8 standard errors for columns in their own units.
    assert (np.abs(ours.params[plain].to_numpy() - theirs.params.to_numpy()) < 1e-7 * theirs.bse).all()


@pytest.mark.parametrize("right", [*AT_ONE, *OF_DATA])
def test_coded_columns_of_a_site_are_those_of_patsy(right):
    parsed = parse_formula(f"y ~ {right}", {"A": ["y"], "B": ["x", "z", "g", "h"]})
    block = build_block(FRAME, parsed.sites[0])
    theirs = patsy.dmatrix(right, FRAME, return_type="dataframe").drop(columns="Intercept")
    theirs.columns = theirs.columns.str.replace(", )", ",)")
    assert set(block.spec.names) == set(theirs)
    np.testing.assert_allclose(block.X, theirs[list(block.spec.names)], rtol=1e-10, atol=1e-10)


def test_predictions_of_new_rows_use_the_states_of_the_fit():
    right = f"{CR} + I(x > 0.3) + C(g, Helmert)"
    ours = fs.FederatedGLM.from_formula(f"y ~ {right}", ROWS, family=sm.families.Gaussian()).fit()
    theirs = smf.glm(f"y ~ {right}", FRAME).fit()
    new = FRAME.iloc[3:20]
    np.testing.assert_allclose(ours.predict(new), theirs.predict(new), rtol=1e-7)


def test_masked_sums_give_the_means_of_a_spline():
    formula = f"y ~ {CR}"
    one, two = (
        fs.FederatedGLM.from_formula(formula, ROWS, family=sm.families.Gaussian()).fit(masked=masked)
        for masked in (False, True)
    )
    np.testing.assert_allclose(one.params, two.params, rtol=1e-7)


def test_compare_lines_up_whichever_quotes_were_written():
    formula = 'y ~ C(g, Sum("b")) + cr(x, knots=(0, 1), lower_bound=-4, upper_bound=4, constraints="center")'
    ours = fs.FederatedGLM.from_formula(formula, ROWS, family=sm.families.Gaussian()).fit()
    table = fs.compare({"ours": ours, "pooled": smf.ols(formula, FRAME).fit()}, stars=()).coefficients
    assert (table != "").all(axis=None) and len(table) == 7


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("coding", ["Sum", "Helmert", "Diff", "Poly"])
def test_matrices_are_those_of_patsy(coding, n):
    levels = list("abcdef"[:n])
    for complete, name in ((True, "code_with_intercept"), (False, "code_without_intercept")):
        theirs = getattr(getattr(patsy, coding)(), name)(levels)
        matrix, names = contrast_matrix(coding, levels, None, complete=complete)
        np.testing.assert_allclose(matrix, theirs.matrix, atol=1e-12)
        assert names == theirs.column_suffixes


@pytest.mark.parametrize(
    ("right", "kind", "told"),
    [
        ("cr(x, knots=(0,), lower_bound=-4, upper_bound=4)", FormulaError, "constraints='center'"),
        ("cr(x, knots=(0, 1), constraints='center')", FormulaError, "needs df=... alone, or knots"),
        ("cr(x, df=4, constraints='none')", FormulaError, "constraints="),
        ("C(g, Sum('zz'))", DesignError, "is not a level"),
        ("C(g, Sum(1, 2))", FormulaError, "write Treatment"),
        ("C(g, Helmert('a'))", FormulaError, "write Treatment"),
        ("C(g, Simple)", FormulaError, "write Treatment"),
        ("I(g * 2)", DesignError, "holds categories"),
        ("I(x == 'a')", DesignError, "compare it with a number"),
        ("I(x > 0 > 1)", FormulaError, "comparison"),
        ("I(C(g))", FormulaError, "not allowed"),
        ("I(x, z)", FormulaError, "not allowed"),
        ("I(x > 99)", DesignError, "constant"),
    ],
)
def test_what_cannot_be_is_said_with_a_remedy(right, kind, told):
    with pytest.raises(kind, match=told):
        fs.FederatedGLM.from_formula(f"y ~ {right}", ROWS, family=sm.families.Gaussian()).fit()


def test_a_product_of_two_sites_columns_is_named():
    with pytest.raises(FormulaError, match=r"'I\(x \* z2\)' needs .* at site 'B' .* at site 'A'"):
        fs.VFEMRegression.from_formula("y ~ I(x * z2)", COLUMNS)


def test_a_rare_side_of_a_comparison_is_refused_at_one_site():
    with pytest.raises(DesignError, match="fewer than 5 entities"):
        cut = float(FRAME["x"].sort_values().iloc[-3])
        fs.VFEMRegression.from_formula(f"y ~ z + I(x > {cut - 1e-9})", COLUMNS)


@pytest.mark.parametrize("masked", [False, True])
def test_a_dry_run_knows_what_a_spline_asks(masked):
    model = fs.FederatedGLM.from_formula(f"y ~ {CR} + poly(z, 2)", ROWS, family=sm.families.Gaussian())
    assert "Every policy allows this fit" in str(model.explain(masked=masked))


def test_a_centered_cubic_spline_is_the_natural_one_of_r():
    """R: lm(y ~ splines::ns(x, knots=c(8, 15, 22), Boundary.knots=c(1, 40.5))), fitted values."""
    x = np.tile(np.append(np.arange(1.0, 21.0), [25.0, 31.0, 40.5]), 3)  # three times every row: the same fit
    frame = pd.DataFrame({"x": x, "y": np.sin(x / 5) + x / 30, "site": np.where(np.arange(69) % 2, "A", "B")})
    spline = "cr(x, knots=(8, 15, 22), lower_bound=1, upper_bound=40.5, constraints='center')"
    partition = fs.ClientPartition.from_frame(frame, by="site")
    fitted = fs.FederatedOLS.from_formula(f"y ~ {spline}", partition).fit()
    of_r = [0.2169709889850, 0.4397490947257, 0.6541484295690, 1.3072065589169, 0.0432883002416]
    found = fitted.predict(frame).to_numpy()
    np.testing.assert_allclose(found[[0, 1, 2, 7, 19]], of_r, rtol=1e-10)
    np.testing.assert_allclose(found[20:23], [0.0142828797593, 0.6341212139670, 2.4240959458652], rtol=1e-10)


@pytest.mark.parametrize("call", ["np.maximum(x - 15, 0)", "hinge(x, 15)", "pmax(x - 15, 0)"])
def test_a_change_of_slope_is_a_linear_spline_as_the_refusal_says(call):
    x = np.tile(np.linspace(1.0, 40.0, 30), 2)
    frame = pd.DataFrame({"x": x, "y": np.sin(x / 5), "site": np.repeat(["A", "B"], 30)})
    partition = fs.ClientPartition.from_frame(frame, by="site")
    with pytest.raises(FormulaError, match=r"linear spline, bs\(x, knots=\(50,\), degree=1"):
        fs.FederatedOLS.from_formula(f"y ~ x + {call}", partition)
    spline = "bs(x, knots=(15,), degree=1, lower_bound=1, upper_bound=40)"
    found = fs.FederatedOLS.from_formula(f"y ~ {spline}", partition).fit().predict(frame)
    hinge = np.column_stack([np.ones(60), x, np.maximum(x - 15.0, 0.0)])
    expected = hinge @ np.linalg.lstsq(hinge, frame["y"], rcond=None)[0]
    np.testing.assert_allclose(found, expected, atol=1e-10)
