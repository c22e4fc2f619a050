"""Information on credit card holders in the exchange: labels at the sites, columns at the lender.

    python tests/models/laser/disclosure_simulation.py [seeds]

The attacks of ``tests/attacks/test_laser_attacks.py`` on fits by default, all blocks there. "labels": area
under the curve of defaults predicted from the gradients of one batch, by a site without labels. "columns":
mean R-squared of a site's five columns predicted from one look at outputs, or at their masked sum, if
the columns of 200 entities are known. Writes ``tests/benchmarks/results/laser_disclosure.csv``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import credit_blocks
import numpy as np
import pandas as pd

import fedstat as fs

sys.path.append(str(Path(__file__).parents[2] / "attacks"))
from test_laser_attacks import area, columns_told
from wiretap import tapped

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "laser_disclosure.csv"
BATCH, KNOWN = 3, 200


def attacks(X, y, exchange, seed):
    """Rows (attack, exchange, client, seed, figure)."""
    rows, _ = credit_blocks.split(len(y), seed)
    label = y[rows]
    part = credit_blocks.partition(X[rows], label, np.ones((len(rows), 4), dtype=bool))
    model = fs.LASER.from_formula("default ~ .", part)
    with tapped(model) as wire:
        model.fit(masked=exchange == "masked", seed=seed, validation=0.3, calibration=0.0)
    look = [request.arrays for request, _ in wire.passed if request.step == "judge"][-1]
    found = []
    for k, site in enumerate(credit_blocks.CLIENTS):
        requests = [
            request.arrays for request, _ in wire.passed if (request.site, request.step) == (site, "train")
        ]
        gradient = requests[BATCH + 1]["gradient"]
        reported = area(
            gradient @ np.linalg.svd(gradient, full_matrices=False)[2][0], label[requests[BATCH]["rows"]]
        )
        found.append(("labels", exchange, site, seed, reported))
        own = X[rows][look["rows"], 5 * k : 5 * k + 5]
        own = (own - own.mean(axis=0)) / own.std(axis=0)
        view = look["outputs"][k if exchange == "clear" else 0]
        reported = columns_told(view, np.arange(len(view)) < KNOWN, own)
        found.append(("columns", exchange, site, seed, reported))
    return found


def main(seeds=2):
    warnings.simplefilter("ignore")
    X, y = credit_blocks.read()
    rows = [row for seed in range(seeds) for how in ("clear", "masked") for row in attacks(X, y, how, seed)]
    found = pd.DataFrame(rows, columns=["attack", "exchange", "client", "seed", "figure"])
    found.round(4).to_csv(TABLE, index=False, lineterminator="\n")
    print(found.pivot_table("figure", ["attack", "exchange"], "client").round(3).to_string())


if __name__ == "__main__":
    main(*[int(n) for n in sys.argv[1:2]])
