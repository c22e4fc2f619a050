"""The receipt: what both sides entered, signed; and that whatever is changed in it is found."""

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from signed_study import SECRET, SITES, STEPS, Study

import fedstat as fs
from fedstat.errors import FedstatError, ReceiptError
from fedstat.federation.audit.event_log import (
    LINK_FIELDS,
    SIGNED_FIELDS,
    AbsentSite,
    canonical_json,
    extended_digest,
    genesis_digest,
    read_site_entry,
)
from fedstat.federation.audit.receipt import Receipt
from fedstat.federation.crypto.keys import Identity, PublicIdentity
from fedstat.federation.disclosure.site import FAMILIES


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", STEPS)


@pytest.fixture
def study():
    return Study()


@pytest.fixture
def receipt(study):
    return study.run(hidden=True)


def changed(receipt, change):
    """The same receipt after a change of its JSON, in canonical form again."""
    content = json.loads(receipt.to_json())
    change(content)
    return canonical_json(content) + "\n"


def test_no_name_in_a_receipt_runs_in_a_notebook(receipt):
    """It may be that of another study, and is shown before it is verified."""
    name = "<script>alert(1)</script>"
    shown = replace(receipt, absent=(AbsentSite(name, 1),), session=name)._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def others(value):
    """Other values of a field."""
    if value is None:
        return ["A"]
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int):
        return [value + 1, value - 1, str(value), None]
    if isinstance(value, str):
        return [value + "x", value[:-1] if value else "y", None]
    if isinstance(value, list):
        return [[*value, 1], *[[*value[:i], value[i] + 1, *value[i + 1 :]] for i in range(len(value))]]
    return [None]


def test_a_receipt_verifies_and_says_so(study, receipt, tmp_path):
    receipt.save(tmp_path / "fit.json")
    report = study.verify(tmp_path / "fit.json", strict=True)
    assert report.ok and report.sites == SITES and report.session == "s"
    assert "verified: 3 sites signed" in str(report) and str(report.entries) in str(report)
    assert Receipt.load(tmp_path / "fit.json") == receipt
    assert "Receipt of session s: 3 sites" in str(receipt) and "no proof of privacy" in str(receipt)
    assert "<table" in receipt._repr_html_()
    assert len(receipt.to_frame()) == report.entries == len(receipt.passed)


def test_fingerprints_may_be_written_as_people_do(study, receipt):
    keys = {site: key.replace(" ", ":").upper() for site, key in study.partition.fingerprints.items()}
    assert fs.verify_receipt(receipt, keys).ok


def test_both_sides_enter_what_passed_both_ways(study, receipt):
    frame = receipt.to_frame().query("site == 'B' and family == 'toy'").reset_index(drop=True)
    assert frame["array"].tolist() == ["text", "text", "weight", "sums", "gram", "flag"]
    assert frame["sender"].tolist() == ["coordinator", "B", "coordinator", "B", "B", "B"]
    assert frame["kind"].tolist() == ["schema", "schema", "per entity", "aggregate", "aggregate", "control"]
    assert frame["masked"].tolist() == [False, False, False, True, False, False]
    assert frame["shape"].tolist() == [(), (), (2,), (2,), (3, 3), ()]
    assert frame["bytes"].tolist() == [7, 7, 16, 32, 72, 8]
    assert frame["entities"].tolist() == [0, 0, 0, 20, 20, 20]
    assert frame["numbers"].tolist() == [0, 0, 2, 2, 6, 1]
    assert frame["among"].tolist() == [1, 1, 1, 3, 1, 1]
    assert frame["time"].str.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ").all()
    assert frame["commitment"].str.fullmatch("[0-9a-f]{64}").all() and frame["commitment"].is_unique


def test_no_value_of_the_data_is_in_it(receipt):
    text = re.sub("[0-9a-f]{32,}", "", receipt.to_json())  # five digits may stand in a digest by chance
    assert str(SECRET)[:8] not in text and str(int(SECRET)) not in text


def test_a_coordinator_at_a_site_is_accounted_for_as_well():
    study = Study(at="B")
    receipt = study.run()
    assert study.verify(receipt).ok
    assert receipt.at == "B" and len(receipt.statements["B"].entries) == len(receipt.statements["A"].entries)
    assert "B (coordinator)" in set(receipt.released["in the hands of"])
    assert "B" not in set(receipt.released["about"])
    assert "B" not in {entry.sender for entry in study.ledger("s").entries}


def test_statements_are_not_in_the_ledgers_of_the_run(study):
    receipt = study.run()
    assert {entry.step for entry in study.ledger("s").entries} == {"tell", "moments"}
    assert study.ledger("s").rounds == 2
    assert {entry.step for entry in study.partition.sites["A"].ledger.entries} == {"tell", "moments"}
    again = study.run()
    assert len(again.statements["A"].entries) == 2 * len(receipt.statements["A"].entries) + 2
    assert study.verify(again).ok


# ---------------------------------------------------------------- whatever is changed is found


def test_every_field_of_every_entry_of_a_real_receipt_is_guarded(tmp_path):
    generator = np.random.default_rng(0)
    table = pd.DataFrame({"x": generator.normal(size=80), "hospital": np.repeat(["East", "West"], 40)})
    table["y"] = table["x"] + generator.normal(size=80)
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    receipt = fs.FederatedGLM.from_formula("y ~ x", partition).fit().receipt()
    keys = partition.fingerprints
    assert fs.verify_receipt(receipt, keys).ok
    content = json.loads(receipt.to_json())
    tables = [content["passed"], *[one["entries"] for one in content["statements"].values()]]
    assert [len(table[0]) for table in tables] == [len(SIGNED_FIELDS), len(LINK_FIELDS), len(LINK_FIELDS)]
    path, found = tmp_path / "fit.json", 0
    for table in tables:
        for row in table:
            for place, value in enumerate(row):
                for other in others(value)[:1]:
                    row[place] = other
                    write(path, canonical_json(content) + "\n")
                    assert not fs.verify_receipt(path, keys, strict=False).ok, (row, place, other)
                    found += 1
                row[place] = value
    write(path, canonical_json(content) + "\n")
    assert fs.verify_receipt(path, keys).ok
    assert found == sum(len(row) for table in tables for row in table)


def test_fields_of_other_types_and_values_are_guarded(study, receipt, tmp_path):
    content = json.loads(receipt.to_json())
    rows = [content["passed"][3], content["statements"]["B"]["entries"][-3]]
    for row in rows:
        for place, value in enumerate(row):
            for other in others(value):
                row[place] = other
                path = write(tmp_path / "fit.json", canonical_json(content) + "\n")
                assert not study.verify(path).ok, (place, other)
            row[place] = value


def test_every_signed_field_and_every_field_of_the_file_is_guarded(study, receipt, tmp_path):
    content = json.loads(receipt.to_json())
    signed = content["statements"]["C"]["signed"]
    holders = [(signed["keys"], signed["keys"]), (signed, signed)]
    holders.append((content, ("format", "fields", "session", "at")))
    holders.append((content["statements"]["C"], ("signature",)))
    for holder, names in holders:
        for name in list(names):
            value = copy.deepcopy(holder[name])
            special = {"earlier": [None, {"1": 5}, {"0": 1}], "fields": [content["fields"][::-1]]}
            special |= {"families": [None, [], ["glm"]], "signature": [str(value).upper(), f"{value}x", None]}
            for other in special[name] if name in special else others(value):
                holder[name] = other
                path = write(tmp_path / "fit.json", canonical_json(content) + "\n")
                assert not study.verify(path).ok, (name, other)
            holder[name] = value
            holder["more"] = 1
            assert not study.verify(write(tmp_path / "fit.json", canonical_json(content) + "\n")).ok, name
            del holder["more"]


CHANGES = {
    "removed": lambda rows: rows.pop(2),
    "added": lambda rows: rows.insert(3, [*rows[3][:3], "toy", *rows[3][4:]]),
    "duplicated": lambda rows: rows.insert(2, rows[2]),
    "moved": lambda rows: rows.insert(4, rows.pop(2)),
    "cut off": lambda rows: rows.pop(),
    "emptied": lambda rows: rows.clear(),
}


def forge(statement, identity=None):
    """Changes without the site's key: make chain and count consistent again, and sign with another key."""
    signed = statement["signed"]
    keys = (
        identity.public
        if identity
        else PublicIdentity(*[bytes.fromhex(signed["keys"][name]) for name in ("signing", "agreement")])
    )
    digest = genesis_digest(signed["site"], keys, signed["session"], signed["ordinal"], signed["previous"])
    for row in statement["entries"]:
        digest = extended_digest(digest, read_site_entry(row))
    signed["head"], signed["count"] = digest.hex(), len(statement["entries"])
    if identity:
        signed["keys"] = {"signing": keys.signing.hex(), "agreement": keys.agreement.hex()}
        statement["signature"] = identity.signing.sign(canonical_json(signed).encode()).hex()


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("how", ["plainly", "chain made to fit", "signed with another key"])
def test_entries_removed_added_moved_or_cut_are_found(study, receipt, what, how, tmp_path):
    def change(content):
        statement = content["statements"]["B"]
        CHANGES[what](statement["entries"])
        if how == "chain made to fit":
            forge(statement)
        if how == "signed with another key":
            forge(statement, Identity.generate())
        assert how == "plainly" or Receipt.from_json(canonical_json(content) + "\n")

    report = study.verify(write(tmp_path / "fit.json", changed(receipt, change)))
    assert not report.ok
    complaint = {
        "plainly": "not a receipt|chain is broken",
        "chain made to fit": "signature is wrong",
        "signed with another key": "another key",
    }
    assert pd.Series(report.problems).str.contains(complaint[how]).any()


@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_the_coordinators_ledger_are_found(study, receipt, what, tmp_path):
    text = changed(receipt, lambda content: CHANGES[what](content["passed"]))
    report = study.verify(write(tmp_path / "fit.json", text))
    assert any("signed another ledger of the coordinator" in problem for problem in report.problems)


def test_the_same_forgery_with_the_sites_own_key_is_not_found(study, receipt, tmp_path):
    """That forging is what the test above thinks it is; a site can sign what it likes about itself."""
    identity = study.partition.sites["B"].trust.identity
    text = changed(receipt, lambda content: forge(content["statements"]["B"], identity))
    assert study.verify(write(tmp_path / "fit.json", text)).ok


def test_a_missing_site_and_one_without_a_fingerprint_are_found(study, receipt, tmp_path):
    gone = write(tmp_path / "fit.json", changed(receipt, lambda content: content["statements"].pop("A")))
    assert any("A: there is no statement" in problem for problem in study.verify(gone).problems)
    keys = {site: key for site, key in study.partition.fingerprints.items() if site != "A"}
    report = fs.verify_receipt(receipt, keys, strict=False)
    assert report.problems == ("A: no fingerprint was given for this site",)
    swapped = dict(study.partition.fingerprints, A=study.partition.fingerprints["B"])
    assert "another key" in str(fs.verify_receipt(receipt, swapped, strict=False))


def test_a_statement_of_another_session_or_an_earlier_one_is_found(study, tmp_path):
    first, other = study.run("s"), study.run("t")
    later = study.run("s")
    assert study.verify(later).ok
    for foreign, complaint in ((other, "another session"), (first, "signed another ledger")):
        text = changed(
            later, lambda c, f=foreign: c["statements"].update(A=json.loads(f.to_json())["statements"]["A"])
        )
        report = study.verify(write(tmp_path / "fit.json", text))
        assert not report.ok and complaint in str(report)
    text = changed(later, lambda c: c["statements"].update(A=c["statements"]["B"]))
    assert "statement is that of 'B'" in str(study.verify(write(tmp_path / "fit.json", text)))


@pytest.mark.parametrize(
    "lie, complaint",
    [
        ({"shape": (4,)}, r"entry \d+ \(moments, weight\).*: shape"),
        ({"bytes": 7}, r"entry \d+ \(moments, weight\).*: bytes"),
        ({"array": "weights"}, "array"),
        (None, r"ledger has \d+ entries with this site, its own \d+"),
    ],
)
def test_a_coordinator_that_wrote_down_something_else_is_found(study, lie, complaint):
    """The false entry is made before the sites sign: signatures are valid, and the two ledgers differ."""
    study.run()
    ledger = study.ledger("s")
    place = next(i for i, e in enumerate(ledger.log._passed) if (e.array, e.receiver) == ("weight", "B"))
    entry = ledger.log._passed.pop(place)
    if lie is not None:
        ledger.log._passed.insert(place, replace(entry, **lie))
    report = study.verify(study.run(steps=()))
    assert not report.ok and pd.Series(report.problems).str.contains(complaint).any()
    assert all(problem.startswith("B: ") for problem in report.problems)


def test_a_site_that_left_something_out_is_found(study):
    study.run()
    study.partition.sites["C"]._data.site_ledger.chain("C", None, "s").entries.pop(2)
    report = study.verify(study.run(steps=()))
    assert not report.ok and all(problem.startswith("C: ") for problem in report.problems)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", "nonsense", '{"session": 1}', "\x00", "[" * 100_000]
)
def test_what_is_no_receipt_is_named(study, content, tmp_path):
    path = write(tmp_path / "fit.json", content)
    assert "not a receipt" in str(study.verify(path))
    with pytest.raises(ReceiptError, match="does NOT verify"):
        fs.verify_receipt(path, study.partition.fingerprints)
    with pytest.raises(FedstatError):
        Receipt.load(path)


def test_only_the_canonical_form_is_a_receipt(study, receipt, tmp_path):
    text = receipt.to_json()
    for other in (text[:-1], " " + text, text.replace(",", ", ", 1), json.dumps(json.loads(text)) + "\n"):
        assert "canonical" in str(study.verify(write(tmp_path / "fit.json", other)))


def test_every_truncation_and_flipped_bits_of_the_file_are_found(study, receipt, tmp_path):
    data = receipt.to_json().encode()
    path, generator = tmp_path / "fit.json", np.random.default_rng(1)
    for place in generator.choice(len(data), 150, replace=False):
        path.write_bytes(data[:place])
        assert not study.verify(path).ok, place
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(bytes(flipped))
        assert not study.verify(path).ok, place
