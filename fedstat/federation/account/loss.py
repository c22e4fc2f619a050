"""The way back for a site whose account is not whole: its owner declares the loss, in the account itself.

What was lost cannot be held against new answers: two that differ by a few rows may then both leave. This is
for the owner to weigh, and for the others to know: the times of all declarations go with every statement of
the site.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from fedstat.errors import SecurityError
from fedstat.federation.account.charges import Charge
from fedstat.federation.account.head import told
from fedstat.federation.account.ledger_file import (
    NEXT,
    Fits,
    LedgerFile,
    begin_file,
    open_whole,
    recall,
)
from fedstat.federation.account.ledger_lines import (
    ANSWERED,
    HEAD,
    LEDGER,
    SECRET,
    AnsweredLine,
    LostLine,
    Reading,
)
from fedstat.federation.crypto.keys import Identity
from fedstat.records import to_plain

NOTHING = Fraction(0)
LOST_CHARGES = "all that may have been charged before the account was lost"


@dataclass(frozen=True, slots=True)
class Loss:
    """What was declared: why the account was not whole, and the files that were set aside, and where.

    Answers that are `forgotten` are not held against new ones any more; `charged` says whether the whole
    privacy budget counts as spent, since nobody knows what was.
    """

    found: str
    forgotten: bool
    aside: Path
    files: tuple[str, ...]
    charged: bool = False


def declare_loss(
    folder: str | Path, site: str, identity: Identity, reason: str, fits: Fits, whole: Fraction = NOTHING
) -> Loss:
    """Declare that what a site has answered is not all known any more.

    An account whose lines are whole is gone on with; any other is set aside and begun anew. Earlier answers
    are remembered where their file is the one that the ledger names, and its rows `fits` those there are now.
    Where charges to a privacy budget may be among what was lost, the `whole` of it is charged. EngineError
    where a process serves the site.
    """
    folder, forgotten, files, charged = Path(folder), True, list[str](), False
    aside = _new_folder(folder)
    try:
        store, reading = open_whole(folder, site, identity)
    except SecurityError as error:
        # The secret as well: it was in the hands of whoever altered the rest.
        found, files = str(error), _set_aside(folder, aside, (LEDGER, HEAD, ANSWERED, NEXT, SECRET))
        store, charged = begin_file(folder, identity), whole > 0
    else:
        problem = _forgotten(folder, reading, fits)
        found, forgotten = reading.account.disputed or problem, bool(problem)
        if forgotten:
            files = _set_aside(folder, aside, (ANSWERED, NEXT))
            store.append([to_plain(AnsweredLine())])
    if charged:
        store.charged([Charge(time.time_ns(), str(whole), LOST_CHARGES, "", secrets.token_hex(32))])
    _declare(store, reason, aside.name if files else "")
    return Loss(
        found or "nothing is amiss with the files themselves", forgotten, aside, tuple(files), charged
    )


def _forgotten(folder: Path, reading: Reading, fits: Fits) -> str:
    """Say why earlier answers cannot be held against new ones; empty where they can."""
    try:
        kept = recall(folder, reading.answered)
    except SecurityError as error:
        return str(error)
    return fits(kept, reading.answered.rows) if kept else ""


def _declare(store: LedgerFile, reason: str, aside: str) -> None:
    # Not before any head that was signed here: the heads of others are forgiven up to this time.
    now = max(time.time_ns(), store.head.time + 1)
    store.lost = (*store.lost, now)
    line: dict[str, Any] = to_plain(LostLine(now, reason, aside))
    store.append([line])
    store.close()


def _new_folder(folder: Path) -> Path:
    stamp = told(time.time_ns()).replace(":", "").replace("-", "")
    return next(
        place for number in range(1, 1000) if not (place := folder / f"lost-{stamp}-{number}").exists()
    )


def _set_aside(folder: Path, aside: Path, names: tuple[str, ...]) -> list[str]:
    """Move what is there of some files into a folder of their own, for whoever looks into what happened."""
    there = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        aside.mkdir(mode=0o700)
    for name in there:
        (folder / name).rename(aside / name)
    return there
