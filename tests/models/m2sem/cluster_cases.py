"""Partitions with clusters, for tests of fits."""

import numpy as np
import pandas as pd

import fedstat as fs

QUICK = {"n_init": 1, "starts": "sum", "select": None}


def make_frames(n=150, sites=3, P=4, K=2, seed=0, missing=0.0, apart=2.0):
    """Frames of clients with continuous columns, by clusters k (n,)."""
    rng = np.random.default_rng(seed)
    k = rng.integers(K, size=n)
    frames = {}
    for c in range(sites):
        mu = rng.standard_normal((K, 1)) if c == sites - 1 else apart * np.linspace(-0.5, 0.5, K)[:, None]
        eta = mu[k] + rng.standard_normal((n, 1))
        X = eta @ rng.uniform(0.5, 1.0, (1, P)) + rng.standard_normal((n, P))
        frame = pd.DataFrame(X, columns=[f"{'abcdefgh'[c]}{p}" for p in range(P)])
        frame.insert(0, "id", np.arange(n))
        frames["ABCDEFGH"[c]] = frame[rng.random(n) >= missing]
    return frames, k


def partition_of(frames, **options):
    return fs.ClientPartition.from_frames(frames, on="id", **options)


def agreement(labels, k):
    """Share of entities in the right cluster, of two."""
    right = float(np.mean(np.asarray(labels) - 1 == k))
    return max(right, 1.0 - right)


def rises(result):
    """Smallest rise of a penalized log-likelihood between two rounds of one mixture."""
    return min(
        np.diff(part["llf"].to_numpy()).min(initial=0.0) for _, part in result.history.groupby("mixture")
    )
