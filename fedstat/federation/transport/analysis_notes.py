"""Notes of a coordinator on its connections: who analyzes, whether it runs, and what waits for approval."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedstat.codec import from_json
from fedstat.errors import ConsentError, FedstatError
from fedstat.federation import state_formats
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.disclosure.approval import APPROVAL_FAMILY
from fedstat.federation.message import Purpose, Reply, Request
from fedstat.federation.protocols.plan_approval import PlanStatus, propose_plan

NOTES, MOST_NOTES = "analyses", 200
"""Folder of the notes, and how many are kept."""


@dataclass(frozen=True, slots=True)
class AnalysisNote:
    """One connection of an analyst: its process, the time of the last change, and its state.

    `waits_for` has the text of the sites whose owners have not approved a plan, or is empty. `plans` are the
    digests of the plans that were proposed, with the answers of the owners.
    """

    process: int
    changed: str
    person: str
    study: str
    purpose: str
    state: str
    waits_for: str = ""
    plans: Mapping[str, str] = field(default_factory=dict)

    def state_of(self, is_alive: bool) -> str:
        """Return the state in words; a process that ended runs nothing."""
        if self.waits_for:
            return "waited for approval"
        return self.state if is_alive or self.state != "running" else "ended without a message"


class NoteKeeper:
    """Writes the note of one connection; a note that cannot be written does not stop an analysis."""

    def __init__(self, folder: Path, purpose: Purpose) -> None:
        self._path = folder / NOTES / f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
        stated = purpose.person, purpose.study, purpose.purpose
        self._note = AnalysisNote(os.getpid(), "", *stated, "connected")
        self._plans: dict[str, str] = {}

    def take(self, request: Request, reply: Reply) -> None:
        """Note what an owner has answered to a plan."""
        if (request.family, request.step) == (APPROVAL_FAMILY, propose_plan.__name__):
            found = from_json(PlanStatus, reply.text, f"{reply.site}: status of a plan")
            self._plans[found.digest] = found.status

    def begin(self) -> None:
        """Note that requests are sent."""
        self._write(replace(self._note, state="running"))

    def end(self, error: FedstatError | None = None) -> None:
        """Note that a run ended, and for what it waits."""
        if isinstance(error, ConsentError) and error.rule == "approval":
            is_open = "pending" in self._plans.values()
            state = "waits for approval" if is_open else "denied"
            self._write(replace(self._note, state=state, waits_for=str(error) if is_open else ""))
        else:
            state = "done" if error is None else f"ended with {type(error).__name__}"
            self._write(replace(self._note, state=state))

    def _write(self, note: AnalysisNote) -> None:
        with suppress(OSError):
            folder = self._path.parent
            folder.mkdir(mode=0o700, exist_ok=True)
            for old in sorted(folder.glob("*.json"))[:-MOST_NOTES]:
                old.unlink(missing_ok=True)
            changed = utc_text(time.time_ns())
            complete = replace(note, changed=changed, plans=dict(self._plans))
            self._path.write_text(state_formats.NOTE.write_record(complete))


def read_notes(folder: Path) -> list[AnalysisNote]:
    """Return the notes of a federation, the latest first; files that are not notes are skipped."""
    found = []
    for path in sorted((folder / NOTES).glob("*.json"), reverse=True):
        with suppress(FedstatError, OSError, UnicodeDecodeError):
            found.append(state_formats.NOTE.read_record(AnalysisNote, path.read_text(), f"'{path}'"))
    return found


def waiting_notes(notes: Sequence[AnalysisNote]) -> list[AnalysisNote]:
    """Return the notes with a plan that still waits, the latest first; each plan once."""
    found, answered = [], set[str]()
    for note in notes:
        is_open = {digest for digest, status in note.plans.items() if status == "pending"} - answered
        if note.waits_for and is_open:
            found.append(note)
        answered |= note.plans.keys()
    return found
