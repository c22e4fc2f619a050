"""The analyst's end: joins, starts and ends the job of an analysis."""

from __future__ import annotations

import io
import json
import shlex
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from fedstat.errors import EngineError, FedstatError, FedstatWarning, PartitionError, Remedy, warn
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.transport.flare import provision
from fedstat.federation.transport.mailbox import STATUS_OF_NOTES
from fedstat.federation.transport.signed import open_reply, sign_request

# ----------------------------------------------------------------------------------------------------
# The analyst's end of a running job.

CONNECT_PAUSE = 0.2
PATIENCE = 60
"""Seconds for one message to or from a server on the same machine."""
MARGIN = 30.0
"""Seconds within which the server has to report a silent site."""


@dataclass(slots=True)
class FlareTransport:
    """The analyst's end of a running job; several threads may use it, each with a connection of its own.

    `server` is the folder of the FLARE server, on this machine; `timeout` the seconds until a site counts as
    silent, by default those of the job's start.
    """

    server: Path
    identity: Identity
    fingerprints: Mapping[str, str]
    timeout: float | None = None
    bundles: ClassVar[bool] = True
    _connections: threading.local = field(default_factory=threading.local)

    def wait(self, seconds: float = provision.START) -> None:
        """Wait until the job takes requests; EngineError if it does not within `seconds`."""
        until = time.monotonic() + seconds
        while True:
            try:
                self._connection()
                return
            except (OSError, EOFError, AuthenticationError) as error:
                if time.monotonic() > until:
                    raise EngineError(
                        f"no job takes requests at '{Path(self.server, provision.SOCKET)}' after {seconds:g} "
                        f"s ({type(error).__name__}). Was it submitted, and are all its sites running?"
                    ) from error
            time.sleep(CONNECT_PAUSE)

    def send(self, site: str, request: bytes) -> bytes:
        """Send one request, and wait for its reply.

        EngineError if no job is running or the site did not answer, SecurityError if the site did not sign
        the reply or it belongs to another request.
        """
        number, question = sign_request(self.identity, site, request)
        try:
            connection = self._connection()
            connection.send_bytes(json.dumps({"site": site, "timeout": self.timeout}).encode())
            connection.send_bytes(question)
            header = self._receive(connection)
            while "waits" in header:
                warn(f"'{site}': {STATUS_OF_NOTES[header['waits']]}", FedstatWarning)
                header = self._receive(connection)
            problem = header["problem"]
            answer = connection.recv_bytes()
        except TimeoutError as error:
            self._drop()
            raise EngineError(
                f"'{site}' was not reached: the server's process is {error} and no longer responds. Stop it "
                "and start it again"
            ) from error
        except (EOFError, OSError, AuthenticationError) as error:
            self._drop()
            raise EngineError(
                f"'{site}': the job of the analysis has ended or was not started ({type(error).__name__})"
            ) from error
        if problem:
            raise EngineError(f"'{site}' did not answer: {problem}")
        return open_reply(answer, self.fingerprints[site], site, number, f"the reply of '{site}'")

    def _receive(self, connection: Connection) -> dict[str, str]:
        """Read a header: the server reports a silent site in time, and only a blocked one takes longer."""
        limit = (provision.TIMEOUT if self.timeout is None else self.timeout) + MARGIN
        if not connection.poll(limit):
            raise TimeoutError(f"silent for {limit:g} s")
        header: dict[str, str] = json.loads(connection.recv_bytes())
        return header

    def end(self) -> bool:
        """End the analysis: the job completes and the sites close their data; False if it had ended."""
        connection = self._connection()
        try:
            connection.send_bytes(json.dumps({"site": None}).encode())
            connection.recv_bytes()
        except (EOFError, OSError):
            return False
        finally:
            self._drop()
        return True

    def _connection(self) -> Connection:
        connection: Connection | None = getattr(self._connections, "open", None)
        if connection is None:
            key = Path(self.server, "local", provision.KEY).read_bytes()
            connection = _open(Path(self.server, provision.SOCKET), key)
            self._connections.open = connection
        return connection

    def _drop(self) -> None:
        """Close a connection in which a reply may still arrive."""
        connection: Connection | None = getattr(self._connections, "open", None)
        if connection is not None:
            connection.close()
        self._connections.open = None


def _open(path: Path, key: bytes) -> Connection:
    """Connect to a socket.

    Each side proves that it knows the secret. TimeoutError if the other is blocked.
    """
    limit = struct.pack("@ll", PATIENCE, 0)
    with socket.socket(socket.AF_UNIX) as visitor:
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            visitor.setsockopt(socket.SOL_SOCKET, direction, limit)
        visitor.connect(str(path))
        connection = Connection(visitor.detach())
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


# ----------------------------------------------------------------------------------------------------
# The job of an analysis: a running job is joined, otherwise one is started; it is ended by name.

# seconds: between two looks, for a login, for jobs to end, and since the last sign of life of a site
PAUSE, LOGIN, LAST, FRESH = 0.5, 10.0, 12.0, 35.0
ENDED = "FINISHED"


@dataclass(slots=True)
class Analysis(FlareTransport):
    """The analyst's end of the job that serves a federation.

    The process that started the job (`started_here`) also ends it.
    """

    started_here: bool = False

    def close(self) -> None:
        """End the job if this process started it; a job that another analyst started continues."""
        if not self.started_here:
            return
        self.started_here = False
        # it is no error if another process has already ended the analysis
        if self.is_heard() and self.end():
            with _session(self.server.parent.parent) as session:
                _wait_until_ended(session)

    def there(self, sites: Sequence[str]) -> list[str]:
        """Return those of `sites` that take part in the job and can be reached."""
        connection = self._connection()
        connection.send_bytes(json.dumps({"there": list(sites)}).encode())
        return list(json.loads(connection.recv_bytes()))

    def is_heard(self) -> bool:
        """Return whether a job takes requests."""
        try:
            self.wait(0.0)
        except EngineError:
            return False
        return True


def open_analysis(
    folder: Path,
    identity: Identity,
    fingerprints: Mapping[str, str],
    sites: Sequence[str],
    timeout: float,
    patience: float = provision.START,
) -> Analysis:
    """Join the job of a federation; if none runs, start one that serves all connected sites.

    Without any of `sites` no job is started. `timeout` is the seconds until a site counts as silent,
    `patience` those to wait for sites that are not connected, and then for the job. PartitionError if the
    federation has not been provisioned; EngineError if the server cannot be reached, a site is not connected,
    or the job ended at once.
    """
    home = folder / provision.FLARE
    if not (home / provision.ANALYST).exists():
        raise PartitionError(
            f"'{folder}' has no kits for NVIDIA FLARE yet",
            remedy=Remedy("fedstat federation provision {folder}", "make them with '{call}'").filled(
                folder=shlex.quote(str(folder))
            ),
        )
    analysis = Analysis((home / provision.SERVER).resolve(), identity, fingerprints, timeout)
    if not analysis.is_heard():
        _start(folder, analysis, sites, timeout, patience)
    there = analysis.there(sites)
    if lacking := [site for site in sites if site not in there]:
        analysis.close()
        raise EngineError(
            f"an analysis is open without {', '.join(lacking)}: these sites stopped or came later",
            remedy=Remedy(
                "fedstat federation stop {folder}",
                "End it with '{call}', and connect again when 'fedstat federation status {folder}' shows all "
                "sites. To leave out a site for good, use connect(..., without=[...])",
            ).filled(folder=shlex.quote(str(folder))),
        )
    return analysis


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server's report: connected sites, and by number the state of jobs that have not ended."""

    connected: tuple[str, ...]
    jobs: Mapping[str, str]


def query_server(folder: Path) -> ServerStatus:
    """Ask the server of a coordinator's folder for its connected sites and its jobs."""
    with _session(folder) as session:
        return ServerStatus(_connected(session), _jobs(session))


def end_analysis(folder: Path, identity: Identity) -> list[str]:
    """End the job that takes requests and abort all others; return what was ended."""
    analysis = Analysis((folder / provision.FLARE / provision.SERVER).resolve(), identity, {})
    heard = analysis.is_heard() and analysis.end()
    with _session(folder) as session:
        left = _wait_until_ended(session) if heard else _jobs(session)
        for job in left:
            session.abort_job(job)
    return ["the analysis"] * heard + [f"job {job} ({state.lower()})" for job, state in left.items()]


def admit_sites(folder: Path, sites: Iterable[str], out: Iterable[str]) -> None:
    """Let the running server admit some sites, and refuse others from now on."""
    with _session(folder) as session:
        for site in sites:
            session.enable_client(site)
        for site in out:
            session.disable_client(site)


def _start(folder: Path, analysis: Analysis, sites: Sequence[str], timeout: float, patience: float) -> None:
    with _session(folder) as session:
        _wait_for_sites(session, sites, patience)
        with TemporaryDirectory() as place:
            job = session.submit_job(str(provision.write_job(place, sites, timeout)))
        until = time.monotonic() + patience
        while not analysis.is_heard():
            state = str(session.get_job_meta(job)["status"])
            if state.startswith(ENDED) or time.monotonic() > until:
                if not state.startswith(ENDED):
                    session.abort_job(job)
                raise EngineError(
                    f"the job of the analysis took no request ({state.lower()}). The server's log is in "
                    f"'{folder / provision.FLARE}'; a site that cannot run it writes the reason to its own "
                    "log"
                )
            time.sleep(PAUSE)
        # If another analyst was quicker, that job serves both; this one must not wait for its turn.
        if session.get_job_meta(job)["status"] == "RUNNING":
            analysis.started_here = True
        else:
            session.abort_job(job)


def _wait_for_sites(session: Any, sites: Sequence[str], patience: float) -> None:
    until = time.monotonic() + patience
    while missing := sorted(set(sites) - set(_connected(session))):
        if time.monotonic() > until:
            raise EngineError(
                f"not connected to the server: {', '.join(missing)}",
                remedy=Remedy(
                    "ClientPartition.connect(..., without={sites})",
                    "Is 'fedstat site serve' running there, and is the certificate valid (see 'fedstat site "
                    "status')? To leave out a site for good, use {call}",
                ).filled(sites=missing),
            )
        time.sleep(PAUSE)


def _wait_until_ended(session: Any) -> dict[str, str]:
    """Wait for jobs to end; return those that have not."""
    until = time.monotonic() + LAST
    while (left := _jobs(session)) and time.monotonic() < until:
        time.sleep(PAUSE)
    return left


def _connected(session: Any) -> tuple[str, ...]:
    # The server lists a stopped site for ten minutes; a running one sends a sign of life every ten seconds.
    since = time.time() - FRESH
    sites = session.get_system_info().client_info
    return tuple(client.name for client in sites if client.last_connect_time > since)


def _jobs(session: Any) -> dict[str, str]:
    found = {job["job_id"]: str(job["status"]) for job in session.list_jobs()}
    return {job: state for job, state in found.items() if not state.startswith(ENDED)}


@contextmanager
def _session(folder: Path) -> Iterator[Any]:
    """Log in to the server with the analyst's certificate."""
    provision.require_flare()
    from nvflare.fuel.flare_api.flare_api import new_secure_session  # noqa: PLC0415

    kit = (folder / provision.FLARE / provision.ANALYST).resolve()
    try:
        with redirect_stdout(io.StringIO()):
            session = new_secure_session(provision.USER, str(kit), timeout=LOGIN)
    except Exception as error:
        raise EngineError(
            f"the FLARE server does not answer ({type(error).__name__})",
            remedy=Remedy(
                "fedstat federation serve {folder}",
                "Start it with '{call}'. If it is running, check host, port and the dates of the "
                "certificates with 'fedstat federation status {folder}'",
            ).filled(folder=shlex.quote(str(folder))),
        ) from error
    try:
        yield session
    except FedstatError:
        raise
    except Exception as error:  # FLARE's errors have no common class
        raise EngineError(
            f"the FLARE server did not execute the command ({type(error).__name__}: {error})",
            remedy=Remedy(
                "fedstat federation serve {folder}",
                "Stop it and start it with '{call}', which removes the remains of jobs. Its log is in "
                "'{log}'",
            ).filled(folder=shlex.quote(str(folder)), log=folder / provision.FLARE),
        ) from error
    finally:
        session.close()
