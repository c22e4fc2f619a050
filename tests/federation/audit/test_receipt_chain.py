"""A site's chain: what is hashed, what it can prove later, and that refusals are in it."""

import hashlib
import hmac
import json

import numpy as np
import pytest
from signed_study import SECRET, SITES, STEPS, Study

from fedstat.errors import MessageError, PolicyError
from fedstat.federation.audit.event_log import content_digest, extended_digest, genesis_digest
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.message import Request


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", STEPS)


@pytest.fixture
def study():
    return Study()


def test_a_site_can_prove_one_array_and_discloses_no_other(study):
    study.run()
    chain = study.partition.sites["A"]._data.site_ledger.chain("A", None, "s")
    place = next(i for i, link in enumerate(chain.entries) if link.array == "gram")
    link, key = chain.entries[place], chain.entry_key(place)
    x = SECRET + np.arange(3.0)
    prove = lambda key, array: hmac.digest(key, content_digest(array), "sha256").hex()  # noqa: E731
    assert prove(key, np.outer(x, x)) == link.commitment
    assert prove(key, np.nextafter(np.outer(x, x), 0)) != link.commitment
    assert prove(chain.entry_key(place + 1), np.outer(x, x)) != link.commitment


def test_digests_differ_by_type_shape_and_content():
    values = [np.zeros(4), np.zeros((2, 2)), np.zeros(4, dtype=np.int64), np.zeros(32, dtype=np.uint8)]
    values += [np.array(0.0), np.zeros(1), np.empty(0), np.empty((0, 3)), np.array(False), "", "\0" * 32]
    assert len({content_digest(value) for value in values}) == len(values)
    steps = np.arange(12.0).reshape(3, 4)
    assert content_digest(steps.T) == content_digest(np.ascontiguousarray(steps.T))


def test_sessions_are_chained_so_that_none_can_be_dropped(study):
    first, second = study.run("s"), study.run("t")
    for site in SITES:
        one, two = first.statements[site], second.statements[site]
        assert (one.ordinal, two.ordinal, one.previous) == (1, 2, "")
        # The statement itself was entered after it was signed, and before the next session began.
        digest = bytes.fromhex(one.head)
        for link in (
            study.partition.sites[site]._data.site_ledger.chain(site, None, "s").entries[len(one.entries) :]
        ):
            digest = extended_digest(digest, link)
        assert two.previous == digest.hex()
        assert two.other_sessions == 1


def test_the_digest_of_a_chain_is_the_published_formula(study):
    receipt = study.run(hidden=True)
    one = receipt.statements["A"]
    digest = genesis_digest(one.site, one.keys, one.session, one.ordinal, one.previous)
    for link in one.entries:
        row = json.dumps(link.signed, separators=(",", ":"), ensure_ascii=False).encode()
        digest = hashlib.sha256(digest + row).digest()
    assert digest.hex() == one.head


def test_a_refusal_is_entered_by_both_with_its_rule_and_no_value():
    study = Study({"B": Policy(refused_kinds=frozenset({"raw columns"}))})
    with pytest.raises(PolicyError):
        study.run(steps=("moments", "rows"))
    receipt = study.run(steps=("tell",))
    assert study.verify(receipt).ok
    frame = receipt.to_frame().query("kind == 'refusal'")
    assert frame[["site", "step", "rule"]].values.tolist() == [["B", "rows", "PolicyError (refused kinds)"]]
    assert receipt.sites()["refusals"].tolist() == [0, 1, 0]
    refused = [entry for entry in receipt.passed if entry.kind == "refusal"]
    assert [entry.rule for entry in refused] == ["PolicyError (refused kinds)"]


def test_no_policy_keeps_a_site_from_its_statement():
    study = Study({"A": Policy(families=frozenset({"toy"}), masked_only=True, min_count=20)})
    assert study.verify(study.run(steps=("tell",))).ok


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *[(text, "A, step 'state_ledger': failed .JSONDecodeError.") for text in ("", "[" * 9)],
        *[
            (text, "A: expected the digest of a ledger")
            for text in ("{}", '"short"', "1", '{"coordinator": 1}')
        ],
    ],
)
def test_a_malformed_question_for_a_statement_is_named(study, text, words):
    ledger = study.ledger("s")

    def request():
        yield [Request("A", "receipt", "state_ledger", {}, "s", text)]

    with pytest.raises(MessageError, match=words):
        study.engine.run(request(), ledger)
    assert study.verify(study.run()).ok
