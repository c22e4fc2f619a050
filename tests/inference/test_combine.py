"""Combining an analysis over synthetic tables, against the rule by hand and by simulation."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf

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
    return [draw(80, rng.normal([1.0, 2.0], 0.3), rng) for _ in range(8)]


def test_the_rule_by_hand(tables):
    fits = fits_of(tables)
    combined = fs.combine(fits)
    q, v = np.array([fit.params["x"] for fit in fits]), np.array([fit.bse["x"] ** 2 for fit in fits])
    assert combined.params["x"] == pytest.approx(q.mean())
    assert combined.bse["x"] ** 2 == pytest.approx((1 + 1 / 8) * q.var(ddof=1) - v.mean())
    half = 2.364624 * combined.bse["x"]  # the quantile of Student's t with 7 degrees of freedom
    assert combined.conf_int().loc["x"].to_numpy() == pytest.approx([q.mean() - half, q.mean() + half], 1e-6)


def line(x, y):
    """Least squares of a line, without the seconds that thousands of formulas take."""
    Z = np.column_stack([np.ones(len(x)), x])
    inverse = np.linalg.inv(Z.T @ Z)
    b = inverse @ Z.T @ y
    cov = inverse * ((y - Z @ b) ** 2).sum() / (len(x) - 2)
    names = ["Intercept", "x"]
    return SimpleNamespace(
        params=pd.Series(b, names), bse=pd.Series(np.sqrt(np.diag(cov)), names), cov_params=lambda: cov
    )


def test_intervals_of_tables_drawn_with_their_own_parameters_cover():
    """Data of 100 rows; tables of 100 from parameters drawn around the estimate, as a posterior is."""
    rng = np.random.default_rng(5)
    first = draw(100, (1.0, 2.0), np.random.default_rng(0))
    ours, theirs = line(first["x"].to_numpy(), first["y"].to_numpy()), fits_of([first])[0]
    np.testing.assert_allclose(ours.params, theirs.params, rtol=1e-12)
    np.testing.assert_allclose(ours.cov_params(), theirs.cov_params(), rtol=1e-12)

    def fitted(mean):
        x = rng.standard_normal(100)
        return line(x, mean[0] + mean[1] * x + rng.standard_normal(100))

    hits = []
    for _ in range(200):
        fit = fitted((1.0, 2.0))
        drawn = [fitted(rng.multivariate_normal(fit.params, fit.cov_params())) for _ in range(20)]
        low, high = fs.combine(drawn).conf_int().loc["x"]
        hits.append(low < 2.0 < high)
    assert np.mean(hits) > 0.87  # .91 is what the rule has with 20 tables, less two standard errors


def test_tables_of_one_release_have_errors_that_are_floored_and_named():
    rng = np.random.default_rng(6)
    combined = fs.combine(fits_of([draw(100, (1.0, 2.0), rng) for _ in range(20)]))
    assert (combined.bse**2 >= combined.within / 20 - 1e-15).all()
    if combined.floored.any():
        assert "would be too small or negative" in str(combined.summary())


def test_the_summary_names_rule_and_cover(tables):
    text = " ".join(str(fs.combine(fits_of(tables)).summary()).split())
    assert "Raghunathan, Reiter and Rubin 2003" in text and "cover .91 at epsilon 1" in text
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
