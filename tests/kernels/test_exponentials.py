"""Exponentials and logarithms by polynomials are those of numpy."""

import numpy as np

from fedstat.kernels.exponentials import NEGLIGIBLE, exponentials, log_one_plus


def powers(x):
    x, power = x.copy(), np.empty(len(x))
    exponentials(x, power, power.view(np.int64))
    return x


def test_exponentials_down_to_where_they_are_nothing():
    x = np.linspace(NEGLIGIBLE + 1e-6, 0.0, 10_001)
    np.testing.assert_allclose(powers(x), np.exp(x), rtol=1e-14)
    found = powers(np.array([NEGLIGIBLE, -1e300, -np.inf, np.nan]))
    assert not found[:3].any() and np.isnan(found[3])


def test_logarithms_of_one_and_a_share():
    s = np.linspace(0.0, 1.0, 10_001)
    np.testing.assert_allclose([log_one_plus(one) for one in s], np.log1p(s), rtol=0.0, atol=5e-16)
