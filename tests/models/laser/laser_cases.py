"""Simulated customers of three sites; each site lacks some of them."""

import numpy as np
import pandas as pd

import fedstat as fs

SITES = ("bank", "shop", "telecom")


def customers(n=900, seed=0, missing=0.3, kind="binary"):
    """Key, three columns of each site, and a response at the bank that is no linear function."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 9))
    eta = 1.2 * X[:, 0] - X[:, 3] * (X[:, 3] > 0) + 0.8 * np.abs(X[:, 6]) + 0.5 * X[:, 7]
    names = [f"{site}{j}" for site in SITES for j in range(3)]
    frame = pd.DataFrame(X, columns=names).assign(id=np.arange(n))
    if kind == "normal":
        frame["y"] = 10.0 + 3.0 * (eta + 0.5 * rng.normal(size=n))
    elif kind == "multiclass":
        frame["y"] = np.digitize(eta + 0.5 * rng.logistic(size=n), [-0.3, 1.2]).astype(float)
    else:
        frame["y"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-2.0 * eta))).astype(float)
    tables = {}
    for k, site in enumerate(SITES):
        has = (rng.random(n) >= missing) | (k == 0)
        own = frame.loc[has, ["id", *names[3 * k : 3 * k + 3]]]
        tables[site] = own.merge(frame[["id", "y"]], on="id") if k == 0 else own
    return tables


def partition(n=900, order=SITES, **given):
    """The same as a partition, in some order of the clients."""
    tables = customers(n, **given)
    return fs.ClientPartition.from_frames({site: tables[site] for site in order}, on="id")


def model(part, **options):
    """A small network over all columns."""
    return fs.LASER.from_formula("y ~ .", part, hidden=(6,), width=4, **options)
