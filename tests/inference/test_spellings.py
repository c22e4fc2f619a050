"""A coefficient is the same one in every spelling: ``b:a`` is ``a:b``, and ``I(x**2)`` is ``I(x ** 2)``."""

import itertools

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.spline_names import canonical_name, factors_of

RNG = np.random.default_rng(3)
TABLE = pd.DataFrame(
    {
        "x": RNG.normal(size=240),
        "z": RNG.normal(size=240),
        "f": RNG.choice(["a:1", "b", "c"], 240),
        "site": np.arange(240) % 3,
        "id": np.arange(240) // 6,
    }
)
TABLE["y"] = (RNG.random(240) < 0.5).astype(int)
TABLE["site"] = "S" + TABLE["site"].astype(str)
ORDERS = [
    ("y ~ x * f", "y ~ f * x"),
    ("y ~ x + z + x:z", "y ~ z + x + z : x"),
    ("y ~ z + I(x**2):z", "y ~ z:I(x ** 2) + z"),
    ("y ~ x * z * f", "y ~ f * z * x"),
]


def fitted(formula, family=None):
    partition = fs.ClientPartition.from_frame(TABLE, by="site")
    return fs.FederatedGLM.from_formula(formula, partition, family=family or sm.families.Binomial()).fit()


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_fits_with_other_spellings_are_compared_and_pooled(first, second):
    one, other, small = fitted(first), fitted(second), fitted("y ~ 1")
    assert_allclose(one.llf, other.llf, rtol=1e-10)
    same = {canonical_name(name): value for name, value in other.params.items()}
    assert_allclose(one.params, [same[canonical_name(name)] for name in one.params.index], atol=1e-7)
    larger = fitted(f"{second} + I(z > 0)")
    assert larger.compare_lr_test(one)[2] == 1.0
    assert other.compare_lr_test(small)[2] == len(one.params) - 1.0
    pooled = fs.pool([one, other])
    assert_allclose(pooled.params, one.params, atol=1e-7)
    assert_allclose(pooled._within(), one.cov_params(), atol=1e-7)
    frame = fs.compare({"one": one, "other": other}).coefficients
    assert len(frame) == len(one.params) and (frame["one"] == frame["other"]).all()


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_names_of_other_spellings_are_found(first, second):
    one, other = fitted(first), fitted(second)
    for name in one.params.index:
        for way in (":".join(order) for order in itertools.permutations(factors_of(name))):
            assert_allclose(other.wald_test(f"{way} = 0").statistic, one.wald_test(name).statistic, rtol=1e-6)
            assert_allclose(one.t_test(f"2 * {way} = 1").effect, 2.0 * one.params[name], rtol=1e-10)
    last = ":".join(reversed(factors_of(one.params.index[-1])))
    assert one.heterogeneity.plot_forest(last) is not None
    assert one.heterogeneity.random_effects_of([last]).df == 1


def test_terms_that_differ_are_not_the_same():
    full, other = fitted("y ~ x * z"), fitted("y ~ x + z + x:f")
    with pytest.raises(fs.errors.ModelError, match=r"not in this fit: x:f\[T.b\]"):
        full.compare_lr_test(other)
    with pytest.raises(fs.errors.ModelError, match="other coefficients than result 0"):
        fs.pool([full, other])
    assert canonical_name("f[T.a:1]:x") == canonical_name("x:f[T.a:1]") != canonical_name("f[T.a]:x")
    assert factors_of("f[T.a]:1]:x") == ("f[T.a]:1]:x",)
