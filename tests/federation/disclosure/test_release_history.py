"""Combinations of released groups of rows, compared with a search over all, and the stored history."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from fedstat.federation.disclosure import weight_spaces
from fedstat.federation.disclosure.release_history import (
    ReleasedGroups,
    ReleaseHistory,
    convert_history,
    independent_groups,
    row_echelon,
)
from fedstat.federation.disclosure.weight_spaces import (
    ESTIMATE,
    Expressions,
    Pattern,
    WeightSpaces,
    find_cleared,
    find_isolated,
)
from fedstat.federation.tables.aligned_table import AlignedTable
from fedstat.federation.tables.table import FrameTable

N = 10
SECRET = b"a key"


def released(*codes):
    found = ReleasedGroups.none(N)
    for code in codes:
        found = found.with_groups(np.asarray(code))
    return found


def smallest_group(codes, below):
    """Find the fewest rows that a combination of the sums isolates, if fewer than `below`, by a search."""
    groups = np.array([np.equal(code, k) for code in codes for k in range(max(code) + 1)], dtype=float)
    rank = np.linalg.matrix_rank(groups)
    for n in range(1, below):
        for rows in combinations(range(N), n):
            if np.linalg.matrix_rank(np.delete(groups, rows, axis=1)) < rank:
                return n
    return 0


def divisions(seed):
    """Up to four divisions of the rows into up to three groups, some rows in none."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-1, rng.integers(1, 4), N) for _ in range(rng.integers(1, 5))]


@pytest.mark.parametrize("below", [2, 3, 4])
def test_isolated_rows_are_those_that_a_search_finds(below):
    """The result is 1 where combinations of few rows overlap: every sum is then refused."""
    exact = []
    for seed in range(25):
        codes = [code for code in divisions(seed) if code.max() >= 0]
        found, true = released(*codes).fewest_isolated(below), smallest_group(codes, below)
        assert found in (true, 1)
        exact.append(found == true)
    assert sum(exact) >= 18


def test_of_two_apart_groups_the_smaller_one_counts():
    every, without_two = np.zeros(N, dtype=int), np.r_[[-1] * 2, [0] * 8]
    without_five = np.r_[[0] * 5, [-1] * 5]
    history = released(every, without_two, without_five)
    assert [history.fewest_isolated(n) for n in (1, 2, 3, 9)] == [0, 0, 2, 2]
    assert released(every, without_five).fewest_isolated(6) == 5
    assert released(every, without_five).fewest_isolated(5) == 0


def cells(*sizes, groups):
    """Sums over groups of cells of these sizes; a group is named by its cells, such as ``ab``."""
    names = "abcdef"[: len(sizes)]
    history = ReleasedGroups.none(sum(sizes))
    for group in groups:
        history = history.with_groups(np.repeat([0 if name in group else -1 for name in names], sizes))
    return history


def test_a_group_of_exactly_the_minimum_is_not_isolated():
    # The first sum less the second is about the five rows of a and b; no sum separates a from b.
    history = cells(2, 3, 7, 8, groups=("abcd", "cd", "ac"))
    assert [history.fewest_isolated(n) for n in (4, 5, 6)] == [0, 0, 5]
    # Each cell has the minimum, and combinations of the two sums overlap.
    assert cells(5, 5, 5, groups=("ab", "bc")).fewest_isolated(5) == 0
    # "abd" less "d" and "bcd" less "d" overlap in b: no search, the answer is 1.
    assert cells(2, 2, 2, 9, groups=("abd", "bcd", "d")).fewest_isolated(5) == 1


def test_no_group_isolates_no_row():
    assert ReleasedGroups.none(N).fewest_isolated(99) == 0
    assert released(np.zeros(N, dtype=int)).fewest_isolated(N) == 0
    assert released(np.zeros(N, dtype=int)).fewest_isolated(N + 1) == N


@pytest.mark.parametrize("seed", range(8))
def test_the_basis_has_the_rank_of_all_groups_and_is_made_of_them(seed):
    codes = divisions(seed)
    groups = np.array([np.equal(code, k) for code in codes for k in range(max(code) + 1)]).reshape(-1, N)
    history = released(*codes)
    rank = np.linalg.matrix_rank(groups.astype(float)) if len(groups) else 0
    assert len(history.basis) == rank == np.linalg.matrix_rank(history.groups.astype(float))
    assert {row.tobytes() for row in history.groups} <= {row.tobytes() for row in groups}
    assert history.sizes.sum() == N and (history.sizes > 0).all()


def test_groups_that_follow_from_others_are_not_added():
    basis = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=bool)
    assert independent_groups(basis, np.ones((1, 4), dtype=bool)) is basis
    more = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]], dtype=bool)
    found = independent_groups(basis, more)
    np.testing.assert_array_equal(found[:2], basis)
    assert len(found) == 3 and found[2].sum() == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_echelon_form_spans_the_same_rows_with_a_unit_column_for_each(seed):
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(4, 2)) @ rng.normal(size=(2, 6))
    found = row_echelon(A)
    assert found.shape == (2, 6) and np.linalg.matrix_rank(np.vstack([A, found])) == 2
    units = [j for j in range(6) if sorted(np.round(np.abs(found[:, j]), 9)) == [0.0, 1.0]]
    assert np.linalg.matrix_rank(found[:, units]) == 2 and np.abs(found).max() < 1.0 + 1e-9
    assert row_echelon(np.zeros((3, 4))).shape == (0, 4)
    assert row_echelon(np.full((1, 1), 2.0)).tolist() == [[1.0]]


def test_rows_that_are_new_or_gone_keep_their_place_in_groups():
    history = released(np.r_[[0] * 6, [1] * 4])
    places = np.r_[np.arange(9, 1, -1), [-1, -1]]  # rows 0 and 1 are gone, and two rows are new
    carried, gone = history.carried(places)
    assert gone.tolist() == [0, 1]
    assert carried.groups.sum(axis=1).tolist() == [6, 4] and not carried.groups[:, 8:10].any()
    # A sum over the remaining rows of the first group isolates the two rows that are gone.
    assert carried.with_groups(np.r_[[-1] * 4, [0] * 4, [-1] * 2]).fewest_isolated(3) == 2
    assert carried.with_groups(np.r_[[0] * 4, [-1] * 6]).fewest_isolated(3) == 0
    same, none = history.carried(np.arange(N))
    np.testing.assert_array_equal(same.basis, history.basis)
    assert not len(none)


# ---- the stored history -------------------------------------------------------------------------------


def stored():
    table = FrameTable(pd.DataFrame({"x": np.arange(float(N))}))
    weights = np.linspace(0.0, 1.0, N)[:, None]
    groups = released(np.r_[[0] * 6, [1] * 4])
    made = Expressions(groups.spaces)
    sums = [made.estimate(column) for column in weights.T]
    history = ReleaseHistory(replace(groups, spaces=made.result().with_sums(sums)))
    return table, history.to_arrays(table, SECRET)


def test_a_history_is_read_as_it_was_written():
    table, arrays = stored()
    found = ReleaseHistory.from_arrays(arrays, table, SECRET)
    again = found.to_arrays(table, SECRET)
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name], array)
    assert ReleaseHistory().to_arrays(table, SECRET) == {}


def test_a_history_without_marks_is_in_the_order_of_the_table():
    table, arrays = stored()
    found = ReleaseHistory.from_arrays({k: v for k, v in arrays.items() if k != "marks"}, table, SECRET)
    np.testing.assert_array_equal(found.released.cells, arrays["cells"])
    assert found.marks is None and not len(found.gone) and found.order == ""
    again = found.to_arrays(table, SECRET)
    np.testing.assert_array_equal(again["marks"], arrays["marks"])


@pytest.mark.parametrize(
    "change",
    [
        {"basis": np.zeros((2, 2), dtype=np.uint8)},
        {"basis": np.zeros((1, 1), dtype=np.uint8)},
        {"c": np.array([2, 9])},
        {"c": np.array([3, 2])},
        {"c": np.array([2, 1])},
        {"cells": np.r_[np.zeros(9, dtype=int), 2]},
        {"cells": np.r_[np.zeros(9, dtype=int), -1]},
        {"weight codes": np.zeros((N - 1, 1), dtype=np.uint8)},
        {"weight codes": np.zeros(N, dtype=np.uint8)},
        {"weight values": np.full(N, np.nan)},
        {"weight sums": np.frombuffer(b"[[[[1],[],1.0]]]", dtype=np.uint8)},
        {"weight sums": np.frombuffer(b"[[[[0],[-2],1.0]]]", dtype=np.uint8)},
        {"marks": np.zeros((N - 1, 16), dtype=np.uint8)},
        {"marks": np.zeros((N, 15), dtype=np.uint8)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_arrays_that_do_not_belong_together_are_no_history(change):
    table, arrays = stored()
    with pytest.raises(ValueError, match="not complete"):
        ReleaseHistory.from_arrays(arrays | change, table, SECRET)


@pytest.mark.parametrize("cells", [np.zeros(N, dtype=int), np.ones(N, dtype=int), np.arange(N) % 2])
def test_any_cell_of_the_basis_may_be_that_of_a_row(cells):
    table, arrays = stored()
    found = ReleaseHistory.from_arrays(arrays | {"cells": cells}, table, SECRET)
    np.testing.assert_array_equal(found.released.cells, cells)


def test_a_history_of_no_rows_is_one():
    empty = ReleasedGroups.none(0)
    assert ReleasedGroups.from_arrays(empty.to_arrays()).cells.shape == (0,)


# ---- rows that come in another order ------------------------------------------------------------------

ALIGNMENTS = "0123456789abcdef", "fedcba9876543210"


def aligned_table(numbers, alignment=ALIGNMENTS[0]):
    table = AlignedTable("Kiel", pd.DataFrame({"id": np.arange(N), "x": np.arange(float(N))}), ["id"])
    table.keep(alignment, np.asarray(numbers))
    return table


def test_a_history_follows_the_rows_into_another_order():
    code = np.r_[[0] * 6, [1] * 4]
    history, backwards = ReleaseHistory(), np.arange(N)[::-1]
    history.follow(aligned_table(np.arange(N)), SECRET)
    assert history.order == ALIGNMENTS[0] and history.released is None
    history.released = released(code)
    known = history.released
    history.follow(aligned_table(np.arange(N)), SECRET)
    assert history.released is known
    history.follow(aligned_table(backwards, ALIGNMENTS[1]), SECRET)
    assert history.order == ALIGNMENTS[1]
    np.testing.assert_array_equal(history.released.groups, released(code[::-1]).groups)
    np.testing.assert_array_equal(
        history.marks, ReleaseHistory(known).to_arrays(aligned_table(backwards), SECRET)["marks"]
    )


def test_a_history_without_marks_takes_the_order_of_the_table():
    """The history was made in this order, with or without a release."""
    for first in (None, released(np.r_[[0] * 6, [1] * 4])):
        history = ReleaseHistory(first)
        history.follow(aligned_table(np.arange(N)), SECRET)
        assert history.released is first and history.order == ALIGNMENTS[0] and history.marks is not None


def test_rows_of_a_table_without_an_alignment_are_not_marked_before_they_are_stored():
    table, _ = stored()
    history = ReleaseHistory(released(np.r_[[0] * 6, [1] * 4]))
    history.follow(table, SECRET)
    assert history.marks is None


# ---- patterns, and sums that are cleared at once -----------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        [1.0, 2.0, 3.0, -4.0, 0.0, 50.0],
        [51.0, 0.0, 51.0],
        [0.5, -0.0, 0.0],
        [-0.0, 1.0],
        [0.0, 0.0],
        [1e9, -3.0],
    ],
)
def test_a_pattern_is_its_column_and_equal_columns_have_one_digest(x):
    column = np.array(x)
    found = Pattern.of(column)
    np.testing.assert_array_equal(found.column, column)
    assert (np.diff(found.values) > 0.0).all()
    assert Pattern.of(column + 0.0).digest == found.digest != Pattern.of(column + 1.0).digest
    inside = column != 0.0
    assert Pattern.of_rows(inside).digest == Pattern.of(inside * 1.0).digest


def random_counts(seed, n):
    """Counts by products of indicators, and by one that equals another in all but one to four rows."""
    rng = np.random.default_rng(seed)
    one = (rng.random((n, 4)) < rng.uniform(0.3, 0.7, 4)) * 1.0
    near = one[:, 0].copy()
    near[rng.choice(np.flatnonzero(near), rng.integers(1, 5), replace=False)] = 0.0
    return np.column_stack(
        [np.ones(n), one, near, one[:, :1] * one[:, 1:2], rng.integers(0, 9, (n, 2)) * 1.0]
    )


def single_out_up_to_two(weights):
    """Search all groups of up to two rows for one that has all of a combination of columns."""
    U, s, _ = np.linalg.svd(weights, full_matrices=False)
    U = U[:, s > 1e-9 * s[0]]
    H = U @ U.T
    own = np.diag(H)
    pairs = (own[:, None] + own) / 2.0 + np.sqrt((own[:, None] - own) ** 2 / 4.0 + H**2)
    return bool(max(own.max(), (pairs - 9.0 * np.eye(len(H))).max()) > 1.0 - 1e-7)


@pytest.mark.parametrize(("n", "sample"), [(120, 1024), (240, 1), (400, 8)])
def test_counts_that_are_cleared_at_once_single_out_nobody(n, sample, monkeypatch):
    """With smaller samples, cells are divided into samples."""
    monkeypatch.setattr(weight_spaces, "SAMPLE_CELLS", sample)
    outcomes = set()
    for seed in range(80):
        weights = random_counts(seed, n)
        spaces, isolated = WeightSpaces.of_weights(weights), single_out_up_to_two(weights)
        cleared = () in find_cleared(spaces, 0, 2)
        assert not (cleared and isolated)
        outcomes.add((cleared, isolated))
        assert bool(find_isolated(spaces, 0, 2)) is isolated
    assert outcomes >= {(True, False), (False, True)}


def test_a_history_of_the_second_format_keeps_its_sums():
    weights = random_counts(3, 40)
    spaces = WeightSpaces.of_weights(weights)
    cells, place = np.unique(weights, axis=0, return_inverse=True)
    now = spaces.to_arrays()
    earlier = {"weight cells": place.ravel(), "weight patterns": cells, "weight atoms": now["weight atoms"]}
    earlier["weight sums"] = now["weight sums"]
    table = FrameTable(pd.DataFrame({"x": np.zeros(len(weights))}))
    stamp = {"format": np.frombuffer(b'{"format": 2, "written_by": "1"}', dtype=np.uint8)}
    arrays, is_converted = convert_history(earlier | stamp, table)
    found = WeightSpaces.from_arrays(arrays, len(weights))
    assert is_converted and [one.digest for one in found.patterns] == [one.digest for one in spaces.patterns]
    assert found.sums == spaces.sums


def test_a_history_of_the_third_format_counts_its_levels():
    """Digests of levels by which rows were summed, and weights of estimates; a row is gone since."""
    levels = np.array([[5, 5, 5, 9, 9, 9, 0, 9], [7, 7, 7, 7, 0, 0, 0, 0]], dtype=np.uint32).T
    arrays = {"levels": levels, "level names": np.frombuffer(b'["g", "g"]', dtype=np.uint8)}
    arrays["weights"] = np.linspace(0.0, 1.0, 16).reshape(8, 2)
    arrays["format"] = np.frombuffer(b'{"format": 3, "written_by": "1"}', dtype=np.uint8)
    found, is_converted = convert_history(arrays, FrameTable(pd.DataFrame({"x": np.zeros(7)})))
    spaces = WeightSpaces.from_arrays(found, len(levels))
    np.testing.assert_array_equal(spaces.weights_of(ESTIMATE), arrays["weights"])
    counts = [spaces.patterns[p].column for ((p,), a) in (next(iter(one)) for one in spaces.sums) if not a]
    assert is_converted and [one.tolist() for one in counts] == [
        (levels[:, 0] == 5).tolist(),
        (levels[:, 0] == 9).tolist(),
        (levels[:, 1] == 7).tolist(),
    ]
