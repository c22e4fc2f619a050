"""Linearized variances of stratified, clustered samples against their formula on the stacked table."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, ModelError, PolicyError
from fedstat.federation.disclosure.policy import Policy

F = sm.families


def sample(seed=0):
    """Twelve strata of three to five clusters: strata, clusters, or neither lie within a site."""
    rng = np.random.default_rng(seed)
    clusters = pd.DataFrame({"stratum": np.repeat(np.arange(12), rng.integers(3, 6, 12))})
    clusters["psu"] = np.arange(len(clusters)) + 1
    clusters["effect"] = rng.normal(0.0, 0.5, len(clusters))
    frame = clusters.loc[clusters.index.repeat(rng.integers(15, 25, len(clusters)))].reset_index(drop=True)
    n = len(frame)
    frame["by_stratum"] = np.array(list("ABC"))[frame["stratum"] % 3]
    frame["by_psu"] = np.array(list("ABC"))[frame["psu"] % 3]
    frame["by_row"] = np.array(list("AB"))[np.arange(n) % 2]
    frame["x"] = rng.normal(size=n) + 0.5 * frame["effect"]
    frame["g"] = rng.choice(["u", "v"], n)
    frame["w"] = rng.uniform(100.0, 5000.0, n)
    eta = 0.4 * frame["x"] - 0.3 * (frame["g"] == "v") + frame["effect"]
    frame["gauss"] = eta + rng.normal(size=n)
    frame["y"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["count"] = rng.poisson(np.exp(0.3 * eta))
    return frame.drop(columns="effect")


FRAME = sample()
SITES = ("by_stratum", "by_psu", "by_row")
CASES = {
    "gauss": F.Gaussian(),
    "y": F.Binomial(),
    "probit": F.Binomial(sm.families.links.Probit()),
    "count": F.Poisson(),
}


def design(frame):
    return np.column_stack([np.ones(len(frame)), frame["x"], frame["g"] == "v"]).astype(float)


def pooled(frame, response, family):
    fitted = sm.GLM(frame[response], design(frame), family=family, var_weights=frame["w"])
    return fitted.fit(tol=1e-14, tol_criterion="params", maxiter=200)


def svyrecvar(frame, response, family, cluster="psu", stratum="stratum"):
    """D V D of Binder (1983), as svyrecvar of R's survey package has it: totals, centered within strata."""
    X, fitted = design(frame), pooled(frame, response, family)
    mu = np.asarray(fitted.fittedvalues)
    slope, variance = family.link.deriv(mu), family.variance(mu)
    w = frame["w"].to_numpy()
    scores = (w * (frame[response].to_numpy() - mu) / (slope * variance))[:, None] * X
    bread = np.linalg.inv(X.T @ ((w / (slope**2 * variance))[:, None] * X))
    meat = np.zeros_like(bread)
    strata = frame[stratum].to_numpy() if stratum else np.zeros(len(frame))
    for h in np.unique(strata):
        inside = strata == h
        totals = pd.DataFrame(scores[inside]).groupby(frame[cluster].to_numpy()[inside]).sum().to_numpy()
        apart = totals - totals.mean(axis=0)
        meat += len(totals) / (len(totals) - 1) * apart.T @ apart
    return np.asarray(fitted.params), bread @ meat @ bread


def model(response, family, by, frame=FRAME, labels=("psu", "stratum"), **policy):
    frame = frame.drop(columns=[name for name in SITES if name != by], errors="ignore")
    policies = dict.fromkeys(sorted(frame[by].unique()), Policy(**policy))
    partition = fs.ClientPartition.from_frame(frame, by=by, policies=policies)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fs.FederatedGLM.from_formula(
            f"{response} ~ x + g", partition, family=family, var_weights="w", labels=list(labels)
        )


def survey(model, clusters="psu", strata="stratum"):
    kwds = {"clusters": clusters} | ({} if strata is None else {"strata": strata})
    return model.fit(cov_type="survey", cov_kwds=kwds)


@pytest.mark.parametrize("strata", ["stratum", None])
@pytest.mark.parametrize("by", SITES)
@pytest.mark.parametrize("case", CASES)
def test_variances_are_those_of_the_formula(case, by, strata):
    response = {"probit": "y"}.get(case, case)
    result = survey(model(response, CASES[case], by), strata=strata)
    params, expected = svyrecvar(FRAME, response, CASES[case], stratum=strata)
    size = np.sqrt(np.diag(expected))
    np.testing.assert_allclose((result.params - params) / size, 0.0, atol=1e-8)
    np.testing.assert_allclose((result.cov_params() - expected) / np.outer(size, size), 0.0, atol=1e-8)


@pytest.mark.parametrize("by", SITES)
def test_without_strata_it_is_statsmodels_cluster_covariance_up_to_its_factor(by):
    """G / (G - 1) here; statsmodels multiplies by (n - 1) / (n - p) as well, and leaves out means of zero."""
    ours = survey(model("y", F.Binomial(), by), strata=None).cov_params().to_numpy()
    theirs = pooled(FRAME, "y", F.Binomial())
    robust = theirs.model.fit(cov_type="cluster", cov_kwds={"groups": FRAME["psu"]}, tol=1e-14, maxiter=200)
    n, p = len(FRAME), 3
    expected = np.asarray(robust.cov_params()) * (n - p) / (n - 1)
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_what_leaves_follows_where_the_strata_lie():
    within, across = (survey(model("y", F.Binomial(), by)) for by in ("by_stratum", "by_row"))
    shapes = {
        name: result.ledger.to_frame()
        .query("step == 'sum_clusters' and sender == 'A'")
        .set_index("array")["shape"]
        for name, result in (("within", within), ("across", across))
    }
    assert shapes["within"]["sums"] == (0, 3) and shapes["within"]["shared"] == (0,)
    assert shapes["across"]["shared_sums"] == (FRAME["psu"].nunique(), 3)
    assert len(across.ledger.to_frame().query("step == 'list_clusters'")) > 0
    assert "clusters by 'psu' in strata by 'stratum'" in str(within.summary()).replace("\n    ", " ")


@pytest.mark.parametrize("by", SITES)
def test_a_stratum_with_one_cluster_is_counted(by):
    frame = FRAME.copy()
    frame.loc[frame["stratum"].isin([3, 7]), "psu"] = 1000 + frame["stratum"]
    if by == "by_psu":
        frame["by_psu"] = np.array(list("ABC"))[frame["psu"] % 3]
    with pytest.raises(EstimationError, match=r"2 of 12 strata have a single cluster.*merge them"):
        survey(model("y", F.Binomial(), by, frame))


def test_labels_of_clusters_that_repeat_in_strata_are_reported():
    frame = FRAME.assign(psu=FRAME.groupby("stratum")["psu"].rank("dense").astype(int))
    with pytest.raises(DesignError, match=r"site 'A': \d+ labels of 'psu' are in more than one of 'stratum'"):
        survey(model("y", F.Binomial(), "by_row", frame))
    apart = FRAME.copy()
    apart.loc[apart["psu"] == 5, "stratum"] = np.where(apart.loc[apart["psu"] == 5, "by_row"] == "A", 1, 2)
    with pytest.raises(
        EstimationError, match="labels of 'psu' are in different 'stratum' at different sites"
    ):
        survey(model("y", F.Binomial(), "by_row", apart))


def test_a_cluster_of_few_rows_at_a_site_is_refused_and_the_owner_may_allow_it():
    frame = FRAME.copy()
    frame.loc[frame.index[frame["psu"] == 5][:3], "by_stratum"] = (
        "A" if frame.loc[frame["psu"] == 5, "by_stratum"].iloc[0] != "A" else "B"
    )
    with pytest.raises(
        PolicyError, match="at least 5 rows behind the score of a cluster or stratum"
    ) as caught:
        survey(model("y", F.Binomial(), "by_stratum", frame))
    assert "setting is min_count" in str(caught.value)
    result = survey(model("y", F.Binomial(), "by_stratum", frame, min_count=1))
    _, expected = svyrecvar(frame, "y", F.Binomial())
    np.testing.assert_allclose(result.bse, np.sqrt(np.diag(expected)), rtol=1e-8)


@pytest.mark.parametrize("kind", [float, str, "category", "Int64"])
def test_labels_of_other_types_are_the_same_labels(kind):
    changed = FRAME.assign(psu=FRAME["psu"].astype(kind), stratum=FRAME["stratum"].astype(kind))
    one, two = (survey(model("y", F.Binomial(), "by_row", frame)) for frame in (FRAME, changed))
    np.testing.assert_allclose(one.bse, two.bse, rtol=1e-10)


def test_labels_that_are_whole_numbers_here_and_floats_there_agree():
    frame = FRAME.drop(columns=["by_stratum", "by_psu"])
    tables = {s: part.drop(columns="by_row").reset_index(drop=True) for s, part in frame.groupby("by_row")}
    tables["B"] = tables["B"].astype({"psu": float})
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal")
    made = fs.FederatedGLM.from_formula(
        "y ~ x + g", partition, family=F.Binomial(), var_weights="w", labels=["psu", "stratum"]
    )
    _, expected = svyrecvar(FRAME, "y", F.Binomial())
    np.testing.assert_allclose(survey(made).bse, np.sqrt(np.diag(expected)), rtol=1e-8)


def test_rows_without_a_label_are_left_out():
    frame = FRAME.copy()
    frame.loc[frame.index[::17], "psu"] = np.nan
    frame.loc[frame.index[5::29], "stratum"] = np.nan
    complete = frame.dropna()
    result = survey(model("y", F.Binomial(), "by_row", frame))
    params, expected = svyrecvar(complete, "y", F.Binomial())
    assert result.nobs == len(complete)
    np.testing.assert_allclose(result.params, params, rtol=1e-6)
    np.testing.assert_allclose(result.bse, np.sqrt(np.diag(expected)), rtol=1e-8)


def test_sites_as_clusters_or_strata():
    everyone = model("y", F.Binomial(), "by_psu", labels=["psu", "by_psu"])
    as_clusters = survey(everyone, clusters="by_psu", strata=None)
    _, expected = svyrecvar(FRAME, "y", F.Binomial(), "by_psu", None)
    np.testing.assert_allclose(as_clusters.bse, np.sqrt(np.diag(expected)), rtol=1e-7)
    as_strata = survey(everyone, strata="by_psu")
    _, expected = svyrecvar(FRAME, "y", F.Binomial(), "psu", "by_psu")
    np.testing.assert_allclose(as_strata.bse, np.sqrt(np.diag(expected)), rtol=1e-8)


def test_every_row_a_cluster_is_the_sandwich():
    frame = FRAME.assign(row=np.arange(len(FRAME)))
    made = model("y", F.Binomial(), "by_row", frame, labels=["row"])
    n = len(frame)
    result = survey(made, clusters="row", strata=None)
    np.testing.assert_allclose(result.bse, made.fit(cov_type="HC0").bse * np.sqrt(n / (n - 1)), rtol=1e-8)


@pytest.mark.parametrize(
    ("cov_type", "kwds", "expected"),
    [
        ("survey", {}, r"needs the column .*cov_type='survey', cov_kwds=\{'clusters': 'ward'\}"),
        ("cluster", {}, r"needs the column .*cov_type='cluster', cov_kwds=\{'groups': 'ward'\}"),
        (
            "survey",
            {"groups": "psu"},
            r"cov_type='survey' accepts \['clusters', 'strata'\], received \['groups'\]",
        ),
        ("HC0", {"groups": "psu"}, r"cov_type='HC0' accepts none, received \['groups'\]"),
        (
            "survey",
            {"clusters": "region"},
            r"clusters='region' is no column of every site's table",
        ),
        ("survey", {"clusters": "psu", "strata": "by_row"}, r"strata='by_row' is no column"),
        ("clustered", {}, "cov_type"),
    ],
)
def test_what_a_covariance_needs_is_reported(cov_type, kwds, expected):
    with pytest.raises(ModelError, match=expected):
        model("y", F.Binomial(), "by_row").fit(cov_type=cov_type, cov_kwds=kwds)


# -- NHANES ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nhanes(shared_data):
    columns = [
        "SDMVPSU",
        "SDMVSTRA",
        "WTMEC2YR",
        "SurveyYr",
        "Race1",
        "BPSysAve",
        "Age",
        "Gender",
        "Diabetes",
    ]
    frame = pd.read_csv(shared_data / "nhanes" / "NHANESraw.csv.gz", usecols=columns)
    frame = frame[frame["WTMEC2YR"] > 0].dropna().reset_index(drop=True)
    frame["psu"] = 10 * frame["SDMVSTRA"] + frame["SDMVPSU"]
    frame["x"], frame["g"] = frame["Age"] / 10.0, np.where(frame["Gender"] == "male", "v", "u")
    frame["w"], frame["y"] = frame["WTMEC2YR"], (frame["Diabetes"] == "Yes").astype(int)
    return frame[["psu", "SDMVSTRA", "SurveyYr", "Race1", "x", "g", "w", "y", "BPSysAve"]]


@pytest.mark.parametrize(("by", "least"), [("SurveyYr", 5), ("Race1", 1)])
@pytest.mark.parametrize(("response", "family"), [("BPSysAve", F.Gaussian()), ("y", F.Binomial())])
def test_nhanes(nhanes, by, least, response, family):
    """Strata lie within a survey year, and across ethnic groups: there owners must allow small clusters."""
    frame = nhanes.drop(columns=({"SurveyYr", "Race1"} - {by}).pop())
    made = model(response, family, by, frame, ("psu", "SDMVSTRA"), min_count=least)
    result = survey(made, strata="SDMVSTRA")
    params, expected = svyrecvar(frame, response, family, stratum="SDMVSTRA")
    np.testing.assert_allclose(result.params, params, rtol=1e-7)
    np.testing.assert_allclose(result.bse, np.sqrt(np.diag(expected)), rtol=1e-7)
    naive = sm.GLM(
        frame[response], design(frame), family=family, freq_weights=frame["w"] / frame["w"].mean()
    ).fit()
    effect = (result.bse.to_numpy() / naive.bse.to_numpy()) ** 2
    assert ((effect > 0.8) & (effect < 8.0)).all()  # the usual range of design effects in NHANES
    assert result.params["x"] > 0.0 and result.pvalues["x"] < 1e-10


def test_nhanes_by_ethnic_group_is_refused_under_the_usual_policy(nhanes):
    with pytest.raises(PolicyError, match=r"Black: its policy \(minimum count\).*use labels that differ"):
        survey(model("y", F.Binomial(), "Race1", nhanes, ("psu", "SDMVSTRA")), strata="SDMVSTRA")
