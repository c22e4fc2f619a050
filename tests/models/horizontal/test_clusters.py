"""Covariances for clusters in all families: CR2 of the pooled rows, degrees of freedom, alarms, remedies."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import cluster_oracles as oracle
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose
from scipy import stats

import fedstat as fs
from fedstat.errors import EstimationError, MessageError, ModelError, PolicyError, Remedy
from fedstat.models.horizontal.clusters import FEW, FEW_UNCORRECTED, Clustering, own_inverse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_clusters

F = sm.families
OPEN = fs.Policy(min_count=1, min_level_count=1, min_events=1, max_parameters=1e9)
CR1 = {"groups": "cluster", "correction": "CR1"}


def draw(clusters=14, sites=3, sizes=(5, 25), seed=1):
    """Clusters of unequal size and with an effect, each at one site; x is constant in a cluster."""
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(clusters), rng.integers(*sizes, clusters))
    n = len(cluster)
    x, z = rng.normal(size=clusters)[cluster], 5.0 + 2.0 * rng.normal(size=n)
    effect = 0.6 * rng.normal(size=clusters)[cluster]
    latent = effect + 0.2 * z + rng.logistic(size=n)
    return pd.DataFrame(
        {
            "cluster": cluster,
            "site": np.array(list("abcdefgh"))[cluster % sites],
            "two": cluster % 2,
            "x": x,
            "z": z,
            "y": effect + 0.3 * z + rng.normal(size=n),
            "b": (latent > 1.0) * 1.0,
            "k": rng.poisson(np.exp(0.3 * effect + 0.1 * z)),
            "w": rng.integers(1, 4, n),
            "off": rng.normal(size=n) * 0.1,
            "o": np.digitize(latent, [0.0, 2.0]),
            "time": np.ceil(20.0 * rng.exponential(np.exp(-effect))),
            "event": (rng.random(n) < 0.8) * 1,
        }
    )


TABLE = draw()
LABELS = {"labels": ["cluster"]}
EXCHANGEABLE = {"groups": "cluster", "cov_struct": "exchangeable"}
BY_CLUSTER = {"cov_type": "cluster", "cov_kwds": {"groups": "cluster"}}
MODELS = {
    "OLS": (fs.FederatedOLS, "y ~ x + z", LABELS, BY_CLUSTER),
    "GLM": (fs.FederatedGLM, "b ~ x + z", LABELS | {"family": F.Binomial()}, BY_CLUSTER),
    "GEE": (fs.FederatedGEE, "y ~ x + z", {"groups": "cluster"}, {}),
    "ordinal": (fs.FederatedOrdinal, "o ~ x + z", LABELS, BY_CLUSTER),
    "multinomial": (fs.FederatedMultinomial, "o ~ x + z", LABELS, BY_CLUSTER),
    "AFT": (fs.FederatedAFT, "Surv(time, event) ~ x + z + cluster(cluster)", {}, {}),
    "Cox": (fs.FederatedCox, "Surv(time, event) ~ x + z + cluster(cluster)", {}, {}),
    "Cox, common": (
        fs.FederatedCox,
        "Surv(time, event) ~ x + z + cluster(cluster)",
        {},
        {"baseline": "common", "grid": 5, "until": 60},
    ),
}
"""Model, formula, arguments of model and fit. A family that takes clusters has a line here."""
UNCORRECTED = {
    "OLS": {"cov_type": "cluster", "cov_kwds": CR1},
    "GLM": {"cov_type": "cluster", "cov_kwds": CR1},
    "GEE": {"cov_type": "robust"},
    "ordinal": {"cov_type": "cluster", "cov_kwds": CR1},
    "multinomial": {"cov_type": "cluster", "cov_kwds": CR1},
    "AFT": {"cov_kwds": {"correction": "CR0"}},
    "Cox": {"cov_kwds": {"correction": "CR0"}},
    "Cox, common": {"cov_kwds": {"correction": "CR0"}, "baseline": "common", "grid": 5, "until": 60},
}


def model_of(name, table=TABLE, policy=OPEN, **more):
    made, formula, settings, _ = MODELS[name]
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    return made.from_formula(formula, partition, **settings, **more)


@functools.cache
def plain(name, corrected=True):
    """A fit that several tests read."""
    return model_of(name).fit(**(MODELS[name][3] if corrected else UNCORRECTED[name]))


def fitted(name, table=TABLE, policy=OPEN, **more):
    return model_of(name, table, policy).fit(**MODELS[name][3] | more)


def assert_covariance(fit, expected, close=1e-8):
    cov, effective = expected
    assert_allclose(fit.cov_params(), cov, rtol=close, atol=close * np.abs(np.diag(cov)).min())
    assert_allclose(fit.df, effective - 1.0, rtol=close)
    half = stats.t.isf(0.025, effective - 1.0) * np.sqrt(np.diag(cov))
    assert_allclose(fit.conf_int()[1] - fit.params, half, rtol=close)


# -- the pooled rows -----------------------------------------------------------------------------

CASES = {
    "normal": ("y ~ x + z", F.Gaussian(), {}),
    "logit": ("b ~ x + z", F.Binomial(), {}),
    "counts": ("k ~ x + z", F.Poisson(), {"offset": "off"}),
    "weights": ("y ~ x + z", F.Gaussian(), {"freq_weights": "w"}),
    "gamma": ("I(k + 1) ~ x + z", F.Gamma(F.links.Log()), {}),
}


@pytest.mark.parametrize(
    ("case", "masked"), [*((case, True) for case in CASES), ("counts", False), ("weights", False)]
)
def test_glm_is_cr2_of_the_pooled_rows(case, masked):
    formula, family, roles = CASES[case]
    partition = fs.ClientPartition.from_frame(TABLE, by="site", policy=OPEN)
    model = fs.FederatedGLM.from_formula(formula, partition, family=family, **LABELS, **roles)
    fit = model.fit(masked=masked, tol=1e-12, **BY_CLUSTER)
    given = {role: TABLE[column] for role, column in roles.items()}
    assert_covariance(fit, oracle.glm(formula, TABLE, family, "cluster", **given))


@pytest.mark.parametrize("groups", ["site", "two"])
def test_sites_and_clusters_over_several_sites_are_those_of_the_pooled_rows(groups):
    """Scores of a cluster at two sites are added before they are corrected."""
    table = draw(sites=6)
    partition = fs.ClientPartition.from_frame(table.assign(two=table["x"] > 0.0), by="site", policy=OPEN)
    labels = [] if groups == "site" else [groups]
    model = fs.FederatedOLS.from_formula("y ~ z", partition, labels=labels)
    fit = model.fit(cov_type="cluster", cov_kwds={"groups": groups})
    pooled = table.assign(two=table["x"] > 0.0)
    assert_covariance(fit, oracle.glm("y ~ z", pooled, F.Gaussian(), groups))


def test_gee_of_independent_rows_is_the_glm():
    assert_covariance(fitted("GEE"), oracle.glm("y ~ x + z", TABLE, F.Gaussian(), "cluster"))


def test_categories_are_cr2_of_the_pooled_rows():
    X, y, code = np.column_stack([np.ones(len(TABLE)), TABLE[["x", "z"]]]), TABLE["o"], TABLE["cluster"]
    fit = fitted("multinomial", tol=1e-12)
    assert_covariance(fit, oracle.multinomial(X, y, fit.params.to_numpy().reshape(2, 3), code))
    fit = fitted("ordinal", tol=1e-12)
    thresholds = fit.thresholds["estimate"].to_numpy()
    cov, effective = oracle.ordinal(X[:, 1:], y, thresholds, fit.params.iloc[:2].to_numpy(), code)
    assert_allclose(fit.bse.iloc[:2], np.sqrt(np.diag(cov))[2:], rtol=1e-8)
    assert_allclose(fit.thresholds["std_error"], np.sqrt(np.diag(cov))[:2], rtol=1e-8)
    assert_allclose(fit.df, np.append(effective[2:], effective[:2]) - 1.0, rtol=1e-8)


def test_cox_is_a_poisson_regression_of_rows_at_risk():
    fit = fitted("Cox", ties="breslow", tol=1e-12)
    assert_covariance(fit, oracle.cox(TABLE, ["x", "z"], fit.params.to_numpy(), "site"), 1e-7)
    common = fitted("Cox, common", ties="breslow")
    edges = common.grid
    rounded = TABLE.assign(time=edges[np.minimum(np.searchsorted(edges, TABLE["time"]), len(edges) - 1)])
    rounded["event"] = TABLE["event"] * (TABLE["time"] <= edges[-1])
    expected = oracle.cox(rounded.assign(all=0), ["x", "z"], common.params.to_numpy(), "all")
    assert_covariance(common, expected, 1e-3)  # of the vector before the last step


def test_efron_ties_and_strata_add_up_to_the_information():
    """The leverages of a site's clusters are checked against its information: all ties of one site."""
    table = TABLE.assign(site="a", time=np.ceil(TABLE["time"] / 10.0))
    tied = fitted("Cox", table)
    assert_allclose(tied.bse, fitted("Cox", table, ties="breslow").bse, rtol=0.2)
    partition = fs.ClientPartition.from_frame(TABLE, by="site", policy=OPEN)
    formula = "Surv(time, event) ~ x + z + strata(two) + cluster(cluster)"
    fit = fs.FederatedCox.from_formula(formula, partition).fit(ties="breslow", tol=1e-12)
    expected = oracle.cox(TABLE, ["x", "z"], fit.params.to_numpy(), ["site", "two"])
    assert_covariance(fit, expected, 1e-7)


# -- degrees of freedom and tests ------------------------------------------------------------------


def test_equal_clusters_have_their_number_less_one():
    """The mean of equal clusters is the t test of their means."""
    table = draw(10, sizes=(12, 13))
    partition = fs.ClientPartition.from_frame(table, by="site", policy=OPEN)
    fit = fs.FederatedOLS.from_formula("y ~ 1", partition, **LABELS).fit(**BY_CLUSTER)
    means = table.groupby("cluster")["y"].mean()
    assert_allclose(fit.df, [9.0], rtol=1e-10)
    assert_allclose(fit.bse, means.std(ddof=1) / np.sqrt(10.0), rtol=1e-10)
    assert_allclose(fit.pvalues, stats.ttest_1samp(means, 0.0).pvalue, rtol=1e-8)


def test_tests_take_the_fewest_degrees_of_freedom_of_their_coefficients():
    fit = fitted("OLS")
    df = fit.df
    assert fit.df_inference == df.min() < df["z"] and fit.use_t
    single = fit.t_test(["z = 0", "x - z = 0"])
    assert_allclose(single.pvalue[0], fit.pvalues["z"])
    assert_allclose(single.df_denom, [df["z"], min(df["x"], df["z"])])
    # Hotelling: Wald's statistic over m, times (df - m + 1) / df.
    both, V, b = fit.wald_test("x = 0, z = 0"), fit.cov_params().iloc[1:, 1:], fit.params.iloc[1:]
    eta = min(df["x"], df["z"])
    F_ = b @ np.linalg.solve(V, b) / 2.0 * (eta - 1.0) / eta
    assert_allclose([both.statistic, both.df_denom], [F_, eta - 1.0])
    assert_allclose(both.pvalue, stats.f.sf(F_, 2, eta - 1.0))
    terms = fit.wald_test_terms().table
    assert_allclose(terms["pvalue"], fit.pvalues)
    assert_allclose([fit.fvalue, fit.f_pvalue], [both.statistic, both.pvalue])
    normal = model_of("OLS").fit(use_t=False, **BY_CLUSTER)
    assert normal.df_inference is None and np.isinf(normal.df).all()
    few = fit.wald_test(np.eye(3)) if df.min() < 2.0 else None
    assert few is None or np.isnan(few.statistic)


def test_predictions_and_effects_take_the_fewest():
    fit = fitted("GLM")
    limit = stats.t.isf(0.025, fit.df.min())
    frame = fit.get_prediction(TABLE.head(2)).summary_frame()
    assert (frame["mean_ci_upper"] < 1.0).all()
    effect = fit.effect("z", [4.0, 6.0], reference=4.0)
    assert_allclose(effect["conf_high"] - effect["estimate"], limit * effect["std_error"])
    effects = fit.get_margeff()
    assert_allclose(
        effects.conf_int().to_numpy()[:, 1] - effects.margeff, limit * effects.margeff_se, rtol=1e-8
    )


# -- alarms and remedies ---------------------------------------------------------------------------


@pytest.mark.parametrize(("correction", "few"), [("CR2", FEW), ("CR3", FEW), ("CR1", FEW_UNCORRECTED)])
def test_the_effective_number_decides_on_the_alarm(correction, few):
    names, terms = ["Intercept", "x", "z"], ["Intercept", "x", "z"]

    def alarms(*effective):
        found = Clustering("ward", 40, np.array(effective), correction)
        return [(note.severity, str(note)) for note in found.notes(names, terms, Remedy("remedy()"))]

    assert not alarms(1.0, few, 40.0)  # the intercept alone is no alarm
    ((severity, text),) = alarms(40.0, few - 0.01, 40.0)
    assert severity == "critical" and text.startswith("FEW CLUSTERS: 'x' rests on ")
    assert ("remedy()" in text) == (correction == "CR1")
    assert "2 coefficients" in alarms(40.0, few - 1.0, few - 2.0)[0][1]


@pytest.mark.parametrize("name", MODELS)
def test_the_remedy_that_an_alarm_names_runs(name):
    """An uncorrected covariance of fourteen clusters is announced at the top, and the remedy corrects."""
    fit = plain(name, corrected=False)
    note = fit.diagnostics().set_index("kind").loc["few_clusters"]
    assert note["severity"] == "critical" and str(fit.summary()).startswith("*** ")
    remedy = re.search(r"use (cov_\w+=.*)\.$", note["note"]).group(1)
    given = UNCORRECTED[name] | eval(f"dict({remedy})")
    corrected = model_of(name).fit(**given)
    assert_allclose(corrected.bse, plain(name).bse)
    assert (corrected.bse / fit.bse).max() > 1.02 and fit.estimate.df is None
    assert "few_clusters" not in corrected.diagnostics()["kind"].tolist()
    assert "CR2" in str(corrected.summary()) or "Kauermann" in str(corrected.summary())


@pytest.mark.filterwarnings("ignore:Federated Cox model did not converge")
@pytest.mark.parametrize("name", MODELS)
def test_few_effective_clusters_are_announced_with_the_correction_too(name):
    """One cluster has nearly all rows."""
    table = draw(14)
    large = pd.concat([table, *[table[table["cluster"] == 0]] * 30], ignore_index=True)
    fit = fitted(name, large, local=False)
    assert fit.df.min() < FEW - 1.0
    assert fit.diagnostics().set_index("kind").loc["few_clusters", "severity"] == "critical"
    assert str(fit.summary()).startswith("*** ") and "*** FEW CLUSTERS" in str(fit.summary())


@pytest.mark.filterwarnings("ignore:Federated Cox model did not converge")
@pytest.mark.parametrize("name", MODELS)
def test_a_coefficient_of_one_cluster_is_refused_and_the_remedy_runs(name):
    varied = TABLE.groupby("cluster")["o"].nunique()
    table = TABLE.assign(x=(TABLE["cluster"] == varied.index[varied == 3][0]) * 1.0)
    if "Cox" in name:  # a hazard that varies in time shares the effect with the other clusters
        fit = fitted(name, table)
        assert fit.df["x"] < 1.0 and "FEW CLUSTERS: 'x'" in str(fit.summary())
        return
    with pytest.raises(EstimationError, match="a coefficient rests on one cluster") as error:
        fitted(name, table)
    remedy = re.search(r"Use (cov_\w+=.*), or leave", str(error.value)).group(1)
    fit = model_of(name, table).fit(**MODELS[name][3] | eval(f"dict({remedy})"))
    assert np.isfinite(fit.bse).all()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "GEE"])
def test_unknown_corrections_are_refused(name):
    given = MODELS[name][3] | {"cov_kwds": {"groups": "cluster", "correction": "CR9"}}
    if "Cox" in name or name == "AFT":
        given["cov_kwds"].pop("groups")
    with pytest.raises(ModelError, match="cov_kwds: correction"):
        model_of(name).fit(**given)


SIMULATED = {
    "OLS": (fs.FederatedOLS, "y ~ x + z", LABELS, BY_CLUSTER),
    "GLM, binary": (fs.FederatedGLM, "b ~ x + z", LABELS | {"family": F.Binomial()}, BY_CLUSTER),
    "GEE, normal": (fs.FederatedGEE, "y ~ x + z", EXCHANGEABLE, {}),
    "GEE, binary": (fs.FederatedGEE, "b ~ x + z", EXCHANGEABLE | {"family": F.Binomial()}, {}),
    "Cox": MODELS["Cox"],
    "ordinal": MODELS["ordinal"],
    "multinomial": MODELS["multinomial"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_the_simulation_has_the_intervals_of_fits(name, runs=60):
    """Sixty tables of twenty clusters at two sites, as in ``benchmarks/bench_clusters.py``."""
    made, formula, settings, arguments = SIMULATED[name]
    design, rng = bench_clusters.DESIGNS[name], np.random.default_rng(1)
    for _ in range(runs):
        table = bench_clusters.draw(rng, design, 20)
        found = design.solve(table)
        se, own = bench_clusters.intervals(found, 20, "CR2")
        partition = fs.ClientPartition.from_frame(
            table.assign(site=table["cluster"] % 2), by="site", policy=OPEN
        )
        fit = made.from_formula(formula, partition, **settings).fit(local=False, masked=False, **arguments)
        order = np.concatenate(found.places)
        names = [name for end in "xz" for name in fit.params.index if name in (end, f"1: {end}", f"2: {end}")]
        assert_allclose(fit.params[names], found.beta[order], rtol=1e-3, atol=1e-4)
        half = stats.t.isf(0.025, own.df[order]) * se[order]
        assert_allclose(fit.conf_int().loc[names, 1] - fit.params[names], half, rtol=2e-3)


# -- saved results, dry run, disclosure --------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_results_are_saved_and_explained(name, tmp_path):
    for corrected in (True, False) if name == "OLS" else (True,):
        fit = plain(name, corrected)
        expected = model_of(name).explain(**(MODELS[name][3] if corrected else UNCORRECTED[name])).tidy()
        fit.save(tmp_path / "fit.fed")
        again = fs.load(tmp_path / "fit.fed")
        assert again.summary().as_text() == fit.summary().as_text()
        assert_allclose(again.df, fit.df)
        released = fit.ledger.releases()
        key = ["step", "array", "kind"]
        own = set(released[released["array"] == "concentration"][key].apply(tuple, axis=1))
        assert own and own <= set(expected[key].apply(tuple, axis=1))


@pytest.mark.parametrize("name", MODELS)
def test_one_number_leaves_for_each_coefficient(name):
    """Shares of clusters leave as p sums of squares, not as matrices that clusters could be solved from."""
    fit = plain(name)
    released = fit.ledger.releases()
    shapes = released[released["array"] == "concentration"]
    assert len(shapes) and shapes["masked"].all()
    assert set(shapes["shape"].map(lambda shape: int(np.prod(shape)))) == {len(fit.params)}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Cox, common"])
def test_the_strict_policy_allows_it(name):
    table = draw(120, sites=3, sizes=(4, 5), seed=4)
    fit = fitted(name, table, fs.Policy.strict(), local=False)
    assert np.isfinite(fit.bse).all() and fit.df.min() > 20.0


def test_products_of_shared_clusters_need_more_rows_than_scores():
    """Five equations about a column follow from score and products of four columns."""
    table = draw(12, sites=3, sizes=(9, 10))
    table["site"] = np.array(list("abc"))[np.arange(len(table)) % 3]  # three rows of a cluster at a site
    policy = fs.Policy(min_count=3, min_level_count=1, min_events=1)
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    model = fs.FederatedOLS.from_formula("y ~ x + z", partition, **LABELS)
    with pytest.raises(PolicyError, match="every cluster that several sites have") as error:
        model.fit(**BY_CLUSTER)
    assert '"correction": "CR1"' in str(error.value)
    fit = model.fit(cov_type="cluster", cov_kwds=CR1)
    theirs = sm.OLS(table["y"], sm.add_constant(table[["x", "z"]])).fit(
        cov_type="cluster", cov_kwds={"groups": table["cluster"]}
    )
    assert_allclose(fit.bse, theirs.bse, rtol=1e-9)
    assert (fit.basis.clustering.effective == 12.0).all()


def test_an_inverse_that_singles_out_a_cluster_is_refused():
    own = np.diag([4.0, 2.0])
    assert own_inverse("A", own, np.eye(2), np.linalg.inv(own + np.eye(2))).shape == (2, 2)
    with pytest.raises(MessageError, match="not that of an information"):
        own_inverse("A", own, np.eye(2), np.linalg.inv(own) * 1.1)
