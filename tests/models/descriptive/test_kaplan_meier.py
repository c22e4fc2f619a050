"""Survival curves over sites are R's survfit of the pooled rows; no count is about few rows."""

import json
import runpy
import warnings
from pathlib import Path

import curve_coverage
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, FormulaError, MessageError, ModelError, PolicyError
from fedstat.federation.design.site_rows import block_means
from fedstat.federation.message import Request, pack_request
from fedstat.inference.survival_curves import SurvivalCounts, curve_quantile, product_limit
from fedstat.models.horizontal.blocks import grid_points

REFERENCE = Path(__file__).parents[2] / "reference" / "survival"
PATIENTS = runpy.run_path(str(REFERENCE / "patients.py"))["patients"]()
R = json.loads((REFERENCE / "curves.json").read_text())
COMPETING = json.loads((REFERENCE / "competing.json").read_text())
CAUSES = "Surv(months, C(cause, levels=['none', 'relapse', 'death']))"
ROUNDED = PATIENTS.assign(months=3 * PATIENTS["quarters"], entry=3 * np.floor(PATIENTS["entry"] / 3))
"""The times of the reference: rounded up to quarters, starts down."""
EXACT = fs.Policy(min_count=1, min_level_count=1, min_events=1)
QUARTERS = np.arange(3.0, 61.0, 3.0)


def curves(formula="Surv(months, died) ~ arm", table=ROUNDED, grid=QUARTERS, policy=EXACT, **more):
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


def competing(formula=f"{CAUSES} ~ arm", table=ROUNDED, grid=QUARTERS, policy=EXACT, **more):
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
    assert fit.median().columns.tolist() == ["median", "conf_low", "conf_high", "after", "until"]


def test_comparisons_are_those_of_survdiff():
    fit = curves("Surv(months, died) ~ arm + stage")
    assert fit.log_rank_test()["df"] == 5
    assert_allclose(fit.log_rank_test()["statistic"], R["logrank"], rtol=1e-10)
    assert_allclose(fit.log_rank_test(1.0)["statistic"], R["rho1"], rtol=1e-10)
    # On the times as they are, whatever the policy averages.
    assert_allclose(
        curves("Surv(months, died) ~ arm + stage", PATIENTS, policy=None).log_rank_test(by_site=True)[
            "statistic"
        ],
        R["bysite"],
        rtol=1e-10,
    )


@pytest.mark.parametrize("sites", [1, 3, 40])
def test_the_number_of_sites_does_not_matter(sites):
    table = ROUNDED.assign(hospital=[f"H{k % sites:02d}" for k in range(len(PATIENTS))])
    assert_allclose(curves(table=table).tidy()["survival"], curves().tidy()["survival"], rtol=1e-12)


def monthly(formula="Surv(months, died) ~ arm", table=PATIENTS, policy=EXACT, **more):
    return curves(formula, table, np.arange(1.0, 61.0), policy, **more)


def merged(formula="Surv(months, died) ~ arm", policy=None, **more):
    return monthly(formula, policy=policy, **more)


@pytest.mark.parametrize("formula", ["Surv(months, died) ~ arm", "Surv(months, died) ~ 1"])
def test_merged_intervals_keep_the_curves(formula):
    exact, fit = (
        monthly(
            formula,
        ),
        merged(formula),
    )
    assert 15 < len(fit.times) < 60 and set(fit.times) <= set(exact.times)
    known = exact.survival_at(fit.times)["survival"] - fit.survival_at(fit.times)["survival"]
    # Within a merged interval the order of deaths and censored rows is unknown; a standard error is 0.03.
    assert known.abs().max() < 0.01 and abs(known.mean()) < 0.002
    for until in (24, 36):
        difference = exact.restricted_mean(until) - fit.restricted_mean(until)
        assert (difference["estimate"].abs() < 0.2 * exact.restricted_mean(until)["std_error"]).all()
        assert_allclose(
            fit.restricted_mean(until)["std_error"], exact.restricted_mean(until)["std_error"], rtol=0.03
        )
    # Up to one month, since the curve is near a half for several.
    medians, right = fit.median(), exact.median()["median"]
    assert ((medians["after"] - 1.0 < right) & (right <= medians["until"] + 1.0)).all()
    assert (medians["conf_low"] <= exact.median()["conf_low"] + 1.0).all()
    notes = fit.diagnostics().set_index("kind")
    assert "at least 3 rows" in notes.loc["merged_intervals", "note"] and "all sites" in str(fit.notes)
    assert not {"merged_intervals", "at_risk", "wide_intervals"} & set(exact.diagnostics()["kind"])


def test_rows_at_risk_are_those_of_the_printed_time():
    def later(table, arm, time):
        own = table.loc[table["arm"] == arm, "months"]
        return [(own > time).sum(), (own >= time).sum()]

    days = PATIENTS.assign(months=30.0 * PATIENTS["months"] + np.arange(800) / 1000.0)
    for fit, table in (
        (monthly(), PATIENTS),
        (curves(table=PATIENTS, grid=[12, 24, 36]), PATIENTS),
        (merged(), PATIENTS),
        (curves(table=days, grid=np.arange(90.0, 1800.0, 90.0), policy=None), days),
    ):
        frame = fit.tidy()
        exact = dict(zip(fit.times, fit._record.apart, strict=True))
        assert any(exact.values())
        for row in frame.itertuples():
            after, true = later(table, row.group.removeprefix("arm="), row.time)
            assert row.n_risk == (true if exact[row.time] else after)
        # The summary has the same numbers in the lines of these times.
        text = fit.summary().as_text().replace("arm=drugs", "").splitlines()
        for line in (line.split() for line in text):
            if len(line) == 7 and line[0] in {f"{time:g}" for time in fit.times}:
                own = frame[np.isclose(frame["time"], float(line[0]))]
                assert int(line[1]) in own["n_risk"].astype(int).tolist()
                break
        else:
            raise AssertionError("no line of the summary was found")
        places = np.append(0.0, fit.times)
        assert fit._risk_table.shape == (2, len(places))


@pytest.mark.parametrize("fit", ["survival", "incidence"])
@pytest.mark.parametrize(
    ("grid", "point", "ends"), [(24, 20, "0 and 24"), (6, 11, "6 and 12"), (6, 40, "36 and 42")]
)
def test_between_two_ends_there_are_limits_and_no_value(fit, grid, point, ends):
    exact, coarse = (
        (curves if fit == "survival" else competing)(grid=np.arange(width, 49.0, width))
        for width in (1.0, grid)
    )
    at = "survival_at" if fit == "survival" else "incidence_at"
    with pytest.warns(fs.errors.FedstatWarning, match=f"between {ends}"):
        found = getattr(coarse, at)([point])
    true = getattr(exact, at)([point])
    value = "survival" if fit == "survival" else "incidence"
    assert found[value].isna().all()
    assert (found["conf_low"] <= true["conf_low"] + 0.005).all()
    assert (found["conf_high"] >= true["conf_high"] - 0.005).all()
    assert (found["conf_low"] < found["conf_high"]).all()
    # At the ends, and after the last one, nothing changes.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(coarse, at)([grid, 24.0])[value].notna().all()
        assert getattr(coarse, at)([0.0])[value].isin([0.0, 1.0]).all()
        assert getattr(coarse, at)([100.0]).iloc[:, -1].isna().all()


def test_a_curve_is_known_between_ends_where_nobody_had_the_event():
    table = PATIENTS.assign(died=np.where(PATIENTS["months"].between(13, 24), 0, PATIENTS["died"]))
    fit = curves(table=table, grid=[12, 24, 36])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at = fit.survival_at([12, 18, 24])
    assert_allclose(at["survival"], np.repeat(at["survival"].to_numpy()[::3], 3))


def test_a_median_in_a_wide_interval_is_the_interval():
    fit = curves(table=PATIENTS, grid=[24, 54])
    medians, right = fit.median(), monthly().median()
    assert medians["median"].isna().all()
    assert ((medians["after"] < right["median"]) & (right["median"] <= medians["until"])).all()
    assert (medians["conf_low"] <= right["conf_low"]).all()
    text = fit.summary().as_text()
    assert "24 to 54" in text and text.startswith(
        "*** ONE INTERVAL HAS A LARGE PART OF A CURVE: between 0 and 24"
    )
    assert "Use a narrower grid" in text
    assert "wide_intervals" not in monthly().diagnostics()["kind"].tolist()


def test_the_remedies_for_wide_intervals():
    # A minimum at every site leaves few intervals; masks over all sites, as the note says, leave many.
    fit = merged(masked=False)
    note = fit.diagnostics().set_index("kind").loc["wide_intervals"]
    assert note["severity"] == "critical" and "Mask the counts over three sites" in note["note"]
    assert len(fit.times) < len(merged().times) / 2
    assert "wide_intervals" not in merged().diagnostics()["kind"].tolist()
    lower = fs.Policy(min_level_count=1)
    assert "wide_intervals" not in merged(masked=False, policy=lower).diagnostics()["kind"].tolist()


def test_before_the_first_event_limits_are_those_of_clopper_and_pearson():
    table = PATIENTS.assign(died=np.where(PATIENTS["months"] <= 6, 0, PATIENTS["died"]))
    frame = curves(table=table).tidy().query("time == 3")
    assert (frame["survival"] == 1.0).all()
    for row in frame.itertuples():
        low, high = scipy.stats.binomtest(int(row.n_start), int(row.n_start)).proportion_ci(method="exact")
        assert_allclose([row.conf_low, row.conf_high], [low, high], rtol=1e-10)


def test_both_log_rank_tests_are_compared():
    rng = np.random.default_rng(11)
    site = np.repeat(np.arange(5), 80)
    arm = np.where(rng.uniform(size=400) < 0.2 + 0.15 * site, "a", "b")
    months = np.ceil(rng.exponential(40.0 / (1.0 + site)))
    table = pd.DataFrame({"hospital": [f"H{k}" for k in site], "arm": arm, "months": months})
    table["died"] = rng.uniform(size=400) < 0.8
    fit = curves(table=table.assign(died=table["died"].astype(int)), grid=np.arange(1.0, 61.0))
    assert fit.log_rank_test()["p_value"] < 0.01 < 0.05 < fit.log_rank_test(by_site=True)["p_value"]
    text = fit.summary().as_text()
    assert text.startswith("*** THE TWO LOG-RANK TESTS DIFFER") and "Read the test by site" in text
    assert text.index("Log-rank by site") < text.index("Log-rank pooled")
    assert "tests_differ" not in curves().diagnostics()["kind"].tolist()


def test_times_within_intervals_are_in_random_order():
    # Hazards of a constant ratio: the share that survives is exact whatever the width of the interval.
    n, died, censored = 1e6, 0.09, 0.03
    left = np.exp(-(died + censored) * 10.0)
    gone = n * (1.0 - left)

    def counted(events, censored, beyond, at_end=0.0, events_at_end=0.0):
        cells = (np.array([[one]]) for one in (events, censored))
        ends = (np.array([[one]]) for one in (at_end, events_at_end))
        return SurvivalCounts(np.array([10.0]), *cells, np.array([beyond]), None, *ends)

    counts = counted(gone * 0.75, gone * 0.25, n * left)
    frame = product_limit(counts, 0.05, "log-log")[0]
    assert_allclose(frame["survival"], np.exp(-died * 10.0), rtol=1e-12)
    # Without censored rows, and with all rows at the end, it is the product limit.
    for censored, *at_end in ((0.0, 0.0, 0.0), (10.0, 30.0, 20.0)):
        assert_allclose(counted(20.0, censored, 70.0, *at_end).at_risk, 90.0 + censored, rtol=1e-12)
    # Some events within the interval, and then some at its end.
    share = 1.0 - 15.0 / counted(15.0, 5.0, 80.0, 4.0, 4.0).at_risk
    assert_allclose(share, (1.0 - 16.0 / 100.0) ** (11.0 / 16.0) * (1.0 - 4.0 / 84.0), rtol=1e-12)
    # Nobody stays: the actuarial estimate.
    assert_allclose(1.0 - 4.0 / counted(4.0, 6.0, 0.0).at_risk, 1.0 - 4.0 / 7.0)


def test_errors_within_intervals_are_those_of_exact_times():
    # The mean of Greenwood's sum over random orders of 30 events and 20 censored rows of 80.
    rng, order = np.random.default_rng(1), np.repeat([1.0, 0.0], [30, 20])
    n = 80.0 - np.arange(50.0)
    exact = np.mean([(rng.permutation(order) / (n * (n - 1.0))).sum() for _ in range(4000)])

    def counted(*cells):
        cells = [np.array([[one]]) for one in cells]
        return SurvivalCounts(np.array([10.0]), *cells[:2], np.array([30.0]), None, *cells[2:])

    counts = counted(30.0, 20.0, 0.0, 0.0)
    assert_allclose(counts.log_variance, exact, rtol=0.01)
    frame = product_limit(counts, 0.05, "log-log")[0]
    assert_allclose(frame["std_error"], frame["survival"] * np.sqrt(exact), rtol=0.005)
    # Events at the end follow those within; with all times at the end it is Greenwood's term.
    assert_allclose(counted(34.0, 20.0, 6.0, 4.0).log_variance, 30.0 / 84.0 / 36.0 + 4.0 / 36.0 / 32.0)
    for ends in ((), (50.0, 30.0)):
        assert_allclose(counted(30.0, 20.0, *ends).log_variance, 30.0 / 80.0 / 50.0)


def test_means_of_blocks():
    values, code = np.array([5.0, 1.5, 2.5, 9.0, 4.0, 7.0, 7.0]), np.array([0, 0, 0, 0, 0, 1, 1])
    assert_allclose(block_means(code, values, 1), values)
    # Five rows are blocks of three and two, seven would be at least three.
    assert_allclose(block_means(code, values, 2), [7.0, 8.0 / 3, 8.0 / 3, 7.0, 8.0 / 3, 7.0, 7.0])
    assert_allclose(block_means(code, values, 3), [4.4] * 5 + [7.0, 7.0])
    assert_allclose(block_means(code, np.rint(values * 2) // 2, 3)[:5], 4.0)
    assert not len(block_means(code[:0], values[:0], 3))


def test_no_cell_has_few_rows():
    for masked in (True, False):
        fit = merged(masked=masked)
        record = fit._record
        for cells in (record.events, record.censored, record.beyond):
            assert cells[cells > 0.0].min(initial=3.0) >= 3.0
        seen = [event.array for event in fit.ledger.to_frame().itertuples() if event.step == "count_times"]
        assert seen


def test_groups_that_differ_by_one_person_are_refused():
    table = PATIENTS.assign(other=PATIENTS["arm"])
    table.loc[table.index[5], "other"] = "surgery" if table.loc[table.index[5], "arm"] == "drugs" else "drugs"
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy="strict")
    fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(3, until=60)
    with pytest.raises(PolicyError):
        fs.KaplanMeier.from_formula("Surv(months, died) ~ other", partition).fit(3, until=60)


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
        (0, 60, "grid"),
        (0.01, 60, "at most 1,000 points"),
        ([3, 3], None, "ascend"),
        ([0, 3], None, "ascend"),
        ([3, 6], 60, "leave it out"),
        (100, 48, r"exceeds the last time, until=48.*grid=2.4, until=48"),
        (1, 1100, r"received 1,100. Use grid=2"),
        (0.25, 1000, r"Use grid=1,"),
        (None, -1, "until: expected a positive number"),
        (-1, None, "grid: expected a positive number"),
        ([], None, "expected a width"),
        ("months", None, "expected a width"),
    ],
)
def test_grids_without_a_meaning(grid, until, text):
    for model, response in ((fs.KaplanMeier, "Surv(months, died)"), (fs.CumulativeIncidence, CAUSES)):
        partition = fs.ClientPartition.from_frame(PATIENTS, by="hospital")
        with pytest.raises(ModelError, match=text):
            model.from_formula(f"{response} ~ arm", partition).fit(grid, until=until)
    assert len(grid_points(2, 1100)) == 550 and len(grid_points(48, 48)) == 1
    assert_allclose(grid_points(7, 20), [7.0, 14.0, 20.0])


def test_without_a_grid_times_are_counted_in_units_up_to_the_rounded_end():
    partition = fs.ClientPartition.from_frame(PATIENTS, by="hospital")
    model = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition)
    fit, end = model.fit(), PATIENTS["months"].max()
    until = fit._record.requested[-1]
    assert abs(until - end) <= 0.05 * end
    assert f"multiples of 1 up to {until:g}, the rounded end of the times" in " ".join(
        str(fit.summary()).split()
    )
    chosen = model.fit(grid=1, until=until)
    assert fit.tidy().equals(chosen.tidy()) and fit.tidy().equals(model.fit().tidy())
    assert "multiples of" not in str(chosen.summary())
    # With one of the two, the other is found.
    assert_allclose(model.fit(grid=3)._record.requested, np.append(np.arange(3.0, until, 3.0), until))
    assert_allclose(model.fit(until=30)._record.requested, np.arange(1.0, 31.0))
    text = " ".join(str(model.explain()).split())
    assert "rows by interval, for knots" in text and "open_cells" in text
    assert "count_intervals" not in str(model.explain(grid=1, until=60))


@pytest.mark.parametrize("unit", [30.0, 1.0 / 12.0])
def test_other_units_have_round_widths(unit):
    fit = curves(table=PATIENTS.assign(months=PATIENTS["months"] * unit), grid=None)
    width, until = fit._record.requested[[0, -1]]
    assert 100 <= until / width <= 250
    assert abs(until - PATIENTS["months"].max() * unit) <= 0.05 * until


def test_published_ranges_are_the_end_of_a_grid():
    described = {"months": {"kind": "number", "range": [0, 72]}, "died": {"kind": "number", "range": [0, 1]}}
    described["arm"] = {"kind": "category", "levels": ["drugs", "surgery"]}
    published = dict.fromkeys(PATIENTS["hospital"].unique(), described)
    partition = fs.ClientPartition.from_frame(PATIENTS, by="hospital", policy="strict", published=published)
    fit = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit()
    assert fit._record.requested[-1] == 72.0
    assert not [event for _, event in fit._ledger.events if event.step == "count_intervals"]


def test_competing_events_and_late_entry_find_a_grid():
    fit = competing(table=PATIENTS, grid=None)
    again = competing(table=PATIENTS, grid=1, until=fit._record.requested[-1])
    assert fit.tidy().equals(again.tidy())
    late = curves("Surv(entry, months, died) ~ arm", PATIENTS, None)
    assert late._record.proposed == "counted"


def test_times_without_an_end_name_a_grid():
    with pytest.raises(DesignError, match=r"times of all rows are equal.*fit\(grid=1, until=60\)"):
        curves(table=PATIENTS.assign(months=5), grid=None)
    with pytest.raises(DesignError, match=r"found for a column.*fit\(grid=1, until=60\)"):
        curves("Surv(2 * months, died) ~ arm", PATIENTS, None)


def test_one_time_is_a_list_of_one():
    assert curves().survival_at(12).equals(curves().survival_at([12]))
    assert competing().incidence_at(12).equals(competing().incidence_at([12]))


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
    assert fit.survival_at([0.0, 70])["survival"].tolist()[0] == 1.0
    assert np.isnan(fit.survival_at([70])["survival"]).all()


def test_merged_starts_keep_the_curves():
    late = "Surv(entry, months, died) ~ arm"
    exact, fit = (
        monthly(
            late,
        ),
        merged(late),
    )
    difference = fit.survival_at(fit.times)["survival"] - exact.survival_at(fit.times)["survival"]
    assert difference.abs().mean() < 0.02 and difference.abs().max() < 0.06
    notes = fit.diagnostics()["kind"].tolist()
    assert {"late_entry", "merged_intervals"} <= set(notes)
    assert "late_entry" not in curves().diagnostics()["kind"].tolist()
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
    assert counts.at_risk.tolist() == counts.at_start.tolist() == [[3.0, 2.0]]


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
    assert (moved[["incidence", "std_error", "conf_low"]] == 0.0).all(axis=None)
    # No event among n rows: the limit of Clopper and Pearson.
    assert_allclose(moved["conf_high"], 1.0 - 0.025 ** (1.0 / moved["n_start"]), rtol=1e-12)
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
    table = ROUNDED.assign(hospital=[f"H{k % sites:02d}" for k in range(len(PATIENTS))])
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
    assert "Log-rank by site" in text and "arm=surgery" in text and "median" in text
    fit.save(tmp_path / "curves.fed")
    again = fs.load(tmp_path / "curves.fed")
    assert again.summary().as_text() == text
    ax = again.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(fit.labels)
    assert f"{fit._counts.at_start[0, 0]:.0f}" in [note.get_text() for note in ax.texts]
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
    assert (again.incidence_at([0.0])["incidence"] == 0.0).all()
    assert merged().plot().get_lines()[0].get_marker() == "o"


def test_requests_out_of_turn_are_refused():
    site = fs.ClientPartition.from_frame(PATIENTS, by="hospital").sites["Bonn"]
    request = Request("Bonn", "descriptive", "count_cells", {"edges": np.array([3.0])}, "another session")
    with pytest.raises(MessageError, match="open_cells"):
        site.answer(pack_request(request))


@pytest.mark.parametrize("model", [fs.KaplanMeier, fs.FederatedCox])
@pytest.mark.parametrize(
    "response", ["Surv(died, months)", "Surv(event, months)", "Surv(event, entry, months)"]
)
def test_exchanged_times_and_events_are_asked_for(model, response):
    # Zeros as times, ones as times, and starts that are after their ends.
    table = PATIENTS.assign(event=1)
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    with pytest.raises(DesignError, match=r"are time and event exchanged\? The time"):
        fit = model.from_formula(
            f"{response} ~ age" if model is fs.FederatedCox else f"{response} ~ arm", partition
        )
        fit.fit(**({} if model is fs.FederatedCox else {"grid": 3, "until": 60}))


@pytest.mark.parametrize("model", [fs.KaplanMeier, fs.FederatedCox])
def test_competing_events_without_levels_are_sent_to_their_model(model):
    cause = PATIENTS["died"].map({0: "none", 1: "death"})
    partition = fs.ClientPartition.from_frame(PATIENTS.assign(cause=cause), by="hospital")
    with pytest.raises(DesignError, match=r"an event must be .* cause == 'level' .* CumulativeIncidence"):
        model.from_formula("Surv(months, cause) ~ age", partition)


@pytest.mark.parametrize("competing", [False, True])
@pytest.mark.parametrize("sites", [3, 5])
def test_the_simulation_has_the_counts_of_a_fit(competing, sites):
    table = curve_coverage.patients(np.random.default_rng([1, sites]), sites, competing)
    for grid in curve_coverage.GRIDS.values():
        both = [make(table, competing, grid) for make in (curve_coverage.counted, curve_coverage.fitted)]
        assert both[0].tidy().equals(both[1].tidy()) and len(both[0].times) > 1


@pytest.mark.slow
@pytest.mark.parametrize("competing", [False, True])
@pytest.mark.parametrize("sites", [5, 25])
def test_coverage_under_the_default_policy(competing, sites):
    for grid in curve_coverage.GRIDS:
        found, more = curve_coverage.simulate(sites, grid, 100, competing)
        # The interval of the pooled rows, up to what merged intervals add; three standard errors of 100 runs.
        assert (found["covered"] >= found["pooled rows"] - 0.065).all(), (grid, found)
        assert (found["nothing"] < 0.02).all() and (found["bias"].abs() < 0.6).all()
        if grid == "every half month" and not competing:
            assert more["mean"] > 0.88 and abs(more["mean_bias"]) < 0.4 and more["median"] > 0.88
            assert max(more["by_site"], more["pooled"]) < 0.13
