"""The summary: one content in four renderings, loud where it must be."""

import csv
import io
import os
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from fedstat.errors import NotAvailableError
from fedstat.inference.summary import WIDTH
from fedstat.inference.tables import Sheet, SheetSummary, human_bytes, latex, number, shorten


def widths(summary):
    """Widths of the lines of the tables."""
    return {len(line) for line in SheetSummary(summary.sheets).as_text().splitlines()}


def test_text_holds_estimate_and_federation(result):
    summary = result.summary()
    text = summary.as_text()
    assert widths(summary) == {WIDTH}
    for shown in (
        "Dep. Variable:",
        "400",
        "What left the sites: aggregate, per entity and the schema; see disclosure().",
        "none (exact)",
        "25.00 %",
    ):
        assert shown in text
    left = result.disclosure().as_text()
    assert "1.2 MB" in left and "schema, per entity" in left


def test_text_is_that_of_the_statsmodels_tables():
    wrapped = Sheet(
        ("a", ""), (("one two three", "1"), ("", "2.5")), "lr", (6, 4), "a title of many words", 2, True
    )
    summary = SheetSummary([wrapped])
    tables = [table.as_text().rsplit("\n", 1)[0] for table in summary.tables]
    assert summary.as_text().startswith("\n".join(tables) + "\n=")


def test_a_heading_takes_the_whole_width():
    sheet = Sheet(("", "x"), (("A heading of several words", ""), ("a", "1")), "lr", (10, 20))
    assert SheetSummary([sheet]).as_text().splitlines()[3] == "A heading of several words".ljust(31)


def test_site_stands_above_its_rows(result):
    rows = result.summary().sheets[1].rows
    headings = {row[0].partition(" (")[0]: i for i, row in enumerate(rows) if not any(row[1:])}
    assert headings == {"Judicial_Organ": 1, "Register": 4, "Credit Agency": 7}
    assert rows[0][0] == "Intercept"
    assert rows[5][0].strip() == "sex[T.male]"
    assert rows[5][0] != rows[5][0].strip()


def test_numbers_are_those_of_the_fit(result, reference):
    line = next(line for line in result.summary().as_text().splitlines() if "np.log(x2)" in line)
    low, high = reference.conf_int().loc["np.log(x2)"]
    numbers = [float(cell) for cell in line.split()[-6:]]
    expected = [
        reference.params["np.log(x2)"],
        reference.bse["np.log(x2)"],
        reference.tvalues["np.log(x2)"],
        0.0,
        low,
        high,
    ]
    np.testing.assert_allclose(numbers, expected, atol=5.1e-4)


def test_alpha_is_in_the_header_and_in_the_numbers(result, reference):
    summary = result.summary(alpha=0.1)
    assert summary.sheets[1].headers[-2:] == ("[0.05", "0.95]")
    assert float(summary.sheets[1].rows[0][-1]) == pytest.approx(
        reference.conf_int(0.1).loc["Intercept", 1], abs=1e-4
    )


def test_not_converged_is_the_first_line_and_the_first_note(make):
    result = make(converged=False, convergence="relative score 3e-2 after 500 rounds")
    summary = result.summary()
    first = summary.as_text().splitlines()[0]
    assert first.startswith("*** NOT CONVERGED: relative score 3e-2 after 500 rounds")
    assert result.notes[0].startswith("NOT CONVERGED") and not any("NOT CONV" in n for n in summary.notes)
    assert "NOT CONVERGED" in summary.as_html()
    assert "NOT CONVERGED" in summary.as_latex()


def test_converged_is_quiet(result):
    assert "NOT CONVERGED" not in str(result.summary())


def test_without_standard_errors_the_reason_is_printed(make):
    summary = make(cov=None, reasons={"cov_params": "averaging has none"}).summary()
    assert summary.sheets[1].headers == ("", "coef")
    assert "averaging has none" in summary.notes[0]


def test_undetermined_standard_errors_are_noted(make, reference):
    cov = reference.cov_params().to_numpy().copy()
    cov[4, 4] = np.nan
    assert "nan) of: x1." in make(cov=cov).notes[0]


def test_no_site_no_heading(make):
    summary = make(sites=("",) * 7).summary()
    assert all(any(row[1:]) for row in summary.sheets[1].rows)
    assert widths(summary) == {WIDTH}


def test_without_a_ledger_nothing_is_claimed(restricted):
    assert "What left" not in restricted.summary().as_text()
    with pytest.raises(NotAvailableError, match="no ledger"):
        restricted.disclosure()


def test_long_names_lose_their_middle_in_text_only(make, reference):
    names = ("A" * 60, *list(reference.params.index)[1:])
    summary = make(names=names, sites=("Market Supervision and Administration Bureau",) * 7).summary()
    assert widths(summary) == {WIDTH}
    assert "A" * 60 in summary.as_html()


ODD = Sheet(("name", "[0.025"), (("C(g)[T.<5 & \\x_1, 50%]", "1"), ("[low", "2")), "lr", (24, 8), title="a_b")


def test_html_is_well_formed_and_keeps_the_text():
    root = ET.fromstring(SheetSummary([ODD], ["p < 0.05"], "x & y").as_html())
    assert ODD.rows[0][0] in [cell.text for cell in root.iter("td")]
    assert [note.text for note in root.iter("li")] == ["p < 0.05"]


def test_html_indents_levels_below_their_column():
    sheet = Sheet(("name", "n"), (("stage, I", "8"), ("  II", "9")), "lr", (24, 8))
    cells = [cell.text for cell in ET.fromstring(SheetSummary([sheet]).as_html()).iter("td")]
    assert cells == ["stage, I", "8", "\xa0\xa0II", "9"]


def test_latex_is_escaped():
    assert latex("a_b & 50% {x} #1 $ \\ ^~") == (
        r"a\_b \& 50\% \{x\} \#1 \$ \textbackslash{} \textasciicircum{}\textasciitilde{}"
    )
    body = SheetSummary([ODD]).as_latex()
    assert "\n{[}low & 2 \\\\" in body
    assert body.count(r"\begin{") == body.count(r"\end{") == 2


def test_csv_reads_back():
    rows = list(csv.reader(io.StringIO(SheetSummary([ODD], ["a, b"]).as_csv())))
    assert rows == [["a_b"], ["name", "[0.025"], *map(list, ODD.rows), ["[1] a, b"]]


def test_notes_are_numbered_and_wrapped():
    lines = SheetSummary([ODD], ["word " * 20, "b"]).as_text().splitlines()
    start = lines.index("Notes:")
    assert lines[start + 1].startswith("[1] word")
    assert lines[start + 2].startswith("    word")
    assert lines[-1] == "[2] b"
    assert max(map(len, lines)) <= ODD.width


def test_notebook_shows_html(result):
    assert result._repr_html_() == result.summary()._repr_html_() == result.summary().as_html()
    assert result.summary()._repr_latex_() == result.summary().as_latex()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0000"),
        (-0.12345, "-0.1235"),
        (1.2e-5, "1.200e-05"),
        (9999.1234, "9999.1234"),
        (-123456.78, "-123456.8"),
        (-1.5e8, "-1.500e+08"),
        (float("nan"), "nan"),
    ],
)
def test_number(value, shown):
    assert number(value) == shown


def test_shorten_and_bytes():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcde…hijk"
    assert [human_bytes(n) for n in (0, 999, 1000, 999_960, 5 * 10**12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.0 MB",
        "5.0 TB",
    ]


def test_lines_are_as_wide_as_the_terminal(result, monkeypatch):
    summary = result.summary()
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((70, 24)))
    assert widths(summary) == {WIDTH}  # output to a file or a notebook
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert widths(summary) == {70} and max(map(len, str(summary).splitlines())) == 70
    numbers = {part for part in summary.as_text(WIDTH).split() if "." in part and part[-1].isdigit()}
    assert numbers <= set(summary.as_text().split())
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((200, 24)))
    assert widths(summary) == {WIDTH}
