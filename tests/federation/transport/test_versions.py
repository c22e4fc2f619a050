"""Sites of other versions: named with both, before any model asks."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pandas as pd
import pytest
from operating import make_federation, served_sites

import fedstat as fs
from fedstat.errors import MessageError, ReceiptError, VersionWarning
from fedstat.federation.audit.receipt import SiteStatement
from fedstat.federation.message import VERSION, Reply
from fedstat.federation.protocols import engine, schema
from fedstat.federation.transport import remote
from fedstat.operator import site_status
from fedstat.operator.command_line import main

RECORDS = pd.DataFrame({"age": [61.0, 47, 55, 70, 39, 58] * 6, "ill": [1.0, 0, 1, 1, 0, 0] * 6})


def as_of(monkeypatch, change):
    """Answers to the first question as another version would give them."""
    read = remote.unpack_reply

    def altered(answer):
        reply = read(answer)
        reported = json.loads(reply.text) if reply.text.startswith("{") else {}
        if "release" not in reported:
            return reply
        change(reported)
        return Reply(reply.site, reply.arrays, json.dumps(reported), reply.entities)

    for module in (remote, engine):
        monkeypatch.setattr(module, "unpack_reply", altered)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    home = tmp_path_factory.mktemp("versions")
    made = make_federation(home, {"A": RECORDS, "B": RECORDS})
    with served_sites(home, ("A", "B")):
        yield made


def test_the_command_reveals_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"fedstat {VERSION}\n"
    assert fs.__version__ == VERSION


def test_version_and_families_are_reported_in_handshake_status_and_receipt(study, capsys, monkeypatch):
    partition = fs.ClientPartition.connect(study)
    installed, own = partition._engine.installed["A"], schema.own_version()
    assert replace(installed, families=()) == replace(own, families=())
    assert {*own.families} ^ {*installed.families} <= {"margins"}  # of tests, in one process or the other
    receipt = fs.GLORE.from_formula("ill ~ age", partition).fit(masked=False).receipt()
    assert receipt.sites()["fedstat"].tolist() == [VERSION, VERSION]
    statement = receipt.statements["A"]
    assert (statement.version, "glm" in statement.families) == (VERSION, True)
    assert fs.verify_receipt(receipt, partition.fingerprints).ok
    # it is signed along
    altered = json.loads(statement.to_json())
    altered["signed"]["version"] = "0.0.1"
    receipt.statements["A"] = SiteStatement.from_dict(altered, "a statement")
    with pytest.raises(ReceiptError, match="the signature is wrong"):
        fs.verify_receipt(receipt, partition.fingerprints)
    capsys.readouterr()
    assert main(["federation", "test", str(study), "--timeout", "600"]) == 0
    assert capsys.readouterr().out.count(VERSION) == 2
    assert main(["site", "status", str(study.parent / "A")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fedstat", VERSION] in lines and any(
        line[:1] == ["families"] and "glm," in line for line in lines
    )
    monkeypatch.setattr(site_status, "VERSION", "0.1.7")
    assert main(["site", "status", str(study.parent / "A")]) == 0
    assert f"{VERSION} (installed is 0.1.7: start it again)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda reported: reported["release"].update(messages=99, version="9.9.0"),
            "A: it runs fedstat 9.9.0",
        ),
        # a later version may say more, and may say it in another way
        (
            lambda reported: reported.update(release={"version": "9.9.0", "messages": 99, "more": 1}),
            "fedstat 9.9.0",
        ),
        (lambda reported: reported.update(release={}), "an earlier version without a number"),
    ],
)
def test_messages_of_another_version_are_an_error_that_names_both(
    study, monkeypatch, capsys, change, expected
):
    as_of(monkeypatch, change)
    with pytest.raises(MessageError, match=expected) as error:
        fs.ClientPartition.connect(study)
    assert VERSION in str(error.value) and "Install the same version" in str(error.value)
    assert main(["federation", "test", str(study), "--timeout", "600"]) == 1
    printed = capsys.readouterr().out
    assert expected in printed
    # in the table as well, next to the site
    (row,) = [line.split() for line in printed.splitlines() if line.split()[:2] == ["A", "no"]]
    version = "9.9.0" if "9.9.0" in expected else "not"
    assert row[2] == version


def test_another_version_of_the_same_messages_is_a_warning(study, monkeypatch, capsys):
    as_of(monkeypatch, lambda reported: reported["release"].update(version="0.1.7"))
    with pytest.warns(
        VersionWarning, match=rf"fedstat is {re.escape(VERSION)} here, and 0\.1\.7 at A, 0\.1\.7 at B"
    ):
        fs.ClientPartition.connect(study)
    assert main(["federation", "test", str(study), "--timeout", "600"]) == 0
    assert "Note: fedstat is" in capsys.readouterr().out


def test_a_site_without_the_family_is_named_before_it_is_asked(study, monkeypatch):
    without = [name for name in schema.own_version().families if name != "glm"]
    as_of(monkeypatch, lambda reported: reported["release"].update(families=without))
    partition = fs.ClientPartition.connect(study)
    monkeypatch.undo()
    with pytest.raises(
        MessageError,
        match=rf"A: its fedstat {re.escape(VERSION)} has no family 'glm'.*install it at the site",
    ):
        fs.GLORE.from_formula("ill ~ age", partition).fit(masked=False)
