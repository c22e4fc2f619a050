"""Declarations and facts of a step: without them a family is not registered, and nothing is released."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import DisclosureError, PolicyError
from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights, GroupSums
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request

PACKAGE = Path(__file__).parents[3] / "fedstat"
COUNTS = ("count_dominant_rows", "entities_per_equation", "masked_among_the_same")
JUDGES = ("row_checks", "leverage", "differencing", "checks")


def total(data, state, weight):
    state.keep("x", data.frame["x"], len(data.frame))
    return {"total": np.array(data.frame["x"].to_numpy() @ weight)}


def step(takes, **gives):
    return Step(
        total,
        {"weight": ArrayDeclaration("per entity", "weight", **takes)},
        {"total": ArrayDeclaration("aggregate", "sum", 0, **gives)},
    )


WHOLE = {"weighs": "weights"}, {"behind": (EntityCount, ExternalWeights)}


def request(weight, **policy):
    site = Site("Kiel", pd.DataFrame({"x": np.arange(20.0)}), Policy(**policy))
    return site.answer(pack_request(Request("Kiel", "toy", "total", {"weight": weight}, "s"))), site


@pytest.mark.parametrize(
    ("takes", "gives", "words"),
    [
        (WHOLE[0], {}, "'total' is declared 'aggregate', without the facts behind it"),
        ({}, WHOLE[1], "'weight' has a value per entity, and does not declare whether these weigh"),
        (WHOLE[0], {"behind": (int,)}, "'total' has int behind it, which no rule checks"),
    ],
)
def test_what_is_left_open_does_not_install(takes, gives, words):
    with pytest.raises(DisclosureError, match=f"family 'toy', step 'total': array {words}"):
        FAMILIES["toy"] = {"total": step(takes, **gives)}
    assert "toy" not in FAMILIES


def test_weights_are_judged_whatever_the_step_does(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", {"total": step(WHOLE[0], **WHOLE[1])})
    request(np.ones(20))
    request(np.ones(20) * np.where(np.arange(20) % 2, 1.0, -1.0))
    request(np.eye(20)[3], min_count=1)
    for few in (np.eye(20)[3], -np.eye(20)[3], np.eye(20)[:4].sum(axis=0), np.eye(20)[3] + 1e-6):
        with pytest.raises(
            PolicyError, match=r"Kiel: its policy \(minimum count\).*these weights concentrate on fewer"
        ):
            request(few)


def test_a_fact_that_was_not_shown_holds_the_answer_back(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", {"total": step(WHOLE[0], behind=(EntityCount, GroupSums))})
    with pytest.raises(
        DisclosureError, match="'total' does not leave: GroupSums is declared to stand behind it"
    ):
        request(np.ones(20))


def test_facts_are_kept_with_what_a_step_keeps(monkeypatch):
    def stage(data, state):
        state.report(GroupSums(np.zeros(20, dtype=np.int64)))
        state.keep("x", data.frame["x"], 20)
        return {}

    def release(data, state):
        return {"total": np.array(state.use("x", np.ndarray).sum())}

    gives = {"total": ArrayDeclaration("aggregate", "sum", 0, behind=(EntityCount, GroupSums))}
    monkeypatch.setitem(FAMILIES, "toy", {"stage": Step(stage), "release": Step(release, {}, gives)})
    site = Site("Kiel", pd.DataFrame({"x": np.arange(20.0)}), Policy())
    for name in ("stage", "release"):
        site.answer(pack_request(Request("Kiel", "toy", name, {}, "s")))


def test_no_step_calls_a_guard():
    """Outside the disclosure folder no module imports a check, except for the numbers that a plan needs."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts
        if room[:2] in (("federation", "disclosure"), ("federation", "dry_run")) or "explain" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("fedstat.federation.disclosure.")
            ):
                names = [a.name for a in node.names if not a.name.isupper() and a.name not in COUNTS]
                if node.module.rpartition(".")[2] in JUDGES and names:
                    found.append((path.name, names))
    assert found == []
