"""GLORE's published estimates of the benchmark of federated learning, homogeneous setting, seed 1."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs


@pytest.fixture(scope="module")
def folder(shared_data):
    return shared_data / "fl_benchmark_sim" / "homogenous" / "seed1"


@pytest.fixture(scope="module")
def result(folder):
    frames = {path.name[:5]: pd.read_csv(path) for path in sorted(folder.glob("Site*.train.*.csv"))}
    assert [len(frame) for frame in frames.values()] == [700, 1400, 2800]
    partition = fs.ClientPartition.from_frames(frames, layout="horizontal")
    return fs.GLORE.from_formula("y ~ .", partition).fit()


def test_coefficients_are_the_published_ones(folder, result):
    published = pd.read_csv(folder / "Coef_glore.csv", header=None)[0].head(9).astype(float)
    np.testing.assert_allclose(result.params, published, rtol=0, atol=1e-8)


def test_covariance_is_the_published_one_to_its_six_decimals(folder, result):
    published = pd.read_csv(folder / "Cov_glore.csv").to_numpy()
    np.testing.assert_allclose(result.cov_params(), published, rtol=0, atol=5.1e-7)


def test_six_rounds_are_enough_and_two_for_keys(result):
    """Agreement on columns, sites' own fits, and the evaluations, all counted."""
    assert result.converged
    assert result.ledger.rounds <= 6 + 2
    assert result.model.fit(masked=False).ledger.rounds <= 6
