"""Cox regression over sites is R's coxph of the pooled table, stratified by site."""

import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import (
    ConvergenceWarning,
    DesignError,
    EstimationError,
    FormulaError,
    MessageError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.federation.message import Request, pack_request
from fedstat.kernels.partial_likelihood import PartialLikelihood, RiskTable, concordance

REFERENCE = Path(__file__).parents[2] / "reference" / "survival"
PATIENTS = runpy.run_path(str(REFERENCE / "patients.py"))["patients"]()
R = json.loads((REFERENCE / "cox.json").read_text())
# R stops at a relative change of the log-likelihood of 1e-9: coefficients differ by up to 1e-8.
CLOSE = 2e-8
CASES = {
    "plain": ("Surv(quarters, died) ~ age + C(stage)", {}, {}),
    "breslow": ("Surv(quarters, died) ~ age + C(stage)", {}, {"ties": "breslow"}),
    "robust": ("Surv(quarters, died) ~ age + C(arm)", {}, {"cov_type": "robust"}),
    "late": ("Surv(entry, months, died) ~ age + C(arm)", {}, {}),
    "weighted": (
        "Surv(quarters, died == 1) ~ age + C(arm) + offset(shift)",
        {"var_weights": "weight"},
        {"cov_type": "robust"},
    ),
    "strata": ("Surv(quarters, died) ~ age + C(arm) + strata(ward)", {}, {}),
    "cluster": (
        "Surv(quarters, died) ~ age + C(arm) + cluster(family)",
        {},
        {"cov_kwds": {"correction": "CR0"}},
    ),
}


def rows(table=PATIENTS, **settings):
    return fs.ClientPartition.from_frame(table, by="hospital", **settings)


def fitted(case, table=PATIENTS, **more):
    formula, settings, arguments = CASES[case]
    return fs.FederatedCox.from_formula(formula, rows(table), **settings).fit(**arguments | more)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_estimates_are_those_of_coxph(case, masked):
    fit, expected = fitted(case, masked=masked), R[case]
    assert_allclose(fit.params, expected["coef"], rtol=CLOSE)
    assert_allclose(fit.bse, expected["se"], rtol=CLOSE)
    assert_allclose([fit.llnull, fit.llf], expected["loglik"], rtol=1e-10)
    assert_allclose(fit.global_tests().loc["score", "statistic"], expected["score"], rtol=1e-8)
    assert_allclose([fit.concordance, fit.concordance_se], expected["concordance"], rtol=1e-8)


@pytest.mark.parametrize(
    ("case", "transform", "expected"),
    [("plain", "log", "log"), ("plain", "identity", "identity"), ("late", "log", "late")],
)
def test_proportional_hazards_as_cox_zph(case, transform, expected):
    found = fitted(case).test_proportional_hazards(transform)
    assert_allclose(found.tidy()["statistic"], R["zph"][expected], rtol=1e-7)


def test_estimates_are_those_of_lifelines():
    lifelines = pytest.importorskip("lifelines")
    table = PATIENTS.assign(surgery=(PATIENTS["arm"] == "surgery").astype(float))
    kept = table[["quarters", "died", "age", "surgery", "hospital"]]
    theirs = lifelines.CoxPHFitter().fit(
        kept, "quarters", "died", strata=["hospital"], fit_options={"precision": 1e-10}
    )
    ours = fs.FederatedCox.from_formula("Surv(quarters, died) ~ age + surgery", rows(table)).fit()
    assert_allclose(ours.params, theirs.params_, rtol=1e-6)
    assert_allclose(ours.bse, theirs.standard_errors_, rtol=1e-6)
    assert_allclose(ours.llf, theirs.log_likelihood_, rtol=1e-9)


def test_one_site_is_many_strata():
    split = fitted("plain")
    one = rows(PATIENTS.assign(hospital="all", ward=PATIENTS["hospital"]))
    same = fs.FederatedCox.from_formula("Surv(quarters, died) ~ age + C(stage) + strata(ward)", one).fit()
    assert_allclose(same.params, split.params, rtol=1e-9)
    assert_allclose(same.bse, split.bse, rtol=1e-9)
    assert_allclose(same.concordance, split.concordance, rtol=1e-12)


def test_score_and_information_are_derivatives():
    table = PATIENTS.head(200)
    X = np.column_stack([(table["age"] - 60) / 10, table["arm"] == "surgery"]).astype(float)
    stop, start = table["quarters"].to_numpy() * 3.0, table["entry"].to_numpy()
    risks = RiskTable.of(start, stop, table["died"].to_numpy() == 1, table["weight"].to_numpy())
    beta, h = np.array([0.3, -0.4]), 1e-5

    def at(b):
        return PartialLikelihood.at(risks, X, X @ b, "efron")

    for j, step in enumerate(np.eye(2) * h):
        above, below = at(beta + step), at(beta - step)
        # A log-likelihood of 600 has 13 decimals: its difference quotient has eight.
        assert_allclose(at(beta).score()[j], (above.loglik - below.loglik) / (2 * h), rtol=1e-7, atol=1e-7)
        assert_allclose(
            at(beta).information()[j], (below.score() - above.score()) / (2 * h), rtol=1e-7, atol=1e-7
        )
    assert_allclose(at(beta).row_scores().sum(axis=0), at(beta).score(), rtol=1e-9)


def test_concordance_counts_pairs():
    rng = np.random.default_rng(2)
    n = 60
    start, stop = rng.integers(0, 4, n) * 1.0, np.zeros(n)
    stop = start + rng.integers(1, 6, n)
    event, eta, stratum = rng.random(n) < 0.6, rng.integers(0, 5, n) * 1.0, rng.integers(0, 2, n)
    pairs, influences = concordance(RiskTable.of(start, stop, event, stratum=stratum), eta)
    expected, own = np.zeros(4), np.zeros((n, 2))
    for i in np.flatnonzero(event):
        for j in range(n):
            if j == i or stratum[i] != stratum[j] or not start[j] < stop[i] <= stop[j]:
                continue
            if stop[j] == stop[i] and event[j]:
                expected[3] += 0.5
                continue
            kind = 0 if eta[i] > eta[j] else 1 if eta[i] < eta[j] else 2
            expected[kind] += 1.0
            own[[i, j]] += [(kind == 0) * 1.0 - (kind == 1), 1.0]
    assert_allclose(pairs, expected)
    assert_allclose(influences, own)


def test_own_fits_are_those_of_each_site_alone():
    fit = fitted("plain")
    for site in ("Bonn", "Ulm"):
        alone = fitted("plain", PATIENTS[PATIENTS["hospital"] == site])
        assert_allclose(fit.site_estimates.loc[site], alone.params, rtol=1e-8)
    assert fit.heterogeneity.joint.df == 9
    unmasked = fitted("plain", masked=False).heterogeneity
    assert_allclose(fit.heterogeneity.joint.statistic, unmasked.joint.statistic, rtol=1e-7)


def test_predictions_are_hazard_ratios():
    fit = fitted("plain")
    new = pd.DataFrame({"age": [50.0, 60.0, np.nan], "stage": ["I", "III", "I"]})
    linear = fit.predict(new, which="linear", reference="zero")
    expected = [50.0 * fit.params["age"], 60.0 * fit.params["age"] + fit.params["C(stage)[T.III]"], np.nan]
    assert_allclose(linear, expected)
    ratio = fit.predict(new)
    assert_allclose(ratio[1] / ratio[0], np.exp(expected[1] - expected[0]))
    compared = fit.compare_profiles(new.iloc[[1]], new.iloc[[0]])
    assert_allclose(compared["hazard_ratio"], ratio[1] / ratio[0])
    contrast = fit.t_test("10 * age + C(stage)[T.III] = 0")
    assert_allclose(np.log(compared[["conf_low", "conf_high"]].to_numpy()), contrast.conf_int(), rtol=1e-9)
    with pytest.raises(ModelError, match="one row"):
        fit.compare_profiles(new.iloc[:2], new)
    with pytest.raises(NotAvailableError, match="frame of rows"):
        fit.predict()


PROFILES = pd.DataFrame({"age": [50.0, 70.0], "arm": ["drugs", "surgery"]}, index=["young", "old"])
EXACT = fs.Policy(min_count=1, min_level_count=1, min_events=1)
TIMES = [6, 12, 24, 48]


def test_predicted_survival_is_that_of_survfit():
    one = rows(PATIENTS.assign(hospital="all"), policy=EXACT)
    baseline = (
        fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(arm)", one).fit().baseline_hazard(TIMES)
    )
    found = baseline.survival(PROFILES).set_index(["row", "time"])
    for name, theirs in (("survival", "survival"), ("conf_low", "low"), ("conf_high", "high")):
        assert_allclose(found[name].to_numpy().reshape(2, 4), R["survival"][theirs], rtol=1e-7)


def test_the_baseline_is_the_mean_over_sites():
    fit = fitted("robust")
    whole = rows(PATIENTS, policy=EXACT)
    model = fs.FederatedCox.from_formula("Surv(quarters, died) ~ age + C(arm)", whole)
    exact = model.fit(cov_type="robust").baseline_hazard([3, 6, 12])
    parts = np.zeros(3)
    for _, part in PATIENTS.groupby("hospital"):
        eta = part["age"] * fit.params["age"] + (part["arm"] == "surgery") * fit.params["C(arm)[T.surgery]"]
        table = RiskTable.of(np.zeros(len(part)), part["quarters"].to_numpy(), part["died"].to_numpy() == 1)
        hazard = PartialLikelihood.at(table, np.zeros((len(part), 1)), eta.to_numpy(), "efron").hazard()[0]
        parts += [len(part) / len(PATIENTS) * hazard[table.times <= time].sum() for time in (3, 6, 12)]
    assert_allclose(exact.hazard, parts, rtol=1e-9)
    # Averages over three events move a part of a step.
    assert_allclose(fit.baseline_hazard([3, 6, 12]).hazard, parts, rtol=0.1)
    assert "mean over sites" in exact.summary().as_text()
    assert exact.plot(PROFILES).get_ylabel() == "survival"


def test_predicted_survival_without_a_meaning():
    fit = fitted("strata")
    with pytest.raises(NotAvailableError, match="has strata"):
        fit.baseline_hazard(TIMES)
    with pytest.raises(ModelError, match="ascend"):
        fit.baseline_hazard([3, 3])
    with pytest.raises(ModelError, match="without missing"):
        fitted("robust").baseline_hazard(TIMES).survival(PROFILES.assign(age=np.nan))


def test_effects_and_plots_speak_of_hazards():
    knots = "bs(age, knots=(55, 65), lower_bound=20, upper_bound=100)"
    fit = fs.FederatedCox.from_formula(f"Surv(months, died) ~ {knots}", rows()).fit()
    effect = fit.effect("age", [50, 60, 70], reference=60, exponentiate=True)
    assert effect["estimate"][1] == 1.0
    assert fit.plot_effect("age", exponentiate=True).get_ylabel() == "hazard ratio"
    assert "hazard ratio" in fitted("robust").plot_coefficients(exponentiate=True).get_xlabel().lower()


def test_the_summary_has_what_coxph_prints(tmp_path):
    fit = fitted("cluster")
    text = fit.summary().as_text()
    for part in ("Federated Cox model", "Events:", "Concordance:", "LR Test:", "hazard ratio", "family, "):
        assert part in text
    fit.save(tmp_path / "cox.fed")
    again = fs.load(tmp_path / "cox.fed")
    assert again.summary().as_text() == text
    assert_allclose(again.predict(PATIENTS.head(3)), fit.predict(PATIENTS.head(3)))
    for call in (again.test_proportional_hazards, lambda: again.baseline_hazard(TIMES)):
        with pytest.raises(NotAvailableError, match="read from a file"):
            call()
    assert fit.glance()["events"].tolist() == [int(PATIENTS["died"].sum())]


def test_few_events_are_announced():
    few = PATIENTS.assign(died=np.where(np.arange(len(PATIENTS)) % 12 == 0, PATIENTS["died"], 0))
    formula = "Surv(months, died) ~ age + C(stage) + C(arm) + entry"
    fit = fs.FederatedCox.from_formula(formula, rows(few)).fit(local=False)
    found = fit.diagnostics().set_index("kind")
    assert found.loc["few_events", "severity"] == "warning"
    assert "few_events" not in fitted("plain").diagnostics()["kind"].tolist()


@pytest.mark.parametrize(
    ("formula", "error", "text"),
    [
        ("Surv(months, stage) ~ age", DesignError, "holds categories"),
        ("Surv(months, months) ~ age", DesignError, r"neither 0 nor 1 in \d+ of 260 rows"),
        ("Surv(entry, died) ~ age", DesignError, "times are not positive"),
        ("Surv(months, entry, died) ~ age", DesignError, "not after their start"),
        ("Surv(entry - 1, months, died) ~ age", DesignError, "starts are negative"),
        ("Surv(months) ~ age", FormulaError, r"Surv\(start, stop, event\)"),
        ("Surv(months, died) ~ age + strata(nothing)", FormulaError, "no column 'nothing'"),
        ("Surv(months, died) ~ age:strata(ward)", FormulaError, "outside parentheses"),
        ("Surv(months, died) ~ age + strata(ward + 1)", FormulaError, "write columns"),
        ("Surv(months, died) ~ 0 + age", FormulaError, "no intercept"),
        ("Surv(months, died) ~ 1", FormulaError, "needs a covariate"),
        ("months ~ age", FormulaError, "needs times and events"),
        ("Surv(scale(months), died) ~ age", FormulaError, "scale"),
    ],
)
def test_formulas_without_a_meaning(formula, error, text):
    with pytest.raises(error, match=text):
        fs.FederatedCox.from_formula(formula, rows()).fit()


def test_other_models_refuse_times_and_strata():
    for formula, what in (("Surv(months, died) ~ age", "Surv"), ("died ~ age + strata(ward)", "strata")):
        with pytest.raises(FormulaError, match=what):
            fs.GLORE.from_formula(formula, rows())
    frames = {
        "A": PATIENTS[["age"]].assign(k=range(800)),
        "B": PATIENTS[["months", "died"]].assign(k=range(800)),
    }
    with pytest.raises(FormulaError, match=r"Surv\(\.\.\.\)"):
        fs.VerticalGLM.from_formula(
            "Surv(months, died) ~ age", fs.ClientPartition.from_frames(frames, on="k")
        )


def test_arguments_without_a_meaning():
    model = fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows())
    with pytest.raises(ModelError, match="cluster"):
        model.fit(cov_type="cluster")
    with pytest.raises(ModelError, match="ties"):
        model.fit(ties="exact")
    with pytest.raises(ModelError, match="exposure"):
        fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows(), exposure="entry")
    with pytest.warns(ConvergenceWarning, match="after 2 evaluations"):
        assert not model.fit(maxiter=2).converged


def test_no_maximum_is_an_error():
    never = PATIENTS.assign(safe=((PATIENTS["died"] == 0) & (np.arange(800) % 2 == 0)).astype(float))
    for masked in (True, False):
        with pytest.raises(EstimationError, match=r"monotone likelihood: .*'safe'"):
            fs.FederatedCox.from_formula("Surv(months, died) ~ age + safe", rows(never)).fit(masked=masked)
    fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows(PATIENTS)).fit()
    assert fit.converged
    with pytest.raises(EstimationError, match=r"'I\(age \* 2\)' follows from 'age'"):
        fs.FederatedCox.from_formula("Surv(months, died) ~ age + I(age * 2)", rows()).fit()
    with pytest.raises(EstimationError, match="no events"):
        fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows(PATIENTS.assign(died=0))).fit()


def test_a_site_without_events_takes_part():
    table = PATIENTS.assign(died=np.where(PATIENTS["hospital"] == "Ulm", 0, PATIENTS["died"]))
    fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows(table)).fit()
    rest = fs.FederatedCox.from_formula(
        "Surv(months, died) ~ age", rows(PATIENTS[PATIENTS["hospital"] != "Ulm"])
    ).fit()
    assert_allclose(fit.params, rest.params, rtol=1e-8)
    assert fit.site_estimates.loc["Ulm"].isna().all()
    text = " ".join(fit.summary().as_text().split())
    assert "Ulm (no events). Their rows count in the estimate all the same, except" in text


def test_a_site_where_all_rows_have_the_same_time_is_an_error():
    tied = PATIENTS.assign(months=np.where(PATIENTS["hospital"] == "Ulm", 7.0, PATIENTS["months"]))
    with pytest.raises(DesignError, match=r"'Ulm': all rows have the same time .*no order"):
        fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows(tied)).fit()


def test_rules_on_rows_hold():
    with pytest.raises(PolicyError, match="minimum events"):
        lone = PATIENTS.assign(died=np.where(np.arange(800) % 260 == 1, 1, 0))
        fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows(lone)).fit()
    with pytest.raises(PolicyError, match="minimum rows per level"):
        single = PATIENTS.assign(ward=np.where(np.arange(800) % 260 == 0, "alone", PATIENTS["ward"]))
        fs.FederatedCox.from_formula("Surv(months, died) ~ age + strata(ward)", rows(single)).fit()


def test_requests_out_of_turn_are_refused():
    model = fs.FederatedCox.from_formula("Surv(months, died) ~ age", rows())
    site = model.partition.sites["Bonn"]
    point = {"scale": np.ones(1), "beta": np.zeros(1)}
    with pytest.raises(MessageError, match="make the model again"):
        site.answer(pack_request(Request("Bonn", "cox", "sum_scores", point, "another session")))
    with pytest.raises(MessageError, match="ties"):
        model.fit()
        text = '{"ties": "exact", "strata": [], "clusters": []}'
        site.answer(pack_request(Request("Bonn", "cox", "start", {}, model._session, text)))
