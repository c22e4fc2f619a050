"""Cox regression, survival curves and tables over sites in processes of their own: to the bit as here."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from operating import make_federation, served_sites

import fedstat as fs

TABLE = fs.datasets.make_survival()
NAMES = {"Bonn": "bonn", "Kiel": "kiel", "Trier": "trier", "Ulm": "ulm"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("hospitals")
    frames = {
        name: TABLE[TABLE["hospital"] == hospital].drop(columns="hospital").reset_index(drop=True)
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


def test_cox_regression_is_that_of_one_process_to_the_bit(both):
    models = [fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(arm)", one) for one in both]
    assert models[0].explain().passes
    theirs, ours = (model.fit() for model in models)
    np.testing.assert_array_equal(theirs.params, ours.params)
    np.testing.assert_array_equal(theirs.cov_params(), ours.cov_params())
    tests = [fit.test_proportional_hazards().tidy() for fit in (theirs, ours)]
    pd.testing.assert_frame_equal(*tests, check_exact=True)
    assert fs.verify_receipt(theirs.receipt(), both[0].fingerprints).ok


def test_times_are_those_of_one_process_to_the_bit(both):
    models = [
        fs.FederatedAFT.from_formula("Surv(months, died) ~ age + C(arm)", one, distribution="loglogistic")
        for one in both
    ]
    assert models[0].explain().passes
    theirs, ours = (model.fit(cov_type="robust") for model in models)
    np.testing.assert_array_equal(theirs.params, ours.params)
    np.testing.assert_array_equal(theirs.cov_params(), ours.cov_params())
    means = [fit.predictions(times=[12, 24]).tidy() for fit in (theirs, ours)]
    pd.testing.assert_frame_equal(*means, check_exact=True)


def test_effects_of_a_treatment_are_those_of_one_process_to_the_bit(both):
    given = {"treatment": "arm ~ age + C(stage)", "estimand": "ATO"}
    models = [fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", one, **given) for one in both]
    assert models[0].explain(grid=3, until=48).passes
    fits = [model.fit(grid=3, until=48) for model in models]
    pd.testing.assert_frame_equal(*(fit.tidy() for fit in fits), check_exact=True)
    assert fs.verify_receipt(fits[0].receipt(), both[0].fingerprints).ok


def test_a_common_baseline_and_scores_are_those_of_one_process_to_the_bit(both):
    models = [fs.FederatedCox.from_formula("Surv(months, died) ~ age + strata(arm)", one) for one in both]
    given = {"baseline": "common", "grid": 6, "until": 48, "ties": "breslow", "cov_type": "robust"}
    theirs, ours = (model.fit(**given) for model in models)
    np.testing.assert_array_equal(theirs.params, ours.params)
    np.testing.assert_array_equal(theirs.cov_params(), ours.cov_params())
    models = [fs.FederatedCox.from_formula("Surv(months, died) ~ age", one) for one in both]
    scores = [model.fit(local=False).evaluate(times=[12, 24, 36]).tidy() for model in models]
    pd.testing.assert_frame_equal(*scores, check_exact=True)


def test_curves_and_tables_are_those_of_one_process(both):
    curves = [fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", one).fit(3, until=60) for one in both]
    pd.testing.assert_frame_equal(*(fit.tidy() for fit in curves), check_exact=True)
    formula = "Surv(months / 2, months, C(died, levels=[0, 1])) ~ arm"
    competing = [fs.CumulativeIncidence.from_formula(formula, one).fit(3, until=60) for one in both]
    pd.testing.assert_frame_equal(*(fit.tidy() for fit in competing), check_exact=True)
    tables = [fs.table_one(one, "age + C(stage)", by="arm") for one in both]
    pd.testing.assert_frame_equal(*(table.tidy() for table in tables), check_exact=True)
