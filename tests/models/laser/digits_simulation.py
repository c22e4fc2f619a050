"""Digits in quadrants: accuracy by method, and by what is missing in training and at prediction.

    python tests/models/laser/digits_simulation.py [seeds]

1,797 digits of scikit-learn, 8 x 8 pixels; each of four sites has a quadrant; a twin of the
published experiments with images. Ten classes, 30 epochs in batches of 128, all outputs in clear. Writes each
run to ``tests/benchmarks/results/laser_digits.csv``.
"""

from __future__ import annotations

import sys
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import table1_raw as raw
from sklearn.datasets import load_digits

import fedstat as fs

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "laser_digits.csv"
QUADRANTS = ("upper left", "upper right", "lower left", "lower right")
METHODS = ("local", "standard", "ensemble", "laser", "combinatorial")
IN_TRAINING, MISSING, N_TRAIN = (0.0, 0.5), (0.0, 0.1, 0.5), 1437


def read():
    """Pixels (n, 64), quadrant by quadrant, and digits (n,)."""
    pixels, digits = load_digits(return_X_y=True)
    parts = pixels.reshape(-1, 2, 4, 2, 4).transpose(0, 1, 3, 2, 4)
    return parts.reshape(len(digits), 64) / 16.0, digits


def partition(X, digits, seen, varied, new_data=False):
    n, frames = len(digits), {"Reader": pd.DataFrame({"id": np.arange(len(digits)), "digit": digits})}
    for k, site in enumerate(QUADRANTS):
        if seen[:, k].any():
            pixels = [j for j in range(16) if varied[16 * k + j]]
            own = {f"{site} {j}": X[:, 16 * k + j] for j in pixels}
            frames[site] = pd.DataFrame(own).assign(id=np.arange(n))[seen[:, k]]
    # Where a network has learned a digit by heart, gradients of a batch belong to fewer than five images.
    loose = fs.Policy(min_count=1)
    return fs.ClientPartition.from_frames(frames, on="id", policy=loose, new_data=new_data)


def run(X, digits, method, missing, seed):
    """Accuracy by what is missing at prediction, in expectation over patterns."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits))
    learned, tested = order[:N_TRAIN], order[N_TRAIN:]
    varied = X[learned].std(axis=0) > 0.02
    seen = rng.random((len(learned), 4)) >= missing
    model = fs.LASER.from_formula(
        "digit ~ .", partition(X[learned], digits[learned], seen, varied),
        outcome="multiclass", hidden=(32, 32), width=32,
    )  # fmt: skip
    fit = {"epochs": 30, "batch_size": 128, "calibration": 0.0, "exchange": "clear", "seed": seed}
    result = model.fit(method=method, **fit)
    right = {}
    for s in raw.SETS:
        seen = np.tile([bool(s >> k & 1) for k in range(4)], (len(tested), 1))
        P = result.predict_proba(partition(X[tested], digits[tested], seen, varied, True)).to_numpy()
        best = np.isclose(P, P.max(axis=1, keepdims=True))  # ties are guessed
        right[s] = np.mean(best[np.arange(len(tested)), digits[tested]] / best.sum(axis=1))
    if method == "local":
        right = {s: np.mean([right[1 << k] for k in raw.members_of(s)]) for s in raw.SETS}
    return [100 * sum(raw.weight_of(s, q) * right[s] for s in raw.SETS) / (1.0 - q**4) for q in MISSING]


def main(seeds=3):
    for kind in (fs.errors.DataWarning, fs.errors.DisclosureWarning):
        warnings.simplefilter("ignore", kind)
    X, digits = read()
    rows = []
    for seed, missing, method in product(range(seeds), IN_TRAINING, METHODS):
        found = run(X, digits, method, missing, seed)
        rows += [(method, missing, q, seed, a) for q, a in zip(MISSING, found, strict=True)]
        runs = pd.DataFrame(rows, columns=["method", "train", "test", "seed", "accuracy"])
        runs.round(3).to_csv(TABLE, index=False, lineterminator="\n")
    print(runs.pivot_table("accuracy", ["train", "method"], "test", sort=False).round(1).to_string())


if __name__ == "__main__":
    main(*[int(n) for n in sys.argv[1:2]])
