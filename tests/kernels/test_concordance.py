"""Pairs of rows in known order: few rows compared each with each, as the compiled loops count them."""

import numpy as np
import pytest

from fedstat.kernels import partial_likelihood


@pytest.mark.parametrize("n", [1, 2, 7, 60])
@pytest.mark.parametrize("late", [False, True])
def test_few_rows_are_counted_as_many(monkeypatch, n, late):
    rng = np.random.default_rng(n)
    stop = rng.integers(2, 12, n).astype(np.float64)  # ties in time
    start = rng.integers(0, 2, n) * float(late)
    table = partial_likelihood.RiskTable.of(
        start, stop, rng.random(n) < 0.6, weight=rng.random(n), stratum=rng.integers(0, 3, n)
    )
    eta = rng.integers(0, 6, n).astype(np.float64)  # and in the predictor
    few = partial_likelihood.concordance(table, eta)
    monkeypatch.setattr(partial_likelihood, "FEW", 0)
    for one, other in zip(few, partial_likelihood.concordance(table, eta), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
