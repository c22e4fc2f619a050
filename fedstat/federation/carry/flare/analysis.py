"""The job of an analysis: one that runs is joined, one is begun where none runs, and it is ended by name."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedstat.errors import EngineError, FedstatError, PartitionError
from fedstat.federation.carry.flare.carrier import FlareCarrier
from fedstat.federation.carry.flare.kit import ANALYST, FLARE, SERVER, START, USER, write_job
from fedstat.federation.carry.flare.provision import require_flare
from fedstat.federation.crypto.keys import Identity

# seconds: between two looks, for a login, for jobs to wind down, and since a site was last heard of
PAUSE, LOGIN, LAST, FRESH = 0.5, 10.0, 12.0, 35.0
ENDED = "FINISHED"


@dataclass(slots=True)
class Analysis(FlareCarrier):
    """The analyst's end of the job that serves a federation.

    The process that started the job (`started_here`) also ends it.
    """

    started_here: bool = False

    def close(self) -> None:
        """End the job where it was started here; one that another analyst started goes on."""
        if not self.started_here:
            return
        self.started_here = False
        # an analysis that another process has ended meanwhile is no error
        if self.is_heard() and self.end():
            with _session(self.server.parent.parent) as session:
                _wait_until_ended(session)

    def there(self, sites: Sequence[str]) -> list[str]:
        """Those of some sites that take part in the job, and can be reached."""
        connection = self._connection()
        connection.send_bytes(json.dumps({"there": list(sites)}).encode())
        return list(json.loads(connection.recv_bytes()))

    def is_heard(self) -> bool:
        """Whether a job takes questions."""
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
    patience: float = START,
) -> Analysis:
    """Join the job of a federation; where none runs, start one that serves all sites that are connected.

    Without any of `sites` no job is started. `timeout` is the seconds until a site counts as silent,
    `patience` those to wait for sites that are not connected, and then for the job. PartitionError where the
    federation has not been provisioned; EngineError where the server is not reached, a site is not connected,
    or the job ended at once.
    """
    home = folder / FLARE
    if not (home / ANALYST).exists():
        raise PartitionError(
            f"'{folder}' has no kits for NVIDIA FLARE yet; make them with 'fedstat federation provision "
            f"{folder}'"
        )
    analysis = Analysis((home / SERVER).resolve(), identity, fingerprints, timeout)
    if not analysis.is_heard():
        _start(folder, analysis, sites, timeout, patience)
    there = analysis.there(sites)
    if lacking := [site for site in sites if site not in there]:
        analysis.close()
        raise EngineError(
            f"an analysis is open without {', '.join(lacking)}, which stopped or came later. End it with "
            f"'fedstat federation stop {folder}' and connect again when 'fedstat federation status {folder}' "
            "shows all sites; one that is gone for good is left out by connect(..., without=[...])"
        )
    return analysis


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the server tells: connected sites, and by number the state of jobs that have not ended."""

    connected: tuple[str, ...]
    jobs: Mapping[str, str]


def ask_server(folder: Path) -> ServerState:
    """Ask the server of a coordinator's folder which sites are connected, and which jobs there are."""
    with _session(folder) as session:
        return ServerState(_connected(session), _jobs(session))


def end_analysis(folder: Path, identity: Identity) -> list[str]:
    """End the job that takes questions, and abort all others; what was ended."""
    analysis = Analysis((folder / FLARE / SERVER).resolve(), identity, {})
    heard = analysis.is_heard() and analysis.end()
    with _session(folder) as session:
        left = _wait_until_ended(session) if heard else _jobs(session)
        for job in left:
            session.abort_job(job)
    return ["the analysis"] * heard + [f"job {job} ({state.lower()})" for job, state in left.items()]


def admit(folder: Path, sites: Iterable[str], out: Iterable[str]) -> None:
    """Have the server that runs admit some sites, and turn others away from now on."""
    with _session(folder) as session:
        for site in sites:
            session.enable_client(site)
        for site in out:
            session.disable_client(site)


def _start(folder: Path, analysis: Analysis, sites: Sequence[str], timeout: float, patience: float) -> None:
    with _session(folder) as session:
        _wait_for_sites(session, sites, patience)
        with TemporaryDirectory() as place:
            job = session.submit_job(str(write_job(place, sites, timeout)))
        until = time.monotonic() + patience
        while not analysis.is_heard():
            state = str(session.get_job_meta(job)["status"])
            if state.startswith(ENDED) or time.monotonic() > until:
                if not state.startswith(ENDED):
                    session.abort_job(job)
                raise EngineError(
                    f"the job of the analysis took no question ({state.lower()}). The server's log is in "
                    f"'{folder / FLARE}'; a site that cannot run it tells why in its own log"
                )
            time.sleep(PAUSE)
        # Where another analyst was quicker, that job serves both, and this one must not wait for its turn.
        if session.get_job_meta(job)["status"] == "RUNNING":
            analysis.started_here = True
        else:
            session.abort_job(job)


def _wait_for_sites(session: Any, sites: Sequence[str], patience: float) -> None:
    until = time.monotonic() + patience
    while missing := sorted(set(sites) - set(_connected(session))):
        if time.monotonic() > until:
            raise EngineError(
                f"not connected to the server: {', '.join(missing)}. Is 'fedstat site serve' running there, "
                "and the certificate in date ('fedstat site status' tells)? One that is gone for good is "
                "left out by ClientPartition.connect(..., without=[...])"
            )
        time.sleep(PAUSE)


def _wait_until_ended(session: Any) -> dict[str, str]:
    """Wait for jobs to wind down; those that have not."""
    until = time.monotonic() + LAST
    while (left := _jobs(session)) and time.monotonic() < until:
        time.sleep(PAUSE)
    return left


def _connected(session: Any) -> tuple[str, ...]:
    # A site that ended stays on the server's list for ten minutes; one that lives is heard every ten seconds.
    since = time.time() - FRESH
    clients = session.get_system_info().client_info
    return tuple(client.name for client in clients if client.last_connect_time > since)


def _jobs(session: Any) -> dict[str, str]:
    found = {job["job_id"]: str(job["status"]) for job in session.list_jobs()}
    return {job: state for job, state in found.items() if not state.startswith(ENDED)}


@contextmanager
def _session(folder: Path) -> Iterator[Any]:
    """Log in to the server with the analyst's certificate."""
    require_flare()
    from nvflare.fuel.flare_api.flare_api import new_secure_session  # noqa: PLC0415

    kit = (folder / FLARE / ANALYST).resolve()
    try:
        with redirect_stdout(io.StringIO()):
            session = new_secure_session(USER, str(kit), timeout=LOGIN)
    except Exception as error:
        raise EngineError(
            f"the FLARE server does not answer ({type(error).__name__}). Start it with 'fedstat federation "
            f"serve {folder}'; where it runs, look at host, port and the dates of the certificates with "
            f"'fedstat federation status {folder}'"
        ) from error
    try:
        yield session
    except FedstatError:
        raise
    except Exception as error:  # FLARE's own, whose kinds have nothing in common
        raise EngineError(
            f"the FLARE server did not do as it was told ({type(error).__name__}: {error}). Stop it and "
            f"start it with 'fedstat federation serve {folder}', which clears what is left of jobs; its "
            f"log is in '{folder / FLARE}'"
        ) from error
    finally:
        session.close()
