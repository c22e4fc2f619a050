"""A refusal carries its rule and its site as fields, and nothing reads them out of its message."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import ConsentError, DesignError, PolicyError
from fedstat.federation.audit.event_log import refusal_entry, refusal_reason
from fedstat.federation.disclosure.facts import EntityCount, LevelRowCounts
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.message import (
    ArrayDeclaration,
    Request,
    Step,
    pack_refusal,
    pack_request,
    unpack_reply,
)

TRAP = "x: its policy (quorum) of"


def request(monkeypatch, reported, **policy):
    def run(data, state):
        state.report(reported)
        return {"total": np.array(1.0)}

    gives = {"total": ArrayDeclaration("aggregate", "sum", 0, behind=(EntityCount,))}
    monkeypatch.setitem(FAMILIES, "toy", {"total": Step(run, {}, gives)})
    site = Site("Kiel", pd.DataFrame({"x": np.arange(20.0)}), Policy(**policy))
    with pytest.raises(PolicyError) as caught:
        site.answer(pack_request(Request("Kiel", "toy", "total", {}, "s")))
    (entry,) = [entry for entry in site.site_ledger.present.entries if entry.kind == "refusal"]
    return caught.value, entry.rule, site


def test_the_ledger_has_the_rule_of_the_error(monkeypatch):
    error, rule, _ = request(monkeypatch, EntityCount(3))
    assert (error.rule, error.site) == ("minimum count", "Kiel")
    assert str(error).startswith("Kiel: its policy (minimum count) requires at least 5 entities")
    assert rule == "PolicyError (minimum count)"


@pytest.mark.parametrize("known", [True, False])
def test_a_column_named_like_a_refusal_changes_no_rule(monkeypatch, known):
    error, rule, _ = request(monkeypatch, LevelRowCounts(TRAP, [2, 9], known))
    assert TRAP in str(error) and error.rule == "minimum rows per level"
    assert rule == "PolicyError (minimum rows per level)"


@pytest.mark.parametrize(
    ("told", "reason"),
    [(EntityCount(3), "(minimum count)"), (DesignError(TRAP), TRAP)],
)
def test_the_analyst_reads_one_word_where_reasons_are_logged(monkeypatch, told, reason):
    if isinstance(told, DesignError):

        def judge(*_):
            raise told

        monkeypatch.setattr("fedstat.federation.disclosure.state.State.report", judge)
    error, entered, site = request(monkeypatch, told, reasons="logged")
    text = (
        "Kiel: refused for a reason that depends on rows; the owner's log has the reason. Rows (min_count, "
        "remember): use the rows of an earlier model (complete=[...]), or fewer columns"
    )
    assert (str(error), error.rule, error.site) == (text, "rows", "Kiel")
    assert entered == "PolicyError (rows)"
    (logged,) = site.refusals.reasons
    assert reason in logged


@pytest.mark.parametrize("kind", [PolicyError, ConsentError])
def test_the_fields_travel_and_are_copied(kind):
    error = kind.of_rule("differencing", "Kiel", "refuses rows")
    with pytest.raises(kind, match=r"^Kiel: its policy \(differencing\) refuses rows$") as caught:
        unpack_reply(pack_refusal("Kiel", error))
    for same in (caught.value, copy.copy(error), pickle.loads(pickle.dumps(error)), error.with_message("no")):
        assert type(same) is kind and (same.rule, same.site) == ("differencing", "Kiel")


def test_an_error_of_no_rule_has_none():
    for error in (DesignError(TRAP), PolicyError(TRAP)):
        assert refusal_reason(error) == type(error).__name__
        assert refusal_entry(Request("Kiel", "toy", "total"), error, 1).rule == type(error).__name__
        assert b'"rule"' not in pack_refusal("Kiel", error)
