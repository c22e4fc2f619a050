"""Cox models at the limits of numbers, and columns that a site's baseline absorbs."""

from __future__ import annotations

import warnings

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.kernels.partial_likelihood import PartialLikelihood, RiskTable

mpl.use("Agg")
ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1, max_parameters=1e9)


def patients(n=240, seed=2):
    rng = np.random.default_rng(seed)
    x, site = rng.normal(size=n), rng.choice(list("abc"), n)
    time = np.ceil(rng.exponential(8.0 * np.exp(0.8 * x)))
    return pd.DataFrame(
        {"site": site, "x": x, "z": rng.normal(size=n), "t": time, "e": rng.integers(0, 2, n)}
    )


def fitted(table, formula="Surv(t, e) ~ x + z", **arguments):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    return fs.FederatedCox.from_formula(formula, partition).fit(**arguments)


@pytest.mark.parametrize("unit", [1e-3, 1e-4, -1e-4, 1e-7])
def test_ratios_beyond_the_largest_number(unit):
    plain, fit = fitted(patients()), fitted(patients().assign(x=lambda table: table["x"] * unit))
    assert_allclose(fit.params["x"] * unit, plain.params["x"], rtol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = fit.summary().as_text()
        ratios, tidied = fit.hazard_ratios(), fit.tidy(exponentiate=True)
        fit.plot_coefficients(exponentiate=True)
        fit.plot_forest("x")
    if abs(fit.params["x"]) > 750.0:
        sign = np.sign(fit.params["x"])
        assert ratios.loc["x", "hazard_ratio"] == (np.inf if sign > 0 else 0.0) and "inf" in text
        assert tidied.loc[0, "estimate"] == ratios.loc["x", "hazard_ratio"]


@pytest.mark.parametrize("unit", [1e-4, -1e-7])
@pytest.mark.parametrize("kind", ["GLORE", "FederatedOrdinal", "FederatedMultinomial"])
def test_ratios_of_other_families_beyond_the_largest_number(kind, unit):
    table = patients().assign(
        x=lambda table: table["x"] * unit,
        y=lambda table: np.digitize(table["t"], [6.0] if kind == "GLORE" else [4.0, 10.0]),
    )
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    fit = getattr(fs, kind).from_formula("y ~ x + z", partition).fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit.summary().as_text()
        assert not fit.tidy(exponentiate=True)["estimate"].between(1e-300, 1e300).all()
        fit.plot_coefficients(exponentiate=True)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_a_sum_without_digits_is_no_maximum(ties):
    # The row that enters after the first event outweighs the others, and leaves their sum no digits.
    times = np.array([0.0, 0.0, 6.0]), np.array([5.0, 7.0, 10.0])
    table = RiskTable.of(*times, np.array([True, False, True]))
    eta = np.array([-60.0, -80.0, 0.0])
    assert PartialLikelihood.at(table, np.zeros((3, 1)), eta, ties).loglik == -np.inf
    assert np.isfinite(PartialLikelihood.at(table, np.zeros((3, 1)), eta / 20.0, ties).loglik)
    # A row that is at risk at no event has no part.
    table = RiskTable.of(*times, np.array([True, False, False]))
    found = PartialLikelihood.at(table, np.zeros((3, 1)), eta, ties).loglik
    assert found == pytest.approx(-np.log1p(np.exp(-20.0)), rel=1e-12)


def test_a_site_with_one_event_and_late_entry_has_no_fit_of_its_own():
    few = pd.DataFrame(
        {
            "site": "few",
            "x": [-1.0, -2.0, 5.0, 0.5, -1.5, 4.0],
            "z": [0.1, -0.3, 0.2, 0.4, -0.6, 0.3],
            "t": [5.0, 7.0, 10.0, 12.0, 9.0, 12.0],
            "e": [1, 0, 0, 0, 0, 0],
            "entry": [0.0, 0.0, 6.0, 7.0, 0.0, 6.0],
        }
    )
    whole = pd.concat(
        [patients().assign(entry=0.0, t=lambda table: table["t"] + 1.0), few], ignore_index=True
    )
    fit = fitted(whole, "Surv(entry, t, e) ~ x + z")
    own = {one.site: one.problem for one in fit._fit.local}
    assert own["few"] and fit.converged
    pooled = fitted(whole.assign(h=whole["site"], site="all"), "Surv(entry, t, e) ~ x + z + strata(h)")
    assert_allclose(fit.params, pooled.params, rtol=1e-8)


@pytest.mark.parametrize(
    ("formula", "named"),
    [
        ("Surv(t, e) ~ x + C(site)", "'C(site)[T.b]', 'C(site)[T.c]' are"),
        ("Surv(t, e) ~ x + size", "'size' is"),
        ("Surv(t, e) ~ size", "'size' is"),
    ],
)
def test_columns_that_are_constant_within_sites_are_named(formula, named):
    table = patients().assign(size=lambda table: table["site"].map({"a": 10.0, "b": 250.0, "c": 31.0}))
    with pytest.raises(EstimationError) as caught:
        fitted(table, formula)
    assert named in str(caught.value) and "baselines absorb it" in str(caught.value)
    common = fitted(table, formula, baseline="common", grid=4, until=24)
    assert np.isfinite(common.params).all()
