"""Tables that a site holds: the same rows whether in memory or streamed, and no more of them than asked."""

import builtins
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedstat.errors import DesignError
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
from fedstat.federation.tables.table import (
    MOST_KEPT,
    MOST_NUMBERS_KEPT,
    FrameTable,
    LabeledTable,
    ParquetTable,
    keep_result,
)

N = 1000


def records(n=N, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(rng.standard_normal((n, 3)), columns=["x", "y", "z"])
    frame.loc[rng.random(n) < 0.2, "z"] = np.nan
    frame["word"] = rng.choice(["u", "v", "w"], n)
    frame.loc[rng.random(n) < 0.1, "word"] = None
    levels = ["low", "mid", "high"]
    frame["grade"] = pd.Categorical(rng.choice(["low", "high"], n), categories=levels, ordered=True)
    frame["well"] = rng.random(n) < 0.5
    return frame


@pytest.fixture
def frame():
    return records()


@pytest.fixture
def path(tmp_path, frame):
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=300)
    return tmp_path / "a.parquet"


def stacked(table, columns):
    return pd.concat(list(table.chunks(columns)), ignore_index=True)


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 300, 301, 10_000])
def test_chunks_of_a_file_stack_to_its_rows(path, frame, rows_per_chunk):
    table = ParquetTable(path, rows_per_chunk)
    assert (table.columns, table.n_rows) == (tuple(frame.columns), N)
    columns = ["z", "grade", "x", "word"]
    pd.testing.assert_frame_equal(stacked(table, columns), frame[columns])
    for chunk in table.chunks(columns):
        assert 0 < len(chunk) <= rows_per_chunk
        assert chunk.index.equals(pd.RangeIndex(len(chunk))) and isinstance(chunk.index, pd.RangeIndex)


def test_categories_keep_their_order_in_every_chunk(path):
    for chunk in ParquetTable(path, 7).chunks(["grade"]):
        assert chunk["grade"].cat.categories.tolist() == ["low", "mid", "high"]


def test_arrow_and_polars_files_are_read_too(tmp_path, frame):
    pl.from_pandas(frame).write_parquet(tmp_path / "polars.parquet", row_group_size=400)
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), tmp_path / "arrow.parquet")
    for name in ("polars", "arrow"):
        found = stacked(ParquetTable(tmp_path / f"{name}.parquet"), list(frame.columns))
        pd.testing.assert_frame_equal(found, frame, check_dtype=False, check_categorical=False)


def test_a_chunk_with_missing_true_and_false_has_the_type_of_the_others(tmp_path):
    pd.DataFrame({"b": [True, False, None, True]}).to_parquet(tmp_path / "b.parquet")
    chunks = list(ParquetTable(tmp_path / "b.parquet", 2).chunks(["b"]))
    assert [str(chunk["b"].dtype) for chunk in chunks] == ["boolean", "boolean"]
    assert pd.concat(chunks)["b"].isna().tolist() == [False, False, True, False]


STORED = [(pd.Index([5, 3, 4], name="id"), 1), (pd.Index([5, 3, 4]), 1), (pd.RangeIndex(5, 8), 0)]


@pytest.mark.parametrize(("index", "n_columns"), STORED)
def test_an_index_that_pandas_stored_is_no_column(tmp_path, index, n_columns):
    pd.DataFrame({"x": [1.0, 2.0, 3.0]}, index=index).to_parquet(tmp_path / "i.parquet")
    table = ParquetTable(tmp_path / "i.parquet")
    assert table.columns == ("x",) and len(table.index_columns) == n_columns
    (chunk,) = table.chunks(["x"])
    assert chunk.index.equals(pd.RangeIndex(3))
    pd.testing.assert_frame_equal(stacked(table, ["x"]), pd.DataFrame({"x": [1.0, 2.0, 3.0]}))


def test_columns_left_out_cannot_be_requested(path):
    table = ParquetTable(path, leave_out=["y"])
    assert "y" not in table.columns
    with pytest.raises(DesignError, match="no column 'y'"):
        next(table.chunks(["x", "y"]))


def test_names_with_dots_are_distinguished(tmp_path):
    frame = pd.DataFrame({"a.b": [1.0], "a": [2.0], "a.c": [3.0]})
    frame.to_parquet(tmp_path / "dots.parquet")
    table = ParquetTable(tmp_path / "dots.parquet")
    for columns in (["a"], ["a.c", "a"], ["a.b"]):
        pd.testing.assert_frame_equal(stacked(table, columns), frame[columns])


def test_only_the_columns_requested_are_read(path, monkeypatch):
    request = []
    real = pq.ParquetFile.iter_batches

    def spy(self, *args, **kwargs):
        request.append(kwargs["columns"])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    stacked(ParquetTable(path), ["z", "x"])
    stacked(ParquetTable(path), [])
    assert request == [["z", "x"]]


@pytest.mark.parametrize("streamed", [True, False])
def test_rows_can_be_counted_without_a_column(path, frame, streamed):
    table = ParquetTable(path, 300) if streamed else FrameTable(frame)
    assert [chunk.shape for chunk in table.chunks([])] == (
        [(300, 0)] * 3 + [(100, 0)] if streamed else [(N, 0)]
    )


def test_a_file_that_changed_its_length_is_refused(path, frame):
    table = ParquetTable(path)
    frame.head(10).to_parquet(path)
    with pytest.raises(DesignError, match=r"has 10 rows, and had 1,000"):
        next(table.chunks(["x"]))


READ = """
import sys
import pyarrow as pa
from fedstat.federation.tables.table import ParquetTable
table = ParquetTable(sys.argv[1], 10_000)
for chunk in table.chunks(table.columns):
    pass
print(pa.default_memory_pool().max_memory() // 2**20)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Of 40 MB of numbers in one row group, pyarrow holds 0.8 MB for a chunk, and its buffers."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.standard_normal((500_000, 10)), columns=[f"x{j}" for j in range(10)])
    frame.to_parquet(tmp_path / "long.parquet", row_group_size=len(frame), compression=None)
    run = [sys.executable, "-c", READ, str(tmp_path / "long.parquet")]
    assert int(subprocess.run(run, capture_output=True, check=True, text=True).stdout) < 25


def test_without_pyarrow_it_says_what_to_install(path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"read by pyarrow: pip install fedstat\[parquet\]"):
        ParquetTable(path)


def test_a_table_in_memory_is_handed_on_as_it_is(frame):
    table = FrameTable(frame)
    assert table.frame is frame and next(table.chunks(list(frame.columns))) is frame
    (part,) = table.chunks(["z", "word"])
    pd.testing.assert_frame_equal(part, frame[["z", "word"]])
    assert np.shares_memory(part["z"].to_numpy(), frame["z"].to_numpy())
    with pytest.raises(DesignError, match="no column 'q'"):
        next(table.chunks(["x", "q"]))


def test_a_table_in_memory_counts_its_rows_from_zero(frame):
    shuffled = frame.sample(frac=1, random_state=0)
    kept = shuffled.index.copy()
    table = FrameTable(shuffled)
    pd.testing.assert_frame_equal(table.frame, shuffled.reset_index(drop=True))
    pd.testing.assert_index_equal(shuffled.index, kept)


ALL = ["x", "y", "z", "word", "grade", "well"]


@pytest.mark.parametrize("columns", [["x", "site", "z"], ["site"], ["x"], ["word", "site"], [*ALL, "site"]])
def test_the_site_column_stands_where_it_is_requested(path, frame, columns):
    expected = frame.assign(site=pd.Categorical(["Bank"] * N))[columns]
    for table in (FrameTable(frame), ParquetTable(path, 300)):
        labeled = LabeledTable(table, "site", "Bank")
        assert labeled.columns == (*frame.columns, "site") and labeled.n_rows == N
        pd.testing.assert_frame_equal(stacked(labeled, columns), expected, check_dtype=False)
    assert "site" not in frame.columns


def test_a_table_with_a_site_column_of_its_own_is_refused(frame):
    with pytest.raises(DesignError, match=r"Bank: .*'word' of its own.*another name"):
        LabeledTable(FrameTable(frame), "word", "Bank")


def count_of(data, state):
    state.count_entities(data.table.n_rows)
    sites = pd.concat(list(data.table.chunks(["site"])))["site"]
    return {"n": np.array(float((sites == data.name).sum()))}


def complete(data, state):
    state.count_entities(len(data.frame))
    return {"n": np.array(float(len(data.frame)))}


@pytest.fixture
def toy(monkeypatch):
    gives = {"n": ArrayDeclaration("aggregate", "rows", 0, behind=(EntityCount,))}
    monkeypatch.setitem(
        FAMILIES, "toy", {"count": Step(count_of, {}, gives), "whole": Step(complete, {}, gives)}
    )


def answer(site, step):
    return float(unpack_reply(site.answer(pack_request(Request("Bank", "toy", step, {})))).arrays["n"])


@pytest.mark.usefixtures("toy")
def test_a_site_knows_its_own_name_and_streams(path, frame):
    for table in (frame, FrameTable(frame), ParquetTable(path)):
        site = Site("Bank", table, site_column="site")
        assert answer(site, "count") == N
        assert repr(site) == "Site('Bank', 1000 records, 6 columns)"


@pytest.mark.usefixtures("toy")
def test_a_family_that_needs_the_whole_table_says_so(path, frame):
    assert answer(Site("Bank", frame, site_column="site"), "whole") == N
    for site_column in ("", "site"):
        with pytest.raises(DesignError, match=r"Bank: this family needs the table in memory.*pandas"):
            answer(Site("Bank", ParquetTable(path), site_column=site_column), "whole")


def test_a_step_reads_the_rules_of_its_site(frame):
    data = SiteData("Bank", FrameTable(frame), 0, Policy(min_count=12))
    assert data.min_count == data.policy.min_count == 12


def test_a_small_table_in_memory_computes_a_result_once():
    frame, calls = pd.DataFrame({"x": np.arange(3.0)}), []
    held = FrameTable(frame)
    labeled = LabeledTable(held, "site", "A")
    for key in ("one", "one", "two", "one"):
        assert keep_result(labeled, key, lambda key=key: calls.append(key) or key) == key
    assert calls == ["one", "two"]
    for number in range(MOST_KEPT):
        keep_result(held, number, lambda: calls.append("more"))
    assert keep_result(held, "one", lambda: "again") == "again"  # the oldest results are dropped
    held.frame = frame[::-1].reset_index(drop=True)
    assert keep_result(held, "one", lambda: "another order") == "another order"


def test_a_large_table_computes_every_time():
    held = FrameTable(pd.DataFrame({"x": np.zeros(MOST_NUMBERS_KEPT + 1)}))
    assert [keep_result(held, "one", lambda number=number: number) for number in range(2)] == [0, 1]
