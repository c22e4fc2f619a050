"""Results of the family: no standard errors, the distance to the maximum, figures to compare."""

import re

import descent
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from descent import FRAME, WHOLE, F, Pooled, fit, model, run, table

import fedstat as fs
from fedstat.errors import ConvergenceWarning, DataWarning, NotAvailableError

KINDS = {"FedAvg": fs.FedAvg, "FedAvgM": fs.FedAvgM, "q-FedAvg": fs.QFedAvg, "FedProx": fs.FedProx}


@pytest.fixture(scope="module")
def exact():
    return model(fs.GLORE).fit()


@pytest.fixture(scope="module")
def result():
    return fit(fs.FedAvg, rounds=40, **WHOLE, learning_rate=1.0)


# ---------------------------------------------------------------- what it does not say


@pytest.mark.parametrize("statement", ["bse", "pvalues", "tvalues", "zvalues", "aic", "bic", "rsquared"])
def test_what_does_not_exist_says_why(result, statement):
    reason = {
        "aic": "no AIC: the log-likelihood of FedAvg is not a maximum",
        "bic": "no BIC: the log-likelihood of FedAvg is not a maximum",
        "rsquared": "no rsquared: a GLM has none",
    }.get(statement, "gives an estimate without a standard error: it stops.*use GLORE")
    with pytest.raises(NotAvailableError, match=reason):
        getattr(result, statement)


def test_tests_and_intervals_do_not_exist(result):
    for statement in (
        result.conf_int,
        result.cov_params,
        lambda: result.t_test("x = 0"),
        lambda: result.wald_test("x = 0"),
        lambda: result.compare_lr_test(result),
    ):
        with pytest.raises(NotAvailableError):
            statement()


@pytest.mark.parametrize("name", KINDS)
def test_summary_is_loud_about_it(name):
    text = str(fit(KINDS[name], rounds=40, learning_rate=1.0, **WHOLE).summary())
    assert text.startswith("*** POINT ESTIMATES ONLY ***")
    assert f"{name} results" in text
    assert "federated averaging gives an estimate without a standard error" in " ".join(text.split())
    assert "std err" not in text and "P>|z|" not in text
    assert "Distance to the maximum-likelihood estimate" in text


def test_summary_lists_the_options():
    text = str(fit(fs.FedProx, mu=0.25, gamma=0.5, fraction=0.5, rounds=7, batch_size=None, seed=9).summary())
    for label, value in {
        "Averaging Rounds": "7", "Fraction": "0.5", "Local Epochs": "5", "Batch Size": "whole site",
        "Learning Rate": "0.05", "mu": "0.25", "gamma": "0.5", "Standardized": "no", "Seed": "9",
    }.items():  # fmt: skip
        assert re.search(rf"(^|\s){label}: +{re.escape(value)}(\s|$)", text), label


# ---------------------------------------------------------------- how far it is


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize(
    ("response", "family"),
    [("binary", F.Binomial()), ("binary", F.Binomial(sm.families.links.Probit())), ("gauss", F.Gaussian())],
)
def test_distance_is_that_to_the_estimate_of_glore_in_its_standard_errors(response, family, standardize):
    known = {"formula": f"{response} ~ x + z", "family": family}
    exact = model(fs.FederatedGLM, **known).fit()
    init = exact.params + [0.02, -0.01, 0.03] * exact.bse
    ours = fit(
        fs.FedAvg, formula=known["formula"], known={"family": family}, init=init, rounds=1,
        learning_rate=1e-9, standardize=standardize,
    )  # fmt: skip
    np.testing.assert_allclose(ours.distance, [-0.02, 0.01, -0.03], atol=8e-4)


@pytest.mark.parametrize(("step", "converged"), [(0.9, True), (1.1, False)])
def test_converged_is_within_one_standard_error_in_every_coefficient(exact, step, converged):
    init = exact.params + np.array([0.0, step, 0.0, 0.0]) * exact.bse
    still = {"init": init, "rounds": 1, "learning_rate": 1e-9}
    ours = fit(fs.FedAvg, **still)
    assert ours.converged is converged
    size = f"{abs(ours.distance['x']):.2f}"
    if converged:
        reported = (
            f"after 1 round every coefficient is within {size} standard errors of the maximum-likelihood"
        )
        assert ours.estimate.convergence == f"{reported} estimate"
        assert model(fs.FedAvg).fit(seed=1, **still).converged
    else:
        assert f"'x' is about {size} standard errors from the maximum" in ours.estimate.convergence
        assert "NOT CONVERGED" in repr(ours)
        with pytest.warns(ConvergenceWarning, match="FedAvg did not converge: after 1 round 'x' is about"):
            model(fs.FedAvg).fit(seed=1, **still)


def test_collinear_columns_have_no_distance():
    frame = FRAME.assign(twice=2.0 * FRAME["x"])
    ours = fit(fs.FedAvg, formula="binary ~ x + twice", frame=frame, rounds=3)
    assert not ours.converged
    assert np.isinf(ours.distance).all()
    assert "the information is singular" in ours.estimate.convergence


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("response", "family"),
    [
        ("binary", F.Binomial()),
        ("count", F.Poisson()),
        ("gauss", F.Gaussian()),
        ("gamma", F.Gamma(sm.families.links.Log())),
    ],
)
def test_figures_are_those_of_statsmodels_at_these_coefficients(response, family):
    ours = fit(fs.FedAvg, formula=f"{response} ~ x + z + C(g)", known={"family": family}, rounds=10)
    pooled = Pooled(response, "x + z + C(g)", family).all
    mu = pooled.predict(ours.params.to_numpy())
    pearson = ((pooled.endog - mu) ** 2 / family.variance(mu)).sum()
    deviance = family.deviance(pooled.endog, mu)
    np.testing.assert_allclose([ours.deviance, ours.pearson_chi2], [deviance, pearson], rtol=1e-10)
    scale = pearson / (len(FRAME) - 4) if response in ("gauss", "gamma") else 1.0
    np.testing.assert_allclose(ours.scale, scale, rtol=1e-10)
    at = deviance / len(FRAME) if response == "gauss" else scale
    np.testing.assert_allclose(ours.llf, family.loglike(pooled.endog, mu, scale=at), rtol=1e-10)


def test_the_likelihood_is_below_that_of_the_maximum(exact, result):
    assert exact.llf - 2 < result.llf < exact.llf


def test_trace_is_the_loss_after_each_round(result):
    trace = result.trace
    assert trace.index.tolist() == list(range(41))
    assert (np.diff(trace["loss"]) < 0).all()
    np.testing.assert_allclose(trace["loss"].iloc[-1], result.deviance / (2 * result.nobs), rtol=1e-12)
    again = fit(fs.FedAvg, rounds=39, **WHOLE, learning_rate=1.0)
    np.testing.assert_allclose(again.trace["loss"].iloc[-1], trace["loss"].iloc[39], rtol=1e-12)


def test_trace_is_drawn(result):
    ax = result.plot_trace()
    (line,) = ax.get_lines()
    np.testing.assert_array_equal(line.get_ydata(), result.trace["loss"])
    assert fit(fs.FedAvgM, rounds=3).plot_trace(ax) is ax and len(ax.get_lines()) == 2
    plt.close(ax.figure)


def test_fairness_brings_the_losses_of_the_sites_together():
    frame = table(2_000)
    fit_at = {"frame": frame, "rounds": 60, "learning_rate": 0.3, **WHOLE}
    fits = [fit(fs.QFedAvg, q=q, lipschitz=3.0, masked=False, **fit_at) for q in (0.0, 2.0, 8.0)]
    spread = [one.site_loss.std() for one in fits]
    assert spread[0] > spread[1] > spread[2]


@pytest.mark.parametrize("which", ["mean", "linear"])
def test_prediction_is_that_of_the_design(which):
    known = {"exposure": "days", "family": F.Poisson()}
    ours = fit(fs.FedAvg, formula="count ~ z + C(g)", known=known, rounds=5, learning_rate=1e-3)
    frame = FRAME.drop(columns="site").iloc[:9].copy()
    frame.loc[frame.index[4], "z"] = np.nan
    eta = ours.params["Intercept"] + ours.params["z"] * frame["z"] + np.log(frame["days"])
    eta = eta + ours.params.iloc[2] * (frame["g"] == "b")
    expected = eta if which == "linear" else np.exp(eta)
    pd.testing.assert_series_equal(ours.predict(frame, which), expected, check_names=False)
    assert np.isnan(ours.predict(frame).iloc[4])


def test_rows_that_are_left_out_are_reported():
    frame = FRAME.copy()
    frame.loc[frame.index[:10], "x"] = np.nan
    with pytest.warns(DataWarning, match="left out rows") as caught:
        one = model(fs.FedAvg, frame=frame)
    assert caught[0].filename == descent.__file__, "it points at the line of the user"
    ours = run(one, rounds=3)
    assert ours.nobs == len(FRAME) - 10
    assert "10 rows that lack one of the model's columns were left out." in str(ours.summary())


# ---------------------------------------------------------------- next to the exact fit


def test_all_stand_side_by_side_in_the_order_given(exact):
    fits = {name: fit(kind, rounds=5, learning_rate=0.02) for name, kind in reversed(KINDS.items())}
    comparison = fs.compare({**fits, "GLORE": exact})
    frame = comparison.to_frame()
    assert list(frame.columns) == ["FedProx", "q-FedAvg", "FedAvgM", "FedAvg", "GLORE"]
    assert frame.index.get_level_values("name")[:4].tolist() == list(exact.params.index)
    for name, one in fits.items():
        assert frame.loc[("", "x"), name] == f"{one.params['x']:.4f}"
        assert frame.loc[("", "Log-Likelihood"), name] == f"{one.llf:.2f}"
    assert "(" in frame.loc[("", "x"), "GLORE"]
    lacking = [note for note in comparison.notes if "without a standard error" in note]
    assert len(lacking) == 1 and lacking[0].startswith("FedProx, q-FedAvg, FedAvgM, FedAvg: ")
