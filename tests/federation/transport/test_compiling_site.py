"""A site that is served compiles the loops of the families that its policy allows, in another process."""

import os
import signal
import subprocess
import sys

import pandas as pd
import pytest
from operating import command, make_federation, serving, until_true, wait

from fedstat.federation.disclosure.policy import Policy
from fedstat.kernels import compiled
from fedstat.operator import service

FAMILIES = frozenset({"schema", "design", "secure", "cox", "descriptive"})


@pytest.fixture
def folder(tmp_path):
    table = pd.DataFrame({"x": range(40), "y": range(40)})
    make_federation(tmp_path, {"A": table}, policy=Policy(families=FAMILIES))
    return tmp_path / "A"


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """The list of a machine where nothing is compiled."""
    path = tmp_path / "cache" / "compiled.txt"
    for module in (compiled, service):
        monkeypatch.setattr(module, "list_path", lambda: path)
    return path


def test_a_site_compiles_once_while_it_answers(folder, tmp_path):
    cache, log = tmp_path / "cache", folder / "log.txt"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}

    def start():
        with open(log, "w") as file:
            words = command(*serving(folder))
            return subprocess.Popen(words, stdout=file, stderr=file, text=True, env=environment)

    process = start()
    try:
        wait(folder, process)
        until_true(lambda: "compiled in" in log.read_text(), 600)
        assert "compiles loops of cox, descriptive, once on this machine" in log.read_text()
        (found,) = cache.rglob("compiled-*.txt")
        assert set(found.read_text().split()) == {"cox", "descriptive"}
        assert list(cache.rglob("partial_likelihood*.nbc")) and not list(cache.rglob("split_networks*.nbc"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        process = start()
        wait(folder, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert "stopped" in log.read_text() and "compiles loops" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_site_that_stops_ends_the_process_and_the_next_one_compiles(folder, listed):
    lines = []
    with service.compiling([folder], lines.append) as process:
        assert process.poll() is None
        with service.compiling([folder], lines.append) as second:
            assert second is None  # another site of this machine compiles
    assert process.poll() == -signal.SIGTERM
    assert len(lines) == 1
    with service.compiling([folder], lines.append) as process:
        assert process is not None and len(lines) == 2


def test_what_a_killed_site_has_begun_is_not_compiled_again(folder, listed, tmp_path):
    """The process that compiles goes on without its site, and no other begins in the meantime."""
    program = tmp_path / "killed.py"
    program.write_text(
        "import os, sys; from pathlib import Path; from fedstat.kernels import compiled\n"
        "from fedstat.operator import service\n"
        f"path = Path({str(listed)!r})\n"
        "compiled.list_path = service.list_path = lambda: path\n"
        f"with service.compiling([Path({str(folder)!r})], [].append) as process:\n"
        "    print(process.pid, flush=True); os._exit(9)\n"
    )
    run = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert run.returncode == 9, run.stderr
    try:
        with service.compiling([folder], [].append) as second:
            assert second is None
    finally:
        os.kill(int(run.stdout), signal.SIGKILL)
    until_true(lambda: _may_compile(folder))


def _may_compile(folder):
    with service.compiling([folder], [].append) as process:
        return process is not None


@pytest.mark.parametrize(
    "known, missing",
    [([], "cox, descriptive"), (["cox"], "descriptive"), (["descriptive", "cox"], None)],
)
def test_only_what_is_missing_is_compiled(folder, listed, known, missing):
    listed.parent.mkdir()
    compiled.note_compiled(known)
    lines = []
    with service.compiling([folder], lines.append) as process:
        assert (process is None) == (missing is None)
    assert lines == (
        []
        if missing is None
        else [f"compiles loops of {missing}, once on this machine; requests are answered"]
    )


def test_a_failure_is_logged(folder, listed, monkeypatch):
    monkeypatch.setattr(service, "WARM_UP", "fedstat.absent")
    lines = []
    with service.compiling([folder], lines.append):
        until_true(lambda: len(lines) == 2)
    assert "compiling ended with exit code 1; a request compiles what it needs" in lines[1]


def test_one_table_that_allows_all_families_is_enough(folder, listed):
    (folder / "policy.toml").write_text(Policy().to_toml())
    lines = []
    with service.compiling([folder], lines.append):
        assert "boost, categories" in lines[0] and "vglm" in lines[0]


def test_a_folder_that_cannot_be_written_compiles_nothing(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for module in (compiled, service):
        monkeypatch.setattr(module, "list_path", lambda: tmp_path / "file" / "compiled.txt")
    compiled.note_compiled(["cox"])
    assert compiled.compiled_families() == set()
    with service.compiling([folder], [].append) as process:
        assert process is None


def test_the_list_has_another_name_after_an_update(monkeypatch):
    before = compiled.list_path()
    assert before == compiled.list_path()
    monkeypatch.setattr(compiled.numba, "__version__", "0.0")
    assert compiled.list_path() != before
