"""Marginal effects with one column held at many values: the rows at each value of the other are counted."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")

LEVELS, SITES = np.arange(9.0), ("S0", "S1", "S2")


def table():
    """Column z has nine values; one person has 8, and one 7."""
    rng = np.random.default_rng(0)
    n = 900
    z = np.minimum(rng.binomial(8, 0.25, n), 5).astype(float)
    z[17], z[400] = 8.0, 7.0
    x = rng.normal(size=n)
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(1.2 - 0.5 * x - 0.7 * (z - 2.0)))).astype(float)
    return pd.DataFrame({"site": np.repeat(SITES, n // 3), "x": x, "z": z, "y": y})


def counts(policy):
    """Rows by value of z, from average effects with x held at forty values."""
    partition = fs.ClientPartition.from_frame(table(), by="site", policy=policy)
    result = fs.GLORE.from_formula("y ~ x + z", partition).fit(local=False)
    held, b, slopes = np.linspace(-25.0, 25.0, 40), result.params, []
    for value in held:
        effects = result.get_margeff(atexog={"x": value}).margeff
        slopes.append(len(table()) * effects["z"] / b["z"])
    mean = 1.0 / (1.0 + np.exp(-(b["Intercept"] + b["x"] * held[:, None] + b["z"] * LEVELS)))
    return np.linalg.lstsq(mean * (1.0 - mean), np.array(slopes), rcond=None)[0]


def test_rows_at_rare_values_are_not_counted():
    truth = np.bincount(table().z.astype(int), minlength=9)
    np.testing.assert_allclose(counts("open"), truth, atol=0.01)
    with pytest.raises(PolicyError):
        counts("strict")


def test_effects_of_one_model_are_released_in_all_ways():
    partition = fs.ClientPartition.from_frame(table(), by="site", policy="strict")
    result = fs.GLORE.from_formula("y ~ x + z", partition).fit(local=False)
    for options in ({}, {"method": "eyex"}, {"method": "dyex"}, {"atexog": {"x": 0.5}}):
        assert np.isfinite(result.get_margeff(**options).margeff).all()
