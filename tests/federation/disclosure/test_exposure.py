"""Exposure of columns: the largest share of one row in released sums, against shares by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.federation.disclosure.column_sums import column_exposure, exposure

X = pd.Series([1.0, 2.0, 3.0, 10.0, np.nan])


def test_the_share_in_means_is_that_of_the_squared_deviation():
    """Mean 4, deviations -3, -2, -1, 6 with squares 9, 4, 1, 36 of 50: 1 / 4 + 36 / 50 = 0.97."""
    found = column_exposure("x", X, {"x^1": None})
    assert (found.rows, found.functions, found.omitted) == (4, 1, 0)
    assert found.share == pytest.approx(0.97, abs=1e-12)


def test_as_many_functions_as_rows_give_every_row():
    names = dict.fromkeys(["x^1", "x^2", "log"])
    assert column_exposure("x", X, names).share == pytest.approx(1.0, abs=1e-9)


def test_the_share_is_the_largest_over_combinations():
    """No drawn combination of x, x^2 and a constant gives a row more, and the best one as much."""
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 9, 30)
    share = column_exposure("x", pd.Series(x), dict.fromkeys(["x^1", "x^2"])).share
    B = np.column_stack([np.ones(30), x, x**2])
    drawn = (B @ rng.normal(size=(3, 5000))) ** 2
    assert (drawn / drawn.sum(axis=0)).max() <= share + 1e-12
    best = (B @ np.linalg.solve(B.T @ B, B[np.argmax(np.einsum("ij,ji->i", B, np.linalg.pinv(B)))])) ** 2
    assert best.max() / best.sum() == pytest.approx(share, rel=1e-9)


def test_a_level_has_one_over_its_rows():
    found = column_exposure("g", pd.Series(list("aaaabbbbbccc")), {})
    assert (found.share, found.rows, found.functions) == (pytest.approx(1 / 3), 12, 3)


def test_what_cannot_be_computed_is_said():
    found = column_exposure("x", X, dict.fromkeys(["x^1", "bs(x, df=4)[0]"]))
    assert (found.functions, found.omitted) == (1, 1)
    assert np.isnan(column_exposure("x", pd.Series([np.nan]), {}).share)


def test_the_ledger_of_a_site_names_columns_and_functions():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"site": np.repeat(list("ABC"), 80), "x": rng.uniform(1, 9, 240).round(2)})
    frame = frame.assign(y=rng.normal(size=240).round(2), unused=1.0)
    pub = {"x": {"kind": "number", "range": [1.0, 9.0]}, "y": {"kind": "number", "range": [-9.0, 9.0]}}
    where = fs.ClientPartition.from_frame(
        frame, by="site", policy="strict", published=dict.fromkeys("ABC", pub)
    )
    site = where.sites["A"]
    assert exposure(site.data.table, site.site_ledger) == []
    fs.FederatedOLS.from_formula("y ~ x + log(x)", where).fit()
    found = {one.column: one for one in exposure(site.data.table, site.site_ledger)}
    assert set(found) == {"x", "y"}
    x = frame["x"].to_numpy()[:80]
    B = np.column_stack([x**0, x, x**2, np.log(x), np.log(x) ** 2, x * np.log(x)])
    Q, _ = np.linalg.qr(B)
    assert found["x"].functions == 5
    assert found["x"].share == pytest.approx((Q**2).sum(axis=1).max(), rel=1e-6)
