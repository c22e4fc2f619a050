"""One peer on one table of codes, in an environment where it is installed:

    /its/bin/python tests/benchmarks/copula_peers.py installed
    /its/bin/python tests/benchmarks/copula_peers.py METHOD codes.csv levels.json epsilon seed out.csv

prints CPU seconds as JSON. SDV's Gaussian copula has no privacy. MST and AIM are those of dpmm: one party
that holds all rows, epsilon for a record that is added or removed (ours, replaced, is the stricter promise),
delta 1e-6.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib import util

import numpy as np
import pandas as pd

METHODS = {"SDV Gaussian copula": "sdv", "dpmm MST": "dpmm", "dpmm AIM": "dpmm"}


def sdv(table, levels, epsilon, seed):
    """Fit with its defaults, kinds of columns as it detects them."""
    from sdv.metadata import Metadata
    from sdv.single_table import GaussianCopulaSynthesizer

    metadata = Metadata.detect_from_dataframes({"table": table})
    model = GaussianCopulaSynthesizer(metadata)
    model.fit({"table": table})
    return model.sample(len(table))["table"]


def dpmm(table, levels, epsilon, seed, method):
    """Fit with its defaults, but for the steps of its fit where the command says how many."""
    from dpmm.models.aim import AIMGM
    from dpmm.models.mst import MSTGM

    given = {"n_iters": int(sys.argv[7])} if len(sys.argv) > 7 else {}
    if method == "dpmm AIM":
        given["max_model_size"] = 1
    random = np.random.RandomState(seed)
    kind = {"dpmm MST": MSTGM, "dpmm AIM": AIMGM}[method]
    model = kind(epsilon=epsilon, delta=1e-6, domain=levels, random_state=random, n_jobs=1, **given)
    model.fit(table)
    return model.generate(len(table))


def main():
    if sys.argv[1] == "installed":
        print(json.dumps([method for method, package in METHODS.items() if util.find_spec(package)]))
        return
    method, path, levels, epsilon, seed, out = sys.argv[1:7]
    warnings.filterwarnings("ignore")
    with open(levels) as file:
        levels = json.load(file)
    table, given = pd.read_csv(path), (levels, float(epsilon), int(seed))
    np.random.seed(int(seed))  # noqa: NPY002 (SDV draws from this generator)
    began = time.process_time()
    made = sdv(table, *given) if METHODS[method] == "sdv" else dpmm(table, *given, method)
    spent = time.process_time() - began
    numbers = made[list(levels)].astype(float).round().clip(0, [k - 1 for k in levels.values()], axis=1)
    numbers.astype(int).to_csv(out, index=False)
    print(json.dumps({"cpu": spent}))


if __name__ == "__main__":
    main()
