"""Survival curves with noise under the budgets of sites: estimates, errors, charges and refusals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.duration.survfunc import SurvfuncRight, survdiff

import fedstat as fs
from fedstat.errors import DescriptionError, EstimationError, FormulaError, ModelError
from fedstat.federation.disclosure.policy import Budget, Policy

FORMULA, GRID = "Surv(time, died) ~ arm", {"grid": 1, "until": 36}
LEVELS = {"arm": ["a", "b"], "died": ["no", "yes"]}


def table(n=1200, seed=0, whole=True):
    random = np.random.default_rng(seed)
    arm = random.choice(["a", "b"], n)
    time = random.exponential(np.where(arm == "a", 16.0, 24.0))
    until = random.uniform(6.0, 48.0, n)
    found = np.minimum(time, until)
    return pd.DataFrame(
        {
            "site": np.array(["A", "B", "C"])[np.arange(n) % 3],
            "arm": arm,
            "time": np.ceil(found) if whole else found,
            "died": (time <= until).astype(int),
        }
    )


def partition_of(frame=None, epsilon=20.0, colluding=1):
    policy = Policy(privacy=Budget(epsilon, 1e-6, colluding))
    return fs.ClientPartition.from_frame(table() if frame is None else frame, by="site", policy=policy)


def fit(partition, epsilon=1.0, formula=FORMULA, bounds=LEVELS, **given):
    return fs.KaplanMeier.from_formula(formula, partition).fit(
        **(GRID | given), epsilon=epsilon, bounds=bounds
    )


@pytest.fixture(scope="module")
def exact():
    return fit(partition_of(epsilon=5e6, colluding=None), 1e6)


def test_without_noise_to_speak_of_curves_are_those_of_the_pooled_rows(exact):
    frame = table()
    for arm, rows in frame.groupby("arm"):
        own = exact.tidy()[exact.tidy()["group"] == f"arm={arm}"]
        pooled = SurvfuncRight(rows["time"], rows["died"])
        at = np.searchsorted(pooled.surv_times, own["time"], side="right") - 1
        np.testing.assert_allclose(own["survival"], np.append(1.0, pooled.surv_prob)[at + 1], atol=1e-4)
        np.testing.assert_allclose(own["std_error"], np.append(0.0, pooled.surv_prob_se)[at + 1], rtol=1e-2)
    cut = frame.assign(t=np.minimum(frame["time"], 37.0))
    cut["d"] = cut["died"] * (cut["t"] <= 36)
    statistic, p = survdiff(cut["t"], cut["d"], cut["arm"])
    assert exact.log_rank_test()["statistic"] == pytest.approx(statistic, rel=1e-3)
    assert exact.log_rank_test()["p_value"] == pytest.approx(p, rel=2e-2)
    assert (exact.nobs, exact.events) == (1200, frame["died"].sum())
    assert exact._price == pytest.approx(1.0, abs=1e-3)


def test_times_between_the_ends_are_spread_over_their_interval():
    """Nearer to the curve of the exact times than the same times rounded up are."""
    frame = table(30_000, 5, whole=False)
    found = fit(partition_of(frame, 5e6, None), 1e6, "Surv(time, died) ~ 1", {}).tidy()
    errors = []
    for times in (frame["time"], np.ceil(frame["time"])):
        exact = SurvfuncRight(times, frame["died"])
        at = np.searchsorted(exact.surv_times, found["time"], side="right") - 1
        errors.append(np.abs(found["survival"] - exact.surv_prob[at]).max())
    assert errors[0] < 5e-4 < 4e-3 < errors[1]


def test_the_restricted_mean_is_that_of_the_curve(exact):
    own = exact.tidy()[exact.tidy()["group"] == "arm=a"]
    steps = np.diff(np.concatenate([[0.0], own["time"], [30.0]]).clip(0.0, 30.0))
    area = steps @ np.concatenate([[1.0], own["survival"]])
    assert exact.restricted_mean(30)["estimate"]["arm=a"] == pytest.approx(area, rel=1e-10)


def test_one_charge_and_repeats_are_free():
    partition = partition_of()
    first, again = fit(partition), fit(partition)
    pd.testing.assert_frame_equal(first.tidy(), again.tidy())
    states = [site.privacy for site in partition.sites.values()]
    assert all(0.9999 < one.epsilon_spent <= 1.0 and one.releases == 1 for one in states)


def test_errors_grow_with_less_budget_and_curves_stay_monotone():
    partition, prices = partition_of(), []
    for epsilon in (0.5, 1.0, 3.0):
        found = fit(partition, epsilon)
        prices.append(found._price)
        for _, own in found.tidy().groupby("group"):
            assert (np.diff(own["survival"]) <= 1e-12).all() and (np.diff(own["n_start"]) <= 1e-9).all()
            assert (own["conf_low"] <= own["survival"]).all() and (own["survival"] <= own["conf_high"]).all()
    assert prices[0] > prices[1] > prices[2] > 1.0


def test_the_summary_states_epsilon_price_and_where_curves_end():
    found = fit(partition_of(table(400)), 0.7)
    text = str(found.summary())
    assert "Errors by noise" in text and "Log-rank pooled" in text and "Log-rank by site" not in text
    assert "noise with epsilon 0.7 at delta 1e-06" in text
    assert found.times[-1] < 36 and f"They end at {found.times[-1]:g} of 36" in text
    with pytest.raises(ModelError, match="no counts by site"):
        found.log_rank_test(by_site=True)


def test_results_are_kept_in_a_file(tmp_path):
    found = fit(partition_of())
    found.save(tmp_path / "curves")
    loaded = fs.load(tmp_path / "curves")
    pd.testing.assert_frame_equal(loaded.tidy(), found.tidy())
    assert str(loaded.summary()).splitlines()[:12] == str(found.summary()).splitlines()[:12]


def test_the_price_is_stated_before_the_charge():
    partition = partition_of()
    plan = fs.KaplanMeier.from_formula(FORMULA, partition).explain(**GRID, epsilon=1.0, bounds=LEVELS)
    assert plan.passes and "epsilon=1.0" in plan.call
    assert any(note.startswith("Price: at 1,200 rows, epsilon 1 makes") for note in plan.notes)
    assert not any(site.site_ledger.charges.made for site in partition.sites.values())


def test_events_are_compared_with_a_level():
    frame = table()
    words = frame.assign(died=np.where(frame["died"] == 1, "yes", "no"))
    found = fit(partition_of(words), formula="Surv(time, died == 'yes') ~ arm")
    assert found.events == pytest.approx(frame["died"].sum(), abs=60)
    none = fit(partition_of(frame), formula="Surv(time, died) ~ 1")
    assert none.labels == ("all rows",) and len(none.restricted_mean()) == 1


@pytest.mark.parametrize(
    ("formula", "given", "error", "text"),
    [
        ("Surv(log(time), died) ~ arm", {}, FormulaError, "with epsilon, the left side is"),
        ("Surv(time, died > 0) ~ arm", {}, FormulaError, "with epsilon, the left side is"),
        ("Surv(time, time, died) ~ arm", {}, FormulaError, "with epsilon, the left side is"),
        (FORMULA, {"bounds": None}, ModelError, "1 of 1 columns have none"),
        (FORMULA, {"masked": True}, ModelError, "masked: with epsilon"),
        (FORMULA, {"epsilon": -1.0}, ModelError, "epsilon: expected a positive number"),
        (FORMULA, {"epsilon": 0.01}, ModelError, "hides the rows of 4 groups"),
        (FORMULA, {"epsilon": None}, DescriptionError, r"releases counts only with noise.*epsilon="),
        (FORMULA, {"epsilon": 25.0}, DescriptionError, "is epsilon 20 at delta 1e-06"),
        ("Surv(time, died == 'yes') ~ 1", {"bounds": {"died": ["a", "b", "yes"]}}, ModelError, "two levels"),
    ],
)
def test_what_has_no_form_with_noise_is_refused_before_a_charge(formula, given, error, text):
    partition = partition_of()
    with pytest.raises(error, match=text):
        fit(partition, **({"formula": formula, "epsilon": 1.0} | given))
    assert not any(site.site_ledger.charges.made for site in partition.sites.values())


def test_a_group_without_rows_ends_in_words():
    partition = partition_of(table(300))
    with pytest.raises(EstimationError, match="noise hides the rows at risk of a group"):
        fit(partition, 3.0, bounds={"arm": ["a", "b", "z"]})


def test_the_test_has_its_level_with_noise():
    """Equal groups: the statistic, whose variance includes the noise, is chi-squared."""
    found = []
    for seed in range(25):
        frame = table(600, seed)
        frame["arm"] = np.random.default_rng(seed + 100).choice(["a", "b"], 600)
        found.append(fit(partition_of(frame, colluding=None), 2.0).log_rank_test()["p_value"])
    assert stats.kstest(found, "uniform").pvalue > 1e-3
