"""Effects of a treatment on times are those of R's survival on the pooled table, with stacked errors."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import effect_simulation as simulation
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import (
    EstimationError,
    FormulaError,
    MessageError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.models.descriptive.protocol import with_ends_apart
from fedstat.models.horizontal.session import RowsSession
from fedstat.models.survival_effect import steps
from fedstat.models.survival_effect.estimates import (
    WeightedCells,
    cell_influences,
    curve_functionals,
    ends_of,
    hazard_ratios,
    remaining_times,
)
from fedstat.models.treatment.results import e_value

REFERENCE = Path(__file__).parents[2] / "reference" / "survival"
# At the ends of a grid of quarters, as in the script of the reference.
PATIENTS = runpy.run_path(str(REFERENCE / "patients.py"))["patients"]().assign(
    months=lambda t: 3 * t["quarters"]
)
R = json.loads((REFERENCE / "treatment.json").read_text())
ALLOW = fs.Policy(
    min_events=0, min_level_count=1, min_count=1, max_parameters=1e9, max_share=1.0, max_column_sums="any"
)
QUARTERS = np.arange(3.0, 37.0, 3.0)
CLOSE = 1e-8
TREATMENT = "arm ~ age + C(stage)"
CAUSES = "Surv(months, C(cause, levels=['none', 'death', 'relapse'])) ~ 1"


def rows(table=PATIENTS, **settings):
    return fs.ClientPartition.from_frame(table, by="hospital", **settings)


def model(formula="Surv(months, died) ~ 1", table=PATIENTS, policy=ALLOW, **settings):
    return fs.SurvivalEffect.from_formula(
        formula, rows(table, policy=policy), **{"treatment": TREATMENT} | settings
    )


def require_equal(frame, reference):
    columns = {"estimate": "estimate", "std_error": "stacked", "known_weights": "robust"}
    for ours, theirs in columns.items():
        assert_allclose(frame[ours], reference[theirs], rtol=CLOSE, atol=1e-12)


def by_arm(frame, causes=("",)):
    arms = ["drugs", "surgery", "surgery - drugs"]
    return pd.concat([frame[(frame["arm"] == arm) & (frame["cause"] == c)] for arm in arms for c in causes])


# ---- references ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimand", ["ATE", "ATT", "ATC", "ATO"])
def test_hazard_ratios_are_those_of_coxph(estimand):
    effect = model(estimand=estimand)
    for ties, name in (("efron", "hazard"), ("breslow", "breslow")):
        found = effect.fit(ties=ties).tidy()
        require_equal(found, {key: [value] for key, value in R[estimand][name].items()})
    common = effect.fit(3, until=60, baseline="common").tidy().tail(1)
    require_equal(common, {key: [value] for key, value in R[estimand]["common"].items()})


@pytest.mark.parametrize("estimand", ["ATE", "ATT", "ATC", "ATO"])
def test_curves_and_restricted_means_are_those_of_survfit(estimand):
    fit = model(estimand=estimand).fit(3, until=36, times=QUARTERS)
    found = fit.tidy()
    require_equal(by_arm(found[found["quantity"] == "survival"]), R[estimand]["survival"])
    require_equal(found[found["quantity"] == "restricted mean"], R[estimand]["rmean"])
    curve = fit.curves().query("arm == 'surgery'")["survival"]
    assert_allclose(curve, R[estimand]["survival"]["estimate"][12:24], rtol=CLOSE)


@pytest.mark.parametrize("estimand", ["ATE", "ATO"])
def test_incidences_are_those_of_survfit(estimand):
    found = model(CAUSES, estimand=estimand).fit(3, until=36, times=QUARTERS).tidy()
    incidence = by_arm(found[found["quantity"] == "incidence"], ("death", "relapse"))
    require_equal(incidence, R[estimand]["incidence"])


def test_without_columns_curves_are_those_of_kaplan_meier():
    """Intervals with few rows are merged alike, and events within them are in random order."""
    # Sums of weights need as many rows of a cell as sums; the minimum of counts is the same here.
    partition = rows(fs.datasets.make_survival(), policy=fs.Policy(min_count=3))
    plain = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(1, until=48)
    effect = fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", partition, treatment="arm ~ 1")
    fit = effect.fit(1, until=48)
    assert_allclose(fit.times, plain.times)
    assert len(fit.times) < 48
    assert_allclose(fit.curves()["survival"], plain.tidy()["survival"], rtol=1e-12)
    means, theirs = fit.restricted_means().head(2), plain.restricted_mean()
    assert_allclose(means["estimate"], theirs["estimate"], rtol=1e-12)
    # Greenwood's errors suppose proportional hazards of events and censoring within an interval.
    assert_allclose(means["std_error"], theirs["std_error"], rtol=5e-3)


def numerical(function, weights, h=1e-4):
    """Derivatives of a function by every sum of weights that is not zero."""
    found = {}
    for place in zip(*np.nonzero(weights), strict=True):
        d = np.zeros_like(weights)
        d[place] = h
        near, far = (function(weights + k * d) - function(weights - k * d) for k in (1.0, 2.0))
        found[place] = (8.0 * near - far) / (12.0 * h)
    return found


@pytest.mark.parametrize("ties", ["efron", "breslow", None])
@pytest.mark.parametrize("apart", [(1, 1, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("arms, causes", [(2, 1), (3, 2)])
def test_influences_are_numerical_derivatives(apart, arms, causes, ties):
    rng = np.random.default_rng(0)
    ends = np.array([1.0, 2.0, 3.0, 5.0])
    edges = with_ends_apart(ends, np.array(apart, dtype=bool))
    assert_allclose(ends_of(edges), ends)
    weights = rng.uniform(1.0, 3.0, (arms, len(edges) + 1, 1 + causes))
    counts = rng.integers(3, 9, weights.shape).astype(float)
    weights[0, 1] = 0.0
    if ties is None:
        weights[1, -1] = 0.0  # all rows of an arm leave in the last interval
    functionals = curve_functionals(np.array([1, 3]), np.array([4.0, 3.0, 1.5, 0.0]))

    def estimates(w):
        cells = WeightedCells(edges, w, counts)
        curves = (cells.incidence @ functionals.T).ravel()
        return curves if ties is None else np.append(curves, hazard_ratios(cells, ties)[0])

    cells = WeightedCells(edges, weights, counts)
    assert_allclose(1.0 - cells.incidence.sum(axis=1), cells.survival, rtol=1e-12)
    influences = cell_influences(cells, functionals, ties)
    for place, derivative in numerical(estimates, weights).items():
        assert_allclose(influences[place], derivative, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("sites, masked", [(1, None), (2, None), (4, False)])
def test_curves_need_more_rows_of_a_cell_where_sums_are_not_masked(sites, masked):
    table = fs.datasets.make_survival()
    table["hospital"] = [f"S{k}" for k in np.arange(len(table)) % sites]
    effect = fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", rows(table), treatment="arm ~ age")
    fit = effect.fit(3, until=48, masked=masked)
    assert 1 < len(fit.times) < 16
    counts = fit.curves()["n_event"]
    assert ((counts == 0) | (counts >= 5)).all()


def test_areas_spread_the_events_of_merged_intervals():
    ends, requested = np.array([2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])
    assert_allclose(remaining_times(ends, requested, 3.0), [1.5, 0.0])


# ---- sites -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", [1, 3, 25])
def test_it_is_the_pooled_estimate_for_any_number_of_sites(sites):
    table = simulation.draw(2000, 5, np.random.default_rng(3))
    named = table.assign(hospital=[f"S{k:02}" for k in np.arange(len(table)) % sites], arm=table["t"])
    settings = {"treatment": "arm ~ a + b", "formula": "Surv(time, event) ~ strata(site)"}
    effect = model(table=named, **settings)
    pooled = simulation.Propensity.fit(
        table["t"].to_numpy(), np.column_stack([np.ones(2000), table[["a", "b"]]])
    )
    found = effect.fit().tidy().iloc[-1]
    # The pooled risk sets are those of a site and stratum.
    own = table.assign(site=table["site"] + 100 * (np.arange(len(table)) % sites))
    ratio, influences = simulation.hazard_influences(pooled, own)
    assert_allclose(
        [found["estimate"], found["std_error"]], [ratio, np.linalg.norm(pooled.stacked(influences))]
    )
    curves = model(table=named, treatment="arm ~ a + b", formula="Surv(time, event) ~ 1")
    mean = curves.fit(0.25, until=3).restricted_means().loc["1.0 - 0.0"]
    value, influences = simulation.restricted_influences(pooled, table)
    assert_allclose(
        [mean["estimate"], mean["std_error"]], [value, np.linalg.norm(pooled.stacked(influences))]
    )


def test_models_of_the_sites_own_are_one_model_with_products():
    table = PATIENTS.assign(place=PATIENTS["hospital"])
    own = model(table=table, propensity="sites").fit(3, until=36)
    products = model(table=table, treatment="arm ~ (age + C(stage)) * C(place)").fit(3, until=36)
    assert_allclose(own.tidy()["estimate"], products.tidy()["estimate"], rtol=1e-7)
    assert_allclose(own.tidy()["std_error"], products.tidy()["std_error"], rtol=1e-6)


def test_three_arms_are_compared_with_the_first():
    rng = np.random.default_rng(5)
    table = PATIENTS.assign(dose=rng.choice(["a", "b", "c"], len(PATIENTS)))
    fit = model(table=table, treatment="dose ~ age").fit(3, until=36, times=[18, 36])
    assert fit.hazard_ratios().index.tolist() == ["b", "c"]
    assert len(fit.restricted_means()) == 5
    assert_allclose(fit.weights["weight"], len(table), rtol=0.02)


# ---- results ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fit():
    return model(CAUSES, policy=None).fit(3, until=36)


def test_the_parts_of_the_results_agree(fit):
    found = fit.tidy().set_index(["quantity", "arm", "cause", "time"])["estimate"].sort_index()
    last = found.loc["survival", "drugs", ""].index.max()
    of = found.loc["survival", "drugs", "", last] + sum(
        found.loc["incidence", "drugs", cause, last] for cause in fit.causes
    )
    assert_allclose(of, 1.0)
    ratio = fit.hazard_ratios().loc["surgery"]
    assert_allclose(np.log(ratio["hazard_ratio"]), found.loc["log hazard ratio"].iloc[0])
    assert ratio["conf_low"] < ratio["hazard_ratio"] < ratio["conf_high"] < 1.0 < ratio["e_value_limit"]
    assert ratio["e_value_limit"] < ratio["e_value"]
    assert fit.plot_curves(cause="death").get_ylabel() == "cumulative incidence"
    with pytest.raises(ModelError, match="cause"):
        fit.plot_curves(cause="none")


def test_saved_results_are_the_same(fit, tmp_path):
    fit.save(tmp_path / "effect.fed")
    loaded = fs.load(tmp_path / "effect.fed")
    pd.testing.assert_frame_equal(loaded.tidy(), fit.tidy())
    assert loaded.summary().as_text() == fit.summary().as_text()


def test_e_values_of_a_published_example():
    """VanderWeele and Ding (2017): a hazard ratio of 0.56 of a rare outcome has the E-value 2.97."""

    assert_allclose(e_value(np.array([0.56])), 2.97, atol=5e-3)


RNG = np.random.default_rng(5)
FEW = pd.DataFrame(
    {"a": RNG.normal(size=240), "hospital": np.arange(240) % 3, "ward": np.arange(240) // 3 % 2}
)
FEW["arm"] = (RNG.random(240) < 1.0 / (1.0 + np.exp(-0.5 * FEW["a"]))).astype(int)
FEW["time"] = np.minimum(np.ceil(RNG.exponential(np.exp(1.2 + 0.3 * FEW["a"] + 0.3 * FEW["arm"]))), 13.0)
FEW["event"], FEW["w"] = 1, RNG.uniform(0.5, 2.0, 240)
GRID = {"grid": [2.0, 4.0, 8.0], "times": [4.0, 8.0]}


@pytest.mark.parametrize("baseline", ["site", "common"])
@pytest.mark.parametrize("given", [{}, {"target": "1"}])
def test_errors_of_clusters_are_those_of_an_infinitesimal_jackknife(given, baseline):
    """Each cluster has a factor of its equations, by which estimates are derived; squares are added."""

    def fit(weights, **more):
        table = FEW.assign(w=weights, hospital=FEW["hospital"].astype(str))
        one = model("Surv(time, event) ~ 1", table, treatment="arm ~ a", weights="w", **given)
        return one.fit(baseline=baseline, masked=False, tol=1e-12, **GRID, **more)

    found = fit(FEW["w"], cov_type="cluster", cov_kwds={"groups": "ward"}).tidy()
    cluster = FEW.groupby(["hospital", "ward"]).ngroup()
    G, size, slopes = cluster.max() + 1, 1e-4, []
    for g in range(G):
        ends = [fit(FEW["w"] * (1.0 + move * (cluster == g))).tidy()["estimate"] for move in (size, -size)]
        slopes.append((ends[0] - ends[1]) / (2.0 * size))
    expected = np.sqrt((np.array(slopes) ** 2).sum(axis=0) * G / (G - 1))
    assert_allclose(found["std_error"], expected, rtol=2e-5, atol=1e-9)


def test_curves_of_a_site_have_the_weights_of_membership_and_sampling():
    table = FEW.assign(hospital=FEW["hospital"].astype(str))
    one = model("Surv(time, event) ~ 1", table, treatment="arm ~ a", weights="w", target="1")
    found = one.fit(**GRID).tidy().query("quantity == 'survival'").set_index(["arm", "time"])["estimate"]
    Z, w = np.column_stack([np.ones(len(FEW)), FEW["a"]]), FEW["w"].to_numpy()
    t, there = FEW["arm"].to_numpy(), (FEW["hospital"] == 1).to_numpy(float)
    e, p = (1.0 / (1.0 + np.exp(-Z @ simulation.logistic(Z, one, w))) for one in (t, there))
    whole = w * p / np.where(t == 1, e, 1.0 - e)
    for arm in (0, 1):
        for time in GRID["times"]:
            inside = t == arm
            expected = whole[inside & (FEW["time"] > time)].sum() / whole[inside].sum()
            assert_allclose(found[str(arm), time], expected, rtol=1e-8)


def test_poor_overlap_comes_first_in_the_summary():
    rng = np.random.default_rng(8)
    n = 900
    x = rng.normal(size=n)
    table = pd.DataFrame({"x": x, "hospital": np.arange(n) % 3, "time": np.ceil(rng.exponential(10.0, n))})
    table["arm"], table["event"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-2.6 * x))).astype(int), 1
    settings = {"treatment": "arm ~ x", "formula": "Surv(time, event) ~ 1", "table": table}
    text = model(**settings).fit().summary().as_text()
    assert text.splitlines()[0].startswith("*** POOR OVERLAP: few rows of '0'")
    assert "POOR OVERLAP" not in model(**settings, estimand="ATO").fit().summary().as_text()


def test_curves_need_a_grid():
    fit = model().fit()
    for call in (fit.curves, fit.restricted_means, fit.plot_curves):
        with pytest.raises(NotAvailableError, match="grid"):
            call()


# ---- refusals --------------------------------------------------------------------------------------------


def test_what_has_no_place_is_named():
    with pytest.raises(FormulaError, match="weights adjust"):
        model("Surv(months, died) ~ age")
    with pytest.raises(FormulaError, match="begins at time 0"):
        model("Surv(entry, months, died) ~ 1", PATIENTS.assign(entry=0.0))
    with pytest.raises(FormulaError, match="SurvivalEffect"):
        fs.TreatmentEffect.from_formula("Surv(months, died) ~ 1", rows(), treatment=TREATMENT)
    effect = model("Surv(months, died) ~ strata(ward)")
    for arguments in (
        {"baseline": "common"},
        {"baseline": "common", "grid": 3, "until": 36},
        {"times": [12]},
        {"grid": 3, "until": 36, "times": [48]},
        {"grid": 3, "until": 36, "times": np.arange(1.0, 14.0)},
    ):
        with pytest.raises(ModelError):
            effect.fit(**arguments)


def test_an_arm_without_events_has_no_hazard_ratio():
    table = PATIENTS.assign(died=np.where(PATIENTS["arm"] == "surgery", 0, PATIENTS["died"]))
    for arguments in ({}, {"grid": 3, "until": 36, "baseline": "common"}):
        with pytest.raises(EstimationError, match="no events"):
            model(table=table).fit(**arguments)


@pytest.mark.parametrize("forged", ["weights", "counts"])
def test_a_site_refuses_sums_that_are_not_those_of_all_sites(forged, monkeypatch):
    """With sums of a few cells alone, influences would belong to the rows of these cells."""
    original = RowsSession.request_all

    def sent(session, step, arrays, text=""):
        if step == "sum_influences":
            one_interval = np.zeros_like(arrays[forged])
            one_interval[:, 2] = arrays[forged][:, 2]
            arrays = {**arrays, forged: one_interval}
        return original(session, step, arrays, text)

    monkeypatch.setattr(RowsSession, "request_all", sent)
    with pytest.raises(MessageError, match="not those of all sites"):
        model().fit(3, until=36)


def test_weights_of_cells_need_their_counts(monkeypatch):
    """Intervals that were not examined may have few rows."""
    none = SimpleNamespace(counted=np.zeros(0), rows=np.zeros(0))
    monkeypatch.setattr(steps, "cells_of", lambda state: none)
    with pytest.raises(MessageError, match="count_times"):
        model().fit(3, until=36)


def test_a_site_with_a_row_of_nearly_all_weight_refuses():
    """A row whose arm is nearly impossible would carry the sums of its arm."""
    rng = np.random.default_rng(2)
    n = 400
    table = pd.DataFrame({"x": rng.normal(size=n), "hospital": np.arange(n) % 2, "died": 1})
    table["time"] = 1.0 + np.arange(n) % 7
    table["arm"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-5.0 * table["x"]))).astype(int)
    table.loc[0, ["x", "arm"]] = -4.0, 1
    with pytest.raises(PolicyError, match="weight"):
        model("Surv(time, died) ~ 1", table, policy=None, treatment="arm ~ x").fit()


def test_two_fits_that_differ_by_one_person_are_refused():
    """The difference of all sums would be the person."""
    partition = rows()
    oldest = PATIENTS["age"].max()
    settings = {"treatment": TREATMENT}
    formula = "Surv(months, died) ~ 1"
    fs.SurvivalEffect.from_formula(formula, partition, **settings).fit(3, until=36)
    with pytest.raises(PolicyError):
        without = fs.SurvivalEffect.from_formula(formula, partition, subset=f"age < {oldest}", **settings)
        without.fit(3, until=36)


def test_the_same_fit_is_repeated_with_the_same_releases():
    partition = rows()
    fits = [
        fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", partition, treatment=TREATMENT).fit(
            3, until=36
        )
        for _ in range(2)
    ]
    pd.testing.assert_frame_equal(*(fit.tidy() for fit in fits), check_exact=True)


# ---- simulations -----------------------------------------------------------------------------------------


def test_the_pooled_arithmetic_has_the_nominal_coverage():
    """A small version of the table of the vignette: 150 tables of 1,000 rows."""
    found = simulation.coverage(1000, 3, 150)
    assert (np.abs(found["bias"]) < 3.5 * found["deviation"] / np.sqrt(150)).all()
    assert found["coverage"].between(0.89, 0.99).all()


@pytest.mark.slow
def test_coverage_by_number_of_rows_and_sites():
    found = simulation.coverage_table(1000)
    assert found["coverage"].between(0.925, 0.97).all()


@pytest.mark.slow
def test_augmented_weighting_needs_one_right_model():
    found = simulation.double_robustness(300)
    assert (found.loc[["both right", "propensity wrong", "outcome wrong"], "bias"].abs() < 0.015).all()
    assert abs(found.loc["both wrong", "bias"]) > 0.1


@pytest.mark.slow
def test_stacked_errors_keep_the_level_of_tests_and_robust_ones_are_conservative():
    found = simulation.federated_trials(1000)
    null, effect = (found.xs(ratio, level="hazard ratio") for ratio in (1.0, 0.4))
    assert null["rejected"].between(0.03, 0.075).all()
    assert (null["rejected, robust"] < 0.025).all()
    assert (effect["rejected"] > effect["rejected, robust"] + 0.05).all()


def test_a_strict_site_with_few_rows_releases_fewer_times():
    strict = {"table": fs.datasets.make_survival(), "policy": "strict"}
    with pytest.raises(PolicyError, match="Ulm"):
        model(**strict).fit(grid=6, until=36)
    found = model(**strict).fit(grid=6, until=36, times=[36]).tidy()
    assert set(found["time"].dropna()) == {36.0}
