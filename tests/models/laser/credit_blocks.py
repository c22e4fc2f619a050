"""Credit card holders among four sites with five columns each, as in the publication, and a lender.

The table of Yeh and Lien (2009), "default of credit card clients", where it is at hand: its first 20 columns,
in their order. The lender knows who defaulted, and nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

import fedstat as fs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from credit_default import DATA

FILE = DATA / "UCI_Credit_Card.csv"
CLIENTS = ("Bank", "Bureau", "Billing", "Payments")
HELD = 5
"""Columns of each client."""
N_TRAIN = 24_000


def read():
    """Columns (30,000, 20) in their own units, and defaults (30,000,)."""
    table = pd.read_csv(FILE)
    y = table.pop("default.payment.next.month").to_numpy()
    return np.ascontiguousarray(table.to_numpy(dtype=np.float64)[:, : HELD * len(CLIENTS)]), y


def split(n, seed):
    """Rows to learn from and rows to predict."""
    order = np.random.default_rng(1000 + seed).permutation(n)
    return order[:N_TRAIN], order[N_TRAIN:]


def partition(X, y, seen):
    """Rows among the sites; `seen` (n, 4) says who has which."""
    n, frames = len(y), {"Lender": pd.DataFrame({"id": np.arange(len(y)), "default": y.astype(float)})}
    for k, site in enumerate(CLIENTS):
        if seen[:, k].any():
            own = pd.DataFrame(X[:, HELD * k : HELD * (k + 1)], columns=[f"{site}{j}" for j in range(HELD)])
            frames[site] = own.assign(id=np.arange(n))[seen[:, k]]
    return fs.ClientPartition.from_frames(frames, on="id")


def patterns(n, missing, seed):
    """Every row keeps its own pattern, (n, 4)."""
    return np.random.default_rng([seed, 7]).random((n, len(CLIENTS))) >= missing
