"""Units and compose files with the true paths of a site, held against the tools that read them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from operating import make_federation

from fedstat.errors import PartitionError
from fedstat.operator.command_line import main
from fedstat.operator.deployment import ServiceUnit

RECORDS = pd.DataFrame({"age": [61.0, 47, 55, 70, 39, 58]})


@pytest.fixture
def home(tmp_path):
    make_federation(tmp_path, {"A": RECORDS})
    return tmp_path


@pytest.fixture
def unit(home, capsys):
    capsys.readouterr()
    assert main(["site", "unit", str(home / "A")]) == 0
    return capsys.readouterr().out


def entries(unit):
    lines = [line.partition("=") for line in unit.splitlines() if not line.startswith(("#", "["))]
    return {key: value for key, _, value in lines if key}


def test_a_unit_writes_the_folder_and_the_exchange_alone(home, unit):
    found = entries(unit)
    assert found["ReadWritePaths"].split() == [str(home / "A"), str(home / "study" / "exchange")]
    assert str(home / "A.csv") in found["RequiresMountsFor"] and "A.csv" not in found["ReadWritePaths"]
    assert found["ProtectSystem"] == "strict" and found["NoNewPrivileges"] == "true"
    assert (
        found["RestrictAddressFamilies"] == "AF_UNIX"
    )  # records in a file, questions in a folder: no network
    assert found["ExecStart"] == f"{sys.executable} -m fedstat.operator site serve {home / 'A'}"


def test_the_command_of_a_unit_runs(unit):
    run = subprocess.run([*entries(unit)["ExecStart"].split(), "--once"], timeout=600, capture_output=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_a_unit_is_understood_by_systemd(unit, tmp_path):
    path = tmp_path / "fedstat-a.service"
    path.write_text(unit)
    run = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=120
    )
    reported = [line for line in run.stderr.splitlines() if "fedstat-a" in line]
    assert not reported and run.returncode == 0, run.stderr


def test_a_compose_file_mounts_what_the_site_names(home, capsys, tmp_path):
    yaml = pytest.importorskip("yaml")
    assert main(["site", "compose", str(home / "A"), str(tmp_path / "docker")]) == 0
    service = yaml.safe_load((tmp_path / "docker" / "compose.yaml").read_text())["services"]["a"]
    folder, exchange, records = (str(home / name) for name in ("A", "study/exchange", "A.csv"))
    assert service["volumes"] == [f"{folder}:{folder}", f"{exchange}:{exchange}", f"{records}:{records}:ro"]
    assert service["command"] == ["site", "serve", folder] and service["network_mode"] == "none"
    assert service["healthcheck"]["test"] == ["CMD", "fedstat", "site", "health", folder]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert (
        main(["site", "compose", str(home / "A"), str(tmp_path / "docker")]) == 1
    )  # nothing is written over


def test_a_database_gets_its_variable_or_its_file_and_no_value_is_written(
    home, tmp_path, monkeypatch, capsys
):
    yaml = pytest.importorskip("yaml")
    monkeypatch.setenv("WARD", "postgresql://reader:secret@host/ward")
    path = home / "A" / "site.toml"
    top, _, rest = path.read_text().partition("[data]")
    for place, entry in enumerate(('env = "WARD"', f'file = "{home}/ward.txt"')):
        data = f'[data]\nkind = "sql"\nquery = "SELECT id, age FROM t"\nkey = "id"\n{entry}\n\n[pinned]'
        path.write_text(top + data + rest.partition("[pinned]")[2])
        into = tmp_path / f"docker{place}"
        assert main(["site", "compose", str(home / "A"), str(into)]) == 0, capsys.readouterr().err
        text = (into / "compose.yaml").read_text()
        service = yaml.safe_load(text)["services"]["a"]
        assert "secret" not in text and "network_mode" not in service
        mounted = f"{home}/ward.txt:{home}/ward.txt:ro" in service["volumes"]
        assert (service.get("environment"), mounted) == ((["WARD"], False), (None, True))[place]


def test_a_ledger_without_a_name_is_named_by_its_number(home, monkeypatch):
    def nameless(path):
        raise KeyError("uid")

    monkeypatch.setattr(Path, "owner", nameless)
    unit = ServiceUnit("a", home / "A", ("site", "serve"), (home / "A",)).unit()
    assert entries(unit)["User"] == str(os.getuid())


def test_a_dockerfile_has_instructions_that_docker_knows(home, tmp_path, capsys):
    assert main(["site", "compose", str(home / "A"), str(tmp_path / "docker")]) == 0
    lines = (tmp_path / "docker" / "Dockerfile").read_text().splitlines()
    words = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert words == ["FROM", "COPY", "RUN", "ENV", "ENTRYPOINT"]
    assert json.loads(lines[-1].removeprefix("ENTRYPOINT ")) == ["fedstat"]
    copied = next(line for line in lines if line.startswith("COPY")).split()[1]
    assert re.fullmatch(r"fedstat-[0-9.a-z+]+-py3-none-any\.whl", copied)
    assert copied in next(line for line in lines if line.startswith("RUN pip install"))


def test_a_coordinator_over_a_folder_has_nothing_to_run(home, capsys):
    assert main(["federation", "unit", str(home / "study")]) == 1
    assert "needs no server" in capsys.readouterr().err


def test_a_path_that_a_unit_would_take_apart_is_refused(home, tmp_path):
    for name in ("two words", "a%h", "x:ro", "a\nUser=root"):
        with pytest.raises(PartitionError, match="letters, digits"):
            ServiceUnit("a", home / "A", ("site", "serve"), (tmp_path / name,)).unit()
