"""Declaring steps: what the decorator enters into a family, and how a step receives its request."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from fedstat.errors import DisclosureError, MessageError
from fedstat.federation.disclosure.facts import EntityCount, RowCount
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.federation.message import ArrayDeclaration, Step

SUM = ArrayDeclaration("aggregate", "sum", without_terms="a toy")
COUNT = ArrayDeclaration("aggregate", "count", behind=(RowCount,), without_terms="a toy")
OPTIONS = ArrayDeclaration("control", "options")
HERE = SimpleNamespace(name="A")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a step."""

    columns: tuple[str, ...]


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", {})


def test_the_function_stays_and_its_step_is_entered():
    @step("toy", "begin other", takes={"x": OPTIONS}, releases={"sum": SUM}, rows_behind=(EntityCount,))
    def add(data, state, x):
        return {"sum": x}

    entered = FAMILIES["toy"]["add"]
    assert entered.run is add
    assert entered.after == {"begin", "other"}
    assert entered.gives["sum"].behind == (EntityCount,)
    assert add(None, None, 1) == {"sum": 1}


def test_facts_that_an_array_declares_itself_take_the_place_of_those_of_all():
    step("toy", releases={"sum": SUM, "count": COUNT}, rows_behind=(EntityCount,), name="two")(dict)
    assert {name: one.behind for name, one in FAMILIES["toy"]["two"].gives.items()} == {
        "sum": (EntityCount,),
        "count": (RowCount,),
    }


def test_a_release_without_facts_does_not_install():
    with pytest.raises(DisclosureError, match="without the facts behind"):
        step("toy", releases={"sum": SUM})(dict)
    assert "dict" not in FAMILIES["toy"]


def test_a_request_arrives_as_its_type_and_the_reply_may_be_arrays_alone():
    @step("toy", request=Options, requests=OPTIONS)
    def choose(data, state, options):
        return {"n": np.array(len(options.columns))}

    arrays, text = FAMILIES["toy"]["choose"].run(HERE, None, '{"columns": ["a", "b"]}')
    assert (int(arrays["n"]), text) == (2, "")
    with pytest.raises(MessageError, match="A: options"):
        FAMILIES["toy"]["choose"].run(HERE, None, '{"columns": 3}')


def test_a_text_without_a_type_arrives_as_it_is():
    @step("toy", requests=OPTIONS, replies=OPTIONS)
    def echo(data, state, text):
        return {}, text

    assert FAMILIES["toy"]["echo"].run(HERE, None, "as it is") == ({}, "as it is")


def test_shared_steps_get_the_order_of_the_family():
    include("toy", {"a": Step(dict), "b": Step(dict)}, {"b": "a"})
    assert FAMILIES["toy"]["a"].after is None
    assert FAMILIES["toy"]["b"].after == {"a"}


def test_the_order_of_every_family_names_steps_that_it_has():
    load_families()
    unknown = {
        (family, name): one.after - steps.keys()
        for family, steps in FAMILIES.items()
        for name, one in steps.items()
        if one.after is not None and one.after - steps.keys()
    }
    assert not unknown
