"""A privacy budget at sites in processes of their own: charged over restarts, and over coordinators."""

from __future__ import annotations

import os
import re
import signal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from forked import Forked
from noisy_counts import BinsRequest, counting, request_margins  # noqa: F401
from operating import make_federation, serve, serving, wait

import fedstat as fs
from fedstat.errors import DescriptionError, EngineError, PolicyError, SecurityError
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.crypto.keys import random_bytes
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.transport.site_folder import load_identity, open_site, read_description
from fedstat.operator.command_line import main
from fedstat.privacy.discrete_gaussian import discrete_gaussian
from fedstat.privacy.zcdp import rho_of_budget, round_to_grid

SITES = ("A", "B", "C")
N = 300
RNG = np.random.default_rng(9)
FRAMES = {
    name: pd.DataFrame({"x": RNG.normal(size=N), "g": RNG.choice(["low", "high"], N)}) for name in SITES
}
EDGES = (-1.0, 0.0, 1.0)
THIRD = str(round_to_grid(rho_of_budget(1.0, 1e-6) / 3))


@pytest.fixture
def home(tmp_path):
    """Three described sites with a budget, none of which is served yet."""
    make_federation(tmp_path, FRAMES, policy=Policy.strict(privacy=Budget(1.0, 1e-6)))
    for name in SITES:
        assert main(["site", "describe", str(tmp_path / name)]) == 0
    return tmp_path


@pytest.fixture
def running():
    processes = {}
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


def start(home, running, *names):
    for name in names or SITES:
        running[name] = serve(home / name)
    for name in names or SITES:
        wait(home / name, running[name])


def stop(running, name):
    running[name].send_signal(signal.SIGTERM)
    running[name].wait(60)


def requested(partition, column="x", edges=EDGES, rho=THIRD, session="", how=lambda protocol, *_: protocol):
    session = session or os.urandom(8).hex()
    request = [(name, BinsRequest(column, rho, edges)) for name in partition.sites]
    protocol = how(request_margins(request, session), tuple(partition.sites), session)
    return {site: part for site, _, part in partition.engine.run(protocol, Ledger())}


def site_ledger(home, name):
    return read_ledger(home / name, name, load_identity(home / name).public)


def reported(command, home, name, capsys):
    capsys.readouterr()
    main(["site", command, str(home / name)])
    return capsys.readouterr().out


def test_a_budget_outlives_restarts_and_coordinators(home, running, capsys):
    start(home, running)
    study = home / "study"
    partition = fs.ClientPartition.connect(study)
    first = requested(partition)
    for name, frame in FRAMES.items():
        true = np.bincount(np.searchsorted(EDGES, frame["x"]), minlength=4)
        assert 0 < np.abs(first[name] - true).max() < 6.0 * float(Fraction(THIRD)) ** -0.5
    total = requested(partition, how=masked_protocol)
    np.testing.assert_array_equal(total["A"], sum(first.values()))
    assert not total["B"].any() and not total["C"].any()

    stop(running, "A")
    start(home, running, "A")
    again = fs.ClientPartition.connect(study)
    assert "Privacy budget of A: epsilon 0.556 of 1 at delta 1e-06 is charged, by 1 release" in str(
        again.describe()
    )
    np.testing.assert_array_equal(requested(again)["A"], first["A"])
    requested(again, "g", ())

    # Another coordinator, whom the owner of A now trusts, finds what the first has spent.
    other, exchange = home / "other", str(study / "exchange")
    assert main(["federation", "new", str(other), "--layout", "horizontal", "--exchange", exchange]) == 0
    assert main(["federation", "join", str(other), str(home / "A")]) == 0
    known = read_description(home / "A").coordinator
    assert main(["site", "pin", str(home / "A"), str(other), "--replace", known]) == 0
    second = fs.ClientPartition.connect(other)
    np.testing.assert_array_equal(requested(second)["A"], first["A"])
    requested(second, rho=THIRD, edges=(0.0,))
    with pytest.raises(DescriptionError, match=r"A: its policy \(privacy budget\) has rho .* left of 0.0244"):
        requested(second, rho=THIRD, edges=(0.5,))
    assert site_ledger(home, "A").charges.spent == 3 * Fraction(THIRD)

    status, shown, left = (reported(what, home, "A", capsys) for what in ("status", "check", "ledger"))
    assert re.search(r"privacy budget +epsilon 1 of 1 at delta 1e-06 is charged, by 3 releases", status)
    assert "Privacy budget" in shown and "Epsilon 1 of 1 at delta 1e-06 is charged" in shown
    assert "Privacy budget: epsilon 1 of 1" in left and "rho charged" in left
    assert re.search(rf"count_bins +counts +noisy aggregate .* {float(Fraction(THIRD)):.3g}\n", left)


def test_linked_records_are_aligned_and_counted_under_a_budget(tmp_path, running):
    """The presence of records is not part of the budget, and still needs the owners' consent."""
    frames = {
        name: frame[["x"]].add_suffix(name).assign(id=np.arange(N)).sample(frac=0.9, random_state=1)
        for name, frame in FRAMES.items()
    }
    study = make_federation(tmp_path, frames, ["id"], Policy.strict(privacy=Budget(1.0, 1e-6)))
    for name in SITES:
        assert main(["site", "describe", str(tmp_path / name)]) == 0
    start(tmp_path, running)
    assert main(["federation", "align", str(study)]) != 0

    def counted():
        for name in SITES:
            assert main(["site", "consent", str(tmp_path / name), *sorted({*SITES} - {name})]) == 0
        assert main(["federation", "align", str(study)]) == 0
        partition = fs.ClientPartition.connect(study)
        request = [(name, BinsRequest(f"x{name}", THIRD, EDGES)) for name in SITES]
        found = partition.engine.run(request_margins(request, partition._new_session()), Ledger())
        return partition, {site: part for site, _, part in found}

    _, first = counted()
    true = np.bincount(np.searchsorted(EDGES, frames["A"]["xA"]), minlength=4)
    assert 0 < np.abs(first["A"] - true).max() < 6.0 * float(Fraction(THIRD)) ** -0.5
    # After a new alignment the same rows are in another order.
    partition, again = counted()
    for name in SITES:
        np.testing.assert_array_equal(again[name], first[name])
        assert site_ledger(tmp_path, name).charges.spent == Fraction(THIRD)
    with pytest.raises(PolicyError, match="releases values that depend on rows only with noise"):
        fs.VFEMRegression.from_formula("xA ~ xB + xC", partition)


def serve_and_die(folder):
    """Serve until the first charge is on disk, and end there as by kill -9."""
    charged = SiteLedger.keep_charges

    def last(self, charges):
        charged(self, charges)
        os.kill(os.getpid(), signal.SIGKILL)

    SiteLedger.keep_charges = last
    return main(list(serving(folder)))


def test_killed_between_charge_and_answer(home, running, capsys):
    """The charge stands; what then leaves is what would have left, and it leaves once."""
    running["A"] = Forked(serve_and_die, home / "A", log=home / "A" / "log.txt")
    start(home, running, "B", "C")
    wait(home / "A", running["A"])
    path = home / "study" / "federation.toml"
    patient = path.read_text()
    path.write_text(patient.replace("timeout = 3600", "timeout = 4"))
    partition = fs.ClientPartition.connect(home / "study")
    path.write_text(patient)
    with pytest.raises(EngineError, match="did not answer"):
        requested(partition, session="0123456789abcdef")
    running["A"].wait(60)
    kept = site_ledger(home, "A")
    assert kept.charges.spent == Fraction(THIRD) and len(kept.charges.made) == 1
    assert not [link for chain in kept.chains for link in chain.entries if link.array == "counts"]
    assert "by 1 release" in reported("status", home, "A", capsys)

    start(home, running, "A")
    again = fs.ClientPartition.connect(home / "study")
    first, second = requested(again)["A"], requested(again)["A"]
    np.testing.assert_array_equal(first, second)
    kept = site_ledger(home, "A")
    assert kept.charges.spent == Fraction(THIRD)
    entries = [link for chain in kept.chains for link in chain.entries if link.array == "counts"]
    # The question of then, which waited, and two more: the one charge pays for all.
    assert [link.charged for link in entries] == ["0", "0", "0"]
    # It is the noise that the charge was for, and not one that was drawn since.
    stop(running, "A")
    site = open_site(home / "A")
    (charge,) = site.site_ledger.charges.made
    noise = discrete_gaussian(
        1 / Fraction(THIRD), 4, random_bytes(site._noise._keyed("noise", charge.answer))
    )
    true = np.bincount(np.searchsorted(EDGES, FRAMES["A"]["x"]), minlength=4)
    np.testing.assert_array_equal(first - true, noise)
    site.site_ledger.store.close()


def test_a_lost_ledger_is_a_spent_budget(home, running, capsys):
    """Somebody with write access to a site's folder who truncates its ledger does not get the budget back."""
    start(home, running)
    first = requested(fs.ClientPartition.connect(home / "study"))
    stop(running, "A")
    ledger = home / "A" / "ledger.jsonl"
    lines = ledger.read_bytes().split(b"\n")
    ledger.write_bytes(b"\n".join(line for line in lines if b'"charged"' not in line))
    with pytest.raises(SecurityError):
        open_site(home / "A")
    capsys.readouterr()
    assert main(["site", "declare-loss", str(home / "A"), "--reason", "cut"]) == 0
    assert "all of it counts as spent" in capsys.readouterr().out
    start(home, running, "A")
    partition = fs.ClientPartition.connect(home / "study")
    with pytest.raises(DescriptionError, match=r"A: .* has rho 0 left"):
        requested(partition)
    stop(running, "A")
    policy = home / "A" / "policy.toml"
    policy.write_text(policy.read_text().replace("epsilon = 1.0", "epsilon = 2.0"))
    start(home, running, "A")
    again = requested(fs.ClientPartition.connect(home / "study"))
    np.testing.assert_array_equal(again["A"], first["A"])
