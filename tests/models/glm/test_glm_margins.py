"""Marginal effects from sums against statsmodels' get_margeff on the stacked table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pooled import fit_pooled, partition, table
from scipy.optimize import approx_fprime

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError

FRAME = table()
F, L = sm.families, sm.families.links
RIGHT = "x + z + C(g)"
FITS = {
    "logit": ("binary", F.Binomial()),
    "probit": ("binary", F.Binomial(L.Probit())),
    "cloglog": ("binary", F.Binomial(L.CLogLog())),
    "loglog": ("binary", F.Binomial(L.LogLog())),
    "cauchit": ("binary", F.Binomial(L.Cauchy())),
    "poisson": ("count", F.Poisson()),
    "gamma": ("gamma", F.Gamma(L.Log())),
    "gaussian": ("gauss", F.Gaussian()),
    "gaussian log": ("gamma", F.Gaussian(L.Log())),
}
ASKED = [
    {"at": at, "method": method, "dummy": dummy}
    for at in ("overall", "mean", "zero")
    for method in ("dydx", "eyex", "dyex", "eydx")
    for dummy in (False, True)
    if not (dummy and (at == "zero" or method in ("dyex", "eyex")))
]


def both(case, right=RIGHT, **fit):
    response, family = FITS[case]
    ours = fs.FederatedGLM.from_formula(f"{response} ~ {right}", partition(FRAME), family=family).fit(
        use_t=False, local=False, **fit
    )
    theirs = fit_pooled(f"{response} ~ {right}", FRAME, family, **fit)
    return ours, theirs


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", FITS)
def test_effects_and_errors_are_those_of_statsmodels(case):
    ours, theirs = both(case)
    for request in ASKED:
        if case == "gaussian" and request["method"].startswith("ey"):
            continue  # logarithms of means that are negative
        # Derivatives by complex steps are exact, those by differences, of links without, are not.
        rtol = 2e-6 if case in ("probit", "cauchit", "cloglog", "loglog") else 1e-8
        mine, other = ours.get_margeff(columns=True, **request), theirs.get_margeff(**request)
        np.testing.assert_allclose(mine.margeff, other.margeff, rtol=1e-8, atol=1e-14, err_msg=str(request))
        np.testing.assert_allclose(mine.margeff_se, other.margeff_se, rtol=rtol, err_msg=str(request))
        np.testing.assert_allclose(mine.margeff_cov, other.margeff_cov, rtol=10 * rtol, atol=1e-9)
        np.testing.assert_allclose(mine.conf_int(), other.conf_int(), rtol=10 * rtol, atol=1e-9)
        frame, expected = mine.summary_frame(0.1), other.summary_frame(0.1)
        assert list(frame) == list(expected) and list(frame.index) == list(expected.index)
        np.testing.assert_allclose(frame, expected, rtol=10 * rtol, atol=1e-9)


def derivative_errors(ours, frame):
    """Errors of average effects by the delta method, from the pooled table and numerical derivatives."""
    X = np.column_stack([np.ones(len(frame)), frame[["x", "z"]], frame["g"] == "b", frame["g"] == "c"])
    beta, cov, link = ours.params.to_numpy(), ours.cov_params().to_numpy(), ours.family.link

    def effects(b):
        return link.inverse_deriv(X @ b).mean() * b[1:]

    J = approx_fprime(beta, effects, 1e-7)
    return np.sqrt(np.diag(J @ cov @ J.T))


@pytest.mark.parametrize("case", ["probit", "cauchit", "loglog"])
def test_errors_are_those_of_numerical_derivatives(case):
    ours, _ = both(case)
    np.testing.assert_allclose(
        ours.get_margeff(columns=True).margeff_se, derivative_errors(ours, FRAME), rtol=1e-6
    )


@pytest.mark.parametrize("at", ["overall", "mean"])
def test_columns_are_held_at_values(at):
    ours, theirs = both("logit")
    for method in ("dydx", "eyex"):
        mine = ours.get_margeff(at=at, method=method, atexog={"x": 0.7, 3: 1.0}, columns=True)
        other = theirs.get_margeff(at=at, method=method, atexog={1: 0.7, 3: 1.0})
        np.testing.assert_allclose(mine.margeff, other.margeff, rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(mine.margeff_se, other.margeff_se, rtol=1e-8, atol=1e-14)
    with pytest.raises(ModelError, match="atexog"):
        ours.get_margeff(atexog={"nobody": 1.0})


def test_without_an_intercept_and_with_a_robust_covariance():
    for right, fit in (("0 + C(g) + x", {}), (RIGHT, {"cov_type": "HC0"})):
        ours, theirs = both("logit", right, **fit)
        for request in ({}, {"dummy": True}, {"at": "mean", "dummy": True}, {"method": "eyex"}):
            mine, other = ours.get_margeff(columns=True, **request), theirs.get_margeff(**request)
            np.testing.assert_allclose(mine.margeff, other.margeff, rtol=1e-8)
            np.testing.assert_allclose(mine.margeff_se, other.margeff_se, rtol=1e-8)


def test_weights_count_rows_and_offsets_are_the_rows_own():
    """statsmodels does not support these; the oracle is computed from the table of all rows."""
    ours = fs.FederatedGLM.from_formula(
        "binary ~ x + z", partition(FRAME), family=F.Binomial(), freq_weights="w", offset="v"
    ).fit()
    X = np.column_stack([np.ones(len(FRAME)), FRAME[["x", "z"]]])
    eta, w = X @ ours.params.to_numpy() + FRAME["v"], FRAME["w"] / FRAME["w"].sum()
    mu = 1 / (1 + np.exp(-eta))
    expected = (w * mu * (1 - mu)).sum() * ours.params.to_numpy()[1:]
    np.testing.assert_allclose(ours.get_margeff().margeff, expected, rtol=1e-8)
    with pytest.raises(NotAvailableError, match="offset"):
        ours.get_margeff(at="mean")


def test_masked_sums_give_the_same_and_no_site_s_part_is_reported():
    ours, _ = both("logit")
    assert ours._fit.masked
    clear = fs.GLORE.from_formula(f"binary ~ {RIGHT}", partition(FRAME)).fit(masked=False)
    np.testing.assert_allclose(ours.get_margeff().margeff, clear.get_margeff().margeff, rtol=1e-10)


def test_strict_sites_answer_what_a_fit_asks_for():
    strict = fs.Policy.strict()
    ours = fs.GLORE.from_formula(f"binary ~ {RIGHT}", partition(FRAME, policy=strict)).fit()
    _, theirs = both("logit")
    for request in ({}, {"dummy": True}, {"method": "eyex"}):
        mine, other = ours.get_margeff(columns=True, **request), theirs.get_margeff(**request)
        np.testing.assert_allclose(mine.margeff_se, other.margeff_se, rtol=1e-8)


def test_what_rows_alone_would_reveal_is_refused(tmp_path):
    ours, _ = both("logit")
    for at in ("all", "median"):
        with pytest.raises(NotAvailableError, match="stay at the sites"):
            ours.get_margeff(at=at)
    with pytest.raises(NotAvailableError, match="counts"):
        ours.get_margeff(count=True)
    with pytest.raises(ModelError, match="dummy"):
        ours.get_margeff(method="eyex", dummy=True)
    ours.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed")
    with pytest.raises(NotAvailableError, match="file"):
        again.get_margeff()
    pd.testing.assert_series_equal(again.get_margeff(at="mean").margeff, ours.get_margeff(at="mean").margeff)


def test_summary_prints_what_was_requested():
    text = str(both("logit")[0].get_margeff(dummy=True, columns=True).summary())
    for shown in ("dy/dx", "at overall", "Changes from 0 to 1: C(g)[T.b], C(g)[T.c]", "std err"):
        assert shown in text
