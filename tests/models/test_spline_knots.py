"""Splines with df= where sites hold different rows: the pooled fit, with knots near quantiles of all rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from formulaic import model_matrix
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import DescriptionError, FormulaError
from fedstat.federation.design.formula.expression import parse_expression

pytestmark = pytest.mark.filterwarnings("ignore")
N = 1500
rng = np.random.default_rng(1)
TABLE = pd.DataFrame(
    {
        "site": rng.choice(["A", "B", "C"], N),
        "x": rng.normal(size=N),
        "group": rng.choice(["g", "h"], N),
        "far": 1e9 + 1e4 * rng.normal(size=N),
        "tiny": 1e-9 * rng.normal(size=N),
        "skew": np.exp(1.2 * rng.normal(size=N)),
        "year": 2000.0 + rng.integers(0, 23, N),
        "below": -50.0 - rng.gamma(3.0, 5.0, N),
    }
).assign(y=lambda t: np.sin(t["x"]) + 0.3 * np.log(t["skew"]) + rng.normal(size=N))
ROWS = fs.ClientPartition.from_frame(TABLE, by="site")


def options_of(text):
    return dict(parse_expression(text).tree.options)


def pooled(result, table=TABLE):
    """Return statsmodels' fit of the pooled rows, with the knots that the result reports."""
    terms = " + ".join(result.basis.agreement.question.terms)
    return sm.OLS(table["y"].to_numpy(), np.asarray(model_matrix(terms, table))).fit()


def fit(right, partition=ROWS, **settings):
    return fs.FederatedOLS.from_formula(f"y ~ {right}", partition, **settings).fit()


@pytest.mark.parametrize("column", ["x", "far", "tiny", "skew", "year", "below"])
@pytest.mark.parametrize("spline", ["bs({}, df=5)", "ns({}, df=4)", "cr({}, df=4, constraints='center')"])
def test_knots_are_near_the_quantiles_of_all_rows(column, spline):
    result, values = fit(spline.format(column)), TABLE[column].to_numpy()
    ((written, asked),) = result.basis.agreement.question.placed.items()
    assert asked == spline.format(column).replace("ns(x", "cr(x") or "ns(" in spline
    given = options_of(written)
    knots = np.array(given["knots"])
    shares = np.linspace(0.0, 1.0, len(knots) + 2)
    quantiles = np.quantile(values, shares)
    # A step is a hundredth of the distance between the quantiles on both sides; blocks have three rows.
    apart = quantiles[2:] - quantiles[:-2]
    assert (np.abs(knots - quantiles[1:-1]) <= 0.02 * apart).all()
    within = np.sort(values)[[20, -21]]
    assert given["lower_bound"] <= within[0] and within[1] <= given["upper_bound"]
    if column != "far":
        reference = pooled(result)
        assert_allclose(result.params, reference.params, rtol=1e-7, atol=1e-9)
        assert_allclose(result.llf, reference.llf, rtol=1e-10)
    of_quantiles = (
        smf.ols(f"y ~ {spline.format(column).replace('ns(', 'cr(')}", TABLE) if "bs" in spline else None
    )
    if of_quantiles is not None:
        assert abs(result.llf - of_quantiles.fit().llf) < 0.3


def test_natural_splines_have_the_fit_of_r():
    """R: logLik(lm(y ~ splines::ns(x, df = 4))) of the same rows; whole numbers are their own knots."""
    frame = pd.DataFrame({"x": np.tile(np.arange(20.0, 81.0), 9), "site": np.repeat(["A", "B", "C"], 183)})
    frame["y"] = np.sin(frame["x"] / 9.0) + 0.1 * ((frame.index * 7) % 11)
    result = fit("ns(x, df=4)", fs.ClientPartition.from_frame(frame, by="site"))
    (written,) = result.basis.agreement.question.placed
    assert options_of(written) == {
        "knots": (35.0, 50.0, 65.0),
        "lower_bound": 20.0,
        "upper_bound": 80.0,
        "constraints": "center",
    }
    assert_allclose(result.llf, -151.254100666672, rtol=1e-12)


def test_a_number_of_degrees_of_freedom_is_that_of_columns():
    for df in (3, 4, 7):
        for spline in (f"bs(x, df={df})", f"ns(x, df={df})", f"bs(x, df={df}, degree=2)"):
            assert fit(spline).params.size == 1 + df
    assert fit("0 + cr(x, df=4)").params.size == 4
    assert fit("cc(year, df=4, lower_bound=2000, upper_bound=2023, constraints='center')").params.size == 5


def test_products_transforms_and_several_splines():
    right = "bs(x, df=4):group + group + ns(np.log(skew), df=3) + bs(year, df=3)"
    result = fit(right)
    assert_allclose(result.params, pooled(result).params, rtol=1e-8, atol=1e-9)
    assert len(result.basis.agreement.question.placed) == 3
    text = result.summary().as_text()
    assert "bs(x)[0]:group[g]" in text and "cr(np.log(skew))[2]" in text
    assert "Knots: " in text and "; bs(year) between 2000 and 2022" in " ".join(text.split())


def test_knots_depend_on_rows_and_not_on_masks_or_the_order_of_sites():
    def knots(partition, **settings):
        return fit("ns(x, df=4)", partition, **settings).params.index.tolist()

    plain = knots(ROWS)
    assert plain == knots(fs.ClientPartition.from_frame(TABLE.iloc[::-1], by="site"))
    masked = fs.Policy(masked_only=True)
    assert plain == knots(fs.ClientPartition.from_frame(TABLE, by="site", policy=masked))
    open_rows = fs.Policy(min_count=1, min_level_count=1, min_events=1)
    one = fs.ClientPartition.from_frame(TABLE.assign(site="all"), by="site", policy=open_rows)
    exact = options_of(fit("ns(x, df=4)", one).basis.agreement.question.terms[0])
    assert_allclose(exact["lower_bound"], TABLE["x"].min(), atol=0.03)
    assert knots(ROWS, subset="x > 0") != plain


def test_a_range_in_the_formula_takes_one_round():
    result = fit("bs(x, df=5, lower_bound=-4, upper_bound=4.5)")
    given = options_of(result.basis.agreement.question.terms[0])
    assert (given["lower_bound"], given["upper_bound"], given.get("extrapolation")) == (-4, 4.5, None)
    rounds = {entry.round for entry in result.ledger.entries if entry.step == "count_intervals"}
    assert len(rounds) == 1
    counts = [entry for entry in result.ledger.entries if entry.array == "counts"]
    assert all(entry.masked for entry in counts) and len(counts) == 3


def test_results_with_knots_go_on(tmp_path):
    model = fs.GLORE.from_formula("y > 0 ~ ns(x, df=4) + group", ROWS)
    result = model.fit()
    expected = result.predict(TABLE.head(9))
    result.save(tmp_path / "fit")
    assert_allclose(fs.load(tmp_path / "fit").predict(TABLE.head(9)), expected)
    expected = result.wald_test([f"cr(x)[{j}] = 0" for j in range(4)])
    found = result.wald_test([f"{name} = 0" for name in result.params.index[1:5]])
    assert_allclose(found.statistic, expected.statistic)
    assert 0.0 < result.test_nonlinearity("x").pvalue < 1e-3
    line = fs.GLORE.from_formula("y > 0 ~ x + group", ROWS).fit()
    assert result.llf > line.llf
    assert len(result.effect("x")) > 50
    assert "count_intervals" not in set(model.explain().table["step"])  # the model has the knots


def test_strict_sites_compute_splines_with_published_knots():
    published = {
        "x": {"kind": "number", "range": [-5, 5], "knots": [-2, -1, 0, 1, 2]},
        "y": {"kind": "number", "range": [-9, 9], "levels": [0]},
    }
    sites = dict.fromkeys(["A", "B", "C"], published)
    strict = fs.ClientPartition.from_frame(TABLE, by="site", policy=fs.Policy.strict(), published=sites)
    result = fs.FederatedOLS.from_formula("y ~ ns(x, df=4)", strict).fit()
    given = options_of(result.basis.agreement.question.terms[0])
    assert (given["lower_bound"], given["knots"], given["upper_bound"]) == (-5.0, (-2.0, 0.0, 1.0), 5.0) or (
        given["knots"] == (-2.0, 0.0, 2.0)
    )
    assert not [entry for entry in result.ledger.entries if entry.step == "count_intervals"]
    assert "among those that the sites publish" in result.summary(notes="all").as_text()
    del published["x"]["knots"]
    bare = fs.ClientPartition.from_frame(TABLE, by="site", policy=fs.Policy.strict(), published=sites)
    with pytest.raises(DescriptionError, match=r"published without knots. Ask the owner .* knots = \[...\]"):
        fs.FederatedOLS.from_formula("y ~ ns(x, df=4)", bare)


@pytest.mark.parametrize(
    "right",
    ["bs(x, df=4, knots=(0, 1))", "ns(x, df=4, lower_bound=0)", "0 + cc(x, df=4)", "ns(scale(x), df=3)"],
)
def test_other_splines_need_what_the_error_says(right):
    with pytest.raises(FormulaError, match="needs"):
        fit(right)


def test_learners_of_boosting_have_their_own_splines():
    with pytest.raises(FormulaError, match=r"a smooth effect is bbs\(x\)"):
        fs.FedFunctionBoost.from_formula("y ~ ns(x, df=3)", ROWS)
