"""Rules for one array before it is computed: each by itself, and on either side of its condition."""

from dataclasses import replace

import numpy as np
import pytest

from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.privacy_budget import NoiseRequired
from fedstat.federation.disclosure.request_checks import refusals, rules_in_force
from fedstat.federation.message import ArrayDeclaration, Request, Step

SUM = ArrayDeclaration("aggregate", "a sum", behind=(EntityCount,))
HIDDEN = replace(SUM, maskable=True)
NOISY = ArrayDeclaration(
    "noisy aggregate",
    "a noisy sum",
    maskable=True,
    dtype="int64",
    behind=(EntityCount, NoiseRequired),
    noisy=True,
)
ROWS = ArrayDeclaration("per entity", "numbers of rows", 2, maskable=True, behind=(EntityCount,))
UNPAID = ArrayDeclaration("presence", "who is there", unpaid="it is public")
BUDGET = Budget(1.0, 1e-6)


def refused(policy, declared, masked=None, **step):
    """Rules by which a policy refuses an array."""
    request = Request("Kiel", "toy", "sum", {}, "s", masked=masked)
    found = list(refusals("Kiel", Policy(**policy), request, Step(dict, gives={"total": declared}, **step)))
    assert all(one.site == "Kiel" for one in found)
    return [one.rule for one in found]


@pytest.mark.parametrize(
    ("policy", "declared", "masked", "rules"),
    [
        ({}, SUM, None, []),
        ({"families": frozenset({"toy"})}, SUM, None, []),
        ({"families": frozenset({"other"})}, SUM, None, ["families"]),
        ({"refused_kinds": frozenset({"aggregate"})}, SUM, None, ["refused kinds"]),
        ({"refused_kinds": frozenset({"aggregate"})}, SUM, 0, ["refused kinds"]),
        ({"refused_kinds": frozenset({"aggregate"})}, HIDDEN, None, ["refused kinds"]),
        ({"refused_kinds": frozenset({"aggregate"})}, HIDDEN, 0, []),
        ({"refused_kinds": frozenset({"aggregate"})}, ROWS, None, []),
        ({"refused_kinds": frozenset({"per entity"})}, ROWS, 0, ["refused kinds"]),
        ({"per_entity": 0}, ROWS, None, ["per entity"]),
        ({"per_entity": 0}, ROWS, 0, ["per entity"]),
        ({"per_entity": 0}, SUM, None, []),
        ({"per_entity": 1}, ROWS, None, []),
        ({"per_entity": 0, "refused_kinds": frozenset({"per entity"})}, ROWS, None, ["refused kinds"]),
        ({"masked_only": True}, HIDDEN, None, ["masked only"]),
        ({"masked_only": True}, HIDDEN, 0, []),
        ({"masked_only": True}, SUM, None, []),
        ({"masked_only": True}, NOISY, None, []),
        ({"masked_only": False}, HIDDEN, None, []),
        ({"privacy": BUDGET}, SUM, None, ["privacy budget"]),
        ({"privacy": BUDGET}, HIDDEN, 0, ["privacy budget"]),
        ({"privacy": BUDGET}, NOISY, None, []),
        ({"privacy": BUDGET}, UNPAID, None, []),
        ({"privacy": BUDGET, "masked_only": True}, HIDDEN, None, ["masked only", "privacy budget"]),
    ],
)
def test_an_array_is_refused_by_the_rules_that_it_meets(policy, declared, masked, rules):
    assert refused(policy, declared, masked) == rules


@pytest.mark.parametrize(
    ("policy", "public", "gives", "refused_here"),
    [
        ({"privacy": BUDGET}, False, {}, True),
        ({"privacy": BUDGET}, True, {}, False),
        ({"privacy": BUDGET}, False, {"total": NOISY}, False),
        ({"privacy": BUDGET}, True, {"total": SUM}, False),
        ({}, False, {}, False),
    ],
)
def test_a_step_that_gives_nothing_may_still_depend_on_rows(policy, public, gives, refused_here):
    request = Request("Kiel", "toy", "sum")
    found = [
        one.rule
        for one in refusals("Kiel", Policy(**policy), request, Step(dict, gives=gives, public=public))
    ]
    assert found == (["privacy budget"] if refused_here else [])


def test_a_text_is_refused_as_an_array_is():
    assert refused(
        {"refused_kinds": frozenset({"schema"})}, SUM, text_out=ArrayDeclaration("schema", "names")
    ) == ["refused kinds"]


def test_weights_that_did_not_come_are_not_refused():
    weighs = ArrayDeclaration("per entity", "numbers", weighs="weights", optional=True)
    step = Step(dict, {"w": weighs}, {"total": SUM})
    rules = [
        [
            one.rule
            for one in refusals("Kiel", Policy(per_entity=0), Request("Kiel", "toy", "sum", arrays), step)
        ]
        for arrays in ({}, {"w": np.ones(2)})
    ]
    assert rules == [[], ["per entity"]]


COUNTED = "minimum count 5"


@pytest.mark.parametrize(
    ("policy", "declared", "n_masked", "rules"),
    [
        ({}, SUM, 0, [COUNTED]),
        ({}, UNPAID, 0, []),
        ({"families": frozenset({"toy"})}, SUM, 0, ["families", COUNTED]),
        ({"refused_kinds": frozenset({"sketch"})}, SUM, 0, ["refused kinds", COUNTED]),
        ({"refused_kinds": frozenset({"sketch"})}, HIDDEN, 3, [COUNTED]),
        ({"refused_kinds": frozenset({"sketch"})}, ROWS, 3, ["refused kinds"]),
        ({"per_entity": 4}, ROWS, 0, ["per entity 4"]),
        ({"per_entity": 4}, SUM, 0, [COUNTED]),
        ({"masked_only": True}, HIDDEN, 3, ["masked only", COUNTED]),
        ({"masked_only": True}, SUM, 0, [COUNTED]),
        ({"masked_only": True}, NOISY, 0, [COUNTED]),
        ({"two_sites": "refuse"}, HIDDEN, 2, ["two sites: refuse", COUNTED]),
        ({"two_sites": "refuse"}, HIDDEN, 3, [COUNTED]),
        ({"two_sites": "refuse"}, HIDDEN, 0, [COUNTED]),
        ({"quorum": 3}, HIDDEN, 3, ["quorum 3", COUNTED]),
        ({"quorum": 3}, HIDDEN, 0, [COUNTED]),
        ({"quorum": 0}, HIDDEN, 3, [COUNTED]),
        ({"apart": 2}, HIDDEN, 3, ["apart 2", COUNTED]),
        ({"apart": 1}, HIDDEN, 3, [COUNTED]),
        ({"apart": 2}, HIDDEN, 0, [COUNTED]),
        ({"min_count": 9, "privacy": BUDGET}, NOISY, 0, ["minimum count 9", "privacy budget"]),
    ],
)
def test_the_rules_that_an_array_meets_are_listed(policy, declared, n_masked, rules):
    assert list(rules_in_force(Policy(**policy), declared, n_masked)) == rules
