"""Regressions of categories over sites in processes of their own: to the bit as here."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from operating import make_federation, served_sites

import fedstat as fs

TABLE = fs.datasets.make_hospitals()
NAMES = {"Cleveland": "cleveland", "Hungary": "hungary", "Long Beach": "beach"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("hospitals")
    frames = {
        name: TABLE.loc[TABLE["hospital"] == hospital, ["age", "sex", "cp"]].reset_index(drop=True)
        for hospital, name in NAMES.items()
    }
    make_federation(home, frames)
    with served_sites(home, frames):
        yield home


@pytest.fixture(scope="module")
def both(home):
    there = fs.ClientPartition.connect(home / "study")
    frames = {name: pd.read_csv(home / f"{name}.csv") for name in there.sites}
    return there, fs.ClientPartition.from_frames(frames, layout="horizontal")


@pytest.mark.parametrize("kind", ["Ordinal", "Multinomial"])
def test_a_fit_is_that_of_one_process_to_the_bit(both, kind):
    models = [getattr(fs, f"Federated{kind}").from_formula("cp ~ age + sex", one) for one in both]
    assert models[0].explain().passes
    theirs, ours = (model.fit() for model in models)
    np.testing.assert_array_equal(theirs.params, ours.params)
    np.testing.assert_array_equal(theirs.cov_params(), ours.cov_params())
    np.testing.assert_array_equal(theirs.get_margeff().margeff, ours.get_margeff().margeff)
    pd.testing.assert_frame_equal(theirs.evaluate().tidy(), ours.evaluate().tidy(), check_exact=True)
    if kind == "Ordinal":
        tests = [fit.test_proportional_odds().tidy() for fit in (theirs, ours)]
        pd.testing.assert_frame_equal(*tests, check_exact=True)
    assert fs.verify_receipt(theirs.receipt(), both[0].fingerprints).ok
