"""Protocols over the local engine, and the account that it keeps."""

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import MessageError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine


def add(data, state, amount):
    state.count_entities(len(data.frame))
    return {"total": np.array(float(data.frame["x"].sum() + amount))}


STEPS = {
    "add": Step(
        add,
        {"amount": ArrayDeclaration("control", "amount", 0)},
        {"total": ArrayDeclaration("aggregate", "sum", 0, behind=(EntityCount,))},
    )
}


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", STEPS)


@pytest.fixture
def sites():
    return {name: Site(name, pd.DataFrame({"x": np.arange(5.0) + i})) for i, name in enumerate("ABC")}


def protocol(order="ABC", rounds=2):
    amount = 0.0
    for _ in range(rounds):
        requests = [Request(name, "toy", "add", {"amount": np.array(amount)}) for name in order]
        replies = yield requests
        assert [reply.site for reply in replies] == list(order)
        amount = sum(float(reply.arrays["total"]) for reply in replies)
    return amount


def test_replies_come_in_the_order_of_the_asks(sites):
    ledger = Ledger()
    total = LocalEngine(sites).run(protocol("CAB"), ledger)
    assert total == 45.0 + 3 * 45.0
    assert ledger.rounds == 2


def test_a_protocol_needs_no_engine(sites):
    running = protocol()
    requests = next(running)
    with pytest.raises(StopIteration) as stop:
        while True:
            requests = running.send([unpack_reply(sites[a.site].answer(pack_request(a))) for a in requests])
    assert stop.value.value == LocalEngine(sites).run(protocol(), Ledger())


def test_what_stays_at_the_coordinators_site_is_not_entered(sites):
    apart, there = Ledger(), Ledger(at="B")
    LocalEngine(sites).run(protocol(), apart)
    LocalEngine(sites).run(protocol(), there)
    assert {e.sender for e in apart.entries} == {"coordinator", "A", "B", "C"}
    assert {e.sender for e in there.entries} == {"coordinator", "A", "C"}
    assert apart.bytes == 3 * 2 * 2 * 8
    assert there.bytes == 2 * 2 * 2 * 8
    assert there.releases()["sender"].unique().tolist() == ["B", "A", "C"]
    assert there.kinds_by_site() == {"B": ("control",), "A": ("aggregate",), "C": ("aggregate",)}


def test_a_round_within_one_site_is_not_counted(sites):
    ledger = Ledger(at="A")
    LocalEngine(sites).run(protocol("A"), ledger)
    assert ledger.rounds == 0
    assert ledger.entries == []


def test_entities_stand_behind_every_array(sites):
    ledger = Ledger()
    LocalEngine(sites).run(protocol(), ledger)
    frame = ledger.to_frame()
    assert (frame.loc[frame["sender"] != "coordinator", "entities"] == 5).all()


def test_a_refusal_reaches_the_analyst_and_ends_the_ledger(sites):
    sites["B"] = Site("B", pd.DataFrame({"x": [1.0]}), Policy(min_count=2))
    ledger = Ledger()
    with pytest.raises(PolicyError, match="B: its policy"):
        LocalEngine(sites).run(protocol(), ledger)
    assert {e.sender for e in ledger.entries} == {"coordinator", "A"}


def test_an_unknown_site_is_named(sites):
    with pytest.raises(MessageError, match=r"no site 'D'; there are \['A', 'B', 'C'\]"):
        LocalEngine(sites).run(protocol("D"), Ledger())
