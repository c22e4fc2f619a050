"""Derivatives of coded rows, for every transform of the formula language."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from fedstat.federation.design.coding import code_design
from fedstat.federation.design.formula.syntax_tree import TRANSFORMS
from fedstat.federation.design.formula.terms import parse_terms
from fedstat.federation.tables.columns import Columns

N, STEP = 200, 1e-5
SPLINE = "knots=(3, 5), lower_bound=0, upper_bound=10"
TEXTS = {
    **{
        name: f"{name}(x)"
        for name in ("log", "exp", "sqrt", "np.log", "np.exp", "np.sqrt", "center", "scale")
    },
    "poly": "poly(x, 3)",
    "bs": f"bs(x, {SPLINE})",
    "cr": f"cr(x, {SPLINE}, constraints='center')",
    "cc": f"cc(x, {SPLINE}, constraints='center')",
}
OTHERS = [
    "poly(x, 2, raw=True)", "scale(np.log(x))", "scale(x, scale=False)", "np.exp(x / 4):g", "x:g + C(g, Sum)",
    "I(x / (z ** 2 + 1)) + I(-x ** -0.5) + I(x * z - x)", f"bs(x, {SPLINE}, degree=1):z",
    "bs(x, df=4) * g", "bs(x, knots=(3, 5), lower_bound=2, upper_bound=8, extrapolation='clip')",
    "bs(x, knots=(3, 5), lower_bound=2, upper_bound=8, extrapolation='extend')",
]  # fmt: skip


def columns(x, z, g):
    return Columns({"x": x, "z": z}, {"g": pd.Categorical(g, categories=list("abc"))})


def test_every_transform_is_compared():
    assert set(TEXTS) == set(TRANSFORMS)


@pytest.mark.parametrize("text", [*TEXTS.values(), *OTHERS])
def test_derivatives_are_those_of_differences(text):
    random = np.random.default_rng(2)
    x, z, g = random.uniform(1, 9, N), random.normal(size=N), random.choice(list("abc"), N)
    terms, state = parse_terms(text).terms, {}

    def code(x, by=""):
        return code_design(terms, columns(x, z, g), state, intercept=True, n=N, site="", by=by)

    whole = code(x)  # fixes the state
    found, inside = code(x, "x"), (x > x.min()) & (x < x.max())  # a spline with df has no values beyond
    wide = np.clip(x[:, None] + [-STEP, STEP], x.min(), x.max())
    numerical = (code(wide[:, 1]).X - code(wide[:, 0]).X) / np.diff(wide)
    assert found.names == whole.names
    np.testing.assert_allclose(found.X[inside], numerical[inside], atol=2e-7 * np.abs(numerical).max())
    assert code(x, "z").X.any() == bool(re.search(r"\bz\b", text))


def test_derivatives_at_bounds_and_knots():
    """At a bound it is that of the inside, and at a kink the mean of both sides."""
    x = np.array([0.0, 5.0, 10.0, 2.0])
    terms = parse_terms("bs(x, knots=(5,), degree=1, lower_bound=0, upper_bound=10)").terms
    one = Columns({"x": x}, {})
    hat = code_design(terms, one, {}, intercept=True, n=4, site="", by="x").X[:, 0]
    np.testing.assert_allclose(hat, [0.2, 0.0, -0.2, 0.2], atol=1e-9)
