"""Cover of the intervals, with and without noise; ``private_coverage_simulation.py`` says what is drawn."""

import numpy as np
import pytest
from private_coverage_simulation import covers, simulate


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Binomial", "Gaussian"])
@pytest.mark.parametrize("epsilon", [1.0, 3.0, np.inf])
def test_intervals_cover(family, epsilon):
    ours, _ = covers(simulate(family, epsilon, 100))
    # A thousand intervals that are correlated within a repetition: an error of about .01.
    assert 0.92 < ours.mean() < 0.98
    assert ours.mean(axis=0).min() > 0.85
