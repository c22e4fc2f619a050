"""Equations and unknowns: which releases count, how often, and how they are printed."""

import math

import numpy as np
import pytest
from signed_study import SITES, STEPS, Study

from fedstat.errors import DisclosureWarning
from fedstat.federation.audit.release_counts import (
    NO_EQUATIONS,
    VERDICT_ENOUGH_BITS,
    VERDICT_FEW_BITS,
    VERDICT_SOLVABLE,
    Exposure,
    SiteReleaseCounts,
    compare_site_counts,
    distinct_numbers,
    exposure_warning,
)
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.message import ArrayDeclaration, Step


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", STEPS)


def line(run, unknowns, earlier=0):
    return Exposure("A", "coordinator", run, earlier, unknowns)


@pytest.mark.parametrize(
    ("array", "numbers"),
    [
        (np.zeros((3, 3)), 6),
        (np.arange(9.0).reshape(3, 3), 9),
        (np.zeros((4, 3, 3)), 24),
        (np.zeros((4, 3)), 12),
        (np.float64(1.0), 1),
        (np.empty((0, 0)), 0),
        (np.empty((0, 2, 2)), 0),
        (np.eye(3, dtype=bool), 9),
        (np.ones((1, 1)), 1),
    ],
)
def test_a_symmetric_matrix_counts_by_its_distinct_numbers(array, numbers):
    assert distinct_numbers(np.asarray(array)) == numbers


def test_rounding_does_not_make_a_matrix_asymmetric():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(50, 4))
    gram = x.T @ x
    gram[0, 1] *= 1 + 1e-14
    assert distinct_numbers(gram) == 10
    gram[0, 1] *= 1 + 1e-6
    assert distinct_numbers(gram) == 16


@pytest.mark.parametrize(
    ("run", "earlier", "verdict"),
    [
        (0, 0, NO_EQUATIONS),
        (1, 0, VERDICT_FEW_BITS),
        (2, 0, VERDICT_ENOUGH_BITS),
        (99, 0, VERDICT_ENOUGH_BITS),
        (100, 0, VERDICT_SOLVABLE),
        (60, 40, VERDICT_SOLVABLE),
    ],
)
def test_verdicts_change_at_a_bit_and_at_a_number_for_each_value(run, earlier, verdict):
    assert line(run, 100, earlier).verdict == verdict


def test_numbers_about_nothing_are_not_divided():
    assert line(0, 0).ratio == 0.0 and line(1, 0).ratio == math.inf and line(1, 0).verdict == VERDICT_SOLVABLE


def test_the_alarm_names_three_and_counts_the_rest():
    assert exposure_warning([line(99, 100)]) == exposure_warning([line(0, 0)]) == ""
    text = exposure_warning([line(1200, 100)] * 5)
    assert (
        "1,200 about 100 values of A to coordinator" in text and text.count("about") == 3 and "2 more" in text
    )


def test_the_alarm_counts_this_session_only():
    assert exposure_warning([line(60, 100, 9_000)]) == ""
    assert "100 about 100 values" in exposure_warning([line(100, 100, 9_000)])


def test_counts_by_hand():
    """Two sites that mask a sum, share a product, and send some numbers of their own."""
    a = SiteReleaseCounts("A", {1: 10, 2: 4}, 7, {1: 5}, 1, columns=2, entities=20)
    b = SiteReleaseCounts("B", {1: 30, 2: 4}, 0, {2: 3}, 0, columns=1, entities=30)
    lines = {(one.about, one.receiver): one for one in compare_site_counts([a, b], None)}
    assert lines["A", "coordinator"] == Exposure("A", "coordinator", 10, 5, 40)
    assert lines["B", "coordinator"] == Exposure("B", "coordinator", 30, 0, 30)
    joint = lines["all together, with sums over several", "coordinator"]
    assert (joint.run, joint.earlier, joint.unknowns) == (10 + 30 + 4, 5 + 2, 70)
    assert lines["the others", "A"] == Exposure("the others", "A", 7, 1, 30)
    inside = compare_site_counts([a, b], "B")
    assert [(one.about, one.receiver) for one in inside] == [
        ("A", "B (coordinator)"),
        ("all together, with sums over several", "B (coordinator)"),
        ("the others", "A"),
    ]
    # The coordinator's own site knows its part of the sums.
    assert (inside[1].run, inside[1].unknowns) == (10 + 4, 40)
    assert SiteReleaseCounts("A", {}, 0, {}, 0, columns=0, entities=9).unknowns == 9


def test_counts_of_a_run():
    study = Study()
    released = study.run(hidden=True).released.set_index(["about", "in the hands of"])
    # Products (3 x 3, symmetric) and a flag leave each site; two masked sums are about the three together.
    assert released.loc[("A", "coordinator"), ["this session", "unknowns"]].tolist() == [7, 20]
    joint = released.loc[("all together, with sums over several", "coordinator")]
    assert joint[["this session", "other sessions", "unknowns"]].tolist() == [3 * 7 + 2, 0, 60]
    assert released.loc[("the others", "A"), ["this session", "unknowns"]].tolist() == [2, 40]


def test_what_is_released_again_is_no_new_equation_and_other_runs_count():
    study = Study()
    first = study.run("s").released.set_index(["about", "in the hands of"])
    again = study.run("t").released.set_index(["about", "in the hands of"])
    where = ("A", "coordinator")
    assert first.loc[where, ["this session", "other sessions"]].tolist() == [2 + 6 + 1, 0]
    assert again.loc[where, ["this session", "other sessions", "unknowns"]].tolist() == [0, 9, 20]


def test_a_sum_that_is_masked_is_about_all_together(monkeypatch):
    clear, hidden = Study().run().released, Study().run(hidden=True).released
    own = [table.set_index("about").loc["A", "this session"] for table in (clear, hidden)]
    assert own == [9, 7]


def test_the_rows_themselves_are_flagged_with_a_warning():
    study = Study()
    with pytest.warns(DisclosureWarning, match=r"rows could be computed: 29 about 20 values of A to coord"):
        receipt = study.run(steps=("moments", "rows"))
    assert receipt.released.set_index("about").loc[list(SITES), "verdict"].eq(VERDICT_SOLVABLE).all()
    assert receipt.alarm in str(receipt)


def test_the_same_column_opened_twice_is_one_column(monkeypatch):
    def more(data, state):
        state.use_columns(["x", "z"])
        return {"rows": state.use("x", np.ndarray)}

    more_step = Step(more, {}, {"rows": ArrayDeclaration("raw columns", "x itself")})
    monkeypatch.setitem(FAMILIES, "toy", {**STEPS, "rows": more_step})
    unknowns = Study().run(steps=("moments", "rows")).released.set_index("about").loc["A", "unknowns"]
    assert unknowns == 2 * 20
