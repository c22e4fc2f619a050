"""One entity alone has both a column of one site and a column of another: the product is its value.

The court has indicator a, the bank b and incomes; entity 17 alone has a and b. The sum of products of a and
of b times income is its income. Under the strict policy columns move by up to half a hundredth of their
standard deviation, so that a value is read with a small error; one below READ counts as read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from released import miss

import fedstat as fs
from fedstat.errors import PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")

N, VICTIM, HAVE = 400, 17, 24
READ = 0.2
"""Error in standard deviations below which a value is read: guessing the mean has about one."""
POINTS = 12


def frames() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(5)
    k = np.arange(N)
    order = np.concatenate([[VICTIM], rng.permutation(np.delete(k, VICTIM))])
    a, b = np.zeros(N), np.zeros(N)
    a[order[:HAVE]] = 1.0
    b[order[[0, *range(HAVE, 2 * HAVE - 1)]]] = 1.0
    # Of d, all have b but the victim; all have not-a but those with a.
    d = b.copy()
    d[VICTIM] = 0.0
    d[order[2 * HAVE : 4 * HAVE]] = 1.0
    income = rng.uniform(1.0, 8.0, N).round(3)
    income[VICTIM] = 7.5
    first = rng.normal(5.0, 1.0, N).round(2)
    gait = rng.normal(size=(N, 2)) @ np.cos(np.outer([0, 3], np.linspace(0, 1, POINTS)))
    return {
        "Clinic": pd.DataFrame({"k": k, "y": rng.normal(size=N)}).join(
            pd.DataFrame(gait).rename(columns=lambda j: f"gait_{j}")
        ),
        "Court": pd.DataFrame({"k": k, "a": a, "a2": a + 1.0, "d": d, "c": rng.normal(size=N)}).assign(
            less=np.where(k == VICTIM, 0.0, a), first=first, second=np.where(k == VICTIM, first + 1.5, first)
        ),
        "Bank": pd.DataFrame({"k": k, "b": b, "income": income, "u": np.where(b > 0, "yes", "no")}),
        "Third": pd.DataFrame({"k": k, "t": rng.normal(size=N)}),
    }


FRAMES = frames()
INCOME = FRAMES["Bank"].income
TRUTH = INCOME[VICTIM]


def partition(policy: str) -> fs.ClientPartition:
    curve = {"gait": fs.Curve("gait_*", domain=(0, 1))}
    return fs.ClientPartition.from_frames(FRAMES, on="k", policy=policy, curves=curve)


def moments(formula: str, at: fs.ClientPartition) -> pd.DataFrame:
    """Sums of products of columns, in the units of the data, with the first column of ones."""
    found = fs.VFEMRegression.from_formula(formula, at).fit(cov_type="none").exchange.moments
    # Columns are center + scale z: of all, with the response last.
    names = ["1", *found.names]
    q = len(names)
    units = np.eye(q)
    units[1:, 0] = found.center[: q - 1]
    units[1:, 1:] = np.diag(found.scale[: q - 1])
    return pd.DataFrame(units @ found.grams.sum(axis=0)[:q, :q] @ units.T, names, names)


def product_of_columns(left: str, right: str) -> Callable[[fs.ClientPartition], float]:
    def attack(at: fs.ClientPartition) -> float:
        return float(moments(f"y ~ {left} + {right} + t", at).loc[left, right])

    return attack


def boosted(response: str, time: str | None = None) -> Callable[[fs.ClientPartition], float]:
    """Products of learners' columns, by which boosting between sites starts."""

    def attack(at: fs.ClientPartition) -> float:
        options = {} if time is None else {"time": time}
        made = fs.FedFunctionBoost.from_formula(f"{response} ~ a + b:income + t", at, **options)
        S = made.fit(steps=1)._record.boosting.moments.total.S
        return float(S[2, 4])  # each learner has a column of ones before its own

    return attack


def ones_and_twos(at: fs.ClientPartition) -> float:
    """Sum of (1 + a) b z, less that of b z."""
    found = moments("y ~ a2 + b:income + t", at)
    return float(found.loc["a2", "b:income"] - found.loc["1", "b:income"])


def centered(at: fs.ClientPartition) -> float:
    """Sum of (a - mean) b z, and the mean of a times that of b z."""
    found = moments("y ~ center(a) + b:income + t", at)
    share = FRAMES["Court"].a.mean()  # public: it is in the agreed transform
    return float(found.loc["center(a)", "b:income"] + share * found.loc["1", "b:income"])


def rest(at: fs.ClientPartition) -> float:
    """Sum over b less that over b and d: the victim alone has b without d."""
    found = moments("y ~ d + b:income + t", at)
    return float(found.loc["1", "b:income"] - found.loc["d", "b:income"])


ATTACKS: dict[str, Callable[[fs.ClientPartition], float]] = {
    "joint model": product_of_columns("a", "b:income"),
    "boosting": boosted("y"),
    "boosting of curves": boosted("gait(t)", "bbs(t, knots=2, df=4)"),
    "ones and twos": ones_and_twos,
    "centered": centered,
    "the rest of a column": rest,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_cell_of_one_entity_is_not_read(name):
    assert miss(ATTACKS[name](partition("open")), TRUTH, INCOME) < READ
    with pytest.raises(PolicyError):
        ATTACKS[name](partition("strict"))


def test_nor_by_a_penalized_fit():
    fs.VerticalGLM.from_formula("y ~ a + b:income + t", partition("open"), penalty="scad").fit()
    with pytest.raises(PolicyError):
        fs.VerticalGLM.from_formula("y ~ a + b:income + t", partition("strict"), penalty="scad").fit()


def test_columns_that_many_share_are_multiplied():
    at = partition("strict")
    assert np.isfinite(moments("y ~ c + a + income + t", at)).all(axis=None)
