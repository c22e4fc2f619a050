"""Processes that tests start by forking one that has imported the package."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["warm"])


def _ensure_running() -> None:
    """The process that is forked finds `warm` by the environment it starts with."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (Path(__file__).parent, Path(__file__).parents[2]):
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        forkserver.ensure_running()


def _run(function: Callable[..., object], arguments: tuple, log: Path | None) -> None:
    if log is not None:
        with open(log, "ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
    raise SystemExit(function(*arguments))


class Forked:
    """A process that makes one call and returns its value, with the methods of `subprocess.Popen`.

    It begins as a copy of a process that has only imported: nothing that a test did is in it. The function is
    one that can be imported; what the process prints is added to the file `log`.
    """

    def __init__(self, function: Callable[..., object], *arguments: object, log: Path | None = None) -> None:
        self._process = context.Process(target=_run, args=(function, arguments, log), daemon=True)
        _ensure_running()
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", seconds)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
