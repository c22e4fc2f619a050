"""What monitors ask a site: how it stands under keys that stay, and whether it can answer."""

import json
import os
import shutil
import signal

import pandas as pd
import pytest
from operating import make_federation, serve, until_true, wait

from fedstat.operator.command_line import main

KEYS = (
    "form site carrier state is_served process since heartbeat connected version installed problem "
    "records_as_of account sessions questions refused arrays_left entries last_question passed_over waiting "
    "plans_waiting certificate_days budget"
)


@pytest.fixture
def home(tmp_path):
    make_federation(tmp_path, {name: pd.DataFrame({"age": [61.0, 47, 55, 70, 39, 58]}) for name in "AB"})
    return tmp_path


def told(capsys, *words, code):
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    return capsys.readouterr().out


def standing(capsys, folder, code):
    return json.loads(told(capsys, "site", "status", folder, "--json", code=code))


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
        assert standing(capsys, folder, 0)["questions"] >= 1
    finally:
        process.kill()
        process.wait()
    assert standing(capsys, folder, 1)["state"] == "killed"
    (folder / "ledger.jsonl").unlink()
    found = standing(capsys, folder, 1)
    assert "is absent" in found["account"] and found["questions"] is None


def test_a_site_is_healthy_while_it_can_answer(home, capsys, monkeypatch):
    folder = home / "A"
    assert told(capsys, "site", "health", folder, code=1) == "A: is not served (never started)\n"
    process = serve(folder)
    try:
        wait(folder, process)
        assert told(capsys, "site", "health", folder, code=0) == "A: is served, and can answer\n"
        with monkeypatch.context() as patch:
            usage = shutil.disk_usage(folder)
            patch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=2**20))
            assert "is full" in told(capsys, "site", "health", folder, code=1)
        rules = (folder / "policy.toml").read_text()
        (folder / "policy.toml").write_text("no rule")
        assert "policy cannot be read" in told(capsys, "site", "health", folder, code=1)
        (folder / "policy.toml").write_text(rules)
        process.send_signal(signal.SIGSTOP)  # it lives, holds its lock, and looks for no question
        os.utime(folder / "status.json", (0, 0))
        assert "it hangs" in told(capsys, "site", "health", folder, "--patience", "60", code=1)
        process.send_signal(signal.SIGCONT)
        until_true(lambda: main(["site", "health", str(folder), "--patience", "60"]) == 0)
    finally:
        process.kill()
        process.wait()
    assert told(capsys, "site", "health", folder, code=1) == "A: is not served (killed)\n"
