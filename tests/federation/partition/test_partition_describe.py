"""Counts, patterns, rank correlations and pictures, against pandas, statsmodels and NHANES."""

import builtins
import sys

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from pictures import WIDTHS, faults, page
from scipy import stats
from statsmodels.multivariate.cancorr import CanCorr

from fedstat.datasets import load_sme
from fedstat.errors import PartitionError
from fedstat.federation.partition.dependence import bartlett_test, spearman
from fedstat.federation.partition.partition import ClientPartition

NHANES = {
    "Interview": ["Age", "Sex", "HHIncomeMid"],
    "Body": ["Weight", "Height", "BMI"],
    "Blood pressure": ["Pulse", "BPSysAve", "BPDiaAve"],
    "Blood laboratory": ["DirectChol", "TotChol"],
    "Urine": ["UrineVol1", "UrineFlow1"],
    "Questionnaire": ["HealthGen", "DaysPhysHlthBad", "DaysMentHlthBad"],
}


def blocks(seed=0, n=400, shift=0.0):
    """Two numeric clients and a text column; B depends on A by ``shift``."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((n, 3)) @ np.array([[1, 0.5, 0], [0, 1, 0.3], [0, 0, 1]])
    B = rng.standard_normal((n, 2)) + shift * A[:, :2]
    table = pd.DataFrame(np.hstack([A, B]), columns=["a1", "a2", "a3", "b1", "b2"])
    table.loc[rng.random(n) < 0.3, ["a1", "a2", "a3"]] = np.nan
    table.loc[rng.random(n) < 0.4, ["b1", "b2"]] = np.nan
    table.loc[rng.random(n) < 0.1, "a2"] = np.nan
    table["word"] = rng.choice(["u", "v"], n)
    return table, {"A": ["a1", "a2", "a3"], "B": ["b1", "b2"], "W": ["word"]}


def partition_of(**options):
    table, columns = blocks(**options)
    return table, ClientPartition.from_frame(table, columns=columns)


def test_description_counts_what_pandas_counts():
    table, partition = partition_of()
    described = partition.describe()
    cells = table[["a1", "a2", "a3"]].notna()
    row = described.sites.loc["A"]
    assert row["columns"] == 3
    assert row["entities"] == cells.any(axis=1).sum()
    assert row["complete"] == cells.all(axis=1).sum()
    assert row["partly filled"] == (cells.any(axis=1) & ~cells.all(axis=1)).sum()
    assert row["missing share"] == pytest.approx(1 - cells.any(axis=1).mean())
    assert described.n_complete == partition.presence().all(axis=1).sum()


def test_patterns_are_those_of_presence_by_count():
    _, partition = partition_of()
    patterns = partition.describe().patterns
    expected = partition.presence().value_counts()
    found = patterns.set_index(["A", "B", "W"])["count"]
    assert found.to_dict() == expected.to_dict()
    assert patterns["count"].is_monotonic_decreasing
    assert patterns["share"].sum() == pytest.approx(1)


def test_many_sites_and_a_site_called_count():
    rng = np.random.default_rng(1)
    table = pd.DataFrame(rng.standard_normal((50, 12)), columns=[f"x{j}" for j in range(12)])
    table = table.mask(rng.random(table.shape) < 0.3)
    columns = {f"c{j}" if j else "count": [f"x{j}"] for j in range(12)}
    partition = ClientPartition.from_frame(table, columns=columns)
    described = partition.describe()
    unique, counts = np.unique(partition.presence().to_numpy(), axis=0, return_counts=True)
    assert len(described.patterns) == len(unique)
    assert sorted(described.patterns["count"].iloc[:, -1]) == sorted(counts)


def test_texts_show_counts_and_no_data():
    table, partition = partition_of()
    table.insert(0, "id", 5_000_000 + np.arange(len(table)))
    keyed = ClientPartition.from_frame(table, columns={"A<b>": ["a1"], "B": ["b1"]}, on="id")
    for text in (repr(keyed), str(keyed.describe()), keyed._repr_html_()):
        assert "400" in text and "5000" not in text and "5,000" not in text
        assert not any(f"{value:.4f}" in text for value in table["a1"].dropna())
    assert "A&lt;b&gt;" in keyed._repr_html_() and "<b>" not in keyed.describe()._sites_shown().to_html()
    assert repr(partition).startswith("ClientPartition (vertical): 400 entities, 3 sites")


def test_correlations_are_those_of_the_pooled_table():
    table, partition = partition_of(shift=0.4)
    correlation = partition.correlation()
    numeric = table[["a1", "a2", "a3", "b1", "b2"]]
    pd.testing.assert_frame_equal(correlation.matrix, numeric.corr(method="spearman"))
    seen = numeric.notna().to_numpy().astype(int)
    assert np.array_equal(correlation.n.to_numpy(), seen.T @ seen)
    assert correlation.site_of == {"a1": "A", "a2": "A", "a3": "A", "b1": "B", "b2": "B"}
    R = numeric.corr(method="spearman").abs()
    assert correlation.mean_between == pytest.approx(R.loc[["a1", "a2", "a3"], ["b1", "b2"]].mean(axis=None))
    within = [R.loc["a1", "a2"], R.loc["a1", "a3"], R.loc["a2", "a3"], R.loc["b1", "b2"]]
    assert correlation.mean_within == pytest.approx(np.mean(within))


def test_bartlett_statistic_is_that_of_the_canonical_correlations():
    table, _ = blocks(shift=0.1)
    ranks = table.drop(columns="word").dropna().rank()
    X, Y = ranks.iloc[:, :3].to_numpy(), ranks.iloc[:, 3:].to_numpy()
    test = bartlett_test(X, Y)
    r = CanCorr(Y - Y.mean(0), X - X.mean(0)).cancorr
    statistic = -(len(X) - (3 + 2 + 3) / 2) * np.log1p(-(r**2)).sum()
    assert test.statistic == pytest.approx(statistic) and test.df == 6
    assert test.p_value == pytest.approx(stats.chi2.sf(statistic, 6))


def test_bartlett_test_keeps_its_level_and_is_unmoved_by_collinear_columns():
    rng = np.random.default_rng(5)
    p_values = [
        bartlett_test(*np.split(rng.standard_normal((120, 5)), [3], axis=1)).p_value for _ in range(400)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    X, Y = rng.standard_normal((50, 2)), rng.standard_normal((50, 2))
    doubled = np.hstack([X, 3 * X[:, :1], np.ones((50, 1))])
    one, two = bartlett_test(X, Y), bartlett_test(doubled, Y)
    assert one.statistic == pytest.approx(two.statistic) and one.df == two.df == 4


def test_too_few_common_entities_are_not_tested():
    assert np.isnan(bartlett_test(np.ones((4, 2)), np.ones((4, 2))).p_value)
    R, N = spearman(np.array([[1, np.nan], [2, np.nan], [3, 1.0], [4, 2.0]]))
    assert np.isnan(R[0, 1]) and N[0, 1] == 2


def test_a_flag_needs_both_significance_and_size():
    strong = partition_of(n=400, shift=0.5)[1].correlation()
    assert strong.pairs["flagged"].tolist() == [True]
    assert strong.in_doubt().loc["a1", "b1"] and not strong.in_doubt().loc["a1", "a2"]
    slight = partition_of(n=60_000, shift=0.03)[1].correlation()
    assert slight.pairs.loc[0, "p_adjusted"] < 1e-6 and not slight.pairs.loc[0, "flagged"]
    chance = partition_of(n=60)[1].correlation()
    assert chance.pairs.loc[0, "max_abs"] > 0.1 and not chance.pairs.loc[0, "flagged"]
    assert not chance.in_doubt().any(axis=None)


def test_correlation_needs_numbers_and_the_vertical_layout():
    table, _ = blocks()
    with pytest.raises(PartitionError, match="numeric"):
        ClientPartition.from_frame(table, columns={"W": ["word"]}).correlation()
    with pytest.raises(PartitionError, match="vertical"):
        ClientPartition.from_frame(table, by="word").plot_correlation()


def test_plots_draw_every_pattern_and_mark_the_doubts():
    _, partition = partition_of(shift=0.5)
    ax = partition.plot_missing()
    n_patterns = len(partition.describe().use)
    assert ax.images[0].get_array().shape[:2] == (n_patterns, 3)
    assert partition.plot_missing(max_patterns=2).images[0].get_array().shape[0] == 2
    ax = partition.plot_correlation()
    assert len(ax.collections[0].get_offsets()) == partition.correlation().in_doubt().to_numpy().sum() > 0
    _, given = plt.subplots()
    assert partition.plot_missing(given) is given
    plt.close("all")


def test_plots_without_matplotlib_say_what_to_install(monkeypatch):
    _, partition = partition_of()
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"fedstat\[plot\]"):
        partition.plot_missing()


def test_nhanes_has_the_blocks_that_its_notes_count(shared_data):
    path = shared_data / "nhanes" / "NHANESraw.csv.gz"
    if not path.is_file():
        pytest.skip("NHANES is absent from the real data")
    raw = pd.read_csv(path, keep_default_na=False, na_values=["", "NA"], low_memory=False)
    adults = raw[raw["Age"] >= 20]
    partition = ClientPartition.from_frames(
        {c: adults[["ID", *names]] for c, names in NHANES.items()}, on="ID"
    )
    described = partition.describe()
    shares = (100 * described.sites["missing share"]).round(1)
    assert partition.n_entities == 11_778
    assert shares.tolist() == [0.0, 4.3, 7.7, 9.9, 5.3, 14.6]
    presence = partition.presence().to_numpy()
    assert (~presence[:, 1:]).all(axis=1).sum() == 400
    pairs = partition.correlation().pairs.set_index(["client_1", "client_2"])
    assert pairs.loc[("Interview", "Blood pressure"), "flagged"]


def test_heart_disease_hospitals_split_by_rows(shared_data):
    folder = shared_data / "heart_disease_4sites"
    if not folder.is_dir():
        pytest.skip("heart disease is absent from the real data")
    names = [f"column{j}" for j in range(14)]
    parts = [
        pd.read_csv(folder / f"processed.{site}.data", header=None, names=names, na_values="?").assign(
            site=site
        )
        for site in ("cleveland", "hungarian", "switzerland", "va")
    ]
    partition = ClientPartition.from_frame(pd.concat(parts, ignore_index=True), by="site")
    assert partition.describe().sites["entities"].tolist() == [303, 294, 123, 200]
    assert partition.plot_missing().images[0].get_array().shape == (14, 4)
    plt.close("all")


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_of_a_partition_fit_a_journal(width):
    table, columns = blocks()
    long = {f"Market Supervision and Administration Bureau {c}": names for c, names in columns.items()}
    partition = ClientPartition.from_frame(table, columns=long)
    ax = partition.plot_missing(page(width, 5.0))
    assert not faults(ax.figure)
    assert ax.get_title(loc="left").startswith("Records of")
    ax = partition.plot_correlation(page(width, 6.0))
    assert not faults(ax.figure)
    assert ax.get_title(loc="left").replace("\n", " ") == "Rank correlation within and between sites"
    plt.close("all")


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_of_many_columns_and_sites_fit_a_journal(width):
    frames = load_sme()
    partition = ClientPartition.from_frames(frames, on="enterprise_id")
    ax = partition.plot_missing(page(width, 4.0), max_patterns=12)
    assert not faults(ax.figure)
    ax = partition.plot_correlation(page(width, 5.0))
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert not faults(ax.figure) and len(names) == 36 and names[0] == "NPGR"
    right = [label.get_text().replace("\n", " ") for label in ax.child_axes[0].get_yticklabels()]
    assert len(right) == 6 and right[1] == "Credit Agency"
    plt.close("all")


@pytest.mark.parametrize(("partial", "part"), [("condition", "some"), ("drop", "none"), ("mean", "all")])
def test_records_that_are_there_in_part_are_shown_as_fits_take_them(partial, part):
    table, columns = blocks()
    described = ClientPartition.from_frame(table, columns=columns, partial=partial).describe()
    has = table[columns["A"]].notna()
    partly = has.any(axis=1) & ~has.all(axis=1)
    use = described.use
    assert use["count"].sum() == len(table) and use["count"].is_monotonic_decreasing
    counts = use.groupby("A")["count"].sum()
    others = {"some": 0, "none": (~has.any(axis=1)).sum(), "all": has.all(axis=1).sum()}
    assert counts[part] == partly.sum() + others[part]
    assert "x all columns, o some, . none" in str(described)
    axes = ClientPartition.from_frame(table, columns=columns, partial=partial).plot_missing()
    assert axes.images[0].get_array().shape[0] == len(use)
    assert len(np.unique(axes.images[0].get_array().reshape(-1, 3), axis=0)) == (3 if part == "some" else 2)
    plt.close("all")


def test_where_every_record_is_whole_nothing_is_said_of_parts():
    table, columns = blocks()
    table["a2"] = table["a1"]
    assert ClientPartition.from_frame(table, columns=columns).describe().use is None


def test_columns_that_lack_most_values_are_named_with_their_share():
    rng = np.random.default_rng(0)
    b, c = np.where(np.arange(200) < 86, np.nan, 1.0), np.where(np.arange(200) < 1, np.nan, 1.0)
    table = pd.DataFrame({"id": range(200), "a": rng.normal(size=200), "b": b, "c": c})
    other = pd.DataFrame({"id": range(150), "d": rng.normal(size=150)})
    described = ClientPartition.from_frames({"A": table, "B": other}, on="id").describe()
    assert described.most_missing == (("A", "b", 0.43),)
    assert "43 % of 'b' (A)" in str(described)
