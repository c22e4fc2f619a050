"""The page on a quarter for a data protection officer, compared with the ledger entry by entry."""

from __future__ import annotations

import re
import time
import warnings
from html import unescape
from math import prod

import numpy as np
import pandas as pd
import pytest
from operating import make_federation, printed, served_sites

import fedstat as fs
from fedstat.errors import FedstatError, PartitionError
from fedstat.federation.audit import event_log
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.transport.site_folder import load_identity
from fedstat.operator.page import quarter_summary
from fedstat.operator.page.quarter_summary import Quarter

N = 80
ADA, LI = ("Ada Berg", "Does x predict y?"), ("Li <b>Wei</b>", "A table")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Three analyses by two persons, refusals, and a policy that became weaker."""
    home = tmp_path_factory.mktemp("quarter")
    rng = np.random.default_rng(4)
    frames = {
        name: pd.DataFrame(
            {
                "x": rng.normal(size=N),
                "g": ["a", "b"] * (N // 2),
                "rare": ["c", "d", *["e", "f"] * (N // 2 - 1)],
                "y": rng.normal(size=N),
            }
        )
        for name in "AB"
    }
    make_federation(home, frames, policy=Policy.open())
    with served_sites(home, "AB"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (person, purpose), formulas in ((ADA, ("y ~ x", "y ~ x", "y ~ x + g")), (LI, ("x ~ g",))):
            partition = fs.ClientPartition.connect(home / "study", person=person, purpose=purpose)
            for formula in formulas:
                fs.FederatedOLS.from_formula(formula, partition).fit(masked=False, local=False)
        with pytest.raises(FedstatError):
            fs.FederatedOLS.from_formula("y ~ rare", partition).fit(masked=False)
    (home / "A/policy.toml").write_text(Policy.open().to_toml().replace("min_count = 5", "min_count = 3"))
    with served_sites(home, "A"):
        pass
    return home


def ledger_of(home):
    return read_ledger(home / "A", "A", load_identity(home / "A").public)


def text_of(page):
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_the_page_has_what_the_ledger_has(home, capsys, tmp_path):
    out = tmp_path / "quarter.html"
    printed(capsys, "site", "summary", home / "A", "--out", out)
    page = out.read_text()
    assert out.stat().st_mode & 0o077 == 0
    assert "<script" not in page and "<b>Wei</b>" not in page  # texts of others are escaped
    text = text_of(page)
    assert "Analyses that released numbers 4 " in text and "Persons who asked 2 " in text
    entries = [
        (chain.subject, entry)
        for chain in ledger_of(home).chains
        for entry in chain.entries
        if entry.left and entry.array != "text"
    ]
    alone = sum(prod(entry.shape) for _, entry in entries if entry.kind == "aggregate")
    assert f"Numbers of this site alone {alone:,} " in text and "Numbers about single records 0 " in text
    by_x = sum(prod(e.shape) for s, e in entries if e.kind == "aggregate" and "x" in s.columns)
    assert f" x 4 0 {by_x:,} 0 " in text
    assert "Ada Berg study Does x predict y?" in text and "Li <b>Wei</b> study A table" in text
    refused = sum(one.kind == event_log.REFUSAL for c in ledger_of(home).chains for one in c.entries)
    assert refused and f"Requests refused {refused:,} " in text
    assert "min_count from 5 to 3" in text and "Changes that made the policy weaker 1 " in text
    assert "largest share" in text


def test_a_quarter_without_releases_says_so(home, capsys, tmp_path):
    out = tmp_path / "quarter.html"
    printed(capsys, "site", "summary", home / "A", "--quarter", "2020-Q1", "--out", out)
    text = text_of(out.read_text())
    assert "2020-01-01 to 2020-03-31" in text and "Nobody received a number." in text
    assert "No request was refused." in text and "The policy did not change." in text
    assert "not a quarter" in printed(capsys, "site", "summary", home / "A", "--quarter", "2020-5", code=1)
    wrong = printed(capsys, "site", "summary", home / "A", "--out", tmp_path / "quarter.pdf", code=1)
    assert "expected the ending .html" in wrong


def test_a_problem_with_the_records_leaves_the_rest_of_the_page(home, capsys, tmp_path):
    moved = home / "A.csv"
    moved.rename(home / "away.csv")
    try:
        printed(capsys, "site", "summary", home / "A", "--out", tmp_path / "quarter.html")
    finally:
        (home / "away.csv").rename(moved)
    page = (tmp_path / "quarter.html").read_text()
    assert 'class="problem"' in page and "Ada Berg" in page


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("2026-Q1", "2026-01-01", "2026-03-31"),
        ("2024-Q2", "2024-04-01", "2024-06-30"),
        ("2026-Q4", "2026-10-01", "2026-12-31"),
    ],
)
def test_a_quarter_has_its_days_and_no_others(text, first, last):
    quarter = Quarter.parse(text)
    assert (quarter.first, quarter.last, str(quarter)) == (first, last, text)
    assert quarter.has(f"{first}T00:00:00Z") and quarter.has(f"{last}T23:59:59Z")
    outside = pd.Timestamp(first) - pd.Timedelta(days=1), pd.Timestamp(last) + pd.Timedelta(days=1)
    assert not any(quarter.has(one.strftime("%Y-%m-%dT12:00:00Z")) for one in outside)
    with pytest.raises(PartitionError, match="2026-Q4"):
        Quarter.parse("2026-Q5")
    assert Quarter.parse("").has(time.strftime("%Y-%m-%d", time.gmtime()))


def test_long_lists_are_cut_and_say_how_much_is_missing(home, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(quarter_summary, "MOST_COLUMNS", 1)
    monkeypatch.setattr(quarter_summary, "MOST_QUESTIONS", 1)
    printed(capsys, "site", "summary", home / "A", "--out", tmp_path / "quarter.html")
    text = text_of((tmp_path / "quarter.html").read_text())
    assert "2 more columns are in the export" in text and "; and 1 more" in text
