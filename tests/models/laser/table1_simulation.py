"""Table 1 of the publication, Credit: F1 by method, and by what is missing in training and at prediction.

    python tests/models/laser/table1_simulation.py [raw] [standardized] [variants] [seeds]

"raw": columns in their own units and the published training, see ``table1_raw.py``; "standardized": this
package's defaults with its disclosure checks; every row keeps its pattern of missing blocks and classes weigh
the same, as in the published training; "variants": LASER on raw columns with other schedules. Each seed has
its own split. Writes each run to ``tests/benchmarks/results/laser_table1.csv``, goes on where it was cut
short, and prints means and standard deviations next to the published figures.
"""

from __future__ import annotations

import sys
import warnings
from itertools import product
from pathlib import Path

import credit_blocks
import numpy as np
import pandas as pd
import table1_raw as raw

import fedstat as fs

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "laser_table1.csv"
MISSING = (0.0, 0.1, 0.5)
METHODS = ("local", "standard", "ensemble", "laser", "combinatorial")
PUBLISHED = {
    (0.0, "local"): (37.7, 37.6, 37.5),
    (0.0, "standard"): (45.7, 38.8, 31.0),
    (0.0, "ensemble"): (42.1, 42.1, 40.1),
    (0.0, "laser"): (46.5, 45.0, 43.7),
    (0.0, "combinatorial"): (42.8, 42.7, 41.7),
    (0.1, "local"): (37.6, 37.6, 37.5),
    (0.1, "standard"): (42.4, 38.3, 31.0),
    (0.1, "ensemble"): (41.4, 40.8, 39.2),
    (0.1, "laser"): (43.1, 41.9, 41.3),
    (0.1, "combinatorial"): (44.4, 41.8, 41.7),
    (0.5, "local"): (36.2, 36.2, 36.0),
    (0.5, "standard"): (32.4, 32.5, 30.3),
    (0.5, "ensemble"): (42.4, 41.8, 40.1),
    (0.5, "laser"): (41.5, 40.9, 41.4),
    (0.5, "combinatorial"): (32.8, 36.3, 37.6),
}
"""F1 x 100 with 0, .1 and .5 missing at prediction, by what is missing in training."""
VARIANTS = {
    "laser, unused at rest": {"coast": False},
    "laser, as standard": {"plan": (75, 1e-4, 1.0)},
    "laser, as ensemble": {"plan": (50, 1e-3, 1.0)},
    "laser, cosine": {"plan": (125, 1e-3, 0.2)},
    "laser, 200 epochs": {"plan": (200, 1e-3, 1.0)},
}
"""Other schedules of LASER: epochs, penalty, and the share of the rate at the end."""
FIELDS = ["columns", "method", "train", "test", "seed", "f1"]


def run_raw(data, method, missing, seed):
    """F1 by what is missing at prediction."""
    X, y, learned, tested = data
    other, method = VARIANTS.get(method, {}), method.split(",")[0]
    fitted = raw.fit(method, X[learned], y[learned], missing, seed, **other)
    decided = raw.decide(*fitted, X[tested])
    rng = np.random.default_rng(seed)
    return [raw.score(method, fitted[0], decided, y[tested], q, rng) for q in MISSING]


def run_standardized(data, method, missing, seed):
    """F1 by what is missing at prediction: by client as published, of all where a set has one prediction."""
    X, y, learned, tested = data
    seen = credit_blocks.patterns(len(learned), missing, seed)
    model = fs.LASER.from_formula("default ~ .", credit_blocks.partition(X[learned], y[learned], seen))
    result = model.fit(method=method, balanced=True, seed=seed)
    decided = {}
    for s in raw.SETS:
        seen = np.tile([bool(s >> k & 1) for k in range(raw.K)], (len(tested), 1))
        P = result.predict_proba(credit_blocks.partition(X[tested], y[tested], seen))[1.0].to_numpy()
        decided[s] = np.where(P == 0.5, 0.5, P > 0.5)
    return [f1_of_sets(method, decided, y[tested], q) for q in MISSING]


def f1_of_sets(method, decided, y, missing):
    by_site = {}
    for s in raw.SETS:
        for k in raw.members_of(s) if method in ("local", "laser") else [0]:
            one = decided[1 << k] if method == "local" else decided[s]
            counts = raw.weight_of(s, missing) * raw.confusion(one, y)
            by_site[k] = by_site.get(k, 0.0) + counts
    return np.mean([raw.f1(counts) for counts in by_site.values()])


def published():
    """The published figures as rows of the table."""
    rows = [
        ("published", method, train, q, 0, f)
        for (train, method), figures in PUBLISHED.items()
        for q, f in zip(MISSING, figures, strict=True)
    ]
    return pd.DataFrame(rows, columns=FIELDS)


def main(kinds, seeds):
    for kind in (fs.errors.DataWarning, fs.errors.DisclosureWarning):
        warnings.simplefilter("ignore", kind)
    X, y = credit_blocks.read()
    held = pd.read_csv(TABLE) if TABLE.exists() else pd.DataFrame(columns=FIELDS)
    if "published" not in set(held["columns"]):
        held = pd.concat([published(), held], ignore_index=True)
    done = set(held[["columns", "method", "train", "seed"]].itertuples(index=False, name=None))
    for columns, seed, missing in product(kinds, range(seeds), MISSING):
        for method in VARIANTS if columns == "variants" else METHODS:
            if (columns, method, missing, seed) in done:
                continue
            run = run_standardized if columns == "standardized" else run_raw
            found = run((X, y, *credit_blocks.split(len(y), seed)), method, missing, seed)
            rows = [(columns, method, missing, q, seed, f) for q, f in zip(MISSING, found, strict=True)]
            held = pd.concat([held, pd.DataFrame(rows, columns=FIELDS)], ignore_index=True)
            held.round(3).to_csv(TABLE, index=False, lineterminator="\n")
    by = held.groupby(["columns", "train", "method", "test"], sort=False)["f1"].agg(["mean", "std", "size"])
    print(by.round(1).to_string())


if __name__ == "__main__":
    given = sys.argv[1:]
    main([a for a in given if not a.isdigit()] or ["raw", "standardized", "variants"],
         next((int(a) for a in given if a.isdigit()), 5))  # fmt: skip
