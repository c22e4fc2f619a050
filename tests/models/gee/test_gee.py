"""Estimating equations over sites are those of statsmodels and of R's geepack on the pooled table."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.testing import assert_allclose
from statsmodels.genmod import cov_struct

import fedstat as fs
from fedstat.errors import (
    ConsentError,
    DesignError,
    EstimationError,
    FormulaError,
    MessageError,
    ModelError,
    NotAvailableError,
)
from fedstat.federation.design.horizontal_steps import OpenRows
from fedstat.federation.message import Request, pack_request
from fedstat.kernels.clusters import adjusted_scores, cluster_sums

REFERENCE = Path(__file__).parents[2] / "reference" / "gee"
VISITS = runpy.run_path(str(REFERENCE / "visits.py"))["visits"]()
R = json.loads((REFERENCE / "gee.json").read_text())
# Rows in another order: sites and clusters sort their own.
PARTITION = fs.ClientPartition.from_frame(VISITS.sample(frac=1.0, random_state=1), by="hospital")
FAMILIES = {"score": sm.families.Gaussian(), "ill": sm.families.Binomial(), "falls": sm.families.Poisson()}
STRUCTURES = {
    "independence": cov_struct.Independence,
    "exchangeable": cov_struct.Exchangeable,
    "ar1": lambda: cov_struct.Autoregressive(grid=True),
}
TERMS = "dose + arm + visit"


def model_of(response, structure="exchangeable", terms=TERMS, partition=PARTITION, **settings):
    settings = {"family": FAMILIES[response], "time": "visit", "groups": "patient"} | settings
    return fs.FederatedGEE.from_formula(f"{response} ~ {terms}", partition, cov_struct=structure, **settings)


def pooled(response, structure="exchangeable", terms=TERMS, table=VISITS, cov_type="robust", **settings):
    # Rows of a group keep their order, that of the visits; groups of the first rows are in theirs.
    model = smf.gee(
        f"{response} ~ {terms}",
        "patient",
        table,
        family=FAMILIES[response],
        cov_struct=STRUCTURES[structure](),
        **settings,
    )
    return model.fit(ctol=1e-13, maxiter=500, cov_type=cov_type)


def assert_same(fit, expected, close=1e-8):
    assert fit.converged
    names = list(expected.params.index)  # statsmodels has categories first
    assert_allclose(fit.params[names], expected.params, rtol=close)
    assert_allclose(fit.bse[names], expected.bse, rtol=close)
    assert_allclose(fit.scale, expected.scale, rtol=close)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("response", FAMILIES)
def test_estimates_and_all_covariances_are_those_of_statsmodels(response, structure):
    model = model_of(response, structure)
    types = ("robust", "naive", "bias_reduced")
    for cov_type in types if response == "ill" or structure == "exchangeable" else types[1:]:
        expected = pooled(response, structure, cov_type=cov_type)
        fit = model.fit(cov_type=cov_type, local=False)
        assert_same(fit, expected)
    names = list(expected.params.index)
    assert_allclose(fit.cov_naive.loc[names, names], expected.cov_naive, rtol=1e-7, atol=1e-12)
    if structure != "independence":
        assert_allclose(fit.dep_params, expected.cov_struct.dep_params, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:weights not implemented")
@pytest.mark.parametrize(
    ("structure", "masked"), [*((structure, True) for structure in STRUCTURES), ("exchangeable", False)]
)
def test_weights_offset_and_missing_values(structure, masked):
    table = VISITS.copy()
    # The first visit stays: statsmodels takes the weight of the g-th row as that of the g-th group.
    lost = ((table["visit"] == 1) & (table["patient"] % 4 == 3)) | (
        (table["visit"] == 3) & (table["patient"] % 5 == 0)
    )
    table.loc[lost, "dose"] = np.nan
    whole = table.dropna(ignore_index=True)
    expected = pooled("falls", structure, table=whole, weights=whole["weight"], offset=whole["shift"])
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    with pytest.warns(fs.errors.DataWarning, match="left out"):
        model = model_of("falls", structure, partition=partition, weights="weight", offset="shift")
    fit = model.fit(cov_type="robust", masked=masked)
    assert_same(fit, expected)
    assert fit.diagnostics()["kind"].isin(["left_out"]).any()
    with pytest.raises(ModelError, match="no meaning with weights"):
        model.fit(cov_type="naive")


def test_weights_of_visits_need_independence():
    fit = model_of("ill", "independence", weights="visit_weight").fit(cov_type="robust")
    assert_same(fit, pooled("ill", "independence", weights=VISITS["visit_weight"]))
    with pytest.raises(DesignError, match="weights differ between rows of one 'patient'"):
        model_of("ill", weights="visit_weight").fit()


def test_an_exposure_is_an_offset():
    table = VISITS.assign(months=np.exp(VISITS["shift"]))
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    model = model_of("falls", partition=partition, exposure="months")
    fit = model.fit(cov_type="robust", local=False)
    assert_same(fit, pooled("falls", offset=VISITS["shift"]))


@pytest.mark.parametrize("response", FAMILIES)
def test_geepack(response):
    for structure in STRUCTURES:
        fit = model_of(response, structure).fit(cov_type="robust", local=False)
        expected = R[response][structure]
        # The moment estimators of the correlation differ in degrees of freedom, and for AR(1) altogether.
        close = {"independence": 1e-7, "exchangeable": 5e-3, "ar1": 1.0}[structure]
        order = ["Intercept", "dose", "arm[T.old]", "visit"]
        assert_allclose(fit.params[order], expected["coef"], rtol=close, atol=0.02 * (structure == "ar1"))
        assert_allclose(fit.bse[order], expected["se"], rtol=min(close, 0.05))
        if structure == "exchangeable":
            assert_allclose(fit.dep_params, expected["alpha"], rtol=0.03)
    found = model_of(response, "independence").fit(cov_type="robust", local=False)
    y = VISITS[response]
    # geepack's quasi-likelihood lacks the terms of the response alone, and scales its penalty.
    rest = 2.0 * np.sum(y * np.log(np.maximum(y, 1)) - y) if response == "falls" else 0.0
    expected = R[response]["independence"]
    qic, qicu = found.qic(1.0)
    assert_allclose(qicu - rest, expected["qic"][1], rtol=1e-7)
    penalty = (qic - qicu) / 2.0 + 4.0
    assert_allclose(
        penalty / expected["scale"], (expected["qic"][0] - expected["qic"][1]) / 2.0 + 4.0, rtol=1e-6
    )


def test_weights_in_geepack():
    model = model_of("falls", "independence", "dose + arm", weights="weight", offset="shift")
    fit = model.fit(cov_type="robust", local=False)
    order = ["Intercept", "dose", "arm[T.old]"]
    assert_allclose(fit.params[order], R["weighted"]["coef"], rtol=1e-7)
    assert_allclose(fit.bse[order], R["weighted"]["se"], rtol=1e-7)


def dense(rho, kind, size):
    """The working correlation as a matrix."""
    apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    return {
        "independence": np.eye(size),
        "exchangeable": np.where(apart == 0, 1.0, rho),
        "ar1": np.where(apart == 0, 1.0, rho ** np.maximum(apart, 1)),
    }[kind]


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_kernels_are_dense_algebra(kind):
    rng = np.random.default_rng(3)
    sizes, rho = np.array([1, 4, 2, 7, 3, 5, 2, 6, 4, 3]), 0.35
    start = np.concatenate([[0], sizes.cumsum()])
    D, r = rng.normal(size=(3, start[-1])), rng.normal(size=start[-1])
    w = np.repeat(rng.uniform(0.5, 2.0, len(sizes)), sizes)
    score, parts = cluster_sums(D, r, w, start, list(STRUCTURES).index(kind), rho, True)
    _, total = cluster_sums(D, r, w, start, list(STRUCTURES).index(kind), rho, False)
    bread = np.linalg.inv(total[0])
    root = np.linalg.cholesky(bread)
    corrected = {
        power: adjusted_scores(score, parts, root, power)[0] @ np.linalg.inv(root) for power in (0.5, 1.0)
    }
    for g, size in enumerate(sizes):
        rows = slice(start[g], start[g + 1])
        V = np.linalg.inv(dense(rho, kind, size)) * w[rows]
        Dg, rg = D[:, rows].T, r[rows]
        assert_allclose(score[g], Dg.T @ V @ rg)
        assert_allclose(parts[g], Dg.T @ V @ Dg)
        # Mancl and DeRouen (2001), equation 5; Kauermann and Carroll (2001) with the root of the same matrix.
        H = Dg @ bread @ Dg.T @ V
        assert_allclose(corrected[1.0][g], Dg.T @ V @ np.linalg.solve(np.eye(size) - H, rg), rtol=1e-9)
        values, vectors = np.linalg.eig(np.eye(size) - H)
        half = vectors @ np.diag(1.0 / np.sqrt(values)) @ np.linalg.inv(vectors)
        assert_allclose(corrected[0.5][g], Dg.T @ V @ half @ rg, rtol=1e-9)


def test_small_sample_corrections():
    few = VISITS[VISITS["patient"] < 30]
    partition = fs.ClientPartition.from_frame(few, by="hospital")
    model = model_of("score", "independence", "dose + arm", partition)
    fits = {name: model.fit(cov_type=name) for name in ("robust", "kauermann_carroll", "bias_reduced")}
    errors = [fit.bse["dose"] for fit in fits.values()]
    assert errors == sorted(errors) and errors[0] < errors[2]
    default = fits["kauermann_carroll"]
    assert_allclose(default.bse, model.fit().bse)
    assert fits["robust"].df_inference is None and fits["bias_reduced"].df_inference == 27.0
    assert 10.0 < default.df_inference == default.df.min() < 29.0
    assert model.fit(cov_type="robust", use_t=True).df_inference == 27.0
    assert model.fit(cov_type="bias_reduced", use_t=False).df_inference is None
    alarm = fits["robust"].diagnostics().set_index("kind").loc["few_clusters"]
    assert alarm["severity"] == "critical" and "cov_type='kauermann_carroll'" in alarm["note"]
    for corrected in (default, fits["bias_reduced"]):
        assert "few_clusters" not in corrected.diagnostics()["kind"].tolist()


@pytest.mark.parametrize(
    ("response", "structure"), [("ill", "exchangeable"), ("score", "ar1"), ("falls", "independence")]
)
def test_score_and_wald_tests_are_those_of_statsmodels(response, structure):
    fit = model_of(response, structure, "dose").fit(local=False)
    small = pooled(response, structure, "dose")
    larger = smf.gee(
        f"{response} ~ dose + arm + visit",
        "patient",
        VISITS,
        family=FAMILIES[response],
        cov_struct=STRUCTURES[structure](),
    )
    larger.update_cached_means(np.zeros(4))
    expected = larger.compare_score_test(small)
    found = fit.score_test("arm + visit")
    assert_allclose(found.statistic, expected["statistic"], rtol=1e-6)
    assert found.df == 2
    whole = model_of(response, structure).fit(cov_type="robust", local=False)
    reference = pooled(response, structure)
    hypothesis = "dose = 0, visit = 0"
    ours, theirs = whole.wald_test(hypothesis), reference.wald_test(hypothesis, scalar=True)
    assert_allclose(ours.statistic, theirs.statistic, rtol=1e-7)
    with pytest.raises(ModelError, match="add no coefficient"):
        fit.score_test("dose")


@pytest.mark.parametrize("response", ["ill", "falls"])
def test_margins_are_those_of_statsmodels(response):
    fit, expected = model_of(response).fit(cov_type="robust", local=False), pooled(response)
    for at in ("overall", "mean"):
        ours, theirs = fit.get_margeff(at=at, columns=True), expected.get_margeff(at=at)
        order = list(expected.model.exog_names[1:])
        assert_allclose(ours.margeff[order], theirs.margeff, rtol=1e-7)
        assert_allclose(ours.margeff_se[order], theirs.margeff_se, rtol=1e-6)


def test_predictions():
    fit, expected = model_of("ill").fit(cov_type="robust", local=False), pooled("ill")
    new = VISITS.head(5)
    assert_allclose(fit.predict(new), expected.predict(new), rtol=1e-8)
    ours = fit.get_prediction(new).summary_frame()
    row = np.array([1.0, 1.0, new["dose"][0], 0.0]) if new["arm"][0] == "old" else None
    names = ["Intercept", "arm[T.old]", "dose", "visit"]
    variance = row @ expected.cov_params().loc[names, names] @ row
    mean = expected.predict(new)[0]
    assert_allclose(ours["mean_se"][0], np.sqrt(variance) * mean * (1 - mean), rtol=1e-7)


def test_sites_are_compared_by_their_own_fits():
    fit = model_of("score", "ar1").fit()
    for site in ("Bonn", "Ulm"):
        own = pooled("score", "ar1", table=VISITS[VISITS["hospital"] == site], cov_type="bias_reduced")
        found = fit.site_estimates.loc[site, list(own.params.index)]
        assert_allclose(found, own.params, rtol=1e-7)
        assert_allclose(fit.heterogeneity.std_errors.loc[site, list(own.params.index)], own.bse, rtol=1e-7)
    assert fit.heterogeneity.joint.df == 8
    ax = fit.plot_forest("dose")
    assert ax.has_data()
    alone = model_of("score", "ar1").fit(local=False)
    with pytest.raises(NotAvailableError, match="own fits"):
        _ = alone.heterogeneity


def test_sites_that_lack_a_level_are_compared_by_coefficient_only():
    """Every site has one sex, so that no own fit has all coefficients."""
    sex = np.where(VISITS["hospital"] == VISITS["hospital"].iloc[0], "f", "m")
    partition = fs.ClientPartition.from_frame(VISITS.assign(sex=sex), by="hospital")
    with pytest.warns(fs.errors.SpellingWarning):
        model = model_of("score", terms="dose + C(sex)", partition=partition)
    fit = model.fit()
    assert fit.heterogeneity.joint.df == 0 and fit.heterogeneity.std_errors["dose"].notna().all()
    assert re.search(r"Heterogeneity:\s+not defined", fit.summary().as_text())


def test_one_site_is_many():
    split = model_of("falls", "ar1").fit(cov_type="bias_reduced")
    whole = fs.ClientPartition.from_frame(VISITS.assign(hospital="all"), by="hospital")
    one = model_of("falls", "ar1", partition=whole).fit(cov_type="bias_reduced")
    assert_allclose(one.params, split.params, rtol=1e-9)
    assert_allclose(one.cov_params(), split.cov_params(), rtol=1e-8, atol=1e-14)


def test_a_patient_at_two_sites_is_two_clusters():
    table = VISITS.assign(patient=VISITS["patient"] // 3)
    fit = model_of(
        "score", "independence", time=None, partition=fs.ClientPartition.from_frame(table, by="hospital")
    )
    assert fit.fit().clusters == 240


def test_results_are_saved_compared_and_pooled(tmp_path):
    fit = model_of("ill").fit()
    text = fit.summary().as_text()
    for part in ("exchangeable", "240 (patient)", "QIC", "Clusters"):
        assert part in text
    fit.save(tmp_path / "gee.fed")
    again = fs.load(tmp_path / "gee.fed")
    assert again.summary().as_text() == text
    assert_allclose(again.predict(VISITS.head(3)), fit.predict(VISITS.head(3)))
    for call in (lambda: again.score_test("shift"), again.get_margeff):
        with pytest.raises(NotAvailableError, match="read from a file"):
            call()
    other = model_of("ill", "independence").fit()
    compared = fs.compare({"exchangeable": fit, "independence": other})
    assert "exchangeable" in str(compared)
    assert fs.pool([fit, other]).params.index.tolist() == fit.params.index.tolist()
    assert fit.glance()["clusters"].tolist() == [240]
    assert fit.trace.columns.tolist() == ["step", "move", "dep_params"]
    with pytest.raises(NotAvailableError, match="no likelihood"):
        _ = fit.aic


def approve(fit, partition):
    """Run a fit that waits, consent to it at all sites, and run it again."""
    with pytest.raises(ConsentError, match="pending"):
        fit()
    for site in partition.sites.values():
        for digest in list(site.pending):
            site.approve(digest)
    return fit()


def test_strict_sites_answer_and_owners_approve():
    given = {"groups": "patient", "time": "visit", "cov_struct": "ar1"}
    policies = (None, fs.Policy.strict(approval="owner"))
    partitions = [fs.ClientPartition.from_frame(VISITS, by="hospital", policy=one) for one in policies]
    loose, strict = (fs.FederatedGEE.from_formula("score ~ dose", one, **given) for one in partitions)
    fit = approve(strict.fit, partitions[1])
    assert_allclose(fit.params, loose.fit().params, atol=1e-9)
    released = fit.ledger.to_frame()
    assert released.loc[released["step"] == "sum_scores", "masked"].any()


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"groups": None}, ModelError, "groups: expected the column"),
        ({"groups": "family"}, ModelError, "groups: there is no column 'family'"),
        ({"time": "day"}, ModelError, "time: there is no column 'day'"),
        ({"labels": ["day"]}, ModelError, "labels: there is no column 'day'"),
        ({"structure": "unstructured"}, ModelError, "cov_struct: expected one of 'independence'"),
        ({"structure": "ar1", "time": None}, ModelError, "time: cov_struct='ar1' needs"),
        ({"freq_weights": "weight"}, ModelError, r'freq_weights: .* weights="column" for a cluster'),
        ({"terms": "dose + cluster(arm)"}, FormulaError, "cluster"),
    ],
)
def test_wrong_arguments_are_refused(settings, error, match):
    with pytest.raises(error, match=match):
        model_of("ill", **settings)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_working_correlations_of_statsmodels_are_accepted(structure):
    assert model_of("ill", structure=STRUCTURES[structure]()).cov_struct == structure
    with pytest.raises(ModelError, match="cov_struct: expected one of"):
        model_of("ill", structure=cov_struct.Nested())


def test_wrong_arguments_of_fit():
    model = model_of("ill")
    for given in ({"cov_type": "HC1"}, {"maxiter": 0}, {"scale": -1.0}, {"use_t": 3}):
        with pytest.raises(ModelError, match=next(iter(given))):
            model.fit(**given)
    with pytest.raises(ModelError, match="cbind"):
        fs.FederatedGEE.from_formula(
            "cbind(ill, falls) ~ dose", PARTITION, groups="patient", family=sm.families.Binomial()
        )


def test_two_rows_with_the_same_time():
    table = VISITS.assign(visit=VISITS["visit"] // 2)
    with pytest.raises(DesignError, match="the same 'visit'"):
        model_of("score", "ar1", partition=fs.ClientPartition.from_frame(table, by="hospital")).fit()


def test_no_estimate_is_an_error():
    separated = VISITS.assign(ill=(VISITS["arm"] == "new") * 1)
    with pytest.raises(EstimationError, match=r"without bound|nearly all weight"):
        model_of("ill", terms="arm", partition=fs.ClientPartition.from_frame(separated, by="hospital")).fit(
            local=False
        )
    doubled = VISITS.assign(twice=2.0 * VISITS["dose"])
    with pytest.raises(EstimationError, match="collinear"):
        model_of(
            "ill", terms="dose + twice", partition=fs.ClientPartition.from_frame(doubled, by="hospital")
        ).fit()


def test_a_request_out_of_turn_is_refused():
    site = model_of("ill").partition.sites["Bonn"]
    point = {"shift": np.zeros(4), "scale": np.ones(4), "beta": np.zeros(4), "rho": np.array(0.0)}
    for step, more in (("sum_scores", {}), ("finish", {"inverse": np.eye(4), "power": np.array(0.0)})):
        with pytest.raises(MessageError, match="no rows are open in this session"):
            site.answer(pack_request(Request("Bonn", "gee", step, point | more, "another session")))


def test_streamed_rows_are_those_in_memory(tmp_path):
    frames = {}
    for hospital, rows in VISITS.groupby("hospital"):
        frames[hospital] = tmp_path / f"{hospital}.csv"
        rows.drop(columns="hospital").to_csv(frames[hospital], index=False)
    tables = {name: pd.read_csv(path) for name, path in frames.items()}
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal")
    fit = model_of("falls", "ar1", partition=partition).fit()
    assert_allclose(fit.params, model_of("falls", "ar1").fit().params, rtol=1e-9)


def test_squared_residuals_that_are_checked_are_those_of_the_rows_of_the_table(monkeypatch):
    checked, plain = [], OpenRows.products_with

    def products_with(opened, weights):
        checked.append((opened.data.name, opened.used, weights))
        return plain(opened, weights)

    monkeypatch.setattr(OpenRows, "products_with", products_with)
    fit = model_of("score").fit()
    assert [name for name, _, _ in checked] == list(PARTITION.sites)
    rows = VISITS.sample(frac=1.0, random_state=1)
    for name, used, weights in checked:
        own = rows[rows["hospital"] == name][used]
        assert_allclose(weights, (own["score"] - fit.predict(own)) ** 2, rtol=1e-6)
