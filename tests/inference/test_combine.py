"""Combining an analysis over synthetic tables, against the rule by hand and by simulation."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from combine_simulation import fit, ideal
from scipy import stats

import fedstat as fs
from fedstat.errors import ModelError


def fits_of(tables):
    return [smf.ols("y ~ x", table).fit() for table in tables]


def draw(n, mean, rng):
    x = rng.standard_normal(n)
    return pd.DataFrame({"x": x, "y": mean[0] + mean[1] * x + rng.standard_normal(n)})


@pytest.fixture(scope="module")
def tables():
    rng = np.random.default_rng(4)
    return [draw(80, rng.normal([1.0, 2.0], 0.6), rng) for _ in range(8)]


def test_the_rule_by_hand(tables):
    fits = fits_of(tables)
    combined = fs.combine(fits)
    q, v = np.array([fit.params["x"] for fit in fits]), np.array([fit.bse["x"] ** 2 for fit in fits])
    assert combined.params["x"] == pytest.approx(q.mean())
    assert combined.bse["x"] ** 2 == pytest.approx((1 + 1 / 8) * q.var(ddof=1) - v.mean())
    df = 7 * (1 - v.mean() / ((1 + 1 / 8) * q.var(ddof=1))) ** 2
    assert combined.df_resid["x"] == pytest.approx(df)
    half = stats.t.ppf(0.975, df) * combined.bse["x"]
    assert combined.conf_int().loc["x"].to_numpy() == pytest.approx([q.mean() - half, q.mean() + half], 1e-6)


@pytest.mark.slow
def test_intervals_of_tables_drawn_with_their_own_parameters_cover():
    """With v / M as floor and M - 1 degrees of freedom, 5 tables cover .90 and 20 tables .91."""
    assert ideal(5, 100, 200) > 0.96 and ideal(20, 100, 200) > 0.96


def test_variances_below_v_are_v():
    """Tables of one release: b is v on average, so that (1 + 1/M) b - v is far too small."""
    rng = np.random.default_rng(6)
    combined = fs.combine(fits_of([draw(100, (1.0, 2.0), rng) for _ in range(20)]))
    assert combined.floored.all()
    np.testing.assert_allclose(combined.bse**2, combined.within)
    np.testing.assert_allclose(combined.df_resid, 19 / 4)
    assert "(1 + 1/M) b - v below v are replaced by v" in " ".join(str(combined).split())


def test_what_are_no_synthetic_tables_is_refused():
    rng = np.random.default_rng(7)
    with pytest.raises(ModelError, match=r"different numbers of rows \(50 to 2,000\).*meta\(estimates"):
        fs.combine(fits_of([draw(n, (1.0, 2.0), rng) for n in (2000, 200, 50)]))
    table = draw(200, (1.0, 2.0), rng)
    imputed = [table.assign(x=table["x"].where(rng.uniform(size=200) > 0.05, 0.0)) for _ in range(20)]
    with pytest.raises(ModelError, match=r"imputations of the same rows, use pool\(results\)"):
        fs.combine(fits_of(imputed))


def test_tables_of_many_seeds_are_not_refused():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        fs.combine([fit(rng.normal(size=(40, 1)), rng.normal(size=40), logistic=False) for _ in range(5)])


def test_the_summary_names_rule_and_cover(tables):
    text = " ".join(str(fs.combine(fits_of(tables)).summary()).split())
    assert "Raghunathan, Reiter and Rubin 2003" in text and "cover .95 at epsilon 1" in text
    assert "Fewer than 20 tables" in text


def test_what_cannot_be_combined_is_named(tables):
    fits = fits_of(tables)
    with pytest.raises(ModelError, match="at least 2 tables, received 1"):
        fs.combine(fits[:1])
    with pytest.raises(ModelError, match="result 1 has no named params and bse; received DataFrame"):
        fs.combine([fits[0], tables[0]])
    other = smf.ols("y ~ x + I(x**2)", tables[1]).fit()
    with pytest.raises(ModelError, match=r"other coefficients than result 0: I\(x \*\* 2\)"):
        fs.combine([fits[0], other])
