"""Files that are there whole or not at all, and folders that one process writes."""

from __future__ import annotations

import os
from pathlib import Path
from threading import get_ident
from typing import IO

try:
    import fcntl
except ImportError:  # no POSIX: nothing then keeps two processes from one folder
    LOCKS = False
else:
    LOCKS = True


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, also where two threads write it at once."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def lock(file: IO[bytes]) -> bool:
    """Take a file for this process until it is closed; False where another has it."""
    if not LOCKS:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
