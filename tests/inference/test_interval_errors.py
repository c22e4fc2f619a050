"""What intervals, pooled results and comparisons refuse, and what their notes say of what is there."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.inference.estimate import Estimate
from fedstat.inference.heterogeneity import heterogeneity as compare_sites
from fedstat.inference.pooling import denominator
from fedstat.inference.post_selection import aggregate_splits, debias

heterogeneity = partial(compare_sites, sources=())

# ---- estimates ---------------------------------------------------------------------------------------


def estimate(**changed):
    fields = {
        "params": np.zeros(2),
        "cov": np.eye(2),
        "names": ("a", "b"),
        "sites": ("A", "B"),
        "terms": ("a", "b"),
        "response": "y",
        "nobs": 9,
        "df_model": 2.0,
        "converged": True,
    }
    return Estimate(**(fields | changed))


@pytest.mark.parametrize(
    ("changed", "received"),
    [
        ({"names": ("a", "a")}, "received a repeated name"),
        ({"params": np.zeros(3)}, "received 3 params$"),
        ({"sites": ("A",), "terms": ()}, "received 1 clients and 0 terms"),
        ({"cov": np.eye(3)}, r"received a covariance of shape \(3, 3\)"),
    ],
)
def test_an_estimate_has_a_name_and_a_value_for_each_coefficient(changed, received):
    assert estimate().names == estimate(cov=None).names
    with pytest.raises(EstimationError, match=f"expected 2 unique names and as many values, {received}"):
        estimate(**changed)


# ---- pooled results ----------------------------------------------------------------------------------


def analyses(params=(1.0, 2.0), error=0.1, shape=(2, 2), m=3):
    rng = np.random.default_rng(1)
    names = ["a", "b"]
    return [
        SimpleNamespace(
            params=pd.Series(np.array(params) + 0.05 * rng.normal(size=2), names),
            bse=pd.Series([0.1, error], names),
            cov_params=lambda: 0.01 * np.eye(*shape),
        )
        for _ in range(m)
    ]


@pytest.mark.parametrize("wrong", [{"params": (1.0, np.nan)}, {"error": np.inf}])
def test_results_without_a_number_are_not_pooled(wrong):
    assert fs.pool(analyses()).imputations == 3
    with pytest.raises(ModelError, match="a coefficient or a standard error is not a finite number"):
        fs.pool(analyses(**wrong))


def test_a_covariance_of_another_shape_is_not_pooled():
    with pytest.raises(ModelError, match=r"result 0 has a covariance of shape \(3, 3\) for 2 params"):
        fs.pool(analyses(shape=(3, 3)))


@pytest.mark.parametrize("alpha", [-1e-9, 0.0, 1.0])
def test_the_level_of_an_interval_lies_between_zero_and_one(alpha):
    pooled = fs.pool(analyses())
    assert np.isfinite(pooled.conf_int(1e-9)).all(axis=None)
    with pytest.raises(ModelError, match="expected alpha between 0 and 1"):
        pooled.conf_int(alpha)


def test_degrees_of_freedom_without_spread_are_those_of_the_complete_data():
    assert denominator(2, 3, 0.0, 50.0) == denominator(2, 3, -1.0, 50.0)
    assert denominator(2, 3, 0.0, 50.0) == 50.0 < denominator(2, 3, 1e-9, 50.0)
    assert denominator(2, 4, 1e-9, 50.0) < 50.0
    # Reiter's equation 3 needs df (df + 1) / (df + 3) > 4 (1 + 1.5 r): at df = 5 that is 3.75, too little.
    assert denominator(2, 4, 1e-9, 7.0) > 4.0
    with pytest.raises(NotAvailableError, match="too much is missing for 5 degrees of freedom"):
        denominator(2, 4, 1e-9, 5.0)


@pytest.mark.parametrize(
    ("df", "wanted"), [(20.0, 5.6803642873824725), (37.0, 7.8360470958333703), (200.0, 11.985351568042077)]
)
def test_degrees_of_freedom_are_those_of_mice(df, wanted):
    """D1() of mice 3.15: two coefficients, four imputations, relative increase of variance .565."""
    assert denominator(2, 4, 0.5652302291697463, df) == pytest.approx(wanted, rel=1e-12)


# ---- after selection ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p_values", "smallest"),
    [(np.ones(3), 0.05), (np.ones((0, 3)), 0.05), (np.ones((2, 3)), 0.0), (np.ones((2, 3)), 1.0)],
)
def test_what_are_no_p_values_of_splits_is_refused(p_values, smallest):
    with pytest.raises(EstimationError, match=r"expected p-values \(B, p\) of one split or more"):
        aggregate_splits(p_values, smallest)


def test_p_values_of_splits_by_hand():
    """Of ten splits the quantiles are order statistics; those below the smallest do not count."""
    p = np.sort(np.random.default_rng(2).random((10, 3)), axis=0) / 10
    p[0] = 0.0
    for smallest in (0.05, 0.1, 0.2):
        quantiles = [p[k - 1] / (k / 10) for k in range(1, 11) if k / 10 >= smallest]
        wanted = np.minimum((1 - np.log(smallest)) * np.min(quantiles, axis=0), 1.0)
        np.testing.assert_allclose(aggregate_splits(p, smallest), wanted, rtol=1e-14)
    assert aggregate_splits(np.full((1, 1), 1e-3), 0.999)[0] == pytest.approx(1e-3 * (1 - np.log(0.999)))


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_without_a_penalty_a_debiased_estimate_is_one_newton_step(weight):
    rng = np.random.default_rng(3)
    X = np.column_stack([np.ones(400), rng.normal([0.0, 2.0, -1.0], 1.0, (400, 3))])
    y = X @ [1.0, 0.5, 0.0, -0.5] + rng.normal(size=400)
    H, b = weight * X.T @ X / 400, np.array([0.9, 0.3, 0.1, -0.2])
    score = weight * X.T @ (y - X @ b) / 400
    found = debias(b, score, H, 400.0)
    assert not found.lambdas.any()  # the inverse itself
    np.testing.assert_allclose(found.params, np.linalg.lstsq(X, y, rcond=None)[0], atol=1e-7)
    np.testing.assert_allclose(found.cov, np.linalg.inv(H) / 400, atol=1e-8)


def test_a_column_that_is_constant_given_the_intercept_is_not_debiased():
    H = np.array([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 1.0]])
    with pytest.raises(EstimationError, match="1 of 2 columns are constant"):
        debias(np.zeros(3), np.zeros(3), H, 100.0)


# ---- comparison of sites -----------------------------------------------------------------------------


def site(name, b, cov=None, **changed):
    cov = 0.01 * np.eye(2) if cov is None else cov
    fields = {"site": name, "n": 99, "beta": b, "cov": cov, "problem": "", "own": None}
    return SimpleNamespace(**(fields | {"score": np.zeros(2), "information": 100.0 * np.eye(2)} | changed))


@pytest.mark.parametrize(
    ("wrong", "received"),
    [
        ({"b": np.zeros(3)}, r"beta of shape \(3,\)"),
        ({"b": np.zeros(2), "cov": np.eye(3)}, r"cov of shape \(3, 3\)"),
        ({"b": np.zeros(2), "score": np.zeros(1)}, r"score of shape \(1,\)"),
    ],
)
def test_arrays_of_another_shape_are_refused_by_site(wrong, received):
    with pytest.raises(EstimationError, match=f"2 coefficients of site 'B', received {received}"):
        heterogeneity(("x", "z"), np.zeros(2), 1.0, [site("A", np.zeros(2)), site("B", **wrong)])


def test_a_site_without_a_covariance_has_no_estimate_of_its_own():
    sites = [site("A", np.zeros(2)), site("B", np.ones(2)), site("C", np.zeros(2))]
    sites[2].cov = None
    found = heterogeneity(("x", "z"), np.zeros(2), 1.0, sites)
    assert found.estimates.loc["C"].isna().all() and found.estimates.loc["B"].notna().all()
    text = " ".join(str(found.summary()).split())
    assert "No own estimates: C." in text and "use the other 2 of 3 sites" in text


@pytest.mark.parametrize("unit", [0.0, -1.0, np.inf, np.nan])
def test_the_unit_of_a_forest_is_a_positive_number(unit):
    found = heterogeneity(("x", "z"), np.zeros(2), 1.0, [site("A", np.zeros(2)), site("B", np.ones(2))])
    with pytest.raises(ModelError, match="expected unit to be a positive number"):
        found.plot_forest("x", unit=unit)


def test_random_effects_of_a_term_are_those_of_its_coefficients():
    rng = np.random.default_rng(4)
    sites = [site(name, rng.normal(size=2)) for name in "ABCD"]
    found = heterogeneity(("x[b]", "x[c]"), np.zeros(2), 1.0, sites, terms=("x", "x"))
    of_term, named = found.random_effects_of("x"), found.random_effects_of(["x[b]", "x[c]"])
    assert of_term.df == named.df == 2 and of_term.pvalue == named.pvalue
    assert found.random_effects_of("x[c]").df == 1
    for nothing in ("z", []):
        with pytest.raises(ModelError, match="is no term and no coefficient; there are: x,"):
            found.random_effects_of(nothing)
