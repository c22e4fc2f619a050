"""The page on running a site for a year is executed here: real folders, real processes."""

import signal
import subprocess
import tomllib

import numpy as np
import pytest
from faulty import patients
from operating import make_federation, serve, wait

import fedstat as fs
from fedstat.errors import SecurityError
from fedstat.operator.command_line import main

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")
SITES = ("A", "B", "C")


class Running:
    """Three sites that are served, each from a folder that may change."""

    def __init__(self, home):
        self.home, self.processes, self.folders = home, {}, {}
        make_federation(home, {name: rows.drop(columns="h") for name, rows in patients().groupby("h")})
        for name in SITES:
            self.start(name, home / name)

    def start(self, name, folder):
        self.folders[name], self.processes[name] = folder, serve(folder)
        wait(folder, self.processes[name])

    def stop(self, name):
        self.processes[name].send_signal(signal.SIGTERM)
        assert self.processes[name].wait(120) == 0

    def connect(self):
        return fs.ClientPartition.connect(self.home / "study" / "federation.toml")

    def fit(self):
        return fs.GLORE.from_formula("y ~ x", self.connect()).fit().params

    def run(self, *words, code=0):
        assert main([str(word) for word in words]) == code


@pytest.fixture
def running(tmp_path):
    found = Running(tmp_path)
    yield found
    for process in found.processes.values():
        process.kill()
        process.wait()


def test_a_backup_is_made_while_a_site_serves_and_serves_when_restored_unless_it_lags(running):
    home, before = running.home, running.fit()
    archive = home / "A.tar.gz"
    pack = ["tar", "--create", "--gzip", "--file", str(archive), "--directory", str(home), "A"]
    subprocess.run(pack, check=True, timeout=120)
    for place, lags in (("new", False), ("newer", True)):
        running.stop("A")
        (home / place).mkdir()
        unpack = ["tar", "--extract", "--preserve-permissions", "--file", str(archive)]
        subprocess.run([*unpack, "--directory", str(home / place)], check=True, timeout=120)
        running.start("A", home / place / "A")
        if not lags:
            assert np.array_equal(running.fit(), before)  # which the archive does not hold
            continue
        with pytest.raises(SecurityError, match="A: its ledger does not contain its signed state"):
            running.fit()
        running.stop("A")
        running.run("site", "declare-loss", home / place / "A", "--reason", "restored from a backup")
        running.start("A", home / place / "A")
        assert np.array_equal(running.fit(), before)


def test_a_site_takes_new_keys_in_a_new_folder(running):
    home, before = running.home, running.fit()
    old = tomllib.loads((home / "A" / "card.toml").read_text())["fingerprint"]
    running.stop("A")
    new = home / "A2"
    given = ("--data", home / "A.csv", "--exchange", home / "study" / "exchange")
    running.run("site", "init", new, "--name", "A", *given)
    (new / "policy.toml").write_bytes((home / "A" / "policy.toml").read_bytes())
    running.run("federation", "join", home / "study", new, code=1)  # the known key stands
    running.run("federation", "join", home / "study", new, "--replace", old)
    running.run("site", "pin", new, home / "study")
    for other in "BC":
        running.run("site", "pin", new, home / other)
        running.run("site", "pin", home / other, new, "--replace", old)
    running.start("A", new)
    assert np.array_equal(running.fit(), before)
    running.run("site", "ledger", home / "A")  # the old account can still be read and checked


def test_an_open_analysis_goes_on_after_an_upgrade(running):
    before = running.fit()
    model = fs.GLORE.from_formula("y ~ x", running.connect())
    for name in SITES:
        running.stop(name)
        running.start(name, running.folders[name])
    assert np.array_equal(model.fit().params, before)
