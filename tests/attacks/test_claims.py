"""Claims are made in one place, follow from the policy, and are what readers are told."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedstat as fs
from fedstat.errors import PartitionError
from fedstat.federation.door.owner.claims import ALL_ROWS, BEYOND, PARTIES, STRICT_LEARNS, WITHOUT
from fedstat.federation.door.owner.policy import STRICT

ROOT = Path(__file__).parents[2]
FORMER = (
    "no number that belongs to a single enterprise leaves",
    "in which an altered line is found",
    "nothing that depends on the data leaves",
    "far fewer equations",
)


def test_every_rule_of_the_strict_policy_says_what_is_learned_without_it():
    assert set(STRICT) <= set(WITHOUT) and set(STRICT_LEARNS) == set(PARTIES)
    looser = {name for name in WITHOUT if name in fs.Policy().looser_than_strict()}
    assert looser == set(fs.Policy().looser_than_strict())


def test_the_strict_policy_adds_nothing_and_each_line_its_own():
    strict = fs.threats("strict").tidy()
    assert list(strict["party"]) == list(PARTIES) and set(strict["under"]) == {"strict"}
    for rule in STRICT:
        value = getattr(fs.Policy.open(), rule)
        added = fs.threats(fs.Policy.strict(**{rule: value})).tidy().query("under != 'strict'")
        assert list(added["party"]) == list(WITHOUT[rule]), rule
        assert list(added["learns"]) == list(WITHOUT[rule].values())
        assert added["under"].str.startswith(f"{rule} = ").all()
    few = fs.threats(fs.Policy.strict(min_count=1)).tidy()
    assert "min_count = 1" in set(few["under"])
    assert "fewer than 9 entities" in fs.threats(fs.Policy.strict(min_count=9)).tidy()["learns"][0]


def test_the_whole_table_begins_with_one_process():
    whole = fs.threats()
    assert tuple(whole.tidy().iloc[0]) == ("Everybody", "one process", ALL_ROWS)
    lines = len(fs.threats("open").tidy()) + 1
    assert len(whole.tidy()) == lines and "two_sites" in str(whole) and "<table" in whole.as_html()
    with pytest.raises(PartitionError):
        fs.threats(7)


def test_readme_prints_the_table_and_no_former_claim():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert fs.threats("strict").as_markdown() in readme
    pages = [readme, *(path.read_text(encoding="utf-8") for path in (ROOT / "vignettes").glob("*.md"))]
    for page in pages:
        assert not [claim for claim in FORMER if claim in " ".join(page.split())]


def test_an_explanation_says_what_is_learned_by_other_means():
    patients = fs.datasets.make_hospitals()

    def told(policy):
        partition = fs.ClientPartition.from_frame(patients, by="hospital", policy=policy)
        return fs.GLORE.from_formula("sex ~ age + C(cp)", partition).explain().learned

    assert ("Everybody here", ALL_ROWS) in told("open")
    strict = dict(told("strict"))
    assert set(BEYOND) <= set(strict) and strict["Everybody here"] == ALL_ROWS
