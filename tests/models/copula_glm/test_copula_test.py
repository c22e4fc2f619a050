"""The test of the copula by the step on the rows, and when the step is the default."""

import numpy as np
import pandas as pd
import pytest
from copula_test_simulation import SLOPES, draw, fit

import fedstat as fs
from fedstat.errors import NotAvailableError


@pytest.fixture(scope="module")
def tested():
    return {
        shape: fit(draw(shape, np.random.default_rng(4)), 30.0, draws=15, polish=1)
        for shape in ("copula", "humps")
    }


def note_of(result):
    return next(note for note in result._summary_notes() if note.kind == "copula")


def test_the_test_rejects_where_no_copula_describes_the_columns(tested):
    good, bad = tested["copula"], tested["humps"]
    assert good._record.test.pvalue > 0.05 and note_of(good).severity == "info"
    assert bad._record.test.pvalue < 1e-3 and note_of(bad).severity == "critical"
    assert "P (copula)" in str(bad.summary()) and "DO NOT FOLLOW THE COPULA" in str(bad.summary())


def test_the_step_is_from_the_estimate_of_the_moments(tested, tmp_path):
    result = tested["humps"]
    table = result.copula_test
    np.testing.assert_allclose(table["statistic"], table["step"] / table["std_error"])
    start = result.params - table["step"]
    # The moments are off by more than the step: the truth is nearer to the final estimate.
    truth = pd.Series({"Intercept": -0.5, **SLOPES})
    assert (result.params - truth).abs().sum() < (start - truth).abs().sum()
    result.save(tmp_path / "fit.fed")
    assert fs.load(tmp_path / "fit.fed").copula_test.equals(table)


@pytest.mark.slow
def test_moves_of_the_simulation_have_the_deviations_of_the_test():
    """The size of the test over tables that follow the copula, by deviations of the statistics."""
    found = [
        fit(draw("copula", np.random.default_rng([seed, 9]), 2_000), 20.0, seed, 20, polish=1)
        for seed in range(5)
    ]
    statistics = np.array([one._record.test.statistic for one in found])
    assert 0.6 < np.sqrt(np.mean(statistics**2)) < 1.45


def test_a_step_is_the_default_where_its_noise_is_small():
    table = draw("copula", np.random.default_rng(1))
    much, little = fit(table, 20.0, draws=10), fit(table, 0.5, draws=10)
    assert much.cov_type == "closed form" and little.cov_type == "bootstrap"
    # Both spend what was stated.
    for result, epsilon in ((much, 20.0), (little, 0.5)):
        assert result.epsilon == epsilon and f"epsilon {epsilon:g}" in str(result.summary())
    with pytest.raises(NotAvailableError, match=r"polish=1"):
        _ = little.copula_test
    assert "does not test the copula" in " ".join(str(little.summary()).split())
