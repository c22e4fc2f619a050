"""Notes of a result in order of severity; tests/contracts has what every results class prints and exports."""

from __future__ import annotations

from fedstat.inference.summary import Note, Report
from fedstat.inference.tables import Sheet


class Many(Report):
    """A result with a note of each severity, the least severe first, and nine more."""

    def _summary_notes(self):
        yield from (Note(f"info_{i}", f"fact {i}") for i in range(9))
        yield Note("watch", "look at this", "warning")
        yield Note("stop", "NOT CONVERGED", "critical")

    def _sheets(self):
        yield Sheet(("x",), (("1",),), "l", (40,), "A title")


def test_the_most_severe_notes_lead_and_the_rest_is_in_the_diagnostics():
    text = Many().summary().as_text().splitlines()
    assert text[0] == "*** NOT CONVERGED ***" and "[1] look at this" in text and "[8] fact 6" in text
    assert "fact 7" not in "".join(text) and text[-1] == "2 more notes: see diagnostics()."
    assert len(Many().diagnostics()) == 11
    for rendered in (Many().summary().as_html(), Many().summary().as_latex(), Many().summary().as_csv()):
        assert "NOT CONVERGED" in rendered and "2 more notes: see diagnostics()." in rendered
