"""The alarm of imputations stands above their regressions; tests/contracts has all other results."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_alarm_of_imputations_names_a_remedy_that_exists():
    rng = np.random.default_rng(3)
    n = 1200
    x, z = rng.normal(size=(2, n))
    y = x + z + 2.0 * rng.exponential(size=n)
    there = rng.random(n) < 1.0 / (1.0 + np.exp(1.5 * (y - 2.0)))
    key = np.arange(n)
    frames = {
        "A": pd.DataFrame({"id": key, "y": y, "x": x}),
        "B": pd.DataFrame({"id": key[there], "z": z[there]}),
    }
    partition = fs.ClientPartition.from_frames(frames, on="id")
    imputations = fs.impute(partition, "y ~ x + z", m=3, seed=1)
    for result in (imputations, imputations.regress()):
        banner = " ".join(result.summary().as_text().partition("\n\n")[0].split())
        assert banner.startswith("*** RESPONSE NOT NORMAL") and "Regress by VFEMRegression and fit(" in banner
    assert fs.VFEMRegression.from_formula("y ~ x + z", partition).fit(method="weighted").converged
