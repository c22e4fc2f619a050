"""A policy as a file: what is written is read, and what has no meaning is named with its remedy."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstat as fs
from fedstat.errors import PartitionError
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.rules import RELEASE_KINDS, rules_of

COUNTS = st.integers(0, 10**6)
NAMES = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=12)
POLICIES = st.builds(
    Policy,
    families=st.none() | st.frozensets(NAMES, min_size=1, max_size=4),
    refused_kinds=st.frozensets(st.sampled_from(RELEASE_KINDS)),
    masked_only=st.booleans(),
    two_sites=st.sampled_from(["warn", "refuse"]),
    min_count=COUNTS,
    min_events=COUNTS,
    min_level_count=COUNTS,
    max_parameters=st.floats(1e-6, 1e6) | st.integers(1, 9),
    max_columns=st.none() | st.integers(1, 10**6),
    remember=st.sampled_from(["all", "rows", "nothing"]),
    privacy=st.none() | st.builds(Budget, st.floats(1e-3, 50.0), st.floats(0.0, 1e-6)),
)


def write(tmp_path, text):
    file = tmp_path / "ward.toml"
    file.write_text(text, encoding="utf-8")
    return file


@settings(max_examples=150, deadline=None)
@given(POLICIES)
def test_a_policy_that_is_written_is_read(tmp_path_factory, policy):
    file = tmp_path_factory.mktemp("policy") / "ward.toml"
    file.write_text(policy.to_toml(), encoding="utf-8")
    assert fs.Policy.from_toml(file) == policy


def test_the_template_explains_every_rule_and_changes_none(tmp_path):
    text = Policy().to_toml()
    assert fs.Policy.from_toml(write(tmp_path, text)) == Policy()
    names = set(rules_of(Policy)) - {"privacy"}
    assert all(f"{name} = " in text for name in names)
    assert all(rule.comment.split()[0] in text for rule in rules_of(Policy).values())
    assert all(len(line) <= 90 for line in text.splitlines())
    examples = "\n".join(line.removeprefix("# ") for line in text.splitlines() if " = " in line)
    strict = tomllib.loads(examples)
    assert set(strict) == names | {"epsilon", "delta"}


def test_what_is_left_out_keeps_its_default(tmp_path):
    text = 'refused_kinds = ["per entity"]\nmax_columns = 4\n[privacy]\nepsilon = 2\ndelta = 0\n'
    policy = fs.Policy.from_toml(str(write(tmp_path, text)))
    expected = Policy(refused_kinds=frozenset({"per entity"}), max_columns=4, privacy=Budget(2.0, 0.0))
    assert policy == expected
    assert fs.Policy.from_toml(write(tmp_path, "")) == Policy()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("min_cuont = 3", r"unknown key 'min_cuont' \(did you mean 'min_count'\?\). Its keys are families"),
        ("color = 3", "unknown key 'color'. Its keys are"),
        ("[privcy]\nepsilon = 1", r"unknown key 'privcy' \(did you mean 'privacy'\?\)"),
        ('families = "glm"', r"families: expected a list of names .*received 'glm'; write \['glm'\] for one"),
        ("families = [1]", "families: expected a list"),
        ('refused_kinds = ["raw column"]', r"refused_kinds: .*\(did you mean 'raw columns'\?\)"),
        ("masked_only = 1", "masked_only: expected true or false, received 1"),
        ("min_count = true", "min_count: expected a whole number of at least 0, received True"),
        ("max_parameters = nan", "max_parameters: expected a number above 0"),
        ("min_count = -1\nmax_refusals = 0.5", "min_count: .*; max_refusals: "),
        ("privacy = 3", r"privacy: expected a section \[privacy\] with epsilon, delta"),
        ("[privacy]\nepsilon = 1.0", r"section \[privacy\]: lacks delta; a budget is both"),
        (
            "[privacy]\nepsilon = 1.0\ndelta = 0.05",
            r"section \[privacy\]: delta: .*received 0.05. A larger one",
        ),
        ("[privacy]\nepsilon = -1\ndelta = 0", r"section \[privacy\]: epsilon: expected a number above 0"),
        (
            "[privacy]\nepsilonn = 1\ndelta = 0",
            r"\[privacy\]: unknown key 'epsilonn' \(did you mean 'epsilon'",
        ),
        ("min_count 3\n", r"is not TOML \(.*line 1.*Write texts in quotes"),
        ("min_count = 3\nmin_count = 4", "is not TOML"),
    ],
)
def test_a_file_without_meaning_is_named_with_its_remedy(tmp_path, text, words):
    file = write(tmp_path, text)
    with pytest.raises(PartitionError, match=words) as error:
        fs.Policy.from_toml(file)
    assert str(error.value).startswith(f"policy file '{file}'")


def test_a_file_that_is_absent_or_no_text(tmp_path):
    with pytest.raises(PartitionError, match=r"cannot be read \(FileNotFoundError\). Write one with"):
        fs.Policy.from_toml(tmp_path / "absent.toml")
    file = tmp_path / "ward.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PartitionError, match="is not TOML"):
        fs.Policy.from_toml(file)
