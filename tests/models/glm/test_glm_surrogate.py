"""Estimates that stop after a given number of steps from the sites' own fits."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import EstimationError, ModelError

F = sm.families
FAMILIES = {
    "binary": F.Binomial(),
    "count": F.Poisson(),
    "cost": F.Gamma(sm.families.links.Log()),
    "probit": F.Binomial(sm.families.links.Probit()),
}


def model(n, seed=0, response="binary", **change):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"site": rng.choice(list("ABC"), n, p=[0.2, 0.3, 0.5])})
    frame["x"], frame["z"] = rng.normal(size=(2, n))
    eta = 0.5 + frame["x"] - 0.5 * frame["z"]
    frame["binary"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["probit"], frame["count"] = frame["binary"], rng.poisson(np.exp(eta))
    frame["cost"] = rng.gamma(2.0, np.exp(eta))
    partition = fs.ClientPartition.from_frame(frame.assign(**change), by="site")
    return fs.FederatedGLM.from_formula(f"{response} ~ x + z", partition, family=FAMILIES[response])


def distance(one, full):
    """Length of the difference in standard errors of the full fit."""
    apart = (one.params - full.params).to_numpy()
    return float(np.sqrt(apart @ np.linalg.solve(full.cov_params().to_numpy(), apart)))


def pair(n, seed, response="binary", rounds=1):
    made = model(n, seed, response)
    full, one = made.fit(), made.fit(rounds=rounds)
    return distance(one, full), one, full


@pytest.mark.parametrize("response", FAMILIES)
def test_one_step_ends_within_the_length_of_the_score_that_remains(response):
    for seed in range(5):
        apart, one, full = pair(600, seed, response)
        said = one._fit.trace[-1].step
        assert 0.0 < apart < 1.05 * said < 0.3
        assert len(one._fit.trace) == 2 and one.converged
        assert one.ledger.rounds < full.ledger.rounds


def test_the_distance_shrinks_faster_than_the_standard_errors():
    """The error of the start decreases like n^-1 in the data's units, and after a step like n^-2.

    In standard errors of the exact fit the rates are n^-0.5 and n^-1.5.
    """
    sizes = np.array([300, 1200, 4800])
    apart, start = np.zeros((2, len(sizes), 8))
    for i, n in enumerate(sizes):
        for seed in range(8):
            apart[i, seed], one, _ = pair(n, seed)
            start[i, seed] = one._fit.trace[0].step
    middle, first = np.median(apart, axis=1), np.median(start, axis=1)
    slope, of_start = (np.polyfit(np.log(sizes), np.log(v), 1)[0] for v in (middle, first))
    assert slope < -1.0
    assert -0.9 < of_start < -0.2
    assert (middle < first**2).all()


def test_coefficients_are_as_good_as_those_of_the_full_fit():
    """Mean squared errors over samples differ by less than a percent of them."""
    truth = np.array([0.5, 1.0, -0.5])
    errors = np.zeros((2, 20, 3))
    for seed in range(20):
        _, one, full = pair(900, 1000 + seed)
        errors[:, seed] = one.params - truth, full.params - truth
    ratio = (errors[0] ** 2).mean(axis=0) / (errors[1] ** 2).mean(axis=0)
    np.testing.assert_allclose(ratio, 1.0, atol=0.01)


@pytest.mark.parametrize("response", FAMILIES)
def test_three_steps_are_the_full_fit(response):
    apart, three, full = pair(900, 3, response, rounds=3)
    assert apart < 1e-6
    np.testing.assert_allclose(three.bse, full.bse, rtol=1e-6)
    np.testing.assert_allclose(three.llf, full.llf, rtol=1e-10)


def test_one_step_is_newtons_from_the_mean_of_the_sites_fits_by_rows():
    made = model(600, 4)
    full, one = made.fit(), made.fit(rounds=1)
    frames = {s: site._data.frame for s, site in made.partition.sites.items()}
    fits, sizes = [], []
    for frame in frames.values():
        X = np.column_stack([np.ones(len(frame)), frame["x"], frame["z"]])
        fits.append(sm.GLM(frame["binary"], X, family=F.Binomial()).fit(tol=1e-14).params)
        sizes.append(len(frame))
    start = np.average(np.asarray(fits), axis=0, weights=sizes)
    stacked = pd.concat(frames.values())
    X = np.column_stack([np.ones(len(stacked)), stacked["x"], stacked["z"]])
    glm = sm.GLM(stacked["binary"], X, family=F.Binomial())
    step = np.linalg.solve(glm.hessian(start), glm.score(start))
    np.testing.assert_allclose(one.params, start - step, rtol=1e-9)
    assert distance(one, full) < 0.05


def test_the_summary_says_how_far_the_estimate_may_be():
    _, one, _ = pair(600, 5)
    text = " ".join(str(one.summary()).split())
    said = re.search(r"stops after one Newton step.*next step would be ([\d.e-]+) standard errors", text)
    assert said and float(said[1]) == pytest.approx(one._fit.trace[-1].step, rel=1e-2)
    assert "stops after" not in str(model(600, 5).fit().summary())


def test_a_site_without_a_fit_of_its_own_is_left_out_of_the_start():
    """A site whose outcomes are separated, and one where a column is constant."""
    made = model(900, 6)
    frames = {s: site._data.frame.copy() for s, site in made.partition.sites.items()}
    frames["A"]["binary"] = (frames["A"]["x"] > 0).astype(int)
    frames["B"]["z"] = 1.0
    tables = {s: frame.drop(columns="site", errors="ignore") for s, frame in frames.items()}
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal")
    changed = fs.FederatedGLM.from_formula("binary ~ x + z", partition, family=F.Binomial())
    full, one = changed.fit(), changed.fit(rounds=1)
    assert full.site_estimates.loc["A"].isna().all()
    assert distance(one, full) < 1.05 * one._fit.trace[-1].step
    assert distance(changed.fit(rounds=5), full) < 1e-6


def test_where_no_site_has_a_fit_there_is_nothing_to_start_from():
    made = model(900, 7)
    tables = {
        s: site._data.frame.drop(columns="site", errors="ignore") for s, site in made.partition.sites.items()
    }
    for k, (site, frame) in enumerate(tables.items()):
        tables[site] = frame.assign(x=frame["binary"] if k % 2 else 1 - frame["binary"])
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal")
    changed = fs.FederatedGLM.from_formula("binary ~ x + z", partition, family=F.Binomial())
    assert changed.fit().converged
    with pytest.raises(EstimationError, match="rounds: no site has its own fit as a start"):
        changed.fit(rounds=1)


@pytest.mark.parametrize("rounds", [0, -1, 1.5, "1"])
def test_rounds_are_a_whole_number(rounds):
    with pytest.raises(ModelError, match="rounds"):
        model(300).fit(rounds=rounds)


def test_rounds_need_the_sites_own_fits():
    with pytest.raises(
        ModelError, match="rounds: the steps start from the sites' own fits, which local=False leaves"
    ):
        model(300).fit(rounds=1, local=False)


def test_robust_covariances_go_with_it():
    made = model(900, 8)
    one, full = made.fit(rounds=1, cov_type="HC0"), made.fit(cov_type="HC0")
    np.testing.assert_allclose(one.bse, full.bse, rtol=0.01)
