"""Tables of three sites, and what the pooled fit or the error is."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pooled import fit_pooled

import fedstat as fs
from fedstat.errors import FedstatError

F = sm.families
SITES = ("A", "B", "C")
N = 600


def table(seed=1, n=N):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "site": np.repeat(SITES, n // 3),
            "x": rng.normal(size=n),
            "z": rng.normal(size=n),
            "g": rng.choice(list("abc"), n),
        }
    )
    eta = 0.3 * frame["x"] - 0.4 * frame["z"]
    frame["y"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["count"] = rng.poisson(np.exp(eta))
    return frame


FRAME = table()


def by_site(frame):
    return {s: part.drop(columns="site").reset_index(drop=True) for s, part in frame.groupby("site")}


def model(formula, frame, family=None, policy=None, **roles):
    tables = frame if isinstance(frame, dict) else by_site(frame)
    policies = None if policy is None else dict.fromkeys(tables, policy)
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal", policies=policies)
    return fs.FederatedGLM.from_formula(formula, partition, family=family or F.Binomial(), **roles)


def error_of(formula, frame, family=None, fit=None, **known):
    with pytest.raises(FedstatError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(formula, frame, family, **known).fit(**(fit or {}))
    return caught.value


def assert_pooled(ours, formula, frame, family=None, **roles):
    theirs = fit_pooled(formula, frame, family or F.Binomial(), **roles)
    assert list(ours.params.index) == list(theirs.params.index)
    np.testing.assert_allclose((ours.params - theirs.params) / theirs.bse, 0.0, atol=1e-7)
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-7)
