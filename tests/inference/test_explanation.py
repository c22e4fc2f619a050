"""How an explanation is printed."""

import pandas as pd
import pytest

from fedstat.inference.explanation import Explanation, count_range, expected_bytes, expected_count

ROW = {
    "step": "sum",
    "array": "total",
    "kind": "aggregate",
    "what": "a sum",
    "masked": False,
    "shape": (3,),
    "messages": 5,
    "messages_low": 2,
    "messages_high": 9,
    "bytes": 120,
    "bytes_low": 48,
    "bytes_high": 216,
    "rules": "minimum count 5",
    "guessed": False,
    "policed": True,
    "passes": True,
    "refused_by": "",
    "refusal": "",
}


def row(sender, receiver="coordinator", entities=8, **changes):
    return {"sender": sender, "receiver": receiver, "entities": entities, **ROW, **changes}


def explanation(*rows, refused=None):
    reported = row("coordinator", "A", 0, policed=False, rules="", array="beta")
    return Explanation(
        "Model.fit(masked=False)",
        pd.DataFrame([reported, *rows]),
        [("open", (1, 1, 1)), ("sum", (2, 5, 9))],
        refused or {},
        [("Coordinator", "learns <sums>.")],
        ["A guess."],
    )


def test_what_passes_is_printed_with_rounds_bytes_rules_and_notes():
    text = str(explanation(row("A"), row("B", entities=12)))
    assert text.startswith("Every policy allows this fit")
    assert "Model.fit(masked=False) would request; nothing" in " ".join(text.split())
    for words in (
        "about 6 (3 to 10)",
        "about 120 B (48 B to 216 B)",
        "A, B would send to the coordinator, each",
        "8-12",
        "minimum count 5",
        "learns <sums>.",
        "[1] A guess.",
    ):
        assert words in text, words
    assert "REFUSED" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_sites_that_send_other_things_stand_apart():
    text = str(explanation(row("A"), row("B", array="mean", guessed=True), row("C", masked=True)))
    assert [name for name in "ABC" if f"{name} would send to the coordinator" in text] == ["A", "B", "C"]
    assert "(3,) ?" in text and "masked" in text


def test_a_refusal_is_loud():
    refused = {"A": {"minimum count": ["A: its policy wants more.", "A: and more."]}}
    bad = row("A", passes=False, refused_by="minimum count", refusal="A: its policy wants more.")
    shown = explanation(bad, row("B"), refused=refused)
    text = str(shown)
    assert not shown.passes
    assert text.startswith("REFUSED by the policy of A.")
    assert "THIS FIT WOULD BE REFUSED" in text
    assert "its policy wants more. (and 1 arrays more)" in text
    assert "REFUSED: minimum" in text
    html = shown._repr_html_()
    assert html.index("REFUSED by the policy of A") < html.index("<table") and "#b00020" in html
    assert "learns &lt;sums&gt;." in html and "<sums>" not in html


def test_tables():
    shown = explanation(row("A"), row("B"))
    assert shown.tidy().equals(shown.table) and shown.tidy() is not shown.table
    totals = shown.totals()
    assert totals.loc["A", "sends"] == 120 and totals.loc["A", "receives"] == 120
    assert totals.loc["coordinator", ["receives", "receives_low", "receives_high"]].tolist() == [240, 96, 432]
    assert totals["sends"].sum() == totals["receives"].sum()


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (expected_count, ((3, 3, 3),), "3"),
        (expected_count, ((20, 60, 2000),), "about 60 (20 to 2,000)"),
        (expected_bytes, (10, 10, 10), "10 B"),
        (expected_bytes, (10, 2000, 3000), "about 2.0 kB (10 B to 3.0 kB)"),
        (count_range, (0, 0), ""),
        (count_range, (5, 5), "5"),
        (count_range, (5, 1200), "5-1,200"),
    ],
)
def test_numbers_with_their_range(function, arguments, text):
    assert function(*arguments) == text


def test_sites_that_are_alike_share_every_line_and_are_named_once():
    names = [f"region {k:02d}" for k in range(16)]
    arrays = ({}, {"array": "sum of squares"}, {"array": "count", "shape": ()})
    rows = [row(name, **each) for name in names for each in arrays]
    rows += [row("coordinator", name, 0, policed=False, rules="") for name in names]
    refused = {name: {"minimum count": [f"{name}: too few."]} for name in names}
    text = str(explanation(*rows, refused=refused))
    assert "REFUSED by the policy of all 16 sites." in text
    flat = " ".join(text.split())
    assert text.count("too few.") == 1 and text.count("all 16 sites, each") == 2
    assert f"16 sites would send to the coordinator, each: {', '.join(names)}" in flat
    assert "total, sum of" in flat and "squares, each" in flat and "count" in flat
    assert all(flat.count(name) == 1 for name in names)
    assert len(text.splitlines()) < 50 and max(map(len, text.splitlines())) <= 110


def test_some_of_many_sites_are_named():
    names = [f"region {k}" for k in range(16)]
    refused = {name: {"minimum count": [f"{name}: too few."]} for name in names[:5]}
    text = str(explanation(*(row(name) for name in names), refused=refused))
    assert text.count("too few.") == 1 and "region 4, each" in " ".join(text.split())
    text = str(explanation(row("A"), row("B", bytes=130)))
    assert "about 120 B" in text and "about 130 B" in text
