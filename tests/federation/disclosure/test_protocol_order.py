"""Which step may follow which, who deals, and what all sites are sent alike: every case by itself."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedstat.errors import DescriptionError, SecurityError
from fedstat.federation.crypto.masks import FLOATS, WIDE
from fedstat.federation.disclosure.facts import ProductDealer
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.request_checks import (
    bind_common,
    check_dealer,
    check_order,
    digest_common,
    mask_reply,
    record_step,
)
from fedstat.federation.disclosure.state import State
from fedstat.federation.message import ArrayDeclaration, Request, Step

SCALE = ArrayDeclaration("aggregate", "scale", common=True)
OWN = ArrayDeclaration("aggregate", "own")
TEXT = ArrayDeclaration("control", "words", common=True)
START = Step(dict, {"scale": SCALE, "own": OWN}, text_in=TEXT)
SUM = Step(dict, {"beta": SCALE}, after=frozenset({"start", "sum"}))
ASK = Request("Kiel", "toy", "start", {"scale": np.ones(2), "own": np.ones(2)}, "s", '"words"')


@pytest.mark.parametrize(
    ("order", "after", "last", "passes"),
    [
        ("declared", None, {}, True),
        ("declared", {"start"}, {"toy": "start"}, True),
        ("declared", {"start"}, {"toy": "sum"}, False),
        ("declared", {"start"}, {"other": "start"}, False),
        ("declared", {"start"}, {}, False),
        ("any", {"start"}, {}, True),
    ],
)
def test_a_step_follows_one_that_it_names(order, after, last, passes):
    step = replace(SUM, after=None if after is None else frozenset(after))
    arguments = "Kiel", Policy(order=order), replace(ASK, step="sum"), step, last
    if passes:
        check_order(*arguments)
    else:
        with pytest.raises(DescriptionError) as refusal:
            check_order(*arguments)
        assert (refusal.value.rule, refusal.value.site) == ("order", "Kiel")


@pytest.mark.parametrize(
    ("dealer", "rule", "error"),
    [
        ("Ulm", "any", None),
        ("Ulm", "third party", None),
        ("", "any", None),
        ("", "third party", DescriptionError),
        ("Bonn", "any", SecurityError),
        ("Kiel", "third party", SecurityError),
    ],
)
def test_neither_of_two_sites_deals_and_the_coordinator_only_where_it_may(dealer, rule, error):
    data, fact = (
        SimpleNamespace(name="Kiel", policy=Policy(dealer=rule)),
        ProductDealer(dealer, ("Kiel", "Bonn")),
    )
    if error is None:
        check_dealer(data, State("Kiel"), fact)
    else:
        with pytest.raises(error, match="Kiel"):
            check_dealer(data, State("Kiel"), fact)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"site": "Ulm"}, True),
        ({"arrays": {"scale": np.ones(2), "own": np.zeros(2)}}, True),
        ({"arrays": {"scale": np.zeros(2), "own": np.ones(2)}}, False),
        ({"arrays": {"scale": np.ones((2, 1)), "own": np.ones(2)}}, False),
        ({"arrays": {"scale": np.ones(2, dtype=np.int64), "own": np.ones(2)}}, False),
        ({"arrays": {"own": np.ones(2)}}, False),
        ({"text": '"other words"'}, False),
        ({"step": "other"}, False),
        ({"family": "other"}, False),
    ],
)
def test_what_is_declared_alike_at_all_sites_is_in_the_digest(change, same):
    assert (digest_common(replace(ASK, **change), START) == digest_common(ASK, START)) is same


def test_what_may_differ_between_sites_is_in_no_digest():
    alone = Step(dict, {"scale": OWN}, text_in=replace(TEXT, common=False))
    assert digest_common(ASK, alone) == b""
    assert bind_common(State("Kiel"), ASK, alone) == ""
    record_step(state := State("Kiel"), ASK, alone)
    assert bind_common(state, ASK, alone) == ""


def test_a_sum_is_bound_to_what_came_since_the_fit_began():
    total = replace(ASK, step="sum", arrays={"beta": np.ones(1)}, text="")
    other = replace(ASK, arrays={"scale": np.zeros(2), "own": np.ones(2)})
    bound = {}
    for name, start in (("one", ASK), ("other", other)):
        record_step(state := State("Kiel"), start, START)
        bound[name] = bind_common(state, total, SUM)
        assert state.last == {"toy": "start"}
        record_step(state, total, SUM)  # what follows another step is not a beginning
        assert bind_common(state, total, SUM) == bound[name] and state.last == {"toy": "sum"}
    assert bound["one"] != bound["other"] != bind_common(State("Kiel"), total, SUM)
    record_step(state, replace(ASK, family="design", step="open"), Step(dict, begins=True))
    assert (state.begun, state.last) == ({"design open": b""}, {"design": "open"})
    assert bind_common(state, total, SUM) == bind_common(State("Kiel"), total, SUM)


def test_maskable_arrays_alone_are_masked_each_under_its_own_name():
    calls = []

    class Masker:
        def mask_all(self, arrays, number, encodings, bound):
            calls.append((number, encodings, bound))
            return {name: array + 100.0 for name, array in arrays.items()}

    gives = {
        "total": replace(OWN, maskable=True),
        "wide": replace(OWN, maskable=True, wide=True),
        "open": OWN,
    }
    arrays = {name: np.ones(1) for name in ("total", "open", "wide")}
    hidden = mask_reply(Masker(), replace(ASK, masked=7), Step(dict, gives=gives), arrays, "bound")
    assert {name: float(array[0]) for name, array in hidden.items()} == {
        "total": 101.0,
        "open": 1.0,
        "wide": 101.0,
    }
    assert calls == [(7, {"toy start total": FLOATS, "toy start wide": WIDE}, "bound")]
    assert float(arrays["total"][0]) == 1.0
