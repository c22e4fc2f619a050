"""Two fits between sites whose entities differ by one: the sums differ by the record of that entity.

Entity 17 is the victim. Each attack reads its income where nothing is protected, and learns nothing
under the strict policy, whose sites remember over which entities sums have left.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from released import miss

import fedstat as fs
from fedstat.errors import PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")

N, VICTIM = 300, 17


def frames(gap=(), absent=()):
    """Four sites; the registry lacks a value of x2 for some entities, and has no record of others."""
    rng = np.random.default_rng(0)
    k = np.arange(N)
    clinic = pd.DataFrame({"k": k, "y": rng.normal(100, 15, N).round(1), "one": 1.0, "most": 1.0})
    clinic.loc[VICTIM, "most"] = 0.0
    registry = pd.DataFrame({"k": k, "x": rng.normal(50, 9, N).round(1), "x2": rng.normal(size=N)})
    bank = pd.DataFrame({"k": k, "income": np.round(rng.lognormal(10, 0.6, N), 2)})
    third = pd.DataFrame({"k": k, "t": rng.normal(size=N)})
    registry.loc[list(gap), "x2"] = np.nan
    return {"Clinic": clinic, "Registry": registry[~registry.k.isin(absent)], "Bank": bank, "Third": third}


def total_income(partition, formula, model=fs.VFEMRegression, method="cc", **roles):
    """Sum of incomes over the entities of a fit, from the moments that the coordinator puts together."""
    fit = model.from_formula(formula, partition, missing="drop", **roles).fit(method=method, cov_type="none")
    moments = fit.exchange.moments
    j, total = [*moments.names].index("income"), moments.grams.sum(axis=0)
    return moments.center[j] * total[0, 0] + moments.scale[j] * total[0, 1 + j]


GAP, ABSENT = {"gap": (VICTIM,)}, {"absent": (VICTIM,)}
WAYS = {
    "a value that is missing": (
        GAP,
        {"formula": "y ~ x + income + t"},
        {"formula": "y ~ x + x2 + income + t"},
    ),
    "a record that is missing": (ABSENT, {"formula": "y ~ income + t"}, {"formula": "y ~ x + income + t"}),
    "a weight of zero": (
        {},
        {"formula": "y ~ x + income + t", "freq_weights": "one"},
        {"formula": "y ~ x + income + t", "freq_weights": "most"},
    ),
}


def victim_income(policy, way):
    table, first, second = WAYS[way]
    partition = fs.ClientPartition.from_frames(frames(**table), on="k", policy=policy)
    return total_income(partition, **first) - total_income(partition, **second)


@pytest.mark.parametrize("way", WAYS)
def test_the_difference_of_two_fits_is_not_one_entity(way):
    income = frames()["Bank"].income
    assert miss(victim_income("open", way), income[VICTIM], income) < 1e-6
    with pytest.raises(PolicyError):
        victim_income("strict", way)


@pytest.mark.parametrize("way", ["a value that is missing", "a record that is missing"])
def test_not_in_the_other_order_either(way):
    table, first, second = WAYS[way]
    partition = fs.ClientPartition.from_frames(frames(**table), on="k", policy="strict")
    total_income(partition, **second)
    with pytest.raises(PolicyError):
        total_income(partition, **first)


AFTERWARDS = {
    "VerticalGLM": lambda formula, partition: fs.VerticalGLM.from_formula(
        formula, partition, penalty="scad", missing="drop"
    ).fit(),
    "boosting": lambda formula, partition: fs.FedFunctionBoost.from_formula(formula, partition).fit(steps=2),
}


@pytest.mark.parametrize("model", AFTERWARDS)
def test_not_between_two_families(model):
    partition = fs.ClientPartition.from_frames(frames(gap=(VICTIM,)), on="k", policy="strict")
    total_income(partition, "y ~ x + income + t")
    AFTERWARDS[model]("y ~ x + income + t", partition)
    with pytest.raises(PolicyError):
        AFTERWARDS[model]("y ~ x + x2 + income + t", partition)
