"""Values of a rule, which of two is stricter, and how an owner writes it, on a small policy."""

from dataclasses import dataclass

import pytest

from fedstat.errors import PartitionError
from fedstat.federation.disclosure.rules import (
    ANALYST,
    RELEASE_KINDS,
    check_policy_values,
    choice,
    integer,
    is_integer,
    is_name_set,
    is_number,
    limit,
    looser_rules,
    parse_policy,
    rule,
    rules_of,
    stricter_rules,
    toml_comment,
    toml_line,
    toml_value,
    write_policy,
)


@dataclass(frozen=True)
class Small:
    """A policy of few rules."""

    least: int = rule(
        5, "least", integer(1, lambda a, b: a >= b), "The least.\n\nA second paragraph.", strict=9
    )
    most: int | None = rule(
        None,
        "most",
        integer(0, limit(None), none=True),
        "The most.",
        example="most = 3",
        moot=lambda p: p.mode == "off",
    )
    mode: str = rule("on", "mode", choice("on", "low", "off", strictest="off"), "How.", strict="off")
    kinds: frozenset = rule(
        frozenset(),
        "kinds",
        ("a list of kinds", lambda v: is_name_set(v) and v <= set(RELEASE_KINDS), lambda a, b: a >= b),
        "Which.",
    )


@pytest.mark.parametrize(
    ("value", "least", "fits"),
    [
        (1, 1, True),
        (0, 1, False),
        (2, 1, True),
        (True, 0, False),
        (1.0, 1, False),
        ("1", 1, False),
        (None, 0, False),
    ],
)
def test_whole_numbers_are_no_truth_values(value, least, fits):
    assert is_integer(value, least) is fits
    assert integer(least, limit(0))[1](value) is fits
    assert integer(least, limit(0), none=True)[1](value) is (fits or value is None)


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (0, True),
        (-1.5, True),
        (True, False),
        (float("nan"), False),
        (float("inf"), False),
        ("1", False),
        (None, False),
    ],
)
def test_numbers_are_finite_and_no_truth_values(value, fits):
    assert is_number(value) is fits


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (frozenset(), True),
        (frozenset({"a"}), True),
        (frozenset({"a", ""}), False),
        (frozenset({"a\n"}), False),
        (frozenset({1}), False),
        ({"a"}, False),
        (["a"], False),
    ],
)
def test_names_are_texts_that_can_be_printed(value, fits):
    assert is_name_set(value) is fits


@pytest.mark.parametrize(
    ("a", "b", "within"),
    [(3, 3, True), (3, 4, True), (4, 3, False), (3, 0, True), (0, 3, False), (0, 0, True)],
)
def test_zero_may_stand_for_no_limit(a, b, within):
    assert limit(0)(a, b) is within


@pytest.mark.parametrize(
    ("a", "b", "within"),
    [
        ("off", "on", True),
        ("on", "off", False),
        ("on", "low", True),
        ("low", "on", False),
        ("on", "on", True),
    ],
)
def test_the_strictest_word_comes_first_and_others_as_they_are_listed(a, b, within):
    expected, fits, compare = choice("on", "low", "off", strictest="off")
    assert expected == '"on", "low" or "off"'
    assert fits(a) and not fits("other")
    assert compare(a, b) is within


@pytest.mark.parametrize(
    ("policy", "looser"),
    [
        (Small(), ("least", "mode")),
        (Small(least=9, mode="off"), ()),
        (Small(least=10, mode="off"), ()),
        (Small(least=8, mode="off"), ("least",)),
        (Small(least=9, mode="low"), ("mode",)),
    ],
)
def test_rules_that_allow_more_than_the_strict_policy_are_named(policy, looser):
    assert looser_rules(policy) == looser


def test_a_rule_without_effect_is_not_looser():
    strict = rules_of(Small)["most"].strict
    assert strict is None and rules_of(Small)["kinds"].strict == frozenset()
    assert rules_of(Small)["most"].moot(Small(mode="off")) and not rules_of(Small)["most"].moot(Small())
    assert not rules_of(Small)["least"].moot(Small())

    @dataclass(frozen=True)
    class Limited:
        most: int = rule(7, "most", integer(0, limit(0)), "The most.", strict=3, moot=lambda p: p.most == 5)

    assert looser_rules(Limited()) == ("most",) and looser_rules(Limited(5)) == looser_rules(Limited(3)) == ()


@pytest.mark.parametrize(
    ("before", "after", "stricter"),
    [
        (Small(), Small(), ()),
        (Small(), Small(least=6), ("least",)),
        (Small(), Small(least=4), ()),
        (Small(), Small(most=3), ("most",)),
        (Small(most=3), Small(), ()),
        (Small(most=3), Small(most=2, mode="off"), ("most", "mode")),
        (Small(kinds=frozenset({"sketch"})), Small(kinds=frozenset({"control"})), ("kinds",)),
        (Small(kinds=frozenset({"sketch"})), Small(), ()),
    ],
)
def test_a_change_that_no_longer_allows_all_is_stricter(before, after, stricter):
    assert stricter_rules(before, after) == stricter


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"least": 0}, "least: expected a whole number of at least 1, received 0"),
        ({"mode": "of"}, 'mode: expected "on", "low" or "off", received \'of\''),
        ({"kinds": "sketch"}, "received 'sketch'; write ['sketch'] for one"),
        ({"kinds": frozenset({"sketches"})}, "received ['sketches']"),
        ({"least": 0, "most": -1}, "received 0; most: expected a whole number of at least 0, received -1"),
        ({"least": "x"}, "received 'x'"),
    ],
)
def test_a_value_that_does_not_fit_is_shown_with_its_remedy(values, words):
    with pytest.raises(PartitionError) as error:
        check_policy_values("here", Small, values)
    assert str(error.value).startswith("here: ")
    assert str(error.value).endswith(words)


def test_values_that_fit_are_no_error():
    check_policy_values(
        "here", Small, {"least": 1, "most": None, "mode": "low", "kinds": frozenset({"sketch"})}
    )
    check_policy_values("here", Small, {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (0.5, "0.5"),
        ('a"b', '"a\\"b"'),
        ("å", '"å"'),
        (frozenset({"b", "a"}), '["a", "b"]'),
    ],
)
def test_values_are_written_as_toml(value, text):
    assert toml_value(value) == text
    assert toml_line("name", value) == f"name = {text}"


def test_a_policy_is_written_with_its_comments_and_read_again():
    policy = Small(least=7, kinds=frozenset({"sketch"}))
    text = write_policy(policy)
    assert "# The least.\n#\n# A second paragraph.\nleast = 7" in text
    assert "# The most.\n# most = 3" in text and text.endswith('kinds = ["sketch"]\n')
    assert Small(**parse_policy("here", text.encode(), Small)) == policy
    assert max(map(len, toml_comment("word " * 99).splitlines())) <= 90


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("least = ", "is not TOML"),
        ("\xff", "is not TOML"),
        ("other = 1", "unknown key 'other'"),
        ("leat = 1", "unknown key 'leat' (did you mean 'least'?). Its keys are least, most, mode, kinds"),
    ],
)
def test_a_file_that_is_no_policy_is_named(text, words):
    with pytest.raises(PartitionError) as error:
        parse_policy("here", text.encode("latin-1"), Small)
    assert str(error.value).startswith("here: ") and words in str(error.value)


def test_lists_of_texts_are_sets_where_a_rule_holds_one():
    read = parse_policy("here", b'kinds = ["sketch"]\nmode = ["on"]\nmost = [1]', Small)
    assert read == {"kinds": frozenset({"sketch"}), "mode": ["on"], "most": [1]}
    assert parse_policy("here", b"", Small) == {}
    assert parse_policy("here", b"kinds = ['sketch', 1]", Small) == {"kinds": ["sketch", 1]}


def test_what_a_party_learns_without_a_rule_stands_in_its_record():
    @dataclass(frozen=True)
    class Explained:
        most: int = rule(7, "most", integer(0, limit(0)), "The most.", without={ANALYST: "All."})

    assert rules_of(Explained)["most"].without == {ANALYST: "All."}
    assert rules_of(Small)["least"].without == {}
