"""The pipeline of disclosure checks: its order, its completeness, and a rule that is added to it."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PartitionError, PolicyError
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.disclosure import checks
from fedstat.federation.disclosure import facts as fact_module
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.rules import ANALYST, integer, rule, rules_of, stricter_rules
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.disclosure.threat_statements import threats_under
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
from fedstat.operator.page.views import policy_page

PACKAGE = Path(fs.__file__).parent
ORDER = {
    "ADMISSION": ["check_address", "check_session_owner", "check_turn", "check_ledger_complete"],
    "BEFORE": [
        "check_role",
        "check_request_arrays",
        "check_refusals_left",
        "check_declared_release",
        "check_session_known",
        "check_session_aligned",
        "check_step_order",
        "check_masks",
        "check_plan_approved",
    ],
    "AFTER": [
        "check_reply_arrays",
        "check_weights_received",
        "check_facts_reported",
        "check_role_columns",
        "check_column_limit",
        "check_entities_behind",
        "check_released_alone",
        "check_row_level_values",
        "charge_noise",
        "check_plan_kept",
    ],
}
NOT_TOLD = {"FormulaFactor", "RowBlock", "RowTerms"}
"""Parts of facts."""


@pytest.mark.parametrize("name", ORDER)
def test_the_order_of_the_checks_is_the_one_that_was_argued_for(name):
    assert [check.__name__ for check in getattr(checks, name)] == ORDER[name]


def test_every_check_of_a_request_is_in_the_pipeline():
    """A function of the module that takes a request is called by it: none is forgotten."""
    takes = (["context"], ["data", "request", "client"])
    found = [
        name
        for name, one in inspect.getmembers(checks, inspect.isfunction)
        if one.__module__ == checks.__name__ and list(inspect.signature(one).parameters) in takes
    ]
    assert sorted(found) == sorted(["is_foreign", *(one for names in ORDER.values() for one in names)])


def test_every_fact_has_a_check():
    facts = {
        one
        for name, one in inspect.getmembers(fact_module, inspect.isclass)
        if one.__module__ == fact_module.__name__ and name not in NOT_TOLD
    }
    assert facts <= set(checks.FACT_CHECKS)
    for check in checks.FACT_CHECKS.values():
        assert list(inspect.signature(check).parameters) == ["data", "state", "fact"]


def test_every_rule_that_an_error_names_is_in_the_policy():
    known = {one.words for one in rules_of(Policy).values()}
    named = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "of_rule" in text else ():
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "of_rule"
            ):
                named |= {one.value for one in node.args[:1] if isinstance(one, ast.Constant)}
    assert len(named) > 15 and named <= known


# ---- a rule is added: its record, its check, and this test ----


@dataclass(frozen=True, slots=True)
class LongerPolicy(Policy):
    """A policy with one more rule, written as in the class itself."""

    max_arrays: int = rule(
        9,
        "maximum arrays",
        integer(1, lambda a, b: a <= b),
        "Most arrays that leave in one reply.",
        strict=2,
        without={ANALYST: "More arrays at a time."},
    )


def check_array_count(context):
    """Require no more arrays than the policy allows."""
    most = context.policy.max_arrays
    if len(context.reply.arrays) > most:
        why = f"allows {most} arrays in one reply. Ask for fewer"
        raise PolicyError.of_rule("maximum arrays", context.data.name, why)


def three(data, state):
    state.report(EntityCount(20))
    return {name: np.array(1.0) for name in "abc"}


def test_a_rule_is_its_record_its_check_and_its_test(monkeypatch):
    monkeypatch.setattr("fedstat.federation.disclosure.site.AFTER", (*checks.AFTER, check_array_count))
    gives = {name: ArrayDeclaration("aggregate", "sum", 0, behind=(EntityCount,)) for name in "abc"}
    monkeypatch.setitem(FAMILIES, "toy", {"three": Step(three, {}, gives)})
    request = pack_request(Request("Kiel", "toy", "three", {}, "s"))
    open_, strict = LongerPolicy.open(), LongerPolicy.strict()
    table = pd.DataFrame({"x": np.arange(20.0)})
    assert len(unpack_reply(Site("Kiel", table, open_).answer(request)).arrays) == 3
    # The check, the error's fields and the ledger.
    site = Site("Kiel", table, LongerPolicy(max_arrays=2))
    with pytest.raises(PolicyError, match=r"^Kiel: its policy \(maximum arrays\) allows 2 arrays") as caught:
        site.answer(request)
    assert (caught.value.rule, caught.value.site) == ("maximum arrays", "Kiel")
    assert site.site_ledger.present.entries[-1].rule == "PolicyError (maximum arrays)"
    # Strict value and comparison.
    assert (strict.max_arrays, strict.is_strict) == (2, True)
    assert LongerPolicy.strict(max_arrays=3).looser_than_strict() == ("max_arrays",)
    assert stricter_rules(open_, LongerPolicy(max_arrays=8)) == ("max_arrays",)
    assert not stricter_rules(open_, LongerPolicy(max_arrays=10))
    # The policy file.
    text = strict.to_toml()
    assert "# Most arrays that leave in one reply.\nmax_arrays = 2\n" in text
    assert LongerPolicy.from_text("a file", text) == strict
    with pytest.raises(PartitionError, match="max_arrays: expected a whole number of at least 1, received 0"):
        LongerPolicy.from_text("a file", "max_arrays = 0")
    # The threat table and the owner's page.
    loose = LongerPolicy.strict(max_arrays=3)
    (threat,) = [one for one in threats_under(loose) if one.line]
    assert (threat.party, threat.line, threat.learns) == (ANALYST, "max_arrays = 3", "More arrays at a time.")
    page = policy_page(type("View", (), {"policy": loose, "site_ledger": SiteLedger()}))
    assert page["looser"].value == ["max_arrays = 3"]
    assert ("Most arrays that leave in one reply.", "3", "2", "yes", "max_arrays") in page["rules"].value


def test_a_field_without_a_record_cannot_be_used():
    @dataclass(frozen=True, slots=True)
    class Forgotten(Policy):
        max_arrays: int = 9

    with pytest.raises(KeyError, match="rule"):
        Forgotten()
