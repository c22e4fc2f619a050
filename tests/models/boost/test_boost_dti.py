"""Tracts of the brain (refund's DTI, where it is at hand): three sites against rows of one table."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from curve_cases import LOOSE, by_site
from row_boosting import along, boost, both, centered, integrals, smooth

import fedstat as fs
from fedstat.kernels.curves import spline_basis

DATA = Path(os.environ.get("FEDSTAT_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))
TABLE = DATA / "dti" / "DTI.csv.gz"
pytestmark = pytest.mark.skipif(not TABLE.is_file(), reason="the data of refund are not at hand")
S, T = np.linspace(0, 1, 55), np.linspace(0, 1, 93)


def scans():
    """Visits at which both tracts were measured whole."""
    table = pd.read_csv(TABLE)
    table = table[table.filter(regex="^(cca|rcst)_").notna().all(axis=1)].reset_index(drop=True)
    columns = [name for name in table if name.startswith(("cca_", "rcst_"))]
    return table[[*columns, "case", "pasat"]].copy().assign(site=np.arange(len(table)) % 3)


def check(result, chosen, left):
    labels = list(result.learners.index)
    assert [labels.index(name) for name in result.path["learner"]] == chosen
    assert (1 - result.rsquared) * result._boosting.total_squares == pytest.approx(left, rel=1e-8)


def test_one_tract_on_the_other_and_the_group():
    frame = scans()
    assert len(frame) == 255
    Y, x = (frame.filter(regex=f"^{name}_").to_numpy() for name in ("cca", "rcst"))
    b, K2 = spline_basis(T, 0, 1, 4), smooth(8, 2)
    case = np.column_stack([np.ones(255), frame["case"]])
    learners = [
        (along(np.ones((255, 1)), b), K2, 4.0),
        (along(integrals(x, S, 4), b), both(smooth(8, 1), K2), 16.0),
        (along(centered(case), b), both(np.eye(1), K2), 4.0),
    ]
    chosen, left, _ = boost(learners, Y, 100)
    model = fs.FedFunctionBoost.from_formula(
        "cca(t) ~ bsignal(rcst, knots=4, df=4) + bols(case, df=1)",
        by_site(frame.drop(columns="pasat"), "cca", "rcst", policy=LOOSE),
        time="bbs(t, knots=4, df=4)",
        penalty="fdboost",
    )
    assert set(chosen) == {1, 2}
    check(model.fit(steps=100), chosen, left)


def test_a_score_on_both_tracts():
    frame = scans().dropna(subset="pasat")
    assert len(frame) == 229
    learners = [(np.ones((229, 1)), np.zeros((1, 1)), 1.0)]
    for name, s in (("cca", T), ("rcst", S)):
        learners.append((integrals(frame.filter(regex=f"^{name}_").to_numpy(), s, 10), smooth(14, 1), 4.0))
    chosen, left, fit = boost(learners, frame[["pasat"]].to_numpy(), 300)
    model = fs.FedFunctionBoost.from_formula(
        "pasat ~ bsignal(cca) + bsignal(rcst)",
        by_site(frame.drop(columns="case"), "cca", "rcst", policy=LOOSE),
        penalty="fdboost",
    )
    result = model.fit(steps=300)
    check(result, chosen, left)
    np.testing.assert_allclose(result.predict(frame), fit[:, 0], atol=1e-6)
