"""A small study over three sites, and the pooled design that an analyst with all rows would have."""

from __future__ import annotations

import numpy as np
import pandas as pd

import fedstat as fs

COLUMNS = {
    "Bank": ["y", "x0", "x1", "x2"],
    "Clinic": ["x3", "x4", "f"],
    "Registry": ["x5", "x6", "x7", "x8"],
}
NAMES = ["x0", "x1", "x2", "x3", "x4", "f[T.b]", "f[T.c]", "f[T.d]", "x5", "x6", "x7", "x8"]


def make_table(n=300, seed=0, response="normal"):
    """Nine correlated columns in odd units, one factor, and a response of three columns and one level."""
    rng = np.random.default_rng([seed, 11])
    Z = rng.normal(size=(n, 9)) + 0.6 * rng.normal(size=(n, 1))
    table = pd.DataFrame(Z * [1, 10, 0.1, 1, 1, 5, 1, 1, 1] + 3.0, columns=[f"x{j}" for j in range(9)])
    table["f"] = rng.choice(list("abcd"), n)
    eta = 0.9 * Z[:, 0] - 0.6 * Z[:, 3] + 0.5 * Z[:, 5] + 0.8 * (table["f"] == "b")
    if response == "normal":
        table["y"] = 20.0 + 4.0 * (eta + rng.normal(size=n))
    elif response == "binary":
        table["y"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    else:
        table["y"] = rng.poisson(np.exp(0.5 * eta)).astype(float)
    return table


def make_partition(table, columns=None, **options):
    return fs.ClientPartition.from_frame(table, columns=columns or COLUMNS, **options)


def make_model(table, columns=None, partition=None, **options):
    given = {} if partition is None else partition
    return fs.VerticalGLM.from_formula("y ~ .", make_partition(table, columns, **given), **options)


def pooled_columns(table, names=NAMES):
    """The design without intercept, (n, p), in the order of the names."""
    coded = pd.get_dummies(table["f"], dtype=float).add_prefix("f[T.").add_suffix("]")
    return pd.concat([table, coded], axis=1)[list(names)].to_numpy(float)
