"""Evaluation of predicted survival over sites: R's riskRegression, and numpy on pooled rows."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from survival_scores import scores

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError, PolicyError
from fedstat.inference.survival_evaluation import censoring_survival
from fedstat.models.horizontal.time_evaluation import BINS

REFERENCE = Path(__file__).parents[2] / "reference" / "survival"
PATIENTS = runpy.run_path(str(REFERENCE / "patients.py"))["patients"]()
PATIENTS["months"] = np.ceil(PATIENTS["months"])
R = json.loads((REFERENCE / "score.json").read_text())
EXACT = fs.Policy(min_count=1, min_level_count=1, min_events=1, max_parameters=1e9)
TIMES = R["times"]
pytestmark = pytest.mark.filterwarnings("ignore:Sites released as many equations")


def rows(table=PATIENTS, policy=EXACT):
    return fs.ClientPartition.from_frame(table, by="hospital", policy=policy)


@pytest.fixture(scope="module")
def fit():
    model = fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(stage)", rows())
    return model.fit(baseline="common", grid=1, until=float(PATIENTS["months"].max()))


def test_scores_are_those_of_riskregression(fit):
    found = fit.evaluate(times=TIMES)
    assert_allclose(found.brier, R["brier"], rtol=1e-9)
    assert_allclose(found.null_brier, R["null"], rtol=1e-12)
    # Ties within a bin of 0.05 of the linear predictor.
    assert_allclose(found.auc, R["auc"], atol=1e-3)
    assert found.own_rows
    assert fit.evaluation_ledger.rounds > 0


@pytest.mark.parametrize("sites", [1, 3, 40])
def test_scores_are_those_of_the_pooled_rows(fit, sites):
    held = PATIENTS.assign(hospital=[f"S{k % sites:02d}" for k in range(len(PATIENTS))]).sample(
        500, random_state=1
    )
    found = fit.evaluate(rows(held), times=TIMES)
    eta = fit.predict(held, which="linear").to_numpy()
    hazard = fit.baseline_hazard().hazard_at(TIMES)
    zero = fit.predict(held, which="linear", reference="zero").to_numpy()
    event, times = held["died"].to_numpy() == 1, held["months"].to_numpy()
    for k, t in enumerate(TIMES):
        survival = np.exp(-hazard[k] * np.exp(zero))
        expected = scores(times, event, np.searchsorted(BINS, eta), survival, t)
        assert_allclose([found.auc[k], found.brier[k], found.null_brier[k]], expected, rtol=1e-10)
    assert not found.own_rows
    # Over all rows, the observed probabilities are one minus Kaplan and Meier's estimate.
    for t in TIMES:
        groups = found.calibration(t, 5)
        total = groups["observed"] @ groups["rows"] / groups["rows"].sum()
        assert_allclose(total, found.tidy().set_index("time").loc[t, "observed"], rtol=1e-10)
    width = np.diff(TIMES)
    assert_allclose(found.integrated_brier, width @ (found.brier[1:] + found.brier[:-1]) / 2 / width.sum())


def test_default_policy_is_near(fit):
    exact = fit.evaluate(times=TIMES)
    near = fit.evaluate(rows(policy=None), times=TIMES)
    assert_allclose(near.auc, exact.auc, atol=0.02)
    assert_allclose(near.brier, exact.brier, atol=0.005)
    assert near.least == 5
    assert "merged with" in near.summary().as_text()


def test_a_baseline_for_each_site_gives_the_mean_prediction():
    fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(stage)", rows(policy=None)).fit()
    found = fit.evaluate(times=TIMES)
    table = found.tidy()
    assert_allclose(table["predicted"], table["observed"], atol=0.03)
    given = fit.evaluate(times=TIMES, baseline=fit.baseline_hazard(TIMES))
    assert_allclose(given.brier, found.brier, rtol=1e-12)
    assert (found.brier < found.null_brier).all()


def test_evaluation_of_a_file(fit, tmp_path):
    fit.save(tmp_path / "cox.fed")
    again = fs.load(tmp_path / "cox.fed")
    assert_allclose(again.evaluate(rows(), times=TIMES).brier, fit.evaluate(times=TIMES).brier, rtol=1e-12)
    with pytest.raises(NotAvailableError, match="has no partition"):
        again.evaluate(times=TIMES)


def test_strict_policy_evaluates_once(fit):
    strict = rows(policy=fs.Policy.strict(approval="auto", formulas="any", max_column_sums="any"))
    first = fit.evaluate(strict, times=TIMES)
    assert_allclose(fit.evaluate(strict, times=TIMES).brier, first.brier, rtol=1e-12)
    with pytest.raises(PolicyError, match="evaluation once"):
        fit.evaluate(strict, times=[12, 23])


def test_what_leaves_a_site_is_sums(fit):
    partition = rows(policy=None)
    fit.evaluate(partition, times=TIMES)
    released = fit.evaluation_ledger.releases()
    own = released[
        released["step"].isin(["count_times", "evaluate_times"]) & (released["sender"] != "coordinator")
    ]
    assert set(own["kind"]) == {"aggregate", "control"}
    assert own.loc[own["kind"] == "aggregate", "masked"].all()


def test_few_events_between_times_are_refused(fit):
    partition = rows(policy=None)
    with pytest.raises(PolicyError, match=r"minimum (count|rows per level)"):
        fit.evaluate(partition, times=[12, 55, 56])


def test_evaluations_without_a_meaning(fit):
    with pytest.raises(ModelError, match="ascend"):
        fit.evaluate(times=[24, 12])
    with pytest.raises(ModelError, match="ends at"):
        fit.evaluate(times=[12, 500])
    with pytest.raises(ModelError, match="was evaluated at 12, 24, 36"):
        fit.evaluate(times=TIMES).calibration(13)
    with pytest.raises(NotAvailableError, match="two times"):
        _ = fit.evaluate(times=[12]).integrated_brier
    longest = float(PATIENTS["months"].max())
    with pytest.raises(NotAvailableError, match="followed for longer"):
        fit.evaluate(times=[12, longest])
    late = fs.FederatedCox.from_formula("Surv(entry, months, died) ~ age", rows()).fit()
    strata = fs.FederatedCox.from_formula("Surv(months, died) ~ age + strata(ward)", rows()).fit()
    for other in (late, strata):
        with pytest.raises(NotAvailableError, match="without strata and without late entry"):
            other.evaluate(times=TIMES)


def test_censoring_counts_events_first():
    # Three rows at risk: an event and a censored row in the first interval, one row beyond.
    free = censoring_survival(np.array([1.0]), np.array([1.0]), 1.0)
    assert_allclose(free, [1.0, 0.5])
    assert_allclose(censoring_survival(np.zeros(2), np.zeros(2), 0.0), np.ones(3))


def test_plots(fit):
    found = fit.evaluate(times=TIMES)
    assert found.plot_auc().get_ylabel() == "AUC"
    assert found.plot_calibration(24, groups=5).get_ylabel() == "observed"


def test_the_hazard_between_two_ends_is_not_known():
    model = fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows(PATIENTS))
    fit = model.fit()
    coarse, fine = fit.baseline_hazard(12, until=48), fit.baseline_hazard([6, 12, 18, 48])
    with pytest.warns(
        fs.errors.FedstatWarning, match=r"18 \(between 12 and 24\), 30.5 \(between 24 and 36\)"
    ):
        found = coarse.hazard_at([0, 12, 18, 30.5, 48])
    assert np.isnan(found).tolist() == [False, False, True, True, False] and found[0] == 0.0
    assert found[1] < fine.hazard_at([18])[0] < coarse.hazard_at([24])[0]
    with pytest.raises(ModelError, match="not known at 18"):
        fit.evaluate(times=[12, 18], baseline=coarse)
    common = model.fit(baseline="common", grid=[12, 24, 36], ties="breslow")
    with pytest.raises(ModelError, match=r"not known at 18 .*Choose times among the ends"):
        common.evaluate(times=[12, 18])
