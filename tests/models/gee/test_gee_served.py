"""Estimating equations over sites in processes of their own: to the bit as in one process."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from operating import make_federation, served_sites

import fedstat as fs

VISITS = runpy.run_path(str(Path(__file__).parents[2] / "reference" / "gee" / "visits.py"))["visits"]()
NAMES = {"Bonn": "bonn", "Kiel": "kiel", "Ulm": "ulm"}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    home = tmp_path_factory.mktemp("hospitals")
    frames = {
        name: VISITS[VISITS["hospital"] == hospital].drop(columns="hospital").reset_index(drop=True)
        for hospital, name in NAMES.items()
    }
    make_federation(home, frames)
    with served_sites(home, frames):
        there = fs.ClientPartition.connect(home / "study")
        tables = {name: pd.read_csv(home / f"{name}.csv") for name in there.sites}
        yield there, fs.ClientPartition.from_frames(tables, layout="horizontal")


def test_estimating_equations_are_those_of_one_process_to_the_bit(both):
    settings = {"groups": "patient", "time": "visit", "family": sm.families.Binomial(), "cov_struct": "ar1"}
    models = [fs.FederatedGEE.from_formula("ill ~ dose + arm", one, **settings) for one in both]
    assert models[0].explain().passes
    theirs, ours = (model.fit(cov_type="bias_reduced") for model in models)
    np.testing.assert_array_equal(theirs.params, ours.params)
    np.testing.assert_array_equal(theirs.cov_params(), ours.cov_params())
    assert theirs.dep_params == ours.dep_params
    tests = [fit.score_test("visit").statistic for fit in (theirs, ours)]
    assert tests[0] == tests[1]
    pd.testing.assert_frame_equal(
        *(fit.get_margeff().summary_frame() for fit in (theirs, ours)), check_exact=True
    )
    assert fs.verify_receipt(theirs.receipt(), both[0].fingerprints).ok
