"""The alarm on a response that is far from normal, and the shapes of columns of two values."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedstat as fs
from fedstat.models.vfem.diagnostics import LEAST_ASYMMETRY, LEAST_TAILS, NORMAL_TAILS, SYMMETRY_SD, TAILS_SD

ERRORS = {
    "normal": lambda random, n: random.normal(size=n),
    "exponential": lambda random, n: 1.5 * (random.exponential(size=n) - 1.0),
    "t5": lambda random, n: random.standard_t(5, n),
}
SLOPE = {"mar on y": 1.2, "mcar": 0.0}


def fit(errors="normal", mechanism="mar on y", seed=0, n=2000, column=None):
    random = np.random.default_rng(seed)
    x, w = random.multivariate_normal([0.0, 0.0], [[1.0, 0.4], [0.4, 1.0]], n).T
    if column is not None:
        x = column(x)
    y = x - 0.5 * w + ERRORS[errors](random, n)
    ids, scores = np.arange(n), SLOPE[mechanism] * (y - y.mean()) / y.std()
    has = random.random((2, n)) < 1.0 / (1.0 + np.exp(-0.4 - scores))
    frames = {
        "Bank": pd.DataFrame({"id": ids, "y": y}),
        "Shop": pd.DataFrame({"id": ids, "x": x})[has[0]],
        "Agency": pd.DataFrame({"id": ids, "w": w})[has[1]],
    }
    partition = fs.ClientPartition.from_frames(frames, on="id")
    return fs.VFEMRegression.from_formula("y ~ x + w", partition).fit()


def alarmed(result):
    return "RESPONSE NOT NORMAL" in str(result.summary())


@pytest.mark.parametrize("errors", ["exponential", "t5"])
def test_the_alarm_fires_where_a_response_is_not_normal_and_missingness_depends_on_it(errors):
    result = fit(errors)
    what = "is skewed" if errors == "exponential" else "longer tails"
    assert alarmed(result) and what in str(result.summary())


@pytest.mark.parametrize(("errors", "mechanism"), [("normal", "mar on y"), ("exponential", "mcar")])
def test_the_alarm_is_silent_where_maximum_likelihood_is_valid(errors, mechanism):
    assert not alarmed(fit(errors, mechanism))


def test_the_tests_of_shape_have_their_size_and_limits_mean_what_they_say():
    z = np.random.default_rng(1).normal(size=(4000, 500))
    z = (z - z.mean(axis=1, keepdims=True)) / z.std(axis=1, keepdims=True)
    for statistic, sd in (((z * np.abs(z)).mean(axis=1), SYMMETRY_SD), (np.abs(z).mean(axis=1), TAILS_SD)):
        assert np.sqrt(500) * statistic.std() == pytest.approx(sd, rel=0.05)
    skewed = stats.gamma(4.0 / 0.25**2)  # skewness .25
    mean, sd = skewed.mean(), skewed.std()
    asymmetry = skewed.expect(lambda v: (v - mean) * abs(v - mean) / sd**2)
    assert asymmetry == pytest.approx(LEAST_ASYMMETRY, abs=0.008)
    long = stats.t(4.0 + 6.0 / 0.35)  # excess kurtosis .35
    assert NORMAL_TAILS - long.expect(abs) / long.std() == pytest.approx(LEAST_TAILS, abs=0.004)


@pytest.mark.parametrize(("share", "noted"), [(0.3, False), (0.1, True)])
def test_a_column_of_two_values_is_named_as_skewed_only_if_one_is_rare(share, noted):
    result = fit(column=lambda x: 2.0 * (x > stats.norm.isf(share)))
    assert ("Skewed columns" in str(result.summary())) == noted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("errors", "mechanism", "least", "most"),
    [
        ("normal", "mar on y", 0.0, 0.06),
        ("exponential", "mar on y", 0.95, 1.0),
        ("t5", "mar on y", 0.95, 1.0),
        ("normal", "mcar", 0.0, 0.06),
        ("exponential", "mcar", 0.0, 0.06),
    ],
)
def test_the_alarm_fires_in_most_skewed_and_in_few_normal_samples(errors, mechanism, least, most):
    rate = np.mean([alarmed(fit(errors, mechanism, seed=s)) for s in range(300)])
    assert least <= rate <= most
