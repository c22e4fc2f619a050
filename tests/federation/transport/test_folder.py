"""Sites in processes of their own, over signed files: the same numbers; named outcomes of faults."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from serving import connected, served

import fedstat as fs
from fedstat.errors import EngineError, PolicyError, SecurityError
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.transport import journal
from fedstat.federation.transport.folder import FolderTransport


def hospitals() -> fs.ClientPartition:
    return fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital", shared_seed=1)


def enterprises() -> fs.ClientPartition:
    frames = fs.datasets.load_sme()
    return fs.ClientPartition.from_frames(frames, on="enterprise_id", shared_seed=1)


def three_sites() -> fs.ClientPartition:
    """A response, and a column at each of two sites that lack some of its entities."""
    rng, n = np.random.default_rng(3), 400
    x, at = rng.normal(size=(n, 2)), np.arange(n)
    frames = {"H": pd.DataFrame({"k": at, "y": x @ [1.0, 0.5] + rng.normal(size=n)})}
    for site, column in zip("AB", x.T, strict=True):
        frames[site] = pd.DataFrame({"k": at, site.lower(): column})[rng.random(n) < 0.8]
    return fs.ClientPartition.from_frames(frames, on="k", shared_seed=1)


FITS = {
    "logistic": (
        hospitals,
        lambda partition: fs.GLORE.from_formula("num > 0 ~ age + C(cp)", partition).fit(),
    ),
    "moments": (
        enterprises,
        lambda partition: fs.VFEMRegression.from_formula("NPGR ~ .", partition).fit(exchange="moments"),
    ),
    "weighted moments": (
        three_sites,
        lambda partition: fs.VFEMRegression.from_formula("y ~ a + b", partition, coordinator="apart").fit(
            method="weighted"
        ),
    ),
    "federated averaging": (
        hospitals,
        lambda partition: fs.FedAvg.from_formula("num > 0 ~ age", partition).fit(
            rounds=3, seed=1, standardize=True
        ),
    ),
}


@pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")
@pytest.mark.parametrize("family", FITS)
def test_the_same_result_to_the_bit(family, tmp_path):
    make, fit = FITS[family]
    partition = make()
    here = fit(partition)
    with served(partition, tmp_path) as service:
        there = fit(connected(partition, service["transport"]))
    np.testing.assert_array_equal(there.params, here.params)
    np.testing.assert_equal(there.estimate.cov, here.estimate.cov)
    assert there.ledger.bytes == here.ledger.bytes and there.ledger.rounds == here.ledger.rounds
    for result in (here, there):
        result.summary()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    partition = hospitals()
    with served(partition, tmp_path_factory.mktemp("sites")) as service:
        yield partition, service


def test_a_refusal_reaches_the_analyst_by_name(running):
    partition, service = running
    with pytest.raises(PolicyError, match=r"minimum|fewer"):
        fs.GLORE.from_formula("age > 76 ~ C(cp)", connected(partition, service["transport"])).fit()


def test_another_coordinators_questions_are_passed_over(running):
    partition, service = running
    prints = service["transport"].fingerprints
    stranger = FolderTransport(service["folder"], Identity.generate(), prints, timeout=600, poll=0.01)
    with pytest.raises(EngineError, match=r"refuses requests that are signed with the key of this coord"):
        stranger.send(next(iter(partition.sites)), b"anything")


def test_an_answer_that_the_site_did_not_sign_is_refused(running):
    partition, service = running
    transport = service["transport"]
    wrong = {name: Identity.generate().public.fingerprint for name in partition.sites}
    with pytest.raises(SecurityError, match="not the pinned key"):
        FolderTransport(transport.folder, transport.identity, wrong, 600.0, 0.01).send(
            next(iter(partition.sites)), b"x"
        )


def test_a_frozen_site_is_survived_and_a_dead_one_is_named(tmp_path):
    partition = hospitals()
    expected = FITS["logistic"][1](partition).params
    first = next(iter(partition.sites))
    with served(partition, tmp_path) as service:
        journal = tmp_path / "journal"
        frozen = service["running"][first].pid
        model = fs.GLORE.from_formula(
            "num > 0 ~ age + C(cp)", connected(partition, service["transport"], journal)
        )
        service["transport"].timeout = 2.0
        os.kill(frozen, signal.SIGSTOP)
        with pytest.raises(
            EngineError, match=rf"'{first}' did not answer.*round 1.*Run the same analysis again"
        ):
            model.fit()
        os.kill(frozen, signal.SIGCONT)
        service["transport"].timeout = 600.0
        again = FITS["logistic"][1](connected(partition, service["transport"], journal))
    np.testing.assert_array_equal(again.params, expected)


@pytest.mark.parametrize("stopped_at", [1, 2, 4, 7])
def test_an_interrupted_analysis_goes_on_from_its_journal(running, tmp_path, stopped_at):
    partition, service = running
    expected = FITS["logistic"][1](partition).params
    journal = tmp_path / "journal"

    class Cut(FolderTransport):
        left = stopped_at * len(partition.sites)

        def send(self, site: str, request: bytes) -> bytes:
            Cut.left -= 1
            if Cut.left < 0:
                raise EngineError(f"'{site}': the network is cut")
            return super().send(site, request)

    good = service["transport"]
    cut = Cut(good.folder, good.identity, good.fingerprints, good.timeout, good.poll)
    with pytest.raises(EngineError, match=r"the network is cut .*stored in '.*journal'"):
        FITS["logistic"][1](connected(partition, cut, journal))
    other = connected(partition, good, journal)
    again = FITS["logistic"][1](other)
    np.testing.assert_array_equal(again.params, expected)
    assert other.engine._journal.taken_up >= stopped_at * len(partition.sites)


def test_another_analysis_does_not_take_up_a_journal(running, tmp_path):
    partition, service = running
    FITS["logistic"][1](connected(partition, service["transport"], tmp_path / "journal"))
    with pytest.raises(EngineError, match="belongs to another analysis"):
        fs.FedAvg.from_formula(
            "num > 0 ~ age + C(cp)", connected(partition, service["transport"], tmp_path / "journal")
        ).fit(rounds=2)


def test_a_full_disk_is_named(running, tmp_path, monkeypatch):
    partition, service = running

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "write_atomic", full)
    with pytest.raises(EngineError, match=r"cannot be written .No space left on device.*Free disk space"):
        fs.GLORE.from_formula("num > 0 ~ age", connected(partition, service["transport"], tmp_path / "j"))
