"""Ways in which tables hold curves give the same fit; what is wrong is named with site, curve and remedy."""

from __future__ import annotations

import importlib.util

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from curve_cases import LOOSE, declared, simulated

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, PartitionError
from fedstat.federation.tables.curve_columns import CURVES_PER_CHUNK
from fedstat.federation.tables.curves import curves_of
from fedstat.federation.tables.sources import Source, open_source

TEXT = "y(t) ~ bsignal(x1, knots=5) + bols(age)"
FRAME = simulated(240).assign(site=lambda one: one["site"].map("site {}".format))
WIDE = FRAME.drop(columns=[c for c in FRAME if c.startswith("x2_")])


def in_cells(frame):
    """Curves as arrays with points of their own, all the same, in a second column."""
    out = {"age": frame["age"], "site": frame["site"], "g": frame["g"], "id": np.arange(len(frame))}
    for name, m in (("x1", 30), ("y", 12)):
        values = frame[[f"{name}_{j}" for j in range(m)]].to_numpy()
        out[name] = list(values)
        out[f"{name}_t"] = [np.linspace(0, 1, m)] * len(frame)
    return pd.DataFrame(out)


CELLS = in_cells(WIDE)
AT = {name: fs.Curve(name, at=f"{name}_t", domain=(0, 1)) for name in ("x1", "y")}


def by_site(frame):
    return {site: part.drop(columns="site").reset_index(drop=True) for site, part in frame.groupby("site")}


def fitted(partition, text=TEXT, **settings):
    return fs.FedFunctionBoost.from_formula(text, partition).fit(steps=40, **settings)


@pytest.fixture(scope="module")
def expected():
    curves = declared("x1", "y")
    return fitted(fs.ClientPartition.from_frames(by_site(WIDE), layout="horizontal", curves=curves))


def parquet_files(folder, frames):
    paths = {}
    for site, frame in frames.items():
        paths[site] = folder / f"{site}.parquet"
        pq.write_table(pa.Table.from_pandas(frame), paths[site], row_group_size=37)
    return paths


def long_tables(frame):
    """The same curves with one row for each value, in no order; of every site one table for each curve."""
    out = {}
    for name in ("x1", "y"):
        rows = [
            pd.DataFrame({"id": i, "t": t, "v": v})
            for i, v, t in zip(frame["id"], frame[name], frame[f"{name}_t"], strict=True)
        ]
        out[name] = pd.concat(rows).sample(frac=1.0, random_state=1)
    return out


def test_arrays_in_cells_parquet_lists_and_long_tables_are_the_same_curves(expected, tmp_path):
    cells, horizontal = by_site(CELLS), {"layout": "horizontal"}
    paths = parquet_files(tmp_path, cells)
    long = {
        name: fs.LongCurve(table, entity="id", at="t", value="v", domain=(0, 1))
        for name, table in long_tables(CELLS).items()
    }
    bare = {site: frame.drop(columns=["x1", "y", "x1_t", "y_t"]) for site, frame in cells.items()}
    (tmp_path / "wide").mkdir()
    wide_files = parquet_files(tmp_path / "wide", by_site(WIDE))
    partitions = {
        "cells": fs.ClientPartition.from_frames(cells, **horizontal, curves=AT),
        "polars": fs.ClientPartition.from_frames(
            {site: pa.Table.from_pandas(frame) for site, frame in cells.items()}, **horizontal, curves=AT
        ),
        "lists of a file": fs.ClientPartition.from_files(paths, **horizontal, curves=AT),
        "columns of a file": fs.ClientPartition.from_files(
            wide_files, **horizontal, curves=declared("x1", "y")
        ),
        "long": fs.ClientPartition.from_frames(bare, **horizontal, curves=long),
        "long with a key": fs.ClientPartition.from_frames(bare, "id", **horizontal, curves=long),
        "by site": fs.ClientPartition.from_frames(
            {**cells, "site 1": by_site(WIDE)["site 1"]},
            **horizontal,
            curves={
                name: {"site 0": AT[name], "site 1": declared(name)[name], "site 2": AT[name]}
                for name in ("x1", "y")
            },
        ),
    }
    for how, partition in partitions.items():
        assert {"x1", "y"} <= set(partition.curves["site 1"]), how
        found = fitted(partition)
        np.testing.assert_allclose(found.coef, expected.coef, atol=1e-9, err_msg=how)
        assert found.nobs == 240
    assert "x1_t" not in partitions["lists of a file"].pooled_columns


def test_a_query_gives_arrays(expected, tmp_path, monkeypatch):
    tables = {}
    for k, (site, held) in enumerate(by_site(CELLS).items()):
        with duckdb.connect(str(tmp_path / f"{k}.duckdb")) as connection:
            connection.register("held", held)
            connection.execute("CREATE TABLE visits AS SELECT * FROM held")
        monkeypatch.setenv(f"AT_{k}", f"duckdb:///{tmp_path / f'{k}.duckdb'}")
        curves = {name: {"columns": name, "at": f"{name}_t", "domain": [0, 1]} for name in ("x1", "y")}
        given = {
            "kind": "sql",
            "query": "SELECT * FROM visits",
            "env": f"AT_{k}",
            "key": "id",
            "curves": curves,
        }
        tables[site] = open_source(Source.from_mapping(site, given))
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal")
    np.testing.assert_allclose(fitted(partition).coef, expected.coef, atol=1e-9)


def test_an_owner_names_the_file_of_a_long_table(expected, tmp_path):
    tables = {}
    for site, frame in by_site(CELLS).items():
        frame[["id", "age", "g"]].to_csv(tmp_path / f"{site}.csv", index=False)
        curves = {}
        for name, table in long_tables(frame).items():
            table.to_csv(tmp_path / f"{site} {name}.csv", index=False)
            curves[name] = {
                "table": str(tmp_path / f"{site} {name}.csv"), "entity": "id", "at": "t", "value": "v",
                "domain": [0, 1],
            }  # fmt: skip
        given = {"kind": "csv", "path": str(tmp_path / f"{site}.csv"), "key": "id", "curves": curves}
        tables[site] = open_source(Source.from_mapping(site, given))
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal")
    assert partition.pooled_columns == ("age", "g")
    np.testing.assert_allclose(fitted(partition).coef, expected.coef, atol=1e-9)


def own_times(n=300, seed=2, least=20):
    """Curves at random times, as many as every person has; y follows x."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        a, b = random.normal(size=2)
        s, t = (np.sort(random.uniform(0, 24, random.integers(least, 45))) for _ in "st")
        x = a * np.sin(s / 4) + b * np.cos(s / 6)
        y = a * np.cos(t / 5) + 0.3 * random.normal(size=len(t))
        rows.append({"x": x, "x_t": s, "y": y, "y_t": t, "site": "ABC"[i % 3], "a": a})
    return pd.DataFrame(rows)


def test_curves_on_points_of_their_own_stream_and_are_integrated_on_them(tmp_path):
    frame = own_times()
    curves = {
        "x": fs.Curve("x", at="x_t", domain=(0, 24), unit="h", max_gap=0.3),
        "y": fs.Curve("y", at="y_t", domain=(0, 24), unit="h"),
    }
    held = fs.ClientPartition.from_frames(by_site(frame), layout="horizontal", curves=curves, policy=LOOSE)
    paths = parquet_files(tmp_path, by_site(frame))
    streamed = fs.ClientPartition.from_files(paths, layout="horizontal", curves=curves, policy=LOOSE)
    text = "y(t) ~ bsignal(x, knots=3)"
    fits = [fs.FedFunctionBoost.from_formula(text, one).fit(steps=150) for one in (held, streamed)]
    np.testing.assert_allclose(fits[0].coef, fits[1].coef, atol=1e-9)
    assert fits[0].score(frame)["rsquared"] > 0.8
    assert fits[0].surface("x").shape == (40 * len(fits[0].offset), 3)
    explained = fs.FedFunctionBoost.from_formula(text, streamed).explain()
    assert "51 weighted sums" in str(explained) and explained.table["passes"].all()


def changed(row=5, **cells):
    """Arrays in cells, with others in one row."""
    held = {name: [*CELLS[name][:row], cell, *CELLS[name][row + 1 :]] for name, cell in cells.items()}
    return CELLS.assign(**held)


def test_points_of_their_own_that_all_share_are_common_ones():
    assert curves_of(fs.curves.read(CELLS, AT)["x1"]).grid.shape == (30,)
    lost = changed(3, x1=np.where(np.arange(30) == 4, np.nan, CELLS["x1"][3]))
    found = curves_of(fs.curves.read(lost, AT)["x1"])
    assert not found.own and np.isnan(found.values[3, 4]) and found.uneven.sum() == 1
    shorter = changed(3, x1=np.delete(CELLS["x1"][3], 4), x1_t=np.delete(CELLS["x1_t"][3], 4))
    own = curves_of(fs.curves.read(shorter, AT)["x1"])
    assert own.own and np.isnan(own.values[3]).sum() == 1
    fits = [
        fitted(fs.ClientPartition.from_frame(table, by="site", curves=AT), "age ~ x1")
        for table in (lost, shorter)
    ]
    np.testing.assert_allclose(fits[0].coef, fits[1].coef, rtol=1e-9)


def test_only_a_chunk_of_curves_is_in_memory(tmp_path):
    n = CURVES_PER_CHUNK + 10
    frame = pd.DataFrame({"x": list(np.random.default_rng(1).normal(size=(n, 3))), "z": np.arange(n)})
    (table,) = fs.ClientPartition.from_files(
        parquet_files(tmp_path, {"A": frame}), layout="horizontal", curves={"x": fs.Curve("x", domain=(0, 1))}
    )._tables.values()
    chunks = list(table.table.chunks(["x", "z"])) if hasattr(table, "table") else []
    assert max(map(len, chunks)) <= CURVES_PER_CHUNK and sum(map(len, chunks)) == n


T30 = np.linspace(0, 1, 30)


@pytest.mark.parametrize(
    ("frame", "curves", "words"),
    [
        (
            changed(x1_t=np.r_[T30[:-1], 1.5]),
            AT,
            r"curve 'x1': 1 of 240 curves have points outside the domain",
        ),
        (changed(x1_t=T30[::-1]), AT, r"points that do not ascend; sort every array"),
        (changed(x1_t=np.r_[T30[0], T30[:-1]]), AT, r"a point twice; keep one value"),
        (changed(x1_t=np.r_[T30[:-1], np.nan]), AT, r"points that are missing; drop"),
        (changed(x1_t=T30[1:]), AT, r"1 arrays have not as many values as points in 'x1_t'"),
        (changed(x1=np.r_[T30[1:], np.inf]), AT, r"1 values are infinite. Make them missing or finite"),
        (CELLS.drop(columns="x1_t"), AT, r"no column 'x1_t' with its points"),
        (
            changed(x1=T30[1:]),
            {"x1": fs.Curve("x1", domain=(0, 1))},
            r"one length .* found 2.*Curve\(..., at=",
        ),
        (CELLS, {"x1": fs.Curve("g")}, r"expected arrays of numbers in the cells of column 'g'"),
        (WIDE[[*WIDE.columns[::-1]]], declared("x1"), r"do not ascend. Order the columns, or give grid"),
        (CELLS, {"x1": fs.LongCurve(WIDE, "id", "t", "v", (0, 1))}, r"its long table has no column 'id'"),
        (
            CELLS.drop(columns=["x1"]),
            {"x1": fs.LongCurve(pd.DataFrame({"id": [-5], "t": 0.5, "v": 1.0}), "id", "t", "v", (0, 1))},
            r"no entity of its long table is in column 'id'",
        ),
        (
            CELLS.assign(id=1),
            {"x1": fs.LongCurve(pd.DataFrame({"id": [1], "t": 0.5, "v": 1.0}), "id", "t", "v", (0, 1))},
            r"names an entity twice",
        ),
    ],
)
def test_what_is_wrong_with_a_curve_is_named_with_a_remedy(frame, curves, words):
    with pytest.raises(PartitionError, match=words):
        fs.ClientPartition.from_frame(frame, by="site", curves=curves)


def test_what_is_wrong_in_a_file_is_named_when_it_is_opened(tmp_path):
    for bad, curves, words in (
        (changed(x1_t=T30[::-1]), AT, "site 'site 2', curve 'x1': 1 of .* do not ascend"),
        (
            changed(x1=T30[1:]),
            {"x1": fs.Curve("x1", domain=(0, 1))},
            "site 'site 2', curve 'x1'.*one length",
        ),
        (CELLS.assign(x1=None), AT, "site 'site 0', curve 'x1': there is no curve in any row"),
    ):
        paths = parquet_files(tmp_path, by_site(bad))
        with pytest.raises(PartitionError, match=words):
            fs.ClientPartition.from_files(paths, layout="horizontal", curves=curves)


def test_a_declaration_that_contradicts_itself_is_refused():
    for options, words in (
        ({"at": "t"}, "domain"),
        ({"at": "t", "domain": (0, 1), "grid": (0, 1)}, "no grid"),
        ({"max_gap": 2.0}, "share of the domain"),
        ({"domain": (1, 0)}, "first < last"),
    ):
        with pytest.raises(PartitionError, match=words):
            fs.Curve("x", **options)


def test_curves_that_are_all_the_same_or_have_fewer_points_than_a_basis_are_refused():
    flat = WIDE.assign(**{f"x1_{j}": float(j) for j in range(30)})
    held = fs.ClientPartition.from_frames(by_site(flat), layout="horizontal", curves=declared("x1", "y"))
    with pytest.raises(EstimationError, match=r"bsignal\(x1\): its columns do not vary"):
        fs.FedFunctionBoost.from_formula("y(t) ~ bsignal(x1, knots=3)", held).fit(steps=2)
    partition = fs.ClientPartition.from_frames(
        by_site(WIDE.drop(columns=[f"x1_{j}" for j in range(6, 30)])),
        layout="horizontal",
        curves=declared("x1", "y"),
    )
    with pytest.raises(
        DesignError,
        match=r"site 0: curve 'x1' has 6 points, fewer than the 9 splines of bsignal\(x1\).*knots=2",
    ):
        fs.FedFunctionBoost.from_formula(TEXT, partition)


def test_a_site_all_of_whose_curves_have_gaps_says_so():
    frame = WIDE.copy()
    frame.loc[frame["site"] == "site 1", [f"x1_{j}" for j in range(5, 20)]] = np.nan
    partition = fs.ClientPartition.from_frames(
        by_site(frame), layout="horizontal", curves=declared("x1", "y")
    )
    with pytest.raises(DesignError, match=r"'site 1' has no row .* max_gap"):
        fs.FedFunctionBoost.from_formula(TEXT, partition)


@pytest.mark.skipif(importlib.util.find_spec("skfda") is None, reason="scikit-fda is not installed")
def test_objects_of_scikit_fda_come_and_go(expected):
    import skfda

    frames = {}
    for site, frame in by_site(WIDE).items():
        own = {}
        for name in ("x1", "y"):
            values = frame.filter(regex=f"^{name}_").to_numpy()
            own[name] = fs.curves.from_skfda(skfda.FDataGrid(values, np.linspace(0, 1, values.shape[1])))
        frames[site] = frame[["age", "g"]].assign(**own)
    result = fitted(fs.ClientPartition.from_frames(frames, layout="horizontal"))
    np.testing.assert_allclose(result.coef, expected.coef, atol=1e-9)
    effects = result.to_skfda()
    assert set(effects) == {"offset", "1", "bsignal(x1)", "bols(age)"}
    surface = result.surface("x1").pivot_table("estimate", "s", "t").to_numpy()
    np.testing.assert_allclose(effects["bsignal(x1)"].data_matrix[0, ..., 0], surface)
    irregular = skfda.FDataIrregular(
        start_indices=[0, 3], points=[0.0, 0.4, 1.0, 0.1, 0.9], values=[1.0, 2.0, 3.0, 4.0, 5.0],
        domain_range=[(0.0, 1.0)],
    )  # fmt: skip
    column = fs.curves.from_skfda(irregular)
    assert column.own and column.domain == (0.0, 1.0)
    np.testing.assert_array_equal(column.at, [[0.0, 0.4, 1.0], [0.1, 0.9, np.nan]])


def test_without_scikit_fda_its_objects_say_what_to_install(expected, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "skfda", None)
    with pytest.raises(ImportError, match="pip install scikit-fda"):
        expected.to_skfda()
    with pytest.raises(PartitionError, match="one number along one argument"):
        fs.curves.from_skfda(np.zeros(3))
