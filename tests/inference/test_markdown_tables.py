"""Tables in Markdown have one cell for each cell, with bars escaped."""

from fedstat.inference.tables import Sheet, SheetSummary


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
