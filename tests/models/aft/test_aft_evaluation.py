"""Evaluation of survival that an accelerated failure time model predicts, and its concordance."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from survival_scores import scores

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError, PolicyError
from fedstat.models.horizontal.time_evaluation import BINS

REFERENCE = Path(__file__).parents[2] / "reference" / "survival"
PATIENTS = runpy.run_path(str(REFERENCE / "patients.py"))["patients"]()
PATIENTS["months"] = np.ceil(PATIENTS["months"])
EXACT = fs.Policy(min_count=1, min_level_count=1, min_events=1, max_parameters=1e9)
FORMULA, TIMES = "Surv(months, died) ~ age + C(stage)", [12, 24, 36]
DISTRIBUTIONS = ("weibull", "exponential", "lognormal", "loglogistic")
pytestmark = pytest.mark.filterwarnings("ignore:Sites released as many equations")


def rows(table=PATIENTS, policy=EXACT):
    return fs.ClientPartition.from_frame(table, by="hospital", policy=policy)


def fitted(distribution="weibull", policy=EXACT, formula=FORMULA):
    return fs.FederatedAFT.from_formula(formula, rows(policy=policy), distribution=distribution).fit()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_scores_are_those_of_the_pooled_rows(distribution):
    fit = fitted(distribution)
    held = PATIENTS.assign(hospital=[f"S{k % 3}" for k in range(len(PATIENTS))]).sample(500, random_state=1)
    found = fit.evaluate(rows(held), times=TIMES)
    survival = fit.survival_function(held, TIMES).wide().to_numpy()
    survival = survival if survival.shape[0] == len(held) else survival.T
    linear = fit.predict(held, which="linear").to_numpy()
    center = float(fit._record.fit.design.mean @ fit.params.to_numpy()[: len(fit._record.fit.design.names)])
    event, times = held["died"].to_numpy() == 1, held["months"].to_numpy()
    bins = np.searchsorted(BINS, (center - linear) / fit.scale)
    for k, time in enumerate(TIMES):
        expected = scores(times, event, bins, survival[:, k], time)
        assert_allclose([found.auc[k], found.brier[k], found.null_brier[k]], expected, rtol=1e-9)
    assert not found.own_rows and fit.evaluate(times=TIMES).own_rows
    assert fit.evaluation_ledger.rounds > 0


@pytest.mark.parametrize("distribution", ["weibull", "lognormal"])
def test_concordance_counts_pairs_of_a_site(distribution):
    fit = fitted(distribution)
    agree = comparable = 0.0
    for _, part in PATIENTS.groupby("hospital"):
        time, event = part["months"].to_numpy(), part["died"].to_numpy() == 1
        linear = fit.predict(part, which="linear").to_numpy()
        known = event[:, None] & ((time > time[:, None]) | ((time == time[:, None]) & ~event))
        comparable += known.sum()
        agree += (known & (linear > linear[:, None])).sum() + (known & (linear == linear[:, None])).sum() / 2
    assert_allclose(fit.concordance, agree / comparable, rtol=1e-12)
    cox = fs.FederatedCox.from_formula(FORMULA, rows()).fit()
    assert abs(fit.concordance - cox.concordance) < 0.01
    assert abs(fit.concordance_se - cox.concordance_se) < 0.002
    assert f"{fit.concordance:.3f} (se" in fit.summary().as_text()


def test_calibration_and_a_file(tmp_path):
    fit = fitted(policy=None)
    found = fit.evaluate(times=TIMES)
    assert (found.brier < found.null_brier).all()
    assert_allclose(found.tidy()["predicted"], found.tidy()["observed"], atol=0.05)
    fit.save(tmp_path / "aft.fed")
    again = fs.load(tmp_path / "aft.fed")
    assert_allclose(again.evaluate(rows(policy=None), times=TIMES).brier, found.brier, rtol=1e-12)
    with pytest.raises(NotAvailableError, match="has no partition"):
        again.evaluate(times=TIMES)


def test_strict_sites_evaluate_once():
    fit = fitted()
    strict = rows(policy=fs.Policy.strict(approval="auto", formulas="any", max_column_sums="any"))
    first = fit.evaluate(strict, times=TIMES)
    assert_allclose(fit.evaluate(strict, times=TIMES).brier, first.brier, rtol=1e-12)
    with pytest.raises(PolicyError, match="evaluation once"):
        fit.evaluate(strict, times=[12, 23])


def test_evaluations_without_a_meaning():
    fit = fitted()
    with pytest.raises(ModelError, match="ascend"):
        fit.evaluate(times=[24, 12])
    with pytest.raises(NotAvailableError, match="followed for longer"):
        fit.evaluate(times=[12, float(PATIENTS["months"].max())])
    with pytest.raises(NotAvailableError, match="without late entry"):
        fitted(formula="Surv(entry, months, died) ~ age").evaluate(times=TIMES)
