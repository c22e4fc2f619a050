"""Characters that end lines or hide text in names and levels: no table with them is opened."""

from __future__ import annotations

import sqlite3

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PartitionError
from fedstat.federation.disclosure.site import Site
from fedstat.federation.tables.checks import CONTROL_CHARACTERS
from fedstat.federation.tables.published import PublishedColumn
from fedstat.federation.tables.sources import Source, open_source
from fedstat.federation.transport.site_folder import open_site
from fedstat.operator.command_line import main

CHARACTERS = [
    "\n",
    "\r",
    "\t",
    "\0",
    "\x1b",
    "\x7f",
    "\x85",
    "\u2028",
    "\u2029",
    "\u202e",
    "\u2066",
    "\u200f",
]
N = 30


def frame():
    return pd.DataFrame(
        {"k": range(N), "x": np.arange(float(N)), "w": ["a", "b"] * (N // 2), "s": ["A", "B"] * 15}
    )


def rows(table, **more):
    return fs.ClientPartition.from_frame(table, by="s", **more)


def linked(table):
    parts = {"A": table[["k", "x"]], "B": table[[name for name in table if name not in ("x", "s")]]}
    return fs.ClientPartition.from_frames(parts, on="k")


@pytest.mark.parametrize("sign", CHARACTERS, ids=ascii)
@pytest.mark.parametrize("split", [rows, linked])
def test_names_and_levels_are_refused(sign, split):
    for table in (
        frame().rename(columns={"w": f"w{sign}"}),
        frame().replace({"w": {"b": f"b{sign}c"}}),
        frame().replace({"w": {"b": f"b{sign}c"}}).astype({"w": "category"}),
    ):
        with pytest.raises(PartitionError, match=f"control characters.*U[+]{ord(sign):04X}") as caught:
            split(table)
        assert sign not in str(caught.value)


@pytest.mark.parametrize("sign", ["\n", "\u2028"])
def test_names_of_sites_and_keys_are_refused(sign):
    with pytest.raises(PartitionError, match="names of sites"):
        rows(frame().replace({"s": {"B": f"B{sign}"}}))
    with pytest.raises(PartitionError, match="names of sites"):
        fs.ClientPartition.from_frames({f"A{sign}": frame()[["k", "x"]], "B": frame()[["k", "w"]]}, on="k")
    key = f"k{sign}"
    with pytest.raises(PartitionError, match="names of columns"):
        linked_key = frame().rename(columns={"k": key})
        fs.ClientPartition.from_frames({"A": linked_key[[key, "x"]], "B": linked_key[[key, "w"]]}, on=key)
    with pytest.raises(PartitionError, match="levels and units"):
        PublishedColumn("category", levels=("a", f"b{sign}")).check()
    with pytest.raises(PartitionError, match="names of columns"):
        Site("A", frame()[["x"]], site_column=f"site{sign}")


def test_other_scripts_and_signs_are_allowed():
    names = ["São Paulo\xa0", "naïve – 5 °C", "日本", "می‌شود", "a|b;c", "50 %"]
    assert not CONTROL_CHARACTERS.search("".join(names))
    rows(frame().assign(w=np.resize(names, N)))


def files(kind, table, folder):
    """A file with a table, and its description."""
    if kind == "csv":
        table.to_csv(folder / "t.csv", index=False)
        return Source("A", "csv", path=str(folder / "t.csv"))
    if kind == "parquet":
        table.to_parquet(folder / "t.parquet", row_group_size=7)
        return Source("A", "parquet", path=str(folder / "t.parquet"))
    with sqlite3.connect(folder / "t.db") as database:
        table.to_sql("t", database, index=False)
    (folder / "address").write_text(f"sqlite:///{folder / 't.db'}")
    (folder / "address").chmod(0o600)
    return Source("A", "sql", file=str(folder / "address"), query="SELECT * FROM t", key=("k",))


@pytest.mark.parametrize("kind", ["csv", "parquet", "sql"])
def test_files_are_refused(kind, tmp_path):
    for place, table in enumerate(
        (
            frame().drop(columns="s").rename(columns={"x": "x\n"}),
            frame().drop(columns="s").replace({"w": {"b": "b\u2028"}}),
        )
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        with pytest.raises(PartitionError, match="control characters"):
            Site("A", open_source(files(kind, table, folder)))
    fine = tmp_path / "fine"
    fine.mkdir()
    assert Site("A", open_source(files(kind, frame().drop(columns="s"), fine))).name == "A"


def test_curves_are_refused(tmp_path):
    table = frame()[["k", "s"]].assign(c1=1.0, c2=2.0)
    with pytest.raises(PartitionError, match="control characters"):
        rows(table, curves={"c\n": fs.Curve("c*", domain=(0, 1))})


def test_a_served_site_does_not_start_with_them(tmp_path):
    frame()[["x", "w"]].to_csv(tmp_path / "t.csv", index=False)
    assert main(["site", "init", str(tmp_path / "A"), "--name", "A", "--data", str(tmp_path / "t.csv")]) == 0
    open_site(tmp_path / "A").site_ledger.store.close()
    frame()[["x", "w"]].replace({"w": {"b": "b\tc"}}).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(PartitionError, match=r"column 'w'.*U[+]0009"):
        open_site(tmp_path / "A")
