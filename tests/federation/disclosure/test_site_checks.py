"""The one door: what does not pass, and what stays intact when something does not."""

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import DisclosureError, MessageError, PolicyError, SessionError
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.disclosure.state import MAX_SESSIONS
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply


def total(data, state, weight):
    request = state.use("asked", int) if "asked" in state else 0
    state.keep("asked", request + 1, len(data.frame))
    return {"total": np.array(float(data.frame["x"].sum() * weight[0]))}


def rows(data, state):
    return {"rows": data.frame["x"].to_numpy()}


def shout(data, state, text):
    return {}, text.upper()


def wrong(data, state):
    return {"undeclared": np.ones(1)}


def broken(data, state):
    return {"total": np.array(np.nan)}


TOTAL = {"total": ArrayDeclaration("aggregate", "sum of x", 0, behind=(EntityCount,))}
STEPS = {
    "total": Step(total, {"weight": ArrayDeclaration("control", "weight")}, TOTAL),
    "rows": Step(rows, {}, {"rows": ArrayDeclaration("raw columns", "x itself")}),
    "shout": Step(
        shout,
        text_in=ArrayDeclaration("schema", "words"),
        text_out=ArrayDeclaration("schema", "louder words"),
    ),
    "wrong": Step(wrong, {}, TOTAL),
    "broken": Step(broken, {}, TOTAL),
}


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", STEPS)


@pytest.fixture
def make():
    return lambda n=6, **policy: Site("Bank", pd.DataFrame({"x": np.arange(float(n))}), Policy(**policy))


def question(step="total", site="Bank", family="toy", arrays=None, **rest):
    return pack_request(
        Request(site, family, step, {"weight": np.ones(1)} if arrays is None else arrays, **rest)
    )


def test_an_answer_is_entered_with_the_entities_behind_it(make):
    site = make()
    reply = unpack_reply(site.answer(question()))
    assert float(reply.arrays["total"]) == 15.0
    assert reply.entities == 6
    (entry,) = site.ledger.entries
    assert (entry.sender, entry.step, entry.array, entry.kind) == ("Bank", "total", "total", "aggregate")
    assert entry.entities == 6


def test_text_passes_where_it_is_declared(make):
    reply = unpack_reply(make().answer(question("shout", arrays={}, text='"a"')))
    assert reply.text == '"A"'


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (question("nothing"), "family 'toy' has no step 'nothing'; it has .*'total'"),
        (question(family="unknown"), "unknown family 'unknown'; installed are .*'toy'"),
        (question(site="Court"), "addressed to 'Court'"),
        (question(arrays={}), r"step 'total': .*missing \['weight'\]"),
        (question(arrays={"weight": np.ones((1, 1))}), "2 dimensions, expected 1"),
        (question(arrays={"weight": np.array([np.nan])}), "not finite"),
        (question(arrays={"weight": np.ones(1), "more": np.ones(1)}), r"unknown \['more'\]"),
        (question(text="{}"), "received a text, expected arrays only"),
        (b"", "0 bytes that are not"),
        (question()[:-1], "bytes that are not"),
        (question("wrong", arrays={}), r"step 'wrong': .*unknown \['undeclared'\]"),
        (question("broken", arrays={}), "not finite"),
    ],
)
def test_malformed_asks_are_named_and_nothing_is_entered(make, ask, complaint):
    site = make()
    with pytest.raises(MessageError, match=complaint):
        site.answer(ask)
    assert site.ledger.entries == []


@pytest.mark.parametrize(
    ("policy", "step", "complaint"),
    [
        (
            {"families": frozenset({"glm"})},
            "total",
            r"Bank: its policy \(families\) allows \['glm'\], not 'toy'",
        ),
        (
            {"refused_kinds": frozenset({"raw columns"})},
            "rows",
            r"Bank: its policy \(refused kinds\).*'raw columns'.*array 'rows' of step 'rows' \(x itself\)",
        ),
        (
            {"min_count": 7},
            "total",
            r"Bank: its policy \(minimum count\) requires at least 7 entities behind array 'total'.* are 6",
        ),
    ],
)
def test_a_refusal_names_site_rule_and_array_and_releases_nothing(make, policy, step, complaint):
    site = make(**policy)
    with pytest.raises(PolicyError, match=complaint):
        site.answer(question(step, arrays=None if step == "total" else {}))
    assert site.ledger.entries == []


def test_a_refused_family_is_not_computed(make):
    site = make(families=frozenset({"glm"}))
    with pytest.raises(PolicyError):
        site.answer(question(session="s"))
    assert "s" not in site.states


def test_ten_thousand_random_byte_strings_leave_the_site_intact(make):
    site = make()
    site.answer(question(session="kept"))
    generator = np.random.default_rng(3)
    complete = question(session="kept")
    for _ in range(10_000):
        data = bytearray(complete)
        for _ in range(int(generator.integers(1, 6))):
            data[int(generator.integers(len(data)))] = int(generator.integers(256))
        try:
            site.answer(bytes(data[: int(generator.integers(1, len(data)))]))
        except DisclosureError:
            continue
    assert len(site.ledger.entries) == 1
    assert float(unpack_reply(site.answer(complete)).arrays["total"]) == 15.0


def test_sessions_are_apart_and_the_oldest_is_forgotten(make):
    site = make()
    for i in range(MAX_SESSIONS + 2):
        site.answer(question(session=str(i)))
        site.answer(question(session=str(i)))
    assert len(site.states) == MAX_SESSIONS
    assert all(state.use("asked", int) == 2 for state in site.states.values())
    assert "0" not in site.states
    with pytest.raises(SessionError, match="newer sessions have replaced this one"):
        site.answer(question(session="0"))


def test_sessions_with_requests_are_kept_when_many_analysts_connect(make):
    """Twenty fits go on while a hundred other sessions are opened that keep nothing."""
    site = make()
    fits = [f"fit {i}" for i in range(20)]
    for turn in range(5):
        for fit in fits:
            site.answer(question(session=fit))
            site.answer(question("shout", arrays={}, text='"a"', session=f"connection {turn} {fit}"))
    assert all(site.states[fit].use("asked", int) == 5 for fit in fits)
    assert len(site.states) == MAX_SESSIONS


def test_the_session_without_requests_for_the_longest_time_goes_first(make):
    site = make()
    for i in range(MAX_SESSIONS):
        site.answer(question(session=str(i)))
    for again in ("3", "0"):
        site.answer(question(session=again))
        assert site.states.keys() == set(map(str, range(MAX_SESSIONS)))  # which replaces none
    site.answer(question(session="new"))
    assert "0" in site.states and "1" not in site.states


def test_repr_shows_no_data(make):
    assert repr(make()) == "Site('Bank', 6 records, 1 columns)"
