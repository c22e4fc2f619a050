"""A common baseline hazard: coxph of the pooled table, on times that are rounded up to a grid."""

import json
import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import (
    ConsentError,
    ConvergenceWarning,
    EstimationError,
    MessageError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.federation.message import Request, pack_request
from fedstat.models.cox.interval_steps import IntervalRequest

REFERENCE = Path(__file__).parents[2] / "reference" / "survival"
PATIENTS = runpy.run_path(str(REFERENCE / "patients.py"))["patients"]()
R = json.loads((REFERENCE / "cox_common.json").read_text())
EXACT = fs.Policy(min_count=1, min_level_count=1, min_events=1, max_parameters=1e9)
CASES = {
    "plain": ("Surv(months, died) ~ age + C(stage)", {}, {}),
    "breslow": ("Surv(months, died) ~ age + C(stage)", {}, {"ties": "breslow"}),
    "robust": ("Surv(months, died) ~ age + C(arm)", {}, {"cov_type": "robust"}),
    "late": ("Surv(entry, months, died) ~ age + C(arm)", {}, {}),
    "weighted": (
        "Surv(months, died == 1) ~ age + C(arm) + offset(shift)",
        {"var_weights": "weight"},
        {"cov_type": "robust"},
    ),
    "strata": ("Surv(months, died) ~ age + C(arm) + strata(ward)", {}, {}),
    "cluster": (
        "Surv(months, died) ~ age + C(arm) + cluster(family)",
        {},
        {"cov_kwds": {"correction": "CR0"}},
    ),
    "site": ("Surv(months, died) ~ age + C(hospital)", {}, {}),
}
pytestmark = pytest.mark.filterwarnings("ignore:Sites released as many equations")


def model_of(formula, table=PATIENTS, policy=EXACT, **settings):
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy=policy)
    return fs.FederatedCox.from_formula(formula, partition, **settings)


def fitted(case, table=PATIENTS, policy=EXACT, **more):
    formula, settings, arguments = CASES[case]
    given = {"grid": 6, "until": 48} | arguments | more
    return model_of(formula, table, policy, **settings).fit(baseline="common", **given)


@pytest.mark.parametrize(
    ("case", "masked"),
    [*((case, True) for case in CASES), *((case, False) for case in ("weighted", "strata", "site"))],
)
def test_estimates_are_those_of_coxph_on_rounded_times(case, masked):
    fit, expected = fitted(case, masked=masked), R[case]
    assert fit.converged
    assert_allclose(fit.params, expected["coef"], rtol=1e-10)
    # The information is that before the last step, which is at most 1e-3 standard errors long.
    assert_allclose(fit.bse, expected["se"], rtol=2e-7)
    assert_allclose([fit.llnull, fit.llf], expected["loglik"], rtol=1e-12)
    assert fit.grid.tolist() == [6, 12, 18, 24, 30, 36, 42, 48]
    assert fit.global_tests().index.tolist() == ["likelihood ratio", "Wald"]


@pytest.mark.parametrize(
    ("case", "transform", "expected"),
    [("plain", "log", "log"), ("plain", "identity", "identity"), ("late", "log", "late")],
)
def test_proportional_hazards_as_cox_zph(case, transform, expected):
    found = fitted(case).test_proportional_hazards(transform)
    assert_allclose(found.tidy()["statistic"], R["zph"][expected], rtol=1e-7)


def test_predicted_survival_is_that_of_survfit(tmp_path):
    fit = fitted("robust", cov_type="nonrobust")
    profiles = pd.DataFrame({"age": [50.0, 70.0], "arm": ["drugs", "surgery"]}, index=["young", "old"])
    baseline = fit.baseline_hazard()
    found = baseline.survival(profiles)
    found = found[found["time"].isin([6, 12, 24, 48])]
    for name, theirs in (("survival", "survival"), ("conf_low", "low"), ("conf_high", "high")):
        assert_allclose(found[name].to_numpy().reshape(2, 4), R["survival"][theirs], rtol=1e-9)
    assert "all sites" in baseline.summary().as_text()
    fit.save(tmp_path / "cox.fed")
    again = fs.load(tmp_path / "cox.fed")
    assert again.summary().as_text() == fit.summary().as_text()
    # The fit has the baseline: no partition is needed.
    assert_allclose(again.baseline_hazard().hazard, baseline.hazard, rtol=0.0)
    with pytest.raises(ModelError, match="leave it out"):
        fit.baseline_hazard(3, until=48)


@cache
def of_all_sites():
    return fitted("plain", local=False)


@pytest.mark.parametrize("sites", [1, 3, 40])
def test_the_division_into_sites_has_no_influence(sites):
    whole = of_all_sites()
    place = np.arange(len(PATIENTS))[::-1] % sites
    again = fitted("plain", PATIENTS.assign(hospital=[f"S{k:02d}" for k in place]), local=False)
    assert_allclose(again.params, whole.params, rtol=1e-9)
    assert_allclose(again.bse, whole.bse, rtol=1e-5)
    assert_allclose(again.baseline_hazard().hazard, whole.baseline_hazard().hazard, rtol=1e-6)


def test_merged_intervals_are_a_coarser_grid():
    fit = fitted("robust", policy=None, ties="breslow", grid=1)
    assert 3 < len(fit.grid) < 48
    assert set(fit.grid) <= set(range(1, 49))
    assert fit.grid[-1] == 48
    exact = fitted("robust", ties="breslow", grid=fit.grid, until=None)
    assert_allclose(fit.params, exact.params, rtol=1e-12)
    assert_allclose(fit.bse, exact.bse, rtol=1e-12)
    found = fit.diagnostics().set_index("kind")
    assert len(fit.grid) < 20 and found.loc["merged_intervals", "severity"] == "critical"
    assert "*** CONFIDENCE INTERVALS MAY BE WRONG: the sites merged 48" in fit.summary().as_text()


def test_strict_policy_and_explain():
    strict = fs.Policy.strict(approval="auto", formulas="any")
    model = model_of("Surv(months, died) ~ age", policy=strict)
    arguments = {"baseline": "common", "grid": 6, "until": 48, "ties": "breslow", "cov_type": "robust"}
    expected = model.explain(**arguments)
    assert expected.passes
    fit = model.fit(**arguments)
    key = ["sender", "step", "array", "kind", "masked"]
    released = fit.ledger.releases()
    own = released[released["sender"] != "coordinator"]
    own = own[own["step"].isin(["flag_intervals", "start_intervals", "sum_intervals", "sum_products"])]
    assert set(own[key].apply(tuple, axis=1)) <= set(expected.tidy()[key].apply(tuple, axis=1))
    assert len(own)
    assert own["masked"].all()
    # Second moments never leave by interval.
    assert own.loc[own["array"] == "products", "shape"].tolist() == [(1, 1)] * int(
        (own["array"] == "products").sum()
    )


@pytest.mark.parametrize(("ties", "least"), [("efron", 100), ("breslow", 5)])
def test_explain_agrees_on_strata(ties, least):
    table = pd.concat([PATIENTS] * (1 if least == 5 else 16), ignore_index=True)
    model = model_of("Surv(months, died) ~ age + strata(ward)", table, fs.Policy(min_count=least))
    arguments = {"baseline": "common", "grid": 6, "until": 48, "ties": ties}
    found = model.explain(**arguments)
    assert found.passes
    assert "half of the rows have the event" in " ".join(str(found).split())
    fit = model.fit(**arguments)
    shapes = found.tidy().query("step == 'start_intervals' and array == 'events'")["shape"]
    released = fit.ledger.releases().query("step == 'start_intervals' and array == 'events'")["shape"]
    # Two strata at all sites, as in the table, and the intervals that the drawn rows leave.
    assert {shape[1] % 2 for shape in [*shapes, *released]} == {0}
    few = model_of("Surv(months, died) ~ age + strata(ward)", policy=fs.Policy(min_count=130))
    found = few.explain(**arguments)
    assert not found.passes
    with pytest.raises(PolicyError, match="minimum count"):
        few.fit(**arguments)


def test_comparison_of_sites_is_that_of_own_baselines():
    common = fitted("plain")
    site = model_of(CASES["plain"][0]).fit()
    assert_allclose(common.heterogeneity.joint.statistic, site.heterogeneity.joint.statistic, rtol=1e-9)
    assert_allclose(common.site_estimates, site.site_estimates, rtol=1e-12)
    assert common.concordance == site.concordance
    assert ") by site" in common.summary().as_text()


def test_a_column_that_is_constant_at_every_site_is_estimated_and_not_compared():
    for masked in (True, False):
        fit = fitted("site", masked=masked)
        assert "The sites are not compared" in " ".join(fit.summary().as_text().split())
        with pytest.raises(NotAvailableError, match="no heterogeneity"):
            _ = fit.heterogeneity


def test_owners_approve_a_common_baseline():
    owner = fs.Policy(approval="owner")
    model = model_of("Surv(months, died) ~ age + strata(ward)", policy=owner)

    def approved(call):
        with pytest.raises(ConsentError, match="pending"):
            call()
        for site in model.partition.sites.values():
            for digest in list(site.pending):
                site.approve(digest)
        return call()

    fit = approved(lambda: model.fit(baseline="common", grid=6, until=48, ties="breslow", cov_type="robust"))
    assert fit.converged
    assert len(approved(fit.test_proportional_hazards).tidy()) == 2
    model = model_of("Surv(months, died) ~ age", policy=owner)
    fit = approved(lambda: model.fit(baseline="common", grid=6, until=48, ties="breslow"))
    assert approved(lambda: fit.evaluate(times=[12, 24])).auc.shape == (2,)


def test_fits_are_compared_pooled_and_drawn():
    fits = {"own": model_of("Surv(months, died) ~ age").fit(), "one": fitted("late", policy=None, grid=12)}
    assert "one" in str(fs.compare(fits))
    assert len(fs.pool([fitted("robust"), fitted("cluster")]).params) == 2
    assert "hazard ratio" in fitted("plain").plot_forest("age").get_xlabel()


def test_arguments_without_a_meaning():
    model = model_of("Surv(months, died) ~ age")
    with pytest.raises(ModelError, match="needs the intervals of time"):
        model.fit(baseline="common")
    with pytest.raises(ModelError, match="belongs to baseline='common'"):
        model.fit(grid=6, until=48)
    with pytest.raises(ModelError, match="baseline"):
        model.fit(baseline="shared", grid=6, until=48)
    late = model_of("Surv(months, died) ~ age", PATIENTS.assign(months=PATIENTS["months"] + 100.0))
    with pytest.raises(EstimationError, match="no events up to the end of the grid, 48"):
        late.fit(baseline="common", grid=6, until=48)


def test_strata_without_events_and_monotone_likelihood():
    never = PATIENTS.assign(died=np.where(PATIENTS["ward"] == "east", 0, PATIENTS["died"]))
    fit = fitted("strata", never)
    rest = fitted("robust", never[never["ward"] == "west"], cov_type="nonrobust")
    assert_allclose(fit.params, rest.params, rtol=1e-8)
    assert "Strata without events do not count: east" in fit.summary().as_text()
    place = np.arange(len(PATIENTS)) % 2 == 0
    safe = PATIENTS.assign(safe=((PATIENTS["died"] == 0) & place).astype(float))
    with pytest.raises(EstimationError, match=r"monotone likelihood: .*'safe'"):
        model_of("Surv(months, died) ~ age + safe", safe).fit(baseline="common", grid=6, until=48)
    none = PATIENTS.assign(died=0)
    with pytest.raises(EstimationError, match="no events at any site"):
        model_of("Surv(months, died) ~ age", none).fit(baseline="common", grid=6, until=48)


def test_a_fit_that_is_cut_off_says_so(monkeypatch):
    monkeypatch.setattr("fedstat.models.cox.protocol.POINTS", 2)
    with pytest.warns(ConvergenceWarning, match="after 2 evaluations"):
        fit = fitted("breslow")
    assert not fit.converged
    assert "NO" in fit.summary().as_text()


def test_requests_out_of_turn_are_refused():
    model = model_of("Surv(months, died) ~ age")
    model.fit(baseline="common", grid=6, until=48)
    site = model.partition.sites["Bonn"]

    def ask(step, arrays, text=""):
        return site.answer(pack_request(Request("Bonn", "cox", step, arrays, model._session, text)))

    point = {"beta": np.zeros(1)}
    for gap in (0.1, 0.2):
        full = {"beta": np.full(1, gap), "full": np.array(False)}
        if gap == 0.1:
            ask("sum_intervals", full)
        else:
            with pytest.raises(MessageError, match="were announced for 4 coefficient vectors"):
                ask("sum_intervals", full)
    hazards = {"at_risk": np.full(8, -0.1), "tied": np.zeros(8), "g": np.ones(8)}
    with pytest.raises(MessageError, match="must be hazards"):
        ask("sum_products", point | hazards)
    with pytest.raises(MessageError, match="points, full"):
        IntervalRequest(points=2, full=3).check()
    edges = {"scale": np.ones(1), "shift": np.zeros(1), "edges": np.array([6.0, 6.0])}
    with pytest.raises((MessageError, PolicyError)):
        ask("start_intervals", edges, to_json(IntervalRequest()))
