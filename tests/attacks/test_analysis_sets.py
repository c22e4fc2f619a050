"""Rows that are left out: no combination of the rows of any analyses belongs to few rows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from refusals import refused_for

import fedstat as fs
from fedstat.federation.disclosure import analysis_sets
from fedstat.federation.disclosure.analysis_sets import leave_out_rows
from fedstat.federation.disclosure.differencing import check_row_difference
from fedstat.federation.disclosure.facts import RowsUsed
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables.table import FrameTable

N = 200
SECRET = b"s" * 32


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
    policy = fs.Policy.strict(small_differences="leave out")
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    fs.FederatedOLS.from_formula("y ~ x", partition).fit()
    found = fs.FederatedOLS.from_formula("y ~ x + z", partition).fit()
    assert found.nobs == 300 - 2 * 5
    used = np.concatenate(
        [
            leave_out_rows(site.data, frame[frame["site"] == name].notna().all(axis=1).to_numpy())
            for name, site in partition.sites.items()
        ]
    )
    pooled = smf.ols("y ~ x + z", frame[used]).fit()
    np.testing.assert_allclose(found.params, pooled.params, rtol=1e-9)
    np.testing.assert_allclose(found.bse, pooled.bse, rtol=1e-9)
    note = next(note for note in found.notes if "Some are complete" in str(note))
    assert "'A', 'B'" in str(note)
