"""Errors of correlations of mixed columns at five sites, next to those of the first prototype.

pytest -m slow tests/models/copula/test_errors_simulation.py
"""

import pytest
from errors_simulation import EPSILONS, PROTOTYPE, measure

ALLOWED = 1.15


@pytest.mark.slow
@pytest.mark.parametrize("p, n", [(20, 10_000), (20, 70_000), (55, 70_000)])
def test_errors_at_epsilon_one(p, n):
    assert measure(p, n, 1.0, 3)[1] < ALLOWED * PROTOTYPE[p, n][EPSILONS.index(1.0)][1]
