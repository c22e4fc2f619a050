"""P-values adjusted for the number of tests."""

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from fedstat.kernels.multiple_tests import adjust


@pytest.mark.parametrize("n", [1, 2, 12])
@pytest.mark.parametrize("method", ["holm", "bonferroni", "sidak"])
def test_adjusted_p_values_are_those_of_statsmodels_and_gaps_are_not_counted(n, method):
    p = np.random.default_rng(n).uniform(0.0, 0.2, n)
    expected = multipletests(p, method=method)[1]
    np.testing.assert_allclose(adjust(p, method), expected, rtol=1e-13)
    with_gap = adjust(np.insert(p, 1, np.nan), method)
    assert np.isnan(with_gap[1])
    np.testing.assert_allclose(np.delete(with_gap, 1), expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [([], []), ([0.04], [0.04]), ([0.04, 0.02], [0.04, 0.04]), ([0.5, 0.3, 0.9], [1.0, 0.9, 1.0])],
)
def test_holms_method_by_hand(p, adjusted):
    np.testing.assert_allclose(adjust(p), adjusted)
