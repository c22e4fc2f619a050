"""Tables with noise under the budgets of sites: their figures, prices, charges, repeats and refusals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError, FormulaError, ModelError, PolicyError
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.models.descriptive.noisy_model import LEAST_CLEAR, intervals_of
from fedstat.models.descriptive.noisy_steps import CodedColumn

N = 900
BOUNDS = {
    "arm": ["a", "b"],
    "stage": ["I", "II", "III"],
    "age": (0, 100),
    "dose": (0.0, 40.0),
    "site": ["A", "B", "C"],
}
CALLS = {
    "crosstab": lambda p, **more: fs.crosstab(p, "arm", "stage", bounds=BOUNDS, **more),
    "histogram": lambda p, **more: fs.histogram(p, "age", bins=10, by="arm", bounds=BOUNDS, **more),
    "quantiles": lambda p, **more: fs.quantiles(p, "age", by="arm", bounds=BOUNDS, **more),
    "corr": lambda p, **more: fs.corr(p, ["age", "dose"], bounds=BOUNDS, **more),
    "table_one": lambda p, **more: fs.table_one(
        p, "age + dose + stage", by="arm", nonnormal=["dose"], bounds=BOUNDS, **more
    ),
}


def table(n=N, seed=0):
    random = np.random.default_rng(seed)
    age = np.clip(random.normal(50.0, 12.0, n), 0.0, 100.0)
    out = pd.DataFrame(
        {
            "site": np.array(["A", "B", "C"])[np.arange(n) % 3],
            "arm": random.choice(["a", "b"], n),
            "stage": random.choice(["I", "II", "III"], n, p=[0.6, 0.38, 0.02]),
            "age": age,
            "dose": np.clip(0.3 * (age - 50.0) + random.normal(15.0, 4.0, n), 0.0, 40.0),
        }
    )
    out.loc[out.index % 50 == 7, "stage"] = None
    out.loc[out.index % 60 == 11, "age"] = np.nan
    return out


def partition_of(frame=None, epsilon=10.0, colluding=1, **more):
    policy = Policy(privacy=Budget(epsilon, 1e-6, colluding), **more)
    return fs.ClientPartition.from_frame(table() if frame is None else frame, by="site", policy=policy)


def spent(partition):
    return [site.site_ledger.charges.spent for site in partition.sites.values()]


def releases(partition):
    return [len(site.site_ledger.charges.made) for site in partition.sites.values()]


# ---- without noise to speak of ------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact():
    """A budget without meaning: noise is about a thousandth of a row."""
    return partition_of(epsilon=5e6, colluding=None)


def test_counts_are_those_of_the_rows(exact):
    frame, found = table(), CALLS["crosstab"](exact, epsilon=1e6)
    np.testing.assert_array_equal(found, pd.crosstab(frame["arm"], frame["stage"]))
    assert found.attrs["missing"] == frame["stage"].isna().sum()
    # A cell of few rows is shown: nothing is hidden.
    assert 0 < found["III"].min() < 15
    counts = CALLS["histogram"](exact, epsilon=1e6)
    known = frame.dropna(subset="age")
    bins = pd.cut(known["age"], np.linspace(0, 100, 11), include_lowest=True)
    np.testing.assert_array_equal(
        counts.iloc[1:-1], pd.crosstab(bins, known["arm"], dropna=False)[["a", "b"]]
    )
    assert not counts.iloc[[0, -1]].to_numpy().any()


def test_ends_of_bins_are_counted_where_they_belong(exact):
    frame = pd.DataFrame({"site": ["A", "B", "C"] * 3, "x": [0.0, 1.0, 2.0, -1.0, 3.0, 9.0, -9.0, 0.5, None]})
    held = partition_of(frame, 5e6, None, min_count=1)
    found = fs.histogram(held, "x", bins=[0, 1, 2], epsilon=1e6, bounds={})
    assert found["rows"].tolist() == [2, 3, 1, 2] and found.attrs["missing"] == 1
    levels = {"x": [0.0, 1.0], "site": ["A", "B", "C"]}
    assert fs.crosstab(held, "site", "x", epsilon=1e6, bounds=levels).to_numpy().sum() == 2


def test_odd_values_are_in_outer_intervals_or_in_none():
    values = pd.Series([np.inf, -np.inf, np.nan, "x", None, 1, "1", True], dtype=object)
    number = CodedColumn("x", edges=(0.0, 2.0))
    assert number.code(values).tolist() == [2, 0, -1, -1, -1, 1, 1, 1]
    assert CodedColumn("x", levels=(1, "x")).code(values).tolist() == [-1, -1, -1, 1, -1, 0, 0, 0]


def test_quantiles_are_those_of_the_rows(exact):
    found = CALLS["quantiles"](exact, epsilon=1e6)
    own = [rows["age"].quantile([0.25, 0.5, 0.75]) for _, rows in table().groupby("arm")]
    assert np.abs(found.to_numpy() - np.array(own)).max() < 2.0 * found.attrs["error"] + 0.2


def test_correlations_are_those_of_the_rows(exact):
    found, own = CALLS["corr"](exact, epsilon=1e6), table()[["age", "dose"]].dropna().corr()
    assert np.abs(found - own).to_numpy().max() < 0.01
    assert found.attrs["nobs"] == pytest.approx(table()[["age", "dose"]].dropna().shape[0], abs=3)


def test_the_first_table_is_that_of_the_rows(exact):
    frame, found = table(), CALLS["table_one"](exact, epsilon=1e6)
    tidy = found.tidy().set_index(["variable", "level", "group", "figure"])["value"]
    for arm, rows in frame.groupby("arm"):
        assert tidy["age", "", arm, "mean"] == pytest.approx(rows["age"].mean(), abs=1e-2)
        assert tidy["age", "", arm, "sd"] == pytest.approx(rows["age"].std(), rel=1e-2)
        assert tidy["dose", "", arm, "median"] == pytest.approx(rows["dose"].median(), abs=0.5)
        for stage, count in rows["stage"].value_counts().items():
            assert tidy["stage", stage, arm, "count"] == count
    assert [one.missing for one in found.variables] == frame[["age", "dose", "stage"]].isna().sum().tolist()
    assert f"{len(frame):,}" in found.to_frame()["all"].iloc[0]


# ---- charges ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_a_table_is_one_charge_of_the_epsilon_and_a_repeat_is_free(name):
    partition = partition_of()
    found = CALLS[name](partition, epsilon=1.0)
    attrs = found.attrs if isinstance(found, fs.models.descriptive.frames.TableFrame) else None
    first, before = spent(partition), releases(partition)
    assert before == [2 if name == "corr" else 1] * 3
    states = [site.privacy for site in partition.sites.values()]
    assert all(0.9999 < one.epsilon_spent <= 1.0 for one in states)
    if attrs is not None:
        assert 0.9999 < attrs["epsilon"] <= 1.0 and attrs["delta"] == 1e-6
        again = CALLS[name](partition, epsilon=1.0)
        pd.testing.assert_frame_equal(found.to_frame(), again.to_frame())
    else:
        pd.testing.assert_frame_equal(found.tidy(), CALLS[name](partition, epsilon=1.0).tidy())
    assert spent(partition) == first and releases(partition) == before


@pytest.mark.parametrize("name", CALLS)
def test_the_price_is_stated_and_nothing_is_charged(name):
    partition = partition_of()
    arguments = {
        "crosstab": (fs.crosstab, "arm", "stage"),
        "histogram": (fs.histogram, "age"),
        "quantiles": (fs.quantiles, "age"),
        "corr": (fs.corr, ["age", "dose"]),
        "table_one": (fs.table_one, "age + stage"),
    }[name]
    ratios = []
    for epsilon in (0.8, 1.0, 5.0):
        plan = fs.explain_table(arguments[0], partition, *arguments[1:], epsilon=epsilon, bounds=BOUNDS)
        assert plan.passes and plan.call.startswith(name)
        price = next(note for note in plan.notes if note.startswith("Price"))
        assert f"at 900 rows, epsilon {epsilon:g}" in price
        ratios.append(float(price.split("about ")[1].split(" times")[0]))
        assert any("of the budget of A, B and C, epsilon 10" in note for note in plan.notes)
    assert ratios[0] > ratios[1] >= ratios[2] >= 1.0
    assert not any(spent(partition))


def test_several_tables_add_up_and_the_budget_ends():
    partition = partition_of(epsilon=2.0)
    for epsilon in (1.0, 1.1):
        CALLS["crosstab"](partition, epsilon=epsilon)
    with pytest.raises(DescriptionError, match=r"privacy budget\) has rho .* left"):
        CALLS["crosstab"](partition, epsilon=1.9)
    CALLS["crosstab"](partition, epsilon=1.0)


def test_correlations_that_a_budget_does_not_allow_charge_nothing():
    """The second request is too expensive: the first one is refused as well."""
    partition = partition_of(epsilon=1.2)
    CALLS["crosstab"](partition, epsilon=0.8)
    before = spent(partition)
    with pytest.raises(DescriptionError, match="this analysis costs"):
        CALLS["corr"](partition, epsilon=1.0)
    assert spent(partition) == before


@pytest.mark.parametrize("colluding", [None, 1])
def test_sites_that_release_nothing_exact_release_tables_with_noise(colluding):
    partition = partition_of(colluding=colluding, exact="none")
    for name in CALLS:
        CALLS[name](partition, epsilon=2.0)
    with pytest.raises(PolicyError):
        fs.crosstab(partition, "arm", "stage")


def test_noise_in_shares_is_less_noise():
    found = {
        colluding: fs.explain_table(
            fs.crosstab, partition_of(colluding=colluding), "arm", "stage", epsilon=1.0, bounds=BOUNDS
        ).notes[0]
        for colluding in (None, 1)
    }
    alone, shared = (float(found[one].split("deviation of ")[1].split()[0]) for one in (None, 1))
    assert alone / shared == pytest.approx(np.sqrt(2.0), rel=0.01)


# ---- limits -------------------------------------------------------------------------------------


def test_limits_hold_the_noise_and_sampling():
    partition = partition_of()
    counts = CALLS["crosstab"](partition, epsilon=1.0).conf_int()
    true = pd.crosstab(table()["arm"], table()["stage"]).to_numpy().ravel()
    assert ((counts["conf_low"] <= true) & (true <= counts["conf_high"])).mean() > 0.6
    wide, narrow = (CALLS["crosstab"](partition, epsilon=1.0).conf_int(alpha) for alpha in (0.05, 0.5))
    assert (wide["conf_high"] - wide["conf_low"] > narrow["conf_high"] - narrow["conf_low"]).all()
    for name in ("quantiles", "corr"):
        limits = CALLS[name](partition, epsilon=1.0).conf_int()
        assert (limits["conf_low"] <= limits["estimate"]).all()
        assert (limits["estimate"] <= limits["conf_high"]).all()
    tidy = CALLS["table_one"](partition, epsilon=1.0).tidy()
    assert set(tidy.columns) > {"conf_low", "conf_high"}
    known = tidy[tidy["figure"].isin(["mean", "count", "median"]) & (tidy["variable"] != "dose")]
    assert (known["conf_low"] < known["conf_high"]).all()
    text = str(CALLS["table_one"](partition, epsilon=1.0))
    assert "±" in text and "noise with epsilon 1 at delta 1e-06" in text


def test_tables_without_noise_have_no_limits():
    frame = table().dropna()
    frame = frame[frame["stage"] != "III"]
    found = fs.crosstab(fs.ClientPartition.from_frame(frame, by="site"), "arm", "stage")
    with pytest.raises(ModelError, match="only tables with epsilon have limits"):
        found.conf_int()


def test_intervals_have_round_middles():
    ends = np.array(intervals_of(0.0, 100.0, 64))
    middles = (ends[:-1] + ends[1:]) / 2.0
    np.testing.assert_allclose(middles, np.arange(0.0, 101.0, 2.0))
    for low, high, most in ((0.0, 1.0, 16), (-3.0, 7.0, 256), (1e-9, 3e-9, 20)):
        ends = intervals_of(low, high, most)
        assert ends[0] < low and high <= ends[-1] and len(ends) <= most + 2


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"epsilon": 0}, ModelError, "epsilon: expected a positive number"),
        ({"epsilon": True}, ModelError, "epsilon: expected a positive number"),
        ({"epsilon": 1.0, "delta": 0.1}, ModelError, "delta: expected"),
        ({"epsilon": 1.0, "subset": "age > 3"}, ModelError, "subset: tables with epsilon"),
        ({"epsilon": 1.0, "masked": True}, ModelError, "masked: with epsilon"),
        ({"epsilon": 11.0}, DescriptionError, "A: .*is epsilon 10 at delta 1e-06 over all analyses"),
        (
            {"epsilon": 1.0, "bounds": {"arm": ["a", "b"]}},
            ModelError,
            r'(?s)1 of 2 columns have none.*"stage"',
        ),
        (
            {"epsilon": 1.0, "bounds": {**BOUNDS, "arm": "ab"}},
            ModelError,
            "bounds of column 'arm': expected a range",
        ),
        (
            {"epsilon": 1.0, "bounds": {**BOUNDS, "arm": (3, 1)}},
            ModelError,
            "bounds of column 'arm': expected an ascending",
        ),
        ({"epsilon": 1.0, "bounds": 3}, ModelError, "bounds: expected"),
        ({"epsilon": 1.0, "complete": ["zz"]}, ModelError, "column 'zz' is not at 'A', 'B', 'C'"),
    ],
)
def test_arguments_that_are_wrong_are_named_before_a_charge(given, error, text):
    partition = partition_of()
    with pytest.raises(error, match=text):
        fs.crosstab(partition, "arm", "stage", **({"bounds": BOUNDS} | given))
    assert not any(spent(partition))


def test_what_has_no_form_with_noise_is_refused():
    partition = partition_of()
    with pytest.raises(ModelError, match="only 'pearson'"):
        fs.corr(partition, ["age", "dose"], method="spearman", epsilon=1.0, bounds=BOUNDS)
    with pytest.raises(FormulaError, match=r"are of columns, as in .*log\(age\)"):
        fs.corr(partition, "log(age) + dose", epsilon=1.0, bounds=BOUNDS)
    with pytest.raises(ModelError, match="smd, pvalues"):
        fs.table_one(partition, "age", by="arm", smd=True, epsilon=1.0, bounds=BOUNDS)
    with pytest.raises(ModelError, match="expected numbers of the table"):
        fs.table_one(partition, "stage", nonnormal=["stage"], epsilon=1.0, bounds=BOUNDS)
    with pytest.raises(ModelError, match=r"expected one of fs\.crosstab"):
        fs.explain_table(fs.compare, partition)
    with pytest.raises(ModelError, match="name an epsilon"):
        fs.explain_table(fs.crosstab, partition, "arm", "stage")
    vertical = fs.ClientPartition.from_frame(table(), columns={"A": ["arm"], "B": ["stage"]})
    with pytest.raises(ModelError, match="horizontal partition"):
        fs.crosstab(vertical, "arm", "stage", epsilon=1.0, bounds=BOUNDS)
    plain = fs.ClientPartition.from_frame(table(), by="site")
    with pytest.raises(DescriptionError, match=r"A: .*is none, and releases with noise are charged"):
        CALLS["crosstab"](plain, epsilon=1.0)


def test_few_rows_for_a_budget_are_refused_with_the_number_that_would_do():
    partition = partition_of()
    with pytest.raises(ModelError, match=r"epsilon: 0\.01 hides the rows of 2 groups: .* 900") as error:
        CALLS["quantiles"](partition, epsilon=0.01)
    needed = int(str(error.value).split("about ")[1].split()[0].replace(",", ""))
    assert not any(spent(partition)) and needed > 900 and LEAST_CLEAR == 4.0
    enough = float(str(error.value).split("epsilon of about ")[1].split(". ")[0])
    CALLS["quantiles"](partition, epsilon=1.1 * enough)


def test_published_levels_and_ranges_are_used():
    frame = table()
    published = {
        name: {
            "arm": {"kind": "category", "levels": ["a", "b"]},
            "stage": {"kind": "category", "levels": ["I", "II", "III"]},
            "age": {"kind": "number", "range": [0.0, 100.0]},
        }
        for name in "ABC"
    }
    policy = Policy(privacy=Budget(10.0, 1e-6, 1))
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy, published=published)
    assert fs.crosstab(partition, "arm", "stage", epsilon=1.0).shape == (2, 3)
    assert fs.crosstab(partition, "site", "stage", epsilon=1.0).index.tolist() == ["A", "B", "C"]
    assert fs.table_one(partition, "age + stage", epsilon=1.0).to_frame().shape[1] == 2
    assert np.isfinite(fs.quantiles(partition, "age", epsilon=1.0).to_numpy()).all()


@pytest.mark.parametrize("n", [1, 3])
def test_tables_of_few_rows_are_answered(n):
    """A count of few rows is released as any other: nothing depends on its size."""
    frame = table(3 * n)
    partition = partition_of(frame, min_count=1)
    found = CALLS["crosstab"](partition, epsilon=1.0)
    assert found.to_numpy().min() >= 0


def test_counts_of_a_table_add_up_to_its_rows_and_never_exceed_them():
    random = np.random.default_rng(7)
    n = 900
    frame = pd.DataFrame({"g": random.choice(["a", "b"], n), "k": random.choice(["p", "q", "r"], n)})
    frame = frame.assign(x=random.normal(size=n), z=random.normal(size=n), site=np.arange(n) % 3)
    bounds = {"g": ["a", "b"], "k": ["p", "q", "r"], "x": (-5, 5), "z": (-5, 5)}
    policy = fs.Policy(privacy=fs.Budget(100.0, 1e-6))
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    for epsilon in (0.8, 0.9, 1.0, 1.1):
        table = fs.table_one(partition, "x + k + z", by="g", nonnormal=["z"], epsilon=epsilon, bounds=bounds)
        for one in table.variables:
            assert one.rows.sum() + one.missing == n and one.rows.min() >= 0
        assert table._groups.sizes.sum() + table._groups.unknown == n
        counts = fs.crosstab(partition, "g", "k", epsilon=epsilon, bounds=bounds)
        assert counts.to_numpy().sum() + counts.attrs["missing"] == n
