"""NVIDIA FLARE as the carrier: long-lived site processes on their own machines, over mutual TLS.

One FLARE job serves a whole analysis. Its server side, :class:`FlareController`, takes questions from the
analyst's process on the coordinator's machine through a local socket that its owner alone can open, and sends
each to the site that it is meant for; the site side, :class:`FlareExecutor`, holds the site, opened at the
start of the job from the site's own folder and kept until its end. No code travels: the job names these two
classes, and sites that allow no others and no custom code refuse every job with more in it
(:func:`write_local`).

Messages go through FLARE's ``ReliableMessage``, which asks again after a loss; a question that arrives twice is
answered twice with the same bytes and computed once.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.reliable_message import ReliableMessage

from fedstat.errors import EngineError
from fedstat.federation.remote import SiteServer
from fedstat.federation.site_folder import open_site

TOPIC = "fedstat"
SOCKET, KEY = "fedstat.socket", "fedstat.key"
FOLDER = "fedstat"
PER_MESSAGE, RETRIES = 10.0, 6


class FlareController(Controller):  # type: ignore[misc]
    """The server side of the job: passes questions on, and decides nothing.

    Parameters
    ----------
    timeout : float
        Seconds until a site counts as silent.
    """

    def __init__(self, timeout: float = PER_MESSAGE * RETRIES) -> None:
        super().__init__()
        self._timeout = timeout
        self._listener: Listener | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Open the socket."""
        ReliableMessage.enable(fl_ctx)
        home = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
        path = home / SOCKET
        path.unlink(missing_ok=True)
        key = (home / "local" / KEY).read_bytes()
        mask = os.umask(0o177)
        try:
            self._listener = Listener(str(path), "AF_UNIX", authkey=key)
        finally:
            os.umask(mask)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Serve until the analyst ends the analysis, or the job is aborted."""
        assert self._listener is not None
        ended = threading.Event()
        threading.Thread(target=self._accept, args=(abort_signal, fl_ctx, ended), daemon=True).start()
        while not ended.wait(0.2):
            if abort_signal.triggered:
                return

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Close the socket."""
        if self._listener is not None:
            self._listener.close()

    def _accept(self, abort_signal: Signal, fl_ctx: FLContext, ended: threading.Event) -> None:
        assert self._listener is not None
        while not ended.is_set():
            try:
                connection = self._listener.accept()
            except Exception:
                if ended.is_set() or abort_signal.triggered:
                    return
                continue
            arguments = (connection, abort_signal, fl_ctx, ended)
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(
        self, connection: Connection, abort_signal: Signal, fl_ctx: FLContext, ended: threading.Event
    ) -> None:
        """Pass on the questions of one connection."""
        with connection:
            while True:
                try:
                    header = json.loads(connection.recv_bytes())
                    if header["site"] is None:
                        ended.set()
                        return
                    payload = connection.recv_bytes()
                except (EOFError, OSError):
                    return
                problem, answer = self._pass_on(header, payload, abort_signal, fl_ctx)
                connection.send_bytes(json.dumps({"problem": problem}).encode())
                connection.send_bytes(answer)

    def _pass_on(
        self, header: Mapping[str, str], payload: bytes, abort_signal: Signal, fl_ctx: FLContext
    ) -> tuple[str, bytes]:
        request = Shareable({"number": header["number"], "payload": payload})
        reply = ReliableMessage.send_request(
            target=header["site"],
            topic=TOPIC,
            request=request,
            per_msg_timeout=min(PER_MESSAGE, self._timeout),
            tx_timeout=self._timeout,
            abort_signal=abort_signal,
            fl_ctx=fl_ctx,
        )
        code = reply.get_return_code() if reply is not None else ReturnCode.TIMEOUT
        if code != ReturnCode.OK:
            return str(code), b""
        return "", reply["payload"]

    def process_result_of_unknown_task(self, *args: Any, **kwargs: Any) -> None:
        """There are no tasks."""


class FlareExecutor(Executor):  # type: ignore[misc]
    """The site's side of the job: its data, its policy, and the one door."""

    def __init__(self) -> None:
        super().__init__()
        self._server: SiteServer | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Open the site when the job starts."""
        if event_type == EventType.START_RUN:
            home = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
            self._server = SiteServer(open_site(home / "local" / FOLDER))
            ReliableMessage.enable(fl_ctx)
            ReliableMessage.register_request_handler(TOPIC, self._answer, fl_ctx)

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        assert self._server is not None
        reply = make_reply(ReturnCode.OK)
        reply["payload"] = self._server.answer(str(request["number"]), request["payload"])
        return reply

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Refuse tasks: there are none."""
        return make_reply(ReturnCode.TASK_UNKNOWN)


@dataclass(slots=True)
class FlareCarrier:
    """The analyst's end of a running job.

    Parameters
    ----------
    server : path
        Folder of the FLARE server, on this machine.
    """

    server: Path
    _connections: threading.local = field(default_factory=threading.local)

    def carry(self, site: str, request: bytes) -> bytes:
        """Send one question, and wait for its answer.

        Raises
        ------
        EngineError
            No job is running, or the site did not answer.
        """
        try:
            connection = self._connection()
            header = {"site": site, "number": secrets.token_hex(8)}
            connection.send_bytes(json.dumps(header).encode())
            connection.send_bytes(request)
            problem = json.loads(connection.recv_bytes())["problem"]
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            self._connections.open = None
            raise EngineError(
                f"'{site}': the job of the analysis has ended or was not started ({type(error).__name__})"
            ) from error
        if problem:
            raise EngineError(f"'{site}' did not answer ({problem}). Is its process running?")
        return answer

    def end(self) -> None:
        """End the job."""
        connection = self._connection()
        connection.send_bytes(json.dumps({"site": None}).encode())
        connection.close()
        self._connections.open = None

    def _connection(self) -> Connection:
        connection: Connection | None = getattr(self._connections, "open", None)
        if connection is None:
            key = (Path(self.server) / "local" / KEY).read_bytes()
            connection = Client(str(Path(self.server) / SOCKET), "AF_UNIX", authkey=key)
            self._connections.open = connection
        return connection


ALLOWED = [f"fedstat.federation.flare.{name}" for name in ("FlareController", "FlareExecutor")]
NO_CODE = {"byoc": "none", "shell_commands": "none", "server-predeployed-flwr": "none"}


def write_local(kit: str | Path) -> None:
    """Let a FLARE participant run this package's two classes and no others, and no code that comes with a job.

    Parameters
    ----------
    kit : path
        Folder of a provisioned server or site, with ``startup`` and ``local``.
    """
    local = Path(kit) / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_list_enforcement_mode"] = "enforce"
    resources["class_allow_list"] = ALLOWED
    resources["allow_log_streaming"] = False
    (local / "resources.json").write_text(json.dumps(resources, indent=2))
    rights = json.loads((local / "authorization.json.default").read_text())
    owner = {"submit_job": "any", "manage_job": "any", "download_job": "any", "view": "any", "operate": "any"}
    rights["permissions"]["project_admin"] = {**owner, "clone_job": "none", **NO_CODE}
    rights["permissions"]["lead"] = {**owner, "clone_job": "none", **NO_CODE}
    (local / "authorization.json").write_text(json.dumps(rights, indent=2))
    log = json.loads((local / "log_config.json.default").read_text())
    for logger in log.get("loggers", {}).values():
        logger["level"] = "WARNING"
    (local / "log_config.json").write_text(json.dumps(log, indent=2))


def write_key(server: str | Path) -> None:
    """Draw the secret with which the analyst's process opens the server's socket; for its owner alone."""
    path = Path(server) / "local" / KEY
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))


def write_job(folder: str | Path, sites: Sequence[str], timeout: float = PER_MESSAGE * RETRIES) -> Path:
    """Write the job that serves an analysis: a specification that names two classes.

    Parameters
    ----------
    folder : path
        Made where it is absent.
    sites : sequence of str
    timeout : float
        Seconds until a site counts as silent.

    Returns
    -------
    path
        What to submit.
    """
    config = Path(folder) / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    controller, executor = ALLOWED
    server = {
        "format_version": 2,
        "workflows": [{"id": "fedstat", "path": controller, "args": {"timeout": timeout}}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["none"], "executor": {"id": "fedstat", "path": executor, "args": {}}}],
    }
    meta = {
        "name": "fedstat",
        "resource_spec": {},
        "deploy_map": {"app": ["@ALL"]},
        "min_clients": len(sites),
        "mandatory_clients": list(sites),
    }
    (config / "config_fed_server.json").write_text(json.dumps(server, indent=2))
    (config / "config_fed_client.json").write_text(json.dumps(client, indent=2))
    (Path(folder) / "meta.json").write_text(json.dumps(meta, indent=2))
    return Path(folder)
