"""Regression under a privacy budget at served sites, and with owners who approve every analysis."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from operating import make_federation, serve, wait

import fedstat as fs
from fedstat.errors import ConsentError, DescriptionError
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.operator.command_line import main

SITES, N = ("A", "B", "C"), 1_500
RNG = np.random.default_rng(3)
BUDGET = Budget(3.0, 1e-6, colluding=1)
BOUNDS = {"y": [0, 1], "x": (-4.0, 4.0), "g": ["high", "low"]}


def frame():
    x, g = np.clip(RNG.normal(size=N), -4, 4), RNG.choice(["high", "low"], N)
    y = RNG.random(N) < 1.0 / (1.0 + np.exp(-(x - 0.5 * (g == "low"))))
    return pd.DataFrame({"y": y.astype(int), "x": x, "g": g})


FRAMES = {name: frame() for name in SITES}


def fit(partition, epsilon=1.0):
    return fs.GLORE.from_formula("y ~ x + g", partition).fit(epsilon=epsilon, bounds=BOUNDS)


def test_strict_sites_that_release_nothing_exact_fit_a_regression(tmp_path):
    policy = Policy.strict(privacy=BUDGET, exact="none")
    study = make_federation(tmp_path, FRAMES, policy=policy)
    for name in SITES:
        assert main(["site", "describe", str(tmp_path / name)]) == 0
    running = {name: serve(tmp_path / name) for name in SITES}
    try:
        for name, process in running.items():
            wait(tmp_path / name, process)
        found = fit(fs.ClientPartition.connect(study))
        assert (np.abs(found.params - [0.0, 1.0, -0.5]) < 5 * found.bse).all() and found.price < 1.6
        # Another connection has the same noise, for nothing, also after a restart.
        running["A"].kill()
        running["A"].wait()
        running["A"] = serve(tmp_path / "A")
        wait(tmp_path / "A", running["A"])
        partition = fs.ClientPartition.connect(study)
        assert "epsilon 1 of 3 at delta 1e-06 is charged" in str(partition.describe())
        np.testing.assert_array_equal(fit(partition).params, found.params)
        with pytest.raises(DescriptionError, match="privacy budget"):
            fit(partition, 2.99)
        assert "epsilon 1 of 3 at delta 1e-06" in str(fs.ClientPartition.connect(study).describe())
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_an_owner_approves_a_plan_that_states_the_charge():
    policy = Policy(privacy=BUDGET, approval="owner")
    table = pd.concat([one.assign(site=name) for name, one in FRAMES.items()])
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    with pytest.raises(ConsentError):
        fit(partition)
    for site in partition.sites.values():
        ((digest, plan),) = site.pending.items()
        text = " ".join(str(plan.learned).split())
        assert "each site is charged epsilon 1 at delta 1e-06" in text
        assert "for the values of one row added or removed, against the coordinator and 1 of 3 sites" in text
        site.approve(digest)
    assert fit(partition).converged
    assert all(site.privacy.epsilon_spent <= 1.0 for site in partition.sites.values())


def test_the_site_refuses_a_coalition_that_its_owner_fears():
    """A coordinator that states fewer colluding sites than an owner allows gets nothing."""
    table = pd.concat([one.assign(site=name) for name, one in FRAMES.items()])
    partition = fs.ClientPartition.from_frame(table, by="site", policy=Policy(privacy=BUDGET))
    site = partition.sites["B"]
    model = fs.GLORE.from_formula("y ~ x + g", partition)
    # What the coordinator believes of the policy is not what decides.
    site._noise.policy = Policy(privacy=Budget(3.0, 1e-6, colluding=2))
    with pytest.raises(DescriptionError, match="adds noise against 2 colluding sites"):
        model.fit(epsilon=1.0, bounds=BOUNDS)
    assert not site.site_ledger.charges.made
