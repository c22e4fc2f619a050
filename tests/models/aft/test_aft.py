"""Accelerated failure time models over sites are R's survreg of the pooled table."""

import json
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.optimize
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import (
    DesignError,
    EstimationError,
    FormulaError,
    MessageError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.federation.message import Request, pack_request
from fedstat.kernels.lifetimes import LIFETIMES
from fedstat.models.aft.steps import AFTRequest, TimesRequest, time_jet

REFERENCE = Path(__file__).parents[2] / "reference" / "survival"
PATIENTS = runpy.run_path(str(REFERENCE / "patients.py"))["patients"]()
R = json.loads((REFERENCE / "aft.json").read_text())
DISTRIBUTIONS = ["weibull", "exponential", "lognormal", "loglogistic"]
STAGES, ARMS = "Surv(months, died) ~ age + C(stage)", "Surv(months, died) ~ age + C(arm)"
CASES = {name: (STAGES, {"distribution": name}, {}) for name in DISTRIBUTIONS} | {
    "robust": (ARMS, {"distribution": "lognormal"}, {"cov_type": "robust"}),
    "weighted": (f"{ARMS} + offset(shift)", {"var_weights": "weight"}, {"cov_type": "robust"}),
    "cluster": (
        f"{ARMS} + cluster(family)",
        {"distribution": "loglogistic"},
        {"cov_kwds": {"correction": "CR0"}},
    ),
}
PROFILES = pd.DataFrame({"age": [50, 70], "stage": ["II", "III"]})


def rows(table=PATIENTS, **settings):
    return fs.ClientPartition.from_frame(table, by="hospital", **settings)


def fitted(formula, table=PATIENTS, arguments=None, **settings):
    return fs.FederatedAFT.from_formula(formula, rows(table), **settings).fit(**arguments or {})


@pytest.mark.parametrize(
    ("case", "masked"), [*((case, True) for case in CASES), *((case, False) for case in [*CASES][::3])]
)
def test_estimates_are_those_of_survreg(case, masked):
    formula, settings, arguments = CASES[case]
    fit, expected = fitted(formula, arguments=arguments | {"masked": masked}, **settings), R[case]
    assert fit.converged
    assert_allclose(fit.params, expected["params"], rtol=1e-7, atol=1e-8)
    assert_allclose(fit.bse, expected["se"], rtol=1e-6)
    assert_allclose([fit.llnull, fit.llf], expected["loglik"], rtol=1e-10)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_quantiles_and_their_errors_are_those_of_survreg(name):
    fit = fitted(STAGES, distribution=name)
    predicted = [fit.get_prediction(PROFILES, p=p) for p in (0.25, 0.5)]
    log_time = np.array([one.linear for one in predicted]).T.ravel()
    assert_allclose(log_time, R[name]["log_time"], rtol=1e-7)
    error = np.array([one.se_linear for one in predicted]).T.ravel()
    assert_allclose(error, R[name]["log_time_se"], rtol=1e-6)
    found = predicted[1].summary_frame()
    assert_allclose(fit.predict(PROFILES), found["mean"])
    # A survival curve has the probability 0.5 at the median, with the errors of its logarithm over sigma.
    for place, row in found.iterrows():
        [at] = fit.survival_function(PROFILES.loc[[place]], [row["mean"]]).tidy().itertuples()
        assert_allclose(at.survival, 0.5, rtol=1e-9)
        z = LIFETIMES[name].quantile(0.5)
        half = 1.959963984540054 * row["mean_se"] / row["mean"] / fit.scale
        ends = LIFETIMES[name].survival(np.array([z + half, z - half]))[0]
        assert_allclose([at.conf_low, at.conf_high], ends, rtol=1e-6)


def test_own_fits_are_those_of_the_sites():
    fit = fitted(ARMS)
    assert_allclose(fit.site_estimates.loc["Ulm"], R["ulm"]["params"], rtol=1e-6, atol=1e-7)


def pooled(name, X, start, stop, died):
    """Maximize the likelihood of rows that enter late by scipy."""
    terms, fixed = LIFETIMES[name].terms, LIFETIMES[name].fixed

    def cost(theta):
        sigma = 1.0 if fixed else np.exp(theta[-1])
        eta = X @ theta[: X.shape[1]]
        value = terms((np.log(stop) - eta) / sigma, died)[0] - died * np.log(sigma * stop)
        late = start > 0
        before = terms((np.log(start[late]) - eta[late]) / sigma, np.zeros(late.sum()))[0]
        return -value.sum() + before.sum()

    first = np.zeros(X.shape[1] + (not fixed))
    first[0] = np.log(stop.mean())
    found = scipy.optimize.minimize(cost, first, method="BFGS", options={"gtol": 1e-7})
    polished = scipy.optimize.minimize(
        cost, found.x, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 20_000}
    )
    return polished.x, -polished.fun


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_late_entry_is_a_condition_of_the_likelihood(name):
    fit = fitted("Surv(entry, months, died) ~ C(arm)", distribution=name)
    X = np.column_stack([np.ones(len(PATIENTS)), PATIENTS["arm"] == "surgery"])
    columns = (PATIENTS[column].to_numpy(dtype=float) for column in ("entry", "months", "died"))
    theta, llf = pooled(name, X, *columns)
    assert_allclose(fit.params, theta, atol=1e-5)
    assert_allclose(fit.llf, llf, rtol=1e-10)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_derivatives_of_survival_and_of_the_median(name):
    J, at = 1 if LIFETIMES[name].fixed else 2, np.array([2.0, -0.3])

    def jet(theta, times):
        return time_jet(LIFETIMES[name], theta[:J, None], np.array([theta[0]]), times)

    for times in ((), (3.0, 9.0)):
        _, first, second = jet(at, times)
        for k in range(J):
            move = 1e-5 * np.eye(2)[k]
            (above, up, _), (below, down, _) = jet(at + move, times), jet(at - move, times)
            assert_allclose((above - below) / 2e-5, first[..., k], rtol=1e-6)
            assert_allclose((up - down) / 2e-5, second[..., k], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_terms_and_means_of_a_distribution(name):
    lifetimes, z = LIFETIMES[name], np.array([-3.0, -0.4, 0.0, 1.2, 2.5])
    for died in (0.0, 1.0):
        event = np.full(5, died)
        _, first, second = lifetimes.terms(z, event)
        up, down = (lifetimes.terms(z + move, event) for move in (1e-5, -1e-5))
        assert_allclose((up[0] - down[0]) / 2e-5, first, rtol=1e-7, atol=1e-9)
        assert_allclose((up[1] - down[1]) / 2e-5, second, rtol=1e-6, atol=1e-9)
    # The density is minus the slope of the survival function; means are its integrals.
    density = np.exp(lifetimes.terms(z, np.ones(5))[0])
    assert_allclose(-lifetimes.survival(z)[1], density, rtol=1e-9)
    grid = np.linspace(-40.0, 40.0, 400_001)
    for sigma in (0.3, 0.6):
        mean = np.trapezoid(np.exp(sigma * grid + lifetimes.terms(grid, np.ones_like(grid))[0]), grid)
        log, slope = lifetimes.mean(sigma)
        assert_allclose(np.exp(log), mean, rtol=1e-6)
        assert_allclose(
            (lifetimes.mean(sigma + 1e-6)[0] - lifetimes.mean(sigma - 1e-6)[0]) / 2e-6, slope, rtol=1e-6
        )
    assert_allclose(lifetimes.survival(np.array([lifetimes.quantile(0.3)]))[0], 0.7)


def test_a_log_logistic_time_with_a_large_sigma_has_no_mean():
    assert LIFETIMES["loglogistic"].mean(1.0)[0] == np.inf
    assert np.isfinite(LIFETIMES["loglogistic"].mean(0.999)[0])


def test_hazard_ratios_are_those_of_weibull_regression():
    fit, numerical = fitted(STAGES), []
    ratios, cov = fit.hazard_ratios(), fit.cov_params().to_numpy()
    theta = fit.params.to_numpy()
    for k in range(len(theta)):
        move = 1e-6 * np.eye(len(theta))[k]
        up, down = (-at[1:4] / np.exp(at[-1]) for at in (theta + move, theta - move))
        numerical.append((up - down) / 2e-6)
    error = np.sqrt(np.diag(np.transpose(numerical) @ cov @ numerical))
    assert_allclose(np.log(ratios["hazard_ratio"]), -theta[1:4] / fit.scale)
    assert_allclose(
        np.log(ratios["conf_high"] / ratios["hazard_ratio"]), 1.959963984540054 * error, rtol=1e-7
    )
    assert ratios.index.tolist() == fit.ratios().index.tolist() == list(fit.params.index[1:4])
    with pytest.raises(NotAvailableError, match="not proportional"):
        fitted(STAGES, distribution="lognormal").hazard_ratios()


@pytest.mark.parametrize("name", ["exponential", "lognormal"])
def test_averages_over_rows_are_those_of_all_predictions(name):
    fit = fitted(f"{ARMS} + offset(shift)", distribution=name, freq_weights="weight")
    weight, table = PATIENTS["weight"].to_numpy(), fit.predictions(times=[12, 24]).tidy()
    curves = fit.survival_function(PATIENTS, [12, 24]).wide().to_numpy()
    assert_allclose(table["estimate"], curves @ weight / weight.sum())
    arms = [PATIENTS.assign(arm=arm) for arm in ("surgery", "drugs")]
    high, low = (fit.survival_function(one, [12, 24]).wide().to_numpy() @ weight for one in arms)
    found = fit.comparisons("arm", times=[12, 24]).tidy()
    assert_allclose(found["estimate"], (high - low) / weight.sum())
    medians = fit.predict(PATIENTS) @ weight / weight.sum()
    assert_allclose(fit.predictions().tidy()["estimate"], medians)
    ratio = fit.comparisons("arm", at={"shift": 0.0}, comparison="lnratio", exponentiate=True).tidy()
    assert_allclose(ratio["estimate"], fit.ratios().loc["C(arm)[T.surgery]", "time_ratio"])


def test_errors_of_an_average_are_those_of_the_delta_method():
    fit, slopes = fitted(ARMS), []
    theta, table = fit.params.to_numpy(), PATIENTS
    X = np.column_stack([np.ones(len(table)), table["age"], table["arm"] == "surgery"])

    def mean(at):
        return np.exp(-np.exp((np.log(24.0) - X @ at[:3]) / np.exp(at[3]))).mean()

    for k in range(4):
        move = 1e-6 * np.eye(4)[k]
        slopes.append((mean(theta + move) - mean(theta - move)) / 2e-6)
    found = fit.predictions(times=[24]).tidy()
    assert_allclose(found["estimate"], mean(theta))
    assert_allclose(found["std_error"], np.sqrt(slopes @ fit.cov_params().to_numpy() @ slopes), rtol=1e-6)


def test_curves_by_default_fall_to_a_twentieth():
    curves = fitted(ARMS).survival_function(PATIENTS.loc[[0, 9], ["age", "arm"]])
    wide = curves.wide()
    assert wide.shape == (100, 2) and (np.diff(wide, axis=0) < 0.0).all()
    assert_allclose(wide.iloc[-1].max(), 0.05, rtol=1e-9)
    assert curves.glance().iloc[0].tolist()[:2] == [2, 100]


def test_rows_with_equal_labels_have_a_curve_each():
    people = PATIENTS.loc[[0, 9], ["age", "arm"]].set_axis(["arm", "arm"])
    for model in (fitted(ARMS), fs.FederatedCox.from_formula(ARMS, rows(PATIENTS)).fit()):
        found = model.survival_function(people, [12, 24, 36])
        axes = found.plot()
        assert found.wide().shape == (3, 2) and len(axes.get_lines()) == 2
        plt.close(axes.figure)
        np.testing.assert_array_equal(found.wide().to_numpy().T.ravel(), found.tidy()["survival"])
        assert "2 rows at 3 times" in repr(found)


@pytest.mark.parametrize("wrong", [[24, 12], [0, 12], "soon", [], [np.nan], [[12, 24]]])
def test_wrong_times_are_named_as_times(wrong):
    person = PATIENTS.loc[[0], ["age", "arm"]]
    cox = fs.FederatedCox.from_formula(ARMS, rows(PATIENTS)).fit()
    for model in (fitted(ARMS), cox):
        with pytest.raises(ModelError, match=r"^times: expected .*times"):
            model.survival_function(person, wrong)
        with pytest.raises(ModelError, match=r"times: expected .*times"):
            model.predictions(person, times=wrong)
    with pytest.raises(ModelError, match="times: expected"):
        cox.evaluate(times=wrong)


@pytest.mark.parametrize("sigma", [1e-3, 8.0])
@pytest.mark.parametrize("name", ["weibull", "lognormal", "loglogistic"])
def test_the_iteration_finds_scales_that_are_far_from_one(name, sigma):
    rng = np.random.default_rng(5)
    table = PATIENTS.assign(x=rng.normal(size=len(PATIENTS)))
    z = np.sort(rng.uniform(size=len(table)))
    noise = np.array([LIFETIMES[name].quantile(p) for p in rng.permutation(z)])
    table["months"] = np.exp(3.0 + sigma * (0.5 * table["x"] + noise))
    fit = fitted("Surv(months, died) ~ x", table.assign(died=1), distribution=name)
    assert fit.converged and fit.iterations < 20
    assert_allclose([fit.scale / sigma, fit.params["x"] / sigma], [1.0, 0.5], atol=0.15)


def test_a_level_without_events_is_named():
    table = PATIENTS.assign(died=np.where(PATIENTS["stage"] == "III", 0, PATIENTS["died"]))
    for name in DISTRIBUTIONS:
        with pytest.raises(EstimationError, match=r"estimate of 'C\(stage\)\[T.III\]' would be infinite"):
            fitted(STAGES, table, distribution=name)


def test_data_without_a_fit_are_named():
    with pytest.raises(EstimationError, match="no events at any site"):
        fitted(STAGES, PATIENTS.assign(died=0))
    with pytest.raises(EstimationError, match="collinear"):
        fitted("Surv(months, died) ~ age + again", PATIENTS.assign(again=PATIENTS["age"] * 2.0 + 1.0))
    with pytest.raises(DesignError, match="no whole numbers"):
        fitted(STAGES, PATIENTS.assign(w=1.5), freq_weights="w")
    table = PATIENTS.assign(died=np.where(PATIENTS["hospital"] == "Ulm", 0, PATIENTS["died"]))
    fit = fitted(STAGES, table)
    assert "Ulm (no events)" in " ".join(fit.notes) and fit.site_estimates.loc["Ulm"].isna().all()


def test_wrong_arguments_are_refused():
    for formula, settings, error, text in (
        (f"{ARMS} + strata(ward)", {}, FormulaError, r"Give levels different constants with C\(ward\)"),
        ("Surv(months, died) ~ age - 1", {}, FormulaError, "always part of this model"),
        ("months ~ age", {}, FormulaError, "needs times and events"),
        (ARMS, {"distribution": "gamma"}, ModelError, "distribution"),
        (ARMS, {"freq_weights": "weight", "var_weights": "weight"}, ModelError, "once"),
    ):
        with pytest.raises(error, match=text):
            fs.FederatedAFT.from_formula(formula, rows(), **settings)
    model = fs.FederatedAFT.from_formula(ARMS, rows())
    with pytest.raises(ModelError, match="needs the clusters in the formula"):
        model.fit(cov_type="cluster")
    with pytest.raises(ModelError, match="ascend"):
        model.fit().survival_function(PATIENTS.head(1), [12, 6])
    with pytest.raises(ModelError, match="without missing values"):
        model.fit().survival_function(PATIENTS.head(1).assign(age=np.nan), [12])


@pytest.mark.parametrize(
    "request_",
    [
        AFTRequest("gamma"),
        TimesRequest((), (0.0,)),
        TimesRequest((), (np.inf,)),
        TimesRequest((), tuple(range(1, 102))),
    ],
)
def test_a_site_refuses_unknown_distributions_and_times(request_):
    with pytest.raises(MessageError, match="expected"):
        request_.check()


def test_survival_is_averaged_at_up_to_a_hundred_times():
    fit = fitted(ARMS)
    assert len(fit.predictions(times=range(1, 101)).tidy()) == 100
    with pytest.raises(ModelError, match="up to 100 times, received 101"):
        fit.predictions(times=range(1, 102))
    assert len(fit.predictions(at="mean", times=range(1, 102)).tidy()) == 101


def test_a_site_refuses_rows_without_times():
    model = fs.GLORE.from_formula("died ~ age", rows())
    session = model._open_session("glm", False)
    site = model.partition.sites["Ulm"]
    for request in session.opening():
        if request.site == "Ulm":
            site.answer(pack_request(request))
    text = '{"distribution": "weibull", "clusters": []}'
    with pytest.raises(MessageError, match="opened no times"):
        site.answer(pack_request(Request("Ulm", "aft", "start", {}, session.session, text)))


def test_owners_minimum_of_events_holds():
    model = fs.FederatedAFT.from_formula(ARMS, rows(policy=fs.Policy(min_events=400)))
    with pytest.raises(PolicyError, match="minimum events"):
        model.fit()


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_intervals_cover(name):
    """Of 400 intervals of 95 %, 93 to 97 % cover but for chance (a standard error of 1.1 %)."""
    rng, hits, repeats = np.random.default_rng(8), 0, 400
    allow = fs.Policy(min_events=0, min_level_count=1, min_count=1)
    for _ in range(repeats):
        n = 400
        table = pd.DataFrame({"site": np.arange(n) % 4, "x": rng.normal(size=n)})
        sigma = 1.0 if LIFETIMES[name].fixed else 0.7
        noise = np.array([LIFETIMES[name].quantile(p) for p in rng.uniform(size=n)])
        time = np.exp(2.0 + 0.5 * table["x"] + sigma * noise)
        end = rng.uniform(2.0, 20.0, n)
        table = table.assign(
            t=np.minimum(time, end), d=(time <= end).astype(int), site="S" + table["site"].astype(str)
        )
        partition = fs.ClientPartition.from_frame(table, by="site", policy=allow)
        model = fs.FederatedAFT.from_formula("Surv(t, d) ~ x", partition, distribution=name)
        low, high = model.fit(local=False, masked=False).conf_int().loc["x"]
        hits += low < 0.5 < high
    assert 0.92 < hits / repeats < 0.98
