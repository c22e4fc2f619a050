"""Tables of counts: the owner declares how many entities a row represents, and policies count them."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from operating import make_federation
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import DesignError, ModelError, PartitionError, PolicyError
from fedstat.federation.disclosure.facts import TABLE_OF_COUNTS
from fedstat.federation.tables.aligned_table import row_keys
from fedstat.federation.tables.sources import Source, open_source

CELLS = itertools.product(["Admitted", "Rejected"], ["Male", "Female"], "ABCDEF")
UCB = pd.DataFrame(CELLS, columns=["Admit", "Gender", "Dept"])
ADMITTED = [512, 353, 120, 138, 53, 22, 89, 17, 202, 131, 94, 24]
UCB["Freq"] = [*ADMITTED, 313, 207, 205, 279, 138, 351, 19, 8, 391, 244, 299, 317]
UCB["Office"] = UCB["Dept"].map(dict(zip("ABCDEF", np.repeat(["North", "East", "South"], 2), strict=True)))
POLICIES = {"default": None, "strict": fs.Policy.strict()}
# coef(summary(clm(Sat ~ Infl + Type + Cont, weights = Freq, data = MASS::housing)))[, 1:2]
HOUSING = {
    "InflMedium": (0.566393737902, 0.1046527813639),
    "InflHigh": (1.288819110364, 0.1271561445676),
    "TypeApartment": (-0.572350002038, 0.1192380085964),
    "TypeAtrium": (-0.366186370687, 0.1551733320186),
    "TypeTerrace": (-1.091014658963, 0.1514860185608),
    "ContHigh": (0.360284004567, 0.0955357950023),
}
SATISFIED = itertools.product(
    ["Low", "High"], ["Tower", "Apartment", "Atrium", "Terrace"], ["Low", "Medium", "High"], [1, 2, 3]
)
FREQUENCIES = """
21 21 28 34 22 36 10 11 36 61 23 17 43 35 40 26 18 54 13 9 10 8 8 12
6 7 9 18 6 7 15 13 13 7 5 11 14 19 37 17 23 40 3 5 23 78 46 43
48 45 86 15 25 62 20 23 20 10 22 24 7 10 21 57 23 13 31 21 13 5 6 13
"""


def housing():
    """MASS's table of 72 rows and 1,681 people, as two owners of buildings hold it."""
    table = pd.DataFrame(SATISFIED, columns=["Cont", "Type", "Infl", "Sat"])
    table["Infl"] = pd.Categorical(table["Infl"], ["Low", "Medium", "High"])
    table["Type"] = pd.Categorical(table["Type"], ["Tower", "Apartment", "Atrium", "Terrace"])
    table["Cont"] = pd.Categorical(table["Cont"], ["Low", "High"])
    table["Freq"] = list(map(int, FREQUENCIES.split()))
    assert table["Freq"].sum() == 1681
    halves = table["Freq"] // 2
    return pd.concat([table.assign(Freq=halves, s="a"), table.assign(Freq=table["Freq"] - halves, s="b")])


@pytest.mark.parametrize("policy", POLICIES)
def test_people_are_counted_and_not_rows(policy):
    partition = fs.ClientPartition.from_frame(UCB, by="Office", counts="Freq", policy=POLICIES[policy])
    assert partition.n_entities == 4526 and "Freq" not in partition.pooled_columns
    fit = fs.GLORE.from_formula("Admit == 'Admitted' ~ Gender", partition).fit()
    rows = UCB.loc[UCB.index.repeat(UCB["Freq"])]
    odds = pd.crosstab(rows["Gender"], rows["Admit"]).pipe(lambda t: t["Admitted"] / t["Rejected"])
    assert_allclose(fit.params["Gender[T.Male]"], np.log(odds["Male"] / odds["Female"]), rtol=1e-9)
    assert fit.nobs == 4526
    table = fs.table_one(partition, ["Gender"], by="Admit").to_frame()
    assert table.loc[("n", ""), "all"] == "4,526"


def test_estimates_are_those_of_r():
    partition = fs.ClientPartition.from_frame(UCB, by="Office", counts="Freq")
    fit = fs.GLORE.from_formula("Admit == 'Admitted' ~ C(Gender, Treatment('Male')) + Dept", partition).fit()
    # coef(summary(glm(Admit == "Admitted" ~ Gender + Dept, binomial, UCBAdmissions, weights = Freq)))
    right = [0.5820513952760, 0.0998700881593, -0.0433979312092, -1.2625980223792]
    right += [-1.2946064687482, -1.7393057378155, -3.3064800558869]
    assert_allclose(fit.params, right, rtol=1e-8)
    assert_allclose(fit.bse.iloc[1], 0.0808464647066, rtol=1e-6)
    partition = fs.ClientPartition.from_frame(housing(), by="s", counts="Freq")
    fit = fs.FederatedOrdinal.from_formula("Sat ~ Infl + Type + Cont", partition).fit()
    names = [name.replace("[T.", "").replace("]", "") for name in fit.params.index]
    for name, (estimate, error) in HOUSING.items():
        j = names.index(name)
        assert_allclose([fit.params.iloc[j], fit.bse.iloc[j]], [estimate, error], rtol=1e-6)


FAMILIES = {
    "GLORE": ("ill ~ sex + old", {}),
    "FederatedOLS": ("ill ~ sex + old", {}),
    "FederatedGLM": ("ill ~ sex + old", {"family": "Poisson"}),
    "FederatedOrdinal": ("grade ~ sex", {}),
    "FederatedMultinomial": ("grade ~ sex", {}),
    "FederatedCox": ("Surv(t, ill) ~ sex", {}),
    "FedAvg": ("ill ~ sex", {"family": "Binomial"}),
}


def cells():
    rng = np.random.default_rng(3)
    each = [["f", "m"], [0, 1], [0, 1], ["1", "2", "3"], [1.0, 2.0], list("abc")]
    table = pd.DataFrame(itertools.product(*each), columns=["sex", "ill", "old", "grade", "t", "s"])
    table["grade"] = table["grade"].astype(int)
    return table.assign(n=rng.integers(0, 9, len(table)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_family_fits_the_people(family, policy):
    import statsmodels.api as sm

    formula, settings = FAMILIES[family]
    if "family" in settings:
        settings = {"family": getattr(sm.families, settings["family"])()}
    more = {"rounds": 3, "batch_size": None} if family == "FedAvg" else {}
    table = cells()
    repeated = table.loc[table.index.repeat(table["n"])].drop(columns="n")

    def fit(frame, **counts):
        partition = fs.ClientPartition.from_frame(frame, by="s", policy=POLICIES[policy], **counts)
        return getattr(fs, family).from_formula(formula, partition, **settings).fit(**more)

    counted, people = fit(table, counts="n"), fit(repeated)
    assert_allclose(counted.params, people.params, rtol=1e-10, atol=1e-12)
    assert counted.nobs == len(repeated)


def test_tables_of_counts_and_of_people_are_one_analysis():
    table = cells()
    north, south = table[table["s"] == "a"], table[table["s"] != "a"]
    people = south.loc[south.index.repeat(south["n"])].drop(columns=["n", "s"])
    frames = {"North": north.drop(columns="s"), "South": people}
    partition = fs.ClientPartition.from_frames(frames, layout="horizontal", counts={"North": "n"})
    assert partition.n_entities == table["n"].sum()
    assert pickle.loads(pickle.dumps(partition)).n_entities == partition.n_entities


@pytest.mark.parametrize("policy", POLICIES)
def test_a_refused_table_of_counts_names_the_remedy_which_runs(policy):
    def fit(role, **counts):
        # Each site has four rows, as many as fewer than the minimum.
        few = UCB[UCB["Dept"].isin(list("AB"))]
        partition = fs.ClientPartition.from_frame(few, by="Dept", policy=POLICIES[policy], **counts)
        return fs.GLORE.from_formula("Admit == 'Admitted' ~ Gender", partition, **role).fit()

    with pytest.raises(PolicyError) as caught:
        fit({"freq_weights": "Freq"})
    assert TABLE_OF_COUNTS in str(caught.value)
    if policy == "default":
        assert "the owner's setting is min_count" in str(caught.value)
        assert fit({}, counts="Freq").nobs == 1518
    with pytest.raises(ModelError, match=r"no column 'Freq' .* \(counts\), .* leave it out"):
        fit({"freq_weights": "Freq"}, counts="Freq")


def test_a_refused_level_names_the_setting_and_the_remedy():
    partition = fs.ClientPartition.from_frame(UCB, by="Office")
    with pytest.raises(DesignError, match=r"5 rows over all sites.* min_count of the partition") as no:
        fs.GLORE.from_formula("Admit == 'Admitted' ~ Dept", partition, freq_weights="Freq")
    assert TABLE_OF_COUNTS in str(no.value)
    with pytest.raises(DesignError, match="min_count of the partition") as no:
        fs.GLORE.from_formula("Admit == 'Admitted' ~ Dept", partition)
    assert TABLE_OF_COUNTS not in str(no.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.assign(Freq=t["Freq"] + 0.5), "column 'Freq': 24 values are no whole numbers"),
        (lambda t: t.assign(Freq=t["Freq"].where(t.index > 0, -1)), "column 'Freq': 1 values are no whole"),
        (lambda t: t.assign(Freq=t["Freq"].where(t.index > 1)), "column 'Freq': 2 values are no whole"),
        (lambda t: t.assign(Freq=t["Freq"] * 10**5), "more than 10,000,000 entities"),
        (lambda t: t.assign(Freq=t["Freq"].astype(str)), "column 'Freq': counts are whole numbers"),
        (lambda t: t.drop(columns="Freq"), "the table has no column 'Freq', which counts names"),
    ],
)
def test_columns_that_are_no_counts(change, text):
    with pytest.raises(PartitionError, match=text):
        fs.ClientPartition.from_frame(change(UCB), by="Office", counts="Freq")


def test_where_counts_have_no_place():
    with pytest.raises(PartitionError, match=r"counts is for sites with different rows.*Leave counts= out"):
        fs.ClientPartition.from_frame(UCB, columns={"A": ["Dept"], "B": ["Admit"]}, counts="Freq")
    with pytest.raises(PartitionError, match="Leave on= out"):
        fs.ClientPartition.from_frames({"A": UCB}, "Dept", layout="horizontal", counts="Freq")
    with pytest.raises(PartitionError, match="counts names 'B', which is no site"):
        fs.ClientPartition.from_frames({"A": UCB}, layout="horizontal", counts={"B": "Freq"})


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_source_of_counts(tmp_path, ending):
    table = UCB.assign(id=np.arange(24))
    path = tmp_path / f"ucb.{ending}"
    table.to_csv(path, index=False) if ending == "csv" else table.to_parquet(path)
    source = Source("North", ending, path=str(path), key=("id",), counts="Freq")
    opened = open_source(source)
    assert opened.n_rows == 4526 and opened.columns == ("Admit", "Gender", "Dept", "Office")
    if ending == "csv":  # the entities of a row have a key each, by which they are recognized
        assert len(np.unique(row_keys(opened), axis=0)) == 4526
    with pytest.raises(PartitionError, match="unknown entries"):
        Source.from_mapping("North", {"kind": "csv", "path": str(path), "count": "Freq"})


def test_a_served_table_of_counts(tmp_path, capsys):
    table = cells().drop(columns="t")
    frames = {site.upper(): rows.drop(columns="s") for site, rows in table.groupby("s")}
    make_federation(tmp_path, frames, policy=fs.Policy())
    for name in frames:
        path = tmp_path / name / "site.toml"
        path.write_text(path.read_text().replace("[data]\n", '[data]\ncounts = "n"\n', 1))
    federation = Federation(tmp_path)
    fit = fs.GLORE.from_formula("ill ~ sex + old", federation.connect()).fit()
    for site in federation.sites.values():
        site.site.site_ledger.store.close()
    here = fs.ClientPartition.from_frame(table, by="s", counts="n")
    assert_allclose(fit.params, fs.GLORE.from_formula("ill ~ sex + old", here).fit().params, rtol=1e-10)
