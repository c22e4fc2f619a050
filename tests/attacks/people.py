"""Patients of several hospitals, whose rows are attacked."""

from __future__ import annotations

import numpy as np
import pandas as pd

import fedstat as fs


def people(n=600, sites=3):
    rng = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "site": np.repeat([f"S{k}" for k in range(sites)], n // sites),
            "age": rng.integers(20, 90, n).astype(float),
            "sex": rng.integers(0, 2, n).astype(float),
            "bmi": np.round(rng.normal(26, 4, n), 1),
            "z": rng.normal(size=n),
            "income": np.round(rng.lognormal(10, 0.6, n), 2),
            "y": (rng.random(n) < 0.4).astype(float),
        }
    )


def rows(policy):
    return fs.ClientPartition.from_frame(people(), by="site", policy=policy)
