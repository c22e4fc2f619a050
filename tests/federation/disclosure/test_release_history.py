"""Combinations of released groups of rows, compared with a search over all, and the stored history."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy.sparse.csgraph import connected_components

from fedstat.federation.disclosure import weight_spaces
from fedstat.federation.disclosure.release_history import (
    ReleasedSums,
    ReleaseHistory,
    convert_history,
)
from fedstat.federation.disclosure.weight_spaces import (
    ESTIMATE,
    Expressions,
    Pattern,
    WeightSpaces,
    adds_groups,
    find_cleared,
    find_isolated,
)
from fedstat.federation.tables.aligned_table import AlignedTable
from fedstat.federation.tables.table import FrameTable

N = 10
SECRET = b"a key"


def released_of(n, *codes):
    found = ReleasedSums.none(n)
    for code in codes:
        found = found.with_groups(np.asarray(code))
    return found


def released(*codes):
    return released_of(N, *codes)


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


def fewest(history, below, known=None):
    """The fewest rows that are isolated, if fewer than `below`; else 0."""
    return next((n for n in range(1, below) if history.isolates(n + 1, known)), 0)


@pytest.mark.parametrize("below", [2, 3, 4])
def test_isolated_rows_are_those_that_a_search_finds(below):
    for seed in range(40):
        codes = [code for code in divisions(seed) if code.max() >= 0]
        assert fewest(released(*codes), below) == smallest_group(codes, below)


def test_of_two_apart_groups_the_smaller_one_counts():
    every, without_two = np.zeros(N, dtype=int), np.r_[[-1] * 2, [0] * 8]
    without_five = np.r_[[0] * 5, [-1] * 5]
    history = released(every, without_two, without_five)
    assert [history.isolates(n) for n in (0, 1, 2, 3, 9)] == [False, False, False, True, True]
    assert fewest(released(every, without_five), 6) == 5
    assert not released(every, without_five).isolates(5)


def cells(*sizes, groups):
    """Sums over groups of cells of these sizes; a group is named by its cells, such as ``ab``."""
    names = "abcdef"[: len(sizes)]
    history = ReleasedSums.none(sum(sizes))
    for group in groups:
        history = history.with_groups(np.repeat([0 if name in group else -1 for name in names], sizes))
    return history


def test_a_group_of_exactly_the_minimum_is_not_isolated():
    # The first sum less the second is about the five rows of a and b; no sum separates a from b.
    history = cells(2, 3, 7, 8, groups=("abcd", "cd", "ac"))
    assert [history.isolates(n) for n in (4, 5, 6)] == [False, False, True]
    # Each cell has the minimum, and combinations of the two sums overlap.
    assert not cells(5, 5, 5, groups=("ab", "bc")).isolates(5)
    # "abd" less "d" and "bcd" less "d" overlap in b.
    assert fewest(cells(2, 2, 2, 9, groups=("abd", "bcd", "d")), 5) == 4


def test_no_group_isolates_no_row():
    assert not ReleasedSums.none(N).isolates(99)
    assert not released(np.zeros(N, dtype=int)).isolates(N)
    assert released(np.zeros(N, dtype=int)).isolates(N + 1)


def test_where_a_search_could_not_be_complete_groups_isolate():
    """Each row is in three of many overlapping groups: no combination is of fewer than three of them."""
    rows = np.arange(30)
    threes = [[k, (k + 1) % 30, (k + 7) % 30] for k in rows]
    history = released_of(30, *(np.where(np.isin(rows, three), 0, -1) for three in threes))
    assert history.isolates(4)
    few = released_of(30, *(np.where(np.isin(rows, [k, k + 1, k + 2]), 0, -1) for k in range(0, 30, 3)))
    assert few.isolates(4) and not few.isolates(3)


@pytest.mark.parametrize("seed", range(8))
def test_groups_that_follow_from_others_add_nothing(seed):
    codes = divisions(seed)
    history = ReleasedSums.none(N)
    for k, code in enumerate(codes, 1):
        groups = [np.equal(one, g) for one in codes[:k] for g in range(max(one) + 1)]
        parts = groups, groups[: len(groups) - max(code) - 1]
        ranks = [np.linalg.matrix_rank(np.array(part, dtype=float).reshape(-1, N)) for part in parts]
        after = history.with_groups(code)
        assert adds_groups(after.spaces, len(history.spaces.sums)) is bool(ranks[0] > ranks[1])
        history = after


def test_versions_of_a_person_count_once():
    """Rows 8 and 9 are earlier versions of rows 0 and 1."""
    persons = np.r_[np.arange(8), 0, 1]
    before, now = np.r_[[-1] * 2, [0] * 8], np.r_[[0] * 8, [-1] * 2]
    history = released(before, now)
    assert fewest(history, 9) == 4 and fewest(replace(history, persons=persons), 9) == 2


def test_rows_that_are_new_or_gone_keep_their_place_in_groups():
    history = released(np.r_[[0] * 6, [1] * 4])
    places = np.r_[np.arange(9, 1, -1), [-1, -1]]  # rows 0 and 1 are gone, and two rows are new
    carried, gone = history.carried(places)
    assert gone.tolist() == [0, 1]
    (division,) = carried.spaces.patterns
    np.testing.assert_array_equal(division.column, np.r_[[2] * 4, [1] * 4, 0, 0, 1, 1])
    # A sum over the remaining rows of the first group isolates the two rows that are gone.
    assert fewest(carried.with_groups(np.r_[[-1] * 4, [0] * 4, [-1] * 2]), 3) == 2
    assert not carried.with_groups(np.r_[[0] * 4, [-1] * 6]).isolates(3)
    same, none = history.carried(np.arange(N))
    assert same.spaces.patterns[0].digest == history.spaces.patterns[0].digest
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
    assert found.released.n_rows == N and len(found.released.spaces.sums) == 2
    assert found.marks is None and not len(found.gone) and found.order == ""
    again = found.to_arrays(table, SECRET)
    np.testing.assert_array_equal(again["marks"], arrays["marks"])


@pytest.mark.parametrize(
    "change",
    [
        {"sets": np.r_[np.zeros(9, dtype=int), -1]},
        {"sets": np.zeros((N, 1), dtype=int)},
        {"sets": np.zeros(N - 1, dtype=int)},
        {"weight sums": np.frombuffer(b"[[[[0,0],[-2],1.0]]]", dtype=np.uint8)},
        {"weight sums": np.frombuffer(b"[[[[0],[-2],1.0],[[0],[],1.0]]]", dtype=np.uint8)},
        {"weight codes": np.zeros((N - 1, 1), dtype=np.uint8)},
        {"weight codes": np.zeros(N, dtype=np.uint8)},
        {"weight values": np.full(N, np.nan)},
        {"weight sums": np.frombuffer(b"[[[[2],[],1.0]]]", dtype=np.uint8)},
        {"weight sums": np.frombuffer(b"[[[[0],[-3],1.0]]]", dtype=np.uint8)},
        {"marks": np.zeros((N - 1, 16), dtype=np.uint8)},
        {"marks": np.zeros((N, 15), dtype=np.uint8)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_arrays_that_do_not_belong_together_are_no_history(change):
    table, arrays = stored()
    with pytest.raises(ValueError, match="not complete"):
        ReleaseHistory.from_arrays(arrays | change, table, SECRET)


def no_groups(n):
    """Arrays of groups of cells, as the fifth format and earlier ones have them."""
    return {"cells": np.zeros(n, dtype=int), "basis": np.zeros((0, 1), dtype=np.uint8), "c": np.array([0, 1])}


FORMAT_5 = {"format": np.frombuffer(b'{"format": 5, "written_by": "1"}', dtype=np.uint8)}


def test_a_history_of_the_fifth_format_keeps_its_groups():
    """Groups were sets of cells: (r, c) bits. Groups without a common row become one division."""
    groups = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 0]], dtype=bool)
    cells = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    stored = {"cells": cells, "basis": np.packbits(groups, axis=1), "c": np.array(groups.shape)}
    table = FrameTable(pd.DataFrame({"x": np.arange(float(N))}))
    found = ReleaseHistory.from_arrays(stored | FORMAT_5, table, SECRET)
    assert found.is_converted and found.released.sets.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 0]
    columns = [one.column.tolist() for one in found.released.spaces.patterns]
    assert columns == [[1] * 6 + [2] * 3 + [0], [0] * 3 + [1] * 6 + [0]]
    again = released(np.r_[[0] * 6, [1] * 3, -1], np.r_[[-1] * 3, [0] * 6, -1])
    assert found.released.spaces.sums == again.spaces.sums
    wrong = {"c": np.array([4, 4])}, {"c": np.array([3, 9])}, {"cells": cells + 1}, {"cells": cells - 1}
    for change in wrong:
        with pytest.raises(ValueError, match="not complete"):
            ReleaseHistory.from_arrays(stored | FORMAT_5 | change, table, SECRET)


def test_a_history_of_no_rows_is_one():
    empty = ReleasedSums.none(0)
    assert ReleasedSums.from_arrays(empty.to_arrays()).n_rows == 0


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
    backwards_sums = released(code[::-1]).spaces
    assert history.released.spaces.patterns[0].digest == backwards_sums.patterns[0].digest
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


def test_sums_are_divided_by_the_quantities_that_they_share():
    """Against the connected parts of a graph of quantities."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        chosen = [rng.choice(30, rng.choice([1, 1, 2, 4]), replace=False).tolist() for _ in range(25)]
        sums = [{((), (j,)): 1.0 for j in one} for one in chosen]
        joined = np.zeros((30, 30))
        for one in chosen:
            joined[one[0], one] = 1.0
        label = connected_components(joined, directed=False)[1][[one[0] for one in chosen]]
        parts = [np.flatnonzero(label == one).tolist() for one in dict.fromkeys(label)]
        assert weight_spaces._components(sums, 20) == [part for part in parts if part[-1] >= 20]


@pytest.mark.parametrize("smallest", [1.0, 2e-4, 9e-5, 0.0])
def test_inverses_give_the_shortest_solutions(smallest):
    """Up to a singular value that the shortest solution leaves out."""
    rng = np.random.default_rng(0)
    U, _, V = np.linalg.svd(rng.normal(size=(3, 6, 6)))
    A = U * np.append(np.ones(5), smallest) @ V
    shortest = np.linalg.pinv(A, rcond=weight_spaces.NEAR_A_LINE)
    np.testing.assert_allclose(weight_spaces._short_inverses(A), shortest, atol=1e-9 * np.abs(shortest).max())


def test_a_history_of_the_second_format_keeps_its_sums():
    weights = random_counts(3, 40)
    spaces = WeightSpaces.of_weights(weights)
    cells, place = np.unique(weights, axis=0, return_inverse=True)
    now = spaces.to_arrays()
    earlier = {"weight cells": place.ravel(), "weight patterns": cells, "weight atoms": now["weight atoms"]}
    earlier |= {"weight sums": now["weight sums"]} | no_groups(len(weights))
    table = FrameTable(pd.DataFrame({"x": np.zeros(len(weights))}))
    stamp = {"format": np.frombuffer(b'{"format": 2, "written_by": "1"}', dtype=np.uint8)}
    arrays, is_converted = convert_history(earlier | stamp, table)
    found = WeightSpaces.from_arrays(arrays, len(weights))
    assert is_converted and [one.digest for one in found.patterns] == [one.digest for one in spaces.patterns]
    assert found.sums == spaces.sums


def test_a_history_of_the_third_format_counts_its_levels():
    """Digests of levels by which rows were summed, and weights of estimates; a row is gone since."""
    levels = np.array([[5, 5, 5, 9, 9, 9, 0, 9], [7, 7, 7, 7, 0, 0, 0, 0]], dtype=np.uint32).T
    arrays = {"levels": levels, "level names": np.frombuffer(b'["g", "g"]', dtype=np.uint8)} | no_groups(8)
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
