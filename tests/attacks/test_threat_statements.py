"""The statements on who can learn what have one source, follow from the policy, and are printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from people import people

import fedstat as fs
from fedstat.errors import PartitionError, PolicyError
from fedstat.federation.disclosure.policy import Budget
from fedstat.federation.disclosure.rules import INTRUDER, PARTIES, rules_of
from fedstat.federation.disclosure.threat_statements import (
    ACTIVE_PARTIES,
    ALL_ROWS_THREAT,
    BUDGET_STATEMENTS,
    STRICT_LEARNS,
)

RULES = rules_of(fs.Policy)
STRICT_VALUES = [name for name, rule in RULES.items() if not rule.within(rule.default, rule.strict)]
THREATS_WITHOUT_RULE = {name: rule.without for name, rule in RULES.items() if rule.without}
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "disclosure.md"
FORMER = (
    "no number that belongs to a single enterprise leaves",
    "in which an altered line is found",
    "nothing that depends on the data leaves",
    "far fewer equations",
)


def test_every_rule_of_the_strict_policy_says_what_is_learned_without_it():
    assert set(STRICT_VALUES) <= set(THREATS_WITHOUT_RULE) and set(STRICT_LEARNS) == set(PARTIES)
    looser = {name for name in THREATS_WITHOUT_RULE if name in fs.Policy().looser_than_strict()}
    assert looser == set(fs.Policy().looser_than_strict())


def test_the_strict_policy_adds_nothing_and_each_line_its_own():
    strict = fs.threats("strict").tidy()
    assert list(strict["party"].unique()) == list(PARTIES) and set(strict["under"]) == {"strict"}
    assert len(strict) == sum(map(len, STRICT_LEARNS.values()))
    for rule in STRICT_VALUES:
        value = getattr(fs.Policy.open(), rule)
        added = fs.threats(fs.Policy.strict(**{rule: value})).tidy().query("under != 'strict'")
        assert list(added["party"]) == list(THREATS_WITHOUT_RULE[rule]), rule
        assert list(added["learns"]) == list(THREATS_WITHOUT_RULE[rule].values())
        assert added["under"].str.startswith(f"{rule} = ").all()
    few = fs.threats(fs.Policy.strict(min_count=1)).tidy()
    assert "min_count = 1" in set(few["under"])
    more = fs.threats(fs.Policy.strict(min_count=9)).tidy()["learns"]
    assert more.str.startswith("No sum over fewer than 9 rows, except").sum() == 1


def test_with_a_budget_nothing_of_rows_is_learned():
    table = fs.threats(fs.Policy.strict(privacy=Budget(1.0, 1e-9))).tidy()
    assert list(table["party"].unique()) == list(PARTIES)
    assert set(table["learns"][table["under"] == "[privacy]"]) == set(BUDGET_STATEMENTS)
    assert set(table["party"][table["under"] == "strict"]) == {INTRUDER}


@pytest.mark.filterwarnings("ignore")
def test_predictions_show_as_many_columns_as_are_claimed():
    """That of a model of one column, where numbers per entity need not be masked; under strict rules none."""
    rng = np.random.default_rng(1)
    X = pd.DataFrame(rng.normal(size=(300, 3)), columns=["a", "c", "d"]).assign(k=range(300))
    frames = {
        "A": X[["k", "a"]].assign(y=X.a + X.c + X.d + rng.normal(size=300)),
        "B": X[["k", "c"]],
        "C": X[["k", "d"]],
    }

    def found(**lines):
        policy = fs.Policy.strict(**lines)
        partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
        result = fs.VFEMRegression.from_formula("y ~ a + c + d", partition).fit()
        return abs(np.corrcoef(result.refit("y ~ d").predict(partition), X["d"])[0, 1])

    assert fs.threats(fs.Policy.strict(per_entity=1)).tidy()["learns"].str.contains("whole column").any()
    assert found(per_entity=1, masked_only=False) == pytest.approx(1.0)
    for lines in ({}, {"per_entity": 1}, {"masked_only": False}):
        with pytest.raises(PolicyError, match=r"per entity|masked only"):
            found(**lines)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("few", [6, 2])
def test_own_fits_and_bins_are_of_as_many_rows_as_is_claimed(few):
    """Three rows of a level and an outcome enter an own fit, two do not; a bin has five rows."""
    assert fs.threats("strict").tidy()["learns"].str.contains("fewer than 3 rows of a level").any()
    table = people(600)
    table["level"] = np.where(np.arange(600) % 200 < few, "rare", "common")
    place = np.arange(600) % 200
    table.loc[place < 3, "y"], table.loc[(place >= 3) & (place < few), "y"] = 1.0, 0.0
    partition = fs.ClientPartition.from_frame(table, by="site", policy="strict")
    if few < 6:
        with pytest.raises(PolicyError):
            fs.GLORE.from_formula("y ~ age + level", partition).fit()
        return
    result = fs.GLORE.from_formula("y ~ age + level", partition).fit()
    assert result.site_estimates["level[T.rare]"].notna().any()
    counts = result.evaluate().n
    assert counts[counts > 0].min() >= 5


def test_the_whole_table_begins_with_one_process():
    complete = fs.threats()
    assert tuple(complete.tidy().iloc[0]) == ("Everybody", "one process", ALL_ROWS_THREAT)
    lines = len(fs.threats("open").tidy()) + 1
    assert len(complete.tidy()) == lines and "two_sites" in str(complete) and "<table" in complete.as_html()
    with pytest.raises(PartitionError):
        fs.threats(7)


def test_no_page_has_a_former_claim():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "vignettes").glob("*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert not [claim for claim in FORMER if claim in text], page


def test_every_sentence_about_the_strict_policy_has_a_test():
    """The page has a row for each sentence, and the row names tests that exist."""
    rows = [line.strip("|\n ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    named = {row[0]: re.findall(r"`([^`]+)::([^`]+)`", row[1]) for row in rows if len(row) == 2}
    for sentence in fs.threats("strict").tidy()["learns"]:
        assert named.get(sentence), sentence
        for path, test in named[sentence]:
            assert f"def {test}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), test
    printed = {row[0] for row in rows if len(row) == 2 and "::" in row[1]}
    assert printed == set(fs.threats("strict").tidy()["learns"])


@pytest.mark.filterwarnings("ignore:left out rows")
def test_an_explanation_says_what_is_learned_by_other_means():
    patients = fs.datasets.make_hospitals()

    def reported(policy):
        partition = fs.ClientPartition.from_frame(patients, by="hospital", policy=policy)
        return fs.GLORE.from_formula("sex ~ age + C(cp)", partition).explain().learned

    assert ("Everybody here", ALL_ROWS_THREAT) in reported("open")
    strict = dict(reported("strict"))
    assert set(ACTIVE_PARTIES) <= set(strict) and strict["Everybody here"] == ALL_ROWS_THREAT
