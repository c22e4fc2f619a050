"""The service of a site: it answers requests until it is stopped, with log, health check and metrics."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

from fedstat.codec import to_plain
from fedstat.errors import FedstatError, PartitionError
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.files import write_atomic
from fedstat.federation.transport.bucket import BucketInbox, open_bucket
from fedstat.federation.transport.flare.provision import FLARE, KIT, days_left
from fedstat.federation.transport.live_config import ClosedError, full_disk
from fedstat.federation.transport.mailbox import Backoff, Inbox, SiteMailbox, is_bucket
from fedstat.federation.transport.signed import SignedSite
from fedstat.federation.transport.site_folder import (
    DESCRIPTION,
    SiteDescription,
    mode_problems,
    read_description,
    read_site_policy,
)
from fedstat.operator import flare_commands
from fedstat.operator.disclosure_commands import plan_folder
from fedstat.operator.flare_process import LOG, is_running
from fedstat.operator.page.owner_view import OwnerView
from fedstat.operator.page.server import serve_page
from fedstat.operator.site_commands import examine_site
from fedstat.operator.site_status import (
    BEAT,
    SiteStatus,
    describe_budget,
    describe_counts,
    heartbeat_age,
    ledger_is_held,
    read_service_status,
    read_site_status,
    show_status,
    utc_now,
    write_heartbeat,
    write_status,
)
from fedstat.operator.terminal import shell_path

# ----------------------------------------------------------------------------------------------------
# The log of a service: on standard error, or in files of a size and a number that its owner chooses.

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


# ----------------------------------------------------------------------------------------------------
# Whether a site is served and can answer, in one line for monitors.


def health_problem(standing: SiteStatus, folder: Path, age: float | None, patience: float) -> str:
    """Say why a site, whose service was seen `age` seconds ago, cannot answer; empty where it can."""
    if not standing.is_served:
        return f"is not served ({standing.state})"
    if age is None or age > patience:
        seen = "never seen" if age is None else f"seen {age:.0f} s ago"
        return f"its service was {seen}, and one question may take {patience:g} s: it hangs"
    if full := full_disk(folder):
        return full
    try:
        read_site_policy(folder)
    except FedstatError as error:
        return f"its policy cannot be read: {error}"
    for problem in mode_problems(folder):
        return problem
    if standing.site_ledger != "whole":
        return standing.site_ledger
    if standing.connected is False:
        return "it has no connection to the server"
    if standing.certificate_days is not None and standing.certificate_days < 0:
        return "its certificate has expired"
    return standing.problem


# ----------------------------------------------------------------------------------------------------
# What a service counts, in Prometheus' text format (version 0.0.4), for node_exporter's textfile collector.
#
# No value depends on rows beyond what the site's ledger tells its owner: counts of questions and refusals,
# times, room. No name of a column, no text of a rule and no number of rows stands in it. Seconds of work do
# depend on rows, as whoever asks can time as well; the file is its owner's (mode 0600) unless another mode
# is asked for.

EVERY = 15.0
"""Seconds after which the file is written anew."""
Metric: TypeAlias = tuple[str, str, str, float | None]


def exposition(standing: SiteStatus, busy: float | None, free: int | None) -> str:
    """Write metrics of a site: `busy` seconds of work since its service began, `free` bytes on its disk."""
    lines = []
    label = f'site="{_escaped(standing.site)}"'
    for name, kind, what, value in _metrics(standing, busy, free):
        if value is not None:
            reported = f'{label},transport="{standing.transport}",version="{_escaped(standing.installed)}"'
            labels = reported if name == "fedstat_build_info" else label
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value!r}"]
    return "\n".join(lines) + "\n"


def write_metrics(path: Path, mode: int, standing: SiteStatus, folder: Path, busy: float | None) -> None:
    """Write the file whole; a disk without room keeps the earlier one, whose time tells of it."""
    with suppress(OSError):
        text = exposition(standing, busy, shutil.disk_usage(folder).free)
        write_atomic(path, text.encode(), mode)


def _metrics(standing: SiteStatus, busy: float | None, free: int | None) -> Iterator[Metric]:
    yield "fedstat_build_info", "gauge", "Version of the package and transport of the site.", 1
    answers = int(standing.is_served and not standing.problem and standing.site_ledger == "whole")
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


# ----------------------------------------------------------------------------------------------------
# A site that runs: it answers until it is told to stop, and says how it is.

POLL = 0.05
ORDERLY = "stopped"


@dataclass(slots=True)
class Service:
    """One process that serves a site; with `once` it ends when no question waits."""

    folder: Path
    site: SignedSite
    once: bool
    log: Callable[[str], None]
    metrics: Callable[[SiteStatus, float | None], None]
    began: str = field(default_factory=utc_now)
    busy: float = 0.0
    passed_over: int = 0
    stop_requested: bool = False
    _looks: int = 0
    _reported: tuple[int, int] = (-1, -1)
    _beaten: float = 0.0
    _measured: float = -EVERY

    def run(self, poll: float) -> None:
        """Answer until told to stop, by what the owner's files say then."""
        inbox, pace = self._inbox(), Backoff(poll)
        while not self._stop():
            busy = False
            try:
                if self.site.heed():
                    inbox = self._inbox()
                since = time.monotonic()
                busy = inbox.look(self.site)
                self.busy += (time.monotonic() - since) * busy
            except ClosedError:  # its log has the reason, and what waits is answered later
                inbox.say_closed(self.site)
            pace.rest(busy)

    def _inbox(self) -> Inbox | BucketInbox:
        flare_commands.require_coordinator(self.folder, self.site.description)
        return _open_inbox(self.site.description.exchange, self.site.site.name, self._refused)

    def stop(self, number: int, frame: Any) -> None:
        """Finish the present question, then end."""
        self.stop_requested = True

    def _stop(self) -> bool:
        self._looks += 1
        self._report()
        # the first look answers all that waits
        done = self.once and self._looks > 1
        return self.stop_requested or done

    def _refused(self, why: str) -> None:
        self.passed_over += 1
        self.log(f"passed over: {why}")

    def _report(self) -> None:
        """Write how it is, where that changed."""
        count = (sum(len(chain.entries) for chain in self.site.site.site_ledger.chains), self.passed_over)
        if count != self._reported:
            self._reported = count
            self.report("running")
        if time.monotonic() - self._beaten > BEAT:
            self._beaten = time.monotonic()
            write_heartbeat(self.folder)
        if time.monotonic() - self._measured > EVERY:
            self._measured = time.monotonic()
            self.metrics(show_site_json(self.folder, self.site.site.site_ledger), self.busy)

    def report(self, state: str) -> None:
        """Write the status file."""
        reported = {"passed over": self.passed_over} | describe_counts(self.site.site.site_ledger)
        write_status(self.folder, state, self.site.site.name, self.began, reported)


def _open_inbox(exchange: str, name: str, refused: Callable[[str], None]) -> Inbox | BucketInbox:
    """Open a site's end of a folder or of a bucket."""
    if is_bucket(exchange):
        return BucketInbox(open_bucket(exchange).at(name), refused)
    return Inbox(SiteMailbox(Path(exchange, name)), refused)


def serve_site_folder(
    folder: Path,
    once: bool,
    poll: float,
    metrics: Path | None = None,
    metrics_mode: int = 0o600,
    log: Path | None = None,
    log_megabytes: float = 10.0,
    log_count: int = 5,
) -> int:
    """Serve a site until SIGTERM or SIGINT, over a folder or over NVIDIA FLARE."""

    def measure(found: SiteStatus, busy: float | None) -> None:
        if metrics is not None:
            write_metrics(metrics, metrics_mode, found, folder, busy)

    if metrics is not None and not metrics.parent.is_dir():
        raise PartitionError(f"there is no folder '{metrics.parent}' for the file of metrics")
    if flare_commands.uses_flare(folder):
        if log is not None:
            raise PartitionError(
                f"over NVIDIA FLARE the log is '{folder / FLARE / LOG}', which is appended to: have "
                "logrotate cut it by copytruncate"
            )
        if metrics is not None:
            Thread(target=_measure_flare, args=(folder, measure), daemon=True).start()
        return flare_commands.serve_site(folder)
    description = read_description(folder)
    if not description.exchange:
        raise PartitionError(
            f"'{folder / DESCRIPTION}' names no folder for questions and answers; write it under 'exchange', "
            f"or join a kit for NVIDIA FLARE with 'fedstat site join-kit {shell_path(folder)} KIT'"
        )
    take = log_to(log, log_megabytes, log_count)

    def report(line: str) -> None:
        take(f"{utc_now()} {line}")

    service = Service(folder, SignedSite(folder, report=report), once, report, measure)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, service.stop)
    said = f"{utc_now()} {description.name} answers in '{description.exchange}' (process {os.getpid()})"
    print(said, flush=True) if log is None else take(said)
    state = "failed"
    try:
        service.run(poll)
        state = ORDERLY
    finally:
        service.report(state)
        measure(replace(show_site_json(folder, service.site.site.site_ledger), is_served=False), service.busy)
    said = f"{utc_now()} {description.name} {ORDERLY}; its ledger goes on when it is started again"
    print(said, flush=True) if log is None else take(said)
    return 0


def _measure_flare(folder: Path, measure: Callable[[SiteStatus, float | None], None]) -> None:
    """Write metrics of a site whose questions another process answers; its account is read from the file."""
    while True:
        with suppress(FedstatError, OSError):
            measure(show_site_json(folder), None)
        time.sleep(EVERY)


def show_site_status(folder: Path, as_json: bool = False) -> int:
    """Show whether a site is served, over a folder or over NVIDIA FLARE, and what it has done."""
    if as_json:
        found = show_site_json(folder)
        print(json.dumps(to_plain(found), indent=2))
        return 0 if found.is_served else 1
    return show_status(*_status(folder))


def serve_owner_page(folder: Path, port: int, in_browser: bool) -> int:
    """Serve the owner's page on this machine until SIGTERM or Ctrl-C."""
    return serve_page(owner_view(folder), port, in_browser)


def owner_view(folder: Path) -> OwnerView:
    """Read a site as its owner's page does."""
    return OwnerView(folder, lambda place: _status(place)[0], examine_site)


def _status(folder: Path) -> tuple[dict[str, Any], bool]:
    if flare_commands.uses_flare(folder):
        return flare_commands.show_flare_site_status(folder)
    return read_service_status(folder, folder, ledger_is_held, lambda site: _left_to_do(folder, site))


def show_site_json(folder: Path, site_ledger: SiteLedger | None = None) -> SiteStatus:
    """Read how a site stands, whatever carries its questions, for programs; its account unless given."""
    site, plans = read_description(folder), len(plan_folder(folder).waiting())
    if flare_commands.uses_flare(folder):
        home, days = folder / FLARE, days_left(folder / FLARE / KIT)
        return read_site_status(folder, home, FLARE, site.name, is_running(home), (None, plans), days)
    # not known of a bucket, which is not asked for the sake of a figure
    waiting = None if is_bucket(site.exchange) else _waiting(site.exchange, site.name)
    counted = (waiting if isinstance(waiting, int) else None), plans
    transport = "bucket" if is_bucket(site.exchange) else "folder"
    served = site_ledger is not None or ledger_is_held(folder)
    return read_site_status(folder, folder, transport, site.name, served, counted, None, site_ledger)


def show_health(folder: Path, patience: float) -> int:
    """Say in one line whether a site is served and can answer."""
    description = read_description(folder)
    home = folder / FLARE if flare_commands.uses_flare(folder) else folder
    problem = health_problem(show_site_json(folder), folder, heartbeat_age(home), patience)
    print(f"{description.name}: {problem or 'is served, and can answer'}")
    return 1 if problem else 0


def _left_to_do(folder: Path, site: SiteDescription) -> dict[str, int | str]:
    """Count what waits for the site, and what for its owner; how its privacy budget stands."""
    return {
        **describe_budget(folder, site.name),
        "waiting": _waiting(site.exchange, site.name),
        "plans waiting for consent": len(plan_folder(folder).waiting()),
    }


def _waiting(exchange: str, name: str) -> int | str:
    """Count the questions without an answer."""
    if not exchange:
        return 0
    if is_bucket(exchange):
        return "not counted in a bucket"
    try:
        return len(SiteMailbox(Path(exchange, name)).open_numbers()[0])
    except OSError as error:
        return 0 if isinstance(error, FileNotFoundError) else f"not known ({error.strerror})"
