"""Where all tables are in one process the partition says so, as do every summary and a saved fit."""

from __future__ import annotations

import numpy as np
import pandas as pd
from statsmodels.genmod.families import Gaussian

import fedstat as fs
from fedstat.federation.disclosure.threat_statements import ONE_PROCESS_NOTE, STRICT_TRIAL_NOTE
from fedstat.federation.transport.remote import RemoteEngine


def partition(**given):
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 240))
    frame = pd.DataFrame({"x": x, "z": z, "y": x + z + rng.normal(size=240)})
    return fs.ClientPartition.from_frame(frame.assign(site=np.repeat(list("ABC"), 80)), by="site", **given)


def columns():
    frame = partition().frames["A"].reset_index(drop=True)
    return fs.ClientPartition.from_frame(frame, columns={"P": ["y"], "Q": ["x"], "R": ["z"]})


def test_a_partition_and_its_fits_say_that_nothing_is_protected(tmp_path):
    assert repr(partition()).splitlines()[-1] == ONE_PROCESS_NOTE
    assert ONE_PROCESS_NOTE in partition()._repr_html_()
    fits = {
        "rows": fs.GLORE.from_formula("y > 0 ~ x + z", partition()).fit(),
        "averaged": fs.FedAvg.from_formula("y > 0 ~ x", partition()).fit(seed=1, standardize=True),
        "columns": fs.VFEMRegression.from_formula("y ~ .", columns()).fit(),
        "refitted": fs.VFEMRegression.from_formula("y ~ .", columns()).fit().refit("y ~ x"),
        "selected": fs.VerticalGLM.from_formula("y ~ .", columns()).fit(),
    }
    for name, fitted in fits.items():
        assert ONE_PROCESS_NOTE in fitted.notes, name
        if name != "refitted":
            fitted.save(tmp_path / name)
            assert ONE_PROCESS_NOTE in fs.load(tmp_path / name).notes, name


def test_a_rehearsal_says_that_it_is_one():
    strict = partition(policy="strict")
    assert repr(strict).splitlines()[-1] == STRICT_TRIAL_NOTE
    assert STRICT_TRIAL_NOTE in fs.FederatedGLM.from_formula("y ~ x", strict, family=Gaussian()).fit().notes
    assert RemoteEngine({}).setting == ""
