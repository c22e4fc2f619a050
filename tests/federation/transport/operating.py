"""Folders of sites and of a coordinator, made by the command, and sites that it serves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from forked import Forked

from fedstat.federation.disclosure.policy import Policy
from fedstat.operator.command_line import main

OPEN = Policy.open()


def make_federation(
    home: Path,
    frames: Mapping[str, pd.DataFrame],
    key: Sequence[str] = (),
    policy: Policy = OPEN,
    exchange: str = "",
) -> Path:
    """Set-up by owners and coordinator: folders, cards, pins; with a key for the vertical layout."""
    study = home / "study"
    carried, exchange = ["--exchange", exchange] if exchange else [], exchange or str(study / "exchange")
    layout, named = ("vertical", ["--key", *key]) if key else ("horizontal", [])
    assert main(["federation", "new", str(study), "--name", "study", "--layout", layout, *carried]) == 0
    for name, frame in frames.items():
        frame.to_csv(home / f"{name}.csv", index=False)
        given = ["--data", str(home / f"{name}.csv"), "--exchange", exchange]
        assert main(["site", "init", str(home / name), "--name", name, *given, *named]) == 0
        (home / name / "policy.toml").write_text(policy.to_toml())
    for name in frames:
        assert main(["site", "pin", str(home / name), str(study)]) == 0
        assert main(["federation", "join", str(study), str(home / name)]) == 0
        for other in frames:
            assert main(["site", "pin", str(home / name), str(home / other)]) == 0
    return study


def add_second_tables(home: Path, frames: Mapping[str, pd.DataFrame], policy: Policy) -> None:
    """Add a table "icu" to each site, under the policy, for a federation of its own."""
    icu = home / "icu"
    assert main(["federation", "new", str(icu), "--name", "icu"]) == 0
    for name, frame in frames.items():
        file, place = home / f"{name}-icu.csv", home / name / "tables" / "icu"
        frame.to_csv(file, index=False)
        given = ["--data", str(file), "--exchange", str(icu / "exchange")]
        assert main(["site", "add-table", str(home / name), "icu", *given]) == 0
        (place / "policy.toml").write_text(policy.to_toml())
        assert main(["site", "pin", str(place), str(icu)]) == 0
        assert main(["federation", "join", str(icu), str(home / name)]) == 0


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fedstat.operator", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=600, check=False)


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Output of a command that ends with this exit code."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    out = capsys.readouterr()
    return out.out + out.err


def serving(folder: Path, *options: str) -> tuple[str, ...]:
    return ("site", "serve", str(folder), "--poll", "0.01", *options)


def serve(folder: Path, *options: str) -> Forked:
    """Start a site as the command does; its output goes to a file."""
    return Forked(main, serving(folder, *options), log=folder / "log.txt")


def serve_by_command(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a site by the command itself, which takes a second longer."""
    with open(folder / "log.txt", "a") as log:
        return subprocess.Popen(command(*serving(folder, *options)), stdout=log, stderr=log, text=True)


def wait(
    folder: Path, process: subprocess.Popen[str] | Forked, state: str = "running", seconds: float = 120
) -> None:
    """Wait until a process that was just started says how it is."""
    until = time.monotonic() + seconds
    while True:
        path = folder / "status.json"
        if path.exists():
            reported = json.loads(path.read_text())
            if reported["process"] == process.pid and reported["state"] == state:
                return
        if time.monotonic() > until or (process.poll() is not None and state == "running"):
            raise RuntimeError((folder / "log.txt").read_text())
        time.sleep(0.05)


def until_true(what: Callable[[], object], seconds: float = 120) -> None:
    """Wait for a condition."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def served_sites(
    home: Path, names: Iterable[str], start: Callable[[Path], Forked] = serve
) -> Iterator[dict[str, Forked]]:
    """Serve sites until they are no longer needed; the processes by name, which a test may stop and start."""
    running = {name: start(home / name) for name in names}
    try:
        for name, process in running.items():
            wait(home / name, process)
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.wait()
