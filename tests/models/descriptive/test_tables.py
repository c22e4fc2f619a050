"""Tables over sites are pandas' tables of the pooled rows, without counts of few rows."""

import re

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import fedstat as fs
from fedstat.errors import DesignError, FormulaError, ModelError, PolicyError
from fedstat.federation.design.formula.parse import Formula, SiteTerms
from fedstat.models.descriptive.protocol import cells_shown, rank_error
from fedstat.models.descriptive.table_one import kruskal_wallis
from fedstat.models.descriptive.tables import CorrelationModel, TableModel

EXACT = fs.Policy(min_count=1, min_level_count=1, min_events=1)
RNG = np.random.default_rng(5)


def patients():
    table = fs.datasets.make_survival(seed=3)
    table["weight"] = np.round(RNG.normal(75.0, 12.0, len(table)), 1)
    table.loc[RNG.choice(len(table), 60, replace=False), "weight"] = np.nan
    return table


TABLE = patients()
BOUNDS = {"stage": (0.0, 1.0), "age": (0.0, 120.0), "weight": (30.0, 150.0), "months": (0.0, 64.0)}


def partition(table=TABLE, policy=None):
    return fs.ClientPartition.from_frame(table, by="hospital", policy=policy)


def test_counts_are_those_of_pandas():
    found = fs.crosstab(partition(), "arm", "stage")
    expected = pd.crosstab(TABLE["arm"], TABLE["stage"])
    pd.testing.assert_frame_equal(
        found, expected, check_names=True, check_dtype=False, check_column_type=False
    )
    assert found.attrs["ledger"].rounds > 1 and found.attrs["missing"] == 0
    numbers = fs.crosstab(partition(), "arm", "died")
    assert numbers.to_numpy().tolist() == pd.crosstab(TABLE["arm"], TABLE["died"]).to_numpy().tolist()


def test_columns_are_given_as_a_formula_or_a_list():
    for call in (fs.corr, fs.table_one):
        listed, written = (call(partition(), columns) for columns in (["age", "months"], "age + months"))
        pd.testing.assert_frame_equal(listed.to_frame(), written.to_frame())
    renamed = fs.table_one(partition(TABLE.rename(columns={"age": "age at entry"})), ["age at entry"])
    assert renamed.variables[0].name == "age at entry"
    one = fs.quantiles(partition(), "age", 0.5, bounds=BOUNDS)
    assert_allclose(one, fs.quantiles(partition(), "age", [0.5], bounds=BOUNDS), rtol=0.0)


def hidden_table():
    """One cell of two rows at one site."""
    few = (TABLE["hospital"] == "Ulm") & (TABLE["arm"] == "drugs") & (TABLE["stage"] == "II")
    kept = TABLE[few].index[:2]
    return TABLE.assign(stage=np.where(few & ~TABLE.index.isin(kept), "III", TABLE["stage"]))


def test_small_cells_are_hidden_and_do_not_follow():
    table = hidden_table()
    for masked in (True, False):
        found = fs.crosstab(partition(table), "arm", "stage", masked=masked)
        assert found["I"].notna().all()
        assert pd.isna(found.loc["drugs", "II"]) and found.isna().to_numpy().sum() == 4
    # The analyst knows all rows of each arm and of each stage, and solves for the cells.
    arms, stages = table["arm"].value_counts(), table["stage"].value_counts()
    cells = [(arm, stage) for arm in found.index for stage in found.columns]
    equations, values = [], []
    for arm in found.index:
        equations.append([one == arm for one, _ in cells])
        values.append(arms[arm])
    for stage in found.columns:
        equations.append([one == stage for _, one in cells])
        values.append(stages[stage])
    for cell, count in zip(cells, found.to_numpy().ravel(), strict=True):
        if not pd.isna(count):
            equations.append([one == cell for one in cells])
            values.append(count)
    A = np.array(equations, dtype=float)
    null = np.linalg.svd(A)[2][np.linalg.matrix_rank(A) :]
    unknown = [place for place, cell in enumerate(cells) if pd.isna(found.loc[cell])]
    assert len(unknown) == 4 and (np.abs(null[:, unknown]).max(axis=0) > 0.1).all()


def test_the_other_table_hides_the_same_cells():
    """The rows of each stage, less those of the other arm, would be the hidden two."""
    strict = partition(hidden_table(), "strict")
    first, second = fs.crosstab(strict, "arm", "stage"), fs.crosstab(strict, "stage", "arm").T
    assert first.isna().to_numpy().any()
    assert (first.isna().to_numpy() == second.loc[first.index, first.columns].isna().to_numpy()).all()


def test_what_is_shown():
    small = np.array([[False, True, False], [False, False, False], [True, True, False]])
    large = np.array([[True, False, True], [True, True, True], [False, False, False]])
    # The second level of the third group is hidden, so that of another group with enough rows is, too.
    assert cells_shown(small, large).tolist() == [[False, False, True], [True, False, False], [False] * 3]
    # One group: its levels alone are compared.
    assert cells_shown(small[:1], large[:1]).tolist() == [[True, False, False]]


def test_histograms_count_all_rows():
    edges = [20, 40, 50, 60, 70, 80, 100]
    found = fs.histogram(partition(policy=EXACT), "age", bins=edges, by="arm")
    cut = pd.cut(TABLE["age"], edges)
    expected = pd.crosstab(cut, TABLE["arm"])
    assert found.to_numpy().tolist() == expected.to_numpy().tolist()
    averaged = fs.histogram(partition(), "age", bins=edges, by="arm")
    assert averaged.to_numpy().sum() == len(TABLE)
    # At both ends of an interval, at four sites, a block of three moves two rows at most.
    assert (averaged - found).abs().to_numpy().max() <= 2 * 4 * 2
    assert fs.histogram(partition(), "age", bins=4, bounds=BOUNDS).shape == (4, 1)
    outside = fs.histogram(partition(policy=EXACT), "age", bins=[50, 60])
    assert outside.index[0].left == -np.inf and outside.to_numpy().sum() == len(TABLE)


@pytest.mark.parametrize("by", [None, "arm"])
@pytest.mark.parametrize("column", ["age", "weight"])
def test_quantiles_within_the_stated_error(column, by):
    q = [0.1, 0.25, 0.5, 0.9]
    found = fs.quantiles(partition(policy=EXACT), column, q, by=by, bounds=BOUNDS)
    groups = TABLE.groupby(by)[column] if by else [("all rows", TABLE[column])]
    for group, values in groups:
        assert_allclose(found.loc[group], np.nanquantile(values, q), atol=found.attrs["error"] * 1.0001)
    low, high = BOUNDS[column]
    assert found.attrs["error"] <= (high - low) / 1000.0
    near = fs.quantiles(partition(), column, q, by=by, bounds=BOUNDS)
    assert_allclose(near, found, atol=0.6)


def test_repeated_quantiles_find_means_of_blocks_and_no_value():
    """An outlier is never found: shifting ranges reveal the mean of its block."""
    table = TABLE.assign(age=TABLE["age"])
    table.loc[table.index[0], "age"] = 111.1
    for low in (0.0, 0.01, 0.02):
        found = fs.quantiles(partition(table), "age", [0.99999], bounds={"age": (low, 120.0)})
        block = np.sort(table.loc[table["hospital"] == "Bonn", "age"])[-3:]
        assert abs(found.iloc[0, 0] - 111.1) > 5.0
        assert abs(found.iloc[0, 0] - block.mean()) < 1.0


def test_correlations_are_those_of_pandas():
    found = fs.corr(partition(), "age + weight + months + C(arm)")
    numbers = TABLE.assign(arm=(TABLE["arm"] == "surgery").astype(float)).dropna(subset=["weight"])
    expected = numbers[["age", "weight", "months", "arm"]].corr()
    assert found.columns.tolist() == ["age", "weight", "months", "C(arm)[T.surgery]"]
    assert_allclose(found, expected.to_numpy(), rtol=0.0, atol=1e-9)
    assert (found.attrs["nobs"], found.attrs["missing"]) == (740, 60)
    far = TABLE.assign(age=TABLE["age"] + 1e7)
    assert_allclose(fs.corr(partition(far), "age + months", masked=False), numbers_of(far), atol=1e-7)
    released = found.attrs["ledger"].releases()
    products = released[(released["step"] == "sum_products") & (released["sender"] != "coordinator")]
    assert products["masked"].all() and set(products["kind"]) == {"aggregate"}
    lone = TABLE.assign(
        a=np.where(np.arange(800) % 200 < 40, 1.0, 0.0), b=np.where(np.arange(800) % 200 < 239, 0.0, 1.0)
    )
    lone.loc[lone.index[0], "b"] = 1.0
    lone.loc[lone.index[100:140], "b"] = 1.0
    with pytest.raises(PolicyError):  # the product of a and b is one at one row
        fs.corr(partition(lone, "strict"), "a + b")


def rounded():
    """Whole numbers, each of which has an interval of its own in (0, 120], with many ties."""
    return TABLE.assign(age=TABLE["age"].round(), months=TABLE["months"].round())


@pytest.mark.parametrize("sites", [1, 3, 40])
def test_rank_correlations_are_those_of_scipy_where_each_value_has_an_interval(sites):
    table = rounded().sample(frac=1.0, random_state=sites).reset_index(drop=True)
    table["hospital"] = [f"site {k % sites}" for k in range(len(table))]
    columns, ranges = ["age", "months", "died"], {"age": (0, 120), "months": (0, 120), "died": (0, 120)}
    found = fs.corr(
        partition(table, EXACT), "age + months + died", method="spearman", bins=120, bounds=ranges
    )
    assert_allclose(found, stats.spearmanr(table[columns]).statistic, rtol=0.0, atol=1e-9)
    assert found.columns.tolist() == columns and found.attrs["nobs"] == len(table)
    turned = fs.corr(
        partition(table.iloc[::-1], EXACT), "died + age + months", method="spearman", bins=120, bounds=ranges
    )
    assert_allclose(turned.loc[columns, columns], found, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("bins", [2, 10, 100])
def test_rank_correlations_are_within_the_stated_error(bins):
    columns, numbers = ["age", "weight", "months"], TABLE.dropna(subset=["weight"])
    expected = numbers[columns].corr(method="spearman")
    given = {"method": "spearman", "bins": bins, "bounds": BOUNDS}
    found = fs.corr(partition(policy=EXACT), "age + weight + months", **given)
    error = pd.DataFrame(found.attrs["error"])
    assert ((found - expected).abs() <= error + 1e-12).to_numpy().all()
    assert (found.attrs["nobs"], found.attrs["missing"]) == (740, 60)
    # Averages over blocks of three rows at four sites move few rows of 740.
    averaged = fs.corr(partition(), "age + weight + months", **given)
    assert_allclose(averaged, found, rtol=0.0, atol=0.01 if bins > 2 else 0.02)
    if bins == 100:
        assert error.to_numpy().max() < 0.08
        strict = fs.corr(partition(policy="strict"), "age + months + died", **{**given, "bounds": RANGES})
        assert_allclose(
            strict.loc["age", "died"], TABLE["age"].corr(TABLE["died"], method="spearman"), atol=0.01
        )
        released = found.attrs["ledger"].releases()
        own = released[released["step"].isin(["count_columns", "sum_ranks"])]
        own = own[own["sender"] != "coordinator"]
        assert own["masked"].all() and "sum_columns" not in set(released["step"])


RANGES = {**BOUNDS, "died": (0.0, 1.0)}


def test_the_stated_error_is_attained():
    """With the opposite order in every interval, the ranks are as far from each other as they can be."""
    counts = np.full((2, 5), 8.0)
    ranks = (np.arange(5) - 2.0) * 8.0
    squares = np.full(2, 8.0 * (ranks**2).sum())
    x = np.arange(40)
    y = x.reshape(5, 8)[:, ::-1].ravel()
    error = rank_error(np.ones((2, 2)), counts, squares)
    assert_allclose(error[0, 1], 1.0 - stats.spearmanr(x, y).statistic, rtol=1e-9)
    assert error[0, 0] == 0.0 and rank_error(np.ones((2, 2)), np.ones((2, 5)), squares).max() == 0.0


def test_a_dry_run_of_correlations():
    formula = Formula(
        "~ age + months", "", None, (), True, (SiteTerms("", ("age", "months"), ("age", "months")),)
    )
    expected = CorrelationModel(formula, partition()).explain()
    assert expected.passes and "sum_products" in expected.tidy()["step"].tolist()
    edges = np.array([np.linspace(0.0, 120.0, 9)] * 2)
    expected = CorrelationModel(formula, partition()).explain(edges=edges)
    ledger = fs.corr(partition(), "age + months", method="spearman", bins=8, bounds=RANGES).attrs["ledger"]
    released = ledger.releases()
    key = ["sender", "step", "array", "kind", "masked"]
    own = released[released["step"].isin(["open_rows", "count_columns", "sum_ranks"])]
    assert expected.passes
    assert set(own[key].apply(tuple, axis=1)) <= set(expected.tidy()[key].apply(tuple, axis=1))


def numbers_of(table):
    return table[["age", "months"]].corr().to_numpy()


def test_table_one_cell_by_cell():
    found = fs.table_one(
        partition(policy=EXACT),
        "age + weight + C(stage) + months",
        by="arm",
        nonnormal=["months"],
        bounds=BOUNDS,
        smd=True,
        pvalues=True,
    )
    tidy = found.tidy().set_index(["variable", "level", "group", "figure"])["value"]
    for arm, part in TABLE.groupby("arm"):
        for name in ("age", "weight"):
            assert_allclose(tidy[name, "", arm, "mean"], part[name].mean(), rtol=1e-10)
            assert_allclose(tidy[name, "", arm, "sd"], part[name].std(), rtol=1e-10)
        for stage, count in part["stage"].value_counts().items():
            assert tidy["stage", stage, arm, "count"] == count
        assert_allclose(tidy["months", "", arm, "median"], part["months"].median(), atol=0.04)
    arms = [part for _, part in TABLE.groupby("arm")]
    age, weight, stage, months = found.variables
    assert_allclose(age.overall, (TABLE["age"].mean(), TABLE["age"].var()), rtol=1e-10)
    welch = stats.ttest_ind(*(part["age"] for part in arms), equal_var=False).pvalue
    assert_allclose(age.p_value(), welch, rtol=1e-9)
    chi2 = stats.chi2_contingency(pd.crosstab(TABLE["arm"], TABLE["stage"]), correction=False).pvalue
    assert_allclose(stage.p_value(), chi2, rtol=1e-9)
    assert_allclose(months.p_value(), stats.kruskal(*(part["months"] for part in arms)).pvalue, atol=0.003)
    pooled = np.sqrt(np.mean([part["age"].var() for part in arms]))
    assert_allclose(age.difference(), abs(np.subtract(*(part["age"].mean() for part in arms))) / pooled)
    assert weight.missing == 60 and found.to_frame().loc[("weight", "mean (sd)"), "missing"] == "60"
    text = found.summary().as_text()
    assert "Table one, by arm" in text and "median [Q1, Q3]" in text
    assert found.to_frame().columns.tolist() == ["missing", "all", "drugs", "surgery", "SMD", "P"]


def test_kruskal_wallis_is_that_of_scipy():
    counts = np.array([[3.0, 5.0, 2.0, 0.0], [1.0, 4.0, 6.0, 2.0], [0.0, 2.0, 2.0, 7.0]])
    groups = [np.repeat(np.arange(4), row.astype(int)) for row in counts]
    assert_allclose(kruskal_wallis(counts), stats.kruskal(*groups).pvalue, rtol=1e-12)
    assert np.isnan(kruskal_wallis(counts[:1]))
    assert np.isnan(kruskal_wallis(np.array([[3.0, 0.0], [2.0, 0.0]])))


def test_a_table_without_groups():
    found = fs.table_one(partition(), "age + stage")
    assert found.to_frame().columns.tolist() == ["missing", "all"]
    share = 100.0 * (TABLE["stage"] == "I").mean()
    assert found.to_frame().loc[("stage", "I"), "all"] == f"{(TABLE['stage'] == 'I').sum()} ({share:.1f})"
    assert found.glance()["groups"].tolist() == [1]


def test_a_site_without_a_column_counts_as_missing():
    table = TABLE.assign(weight=TABLE["weight"].mask(TABLE["hospital"] == "Ulm"))
    found = fs.table_one(partition(table), "age + weight", by="arm")
    assert found.variables[1].missing == table["weight"].isna().sum()
    assert_allclose(found.variables[1].overall[0], table["weight"].mean(), rtol=1e-10)
    with pytest.raises(DesignError, match="no row with all of 'weight'"):
        fs.table_one(partition(table.assign(weight=np.nan)), "weight")


def test_hidden_counts_are_announced():
    found = fs.table_one(partition(hidden_table()), "stage", by="arm", smd=True, pvalues=True)
    assert (found.to_frame()["drugs"] == "hidden").sum() == 2
    assert found.to_frame()["P"].tolist() == [""] * 4
    assert found.diagnostics().loc[0, "kind"] == "hidden"


def ranked(formula, **given):
    return fs.corr(partition(), formula, **{"method": "spearman", "bounds": BOUNDS, **given})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: fs.table_one(partition(), "log(age)"), FormulaError, "a table has columns"),
        (lambda: fs.table_one(partition(), "nothing"), FormulaError, "no column 'nothing'"),
        (lambda: fs.table_one(partition(), "age", nonnormal=["months"]), ModelError, "'months'"),
        (lambda: fs.table_one(partition(), "age", nonnormal=["age"]), ModelError, "public range"),
        (
            lambda: fs.table_one(partition(), "stage", nonnormal=["stage"], bounds=BOUNDS),
            ModelError,
            "'stage'",
        ),
        (lambda: fs.quantiles(partition(), "age", [0.0], bounds=BOUNDS), ModelError, "between 0 and 1"),
        (lambda: fs.quantiles(partition(), "age", bounds={"age": (5, 5)}), ModelError, "two finite ends"),
        (lambda: fs.histogram(partition(), "age", bins=[3, 2]), ModelError, "ascend"),
        (lambda: fs.histogram(partition(), "age", bins=0, bounds=BOUNDS), ModelError, "bins"),
        (lambda: fs.crosstab(partition(), "arm", "nothing"), ModelError, "no column 'nothing'"),
        (
            lambda: fs.crosstab(partition(), "arm", "arm"),
            ModelError,
            "'arm' is the column of the rows as well",
        ),
        (
            lambda: fs.crosstab(partition(), ["arm"], "stage"),
            ModelError,
            "row: expected the name of one column",
        ),
        (lambda: fs.crosstab(TABLE, "arm", "stage"), ModelError, "expected a fedstat.ClientPartition"),
        (lambda: fs.corr(None, "age"), ModelError, "expected a fedstat.ClientPartition"),
        (lambda: fs.table_one(TABLE, "age"), ModelError, "expected a fedstat.ClientPartition"),
        (lambda: fs.corr(partition(), None), ModelError, r"formula: expected columns.*\['age', 'stage'\]"),
        (lambda: fs.table_one(partition(), []), ModelError, "formula: expected columns"),
        (
            lambda: fs.table_one(partition(), ["age", 3]),
            ModelError,
            "formula: expected the name of one column",
        ),
        (lambda: fs.table_one(partition(), "age", nonnormal="age"), ModelError, r"write \['age'\]"),
        (lambda: fs.table_one(partition(), "arm", by="arm"), ModelError, "by: column 'arm' is in the table"),
        (lambda: fs.table_one(partition(), "age", by=["arm"]), ModelError, "by: expected a text, such as"),
        (lambda: fs.quantiles(partition(), ["age"], bounds=BOUNDS), ModelError, "call the function for each"),
        (lambda: fs.histogram(partition(), None, bounds=BOUNDS), ModelError, "column: expected the name"),
        (lambda: fs.quantiles(partition(), "age", by="age", bounds=BOUNDS), ModelError, "by: 'age' is the"),
        (lambda: fs.quantiles(partition(), "stage", bounds=BOUNDS), ModelError, "'stage' is a category"),
        (lambda: fs.quantiles(partition(), "age", "median", bounds=BOUNDS), ModelError, "received 'median'"),
        (lambda: fs.quantiles(partition(), "age", [], bounds=BOUNDS), ModelError, "q: expected shares"),
        (lambda: fs.quantiles(partition(), "age", bounds={"age": 3}), ModelError, "expected two numbers"),
        (lambda: fs.quantiles(partition(), "age", bounds=(0, 120)), ModelError, "expected a range by column"),
        (lambda: fs.histogram(partition(), "age", bins="auto"), ModelError, "bins"),
        (lambda: fs.histogram(partition(), "age", bins=[0, np.nan, 9]), ModelError, "bins"),
        (lambda: fs.corr(partition(), "age", method="kendall"), ModelError, "'pearson', 'spearman'"),
        (lambda: ranked("age + log(months)"), FormulaError, r"log\(months\).*do not change ranks"),
        (lambda: ranked("age + stage"), FormulaError, "'stage' is a category"),
        (lambda: ranked("age + months", bounds=None), ModelError, "public range"),
        (lambda: ranked("age + months", bins=1), ModelError, "bins"),
        (
            lambda: ranked("age + months", bounds={**BOUNDS, "age": (0, 9)}),
            DesignError,
            "'age'.*one interval",
        ),
    ],
)
def test_calls_without_a_meaning(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_published_ranges_are_used():
    age = {"kind": "number", "range": [0.0, 120.0]}
    arm = {"kind": "category", "levels": ["drugs", "surgery"]}
    published = {site: {"age": age, "arm": arm} for site in ("Bonn", "Kiel", "Trier", "Ulm")}
    table = TABLE[["hospital", "age", "arm"]]
    open_ = fs.ClientPartition.from_frame(table, by="hospital", published=published)
    assert fs.quantiles(open_, "age", by="arm").shape == (2, 3)


def test_a_dry_run_lists_what_leaves():
    for model, arguments in (
        (TableModel(partition(), ("arm",), category="stage"), {}),
        (TableModel(partition(), ("arm",), number="age"), {"edges": np.linspace(0.0, 120.0, 5)}),
    ):
        expected = model.explain(**arguments)
        assert expected.passes
        _, ledger = model.fit(**arguments)
        released = ledger.releases()
        key = ["sender", "step", "array", "kind", "masked"]
        own = released[~released["step"].isin(["introduce", "announce", "finish", "survey_rows"])]
        assert set(own[key].apply(tuple, axis=1)) <= set(expected.tidy()[key].apply(tuple, axis=1))


TABLES = {
    "counts": lambda: fs.crosstab(partition(), "arm", "stage"),
    "quantiles": lambda: fs.quantiles(partition(), "age", [0.05, 0.25, 0.5, 0.75], by="arm", bounds=BOUNDS),
    "histogram": lambda: fs.histogram(partition(), "age", by="arm", bounds=BOUNDS),
    "correlations": lambda: fs.corr(partition(), "age + months"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_drawn_and_written(kind):
    pytest.importorskip("matplotlib").use("Agg")
    table = TABLES[kind]()
    ax = table.plot()
    assert ax.has_data() and ax.get_title(loc="left")
    plain = table.to_frame()
    assert type(plain) is pd.DataFrame and type(table.head(1)) is pd.DataFrame
    assert "tabular" in table.to_latex() and "<table" in table._repr_html_()
    heights = {
        "counts": lambda: (
            sorted(patch.get_height() for patch in ax.patches) == sorted(table.to_numpy().ravel())
        ),
        "quantiles": lambda: [patch.get_x() for patch in ax.patches] == table[0.25].tolist(),
        "histogram": lambda: len(ax.patches) == 4,
        "correlations": lambda: f"{table.loc['age', 'months']:.2f}" in [text.get_text() for text in ax.texts],
    }
    assert heights[kind]()


def test_what_cannot_be_drawn_says_so():
    pytest.importorskip("matplotlib").use("Agg")
    with pytest.raises(ModelError, match="needs the quartiles"):
        fs.quantiles(partition(), "age", [0.5], bounds=BOUNDS).plot()
    with pytest.raises(ModelError, match="draw a histogram instead"):
        fs.table_one(partition(), "age").plot()
    hidden = fs.crosstab(partition(hidden_table()), "arm", "stage").plot()
    assert [text.get_text() for text in hidden.texts] == ["hidden"] * 4
    differences = fs.table_one(partition(), "age + C(stage)", by="arm")
    drawn = [patch.get_width() for patch in differences.plot().patches]
    assert_allclose(drawn, [one.difference() for one in differences.variables])
    shares = [patch.get_width() for patch in fs.table_one(partition(), "stage").plot().patches]
    assert_allclose(sum(shares), 100.0)


def test_table_one_is_that_of_tableone_cell_by_cell():
    """The same figures as the package tableone prints of the pooled rows; quartiles within the error."""
    tableone = pytest.importorskip("tableone")
    theirs = tableone.TableOne(
        TABLE,
        columns=["age", "weight", "months", "stage", "died"],
        categorical=["stage", "died"],
        continuous=["age", "weight", "months"],
        nonnormal=["months"],
        groupby="arm",
        pval=True,
        smd=True,
        decimals={"age": 1, "weight": 1, "months": 2, "stage": 1, "died": 1},
    ).tableone
    theirs.columns = theirs.columns.get_level_values(-1)
    ours = fs.table_one(
        partition(policy=EXACT),
        "age + weight + months + C(stage) + C(died)",
        by="arm",
        nonnormal=["months"],
        bounds=BOUNDS,
        smd=True,
        pvalues=True,
    )
    frame, cells = ours.to_frame(), 0
    groups = {"all": "Overall", "drugs": "drugs", "surgery": "surgery"}
    for one in ours.variables:
        for (name, level), row in frame.loc[[one.name]].iterrows():
            what = {"mean (sd)": ", mean (SD)", "median [Q1, Q3]": ", median [Q1,Q3]"}.get(level, ", n (%)")
            their = theirs.loc[(f"{name}{what}", level if one.levels else "")]
            for column, theirs_column in groups.items():
                if level == "median [Q1, Q3]":
                    numbers = [float(text) for text in re.findall(r"[\d.]+", row[column])]
                    expected = [float(text) for text in re.findall(r"[\d.]+", their[theirs_column])]
                    assert_allclose(numbers, expected, atol=64.0 / 2048 + 0.05)
                else:
                    assert row[column] == their[theirs_column]
                cells += 1
        first = theirs.loc[[index for index in theirs.index if index[0].startswith(f"{one.name},")]].iloc[0]
        assert frame.loc[one.name].iloc[0]["missing"] == (str(first["Missing"]) or "0")
        if one.counts is not None:
            p, their_p = one.p_value(), first["P-Value"]
            assert p < 0.001 if their_p == "<0.001" else abs(p - float(their_p)) <= 6e-4
            assert_allclose(one.difference(), float(first["SMD (drugs,surgery)"].lstrip("<-")), atol=6e-4)
    assert cells == 24
