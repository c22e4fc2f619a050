"""Cover of the intervals, with and without noise; ``private_coverage_simulation.py`` says what is drawn."""

import numpy as np
import pytest
from private_coverage_simulation import covers, simulate

from fedstat.models.copula.request import PooledRows


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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Binomial", "Gaussian"])
@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_intervals_over_rows_cover(family, epsilon):
    """Three sites with different rows add the noise together: .93 to .97, and errors of about .015."""
    rows = PooledRows({"A": 2_000, "B": 2_000, "C": 1_000}, 1)
    ours = covers(simulate(family, epsilon, 40, rows=rows))
    assert 0.915 < ours.mean() < 0.985
    assert ours.mean(axis=0).min() > 0.82
