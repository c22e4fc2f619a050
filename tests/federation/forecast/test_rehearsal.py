"""A protocol carried to stand-ins: what is entered, what is refused, and what is not known."""

import numpy as np
import pytest

from fedstat.errors import MessageError, NotAvailableError, PolicyError
from fedstat.federation.account.entry import Entry
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.door.facts import Entities
from fedstat.federation.door.policy import Policy
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.forecast.adversary import listed, who_learns
from fedstat.federation.forecast.forecast import Forecast
from fedstat.federation.forecast.rehearsal import KEY_ANSWERS, Rehearsal, Rehearsed
from fedstat.federation.message import Ask, Declared, Step
from fedstat.federation.rounds.masked_sums import masked

STEPS = {
    "count": Step(
        lambda data, state: {},
        gives={
            "total": Declared("aggregate", "sum", maskable=True, behind=(Entities,)),
            "each": Declared("per entity", "one each", optional=True),
        },
    ),
    "columns": Step(lambda data, state: {}, gives={"columns": Declared("raw columns", "x", 2)}),
}
SITES = ("A", "B", "C")


def count(site, ask):
    site.hold("odd rule", odd, site)
    return site.reply({"total": np.ones(2)}, entities={"A": 4, "B": 9, "C": 9}[site.name])


def odd(site):
    if site.policy.min_events == 7:
        raise PolicyError(f"{site.name}: its policy (odd rule) refuses")


def columns(site, ask):
    site.columns = 5
    return site.reply({"columns": np.zeros((9, 5))}, entities=9)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", STEPS)


def asks(step, sites=SITES):
    return [Ask(site, "toy", step, session="s") for site in sites]


def protocol(rounds=2):
    for _ in range(rounds):
        replies = yield asks("count")
        assert sum(reply.arrays["total"].sum() for reply in replies) == 6.0
    yield asks("columns", SITES[1:])


def rehearse(run, at=None, policies=None, answers=None):
    given = {("toy", "count"): count, ("toy", "columns"): columns} if answers is None else answers
    rehearsal = Rehearsal({site: Policy() for site in SITES} | (policies or {}), given)
    with pytest.raises(Rehearsed):
        rehearsal.run(run, Ledger(at=at))
    return rehearsal.course


def test_what_passes_is_entered_as_an_engine_enters_it():
    course = rehearse(protocol(), at="A")
    assert course.entries[0] == Entry(
        1, "B", "coordinator", "count", "total", "aggregate", "sum", (2,), 16, 9, family="toy"
    )
    assert course.entries[0].what == "sum"
    assert {entry.sender for entry in course.entries} == {"B", "C"}
    assert course.rounds == (("count",), ("count",), ("columns",))
    assert course.n_masked == 0


def test_masks_make_up_shape_and_bytes_and_leave_the_sum():
    course = rehearse(masked(protocol(), SITES, "s"), at="A")
    entry = next(entry for entry in course.entries if entry.step == "count")
    assert (entry.shape, entry.bytes, entry.masked) == ((2,), 32, True)
    assert course.n_masked == 3
    assert {steps[0] for steps in course.rounds[:3]} == {"introduce", "announce", "finish"}


def test_every_rule_that_would_refuse_is_noted_and_the_rehearsal_goes_on():
    policies = {
        "B": Policy(refused_kinds=frozenset({"aggregate"}), masked_only=True, min_count=10, max_columns=4),
        "C": Policy(min_events=7),
    }
    course = rehearse(protocol(), policies=policies)
    found = {(site, one.rule, one.array) for (site, _), all_ in course.refused.items() for one in all_}
    assert found == {
        ("A", "minimum count", "total"),
        ("B", "refused kinds", "total"),
        ("B", "masked only", "total"),
        ("B", "minimum count", "total"),
        ("B", "maximum columns", ""),
        ("C", "odd rule", ""),
    }
    by_array = {(row.sender, row.array): row for row in Forecast((course,) * 3).planned()}
    assert {one.rule for one in by_array["B", "columns"].refusals} == {"maximum columns"}
    assert by_array["C", "columns"].refusals == ()
    assert by_array["B", "total"].rules == ("refused kinds", "masked only", "minimum count 10")


def test_an_array_that_a_stand_in_lacks_or_makes_up_is_an_error():
    for arrays, words in (({}, "missing"), ({"total": np.ones(2), "other": np.ones(1)}, "unknown")):
        answers = {("toy", "count"): lambda site, ask, arrays=arrays: site.reply(arrays)}
        with pytest.raises(MessageError, match=f"the stand-in of A, step 'count': .*{words}"):
            rehearse(protocol(), answers=answers)


def test_a_step_that_nobody_stands_in_for_has_no_forecast():
    with pytest.raises(NotAvailableError, match=r"no forecast: .*step 'count' of family 'toy' answers; fit"):
        rehearse(protocol(), answers={})
    assert {family for family, _ in KEY_ANSWERS} == {"secure"}


def test_a_forecast_counts_at_three_lengths():
    forecast = Forecast(tuple(rehearse(protocol(rounds)) for rounds in (1, 2, 5)))
    assert forecast.rounds() == [(("count",), (1, 2, 5)), (("columns",), (1, 1, 1))]
    row = next(row for row in forecast.planned() if (row.sender, row.array) == ("A", "total"))
    assert row.messages == (1, 2, 5) and row.bytes == (16, 32, 80) and row.shape == (2,)


def learned(run, at=None, dealers=None):
    course = rehearse(run, at=at)
    planned = Forecast((course,) * 3).planned()
    return " ".join(f"{who}: {text}" for who, text in who_learns(planned, at, course.n_masked, dealers or {}))


def test_who_learns_what_follows_from_kinds_masks_and_receivers():
    plain = learned(protocol(), at="A")
    assert "Coordinator, at A: receives from B and C, of 9 entities or more (aggregate): sum." in plain
    assert "(raw columns): x. It then has these columns." in plain
    assert "Collusion" not in plain
    hidden = learned(masked(protocol(), SITES, "s"))
    assert "Coordinator: receives under masks: sum. It learns the sums over 3 institutions" in hidden
    assert "(aggregate)" not in hidden
    assert "c of the 3 institutions learn the sum over the other 3 - c" in hidden
    dealt = learned(protocol(), dealers={("A", "B"): "C", ("A", "C"): "B", ("B", "C"): ""})
    assert "C deals the random numbers for the products of A and B." in dealt
    assert "the coordinator deals the random numbers for the products of B and C." in dealt


def test_two_sites_under_masks():
    def run():
        yield asks("count", SITES[:2])

    assert "Masks hide nothing from the other institution here" in learned(masked(run(), SITES[:2], "s"))


def test_names_in_a_sentence():
    assert [listed(SITES[:k]) for k in range(4)] == ["", "A", "A and B", "A, B and C"]
