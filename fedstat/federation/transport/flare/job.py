"""The two sides of the job of an analysis: the server forwards requests, and a site answers them."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from fedstat.errors import EngineError, FedstatError
from fedstat.federation.transport.flare import provision
from fedstat.federation.transport.flare.child_process import end_with_parent
from fedstat.federation.transport.live_config import ClosedError
from fedstat.federation.transport.mailbox import BUSY, BusyError
from fedstat.federation.transport.signed import SignedSite

try:
    from nvflare.apis.event_type import EventType
    from nvflare.apis.executor import Executor
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.impl.controller import Controller
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.apis.signal import Signal
except ImportError as error:
    raise ImportError("sites over NVIDIA FLARE need its package: pip install fedstat[flare]") from error

TOPIC, PING = "fedstat", "fedstat.ping"
PAUSE = 0.5


class FlareController(Controller):  # type: ignore[misc]
    """The server side of the job: forwards requests, and decides nothing. All times are in seconds.

    A site is silent after `timeout`. A request is sent again after `again_after`, which doubles every time,
    because a large message takes long. Sites have to open their data within `start`; a request to a site that
    has not is refused by name. After `idle` without a request the analysis counts as abandoned, and ends.
    """

    def __init__(
        self,
        timeout: float = provision.TIMEOUT,
        again_after: float = provision.AGAIN_AFTER,
        start: float = provision.START,
        idle: float = provision.IDLE,
    ) -> None:
        super().__init__()
        self._timeout, self._again_after, self._start, self._idle = timeout, again_after, start, idle
        self._last_request = time.monotonic()
        self._engine: Any = None
        self._abort = Signal()
        self._ended = threading.Event()
        self._listener: Listener | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Keep the object that transfers the messages."""
        self._engine = fl_ctx.get_engine()
        end_with_parent()

    @property
    def _socket(self) -> Path:
        return Path(self._engine.get_workspace().get_root_dir(), provision.SOCKET)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Wait for the sites, open the socket, and serve until the analysis ends or the job is aborted."""
        self._abort = abort_signal
        self.wait_for_sites()
        self._listener = self._listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        self._last_request = time.monotonic()
        while not (self._ended.wait(PAUSE) or abort_signal.triggered):
            if time.monotonic() - self._last_request > self._idle:
                return

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Close the socket."""
        self._ended.set()
        if self._listener is not None:
            self._listener.close()

    def process_result_of_unknown_task(self, *args: Any, **kwargs: Any) -> None:
        """There are no tasks."""

    def _listen(self) -> Listener:
        """Open the socket; replace one that an interrupted job left behind."""
        if _is_heard(self._socket):
            raise EngineError(f"another analysis is running at '{self._socket}'; end it first")
        self._socket.unlink(missing_ok=True)
        key = (self._socket.parent / "local" / provision.KEY).read_bytes()
        # a new socket has no mode of its own: only the mask excludes others from its first moment on
        mask = os.umask(0o177)
        try:
            return Listener(str(self._socket), "AF_UNIX", backlog=16, authkey=key)
        finally:
            os.umask(mask)

    def wait_for_sites(self) -> None:
        """Ask every site whether it is running."""
        until = time.monotonic() + self._start
        waiting = self.site_names()
        while waiting and time.monotonic() < until and not self._abort.triggered:
            waiting = [site for site in waiting if self._send(site, PING, {}, PAUSE * 4) is None]
            if waiting:
                time.sleep(PAUSE)

    def site_names(self) -> list[str]:
        """Return the names of the clients of the job."""
        return [client.name for client in self._engine.get_clients()]

    def _accept(self, listener: Listener) -> None:
        while not self._ended.is_set():
            try:
                connection = listener.accept()
            except (AuthenticationError, EOFError, OSError):
                # A process without the secret, or one that disconnected; or the socket is closed.
                time.sleep(PAUSE)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Forward the requests of one connection; a header gives the site of each."""

        def tell(why: str) -> None:
            connection.send_bytes(json.dumps({"waits": why}).encode())

        with connection:
            while True:
                try:
                    header = json.loads(connection.recv_bytes())
                    if "there" in header:
                        connection.send_bytes(json.dumps(self._there(header["there"])).encode())
                        continue
                    if header["site"] is None:
                        self._ended.set()
                        connection.send_bytes(b"")
                        return
                    timeout = header.get("timeout") or self._timeout
                    question = connection.recv_bytes()
                    problem, answer = self.forward(header["site"], question, timeout, tell)
                    connection.send_bytes(json.dumps({"problem": problem}).encode())
                    connection.send_bytes(answer)
                except (EOFError, OSError):
                    return

    def _there(self, sites: list[str]) -> list[str]:
        """Return those of `sites` that take part in the job and can be reached."""
        return [site for site in sites if self._send(site, PING, {}, PAUSE * 4) is not None]

    def forward(
        self, site: str, question: bytes, timeout: float, tell: Callable[[str], None]
    ) -> tuple[str, bytes]:
        """Send a request until it is answered; return the problem, if any, and the reply.

        `tell` is called once, with the reason, if the request has to wait for its turn.
        """
        if site not in self.site_names():
            return "no site of this name takes part in the job", b""
        begun, wait, waits = time.monotonic(), self._again_after, ""
        while (left := begun + timeout - time.monotonic()) > 0:
            self._last_request = time.monotonic()
            reply = self._send(site, TOPIC, {"payload": question}, min(wait, left))
            if reply is not None and not reply["waits"]:
                return str(reply["problem"]), reply["payload"]
            if self._abort.triggered:
                return "the job was aborted before the site replied; its process may have stopped", b""
            time.sleep(PAUSE)
            if reply is None:
                wait *= 2
            elif not waits:
                waits = str(reply["waits"])
                tell(waits)
        return f"silent for {timeout:g} s", b""

    def _send(self, site: str, topic: str, content: Mapping[str, bytes], timeout: float) -> Shareable | None:
        """Send one message; None if no valid reply came in time."""
        with self._engine.new_context() as context:
            replies = self._engine.send_aux_request(
                targets=[site],
                topic=topic,
                request=Shareable(content),
                timeout=timeout,
                fl_ctx=context,
                optional=True,
            )
        reply = (replies or {}).get(site)
        return reply if reply is not None and reply.get_return_code() == ReturnCode.OK else None


def _is_heard(path: Path) -> bool:
    """Return whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as visitor:
        return visitor.connect_ex(str(path)) == 0


class FlareExecutor(Executor):  # type: ignore[misc]
    """The site's side of the job: its data, its policy, and its only entry point."""

    def __init__(self) -> None:
        super().__init__()
        self._site: SignedSite | None = None
        self._tried = False

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Register for messages at once, and open the site when the job starts."""
        engine = fl_ctx.get_engine()
        if event_type == EventType.ABOUT_TO_START_RUN:
            end_with_parent()
            engine.register_aux_message_handler(PING, self._is_there)
            engine.register_aux_message_handler(TOPIC, self._answer)
        elif event_type == EventType.START_RUN:
            name = fl_ctx.get_identity_name()
            try:
                folder = provision.owner_folder(engine.get_workspace().get_root_dir(), name)
                self._site = SignedSite(folder, name, self.logger.warning)
            except Exception as error:
                # For the site's own log; the analyst learns only that the folder cannot be used.
                self.log_error(fl_ctx, f"the site cannot be opened: {type(error).__name__}: {error}")
            self._tried = True

    def _is_there(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        return make_reply(ReturnCode.OK if self._tried else ReturnCode.SERVICE_UNAVAILABLE)

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        if not self._tried:
            return make_reply(ReturnCode.SERVICE_UNAVAILABLE)
        reply = make_reply(ReturnCode.OK)
        reply["problem"], reply["payload"], reply["waits"] = "", b"", ""
        if self._site is None:
            reply["problem"] = "its folder cannot be used; see the site's own log"
            return reply
        try:
            reply["payload"] = self._site.answer(request["payload"])
        except BusyError:  # the server sends the request again
            reply["waits"] = BUSY
        except ClosedError:
            reply["problem"] = "it answers no requests for now; see the site's own log"
        except FedstatError as error:
            self.log_error(fl_ctx, f"a request was refused: {error}")
            reply["problem"] = "the request does not come from its pinned coordinator; see the site's own log"
        return reply

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Refuse tasks: there are none."""
        return make_reply(ReturnCode.TASK_UNKNOWN)
