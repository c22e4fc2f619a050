"""Pooled intervals cover the truth where records are missing depending on the response."""

import pytest
from impute_simulation import simulate


@pytest.mark.slow
def test_intervals_cover():
    found = simulate(200)
    assert found["coverage"].between(0.91, 0.985).all()
    assert 0.93 < found["coverage"].mean() < 0.97
    assert found["bias_in_sd"].abs().max() < 0.3
