"""Faults of real processes and disks, over a folder: killed, frozen, cut off, full, two at once."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from copy import copy
from pathlib import Path

import numpy as np
import pytest
from faulty import analysis, patients, rows
from forked import Forked
from operating import make_federation, serve, wait

import fedstat as fs
from fedstat.errors import EngineError
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.transport.folder import FolderTransport, serve_folder
from fedstat.federation.transport.mailbox import SiteMailbox
from fedstat.federation.transport.remote import RemoteSite
from fedstat.federation.transport.site_folder import load_identity

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")

SITES = ("A", "B", "C")


class Federation:
    """Three sites, each served by the command in a process of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        frames = {name: frame.drop(columns="h") for name, frame in patients().groupby("h")}
        self.study = make_federation(home, frames)
        self.running = {name: serve(home / name) for name in SITES}
        for name, process in self.running.items():
            wait(home / name, process)

    def connect(self, journal: Path | None = None, seconds: float = 600, **given) -> fs.ClientPartition:
        path = self.study / "federation.toml"
        text = path.read_text()
        try:
            path.write_text(text.replace("timeout = 3600", f"timeout = {seconds}"))
            return fs.ClientPartition.connect(path, journal=journal, **given)
        finally:
            path.write_text(text)

    def site_ledger(self, site: str, session: str) -> list:
        """Lines of the site's file for a session; every line is compared with the chain."""
        site_ledger = read_ledger(self.home / site, site, load_identity(self.home / site).public)
        (found,) = [
            [entry.in_round(entry.round) for entry in c.entries]
            for c in site_ledger.chains
            if c.session == session
        ]
        return rows(found)

    def start_again(self, site: str) -> None:
        self.running[site].wait()
        self.running[site] = serve(self.home / site)
        wait(self.home / site, self.running[site])

    def assert_same(self, result, expected) -> None:
        receipt = result.receipt()
        np.testing.assert_array_equal(result.params, expected.params)
        assert rows(receipt.passed) == rows(expected.receipt().passed)
        for site in SITES:
            assert self.site_ledger(site, receipt.session) == self.site_ledger(
                site, expected.receipt().session
            )
        assert fs.verify_receipt(receipt, self.connect().fingerprints).ok


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    federation = Federation(tmp_path_factory.mktemp("federation"))
    try:
        yield federation
    finally:
        for process in federation.running.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def expected(federation):
    return analysis(federation.connect())


def analyze(study: Path, journal: Path) -> None:
    analysis(fs.ClientPartition.connect(study, journal=journal))


def wait_for_answers(journal: Path, number: int, process: Forked) -> None:
    until = time.monotonic() + 600
    while len(list(journal.glob("run-*/*.reply"))) < number:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.005)


@pytest.mark.parametrize("answers", [20, pytest.param(7, marks=pytest.mark.slow)])
def test_the_coordinator_is_killed(federation, expected, tmp_path, answers):
    journal = tmp_path / "journal"
    analyst = Forked(analyze, federation.study, journal)
    wait_for_answers(journal, answers, analyst)
    # Meanwhile the journal is that process's alone.
    with pytest.raises(EngineError, match="in use by another process"):
        federation.connect(journal)
    analyst.kill()
    analyst.wait()
    partition = federation.connect(journal)
    federation.assert_same(analysis(partition), expected)
    assert partition.engine._journal.taken_up >= answers


def in_the_middle(partition, turn: int, what, patience: float | None = None, first: bool = False) -> None:
    """Run the analysis, and do something before B receives its `turn`-th request; wait less for B after it.

    The other sites keep their time limit: on a busy machine their answers take longer. If it is done `first`,
    they receive their requests of this round later, too.
    """
    transport, requested = partition.engine._sites["B"].transport, itertools.count(1)
    others, done = {name: itertools.count(1) for name in SITES if name != "B"}, threading.Event()
    hasty = copy(transport)
    hasty.timeout = transport.timeout if patience is None else patience

    class Watched:
        def send(self, site, request):
            if site != "B":
                if next(others[site]) == turn and first:
                    assert done.wait(600)
                return transport.send(site, request)
            number = next(requested)
            if number == turn:
                what()
                done.set()
            return (transport if number < turn else hasty).send(site, request)

    for name in SITES:
        partition.engine._sites[name] = RemoteSite(name, Watched())
    analysis(partition)


def test_a_site_is_frozen_and_answers_late(federation, expected, tmp_path):
    pid, journal = federation.running["B"].pid, tmp_path / "journal"
    with pytest.raises(EngineError, match=r"'B' did not answer within 1.5 s.*Run the same analysis again"):
        in_the_middle(federation.connect(journal), 9, lambda: os.kill(pid, signal.SIGSTOP), patience=1.5)
    os.kill(pid, signal.SIGCONT)
    federation.assert_same(analysis(federation.connect(journal)), expected)


@pytest.mark.parametrize("turn", [7, pytest.param(19, marks=pytest.mark.slow)])
def test_a_site_is_killed_and_started_again(federation, expected, tmp_path, turn):
    journal = tmp_path / "journal"
    with pytest.raises(EngineError, match=r"'B' did not answer.*without="):
        in_the_middle(federation.connect(journal), turn, federation.running["B"].kill, patience=1.5)
    federation.start_again("B")
    federation.assert_same(analysis(federation.connect(journal)), expected)


def test_the_folder_is_out_of_reach(federation, expected, tmp_path):
    journal, exchange = tmp_path / "journal", federation.study / "exchange"
    away = exchange.with_name("away")
    with pytest.raises(EngineError, match=r"cannot be written .No such file.*reconnect the share"):
        in_the_middle(federation.connect(journal), 12, lambda: exchange.rename(away), first=True)
    assert not exchange.exists()
    away.rename(exchange)
    federation.assert_same(analysis(federation.connect(journal)), expected)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, which fills up."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    with open(place / "filling", "wb", 0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def test_the_coordinators_disk_is_full(federation, expected, small_disk):
    journal = small_disk / "journal"
    with pytest.raises(EngineError, match=r"the journal .*cannot be written .No space left.*Free disk space"):
        in_the_middle(federation.connect(journal), 10, lambda: fill(small_disk))
    (small_disk / "filling").unlink()
    federation.assert_same(analysis(federation.connect(journal)), expected)


def test_the_exchange_folders_disk_is_full(small_disk):
    """A question cannot be asked; an answer that cannot be written is written when there is room."""
    site = Site("A", patients()[["x", "z"]])
    coordinator, keys = Identity.generate(), site.trust.identity.public.fingerprint
    transport = FolderTransport(small_disk, coordinator, {"A": keys}, 30.0, 0.01)
    question = pack_request(Request("A", "schema", "describe_table", {}, "a session", "{}", None, 1))
    answers, reported = [], []
    requests, replies = (small_disk / "A" / name for name in ("asks", "replies"))
    for place in (requests, replies):
        place.mkdir(parents=True)
    fill(small_disk)
    with pytest.raises(
        EngineError, match=r"asks' cannot be written .No space left on device.. Free disk space"
    ):
        transport.send("A", question)
    (small_disk / "filling").unlink()

    def request():
        answers.append(transport.send("A", question))

    analyst = threading.Thread(target=request)
    analyst.start()
    while not list(requests.glob("*.ask")):
        assert analyst.is_alive()
        time.sleep(0.01)
    fill(small_disk)

    def make_room(why):
        reported.append(why)
        (small_disk / "filling").unlink()

    serve_folder(
        site,
        small_disk,
        coordinator.public.fingerprint,
        poll=0.01,
        stop=lambda: bool(answers),
        refused=make_room,
    )
    analyst.join()
    assert len(reported) == 1 and "its reply cannot be written yet (No space left on device)" in reported[0]
    assert unpack_reply(answers[0]).site == "A"
    assert [chain.round for chain in site.site_ledger.chains] == [1]


def test_an_answer_that_is_there_is_not_replaced(tmp_path, monkeypatch):
    """A share that lists only some of its files does not make a site answer again."""
    site = Site("A", patients()[["x", "z"]])
    coordinator, keys = Identity.generate(), site.trust.identity.public.fingerprint
    transport = FolderTransport(tmp_path, coordinator, {"A": keys}, 0.0, 0.01)
    question = pack_request(Request("A", "schema", "describe_table", {}, "a session", "{}", None, 1))
    with pytest.raises(EngineError, match="did not answer within 0 s"):
        transport.send("A", question)

    def look(times):
        looks = itertools.count()
        serve_folder(
            site, tmp_path, coordinator.public.fingerprint, poll=0.0, stop=lambda: next(looks) == times
        )

    look(1)
    (reply,) = tmp_path.glob("A/replies/*.reply")
    answer, written = reply.read_bytes(), reply.stat().st_mtime_ns
    monkeypatch.setattr(SiteMailbox, "open_numbers", lambda part: ([reply.stem], []))
    look(2)
    assert reply.read_bytes() == answer and reply.stat().st_mtime_ns == written
    (request,) = tmp_path.glob("A/asks/*.ask")
    before = request.stat().st_mtime_ns
    assert unpack_reply(transport.send("A", question)).site == "A"
    (request,) = tmp_path.glob("A/done/*/*.ask")
    assert request.stat().st_mtime_ns == before


def test_a_site_that_leaves_for_good(federation, tmp_path):
    """The others go on without it, and have what they have alone."""
    federation.running["C"].kill()
    with pytest.raises(EngineError, match=r"'C' did not answer.*If a site is lost for good, .*without="):
        federation.connect(tmp_path / "journal", 5)
    formula = "y ~ x + z"
    left = fs.GLORE.from_formula(formula, federation.connect(without=["C"])).fit(masked=True)
    frame = patients().query("h != 'C'")
    files = {name: federation.home / f"{name}.csv" for name in ("A", "B")}
    alone = fs.ClientPartition.from_files(files, layout="horizontal")
    here = fs.GLORE.from_formula(formula, alone).fit(masked=True)
    np.testing.assert_array_equal(left.params, here.params)
    np.testing.assert_array_equal(left.bse, here.bse)
    assert left.nobs == len(frame)
