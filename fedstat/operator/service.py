"""The service of a site: it answers requests until it is stopped, with log, health check and metrics."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

from fedstat.codec import to_plain
from fedstat.errors import FedstatError, PartitionError, Remedy
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.disclosure.site import installed_families
from fedstat.federation.files import LOCKS, lock_file, write_atomic
from fedstat.federation.transport.bucket import BucketInbox, open_bucket
from fedstat.federation.transport.flare.provision import FLARE, KIT, days_left
from fedstat.federation.transport.live_config import ClosedError, full_disk
from fedstat.federation.transport.mailbox import Backoff, Inbox, SiteMailbox, is_bucket, show_alive
from fedstat.federation.transport.signed import SignedSite
from fedstat.federation.transport.site_folder import (
    DESCRIPTION,
    REFUSALS,
    SiteDescription,
    mode_problems,
    read_description,
    read_site_policy,
    table_folders,
)
from fedstat.kernels.compiled import compiled_families, list_path
from fedstat.operator import federation_commands, flare_commands
from fedstat.operator.disclosure_commands import plan_folder
from fedstat.operator.flare_process import LOG, is_running
from fedstat.operator.page.federation_view import FederationView
from fedstat.operator.page.owner_view import OwnerView
from fedstat.operator.page.server import serve_page
from fedstat.operator.site_commands import check_tables, examine_site
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
# The log of a service: standard error, or files of a size and a number that the owner chooses.

MEGABYTE = 10**6


class PrivateLog(RotatingFileHandler):
    """Log files that only the owner may read (mode 0600); the current one has no number."""

    def _open(self) -> Any:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)

        return open(self.baseFilename, self.mode, encoding="utf-8", opener=opener)


def log_to(path: Path | None, megabytes: float, count: int) -> Callable[[str], None]:
    """Return the function that logs a line; `count` older files of at most `megabytes` are kept."""
    if path is None:
        return lambda line: print(line, file=sys.stderr, flush=True)
    handler = PrivateLog(path, maxBytes=max(1, int(megabytes * MEGABYTE)), backupCount=count)
    logger = logging.Logger("fedstat.service")  # a logger of its own: no library writes to it
    logger.addHandler(handler)
    return logger.info


# ----------------------------------------------------------------------------------------------------
# Whether a site is running and can answer, in one line for monitors.

DAY, CLOCK = 86_400.0, 60.0
"""Seconds of a day, and of a change of the clock that is reported."""


def health_problem(standing: SiteStatus, folder: Path, age: float | None, patience: float) -> str:
    """Return why a site cannot answer, or an empty text; its service was seen `age` seconds ago."""
    if not standing.is_served:
        return f"is not running ({standing.state}{': ' if standing.problem else ''}{standing.problem})"
    if age is not None and (age < -CLOCK or age > DAY):
        when = f"{abs(age) / DAY:.1f} days {'from now' if age < 0 else 'ago'}"
        return (
            "the clock of this machine was set, or the service hangs: by the clock, it was seen last "
            f"{when}. Correct the clock, and restart the service"
        )
    if age is None or age > patience:
        seen = "never seen" if age is None else f"seen {age:.0f} s ago"
        return f"the service hangs: it was {seen}, and one request may take {patience:g} s"
    if full := full_disk(folder):
        return full
    try:
        read_site_policy(folder)
    except FedstatError as error:
        return f"the policy cannot be read: {error}"
    for problem in mode_problems(folder):
        return problem
    if standing.site_ledger != "complete":
        return standing.site_ledger
    if standing.exchange_problem:
        return standing.exchange_problem
    if standing.refusals_left == 0:
        return (
            "a coordinator gets no more answers: too many of its requests were refused for reasons that "
            f"depend on the data. Read '{folder / REFUSALS}', stop the service, and reset the count with  "
            f"fedstat site answer-again {shell_path(folder)}"
        )
    if standing.connected is False:
        return "there is no connection to the server"
    if standing.certificate_days is not None and standing.certificate_days < 0:
        return "the certificate has expired"
    return standing.problem or (standing.reload_problem and f"answers, but {standing.reload_problem}")


# ----------------------------------------------------------------------------------------------------
# Counts of a service in Prometheus' text format (version 0.0.4), for node_exporter's textfile collector.
#
# No value depends on rows beyond the content of the site's own ledger: counts of requests and refusals,
# times,
# disk space. There are no names of columns, no texts of rules and no numbers of rows. Seconds of work do
# depend
# on rows, but a client can measure them as well. Only the owner may read the file (mode 0600), unless the
# owner
# chooses another mode.

EVERY = 15.0
"""Number of seconds after which the file is written again."""
Metric: TypeAlias = tuple[str, str, str, float | None]


def exposition(standing: SiteStatus, busy: float | None, free: int | None) -> str:
    """Write metrics of a site: `busy` seconds of work since the service began, `free` bytes on its disk."""
    lines = []
    label = f'site="{_escaped(standing.site)}"'
    for name, kind, what, value in _metrics(standing, busy, free):
        if value is not None:
            reported = f'{label},transport="{standing.transport}",version="{_escaped(standing.installed)}"'
            labels = reported if name == "fedstat_build_info" else label
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value!r}"]
    return "\n".join(lines) + "\n"


def write_metrics(path: Path, mode: int, standing: SiteStatus, folder: Path, busy: float | None) -> None:
    """Write the complete file; on a full disk, the earlier one stays, as its time shows."""
    with suppress(OSError):
        text = exposition(standing, busy, shutil.disk_usage(folder).free)
        write_atomic(path, text.encode(), mode)


def _metrics(standing: SiteStatus, busy: float | None, free: int | None) -> Iterator[Metric]:
    yield "fedstat_build_info", "gauge", "Version of the package and transport of the site.", 1
    answers = int(standing.is_served and not standing.problem and standing.site_ledger == "complete")
    yield "fedstat_answers", "gauge", "Whether the service can answer.", answers
    yield "fedstat_requests_total", "counter", "Number of requests answered.", standing.requests
    yield "fedstat_refused_total", "counter", "Number of requests refused.", standing.refused
    yield "fedstat_sessions_total", "counter", "Number of sessions opened.", standing.sessions
    yield "fedstat_arrays_released_total", "counter", "Number of arrays released.", standing.arrays_released
    yield "fedstat_ledger_entries_total", "counter", "Number of entries of the ledger.", standing.entries
    yield "fedstat_waiting_requests", "gauge", "Number of requests without a reply.", standing.waiting
    yield "fedstat_waiting_plans", "gauge", "Number of plans that wait for approval.", standing.plans_waiting
    yield "fedstat_busy_seconds_total", "counter", "Seconds of work since the service began.", busy
    began, last = _seconds(standing.since), _seconds(standing.last_request)
    yield "fedstat_start_time_seconds", "gauge", "Time at which the service began.", began
    yield "fedstat_last_request_time_seconds", "gauge", "Time of the last entry for a request.", last
    budget = standing.budget
    left = None if budget is None else budget.share_left
    yield "fedstat_budget_left_ratio", "gauge", "Share of the privacy budget that is left.", left
    yield (
        "fedstat_certificate_days",
        "gauge",
        "Days until the certificate expires.",
        standing.certificate_days,
    )
    yield "fedstat_disk_free_bytes", "gauge", "Free space on the disk of the site's folder.", free
    yield (
        "fedstat_written_time_seconds",
        "gauge",
        "Time at which this file was written.",
        round(time.time(), 3),
    )


def _seconds(when: str | None) -> float | None:
    """Convert a time in UTC, as in the ledger, to seconds since 1970."""
    try:
        found = datetime.fromisoformat(str(when))
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ----------------------------------------------------------------------------------------------------
# A running site: it answers requests until it is stopped, and writes its status.

POLL = 0.05
ORDERLY = "stopped"


@dataclass(slots=True)
class Service:
    """One table of a site that a process serves; with `once` it ends when no request is waiting."""

    folder: Path
    site: SignedSite
    once: bool
    log: Callable[[str], None]
    metrics: Callable[[SiteStatus, float | None], None]
    began: str = field(default_factory=utc_now)
    busy: float = 0.0
    passed_over: int = 0
    _inboxes: list[Inbox | BucketInbox] = field(default_factory=list)
    _looks: int = 0
    _reported: tuple[int, int] = (-1, -1)
    _beaten: float = 0.0
    _clock: float = field(default_factory=lambda: time.time() - time.monotonic())
    _notices: dict[str, str] = field(default_factory=dict)
    _measured: float = -EVERY

    def poll(self) -> bool:
        """Answer the waiting requests of all studies, under the current files of the owner."""
        busy = False
        try:
            if self.site.reload_if_changed():
                self.open()
            since = time.monotonic()
            for inbox in self._inboxes:
                busy |= inbox.poll(self.site)
            self.busy += (time.monotonic() - since) * busy
        except ClosedError:  # the log has the reason, and waiting requests are answered later
            for inbox in self._inboxes:
                inbox.say_closed(self.site)
        return busy

    def open(self) -> None:
        """Open the folders or buckets of all studies."""
        description = self.site.description
        flare_commands.require_coordinator(self.folder, description)
        name = self.site.site.name
        days = description.message_days
        self._inboxes = [_open_inbox(one, name, self._refused, days) for one in description.exchanges]

    def stop(self) -> bool:
        """Report what was done, and return whether the service has answered all that it should."""
        self._looks += 1
        self._report()
        # the first pass answers all waiting requests
        return self.once and self._looks > 1

    def _refused(self, why: str) -> None:
        self.passed_over += 1
        self.log(f"passed over: {why}")

    def _report(self) -> None:
        """Write the status if it has changed."""
        count = (sum(len(chain.entries) for chain in self.site.site.site_ledger.chains), self.passed_over)
        if count != self._reported:
            self._reported = count
            self.report("running")
        # not before the first look, which makes the folders of an exchange
        if self._looks > 1 and time.monotonic() - self._beaten > BEAT:
            self._beaten = time.monotonic()
            write_heartbeat(self.folder)
            self._notice("exchange problem", self._exchange_problem())
            self._notice("ledger", self.site.site.site_ledger.disputed)
            self._watch_clock()
        if time.monotonic() - self._measured > EVERY:
            self._measured = time.monotonic()
            self.metrics(show_site_json(self.folder, self.site.site.site_ledger), self.busy)

    def _exchange_problem(self) -> str:
        """Show in the folders for requests and replies that the service runs; return why this fails."""
        for exchange in self.site.description.exchanges:
            if not is_bucket(exchange) and (why := show_alive(Path(exchange), self.site.site.name)):
                return f"the folder for requests and replies, '{exchange}', cannot be written ({why})"
        return ""

    def _watch_clock(self) -> None:
        """Notice that the clock of the machine was set: later times cannot be compared with earlier ones."""
        offset = time.time() - time.monotonic()
        if abs(offset - self._clock) > CLOCK:
            days, way = abs(offset - self._clock) / DAY, "forward" if offset > self._clock else "back"
            self._clock = offset
            self._notice(
                "clock", f"the clock of this machine was set {way} by {days:.2f} days at {utc_now()}"
            )

    def _notice(self, what: str, text: str) -> None:
        """Write a state that has changed into log and status."""
        if text != self._notices.get(what, ""):
            self._notices[what] = text
            self.log(text or f"{what}: none any more")
            self.report("running")

    def report(self, state: str) -> None:
        """Write the status file."""
        reported = {"passed over": self.passed_over} | describe_counts(self.site.site.site_ledger)
        reported |= {what: text for what, text in self._notices.items() if text}
        write_status(self.folder, state, self.site.site.name, self.began, reported)


def run_services(services: Sequence[Service], poll: float) -> None:
    """Serve all tables of a site in turn, until SIGTERM or SIGINT; the present request is completed."""
    stopping = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for service in services:
        service.open()
    pace = Backoff(poll)
    while not (sum(service.stop() for service in services) or stopping):
        pace.rest(sum(service.poll() for service in services) > 0)


# ----------------------------------------------------------------------------------------------------
# Loops are compiled once on a machine, which may take a minute for all families. A site does not wait for it:
# a monitor would restart it, and most requests need no such loop. A process of its own compiles, because
# numba would hold the lock of the interpreter in which requests are answered.

WARM_UP = "fedstat.warm_up"
"""Module that compiles, by name, because it imports the models."""
LOW_PRIORITY = 10


@contextmanager
def compiling(
    folders: Iterable[Path], report: Callable[[str], None]
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Compile the loops of the families that the policies allow, unless this machine has done so before.

    A request that comes earlier compiles what it needs. Where numba keeps nothing (a folder that cannot be
    written) or another site compiles, there is no process.
    """
    allowed = [read_site_policy(folder).families for folder in folders]
    served = [family for family in installed_families() if any(a is None or family in a for a in allowed)]
    missing = sorted(set(served) - compiled_families())
    with _turn_to_compile() if missing else nullcontext() as held:
        if held is None:
            yield None
            return
        report(f"compiles loops of {', '.join(missing)}, once on this machine; requests are answered")
        process = subprocess.Popen(
            [sys.executable, "-m", WARM_UP, *missing],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=held,
        )
        with suppress(AttributeError, OSError):  # a system without priorities
            os.setpriority(os.PRIO_PROCESS, process.pid, LOW_PRIORITY)
        Thread(target=_await_compiled, args=(process, time.monotonic(), report), daemon=True).start()
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@contextmanager
def _turn_to_compile() -> Iterator[tuple[int, ...] | None]:
    """Hold the lock of those who compile; None where another has it, or the folder cannot be written.

    The process that compiles gets its descriptors and holds it as well, also when the site has been killed.
    """
    lock = list_path().with_name("compiling.lock")
    with ExitStack() as stack:
        held = None
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(lock, "ab"))
            held = ((file.fileno(),) if LOCKS else ()) if lock_file(file) else None
        yield held


def _await_compiled(process: subprocess.Popen[bytes], since: float, report: Callable[[str], None]) -> None:
    """Report the end of compiling; a service that stops earlier has ended the process."""
    if (code := process.wait()) == 0:
        report(f"compiled in {time.monotonic() - since:.0f} s")
    elif code != -signal.SIGTERM:
        report(
            f"compiling ended with exit code {code}; a request compiles what it needs. For the reason:  "
            f"python -m {WARM_UP}"
        )


def _open_inbox(
    exchange: str, name: str, refused: Callable[[str], None], keep_days: float
) -> Inbox | BucketInbox:
    """Open the folder or the bucket of a site."""
    if is_bucket(exchange):
        return BucketInbox(open_bucket(exchange).at(name), refused)
    return Inbox(SiteMailbox(Path(exchange, name)), refused, keep_days)


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
    """Run a site until SIGTERM or SIGINT, over a folder or over NVIDIA FLARE."""

    def measure(found: SiteStatus, busy: float | None, table: str = "") -> None:
        if metrics is not None:
            path = metrics.with_stem(f"{metrics.stem}-{table}") if table else metrics
            found = replace(found, site=f"{found.site}/{table}") if table else found
            write_metrics(path, metrics_mode, found, folder, busy)

    if metrics is not None and not metrics.parent.is_dir():
        raise PartitionError(f"the folder '{metrics.parent}' for the file of metrics does not exist")
    if flare_commands.uses_flare(folder):
        if log is not None:
            raise PartitionError(
                f"over NVIDIA FLARE the log is '{folder / FLARE / LOG}', and lines are appended to it: use "
                "logrotate with copytruncate"
            )
        if metrics is not None:
            Thread(target=_measure_flare, args=(folder, measure), daemon=True).start()
        with compiling([folder], lambda line: print(f"{utc_now()} {line}", file=sys.stderr, flush=True)):
            return flare_commands.serve_site(folder)
    folders, description = table_folders(folder), read_description(folder)
    check_tables(folders)
    if lacking := [place for place in folders.values() if not read_description(place).exchanges]:
        raise PartitionError(
            f"'{lacking[0] / DESCRIPTION}' has no folder for requests and replies; write it under 'exchange'",
            remedy=Remedy(
                "fedstat site join-kit {folder} KIT", ", or join a kit for NVIDIA FLARE with '{call}'"
            ).filled(folder=shell_path(folder)),
        )
    take = log_to(log, log_megabytes, log_count)

    def report(line: str) -> None:
        take(f"{utc_now()} {line}")

    services = [
        Service(place, _start(place, description.name, report), once, report, partial(measure, table=name))
        for name, place in folders.items()
    ]
    places = "', '".join(dict.fromkeys(one for s in services for one in s.site.description.exchanges))
    said = f"{utc_now()} {description.name} answers requests in '{places}' (process {os.getpid()})"
    print(said, flush=True) if log is None else take(said)
    state = "failed"
    try:
        with compiling([] if once else folders.values(), report):
            run_services(services, poll)
        state = ORDERLY
    finally:
        for service in services:
            service.report(state)
            found = show_site_json(service.folder, service.site.site.site_ledger)
            service.metrics(replace(found, is_served=False), service.busy)
    said = f"{utc_now()} {description.name} {ORDERLY}; its ledger continues at the next start"
    print(said, flush=True) if log is None else take(said)
    return 0


def _start(folder: Path, name: str, report: Callable[[str], None]) -> SignedSite:
    """Open a site; if it cannot be opened, the status says why."""
    try:
        return SignedSite(folder, report=report)
    except (FedstatError, OSError, ImportError) as error:
        if not ledger_is_held(folder):  # else the status is that of the process that serves it
            write_status(folder, "failed", name, utc_now(), {"problem": str(error)})
        raise


def _measure_flare(folder: Path, measure: Callable[[SiteStatus, float | None], None]) -> None:
    """Write metrics of a site that runs in another process; the ledger is read from its file."""
    while True:
        with suppress(FedstatError, OSError):
            measure(show_site_json(folder), None)
        time.sleep(EVERY)


def show_site_status(folder: Path, as_json: bool = False) -> int:
    """Show whether a site is running, over a folder or over NVIDIA FLARE, and what it has done."""
    if as_json:
        found = show_site_json(folder)
        print(json.dumps(to_plain(found), indent=2))
        return 0 if found.is_served else 1
    return show_status(*_status(folder))


def serve_owner_page(folder: Path, port: int, in_browser: bool) -> int:
    """Serve the owner's page on this machine until SIGTERM or Ctrl-C."""
    return serve_page(owner_view(folder), port, in_browser)


def serve_federation_page(folder: Path, port: int, in_browser: bool) -> int:
    """Serve the coordinator's page on this machine until SIGTERM or Ctrl-C."""
    view = FederationView(folder, federation_commands.federation_status, federation_commands.test_sites)
    return serve_page(view, port, in_browser)


def owner_view(folder: Path) -> OwnerView:
    """Read a site for the owner's page."""
    return OwnerView(folder, lambda place: _status(place)[0], examine_site)


def _status(folder: Path) -> tuple[dict[str, Any], bool]:
    if flare_commands.uses_flare(folder):
        return flare_commands.show_flare_site_status(folder)
    return read_service_status(folder, folder, ledger_is_held, lambda site: _left_to_do(folder, site))


def show_site_json(folder: Path, site_ledger: SiteLedger | None = None) -> SiteStatus:
    """Read the status of a site, for any transport; the ledger is read unless it is given."""
    site, plans = read_description(folder), len(plan_folder(folder).waiting())
    if flare_commands.uses_flare(folder):
        home, days = folder / FLARE, days_left(folder / FLARE / KIT)
        return read_site_status(folder, home, FLARE, site.name, is_running(home), (None, plans), days)
    # not known for a bucket: a status sends no requests to it
    waiting = _waiting_at(site)
    counted = (waiting if isinstance(waiting, int) else None), plans
    transport = "bucket" if is_bucket(site.exchange) else "folder"
    served = site_ledger is not None or ledger_is_held(folder)
    return read_site_status(folder, folder, transport, site.name, served, counted, None, site_ledger)


def show_health(folder: Path, patience: float) -> int:
    """Print in one line whether a site is running and can answer."""
    description = read_description(folder)
    home = folder / FLARE if flare_commands.uses_flare(folder) else folder
    problem = health_problem(show_site_json(folder), folder, heartbeat_age(home), patience)
    print(f"{description.name}: {problem or 'is running and can answer'}")
    return 1 if problem else 0


def _left_to_do(folder: Path, site: SiteDescription) -> dict[str, int | str]:
    """Count the waiting requests and plans, and read the state of the privacy budget."""
    return {
        **describe_budget(folder, site.name),
        "waiting": _waiting_at(site),
        "plans waiting for approval": len(plan_folder(folder).waiting()),
    }


def _waiting_at(site: SiteDescription) -> int | str:
    """Count the requests without a reply of all studies."""
    found = [_waiting(exchange, site.name) for exchange in site.exchanges]
    return next(
        (one for one in found if isinstance(one, str)), sum(one for one in found if isinstance(one, int))
    )


def _waiting(exchange: str, name: str) -> int | str:
    """Count the requests without a reply."""
    if not exchange:
        return 0
    if is_bucket(exchange):
        return "not counted in a bucket"
    try:
        return len(SiteMailbox(Path(exchange, name)).open_numbers()[0])
    except OSError as error:
        return 0 if isinstance(error, FileNotFoundError) else f"not known ({error.strerror})"
