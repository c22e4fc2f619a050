"""What a service counts, in Prometheus' text format (version 0.0.4), for node_exporter's textfile collector.

No value depends on rows beyond what the site's ledger tells its owner: counts of questions and refusals,
times, room. No name of a column, no text of a rule and no number of rows stands in it. Seconds of work do
depend on rows, as whoever asks can time as well; the file is its owner's (mode 0600) unless another mode is
asked for.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from fedstat.federation.files import write_whole
from fedstat.operator.running.standing import Standing

EVERY = 15.0
"""Seconds after which the file is written anew."""
Metric: TypeAlias = tuple[str, str, str, float | None]


def exposition(standing: Standing, busy: float | None, free: int | None) -> str:
    """Write metrics of a site: `busy` seconds of work since its service began, `free` bytes on its disk."""
    lines = []
    label = f'site="{_escaped(standing.site)}"'
    for name, kind, what, value in _metrics(standing, busy, free):
        if value is not None:
            told = f'{label},carrier="{standing.carrier}",version="{_escaped(standing.installed)}"'
            labels = told if name == "fedstat_build_info" else label
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value!r}"]
    return "\n".join(lines) + "\n"


def write_metrics(path: Path, mode: int, standing: Standing, folder: Path, busy: float | None) -> None:
    """Write the file whole; a disk without room keeps the earlier one, whose time tells of it."""
    with suppress(OSError):
        text = exposition(standing, busy, shutil.disk_usage(folder).free)
        write_whole(path, text.encode(), mode)


def _metrics(standing: Standing, busy: float | None, free: int | None) -> Iterator[Metric]:
    yield "fedstat_build_info", "gauge", "Version of the package and carrier of the site.", 1
    answers = int(standing.is_served and not standing.problem and standing.account == "whole")
    yield "fedstat_answers", "gauge", "Whether the service can answer.", answers
    yield "fedstat_questions_total", "counter", "Questions that were answered.", standing.questions
    yield "fedstat_refused_total", "counter", "Questions that were refused.", standing.refused
    yield "fedstat_sessions_total", "counter", "Sessions that were opened.", standing.sessions
    yield "fedstat_arrays_left_total", "counter", "Arrays that left.", standing.arrays_left
    yield "fedstat_ledger_entries_total", "counter", "Entries of the ledger.", standing.entries
    yield "fedstat_waiting_questions", "gauge", "Questions without an answer.", standing.waiting
    yield "fedstat_waiting_plans", "gauge", "Plans that wait for consent.", standing.plans_waiting
    yield "fedstat_busy_seconds_total", "counter", "Seconds of work since the service began.", busy
    began, last = _seconds(standing.since), _seconds(standing.last_question)
    yield "fedstat_start_time_seconds", "gauge", "When the service began.", began
    yield "fedstat_last_question_time_seconds", "gauge", "When the last question was entered.", last
    budget = standing.budget
    left = None if budget is None else budget.share_left
    yield "fedstat_budget_left_ratio", "gauge", "Share of the privacy budget that is left.", left
    yield (
        "fedstat_certificate_days",
        "gauge",
        "Days until the certificate expires.",
        standing.certificate_days,
    )
    yield "fedstat_disk_free_bytes", "gauge", "Room on the disk of the site's folder.", free
    yield "fedstat_written_time_seconds", "gauge", "When this file was written.", round(time.time(), 3)


def _seconds(when: str | None) -> float | None:
    """Seconds since 1970 of a time in UTC as the ledger tells it."""
    try:
        found = datetime.fromisoformat(str(when))
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
