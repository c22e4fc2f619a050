"""Rows behind products of two columns, and combinations of columns of several requests: both boundaries."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from reporting import FAMILY, N_ROWS, STEPS, refusal_of, rule_against, site_of

from fedstat.federation.disclosure import weight_spaces
from fedstat.federation.disclosure.differencing import product_rows
from fedstat.federation.disclosure.facts import SummedProducts
from fedstat.federation.disclosure.leverage import MAX_ROW_SHARE
from fedstat.federation.disclosure.release_history import ReleasedSums, ReleaseHistory
from fedstat.federation.disclosure.site import FAMILIES, Site

RULE = "rows behind a product"
ROWS = np.arange(N_ROWS)
COUNTED = {"products": "counted", "remember": "all", "max_share": 0.2}


@pytest.fixture(autouse=True)
def _family(monkeypatch):
    monkeypatch.setitem(FAMILIES, FAMILY, STEPS)


def released(*columns, **more):
    """Fact on the products of columns of all rows of the table."""
    X = np.column_stack(columns).astype(float)
    names = [f"x{j}" for j in range(X.shape[1])]
    return SummedProducts(lambda: iter([X[:10], X[10:]]), names, ROWS, **more)


def ones(*rows):
    """An indicator of some rows."""
    return np.isin(ROWS, np.concatenate([np.atleast_1d(part) for part in rows])) * 1.0


def random_columns(n=N_ROWS, q=9, seed=3):
    random = np.random.default_rng(seed)
    X = random.normal(size=(n, q))
    X[:, : q // 2] *= random.random((n, q // 2)) < 0.3
    X[:, 0] = X[:, 0] != 0.0
    X[:, 1] = 0.0
    return X


@pytest.mark.parametrize("n", [N_ROWS, 9000])
def test_counts_and_shares_are_those_of_the_products(n):
    X = random_columns(n)
    X[5, 3:5] = 1e4
    found = product_rows(X.T)
    for i, j in combinations(range(X.shape[1]), 2):
        product = np.abs(X[:, i] * X[:, j])
        assert found.counts[i, j] == found.counts[j, i] == (product > 0.0).sum()
        share = product.max() / product.sum() if product.any() else 0.0
        if share > MAX_ROW_SHARE:
            np.testing.assert_allclose(found.shares[[i, j], [j, i]], share, rtol=1e-12)
        else:
            assert found.shares[i, j] <= MAX_ROW_SHARE
    assert (found.shares > 0.9).sum() >= 3
    assert found.constant.tolist() == [True] + [False] * 8 and found.partly.tolist()[:3] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("n", [0, 1, 2, 3])
@pytest.mark.parametrize("least", [2, 3])
def test_no_row_or_enough_rows_are_behind_a_product(n, least):
    site = site_of(**COUNTED | {"remember": "nothing"}, min_level_count=least)
    first, second = ones(ROWS[:20]), ones(ROWS[20 - n : 40])
    refused = 0 < n < least
    assert rule_against(site, released(first, second)) == (RULE if refused else "")
    # Also where one of them is a column of many values, and in an order of its own.
    assert rule_against(site, released(second * np.sqrt(ROWS), first)) == (RULE if refused else "")
    assert rule_against(site_of(min_level_count=least), released(first, second)) == ""


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_no_row_or_enough_rows_of_a_column_of_many_values_are_without_an_indicator(n):
    site = site_of(**COUNTED | {"remember": "nothing"})
    dose = np.where(ROWS < 20, ROWS + 5.0, 0.0)
    indicator = ones(ROWS[: 20 - n], ROWS[40:])
    assert rule_against(site, released(dose, indicator)) == (RULE if 0 < n < 3 else "")


@pytest.mark.parametrize("n", [0, 1, 2, 3])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 2.0), (-1.0, 1.0), (-7.0, -3.0)])
def test_a_column_of_two_values_counts_the_rows_of_its_larger_one(n, low, high):
    first, second = (low + (high - low) * one for one in (ones(ROWS[:20]), ones(ROWS[20 - n : 40])))
    rule = RULE if 0 < n < 3 else ""
    assert in_turn(released(first, second), remember="nothing") == [rule]
    assert in_turn(released(X, low + (high - low) * ones(ROWS[:n])), remember="nothing") == [rule]
    assert in_turn(released(X, high + (low - high) * ones(ROWS[:n])), remember="nothing") == [rule]


def test_a_refusal_names_the_columns_of_the_product():
    site = site_of(**COUNTED | {"remember": "nothing"})
    for columns, named in (
        ((ones(3, 5), X), ["x0"]),
        ((X, ones(ROWS[:20]), ones(ROWS[18:40])), ["x1", "x2"]),
        ((ones(ROWS[:20]), X * ones(ROWS[:22])), ["x0", "x1"]),
    ):
        text = str(refusal_of(site, released(*columns)))
        assert [name for name in ("x0", "x1", "x2") for _ in range(text.count(f"'{name}'"))] == named


@pytest.mark.parametrize("n", [1, 2, 3])
def test_products_are_counted_in_every_group(n):
    site = site_of(**COUNTED | {"remember": "nothing"})
    code = np.where(20 - n > ROWS, 0, 1)
    fact = released(ones(ROWS[:20]), np.sqrt(1.0 + ROWS), code=code)
    assert rule_against(site, fact) == (RULE if n < 3 else "")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_group_of_three_with_few_rows_is_enough_to_refuse(n):
    code = ROWS % 3
    fact = released(
        ones(ROWS[code == 0], ROWS[code == 1][:n], ROWS[code == 2]), np.sqrt(1.0 + ROWS), code=code
    )
    assert in_turn(fact, remember="nothing") == [RULE if n < 3 else ""]


@pytest.mark.parametrize(("factor", "refused"), [(1.0, False), (20.0, False), (2000.0, True)])
def test_no_row_is_nearly_all_of_a_product(factor, refused):
    site = site_of(**COUNTED | {"remember": "nothing"})
    x, z = 1.0 + np.sqrt(ROWS), 1.0 + np.cos(ROWS) ** 2
    x[7] *= factor
    assert rule_against(site, released(x, z)) == (RULE if refused else "")
    assert rule_against(site_of(**COUNTED | {"max_share": 1.0, "remember": "nothing"}), released(x, z)) == ""


# ---- columns of several requests -----------------------------------------------------------------------


def in_turn(*facts, **policy):
    """Rules by which a site refuses requests, one after another."""
    site = site_of(**COUNTED | policy)
    return [rule_against(site, fact, session=str(k)) for k, fact in enumerate(facts)]


X = np.sqrt(1.0 + ROWS)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_columns_of_two_requests_differ_in_enough_rows(n):
    first, second = ones(ROWS[:30]), ones(ROWS[: 30 - n])
    refused = RULE if 0 < n < 3 else ""
    assert in_turn(released(X, first), released(X, second)) == ["", refused]
    assert in_turn(released(X, first), released(X, 1.0 - second)) == ["", refused]
    assert in_turn(released(X, first), released(X, 5.0 - 2.0 * second)) == ["", refused]
    assert in_turn(released(X, first), released(X, second), remember="rows") == ["", ""]
    # Another column over the rows of the second, and then over those of the first.
    joined = released(X, np.cos(ROWS) * second)
    same = released(X, np.cos(ROWS) * first)
    assert in_turn(released(X, first), joined, same) == ["", "", refused]
    assert in_turn(joined, released(X, first), same) == ["", "", refused]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_columns_without_zeros_of_two_requests_differ_in_enough_rows(n):
    other = X.copy()
    other[:n] += 1.0 + ROWS[:n]
    assert in_turn(released(X), released(other)) == ["", RULE if n < 3 else ""]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_and_differences_of_several_requests_single_out_no_few_rows(n):
    """By inclusion and exclusion, of sets of which no two differ by few rows."""
    a, b, c = ones(ROWS[:40]), ones(ROWS[n:25], ROWS[40:50]), ones(ROWS[25:40], ROWS[12:22], ROWS[50:60])
    facts = [released(X, one) for one in (a, a * b, a * c, a * b * c)]
    assert (a * (1 - b) * (1 - c)).sum() == n
    rules = in_turn(*facts)
    assert rules == ["", "", "", RULE if n < 3 else ""]


@pytest.mark.parametrize("scale", [1e-170, 1.0, 1e170])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_unit_in_which_squares_leave_the_range_of_numbers_changes_nothing(n, scale):
    other = X.copy()
    other[:n] += 1.0 + ROWS[:n]
    rules = in_turn(released(scale * X), released(scale * other), max_share=1.0)
    assert rules == ["", RULE if n < 3 else ""]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_of_weight_zero_are_not_behind_a_product(n):
    weights = np.sqrt(1.0 + ROWS) * ones(ROWS[:n])
    assert in_turn(released(X, weights=weights), remember="nothing") == [RULE if n < 3 else ""]
    # One row has nearly all of the weight: a product with X is its value.
    heavy = np.where(ROWS == 9, 1e6, 1.0)
    assert in_turn(released(X, weights=heavy), remember="nothing") == [RULE]
    assert in_turn(released(X, weights=1.0 + np.sqrt(ROWS))) == [""]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_with_weights_the_rows_that_two_columns_share_are_entered(n):
    """With weights of many values, each pair of columns gives the sum of weights over their common rows."""
    a, b, c = ones(ROWS[:40]), ones(ROWS[20:60]), ones(ROWS[20 : 40 - n])
    more = {"weights": 1.0 + np.sqrt(ROWS)}
    refused = RULE if n < 3 else ""
    assert in_turn(released(a, b, **more), released(X, c)) == ["", ""]
    assert in_turn(released(a, b, **more), released(c, **more)) == ["", refused]
    assert in_turn(released(a, b), released(c)) == ["", refused]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_rows_of_a_product_that_an_indicator_shares_are_entered(n):
    """Sums of the column over these rows are a product, whatever other columns are summed there."""
    z = 2.0 + np.cos(ROWS)
    a, product = ones(ROWS[:40]), z * ones(ROWS[20:60])
    shared = ones(ROWS[20 : 40 - n])
    assert in_turn(released(a, product), released(X, shared)) == ["", ""]
    assert in_turn(released(a, product), released(z, shared)) == ["", RULE if n < 3 else ""]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_by_group_add_up_to_sums_over_all_rows(n):
    first, second = ones(ROWS[10:40]), ones(ROWS[10 : 40 - n])
    code = ROWS % 2
    by_group = released(X, first, code=code)
    assert in_turn(by_group, released(X, second)) == ["", RULE if n < 3 else ""]
    assert in_turn(released(X, second), by_group) == ["", RULE if n < 3 else ""]
    # Rows of no group are in no sum.
    inside = released(X, first, code=np.where(40 - n > ROWS, code, -1))
    assert in_turn(released(X, second), inside) == ["", ""]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_over_some_rows_are_entered_with_zeros_elsewhere(n):
    some = SummedProducts(lambda: iter([X[n:, None]]), ["x0"], ROWS[n:])
    assert in_turn(released(X), some) == ["", RULE if n < 3 else ""]
    assert in_turn(some, released(X)) == ["", RULE if n < 3 else ""]


def test_a_column_of_zeros_adds_nothing_to_the_history():
    assert in_turn(released(X, 0.0 * X), released(X, 0.0 * X)) == ["", ""]


def test_a_column_that_is_constant_in_its_first_rows_only_is_no_indicator():
    n = 3 * N_ROWS
    x = 1.0 + (np.arange(n) % 2)
    x[N_ROWS:] += np.sqrt(np.arange(n - N_ROWS))
    site = site_of(pd.DataFrame({"x": x}), **COUNTED)
    assert rule_against(site, SummedProducts(lambda: iter([x[:, None]]), ["x"], np.arange(n))) == ""


def test_a_request_over_no_rows_has_no_products():
    assert in_turn(SummedProducts(lambda: iter([np.zeros((0, 1))]), ["x0"], ROWS[:0])) == [""]


def test_no_more_columns_of_many_values_are_kept_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr(weight_spaces, "MOST_KEPT", N_ROWS)
    site = site_of(**COUNTED)
    assert rule_against(site, released(X, ones(ROWS[:30]))) == ""
    assert rule_against(site, released(np.cos(ROWS), ones(ROWS[:30]))) == ""
    assert site.data.memory.released.spaces.atoms[0].shape == (N_ROWS,)
    assert len(site.data.memory.released.spaces.atoms) == 1
    for column in (X, np.cos(ROWS)):
        assert refusal_of(site, released(column, ones(ROWS[:28]))).rule == RULE


@pytest.mark.parametrize(("least", "policy"), [(1, {}), (3, {"products": "any"})])
def test_an_owner_who_wants_one_row_has_no_history_of_columns(least, policy):
    site = site_of(**COUNTED | {"min_level_count": least} | policy)
    assert rule_against(site, released(X, ones(3))) == ""
    assert site.data.memory.released is None


def test_a_column_of_three_values_is_a_column_of_three_levels():
    for n in (1, 2, 3):
        x = np.where(n > ROWS, 2.0, ROWS % 2)
        assert in_turn(released(X, x)) == [RULE if n < 3 else ""]


def test_a_refused_request_is_not_remembered_and_a_repeated_one_adds_nothing():
    site = site_of(**COUNTED)
    assert rule_against(site, released(X, ones(ROWS[:30]))) == ""
    known = site.data.memory.released
    assert rule_against(site, released(X, ones(ROWS[:29]))) == RULE
    assert site.data.memory.released is known
    assert rule_against(site, released(X, ones(ROWS[:30]))) == ""
    assert site.data.memory.released is known
    assert rule_against(site, released(3.0 - X, 2.0 * ones(ROWS[:30]))) == ""
    assert site.data.memory.released.spaces.atoms[0].shape == (N_ROWS,)
    assert len(site.data.memory.released.spaces.atoms) == 1


def test_a_linear_function_of_a_column_adds_nothing_although_its_values_are_repeated():
    """Ages of whole years: the ratios of the two columns are few, too, and the other rows few."""
    site, age = site_of(**COUNTED), 30.0 + ROWS * 7 % 24
    assert len(np.unique(age)) > weight_spaces.FEW_VALUES
    first = ones(ROWS[:30])
    assert rule_against(site, released(age, first)) == ""
    n_sums = len(site.data.memory.released.spaces.sums)
    assert rule_against(site, released((age - 41.3) / 7.7, first)) == ""
    spaces = site.data.memory.released.spaces
    assert len(spaces.atoms) == len(spaces.patterns) - 1 == 1
    assert all({a for _, a in one} <= {(), (0,), (0, 0)} for one in spaces.sums[n_sums:])


def test_a_restart_between_two_requests_loses_no_column():
    before = site_of(**COUNTED)
    assert rule_against(before, released(X, ones(ROWS[:30]))) == ""
    kept = before.data.memory.to_arrays(before.data.table, before.data.mark_key)
    assert kept["weight atoms"].dtype == np.float32 and kept["weight atoms"].shape == (N_ROWS, 1)
    for fewer, rule in ((0, ""), (1, RULE), (2, RULE), (3, "")):
        # The records are read in another order.
        site = Site(before.name, before.data.table.frame[::-1], before.policy, trust=before.trust)
        site.remember(ReleaseHistory.from_arrays(kept, site.data.table, site.data.mark_key))
        second = released(X[::-1], ones(ROWS[: 30 - fewer])[::-1])
        assert rule_against(site, second) == rule


def test_the_history_survives_a_file_and_rows_that_come_and_go():
    first = released(X, ones(ROWS[:30]))
    site = site_of(**COUNTED)
    assert rule_against(site, first) == ""
    held = ReleasedSums.from_arrays(site.data.memory.released.to_arrays())
    places = np.concatenate([ROWS[::-1][4:], [-1, -1, -1, -1]])  # four rows are gone, and four are new
    carried, gone = held.carried(places)
    np.testing.assert_array_equal(gone, ROWS[-4:])
    patterns, before = ([one.column for one in kept.spaces.patterns] for kept in (carried, held))
    atoms = [(*pair, np.nan) for pair in zip(carried.spaces.atoms, held.spaces.atoms, strict=True)]
    for now, then, new in [*((*pair, 0.0) for pair in zip(patterns, before, strict=True)), *atoms]:
        np.testing.assert_array_equal(now[:60], then[::-1][4:])
        np.testing.assert_array_equal(now[60:64], new)
        np.testing.assert_array_equal(now[64:], then[-4:])
    arrays = held.to_arrays()
    for name in ("weight atoms", "weight codes"):
        with pytest.raises(ValueError, match="not complete"):
            ReleasedSums.from_arrays(arrays | {name: arrays[name][1:]})
