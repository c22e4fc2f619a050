"""Sums within levels, ``y ~ x | ward``, alone and together with other releases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from released import total_sums
from served import ServedSites

import fedstat as fs
from fedstat.errors import PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")
SITES, ROWS, VICTIM = ("S0", "S1", "S2"), 120, 17
NUMBER = {"kind": "number"}
PUBLISHED = {
    name: NUMBER | {"range": [-100.0, 200.0]} for name in ("x", "other", "z", "y", "within_pair")
} | {name: {"kind": "group"} for name in ("ward", "moved", "with_pair", "with_pairs", "pairs")}
Fit = fs.results.OLSResults


def table() -> pd.DataFrame:
    """Wards of 30 rows; columns and wards that differ in the victim alone, and a ward of two rows."""
    rng = np.random.default_rng(7)
    n = ROWS * len(SITES)
    t = pd.DataFrame({"site": np.repeat(SITES, ROWS), "x": rng.normal(50.0, 9.0, n).round(2)})
    t["z"], t["y"] = rng.normal(size=n).round(3), (0.3 * t["x"] + rng.normal(0.0, 5.0, n)).round(2)
    t["other"] = t["x"].where(t.index != VICTIM, t["x"] + 20.0)
    t["ward"] = t["site"] + (t.index // 30).astype(str)
    t["moved"] = t["ward"].where(t.index != VICTIM, "S01")
    t["with_pair"] = t["ward"].where(~t.index.isin([VICTIM, VICTIM + 1]), "S0 pair")
    t["with_pairs"] = t["with_pair"].where(~t.index.isin([60, 61]), "S0 couple")
    t["pairs"] = t["site"] + (t.index // 2).astype(str)
    t["within_pair"] = np.where(t.index == VICTIM, 9.0, t.index // 2 % 7)
    return t


FRAME = table()
CELLS = FRAME.groupby("ward")


def sites(policy: str) -> fs.ClientPartition:
    published = dict.fromkeys(SITES, PUBLISHED)
    return fs.ClientPartition.from_frame(FRAME, by="site", policy=policy, published=published)


def fit(formula: str, at: fs.ClientPartition) -> Fit:
    return fs.FederatedOLS.from_formula(formula, at).fit(local=False)


def two_columns(at: fs.ClientPartition) -> tuple[float, float]:
    """Two columns that differ in one row: the difference of two sums is its residual from the ward's mean."""
    one, two = (total_sums(fit(f"y ~ {name} | ward", at))[1].iloc[0] for name in ("x", "other"))
    y = FRAME["y"]
    return (two - one) / 20.0, float(y[VICTIM] - y[FRAME["ward"] == FRAME["ward"][VICTIM]].mean())


def one_row_moved(at: fs.ClientPartition) -> tuple[float, float]:
    """One row changes its ward: with the wards' totals, a quadratic equation has its value."""
    W, V = (total_sums(fit(f"y ~ x | {name}", at))[0].iloc[0, 0] for name in ("ward", "moved"))
    a, b = CELLS["x"].sum()["S00"], CELLS["x"].sum()["S01"]
    constant = -(a**2) / 30 - b**2 / 30 + a**2 / 29 + b**2 / 31 - (V - W) * -1.0
    roots = np.roots([1 / 29 + 1 / 31, -2 * a / 29 + 2 * b / 31, constant])
    truth = float(FRAME["x"][VICTIM])
    return float(min(roots.real, key=lambda root: abs(root - truth))), truth


def one_small_ward(at: fs.ClientPartition) -> tuple[float, float]:
    """Sums over all rows less those within wards are those of totals: that of a ward of two rows remains."""
    raw = total_sums(fit("y ~ x", at))[0].loc["x", "x"]
    within = total_sums(fit("y ~ x | with_pair", at))[0].iloc[0, 0]
    cells = FRAME.groupby("with_pair")["x"]
    known = (cells.sum() ** 2 / cells.size()).drop("S0 pair").sum()
    return float((2.0 * (raw - within - known)) ** 0.5), float(FRAME["x"][[VICTIM, VICTIM + 1]].sum())


def two_small_wards(at: fs.ClientPartition) -> tuple[float, float]:
    """The same with two wards of two rows, whose sum follows from all others."""
    all_rows = total_sums(fit("y ~ x", at))[0]
    within = total_sums(fit("y ~ x | with_pairs", at))[0].iloc[0, 0]
    cells = FRAME.groupby("with_pairs")["x"]
    known = cells.sum().drop(["S0 pair", "S0 couple"])
    rest = all_rows.loc["Intercept", "x"] - known.sum()
    squares = all_rows.loc["x", "x"] - within - (known**2 / cells.size()[known.index]).sum()
    # a + b = rest, (a^2 + b^2) / 2 = squares
    return float(rest / 2.0 + (squares - rest**2 / 4.0) ** 0.5), float(
        cells.sum()[["S0 pair", "S0 couple"]].max()
    )


ATTACKS: dict[str, Callable[[fs.ClientPartition], tuple[float, float]]] = {
    "two columns": two_columns,
    "one row moved": one_row_moved,
    "one small ward": one_small_ward,
    "two small wards": two_small_wards,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_sums_within_levels_do_not_add_up_to_few_rows(name):
    value, truth = ATTACKS[name](sites("open"))
    assert abs(value - truth) < 1e-4
    with pytest.raises(PolicyError):
        ATTACKS[name](sites("strict"))


@pytest.mark.parametrize("policy", ["open", "strict"])
def test_a_column_that_varies_within_one_level_of_two_rows_is_refused(policy):
    """Its sum with the response would be the difference of the responses of two rows."""
    with pytest.raises(PolicyError, match="'within_pair within pairs'" if policy == "open" else "depends on"):
        fit("y ~ x + within_pair | pairs", sites(policy))


def test_ordinary_fits_pass_in_any_order():
    at = sites("strict")
    model = fs.FederatedOLS.from_formula("y ~ x + z | ward", at)
    for given in ({}, {"cov_type": "HC1"}, {"cov_type": "cluster", "cov_kwds": {"groups": "site"}}):
        assert model.fit(**given).df_resid == len(FRAME) - 12 - 2
    for formula in (
        "y ~ x",
        "y ~ x | ward",
        "y ~ x + z + x:z | ward",
        "z ~ x | ward",
        "y ~ x | pairs",
        "y ~ x + z",
    ):
        assert fit(formula, at).converged


def test_served_sites_go_on_after_a_restart(tmp_path):
    frames = {name: rows.drop(columns="site") for name, rows in FRAME.groupby("site")}
    served = ServedSites(tmp_path, frames, PUBLISHED)
    first = fit("y ~ x | ward", served.connect())
    served.restart()
    assert fit("y ~ x | ward", served.connect()).params.equals(first.params)
    served.restart()
    with pytest.raises(PolicyError):
        fit("y ~ other | ward", served.connect())
