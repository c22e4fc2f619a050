"""Child processes that end when their parent process ends.

``python -m fedstat.federation.transport.flare.child_process MODULE WORDS`` runs a module until the other end
of its standard input is closed. A client that the server rejects for good ends as well; FLARE's own client
would try again without a message.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from typing import Any

PAUSE, AGAIN = 0.5, 2.0
GONE = 75
"""Exit code of a process whose parent is gone."""
TAKEN, OUT = 76, 77
"""Exit codes of a client that another one has replaced, and of one that was removed from the federation."""

CLIENT = "nvflare.private.fed.app.client.client_train"
TURNED_AWAY = {"already registered": TAKEN, "is disabled": OUT}
"""The server's messages that reject a client, and the exit code."""


def end_with_parent() -> None:
    """End this process immediately when its parent is gone."""
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(GONE)


def _watch_input() -> None:
    while os.read(sys.__stdin__.fileno(), 1):  # type: ignore[union-attr]
        pass
    os._exit(GONE)


def _watch_answers() -> None:
    """End when a reply of the server rejects this client; FLARE's own client ignores it.

    Two clients of one kit disconnect each other in turns, and the reply to a heartbeat may reach the other
    one. A rejection that is sent again and again reaches each.
    """
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell  # noqa: PLC0415
    from nvflare.fuel.f3.cellnet.defs import CellChannelTopic, MessageHeaderKey, ReturnCode  # noqa: PLC0415

    send = CoreCell.send_request

    def sent(*given: Any, **more: Any) -> Any:
        limit, until = more.get("timeout"), 0.0
        if limit and more.get("topic") == CellChannelTopic.HEART_BEAT:
            more["timeout"], until = AGAIN, time.monotonic() + limit
        while True:
            answer = send(*given, **more)
            if answer is None:
                return None
            check_server_answer(str(answer.get_header(MessageHeaderKey.ERROR)))
            late = answer.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.TIMEOUT
            if not late or time.monotonic() > until:
                return answer

    CoreCell.send_request = sent


def check_server_answer(problem: str) -> None:
    """End if a problem that the server reports rejects this client."""
    for words, code in TURNED_AWAY.items():
        if words in problem:
            os._exit(code)


def main() -> None:
    """Run the named module, with the words after it."""
    module, sys.argv = sys.argv[1], sys.argv[1:]
    threading.Thread(target=_watch_input, daemon=True).start()
    if module == CLIENT:
        _watch_answers()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
