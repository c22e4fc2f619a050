"""The agreement on columns, levels and entities, before anything is estimated."""

import json

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DesignError, MessageError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.parse import parse_formula
from fedstat.federation.design.vertical_design import agree_design, design_request
from fedstat.federation.message import pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine


@pytest.fixture
def frames():
    generator = np.random.default_rng(0)
    bank = pd.DataFrame({"id": np.arange(40), "y": generator.normal(size=40), "a": generator.normal(size=40)})
    bank.loc[[3, 5], "y"] = np.nan
    bank.loc[7, "a"] = np.nan
    court = pd.DataFrame({"id": np.arange(45)[::-2], "b": generator.normal(size=23)})
    court["c"] = np.where(np.arange(23) % 3 == 0, "x", "w")
    return {"Bank": bank, "Court": court}


def agree(frames, formula="y ~ .", **options):
    partition = fs.ClientPartition.from_frames(frames, on="id")
    parsed = parse_formula(formula, partition.columns)
    ledger = Ledger(at="Bank")
    protocol = agree_design(parsed, partition.rows, partition.n_entities, "s", **options)
    return LocalEngine(partition.sites).run(protocol, ledger), partition, ledger


def test_entities_are_those_with_a_response(frames):
    design, partition, _ = agree(frames, missing="drop")
    ids = partition.entities[design.entities]
    assert ids.tolist() == [i for i in range(40) if i not in (3, 5)]
    assert design.n_dropped == partition.n_entities - 38 == 5


def test_rows_say_who_has_which_entity(frames):
    design, partition, _ = agree(frames, missing="drop")
    ids = partition.entities[design.entities]
    bank, court = design.blocks
    assert (bank.names, court.names) == (("a",), ("b", "c[T.x]"))
    assert 7 not in ids[bank.rows]
    assert len(bank.rows) == 37
    assert ids[court.rows].tolist() == list(range(0, 40, 2))


def test_missing_responses_are_refused_with_their_number(frames):
    with pytest.raises(
        DesignError, match=r"'y' at site 'Bank' is missing for 5 of 43 entities.*missing=\"drop\""
    ):
        agree(frames)


def test_sites_without_a_common_entity_are_named(frames):
    frames["Court"]["id"] += 1000
    with pytest.raises(DesignError, match=r"'Bank' .*'Court' have no entity in common"):
        agree(frames, missing="drop")


def test_only_presence_and_schema_leave(frames):
    _, _, ledger = agree(frames, missing="drop")
    assert {(e.sender, e.array, e.kind) for e in ledger.entries} == {
        ("coordinator", "use", "presence"),
        ("coordinator", "text", "schema"),
        ("Court", "seen", "presence"),
        ("Court", "text", "schema"),
    }


def test_the_schema_holds_levels_and_no_numbers_of_the_data(frames):
    partition = fs.ClientPartition.from_frames(frames, on="id")
    terms = {
        "terms": ["scale(b)", "c"],
        "columns": ["b", "c"],
        "partial": "drop",
        "min_count": 5,
        "intercept": True,
    }
    request = design_request("Court", "open_block", "s", terms, use=np.ones(23, dtype=bool))
    schema = json.loads(unpack_reply(partition.sites["Court"].answer(pack_request(request))).text)
    assert schema == {
        "names": ["scale(b)", "c[T.x]"],
        "term_names": ["scale(b)", "c"],
        "levels": {"c": ["w", "x"]},
        "n_partial": 0,
    }


def test_a_session_that_opened_nothing_is_reported(frames):
    partition = fs.ClientPartition.from_frames(frames, on="id")
    with pytest.raises(MessageError, match="Court: no columns are open in this session"):
        partition.sites["Court"].answer(pack_request(design_request("Court", "release_spec", "other")))
