"""Tables over sites with different columns are pandas' tables of the joined entities."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import fedstat as fs
from fedstat.errors import EstimationError, FormulaError, ModelError, PolicyError
from fedstat.models.descriptive.columns import ColumnPair

N = 600
RNG = np.random.default_rng(0)
PEOPLE = pd.DataFrame(
    {
        "id": np.arange(N),
        "age": RNG.normal(60.0, 9.0, N),
        "sex": RNG.choice(["f", "m"], N),
        "arm": RNG.choice(["a", "b", "c"], N),
        "bmi": RNG.normal(27.0, 4.0, N),
        "smoker": RNG.choice(["no", "yes"], N),
    }
)
PEOPLE["bmi"] += 0.1 * PEOPLE["age"]
RANGES = {"age": (0, 120), "bmi": (0, 100)}
PUBLISHED = {
    "clinic": {
        "age": {"kind": "number", "range": [0, 120]},
        "sex": {"kind": "category", "levels": ["f", "m"]},
    },
    "trial": {
        "arm": {"kind": "category", "levels": ["a", "b", "c"]},
        "bmi": {"kind": "number", "range": [0, 100]},
    },
    "survey": {"smoker": {"kind": "category", "levels": ["no", "yes"]}},
}


def frames(people=PEOPLE):
    trial = people.loc[:559, ["id", "arm", "bmi"]].copy()
    trial.loc[100:130, "bmi"] = np.nan
    return {
        "clinic": people.loc[40:, ["id", "age", "sex"]],
        "trial": trial,
        "survey": people[["id", "smoker"]],
    }


def partition(policy=None, people=PEOPLE, **more):
    published = PUBLISHED if policy == "strict" else None
    tables = frames(people)
    return fs.ClientPartition.from_frames(tables, on="id", policy=policy, published=published, **more)


JOINED = frames()["clinic"].merge(frames()["trial"], on="id").merge(frames()["survey"], on="id")


@pytest.mark.parametrize("policy", [None, "strict"])
@pytest.mark.parametrize(("row", "column"), [("sex", "arm"), ("arm", "sex"), ("smoker", "arm")])
def test_counts_between_sites_are_those_of_pandas(row, column, policy):
    found = fs.crosstab(partition(policy), row, column)
    joined = frames()["trial"].merge(frames()["survey"], on="id") if row == "smoker" else JOINED
    expected = pd.crosstab(joined[row], joined[column])
    assert found.to_numpy().tolist() == expected.to_numpy().tolist()
    assert (
        found.index.tolist() == expected.index.tolist()
        and found.columns.tolist() == expected.columns.tolist()
    )
    assert found.attrs["missing"] == N - len(joined)
    released = found.attrs["ledger"].releases()
    assert not (released["kind"] == "per entity").any()


@pytest.mark.parametrize(("policy", "rtol"), [(None, 1e-6), ("strict", 2e-3)])
def test_table_one_by_groups_of_another_site(policy, rtol):
    table = fs.table_one(partition(policy), "age + sex + bmi + C(smoker)", by="arm", smd=True, pvalues=True)
    tidy = table.tidy().set_index(["variable", "level", "group", "figure"])["value"]
    age, sex, bmi, smoker = table.variables
    for arm, part in JOINED.groupby("arm"):
        assert_allclose(tidy["age", "", arm, "mean"], part["age"].mean(), rtol=rtol)
        assert_allclose(tidy["age", "", arm, "sd"], part["age"].std(), rtol=rtol)
        assert tidy["sex", "f", arm, "count"] == (part["sex"] == "f").sum()
    for arm, part in frames()["trial"].groupby("arm"):
        assert_allclose(tidy["bmi", "", arm, "sd"], part["bmi"].std(), rtol=rtol)
    assert (age.missing, bmi.missing, smoker.missing) == (40, N - 529, 0)
    welch = stats.f_oneway(*(part["age"] for _, part in JOINED.groupby("arm")), equal_var=False).pvalue
    assert_allclose(age.p_value(), welch, rtol=100 * rtol)
    chi2 = stats.chi2_contingency(pd.crosstab(JOINED["arm"], JOINED["sex"]), correction=False).pvalue
    assert_allclose(sex.p_value(), chi2, rtol=1e-9)


def test_every_site_describes_its_own_columns():
    table = fs.table_one(partition(), "age + C(sex) + bmi")
    assert_allclose(
        table.variables[0].overall, (PEOPLE["age"][40:].mean(), PEOPLE["age"][40:].var()), rtol=1e-10
    )
    assert table.variables[1].counts.tolist() == [PEOPLE["sex"][40:].value_counts()[["f", "m"]].tolist()]
    assert table.variables[2].missing == N - 529


@pytest.mark.parametrize(("policy", "atol"), [(None, 1e-6), ("strict", 1e-3)])
def test_correlations_have_the_entities_of_each_pair(policy, atol):
    found = fs.corr(partition(policy), "age + bmi")
    pair = JOINED.dropna(subset=["bmi"])
    assert_allclose(found.loc["age", "bmi"], pair["age"].corr(pair["bmi"]), atol=atol)
    assert found.attrs["nobs"]["age"]["bmi"] == len(pair)
    if policy is None:
        found = fs.corr(partition(), "age + log(bmi) + bmi")
        own = frames()["trial"]["bmi"].dropna()
        assert_allclose(found.loc["bmi", "log(bmi)"], np.corrcoef(own, np.log(own))[0, 1], rtol=1e-9)


def test_two_categories_of_one_site():
    """The second category of a design has a reference level; a table counts it as well."""
    people = PEOPLE.assign(bmi=np.where(PEOPLE["bmi"] > 33.0, "high", "low"))
    trial = frames(people)["trial"].assign(bmi=people["bmi"])
    at = fs.ClientPartition.from_frames(frames() | {"trial": trial}, on="id")
    for row, column in (("arm", "bmi"), ("bmi", "arm")):
        assert fs.crosstab(at, row, column).equals(pd.crosstab(trial[row], trial[column]).astype("int64"))
    (found,) = fs.table_one(at, "bmi", by="arm").variables
    assert found.counts.tolist() == pd.crosstab(trial["arm"], trial["bmi"]).to_numpy().tolist()


def test_each_site_counts_its_own_numbers_on_intervals():
    exact = fs.Policy(min_count=1, min_level_count=1)
    trial = frames()["trial"].dropna()
    found = fs.quantiles(partition(exact), "bmi", by="arm", bounds=RANGES)
    expected = [part["bmi"].quantile([0.25, 0.5, 0.75]) for _, part in trial.groupby("arm")]
    assert_allclose(found, expected, atol=found.attrs["error"] * 1.001)
    counts = fs.histogram(partition(exact), "bmi", bins=[0, 30, 35, 100])
    assert counts["rows"].tolist() == pd.cut(trial["bmi"], [0, 30, 35, 100]).value_counts(sort=False).tolist()
    assert counts.attrs["missing"] == 560 - len(trial)
    table = fs.table_one(partition(exact), "bmi + age + C(smoker)", nonnormal=["bmi"], bounds=RANGES)
    assert_allclose(table.variables[0].quarters[0], trial["bmi"].quantile([0.25, 0.5, 0.75]), atol=0.05)
    assert [one.missing for one in table.variables] == [N - len(trial), 40, 0]
    # The owner's minimum holds here as well: numbers are averages over three people.
    careful = fs.histogram(partition(), "bmi", bins=[0, 30, 35, 100])["rows"]
    assert careful.sum() == len(trial) and ((careful % 3 == 0) | (careful > 3)).all()


def test_a_dry_run_lists_what_leaves():
    for terms in (("C(sex)", "C(arm)"), ("age", "C(arm)"), ("bmi", "C(arm)"), ("age",)):
        model = ColumnPair(partition(), terms)
        expected = model.explain(squares=True)
        assert expected.passes
        _, ledger = model.fit(squares=True)
        released = ledger.releases()
        key = ["sender", "step", "array", "kind"]
        own = released[released["step"].isin(["stage_column", "sum_columns", "share_product"])]
        assert len(own) and set(own[key].apply(tuple, axis=1)) <= set(
            expected.tidy()[key].apply(tuple, axis=1)
        )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: fs.table_one(partition(), "age", nonnormal=["age"]), ModelError, "public range"),
        (
            lambda: fs.table_one(partition(), "age", nonnormal=["age"], by="arm", bounds=RANGES),
            ModelError,
            "by: 'arm' is not at site 'clinic'",
        ),
        (lambda: fs.quantiles(partition(), "age", by="arm", bounds=RANGES), ModelError, "'arm' is not at"),
        (lambda: fs.quantiles(partition(), "nothing", bounds=RANGES), ModelError, "no site holds it"),
        (lambda: fs.quantiles(partition(), "sex", bounds={"sex": (0, 1)}), ModelError, "is a category"),
        (lambda: fs.crosstab(partition(), "sex", "sex"), ModelError, "the column of the rows as well"),
        (lambda: fs.table_one(partition(), "sex", by="sex"), ModelError, "'sex' is in the table as well"),
        (lambda: fs.quantiles(partition("strict"), "age"), PolicyError, "masked only"),
        (lambda: fs.crosstab(partition(), "sex", "arm", masked=True), ModelError, "no sums to mask"),
        (lambda: fs.corr(partition(), "age + sex"), FormulaError, "must be numbers"),
        (lambda: fs.corr(partition(), "age + bmi", method="spearman"), ModelError, "only 'pearson'"),
        (lambda: fs.crosstab(partition(), "sex", "nothing"), FormulaError, "nothing"),
        (
            lambda: fs.corr(partition(people=PEOPLE.assign(bmi=27.0)), "age + bmi"),
            EstimationError,
            "'bmi' is constant",
        ),
    ],
)
def test_calls_without_a_meaning(call, error, text):
    with pytest.raises(error, match=text):
        call()
