"""Fits are nested if the columns of one are combinations of those of the other, whatever their names."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from scipy import stats

import fedstat as fs
from fedstat.errors import ModelError

F = sm.families
SPLINE = "cr(x, knots=(-0.7, 0, 0.7), lower_bound=-4, upper_bound=4, constraints='center')"


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(7)
    n = 300
    frame = pd.DataFrame({"site": np.resize(list("ABC"), n), "x": rng.normal(size=n).clip(-3.9, 3.9)})
    frame["g"], frame["h"] = rng.choice(["a", "b"], n), rng.choice(["c", "d"], n)
    eta = np.sin(1.5 * frame["x"])
    frame["e"] = (rng.logistic(size=n) < eta).astype(int)
    frame["y"] = eta + rng.normal(size=n)
    frame["count"] = rng.poisson(np.exp(0.5 * eta))
    frame["grade"] = np.digitize(eta + rng.logistic(size=n), [-1.0, 1.0])
    frame["kind"] = rng.choice(["k", "l", "m"], n)
    frame["time"] = rng.exponential(10.0 * np.exp(-eta)) + 0.5
    frame["group"] = np.arange(n) // 5
    return frame


def over_rows(model, left, more="", **options):
    def fit(frame, right):
        partition = fs.ClientPartition.from_frame(frame, by="site")
        return model.from_formula(f"{left} ~ {right}{more}", partition, **options).fit()

    return fit


FAMILIES = {
    "OLS": over_rows(fs.FederatedOLS, "y"),
    "GLORE": over_rows(fs.GLORE, "e"),
    "Poisson": over_rows(fs.FederatedGLM, "count", family=F.Poisson()),
    "mixed": over_rows(fs.FederatedMixed, "y", " + (1 | group)", reml=False),
    "ordinal": over_rows(fs.FederatedOrdinal, "grade"),
    "multinomial": over_rows(fs.FederatedMultinomial, "kind"),
    "Cox": over_rows(fs.FederatedCox, "Surv(time, e)"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_line_is_nested_in_a_spline(name, frame):
    spline, line = FAMILIES[name](frame, SPLINE), FAMILIES[name](frame, "x")
    test = spline.compare_lr_test(line)
    assert test.df_diff == len(spline.params) - len(line.params)
    assert test.statistic == pytest.approx(2.0 * (spline.llf - line.llf))
    assert test.pvalue == pytest.approx(stats.chi2.sf(test.statistic, test.df_diff))
    with pytest.raises(ModelError, match="not in this fit"):
        line.compare_lr_test(spline)


@pytest.mark.parametrize(
    ("large", "small"),
    [
        ("poly(x, 3)", "x"),
        ("poly(x, 3)", "x + I(x ** 2)"),
        ("g * h", "h:g"),
        ("x + I(x ** 2)", "I((x - 1) ** 2)"),
        ("g * x", "x * h"),
        ("x", "np.exp(x)"),
        ("x + g", "I(x ** 2)"),
    ],
)
def test_the_space_decides_and_not_the_name(large, small, frame):
    full, restricted = FAMILIES["OLS"](frame, large), FAMILIES["OLS"](frame, small)
    X, Z = (
        smf.ols(f"y ~ {right}", frame).exog
        for right in (large.replace("poly(x, 3)", "x + I(x**2) + I(x**3)"), small)
    )
    spanned = np.linalg.matrix_rank(np.column_stack([X, Z])) == np.linalg.matrix_rank(X)
    if spanned and Z.shape[1] < X.shape[1]:
        assert full.compare_lr_test(restricted).df_diff == X.shape[1] - Z.shape[1]
    else:
        with pytest.raises(ModelError, match="compare_lr_test"):
            full.compare_lr_test(restricted)
