"""Room on a site's disk: nothing leaves that cannot be written down first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fedstat.federation.account.ledger_lines import ANSWERED, LEDGER

LEAST, PROBED = 8 * 2**20, 2**16
"""Bytes that a site wants free beside what it remembers of its answers; bytes by which a ledger is tried."""
GOES_ON = "Nothing leaves that is not entered in the ledger; it goes on by itself when there is room"


def full_disk(folder: Path) -> str:
    """Say that the disk of a site's folder is full, and how much room is needed; empty where it is not."""
    try:
        free = shutil.disk_usage(folder).free
        kept = (folder / ANSWERED).stat().st_size if (folder / ANSWERED).exists() else 0
    except OSError as error:
        return f"'{folder}' is out of reach ({error.strerror}). {GOES_ON}"
    needed = LEAST + 2 * kept  # the rows behind earlier answers are written anew beside the old ones
    if free >= needed:
        return ""
    return (
        f"the disk of '{folder}' is full: {free / 2**20:.1f} MB are free, and {needed / 2**20:.1f} MB are "
        f"needed. {GOES_ON}"
    )


def full_ledger(folder: Path) -> str:
    """Say why the ledger of a site, to which nobody writes now, cannot be added to; empty where it can."""
    path = folder / LEDGER
    try:
        size = path.stat().st_size
        try:
            with open(
                os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)), "ab", 0
            ) as file:
                if file.write(bytes(PROBED)) != PROBED:
                    return cannot_grow(path, "no room for all of a line")
                os.fsync(file.fileno())
        finally:
            os.truncate(path, size)
    except OSError as error:
        return cannot_grow(path, str(error.strerror))
    return ""


def cannot_grow(path: Path, why: str) -> str:
    """Say that a ledger cannot be written."""
    return f"'{path}' cannot be written ({why}): {PROBED / 2**10:.0f} kB are needed. {GOES_ON}"
