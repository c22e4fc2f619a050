"""A site that runs: it answers until it is told to stop, and says how it is."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstat.errors import EngineError, PartitionError
from fedstat.federation.account.chain import SiteAccount
from fedstat.federation.account.entry import REFUSAL
from fedstat.federation.account.ledger_file import LedgerFile
from fedstat.federation.carry.folder import serve_folder
from fedstat.federation.carry.site_folder import DESCRIPTION, open_site, read_description
from fedstat.federation.door.site import Site
from fedstat.federation.files import write_whole
from fedstat.operator.screen import columns, heading, typed

STATUS = "status.json"
POLL = 0.05
ORDERLY = "stopped"


def now() -> str:
    """Time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(slots=True)
class Service:
    """One process that serves a site; with `once` it ends when no question waits."""

    folder: Path
    site: Site
    once: bool
    began: str = field(default_factory=now)
    passed_over: int = 0
    asked_to_stop: bool = False
    _looks: int = 0
    _told: tuple[int, int] = (-1, -1)
    _described: int = 0

    def run(self, poll: float) -> None:
        """Answer until told to stop; whom the owner trusts is read again when it changes."""
        while not self.asked_to_stop:
            description = read_description(self.folder)
            self._described = self._changed_at()
            self.site.trust.pinned.clear()
            self.site.trust.pinned.update(description.pinned)
            if not description.coordinator:
                raise PartitionError(
                    f"'{self.folder / DESCRIPTION}' trusts no coordinator, and nobody's questions are "
                    f"answered; pin one with 'fedstat site pin {typed(self.folder)} CARD'"
                )
            serve_folder(
                self.site,
                description.exchange,
                description.coordinator,
                poll=poll,
                stop=self._stop,
                refused=self._refused,
            )
            if self.once:
                return

    def stop(self, number: int, frame: Any) -> None:
        """Finish the present question, then end."""
        self.asked_to_stop = True

    def _stop(self) -> bool:
        self._looks += 1
        self._tell()
        done = self.once and self._looks > 1
        return self.asked_to_stop or done or self._changed_at() != self._described

    def _changed_at(self) -> int:
        try:
            return (self.folder / DESCRIPTION).stat().st_mtime_ns
        except OSError:
            return self._described

    def _refused(self, why: str) -> None:
        self.passed_over += 1
        print(f"{now()} passed over: {why}", file=sys.stderr, flush=True)

    def _tell(self) -> None:
        """Write how it is, where that changed."""
        count = (sum(len(chain.links) for chain in self.site.account.chains), self.passed_over)
        if count != self._told:
            self._told = count
            self.tell("running")

    def tell(self, state: str) -> None:
        """Write the status file."""
        content = {"state": state, "site": self.site.name, "process": os.getpid(), "since": self.began}
        content |= {"passed over": self.passed_over} | counts(self.site.account)
        write_whole(self.folder / STATUS, json.dumps(content, indent=2).encode())


def counts(account: SiteAccount) -> dict[str, Any]:
    """Count what is in a site's account."""
    links = [link for chain in account.chains for link in chain.links]
    return {
        "sessions": len(account.chains),
        "questions": sum(chain.round for chain in account.chains),
        "refused": sum(link.entry.kind == REFUSAL for link in links),
        "arrays left": sum(link.entry.left for link in links),
        "last question": max((link.time for link in links), default="none"),
    }


def serve(folder: Path, once: bool, poll: float) -> int:
    """Serve a site until SIGTERM or SIGINT."""
    description = read_description(folder)
    if not description.exchange:
        raise PartitionError(
            f"'{folder / DESCRIPTION}' names no folder for questions and answers; write it under 'exchange', "
            f"or join a kit for NVIDIA FLARE with 'fedstat site join-kit {typed(folder)} KIT'"
        )
    service = Service(folder, open_site(folder), once)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, service.stop)
    print(
        f"{now()} {description.name} answers in '{description.exchange}' (process {os.getpid()})", flush=True
    )
    state = "failed"
    try:
        service.run(poll)
        state = ORDERLY
    finally:
        service.tell(state)
    print(f"{now()} {description.name} {ORDERLY}; its ledger goes on when it is started again", flush=True)
    return 0


def status(folder: Path) -> int:
    """Show whether a site is served, and what it has done."""
    description, path = read_description(folder), folder / STATUS
    print(heading(f"Site {description.name}"))
    if not path.exists():
        print(f"  has not been started yet; start it with    fedstat site serve {typed(folder)}")
        return 1
    content = json.loads(path.read_text(encoding="utf-8"))
    running = _is_served(folder)
    if not running and content["state"] == "running":
        content["state"] = "ended without a word (killed, or the machine went down); start it again"
    if not running:
        del content["process"]
    rows = [(name, str(value)) for name, value in content.items() if name != "site"]
    print(columns([*rows, ("waiting", str(_waiting(description.exchange, description.name)))]))
    return 0 if running else 1


def _is_served(folder: Path) -> bool:
    """Whether a process holds the ledger."""
    try:
        LedgerFile(folder, patience=0.0).close()
    except EngineError:
        return True
    return False


def _waiting(exchange: str, name: str) -> int:
    """Questions without an answer."""
    if not exchange:
        return 0
    answered = {path.stem for path in Path(exchange, name, "replies").glob("*.reply")}
    return sum(path.stem not in answered for path in Path(exchange, name, "asks").glob("*.ask"))
