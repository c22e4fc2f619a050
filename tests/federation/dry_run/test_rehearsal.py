"""A protocol carried to dry sites: what is entered, what is refused, and what is foreseen of its length."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.audit.event_log import Entry
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import State
from fedstat.federation.dry_run.execution import DryRunEnded, DryRunEngine, DrySite
from fedstat.federation.dry_run.expected_releases import (
    ExpectedReleases,
    IterationLoop,
    join_names,
    who_learns,
)
from fedstat.federation.dry_run.synthetic import SyntheticRows
from fedstat.federation.message import ArrayDeclaration, Request, Step
from fedstat.federation.protocols.masked_sums import masked_protocol

SITES = {"A": 4, "B": 9, "C": 9}


def count(data, state):
    X = state.use("X", np.ndarray)
    if data.policy.min_events == 7:
        raise PolicyError.of_rule("odd rule", data.name, "refuses")
    return {"total": X.sum(axis=0)[:2]}


def columns(data, state):
    return {"columns": state.use("X", np.ndarray)}


def grow(data, state):
    state.keep("grown", state.use("grown", int) + 1 if "grown" in state else 1, 9)
    return {"columns": np.zeros((min(state.use("grown", int), 3), 2))}


STEPS = {
    "count": Step(
        count,
        gives={
            "total": ArrayDeclaration("aggregate", "sum", maskable=True, behind=(EntityCount,)),
            "each": ArrayDeclaration("per entity", "one each", optional=True, behind=(EntityCount,)),
        },
    ),
    "columns": Step(
        columns, gives={"columns": ArrayDeclaration("raw columns", "x", 2, behind=(EntityCount,))}
    ),
    "grow": Step(grow, gives={"columns": ArrayDeclaration("control", "points", 2)}),
    "never": Step(
        lambda data, state: never(data),
        gives={"total": ArrayDeclaration("aggregate", "sum", behind=(EntityCount,))},
    ),
}


def never(data):
    raise PolicyError.of_rule("a rule without a limit", data.name, "refuses")


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", STEPS)


def refusals(dry_run):
    found = dry_run.refused.items()
    return {place: [(one.rule, one.array, str(one)) for one in errors] for place, errors in found}


def requests(step, sites=tuple(SITES)):
    return [Request(site, "toy", step, session="s") for site in sites]


def protocol(rounds=2):
    for _ in range(rounds):
        replies = yield requests("count")
        assert sum(reply.arrays["total"].sum() for reply in replies) == pytest.approx(44.0)
    yield requests("columns", ("B", "C"))


def rehearse(run, at=None, policies=None, repeated=()):
    sites = {}
    for name, n in SITES.items():
        sites[name], state = DrySite(name, (policies or {}).get(name, Policy()), n), State(name)
        state.keep("X", np.ones((n, 5)), n, columns=5)
        sites[name].open("s", state)
    dry_run = DryRunEngine(sites, repeated)
    with pytest.raises(DryRunEnded):
        dry_run.run(run, Ledger(at=at))
    return dry_run.dry_run()


def test_what_passes_is_entered_as_an_engine_enters_it():
    dry_run = rehearse(protocol(), at="A")
    assert dry_run.entries[0] == Entry(
        1, "B", "coordinator", "count", "total", "aggregate", "sum", (2,), 16, 9, family="toy"
    )
    assert dry_run.entries[0].what == "sum"
    assert {entry.sender for entry in dry_run.entries} == {"B", "C"}
    assert dry_run.rounds == (("count",), ("count",), ("columns",))
    assert dry_run.n_masked == 0 and not dry_run.cut_short


@pytest.mark.parametrize("hidden", [False, True])
def test_a_repeated_step_runs_once_and_is_entered_as_often_as_it_is_asked(hidden, monkeypatch):
    def dry_run(repeated):
        run, runs = protocol(rounds=4), []
        step = replace(STEPS["count"], run=lambda data, state: runs.append(data.name) or count(data, state))
        monkeypatch.setitem(FAMILIES, "toy", STEPS | {"count": step})
        run = masked_protocol(run, tuple(SITES), "s") if hidden else run
        policies = {"B": Policy(min_count=10), "C": Policy(masked_only=True)}
        return rehearse(run, policies=policies, repeated=repeated), len(runs)

    complete, every = dry_run(())
    short, once = dry_run({"count"})
    assert (short.entries, short.rounds, refusals(short)) == (
        complete.entries,
        complete.rounds,
        refusals(complete),
    )
    assert every == 4 * once


def test_masks_make_up_shape_and_bytes_and_leave_the_sum():
    dry_run = rehearse(masked_protocol(protocol(), tuple(SITES), "s"), at="A")
    entry = next(entry for entry in dry_run.entries if entry.step == "count")
    assert (entry.shape, entry.bytes, entry.masked) == ((2,), 32, True)
    assert dry_run.n_masked == 3
    request = {step for steps in dry_run.rounds[:2] for step in steps}
    assert request >= {"introduce", "announce", "finish"}


def test_every_rule_that_would_refuse_is_noted_and_the_rehearsal_goes_on():
    policies = {
        "B": Policy(refused_kinds=frozenset({"aggregate"}), masked_only=True, min_count=10, max_columns=4),
        "C": Policy(min_events=7),
    }
    dry_run = rehearse(protocol(), policies=policies)
    found = {(site, one.rule, one.array) for (site, _), all_ in dry_run.refused.items() for one in all_}
    assert found == {
        ("A", "minimum count", "total"),
        ("B", "refused kinds", "total"),
        ("B", "masked only", "total"),
        ("B", "minimum count", "total"),
        ("B", "maximum columns", ""),
        ("C", "odd rule", ""),
    }
    by_array = {(row.sender, row.array): row for row in ExpectedReleases(dry_run).planned()}
    assert by_array["C", "columns"].refusals == ()
    assert by_array["B", "total"].rules == ("refused kinds", "masked only", "minimum count 10")
    assert len(by_array["B", "total"].refusals) == 4


def test_a_refusal_that_no_policy_takes_back_ends_the_rehearsal():
    def run():
        yield requests("count")
        yield requests("never")
        yield requests("columns")

    dry_run = rehearse(run())
    assert dry_run.cut_short == "never" and dry_run.rounds == (("count",), ("never",))
    assert dry_run.refused["A", "never"][0].rule == "a rule without a limit"


def test_a_dry_run_counts_at_three_lengths():
    loop = IterationLoop(("count",), 5)
    expected = ExpectedReleases(rehearse(protocol(3)), [loop])
    assert expected.rounds() == [(("count",), (1, 3, 5)), (("columns",), (1, 1, 1))]
    row = next(row for row in expected.planned() if (row.sender, row.array) == ("A", "total"))
    assert row.messages == (1, 3, 5) and row.bytes == (16, 48, 80) and row.shape == (2,)


def test_arrays_grow_for_as_long_as_they_are_said_to():
    def run(rounds):
        for _ in range(rounds):
            yield requests("grow")

    real = ExpectedReleases(rehearse(run(6))).planned()[0]
    reported = ExpectedReleases(rehearse(run(2)), [IterationLoop(("grow",), 6, sizes=3)]).planned()[0]
    assert (reported.shape, reported.bytes) == ((3, 2), (16, 48, 240))
    assert (real.shape, real.bytes[1]) == (reported.shape, reported.bytes[2])


def learned(run, at=None, dealers=None):
    dry_run = rehearse(run, at=at)
    planned = ExpectedReleases(dry_run).planned()
    return " ".join(
        f"{who}: {text}" for who, text in who_learns(planned, at, dry_run.n_masked, dealers or {})
    )


def test_who_learns_what_follows_from_kinds_masks_and_receivers():
    plain = learned(protocol(), at="A")
    assert "Coordinator, at A: receives from B and C, of 9 entities or more (aggregate): sum." in plain
    assert "(raw columns): x. It then has these columns." in plain
    assert "Collusion" not in plain
    hidden = learned(masked_protocol(protocol(), tuple(SITES), "s"))
    assert "Coordinator: receives under masks: sum. It learns the sums over 3 sites" in hidden
    assert "(aggregate)" not in hidden
    assert "c of the 3 sites together learn the sum over the other 3 - c" in hidden
    dealt = learned(protocol(), dealers={("A", "B"): "C", ("A", "C"): "B", ("B", "C"): ""})
    assert "C deals the random numbers for the products of A and B." in dealt
    assert "the coordinator deals the random numbers for the products of B and C." in dealt


def test_two_sites_under_masks():
    def run():
        yield requests("count", ("A", "B"))

    assert "Masks hide nothing from the other site here" in learned(masked_protocol(run(), ("A", "B"), "s"))


def test_names_in_a_sentence():
    names = tuple(SITES)
    assert [join_names(names[:k]) for k in range(4)] == ["", "A", "A and B", "A, B and C"]


def test_a_label_that_marks_events_is_drawn_as_zeros_and_ones():
    table = pd.DataFrame({"y": range(20), "x": 2.0, "site": ["A", "B"] * 10, "ward": "w", "event": 1})
    table.loc[::3, ["x", "event"]] = 1.0, 0
    partition = fs.ClientPartition.from_frame(table, by="site")
    model = fs.FederatedOLS.from_formula("y ~ x", partition, labels=["ward", "event"])
    drawn = SyntheticRows(model.agreement, model.distribution, binary=("event",))
    rows, _ = drawn._draw(SimpleNamespace(name="A", min_count=5), 10, 1).held
    assert rows.frame["event"].tolist() == [0, 1] * 5
    assert set(rows.frame["ward"]) == {"A 0", "A 1"}
