"""Printed tables as Markdown, LaTeX and Word documents."""

import sys

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.inference.tables import Sheet, SheetSummary, frame_summary


def test_a_table_in_markdown_has_its_cells_and_alignment():
    sheet = Sheet(("", "P>|z|"), (("a:b", "0.1"), ("c|d", "0.2")), "lr", (5, 5), "Title")
    text = SheetSummary([sheet], ["one", "two"], ["Careful"]).as_markdown()
    assert text.split("\n") == [
        "**Careful**",
        "",
        "Title",
        "",
        r"|  | P>\|z\| |",
        "| :-- | --: |",
        "| a:b | 0.1 |",
        r"| c\|d | 0.2 |",
        "",
        "1. one",
        "2. two",
    ]


def test_a_title_and_notes_may_be_absent():
    assert SheetSummary([Sheet(("x",), (("1",),), "r", (3,))]).as_markdown() == "| x |\n| --: |\n| 1 |"


def test_every_kind_of_table_has_the_same_exports(tmp_path):
    docx = pytest.importorskip("docx")
    partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    fit = fs.GLORE.from_formula("died ~ age + C(stage)", partition).fit()
    for place, table in enumerate(
        (
            fit,
            fit.summary(),
            fit.means("stage"),
            fit.terms_test(),
            fs.compare({"one": fit}),
            fs.table_one(partition, "age + C(stage)", by="arm"),
            fs.crosstab(partition, "arm", "stage"),
            fs.threats(fs.Policy.strict()),
        )
    ):
        printed = table._printed()
        assert table.to_markdown() == printed.as_markdown() and table.to_latex() == printed.as_latex()
        table.to_docx(tmp_path / f"{place}.docx")
        document = docx.Document(tmp_path / f"{place}.docx")
        assert len(document.tables) == len(printed.sheets)
        for written, sheet in zip(document.tables, printed.sheets, strict=True):
            rows = [sheet.headers, *sheet.rows] if any(sheet.headers) else sheet.rows
            assert [tuple(cell.text for cell in row.cells) for row in written.rows] == [*map(tuple, rows)]
        texts = [paragraph.text for paragraph in document.paragraphs]
        assert set(printed.notes) <= set(texts) and set(printed.headlines) <= set(texts)


def test_word_documents_name_the_package_that_they_need(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "docx", None)
    with pytest.raises(ImportError, match=r"pip install fedstat\[docx\]"):
        SheetSummary([Sheet(("x",), (("1",),), "r", (3,))]).to_docx(tmp_path / "x.docx")


def test_cells_of_frames_without_a_value_are_empty():
    frame = pd.DataFrame({"a": [1.25, np.nan], "b": ["x", None]}, index=pd.Index(["u", "v"], name="k"))
    rows = frame_summary(frame, "Title").as_markdown().splitlines()
    assert rows[0] == "Title" and rows[-2:] == ["| u | 1.2500 | x |", "| v |  |  |"]
