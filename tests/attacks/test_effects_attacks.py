"""Sums for marginal effects at coefficients chosen by the analyst count the rows on one side of a cut."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.models.horizontal.session import add
from fedstat.models.run import FitAttempt

N = 600
PUBLISHED = {
    "z": {"kind": "number", "range": [20, 80]},
    "x": {"kind": "number", "range": [-10, 10]},
    "y": {"kind": "number", "range": [0, 1]},
}


def table():
    random = np.random.default_rng(3)
    z, x = random.uniform(20, 80, N), random.normal(size=N)
    y = (random.random(N) < 1.0 / (1.0 + np.exp((50.0 - z) / 10.0))).astype(float)
    return pd.DataFrame({"z": z, "x": x, "y": y, "site": np.tile(["A", "B", "C"], N // 3)})


FRAME = table()
LOOSE = fs.Policy(min_count=1, max_share=1.0)
"""A policy that allows sums over single rows; the usual open policy already refuses them."""


def reported(policy, points, log=False, together=True):
    """Sums of the mean at points, in one request for all points or in one request for each."""
    strict = fs.Policy.strict() if policy == "strict" else LOOSE
    published = dict.fromkeys("ABC", PUBLISHED) if strict.masked_only else None
    partition = fs.ClientPartition.from_frame(FRAME, by="site", policy=strict, published=published)
    model = fs.FederatedGLM.from_formula("y ~ z + x", partition, family=sm.families.Binomial())
    session = model._open_session("glm", masked=strict.masked_only)
    fixed = {"shift": np.zeros(3), "scale": np.ones(3), "log": np.array(log), "products": np.array(False)}
    fixed |= {"beta": np.zeros(3), "constant": np.array(0.0)}
    ends = [[0.0, 1e9] if log else [-1e9, 0.0]] * len(points)

    def protocol():
        found = []
        for some in [points] if together else [points[k : k + 1] for k in range(len(points))]:
            yield session.opening() + session.request_all("start", {}, model.distribution.to_json())
            request = {"changed": np.array(some), "ends": np.array(ends[: len(some)])}
            replies = yield session.request_all("sum_effects", fixed | request)
            found += add(replies, "changes").tolist()
        return np.array(found)

    return FitAttempt(model, model._new_ledger()).run(protocol(), session.masked_sites)


def cuts(steep):
    """Coefficients under which means go from zero to one below, and above, one row's value of z."""
    z = np.sort(FRAME["z"].to_numpy())
    around = (z[N // 2 - 1 : N // 2 + 1] + z[N // 2 : N // 2 + 2]) / 2.0
    return [(-steep * cut, steep, 0.0) for cut in around]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("steep", [1e6, 50.0])
def test_rows_between_two_cuts_are_not_counted(together, steep):
    below, above = reported("loose", cuts(1e6))
    assert round(below - above) == 1  # the row between the two
    with pytest.raises(PolicyError):
        reported("strict", cuts(steep), together=together)


def test_logarithms_of_means_sum_values_beyond_a_cut():
    """The logarithm of a steep mean is the predictor on one side: its sum is that of few rows' values."""
    z = np.sort(FRAME["z"].to_numpy())
    cut = (z[0] + z[1]) / 2.0
    point = [(-1e3 * cut, 1e3, 0.0)]
    (level,) = reported("loose", point, log=True)
    np.testing.assert_allclose(cut - level / 1e3, z[0], atol=1e-3)
    with pytest.raises(PolicyError):
        reported("strict", point, log=True)
