"""Entities, rows and presence of a partition, compared with joins by pandas."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from fedstat.errors import PartitionError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.partition import ClientPartition

NAN = float("nan")


def three_clients(seed=0, n=60):
    """Three shuffled tables over partly common keys."""
    rng = np.random.default_rng(seed)
    shapes = {"A": ("a1", "a2"), "B": ("b1",), "C": ("c1", "c2", "c3")}
    frames = {}
    for site, names in shapes.items():
        keys = rng.permutation(n)[: rng.integers(n // 2, n)]
        frame = pd.DataFrame(rng.standard_normal((len(keys), len(names))), columns=list(names))
        frames[site] = frame.assign(id=keys)
    return frames


def outer_join(frames, key):
    joined = [frame.set_index(key) for frame in frames.values()]
    return pd.concat(joined, axis=1).sort_index()


def rebuilt(partition):
    """All clients' records back at their entities."""
    parts = [
        pd.DataFrame(f.to_numpy(), index=partition.entities[partition.rows[c]], columns=f.columns)
        for c, f in partition.frames.items()
    ]
    return pd.concat(parts, axis=1).reindex(partition.entities)


def test_entities_rows_and_presence_are_those_of_an_outer_join():
    frames = three_clients()
    partition = ClientPartition.from_frames(frames, on="id")
    joined = outer_join(frames, "id")
    pd.testing.assert_index_equal(partition.entities, joined.index)
    pd.testing.assert_frame_equal(rebuilt(partition), joined)
    expected = pd.DataFrame({c: joined[list(partition.columns[c])].notna().any(axis=1) for c in frames})
    pd.testing.assert_frame_equal(partition.presence(), expected)


def test_attributes():
    partition = ClientPartition.from_frames(three_clients(), on="id", partial="mean", min_count=3)
    assert tuple(partition.sites) == ("A", "B", "C")
    assert (partition.layout, partition.key) == ("vertical", ("id",))
    assert (partition.partial, partition.min_count) == ("mean", 3)
    assert partition.columns["C"] == ("c1", "c2", "c3")
    assert partition.n_entities == len(partition.entities)
    for site, rows in partition.rows.items():
        assert rows.dtype == np.int64 and np.all(np.diff(rows) > 0) and not rows.flags.writeable
        assert partition.sites[site].name == site
    with pytest.raises(AttributeError):
        partition.layout = "horizontal"


def test_row_order_of_the_tables_is_irrelevant():
    frames = three_clients()
    shuffled = {c: f.sample(frac=1, random_state=1) for c, f in frames.items()}
    one, two = (ClientPartition.from_frames(f, on="id") for f in (frames, shuffled))
    pd.testing.assert_frame_equal(rebuilt(one), rebuilt(two))


def test_tables_of_the_caller_stay_as_they_were():
    frames = three_clients()
    before = {c: f.copy() for c, f in frames.items()}
    ClientPartition.from_frames(frames, on="id")
    for site, frame in frames.items():
        pd.testing.assert_frame_equal(frame, before[site])


def test_rows_without_a_value_are_no_record():
    a = pd.DataFrame({"id": [3, 1, 2], "x": [1.0, NAN, 2.0], "s": ["u", None, None]})
    b = pd.DataFrame({"id": [1, 2, 3], "y": [5.0, 6.0, 7.0]})
    partition = ClientPartition.from_frames({"A": a.assign(s=["u", None, "v"]), "B": b}, on="id")
    assert partition.rows["A"].tolist() == [1, 2]
    assert partition.empty_rows == {"A": 1, "B": 0}
    assert partition.presence()["A"].tolist() == [False, True, True]
    assert partition.describe().sites.loc["A", "empty rows"] == 1


def test_an_entity_that_only_empty_rows_list_is_kept_without_records():
    a = pd.DataFrame({"id": [1, 2, 3, 4], "x": [1.0, 2.0, 3.0, NAN]})
    partition = ClientPartition.from_frames({"A": a}, on="id")
    assert partition.entities.tolist() == [1, 2, 3, 4]
    assert partition.presence()["A"].tolist() == [True, True, True, False]


def test_several_keys_make_a_sorted_multiindex():
    rng = np.random.default_rng(3)
    full = pd.DataFrame(
        [(f, y) for f in ("b", "a", "c") for y in (2012, 2010, 2011)], columns=["firm", "year"]
    )
    a = full.sample(6, random_state=0).assign(x=rng.standard_normal(6))
    b = full.sample(7, random_state=1).assign(z=rng.standard_normal(7))
    partition = ClientPartition.from_frames({"A": a, "B": b}, on=["firm", "year"])
    joined = outer_join({"A": a, "B": b}, ["firm", "year"])
    assert partition.entities.equals(joined.index) and partition.entities.names == ["firm", "year"]
    pd.testing.assert_frame_equal(rebuilt(partition), joined, check_index_type=False)


@pytest.mark.parametrize("convert", [pl.from_pandas, pa.Table.from_pandas])
def test_polars_and_arrow_tables_are_pandas_tables(convert):
    frames = three_clients()
    frames["B"]["group"] = np.where(frames["B"]["b1"] > 0, "high", "low")
    frames["B"].loc[0, "group"] = None
    converted = {c: convert(f) for c, f in frames.items()}
    one, two = (ClientPartition.from_frames(f, on="id") for f in (frames, converted))
    pd.testing.assert_index_equal(one.entities, two.entities)
    for site in frames:
        pd.testing.assert_frame_equal(one.frames[site], two.frames[site])


@pytest.mark.parametrize("dtype", ["int32", "uint8", "Int64", "category", object])
def test_whole_number_keys_match_whatever_their_width(dtype):
    frames = three_clients()
    other = {**frames, "B": frames["B"].astype({"id": dtype})}
    one, two = (ClientPartition.from_frames(f, on="id") for f in (frames, other))
    pd.testing.assert_index_equal(one.entities, two.entities)
    assert all(np.array_equal(one.rows[c], two.rows[c]) for c in frames)


@pytest.mark.parametrize("dtype", ["object", "string", "category"])
def test_text_keys_match_whatever_their_dtype(dtype):
    frames = {c: f.assign(id="e" + f["id"].astype(str)) for c, f in three_clients().items()}
    other = {**frames, "B": frames["B"].astype({"id": dtype})}
    one, two = (ClientPartition.from_frames(f, on="id") for f in (frames, other))
    pd.testing.assert_index_equal(one.entities, two.entities)
    assert all(np.array_equal(one.rows[c], two.rows[c]) for c in frames)


def test_a_key_may_come_as_the_index():
    frames = three_clients()
    indexed = {c: f.set_index("id") for c, f in frames.items()}
    one, two = (ClientPartition.from_frames(f, on="id") for f in (frames, indexed))
    pd.testing.assert_frame_equal(rebuilt(one), rebuilt(two))


def test_one_site_alone_is_a_partition():
    partition = ClientPartition.from_frames({"A": three_clients()["A"]}, on="id")
    assert partition.presence().all(axis=None)


def test_from_frame_by_columns_is_from_frames_of_the_joined_table():
    frames = three_clients()
    joined = outer_join(frames, "id").reset_index()
    columns = {c: [name for name in f.columns if name != "id"] for c, f in frames.items()}
    split = ClientPartition.from_frame(joined.sample(frac=1, random_state=0), columns=columns, on="id")
    linked = ClientPartition.from_frames(frames, on="id")
    pd.testing.assert_frame_equal(rebuilt(split), rebuilt(linked))
    assert all(np.array_equal(split.rows[c], linked.rows[c]) for c in frames)


def test_from_frame_without_a_key_takes_rows_as_entities():
    joined = outer_join(three_clients(), "id").sample(frac=1, random_state=0)
    partition = ClientPartition.from_frame(joined, columns={"A": ["a1"], "C": ["c2", "c1"]})
    assert partition.key == () and isinstance(partition.entities, pd.RangeIndex)
    assert partition.columns == {"A": ("a1",), "C": ("c2", "c1")}
    assert np.array_equal(partition.rows["A"], np.flatnonzero(joined["a1"].notna()))


def test_from_frame_by_a_column_gives_each_site_its_rows():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"site": rng.choice(["b", "c", "a"], 40), "x": rng.standard_normal(40)})
    table["z"] = np.where(table["site"] == "a", NAN, table["x"] ** 2)
    partition = ClientPartition.from_frame(table, by="site")
    assert partition.layout == "horizontal" and tuple(partition.sites) == ("a", "b", "c")
    for site, rows in table.groupby("site").indices.items():
        assert np.array_equal(partition.rows[site], rows)
        pd.testing.assert_frame_equal(
            partition.frames[site], table.loc[rows, ["x", "z"]].reset_index(drop=True)
        )
    assert partition.describe().sites["empty columns"].tolist() == [1, 0, 0]


def test_sites_follow_the_order_of_categories_and_numbers():
    table = pd.DataFrame({"x": [1.0, 2.0, 3.0], "h": [10, 9, 100]})
    assert tuple(ClientPartition.from_frame(table, by="h").sites) == ("9", "10", "100")
    ordered = table.assign(h=pd.Categorical(["low", "high", "low"], categories=["low", "mid", "high"]))
    assert tuple(ClientPartition.from_frame(ordered, by="h").sites) == ("low", "high")


def test_horizontal_keys_may_repeat():
    table = pd.DataFrame({"id": [1, 1, 2], "x": [1.0, 2.0, 3.0], "h": ["a", "a", "b"]})
    partition = ClientPartition.from_frame(table, by="h", on="id")
    assert partition.entities.tolist() == [1, 1, 2] and partition.columns["a"] == ("x",)


def test_policies_reach_their_sites_and_the_secret_is_common():
    policy = Policy(min_count=50)
    partition = ClientPartition.from_frames(three_clients(), on="id", policies={"B": policy}, shared_seed=7)
    assert partition.sites["B"].policy is policy and partition.sites["A"].policy == Policy()
    assert {site._data.shared_seed for site in partition.sites.values()} == {7}
    drawn = ClientPartition.from_frames(three_clients(), on="id")
    assert len({site._data.shared_seed for site in drawn.sites.values()}) == 1
    with pytest.raises(PartitionError, match=r"policies: unknown sites 'Z'\."):
        ClientPartition.from_frames(three_clients(), on="id", policies={"Z": policy})


def test_new_data_may_be_one_entity_with_constant_and_missing_columns():
    one = {"A": pd.DataFrame({"id": [1], "x": [2.0]}), "B": pd.DataFrame({"id": [1], "z": [NAN]})}
    with pytest.raises(PartitionError):
        ClientPartition.from_frames(one, on="id")
    partition = ClientPartition.from_frames(one, on="id", new_data=True)
    assert partition.presence().to_numpy().tolist() == [[True, False]]


def test_new_data_may_lack_all_rows_of_a_site():
    empty = pd.DataFrame({"id": pd.Series([], dtype=object), "z": pd.Series([], dtype=float)})
    full = pd.DataFrame({"id": [2, 1], "x": [1.0, 2.0]})
    partition = ClientPartition.from_frames({"B": empty, "A": full}, on="id", new_data=True)
    assert partition.entities.dtype == np.int64
    assert partition.presence().to_numpy().tolist() == [[False, True], [False, True]]
    alone = ClientPartition.from_frames({"B": empty}, on="id", new_data=True)
    assert alone.n_entities == 0 and len(alone.describe().patterns) == 0


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv", ".parquet"])
def test_files_hold_what_was_written(tmp_path, ending):
    frames = three_clients()
    frames["B"]["mood"] = np.where(frames["B"]["b1"] > 0, "None", "Several")
    frames["B"].loc[[0, 1], "mood"] = None
    paths = {}
    for site, frame in frames.items():
        paths[site] = tmp_path / f"{site}{ending}"
        if ending == ".parquet":
            frame.to_parquet(paths[site])
        else:
            frame.to_csv(paths[site], index=False, sep="\t" if "tsv" in ending else ",")
    read, given = ClientPartition.from_files(paths, on="id"), ClientPartition.from_frames(frames, on="id")
    for site in frames:
        pd.testing.assert_frame_equal(read.frames[site], given.frames[site])
    assert set(read.frames["B"]["mood"].dropna()) == {"None", "Several"}


def test_file_keys_can_be_read_as_text(tmp_path):
    (tmp_path / "a.csv").write_text("id,x\n007,1\n010,2\n")
    partition = ClientPartition.from_files({"A": tmp_path / "a.csv"}, on="id", dtype={"id": "str"})
    assert partition.entities.tolist() == ["007", "010"]
