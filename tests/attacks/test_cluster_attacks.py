"""Rows from covariances by clusters: products of the scores of different rows that are in one cluster.

The score of a row is its residual times its columns. Where two persons alone share a cluster, the covariance
by clusters less that by rows (HC0) is s t' + t s' of their scores s and t: all columns of both follow.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from released import miss, total_sums

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")

N, PAIR = 300, (17, 18)
FORMULA = "y ~ age + income"


def table():
    """Households of one person, but for a pair; wards of ten, and the same after one person has moved."""
    rng = np.random.default_rng(0)
    k = np.arange(N)
    frame = pd.DataFrame(
        {
            "site": np.repeat(["S0", "S1", "S2"], N // 3),
            "age": rng.integers(20, 90, N).astype(float),
            "income": np.round(rng.lognormal(10, 0.6, N), 2),
            "y": rng.normal(100, 15, N).round(1),
            "person": k.astype(float),
            "household": np.where(k == PAIR[1], PAIR[0], k).astype(float),
            "ward": k // 10 * 1.0,
        }
    )
    return frame.assign(moved=np.where(k == PAIR[0], 2.0, frame.ward), pairs=k // 2 * 1.0)


def meat(partition, clusters=None):
    """Sum over clusters of products of their scores; of rows' without a column of clusters."""
    labels = [] if clusters is None else [clusters]
    made = fs.FederatedOLS.from_formula(FORMULA, partition, labels=labels)
    kwds = (
        {"cov_type": "HC0"}
        if clusters is None
        else {"cov_type": "cluster", "cov_kwds": {"groups": clusters, "correction": "CR1"}}
    )
    bread = total_sums(fs.FederatedOLS.from_formula(FORMULA, partition).fit(local=False))[0].to_numpy()
    found = bread @ made.fit(local=False, **kwds).cov_params().to_numpy() @ bread
    G = N if clusters is None else table()[clusters].nunique()
    return found if clusters is None else found / (G / (G - 1) * (N - 1) / (N - 3))


def two_rows(difference):
    """Columns of the two rows from s t' + t s', (2, p): roots of a quadratic each."""
    both = difference[0, 0] / 2.0
    total, product = difference[0, 1:] / both, np.diag(difference)[1:] / (2.0 * both)
    apart = np.sqrt(np.maximum(total**2 - 4.0 * product, 0.0))
    return np.array([(total - apart) / 2.0, (total + apart) / 2.0])


def partition(policy):
    return fs.ClientPartition.from_frame(table(), by="site", policy=policy)


def test_a_pair_in_a_cluster_is_not_read():
    frame, at = table(), partition("open")
    found = two_rows(meat(at, "household") - meat(at))
    for j, name in enumerate(("age", "income")):
        for value, truth in zip(found[:, j], np.sort(frame.loc[list(PAIR), name]), strict=True):
            assert miss(value, truth, frame[name]) < 1e-6
    at = partition("strict")
    meat(at)
    with pytest.raises(PolicyError):
        meat(at, "household")


def test_a_person_who_is_in_another_cluster_is_not_read():
    frame, at = table(), partition("open")
    found = two_rows(meat(at, "ward") - meat(at, "moved"))
    truth = frame.loc[PAIR[0], ["age", "income"]].to_numpy(float)
    assert min(miss(value, truth[0], frame.age) for value in found[:, 0]) < 1e-6
    assert min(miss(value, truth[1], frame.income) for value in found[:, 1]) < 1e-6
    at = partition("strict")
    meat(at, "ward")
    meat(at, "ward")
    with pytest.raises(DescriptionError, match="other clusters or strata"):
        meat(at, "moved")


def test_clusters_of_many_pairs_are_allowed():
    at = partition("strict")
    assert np.isfinite(meat(at, "pairs")).all()
