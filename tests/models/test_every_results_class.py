"""Notes of a result in order of severity; tests/contracts has what every results class prints and exports."""

from __future__ import annotations

import pytest

from fedstat.errors import ModelError
from fedstat.inference.summary import Note, Report
from fedstat.inference.tables import Sheet


class Many(Report):
    """A result with a note of each severity, the least severe first, and many more."""

    def _summary_notes(self):
        yield Note("sums", "the coordinator saw sums", "protocol")
        yield from (Note(f"info_{i}", f"fact {i}") for i in range(60))
        yield Note("watch", "look at this", "warning")
        yield Note("stop", "NOT CONVERGED", "critical")

    def _sheets(self):
        yield Sheet(("x",), (("1",),), "l", (40,), "A title")


def test_the_most_severe_notes_lead_and_the_rest_is_in_the_diagnostics():
    text = Many().summary().as_text().splitlines()
    assert text[0] == "*** NOT CONVERGED ***" and "[1] look at this" in text and len(text) == 60
    assert text[-2].endswith("fact 49") and text[-1] == "10 more notes: see summary(notes='all')."
    everything = Many().summary(notes="all").as_text()
    assert "fact 59" in everything and "the coordinator saw sums" in everything
    assert len(Many().diagnostics()) == 63
    for rendered in (Many().summary().as_html(), Many().summary().as_latex(), Many().summary().as_csv()):
        assert "NOT CONVERGED" in rendered and "10 more notes" in rendered
        assert "the coordinator saw sums" not in rendered
    with pytest.raises(ModelError, match="notes: expected one of 'brief', 'all', got 'none'"):
        Many().summary(notes="none")
