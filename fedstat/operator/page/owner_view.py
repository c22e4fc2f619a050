"""The data of the owner's page, read from the site's folder when a page is requested."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fedstat.errors import SecurityError
from fedstat.federation.audit.event_log import PlanDecision, SiteLedger
from fedstat.federation.audit.ledger_file import CHECKPOINT_FILENAME, LEDGER_FILENAME, read_ledger
from fedstat.federation.disclosure.approval import AnalysisPlan
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.files import read_private
from fedstat.federation.transport.site_folder import (
    REFUSALS,
    PlanFolder,
    SiteDescription,
    load_identity,
    mode_problems,
    read_description,
    read_site_policy,
)

Verdict: TypeAlias = Literal["approved", "denied"]
LOG_LINES, LOG_BYTES = 200, 4_000_000


@dataclass(slots=True)
class OwnerView:
    """A site, as its owner sees it.

    `state` returns the status of the site in a folder. `examine` returns the problems of the folder and the
    output of 'fedstat site check'.
    """

    folder: Path
    state: Callable[[Path], Mapping[str, Any]]
    examine: Callable[[Path], tuple[Sequence[str], str]]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _examining: threading.Lock = field(default_factory=threading.Lock)
    _site_ledger: tuple[object, SiteLedger] | None = None

    @property
    def description(self) -> SiteDescription:
        """The entries of ``site.toml``."""
        return read_description(self.folder)

    @property
    def name(self) -> str:
        """Name of the site."""
        return self.description.name

    @property
    def policy(self) -> Policy:
        """The policy, as the file is now."""
        return read_site_policy(self.folder)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the key of the site."""
        return load_identity(self.folder).public.fingerprint

    @property
    def site_ledger(self) -> SiteLedger:
        """The ledger of the site, checked against its signatures; read again when its files have changed."""
        with self._lock:
            name, keys = self.description.name, load_identity(self.folder).public
            now = name, keys.fingerprint, *map(self._changed, (CHECKPOINT_FILENAME, LEDGER_FILENAME))
            if self._site_ledger is None or self._site_ledger[0] != now:
                self._site_ledger = now, read_ledger(self.folder, name, keys)
            return self._site_ledger[1]

    @property
    def plans(self) -> PlanFolder:
        """The waiting plans, and those with a decision."""
        return PlanFolder(self.description.name, self.folder, load_identity(self.folder).public)

    @property
    def waiting(self) -> Mapping[str, AnalysisPlan]:
        """The waiting plans, by digest."""
        return self.plans.waiting()

    @property
    def decisions(self) -> list[tuple[PlanDecision, str]]:
        """All decisions, the latest first, each with its status."""
        laid = {
            one.plan: (one, "is signed; the site enters it into its ledger at the next request")
            for one in self.plans.decided()
        }
        site_ledger = self.site_ledger
        entered = {
            one.plan: (
                one,
                "was used for one run" if site_ledger.is_used(one) else "is in force",
            )
            for one in site_ledger.decisions.values()
        }
        return sorted((entered | laid).values(), key=lambda one: -one[0].when)

    def examined(self) -> tuple[Sequence[str], str]:
        """Return the problems of the site, and the output of 'fedstat site check'."""
        with self._examining:
            return self.examine(self.folder)

    def check_modes(self) -> None:
        """Refuse a folder that others may read or write, with a SecurityError."""
        for problem in mode_problems(self.folder):
            raise SecurityError(problem)

    def decide(self, digest: str, verdict: Verdict) -> None:
        """Decide about a plan, given by its complete digest, as the user of this process."""
        self.check_modes()
        self.plans.decide(load_identity(self.folder), digest, verdict)

    def reasons(self) -> list[str]:
        """Return the last lines of the log of refusals, which only the owner may read."""
        path = self.folder / REFUSALS
        if not path.exists():
            return []
        text = read_private(path)[-LOG_BYTES:].decode("utf-8", "replace")
        return text.splitlines()[-LOG_LINES:][::-1]

    def _changed(self, name: str) -> tuple[int, int]:
        try:
            found = (self.folder / name).stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size
