"""What federated averaging is said to ask for, held against what it asked for."""

from itertools import chain

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.federation.door.policy import Budget
from fedstat.models.fedavg.explain import FedAvgPlan

RNG = np.random.default_rng(3)
FRAME = pd.DataFrame({"x": RNG.normal(size=240), "z": RNG.normal(size=240)})
FRAME["site"] = RNG.choice(["S1", "S2", "S3"], len(FRAME))
FRAME["y"] = (RNG.uniform(size=len(FRAME)) < 1.0 / (1.0 + np.exp(-FRAME["x"]))).astype(int)

FITS = {
    "averaging": (fs.FedAvg, {"rounds": 4}),
    "a share": (fs.FedAvg, {"rounds": 6, "fraction": 0.4, "seed": 5}),
    "standardised": (fs.FedAvg, {"rounds": 2, "standardize": True, "init": [0.1, 0.2, 0.3]}),
    "in clear": (fs.FedAvg, {"rounds": 3, "masked": False}),
    "fair, in clear": (fs.QFedAvg, {"rounds": 2, "masked": False}),
    "momentum": (fs.FedAvgM, {"rounds": 3}),
    "fair": (fs.QFedAvg, {"rounds": 3}),
    "proximal": (fs.FedProx, {"rounds": 3}),
}


def model_of(kind, policies=None):
    partition = fs.ClientPartition.from_frame(FRAME, by="site", policies=policies)
    return kind.from_formula("y ~ x + z", partition)


@pytest.mark.parametrize("name", FITS)
@pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")
def test_a_fit_asks_for_what_was_foretold(foretold, name):
    kind, arguments = FITS[name]
    model = model_of(kind)
    result = model.fit(**arguments)
    foretold(model, result, FedAvgPlan(model, model.fit, arguments), arguments["rounds"], arguments)


@pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")
def test_totals_are_those_of_the_ledger():
    model = model_of(fs.FedAvg)
    explanation = model.explain(rounds=4)
    ledger = model.fit(rounds=4).ledger
    before = model._agreement_ledger
    assert sum(expected for _, (_, expected, _) in explanation.rounds) == ledger.rounds - before.rounds
    assert explanation.totals()["sends"].sum() == ledger.bytes - before.bytes


def test_what_a_sites_coefficients_tell_is_said_where_they_come_in_clear():
    model, words = model_of(fs.FedAvg), "learns from each site's coefficients"
    assert words not in " ".join(str(model.explain(rounds=2)).split())
    assert words in " ".join(str(model.explain(rounds=2, masked=False)).split())


def test_a_refusal_is_told_as_the_site_will_say_it():
    policy = fs.Policy(privacy=Budget(1.0, 1e-7))
    model = model_of(fs.FedAvg, policies={"S2": policy})
    told = chain(*model.explain(rounds=2).refused["S2"].values())
    with pytest.raises(fs.errors.PolicyError, match=r"S2: its policy \(privacy budget\)") as refusal:
        model.fit(rounds=2)
    assert str(refusal.value) in told
