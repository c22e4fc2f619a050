"""Coverage of conformal sets by pattern of missing blocks on credit card holders, at nominal .90.

    python tests/models/laser/conformal_simulation.py [seeds]

Half of the blocks are missing in training, every row keeps its pattern. New rows have all blocks, and are
predicted from each of the 15 sets of sites. "clear" has defaults except for the exchange, "masked" half of
the entities to calibrate by, since each serves one set there. "pooled" takes one quantile for all sets; "of
defaulters" is the coverage among these, without and with ``conditional="label"``. Writes
``tests/benchmarks/results/laser_conformal.csv``, one row by exchange, set and seed, and goes on where it was
cut short.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import credit_blocks
import numpy as np
import pandas as pd
import table1_raw as raw

import fedstat as fs
from fedstat.models.laser.prediction import ConformalSets, predict_networks

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "laser_conformal.csv"
ALPHA, MISSING = 0.1, 0.5
EXCHANGES = {"clear": {}, "masked": {"calibration": 0.5}}


def pooled(scores):
    """The same counts for every set: those of all."""
    return replace(scores, bins=np.broadcast_to(scores.bins.sum(axis=0), scores.bins.shape))


def run(X, y, exchange, seed):
    learned, tested = credit_blocks.split(len(y), seed)
    seen = credit_blocks.patterns(len(learned), MISSING, seed)
    model = fs.LASER.from_formula("default ~ .", credit_blocks.partition(X[learned], y[learned], seen))
    result = model.fit(masked=exchange == "masked", seed=seed, **EXCHANGES[exchange])
    fitted, scores = result._record.fitted, result.calibration.scores
    assert fitted.sites == credit_blocks.CLIENTS  # bits of sets are in this order
    label, rows = y[tested], []
    for s in raw.SETS:
        names = [credit_blocks.CLIENTS[k] for k in raw.members_of(s)]
        seen = np.tile([bool(s >> k & 1) for k in range(raw.K)], (len(tested), 1))
        new = credit_blocks.partition(X[tested], label, seen)
        found = predict_networks(fitted, new, "predict_set()")
        kinds = {
            "set": ConformalSets(fitted, scores, ALPHA, False),
            "pooled": ConformalSets(fitted, pooled(scores), ALPHA, False),
            "by label": ConformalSets(fitted, scores, ALPHA, True),
        }
        row = {"exchange": exchange, "seed": seed, "clients": " + ".join(names)}
        row["calibrate"] = int(scores.n[scores.sets.tolist().index(s)])
        for kind, sets in kinds.items():
            inside = sets.frame(found, new).to_numpy()
            covered = inside[np.arange(len(label)), label]
            row[f"{kind}: coverage"] = covered.mean()
            row[f"{kind}: of defaulters"] = covered[label == 1].mean()
            row[f"{kind}: size"] = inside.sum(axis=1).mean()
        rows.append(row)
    return pd.DataFrame(rows)


def summary(runs):
    """Means over seeds by exchange and set."""
    return runs.drop(columns="seed").groupby(["exchange", "clients"], sort=False).mean()


def main(seeds=20):
    for kind in (fs.errors.DataWarning, fs.errors.DisclosureWarning):
        warnings.simplefilter("ignore", kind)
    X, y = credit_blocks.read()
    held = pd.read_csv(TABLE) if TABLE.exists() else pd.DataFrame(columns=["exchange", "seed"])
    for seed, exchange in product(range(seeds), EXCHANGES):
        if ((held["exchange"] == exchange) & (held["seed"] == seed)).any():
            continue
        held = pd.concat([held, run(X, y, exchange, seed)], ignore_index=True)
        held.round(4).to_csv(TABLE, index=False, lineterminator="\n")
    print(summary(held).round(3).to_string())


if __name__ == "__main__":
    main(*[int(n) for n in sys.argv[1:2]])
