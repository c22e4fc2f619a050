"""Rows that are left out: no combination of the rows of any analyses belongs to few rows."""

from __future__ import annotations

from copy import deepcopy
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from refusals import refused_for

import fedstat as fs
from fedstat.federation.disclosure import analysis_sets
from fedstat.federation.disclosure.analysis_sets import (
    ClassMinimum,
    enlarge_patterns,
    leave_out_rows,
    usable_rows,
)
from fedstat.federation.disclosure.differencing import check_products, check_row_difference
from fedstat.federation.disclosure.facts import RowsUsed, SummedProducts
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables import table as tables
from fedstat.federation.tables.table import FrameTable

N = 200
SECRET = b"s" * 32
LEAVE_OUT = fs.Policy.strict(small_differences="leave out")


def frame_of(seed=0, n=N):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "id": np.arange(n),
            "x": rng.normal(size=n),
            "g": rng.choice(["p", "q", "r"], n),
            "h": rng.integers(0, 2, n),
        }
    )


def site_of(frame, **rules):
    table = FrameTable(frame.drop(columns="id"))
    table.key_columns = frame[["id"]]
    policy = fs.Policy.strict(**{"small_differences": "leave out", **rules})
    return SiteData("Kiel", table, None, policy, ReleaseHistory())


def analyze(data, complete):
    """Answer an analysis of these complete rows; return the rows that are used."""
    used = leave_out_rows(data, complete)
    if used.any():
        check_row_difference(data, None, RowsUsed(used))
    return used


def without(rows, n=N):
    used = np.ones(n, dtype=bool)
    used[list(rows)] = False
    return used


def classes(data):
    """Sizes of the classes of rows that were in an analysis."""
    sets = data.memory.released.sets
    return np.unique(sets[sets > 0], return_counts=True)[1]


@pytest.mark.parametrize("few", [1, 29, 30, 31])
def test_few_rows_lack_what_many_lack_or_everything(few):
    """Patterns of columns p, q: complete, p alone, q alone, both."""
    patterns = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=bool)
    larger, unused = enlarge_patterns(patterns, np.array([900, few, 31, 50]))
    assert larger[1].tolist() == ([True, True] if few < 31 else [True, False]) and not unused.any()
    assert (larger[[0, 2, 3]] == patterns[[0, 2, 3]]).all()
    larger, unused = enlarge_patterns(patterns[:2], np.array([900, few]))
    assert unused.tolist() == [False, few < 31] and (larger == patterns[:2]).all()


@pytest.mark.parametrize("few", [10, 11])
def test_no_more_than_a_tenth_of_the_rows_is_concerned(few):
    unused = enlarge_patterns(np.array([[False], [True]]), np.array([110 - few, few]))[1]
    assert unused.tolist() == [False, few <= 11 and few * 10 <= 110]
    two = np.array([[False, False], [False, True], [True, False]])
    assert enlarge_patterns(two, np.array([100 - 2 - few, 2, few]))[1].tolist() == [False, True, False]


def published_site(frame):
    """A site whose columns are published, and which leaves rows out."""
    partition = fs.ClientPartition.from_frame(frame.assign(site="A"), by="site", policy=LEAVE_OUT)
    return partition.sites["A"].data


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_rows_are_used_where_a_level_would_have_few(rows):
    """Two rows of level r lack x: without them it has one to three."""
    frame = frame_of().drop(columns="id").assign(g=np.where(np.arange(N) < rows, "r", "p"), h=0.5)
    frame.loc[:1, "x"] = np.nan
    usable = usable_rows(published_site(frame), ["h"])
    assert usable is None if rows < 5 else usable is not None and usable.sum() == N - 2


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_missing_cells_are_read_once_for_all_analyses_of_a_table(monkeypatch):
    """Also of a table that is too large to keep other results, as a file is."""
    calls, find = [], analysis_sets._find_lacking
    monkeypatch.setattr(analysis_sets, "_find_lacking", lambda data: [calls.append(data.name), find(data)][1])
    monkeypatch.setattr(tables, "MOST_NUMBERS_KEPT", 0)
    frame = pd.concat([frame_of(k).assign(site=site) for k, site in enumerate("ABC")], ignore_index=True)
    frame.loc[frame.groupby("site").head(2).index, "x"] = np.nan
    at = fs.ClientPartition.from_frame(frame.drop(columns="id"), by="site", policy=LEAVE_OUT)
    for formula in ("h ~ g", "h ~ x"):
        assert fs.FederatedOLS.from_formula(formula, at).fit().nobs == len(frame) - 6
    assert sorted(calls) == ["A", "B", "C"]


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
@pytest.mark.parametrize("order", [("h ~ g", "h ~ x"), ("y ~ x", "y ~ h")])
def test_all_analyses_are_over_the_same_rows_in_any_order(order):
    frame = pd.concat([frame_of(k).assign(site=site) for k, site in enumerate("ABC")], ignore_index=True)
    frame["y"] = np.random.default_rng(1).normal(size=len(frame))
    frame.loc[[1, 201, 202], "x"] = np.nan
    partition = fs.ClientPartition.from_frame(frame.drop(columns="id"), by="site", policy=LEAVE_OUT)
    found = [fs.FederatedOLS.from_formula(formula, partition).fit() for formula in order]
    assert {one.nobs for one in found} == {len(frame) - 3}
    pooled = smf.ols(order[0], frame[frame["x"].notna()]).fit()
    np.testing.assert_allclose(found[0].params, pooled.params, rtol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_rows_left_out_after_a_correction_have_the_same_levels_of_all_columns(seed):
    """Each combination of the columns that were summed has none or enough rows on both sides."""
    rng = np.random.default_rng(seed)
    frame = frame_of(seed).assign(k=rng.integers(0, 3, N))
    data = site_of(frame)
    analyze(data, without([]))
    columns = np.column_stack([frame["g"] == "p", frame["g"] == "q", frame["h"], frame["k"] == 1]) * 1.0
    fact = SummedProducts(lambda: iter([columns]), ("p", "q", "h", "k"), rows=np.arange(N))
    check_products(data, None, fact)
    changed = frame.copy()
    changed.loc[int(rng.integers(N)), "x"] += 1.0
    table = FrameTable(changed.drop(columns="id"))
    table.key_columns = changed[["id"]]
    used = analyze(data.with_records(table, lambda *_: ""), without([]))
    cells = [frame["g"], frame["h"], frame["k"] == 1]
    left = frame[~used].groupby(cells).size()
    assert 5 <= left.sum() <= 12 and left[left > 0].min() >= 3 and (left > 0).sum() > 1
    rest = frame[used].groupby(cells).size()
    assert rest[rest > 0].min() >= 3


@pytest.mark.parametrize("lacking", [0, 1, 4, 5, 6, 50])
def test_no_two_analyses_differ_in_fewer_rows_than_the_minimum(lacking):
    data = site_of(frame_of())
    every, some = without([]), without(range(lacking))
    assert (analyze(data, every) == every).all()
    used = analyze(data, some)
    assert (used <= some).all()
    apart = int((every & ~used).sum())
    assert apart == 0 if not lacking else apart >= 5
    assert apart - lacking <= 20
    # At the boundary nothing more is left out, unless a level needs it.
    if lacking == 50:
        assert apart == lacking


@pytest.mark.parametrize("first", [1, 4, 5])
def test_rows_that_no_analysis_had_are_left_out_if_they_are_few(first):
    """The first analysis lacks rows; the second one has them."""
    data = site_of(frame_of().assign(g="p", h=0))
    some = without(range(first))
    assert (analyze(data, some) == some).all()
    used = analyze(data, without([]))
    assert used.sum() == (N if first >= 5 else N - first)


def test_the_first_analysis_uses_all_of_its_rows():
    data = site_of(frame_of())
    assert analyze(data, without([3])).sum() == N - 1


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_has_classes_of_enough_rows_and_repeats_itself(seed):
    rng = np.random.default_rng(seed)
    data = site_of(frame_of(seed))
    # Each column lacks one to twelve cells; analyses are of one to three columns.
    lacking = rng.permutation(np.arange(N))[: 6 * 12].reshape(6, 12)
    lacking = [set(rows[: rng.integers(1, 13)]) | set(lacking[0][:1]) for rows in lacking]
    requests = [set(one) for k in (1, 2, 3) for one in combinations(range(6), k)]
    rng.shuffle(requests)
    answered = []
    for columns in requests[:14]:
        complete = without(set().union(*(lacking[j] for j in columns)))
        answered.append((complete, analyze(data, complete)))
        assert classes(data).min() >= 5
        for before, used in answered:
            assert (leave_out_rows(data, before) == used).all()
    # Every combination is constant in each class: no vector of the span is nonzero in fewer rows.
    A = np.array([used for _, used in answered], dtype=float)
    columns, sizes = np.unique(A[:, A.any(axis=0)], axis=1, return_counts=True)
    assert sizes.min() >= 5 and columns.shape[1] <= len(classes(data))


def test_without_the_rule_single_rows_are_refused_and_not_left_out():
    data = site_of(frame_of(), small_differences="refuse")
    analyze(data, without([]))
    with refused_for("differencing"):
        check_row_difference(data, None, RowsUsed(without([3])))
    assert not analysis_sets.leaves_out(data)
    assert analysis_sets.leaves_out(site_with(data, small_differences="leave out"))


def site_with(data, **rules):
    return SiteData("Kiel", data.table, None, fs.Policy.strict(**rules), data.memory)


@pytest.mark.parametrize("row", range(0, N, 20))
def test_levels_have_no_row_or_enough_rows_in_what_is_left_out(row):
    frame = frame_of()
    data = site_of(frame)
    analyze(data, without([]))
    used = analyze(data, without([row]))
    for part in (~used, used):
        for names in (["g"], ["h"], ["g", "h"]):
            assert frame[part].groupby(names).size().min() >= 3


@pytest.mark.parametrize("row", range(0, N, 20))
def test_what_is_left_out_reveals_no_level_of_the_row_that_lacks_a_value(row):
    """Otherwise a difference of two tables would be about rows with the levels of this row alone."""
    frame = frame_of()
    data = site_of(frame)
    analyze(data, without([]))
    left = frame[~analyze(data, without([row]))]
    assert len(np.unique(left["g"])) > 1 and len(np.unique(left["h"])) > 1


def test_other_studies_and_restarts_leave_out_the_same_rows():
    frame = frame_of()
    data = site_of(frame)
    analyze(data, without([]))
    used = analyze(data, without([7]))
    stored = data.memory.to_arrays(data.table, SECRET)
    again = ReleaseHistory.from_arrays(stored, data.table, SECRET)
    restarted = SiteData("Kiel", data.table, None, data.policy, again)
    assert (leave_out_rows(restarted, without([7])) == used).all()
    assert (again.released.sets == data.memory.released.sets).all()


def test_a_new_history_cannot_be_had_to_choose_again():
    """The rows depend on the values alone, so that several sites of a study with one table agree."""
    first, second = site_of(frame_of()), site_of(frame_of())
    for data in (first, second):
        analyze(data, without([]))
    assert (analyze(first, without([9])) == analyze(second, without([9]))).all()


@pytest.mark.parametrize("corrected", [1, 4, 5])
def test_corrected_records_wait_until_enough_have_changed(corrected):
    frame = frame_of().assign(g="p", h=0)
    data = site_of(frame)
    analyze(data, without([]))
    changed = frame.copy()
    changed.loc[: corrected - 1, "x"] += 1.0
    table = FrameTable(changed.drop(columns="id"))
    table.key_columns = changed[["id"]]
    later = data.with_records(table, lambda *_: "")
    used = analyze(later, without([]))
    assert used[:corrected].all() if corrected >= 5 else not used[:corrected].any()
    # Persons in which sums before and after differ.
    assert (~used).sum() >= 5 or corrected >= 5
    assert (leave_out_rows(later, without([])) == used).all()


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_estimates_are_those_of_the_rows_used():
    rng = np.random.default_rng(5)
    frame = pd.DataFrame(
        {"site": np.repeat(list("ABC"), 100), "x": rng.normal(size=300), "z": rng.normal(size=300)}
    )
    frame["y"] = frame["x"] + rng.normal(size=300)
    frame.loc[[5, 105], "z"] = np.nan
    policy = fs.Policy.strict()
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    fs.FederatedOLS.from_formula("y ~ x", partition).fit()
    for name in "AB":  # records are corrected
        site = partition.sites[name]
        changed = site.data.frame.copy()
        changed.loc[7, "x"] += 1.0
        site.change_records(FrameTable(changed), lambda *_: "")
    found = fs.FederatedOLS.from_formula("y ~ x + z", partition).fit()
    assert found.nobs <= 300 - 2 * 5
    used = np.concatenate(
        [
            leave_out_rows(site.data, frame[frame["site"] == name].notna().all(axis=1).to_numpy(), ["z"])
            for name, site in partition.sites.items()
        ]
    )
    pooled = smf.ols("y ~ x + z", frame[used]).fit()
    np.testing.assert_allclose(found.params, pooled.params, rtol=1e-9)
    np.testing.assert_allclose(found.bse, pooled.bse, rtol=1e-9)
    note = next(note for note in found.notes if "Some are complete" in str(note))
    assert "'A', 'B'" in str(note)


@pytest.mark.parametrize("least", [1, 2, 3, 10])
def test_moves_are_the_fewest_after_which_both_parts_have_none_or_enough(least):
    def enough(count):
        return count == 0 or count >= least

    counts = range(3 * least + 2)
    apart, rest = np.array([(a, b) for a in counts for b in counts]).T
    expected = [
        next((t for t in range(b + 1) if enough(a + t) and enough(b - t)), 0)
        for a, b in zip(apart, rest, strict=True)
    ]
    assert analysis_sets._moves(apart, rest, least).tolist() == expected


def choice_of(seed):
    """A choice among 60 rows with three columns of levels, some of them unknown; five rows are lacking."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, [2, 3, 4], (65, 3))
    codes[5:][rng.random((60, 3)) < 0.05] = -1
    part = analysis_sets.Part(np.arange(5, 65), np.arange(5), False)
    history = SimpleNamespace(persons=None)
    return codes[5:], analysis_sets._Choice(history, codes, np.arange(65), part, ClassMinimum(10, 3))


@pytest.mark.parametrize("seed", range(3))
def test_a_score_is_by_how_much_a_row_brings_its_cells_closer_to_enough_rows(seed):
    def moves(choice):
        return analysis_sets._moves(choice.apart, choice.rest, 3).sum()

    _, choice = choice_of(seed)
    for place in (3, 17, 40):
        choice._take(place)
        expected = np.full(60, -np.inf)
        for row in np.flatnonzero(~choice.taken):
            other = deepcopy(choice)
            other._take(row)
            expected[row] = moves(choice) - moves(other)
        scores = choice._scores()
        candidates = np.isfinite(scores)
        assert candidates.any() and not candidates[choice.taken].any()
        np.testing.assert_array_equal(scores[candidates], expected[candidates])
        assert scores.max() == expected.max()


def test_in_every_other_attempt_candidates_have_one_level():
    codes, choice = choice_of(0)
    choice._begin(1)
    candidates = np.isfinite(choice._scores())
    assert 0 < candidates.sum() < 60
    assert any(len(np.unique(column[candidates])) == 1 and column[candidates][0] >= 0 for column in codes.T)


def test_a_row_of_another_level_is_taken_where_all_that_are_left_out_have_one():
    codes, choice = choice_of(0)
    choice.apart[:] = 0  # those that are lacking have no levels
    for place in np.flatnonzero(codes[:, 0] == 0)[:4].tolist():
        choice._take(place)
    before = choice.taken.copy()
    assert choice._mix()
    (added,) = np.flatnonzero(choice.taken & ~before)
    assert codes[added, 0] == 1
