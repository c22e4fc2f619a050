"""Facts that a summary must report."""

import numpy as np
import pytest
from oracle import ITERATIVE, packed

import fedstat as fs

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


SKETCHED = ITERATIVE | {"cross_products": "sketch"}


@pytest.fixture(scope="module")
def data():
    return fs.datasets.make_blocks(400, (3, 2, 2), (0.2, 0.4, 0.5), seed=3)


@pytest.fixture(scope="module")
def partition(data):
    return fs.ClientPartition.from_frames(data.frames, on=data.key, shared_seed=1)


def notes(partition, coordinator=None, **options):
    model = fs.VFEMRegression.from_formula("y ~ .", partition, coordinator=coordinator, between="independent")
    return " ".join(model.fit(**packed(**(SKETCHED | options))).notes)


def test_per_entity_values_and_what_they_disclose_are_named(partition):
    text = notes(partition)
    assert "linear predictor for each of its entities" in text
    assert "recover a site's raw rows" in text


def test_the_accuracy_of_the_sketch_is_stated(partition):
    assert "a sketch of 20,000 rows. The error of a product is about 0.71 %" in notes(partition)


def test_who_knows_the_seed_is_named(partition):
    assert "the coordinator is at one of them, 'Response'" in notes(partition)
    assert "seed" not in notes(partition, coordinator="apart")
    assert "seed" not in notes(partition, cov_type="expected")


def test_expected_standard_errors_say_what_they_need(partition):
    assert "missing completely at random" in notes(partition, cov_type="expected")
    assert "missing completely at random" not in notes(partition)


def test_exchanged_columns_are_named(partition):
    assert "columns of sites were revealed" in notes(partition, cross_products="exact")


def test_complete_cases_have_the_errors_of_least_squares(partition):
    result = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit(method="cc")
    assert f"residual variance has {result.nobs - 8} degrees of freedom" in " ".join(result.notes)
    assert "degrees of freedom" not in notes(partition)


def test_supplemented_em_reports_its_asymmetry(data):
    frames = {name: data.frames[name] for name in ("Response", "B", "C")}
    partition = fs.ClientPartition.from_frames(frames, on=data.key, shared_seed=1)
    assert "relative asymmetry" in notes(partition, cov_type="sem", cross_products="exact")


def test_intervals_after_mean_imputation_do_not_add_what_its_residuals_hold(data, partition):
    result = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit(method="impute")
    prediction = result.get_prediction(partition)
    assert prediction.blocks.nunique() > 1
    np.testing.assert_allclose(prediction.var_resid, result.scale)


def test_a_coefficient_that_is_small_next_to_its_error_is_printed_in_fixed_point():
    from fedstat.inference.tables import number

    assert number(3.457e-05, 4, 0.0155) == "0.0000"
    assert number(3.457e-05, 4, 1e-5) == "3.457e-05"
