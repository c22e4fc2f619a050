"""What the commands of an owner and of a coordinator say about a site that cannot be used as it is."""

import json
import os
import subprocess
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from forked import Forked
from operating import command, make_federation, printed, run, served_sites, serving, until_true

from fedstat.errors import SecurityError
from fedstat.federation.audit.checkpoints import SignedCheckpoint
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import Site
from fedstat.federation.tables.published import PublishedColumn
from fedstat.federation.transport.live_config import policy_changes
from fedstat.federation.transport.site_folder import load_identity, open_site, read_description
from fedstat.operator import service
from fedstat.operator.command_line import main
from fedstat.operator.page.views import policy_rows
from fedstat.operator.site_status import utc_now, write_status

N = 120


def patients(seed=0):
    """Identifiers, dates as text, a rare level, codes and booleans, as a hospital exports them."""
    rng = np.random.default_rng(seed)
    ward = np.where(np.arange(N) < 2, "isolation", rng.choice(["medical", "surgical"], size=N))
    return pd.DataFrame(
        {
            "patient_id": np.arange(N) + 1000,
            "admitted": pd.Timestamp("2021-03-01") + pd.to_timedelta(rng.integers(0, 700, N), "D"),
            "age": rng.integers(20, 90, N),
            "sex": rng.integers(1, 3, N),
            "ward": ward,
            "smoker": rng.random(N) < 0.3,
            "y": rng.integers(0, 2, N),
        }
    )


@pytest.fixture
def home(tmp_path, capsys):
    make_federation(
        tmp_path, {name: patients(seed) for seed, name in enumerate("ABC")}, policy=Policy.strict()
    )
    capsys.readouterr()
    return tmp_path


def declare(folder, schema):
    toml = folder / "site.toml"
    toml.write_text(toml.read_text().replace("# [data.schema]", "[data.schema]\n" + schema, 1))


def test_dates_and_identifiers_block_nothing_and_are_not_published(home, capsys):
    text = printed(capsys, "site", "describe", home / "A")
    assert "patient_id: looks like an identifier" in text
    assert "admitted: dates; to use them as days" in text and '{ type = "dates", since' in text.replace(
        "\n      ", " "
    )
    columns = (home / "A" / "columns.toml").read_text()
    assert "admitted" not in columns and "patient_id" not in columns and '["age"]' in columns
    # the rare level: published, as its owner decides
    (home / "A" / "columns.toml").write_text(columns.replace('"medical"', '"isolation", "medical"'))
    assert "No problems found" in printed(capsys, "site", "check", home / "A")
    with served_sites(home, "A"):
        assert "can answer" in printed(capsys, "site", "health", home / "A")


def test_a_folder_is_not_made_for_a_file_that_does_not_exist(home, capsys):
    new = home / "new"
    text = printed(capsys, "site", "init", new, "--name", "D", "--data", home / "absent.csv", code=1)
    assert "there is no file" in text and not new.exists()
    text = printed(capsys, "site", "add-table", home / "A", "icu", "--data", home / "absent.csv", code=1)
    assert "there is no file" in text and not (home / "A" / "tables").exists()


def test_describe_writes_how_a_file_is_written_and_keeps_what_its_owner_wrote(home, capsys):
    """The export of a site has changed since its folder was made."""
    toml, columns = home / "A" / "site.toml", home / "A" / "columns.toml"
    frame = patients().assign(dose=np.linspace(0.5, 9.5, N))
    text = frame.assign(admitted=frame["admitted"].dt.strftime("%d/%m/%Y")).to_csv(
        index=False, sep="\t", decimal=","
    )
    (home / "A.csv").write_bytes(("Export\n\n" + text).encode("utf-16"))
    refused = printed(capsys, "site", "check", home / "A", code=1)
    assert 'Write  encoding = "utf-16", separator = "\\t", skip_lines = 2  under [data] in site' in refused
    before = toml.read_text()
    out = printed(capsys, "site", "describe", home / "A")
    assert "'A.csv' has the encoding utf-16, tabs between columns, 2 lines above the names of" in out
    assert f"the columns, decimal commas, dates as dd/mm/yyyy. Written to '{toml}':" in out
    written = toml.read_text()
    assert set(before.splitlines()) <= set(written.splitlines())  # comments and entries are kept
    assert 'separator = "\\t"\n' in written and "skip_lines = 2\n" in written
    assert '["dose"]\nkind = "number"' in columns.read_text() and "admitted: dates" in out
    assert "Written to" not in printed(capsys, "site", "describe", home / "A", code=0)
    # the owner's own entry is not changed, and what can mean two things is left to the owner
    columns.unlink()
    changed = written.replace('date_format = "dd/mm/yyyy"\n', "")
    toml.write_text(changed.replace('decimal = ","', 'decimal = "."'))
    early = frame.assign(admitted="03/04/2021").to_csv(index=False, sep="\t", decimal=",")
    (home / "A.csv").write_bytes(("Export\n\n" + early).encode("utf-16"))
    out = printed(capsys, "site", "describe", home / "A")
    assert "no day above 12: write date_format" in out and "under [data] in" in out
    assert 'decimal = "."' in toml.read_text() and 'date_format = "dd/mm' not in toml.read_text()
    assert '["dose"]' not in columns.read_text() and "dose: text that reads as numbers" in out


def test_declared_dates_become_days_and_codes_get_names(home, capsys):
    declare(
        home / "A",
        'admitted = { type = "dates", since = "2020-01-01" }\n'
        'sex = { type = "whole numbers", codes = { 1 = "male", 2 = "female" } }\n',
    )
    printed(capsys, "site", "describe", home / "A")
    columns = home / "A" / "columns.toml"
    columns.write_text(columns.read_text().replace('"medical"', '"isolation", "medical"'))
    site = open_site(home / "A")
    table = site.data.table.table.frame
    site.site_ledger.store.close()
    raw = pd.read_csv(home / "A.csv")
    days = (pd.to_datetime(raw["admitted"]) - pd.Timestamp("2020-01-01")).dt.days
    np.testing.assert_array_equal(table["admitted"], days)
    assert (table["sex"] == raw["sex"].map({1: "male", 2: "female"})).all()
    assert site.published["sex"].levels == ("female", "male")
    assert site.published["admitted"].kind == "number" and site.published["admitted"].range[0] > 0


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ('admitted = { type = "dates", since = "1.1.2020" }', "since needs type"),
        ('age = { type = "numbers", since = "2020-01-01" }', "since needs type"),
        ('admitted = "dates"', ""),
    ],
)
def test_a_declaration_that_cannot_be_used_says_why(home, capsys, entry, text):
    declare(home / "A", entry + "\n")
    out = printed(capsys, "site", "describe", home / "A", code=1 if text else 0)
    assert text in out


def test_check_reports_what_prevents_the_start(home, capsys):
    printed(capsys, "site", "describe", home / "A")
    columns = home / "A" / "columns.toml"
    columns.write_text(columns.read_text().replace('"medical"', '"isolation", "medical"'))
    assert printed(capsys, "site", "check", home / "A").endswith(f"fedstat site serve {home / 'A'}\n")
    site = open_site(home / "A")
    site.data.memory.follow(site.data.table, site.data.mark_key)
    from fedstat.federation.disclosure.release_history import ReleasedSums

    site.data.memory.released = ReleasedSums.none(N).with_groups(np.zeros(N, dtype=int))
    site.site_ledger.keep_answered(site.data.memory.to_arrays(site.data.table, site.data.mark_key), N)
    site.site_ledger.store.close()
    frame = pd.read_csv(home / "A.csv")
    frame.loc[3, "age"] += 1
    frame.to_csv(home / "A.csv", index=False)
    text = printed(capsys, "site", "check", home / "A", code=1)
    assert "Gone or changed since then: 1." in text
    refused = run("site", "serve", home / "A", "--once")
    assert refused.returncode == 1 and "Gone or changed since then: 1." in refused.stderr
    # the status says why
    status = printed(capsys, "site", "status", home / "A", code=1)
    assert "failed" in status and "Gone or changed since then: 1." in status
    found = json.loads(printed(capsys, "site", "status", home / "A", "--json", code=1))
    assert found["state"] == "failed" and "Gone or changed" in found["problem"]
    assert "Gone or changed" in printed(capsys, "site", "health", home / "A", code=1)


def test_a_refused_reload_is_reported_until_one_succeeds(home, capsys):
    with served_sites(home, "A"):
        good = (home / "A.csv").read_bytes()
        (home / "A.csv").unlink()
        main(["site", "reload", str(home / "A")])
        until_true(lambda: main(["site", "health", str(home / "A")]))
        assert "answers, but could not read its rows again" in printed(
            capsys, "site", "health", home / "A", code=1
        )
        found = json.loads(printed(capsys, "site", "status", home / "A", "--json"))
        assert "could not read its rows again" in found["reload_problem"] and found["problem"] == ""
        (home / "A.csv").write_bytes(good)
        main(["site", "reload", str(home / "A")])
        until_true(lambda: not main(["site", "health", str(home / "A")]))


def health(home, capsys, code=1):
    return printed(capsys, "site", "health", home / "A", code=code)


def status(home, capsys):
    return json.loads(printed(capsys, "site", "status", home / "A", "--json"))


def serve_and_beat(folder):
    """Serve a site that looks at its exchange without a pause."""
    service.BEAT = 0.05
    return main([*serving(folder)])


def test_an_exchange_that_cannot_be_written_is_a_problem_until_it_can(home, capsys):
    alive = home / "study" / "exchange" / "A" / "alive"
    with served_sites(home, "A", lambda folder: Forked(serve_and_beat, folder, log=folder / "log.txt")):
        until_true(alive.exists)
        assert "can answer" in health(home, capsys, 0)
        while not alive.is_dir():  # no file can be opened there, as on a share that is read-only
            alive.unlink(missing_ok=True)
            with suppress(FileExistsError):
                alive.mkdir()
        until_true(lambda: main(["site", "health", str(home / "A")]))
        assert "cannot be written (Is a directory)" in health(home, capsys)
        assert "cannot be written" in status(home, capsys)["exchange_problem"]
        alive.rmdir()
        until_true(lambda: not main(["site", "health", str(home / "A")]))
        assert (home / "A" / "log.txt").read_text().count("cannot be written") == 1


def test_a_ledger_that_is_behind_its_signed_state_is_a_problem(home, capsys):
    """As after the restore of an older backup, once a coordinator has sent the later state."""
    site, lines = open_site(home / "A"), []
    ledger, identity = site.site_ledger, site.trust.identity
    write_status(home / "A", "running", "A", utc_now(), {})
    assert "can answer" in health(home, capsys, 0)
    later = SignedCheckpoint(99, "0" * 64, time.time_ns()).sign(identity)
    with pytest.raises(SecurityError, match="reset to an earlier state"):
        ledger.verify_checkpoint("A", identity.public, later)
    text = health(home, capsys)
    assert "reset to an earlier state" in text and "until its owner has declared the loss" in text
    assert "reset to an earlier state" in status(home, capsys)["site_ledger"]
    served = SimpleNamespace(site=site, description=read_description(home / "A"))
    one = service.Service(home / "A", served, False, lines.append, lambda *_: None)
    for _ in range(3):
        one.stop()
    assert [line for line in lines if "reset to an earlier state" in line] == lines[-1:]
    ledger.store.close()


def test_a_coordinator_that_gets_no_more_answers_is_a_problem(home, capsys):
    most = Policy.strict().max_refusals
    for left, code in ((1, 0), (0, 1)):
        site = open_site(home / "A")
        site.site_ledger.set_refusals("coordinator", most - left)
        site.site_ledger.store.close()
        with served_sites(home, "A"):
            assert ("gets no more answers" in health(home, capsys, code)) == bool(code)
            assert status(home, capsys)["refusals_left"] == left
    printed(capsys, "site", "answer-again", home / "A")
    with served_sites(home, "A"):
        assert "can answer" in health(home, capsys, 0)


@pytest.mark.parametrize("days", [-400, 3])
def test_a_clock_that_was_set_is_named(home, capsys, monkeypatch, days):
    now, lines = time.time, []
    one = service.Service(home / "A", None, False, lines.append, None)
    monkeypatch.setattr(service.Service, "report", lambda *_: None)
    one._watch_clock()
    assert not lines
    with served_sites(home, "A"):
        monkeypatch.setattr(time, "time", lambda: now() + days * 86_400)
        seen = f"by the clock, it was seen last {abs(days)}.0 days {'from now' if days < 0 else 'ago'}"
        assert f"the clock of this machine was set, or the service hangs: {seen}" in health(home, capsys)
        one._watch_clock()
        one._watch_clock()
        way = "back" if days < 0 else "forward"
        assert len(lines) == 1 and f"was set {way} by {abs(days)}.00 days" in lines[0]


def test_a_policy_that_became_weaker_is_named_as_such(home, capsys):
    policy, log = home / "A" / "policy.toml", home / "A" / "log.txt"
    with served_sites(home, "A"):
        policy.write_text(Policy.strict(min_count=7).to_toml())
        until_true(lambda: "stricter in min_count" in log.read_text())
        assert "weaker" not in log.read_text()
        policy.write_text(Policy.strict(min_count=3, min_events=9).to_toml())
        until_true(lambda: "weaker" in log.read_text())
        assert "the policy is weaker than before: min_count from 7 to 3\n" in log.read_text()
        assert "min_count from 7 to 3" in printed(capsys, "site", "status", home / "A")
    # also while the site was stopped: the ledger has the rules of before
    policy.write_text(Policy.strict(min_count=3, min_events=2).to_toml())
    with served_sites(home, "A"):
        said = "weaker than before, changed while the site was stopped: min_events from 9 to 2\n"
        assert said in log.read_text()
        assert "min_events from 9 to 2" in printed(capsys, "site", "status", home / "A")
    with served_sites(home, "A"):
        assert log.read_text().count("stopped: min_events") == 1
        # the last time stays in the status
        assert "min_events from 9 to 2" in printed(capsys, "site", "status", home / "A")
    ledger = read_ledger(home / "A", "A", load_identity(home / "A").public)
    weaker = [one.weaker for one in policy_changes(ledger.policies)]
    assert weaker == [(), ("min_count from 7 to 3",), ("min_events from 9 to 2",)]
    assert [row[1] for row in policy_rows(ledger)] == [
        "min_events from 9 to 2",
        "min_count from 7 to 3",
        "none",
    ]


def test_the_coordinator_sees_that_a_site_is_dead(home, capsys):
    with served_sites(home, "ABC") as running:
        until_true(lambda: all((home / "study" / "exchange" / name / "alive").exists() for name in "ABC"))
        printed(capsys, "federation", "status", home / "study")
        running["B"].kill()
        running["B"].wait()
        before = time.time() - 121
        os.utime(home / "study" / "exchange" / "B" / "alive", (before, before))
        text = printed(capsys, "federation", "status", home / "study", code=1)
        assert "B was seen 12" in text and "its service is not running" in text


def test_a_reader_that_stops_early_is_no_error(home):
    piped = subprocess.run(
        f"{' '.join(command('site', 'describe', home / 'A'))} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert piped.stderr == "" and "Published description" in piped.stdout


def test_a_wider_range_is_not_stricter():
    table = pd.DataFrame({"x": np.arange(20.0)})
    published = {"x": PublishedColumn("number", (0.0, 30.0))}
    site = Site("A", table, published=published)
    assert site.change_rules(site.policy, {"x": PublishedColumn("number", (0.0, 40.0))}) == ()
    assert site.change_rules(site.policy, {"x": PublishedColumn("number", (0.0, 35.0))}) == ("columns",)
    assert site.change_rules(site.policy, {}) == ("columns",)


def test_a_unit_of_root_is_pointed_out(home, capsys):
    if os.geteuid() == 0:
        assert "the service would run as root" in printed(capsys, "site", "unit", home / "A")
