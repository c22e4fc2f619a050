"""Clusters adjusted for covariates: covariates by which effects would be those of few entities."""

import numpy as np
import pandas as pd
import pytest
from refusals import refused_for

import fedstat as fs
from fedstat.errors import DesignError, FedstatError, PolicyError

N, VICTIM = 120, 17
ALLOWING = fs.Policy.strict(per_entity="any", formulas="any")
QUICK = {"n_init": 1, "starts": "sum", "select": None, "cov_type": None}


def make_frames():
    rng = np.random.default_rng(2)
    frames = {}
    for site in "ABC":
        X = rng.standard_normal((N, 1)) + rng.standard_normal((N, 3))
        frame = pd.DataFrame(X, columns=[f"{site.lower()}{p}" for p in range(3)])
        frames[site] = frame.assign(id=range(N))
    one = (np.arange(N) == VICTIM) * 1.0
    frames["A"] = frames["A"].assign(
        age=rng.normal(50.0, 9.0, N), one=one, rare=np.where(one, "seldom", "often")
    )
    frames["A"]["near"] = one + 1e-9 * rng.standard_normal(N)
    return frames


COLUMNS = [f"{site}{p}" for site in "abc" for p in range(3)]


def model_of(adjust, policy):
    partition = fs.ClientPartition.from_frames(make_frames(), on="id", policy=policy)
    return fs.M2SEM(partition, 2, 1, columns=COLUMNS, adjust={"A": adjust})


def test_what_an_indicator_of_one_entity_reads():
    """Its effects on columns are what that entity's values are away from the others, but for its factor."""
    found = model_of("~ one", "open").fit(**QUICK)
    x = make_frames()["A"][["a0", "a1", "a2"]]
    expected = x.loc[VICTIM] - x.drop(index=VICTIM).mean()
    assert np.ptp(found.covariate_effects()["estimate"].to_numpy() - expected) < 0.05


@pytest.mark.parametrize("adjust", ["~ one", "~ near", "~ age + one", "~ exp(20 * one)"])
def test_a_covariate_of_one_entity_is_refused(adjust):
    with pytest.raises(PolicyError, match="share"):
        model_of(adjust, ALLOWING)


@pytest.mark.parametrize("policy", ["open", ALLOWING])
def test_a_level_of_one_entity_is_refused_by_all(policy):
    with pytest.raises((DesignError, PolicyError)):
        model_of("~ C(rare)", policy)


def test_entities_that_a_covariate_leaves_out_are_not_revealed_by_a_difference():
    """Return estimates with and without a covariate that one entity alone lacks."""
    frames = make_frames()
    frames["A"].loc[VICTIM, "age"] = np.nan
    partition = fs.ClientPartition.from_frames(frames, on="id", policy=ALLOWING)
    fs.M2SEM(partition, 2, 1, columns=COLUMNS).fit(**QUICK)
    with pytest.warns(fs.errors.DataWarning), refused_for("differencing"):
        fs.M2SEM(partition, 2, 1, columns=COLUMNS, adjust={"A": "~ age"}).fit(**QUICK)


def test_a_strict_owner_lets_covariates_be_named_and_not_computed():
    partition = fs.ClientPartition.from_frames(
        make_frames(), on="id", policy=fs.Policy.strict(per_entity="any")
    )
    fs.M2SEM(partition, 2, 1, columns=COLUMNS, adjust={"A": "~ age"}).fit(**QUICK)
    with pytest.raises(FedstatError, match="formulas"):
        fs.M2SEM(partition, 2, 1, columns=COLUMNS, adjust={"A": "~ log(age - 12.3456)"})
