"""People whose rows are at two sites: labels of groups are compared by keyed hashes, in all families."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import replace

import cluster_oracles as oracle
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.testing import assert_allclose
from test_clusters import MODELS as CLUSTERED
from test_clusters import OPEN, draw

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.models.horizontal.clusters import SharedLabels

MODELS = {name: case for name, case in CLUSTERED.items() if name not in ("OLS", "GLM")}
MODELS |= {
    "mixed": (fs.FederatedMixed, "y ~ x + z + (1 | cluster)", {}, {}),
    "mixed, binary": (
        fs.FederatedMixed,
        "b ~ x + z + (1 | cluster)",
        {"family": sm.families.Binomial()},
        {},
    ),
}
"""Families whose clusters are local: those that add up scores of equal labels have no alarm."""


def people(shared=12, clusters=60, seed=3):
    """Clusters with long numbers as labels; some have half of their rows at another site."""
    table = draw(clusters, seed=seed)
    half = table.groupby("cluster").cumcount() >= table.groupby("cluster")["x"].transform("size") / 2.0
    away = half & (table["cluster"] < shared)
    table.loc[away, "site"] = table["site"].map({"a": "b", "b": "c", "c": "a"})[away]
    return table.assign(cluster=table["cluster"] * 7919 + 104729)


def fitted(name, table, policy=OPEN, **more):
    made, formula, settings, arguments = MODELS[name]
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    return made.from_formula(formula, partition, **settings).fit(
        **({} if "mixed" in name else {"local": False}), **arguments | more
    )


@functools.cache
def crossing(name):
    """A fit to people of whom twelve have rows at two sites."""
    return fitted(name, people())


def note_of(fit):
    found = fit.diagnostics().set_index("kind")
    (kind,) = [kind for kind in ("shared_labels", "local_groups") if kind in found.index]
    return kind, found.loc[kind, "note"], found.loc[kind, "severity"]


@pytest.mark.parametrize("name", MODELS)
def test_labels_at_two_sites_are_counted_at_the_top(name, tmp_path):
    fit = crossing(name)
    kind, text, severity = note_of(fit)
    assert (kind, severity) == ("shared_labels", "critical")
    assert abs(int(re.search(r"about (\d+) labels of 'cluster'", text).group(1)) - 12) <= 2
    assert "*** ONE PERSON AT TWO SITES" in str(fit.summary())
    fit.save(tmp_path / "fit.fed")
    assert note_of(fs.load(tmp_path / "fit.fed"))[1] == text


@pytest.mark.parametrize("name", MODELS)
def test_labels_of_one_site_each_are_no_alarm(name):
    kind, text, severity = note_of(fitted(name, people(0)))
    assert kind == "local_groups" and severity == "info" and "show none that is at several sites" in text


def test_numbers_from_one_on_at_all_sites_are_different_people():
    table = people(0)
    table["cluster"] = table.groupby("site")["cluster"].rank(method="dense").astype(int)
    kind, text, severity = note_of(fitted("GEE", table))
    assert kind == "local_groups" and severity == "info" and "numbers from one on at all sites" in text
    model = fs.FederatedMixed.from_formula(
        "y ~ x + z + (1 | site/cluster)", fs.ClientPartition.from_frame(table, by="site", policy=OPEN)
    )
    notes = model.fit().diagnostics()
    assert (notes["kind"] == "local_groups").sum() == 2 and "shared_labels" not in set(notes["kind"])


def run_remedy(text, formula, table, **settings):
    """Run the fit that a note names."""
    named = re.search(r"Use (Federated\w+)\.from_formula\(\.\.\., (.*?)\)\.fit\((.*?)\), which", text)
    made, more, arguments = named.groups()
    partition = fs.ClientPartition.from_frame(table, by="site", policy=OPEN)
    model = getattr(fs, made).from_formula(formula, partition, **settings, **eval(f"dict({more})"))
    return model.fit(**eval(f"dict({arguments})"))


@pytest.mark.parametrize("name", ["GEE", "mixed", "mixed, binary"])
def test_the_remedy_runs_and_has_the_errors_of_the_pooled_rows(name):
    table, settings, y = people(), MODELS[name][2], "b" if "binary" in name else "y"
    family = settings.get("family", sm.families.Gaussian())
    text, given = note_of(crossing(name))[1], {"family": family} if "binary" in name else {}
    found = run_remedy(text, f"{y} ~ x + z", table, **given)
    cov, effective = oracle.glm(f"{y} ~ x + z", table, family, "cluster")
    assert_allclose(found.bse, np.sqrt(np.diag(cov)), rtol=1e-6)
    assert_allclose(found.df, effective - 1.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["GEE", "ordinal", "multinomial"])
def test_the_bound_holds(name):
    """Errors with the rows of a person in one place are at most 1.41 times those of local clusters."""
    table = people(60)
    local, pooled = fitted(name, table), fitted(name, table.assign(site="a"))
    ratio = pooled.bse / local.bse
    assert ratio.max() > 1.02 and ratio.max() <= 1.4143


@pytest.mark.parametrize("name", MODELS)
def test_labels_leave_as_masked_counts_and_are_explained(name):
    table = draw(120, sites=3, sizes=(4, 5), seed=4)
    policy = OPEN if name == "Cox, common" else fs.Policy.strict()
    made, formula, settings, arguments = MODELS[name]
    model = made.from_formula(
        formula, fs.ClientPartition.from_frame(table, by="site", policy=policy), **settings
    )
    expected = model.explain(**arguments).tidy()
    fit = model.fit(**arguments)
    released = fit.ledger.releases().query("step == 'count_labels'")
    key = ["step", "array", "kind", "masked"]
    own = set(released[key].apply(tuple, axis=1))
    assert ("count_labels", "labels", "presence", True) in own
    assert own <= set(expected[key].apply(tuple, axis=1))
    assert released.query("array == 'labels' and sender != 'coordinator'")["masked"].all()


@pytest.mark.parametrize("what", ["secret", "few"])
def test_a_fit_without_a_comparison_says_so(what):
    policy = replace(OPEN, min_count=30 if what == "few" else 1)  # more than the labels of a site
    partition = fs.ClientPartition.from_frame(people(), by="site", policy=policy)
    site = partition.sites["b"]
    if what == "secret":
        site._data = replace(site._data, shared_seed=None)
    fit = fs.FederatedOrdinal.from_formula("o ~ x + z", partition, labels=["cluster"]).fit(
        cov_type="cluster", cov_kwds={"groups": "cluster"}, local=False
    )
    kind, text, severity = note_of(fit)
    assert (
        kind == "local_groups" and severity == "info" and "Labels were not compared: a site has few" in text
    )


@pytest.mark.parametrize(("crowded", "found"), [(3, 0), (9, 7), (0, 0)])
def test_chance_is_no_alarm(crowded, found):
    """256 labels in 16,384 buckets: two have two labels by chance."""
    shared = SharedLabels("g", 256.0, float(crowded), 2**14, True, False)
    assert shared.by_chance == pytest.approx(256 * 255 / 2 / 2**14, rel=0.02)
    assert shared.found == found
    assert not replace(shared, compared=False).found


def test_weights_on_few_rows_have_a_remedy_and_no_internal_error():
    table = people()
    kept = (table["site"] != "a") | table["cluster"].isin(table["cluster"].unique()[:3])
    partition = fs.ClientPartition.from_frame(table[kept], by="site", policy=replace(OPEN, min_count=5))
    model = fs.FederatedOrdinal.from_formula("o ~ x + z", partition)
    with pytest.raises(EstimationError, match="weight on more than a few rows of every site"):
        model.fit(local=False)


ALL_MODELS = {
    "OLS": lambda p: fs.FederatedOLS.from_formula("num ~ age", p),
    "GLORE": lambda p: fs.GLORE.from_formula("num > 0 ~ age", p),
    "ordinal": lambda p: fs.FederatedOrdinal.from_formula("num ~ age", p),
    "multinomial": lambda p: fs.FederatedMultinomial.from_formula("C(cp) ~ age", p),
    "Cox": lambda p: fs.FederatedCox.from_formula("Surv(age, num > 0) ~ sex", p),
    "GEE": lambda p: fs.FederatedGEE.from_formula("num ~ age", p, groups="pair"),
    "mixed": lambda p: fs.FederatedMixed.from_formula("num ~ age + (1 | pair)", p),
    "FedAvg": lambda p: fs.FedAvg.from_formula("num > 0 ~ age", p),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL_MODELS)
def test_keys_that_two_sites_have_stand_at_the_top_of_every_model(name):
    table = fs.datasets.make_hospitals()
    table = table.assign(id=range(len(table)), pair=[f"p{i // 4}" for i in range(len(table))])
    again = table.iloc[:40].assign(hospital=list(table["hospital"].iloc[40:].drop_duplicates())[-1])
    again = again[again["hospital"] != table["hospital"].iloc[0]]
    both = pd.concat([table, again]).drop_duplicates(["id", "hospital"])
    shared = int((both.groupby("id")["hospital"].transform("nunique") > 1).sum())
    with pytest.warns(fs.errors.DataWarning, match=f"{shared} of {len(both):,} rows have a key"):
        partition = fs.ClientPartition.from_frame(both, by="hospital", on="id")
    fit = ALL_MODELS[name](partition).fit()
    top = fit.summary().as_text()
    assert f"ONE PERSON AT TWO SITES: the keys of {shared} rows" in " ".join(top.split())
    with warnings.catch_warnings():
        warnings.simplefilter("error", fs.errors.DataWarning)
        apart = fs.ClientPartition.from_frame(table, by="hospital", on="id")
    assert "shared_keys" not in set(ALL_MODELS[name](apart).fit().diagnostics()["kind"])


@pytest.mark.filterwarnings("ignore")
def test_the_remedy_for_shared_keys_runs():
    table = fs.datasets.make_hospitals()
    table = table.assign(id=[f"k{i}" for i in range(len(table))])
    both = pd.concat([table, table.assign(hospital=table["hospital"].to_numpy()[::-1])]).drop_duplicates(
        ["id", "hospital"]
    )
    partition = fs.ClientPartition.from_frame(both, by="hospital", policy=fs.Policy(min_count=1))
    kwds = {"groups": "id", "correction": "CR1"}
    model = fs.FederatedGLM.from_formula("num ~ age", partition, labels=["id"])
    clustered = model.fit(cov_type="cluster", cov_kwds=kwds)
    rows = both.dropna(subset=["num", "age"])
    pooled = smf.ols("num ~ age", rows).fit(
        cov_type="cluster", cov_kwds={"groups": rows["id"].astype("category").cat.codes}
    )
    np.testing.assert_allclose(clustered.bse, pooled.bse, rtol=0.01)
    assert (clustered.bse > 1.2 * fs.FederatedGLM.from_formula("num ~ age", partition).fit().bse)["age"]
