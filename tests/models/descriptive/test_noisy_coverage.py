"""Limits of tables and curves with noise hold the truth as often as they state."""

from __future__ import annotations

import pytest
from noisy_coverage import simulate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("n", "epsilon", "sites"), [(1000, 1.0, 4), (5000, 0.5, 1), (5000, 3.0, 10)])
def test_limits_hold_the_truth(n, epsilon, sites):
    found = simulate(n, epsilon, sites, 60).set_index("figure")["coverage"]
    # 60 draws: an error of 0.02 for dependent figures, and of 0.03 for single ones such as a correlation.
    assert found.drop(["correlation", "restricted mean"]).between(0.9, 0.99).all(), found
    assert found[["correlation", "restricted mean"]].between(0.87, 1.0).all(), found
    assert 0.93 < found.mean() < 0.975, found
