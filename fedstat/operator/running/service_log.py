"""The log of a service: on standard error, or in files of a size and a number that its owner chooses."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

MEGABYTE = 10**6


class PrivateLog(RotatingFileHandler):
    """Log files that their owner alone may read (mode 0600), the newest without a number."""

    def _open(self) -> Any:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)

        return open(self.baseFilename, self.mode, encoding="utf-8", opener=opener)


def log_to(path: Path | None, megabytes: float, count: int) -> Callable[[str], None]:
    """Return what takes a line: `count` older files are kept beside the newest, none above `megabytes`."""
    if path is None:
        return lambda line: print(line, file=sys.stderr, flush=True)
    handler = PrivateLog(path, maxBytes=max(1, int(megabytes * MEGABYTE)), backupCount=count)
    logger = logging.Logger("fedstat.service")  # of its own: no library writes into it
    logger.addHandler(handler)
    return logger.info
