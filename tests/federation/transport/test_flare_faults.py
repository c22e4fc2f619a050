"""Faults over NVIDIA FLARE: a named outcome of each, and afterwards the same numbers and the same accounts.

One federation serves all tests, which run in the order of the file; it takes some minutes. Run with
``pytest -m slow tests/federation/transport/test_flare_faults.py`` where ``fedstat[flare]`` is installed.
"""

from __future__ import annotations

import datetime
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs fedstat[flare]")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from faulty import rows
from serving_flare import SERVER, connected, federation_of, start, stop, wait_for_sites
from test_flare import SITES, greeting, hospitals

import fedstat as fs
from fedstat.errors import EngineError, SecurityError, SessionError
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.message import unpack_reply
from fedstat.federation.transport.flare import analysis as transports
from fedstat.federation.transport.flare.analysis import FlareTransport
from fedstat.federation.transport.flare.provision import FOLDER

pytestmark = pytest.mark.slow

ANALYST = """
import json, sys
sys.path.insert(0, sys.argv[1])
from serving_flare import connected
from test_flare import hospitals
from test_flare_faults import analysis
from fedstat.federation.transport.flare.analysis import FlareTransport
from fedstat.federation.crypto.keys import Identity
told = json.loads(sys.argv[2])
transport = FlareTransport(told["server"], Identity.load(told["keys"]), told["fingerprints"])
analysis(connected(hospitals(), transport, told["journal"]))
"""


def analysis(partition, formula="num > 0 ~ age + C(cp)"):
    return fs.GLORE.from_formula(formula, partition).fit()


class Running:
    """A federation, the job that serves it, and what an undisturbed analysis gives."""

    def __init__(self, federation) -> None:
        self.federation, self.partition = federation, hospitals()
        self.job, self.transport = federation.serve(self.partition, again_after=2.0, timeout=60.0)
        self.expected = analysis(self.connect())

    def connect(self, journal: Path | None = None, **given) -> fs.ClientPartition:
        return connected(self.partition, self.analyst(**given), journal)

    def analyst(self, kind=FlareTransport, **given) -> FlareTransport:
        return kind(self.transport.server, self.transport.identity, self.transport.fingerprints, **given)

    def submit(self) -> None:
        self.job, self.transport = self.federation.submit(self.partition, again_after=2.0, timeout=60.0)

    def site_ledger(self, site: str, session: str) -> list:
        folder = self.federation.kits / site / "local" / FOLDER
        site_ledger = read_ledger(folder, site, Identity.load(folder / "identity.json").public)
        (found,) = [
            [entry.in_round(entry.round) for entry in c.entries]
            for c in site_ledger.chains
            if c.session == session
        ]
        return rows(found)

    def assert_same(self, result) -> None:
        receipt, expected = result.receipt(), self.expected.receipt()
        np.testing.assert_array_equal(result.params, self.expected.params)
        np.testing.assert_array_equal(result.bse, self.expected.bse)
        assert rows(receipt.passed) == rows(expected.passed)
        for site in SITES:
            assert self.site_ledger(site, receipt.session) == self.site_ledger(site, expected.session)
        assert fs.verify_receipt(receipt, self.partition.fingerprints).ok


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with federation_of(SITES, tmp_path_factory.mktemp("flare") / "f") as federation:
        yield Running(federation)


class Watched(FlareTransport):
    """Do something before a site receives its `turn`-th request."""

    def send(self, site, request):
        if site == "north" and next(WATCH["requested"]) == WATCH["turn"]:
            WATCH["what"]()
        return FlareTransport.send(self, site, request)


WATCH: dict = {}


def in_the_middle(running, journal, turn, what, **given):
    WATCH.update(requested=count(1), turn=turn, what=what)
    return analysis(connected(running.partition, running.analyst(Watched, **given), journal))


def test_undisturbed(running):
    np.testing.assert_array_equal(running.expected.params, analysis(running.partition).params)
    running.assert_same(analysis(running.connect()))


def test_the_coordinator_is_killed(running, tmp_path):
    keys, journal = tmp_path / "identity.json", tmp_path / "journal"
    running.transport.identity.save(keys)
    reported = {"server": str(running.transport.server), "keys": str(keys), "journal": str(journal)}
    reported["fingerprints"] = dict(running.transport.fingerprints)
    here = str(Path(__file__).parent)
    analyst = subprocess.Popen([sys.executable, "-c", ANALYST, here, json.dumps(reported)])
    until = time.monotonic() + 120
    while len(list(journal.glob("run-*/*.reply"))) < 4 * len(SITES):
        assert time.monotonic() < until and analyst.poll() is None
        time.sleep(0.005)
    with pytest.raises(EngineError, match="in use by another process"):
        running.connect(journal)
    analyst.kill()
    analyst.wait()
    partition = running.connect(journal)
    running.assert_same(analysis(partition))
    assert partition.engine._journal.taken_up >= 4 * len(SITES)


@pytest.mark.parametrize("turn", [2, 6])
def test_a_site_is_frozen_and_answers_late(running, tmp_path, turn):
    frozen = running.federation.job_process("north")
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"'north' did not answer: silent for 4 s.*with this journal to continue"
    ):
        in_the_middle(running, tmp_path / "j", turn, lambda: frozen.send_signal(signal.SIGSTOP), timeout=4.0)
    assert time.monotonic() - began < 15
    frozen.send_signal(signal.SIGCONT)
    running.assert_same(analysis(running.connect(tmp_path / "j")))


def test_old_questions_are_not_answered_again(running):
    kept = []

    class Kept(FlareTransport):
        def send(self, site, request):
            kept.append((site, request))
            return FlareTransport.send(self, site, request)

    running.assert_same(analysis(connected(running.partition, running.analyst(Kept))))
    again = running.analyst()
    for site, request in kept[: len(SITES)]:
        with pytest.raises(SecurityError, match=r"request 1 of a session with"):
            unpack_reply(again.send(site, request))


def test_two_analysts_at_once(running):
    formulas, found = ("num > 0 ~ age + C(cp)", "num > 0 ~ sex"), {}

    def analyze(formula):
        found[formula] = analysis(running.connect(), formula)

    analysts = [threading.Thread(target=analyze, args=(formula,)) for formula in formulas]
    for analyst in analysts:
        analyst.start()
    for analyst in analysts:
        analyst.join()
    running.assert_same(found[formulas[0]])
    np.testing.assert_array_equal(found[formulas[1]].params, analysis(running.partition, formulas[1]).params)


def test_the_servers_process_hangs(running, tmp_path, monkeypatch):
    monkeypatch.setattr(transports, "MARGIN", 1.0)
    server = running.federation.job_process(SERVER)
    with pytest.raises(EngineError, match=r"server's process is silent for 3 s and no longer responds"):
        in_the_middle(running, tmp_path / "j", 4, lambda: server.send_signal(signal.SIGSTOP), timeout=2.0)
    server.send_signal(signal.SIGCONT)
    running.assert_same(analysis(running.connect(tmp_path / "j")))


def resumed_in_the_next_job(running, journal):
    """All sites were started again, and go on; one that was ended in an answer may have lost the session."""
    running.submit()
    try:
        found = analysis(running.connect(journal))
    except SessionError as error:
        assert "set aside" in str(error)
        found = analysis(running.connect(journal))
    running.assert_same(found)


def test_a_sites_process_is_killed(running, tmp_path):
    kill = running.federation.job_process("north").kill
    with pytest.raises(EngineError, match=r"'north' did not answer: .*its process may have stopped"):
        in_the_middle(running, tmp_path / "j", 5, kill)
    assert running.federation.status(running.job) not in ("RUNNING", "FINISHED:COMPLETED")
    resumed_in_the_next_job(running, tmp_path / "j")


def test_the_server_is_killed(running, tmp_path):
    federation = running.federation

    def kill():
        stop({SERVER: federation.processes[SERVER]})

    with pytest.raises(EngineError, match=r"the job of the analysis has ended or was not started"):
        in_the_middle(running, tmp_path / "j", 5, kill)
    federation.session.close()
    federation.session = None
    federation.processes[SERVER] = start(federation.kits / SERVER)
    wait_for_sites(federation, SITES)
    resumed_in_the_next_job(running, tmp_path / "j")


def expired(kit: Path, state: Path) -> None:
    """Give a kit a certificate of the same authority whose days are over."""
    root = json.loads((state / "cert.json").read_text())
    key = serialization.load_pem_private_key(root["root_pri_key"].encode(), None)
    old = x509.load_pem_x509_certificate((kit / "startup" / "client.crt").read_bytes())
    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(old.subject).issuer_name(old.issuer)
    made = made.public_key(old.public_key()).serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - 30 * day).not_valid_after(now - day)
    for extension in old.extensions:
        made = made.add_extension(extension.value, extension.critical)
    signed = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (kit / "startup" / "client.crt").write_bytes(signed)


def test_an_expired_certificate(running, tmp_path):
    federation = running.federation
    authority = federation.kits / SERVER / "startup" / "rootCA.pem"
    kit, copy = federation.kits / "north", tmp_path / "north"
    shutil.copytree(kit / "startup", copy / "startup")
    assert greeting(copy, federation.port, authority)
    expired(copy, federation.kits.parent / "state")
    assert not greeting(copy, federation.port, authority)

    # A server that was started again accepts the sites that connect now.
    stop({name: federation.processes[name] for name in (SERVER, "north")})
    shutil.copy(copy / "startup" / "client.crt", kit / "startup" / "client.crt")
    federation.session.close()
    federation.session = None
    for name in (SERVER, "north"):
        federation.processes[name] = start(federation.kits / name)
    wait_for_sites(federation, [site for site in SITES if site != "north"])
    # no later try of this client can end otherwise: its kit is turned away before a word is said
    assert not greeting(kit, federation.port, authority)
    known = {client.name for client in federation.session.get_system_info().client_info}
    assert known == set(SITES) - {"north"}
    others = running.analyst()
    with pytest.raises(EngineError, match=r"no job takes requests .* after 0 s.*are all its sites running"):
        others.wait(0)
