"""From a folder to a fit over NVIDIA FLARE by commands alone; what is refused on the way, and what is said.

What needs ``fedstat[flare]`` is skipped without it. One federation of two sites serves the tests of the last
part, which run in the order of the file.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
import zipfile
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from operating import OPEN, command

import fedstat as fs
from fedstat.errors import EngineError, PartitionError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.envelopes import Envelope, sign_envelope
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.transport.flare import child_process
from fedstat.federation.transport.flare import provision as provisioning
from fedstat.federation.transport.flare.analysis import end_analysis
from fedstat.federation.transport.flare.provision import (
    USER,
    Participant,
    accept_kit,
    create_key,
    days_left,
    refuse_certificates,
    remove_stale_jobs,
)
from fedstat.federation.transport.site_folder import load_identity
from fedstat.operator import flare_commands, flare_process
from fedstat.operator.command_line import main
from fedstat.operator.flare_process import FlareProcess
from fedstat.operator.site_status import FOR_GOOD

needs_flare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs fedstat[flare]")
SITES = ("north", "south")
FORMULA = "num > 0 ~ age"


def reported(capsys, *arguments, code=0):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    out = capsys.readouterr()
    return out.out + out.err


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def make_folders(home: Path) -> Path:
    """Steps of owners and coordinator before any certificate."""
    study = home / "study"
    address = ["--host", "localhost", "--port", str(free_port())]
    assert main(["federation", "new", str(study), "--transport", "flare", *address]) == 0
    patients = fs.datasets.make_hospitals()
    for name, label in zip(SITES, ("Cleveland", "Hungary"), strict=True):
        table = home / f"{name}.csv"
        patients[patients["hospital"] == label].drop(columns="hospital").to_csv(table, index=False)
        given = ["--name", name, "--data", str(table), "--transport", "flare"]
        assert main(["site", "init", str(home / name), *given]) == 0
        (home / name / "policy.toml").write_text(OPEN.to_toml())  # a strict site adds up no two sites
        assert main(["site", "pin", str(home / name), str(study)]) == 0
        assert main(["federation", "join", str(study), str(home / name)]) == 0
    for name in SITES:
        for other in SITES:
            assert main(["site", "pin", str(home / name), str(home / other)]) == 0
    return study


# Without NVIDIA FLARE


@pytest.mark.parametrize(
    "given, expected",
    [
        ([], "needs --host and --port"),
        (["--host", "localhost"], "needs --host and --port"),
        (["--host", "http://here", "--port", "80"], "expected the name of a machine"),
        (["--host", "here", "--port", "70000"], "a number from 1 to 65535, not 70000"),
    ],
)
def test_an_address_that_is_none_is_refused(tmp_path, capsys, given, expected):
    text = reported(capsys, "federation", "new", tmp_path / "study", "--transport", "flare", *given, code=1)
    assert expected in text and not (tmp_path / "study").exists()


def test_a_name_that_flare_does_not_take_is_refused(tmp_path, capsys):
    given = ("--name", "Long Beach", "--transport", "flare")
    assert "without blanks" in reported(capsys, "site", "init", tmp_path / "site", *given, code=1)
    assert not (tmp_path / "site").exists()
    reported(capsys, "site", "init", tmp_path / "site", "--name", "Long Beach")
    reported(
        capsys, "federation", "new", tmp_path / "s", "--transport", "flare", "--host", "h", "--port", "1"
    )
    assert "without blanks" in reported(
        capsys, "federation", "join", tmp_path / "s", tmp_path / "site", code=1
    )


def test_without_kits_it_is_said_what_to_do(tmp_path, capsys):
    study = make_folders(tmp_path)
    assert "it has no kit for NVIDIA FLARE; request" in reported(
        capsys, "site", "check", tmp_path / "north", code=1
    )
    assert "join-kit" in reported(capsys, "site", "serve", tmp_path / "north", code=1)
    for name in ("serve", "status"):
        assert "federation provision" in reported(capsys, "federation", name, study, code=1)
    with pytest.raises(PartitionError, match=r"has no kits for NVIDIA FLARE yet.*federation provision"):
        fs.ClientPartition.connect(study)


def test_commands_of_flare_are_not_for_a_folder(tmp_path, capsys):
    reported(capsys, "federation", "new", tmp_path / "study")
    for name in ("provision", "serve", "start", "stop"):
        text = reported(capsys, "federation", name, tmp_path / "study", code=1)
        assert 'the transport is "folder"' in text


def test_without_the_extra_it_is_named(tmp_path_factory, capsys, monkeypatch):
    home = tmp_path_factory.mktemp("f")  # with the test's name the path is too long for a local socket
    study = make_folders(home)
    monkeypatch.setattr(provisioning.importlib.util, "find_spec", lambda name: None)
    for words in (("site", "request", home / "north"), ("federation", "provision", study)):
        assert "pip install fedstat[flare]" in reported(capsys, *words, code=1)


# Kits


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory):
    """Two sites with kits; what traveled is in ``post``."""
    home = tmp_path_factory.mktemp("flare")
    before = set(Path.home().rglob(".nvflare/*/*")) if (Path.home() / ".nvflare").exists() else set()
    study, post = make_folders(home), home / "post"
    post.mkdir()
    for name in SITES:
        assert main(["site", "request", str(home / name)]) == 0
        shutil.copy(home / name / f"{name}.request", post)
    assert main(["federation", "provision", str(study), *map(str, post.glob("*.request"))]) == 0
    for name in SITES:
        shutil.copy(study / "kits" / f"{name}.kit", post)
        assert main(["site", "join-kit", str(home / name), str(post / f"{name}.kit")]) == 0
    after = set(Path.home().rglob(".nvflare/*/*")) if (Path.home() / ".nvflare").exists() else set()
    return {"home": home, "study": study, "post": post, "elsewhere": after - before}


def zip_in(path: Path) -> zipfile.ZipFile:
    content = path.read_bytes()
    return zipfile.ZipFile(io.BytesIO(content[content.index(b"PK\x03\x04") :]))


KEYS = {"rootCA.key", "server.key", "client.key", "fedstat.key", "ledger.key"}


@needs_flare
def test_no_private_key_travels_and_none_is_open_to_others(provisioned):
    for path in provisioned["post"].iterdir():
        with zip_in(path) as content:
            assert not [name for name in content.namelist() if b"PRIVATE KEY" in content.read(name)], path
    home = provisioned["home"]
    keys = [path for path in home.rglob("*.key") if path.is_file()]
    assert {path.name for path in keys} == KEYS
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in keys)
    assert len({path.read_bytes() for path in keys}) == len(keys) == 8
    assert not provisioned["elsewhere"]


@needs_flare
def test_a_stranger_and_a_site_that_wants_more_get_no_kit(provisioned, capsys, tmp_path):
    study, home = provisioned["study"], provisioned["home"]
    own = load_identity(home / "north")
    plain = create_key(tmp_path / "flare" / "a", Participant("north", "client", {}))
    lead = create_key(tmp_path / "flare" / "b", Participant(USER, "lead", {}))
    other = create_key(tmp_path / "flare" / "c", Participant("south", "client", {}))
    good = sign_envelope(own, Envelope("north", COORDINATOR, "request", plain))
    forged = {
        "no joined site signed it": sign_envelope(
            Identity.generate(), Envelope("north", COORDINATOR, "request", plain)
        ),
        "it was altered, or": good[:-1] + bytes([good[-1] ^ 1]),
        f"'{USER}' as lead; expected 'north'": sign_envelope(
            own, Envelope("north", COORDINATOR, "request", lead)
        ),
        "a certificate of 'south'": sign_envelope(own, Envelope("north", COORDINATOR, "request", other)),
        "is not a request for a kit": sign_envelope(own, Envelope("north", COORDINATOR, "question", plain)),
    }
    kits = {path: path.read_bytes() for path in (study / "kits").iterdir()}
    for expected, content in forged.items():
        (tmp_path / "forged.request").write_bytes(content)
        assert expected in reported(
            capsys, "federation", "provision", study, tmp_path / "forged.request", code=1
        )
    assert {path: path.read_bytes() for path in (study / "kits").iterdir()} == kits


@needs_flare
def test_a_kit_of_another_coordinator_or_for_another_site_is_refused(provisioned, capsys, tmp_path):
    home, post = provisioned["home"], provisioned["post"]
    granted = (post / "north.kit").read_bytes()
    text = reported(capsys, "site", "join-kit", home / "south", post / "north.kit", code=1)
    assert "is a kit for 'north', but this site is 'south'" in text
    stranger = sign_envelope(Identity.generate(), Envelope(COORDINATOR, "north", "kit", b"anything"))
    (tmp_path / "stranger.kit").write_bytes(stranger)
    text = reported(capsys, "site", "join-kit", home / "north", tmp_path / "stranger.kit", code=1)
    assert "not the pinned key" in text
    assert "no request is open" in reported(
        capsys, "site", "join-kit", home / "north", post / "north.kit", code=1
    )
    key = load_identity(provisioned["study"]).public.fingerprint
    create_key(tmp_path / "flare" / "request", Participant("north", "client", {}))
    with pytest.raises(EngineError, match="NVIDIA FLARE refused the command"):
        accept_kit(tmp_path, granted, "north", key, "an old kit")


@needs_flare
def test_what_a_job_would_stumble_over_is_reported_when_serving(provisioned, capsys):
    folder = provisioned["home"] / "north"
    path, table = folder / "site.toml", provisioned["home"] / "north.csv"
    text = path.read_text()
    try:
        path.write_text(text.replace("\ncoordinator = ", '\ncoordinator = "" # '))
        assert "trusts no coordinator" in reported(capsys, "site", "serve", folder, code=1)
        path.write_text(text)
        table.rename(table.with_suffix(".away"))
        assert "north.csv" in reported(capsys, "site", "serve", folder, code=1)
    finally:
        path.write_text(text)
        table.with_suffix(".away").rename(table)


@needs_flare
def test_the_end_of_a_certificate_is_reported_in_time(provisioned, capsys, monkeypatch):
    home, study = provisioned["home"], provisioned["study"]
    assert 1000 < days_left(home / "north" / "flare" / "kit") <= 1095
    assert "No problems found" in reported(capsys, "site", "check", home / "north")
    for days, expected in ((12, "expires in 12 days"), (-1, "has expired")):
        monkeypatch.setattr(flare_commands, "days_left", lambda kit, days=days: days)
        assert expected in reported(capsys, "site", "check", home / "north", code=1)
        assert expected in reported(capsys, "federation", "status", study, code=1)
        assert expected in reported(capsys, "site", "status", home / "north", code=1)


def test_a_process_that_serves_reveals_it_once_a_day(tmp_path, capsys, monkeypatch):
    days = iter([0.0, 1.0, 86400.0, 86401.0])
    served = FlareProcess("client", "north", tmp_path, tmp_path, ("h", 1), lambda: ["expires in 12 days"])
    monkeypatch.setattr(flare_process, "time", SimpleNamespace(time=lambda: next(days), sleep=lambda _: None))
    monkeypatch.setattr(FlareProcess, "_is_connected", lambda self, number: True)
    served._watch(SimpleNamespace(pid=1, poll=iter([None, None, None, None, 0]).__next__))
    assert capsys.readouterr().err.count("north: expires in 12 days") == 2


@needs_flare
def test_what_flare_refuses_is_said_in_our_words(provisioned, monkeypatch):
    from nvflare.fuel.flare_api import api_spec, flare_api

    class Session:
        def list_jobs(self):
            return [{"job_id": "5f", "status": "RUNNING"}]

        def abort_job(self, job):
            raise api_spec.InternalError("server internal error: Job 5f is not running.")

        def close(self):
            pass

    monkeypatch.setattr(flare_api, "new_secure_session", lambda *given, **more: Session())
    with pytest.raises(EngineError, match=r"Job 5f is not running.*federation serve .*removes the remains"):
        end_analysis(provisioned["study"], load_identity(provisioned["study"]))


def test_a_server_that_starts_knows_no_job_of_one_that_was_killed(tmp_path):
    (tmp_path / "store" / "jobs" / "5f").mkdir(parents=True)
    (tmp_path / "store" / "jobs" / "5f" / "meta").write_text('{"status": "RUNNING"}')
    remove_stale_jobs(tmp_path)
    assert (tmp_path / "store").is_dir() and not list((tmp_path / "store").iterdir())


@pytest.mark.parametrize(
    "problem, code",
    [
        ("Client ID already registered as a client: north", child_process.TAKEN),
        ("Client 'north' is disabled", child_process.OUT),
        ("Unknown client identity", None),
        ("None", None),
    ],
)
def test_a_site_ends_where_the_server_turns_it_away(monkeypatch, problem, code):
    ended = []
    monkeypatch.setattr(child_process.os, "_exit", ended.append)
    child_process.check_server_answer(problem)
    assert ended == ([] if code is None else [code])


def test_a_server_that_starts_refuses_who_was_taken_out(tmp_path):
    refuse_certificates(tmp_path, ["south", "east"])
    assert json.loads((tmp_path / "disabled_clients.json").read_text()) == {
        "disabled_clients": ["east", "south"]
    }


# Processes


@needs_flare
def test_an_analysis_that_is_forgotten_ends(tmp_path, monkeypatch):
    from nvflare.apis.signal import Signal

    from fedstat.federation.transport.flare.job import FlareController

    controller, abort = FlareController(idle=0.1), Signal()
    listener = Listener(str(tmp_path / "socket"), "AF_UNIX", authkey=b"secret")
    monkeypatch.setattr(controller, "wait_for_sites", lambda: None)
    monkeypatch.setattr(controller, "_listen", lambda: listener)
    late = threading.Timer(20.0, abort.trigger, [True])
    late.start()
    controller.control_flow(abort, None)
    late.cancel()
    assert not abort.triggered
    controller.stop_controller(None)


def serve(provisioned, *words) -> subprocess.Popen:
    with open(provisioned["home"] / f"{words[-1].name}.out", "a") as log:
        return subprocess.Popen(command(*words), stdout=log, stderr=log)


def wait_for(capsys, text, *words, seconds=120):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        capsys.readouterr()
        main([str(word) for word in words])
        said = capsys.readouterr().out
        if text in " ".join(said.split()):
            return said
        time.sleep(0.3)
    raise AssertionError(said)


@pytest.fixture(scope="module")
def served(provisioned):
    running = {"server": serve(provisioned, "federation", "serve", provisioned["study"])}
    running |= {name: serve(provisioned, "site", "serve", provisioned["home"] / name) for name in SITES}
    yield provisioned | {"running": running}
    for process in running.values():
        process.send_signal(signal.SIGTERM)
    for process in running.values():
        process.wait(60)


@pytest.fixture
def here(provisioned):
    paths = {name: provisioned["home"] / f"{name}.csv" for name in SITES}
    return fs.ClientPartition.from_files(paths, layout="horizontal")


@needs_flare
def test_a_server_that_is_down_is_named(provisioned, monkeypatch):
    with pytest.raises(EngineError, match=r"does not answer.*Start it with 'fedstat federation serve"):
        fs.ClientPartition.connect(provisioned["study"])


@needs_flare
def test_the_same_fit_to_the_bit_and_an_analysis_that_is_joined(served, here, capsys):
    study = served["study"]
    for name in SITES:
        wait_for(capsys, "connected yes", "site", "status", served["home"] / name)
    assert "is running" in reported(capsys, "site", "serve", served["home"] / "north", code=1)
    assert "is open now" in reported(capsys, "federation", "start", study)
    assert "was open before" in reported(capsys, "federation", "start", study)
    first = fs.ClientPartition.connect(study)
    second = fs.ClientPartition.connect(study)
    expected = fs.GLORE.from_formula(FORMULA, here).fit()
    for partition in (first, second):
        result = fs.GLORE.from_formula(FORMULA, partition).fit()
        np.testing.assert_array_equal(result.params, expected.params)
        assert result.ledger.bytes == expected.ledger.bytes
    for partition in (first, second):
        partition.close()  # it was opened by neither
    assert "running" in reported(capsys, "federation", "status", study)
    found = json.loads(reported(capsys, "federation", "status", study, "--json"))
    assert found["server"] and found["analyses"] and found["sites"]["north"]["connected"]
    found = json.loads(reported(capsys, "site", "status", served["home"] / "north", "--json"))
    assert found["connected"] and found["requests"] and found["certificate_days"] > 300
    assert "can answer" in reported(capsys, "site", "health", served["home"] / "north")
    text = reported(capsys, "federation", "test", study)
    assert all(f"{name}  yes" in text for name in SITES)


@needs_flare
def test_what_a_killed_site_started_ends_by_itself(served, capsys):
    import psutil

    study, folder, running = served["study"], served["home"] / "north", served["running"]
    for name in SITES:
        wait_for(capsys, "connected yes", "site", "status", served["home"] / name)
    reported(capsys, "federation", "start", study)
    family = psutil.Process(running["north"].pid).children(recursive=True)
    assert len(family) >= 2  # FLARE's client, and the process that holds the records
    running["north"].kill()
    running["north"].wait()
    assert not psutil.wait_procs(family, 10)[1]
    assert "ended without a message" in reported(capsys, "site", "status", folder, code=1)
    reported(capsys, "federation", "stop", study)
    running["north"] = serve(served, "site", "serve", folder)
    wait_for(capsys, "connected yes", "site", "status", folder)


@needs_flare
def test_a_site_that_stops_is_named_and_left_out(served, here, capsys):
    home, study, running = served["home"], served["study"], served["running"]
    for name in SITES:
        wait_for(capsys, "connected yes", "site", "status", home / name)
    reported(capsys, "federation", "start", study)
    running["south"].send_signal(signal.SIGTERM)
    assert running["south"].wait(60) == 0
    assert "stopped" in reported(capsys, "site", "status", home / "south", code=1)
    with pytest.raises(EngineError, match=r"open without south.*federation stop"):
        fs.ClientPartition.connect(study)
    assert "Ended: " in reported(capsys, "federation", "stop", study)
    assert "No analysis was open" in reported(capsys, "federation", "stop", study)
    with fs.ClientPartition.connect(study, without=["south"]) as partition:
        assert fs.GLORE.from_formula(FORMULA, partition).fit().nobs == len(here.rows["north"])
    # the server forgets slowly
    wait_for(capsys, "south not connected", "federation", "status", study)
    assert "none is open" in reported(capsys, "federation", "status", study, code=1)
    assert "not connected to the server: south" in reported(
        capsys, "federation", "test", study, "--timeout", "0.1", code=1
    )


@needs_flare
def test_of_two_with_one_kit_the_first_stops_and_says_why(served, capsys):
    home, study, running = served["home"], served["study"], served["running"]
    if running["south"].poll() is not None:
        running["south"] = serve(served, "site", "serve", home / "south")
    wait_for(capsys, "south connected", "federation", "status", study)
    shutil.copytree(home / "south", home / "twin", symlinks=True)
    twin = running["twin"] = serve(served, "site", "serve", home / "twin")
    assert running["south"].wait(120) == FOR_GOOD
    assert "another process with this kit" in (home / "south.out").read_text()
    assert "another process with this kit" in reported(capsys, "site", "status", home / "south", code=1)
    wait_for(capsys, "south connected", "federation", "status", study)
    assert twin.poll() is None


@needs_flare
def test_a_site_that_is_taken_out_is_turned_away(served, capsys):
    home, study, twin = served["home"], served["study"], served["running"]["twin"]
    assert "refuses the certificates of: south" in reported(capsys, "federation", "remove", study, "south")
    assert twin.wait(120) == FOR_GOOD
    assert "has removed this site" in (home / "twin.out").read_text()
    again = serve(served, "site", "serve", home / "twin")
    assert again.wait(120) == FOR_GOOD
    assert (home / "twin.out").read_text().count("has removed this site") == 2
    wait_for(capsys, "south removed, its kit is refused", "federation", "status", study)


@needs_flare
def test_nothing_secret_is_shown_and_the_server_stops(served, capsys):
    home, study, running = served["home"], served["study"], served["running"]
    with fs.ClientPartition.connect(study) as partition:
        assert "north" in partition.sites
        running["server"].send_signal(signal.SIGTERM)
        assert running["server"].wait(60) == 0
    kept = [path.read_text() for path in (study / "flare" / "server" / "store" / "jobs").glob("*/meta")]
    assert kept and not [meta for meta in kept if '"FINISHED' not in meta]
    wait_for(capsys, "connected no", "site", "status", home / "north")
    assert "not running" in reported(capsys, "federation", "status", study, code=1)
    shown = [*home.glob("*.out"), study / "flare" / "log.txt", home / "north" / "flare" / "log.txt"]
    texts = b"".join(path.read_bytes() for path in shown)
    keys = [path.read_bytes() for path in home.rglob("fedstat.key")]
    assert texts and keys and b"PRIVATE" not in texts
    assert not any(key in texts or key.hex().encode() in texts for key in keys)
    assert stat.S_IMODE((study / "flare" / "log.txt").stat().st_mode) == 0o600
    assert os.path.realpath(home / "north" / "flare" / "kit" / "local" / "fedstat") == str(home / "north")
