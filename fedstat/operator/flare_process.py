"""A FLARE server or client in the foreground, with all its child processes, until SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstat.errors import EngineError
from fedstat.federation.files import lock_file
from fedstat.federation.transport.flare import child_process
from fedstat.federation.transport.flare.provision import require_flare
from fedstat.operator.site_status import FOR_GOOD, utc_now, write_heartbeat, write_status

with suppress(ImportError):  # installed wherever FLARE is used
    import psutil

LOCK, LOG = "serving.lock", "log.txt"
POLL, LAST, DAY = 0.2, 10.0, 86400
MODULES = {
    "client": (child_process.CLIENT, "fed_client.json"),
    "server": ("nvflare.private.fed.app.server.server_train", "fed_server.json"),
}
WHY = {
    child_process.TAKEN: (
        "another process with this kit has replaced this one, on another machine or from a copy of the "
        "folder. Find it, and stop one of the two. If nobody here made a copy, somebody else has the kit: "
        "inform the coordinator"
    ),
    child_process.OUT: "the coordinator has removed this site; the server refuses its certificate",
}
"""Reasons for which a client ends by itself."""


@dataclass(slots=True)
class FlareProcess:
    """One FLARE process, of kind "client" or "server", and its child processes.

    `name` is shown to people; for a client, it is the name of the site. `home` has the lock, the log and the
    status, and FLARE starts from `kit`. `address` is host and port of the server. `remarks` are logged once a
    day. `prepare` is called before the start, and `conclude` before the end, when no other
    process is running.
    """

    kind: str
    name: str
    home: Path
    kit: Path
    address: tuple[str, int]
    remarks: Callable[[], list[str]] = list
    prepare: Callable[[], object] = tuple
    conclude: Callable[[], object] = tuple
    stop_requested: bool = False
    began: str = field(default_factory=utc_now)

    def run(self) -> int:
        """Run until SIGTERM or SIGINT; return 1 if FLARE failed and 3 if it must not be started again."""
        require_flare()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        with self._locked() as lock, self._log() as log:
            self.prepare()
            process = self._start(lock, log)
            state = "failed"
            try:
                self._watch(process)
                if self.stop_requested:
                    state = "stopped"
                    with suppress(EngineError):  # not reached: it ends anyway
                        self.conclude()
            finally:
                _end(process)
                self._report(state, "no", None if state == "stopped" else {"reason": self._why(process)})
        if state == "stopped":
            print(f"{utc_now()} {self.name} stopped", flush=True)
            return 0
        print(f"{utc_now()} {self.name}: {self._why(process)}", file=sys.stderr)
        return FOR_GOOD if process.returncode in WHY else 1

    def stop(self, number: int, frame: Any) -> None:
        """End soon."""
        self.stop_requested = True

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock, which all child processes hold as well: it is free when all of them have ended."""
        with open(self.home / LOCK, "ab", opener=_open_private) as file:
            if not lock_file(file):
                raise EngineError(f"{self.name} is running ('{self.home}'); stop that process first")
            yield file.fileno()

    @contextmanager
    def _log(self) -> Iterator[int]:
        with open(self.home / LOG, "ab", opener=_open_private) as file:
            yield file.fileno()

    def _start(self, lock: int, log: int) -> subprocess.Popen[bytes]:
        module, settings = MODULES[self.kind]
        words = ["-m", str(self.kit), "-s", settings]
        words += ["--set", "secure_train=true", "org=fedstat", "config_folder="]
        words += [f"uid={self.name}"] if self.kind == "client" else []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return subprocess.Popen(
            [sys.executable, "-u", "-m", child_process.__name__, module, *words],
            cwd=self.kit,
            env=os.environ | {"PATH": path},
            stdin=subprocess.PIPE,  # the system closes it when this process is killed
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C in a terminal reaches only this process
        )

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Log each change of the connection until the process ends."""
        reported, day = "", -1
        while process.poll() is None and not self.stop_requested:
            connected = "yes" if self._is_connected(process.pid) else "no"
            if connected != reported:
                self._report("running", connected)
                print(
                    f"{utc_now()} {self._sentence(connected, reported)} (process {os.getpid()})", flush=True
                )
                reported = connected
            write_heartbeat(self.home)
            if day != (day := int(time.time() // DAY)):
                for remark in self.remarks():
                    print(f"{utc_now()} {self.name}: {remark}", file=sys.stderr, flush=True)
            time.sleep(POLL)

    def _sentence(self, connected: str, reported: str) -> str:
        where = f"{self.address[0]}:{self.address[1]}"
        if self.kind == "server":
            return (
                f"{self.name} accepts sites at {where}" if connected == "yes" else f"{self.name} is starting"
            )
        if connected == "yes":
            return f"{self.name} is connected to {where}"
        return (
            f"{self.name} has lost {where} and tries again"
            if reported
            else f"{self.name} connects to {where}"
        )

    def _is_connected(self, number: int) -> bool:
        """Return whether a client has a connection to the server, or a server listens at its port."""
        state = psutil.CONN_LISTEN if self.kind == "server" else psutil.CONN_ESTABLISHED
        try:
            found = psutil.Process(number).net_connections("tcp")
        except psutil.Error:
            return False
        ends = [one.laddr if self.kind == "server" else one.raddr for one in found if one.status == state]
        return any(end and end.port == self.address[1] for end in ends)

    def _why(self, process: subprocess.Popen[bytes]) -> str:
        other = f"FLARE ended (exit code {process.returncode}); see '{self.home / LOG}'"
        return WHY.get(process.returncode, other)

    def _report(self, state: str, connected: str, more: Mapping[str, str] | None = None) -> None:
        reported = {"listens" if self.kind == "server" else "connected": connected}
        write_status(self.home, state, self.name, self.began, reported | dict(more or {}))


def is_running(home: Path) -> bool:
    """Return whether a participant, or one of its child processes, holds the lock."""
    if not (home / LOCK).exists():
        return False
    with open(home / LOCK, "rb") as file:
        return not lock_file(file)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its child processes; jobs have sessions of their own."""
    try:
        # listed before any of them ends, because orphans have no parent to list them
        members = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        members = []
    for member in members:
        member.terminate()
    for member in psutil.wait_procs(members, LAST)[1]:
        member.kill()
    process.wait()
