"""Survival curves over sites are R's survfit of the pooled rows; no count is about few rows."""

import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, FormulaError, MessageError, ModelError, PolicyError
from fedstat.federation.message import Request, pack_request
from fedstat.inference.survival_curves import SurvivalCounts, curve_quantile
from fedstat.models.horizontal.blocks import block_means, grid_points

REFERENCE = Path(__file__).parents[2] / "reference" / "survival"
PATIENTS = runpy.run_path(str(REFERENCE / "patients.py"))["patients"]()
R = json.loads((REFERENCE / "curves.json").read_text())
COMPETING = json.loads((REFERENCE / "competing.json").read_text())
CAUSES = "Surv(months, C(cause, levels=['none', 'relapse', 'death']))"
EXACT = fs.Policy(min_count=1, min_level_count=1, min_events=1)
QUARTERS = np.arange(3.0, 61.0, 3.0)


def curves(formula="Surv(months, died) ~ arm", table=PATIENTS, grid=QUARTERS, policy=EXACT, **more):
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy=policy)
    return fs.KaplanMeier.from_formula(formula, partition).fit(grid, **more)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("conf_type", ["log-log", "log", "plain"])
def test_curves_are_those_of_survfit(conf_type, masked):
    found = curves(masked=masked).tidy(conf_type=conf_type)
    expected = pd.DataFrame(R[conf_type.replace("-", "")])
    assert found["group"].tolist() == expected["group"].tolist()
    # R has the rows at risk at times that are rounded up: here those at the beginning of the interval.
    expected = expected.rename(columns={"n_risk": "n_start"})
    for name in ("time", "n_start", "n_event", "survival", "std_error", "conf_low", "conf_high"):
        assert_allclose(found[name], expected[name].astype(float), rtol=1e-10, err_msg=name)


def test_late_entry_is_that_of_survfit():
    found = curves("Surv(entry, months, died) ~ arm").tidy()
    expected = pd.DataFrame(COMPETING["late"])
    # R has lines without events or censored rows, where a row enters and nothing else happens.
    expected = expected.merge(found[["group", "time"]]).rename(columns={"n_risk": "n_start"})
    assert len(expected) == len(found)
    for name in ("time", "n_start", "survival", "std_error", "conf_low", "conf_high"):
        assert_allclose(found[name], expected[name].astype(float), rtol=1e-10, err_msg=name)


def competing(formula=f"{CAUSES} ~ arm", table=PATIENTS, grid=QUARTERS, policy=EXACT, **more):
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy=policy)
    return fs.CumulativeIncidence.from_formula(formula, partition).fit(grid, **more)


@pytest.mark.parametrize("conf_type", ["log-log", "log", "plain"])
def test_competing_events_are_those_of_survfit(conf_type):
    found, expected = competing().tidy(conf_type=conf_type), COMPETING[conf_type.replace("-", "")]
    for k, cause in enumerate(COMPETING["causes"]):
        own = found[found["cause"] == cause]
        assert own["group"].tolist() == expected["group"]
        assert_allclose(own["n_start"], expected["n_risk"])
        for name in ("incidence", "std_error", "conf_low", "conf_high"):
            theirs = np.array(expected[name], dtype=float)[:, k]
            assert_allclose(own[name], theirs, rtol=1e-10, atol=1e-12, err_msg=name)


def test_competing_events_with_late_entry_are_those_of_survfit():
    found = competing("Surv(entry, months, C(cause, levels=['none', 'relapse', 'death'])) ~ arm").tidy()
    for k, cause in enumerate(COMPETING["causes"]):
        theirs = np.array(COMPETING["both"]["incidence"])[:, k]
        assert_allclose(found[found["cause"] == cause]["incidence"], theirs, rtol=1e-10, atol=1e-12)


def test_gray_and_cuminc_are_those_of_cmprsk():
    theirs, fit, groups = COMPETING["gray"], competing(), competing(f"{CAUSES} ~ arm + stage")
    for k, cause in enumerate(theirs["causes"]):
        assert_allclose(fit.gray_test(cause)["statistic"], theirs["arm"][k], rtol=1e-10)
        assert_allclose(groups.gray_test(cause)["statistic"], theirs["group"][k], rtol=1e-10)
        assert_allclose(groups.gray_test(cause, rho=1.0)["statistic"], theirs["rho1"][k], rtol=1e-10)
        assert groups.gray_test(cause)["df"] == 5
    for row, estimate in zip(COMPETING["cuminc"]["rows"], COMPETING["cuminc"]["estimate"], strict=True):
        arm, cause = row.split()
        at = fit.incidence_at([12, 24, 36]).query(
            "group == @group and cause == @cause", local_dict={"group": f"arm={arm}", "cause": cause}
        )
        assert_allclose(at["incidence"], estimate, rtol=1e-10)


def test_quantiles_and_means_are_those_of_survfit():
    fit = curves()
    for place, q in enumerate((0.25, 0.5)):
        found = fit.quantile(q)
        for name, theirs in (("estimate", "estimate"), ("conf_low", "low"), ("conf_high", "high")):
            assert_allclose(found[name], np.array(R["quantile"][theirs])[:, place])
    assert_allclose(fit.restricted_mean(48)[["estimate", "std_error"]], R["rmean"], rtol=1e-10)
    assert fit.median().columns.tolist() == ["median", "conf_low", "conf_high"]


def test_comparisons_are_those_of_survdiff():
    fit = curves("Surv(months, died) ~ arm + stage")
    assert fit.log_rank_test()["df"] == 5
    assert_allclose(fit.log_rank_test()["statistic"], R["logrank"], rtol=1e-10)
    assert_allclose(fit.log_rank_test(1.0)["statistic"], R["rho1"], rtol=1e-10)
    assert_allclose(fit.log_rank_test(by_site=True)["statistic"], R["bysite"], rtol=1e-10)
    # On the times as they are, whatever the policy averages.
    assert_allclose(
        curves("Surv(months, died) ~ arm + stage", policy=None).log_rank_test(by_site=True)["statistic"],
        R["bysite"],
        rtol=1e-10,
    )


@pytest.mark.parametrize("sites", [1, 3, 40])
def test_the_number_of_sites_does_not_matter(sites):
    table = PATIENTS.assign(hospital=[f"H{k % sites:02d}" for k in range(len(PATIENTS))])
    assert_allclose(curves(table=table).tidy()["survival"], curves().tidy()["survival"], rtol=1e-12)


def test_averaged_times_keep_the_curves():
    exact, averaged = curves(grid=np.arange(1.0, 61.0)), curves(grid=np.arange(1.0, 61.0), policy=None)
    difference = averaged.survival_at(range(1, 49))["survival"] - exact.survival_at(range(1, 49))["survival"]
    # Seventy rows at risk at the end, where a block is a large part: a standard error is 0.03 there.
    assert abs(difference.mean()) < 0.002 and difference.abs().mean() < 0.01 and difference.abs().max() < 0.05
    notes = averaged.diagnostics().set_index("kind")["note"]
    assert "every 3 or more successive rows" in notes["averaged_times"]
    assert "averaged_times" not in exact.diagnostics()["kind"].tolist()


def test_means_of_blocks():
    values, code = np.array([5.0, 1.5, 2.5, 9.0, 4.0, 7.0, 7.0]), np.array([0, 0, 0, 0, 0, 1, 1])
    assert_allclose(block_means(code, values, 1), values)
    # Five rows are blocks of three and two, seven would be at least three.
    assert_allclose(block_means(code, values, 2), [7.0, 8.0 / 3, 8.0 / 3, 7.0, 8.0 / 3, 7.0, 7.0])
    assert_allclose(block_means(code, values, 3), [4.4] * 5 + [7.0, 7.0])
    assert_allclose(block_means(code, np.rint(values * 2) // 2, 3)[:5], 4.0)
    assert not len(block_means(code[:0], values[:0], 3))


def test_no_cell_has_few_rows():
    partition = fs.ClientPartition.from_frame(PATIENTS, by="hospital")
    fit = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(0.5, until=60, masked=False)
    seen = [
        event.array
        for event in fit.ledger.to_frame().itertuples()
        if event.step == "count_cells" and event.sender != "coordinator"
    ]
    assert seen
    counts = fit._record.events[fit._record.events > 0.0]
    assert counts.min() >= 3.0
    assert (np.bincount(fit._record.censored.astype(int).ravel())[1:3] == 0).all()


def test_two_grids_reveal_means_of_blocks_and_no_time():
    # Without averaging, grids that differ by one point reveal who died in between.
    lone = PATIENTS[PATIENTS["hospital"] == "Ulm"].assign(hospital="one")
    lone.loc[lone.index[0], ["months", "died"]] = 33, 1

    def events(upto, policy):
        fit = curves("Surv(months, died) ~ 1", lone, [upto, 60.0], policy, masked=False)
        return float(fit._record.events[0, 0])

    between = lone[(lone["died"] == 1) & (lone["months"] == 33)]
    assert events(33.0, EXACT) - events(32.0, EXACT) == len(between)
    for month in range(1, 59):
        moved = events(month + 1.0, None) - events(float(month), None)
        assert moved == 0.0 or moved >= 3.0


def test_groups_that_differ_by_one_person_are_refused():
    table = PATIENTS.assign(other=PATIENTS["arm"])
    table.loc[table.index[5], "other"] = "surgery" if table.loc[table.index[5], "arm"] == "drugs" else "drugs"
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy="strict")
    fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(3, until=60)
    with pytest.raises(PolicyError):
        fs.KaplanMeier.from_formula("Surv(months, died) ~ other", partition).fit(3, until=60)


def test_divisions_that_would_give_the_times_back_are_refused():
    """Blocks of other groups overlap: enough divisions are a linear system for the times."""
    partition = fs.ClientPartition.from_frame(PATIENTS, by="hospital", policy="strict")
    fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(3, until=60)
    # The same division at another grid averages the same blocks.
    fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(1, until=60)
    with pytest.raises(PolicyError, match=r"at most 0\.5 different sums"):
        fs.KaplanMeier.from_formula("Surv(months, died) ~ stage", partition).fit(3, until=60)


def test_a_group_with_few_rows_is_refused():
    table = PATIENTS.assign(arm=np.where(np.arange(800) % 200 < 2, "none", PATIENTS["arm"]))
    with pytest.raises((PolicyError, DesignError), match="level"):
        curves(table=table, policy=None)
    table = PATIENTS.assign(
        died=np.where(PATIENTS["hospital"] == "Ulm", np.arange(800) == 790, PATIENTS["died"])
    )
    with pytest.raises(PolicyError, match="minimum events"):
        curves(table=table, policy=fs.Policy(min_events=5))


@pytest.mark.parametrize(
    ("formula", "error", "text"),
    [
        ("Surv(months, died) ~ log(age)", FormulaError, "groups are columns"),
        ("Surv(months, died) ~ arm:stage", FormulaError, "groups are columns"),
        ("Surv(months, died) ~ arm + strata(stage)", ModelError, "groups only"),
        ("months ~ arm", FormulaError, "needs times and events"),
        (f"{CAUSES} ~ arm", FormulaError, "competing events are for CumulativeIncidence"),
        ("Surv(months, C(cause)) ~ arm", FormulaError, "a category whose first level is censoring"),
    ],
)
def test_formulas_without_a_meaning(formula, error, text):
    with pytest.raises(error, match=text):
        curves(formula)


@pytest.mark.parametrize(
    ("grid", "until", "text"),
    [
        (3, None, "needs its last time"),
        (0, 60, "grid"),
        (0.01, 60, "at most 1,000 points"),
        ([3, 3], None, "ascend"),
        ([0, 3], None, "ascend"),
        ([3, 6], 60, "leave it out"),
        ([], None, "expected a width"),
        ("months", None, "expected a width"),
    ],
)
def test_grids_without_a_meaning(grid, until, text):
    with pytest.raises(ModelError, match=text):
        grid_points(grid, until)
    assert_allclose(grid_points(7, 20), [7.0, 14.0, 20.0])


def test_nothing_to_estimate():
    with pytest.raises(EstimationError, match="no events"):
        curves(table=PATIENTS.assign(died=0))
    with pytest.raises(ModelError, match="there is one"):
        curves("Surv(months, died) ~ 1").log_rank_test()
    fit = curves()
    for call in (
        lambda: fit.quantile(1.0),
        lambda: fit.restricted_mean(61),
        lambda: fit.tidy(conf_type="exact"),
    ):
        with pytest.raises(ModelError):
            call()
    assert fit.survival_at([0.5, 70])["survival"].tolist()[0] == 1.0
    assert np.isnan(fit.survival_at([70])["survival"]).all()


def test_averaged_starts_keep_the_curves():
    late, monthly = "Surv(entry, months, died) ~ arm", np.arange(1.0, 61.0)
    exact, fit = (curves(late, grid=monthly, policy=policy) for policy in (EXACT, None))
    difference = fit.survival_at(range(1, 49))["survival"] - exact.survival_at(range(1, 49))["survival"]
    assert difference.abs().mean() < 0.02 and difference.abs().max() < 0.06
    notes = fit.diagnostics()["kind"].tolist()
    assert {"late_entry", "averaged_times"} <= set(notes) and "late_entry" not in curves().diagnostics()[
        "kind"
    ].tolist()
    assert fit._unit == curves()._unit == "months"
    # No cell of starts has few rows, whatever the grid.
    assert (np.bincount(fit._record.entered.astype(int).ravel())[1:3] == 0).all()


def test_rows_at_risk_are_no_fewer_than_those_that_leave():
    counts = SurvivalCounts(
        np.array([1.0, 2.0]),
        np.array([[3.0, 0.0]]),
        np.array([[0.0, 2.0]]),
        np.zeros(1),
        np.array([[0.0, 5.0]]),
    )
    assert counts.at_risk.tolist() == [[3.0, 2.0]]


@pytest.mark.parametrize(("rho", "gamma"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 2.0)])
def test_curves_and_weighted_tests_are_those_of_lifelines(rho, gamma):
    lifelines = pytest.importorskip("lifelines")
    from lifelines.statistics import multivariate_logrank_test

    fit = curves()
    theirs = multivariate_logrank_test(
        PATIENTS["quarters"],
        PATIENTS["arm"],
        PATIENTS["died"],
        weightings="fleming-harrington",
        p=rho,
        q=gamma,
    )
    assert_allclose(fit.log_rank_test(rho, gamma)["statistic"], theirs.test_statistic, rtol=1e-8)
    for arm, part in PATIENTS.groupby("arm"):
        for columns, response in (
            ({}, "months"),
            ({"entry": 3 * np.floor(part["entry"] / 3)}, "entry, months"),
        ):
            km = lifelines.KaplanMeierFitter().fit(3 * part["quarters"], part["died"], **columns)
            ours = curves(f"Surv({response}, died) ~ arm").tidy().query(f"group == 'arm={arm}'")
            assert_allclose(ours["survival"], km.predict(ours["time"].tolist()), rtol=1e-10)


def test_curves_of_no_event_of_a_kind():
    levels = "Surv(months, C(cause, levels=['none', 'relapse', 'death', 'moved']))"
    fit = competing(f"{levels} ~ arm")
    moved = fit.tidy().query("cause == 'moved'")
    assert (moved[["incidence", "std_error", "conf_low", "conf_high"]] == 0.0).all(axis=None)
    assert np.isnan(fit.gray_test("moved")["p_value"])
    assert_allclose(fit.gray_test("death"), competing().gray_test("death"), rtol=1e-12)
    with pytest.raises(ModelError, match="cause"):
        fit.gray_test("other")
    with pytest.raises(DesignError, match="no declared level in"):
        competing("Surv(months, C(cause, levels=['none', 'death'])) ~ arm")
    with pytest.raises(FormulaError, match="needs competing events"):
        competing("Surv(months, died) ~ arm")
    with pytest.raises(ModelError, match="there is one"):
        competing(f"{CAUSES} ~ 1").gray_test()
    # With one kind of event the incidence is what the survival curve lacks to one.
    alone = competing("Surv(months, C(died, levels=[0, 1])) ~ arm").tidy()
    assert_allclose(alone["incidence"], 1.0 - curves().tidy()["survival"], rtol=1e-12)
    assert_allclose(alone["std_error"], curves().tidy()["std_error"], rtol=1e-10)


@pytest.mark.parametrize("sites", [1, 3, 40])
def test_the_number_of_sites_does_not_matter_to_competing_events(sites):
    table = PATIENTS.assign(hospital=[f"H{k % sites:02d}" for k in range(len(PATIENTS))])
    found, expected = competing(table=table), competing()
    assert_allclose(found.tidy()["incidence"], expected.tidy()["incidence"], rtol=1e-12)
    late = "Surv(entry, months, died) ~ arm"
    assert_allclose(curves(late, table).tidy()["survival"], curves(late).tidy()["survival"], rtol=1e-12)


def test_a_quantile_between_two_times():
    times, curve = np.array([1.0, 2.0, 5.0]), np.array([0.8, 0.5, 0.3])
    assert curve_quantile(times, curve, 0.5) == 3.5
    assert curve_quantile(times, curve, 0.6) == 2.0
    assert np.isnan(curve_quantile(times, curve, 0.2))


def test_summary_plot_and_file(tmp_path):
    fit = curves()
    text = fit.summary().as_text()
    assert "Log-Rank Test" in text and "arm=surgery" in text and "median" in text
    fit.save(tmp_path / "curves.fed")
    again = fs.load(tmp_path / "curves.fed")
    assert again.summary().as_text() == text
    ax = again.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(fit.labels)
    assert f"{fit._counts.at_risk[0, 0]:.0f}" in [note.get_text() for note in ax.texts]
    assert again.plot(events=True).get_ylabel() == "share with the event"


def test_summary_plot_and_file_of_competing_events(tmp_path):
    fit = competing()
    text = fit.summary().as_text()
    assert "Gray: relapse" in text and "arm=surgery, death" in text
    fit.save(tmp_path / "competing.fed")
    again = fs.load(tmp_path / "competing.fed")
    assert again.summary().as_text() == text
    assert again.plot("death").get_ylabel() == "cumulative incidence"
    assert np.isnan(again.incidence_at([70])["incidence"]).all()
    assert (again.incidence_at([0.5])["incidence"] == 0.0).all()


@pytest.mark.parametrize(
    ("model", "response"),
    [
        (fs.KaplanMeier, "Surv(months, died)"),
        (fs.KaplanMeier, "Surv(entry, months, died)"),
        (fs.CumulativeIncidence, CAUSES),
    ],
)
def test_what_leaves_a_site_is_what_explain_lists(model, response):
    partition = fs.ClientPartition.from_frame(PATIENTS, by="hospital", policy="strict")
    model = model.from_formula(f"{response} ~ arm", partition)
    expected = model.explain(grid=3, until=60)
    assert expected.passes
    released = model.fit(3, until=60).ledger.releases()
    key = ["sender", "step", "array", "kind", "masked"]
    own = released[released["step"].isin(["open_cells", "count_cells", "count_entries", "sum_log_rank"])]
    assert ("count_entries" in own["step"].tolist()) == ("entry" in response)
    assert set(own[key].apply(tuple, axis=1)) <= set(expected.tidy()[key].apply(tuple, axis=1))


def test_requests_out_of_turn_are_refused():
    site = fs.ClientPartition.from_frame(PATIENTS, by="hospital").sites["Bonn"]
    request = Request("Bonn", "descriptive", "count_cells", {"edges": np.array([3.0])}, "another session")
    with pytest.raises(MessageError, match="open_cells"):
        site.answer(pack_request(request))


@pytest.mark.parametrize("model", [fs.KaplanMeier, fs.FederatedCox])
def test_competing_events_without_levels_are_sent_to_their_model(model):
    cause = PATIENTS["died"].map({0: "none", 1: "death"})
    partition = fs.ClientPartition.from_frame(PATIENTS.assign(cause=cause), by="hospital")
    with pytest.raises(DesignError, match=r"an event must be .* cause == 'level' .* CumulativeIncidence"):
        model.from_formula("Surv(months, cause) ~ age", partition)
