"""Values that monitors read: the state of a site under stable keys, and whether it can answer."""

import json
import os
import re
import shutil
import signal

import pandas as pd
import pytest
from operating import make_federation, serve, until_true, wait

from fedstat.operator.command_line import main
from fedstat.operator.service import exposition, log_to
from fedstat.operator.site_status import BudgetStatus, SiteStatus

KEYS = (
    "form site transport state is_served process since heartbeat connected version installed problem "
    "records_as_of site_ledger sessions requests refused arrays_released entries last_request "
    "passed_over waiting "
    "plans_waiting certificate_days budget reload_problem exchange_problem clock refusals_left "
    "policy_weakened"
)


@pytest.fixture
def home(tmp_path):
    make_federation(tmp_path, {name: pd.DataFrame({"age": [61.0, 47, 55, 70, 39, 58]}) for name in "AB"})
    return tmp_path


def reported(capsys, *words, code):
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    return capsys.readouterr().out


def standing(capsys, folder, code):
    return json.loads(reported(capsys, "site", "status", folder, "--json", code=code))


def test_how_a_site_stands_has_keys_that_stay(home, capsys):
    folder = home / "A"
    found = standing(capsys, folder, 1)
    assert " ".join(found) == KEYS and found["form"] == 1
    assert (found["state"], found["is_served"], found["heartbeat"]) == ("never started", False, None)
    process = serve(folder)
    try:
        wait(folder, process)
        found = standing(capsys, folder, 0)
        assert (found["state"], found["process"], found["problem"]) == ("running", process.pid, "")
        assert main(["federation", "test", str(home / "study"), "--timeout", "1"]) == 1  # B is not served
        assert standing(capsys, folder, 0)["requests"] >= 1
    finally:
        process.kill()
        process.wait()
    assert standing(capsys, folder, 1)["state"] == "killed"
    (folder / "ledger.jsonl").unlink()
    found = standing(capsys, folder, 1)
    assert "is absent" in found["site_ledger"] and found["requests"] is None


def test_a_site_is_healthy_while_it_can_answer(home, capsys, monkeypatch):
    folder = home / "A"
    assert reported(capsys, "site", "health", folder, code=1) == "A: is not running (never started)\n"
    process = serve(folder)
    try:
        wait(folder, process)
        assert reported(capsys, "site", "health", folder, code=0) == "A: is running and can answer\n"
        with monkeypatch.context() as patch:
            usage = shutil.disk_usage(folder)
            patch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=2**20))
            assert "is full" in reported(capsys, "site", "health", folder, code=1)
        rules = (folder / "policy.toml").read_text()
        (folder / "policy.toml").write_text("no rule")
        assert "policy cannot be read" in reported(capsys, "site", "health", folder, code=1)
        (folder / "policy.toml").write_text(rules)
        process.send_signal(signal.SIGSTOP)  # it lives, holds its lock, and looks for no question
        os.utime(folder / "status.json", (0, 0))
        assert "the service hangs" in reported(capsys, "site", "health", folder, "--patience", "60", code=1)
        process.send_signal(signal.SIGCONT)
        until_true(lambda: main(["site", "health", str(folder), "--patience", "60"]) == 0)
    finally:
        process.kill()
        process.wait()
    assert reported(capsys, "site", "health", folder, code=1) == "A: is not running (killed)\n"


def test_metrics_are_written_in_the_mode_that_was_requested_and_hold_no_row(home, capsys):
    folder, path = home / "A", home / "metrics.prom"
    process = serve(folder, "--metrics", str(path), "--metrics-mode", "640", "--log", str(home / "A.log"))
    try:
        wait(folder, process)
        until_true(path.exists)
        assert main(["federation", "test", str(home / "study"), "--timeout", "1"]) == 1  # B is not served
        assert path.stat().st_mode & 0o777 == 0o640
        assert (home / "A.log").stat().st_mode & 0o777 == 0o600 and "answers requests in" in (
            home / "A.log"
        ).read_text()
    finally:
        process.kill()
        process.wait()
    text = path.read_text()
    parser = pytest.importorskip("prometheus_client.parser")
    found = {
        sample.name: sample for one in parser.text_string_to_metric_families(text) for sample in one.samples
    }
    assert found["fedstat_build_info"].labels["site"] == "A" and found["fedstat_answers"].value == 1
    assert found["fedstat_disk_free_bytes"].value > 0 and "fedstat_budget_left_ratio" not in found
    assert {name for sample in found.values() for name in sample.labels} == {"site", "transport", "version"}
    assert "age" not in text.replace("package", "").split() and "rows" not in text


def test_every_metric_follows_the_grammar():
    line = re.compile(r'[a-z_]+\{([a-z]+="([^"\\\n]|\\["\\n])*",?)+\} -?[0-9.e+-]+')
    plain = dict.fromkeys(KEYS.split()) | {
        "site": 'a"b\\c\nd',
        "transport": "folder",
        "installed": "0.1.0",
        "is_served": False,
    }
    for one in exposition(SiteStatus(**plain | {"requests": 3}), 0.5, 10**9).splitlines():
        assert one.startswith(("# HELP fedstat_", "# TYPE fedstat_")) or line.fullmatch(one), one


COUNTS = {
    "fedstat_requests_total": "requests",
    "fedstat_refused_total": "refused",
    "fedstat_sessions_total": "sessions",
    "fedstat_arrays_released_total": "arrays_released",
    "fedstat_ledger_entries_total": "entries",
    "fedstat_waiting_requests": "waiting",
    "fedstat_waiting_plans": "plans_waiting",
    "fedstat_certificate_days": "certificate_days",
}


def metrics(busy=None, free=None, **known):
    """Values of the metrics of a site of which nothing else is known."""
    nothing = dict.fromkeys(KEYS.split()) | {"site": "A", "transport": "folder", "installed": "1"}
    status = SiteStatus(**nothing | {"is_served": False} | known)
    lines = exposition(status, busy, free).splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("start", [0, 1, 100])
def test_every_metric_has_the_count_that_its_name_says(start):
    known = {field: start + place for place, field in enumerate(COUNTS.values())}
    found = metrics(0.25, 12, **known)
    assert {name: found[name] for name in COUNTS} == {name: known[field] for name, field in COUNTS.items()}
    assert (found["fedstat_busy_seconds_total"], found["fedstat_disk_free_bytes"]) == (0.25, 12)
    none = metrics()
    assert none.keys() == {"fedstat_build_info", "fedstat_answers", "fedstat_written_time_seconds"}


@pytest.mark.parametrize(
    ("known", "answers"),
    [
        ({"is_served": True, "site_ledger": "complete", "problem": ""}, 1),
        ({"is_served": False, "site_ledger": "complete", "problem": ""}, 0),
        ({"is_served": True, "site_ledger": "is absent", "problem": ""}, 0),
        ({"is_served": True, "site_ledger": "complete", "problem": "a full disk"}, 0),
    ],
)
def test_a_site_answers_where_nothing_hinders_it(known, answers):
    assert metrics(**known)["fedstat_answers"] == answers


def test_times_and_the_budget_are_those_of_the_status():
    budget = BudgetStatus(epsilon=1.0, delta=1e-6, epsilon_spent=0.5, share_left=0.75, releases=3)
    found = metrics(since="1970-01-01T00:01:00", last_request="1970-01-01T00:02:00+00:00", budget=budget)
    assert found["fedstat_start_time_seconds"] == 60.0
    assert found["fedstat_last_request_time_seconds"] == 120.0
    assert found["fedstat_budget_left_ratio"] == 0.75


def test_a_log_is_set_aside_at_its_size_and_so_many_are_kept(tmp_path):
    take = log_to(tmp_path / "site.log", 0.001, 2)
    for number in range(100):
        take(f"{number:03} {'x' * 50}")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["site.log", "site.log.1", "site.log.2"]
    assert all(file.stat().st_size <= 1000 and file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert files[0].read_text().splitlines()[-1].startswith("099")


def test_a_status_file_that_is_none_is_no_status(home, capsys):
    (home / "A" / "status.json").write_text("{")
    assert "not been started" in reported(capsys, "site", "status", home / "A", code=1)


def test_how_a_federation_stands_is_reported_to_programs(home, capsys):
    words = ("federation", "status", home / "study")
    found = json.loads(reported(capsys, *words, "--json", code=1))
    assert found["sites"]["A"] == {"connected": None, "waiting": None, "roster": None, "seen": None}
    assert "has not been started" in found["problems"][0] and found["server"] is None
    for name in "AB":
        assert main(["site", "serve", str(home / name), "--once"]) == 0
    found = json.loads(reported(capsys, *words, "--json", code=0))
    assert found["sites"]["B"]["waiting"] == 0 and found["problems"] == []
    assert "roster accepted" in reported(capsys, *words, code=0)
    assert main(["federation", "test", str(home / "study"), "--timeout", "0.2"]) == 1
    (home / "study" / "exchange" / "B" / "alive").unlink(missing_ok=True)
    assert "B: 1 requests wait, and its service was never seen" in reported(capsys, *words, code=1)
