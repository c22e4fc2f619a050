"""Dry runs of federated averaging: who learns what, and what would be refused."""

from itertools import chain

import numpy as np
import pandas as pd
import pytest

import fedstat as fs

RNG = np.random.default_rng(3)
FRAME = pd.DataFrame({"x": RNG.normal(size=240), "z": RNG.normal(size=240)})
FRAME["site"] = RNG.choice(["S1", "S2", "S3"], len(FRAME))
FRAME["y"] = (RNG.uniform(size=len(FRAME)) < 1.0 / (1.0 + np.exp(-FRAME["x"]))).astype(int)


def model_of(kind, policies=None):
    partition = fs.ClientPartition.from_frame(FRAME, by="site", policies=policies)
    return kind.from_formula("y ~ x + z", partition)


def test_what_a_sites_coefficients_reveal_is_said_where_they_come_unmasked():
    model, words = model_of(fs.FedAvg), "learns from each site's coefficients"
    assert words not in " ".join(str(model.explain(rounds=2)).split())
    assert words in " ".join(str(model.explain(rounds=2, masked=False)).split())


def test_a_refusal_is_reported_as_the_site_will_say_it():
    policy = fs.Policy(refused_kinds=frozenset({"aggregate"}))
    model = model_of(fs.FedAvg, policies={"S2": policy})
    reported = chain(*model.explain(rounds=2, masked=False).refused["S2"].values())
    with pytest.raises(fs.errors.PolicyError, match=r"S2: its policy \(refused kinds\)") as refusal:
        model.fit(rounds=2, masked=False)
    assert str(refusal.value) in reported
