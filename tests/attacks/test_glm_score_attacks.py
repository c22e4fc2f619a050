"""Scores of models over rows at coefficients of the asker's making: rows between two cuts, rows of a cell."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.models.horizontal.session import add

pytestmark = pytest.mark.filterwarnings("ignore")
N = 600
PUBLISHED = {
    "a": {"kind": "number", "range": [0, 1]},
    "b": {"kind": "number", "range": [0, 1]},
    "z": {"kind": "number", "range": [20, 80]},
    "y": {"kind": "number", "range": [0, 1]},
}
POLICIES = ("open", "strict")


def table():
    """Of all sites one person, at site A, has a and b."""
    random = np.random.default_rng(7)
    a = (random.random(N) < 0.3).astype(float)
    b = (random.random(N) < 0.3) * (1.0 - a)
    b[np.flatnonzero(a)[0]] = 1.0
    z = random.uniform(20, 80, N)
    y = (random.random(N) < 1.0 / (1.0 + np.exp((50.0 - z) / 10.0))).astype(float)
    site = np.array(["A", "B", "C"])
    start = int(np.flatnonzero(a * b)[0])
    return pd.DataFrame({"a": a, "b": b, "z": z, "y": y, "site": site[(np.arange(N) - start) % 3]})


FRAME = table()
PERSON = FRAME[FRAME["a"] * FRAME["b"] == 1.0].iloc[0]


def asked(policy, betas, sites=("A", "B", "C")):
    """Sums over sites that a coordinator is told that departs: at coefficients (R, 4) of its own, in turn."""
    frame = FRAME[FRAME["site"].isin(sites)]
    published = dict.fromkeys(sites, PUBLISHED) if policy == "strict" else None
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy, published=published)
    model = fs.FederatedGLM.from_formula("y ~ a + b + z", partition, family=sm.families.Binomial())
    session = model.open_session("glm", masked=policy == "strict")
    common = {"shift": np.zeros(4), "scale": np.ones(4), "observed": np.array(False)}

    def protocol():
        yield session.opening() + session.ask_all("start", {}, model.distribution.to_json())
        told = []
        for beta in betas:
            replies = yield session.ask_all("sum_scores", common | {"beta": np.asarray(beta, dtype=float)})
            told.append({name: add(replies, name) for name in replies[0].arrays})
        return told

    return model.run(session, protocol())[0]


def cuts():
    """Coefficients far below zero up to a value of z, and far above from there on, on either side of one."""
    z = np.sort(FRAME["z"].to_numpy())
    at = N // 2
    return z[at], [(-1e6 * cut, 0.0, 0.0, 1e6) for cut in (z[at - 1 : at + 2][:-1] + z[at : at + 2]) / 2.0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sessions", [1, 2])
def test_the_row_between_two_cuts(policy, sessions):
    z, betas = cuts()
    if sessions == 1:
        low, high = asked(policy, betas)
    else:
        low, high = (asked(policy, [beta])[0] for beta in betas)
    change = high["score"] - low["score"]
    assert change[3] / change[0] == pytest.approx(z, rel=1e-6)


CELLS = np.array([(0, 0), (1, 0), (0, 1), (1, 1)], dtype=float)
SHAPES = [(0, 1, -1), (0.5, 1, 1), (-0.5, -1, 1), (0.3, 2, -0.5), (-1, 0.5, 1.5), (0.2, -1.5, -0.7)]


def told_of_cell(policy, scale=1.0):
    """Number of rows, z and y of those with both a and b, from sums at coefficients that are zero for z."""
    betas = scale * np.array(SHAPES)
    told = asked(policy, [(*beta, 0.0) for beta in betas])
    eta = betas[:, :1] + betas[:, 1:] @ CELLS.T
    mu = 1.0 / (1.0 + np.exp(-eta))
    V = mu * (1.0 - mu)
    rows = np.vstack([np.column_stack([np.ones(len(mu)), -mu]), np.column_stack([np.zeros(len(mu)), V])])
    sums = [[one["score"][j] for one in told] + [one["information"][0, j] for one in told] for j in (0, 3)]
    (_, *n), (_, *z) = (np.linalg.lstsq(rows, np.array(one), rcond=None)[0] for one in sums)
    # Pearson's statistic of outcomes of zero and one is linear in them.
    pearson = np.array([one["totals"][2] for one in told]) - (mu**2 / V) @ n
    y = np.linalg.lstsq((1.0 - 2.0 * mu) / V, pearson, rcond=None)[0]
    return n[3], z[3], y[3]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_only_row_of_a_cell(policy):
    n, z, y = told_of_cell(policy)
    print(policy, n, z, y, PERSON)
    assert (n, z, y) == pytest.approx((1.0, PERSON["z"], PERSON["y"]), abs=1e-3)
