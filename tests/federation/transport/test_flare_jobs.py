"""Analyses as job folders for somebody else's FLARE federation; the simulator and a provisioned one run them.

What needs ``fedstat[flare]`` is skipped without it. The federation of the last tests is provisioned by
FLARE's own ``nvflare provision``, and takes some minutes.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import tomllib
import warnings
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from operating import main, printed, until_true

import fedstat as fs
from fedstat.errors import DataWarning, FedstatWarning, PartitionError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.envelopes import Envelope, sign_envelope
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.transport.flare import provision
from fedstat.federation.transport.flare.analysis import FlareTransport
from fedstat.federation.transport.mailbox import BUSY, BusyError
from fedstat.federation.transport.signed import sign_request

needs_flare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs fedstat[flare]")
HOSPITALS = {"site-1": "Cleveland", "site-2": "Hungary", "site-3": "Long Beach"}
FORMULA = "num > 0 ~ age + C(cp)"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folders of a coordinator and of three sites, as for any transport."""
    home, patients = tmp_path_factory.mktemp("jobs"), fs.datasets.make_hospitals()
    study = home / "study"
    assert main(["federation", "new", str(study), "--name", "heart"]) == 0
    for name, label in HOSPITALS.items():
        table = home / f"{name}.csv"
        patients[patients["hospital"] == label].drop(columns="hospital").to_csv(table, index=False)
        given = ["--name", name, "--data", str(table), "--transport", "flare"]
        assert main(["site", "init", str(home / name), *given]) == 0
        assert main(["site", "pin", str(home / name), str(study)]) == 0
        assert main(["federation", "join", str(study), str(home / name)]) == 0
    for name in HOSPITALS:
        for other in HOSPITALS:
            assert main(["site", "pin", str(home / name), str(home / other)]) == 0
        assert main(["site", "describe", str(home / name)]) == 0
    return home


def write_job(home, name, *more, analysis="GLORE", formula=FORMULA):
    given = ["--analysis", analysis, "--formula", formula, "--purpose", "A first look", *more]
    assert main(["federation", "job", str(home / "study"), str(home / name), *given]) == 0
    return home / name


def pooled(home, names):
    files = {name: str(home / f"{name}.csv") for name in names}
    policies = {name: home / name / "policy.toml" for name in names}  # sites leave out rows by their rules
    partition = fs.ClientPartition.from_files(files, layout="horizontal", policies=policies)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        return fs.GLORE.from_formula(FORMULA, partition).fit()


def check_results(folder, expected):
    """The files of a job agree with the fit in one process; policies let the iterations start elsewhere."""
    found = pd.read_csv(folder / "estimates.csv", index_col=0)
    np.testing.assert_allclose(found["estimate"], expected.params, rtol=1e-7)
    np.testing.assert_allclose(found["std_error"], expected.bse, rtol=1e-7)
    assert fs.load(folder / "result.fed").nobs == expected.nobs
    assert "GLORE results" in (folder / "summary.txt").read_text()
    assert not (folder / "error.txt").exists()
    assert set(json.loads((folder / "receipt.json").read_text())["statements"]) >= {"site-1", "site-2"}


# Job folders


def test_a_job_folder_names_the_sites_and_the_analysis_and_holds_no_code(home, tmp_path):
    job = write_job(home, "written", "--without", "site-3")
    meta = json.loads((job / "meta.json").read_text())
    assert meta["deploy_map"] == {"app": ["server", "site-1", "site-2"]} and meta["min_clients"] == 2
    text = (job / "app" / "config" / provision.ANALYSIS_FILE).read_text()
    assert tomllib.loads(text) == {
        "analysis": "GLORE",
        "formula": FORMULA,
        "purpose": "A first look",
        "arguments": {},
        "fit": {},
    }
    assert {path.suffix for path in job.rglob("*") if path.is_file()} == {".json", ".toml"}


@pytest.mark.parametrize(
    "more, expected", [(["--without", "nobody"], "not among the sites: nobody"), ([], "exists; choose")]
)
def test_a_job_that_cannot_be_written_is_explained(home, capsys, tmp_path, more, expected):
    given = ("--analysis", "GLORE", *more)
    (tmp_path / "there").mkdir()
    assert expected in printed(
        capsys, "federation", "job", home / "study", tmp_path / "there", *given, code=1
    )


# Kits of others


def make_kit(place, kind="client", **resources):
    (place / "local").mkdir(parents=True)
    (place / "startup").mkdir()
    (place / "startup" / f"fed_{kind}.json").write_text("{}")
    content = {"format_version": 2, "allow_log_streaming": True} | resources
    (place / "local" / "resources.json.default").write_text(json.dumps(content))
    return place


def resources_of(kit):
    return json.loads((kit / "local" / "resources.json").read_text())


@needs_flare
def test_a_kit_of_others_keeps_what_it_has_and_its_log_stays_at_the_site(home, tmp_path, capsys):
    kit = make_kit(tmp_path / "kit", class_allow_list=["nvflare.app_common."], other=1)
    assert "now allows" in printed(capsys, "site", "use-kit", home / "site-1", kit)
    assert resources_of(kit) == {
        "format_version": 2,
        "other": 1,
        "class_allow_list": ["nvflare.app_common.", provision.EXECUTOR],
        "allow_log_streaming": False,
    }
    assert (kit / "local" / provision.FOLDER).resolve() == (home / "site-1").resolve()
    assert "now allows" not in printed(capsys, "site", "use-kit", home / "site-1", kit)
    assert "leads to another folder" in printed(capsys, "site", "use-kit", home / "site-2", kit, code=1)


@needs_flare
def test_a_kit_without_a_list_keeps_flares_own_and_one_that_allows_all_is_left(home, tmp_path, capsys):
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

    server = make_kit(tmp_path / "server", "server")
    printed(capsys, "federation", "use-kit", home / "study", server)
    ours = [provision.CONTROLLER, provision.ANALYSIS]
    assert resources_of(server)["class_allow_list"] == [*DEFAULT_CLASS_ALLOW_LIST, *ours]
    assert resources_of(server)["allow_log_streaming"] is True
    every = make_kit(tmp_path / "every", class_allow_list=["*"])
    printed(capsys, "site", "use-kit", home / "site-1", every)
    assert resources_of(every)["class_allow_list"] == ["*"]


def test_a_folder_that_is_no_kit_is_refused(home, tmp_path, capsys):
    assert "is no startup kit" in printed(capsys, "site", "use-kit", home / "site-1", tmp_path, code=1)


# What the server side of a job carries out


@pytest.fixture(scope="module")
def partition():
    frame = fs.datasets.make_hospitals()
    return fs.ClientPartition.from_frame(frame, by="hospital")


def read_analysis(tmp_path, text):
    from fedstat.flare_analysis import JobAnalysis

    path = tmp_path / provision.ANALYSIS_FILE
    path.write_text(text)
    return JobAnalysis.read(path)


@needs_flare
def test_a_model_or_a_function_of_a_partition_is_carried_out(tmp_path, partition):
    text = f'analysis = "GLORE"\nformula = "{FORMULA}"\n[fit]\nmasked = false\ncov_type = "robust"\n'
    found = read_analysis(tmp_path, text).run(partition)
    expected = fs.GLORE.from_formula(FORMULA, partition).fit(masked=False, cov_type="robust")
    assert (found.params == expected.params).all() and (found.bse == expected.bse).all()
    table = read_analysis(tmp_path, 'analysis = "table_one"\nformula = "age + cp"\n[arguments]\nby = "sex"\n')
    assert str(table.run(partition)) == str(fs.table_one(partition, "age + cp", by="sex"))


@needs_flare
@pytest.mark.parametrize(
    "text, expected",
    [
        ('formula = "y ~ x"', "analysis"),
        ('analysis = "load"\n[arguments]\npath = "/etc/passwd"', "expected a model with a formula"),
        ('analysis = "os.system"', "expected a model with a formula"),
        ('analysis = "ClientPartition"', "expected a model with a formula"),
        ('analysis = "GLORE"\nfit = 3', r"expected a table \[fit\]"),
        ('analysis = "GLORE"\ncode = "x"', "code"),
    ],
)
def test_nothing_else_is_carried_out(tmp_path, partition, text, expected):
    with pytest.raises(PartitionError, match=expected):
        read_analysis(tmp_path, text).run(partition)


@needs_flare
def test_a_job_names_no_file_of_the_server():
    from fedstat.flare_analysis import _refuse_paths

    def fit(checkpoint: str | Path | None = None, rounds: int = 3) -> None:
        """Accept a file."""

    _refuse_paths(fit, {"rounds": 3})
    with pytest.raises(PartitionError, match="may not set 'checkpoint'"):
        _refuse_paths(fit, {"checkpoint": "/etc/cron.d/x"})


# A request that waits for its turn


class Engine:
    """FLARE's engine of a server, with one site behind it."""

    def __init__(self, executor):
        self.executor, self.asked = executor, 0

    def get_clients(self):
        return [SimpleNamespace(name="A")]

    def new_context(self):
        return warnings.catch_warnings()

    def send_aux_request(self, targets, topic, request, timeout, fl_ctx, optional):
        self.asked += 1
        return {"A": self.executor._answer(topic, request, SimpleNamespace())}


@needs_flare
def test_an_analyst_who_waits_for_a_session_reads_this_once(monkeypatch):
    from fedstat.federation.transport.flare import job as flare_job

    class Busy:
        left = 3

        def answer(self, question):
            self.left -= 1
            if self.left >= 0:
                raise BusyError("A: all 1 sessions are in use")
            return b"reply to " + question

    monkeypatch.setattr(flare_job, "PAUSE", 0.0)
    executor, controller, told = flare_job.FlareExecutor(), flare_job.FlareController(), []
    executor._site, executor._tried = Busy(), True
    controller._engine = Engine(executor)
    assert controller.forward("A", b"q", 60.0, told.append) == ("", b"reply to q")
    assert told == [BUSY] and controller._engine.asked == 4


def test_the_end_of_the_analyst_shows_why_a_request_waits(tmp_path):
    site, coordinator = Identity.generate(), Identity.generate()
    transport = FlareTransport(tmp_path, coordinator, {"A": site.public.fingerprint})
    here, there = Pipe()
    transport._connections.open = here

    def serve():
        there.recv_bytes()
        there.recv_bytes()
        there.send_bytes(json.dumps({"waits": BUSY}).encode())
        there.send_bytes(json.dumps({"problem": ""}).encode())
        there.send_bytes(sign_envelope(site, Envelope("A", COORDINATOR, number, b"done")))

    number, _ = sign_request(coordinator, "A", b"request")
    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.warns(FedstatWarning, match="'A': All its sessions are in use.*waits for its turn"):
        assert transport.send("A", b"request") == b"done"
    thread.join(10)


# The simulator, and a federation that FLARE has provisioned


@needs_flare
def test_the_simulator_runs_a_job_folder(home):
    job, workspace = write_job(home, "simulated"), home / "workspace"
    folders = [str(home / name) for name in HOSPITALS]
    assert main(["federation", "simulator", str(home / "study"), str(workspace), *folders]) == 0
    words = ["simulator", str(job), "-w", str(workspace), "-n", "3", "-t", "3", "-c", ",".join(HOSPITALS)]
    done = subprocess.run(
        [sys.executable, "-m", "nvflare.cli", *words],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    results = workspace / "server" / "simulate_job" / "fedstat"
    assert done.returncode == 0 and results.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    check_results(results, pooled(home, HOSPITALS))


@pytest.fixture(scope="module")
def federation(home, tmp_path_factory):
    """A server and three clients that ``nvflare provision`` has made, with the folders of their owners."""
    import serving_flare

    place = tmp_path_factory.mktemp("theirs") / "project"
    found = serving_flare.Federation(
        serving_flare.provision(place, tuple(HOSPITALS), port := serving_flare.free_port()),
        port,
        Identity.generate(),
    )
    assert main(["federation", "use-kit", str(home / "study"), str(found.kits / serving_flare.SERVER)]) == 0
    for name in HOSPITALS:
        assert main(["site", "use-kit", str(home / name), str(found.kits / name)]) == 0
    try:
        for name in (serving_flare.SERVER, *HOSPITALS):
            found.processes[name] = serving_flare.start(found.kits / name)
        serving_flare.wait_for_sites(found, tuple(HOSPITALS))
        yield found
    finally:
        if found.session is not None:
            found.session.close()
        serving_flare.stop(found.processes)


def download(federation, job, to):
    return Path(federation.session.download_job_result(job)) / "workspace" / "fedstat"


@needs_flare
def test_a_provisioned_federation_runs_a_job_and_the_person_is_its_submitter(home, federation, capsys):
    job = federation.session.submit_job(str(write_job(home, "submitted")))
    assert federation.status(job, 400.0) == "FINISHED:COMPLETED"
    check_results(download(federation, job, home), pooled(home, HOSPITALS))
    shown = printed(capsys, "site", "export", home / "site-2")
    assert "analyst@fedstat.org" in shown and "A first look" in shown and "heart" in shown
    logs = b"".join(path.read_bytes() for path in (federation.kits / "localhost").rglob("log*.txt"))
    assert b"Saved live log" not in logs


@needs_flare
def test_a_job_whose_site_is_killed_ends_with_its_name_and_the_next_goes_on_without_it(home, federation):
    job = federation.session.submit_job(str(write_job(home, "killed")))
    began = federation.kits / "localhost" / job / "fedstat" / "error.txt"
    until_true(began.exists, 300)
    federation.job_process("site-3").kill()  # the process that holds the data of the site
    assert federation.status(job, 300.0).startswith("FINISHED") and federation.status(job) != (
        "FINISHED:COMPLETED"
    )
    assert (
        "Sites of the job: site-1, site-2, site-3"
        in (download(federation, job, home) / "error.txt").read_text()
    )
    for name in ("site-1", "site-2"):  # whose owners let the coordinator see sums over two sites
        policy = home / name / "policy.toml"
        policy.write_text(policy.read_text().replace('two_sites = "refuse"', 'two_sites = "warn"'))
    job = federation.session.submit_job(str(write_job(home, "of-two", "--without", "site-3")))
    assert federation.status(job, 400.0) == "FINISHED:COMPLETED"
    check_results(download(federation, job, home), pooled(home, ["site-1", "site-2"]))
