"""Tables that a partition refuses; each message names site, column and count."""

import re

import numpy as np
import pandas as pd
import polars as pl
import pytest

from fedstat.errors import PartitionError
from fedstat.federation.partition.partition import ClientPartition

NAN, INF = float("nan"), float("inf")
SECRET = 918273.5


def table(column="x", **changes):
    return pd.DataFrame({"id": [1, 2, 3, 4], column: [0.5, 1.5, 2.5, SECRET]} | changes)


BASE = {"A": table("x"), "B": table("z")}


def refusal(frames, on="id", **options):
    with pytest.raises(PartitionError) as caught:
        ClientPartition.from_frames(frames, on=on, **options)
    message = str(caught.value)
    assert "918273" not in message
    return message


LINKED = {
    "duplicate keys": (BASE | {"B": table("z", id=[1, 2, 2, 2])}, "'B'.*2 of 4 rows repeat"),
    "missing keys": (BASE | {"B": table("z", id=[1, 2, NAN, NAN])}, "'B'.*'id'.*2 rows have no key"),
    "no key column": (BASE | {"B": table("z").rename(columns={"id": "ID"})}, "'B' has no key.*'ID', 'z'"),
    "key of text": (BASE | {"B": table("z", id=list("1234")), "C": table("w")}, "'B'.*text.*'A'.*whole"),
    "key of decimals": (BASE | {"B": table("z", id=[1.0, 2, 3, 4]), "C": table("w")}, "'B'.*decimal"),
    "mixed key": (BASE | {"B": table("z", id=pd.Series([1, "2", 3, 4], dtype=object))}, "'B'.*several types"),
    "shared column": ({"A": table("x"), "B": table("x")}, "'x' is at 2 sites \\('A', 'B'\\)"),
    "no rows": (BASE | {"B": table("z").iloc[:0]}, "'B' has no rows"),
    "no columns": (BASE | {"B": table("z")[["id"]]}, "'B' has no column besides the key"),
    "no values": (BASE | {"B": table("z", z=[NAN] * 4)}, "'B' has no value in any of its 1 columns"),
    "infinite": (BASE | {"B": table("z", z=[INF, 1, -INF, 2])}, "'B', column 'z': 2 infinite"),
    "infinite float32": (
        BASE | {"B": table("z", z=np.array([INF, 1, 2, 3], dtype="float32"))},
        "'z': 1 infinite",
    ),
    "no clients": ({}, "no sites"),
    "client's name": ({1: table("x")}, "of type int"),
    "empty client's name": ({" ": table("x")}, "name is empty"),
    "column's name": (BASE | {"B": table("z").rename(columns={"z": 0})}, "'B': 1 column names are not text"),
    "repeated name": (
        BASE | {"B": pd.concat([table("z"), table("z")[["z"]]], axis=1)},
        "'B': 2 columns are called 'z'",
    ),
    "not a table": (BASE | {"B": [1, 2]}, "site 'B'.*received list"),
    "lazy table": (BASE | {"B": pl.from_pandas(table("z")).lazy()}, "'B'.*LazyFrame.*collected"),
}


@pytest.mark.parametrize("case", LINKED)
def test_refusals_name_site_column_and_count(case):
    frames, expected = LINKED[case]
    assert re.search(expected, refusal(frames), flags=re.DOTALL)


def test_the_base_tables_are_accepted():
    assert ClientPartition.from_frames(BASE, on="id").n_entities == 4


def test_all_problems_are_reported_at_once():
    frames = {
        "A": table("x", id=[1, 1, 3, 4]),
        "B": table("z", z=[INF, 1, 2, 3]),
        "C": table("x", w=[1, INF, -INF, 1]),
    }
    message = refusal(frames)
    assert message.startswith("the tables have 4 problems")
    for part in ("repeat a key", "'z': 1 infinite", "'x' is at 2 sites", "'w': 2 infinite"):
        assert part in message


def test_long_lists_of_problems_are_cut():
    wide = table("x").assign(**{f"c{j}": INF for j in range(30)})
    assert "and 20 more" in refusal({"A": wide})


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"partial": "skip"}, "partial"), ({"min_count": 0}, "min_count"), ({"min_count": 2.5}, "min_count")],
)
def test_settings_are_checked(options, expected):
    assert expected in refusal(BASE, **options)


@pytest.mark.parametrize("on", [[], ["id", "id"], [1]])
def test_the_key_must_be_names(on):
    assert "`on`" in refusal(BASE, on=on)


def test_unusual_columns_that_nobody_uses_are_accepted():
    odd = table("z", when=pd.date_range("2020", periods=4), items=[[1], [1], [1, 2], []])
    assert ClientPartition.from_frames({"B": odd}, on="id").columns["B"] == ("z", "when", "items")


def test_infinite_values_are_refused_in_new_data_too():
    assert "infinite" in refusal({"B": table("z", z=[INF, 1, 2, 3])}, new_data=True)


FRAME = pd.DataFrame({"id": [1, 2, 3], "x": [1.0, 2, 4], "z": [3.0, 1, NAN], "h": ["a", "b", "b"]})
SPLIT = {
    "neither": ({}, "not both"),
    "both": ({"by": "h", "columns": {"A": ["x"]}}, "not both"),
    "unknown column": ({"columns": {"A": ["x", "q"]}}, "'A': the table has no column 'q'"),
    "text for a list": ({"columns": {"A": "x"}}, "'A'.*\\['x'\\]"),
    "key listed": ({"columns": {"A": ["x", "id"]}, "on": "id"}, "'A': column 'id' is the key"),
    "listed twice": ({"columns": {"A": ["x", "x"]}}, "'x' is listed twice"),
    "at two clients": ({"columns": {"A": ["x"], "B": ["x", "z"]}}, "'x' is at 2 sites"),
    "unknown key": ({"columns": {"A": ["x"]}, "on": "nr"}, "no key column 'nr'"),
    "no columns": ({"columns": {"A": ["x"], "B": []}}, "'B' has no column"),
    "no clients": ({"columns": {}}, "no sites"),
    "unknown by": ({"by": "site"}, "no column 'site'"),
    "by in key": ({"by": "h", "on": ["id", "h"]}, "'h' cannot name"),
}


@pytest.mark.parametrize("case", SPLIT)
def test_refusals_of_one_table(case):
    options, expected = SPLIT[case]
    with pytest.raises(PartitionError, match=expected):
        ClientPartition.from_frame(FRAME, **options)


def test_one_table_with_repeated_keys_is_reported_once():
    with pytest.raises(PartitionError) as caught:
        ClientPartition.from_frame(FRAME.assign(id=[1, 1, 2]), columns={"A": ["x"], "B": ["z"]}, on="id")
    assert str(caught.value).startswith("the table: 1 of 3 rows repeat")


def test_horizontal_refusals():
    with pytest.raises(PartitionError, match="1 rows name no site"):
        ClientPartition.from_frame(FRAME.assign(h=["a", None, "b"]), by="h")
    with pytest.raises(PartitionError, match="several types"):
        ClientPartition.from_frame(FRAME.assign(h=pd.Series([1, "1", 2], dtype=object)), by="h")


def test_files_are_refused_without_quoting_their_content(tmp_path):
    broken = tmp_path / "a.csv"
    broken.write_text("id,x\n1,918273.5\n2,1,1\n")
    typed = tmp_path / "b.csv"
    typed.write_text("id,x\nsecret918273,1\n")
    cases = [
        (broken, {}, "'A'.*could not be read"),
        (typed, {"dtype": {"id": "int64"}}, "'A'.*could not be read"),
        (tmp_path / "none.csv", {}, "no file"),
        (tmp_path / "a.xlsx", {}, "ending in .csv"),
    ]
    for path, options, expected in cases:
        with pytest.raises(PartitionError, match=expected) as caught:
            ClientPartition.from_files({"A": path}, on="id", **options)
        assert "918273" not in str(caught.value) and caught.value.__context__ is None
