"""The analyst's end of a running job."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import ClassVar

from fedstat.errors import EngineError
from fedstat.federation.carry.flare.kit import KEY, SOCKET, START, TIMEOUT
from fedstat.federation.carry.signed import open_answer, sign_question
from fedstat.federation.crypto.keys import Identity

PAUSE = 0.2
PATIENCE = 60
"""Seconds for one message to or from a server on the same machine."""
MARGIN = 30.0
"""Seconds that the server has to say that a site was silent."""


@dataclass(slots=True)
class FlareCarrier:
    """The analyst's end of a running job; several threads may use it, each with a connection of its own.

    `server` is the folder of the FLARE server, on this machine; `timeout` the seconds until a site counts as
    silent, by default what the job was started with.
    """

    server: Path
    identity: Identity
    fingerprints: Mapping[str, str]
    timeout: float | None = None
    bundles: ClassVar[bool] = True
    _connections: threading.local = field(default_factory=threading.local)

    def wait(self, seconds: float = START) -> None:
        """Wait until the job takes questions; EngineError where it does not within `seconds`."""
        until = time.monotonic() + seconds
        while True:
            try:
                self._connection()
                return
            except (OSError, EOFError, AuthenticationError) as error:
                if time.monotonic() > until:
                    raise EngineError(
                        f"no job takes questions at '{Path(self.server, SOCKET)}' after {seconds:g} s "
                        f"({type(error).__name__}). Was it submitted, and are all its sites running?"
                    ) from error
            time.sleep(PAUSE)

    def carry(self, site: str, request: bytes) -> bytes:
        """Send one question, and wait for its answer.

        EngineError where no job is running or the site did not answer, SecurityError where the answer is not
        signed by the site, or belongs to another question.
        """
        number, question = sign_question(self.identity, site, request)
        try:
            connection = self._connection()
            connection.send_bytes(json.dumps({"site": site, "timeout": self.timeout}).encode())
            connection.send_bytes(question)
            # the server itself tells of a silent site in time: only one that hangs takes longer
            limit = (TIMEOUT if self.timeout is None else self.timeout) + MARGIN
            if not connection.poll(limit):
                raise TimeoutError(f"silent for {limit:g} s")
            problem = json.loads(connection.recv_bytes())["problem"]
            answer = connection.recv_bytes()
        except TimeoutError as error:
            self._drop()
            raise EngineError(
                f"'{site}' was not reached: the server's process is {error}; it hangs. Stop it, "
                "and start it again"
            ) from error
        except (EOFError, OSError, AuthenticationError) as error:
            self._drop()
            raise EngineError(
                f"'{site}': the job of the analysis has ended or was not started ({type(error).__name__})"
            ) from error
        if problem:
            raise EngineError(f"'{site}' did not answer: {problem}")
        return open_answer(answer, self.fingerprints[site], site, number, f"the answer of '{site}'")

    def end(self) -> bool:
        """End the analysis; the job then completes, and the sites close their data; False if it had ended."""
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
            key = Path(self.server, "local", KEY).read_bytes()
            connection = _open(Path(self.server, SOCKET), key)
            self._connections.open = connection
        return connection

    def _drop(self) -> None:
        """Give up a connection in which an answer may be on its way."""
        connection: Connection | None = getattr(self._connections, "open", None)
        if connection is not None:
            connection.close()
        self._connections.open = None


def _open(path: Path, key: bytes) -> Connection:
    """Connect to a socket, and prove to each other that both know the secret; a frozen process ends it."""
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
