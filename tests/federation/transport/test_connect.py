"""Connecting to sites that the command serves: the same numbers, and a named outcome of every fault."""

from __future__ import annotations

import copy
import json
import pickle
import signal

import numpy as np
import pandas as pd
import pytest
from forked import Forked
from operating import main, make_federation, serve, served_sites, until_true, wait

import fedstat as fs
from fedstat.errors import EngineError, NotAvailableError, PartitionError, PolicyError

FORMULA = "num > 0 ~ age + C(cp)"


@pytest.fixture(scope="module")
def frames():
    patients = fs.datasets.make_hospitals()
    names = ("Cleveland", "Hungary", "Long Beach")
    return {name: patients[patients["hospital"] == name].drop(columns="hospital") for name in names}


@pytest.fixture(scope="module")
def federation(frames, tmp_path_factory):
    """Three sites in processes of their own."""
    home = tmp_path_factory.mktemp("federation")
    study = make_federation(home, frames)
    with served_sites(home, frames) as running:
        yield {"home": home, "study": study, "running": running}


@pytest.fixture(scope="module")
def here(frames, federation):
    """The same files in one process."""
    paths = {name: federation["home"] / f"{name}.csv" for name in frames}
    return fs.ClientPartition.from_files(paths, layout="horizontal")


def impatient(federation, seconds, **given):
    """Connect with another patience than the file's."""
    path = federation["study"] / "federation.toml"
    text = path.read_text()
    try:
        path.write_text(text.replace("timeout = 3600", f"timeout = {seconds}"))
        return fs.ClientPartition.connect(path, **given)
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    "formula, masked",
    [(FORMULA, False), ("num > 0 ~ age + C(site)", True), ("num > 0 ~ ns(age, df=4)", True)],
)
def test_the_same_fit_to_the_bit(federation, here, formula, masked):
    there = fs.ClientPartition.connect(federation["study"])
    ours, theirs = (fs.GLORE.from_formula(formula, p).fit(masked=masked) for p in (here, there))
    for name in ("params", "bse"):
        pd.testing.assert_series_equal(getattr(theirs, name), getattr(ours, name), check_exact=True)
    assert theirs.llf == ours.llf
    assert theirs.ledger.bytes == ours.ledger.bytes
    assert fs.verify_receipt(theirs.receipt(), there.fingerprints).ok


def test_imputed_cells_stay_at_the_sites(federation):
    """An analyst fits over imputed tables, and has none of them."""
    there = fs.ClientPartition.connect(federation["study"])
    imputations = fs.impute(there, "num ~ age + chol", m=2, iterations=1, seed=1)
    pooled = imputations.fit(lambda p: fs.FederatedOLS.from_formula("num ~ age + chol", p).fit())
    assert pooled.params.size == 3 and (pooled.fmi > 0.0).any()
    entries = imputations.ledger.entries
    drawn = [one for one in entries if one.step == "draw_cells" and one.receiver == "coordinator"]
    assert {one.array for one in drawn} == {"drawn"} and all(one.shape == () for one in drawn)


def test_what_is_known_without_rows(federation, here):
    there = fs.ClientPartition.connect(federation["study"] / "federation.toml")
    assert set(there.sites) == set(here.sites) and there.pooled_columns == here.pooled_columns
    assert there.n_entities == here.n_entities and there.site_column == "site"
    assert "connected" in repr(there)
    assert there.describe().n_entities == here.n_entities
    assert there.sites["Hungary"].policy == here.sites["Hungary"].policy
    for view in (there.plot_missing, lambda: there.sites["Hungary"].ledger):
        with pytest.raises(NotAvailableError, match=r"process"):
            view()
    with pytest.raises(NotAvailableError, match=r"Hungary: its rows are in a process of its own"):
        next(there._tables["Hungary"].chunks(["age"]))


def test_a_dry_run_from_the_policies_that_the_sites_reported(federation, here):
    partition = fs.ClientPartition.connect(federation["study"])
    ours, theirs = (fs.GLORE.from_formula("num > 0 ~ age", p).explain() for p in (here, partition))
    pd.testing.assert_frame_equal(theirs.table, ours.table)


def test_a_site_that_is_gone_for_good_is_left_out(federation, here):
    there = fs.ClientPartition.connect(federation["study"], without=["Hungary"])
    assert tuple(there.sites) == ("Cleveland", "Long Beach")
    assert there.n_entities == here.n_entities - len(here.rows["Hungary"])
    with pytest.raises(PartitionError, match=r"no site Hungry; there are Cleveland, Hungary"):
        fs.ClientPartition.connect(federation["study"], without=["Hungry"])


def analyze_twice(study, formula):
    partition = fs.ClientPartition.connect(study)
    for _ in range(2):
        print(fs.GLORE.from_formula(formula, partition).fit().params.to_numpy().tobytes().hex(), flush=True)


def test_two_analysts_at_once_do_not_meet(federation, here, tmp_path):
    formulas = [FORMULA, "num > 0 ~ sex"]
    logs = [tmp_path / "one", tmp_path / "other"]
    analysts = [
        Forked(analyze_twice, federation["study"], formula, log=log)
        for formula, log in zip(formulas, logs, strict=True)
    ]
    assert [analyst.wait(600) for analyst in analysts] == [0, 0]
    reported = [log.read_text().split() for log in logs]
    for formula, found in zip(formulas, reported, strict=True):
        expected = fs.GLORE.from_formula(formula, here).fit().params.to_numpy().tobytes().hex()
        assert found == [expected, expected]


def test_a_policy_refuses_by_name(federation):
    partition = fs.ClientPartition.connect(federation["study"])
    fs.GLORE.from_formula(FORMULA, partition)
    with pytest.raises(PolicyError, match=r"Hungary: its policy \(differencing\)"):
        fs.GLORE.from_formula("num > 0 ~ age + thalach", partition)  # one patient lacks it


def test_revoked_sites_enter_no_masked_sum_while_the_site_serves(federation):
    home = federation["home"]
    partition = impatient(federation, 600)
    assert main(["site", "revoke", str(home / "Cleveland"), "Hungary"]) == 0
    with pytest.raises(fs.errors.SecurityError, match=r"Cleveland: its owner has pinned no key of Hungary"):
        fs.GLORE.from_formula("num > 0 ~ age", partition).fit(masked=True)
    assert main(["site", "pin", str(home / "Cleveland"), str(home / "Hungary")]) == 0
    assert fs.GLORE.from_formula("num > 0 ~ age", partition).fit(masked=True).converged


def test_after_a_restart_model_and_ledger_go_on(federation, here, capsys):
    folder, running = federation["home"] / "Hungary", federation["running"]
    partition = fs.ClientPartition.connect(federation["study"])
    model = fs.GLORE.from_formula(FORMULA, partition)
    first = model.fit()
    before = (folder / "ledger.jsonl").read_bytes()
    running["Hungary"].send_signal(signal.SIGTERM)
    assert running["Hungary"].wait(600) == 0
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"

    def is_named():
        # Hungary was seen too long ago already, or does not answer; another site may be slow as well.
        with pytest.raises(EngineError, match=r"(seen last|did not answer within 3 s).*without=") as caught:
            impatient(federation, 3)
        return "Hungary" in str(caught.value)

    try:
        until_true(is_named)
    finally:
        running["Hungary"] = serve(folder)
        wait(folder, running["Hungary"])
    np.testing.assert_array_equal(model.fit().params, first.params)
    with pytest.raises(PolicyError, match=r"Hungary: its policy \(differencing\)"):
        fs.GLORE.from_formula("num > 0 ~ age + thalach", partition)  # one patient lacks it
    again = fs.GLORE.from_formula(FORMULA, partition).fit()
    np.testing.assert_array_equal(again.params, fs.GLORE.from_formula(FORMULA, here).fit().params)
    assert (folder / "ledger.jsonl").read_bytes().startswith(before)
    statement = again.receipt().statements["Hungary"]
    assert statement.ordinal > 2 and statement.previous
    assert fs.verify_receipt(again.receipt(), partition.fingerprints).ok
    assert main(["site", "ledger", str(folder)]) == 0
    assert "Every entry fits the chain" in capsys.readouterr().out


def test_a_journal_goes_on(federation, tmp_path, here):
    partition = fs.ClientPartition.connect(federation["study"], journal=tmp_path / "journal")
    expected = fs.GLORE.from_formula(FORMULA, partition).fit().params
    again = fs.ClientPartition.connect(federation["study"], journal=tmp_path / "journal")
    result = fs.GLORE.from_formula(FORMULA, again).fit()
    np.testing.assert_array_equal(result.params, expected)
    assert again.engine._journal.taken_up > 10


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "lacks layout, sites"),
        ('layout = "diagonal"\n[sites]', r"layout: expected .horizontal.*or .vertical."),
        ('layout = "vertical"\ncoordinator = "A"\n[sites]', r"coordinator: expected .apart."),
        ('layout = "horizontal"\ntransport = "pigeon"\n[sites]\nA = "a"', r"transport: expected .folder."),
        ('layout = "horizontal"\nlayuot = 1\n[sites]', "unknown entry 'layuot'"),
        ('layout = "horizontal"\n[sites]', r"lists no site to ask.*fedstat federation join"),
        ('layout = "horizontal"\n[sites]\nA = 1', "expected a fingerprint in quotes for A"),
        ("layout = ", "not a TOML file"),
    ],
)
def test_a_file_that_means_nothing_is_named(tmp_path, text, expected):
    (tmp_path / "federation.toml").write_text(text)
    with pytest.raises(PartitionError, match=expected):
        fs.ClientPartition.connect(tmp_path)


def test_another_transport_is_handed_over(here, federation, tmp_path):
    class Pigeons:
        def send(self, site, request):
            return here.sites[site].answer(request)

    text = (federation["study"] / "federation.toml").read_text()
    (tmp_path / "federation.toml").write_text(text.replace('transport = "folder"', 'transport = "pigeons"'))
    there = fs.ClientPartition.connect(tmp_path, transport=Pigeons())
    assert fs.GLORE.from_formula("num > 0 ~ age", there).fit().converged


def test_tables_that_do_not_fit_together_are_listed(here, federation):
    class Odd:
        def send(self, site, request):
            answer = here.sites[site].answer(request)
            return answer.replace(b"numbers", b"numbars") if site == "Hungary" else answer

    with pytest.raises(PartitionError, match=r"'age' holds numbers at 'Cleveland', numbars at 'Hungary'"):
        fs.ClientPartition.connect(federation["study"], transport=Odd())


def test_no_file(tmp_path):
    with pytest.raises(PartitionError, match=r"is absent; make it with 'fedstat federation new"):
        fs.ClientPartition.connect(tmp_path / "federation.toml")
    with pytest.raises(PartitionError, match=r"federation new [^']*study'$"):
        fs.ClientPartition.connect(tmp_path / "study")


def test_a_connected_partition_says_why_it_is_not_pickled(federation):
    there = fs.ClientPartition.connect(federation["study"])
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(NotAvailableError, match=r"connected to is not pickled.*ClientPartition\.connect"):
            copied(there)
    assert pickle.loads(pickle.dumps(fs.GLORE.from_formula(FORMULA, there).fit())).nobs
