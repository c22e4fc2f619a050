"""Two or more fits, each of which passes, whose sums together belong to one person.

Sites remember the columns of all that they have released: no combination of these may belong to few rows,
across sessions, families and restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from released import own_sums, total_sums
from served import ServedSites

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.kernels.curves import spline_basis

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, VICTIM, SITES = 150, 17, ("S0", "S1", "S2")
NUMBER = {"kind": "number"}
PUBLISHED = {
    "income": NUMBER | {"range": [0.5, 9.0]},
    "y": NUMBER | {"range": [0.0, 200.0]},
    "ill": NUMBER | {"range": [0, 1], "levels": [0, 1]},
    "stage": NUMBER | {"range": [0.0, 5.0]},
    "first": NUMBER | {"range": [1.0, 9.0]},
    "second": NUMBER | {"range": [1.0, 9.0]},
} | {name: NUMBER | {"range": [0, 1], "levels": [0, 1]} for name in ("a", "b", "c")}


def table() -> pd.DataFrame:
    """The victim alone has a without b, another imputed value, and stage 5 at its site."""
    rng = np.random.default_rng(4)
    n = ROWS * len(SITES)
    a = (rng.random(n) < 0.15).astype(float)
    a[VICTIM] = 1.0
    b = np.maximum(a, rng.random(n) < 0.3)
    b[VICTIM] = 0.0
    ill = (rng.random(n) < 0.45).astype(float)
    ill[VICTIM] = 1.0
    stage = np.minimum(rng.binomial(5, 0.4, n), 4).astype(float)
    stage[VICTIM] = 5.0
    stage[[ROWS + 3, 2 * ROWS + 5]] = 5.0
    first = rng.uniform(2.0, 8.0, n).round(1)
    second = first.copy()
    second[VICTIM] += 1.0
    return pd.DataFrame(
        {
            "site": np.repeat(SITES, ROWS),
            "a": a,
            "b": b,
            "c": (rng.random(n) < 0.4).astype(float),
            "stage": stage,
            "first": first,
            "second": second,
            "y": rng.normal(100, 15, n).round(1),
            "ill": ill,
            "income": rng.uniform(1.0, 8.0, n).round(3),
        }
    )


FRAME = table()
INCOME, ILL, Y = (FRAME[name][VICTIM] for name in ("income", "ill", "y"))
At = fs.ClientPartition


def partition(policy: str) -> At:
    return fs.ClientPartition.from_frame(
        FRAME, by="site", policy=policy, published=dict.fromkeys(SITES, PUBLISHED)
    )


def least_squares(formula: str, at: At) -> tuple[pd.DataFrame, pd.Series]:
    return own_sums(fs.FederatedOLS.from_formula(formula, at).fit())["S0"]


def least_squares_in_all(formula: str, at: At) -> tuple[pd.DataFrame, pd.Series]:
    return total_sums(fs.FederatedOLS.from_formula(formula, at).fit(local=False))


def logistic(formula: str, at: At) -> tuple[float, float]:
    """Members of a column and events among them, at S0, from its own fit of one indicator."""
    result = fs.GLORE.from_formula(formula, at).fit()
    k = [*result.heterogeneity.estimates.index].index("S0")
    mean = 1.0 / (1.0 + np.exp(-result.heterogeneity.estimates.loc["S0"].sum()))
    members = np.linalg.inv(np.asarray(result.heterogeneity.covariances[k]))[1, 1] / (mean * (1.0 - mean))
    return members, members * mean


def boosted(formula: str, at: At) -> Any:
    return fs.FedFunctionBoost.from_formula(formula, at).fit(steps=1)._record.boosting.moments.total


# -- attacks: what is read, and the truth --------------------------------------------------------------


def nested_columns(at: At) -> tuple[float, float]:
    """Sum of incomes over a less that over a and b."""
    return least_squares("income ~ a", at)[1]["a"] - least_squares("income ~ a:b", at)[1].iloc[1], INCOME


def nested_columns_backwards(at: At) -> tuple[float, float]:
    some = least_squares("income ~ a:b", at)[1].iloc[1]
    return least_squares("income ~ a", at)[1]["a"] - some, INCOME


def nested_in_all(at: At) -> tuple[float, float]:
    """The same sums over all sites, if nobody else has a without b."""
    every = least_squares_in_all("income ~ a", at)[1]["a"]
    return every - least_squares_in_all("income ~ a:b", at)[1].iloc[1], INCOME


def nested_as_regressors(at: At) -> tuple[float, float]:
    """Income among the columns, once times a and once times a and b."""
    every = least_squares("y ~ a:income", at)[0].iloc[0, 1]
    return every - least_squares("y ~ a:b:income", at)[0].iloc[0, 1], INCOME


def nested_outcomes(at: At) -> tuple[float, float]:
    """Cases among a, and among a and b, by logistic regressions."""
    (n, events), (m, fewer) = logistic("ill ~ a", at), logistic("ill ~ a:b", at)
    assert n - m == pytest.approx(1.0, abs=1e-3)
    return events - fewer, ILL


def two_families(at: At) -> tuple[float, float]:
    """A linear model, then a logistic one of the same response."""
    every = least_squares("ill ~ a", at)[1]["a"]
    return every - logistic("ill ~ a:b", at)[1], ILL


def boosting_afterwards(at: At) -> tuple[float, float]:
    every = least_squares_in_all("y ~ a", at)[1]["a"]
    return every - boosted("y ~ a:b", at).T[-1, 0], Y


def two_imputations(at: At) -> tuple[float, float]:
    """Two columns without zeros that differ in one row: the ratio of two differences is its income."""
    fits = [least_squares(f"income ~ {name} + a", at) for name in ("first", "second")]
    (G, s), (H, t) = fits
    return (t["second"] - s["first"]) / (H.loc["Intercept", "second"] - G.loc["Intercept", "first"]), INCOME


def functions_of_few_values(at: At) -> tuple[float, float]:
    """Six functions of a column of six values make the sums by value."""
    level, rows, sums = np.arange(6.0), [np.ones(6)], []
    for text, function in (("stage", level), ("sqrt(stage)", np.sqrt(level)), ("exp(stage)", np.exp(level))):
        found = least_squares(f"income ~ {text}", at)[1]
        rows.append(function)
        sums += [found.iloc[0], found.iloc[1]] if not sums else [found.iloc[1]]
    result = fs.FederatedOLS.from_formula("income ~ poly(stage, 3)", at).fit()
    state = result.model.agreement.spec.state["poly(stage, 3)"]
    alpha, norms = (np.array(list(state[key].values())) for key in ("alpha", "norms2"))
    P = [np.ones(6), level - alpha[0]]
    for k in (1, 2):
        P.append((level - alpha[k]) * P[k] - norms[k] / norms[k - 1] * P[k - 1])
    for k, value in ((2, own_sums(result)["S0"][1].iloc[2]), (3, own_sums(result)["S0"][1].iloc[3])):
        rows.append(P[k] / np.sqrt(norms[k]))
        sums.append(value)
    return float(np.linalg.solve(np.array(rows), np.array(sums))[-1]), INCOME


ATTACKS: dict[str, Callable[[At], tuple[float, float]]] = {
    "a and a:b": nested_columns,
    "a:b and a": nested_columns_backwards,
    "sums over all sites": nested_in_all,
    "among the regressors": nested_as_regressors,
    "two logistic models": nested_outcomes,
    "a linear and a logistic model": two_families,
    "a linear model and boosting": boosting_afterwards,
    "two imputations": two_imputations,
    "functions of few values": functions_of_few_values,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_fits_do_not_add_up_to_one_person(name):
    value, truth = ATTACKS[name](partition("open"))
    assert abs(value - truth) < 1e-4
    with pytest.raises(PolicyError):
        ATTACKS[name](partition("strict"))


def one_year_of_age(policy: str) -> tuple[float, float]:
    """Splines with ever other knots: together they are indicators of single years of age."""
    rng = np.random.default_rng(0)
    n, ages = 900, np.arange(20.0, 81.0)
    frame = pd.DataFrame(
        {
            "site": np.repeat(SITES, n // 3),
            "age": np.clip(np.round(rng.normal(50, 11, n)), 20, 80),
            "x": rng.normal(size=n),
            "y": rng.normal(100, 15, n).round(1),
        }
    )
    published = {"age": NUMBER | {"range": [20.0, 80.0]}, "y": NUMBER | {"range": [0.0, 200.0]}}
    at = fs.ClientPartition.from_frame(
        frame, by="site", policy=policy, published=dict.fromkeys(SITES, published)
    )
    columns, sums = [], []
    for knots in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11):
        columns.append(spline_basis(ages, 20.0, 80.0, knots, 1).T)
        formula = f"y ~ bbs(age, knots={knots}, degree=1, lower_bound=20, upper_bound=80, df=2)"
        sums.append(boosted(formula, at).T[1:, 0])
    (alone,) = np.flatnonzero(ages == 26.0)
    assert (frame.age == 26.0).sum() == 1
    inverse = np.linalg.pinv(np.vstack(columns), rcond=1e-10)
    return float(inverse[alone] @ np.concatenate(sums)), frame.y[frame.age == 26.0].item()


def test_splines_of_many_fits_are_not_indicators_of_few():
    value, truth = one_year_of_age("open")
    assert abs(value - truth) < 1e-4
    with pytest.raises(PolicyError):
        one_year_of_age("strict")


@pytest.mark.parametrize("backwards", [False, True])
def test_a_restart_between_two_fits_does_not_help(tmp_path, backwards):
    frames = {name: rows.drop(columns="site") for name, rows in FRAME.groupby("site")}
    served = ServedSites(tmp_path, frames, PUBLISHED)
    formulas = ["income ~ a", "income ~ a:b"][:: -1 if backwards else 1]
    fs.FederatedOLS.from_formula(formulas[0], served.connect()).fit(local=False)
    served.restart()
    fs.FederatedOLS.from_formula(formulas[0], served.connect()).fit(local=False)
    with pytest.raises(PolicyError):
        fs.FederatedOLS.from_formula(formulas[1], served.connect()).fit(local=False)
    served.restart()
    with pytest.raises(PolicyError):
        fs.GLORE.from_formula(formulas[1].replace("income", "ill"), served.connect()).fit(local=False)
