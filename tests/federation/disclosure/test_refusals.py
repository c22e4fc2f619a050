"""Texts of refusals, the owner's log of reasons, the count of refusals, and threat statements."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedstat.errors import (
    ConsentError,
    DescriptionError,
    DesignError,
    FormulaError,
    PolicyError,
    SecurityError,
)
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.disclosure.facts import FactorsRequested, FormulaFactor
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.refusals import RefusalLog, refusal_text
from fedstat.federation.disclosure.threat_statements import (
    ACTIVE_PARTIES,
    STRICT_TRIAL_NOTE,
    one_process_note,
    threats_beyond_one_fit,
    threats_under,
)
from fedstat.federation.tables.published import PublishedColumn

SILENT = {"min_count": 0, "min_events": 0, "min_level_count": 0, "remember": "nothing"}
"""Rules that are off; those that the open policy has off stay so."""


def log_of(**rules):
    return RefusalLog("Kiel", SiteLedger("Kiel")), SimpleNamespace(policy=Policy(**rules), published={})


def factor(text, *functions):
    return FormulaFactor(text, (text,), functions)


def text_of(*factors, crossed=(), published=None, **rules):
    requested = FactorsRequested(factors, dict.fromkeys(crossed, factors))
    return refusal_text("Kiel", Policy(**SILENT | rules), [requested], published or {})


# ---- the owner's log ----------------------------------------------------------------------------------


def test_the_latest_hundred_reasons_are_kept():
    log, _ = log_of()
    for number in range(130):
        log.note(f"reason {number}")
    assert log.reasons == [f"reason {number}" for number in range(30, 130)]


def test_an_owner_who_takes_the_lines_gets_each():
    lines = []
    log = RefusalLog("Kiel", SiteLedger("Kiel"), lines.append)
    log.note("one")
    log.note("two")
    assert lines == log.reasons == ["one", "two"]


@pytest.mark.parametrize("error", [ConsentError, DescriptionError, FormulaError, SecurityError])
def test_an_error_that_depends_on_no_row_is_shown_and_not_counted(error):
    log, data = log_of(reasons="logged", max_refusals=3)
    shown = log.outward(data, (), error("unknown column"), "Anna")
    assert (type(shown), str(shown)) == (error, "unknown column")
    assert not log.reasons and not log.site_ledger.refusals["Anna"]


@pytest.mark.parametrize(
    ("rules", "shown", "counted"),
    [
        ({}, True, 0),
        ({"max_refusals": 1}, True, 1),
        ({"reasons": "logged"}, False, 0),
        ({"reasons": "logged", "max_refusals": 1}, False, 1),
        ({"privacy": Budget(1.0, 1e-6)}, False, 0),
        ({"privacy": Budget(1.0, 1e-6), "reasons": "logged", "max_refusals": 9}, False, 1),
    ],
)
def test_an_error_that_depends_on_rows_is_shown_where_the_owner_says_so(rules, shown, counted):
    log, data = log_of(**rules)
    error = log.outward(data, (), DesignError("row 7"), "Anna")
    assert ("row 7" in str(error)) == shown
    assert (log.reasons == ["row 7"]) == (not shown)
    if not shown:
        assert isinstance(error, PolicyError) and (error.rule, error.site) == ("rows", "Kiel")
    assert (log.site_ledger.refusals["Anna"], log.site_ledger.refusals["Bert"]) == (counted, 0)


# ---- the general text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "keys"),
    [
        ({}, set()),
        ({"min_level_count": 3}, {"min_level_count"}),
        ({"products": "counted"}, {"products"}),
        ({"max_share": 0.2}, {"max_share"}),
        ({"min_events": 1}, {"min_events"}),
        ({"min_count": 1}, {"min_count"}),
        ({"remember": "rows"}, {"remember"}),
        ({"remember": "all", "min_events": 3}, {"remember", "min_events"}),
    ],
)
def test_only_keys_that_are_not_off_are_named(rules, keys):
    text = text_of(factor("g", "C"), factor("x"), **rules)
    named = ("min_level_count", "products", "max_share", "min_events", "min_count", "remember")
    assert {key for key in named if key in text} == keys
    assert text.startswith("Kiel: refused")


def test_the_two_likeliest_causes_are_named():
    strict = {name: getattr(Policy.strict(), name) for name in (*SILENT, "max_share", "products")}
    text = text_of(factor("ward", "C"), factor("x"), **strict)
    assert "(the 2 likeliest follow). Terms ward (" in text and "Rows (" in text
    assert "Columns" not in text and "A response" not in text
    text = text_of(factor("x"), **strict)
    assert "Rows (" in text and "Columns x (" in text and "A response" not in text


def test_levels_and_numbers_are_named_apart():
    """Levels: a category, a code of two values, C() and a comparison. Numbers: all others."""
    published = {
        "category": PublishedColumn("category", levels=("a", "b", "c")),
        "binary": PublishedColumn("number", (0.0, 1.0), (0, 1)),
        "ternary": PublishedColumn("number", (0.0, 2.0), (0, 1, 2)),
        "number": PublishedColumn("number", (0.0, 1.0)),
    }
    coded, compared = factor("coded", "C"), factor("compared", "comparison")
    plain = [factor(name) for name in ("category", "binary", "ternary", "number", "unknown")]
    requested = (coded, compared, *plain, factor("root", "sqrt"))
    text = text_of(*requested, published=published, min_level_count=3)
    assert "coded, compared, category, binary (" in text
    assert "ternary" not in text and "number" not in text
    text = text_of(*requested, published=published, max_share=0.2)
    assert "ternary, number, unknown, root (" in text
    assert "category" not in text and "coded" not in text


def test_a_product_counts_among_the_levels_only():
    rules = {"min_level_count": 3, "max_share": 0.2}
    text = text_of(factor("x"), crossed=("x:z",), **rules)
    assert text.count("x:z (") == 1 and text.count("x (") == 1
    assert text_of(factor("x"), crossed=("x",), **rules).count("x (") == 1


@pytest.mark.parametrize(("n", "more"), [(1, ""), (8, ""), (9, "and 1 more"), (12, "and 4 more")])
def test_eight_terms_are_named(n, more):
    text = text_of(*(factor(f"g{k}", "C") for k in range(n)), min_level_count=3)
    assert f"g{min(n, 8) - 1}" in text and f"g{min(n, 8)}" not in text
    assert ("more (" in text) == bool(more) and more in text


def test_a_request_without_factors_has_no_response():
    rules = Policy(**SILENT | {"min_events": 3})
    assert "min_events" not in refusal_text("Kiel", rules, [], {})
    assert "min_events" in text_of(min_events=3)


# ---- threats ------------------------------------------------------------------------------------------


def sentence(words, **rules):
    (found,) = {threat.learns for threat in threats_under(Policy.strict(**rules)) if words in threat.learns}
    return found


@pytest.mark.parametrize(
    ("words", "rules", "number"),
    [
        ("such refusals", {}, "After 10 "),
        ("such refusals", {"max_refusals": 4}, "After 4 "),
        ("such refusals", {"max_refusals": 12}, "After 10 "),
        ("such refusals", {"max_refusals": 0}, "After 10 "),
        ("fit of a site's own rows", {}, "at least 60 rows"),
        ("fit of a site's own rows", {"min_own_rows": 70}, "at least 70 rows"),
        ("fit of a site's own rows", {"min_own_rows": 50}, "at least 60 rows"),
        ("No sum over fewer than", {"min_count": 9, "min_level_count": 20, "min_events": 20}, "9 rows"),
        ("or of a product of columns", {}, "1 to 2 rows"),
        ("or of a product of columns", {"min_level_count": 6}, "1 to 5 rows"),
        ("or of a product of columns", {"min_level_count": 1}, "1 to 2 rows"),
        ("different sums of functions", {}, "At most 0.5 "),
        ("different sums of functions", {"max_column_sums": 0.25}, "At most 0.25 "),
        ("different sums of functions", {"max_column_sums": 2}, "At most 0.5 "),
        ("different sums of functions", {"max_column_sums": "any"}, "At most 0.5 "),
    ],
)
def test_a_threat_has_the_number_of_the_policy_or_of_the_strict_one(words, rules, number):
    """The sentence on the strict policy stays if a rule is looser. The looser rule has its own line."""
    found = {one.learns for one in threats_under(Policy.strict(**rules)) if not one.line}
    assert any(words in one and number in one for one in found)


@pytest.mark.parametrize(
    ("rules", "number"),
    [
        ({}, 3),
        ({"min_events": 7}, 3),
        ({"min_level_count": 8}, 3),
        ({"min_events": 7, "min_level_count": 8}, 7),
        ({"min_events": 1, "min_level_count": 1}, 3),
    ],
)
def test_the_smaller_of_two_minimum_counts_bounds_small_sums(rules, number):
    words = "rows of a level or of an outcome"
    assert f"fewer than {number} rows" in sentence(words, **rules)


def test_a_looser_rule_adds_a_threat_with_its_line():
    (line,) = {one.line for one in threats_under(Policy.strict(min_events=1)) if one.line}
    assert line == "min_events = 1"
    assert not any(one.line for one in threats_under(Policy.strict()))


def test_a_budget_replaces_all_threats_but_the_intruders():
    budget = list(threats_under(Policy.strict(privacy=Budget(1.0, 1e-6), min_events=1)))
    strict = list(threats_under(Policy.strict()))
    intruder = "Intruder with file access"
    assert [one for one in budget if one.party == intruder] == [
        one for one in strict if one.party == intruder
    ]
    assert {one.line for one in budget if one.party != intruder} == {"[privacy]"}


@pytest.mark.parametrize(
    ("policies", "note"),
    [
        ([Policy.strict()], True),
        ([], False),
        ([Policy.strict(), Policy.open()], False),
        ([Policy.open()], False),
    ],
)
def test_a_trial_of_the_strict_policy_is_one_at_all_sites(policies, note):
    assert (one_process_note(policies) == STRICT_TRIAL_NOTE) == note
    here, apart = ({party for party, _ in threats_beyond_one_fit(policies, at)} for at in (True, False))
    assert here == {"Everybody here"} | (set(ACTIVE_PARTIES) if note else set())
    assert apart == (set(ACTIVE_PARTIES) if policies else set())
