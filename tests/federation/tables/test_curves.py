"""Columns of curves: what a site keeps of them, and how it knows a row again."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import PartitionError
from fedstat.federation.tables.aligned_table import row_fingerprints
from fedstat.federation.tables.curve_columns import with_curves
from fedstat.federation.tables.curves import Curve, curves_of
from fedstat.federation.tables.sources import Source, open_source
from fedstat.federation.tables.table import FrameTable, table_curves

WIDE = pd.DataFrame(np.random.default_rng(1).normal(size=(6, 5))).add_prefix("w_").assign(age=range(6))
DECLARED = {"w": Curve("w_*", domain=(0, 1), unit="h")}


def test_a_row_is_known_again_by_its_curve():
    frame = with_curves("", WIDE, DECLARED)
    changed = WIDE.copy()
    changed.loc[3, "w_2"] += 1e-9
    marks, other = (
        row_fingerprints(FrameTable(one), b"key") for one in (frame, with_curves("", changed, DECLARED))
    )
    assert (marks == other).all(axis=1).tolist() == [True, True, True, False, True, True]
    assert len({mark.tobytes() for mark in marks}) == 6


def test_points_come_from_the_names_of_columns_or_fill_the_domain():
    points = {
        (Curve("w_*"), 4.0): [0, 1, 2, 3, 4],
        (Curve("w_*", domain=(0, 8)), 8.0): [0, 1, 2, 3, 4],
        (Curve("w_*", domain=(0, 1)), 1.0): [0, 0.25, 0.5, 0.75, 1],
        (Curve("w_*", grid=(0, 1, 2, 3, 9)), 9.0): [0, 1, 2, 3, 9],
    }
    for (curve, end), grid in points.items():
        found = curves_of(with_curves("", WIDE, {"w": curve})["w"])
        assert found.grid.tolist() == grid and found.domain == (0.0, end)


def test_long_stretches_without_a_value_are_gaps_and_missing_ends_too():
    frame = pd.DataFrame(np.ones((4, 41))).add_prefix("w_")
    frame.loc[1, [f"w_{j}" for j in range(10, 13)]] = np.nan
    frame.loc[2, [f"w_{j}" for j in range(10, 18)]] = np.nan
    frame.loc[3, [f"w_{j}" for j in range(34, 41)]] = np.nan
    curves = curves_of(with_curves("", frame, DECLARED)["w"])
    assert curves.gappy().tolist() == [False, False, True, True]
    assert curves.isna().tolist() == [False] * 4


def test_an_owner_declares_curves_of_a_file(tmp_path):
    WIDE.to_csv(tmp_path / "w.csv", index=False)
    given = {
        "kind": "csv",
        "path": str(tmp_path / "w.csv"),
        "curves": {"w": {"columns": "w_*", "domain": [0, 1]}},
    }
    table = open_source(Source.from_mapping("ward", given))
    assert table.columns == ("age", "w")
    np.testing.assert_allclose(table_curves(table)["w"].values, WIDE.filter(like="w_"))
    given["curves"]["w"]["columns"] = "v_*"
    with pytest.raises(PartitionError, match="ward, curve 'w': no column"):
        open_source(Source.from_mapping("ward", given))
