"""Published descriptions of columns: proposed, rounded, written, read, and compared with the rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstat.errors import PartitionError
from fedstat.federation.tables.columns import find_levels
from fedstat.federation.tables.published import (
    PublishedColumn,
    description_problems,
    propose,
    read_published,
    round_outwards,
    scan_table,
    withheld_columns,
    write_published,
)
from fedstat.federation.tables.table import FrameTable, ParquetTable


def table(n=60):
    rng = np.random.default_rng(0)
    return FrameTable(
        pd.DataFrame(
            {
                "age": rng.integers(20, 90, n),
                "income": rng.lognormal(10, 1, n),
                "sex": rng.choice(["f", "m"], n),
                "rare": ["usual"] * (n - 1) + ["only one"],
                "seen": rng.random(n) < 0.5,
                "empty": np.nan,
                "ill": rng.integers(0, 2, n).astype(float),
                'odd "name"': rng.normal(size=n),
            }
        )
    )


def test_a_proposal_is_read_as_it_was_written_and_fits_its_table():
    held = table()
    proposed = propose(held, 3)
    assert read_published(write_published(proposed), "columns.toml") == proposed
    assert "empty" not in proposed and proposed["ill"] == PublishedColumn("number", (0.0, 1.0), (0.0, 1.0))
    assert proposed["sex"].levels == ("f", "m") and proposed["seen"].levels == (False, True)
    problems = list(description_problems("Kiel", proposed, held))
    assert len(problems) == 1 and "'rare' has 1 level(s)" in problems[0] and "only one" not in problems[0]


def test_what_describe_writes_is_accepted_by_check():
    """A column with a rare level is left out, with what the owner can do, and blocks nothing."""
    held = table()
    withheld = withheld_columns(held, 3)
    assert "1 of its 2 levels has fewer than 3 records. Merge rare levels" in withheld["rare"]
    assert "sex" not in withheld and "only one" not in str(withheld)
    written = {name: one for name, one in propose(held, 3).items() if name not in withheld}
    assert not list(description_problems("Kiel", written, held))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=30, unique=True))
def test_no_bound_that_is_proposed_is_a_value(values):
    low, high = round_outwards(min(values), max(values))
    assert low <= min(values) and max(values) <= high
    assert low == 0.0 or low not in values
    assert high == 0.0 or high not in values
    assert low * min(values) >= 0.0 and high * max(values) >= 0.0


@pytest.mark.parametrize("few_first", [False, True])
@pytest.mark.parametrize("length", [200, 3000])
def test_a_proposal_does_not_depend_on_chunks(tmp_path, few_first, length):
    """A column has whole numbers in one part of a file, and many numbers in another."""
    few, many = np.tile([0.0, 1.0], length // 2), np.random.default_rng(0).uniform(2, 9, length)
    frame = pd.DataFrame({"x": np.concatenate([few, many] if few_first else [many, few])})
    frame["code"], frame["number"] = frame.index % 7 * 1.0, np.arange(2.0 * length)
    frame.to_parquet(tmp_path / "rows.parquet")
    whole = FrameTable(frame)
    parts = ParquetTable(tmp_path / "rows.parquet", rows_per_chunk=length)
    assert propose(parts, 5) == propose(whole, 5)
    assert propose(parts, 5)["x"].levels == () != propose(parts, 5)["code"].levels
    assert list(withheld_columns(parts, 5)) == list(withheld_columns(whole, 5)) == ["number"]


@pytest.mark.parametrize(
    "column",
    [
        pd.Series([3, 1, 2, 1] * 5),
        pd.Series([2.0, 1.0, np.nan, 1.0] * 5),
        pd.array([2, 1, None, 1] * 5, dtype="Int64"),
        pd.Categorical(["b", "a", "b", "c"] * 5, categories=["c", "b", "a", "unused"]),
        pd.Series(["b", "a", None, "a"] * 5),
        pd.Series([True, False, True, True] * 5),
    ],
)
def test_levels_are_counted_as_by_pandas_and_sorted_as_levels_are(column):
    column = pd.Series(column, name="x")
    seen = scan_table(FrameTable(column.to_frame()))["x"]
    assert tuple(seen.levels) == find_levels(column.dropna())
    counts = column.value_counts()
    assert all(counts[level] == count for level, count in seen.levels.items())
    assert [*map(type, seen.levels)] == [*map(type, find_levels(column.dropna()))]


def test_departures_are_reported_to_the_owner():
    held = table()
    published = dict(propose(held, 3)) | {
        "age": PublishedColumn("number", (30.0, 40.0)),
        "income": PublishedColumn("category", levels=("low", "high")),
        "gone": PublishedColumn("number"),
    }
    text = "; ".join(description_problems("Kiel", published, held))
    assert "'age' has values outside its published range" in text
    assert "'income' is published as a category and holds a number" in text
    assert "'gone' is published, and not in the table" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[age", "is not TOML"),
        ('[age]\nkind = "number"\nrange = [5.0, 1.0]', "have to ascend"),
        ('[age]\nkind = "number"\nrange = [0.0, 9.0]\nknots = [10.0]', "have to ascend"),
        ('[sex]\nkind = "category"', "levels"),
        ('[sex]\nkind = "category"\nlevels = ["f", "f"]', "occurs twice"),
        ('[sex]\nkind = "text"', "kind"),
        ('[patient]\nkind = "group"\nlevels = ["a", "b"]', "nothing but its kind"),
        ('[patient]\nkind = "group"\nrange = [1, 9]', "nothing but its kind"),
        ("[" * 5000, "is not TOML"),
    ],
)
def test_a_description_without_meaning_is_refused(text, words):
    with pytest.raises(PartitionError, match=words):
        read_published(text, "columns.toml")
