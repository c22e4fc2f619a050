"""Records that keep the numbers of their entities, and the site that holds them."""

import json

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import MessageError, PartitionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.site import Site, load_families
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.linkage import (
    FAMILY,
    PersistentAlignment,
    align_persistently,
    load_alignment,
)
from fedstat.federation.tables.aligned_table import AlignedTable, alignment_of, new_session
from fedstat.federation.tables.keys import KeyTable

load_families()
NAME = "0123456789abcdef"
KEYS = {"A": [3, 1, 4, 15, 9], "B": [9, 2, 6, 5, 3], "C": [1, 5, 9, 2]}


def frames():
    out = {name: pd.DataFrame({"id": keys, name: np.arange(float(len(keys)))}) for name, keys in KEYS.items()}
    out["B"].loc[1, "B"] = np.nan  # key 2 alone, without a record
    return out


def sites():
    tables = {name: AlignedTable(name, frame, ["id"]) for name, frame in frames().items()}
    out = {name: Site(name, table) for name, table in tables.items()}
    for site in out.values():
        site.trust.pinned.update({name: other.fingerprint for name, other in out.items()})
    return out


def aligned():
    made = sites()
    return made, LocalEngine(made).run(align_persistently(tuple(made), "s", NAME), Ledger())


def request(site, step, text, session, family=FAMILY, **arrays):
    return unpack_reply(site.answer(pack_request(Request(site.name, family, step, arrays, session, text))))


def test_records_come_in_the_order_of_the_numbers_and_link_as_unmasked():
    made, alignment = aligned()
    linked = {}
    for name, frame in frames().items():
        table = made[name]._data.table
        assert table.alignment == NAME and table.columns == (name,)
        key_of = dict(zip(frame[name], frame["id"], strict=True))
        for number, value in zip(alignment.rows(name), table.frame[name], strict=True):
            assert linked.setdefault(number, key_of[value]) == key_of[value]
    assert sorted(linked.values()) == sorted({key for keys in KEYS.values() for key in keys})
    assert alignment.n_entities == len(linked) == 8
    assert [len(alignment.listed[name]) for name in KEYS] == [5, 5, 4]
    assert [len(alignment.rows(name)) for name in KEYS] == [5, 4, 4]


def test_sites_that_are_left_out_take_their_own_entities_along(tmp_path):
    _, alignment = aligned()
    alignment.save(tmp_path)
    fewer = load_alignment(tmp_path).among(["B", "C"])
    known = ClientPartition.from_frames({name: frames()[name] for name in ("B", "C")}, on="id", new_data=True)
    assert fewer.n_entities == known.n_entities == 6
    assert [len(fewer.rows(name)) for name in ("B", "C")] == [len(known.rows[name]) for name in ("B", "C")]
    both = np.intersect1d(fewer.listed["B"], fewer.listed["C"])
    assert len(both) == 3 and max(map(max, fewer.listed.values())) == 5


def test_an_alignment_of_numbers_that_one_can_look_at():
    listed = {"A": np.array([0, 2, 3]), "B": np.array([1, 3, 4])}
    seen = {"A": np.array([True, True, False]), "B": np.array([True, True, True])}
    fewer = PersistentAlignment(NAME, 5, listed, seen).among(["A"])
    assert fewer.n_entities == 3
    np.testing.assert_array_equal(fewer.listed["A"], [0, 1, 2])
    np.testing.assert_array_equal(fewer.rows("A"), [0, 1])


@pytest.mark.parametrize(
    "places, name, expected",
    [
        ([0, 1, 2, 3], NAME, "expected"),
        ([0, 1, 2, 3, 3], NAME, "expected a different number for each of its entities"),
        ([0, 1, 2, 3, -1], NAME, "expected a different number for each of its entities"),
        ([0, 1, 2, 3, 4], "../../elsewhere", "expected an alignment named by 16 hexadecimal digits"),
        ([0, 1, 2, 3, 4], NAME.upper(), "expected an alignment named by 16 hexadecimal digits"),
        ([0, 1, 2, 3, 4], ["a"], "expected the name of an alignment"),
        ([0, 1, 2, 3, 4], None, "expected the name of an alignment"),
    ],
)
def test_places_that_make_no_sense_change_nothing(places, name, expected):
    made, alignment = aligned()
    table = made["A"]._data.table
    before = table.frame.copy()
    made["A"].states["s"].keep("order", np.arange(5))
    with pytest.raises(MessageError, match=expected):
        request(made["A"], "keep_places", json.dumps(name), "s", places=np.array(places))
    pd.testing.assert_frame_equal(table.frame, before)
    assert table.alignment == alignment.name


def test_places_are_taken_in_their_turn_once_and_by_records_only():
    made, _ = aligned()
    places = np.arange(5)
    for session in ("s", "another"):  # taken already, and never entered
        with pytest.raises(MessageError, match="out of order"):
            request(made["A"], "keep_places", json.dumps(NAME), session, places=places)
    with pytest.raises(MessageError, match="is aligned for good"):
        request(made["A"], "take_places", "", "s", places=places)
    keys = Site("A", KeyTable("A", frames()["A"], ["id"]))
    with pytest.raises(MessageError, match="no records that are linked by a key"):
        request(keys, "keep_places", json.dumps(NAME), "s", places=places)


@pytest.mark.parametrize("session", ["0011223344556677", "fedcba9876543210-0011223344556677", "", "-", NAME])
def test_no_question_of_another_alignment_is_answered(session):
    made, _ = aligned()
    question = json.dumps({"response": "A", "columns": ["A"]})
    with pytest.raises(PartitionError, match="aligned again since this session began"):
        request(made["A"], "open_response", question, session, family="design")
    ours = new_session(NAME)
    assert alignment_of(ours) == NAME and alignment_of("0011223344556677") == ""
    reply = request(made["A"], "open_response", question, ours, family="design")
    assert reply.arrays["has"].sum() == 5


def test_before_it_is_aligned_a_site_answers_on_its_schema_only():
    site = sites()["A"]
    reported = json.loads(request(site, "describe_table", "{}", "s", family="schema").text)
    assert reported["link"] == {"key": ["id"], "alignment": "", "changed": False}
    with pytest.raises(PartitionError, match=r"have not been aligned with those of the others yet"):
        request(site, "open_response", "{}", new_session(NAME), family="design")
