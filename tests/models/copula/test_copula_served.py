"""Synthesis over sites in processes of their own: the same release, over kills, and on a spent budget."""

from __future__ import annotations

import os
import signal
from random import Random

import numpy as np
import pandas as pd
import pytest
from forked import Forked
from operating import make_federation, serve, served_sites, serving, wait
from test_connect_vertical import numbers_at

import fedstat as fs
from fedstat.errors import DescriptionError, EngineError
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.disclosure import privacy_budget
from fedstat.federation.transport.site_folder import load_identity
from fedstat.operator.command_line import main

N = 400
BOUNDS = fs.Bounds({"a": (-4, 4), "b": ["no", "yes"], "c": range(4), "d": fs.log(0.01, 100)})
COLUMNS = {"A": ["a", "b"], "B": ["c"], "C": ["d"]}
EPSILON = 4.0


def make_frames():
    Z = np.random.default_rng(0).standard_normal((N, 4))
    Z[:, 1:] += 0.7 * Z[:, :1]
    complete = pd.DataFrame(
        {
            "id": [f"P{i:04d}" for i in range(N)],
            "a": Z[:, 0],
            "b": np.where(Z[:, 1] > 0.8, "yes", "no"),
            "c": np.searchsorted([-0.8, 0.0, 1.2], Z[:, 2]),
            "d": np.exp(Z[:, 3]),
        }
    )
    return {
        name: complete[["id", *columns]].sample(frac=1, random_state=1) for name, columns in COLUMNS.items()
    }


def same_noise():
    """Noise of one seed, at all sites: that of keys is another in every run."""
    privacy_budget.random_bytes = lambda key: Random(1).randbytes


def serve_same_noise(folder):
    same_noise()
    return main(list(serving(folder)))


def serve_and_die(folder):
    """Serve until products are charged, on disk, and end there as by kill -9."""
    charged = SiteLedger.keep_charges

    def last(self, charges):
        charged(self, charges)
        if any("release_gram" in charge.what for charge in charges):
            os.kill(os.getpid(), signal.SIGKILL)

    SiteLedger.keep_charges = last
    return main(list(serving(folder)))


def serving_sites(home, how):
    """Sites that are served so, or by the command where nothing is said; the processes by name."""

    def start(folder):
        if folder.name not in how:
            return serve(folder)
        return Forked(how[folder.name], folder, log=folder / "log.txt")

    return served_sites(home, COLUMNS, start)


def make_home(home, budget):
    frames = make_frames()
    policy = fs.Policy(privacy=fs.Budget(budget, 1e-6))
    return frames, policy, make_federation(home, frames, ["id"], policy)


def synthesizer(partition):
    return fs.CopulaSynthesizer(partition, EPSILON, BOUNDS, coordinator="apart")


def charges(home, name):
    made = read_ledger(home / name, name, load_identity(home / name).public).charges.made
    return [charge.what.split(":")[0].split(" ", 1)[1] for charge in made]


def test_the_same_release_to_the_bit_as_in_one_process(tmp_path, monkeypatch):
    frames, policy, study = make_home(tmp_path, EPSILON)
    with serving_sites(tmp_path, dict.fromkeys(COLUMNS, serve_same_noise)):
        assert main(["federation", "align", str(study)]) == 0
        there = fs.ClientPartition.connect(study)
        theirs = synthesizer(there).fit()
        # All of the budget is spent: what there is can be printed, saved, read and sampled, and asked again.
        with pytest.raises(DescriptionError, match=r"rho .* left"):
            fs.CopulaSynthesizer(there, EPSILON - 0.1, BOUNDS, coordinator="apart").fit()
        repeated = synthesizer(there).fit()
        pd.testing.assert_frame_equal(repeated.correlation, theirs.correlation, check_exact=True)
        theirs.save(tmp_path / "fit")
        again = fs.load(tmp_path / "fit")
        assert str(again.summary()) == str(theirs.summary())
        pd.testing.assert_frame_equal(again.sample(50, seed=1), theirs.sample(50, seed=1))
        assert "epsilon 4 of 4" in str(fs.ClientPartition.connect(study).describe())
    tables = {
        name: frame.drop(columns="id").assign(number=numbers_at(tmp_path / name))
        for name, frame in frames.items()
    }
    monkeypatch.setattr(privacy_budget, "random_bytes", lambda key: Random(1).randbytes)
    here = fs.ClientPartition.from_frames(tables, on="number", policy=policy)
    ours = synthesizer(here).fit()
    pd.testing.assert_frame_equal(theirs.correlation, ours.correlation, check_exact=True)
    pd.testing.assert_frame_equal(theirs.margins, ours.margins, check_exact=True)
    pd.testing.assert_frame_equal(theirs.sample(50, seed=1), ours.sample(50, seed=1), check_exact=True)
    for name in COLUMNS:
        assert sum("release_margins" in one for one in charges(tmp_path, name)) in (1, 2)


def test_a_site_that_is_killed_in_the_middle_has_charged_its_margins_once(tmp_path):
    """Margins are repeated with the same noise. Products are charged again only if they were not finished."""
    _, _, study = make_home(tmp_path, 7.1)
    path = study / "federation.toml"
    with serving_sites(tmp_path, {"A": serve_and_die}) as running:
        assert main(["federation", "align", str(study)]) == 0
        patient = path.read_text()
        path.write_text(patient.replace("timeout = 3600", "timeout = 4"))
        partition = fs.ClientPartition.connect(study)
        path.write_text(patient)
        with pytest.raises(EngineError, match="did not answer"):
            synthesizer(partition).fit()
        running["A"].wait(60)
        before = charges(tmp_path, "A")
        assert [one for one in before if "release_gram" in one] == ["release_gram grams"]
        running["A"] = serve(tmp_path / "A")
        wait(tmp_path / "A", running["A"])
        first = synthesizer(fs.ClientPartition.connect(study)).fit()
        for name in COLUMNS:
            made = charges(tmp_path, name)
            margins = [one for one in made if "release_margins" in one]
            assert len(margins) == len(set(margins)) == (2 if name == "A" else 1)
            # A has answered the question of the fit that was given up as well, which waited for it
            assert sum("release_gram" in one for one in made) == (3 if name == "A" else 2)
        # Every site starts again, and repeats what it has released.
        before = {name: charges(tmp_path, name) for name in COLUMNS}
        for name in COLUMNS:
            running[name].kill()
            running[name].wait()
            running[name] = serve(tmp_path / name)
            wait(tmp_path / name, running[name])
        second = fs.CopulaSynthesizer(fs.ClientPartition.connect(study), EPSILON, BOUNDS, coordinator="apart")
        pd.testing.assert_frame_equal(second.fit().correlation, first.correlation, check_exact=True)
        assert {name: charges(tmp_path, name) for name in COLUMNS} == before
        other = fs.CopulaSynthesizer(fs.ClientPartition.connect(study), 5.0, BOUNDS, coordinator="apart")
        with pytest.raises(DescriptionError, match="left"):
            other.fit()
        assert len(first.sample(10, seed=1)) == 10
