"""The horizontal layout: one table per site, in memory or streamed; what is common, and what is refused."""

import re
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from pictures import WIDTHS, faults, page

from fedstat.errors import PartitionError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.tables.table import FrameTable, ParquetTable

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore:.*rows have a key that another site has")
SECRET = 918273.5
SIZES = {"Kiel": 40, "Bonn": 25, "Ulm": 60}


def hospitals(seed=0):
    """Same columns, another order at the second site, and one that only the third has."""
    rng = np.random.default_rng(seed)
    frames = {}
    for site, n in SIZES.items():
        frame = pd.DataFrame({"nr": rng.permutation(n), "age": rng.integers(20, 90, n)})
        frame["sbp"] = np.where(rng.random(n) < 0.2, NAN, rng.normal(130, 15, n))
        frames[site] = frame.assign(sex=rng.choice(["f", "m"], n))
    frames["Bonn"] = frames["Bonn"][["sex", "sbp", "age", "nr"]]
    frames["Ulm"]["smoker"] = rng.random(SIZES["Ulm"]) < 0.3
    return frames


def rows_of(frames, **options):
    return ClientPartition.from_frames(frames, layout="horizontal", **options)


def written(folder, frames, ending=".parquet"):
    paths = {site: folder / f"{site}{ending}" for site in frames}
    for site, frame in frames.items():
        if ending == ".parquet":
            frame.to_parquet(paths[site])
        else:
            frame.to_csv(paths[site], index=False, sep="\t" if "tsv" in ending else ",")
    return paths


TEXTS = {"sex"}


@pytest.fixture
def only_texts_are_read(monkeypatch):
    """Opening looks for control characters in columns of text, and reads no column of numbers."""

    def watched(original):
        def read(self, *args, columns=None, **kwargs):
            assert columns is not None and set(columns) <= TEXTS, "rows were read"
            return original(self, *args, columns=columns, **kwargs)

        return read

    for name in ("read", "iter_batches", "read_row_group", "read_row_groups"):
        monkeypatch.setattr(pq.ParquetFile, name, watched(getattr(pq.ParquetFile, name)))


def test_sites_hold_their_tables_one_after_the_other():
    frames = hospitals()
    partition = rows_of(frames, partial="error", min_count=3)
    assert (partition.layout, partition.key, partition.site_column) == ("horizontal", (), "site")
    assert (partition.partial, partition.min_count) == ("error", 3)
    assert tuple(partition.sites) == tuple(frames) and partition.n_entities == 125
    assert np.array_equal(np.concatenate(list(partition.rows.values())), np.arange(125))
    for site, frame in frames.items():
        table = partition.sites[site]._data.table
        assert partition.columns[site] == tuple(frame.columns)
        assert partition.rows[site].dtype == np.int64 and not partition.rows[site].flags.writeable
        pd.testing.assert_frame_equal(next(table.chunks(list(frame.columns))), frame)
        assert set(pd.concat(table.chunks(["site"]))["site"]) == {site}
    assert partition.presence().sum().to_dict() == SIZES
    assert partition.presence().sum(axis=1).eq(1).all()


def test_pooled_columns_are_those_of_every_site_in_the_order_of_the_first():
    frames = hospitals()
    assert rows_of(frames).pooled_columns == ("nr", "age", "sbp", "sex")
    assert rows_of(frames, on="nr").pooled_columns == ("age", "sbp", "sex")
    reordered = {site: frames[site] for site in ("Bonn", "Kiel", "Ulm")}
    assert rows_of(reordered).pooled_columns == ("sex", "sbp", "age", "nr")
    vertical = ClientPartition.from_frames({"Kiel": frames["Kiel"]}, on="nr")
    assert (vertical.pooled_columns, vertical.site_column) == ((), "")


def test_a_key_is_hidden_and_names_the_entities():
    frames = hospitals()
    partition = rows_of(frames, on="nr")
    assert partition.key == ("nr",) and partition.columns["Bonn"] == ("sex", "sbp", "age")
    assert partition.entities.tolist() == np.concatenate([f["nr"] for f in frames.values()]).tolist()
    assert all("nr" not in site._data.table.columns for site in partition.sites.values())
    indexed = rows_of({site: frame.set_index("nr") for site, frame in frames.items()}, on="nr")
    pd.testing.assert_index_equal(indexed.entities, partition.entities)


def test_one_table_split_by_a_column_is_the_same_partition():
    frames = hospitals()
    stacked = pd.concat([frame.assign(site=site) for site, frame in frames.items()], ignore_index=True)
    stacked["site"] = pd.Categorical(stacked["site"], categories=list(frames))
    split, given = ClientPartition.from_frame(stacked, by="site"), rows_of(frames)
    assert split.site_column == "site"
    for site in frames:
        assert np.array_equal(split.rows[site], given.rows[site])
        columns = ["age", "sbp", "sex", "site"]
        for one, two in zip(
            *(p.sites[site]._data.table.chunks(columns) for p in (split, given)), strict=True
        ):
            pd.testing.assert_frame_equal(one, two)


def test_the_site_column_may_have_another_name():
    frames = {site: frame.assign(site="ward 1") for site, frame in hospitals().items()}
    frames["Kiel"].loc[0, "site"] = "ward 2"
    partition = rows_of(frames, site_column="hospital")
    assert partition.site_column == "hospital" and "site" in partition.pooled_columns
    table = partition.sites["Ulm"]._data.table
    assert next(table.chunks(["hospital"]))["hospital"].unique().tolist() == ["Ulm"]
    split = ClientPartition.from_frame(pd.concat([f.assign(h=s) for s, f in frames.items()]), by="h")
    assert split.site_column == "h"


def test_what_the_caller_does_to_his_tables_later_does_not_reach_the_sites():
    frames = hospitals()
    before = frames["Kiel"].copy()
    partition = rows_of(frames)
    frames["Kiel"]["new"] = 1.0
    frames["Kiel"].pop("age")
    pd.testing.assert_frame_equal(partition.frames["Kiel"], before)


def test_policies_the_secret_and_other_kinds_of_tables():
    policy = Policy(min_count=50)
    frames = {site: pl.from_pandas(frame) for site, frame in hospitals().items()}
    partition = rows_of(frames, policies={"Bonn": policy}, shared_seed=7)
    assert partition.sites["Bonn"].policy is policy
    assert {site._data.shared_seed for site in partition.sites.values()} == {7}
    with pytest.raises(PartitionError, match=r"policies: unknown sites 'Z'\."):
        rows_of(frames, policies={"Z": policy})


@pytest.mark.usefixtures("only_texts_are_read")
def test_numbers_of_parquet_files_are_not_read(tmp_path):
    frames = hospitals()
    paths = written(tmp_path, frames)
    partition = ClientPartition.from_files(paths, on="nr", layout="horizontal", site_column="hospital")
    assert partition.site_column == "hospital" and partition.pooled_columns == ("age", "sbp", "sex")
    assert isinstance(partition.entities, pd.RangeIndex) and partition.n_entities == 125
    assert np.array_equal(partition.rows["Ulm"], np.arange(65, 125))
    described = partition.describe()
    assert described.sites["entities"].to_dict() == SIZES and described.n_entities == 125
    unknown = ["complete", "partly filled", "missing share", "empty columns"]
    assert described.sites[unknown].isna().all(axis=None)
    for text in (repr(partition), str(described), partition._repr_html_()):
        assert "streamed" in text and "125" in text
    assert "Some sites lack 'smoker'." in str(described) and "unknown" in str(described)
    with pytest.raises(PartitionError, match=r"all 3 sites are streamed.*pandas"):
        partition.plot_missing()


def test_streamed_rows_are_those_of_the_table_in_memory(tmp_path):
    frames = hospitals()
    partition = ClientPartition.from_files(written(tmp_path, frames), on="nr", layout="horizontal")
    for site, frame in frames.items():
        table = partition.sites[site]._data.table
        assert "nr" not in table.columns
        columns = ["sbp", "sex", "site"]
        expected = frame.assign(site=pd.Categorical([site] * len(frame)))[columns]
        pd.testing.assert_frame_equal(pd.concat(table.chunks(columns)), expected)


def test_a_streamed_table_can_be_given_with_others(tmp_path):
    frames = hospitals()
    streamed = ParquetTable(written(tmp_path, frames)["Bonn"], rows_per_chunk=4)
    partition = rows_of({**frames, "Bonn": streamed}, on="nr")
    chunks = list(partition.sites["Bonn"]._data.table.chunks(["age"]))
    assert [len(chunk) for chunk in chunks] == [4] * 6 + [1]
    assert isinstance(partition.entities, pd.RangeIndex) and partition.n_entities == 125
    sites = partition.describe().sites
    assert sites["complete"].isna().tolist() == [False, True, False]
    assert sites.loc["Kiel", "complete"] == frames["Kiel"].notna().all(axis=1).sum()
    assert partition.plot_missing().images[0].get_array().shape == (2, 4)
    plt.close("all")
    with pytest.raises(PartitionError, match=r"'Bonn': a streamed table needs layout='horizontal'"):
        ClientPartition.from_frames({"Bonn": streamed}, on="nr")


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv"])
def test_text_files_are_read(tmp_path, ending):
    frames = hospitals()
    frames["Kiel"].loc[:3, "sex"] = "None"
    paths = written(tmp_path, frames, ending)
    read = ClientPartition.from_files(paths, layout="horizontal", dtype={"nr": "str"})
    assert all(isinstance(table, FrameTable) for table in read._tables.values())
    for site, frame in frames.items():
        pd.testing.assert_frame_equal(read.frames[site], frame.astype({"nr": "str"}))


def test_a_file_that_is_no_parquet_file_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("id,x\n1,918273.5\n")
    for path, expected in [
        (tmp_path / "a.parquet", "'A'.*could not be read"),
        (tmp_path / "none.parquet", "no file"),
    ]:
        with pytest.raises(PartitionError, match=expected):
            ClientPartition.from_files({"A": path}, layout="horizontal")


def test_description_counts_what_pandas_counts():
    frames = hospitals()
    partition = rows_of(frames, on="nr")
    described = partition.describe()
    bare = {site: frame.drop(columns="nr") for site, frame in frames.items()}
    for site, frame in bare.items():
        row = described.sites.loc[site]
        assert row["columns"] == frame.shape[1] and row["entities"] == len(frame)
        assert row["complete"] == frame.notna().all(axis=1).sum()
        assert row["partly filled"] == len(frame) - row["complete"]
        assert row["missing share"] == pytest.approx(frame.isna().to_numpy().mean())
    assert described.not_pooled == ("smoker",) and described.n_complete == 0
    patterns = described.patterns.set_index(list(frames))["count"]
    assert patterns.to_dict() == partition.presence().value_counts().to_dict()
    assert described.patterns["count"].tolist() == [60, 40, 25]
    assert repr(partition).startswith("ClientPartition (horizontal): 125 entities, 3 sites, key 'nr'")
    assert "3 columns are at every site" in repr(partition) and "streamed" not in repr(partition)
    assert "Some sites lack &#x27;smoker&#x27;." in partition._repr_html_()


def test_missing_cells_are_drawn_by_column_and_gray_where_there_is_no_column():
    frames = hospitals()
    ax = rows_of(frames).plot_missing()
    drawn = np.ma.filled(np.ma.masked_invalid(ax.images[0].get_array()), NAN)
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == ["nr", "age", "sbp", "sex", "smoker"]
    expected = [
        [frame[name].isna().mean() if name in frame else NAN for name in names] for frame in frames.values()
    ]
    np.testing.assert_allclose(drawn, expected)
    texts = [text.get_text() for text in ax.texts]
    assert "gray: the site lacks this column" in texts
    shares = np.ravel(expected)
    assert [text for text in texts if text[-1] in "%–"] == [
        "–" if np.isnan(share) else f"{share:.0%}" for share in shares
    ]
    plt.close("all")


def table(n=4, **changes):
    return pd.DataFrame({"id": range(n), "x": [0.5, 1.5, 2.5, SECRET][:n]} | changes)


BASE = {"A": table(), "B": table()}
REFUSED = {
    "no rows": ({"B": table().iloc[:0]}, "'B' has no rows"),
    "no columns": ({"B": table()[["id"]]}, "'B' has no column besides the key"),
    "no values": ({"B": table(x=[NAN] * 4)}, "'B' has no value in any of its 1 columns"),
    "infinite": ({"B": table(x=[INF, 1, 2, -INF])}, "'B', column 'x': 2 infinite values"),
    "nothing in common": ({"B": table().rename(columns={"x": "X"})}, "no column is at every site"),
    "other type": (
        {"B": table(x=list("abcd"))},
        "'x' holds numbers at site 'A' and text at site 'B'",
    ),
    "true and false": (
        {"B": table(x=[True, False] * 2)},
        "'x' holds numbers at .* and true/false at site 'B'",
    ),
    "dates": (
        {"B": table(x=pd.date_range("2020", periods=4))},
        "'x' holds numbers .* and dates at site 'B'",
    ),
    "codes": (
        {"B": table(x=pd.Categorical([1, 2, 3, 1]))},
        "numbers at .* and numbers as categories at site 'B'",
    ),
    "objects": (
        {"B": table(x=pd.Series(["a", 1, 2, 3], dtype=object))},
        "values of other types at site 'B'",
    ),
    "no key": ({"B": table().rename(columns={"id": "ID"})}, "'B' has no key column 'id'"),
    "repeated key": ({"B": table(id=[1, 2, 2, 2])}, "'B': 2 of 4 rows repeat a key"),
    "missing key": ({"B": table(id=[1, 2, NAN, NAN])}, "'B', key column 'id': 2 rows have no key"),
    "key of text": (
        {"B": table(id=list("abcd"))},
        "'id' holds numbers at site 'A' and text at site 'B'",
    ),
    "site column": (
        {"B": table(site=list("uvwx"))},
        "'B' has a column 'site'.*site_column='another",
    ),
    "a site's name": ({1: table()}, "of type int"),
    "a column's name": ({"B": table().rename(columns={"x": 0})}, "'B': 1 column names are not text"),
    "not a table": ({"B": [1, 2]}, "site 'B'.*received list"),
}


def refusal(frames, on="id", **options):
    with pytest.raises(PartitionError) as caught:
        rows_of(frames, on=on, **options)
    assert "918273" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_site_and_column(case):
    changed, expected = REFUSED[case]
    assert re.search(expected, refusal(BASE | changed), flags=re.DOTALL)


STREAMED = [
    "no rows",
    "no columns",
    "nothing in common",
    "other type",
    "true and false",
    "dates",
    "no key",
    "key of text",
    "site column",
]


@pytest.mark.parametrize("case", STREAMED)
def test_a_streamed_table_is_refused_for_what_its_metadata_reveal(case, tmp_path):
    changed, expected = REFUSED[case]
    tables = {site: ParquetTable(path) for site, path in written(tmp_path, BASE | changed).items()}
    for frames in (tables, {**tables, "A": BASE["A"]}, {**BASE, "B": tables["B"]}):
        assert re.search(expected, refusal(frames), flags=re.DOTALL)


def test_all_problems_are_reported_at_once():
    frames = {"A": table(), "B": table(x=[INF, 1, 2, 3], site=1.5), "C": table(x=list("abcd"))}
    message = refusal(frames)
    for part in (
        "3 problems",
        "'B', column 'x': 1 infinite",
        "'site', and this name is reserved",
        "text at site 'C'",
    ):
        assert part in message


def test_a_site_may_have_no_value_of_a_column_whatever_its_type():
    frames = {"A": table(s=list("uvuv")), "B": table(s=NAN), "C": table(s=None)}
    assert "s" in rows_of(frames, on="id").pooled_columns


def test_types_that_hold_the_same_are_the_same():
    complete = table(x=[1, 2, 3, 4], s=list("uvuv"), b=[True, False] * 2)
    nullable = complete.astype({"x": "Int64", "s": "category", "b": "boolean"})
    objects = complete.astype({"x": object, "s": object, "b": object})
    frames = {"A": table(s=list("uvuv"), b=[True, False] * 2), "B": complete, "C": nullable, "D": objects}
    assert rows_of(frames, on="id").pooled_columns == ("x", "s", "b")


def test_new_data_may_lack_all_rows_of_a_site():
    frames = BASE | {"B": table().iloc[:0].astype({"x": object})}
    partition = rows_of(frames, on="id", new_data=True)
    assert partition.describe().sites["entities"].tolist() == [4, 0]
    assert partition.describe().patterns["count"].tolist() == [4]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"layout": "diagonal"}, "layout must be one of 'vertical', 'horizontal', received 'diagonal'"),
        ({}, r"vertical layout links the tables by a key: give on=.*layout='horizontal'"),
        ({"layout": "horizontal", "site_column": " "}, "site_column must be a name"),
        ({"layout": "horizontal", "site_column": None}, "site_column must be a name"),
    ],
)
def test_the_layout_says_what_it_needs(options, expected, tmp_path):
    with pytest.raises(PartitionError, match=expected):
        ClientPartition.from_frames(BASE, **options)
    with pytest.raises(PartitionError, match=expected):
        ClientPartition.from_files(written(tmp_path, BASE, ".csv"), **options)


@pytest.mark.parametrize("width", WIDTHS)
def test_many_columns_stand_below_each_other_in_a_map_of_missing_cells(width):
    rng = np.random.default_rng(0)
    names = [f"a ratio of the balance sheet with a long name, {j}" for j in range(64)]
    frames = {}
    for k, site in enumerate(["Commercial court of the capital", "Tax office $x_$", "Bank", "Statistics"]):
        values = np.where(rng.random((1000, 64)) < 0.3, np.nan, 1.0)
        values[:, 20:] = 1.0
        values[: 1 if k else 999, 0], values[1 if k else 999 :, 0] = np.nan, 1.0
        values[:k, 1], values[k:, 1] = np.nan, 1.0
        frames[site] = pd.DataFrame(values, columns=names)
    ax = rows_of(frames).plot_missing(page(width, 6.0))
    assert ax.images[0].get_array().shape == (20, 4)
    texts = [text.get_text().replace("\n", " ") for text in ax.texts]
    assert "44 more columns lack nothing anywhere" in texts and {">99%", "<1%", "0%"} <= set(texts)
    assert len(ax.get_yticklabels()) == 20 and ax.get_yticklabels()[3].get_text().endswith(", 3")
    assert not faults(ax.figure)
    plt.close("all")


def test_a_partition_by_rows_holds_one_copy_of_the_table():
    frame = pd.DataFrame(np.zeros((200_000, 10))).add_prefix("x").assign(site=np.arange(200_000) % 2)
    size = frame.memory_usage().sum()
    ClientPartition.from_frame(frame.head(100), by="site")
    tracemalloc.start()
    partition = ClientPartition.from_frame(frame, by="site")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert partition.n_entities == len(frame)
    assert 0.8 * size < held < 1.3 * size and peak < 2.3 * size, (held / size, peak / size)
