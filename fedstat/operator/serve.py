"""A site that runs: it answers until it is told to stop, and says how it is."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

from fedstat.errors import FedstatError, PartitionError
from fedstat.federation.account.chain import SiteAccount
from fedstat.federation.carry.bucket.inbox import BucketInbox
from fedstat.federation.carry.bucket.store import open_bucket
from fedstat.federation.carry.exchange.inbox import Inbox
from fedstat.federation.carry.exchange.part import Pace, SitesPart, is_bucket
from fedstat.federation.carry.flare.kit import FLARE, KIT
from fedstat.federation.carry.flare.provision import days_left
from fedstat.federation.carry.in_force import ClosedError
from fedstat.federation.carry.signed import SignedSite
from fedstat.federation.carry.site_folder import DESCRIPTION, SiteDescription, read_description
from fedstat.operator import flare_commands
from fedstat.operator.description_commands import plan_folder
from fedstat.operator.page.owner import OwnerView
from fedstat.operator.page.server import serve_page
from fedstat.operator.participant import LOG, is_running
from fedstat.operator.running.health import ailing
from fedstat.operator.running.metrics import EVERY, write_metrics
from fedstat.operator.running.service_log import log_to
from fedstat.operator.running.standing import BEAT, Standing, beat, beaten, standing_of
from fedstat.operator.site_commands import examined
from fedstat.operator.status import budget, counts, is_served, now, read_status, show_status, write_status
from fedstat.operator.writing.screen import typed
from fedstat.records import to_plain

POLL = 0.05
ORDERLY = "stopped"


@dataclass(slots=True)
class Service:
    """One process that serves a site; with `once` it ends when no question waits."""

    folder: Path
    site: SignedSite
    once: bool
    log: Callable[[str], None]
    metrics: Callable[[Standing, float | None], None]
    began: str = field(default_factory=now)
    busy: float = 0.0
    passed_over: int = 0
    asked_to_stop: bool = False
    _looks: int = 0
    _told: tuple[int, int] = (-1, -1)
    _beaten: float = 0.0
    _measured: float = -EVERY

    def run(self, poll: float) -> None:
        """Answer until told to stop, by what the owner's files say then."""
        inbox, pace = self._inbox(), Pace(poll)
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
        self.asked_to_stop = True

    def _stop(self) -> bool:
        self._looks += 1
        self._tell()
        # the first look answers all that waits
        done = self.once and self._looks > 1
        return self.asked_to_stop or done

    def _refused(self, why: str) -> None:
        self.passed_over += 1
        self.log(f"passed over: {why}")

    def _tell(self) -> None:
        """Write how it is, where that changed."""
        count = (sum(len(chain.links) for chain in self.site.site.account.chains), self.passed_over)
        if count != self._told:
            self._told = count
            self.tell("running")
        if time.monotonic() - self._beaten > BEAT:
            self._beaten = time.monotonic()
            beat(self.folder)
        if time.monotonic() - self._measured > EVERY:
            self._measured = time.monotonic()
            self.metrics(standing(self.folder, self.site.site.account), self.busy)

    def tell(self, state: str) -> None:
        """Write the status file."""
        told = {"passed over": self.passed_over} | counts(self.site.site.account)
        write_status(self.folder, state, self.site.site.name, self.began, told)


def _open_inbox(exchange: str, name: str, refused: Callable[[str], None]) -> Inbox | BucketInbox:
    """Open a site's end of a folder or of a bucket."""
    if is_bucket(exchange):
        return BucketInbox(open_bucket(exchange).at(name), refused)
    return Inbox(SitesPart(Path(exchange, name)), refused)


def serve(
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

    def measure(found: Standing, busy: float | None) -> None:
        if metrics is not None:
            write_metrics(metrics, metrics_mode, found, folder, busy)

    if metrics is not None and not metrics.parent.is_dir():
        raise PartitionError(f"there is no folder '{metrics.parent}' for the file of metrics")
    if flare_commands.is_carried(folder):
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
            f"or join a kit for NVIDIA FLARE with 'fedstat site join-kit {typed(folder)} KIT'"
        )
    take = log_to(log, log_megabytes, log_count)

    def tell(line: str) -> None:
        take(f"{now()} {line}")

    service = Service(folder, SignedSite(folder, tell=tell), once, tell, measure)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, service.stop)
    said = f"{now()} {description.name} answers in '{description.exchange}' (process {os.getpid()})"
    print(said, flush=True) if log is None else take(said)
    state = "failed"
    try:
        service.run(poll)
        state = ORDERLY
    finally:
        service.tell(state)
        measure(replace(standing(folder, service.site.site.account), is_served=False), service.busy)
    said = f"{now()} {description.name} {ORDERLY}; its ledger goes on when it is started again"
    print(said, flush=True) if log is None else take(said)
    return 0


def _measure_flare(folder: Path, measure: Callable[[Standing, float | None], None]) -> None:
    """Write metrics of a site whose questions another process answers; its account is read from the file."""
    while True:
        with suppress(FedstatError, OSError):
            measure(standing(folder), None)
        time.sleep(EVERY)


def status(folder: Path, as_json: bool = False) -> int:
    """Show whether a site is served, over a folder or over NVIDIA FLARE, and what it has done."""
    if as_json:
        found = standing(folder)
        print(json.dumps(to_plain(found), indent=2))
        return 0 if found.is_served else 1
    return show_status(*_status(folder))


def page(folder: Path, port: int, in_browser: bool) -> int:
    """Serve the owner's page on this machine until SIGTERM or Ctrl-C."""
    return serve_page(owner_view(folder), port, in_browser)


def owner_view(folder: Path) -> OwnerView:
    """Read a site as its owner's page does."""
    return OwnerView(folder, lambda place: _status(place)[0], examined)


def _status(folder: Path) -> tuple[dict[str, Any], bool]:
    if flare_commands.is_carried(folder):
        return flare_commands.site_status(folder)
    return read_status(folder, folder, is_served, lambda site: _left_to_do(folder, site))


def standing(folder: Path, account: SiteAccount | None = None) -> Standing:
    """Read how a site stands, whatever carries its questions, for programs; its account unless given."""
    site, plans = read_description(folder), len(plan_folder(folder).waiting())
    if flare_commands.is_carried(folder):
        home, days = folder / FLARE, days_left(folder / FLARE / KIT)
        return standing_of(folder, home, FLARE, site.name, is_running(home), (None, plans), days)
    # not known of a bucket, which is not asked for the sake of a figure
    waiting = None if is_bucket(site.exchange) else _waiting(site.exchange, site.name)
    counted = (waiting if isinstance(waiting, int) else None), plans
    carrier = "bucket" if is_bucket(site.exchange) else "folder"
    served = account is not None or is_served(folder)
    return standing_of(folder, folder, carrier, site.name, served, counted, None, account)


def health(folder: Path, patience: float) -> int:
    """Say in one line whether a site is served and can answer."""
    description = read_description(folder)
    home = folder / FLARE if flare_commands.is_carried(folder) else folder
    problem = ailing(standing(folder), folder, beaten(home), patience)
    print(f"{description.name}: {problem or 'is served, and can answer'}")
    return 1 if problem else 0


def _left_to_do(folder: Path, site: SiteDescription) -> dict[str, int | str]:
    """Count what waits for the site, and what for its owner; how its privacy budget stands."""
    return {
        **budget(folder, site.name),
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
        return len(SitesPart(Path(exchange, name)).open_numbers()[0])
    except OSError as error:
        return 0 if isinstance(error, FileNotFoundError) else f"not known ({error.strerror})"
