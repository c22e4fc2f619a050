"""Subsets that an analyst chooses: few rows between two of them, outside of one, or in no union of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from released import total_sums
from served import ServedSites

import fedstat as fs
from fedstat.errors import DescriptionError, DesignError, PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")

SITES, ROWS = ("S0", "S1", "S2"), 130
NUMBER = {"kind": "number"}
ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1, max_parameters=1e9)
PUBLISHED = {
    "age": NUMBER | {"range": [20, 90], "knots": [40, 50, 51]},
    "income": NUMBER | {"range": [0.0, 10.0]},
    "x": NUMBER | {"range": [-9.0, 9.0]},
    "ward": {"kind": "category", "levels": ["u", "v", "w"]},
    "a": NUMBER | {"range": [0, 1], "levels": [0, 1]},
    "b": NUMBER | {"range": [0, 1], "levels": [0, 1]},
}


def people(few: int) -> pd.DataFrame:
    """At site S0 `few` people are 50 years old, are in ward w, and alone have neither a nor b."""
    rng = np.random.default_rng(9)
    n = ROWS * len(SITES)
    there = np.arange(n) < few
    age = np.where(rng.random(n) < 0.5, rng.integers(25, 50, n), rng.integers(52, 85, n))
    a = rng.integers(0, 2, n)
    return pd.DataFrame(
        {
            "site": np.repeat(SITES, ROWS),
            "age": np.where(there, 50, age).astype(float),
            "ward": np.where(there, "w", np.array(["u", "v"])[rng.integers(0, 2, n)]),
            "a": np.where(there, 0, a),
            "b": np.where(there, 0, np.where(a == 1, rng.integers(0, 2, n), 1)),
            "x": rng.normal(size=n).round(4),
            "income": rng.uniform(1.0, 8.0, n).round(3),
        }
    )


def income(few: int, policy: object, subsets: list[tuple[float, str | None]]) -> float:
    """Sum of incomes over rows of subsets, each times a number, which an analyst reads from fits."""
    table = people(few)
    partition = fs.ClientPartition.from_frame(
        table, by="site", policy=policy, published=dict.fromkeys(SITES, PUBLISHED)
    )
    found = 0.0
    for times, subset in subsets:
        fit = fs.FederatedOLS.from_formula("income ~ x", partition, subset=subset).fit(local=False)
        found += times * total_sums(fit)[1]["Intercept"]
    return found


ALONE = ("a level", "a conjunction", "levels and cuts")
ATTACKS = {
    "two cuts": [(1.0, "age >= 50"), (-1.0, "age >= 51")],
    "two cuts, the other way": [(-1.0, "age >= 51"), (1.0, "age >= 50")],
    "all rows and a subset": [(1.0, None), (-1.0, "ward != 'w'")],
    "a subset and all rows": [(-1.0, "ward != 'w'"), (1.0, None)],
    "a level": [(1.0, "ward == 'w'")],
    "a union": [(1.0, None), (-1.0, "a == 1"), (-1.0, "b == 1"), (1.0, "a == 1 & b == 1")],
    "a union in another order": [(1.0, "a == 1 & b == 1"), (-1.0, "b == 1"), (-1.0, "a == 1"), (1.0, None)],
    "a conjunction": [(1.0, "a == 0 & b == 0")],
    "levels and cuts": [(1.0, "age >= 50 & ward != 'w'"), (-1.0, "age >= 50"), (2.0, "ward == 'w'")],
}


# A fit of the few rows alone needs more rows than coefficients.
CASES = [(name, few) for name in ATTACKS for few in (1, 2, 4) if few == 4 or name not in ALONE]


@pytest.mark.parametrize(("attack", "few"), CASES)
def test_the_incomes_of_few_rows_are_not_read(attack, few):
    truth = people(few)["income"][:few].sum()
    assert income(few, ALLOW, ATTACKS[attack]) == pytest.approx(truth, abs=1e-6)
    with pytest.raises(PolicyError):
        income(few, "strict", ATTACKS[attack])


def test_enough_rows_between_two_cuts_are_a_sum_like_any_other():
    assert income(5, "strict", ATTACKS["two cuts"]) == pytest.approx(people(5)["income"][:5].sum(), abs=1e-6)


@pytest.mark.parametrize("few", [0, 1, 2, 3])
def test_rows_outside_of_a_subset_are_none_or_enough(few):
    """The number of rows outside follows from the number inside."""
    if few in (0, 3):
        assert np.isfinite(income(few, "strict", [(1.0, "ward != 'w'")]))
        return
    with pytest.raises(PolicyError):
        income(few, "strict", [(1.0, "ward != 'w'")])


@pytest.mark.parametrize(
    "subset", ["age >= 50.5", "age == 50", "age != 40", "x > 0", "ward == 'z'", "a == 0.5", "site == 'S0'"]
)
def test_a_value_that_is_not_published_is_refused_before_a_row_is_read(subset):
    with pytest.raises(DescriptionError, match=r"simple formulas|not published"):
        income(60, "strict", [(1.0, subset)])


def test_negative_numbers_are_published_knots_as_well():
    published = PUBLISHED | {"x": NUMBER | {"range": [-9.0, 9.0], "knots": [-0.5, 0.5]}}
    table = people(60)
    partition = fs.ClientPartition.from_frame(
        table, by="site", policy="strict", published=dict.fromkeys(SITES, published)
    )
    fit = fs.FederatedOLS.from_formula("income ~ x", partition, subset="x > -0.5").fit(local=False)
    assert fit.nobs == (table["x"] > -0.5).sum()


def test_served_sites_answer_a_subset_and_remember_it(tmp_path):
    table = people(4)
    frames = {name: part.drop(columns="site") for name, part in table.groupby("site")}
    served = ServedSites(tmp_path, frames, PUBLISHED)
    fit = fs.FederatedOLS.from_formula("income ~ x + a", served.connect(), subset="age >= 51 & b == 1").fit()
    inside = table[(table["age"] >= 51) & (table["b"] == 1)]
    X = np.column_stack([np.ones(len(inside)), inside[["x", "a"]]])
    assert fit.params.to_numpy() == pytest.approx(np.linalg.lstsq(X, inside["income"])[0], abs=1e-7)
    served.restart()
    assert (
        fs.crosstab(served.connect(), "a", "b", subset="age >= 51").sum().sum() == (table["age"] >= 51).sum()
    )
    served.restart()
    with pytest.raises(PolicyError, match="S0"):
        fs.FederatedOLS.from_formula("income ~ x", served.connect(), subset="age >= 50").fit()
    served.restart()


# ---- searches by numbers of the analyst, which a site with formulas = "any" compares -----------------


def outcome(partition: fs.ClientPartition, formula: str, subset: str | None = None) -> str:
    """What an analyst sees of S0: the number of rows, no row, or a refusal."""
    try:
        model = fs.FederatedOLS.from_formula(formula, partition, subset=subset)
    except DesignError:
        return "none"
    except PolicyError:
        return "refused"
    return str({row.site: row.n for row in model.agreement.sites}.get("S0", "none"))


DOWN, UP = np.arange(0.0105, 0.0, -0.002), np.arange(-0.0105, 0.0, 0.002)
SEARCHES = {
    "the largest": lambda x: [("income ~ a", f"x > {x[-1] + away:.4f}") for away in DOWN],
    "the smallest": lambda x: [("income ~ a", f"x >= {x[0] + away:.4f}") for away in UP],
    "one in the middle": lambda x: [("income ~ a", f"x < {x[50] + k * 1e-6:.6f}") for k in range(1, 5)],
    "a value": lambda x: [("income ~ a", f"x != {x[40] + k * 1e-6:.6f}") for k in range(1, 5)],
    "an outcome": lambda x: [(f"I(x > {x[-1] + away:.4f}) ~ a", None) for away in DOWN],
    "a column": lambda x: [(f"income ~ I(x > {x[-1] + away:.4f})", None) for away in DOWN],
}


def alone(policy: object) -> tuple[fs.ClientPartition, np.ndarray]:
    """Sites with columns that are not published; the values of x at S0, which no other site exceeds."""
    table = people(60)
    there = table["site"] == "S0"
    table.loc[~there, "x"] = table.loc[~there, "x"].clip(-1.0, 1.0).to_numpy()
    return fs.ClientPartition.from_frame(table, by="site", policy=policy), np.sort(table.loc[there, "x"])


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_by_numbers_finds_no_value(search):
    """No row, or no other row than before, is no reply that costs less than few rows."""
    partition, x = alone("open")
    requests = SEARCHES[search](x)
    assert all(outcome(partition, *one) != "refused" for one in requests), "otherwise this is no search"
    partition, _ = alone(fs.Policy.strict(formulas="any", max_refusals=99))
    found = [outcome(partition, *one) for one in requests]
    assert found.count("refused") >= len(found) - 1, found


def test_a_number_with_enough_rows_on_both_sides_is_compared_again_and_in_other_models():
    partition, x = alone(fs.Policy.strict(formulas="any"))
    for _ in range(2):
        assert outcome(partition, "income ~ a", "x > 0.5") == str((x > 0.5).sum())
    assert fs.FederatedOLS.from_formula("income ~ a", partition, subset="x > 0.5").fit().nobs
    assert outcome(partition, "income ~ a", "x > 0.9") == str((x > 0.9).sum())
    assert outcome(partition, "income ~ a", "ward == 'u' & x <= 0.5") != "refused"
