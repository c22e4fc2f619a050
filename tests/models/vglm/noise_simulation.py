"""The published selection study by ADMM with noise in every round: what is selected, and what it costs.

    python tests/models/vglm/noise_simulation.py [data sets]

writes ``tests/benchmarks/results/vglm_noise.csv``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from noisy_admm import noisy_admm
from selection_simulation import FAMILIES, judge

import fedstat as fs
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.penalties import Penalty
from fedstat.privacy.gaussian_dp import mu_of

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "vglm_noise.csv"
N, CLIP, LAMBDAS, ROUNDS, DELTA = 1_000, 3.0, 10, 20, 1e-6
ROW, ALL = 2.0 * CLIP, 2.0 * CLIP * np.sqrt(N)
TOTAL = np.sqrt(LAMBDAS * ROUNDS)
NOISE = {
    "none": 0.0,
    "epsilon 5 by rows, of each round": ROW / mu_of(5.0, DELTA),
    "epsilon 5 by rows, of all rounds": ROW * TOTAL / mu_of(5.0, DELTA),
    "epsilon 5 of all rounds": ALL * TOTAL / mu_of(5.0, DELTA),
}


def run_one(family, seed):
    """Fit one data set at every level of noise."""
    data = fs.datasets.make_selection(N, family, standardize=True, seed=[N, seed])
    y, truth = data.complete[data.response].to_numpy(float), data.truth["coef"].to_numpy()
    owners = data.truth.groupby("client", sort=False).groups
    blocks, rows = [data.complete[names].to_numpy() for names in owners.values()], []
    for name, noise in NOISE.items():
        found = noisy_admm(
            blocks,
            y,
            DistributionSpec.of(FAMILIES[family]),
            Penalty("scad"),
            noise=noise,
            random=np.random.default_rng([seed, 1]),
            clip=CLIP,
            n_lambdas=LAMBDAS,
            rounds=ROUNDS,
        )
        cost = {"noise_sd": noise, "epsilon": found.epsilon(DELTA), "row_epsilon": found.row_epsilon(DELTA)}
        measures = judge(found.coefficients[found.chosen], truth)
        rows.append({"family": family, "n": N, "noise": name, **cost, **measures})
    return rows


def main(runs):
    found = pd.DataFrame([row for f in FAMILIES for seed in range(runs) for row in run_one(f, seed)])
    groups = found.groupby(["family", "n", "noise"], sort=False)
    means = groups.mean().join(groups[["rmse", "gmean", "fdr"]].sem().add_suffix("_error"))
    means.insert(0, "runs", groups.size())
    means.reset_index().round(5).to_csv(TABLE, index=False, lineterminator="\n")
    print(means.to_string())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
