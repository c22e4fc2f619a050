"""The owner's rules: what they refuse, what they let pass, and how they say it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import PolicyError
from fedstat.federation.design.transform_states import ColumnExtremes
from fedstat.federation.disclosure import checks, facts
from fedstat.federation.disclosure import row_checks as disclosure
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables.table import FrameTable


def site(**policy):
    return SiteData("Kiel", FrameTable(pd.DataFrame({"x": np.ones(64)})), 1, Policy(**policy))


def examine(data, fact):
    checks.FACT_CHECKS[type(fact)](data, None, fact)


def refusal(rule, *arguments):
    with pytest.raises(PolicyError) as caught:
        rule(*arguments)
    return str(caught.value)


def test_rows_and_parameters():
    kiel = site(min_count=5, max_parameters=0.5)
    examine(kiel, facts.RowCount(5))
    examine(kiel, facts.RowCount(10, 5))
    assert refusal(examine, kiel, facts.RowCount(4)).startswith(
        "Kiel: its policy (minimum count) requires at least 5 complete rows; there are 4."
    )
    assert refusal(examine, kiel, facts.RowCount(10, 6)).startswith(
        "Kiel: its policy (maximum parameters per row) allows 0.5 coefficients per row; the model has 6"
    )


@pytest.mark.parametrize("counts", [(0, 50), (50, 0), (3, 50), (50, 3)])
def test_no_events_or_enough(counts):
    examine(site(min_events=3), facts.OutcomeCounts(counts, "died"))


@pytest.mark.parametrize(
    ("counts", "few"), [((50, 2), "fewer events"), ((1, 50), "fewer rows without the event")]
)
def test_few_events(counts, few):
    message = refusal(examine, site(min_events=3), facts.OutcomeCounts(counts, "died"))
    assert "(minimum events)" in message and "'died'" in message and few in message


def test_levels_and_indicators():
    kiel = site(min_level_count=3)
    disclosure.check_levels(kiel, "g", [3, 9, 0])
    assert "1 of the 3 levels of column 'g'" in refusal(disclosure.check_levels, kiel, "g", [3, 9, 2])
    assert "looks like an identifier" in refusal(disclosure.check_levels, kiel, "g", [1] * 40)
    examine(kiel, facts.IndicatorCounts(np.array([0, 20, 3, 17, -1]), 20, list("abcde")))
    for ones in (2, 18):
        assert "design column 'c'" in refusal(
            examine, kiel, facts.IndicatorCounts(np.array([0, 20, ones]), 20, list("abc"))
        )


def test_levels_that_few_rows_have_are_not_named():
    kiel = site(min_level_count=3)
    disclosure.check_unknown_levels(kiel, "g", [3, 0])
    assert "levels that the fit does not know in 5 rows" in refusal(
        disclosure.check_unknown_levels, kiel, "g", [3, 2]
    )


def test_weights_count_as_the_rows_that_they_amount_to():
    kiel = site(min_count=5)
    for weights in (np.ones(5), np.arange(1.0, 20.0), np.repeat([1.0, 1e-9], [5, 95])):
        examine(kiel, facts.CaseWeights(weights.sum(), weights @ weights, ["w"]))
    for weights in (np.ones(4), np.repeat([1e9, 1.0], [1, 999]), np.repeat([1.0, 0.0], [4, 96]), np.zeros(9)):
        message = refusal(examine, kiel, facts.CaseWeights(weights.sum(), weights @ weights, ["w"]))
        assert "(minimum count) requires at least 5 effective rows; the weights of 'w'" in message


def rest(x, few=2):
    column = ColumnExtremes(few)
    for part in np.array_split(x, 3):
        column.add(part)
    n, mean, squares = column.moments
    return disclosure.remaining_variation(column.kept - mean, n, squares, few)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_left_without_two_rows_is_that_of_the_best_choice(seed):
    x = np.random.default_rng(seed).standard_cauchy(40)
    every = [
        np.delete(x, pair).var() * 38 for pair in np.array(np.triu_indices(40, 1)).T
    ]  # all pairs, by numpy
    assert rest(x) == pytest.approx(min(every) / (x.var() * 40), rel=1e-9)


def test_a_column_that_two_rows_make_up_is_refused_and_one_of_three_is_not():
    kiel = site(min_level_count=3)
    rng = np.random.default_rng(0)
    spike = np.zeros(50)
    spike[[3, 30]] = 0.7, -0.9
    for column in (
        spike,
        1.0 - spike,
        spike + 1e-4 * rng.normal(size=50),
        np.exp(40.0 * rng.normal(size=50)),
    ):
        assert "fewer make up nearly all variation of 'b'" in refusal(
            disclosure.check_concentration, kiel, rest(column), "'b'"
        )
    spike[31] = 0.8
    for column in (spike, rng.normal(size=50), np.exp(rng.normal(size=50)), rng.standard_t(2, size=50)):
        disclosure.check_concentration(kiel, rest(column), "'b'")
    assert rest(np.ones(50)) == 1.0


def rows(*left_out, n=64):
    used = np.ones(n, dtype=bool)
    used[list(left_out)] = False
    return used


def test_rows_that_differ_by_a_few_are_refused_and_leave_no_trace():
    kiel = site(min_count=5)
    examine(kiel, facts.RowsUsed(rows()))
    for few in ([7], [1, 2, 3, 4]):
        assert "(differencing) refuses rows" in refusal(examine, kiel, facts.RowsUsed(rows(*few)))
        assert len(kiel.memory.released.spaces.sums) == 1
    examine(kiel, facts.RowsUsed(rows()))
    assert len(kiel.memory.released.spaces.sums) == 1
    examine(kiel, facts.RowsUsed(rows(1, 2, 3, 4, 5)))
    assert len(kiel.memory.released.spaces.sums) == 2
    refusal(examine, kiel, facts.RowsUsed(rows(1, 2, 3, 4, 6)))
    refusal(examine, kiel, facts.RowsUsed(rows(1, 2, 3, 4, 5, 6)))


def test_outcomes_of_a_comparison_that_differ_by_a_few_are_refused():
    kiel = site(min_count=5)
    age = np.arange(64.0)
    examine(kiel, facts.RowsUsed(rows(), age > 30))
    assert "refuses outcomes of a comparison" in refusal(examine, kiel, facts.RowsUsed(rows(), age > 31))
    examine(kiel, facts.RowsUsed(rows(), age > 30))
    examine(kiel, facts.RowsUsed(rows(), age > 35))
    examine(kiel, facts.RowsUsed(rows()))
    assert len(kiel.memory.released.spaces.sums) == 3
    fewer = rows(*range(10))
    # The sums of those above 30 and above 32 differ by two rows, whatever other rows either rests on.
    assert "refuses outcomes" in refusal(examine, kiel, facts.RowsUsed(fewer, (age > 32) & fewer))


def test_nothing_is_forgotten_however_much_is_asked():
    kiel = site(min_count=5)
    for block in range(10, 50):
        examine(kiel, facts.RowsUsed(rows(*range(block)) if block % 10 == 0 else rows()))
    refusal(examine, kiel, facts.RowsUsed(rows(*range(11))))
    forgetful = site(min_count=5, remember="nothing")
    examine(forgetful, facts.RowsUsed(rows()))
    examine(forgetful, facts.RowsUsed(rows(1)))
    assert forgetful.memory.released is None


def test_four_sums_of_which_no_two_differ_by_few_may_not_reveal_one_row():
    kiel = site(min_count=5)
    examine(kiel, facts.RowsUsed(rows()))
    examine(kiel, facts.RowsUsed(rows(*range(12))))
    examine(kiel, facts.RowsUsed(rows(*range(11, 22))))
    # all - (without the first twelve) - (without the eleventh to the 21st) + (without either) is row 11
    assert "or from a combination of them" in refusal(examine, kiel, facts.RowsUsed(rows(*range(22))))


# -- directions of the design --------------------------------------------------------------------------


def check(X, names=None, **policy):
    X = np.asarray(X, dtype=float)
    spread = X.std(axis=0)
    X = (X - X.mean(axis=0)) / np.where(spread > 0.0, spread, 1.0)
    names = names or [f"x{j}" for j in range(X.shape[1])]
    examine(site(**policy), facts.DesignDirections(lambda: np.array_split(X, 3), len(X), names))


def factors(cell):
    """Two factors and their product; `rows` rows have the second without the first."""
    a = np.repeat([0.0, 1.0, 1.0, 0.0], [20, 10, 12, cell])
    b = np.repeat([0.0, 0.0, 1.0, 1.0], [20, 10, 12, cell])
    return np.column_stack([a, b, a * b, np.random.default_rng(1).normal(size=len(a))])


@pytest.mark.parametrize("cell", [1, 2])
def test_a_cell_of_few_rows_is_found_though_no_column_is_its_own(cell):
    X = factors(cell)
    assert min(X[:, :3].sum(axis=0)) >= 12
    message = refusal(check, X, ["a", "b", "a:b", "x"])
    assert "Kiel: its policy (minimum rows per level) requires at least 3 rows" in message
    assert "'b', 'a:b' together single out fewer" in message
    check(X, min_level_count=cell)
    check(X, max_parameters=1.0)


@pytest.mark.parametrize("cell", [0, 3])
def test_an_empty_cell_or_one_of_enough_rows_is_fine(cell):
    check(factors(cell))


@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_a_row_between_two_columns_is_found(size):
    rng = np.random.default_rng(2)
    x = rng.normal(size=200)
    other = x.copy()
    other[17] += size
    message = refusal(check, np.column_stack([x, other, rng.normal(size=200)]))
    assert "'x0', 'x1' together single out fewer" in message


@pytest.mark.parametrize("seed", range(8))
def test_designs_of_small_sites_are_no_false_alarm(seed):
    """Thirty rows, nine columns: the policy's own limit, with skewed and two-valued columns."""
    rng = np.random.default_rng(seed)
    normal, skewed = rng.normal(size=(30, 5)), np.exp(rng.normal(size=(30, 2)))
    flags = rng.permuted(np.repeat([[0.0, 1.0]], [20, 10], axis=1), axis=1).T
    check(np.column_stack([normal, skewed, flags, rng.permutation(flags)]))


def test_columns_that_are_constant_or_collinear_at_a_site_are_fine():
    rng = np.random.default_rng(3)
    x = rng.normal(size=40)
    check(np.column_stack([x, 2.0 * x + 1.0, np.full(40, 0.1), x + rng.normal(size=40)]))


def test_larger_groups_are_found_where_the_owner_wants_more_rows():
    X = factors(4)
    check(X, min_level_count=4)
    with pytest.raises(PolicyError, match="at least 6 rows behind every combination"):
        check(X, min_level_count=6)
