"""Processes that end when whoever started them is gone, however that ended.

``python -m fedstat.federation.carry.flare.tethered MODULE WORDS`` runs a module until nobody holds the other
end of its standard input.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time

PAUSE = 0.5
GONE = 75
"""Exit code of a process whose parent is gone."""


def end_with_parent() -> None:
    """End this process, without more ado, when its parent is gone."""
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(GONE)


def _watch_input() -> None:
    while os.read(sys.__stdin__.fileno(), 1):  # type: ignore[union-attr]
        pass
    os._exit(GONE)


def main() -> None:
    """Run the module that is named, with the words after it."""
    module, sys.argv = sys.argv[1], sys.argv[1:]
    threading.Thread(target=_watch_input, daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
