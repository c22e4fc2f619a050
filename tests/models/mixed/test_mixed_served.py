"""Mixed models over sites in processes of their own: to the bit as in one process."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from operating import make_federation, served_sites

import fedstat as fs

TABLE = fs.datasets.make_repeated(3, 20, seed=4).assign(
    days=lambda table: np.random.default_rng(1).negative_binomial(2, 0.3, len(table))
)
NAMES = {"Aachen": "aachen", "Bonn": "bonn", "Chemnitz": "chemnitz"}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    home = tmp_path_factory.mktemp("visits")
    frames = {
        name: TABLE[TABLE["hospital"] == hospital].drop(columns="hospital").reset_index(drop=True)
        for hospital, name in NAMES.items()
    }
    make_federation(home, frames)
    with served_sites(home, frames):
        there = fs.ClientPartition.connect(home / "study")
        own = {name: pd.read_csv(home / f"{name}.csv") for name in there.sites}
        yield there, fs.ClientPartition.from_frames(own, layout="horizontal")


@pytest.mark.parametrize(
    ("formula", "settings", "after"),
    [
        ("score ~ month + (1 + month | patient)", {}, "test_variances"),
        ("relapse ~ month + (1 | patient)", {"family": sm.families.Binomial(), "nagq": 5}, "get_margeff"),
        (
            "days ~ month + (1 | patient)",
            {"family": sm.families.NegativeBinomial(alpha=1.0)},
            "conf_int_variances",
        ),
    ],
)
def test_the_fit_is_that_of_one_process_to_the_bit(both, formula, settings, after):
    models = [fs.FederatedMixed.from_formula(formula, one, **settings) for one in both]
    assert models[0].explain().passes
    theirs, ours = (model.fit() for model in models)
    np.testing.assert_array_equal(theirs.params, ours.params)
    np.testing.assert_array_equal(theirs.cov_params(), ours.cov_params())
    pd.testing.assert_frame_equal(theirs.variances, ours.variances, check_exact=True)
    there, here = (getattr(fit, after)() for fit in (theirs, ours))
    if after == "get_margeff":
        there, here = there.tidy(), here.tidy()
    pd.testing.assert_frame_equal(there, here, check_exact=True)
    assert fs.verify_receipt(theirs.receipt(), both[0].fingerprints).ok
