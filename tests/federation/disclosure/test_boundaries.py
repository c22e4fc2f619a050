"""Every minimum, share and limit of the disclosure checks at its boundary: 0, 1, minimum - 1 and minimum.

One table for all counts, one for all limits, one for all shares. A case says what a step reports, and the
site decides as it does for every release: the table does not depend on how the checks are written. Counts
without a policy are those of the default rules, so that a changed default is seen here.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from reporting import CONTROL, FAMILY, N_ROWS, STEPS, masked_sites, refusal_of, request, rule_against, site_of
from scipy import stats

from fedstat.errors import (
    ConsentError,
    DescriptionError,
    DisclosureError,
    FedstatError,
    MessageError,
    NotAvailableError,
    PartitionError,
    PolicyError,
    SessionError,
)
from fedstat.federation.disclosure import facts, leverage, row_checks
from fedstat.federation.disclosure.differencing import MaskedSites
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.rules import RELEASE_KINDS
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.message import ArrayDeclaration, Request, RequestMessage, Step, pack_request
from fedstat.federation.tables.cardinality import ColumnCardinality, DiscreteColumn
from fedstat.federation.tables.published import PublishedColumn
from fedstat.federation.tables.table import FrameTable

STRICT_SHARE = {"max_share": 0.2}


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, FAMILY, STEPS)


# ---- counts: 0, 1, minimum - 1, minimum ---------------------------------------------------------------


def rows(n, first=0):
    """Rows of the table, `n` of them chosen."""
    chosen = np.zeros(N_ROWS, dtype=bool)
    chosen[first : first + n] = True
    return chosen


def weights(n, rest=0.0, size=N_ROWS):
    """Weights of 1 for `n` rows, and of `rest` for the others."""
    return np.where(np.arange(size) < n, 1.0, rest)


def group(n, beside=N_ROWS):
    """Group 1 of `n` entities, and group 0 of others."""
    return np.repeat([0, 1, -1], [beside, n, 3])


def differing(n):
    """All rows, and all but `n`."""
    return facts.RowsUsed(~rows(0)), facts.RowsUsed(~rows(n))


def divided(n):
    """Two groups, and the same after `n` rows went from one to the other."""
    return tuple(
        facts.RowGroups("folds", (~rows(k, 9)).astype(np.int64), np.arange(N_ROWS)) for k in (30, 30 - n)
    )


def spiked(n):
    """A column that `n` of the rows make up, as deviations from its mean and their squares."""
    column = weights(n) * np.where(np.arange(N_ROWS) % 2, 1.0, -0.9)
    d = column - column.mean()
    return facts.ColumnVariation(d, float(N_ROWS), float(d @ d), "'b'")


def cell(n):
    """Two factors and their product, where `n` rows have the second without the first."""
    a = np.repeat([0.0, 1.0, 1.0, 0.0], [20, 10, 12, n])
    b = np.repeat([0.0, 0.0, 1.0, 1.0], [20, 10, 12, n])
    X = np.column_stack([a, b, a * b])
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    return facts.DesignDirections(lambda: np.array_split(X, 3), len(X), ["a", "b", "a:b"])


def estimated(n):
    """Estimates under equal weights, and under weights that differ in `n` rows."""
    each = np.arange(N_ROWS)
    return tuple(facts.WeightedEstimates((1.0 + weights(k))[:, None], each) for k in (0, n))


def leaving(n):
    """Two groups and ten rows in none, and the same after `n` rows have left the second group."""
    code = np.repeat([0, 1, -1], [27, 27, 10])
    every = np.arange(N_ROWS)
    return tuple(facts.RowGroups("folds", np.where(rows(k, 30), -1, code), every) for k in (0, n))


def doubled(n):
    """Estimates under equal weights, and under twice these but for `n` rows."""
    each = np.arange(N_ROWS)
    return tuple(facts.WeightedEstimates(one[:, None], each) for one in (weights(0, 1.0), 2.0 + weights(n)))


@dataclass(frozen=True)
class Count:
    """A minimum count: which facts hold a count n, the minimum, and the counts below it that pass."""

    rule: str
    facts: object
    minimum: int
    passes: tuple[int, ...] = (0,)
    policy: dict = field(default_factory=dict)


COUNTS = {
    "entities": Count("minimum count", facts.EntityCount, 5, ()),
    "entities of an owner's own minimum": Count(
        "minimum count", facts.EntityCount, 12, (), {"min_count": 12}
    ),
    "rows": Count("minimum count", facts.RowCount, 5, ()),
    "rows that have different weights": Count(
        "maximum parameters per row", lambda n: facts.UnequalWeights(n, 9, 9), 5
    ),
    "rows that have different weights in few sums": Count(
        "maximum parameters per row", lambda n: facts.UnequalWeights(n, 1, 1), 5, policy=STRICT_SHARE
    ),
    "rows that have different weights in many sums": Count(
        "maximum parameters per row",
        lambda n: facts.UnequalWeights(n, 3, 2),
        12,
        policy=STRICT_SHARE | {"max_parameters": 0.5},
    ),
    "entities that sums leave out": Count("minimum count", facts.ExcludedEntities, 5),
    "rows of a cluster": Count("minimum count", lambda n: facts.ClusterRowCounts([50, n]), 5),
    "clusters of several rows": Count(
        "rows behind a product",
        lambda n: facts.ClusterProducts(np.array([[50, n], [n, 50]]), ("ward",)),
        3,
        policy={"products": "counted"},
    ),
    "clusters": Count("minimum count", lambda n: facts.ClusterCounts("patient", n, 0, {}), 5, ()),
    "clusters of many coefficients": Count(
        "maximum parameters per row",
        lambda n: facts.ClusterCounts("patient", max(n, 5), 2, {}),
        7,
        (),
        {"max_parameters": 0.3},
    ),
    "clusters of a kind": Count(
        "minimum rows per level", lambda n: facts.ClusterCounts("patient", 60, 2, {"k": [50, n]}), 3
    ),
    "events": Count("minimum events", lambda n: facts.OutcomeCounts((50, n), "died"), 3),
    "rows without the event": Count("minimum events", lambda n: facts.OutcomeCounts((n, 50), "died"), 3),
    "rows of a level": Count("minimum rows per level", lambda n: facts.LevelRowCounts("g", [50, n, 50]), 3),
    "rows of an unknown level": Count(
        "minimum rows per level", lambda n: facts.LevelRowCounts("g", [50, n], known=False), 3
    ),
    "rows of one": Count(
        "minimum rows per level", lambda n: facts.IndicatorCounts(np.array([20, n]), 40, ["a", "b"]), 3
    ),
    "rows of zero": Count(
        "minimum rows per level", lambda n: facts.IndicatorCounts(np.array([20, 40 - n]), 40, ["a", "b"]), 3
    ),
    "rows behind a column of zeros": Count(
        "minimum rows per level", lambda n: facts.IndicatorCounts(np.array([0]), n, ["a"]), 3
    ),
    "rows behind a column of numbers": Count(
        "minimum rows per level", lambda n: facts.IndicatorCounts(np.array([-1]), n, ["a"]), 0, (0, 1)
    ),
    "entities of a group": Count("minimum count", lambda n: facts.GroupSums(group(n)), 5),
    "entities of the first group": Count(
        "minimum count", lambda n: facts.GroupSums(np.repeat([0, 1, -1], [n, N_ROWS, 3])), 5
    ),
    "entities of a group of few products": Count(
        "minimum count", lambda n: facts.GroupSums(group(n), columns=1), 5
    ),
    "entities of a group of products": Count(
        "minimum count", lambda n: facts.GroupSums(group(n), columns=4), 10
    ),
    "entities of a group of two Gram matrices": Count(
        "minimum count", lambda n: facts.GroupSums(group(n), columns=4, times=2), 20
    ),
    "equal weights by the data": Count(
        "minimum count", lambda n: facts.CaseWeights(float(n), float(n), ["w"]), 5, ()
    ),
    "equal weights from outside": Count("minimum count", lambda n: facts.ExternalWeights(weights(n)), 5),
    "weights of either sign": Count(
        "minimum count", lambda n: facts.ExternalWeights(weights(n) * np.resize([1.0, -1.0], N_ROWS)), 5
    ),
    "the second of two vectors of weights": Count(
        "minimum count", lambda n: facts.ExternalWeights(np.column_stack([np.ones(N_ROWS), weights(n)])), 5
    ),
    "weights within a group": Count(
        "minimum count",
        lambda n: facts.GroupSums(np.repeat([1, 0], N_ROWS), weights=np.append(weights(n), np.ones(N_ROWS))),
        5,
    ),
    "weights at coefficients": Count(
        "minimum count", lambda n: facts.WorkingWeights(lambda: weights(n)[None]), 5
    ),
    "weights at coefficients, summed": Count(
        "minimum count",
        lambda n: facts.WorkingWeights(
            lambda: np.stack([np.ones(N_ROWS), weights(n)]),
            np.array([[N_ROWS, N_ROWS], [float(n), float(n)]]),
        ),
        5,
    ),
    "weights within one group of three": Count(
        "minimum count",
        lambda n: facts.GroupSums(
            np.repeat([0, 1, 2], N_ROWS),
            weights=np.concatenate([np.ones(N_ROWS), weights(n), np.ones(N_ROWS)]),
        ),
        5,
    ),
    "weights within the first group": Count(
        "minimum count",
        lambda n: facts.GroupSums(np.repeat([0, 1], N_ROWS), weights=np.append(weights(n), np.ones(N_ROWS))),
        5,
    ),
    "weights of a minimum of two": Count(
        "minimum count", lambda n: facts.ExternalWeights(weights(n)), 2, policy={"min_count": 2}
    ),
    "rows between two answers": Count("differencing", differing, 5),
    "outcomes between two comparisons": Count(
        "differencing",
        lambda n: tuple(facts.RowsUsed(~rows(0), rows(20 + k)) for k in (0, n)),
        5,
    ),
    "rows of a level between two answers": Count(
        "differencing",
        lambda n: tuple(
            fact
            for k in (0, n)
            # Ten rows of the other level differ, so that the rows in all differ by enough.
            for fact in (
                facts.RowsUsed(~(rows(k) | rows(10 if k else 0, 40))),
                facts.LevelsRequested(~(rows(k) | rows(10 if k else 0, 40)), {"g": ["a", "b"]}),
            )
        ),
        3,
        policy={"remember": "all"},
    ),
    "entities between two divisions of a session": Count("differencing", divided, 5),
    "entities between two divisions of all sessions": Count(
        "differencing", divided, 5, policy={"remember": "all"}
    ),
    "entities that leave a group of a session": Count("differencing", leaving, 5),
    "estimates under multiples of weights": Count("differencing", doubled, 5),
    "entities between two divisions of some rows": Count(
        "differencing",
        lambda n: tuple(replace(one, code=one.code[4:], rows=one.rows[4:]) for one in divided(n)),
        5,
        policy={"remember": "all"},
    ),
    "rows that make up a column": Count("minimum rows per level", spiked, 3),
    "rows of a cell of two factors": Count("minimum rows per level", cell, 3),
    "rows between two vectors of weights of estimates": Count("differencing", estimated, 5),
    "rows between two vectors of weights of a minimum of two": Count(
        "differencing", estimated, 2, policy={"min_count": 2}
    ),
    "rows between two vectors of weights of all sessions": Count(
        "differencing", estimated, 5, policy={"remember": "all"}
    ),
}


def tables():
    level = np.where(np.arange(N_ROWS) < N_ROWS // 2, "a", "b")
    return pd.DataFrame({"x": np.arange(float(N_ROWS)), "g": level})


def listed(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(
    ("case", "n"),
    [
        (name, n)
        for name, one in COUNTS.items()
        for n in sorted({0, 1, max(one.minimum - 1, 0), one.minimum, one.minimum + 1})
    ],
)
def test_a_count_is_refused_up_to_one_less_than_its_minimum(case, n):
    one = COUNTS[case]
    site = site_of(tables(), **one.policy)
    passes = n >= one.minimum or n in one.passes
    assert rule_against(site, *listed(one.facts(n))) == ("" if passes else one.rule)


@pytest.mark.parametrize("case", COUNTS)
def test_an_owner_who_wants_one_entity_gets_no_refusal_of_one(case):
    """The minimum is the owner's: the checks of counts have none of their own but that of equations."""
    if case == "rows behind a column of numbers":
        return
    one = COUNTS[case]
    loose = {"min_count": 1, "min_events": 1, "min_level_count": 1, "max_share": 1.0, "max_parameters": 1.0}
    least = 2 * 5 * (2 if "two Gram" in case else 1) if "products" in case or "Gram" in case else 1
    if case == "entities of a group of few products":
        least = 4
    site = site_of(tables(), **one.policy | loose)
    assert rule_against(site, *listed(one.facts(least))) == ""


def brute_remaining_variation(x, few):
    """Smallest sum of squared deviations that is left without any `few` values, of those of all."""
    kept = (np.delete(x, list(out)) for out in combinations(range(len(x)), few))
    return min(((one - one.mean()) ** 2).sum() for one in kept) / ((x - x.mean()) ** 2).sum()


@pytest.mark.parametrize("few", [1, 2, 3])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_the_variation_without_few_rows_is_the_least_over_all_choices(few, scale):
    for seed in range(5):
        x = scale * np.random.default_rng(seed).standard_t(2, size=11)
        d = x - x.mean()
        found = row_checks.remaining_variation(d, len(d), float(d @ d), few)
        assert found == pytest.approx(brute_remaining_variation(x, few), rel=1e-9)


def test_a_column_without_variation_is_another_rules_and_an_infinite_one_has_none_left():
    d = np.array([-1.0, 0.0, 1.0])
    assert row_checks.remaining_variation(0.0 * d, 3, 0.0, 1) == 1.0
    assert row_checks.remaining_variation(d, 3, 2.0, 3) == 1.0
    assert row_checks.remaining_variation(d, 3, 2.0, 2) == 0.0
    assert (
        row_checks.remaining_variation(d, 3, np.inf, 1)
        == row_checks.remaining_variation(d, 3, np.nan, 1)
        == 0
    )


@pytest.mark.parametrize(
    ("values", "n"),
    [
        (np.zeros(0), 0),
        (np.zeros(7), 7),
        (np.ones(10), 10),
        (np.append(-np.ones(4), np.full(60, 4 * 0.99e-3 / 60)), 4),
        (np.append(np.full(60, 4 * 1.2e-3 / 60), np.ones(4)), 14),
    ],
)
def test_rows_with_all_weight_but_a_thousandth_are_counted(values, n):
    """In the last case the four rows have 1 / 1.0012 of the weight: ten more make up what lacks to 0.999."""
    assert row_checks.count_dominant_rows(values) == n


@pytest.mark.parametrize(
    ("least", "names", "policy", "rule"),
    [
        (3, (), {}, ""),
        (4, (), {}, ""),
        (2, (), {}, "request"),
        (None, (), {}, "request"),
        (3, ("b",), {}, "rows"),
        (None, ("b",), {"products": "any"}, ""),
        (2, (), {"products": "any"}, ""),
        (2, ("b",), {"products": "any"}, "rows"),
        (None, ("b",), {"min_level_count": 1}, ""),
        (1, (), {"min_level_count": 2}, "request"),
        (2, ("b",), {"min_level_count": 2}, "rows"),
    ],
)
def test_rows_behind_products_with_another_site_are_counted(least, names, policy, rule):
    error = refusal_of(site_of(**{"products": "counted"} | policy), facts.CountedProduct("Ulm", least, names))
    assert (error is None) == (rule == "") and isinstance(error, DescriptionError) == (rule == "request")
    assert not rule or (error.rule == "rows behind a product" and "Ulm" in str(error))


@pytest.mark.parametrize(("n", "more"), [(1, False), (10, False), (11, True)])
def test_ten_columns_of_few_common_rows_are_named(n, more):
    names = tuple(f"b{k}" for k in range(n))
    text = str(refusal_of(site_of(products="counted"), facts.CountedProduct("Ulm", 3, names)))
    assert ("..." in text) == more and f"'b{min(n, 10) - 1}'" in text and f"'b{min(n, 10)}'" not in text


@pytest.mark.parametrize(
    ("policy", "second", "rule"),
    [
        ({"remember": "all"}, ("team",), "differencing"),
        ({"remember": "all"}, ("ward",), ""),
        ({"remember": "rows"}, ("team",), ""),
        ({"remember": "all", "products": "any"}, ("team",), ""),
    ],
)
def test_scores_are_summed_by_one_division_into_clusters(policy, second, rule):
    site = site_of(**{"products": "counted"} | policy)
    first, then = (facts.ClusterProducts(np.array([[9]]), columns) for columns in (("ward",), second))
    assert rule_against(site, first, session="one") == ""
    assert rule_against(site, then, session="two") == rule
    # A refused division is not noted as a released one.
    assert rule_against(site, first, session="three") == ""


def test_a_refused_division_into_clusters_is_not_remembered():
    site = site_of(products="counted", remember="all")
    few = facts.ClusterProducts(np.array([[2]]), ("team",))
    assert rule_against(site, few) == "rows behind a product"
    assert rule_against(site, facts.ClusterProducts(np.array([[9]]), ("ward",))) == ""
    assert rule_against(site_of(), few) == ""


def test_keys_are_not_counted_where_an_alignment_needs_no_consent():
    assert rule_against(site_of(), facts.ExternalKeyList(10**9, 1)) == ""
    assert rule_against(site_of(max_keys=9), facts.ExternalKeyList(10, 99)) == "maximum keys"


def released_alone(n, **declared):
    """Release a sum over `n` rows, without a mask."""
    line = {"maskable": True, "behind": (facts.RowCount,)} | declared

    def release(data, state):
        state.count_entities(n)
        if facts.RowCount in line["behind"]:
            state.report(facts.RowCount(n))
        return {"total": np.zeros(())}

    FAMILIES[FAMILY] = {
        **STEPS,
        "sum": Step(release, {}, {"total": ArrayDeclaration("aggregate", "a sum", 0, **line)}),
    }


@pytest.mark.parametrize(("n", "passes"), [(5, False), (59, False), (60, True), (61, True)])
def test_a_sum_that_could_be_masked_is_released_alone_from_the_minimum_of_own_rows_on(n, passes):
    rule = "minimum rows of an own fit"
    released_alone(n)
    if passes:
        request(site_of(min_own_rows=60), "sum")
    else:
        with pytest.raises(PolicyError, match=f"there are {n}") as refusal:
            request(site_of(min_own_rows=60), "sum")
        assert refusal.value.rule == rule
    request(site_of(), "sum")
    request(masked_sites(3, min_own_rows=60)["S0"], "sum", masked=0)


@pytest.mark.parametrize(
    "declared", [{"maskable": False}, {"behind": (facts.EntityCount,)}], ids=["not maskable", "not of rows"]
)
def test_other_sums_are_released_alone_at_any_number_of_rows(declared):
    released_alone(5, **declared)
    request(site_of(min_own_rows=60), "sum")


@pytest.mark.parametrize(("share", "least"), [(0.33, 2.0), (0.999, 2.0), (1.0, 1.0), (4.0, 0.25)])
def test_an_owner_who_allows_a_coefficient_for_each_row_decides_on_entities_per_equation(share, least):
    assert row_checks.entities_per_equation(Policy(max_parameters=share)) == least


# ---- limits: the maximum passes, one more does not ----------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """A limit: which facts hold n, the largest n that passes, and by how much the next one is larger."""

    rule: str
    facts: object
    maximum: float
    policy: dict = field(default_factory=dict)
    step: float = 1


def factor(function, column="x", **options):
    return facts.FactorsRequested(
        [facts.FormulaFactor(f"{function}({column})", (column,), (function,), options=options)]
    )


def product(n):
    """A product of `n` columns of numbers, with one of two values and a category."""
    names = [*(f"x{k}" for k in range(n)), "flag", "g"]
    single = [facts.FormulaFactor(name, (name,), ("C",) if name == "g" else ()) for name in names]
    return facts.FactorsRequested(single, {":".join(names): single})


def bounded(low, high):
    return {"x": PublishedColumn("number", (low, high))}


SIMPLE = {"formulas": "simple"}
NUMBERS = {f"x{k}": PublishedColumn("number", (0.0, 9.0)) for k in range(5)}
PUBLISHED = {
    "x": PublishedColumn("number", (0.0, 9.0), knots=(3.0, 6.0)),
    "flag": PublishedColumn("number", (0.0, 1.0), levels=(0, 1)),
    "g": PublishedColumn("category", levels=("a", "b")),
    **NUMBERS,
}
LIMITS = {
    "coefficients": Limit("maximum parameters per row", lambda n: facts.RowCount(100, n), 33),
    "coefficients of an owner's own share": Limit(
        "maximum parameters per row", lambda n: facts.RowCount(10, n), 5, {"max_parameters": 0.5}
    ),
    "coefficients for each cluster": Limit(
        "maximum parameters per row",
        lambda n: facts.ClusterCounts("patient", 10, n, {}),
        5,
        {"max_parameters": 0.5},
    ),
    "keys": Limit("maximum keys", lambda n: facts.ExternalKeyList(n, 8), 100, {"max_keys": 100}),
    "keys for each key": Limit(
        "maximum keys", lambda n: facts.ExternalKeyList(n, 50), 100, {"alignment": "ask"}
    ),
    "keys of a site with one": Limit(
        "maximum keys", lambda n: facts.ExternalKeyList(n, 1), 5, {"alignment": "ask"}
    ),
    "degree of a polynomial": Limit("simple formulas", lambda n: factor("poly", degree=n), 3, SIMPLE),
    "degree of a spline": Limit(
        "simple formulas",
        lambda n: factor("bs", degree=n, lower_bound=0.0, upper_bound=9.0, knots=(3.0, 6.0)),
        3,
        SIMPLE,
    ),
    "knots": Limit("simple formulas", lambda n: factor("bbs", knots=n, ends=(0.0, 9.0)), 20, SIMPLE),
    "degrees of freedom of a deviation": Limit(
        "simple formulas", lambda n: factor("scale", ddof=n), 1, SIMPLE
    ),
    "numbers of a product": Limit("simple formulas", product, 3, SIMPLE),
    "evaluations": Limit(
        "evaluation once",
        lambda n: tuple(facts.ModelEvaluation(np.full(3, float(k))) for k in range(n)),
        1,
        {"evaluation": "once"},
    ),
}


@pytest.mark.parametrize(
    ("case", "n"), [(name, n) for name, one in LIMITS.items() for n in (0, 1, one.maximum, one.maximum + 1)]
)
def test_a_limit_is_refused_from_one_more_on(case, n):
    one = LIMITS[case]
    found = rule_against(site_of(published=PUBLISHED, **one.policy), *listed(one.facts(n)))
    assert found == (one.rule if n > one.maximum else "")


@pytest.mark.parametrize(
    ("function", "low", "high", "passes"),
    [
        ("log", 1e-9, 9.0, True),
        ("log", 0.0, 9.0, False),
        ("np.log", 0.0, 9.0, False),
        ("sqrt", 0.0, 9.0, True),
        ("sqrt", -1e-9, 9.0, False),
        ("exp", -700.0, 700.0, True),
        ("exp", -700.1, 1.0, False),
        ("exp", 0.0, 700.1, False),
    ],
)
def test_a_function_needs_a_published_range_on_which_it_is_defined(function, low, high, passes):
    site = site_of(published=bounded(low, high), **SIMPLE)
    assert rule_against(site, factor(function)) == ("" if passes else "simple formulas")


# ---- shares of weight, of a column's variation and of its squared deviations --------------------------


def reported_weights(values):
    return facts.ExternalWeights(values)


def working_weights(values):
    return facts.WorkingWeights(lambda: values[None])


def summed_weights(values):
    """Weights whose sums alone may settle that no row is looked at."""
    return facts.WorkingWeights(lambda: values[None], np.array([[values.sum(), values @ values]]))


WEIGHTS = {"from outside": reported_weights, "at coefficients": working_weights, "summed": summed_weights}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("share", [0.99e-3, 1.01e-3])
def test_a_thousandth_of_the_weight_lies_outside_the_four_heaviest_rows(kind, share):
    each = 4.0 * share / (1.0 - share) / (N_ROWS - 4)
    assert (rule_against(site_of(), WEIGHTS[kind](weights(4, each))) == "") == (share > 1e-3)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("share", "passes"), [(0.2, True), (0.2 + 1e-6, False), (0.9, False)])
def test_one_row_has_no_more_than_its_share_of_the_weight(kind, share, passes):
    values = weights(1, (1.0 - share) / share / (N_ROWS - 1))
    error = refusal_of(site_of(**STRICT_SHARE), WEIGHTS[kind](values))
    assert (error is None) == passes and (passes or "max_share = 0.2" in str(error))
    assert rule_against(site_of(), WEIGHTS[kind](values)) == ""


@pytest.mark.parametrize("kind", ["from outside", "at coefficients"])
@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_weights_of_too_few_rows_for_the_rule_are_those_of_another_rule(kind, n):
    """In a table of four rows no four rows are singled out; the limit on entities covers this case."""
    one = np.where(np.arange(n) < 1, 1.0, 1e-9)
    assert (rule_against(site_of(), WEIGHTS[kind](one)) == "") == (n < 5)


def test_rows_are_looked_at_only_where_sums_do_not_settle_it():
    def fails():
        raise AssertionError

    assert rule_against(site_of(), facts.WorkingWeights(fails, np.array([[64.0, 64.0]]))) == ""
    few = facts.WorkingWeights(fails, np.array([[64.0, 64.0], [4.0, 4.0]]))
    assert isinstance(refusal_of(site_of(), few).__cause__, AssertionError)


def test_weights_that_are_no_numbers_are_not_those_of_few_rows():
    assert rule_against(site_of(), working_weights(np.where(np.arange(N_ROWS) < 4, np.nan, 1.0))) == ""
    assert (
        rule_against(site_of(), facts.WorkingWeights(lambda: np.stack([weights(64, np.inf), weights(4)])))
        != ""
    )


@pytest.mark.parametrize(("least", "passes"), [(1, True), (2, False)])
def test_means_at_the_ends_of_their_range_are_those_of_few_rows(least, passes):
    flat = facts.WorkingWeights(lambda: weights(64)[None], flat=lambda: True)
    assert (rule_against(site_of(min_count=least), flat) == "") == passes
    steep = facts.WorkingWeights(lambda: weights(64)[None], flat=lambda: False)
    assert rule_against(site_of(min_count=least), steep) == ""


def test_another_reply_leaves_where_nearly_all_weight_is_on_few_rows():
    def choose(data, state):
        fact = facts.WorkingWeights(lambda: weights(4)[None], instead={"reported": np.array(-1)})
        state.report(fact)
        return {"reported": np.array(1)}

    FAMILIES[FAMILY] = {"report": Step(choose, {}, {"reported": CONTROL})}
    assert int(request(site_of(), "report").arrays["reported"]) == -1


@pytest.mark.parametrize(("n", "many"), [(1, False), (10, False), (11, True)])
def test_a_column_of_many_rare_levels_looks_like_an_identifier(n, many):
    error = refusal_of(site_of(), facts.LevelRowCounts("g", [50] + [2] * n))
    assert error.rule == "minimum rows per level" and ("looks like an identifier" in str(error)) == many


@pytest.mark.parametrize("share", [0.0099, 0.0101])
def test_a_hundredth_of_a_columns_variation_lies_outside_the_two_furthest_rows(share):
    n = 1000
    d = np.tile([1.0, -1.0], n // 2)
    d[:2] *= np.sqrt((1.0 - share) / share * (n - 2) / 2)
    fact = facts.ColumnVariation(d, float(n), float(d @ d), "'b'")
    assert (rule_against(site_of(), fact) == "") == (share > 0.01)


@pytest.mark.parametrize(("least", "passes"), [(1, True), (2, False)])
@pytest.mark.parametrize("squares", [np.inf, np.nan])
def test_a_column_whose_squares_are_no_number_is_that_of_few_rows(squares, least, passes):
    fact = facts.ColumnVariation(np.array([-1.0, 1.0]), 50.0, squares, "'b'")
    assert (rule_against(site_of(min_level_count=least), fact) == "") == passes


@pytest.mark.parametrize(("n", "passes"), [(1, True), (2, True), (3, False)])
def test_directions_of_very_few_rows_are_another_rules(n, passes):
    fact = facts.DesignDirections(lambda: [np.eye(3)[:n, :1]], n, ["b"])
    assert (rule_against(site_of(), fact) == "") == passes


@pytest.mark.parametrize(
    ("policy", "passes"),
    [
        ({}, False),
        ({"max_parameters": 1.0}, True),
        ({"max_parameters": 0.99}, False),
        ({"min_level_count": 1}, True),
        ({"min_level_count": 2}, False),
    ],
)
@pytest.mark.parametrize("fact", [spiked, cell])
def test_one_row_makes_up_a_column_where_the_owner_allows_it(fact, policy, passes):
    assert (rule_against(site_of(**policy), fact(1)) == "") == passes


def one_far(share, n=4000):
    """A column of which one row has such a share of the squared deviations from the mean of the others."""
    x = np.tile([1.0, -1.0], n // 2)
    x[0] = 0.0
    d = np.sqrt(share / (1.0 - share) * (n - 1))
    x[0] = d * np.sqrt((n - 1.0) / n)
    return x


@pytest.mark.parametrize(("share", "passes"), [(0.74, True), (0.76, False)])
@pytest.mark.parametrize("policy", [{"max_share": 0.2}, {"max_share": 0.999}, {"max_share": 1.0}])
def test_one_row_has_three_quarters_of_a_columns_squared_deviations_at_most(policy, share, passes):
    fact = facts.SummedColumns(one_far(share)[:, None])
    assert (rule_against(site_of(**policy), fact) == "") == (passes or policy["max_share"] == 1.0)
    grouped = facts.SummedColumns(
        np.append(np.arange(50.0), one_far(share))[:, None], np.repeat([1, 0], [50, 4000])
    )
    assert (rule_against(site_of(**policy), grouped) == "") == (passes or policy["max_share"] == 1.0)
    outside = facts.SummedColumns(grouped.values, np.repeat([1, -1], [50, 4000]))
    assert rule_against(site_of(**policy), outside) == ""


@pytest.mark.parametrize(("share", "passes"), [(0.74, True), (0.76, False)])
def test_one_row_has_three_quarters_of_a_design_column_at_most(share, passes):
    fact = facts.DesignDirections(lambda: [one_far(share)[:, None]], 4000, ["b"])
    assert rule_against(site_of(**STRICT_SHARE), fact) == ("" if passes else "largest share")
    assert rule_against(site_of(), fact) == ""


@pytest.mark.parametrize(("share", "passes"), [(0.70, True), (0.80, False)])
def test_one_row_has_three_quarters_of_a_combination_of_columns_at_most(share, passes):
    """One row separates two columns, and dominates neither. Without groups, only single columns count."""
    other = np.random.default_rng(1).normal(size=4000)
    values = np.column_stack([other, 60.0 * other + one_far(share)])
    assert rule_against(site_of(**STRICT_SHARE), facts.SummedColumns(values)) == ""
    code = np.zeros(4000, dtype=np.int64)
    for fact in (
        facts.SummedColumns(values, code),
        facts.GroupSums(code, summed=facts.SummedColumns(values, code)),
    ):
        assert rule_against(site_of(**STRICT_SHARE), fact) == ("" if passes else "largest share")
        assert rule_against(site_of(), fact) == ""


@pytest.mark.parametrize(("n", "passes"), [(0, True), (1, True), (2, True), (3, False), (40, False)])
def test_of_very_few_rows_one_may_be_a_whole_column(n, passes):
    """Two rows differ by one number: which of them has it, no sum shows. Counts are another rule's."""
    x = np.where(np.arange(n) < 1, 1.0, 0.0)
    assert (rule_against(site_of(**STRICT_SHARE), facts.SummedColumns(x[:, None])) == "") == passes


@pytest.mark.parametrize("far", [(7, 1, -30.0), (4_500, 0, 40.0), (4_500, 2, -25.0), (0, 0, 0.0)])
def test_largest_shares_are_those_of_all_rows_without_and_with_a_combination(far):
    """The largest of all columns and of both blocks of rows, on either side of a mean that is not zero."""
    row, column, by = far
    X = np.random.default_rng(3).normal(size=(leverage.BLOCK_ROWS + 900, 4)) * [1.0, 5.0, 0.1, 0.0] + 50.0
    X[row, column] += by * X[:, column].std()
    varying = X[:, :3] - X[:, :3].mean(axis=0)
    Q, _ = np.linalg.qr(varying)
    single = (varying**2).max(axis=0) / (varying**2).sum(axis=0)
    scale = len(X) / (len(X) - 1.0)
    expected = scale * np.array([single.max(), (Q**2).sum(axis=1).max()])
    np.testing.assert_allclose(leverage.largest_shares(X), expected, rtol=1e-8)
    assert leverage.largest_shares(X[:, 3:]) == (0.0, 0.0)


def test_the_largest_mean_and_the_longest_row_are_sought_in_all_parts():
    values = np.array([0.2, 0.9, 0.1, 0.3])
    for order in (values, values[::-1]):
        whole = Rows({"only": order})
        halves = [
            SimpleNamespace(
                columns=whole.columns[k : k + 2], vectors=Rows({"only": order[k : k + 2]}).vectors
            )
            for k in (0, 2)
        ]
        for parts in (halves, halves[::-1]):
            fact = facts.ScoreAndInformation("design", 4, "only", lambda parts=parts: parts)
            assert fact.largest == 0.9
            assert fact.furthest == pytest.approx(np.sqrt(2.0))
    parts = [SimpleNamespace(columns=np.full((2, 4), size)) for size in (3.0, 1.0)]
    for order in (parts, parts[::-1]):
        assert facts.ScoreAndInformation("design", 4, "only", lambda order=order: order).furthest == 6.0


@pytest.mark.parametrize(("n", "p"), [(3, 1), (4, 2), (10, 1), (12, 8), (30, 3), (4000, 1), (4000, 20)])
def test_the_largest_share_is_that_of_a_normal_row_in_one_group_of_ten_thousand(n, p):
    rare = float(stats.beta.isf(1e-4 / n, p / 2.0, (n - p - 1) / 2.0))
    assert leverage.max_row_share(n, p) == pytest.approx(max(0.75, rare), rel=1e-12)
    assert leverage.max_row_share(p + 1, p) == leverage.max_row_share(1, p) == 1.0


def few_valued(n, times=1, others=0):
    """A column of zeros and ones with two plain columns, in a group of `n` entities."""
    detail = ColumnCardinality(1, (DiscreteColumn(2, 1, True),))
    return facts.GroupSums(np.zeros(n, dtype=np.int64), times=times, detail=detail, other_columns={0: others})


def least_of(times, beside):
    """Smallest n whose values have more bits than released sums: counts, products with plain columns."""
    n = 1
    while times * (np.log2(n + 1) + 53.0 * (1 + beside)) >= n:
        n += 1
    return n


@pytest.mark.parametrize(("times", "beside"), [(1, 0), (2, 0), (1, 1), (3, 2)])
def test_sums_of_a_column_of_two_values_need_more_entities_than_they_reveal_bits(times, beside):
    least = least_of(times, beside)
    for n in (1, least - 1, least):
        error = refusal_of(site_of(discrete="bits", min_count=1), few_valued(n, times, beside))
        dithered = refusal_of(site_of(discrete="bits", min_count=1, rounding="dither"), few_valued(n))
        assert error is None or 'rounding = "dither"' in str(error)
        assert dithered is None or "dither" not in str(dithered)
        assert (error is None) == (n >= least)
        assert error is None or f"{least:,} entities" in str(error)
        assert rule_against(site_of(min_count=1), few_valued(n, times, beside)) == ""


# ---- means and weights of rows at coefficients --------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows of a design of a constant and a column, with the vector over the rows that each point has."""

    known: dict
    first: int = 0
    step: int = 1

    @property
    def columns(self):
        n = len(next(iter(self.known.values())))
        return np.column_stack([np.ones(n), np.linspace(-1.0, 1.0, n)])[self.first :: self.step]

    def vectors(self, points):
        return np.column_stack([self.known[point][self.first :: self.step] for point in points])

    def times(self, points, wide):
        return np.column_stack([self.columns, self.vectors(points)]) @ wide

    def every(self, first, step):
        return Rows(self.known, first, step)


def mean_sums(known, point, rows="design"):
    size = len(known[point])
    return facts.ScoreAndInformation(rows, size, point, lambda: [Rows(known)])


def means(n, size):
    """Means at two points that differ at `n` rows alone, and at a third."""
    smooth = 1.0 / (1.0 + np.exp(-(np.linspace(-2.0, 1.0, size) ** 3)))
    return {"first": smooth, "second": smooth + weights(n, size=size), "third": smooth**2}


@pytest.mark.parametrize("size", [N_ROWS, 6000])
@pytest.mark.parametrize(("n", "passes"), [(0, True), (1, False), (2, False), (3, True)])
def test_means_at_two_points_differ_at_no_rows_or_at_enough(size, n, passes):
    site = site_of(**STRICT_SHARE)
    known = means(n, size)
    assert rule_against(site, mean_sums(known, "first")) == ""
    assert rule_against(site, mean_sums(known, "second")) == ("" if passes else "largest share")
    # A refused point is not answered, and the next one is held against the first alone.
    assert rule_against(site, mean_sums(known, "third")) == ""


@pytest.mark.parametrize("size", [N_ROWS, 6000])
@pytest.mark.parametrize(("n", "passes"), [(1, False), (2, False), (3, True)])
def test_weights_at_one_point_are_those_of_enough_rows(size, n, passes):
    """Very large sizes: what counts is the share of a direction, and not its unit."""
    for scale in (1e-3, 1.0, 1e6):
        known = {"only": scale * weights(n, size=size)}
        found = rule_against(site_of(**STRICT_SHARE), mean_sums(known, "only"))
        assert found == ("" if passes else "largest share")


@pytest.mark.parametrize(
    ("policy", "passes"),
    [
        ({"max_share": 1.0}, True),
        ({"max_share": 0.999}, False),
        ({"max_share": 0.2, "min_level_count": 1}, True),
        ({"max_share": 0.2, "min_level_count": 2}, False),
    ],
)
def test_means_of_one_row_leave_where_the_owner_allows_it(policy, passes):
    site, known = site_of(**policy), means(1, N_ROWS)
    assert rule_against(site, mean_sums(known, "first")) == ""
    assert (rule_against(site, mean_sums(known, "second")) == "") == passes


@pytest.mark.parametrize(("size", "rule"), [(1, ""), (2, ""), (3, "largest share"), (4, "largest share")])
def test_means_of_very_few_rows_are_those_of_another_rule(size, rule):
    """With a constant and a column each of three rows is a direction of its own."""
    assert (
        rule_against(site_of(**STRICT_SHARE), mean_sums({"only": np.arange(float(size)) ** 2}, "only"))
        == rule
    )


def test_a_point_that_was_answered_is_not_looked_at_again():
    def fails():
        raise AssertionError

    site, known = site_of(**STRICT_SHARE), means(1, N_ROWS)
    rule_against(site, mean_sums(known, "first"))
    again = facts.ScoreAndInformation("design", N_ROWS, "first", fails)
    assert rule_against(site, again) == ""
    assert isinstance(refusal_of(site, replace(again, point="second")).__cause__, AssertionError)


def test_means_of_other_rows_are_not_held_against_these():
    """A design that was opened again has rows of its own, by which answers belong together."""
    site, known = site_of(**STRICT_SHARE), means(1, N_ROWS)
    rule_against(site, mean_sums(known, "first"))
    assert rule_against(site, mean_sums(known, "second", "another design")) == ""
    assert rule_against(site, mean_sums(known, "first", "another design")) == "largest share"


def test_a_vector_of_zeros_is_no_direction():
    known = {
        "none": np.zeros(N_ROWS),
        "first": means(1, N_ROWS)["first"],
        "second": means(1, N_ROWS)["second"],
    }
    site = site_of(**STRICT_SHARE)
    assert rule_against(site, mean_sums(known, "none")) == ""
    assert rule_against(site, mean_sums(known, "first")) == ""
    assert rule_against(site, mean_sums(known, "second")) == "largest share"


def test_a_row_outside_all_samples_is_seen():
    """Three samples have every fifth of 6,000 rows: row 3 is in none, and holds the vector nearly alone."""
    known = {"only": 1e-8 * means(0, 6000)["first"]}
    known["only"][3] = 1.0
    assert rule_against(site_of(**STRICT_SHARE), mean_sums(known, "only")) == "largest share"
    known = {"only": 1e-3 * means(0, 6000)["first"]}
    known["only"][3] = 1.0
    assert rule_against(site_of(**STRICT_SHARE), mean_sums(known, "only")) == ""


@pytest.mark.parametrize(("off", "rule"), [(0.0, ""), (1.0, "largest share")])
def test_a_vector_that_is_a_column_in_all_samples_is_looked_at_in_all_rows(off, rule):
    known = {"only": np.ones(6000)}
    known["only"][3] += off
    assert rule_against(site_of(**STRICT_SHARE), mean_sums(known, "only")) == rule


def test_a_pair_of_rows_is_found_next_to_a_row_of_higher_leverage():
    rng = np.random.default_rng(2)
    x, far = rng.normal(size=(2, 200))
    other = x.copy()
    other[[17, 40]] += 1.0
    far[60] = 45.0
    X = np.column_stack([x, other, far])
    X = (X - X.mean(axis=0)) / X.std(axis=0)

    def design(X):
        return facts.DesignDirections(lambda: [X], len(X), ["x", "other", "far"])

    assert rule_against(site_of(), design(X)) == "minimum rows per level"
    assert rule_against(site_of(min_level_count=2), design(X)) == ""
    assert rule_against(site_of(), design(X[:, [0, 2]])) == ""


# ---- what is remembered of estimates, groups and levels -----------------------------------------------


@pytest.mark.parametrize(("remember", "rule"), [("rows", ""), ("all", "differencing")])
def test_estimates_of_another_session_count_where_the_owner_says_so(remember, rule):
    site, (first, second) = site_of(remember=remember), estimated(1)
    assert rule_against(site, first, session="one") == ""
    assert rule_against(site, second, session="two") == rule
    assert rule_against(site, second, session="one") == "differencing"
    assert rule_against(site, first, session="three") == ""


@pytest.mark.parametrize(("share", "passes"), [(0.7, True), (0.8, False)])
def test_one_row_has_three_quarters_of_the_weights_of_estimates_at_most(share, passes):
    """Shares of the sum of squared weights, of 4,000 rows."""
    table = pd.DataFrame({"x": np.zeros(4000)})
    each = np.sqrt((1.0 - share) / share / 3999.0)
    fact = facts.WeightedEstimates(weights(1, each, 4000)[:, None], np.arange(4000))
    assert rule_against(site_of(table, **STRICT_SHARE), fact) == ("" if passes else "differencing")
    assert rule_against(site_of(table), fact) == ""


@pytest.mark.parametrize("size", [2, 4, 5])
def test_a_small_group_of_a_session_is_refused(size):
    one = facts.RowGroups("folds", np.repeat([0, 1], [N_ROWS - size, size]), np.arange(N_ROWS))
    assert rule_against(site_of(), one) == ("differencing" if size < 5 else "")


def test_levels_are_compared_where_the_owner_wants_all_releases_compared():
    one = COUNTS["rows of a level between two answers"]
    assert rule_against(site_of(tables(), remember="rows"), *listed(one.facts(1))) == ""
    assert rule_against(site_of(tables(), remember="nothing"), *listed(one.facts(1))) == ""
    # Before the first sums there is nothing to be compared with.
    first = facts.LevelsRequested(~rows(0), {"g": ["a", "b"]})
    assert rule_against(site_of(tables(), remember="all"), first) == ""


def test_a_repeated_division_is_free():
    same = facts.RowGroups("folds", np.repeat([0, 1], [59, 5]), np.arange(N_ROWS))
    site = site_of()
    assert rule_against(site, same, same) == ""
    assert rule_against(site, same) == ""


def test_repeated_levels_are_free_also_when_records_are_gone():
    """All rows that are used are still there, in the same places."""
    site, levels = site_of(tables(), remember="all"), {"g": ["a", "b"]}
    used = ~rows(8, 56)
    reported = facts.RowsUsed(used), facts.LevelsRequested(used, levels)
    assert rule_against(site, *reported) == ""
    site.change_records(FrameTable(tables().iloc[:-4]), lambda *_: "")
    assert rule_against(site, facts.LevelsRequested(used[:-4], levels), session="t") == ""


def test_a_history_is_written_when_it_has_changed(monkeypatch):
    site, written = site_of(), []
    monkeypatch.setattr(site.site_ledger, "keep_answered", lambda *history: written.append(history))
    assert rule_against(site, facts.RowsUsed(~rows(0))) == ""
    assert not written  # it has no file
    monkeypatch.setattr(site.site_ledger, "store", SimpleNamespace(append=lambda lines: None))
    for used, count in ((~rows(0), 0), (~rows(9), 1), (~rows(9), 1), (~rows(20), 2)):
        assert rule_against(site, facts.RowsUsed(used)) == ""
        assert len(written) == count
    assert written[-1][1] == N_ROWS and "weight sums" in written[-1][0]


def test_levels_over_a_union_of_groups_are_remembered():
    """The union is no group of its own, since it follows from the two."""
    half, union = rows(32), ~rows(0)
    table = tables().assign(g=np.where(np.arange(N_ROWS) % 2, "a", "b"))
    site = site_of(table, remember="all")
    levels = {"g": ["a", "b"]}
    assert rule_against(site, facts.RowsUsed(half), facts.RowsUsed(~half)) == ""
    assert rule_against(site, facts.RowsUsed(union), facts.LevelsRequested(union, levels)) == ""
    without = union.copy()
    without[[1, *range(0, 22, 2)]] = False  # one row of the one level, and eleven of the other
    assert rule_against(site, facts.RowsUsed(without)) == ""
    assert rule_against(site, facts.LevelsRequested(without, levels)) == "differencing"


# ---- consents, levels of rows that are gone -----------------------------------------------------------


def test_a_consent_to_an_alignment_serves_once():
    site, fact = site_of(alignment="ask"), facts.KeyAlignmentRequest(("A", "B"))
    assert rule_against(site, fact) == "alignment"
    site.trust.consents["A"] = "monday"
    error = refusal_of(site, fact)
    assert error.rule == "alignment" and " B" in str(error) and " A," not in str(error)
    site.trust.consents["B"] = "monday"
    assert rule_against(site, fact) == ""
    assert rule_against(site, fact) == "alignment"
    site.trust.consents |= {"A": "tuesday"}
    assert rule_against(site, fact) == "alignment"
    assert rule_against(site, facts.KeyAlignmentRequest(("A",))) == ""
    assert rule_against(site_of(), fact) == ""


@pytest.mark.parametrize(
    ("gone", "less", "rule"), [(0, 12, ""), (10, 12, ""), (3, 4, ""), (2, 4, "differencing")]
)
def test_levels_of_rows_that_are_gone_are_remembered(gone, less, rule):
    site = site_of(tables(), remember="all")
    before = facts.LevelsRequested(~rows(0), {"g": ["a", "b"]})
    assert rule_against(site, facts.RowsUsed(~rows(0)), before) == ""
    if gone:
        site.change_records(FrameTable(tables().iloc[:-gone]), lambda *_: "")
    size = N_ROWS - gone
    fewer = ~rows(less)[:size]
    found = rule_against(
        site, facts.RowsUsed(fewer), facts.LevelsRequested(fewer, {"g": ["a", "b"]}), session="t"
    )
    assert found == rule


# ---- limits of a site: columns, numbers of rows, refusals, sessions, masked sums ----------------------


@pytest.mark.parametrize(("n", "passes"), [(0, True), (1, True), (3, True), (4, False)])
def test_a_model_has_no_more_columns_than_allowed(n, passes):
    request(site_of(), "open", columns=n)
    site = site_of(max_columns=3)
    if passes:
        request(site, "open", columns=n)
    else:
        with pytest.raises(PolicyError, match=r"Kiel: its policy \(maximum columns\) allows 3 .* opens 4"):
            request(site, "open", columns=n)


@pytest.mark.parametrize(("n", "passes"), [(0, False), (1, False), (4, False), (5, True)])
def test_a_sum_rests_on_the_minimum_of_entities(n, passes):
    if passes:
        request(site_of(), "sum", n=n)
    else:
        with pytest.raises(PolicyError, match=rf"\(minimum count\) requires at least 5 .*there are {n}\."):
            request(site_of(), "sum", n=n)


@pytest.mark.parametrize(
    ("released", "passes"),
    [((3,), True), ((4,), False), ((1, 1, 1), True), ((1, 1, 1, 1), False), ((3, 0), True), ((2, 2), False)],
)
def test_numbers_for_each_entity_are_counted_over_all_releases(released, passes):
    site = site_of(per_entity=3)
    *earlier, last = released
    for n in earlier:
        request(site, "rows", n=n, session=f"s{n}")
    if passes:
        request(site, "rows", n=last)
    else:
        before = sum(earlier)
        with pytest.raises(
            PolicyError, match=rf"\(per entity\) releases 3 numbers .* and has released {before}"
        ):
            request(site, "rows", n=last)
        assert site.site_ledger.vectors == before


@pytest.mark.parametrize("n", [0, 1])
def test_no_number_for_each_entity_leaves_where_none_may(n):
    with pytest.raises(PolicyError, match=r"\(per entity\) does not release numbers for each entity"):
        request(site_of(per_entity=0), "rows", n=n)
    request(site_of(per_entity="any"), "rows", n=n)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ({}, ""),
        ({"per_entity": 1}, ""),
        ({"per_entity": 0}, "per entity"),
        ({"refused_kinds": frozenset({"per entity"})}, "refused kinds"),
        ({"refused_kinds": frozenset({"per entity"}), "per_entity": 0}, "refused kinds"),
        ({"refused_kinds": frozenset({"raw columns"})}, ""),
    ],
)
@pytest.mark.parametrize("weighs", ["weights", ""])
def test_weights_come_in_only_where_numbers_for_each_entity_may_leave(policy, rule, weighs):
    rows = ArrayDeclaration("per entity", "numbers", 1, weighs=weighs)
    FAMILIES[FAMILY] = {
        "weigh": Step(lambda data, state, w: {"seen": w[0]}, {"w": rows}, {"seen": CONTROL}),
        "report": STEPS["report"],
    }
    site = site_of(**policy)
    if weighs and rule:
        with pytest.raises(PolicyError) as refusal:
            request(site, "weigh", w=np.ones(N_ROWS))
        assert refusal.value.rule == rule
    else:
        assert request(site, "weigh", w=np.ones(N_ROWS)).arrays["seen"] == 1.0
        if weighs:
            with pytest.raises(PolicyError, match="minimum count"):
                request(site, "weigh", w=weights(4))
        else:
            assert request(site, "weigh", w=weights(4)).arrays["seen"] == 1.0
    assert rule_against(site) == ""


def test_values_per_entity_in_a_request_are_declared_as_weights_or_not():
    undeclared = ArrayDeclaration("per entity", "numbers", 1)
    with pytest.raises(DisclosureError, match="weighs"):
        FAMILIES[FAMILY] = {"weigh": Step(lambda data, state, w: {}, {"w": undeclared}, {"seen": CONTROL})}


def test_an_owner_who_approves_analyses_allows_no_step_without_a_plan():
    error = refusal_of(site_of(approval="owner"), facts.EntityCount(5))
    assert isinstance(error, ConsentError) and "'report'" in str(error)
    assert rule_against(site_of(), facts.EntityCount(5)) == ""


def test_a_site_is_not_copied():
    with pytest.raises(NotAvailableError, match="Kiel"):
        pickle.dumps(site_of())


def test_a_request_to_another_site_is_not_answered():
    request = pack_request(Request("Ulm", FAMILY, "report", {}, "s"))
    with pytest.raises(MessageError, match=r"Kiel: .*'Ulm'"):
        site_of().answer(request)
    with pytest.raises(MessageError, match=r"Kiel: .*'Ulm'"):
        site_of().answer(RequestMessage(request))


def test_an_owner_may_refuse_every_kind():
    assert Policy(refused_kinds=frozenset(RELEASE_KINDS)).refused_kinds == set(RELEASE_KINDS)
    with pytest.raises(PartitionError, match="refused_kinds: expected"):
        Policy(refused_kinds=frozenset({*RELEASE_KINDS, "row"}))


@pytest.mark.parametrize(("limit", "answered"), [(1, 1), (2, 2), (10, 10), (0, 30)])
def test_no_more_answers_after_the_last_refusal_that_is_allowed(limit, answered):
    site = site_of(max_refusals=limit)
    for _ in range(answered):
        assert rule_against(site, facts.EntityCount(4), client="one") == "minimum count"
    after = rule_against(site, facts.EntityCount(5), client="one")
    assert after == ("maximum refusals" if limit else "")
    assert rule_against(site, facts.EntityCount(5), client="another", session="another") == ""


def test_the_last_refusal_but_one_does_not_end_it():
    site = site_of(max_refusals=3, formulas="simple")
    for _ in range(2):
        assert rule_against(site, facts.EntityCount(4), client="one") == "minimum count"
    # A refusal that does not depend on rows is not counted.
    assert rule_against(site, factor("log"), client="one") == "simple formulas"
    assert rule_against(site, facts.EntityCount(5), client="one") == ""


@pytest.mark.parametrize(("n", "kept"), [(31, True), (32, False)])
def test_a_site_keeps_the_latest_sessions(n, kept):
    site = site_of()
    for k in range(n + 1):
        assert rule_against(site, session=f"s{k}") == ""
    error = refusal_of(site, session="s0")
    assert error is None if kept else isinstance(error, SessionError)
    assert rule_against(site, session="s1") == ""


@pytest.mark.parametrize(
    ("n", "policy", "passes"),
    [
        (2, {"two_sites": "refuse"}, False),
        (3, {"two_sites": "refuse"}, True),
        (2, {"quorum": 0}, True),
        (2, {"quorum": 2}, True),
        (2, {"quorum": 3}, False),
        (3, {"quorum": 3}, True),
        (2, {"apart": 1}, True),
        (2, {"apart": 2}, True),
        (2, {"apart": 3}, False),
        (3, {"apart": 3}, True),
    ],
)
def test_a_masked_sum_is_over_enough_sites(n, policy, passes):
    site = masked_sites(n, **policy)["S0"]
    if passes:
        request(site, "sum", masked=0, n=5)
    else:
        with pytest.raises(PolicyError) as refusal:
            request(site, "sum", masked=0, n=5)
        assert refusal.value.rule.replace(" ", "_") in policy


@pytest.mark.parametrize(("masked", "among"), [(0, 3), (None, 1)])
def test_a_ledger_says_over_how_many_sites_a_sum_is(masked, among):
    site = masked_sites(3)["S0"]
    request(site, "sum", masked=masked, n=5)
    (entry,) = [one for chain in site.site_ledger.chains for one in chain.entries if one.array == "total"]
    assert (entry.among, entry.masked) == (among, masked is not None)


@pytest.mark.parametrize(("apart", "noted"), [(1, 0), (2, 1)])
def test_lists_of_sites_are_kept_where_sums_have_to_be_apart(apart, noted):
    site = masked_sites(3, apart=apart)["S0"]
    for number in range(2):
        request(site, "sum", masked=number, n=5)
    assert len(site.site_ledger.records(MaskedSites)) == noted


@pytest.mark.parametrize(
    ("n", "pinned", "share", "passes"),
    [
        (2, 5, 0.6, False),
        (3, 5, 0.6, True),
        (3, 3, 1.0, True),
        (3, 4, 1.0, False),
        (7, 25, 0.28, True),  # 0.28 * 25 is more than 7 in binary
        (6, 25, 0.28, False),
        (7, 26, 0.28, False),
    ],
)
def test_a_quorum_is_a_share_of_the_pinned_sites(n, pinned, share, passes):
    site = masked_sites(n, pinned, quorum=share)["S0"]
    if passes:
        request(site, "sum", masked=0, n=5)
    else:
        with pytest.raises(
            PolicyError, match=rf"\(quorum\) .* of the {pinned} that are pinned in a masked sum"
        ):
            request(site, "sum", masked=0, n=5)


@pytest.mark.parametrize(
    ("drawn", "passes"),
    [
        (("S0", "S1", "S2", "S3"), True),
        (("S0", "S1", "S2"), True),
        (("S1", "S2"), False),
        (("S1",), False),
        ((), False),
        (("S0", "S1", "S2", "S9"), False),
    ],
)
def test_three_sites_or_all_add_to_a_masked_sum(drawn, passes):
    def add(data, state):
        state.report(facts.SampledSites(drawn))
        return STEPS["sum"].run(data, state, n=np.array(5.0))

    FAMILIES[FAMILY] = {"sum": Step(add, {}, STEPS["sum"].gives)}
    site = masked_sites(4)["S0"]
    if passes:
        request(site, "sum", masked=0)
    else:
        with pytest.raises(FedstatError, match="of 4 sites in a masked sum, only"):
            request(site, "sum", masked=0)
    # Without masks there is nothing to protect.
    request(site_of(name="S0"), "sum")


# ---- what the owner may write, and which of two values is stricter ------------------------------------

SMALLEST = {
    "min_count": (0, -1),
    "min_events": (0, -1),
    "min_level_count": (0, -1),
    "max_refusals": (0, -1),
    "per_entity": (0, -1),
    "quorum": (0, -1),
    "apart": (1, 0),
    "max_columns": (1, 0),
    "max_keys": (1, 0),
    "max_share": (1e-9, 0.0),
    "max_parameters": (1e-9, 0.0),
    "max_column_sums": (1e-9, 0.0),
    "min_own_rows": (0, -1),
}
LARGEST = {"max_share": (1.0, 1.0001), "quorum": (1.0, 1.0001)}


@pytest.mark.parametrize(
    ("key", "fits", "wrong"), [(key, *pair) for one in (SMALLEST, LARGEST) for key, pair in one.items()]
)
def test_the_smallest_and_largest_value_of_a_rule(key, fits, wrong):
    assert getattr(Policy(**{key: fits}), key) == fits
    with pytest.raises(PartitionError, match=f"Policy: {key}: expected .*received {wrong}"):
        Policy(**{key: wrong})


def test_a_quorum_of_zero_sites_is_no_share():
    with pytest.raises(PartitionError, match="quorum: expected"):
        Policy(quorum=0.0)


STRICTER = {
    "min_count": (5, 6),
    "min_events": (3, 4),
    "min_level_count": (3, 4),
    "apart": (1, 2),
    "quorum": (2, 3),
    "max_parameters": (0.33, 0.32),
    "max_share": (1.0, 0.2),
    "max_columns": (4, 3),
    "max_refusals": (10, 9),
    "per_entity": (4, 3),
    "max_keys": (9, 8),
}
NO_LIMIT = {"max_columns": None, "max_refusals": 0, "per_entity": "any", "quorum": 0}


def stricter(key, before, after):
    """Rules that are stricter at a site whose owner changes the value of one."""
    site = site_of(**{key: before})
    return site.change_rules(Policy(**{key: after}), site.published)


@pytest.mark.parametrize("key", STRICTER)
def test_one_less_or_one_more_is_stricter_and_the_other_way_is_not(key):
    loose, strict = STRICTER[key]
    assert stricter(key, loose, strict) == (key,)
    # The estimate of the number of keys ends with the session, in either direction.
    assert stricter(key, strict, loose) == ((key,) if key == "max_keys" else ())
    assert stricter(key, strict, strict) == ()
    if key in NO_LIMIT:
        assert stricter(key, NO_LIMIT[key], strict) == (key,) and stricter(key, strict, NO_LIMIT[key]) == ()


@pytest.mark.parametrize(
    ("published", "ends"),
    [
        (PUBLISHED, False),
        (PUBLISHED | {"y": PublishedColumn("number", (0.0, 1.0))}, False),
        (PUBLISHED | {"x": PublishedColumn("number", (0.0, 8.0), knots=(3.0, 6.0))}, True),
        ({name: one for name, one in PUBLISHED.items() if name != "g"}, True),
    ],
    ids=["same", "a further column", "another range", "a column less"],
)
def test_a_changed_description_of_a_column_ends_open_sessions(published, ends):
    site = site_of(published=PUBLISHED)
    assert rule_against(site) == ""
    assert site.change_rules(site.policy, published) == (("columns",) if ends else ())
    assert isinstance(refusal_of(site), SessionError) == ends


LESS, MORE = Budget(1.0, 1e-7), Budget(2.0, 1e-6)
KINDS = frozenset({"raw columns"}), frozenset({"raw columns", "sketch"})
FAMILIES_ALLOWED = frozenset({"glm"}), frozenset({"glm", "vfem"})


@pytest.mark.parametrize(
    ("key", "before", "after", "ends"),
    [
        ("privacy", None, LESS, True),
        ("privacy", LESS, None, True),
        ("privacy", LESS, MORE, False),
        ("privacy", MORE, LESS, True),
        ("privacy", LESS, Budget(2.0, 1e-7), False),
        ("privacy", LESS, Budget(1.0, 1e-6), False),
        ("privacy", LESS, Budget(2.0, 1e-8), True),
        ("privacy", LESS, Budget(0.5, 1e-6), True),
        ("families", None, FAMILIES_ALLOWED[0], True),
        ("families", FAMILIES_ALLOWED[0], None, False),
        ("families", *FAMILIES_ALLOWED, False),
        ("families", *FAMILIES_ALLOWED[::-1], True),
        ("families", FAMILIES_ALLOWED[0], frozenset({"vfem"}), True),
        ("refused_kinds", *KINDS, True),
        ("refused_kinds", *KINDS[::-1], False),
        ("refused_kinds", KINDS[0], frozenset({"sketch"}), True),
        ("masked_only", False, True, True),
        ("masked_only", True, False, False),
        ("quorum", 2, 0.5, True),
        ("quorum", 0.5, 2, True),
        ("quorum", 0.5, 0.4, False),
        ("quorum", 0.4, 0.5, True),
        ("quorum", 0.5, 0, False),
        ("quorum", 0, 0.5, True),
        ("max_column_sums", "any", 0.5, True),
        ("max_column_sums", 0.5, "any", False),
        ("max_column_sums", 0.5, 0.6, False),
        ("max_column_sums", 0.6, 0.5, True),
        ("min_own_rows", 0, 60, True),
        ("min_own_rows", 60, 0, False),
    ],
)
def test_a_stricter_value_ends_open_sessions_and_a_looser_one_does_not(key, before, after, ends):
    site = site_of(**{key: before})
    assert site.change_rules(Policy(**{key: after}), site.published) == ((key,) if ends else ())


def test_values_per_entity_are_unlimited_only_where_their_kind_is_released():
    loose = Policy.strict(per_entity=5)
    assert loose.looser_than_strict() == ("per_entity",)
    kinds = loose.refused_kinds | {"per entity"}
    assert Policy.strict(per_entity=5, refused_kinds=kinds).is_strict


STRICTEST = {
    "min_count": (5, 4),
    "min_events": (3, 2),
    "min_level_count": (3, 2),
    "max_parameters": (0.33, 0.34),
    "max_share": (0.2, 0.21),
    "max_refusals": (10, 11),
    "per_entity": (0, 1),
}


@pytest.mark.parametrize("key", STRICTEST)
def test_a_strict_policy_is_one_up_to_these_values(key):
    strict, loose = STRICTEST[key]
    assert Policy.strict(**{key: strict}).is_strict
    assert Policy.strict(**{key: loose}).looser_than_strict() == (key,)


@pytest.mark.parametrize(("limit", "loose"), [(0, True), (1, False)])
def test_no_limit_of_refusals_is_looser_than_any(limit, loose):
    assert ("max_refusals" in Policy.strict(max_refusals=limit).looser_than_strict()) == loose
