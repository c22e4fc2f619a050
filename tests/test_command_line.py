"""The command ``fedstat``: what it makes, what it prints, and that nothing secret is in it."""

from __future__ import annotations

import json
import os
import signal
import tomllib

import numpy as np
import pandas as pd
import pytest
from operating import make_federation, printed, run, serve, serve_by_command, wait

import fedstat as fs
from fedstat.errors import EngineError, PartitionError, SecurityError
from fedstat.federation.audit.ledger_file import open_ledger, read_ledger
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.disclosure.threat_statements import threats_under
from fedstat.federation.message import Request, pack_request
from fedstat.federation.state_formats import HISTORY
from fedstat.federation.transport.site_folder import open_site
from fedstat.operator.command_line import main
from fedstat.operator.config_files import set_entry, withdraw_entry

RECORDS = pd.DataFrame({"age": [61.0, 47, 55, 70, 39, 58], "sex": list("fmfmfm")})
SCHEMA = pack_request(Request("A", "schema", "describe_table", {}, "s1", "{}"))


@pytest.fixture
def home(tmp_path):
    make_federation(tmp_path, {"A": RECORDS, "B": RECORDS + RECORDS})
    return tmp_path


def secrets_of(folder):
    keys = json.loads((folder / "identity.json").read_text())
    return [value for name, value in keys.items() if name != "format" and len(value) == 64]


def test_a_new_folder_is_private_and_holds_what_it_says(tmp_path, capsys):
    text = printed(capsys, "site", "init", tmp_path / "north", "--name", "North")
    folder = tmp_path / "north"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "identity.json").stat().st_mode & 0o777 == 0o600
    fingerprint = Identity.load(folder / "identity.json").public.fingerprint
    assert fingerprint in text and fingerprint in (folder / "card.toml").read_text()
    content = tomllib.loads((folder / "site.toml").read_text())
    assert content["name"] == "North" and content["pinned"] == {"North": fingerprint}
    assert fs.Policy.from_toml(folder / "policy.toml") == fs.Policy.strict()
    assert secrets_of(folder) and not any(secret in text for secret in secrets_of(folder))
    again = printed(capsys, "site", "init", folder, "--name", "North", code=1)
    assert "is in use" in again


@pytest.mark.parametrize("name", ["../north", "", "coordinator", 'a"b', ".hidden", "a\nb", "x" * 81])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, capsys, name):
    assert "cannot be the name of a site" in printed(
        capsys, "site", "init", tmp_path / "x", "--name", name, code=1
    )
    assert not (tmp_path / "x").exists()


OPENED = 'formulas = "any"\nmasked_only = false\nrefused_kinds = []\n'


def test_a_site_describes_its_columns_before_it_is_served(home, capsys):
    folder = home / "A"
    (folder / "policy.toml").unlink()
    assert "no formula can use one" in printed(capsys, "site", "check", folder, code=1)
    text = printed(capsys, "site", "describe", folder)
    assert "This proposal" in text and "age" in text
    assert "The data agree with" in printed(capsys, "site", "describe", folder)
    text = printed(capsys, "site", "check", folder)
    assert "As strict as the default" in text and "No problems found" in text
    columns = folder / "columns.toml"
    columns.write_text(columns.read_text().replace('["age"]', '["ago"]'))
    text = printed(capsys, "site", "describe", folder, code=1)
    assert "column 'ago' is published, and not in the table" in text and "Not published" in text
    # It would not be served.
    assert "column 'ago' is published" in printed(capsys, "site", "check", folder, code=1)


def test_an_owner_reads_who_can_learn_what(home, capsys):
    (home / "A" / "policy.toml").write_text('formulas = "any"\n')
    text = " ".join(printed(capsys, "site", "threats", home / "A").split())
    for threat in threats_under(Policy.strict(formulas="any")):
        assert threat.learns in text
    assert 'formulas = "any": The response of a known person' in text


def test_check_shows_what_others_see(home, capsys):
    (home / "A" / "policy.toml").write_text(OPENED + 'families = ["schema", "design", "glm"]\nmin_count = 6')
    text = printed(capsys, "site", "check", home / "A")
    for expected in ("age     numbers", "sex     text", "6 rows", "at least 6 in a sum", "No problems found"):
        assert expected in text
    lines = {
        line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ") and line.strip()
    }
    assert lines["glm"][2:] == ["all", "all"]
    assert " ".join(lines["vfem"][2:]) == "none none families, per entity"
    assert "61" not in text.split("What the policy")[0].split("column")[1]


@pytest.mark.parametrize(
    "spoil, expected",
    [
        (lambda home: (home / "A.csv").unlink(), "A.csv"),
        (lambda home: (home / "A" / "policy.toml").write_text("min_count = 7"), r"requires at least 7 rows"),
        (lambda home: main(["site", "revoke", str(home / "A"), "coordinator"]), "no coordinator is trusted"),
        (lambda home: (home / "A" / "identity.json").chmod(0o644), "chmod 600"),
        (lambda home: (home / "A" / "site.toml").unlink(), "make it with 'fedstat site init"),
        (lambda home: (home / "A" / "policy.toml").write_text("min_cuont = 7"), "did you mean 'min_count'"),
    ],
)
def test_check_finds_what_is_not_in_order(home, capsys, spoil, expected):
    spoil(home)
    assert expected in printed(capsys, "site", "check", home / "A", code=1)


def test_trust_is_given_and_withdrawn(home, capsys, tmp_path):
    path = home / "A" / "site.toml"
    before = path.read_text()
    text = printed(capsys, "site", "revoke", home / "A", "B")
    assert "no longer trusts B" in text
    assert "B" not in tomllib.loads(path.read_text())["pinned"] and "# withdrawn" in path.read_text()
    assert "not trusted here; trusted are coordinator" in printed(
        capsys, "site", "revoke", home / "A", "B", code=1
    )
    printed(capsys, "site", "pin", home / "A", home / "B")
    assert tomllib.loads(path.read_text()) == tomllib.loads(before)
    printed(capsys, "site", "init", tmp_path / "false", "--name", "A")
    assert "has the name of this site" in printed(
        capsys, "site", "pin", home / "A", tmp_path / "false", code=1
    )
    assert "with another key" in printed(
        capsys, "federation", "join", home / "study", tmp_path / "false", code=1
    )
    assert "card of a coordinator" in printed(
        capsys, "federation", "join", home / "study", home / "study", code=1
    )
    assert "is absent; a card is" in printed(capsys, "site", "pin", home / "A", home / "none.toml", code=1)


def test_wrong_usage_is_distinguished_from_a_problem(capsys):
    with pytest.raises(SystemExit) as end:
        main(["site", "frobnicate"])
    assert end.value.code == 2 and "invalid choice" in capsys.readouterr().err
    assert run("site", "check", "/no/such/folder").returncode == 1


def test_entries_leave_what_people_wrote(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('# mine\ntop = ""  # why\n\n[one] # here\n"x" = "1"\n\n# two\n[two]\nx = "3"\n')
    set_entry(path, "one", "y z", "2")
    set_entry(path, "", "top", "t")
    withdraw_entry(path, "two", "x")
    assert tomllib.loads(path.read_text()) == {"top": "t", "one": {"x": "1", "y z": "2"}, "two": {}}
    assert path.read_text().startswith("# mine\n") and "# two" in path.read_text()
    path.write_text('one = { x = "1" }\n')
    with pytest.raises(PartitionError, match="by hand"):
        set_entry(path, "one", "y", "2")
    assert path.read_text() == 'one = { x = "1" }\n'


def answer(folder, times=1):
    """Answer as a new process would; the ledger is free afterwards."""
    site = open_site(folder)
    for _ in range(times):
        site.answer(SCHEMA.replace(b"s1", f"s{len(site.site_ledger.chains) + 1}".encode()))
    site.site_ledger.store.close()
    return site


def test_the_ledger_goes_on_after_a_restart(home, capsys):
    folder = home / "A"
    first = answer(folder, 2)
    second = answer(folder)
    assert [chain.head for chain in second.site_ledger.chains[:2]] == [
        chain.head for chain in first.site_ledger.chains
    ]
    third = second.site_ledger.chains[2]
    assert third.ordinal == 3 and third.previous == first.site_ledger.chains[1].head
    assert [chain.resumed for chain in second.site_ledger.chains] == [True, True, False]
    text = printed(capsys, "site", "ledger", folder)
    assert "6 entries in 3 sessions" in text and "describe_table" in text
    # equal sessions once, in the place of the latest; one by its name
    assert text.count("\nSession ") == 1 and "Session s3" in text and "2 earlier sessions that" in text
    assert "Session s2" in printed(capsys, "site", "ledger", folder, "--session", "s2")
    lines = printed(capsys, "site", "ledger", folder, "--session", "s2", "--json").splitlines()
    assert [json.loads(line)["sender"] for line in lines] == ["coordinator", "A"]
    assert "no session" in printed(capsys, "site", "ledger", folder, "--session", "x", code=1)
    # the keys of commitments are those of before: the site can still prove what it answered
    assert second.site_ledger.chains[0].entry_key(0) == first.site_ledger.chains[0].entry_key(0)


@pytest.mark.parametrize(
    "alter",
    [
        lambda lines: [line.replace(b'"schema"', b'"aggregate"') for line in lines],
        lambda lines: lines[:1] + lines[2:],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [line.replace(b'"s1"', b'"s7"') for line in lines],
        lambda lines: lines[3:],
        lambda lines: [*lines[:-2], lines[-2].replace(b'"schema"', b'"aggregate"'), b""],
        lambda lines: [b"{}", *lines],
    ],
)
def test_an_altered_ledger_is_found(home, capsys, alter):
    folder = home / "A"
    answer(folder, 3)
    path = folder / "ledger.jsonl"
    path.write_bytes(b"\n".join(alter(path.read_bytes().split(b"\n"))))
    assert "not what this site wrote" in printed(capsys, "site", "ledger", folder, code=1)
    with pytest.raises(SecurityError, match="line"):
        open_site(folder)


@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_line_that_a_crash_cut_is_dropped(home, cut):
    folder = home / "A"
    heads = [chain.head for chain in answer(folder).site_ledger.chains]
    path, head = folder / "ledger.jsonl", (folder / "ledger.head").read_bytes()
    answer(folder)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    (folder / "ledger.head").write_bytes(head)  # it is written when the ledger is whole again
    site = answer(folder)
    assert site.site_ledger.chains[0].head == heads[0] and path.read_bytes().endswith(b"\n")
    assert len(read_ledger(folder, "A", site.trust.identity.public).chains) == len(site.site_ledger.chains)


def test_two_processes_do_not_write_one_ledger(home):
    site = open_site(home / "A")
    with pytest.raises(EngineError, match="another process serves the site"):
        open_ledger(home / "A", "A", site.trust.identity, patience=0.1)
    site.site_ledger.store.close()


def test_nothing_leaves_that_cannot_be_written_down(home, monkeypatch):
    site = open_site(home / "A")
    site.answer(SCHEMA)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EngineError, match=r"cannot be written .No space left.*nothing leaves"):
        site.answer(SCHEMA)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="No space left"):
        site.answer(SCHEMA)
    site.site_ledger.store.close()


def test_rows_behind_earlier_answers_outlive_the_process(home):
    site = open_site(home / "A")
    released = ReleasedSums.none(6).with_groups(np.array([0, 0, 0, 1, 1, -1]))
    stored = released.to_arrays() | HISTORY.stamp_arrays()
    site.site_ledger.keep_answered(stored, site._data.table.n_rows)
    site.site_ledger.store.close()
    site = open_site(home / "A")
    kept = site._data.memory.released
    assert kept.spaces.sums == released.spaces.sums and kept.n_rows == 6
    assert [one.digest for one in kept.spaces.patterns] == [one.digest for one in released.spaces.patterns]
    site.site_ledger.keep_answered(stored, 9)
    site.site_ledger.store.close()
    with pytest.raises(SecurityError, match="earlier replies used 9"):
        open_site(home / "A")


def test_a_site_served_for_real(home, capsys):
    """Once, while it serves, stopped in order, killed: status, test and ledger say how it is."""
    A, B = home / "A", home / "B"
    assert "has not been started yet" in printed(capsys, "site", "status", A, code=1)
    assert "has not answered any request" in printed(capsys, "site", "ledger", A)
    running = {A: serve_by_command(A), B: serve(B)}
    try:
        for folder, process in running.items():
            wait(folder, process)
        text = printed(capsys, "federation", "test", home / "study", "--timeout", "600")
        assert text.count(" yes ") == 2 and "ClientPartition.connect" in text
        text = printed(capsys, "site", "status", A)
        assert "running" in text and "requests" in text
        assert "The site is running" in printed(capsys, "site", "check", A)
        running[B].kill()
        running[B].wait()
        assert "ended without a message" in printed(capsys, "site", "status", B, code=1)
        text = printed(capsys, "federation", "test", home / "study", "--timeout", "5", code=1)
        assert "'B' did not answer within 5 s" in text and text.count(" yes ") == 1
        done = run("site", "serve", B, "--once")
        assert done.returncode == 0 and "stopped" in done.stdout, done.stderr
        assert main(["site", "revoke", str(A), "coordinator"]) == 0
        assert running[A].wait(600) == 1
        assert "trusts no coordinator" in (A / "log.txt").read_text()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    logs = (A / "log.txt").read_text() + (B / "log.txt").read_text() + text + done.stdout
    assert not any(secret in logs for folder in (A, B, home / "study") for secret in secrets_of(folder))
    assert "describe_table" in printed(capsys, "site", "ledger", B)


def test_a_serving_site_stops_in_order(home):
    process = serve(home / "A")
    try:
        wait(home / "A", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 0
        wait(home / "A", process, "stopped")
    finally:
        process.kill()
        process.wait()
