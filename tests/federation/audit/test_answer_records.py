"""What a site remembers of its answers: once, in the stored ledger, also as earlier versions wrote it."""

import json

import pytest

from fedstat.errors import SecurityError
from fedstat.federation.audit import event_log
from fedstat.federation.audit.earlier_records import READERS, read_earlier_records
from fedstat.federation.audit.event_log import AnswerRecord, SiteLedger, UsedApproval
from fedstat.federation.disclosure.checks import FailedOwnFit
from fedstat.federation.disclosure.column_sums import SumsOfColumn
from fedstat.federation.disclosure.differencing import DescentStep, MaskedSites
from fedstat.federation.disclosure.leverage import MaskedGroups
from fedstat.federation.disclosure.request_checks import AnsweredEvaluation
from fedstat.federation.disclosure.row_checks import (
    ComparedColumn,
    NeighborsInClusters,
    ScoresByCluster,
    UsedConsent,
)
from fedstat.models.descriptive.steps import CountedTimes
from fedstat.models.laser.response_steps import RandomizedLabels
from fedstat.models.vertical.exchange.standardized_columns import MultipliedColumns

EARLIER = {
    'sums over groups masked among ["A, B", "C"]': [MaskedGroups(("A, B", "C"))],
    'comparisons of "a [\\"b"[41.5, true]': [ComparedColumn('a ["b', 41.5, True)],
    'comparisons of "ward"["x, y"]': [ComparedColumn("ward", "x, y", None)],
    'scores by clusters of ["person", "s"]': [ScoresByCluster(("person", "s"))],
    'products of neighbors within clusters of ["person", "visit"]': [
        NeighborsInClusters(("person",), "visit")
    ],
    "alignment with B, C, 2026-11-20T10:00:00": [UsedConsent("B, C", "2026-11-20T10:00:00")],
    'masked sums over ["A", "B", "C"]': [MaskedSites(("A", "B", "C"))],
    "descent of m1 3 0f0f a1": [DescentStep("m1", "3 0f0f", "a1")],
    "descent of m1 settings a1": [DescentStep("m1", "settings", "a1")],
    "evaluation 0f": [AnsweredEvaluation("0f")],
    "sums of one column x\nr|x^1\nr|x^2": [SumsOfColumn("x", ("r|x^1", "r|x^2"))],
    "plan 0a0b, 1700000000000000000": [UsedApproval("0a0b", 1_700_000_000_000_000_000)],
    "own fit without an estimate y x": [FailedOwnFit("y x")],
    "label epsilon 1.5 0f": [RandomizedLabels(1.5, "0f")],
    'multiplied {"g1": ["m1", "m2"], "g2": ["m3"]}': [
        MultipliedColumns("g1", ("m1", "m2")),
        MultipliedColumns("g2", ("m3",)),
    ],
    "ends of curves "
    + json.dumps({"columns": ["t"], "rows": "r", "division": "d", "requested": "q", "ends": [1.0, 2.5]}): [
        CountedTimes(("t",), "r", "d", "q", (1.0, 2.5))
    ],
}


@pytest.mark.parametrize("text", EARLIER)
def test_a_text_of_an_earlier_version_is_the_record_of_this_one(text):
    ledger = SiteLedger()
    for name, record in read_earlier_records(text):
        ledger.restore_record(name, record)
    assert ledger.n_records == len(EARLIER[text])
    assert list(ledger.records(type(EARLIER[text][0]))) == EARLIER[text]


def test_every_earlier_text_has_a_class_of_this_version():
    """Stored ledgers have the names of the classes: a class with another name needs a conversion."""
    known = {one.__name__ for one in AnswerRecord.__subclasses__()}
    assert {name for name, _ in READERS.values()} <= known
    assert {type(one).__name__ for found in EARLIER.values() for one in found} == {
        name for name, _ in READERS.values()
    }


class Lines(list):
    def append(self, lines):
        self.extend(lines)


def test_a_record_is_stored_once_and_a_refused_request_leaves_none():
    ledger = SiteLedger()
    ledger.store = Lines()
    one, other = MaskedSites(("A", "B")), MaskedSites(("A", "C"))
    for _ in range(2):
        ledger.remember(one)
    assert ledger.store == [{"remembered": "MaskedSites", "record": {"sites": ["A", "B"]}}]
    with pytest.raises(ValueError, match="refused"), ledger.provisionally():
        ledger.remember(one, other)
        assert other in ledger.records(MaskedSites)
        raise ValueError("refused")
    assert list(ledger.records(MaskedSites)) == [one] and len(ledger.store) == 1
    with ledger.provisionally():
        ledger.remember(other, one)
        assert len(ledger.store) == 1
    assert list(ledger.records(MaskedSites)) == [one, other] and len(ledger.store) == 2


def test_a_record_of_another_form_is_no_record():
    ledger = SiteLedger()
    ledger.restore_record("MaskedSites", {"sites": [1]})
    with pytest.raises(SecurityError, match="MaskedSites"):
        ledger.records(MaskedSites)


def test_records_are_read_again_from_the_lines():
    """What a ledger writes as a line, it reads as the same record."""
    first, second = SiteLedger(), SiteLedger()
    first.store = Lines()
    first.remember(*(one for found in EARLIER.values() for one in found))
    for line in first.store:
        plain = json.loads(event_log.canonical_json(line))
        second.restore_record(plain["remembered"], plain["record"])
    assert second.n_records == first.n_records == sum(map(len, EARLIER.values()))
    for kind in {type(one) for found in EARLIER.values() for one in found}:
        assert second.records(kind) == first.records(kind)
