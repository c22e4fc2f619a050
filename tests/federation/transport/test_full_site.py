"""A disk at a site is full: nothing leaves that is not entered, and the site goes on when there is room."""

import errno
import os
import resource
import shutil

import pytest
from faulty import analysis, patients
from operating import make_federation, serve, until_true, wait
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import EngineError, FedstatWarning, SessionError
from fedstat.federation.transport.live_config import ActiveRules, ClosedError
from fedstat.operator import site_status
from fedstat.operator.command_line import main

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")


@pytest.fixture
def home(tmp_path, capsys):
    make_federation(tmp_path, {name: rows.drop(columns="h") for name, rows in patients().groupby("h")})
    capsys.readouterr()
    return tmp_path


@pytest.fixture
def federation(home):
    opened = Federation(home)
    yield opened
    for site in opened.sites.values():
        site.site.site_ledger.store.close()


def test_a_question_waits_for_room_and_its_session_goes_on(federation, monkeypatch):
    model = fs.GLORE.from_formula("y ~ x", federation.connect())
    ledger = (federation.home / "B" / "ledger.jsonl").read_bytes()
    usage = shutil.disk_usage(federation.home)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=2**20))
    for _ in range(3):
        with pytest.raises(ClosedError, match=r"1.0 MB are free, and 8.0 MB are needed"):
            federation.sites["B"].reload_if_changed()
    assert len([line for line in federation.log if "is full" in line]) == 1
    assert "is full" in ActiveRules.load(federation.home / "B").problem
    assert (federation.home / "B" / "ledger.jsonl").read_bytes() == ledger
    monkeypatch.undo()
    assert model.fit().converged
    assert ActiveRules.load(federation.home / "B").problem == ""


def test_what_could_not_be_entered_has_not_left_and_the_site_opens_itself_again(
    federation, monkeypatch, tmp_path
):
    model = fs.GLORE.from_formula("y ~ x", federation.connect(tmp_path / "journal"))
    site, path = federation.sites["B"], federation.home / "B" / "ledger.jsonl"
    complete = path.read_bytes()

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            self.file.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name):
            return getattr(self.file, name)

    store = site.site.site_ledger.store
    store._file = Full(store._file)
    with pytest.raises(EngineError, match=r"ledger.jsonl' cannot be written .No space left.*kB are needed"):
        model.fit()
    assert path.read_bytes().startswith(complete)
    with pytest.raises(SessionError, match=r"it was started again.*set aside"):
        fs.GLORE.from_formula("y ~ x", federation.connect(tmp_path / "journal")).fit()
    assert site.site.site_ledger.store is not store
    again = fs.GLORE.from_formula("y ~ x", federation.connect(tmp_path / "journal")).fit()
    assert again.converged and main(["site", "ledger", str(federation.home / "B")]) == 0
    assert any("reopened" in line for line in federation.log)


def test_a_status_that_cannot_be_written_ends_no_service(home, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(site_status, "write_atomic", full)
    site_status.write_status(home / "A", "running", "A", "now", {})


@pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="limits of another process are set on Linux alone"
)
def test_a_service_whose_ledger_may_not_grow_goes_on_when_it_may(home, capsys, tmp_path):
    """A real process at a real limit: the ledger takes half a line, and the next byte not."""
    running = {name: serve(home / name) for name in "ABC"}
    study = home / "study" / "federation.toml"
    text = study.read_text()
    try:
        for name, process in running.items():
            wait(home / name, process)
        expected = analysis(fs.ClientPartition.connect(study))
        most = (home / "B" / "ledger.jsonl").stat().st_size + 100
        resource.prlimit(running["B"].pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        study.write_text(text.replace("timeout = 3600", "timeout = 2"))
        with (
            pytest.warns(FedstatWarning, match="answers no requests for now"),
            pytest.raises(EngineError, match=r"'B' did not answer.*answers no requests for now"),
        ):
            analysis(fs.ClientPartition.connect(study, journal=tmp_path / "journal"))
        assert main(["site", "status", str(home / "B")]) == 0
        assert "cannot be written (File too large)" in capsys.readouterr().out
        log = (home / "B" / "log.txt").read_text()
        assert log.count("answers no requests") == 1 and "Traceback" not in log
        resource.prlimit(running["B"].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        until_true(lambda: not ActiveRules.load(home / "B").problem)
        study.write_text(text)
        for _ in range(2):
            try:
                result = analysis(fs.ClientPartition.connect(study, journal=tmp_path / "journal"))
                break
            except SessionError:  # where the session had begun at this site
                continue
        assert (result.params == expected.params).all()
        assert running["B"].poll() is None
    finally:
        for process in running.values():
            process.kill()
            process.wait()
