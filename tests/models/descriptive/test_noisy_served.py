"""Tables and curves with noise at sites in processes of their own, over restarts, approvals and plans."""

from __future__ import annotations

import signal

import numpy as np
import pandas as pd
import pytest
from operating import main, make_federation, serve, wait

import fedstat as fs
from fedstat.errors import ConsentError
from fedstat.federation.transport.site_folder import PENDING

N, SITES = 200, ("A", "B", "C")
BOUNDS = {"g": ["a", "b"], "kind": ["p", "q"]}
CURVES = "Surv(time, died) ~ g"


def frames():
    random = np.random.default_rng(3)
    return {
        name: pd.DataFrame(
            {
                "g": random.choice(["a", "b"], N),
                "kind": random.choice(["p", "q"], N),
                "time": np.ceil(random.exponential(9.0, N)),
                "died": random.integers(0, 2, N),
            }
        )
        for name in SITES
    }


@pytest.fixture
def running():
    processes = {}
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


def start(home, running, *names):
    for name in names:
        running[name] = serve(home / name)
    for name in names:
        wait(home / name, running[name])


def test_noise_and_charges_outlive_a_restart(tmp_path, running, capsys):
    policy = fs.Policy.strict(privacy=fs.Budget(9.0, 1e-6, colluding=1))
    study = make_federation(tmp_path, frames(), policy=policy)
    for name in SITES:
        assert main(["site", "describe", str(tmp_path / name)]) == 0
    start(tmp_path, running, *SITES)
    partition = fs.ClientPartition.connect(study)

    def release(partition):
        counts = fs.crosstab(partition, "g", "kind", epsilon=2.0, bounds=BOUNDS)
        model = fs.KaplanMeier.from_formula(CURVES, partition)
        return counts, model.fit(grid=1, until=20, epsilon=2.0, bounds=BOUNDS)

    counts, curves = release(partition)
    true = pd.concat(frames().values()).groupby(["g", "kind"]).size().to_numpy()
    assert np.abs(counts.to_numpy().ravel() - true).max() < 40 and curves.nobs > 400
    running["B"].send_signal(signal.SIGTERM)
    running["B"].wait(60)
    start(tmp_path, running, "B")
    again, later = release(fs.ClientPartition.connect(study))
    pd.testing.assert_frame_equal(counts.to_frame(), again.to_frame())
    pd.testing.assert_frame_equal(curves.tidy(), later.tidy())
    capsys.readouterr()
    main(["site", "status", str(tmp_path / "B")])
    assert "of 9 at delta 1e-06 is charged, by 2 releases" in capsys.readouterr().out


def test_an_owner_approves_a_table_with_its_epsilon(tmp_path, running, capsys):
    policy = fs.Policy.strict(privacy=fs.Budget(9.0, 1e-6), approval="owner")
    study = make_federation(tmp_path, frames(), policy=policy)
    for name in SITES:
        assert main(["site", "describe", str(tmp_path / name)]) == 0
    start(tmp_path, running, *SITES)
    partition = fs.ClientPartition.connect(study)

    def run():
        return fs.crosstab(partition, "g", "kind", epsilon=2.0, bounds=BOUNDS)

    with pytest.raises(ConsentError, match="approval"):
        run()
    for site in SITES:
        (digest,) = (path.stem for path in (tmp_path / site / PENDING).glob("*.json"))
        capsys.readouterr()
        assert main(["site", "pending", str(tmp_path / site)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "rows by g and kind" in shown and "epsilon 2 at delta 1e-06" in shown
        assert "one row" in shown and all(column in shown for column in ("g", "kind"))
        assert main(["site", "approve", str(tmp_path / site), digest]) == 0
    assert run().to_numpy().sum() > 400


def test_a_synthesis_of_rows_outlives_a_restart(tmp_path, running):
    policy = fs.Policy.strict(privacy=fs.Budget(9.0, 1e-6, colluding=1), exact="none")
    study = make_federation(tmp_path, frames(), policy=policy)
    for name in SITES:
        assert main(["site", "describe", str(tmp_path / name)]) == 0
    start(tmp_path, running, *SITES)

    def release():
        partition = fs.ClientPartition.connect(study)
        return fs.CopulaSynthesizer(partition, 4.0, BOUNDS | {"time": range(0, 100), "died": [0, 1]}).fit()

    first = release()
    running["B"].send_signal(signal.SIGTERM)
    running["B"].wait(60)
    start(tmp_path, running, "B")
    pd.testing.assert_frame_equal(first.sample(50, seed=1), release().sample(50, seed=1))
    assert first.glance()["n_sites"].item() == 3 and len(first.sample(50, seed=1).columns) == 4
