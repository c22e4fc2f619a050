"""Sites over NVIDIA FLARE and mutual TLS: the same numbers; strangers and foreign code are refused.

One federation serves all tests, which run in the order of the file; it takes longer than a minute. Run with
``pytest tests/federation/transport/test_flare.py`` where ``fedstat[flare]`` is installed.
"""

from __future__ import annotations

import json
import signal
import socket
import ssl
import stat
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("nvflare", reason="needs fedstat[flare]")

from serving_flare import SERVER, aligned, connected, federation_of, provision

import fedstat as fs
from fedstat.errors import EngineError, PolicyError, SecurityError
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.transport.flare.analysis import FlareTransport
from fedstat.federation.transport.flare.provision import KEY, SOCKET, write_job

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")

SEED = 0x6B1F0C52A94E7D3386E0D1B7F2A5C948
SITES = ("east", "north", "south", "west")
BLOCKS = ("Platform", "Credit Agency", "Industry and Commerce Bureau", "Law-enforcement Agency")


def hospitals() -> fs.ClientPartition:
    frame = fs.datasets.make_hospitals()
    names = dict(zip(sorted(frame["hospital"].unique()), SITES, strict=True))
    frame["hospital"] = frame["hospital"].astype(str).map(names)
    return fs.ClientPartition.from_frame(frame, by="hospital", shared_seed=SEED)


def enterprises() -> fs.ClientPartition:
    frames = fs.datasets.load_sme()
    renamed = {site: frames[block] for site, block in zip(SITES, BLOCKS, strict=True)}
    return aligned(fs.ClientPartition.from_frames(renamed, on="enterprise_id", shared_seed=SEED))


def logistic(partition):
    return fs.GLORE.from_formula("num > 0 ~ age + C(cp)", partition).fit()


def averaged(partition):
    model = fs.FedAvg.from_formula("num > 0 ~ age", partition)
    return model.fit(rounds=3, seed=1, standardize=True)


def ordered(partition):
    return fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()


def unordered(partition):
    return fs.FederatedMultinomial.from_formula("C(cp) ~ age + sex", partition).fit()


def equations(partition):
    model = fs.FederatedGEE.from_formula("num ~ sex", partition, groups="age")
    return model.fit(cov_type="bias_reduced", local=False)


def times(partition):
    model = fs.FederatedCox.from_formula("Surv(age, num > 0) ~ sex", partition)
    return model.fit(cov_type="robust")


def common_times(partition):
    model = fs.FederatedCox.from_formula("Surv(age, num > 1) ~ cp", partition)
    return model.fit(baseline="common", grid=[60, 80], local=False)


def mixed(partition):
    return fs.FederatedMixed.from_formula("num ~ sex + (1 | age)", partition).fit()


def treated(partition):
    return fs.TreatmentEffect.from_formula("num ~ age", partition, treatment="C(sex) ~ age").fit()


def weighted_times(partition):
    model = fs.FederatedCox.from_formula("Surv(age, num > 0) ~ sex", partition, weights=treated(partition))
    return model.fit()


def weighted(partition):
    model = fs.GLORE.from_formula("num > 0 ~ sex", partition, weights=treated(partition))
    return model.fit()


FITS = (
    logistic,
    averaged,
    ordered,
    unordered,
    equations,
    times,
    common_times,
    mixed,
    treated,
    weighted_times,
    weighted,
)


def moments(partition):
    return fs.VFEMRegression.from_formula("NPGR ~ .", partition).fit(exchange="moments")


def iterative(partition):
    model = fs.VFEMRegression.from_formula("NPGR ~ .", partition, between="independent")
    return model.fit(exchange="iterative")


def assert_identical(there, here):
    np.testing.assert_array_equal(there.params, here.params)
    np.testing.assert_array_equal(there.estimate.cov, here.estimate.cov)
    assert there.ledger.bytes == here.ledger.bytes and there.ledger.rounds == here.ledger.rounds


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with federation_of(SITES, tmp_path_factory.mktemp("flare") / "f") as running:
        yield running


@pytest.fixture(scope="module")
def analysis(federation):
    """A job that serves the hospitals; silent sites are asked again after two seconds."""
    partition = hospitals()
    job, transport = federation.serve(partition, again_after=2.0, timeout=60.0)
    return partition, job, transport


@pytest.mark.parametrize("fit", FITS)
def test_several_fits_in_one_job_are_the_same_to_the_bit(analysis, fit):
    partition, _, transport = analysis
    assert_identical(fit(connected(partition, transport)), fit(partition))


def test_effects_on_times_are_the_same(analysis):
    partition, _, transport = analysis
    there, here = (
        fs.SurvivalEffect.from_formula("Surv(age, num > 0) ~ 1", one, treatment="C(sex) ~ cp").fit()
        for one in (connected(partition, transport), partition)
    )
    np.testing.assert_array_equal(there.tidy()["estimate"], here.tidy()["estimate"])
    np.testing.assert_array_equal(there.tidy()["std_error"], here.tidy()["std_error"])


def test_curves_are_the_same(analysis):
    partition, _, transport = analysis
    there, here = (
        fs.KaplanMeier.from_formula("Surv(age, num > 0) ~ 1", one).fit([50, 60, 80])
        for one in (connected(partition, transport), partition)
    )
    pd.testing.assert_frame_equal(there.tidy(), here.tidy())


def test_a_refusal_reaches_the_analyst_by_name(analysis):
    partition, _, transport = analysis
    with pytest.raises(PolicyError, match=r"minimum|fewer"):
        fs.GLORE.from_formula("age > 76 ~ C(cp)", connected(partition, transport)).fit()


def test_a_frozen_site_is_survived(federation, analysis):
    partition, _, transport = analysis
    frozen = federation.job_process("north")
    frozen.send_signal(signal.SIGSTOP)
    thaw = threading.Timer(5.0, frozen.send_signal, [signal.SIGCONT])
    thaw.start()
    try:
        there = logistic(connected(partition, transport))
    finally:
        thaw.join()
    assert_identical(there, logistic(partition))


def test_an_interrupted_analysis_goes_on_from_its_journal(analysis, tmp_path):
    partition, _, good = analysis

    class Cut(FlareTransport):
        left = 4 * len(SITES)

        def send(self, site: str, request: bytes) -> bytes:
            Cut.left -= 1
            if Cut.left < 0:
                raise EngineError(f"'{site}': the network is cut")
            return FlareTransport.send(self, site, request)

    cut = Cut(good.server, good.identity, good.fingerprints)
    with pytest.raises(EngineError, match="the network is cut"):
        logistic(connected(partition, cut, tmp_path / "journal"))
    other = connected(partition, good, tmp_path / "journal")
    assert_identical(logistic(other), logistic(partition))
    assert other.engine._journal.taken_up >= 4 * len(SITES)


def test_another_coordinator_is_not_answered(analysis):
    _, _, transport = analysis
    stranger = FlareTransport(transport.server, Identity.generate(), transport.fingerprints)
    with pytest.raises(EngineError, match=r"'east' did not answer: .*not come from its pinned coordinator"):
        stranger.send("east", b"anything")


def test_an_answer_that_the_site_did_not_sign_is_refused(analysis):
    _, _, transport = analysis
    wrong = dict.fromkeys(SITES, Identity.generate().public.fingerprint)
    with pytest.raises(SecurityError, match="not the pinned key"):
        FlareTransport(transport.server, transport.identity, wrong).send("east", b"anything")


def test_a_site_that_does_not_take_part_is_named(analysis):
    with pytest.raises(EngineError, match="'nowhere' did not answer: no site of this name"):
        analysis[2].send("nowhere", b"anything")


def test_only_the_owner_opens_the_socket_and_the_job_store(analysis):
    server = analysis[2].server
    for place, mode in ((SOCKET, 0o600), (f"local/{KEY}", 0o600), ("store", 0o700)):
        assert stat.S_IMODE((server / place).stat().st_mode) == mode, place
    assert any((server / "store" / "jobs").iterdir())


def with_component(job: Path, component: dict) -> Path:
    path = job / "app" / "config" / "config_fed_client.json"
    config = json.loads(path.read_text()) | {"components": [component]}
    path.write_text(json.dumps(config))
    return job


def with_code(folder: Path, trace: Path) -> Path:
    """A job that brings a module, which leaves a trace where it is imported."""
    job = write_job(folder, SITES)
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "own.py").write_text(f"open({str(trace)!r}, 'w')\nclass Own: pass\n")
    return with_component(job, {"id": "own", "path": "own.Own", "args": {}})


def with_another_class(folder: Path, trace: Path) -> Path:
    """A job that names a class of the installation, which leaves a trace where it is made."""
    component = {"id": "own", "path": "logging.FileHandler", "args": {"filename": str(trace)}}
    return with_component(write_job(folder, SITES), component)


def second_analysis(folder: Path, trace: Path) -> Path:
    return write_job(folder, SITES)


def test_a_job_with_more_in_it_is_refused_and_harms_no_running_one(federation, analysis, tmp_path):
    partition, _, transport = analysis
    jobs = {}
    for make in (with_code, with_another_class, second_analysis):
        folder = make(tmp_path / make.__name__, tmp_path / f"{make.__name__}.trace")
        jobs[make.__name__] = federation.session.submit_job(str(folder))
    statuses = {name: federation.status(job) for name, job in jobs.items()}
    assert all(status not in ("RUNNING", "FINISHED:COMPLETED") for status in statuses.values()), statuses
    assert not list(tmp_path.glob("*.trace"))
    assert_identical(logistic(connected(partition, transport)), logistic(partition))


def greeting(kit: Path | None, port: int, authority: Path) -> bytes:
    """First message of a server to a client with a kit's certificate; empty if it closes the connection."""
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if kit is not None:
        context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    try:
        with socket.create_connection(("127.0.0.1", port), 20) as plain, context.wrap_socket(plain) as secure:
            return secure.recv(1)
    except (ssl.SSLError, ConnectionResetError):
        return b""


def test_a_certificate_of_another_authority_is_refused_at_the_handshake(federation, tmp_path):
    authority = federation.kits / SERVER / "startup" / "rootCA.pem"
    assert greeting(federation.kits / "east", federation.port, authority)
    other = provision(tmp_path / "other", ["east"], federation.port)
    for stranger in (other / "east", None):
        assert not greeting(stranger, federation.port, authority)


def test_logs_are_quiet_and_stay_where_they_are(federation, analysis):
    for name in (SERVER, *SITES):
        for log in (federation.kits / name).rglob("log.txt"):
            assert " - INFO - " not in log.read_text(), log
    reported = [
        path for path in (federation.kits / SERVER).rglob("*") if path.is_file() and path.suffix == ".txt"
    ]
    assert not any("request was refused" in path.read_text() for path in reported)
    assert any(
        "request was refused" in path.read_text() for path in (federation.kits / "east").rglob("log.txt")
    )


def test_an_analysis_that_is_ended_completes(federation, analysis):
    partition, job, transport = analysis
    transport.end()
    assert federation.status(job) == "FINISHED:COMPLETED"
    with pytest.raises(EngineError, match="has ended or was not started"):
        logistic(connected(partition, transport))


def test_a_site_that_stops_is_named_and_the_next_job_serves_again(federation, analysis):
    partition = enterprises()
    job, transport = federation.serve(partition, timeout=60.0)
    for fit in (moments, iterative):
        assert_identical(fit(connected(partition, transport)), fit(partition))
    model = fs.VFEMRegression.from_formula("NPGR ~ .", connected(partition, transport), between="independent")
    federation.job_process("west").kill()
    with pytest.raises(EngineError, match=r"'west' did not answer: .*its process may have stopped.*round"):
        model.fit(exchange="iterative")
    assert federation.status(job) not in ("RUNNING", "FINISHED:COMPLETED")
    _, transport = federation.submit(partition)
    assert_identical(moments(connected(partition, transport)), moments(partition))
