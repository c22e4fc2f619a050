"""The data of the coordinator's page: sites, rosters, waiting approvals and running analyses."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from fedstat.errors import FedstatError, SecurityError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.partition.federation_file import read_federation
from fedstat.federation.protocols.schema import TableSchema
from fedstat.federation.transport.analysis_notes import read_notes, waiting_notes
from fedstat.operator.page.plan_summary import plain_time
from fedstat.operator.page.rendering import section_data

AGAIN = 300.0
"""Seconds after which the sites are asked again while somebody looks at the page."""
Tested = tuple[Mapping[str, TableSchema], list[str]]


@dataclass(slots=True)
class FederationView:
    """A federation, as its coordinator sees it.

    `standing` returns the status of the federation in a folder, without a request to a site. `test` requests
    the schema of every site, when the page begins and again after `AGAIN` seconds while it is looked at.
    """

    folder: Path
    standing: Callable[[Path], Any]
    test: Callable[[Path], Tested]
    _tested: Tested | None = None
    _test_problem: str = ""
    _when: str = field(default_factory=lambda: utc_text(time.time_ns()))
    _next: float = 0.0

    @property
    def name(self) -> str:
        """Name of the federation."""
        return read_federation(self.folder).name

    def check_modes(self) -> None:
        """Refuse a folder that others may write, with a SecurityError, and begin the test of the sites."""
        if self.folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SecurityError(f"others can write '{self.folder}': chmod go-w '{self.folder}'")
        self._test_again()

    def _test_again(self) -> None:
        """Test the sites if the last test is old; the page shows the earlier outcome until it ends."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + AGAIN
            Thread(target=self._run_test, daemon=True).start()

    def _run_test(self) -> None:
        tested, problem = None, ""
        when = utc_text(time.time_ns())
        try:
            tested = self.test(self.folder)
        except (FedstatError, OSError, ImportError) as error:
            problem = str(error)
        self._tested, self._test_problem, self._when = tested, problem, when

    def site_rows(self) -> list[tuple[str, ...]]:
        """Return one row for each site: whether it answered, its version, rows, roster and open requests."""
        self._test_again()
        found = self.standing(self.folder)
        schemas = self._tested[0] if self._tested else {}
        rows: list[tuple[str, ...]] = []
        for name, one in found.sites.items():
            schema = schemas.get(name)
            state = "yes" if schema else "NO" if self._tested or self._test_problem else "being tested"
            newest = one.roster == found.roster or found.roster is None
            roster = "none" if one.roster is None else f"{one.roster}{'' if newest else ' (old)'}"
            version, n_rows = ("", "") if schema is None else (schema.release.version, f"{schema.n_rows:,}")
            waiting = "not known" if one.waiting is None else f"{one.waiting:,}"
            approval = "" if schema is None else {"owner": "yes"}.get(schema.policy.approval, "no")
            rows.append((name, state, version, n_rows, approval, roster, waiting))
        return rows

    def problems(self) -> list[str]:
        """Return the problems of the federation, and those of the test."""
        tested = self._tested[1] if self._tested else [self._test_problem] if self._test_problem else []
        return [*self.standing(self.folder).problems, *tested]


def federation_page(view: FederationView) -> dict[str, Any]:
    """Return sites, problems, waiting approvals and analyses of a federation."""
    return {
        "tested": plain_time(view._when),
        "sites": section_data(view.site_rows),
        "problems": section_data(view.problems),
        "again": round(AGAIN / 60),
        "waiting": section_data(lambda: _notes(view.folder, waiting=True)),
        "analyses": section_data(lambda: _notes(view.folder, waiting=False)),
    }


def _notes(folder: Path, waiting: bool) -> list[tuple[str, ...]]:
    notes = read_notes(folder)
    waits = waiting_notes(notes)
    rows = [
        (
            plain_time(note.changed),
            note.person or "not stated",
            note.study,
            note.purpose,
            note.waits_for if waiting else note.state_of(_is_alive(note.process)),
        )
        for note in notes
        if (note in waits) == waiting
    ]
    equal = Counter(row[1:] for row in rows)
    first = {row[1:]: row for row in reversed(rows)}
    return [
        (*row[:-1], f"{row[-1]}; {equal[row[1:]]:,} times" if equal[row[1:]] > 1 else row[-1])
        for row in rows
        if first[row[1:]] is row
    ]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
