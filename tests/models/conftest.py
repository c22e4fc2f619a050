"""The oracle of every explanation: the ledger of the fit itself."""

from dataclasses import replace

import pytest

from fedstat.models.explain import rehearse


def what_passed(model, result):
    """Entries and rounds of a fit, without those of making the model."""
    earlier = getattr(model, "_agreement", None) or model._agreement_ledger
    entries = [replace(e, round=e.round - earlier.rounds) for e in result.ledger.entries]
    return entries[len(earlier.entries) :], result.ledger.rounds - earlier.rounds


@pytest.fixture
def foretold():
    """Assert that a rehearsal of some length went through what a fit went through, entry by entry."""

    def compare(model, result, plan, length, arguments):
        course = rehearse(model, plan, length, arguments)
        entries, rounds = what_passed(model, result)
        for place, (told, passed) in enumerate(zip(course.entries, entries, strict=False)):
            assert told == passed, f"entry {place}"
        assert len(course.entries) == len(entries)
        assert len(course.rounds) == rounds
        return course

    return compare
