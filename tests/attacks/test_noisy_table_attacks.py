"""Attacks on tables with noise: how far one row moves them, and which rows a release betrays."""

from __future__ import annotations

import json
import math
import secrets
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError, FedstatError
from fedstat.federation.disclosure import privacy_budget
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.message import Request, pack_request
from fedstat.inference.noisy_tables import UNIT, running_weights
from fedstat.models.descriptive.noisy_steps import CodedColumn, NoisyTableRequest, TablePart
from fedstat.privacy.gaussian_dp import mu_interval
from fedstat.privacy.zcdp import rho_of_budget

GROUP = CodedColumn("g", levels=("a", "b"))
X, Y, Z = (CodedColumn(name, edges=(-1.0, 1.0)) for name in "xyz")
PARTS = {
    "cells": TablePart("cells", (CodedColumn("x", edges=(0.0, 0.5)), GROUP)),
    "cells by group": TablePart("cells", (CodedColumn("x", edges=(0.0, 0.5)),), (GROUP,)),
    "running": TablePart(
        "running", (CodedColumn("x", edges=tuple(np.linspace(-1, 1, 40).tolist())),), (GROUP,)
    ),
    "running, one cell": TablePart("running", (CodedColumn("x", edges=(0.0,)),)),
    "moments": TablePart("moments", (X,), (GROUP,)),
    "products": TablePart("products", (X, Y, Z), squared_radius=12),
    "products of one": TablePart("products", (X,), (GROUP,), squared_radius=3),
}
EDGE = [-np.inf, -1e300, -1.0, -0.9999, -1e-9, 0.0, 0.5, 0.9999, 1.0, 1e300, np.inf, np.nan]


def rows():
    """Rows at the ends of all ranges, and a few thousand others, far away and near."""
    random = np.random.default_rng(0)
    ends = np.array(np.meshgrid(EDGE, EDGE, EDGE)).reshape(3, -1).T
    far = random.standard_cauchy((2000, 3)) * random.choice([1e-3, 1.0, 1e3], (2000, 1))
    numbers = np.vstack([ends, far])
    frame = pd.DataFrame(numbers, columns=list("xyz"))
    return frame.assign(g=random.choice(["a", "b", None], len(frame)))


def moved(part, frame):
    """Squared length by which each row moves the sums: a row is all that there is, or is not there."""
    used = np.array([True])
    return [
        int((part.sum_rows(frame.iloc[[i]].reset_index(drop=True), used) ** 2).sum())
        for i in range(len(frame))
    ]


@pytest.mark.parametrize("name", PARTS)
def test_no_row_moves_the_sums_further_than_is_charged(name):
    part, frame = PARTS[name], rows()
    frame = frame if name.startswith("products") else frame.iloc[:: 3 if name == "moments" else 7]
    found = np.array(moved(part, frame)) / part.squared
    assert found.max() <= 1.0
    # The charge is not larger than needed: some row moves the sums nearly as far.
    assert found.max() > (0.9 if name.startswith("products") else 0.999)


def test_the_sums_of_all_parts_together_are_charged():
    request = NoisyTableRequest(tuple(PARTS.values()), (), "1/10")
    every = sum(np.array(moved(part, rows().iloc[::7])) for part in PARTS.values())
    assert every.max() <= request.squared
    assert request.variance >= request.squared / (2 * Fraction(1, 10))


def test_sums_are_sums_over_rows():
    """One row added moves the sums by its own vector, whatever the other rows are."""
    frame, used = rows().iloc[:300].reset_index(drop=True), np.ones(300, dtype=bool)
    for part in PARTS.values():
        every, without = (
            part.sum_rows(frame, used),
            part.sum_rows(frame.iloc[1:].reset_index(drop=True), used[1:]),
        )
        own = part.sum_rows(frame.iloc[[0]].reset_index(drop=True), used[:1])
        np.testing.assert_array_equal(every - without, own)


# ---- one release, many rows in question ------------------------------------------------------------

CANARIES, EPSILON = 1000, 3.0


def right_guesses(seed):
    """Guess of each row whether it is there, from one release of one site: (right guesses).

    Each is there by a fair coin, and has an interval of its own (Steinke, Nasr and Jagielski 2023).
    """
    coins = np.random.default_rng(seed).random(CANARIES) < 0.5
    frame = pd.DataFrame({"x": np.flatnonzero(coins).astype(float), "site": "A"})
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=Policy(privacy=Budget(50.0, 1e-6)))
    edges = np.arange(CANARIES + 1.0) - 0.5
    found = fs.histogram(partition, "x", bins=edges, epsilon=EPSILON, bounds={})
    noisy = found.attrs["limits"].args[0][1:-1, 0]
    return int(((noisy > 0.5) == coins).sum())


def test_a_release_betrays_no_more_rows_than_its_epsilon(monkeypatch):
    mu = math.sqrt(2.0 * float(rho_of_budget(EPSILON, 1e-6)))
    hits = sum(right_guesses(seed) for seed in range(3))
    low, high = mu_interval(hits, 3 * CANARIES, 1e-4)
    assert low <= mu <= high
    real = privacy_budget.discrete_gaussian
    monkeypatch.setattr(
        privacy_budget, "discrete_gaussian", lambda variance, *more: real(variance / 9, *more)
    )
    assert mu_interval(sum(right_guesses(seed) for seed in range(3)), 3 * CANARIES, 1e-4)[0] > mu


# ---- noise ------------------------------------------------------------------------------------------


def partition_of(n=60, epsilon=30.0):
    frame = pd.DataFrame(
        {"g": ["a", "b"] * n, "h": ["u", "v", "v", "u"] * (n // 2), "site": ["A", "B", "C"] * (n * 2 // 3)}
    )
    return fs.ClientPartition.from_frame(frame, by="site", policy=Policy(privacy=Budget(epsilon, 1e-6)))


LEVELS = {"g": ["a", "b"], "h": ["u", "v"]}


def test_repeats_cannot_be_averaged(monkeypatch):
    partition = partition_of()

    def ask():
        return fs.crosstab(partition, "g", "h", epsilon=1.0, bounds=LEVELS).to_numpy()

    first = ask()
    assert all(np.array_equal(ask(), first) for _ in range(5))
    monkeypatch.setattr(privacy_budget, "random_bytes", lambda key: secrets.token_bytes)
    assert len({ask().tobytes() for _ in range(5)}) > 1


def test_other_words_for_a_table_are_charged():
    """Levels in another order, an epsilon that differs in its last digit: each has noise of its own."""
    partition = partition_of(epsilon=1.9)
    fs.crosstab(partition, "g", "h", epsilon=1.0, bounds=LEVELS)
    other = [
        {"epsilon": 1.0 + 1e-9, "bounds": LEVELS},
        {"epsilon": 1.0, "bounds": {"g": ["b", "a"], "h": ["u", "v"]}},
        {"epsilon": 1.0, "bounds": {"g": ["a", "b", "c"], "h": ["u", "v"]}},
        {"epsilon": 1.0, "bounds": LEVELS, "complete": ["site"]},
    ]
    with pytest.raises(DescriptionError, match="privacy budget"):
        for given in other:
            fs.crosstab(partition, "g", "h", **given)
    states = [site.privacy for site in partition.sites.values()]
    assert all(one.epsilon_spent <= 1.9 for one in states)


@pytest.mark.parametrize(
    "change",
    [
        {"rho": "0"},
        {"rho": "-1"},
        {"rho": "1/0"},
        {"rho": "nan"},
        {"later": "-1"},
        {"parts": []},
        {"parts": [{"kind": "moments", "columns": [{"name": "g", "levels": ["a"]}]}]},
        {"parts": [{"kind": "cells", "columns": [{"name": "g", "edges": [1.0, 1.0]}]}]},
        {"parts": [{"kind": "cells", "columns": [{"name": "g", "levels": ["a"], "edges": [1.0]}]}]},
        {"parts": [{"kind": "running", "columns": [{"name": "g", "edges": list(range(5000))}]}]},
        {"parts": [{"kind": "products", "columns": [{"name": "g", "edges": [0.0, 1.0]}]}]},
        {
            "parts": [
                {"kind": "products", "columns": [{"name": "g", "edges": [0.0, 1.0]}], "squared_radius": 10**9}
            ]
        },
        {"squared": 0},
        {"variance": 1},
    ],
)
def test_requests_that_bound_nothing_are_refused(change):
    site = partition_of().sites["A"]
    part = {"kind": "cells", "columns": [{"name": "g", "levels": ["a", "b"]}]}
    plain = {"parts": [part], "complete": [], "rho": "1/100"} | change
    with pytest.raises(FedstatError):
        site.answer(pack_request(Request("A", "descriptive", "sum_noisy_table", {}, "s", json.dumps(plain))))
    assert not site.site_ledger.charges.made


def test_a_refusal_depends_on_no_row():
    """Sites with other rows, or none in a group, refuse and answer alike."""
    frames = [
        pd.DataFrame({"g": values, "site": ["A"] * 6})
        for values in (["a"] * 6, ["c"] * 6, [None] * 5 + ["a"], ["1"] * 6)
    ]
    for frame in frames:
        both = pd.concat([frame, frame.assign(site="B")])
        partition = fs.ClientPartition.from_frame(both, by="site", policy=Policy(privacy=Budget(3.0, 1e-6)))
        found = fs.histogram(partition, "g", bins=[0, 1, 2], epsilon=1.0, bounds={})
        assert found.shape == (4, 1)
        assert fs.crosstab(partition, "g", "site", epsilon=1.0, bounds={"g": ["a", "b"]}).shape == (2, 2)


def test_weights_of_running_sums_have_no_longer_column():
    for J in (1, 2, 50, 1024):
        lengths = (running_weights(J) ** 2).sum(axis=0)
        assert lengths.max() == lengths[0] and lengths[0] < UNIT**2 * (
            1.0 + math.log(4.0 * J + 4.0) / math.pi
        )
