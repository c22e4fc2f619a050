"""Cover of the intervals, with and without noise; ``private_coverage_simulation.py`` says what is drawn."""

import numpy as np
import pytest
from private_coverage_simulation import covers, simulate


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Binomial", "Gaussian"])
@pytest.mark.parametrize("epsilon", [1.0, 3.0, np.inf])
@pytest.mark.parametrize("polish", [0, 1])
def test_intervals_cover(family, epsilon, polish):
    ours = covers(simulate(family, epsilon, 100, polish), polish)
    # A thousand intervals that are correlated within a repetition: an error of about .01.
    # Closed-form errors take derivatives for known, and are a little too small at a small epsilon.
    least, worst = (0.90, 0.80) if polish else (0.92, 0.85)
    assert least < ours.mean() < 0.98
    assert ours.mean(axis=0).min() > worst
