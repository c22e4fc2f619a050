"""Clusters over institutions: the same whoever is asked in which way, and never downhill."""

import numpy as np
import pandas as pd
import pytest
from cluster_cases import QUICK, agreement, make_frames, partition_of, rises

import fedstat as fs


@pytest.fixture(scope="module")
def frames():
    return make_frames()


@pytest.fixture(scope="module")
def result(frames):
    return fs.M2SEM(partition_of(frames[0]), 2, 1).fit(**QUICK)


def test_clusters_are_found(frames, result):
    assert agreement(result.labels, frames[1]) > 0.85
    assert result.converged and result.sizes["share"].is_monotonic_decreasing
    np.testing.assert_allclose(result.posterior.sum(axis=1), 1.0)


@pytest.mark.parametrize("missing", [0.0, 0.25])
def test_the_penalised_likelihood_never_falls(missing):
    frames, _ = make_frames(missing=missing, seed=3)
    frames["D"] = pd.DataFrame({"id": range(150), "d0": np.random.default_rng(1).normal(size=150)})
    frames["D"]["d1"] = frames["D"]["d0"] + np.random.default_rng(2).normal(size=150)
    found = fs.M2SEM(partition_of(frames), 2, 1).fit(select="bic", n_init=2)
    assert rises(found) > -1e-8
    assert found.path["bic"].min() >= found.bic - 1e-6


def test_order_of_clients_and_masks_are_irrelevant(frames, result):
    turned = dict(reversed(frames[0].items()))
    other = fs.M2SEM(partition_of(turned), 2, 1).fit(**QUICK)
    clear = fs.M2SEM(partition_of(turned), 2, 1).fit(masked=False, **QUICK)
    assert other.llf == result.llf and other.posterior.equals(result.posterior)
    np.testing.assert_allclose(clear.posterior, result.posterior, atol=1e-12)
    assert result.record_.masked and not clear.record_.masked


def test_only_differences_of_log_densities_leave_for_an_entity(result):
    """(n, K - 1) for each client and round of the one mixture, three of which k-means began; r comes back."""
    left = result.ledger.releases()
    each = left[left["kind"] == "per entity"]
    assert set(each["step"]) == {"improve"}
    up = each[each["receiver"] == "coordinator"]
    assert set(up["array"]) == {"differences"} and up["masked"].all()
    assert {tuple(shape) for shape in up["shape"]} == {(150, 1)}
    assert set(each[each["sender"] == "coordinator"]["array"]) == {"r"}


def test_results_come_back_from_a_file(result, tmp_path):
    result.save(tmp_path / "fit")
    again = fs.load(tmp_path / "fit")
    assert str(again.summary()) == str(result.summary())
    pd.testing.assert_frame_equal(again.profiles(), result.profiles())
    with pytest.raises(fs.errors.NotAvailableError, match="predict"):
        again.posterior  # noqa: B018
