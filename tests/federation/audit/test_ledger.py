"""The ledger: entries, totals, and their printed form."""

import numpy as np
import pandas as pd
import pytest

from fedstat.federation.audit.event_log import COORDINATOR, Entry, reply_entries, request_entries
from fedstat.federation.audit.ledger import LEDGER_COLUMNS, Ledger
from fedstat.federation.message import ArrayDeclaration, Reply, Request, Step

DECLARED = {
    "z": ArrayDeclaration("per entity", "residual"),
    "gram": ArrayDeclaration("aggregate", "products", 2),
    "flag": ArrayDeclaration("control", "a choice", 0),
}
ARRAYS = {"z": np.ones(7), "gram": np.ones((3, 3)), "flag": np.array(True)}


def record(ledger, sender, arrays, declared, entities=0):
    """Enter the arrays of one message between the bank and the coordinator."""
    if sender == COORDINATOR:
        passed = request_entries(Request("Bank", "toy", "step", arrays), Step(None, takes=declared), 9)
    else:
        reply = Reply("Bank", arrays, "", entities)
        passed = reply_entries(Request("Bank", "toy", "step"), Step(None, gives=declared), reply, 9)
    ledger.enter(passed)


def record_text(ledger, text, line):
    step = Step(None, text_out=line)
    entered = reply_entries(Request("Bank", "toy", "open"), step, Reply("Bank", {}, text), 9)
    ledger.enter(entered)


@pytest.fixture
def ledger():
    ledger = Ledger(at="Registry")
    for _ in range(2):
        ledger.begin_round()
        record(ledger, COORDINATOR, {"flag": ARRAYS["flag"]}, DECLARED)
        record(ledger, "Bank", ARRAYS, DECLARED, entities=7)
    return ledger


def test_an_array_is_entered_with_shape_bytes_and_meaning(ledger):
    assert ledger.entries[2] == Entry(
        1, "Bank", COORDINATOR, "step", "gram", "aggregate", "products", (3, 3), 72, 7, family="toy"
    )
    assert ledger.entries[2].what == "products"
    assert [entry.round for entry in ledger.entries] == [1] * 4 + [2] * 4
    assert ledger.rounds == 2


def test_bytes_add_up_both_ways(ledger):
    assert ledger.bytes == 2 * (1 + 7 * 8 + 9 * 8 + 1)
    assert ledger.to_frame()["bytes"].sum() == ledger.bytes


def test_an_array_that_was_not_declared_cannot_be_entered(ledger):
    with pytest.raises(KeyError):
        record(ledger, "Bank", {"secret": np.ones(2)}, DECLARED)


def test_a_text_counts_by_its_bytes_and_an_empty_one_is_none(ledger):
    line = ArrayDeclaration("schema", "names")
    before = len(ledger.entries)
    record_text(ledger, "", line)
    record_text(ledger, "a", None)
    assert len(ledger.entries) == before
    record_text(ledger, "größe", line)
    assert (ledger.entries[-1].bytes, ledger.entries[-1].kind, ledger.entries[-1].shape) == (7, "schema", ())


def test_releases_are_counted_array_by_array(ledger):
    table = ledger.releases().set_index(["sender", "array"])
    assert table.loc[("Bank", "z"), ["messages", "bytes", "entities"]].tolist() == [2, 112, 7]
    assert table.loc[("Bank", "z"), "shape"] == (7,)
    assert table.loc[("Bank", "z"), "receiver"] == "Registry"
    assert ("Registry", "flag") in table.index
    assert table["bytes"].sum() == ledger.bytes


def test_kinds_are_listed_from_harmless_to_disclosing(ledger):
    assert ledger.kinds_by_site() == {
        "Registry": ("control",),
        "Bank": ("control", "aggregate", "per entity"),
    }
    ledger.at = None
    assert set(ledger.kinds_by_site()) == {COORDINATOR, "Bank"}


def test_every_kind_has_its_place():
    ledger = Ledger()
    kinds = ("raw columns", "per entity", "sketch", "aggregate", "presence", "schema", "control")
    for kind in kinds:
        record(ledger, "Bank", {"x": np.ones(1)}, {"x": ArrayDeclaration(kind, "x")})
    assert ledger.kinds_by_site() == {"Bank": kinds[::-1]}


def test_an_empty_ledger_can_be_read():
    ledger = Ledger()
    assert ledger.bytes == ledger.rounds == 0
    assert ledger.kinds_by_site() == {}
    frame = ledger.to_frame()
    assert isinstance(frame, pd.DataFrame) and len(frame) == 0
    assert list(frame.columns) == list(LEDGER_COLUMNS)
    assert len(Ledger(at="Bank").releases()) == 0
