"""Pooled intervals over imputed tables of sites cover the truth: numbers, zeros and ones, levels."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

import fedstat as fs

TRUTH = {"Intercept": 1.0, "x": 1.0, "z": -1.0, "b": 0.5, "g[T.q]": 0.7, "g[T.r]": -0.3}
FORMULA = "y ~ x + z + b + g"
M, ITERATIONS = 10, 3


def draw(run: int, n: int, mechanism: str) -> pd.DataFrame:
    """One table with missing cells: completely at random, or depending on y and z."""
    rng = np.random.default_rng([run, n])
    t = pd.DataFrame({"site": rng.choice(["A", "B", "C"], n), "z": rng.normal(size=n)})
    t["x"] = 0.5 * t["z"] + rng.normal(size=n)
    t["b"] = (rng.random(n) < expit(0.5 * t["z"])).astype(float)
    scores = np.column_stack([np.zeros(n), 0.4 * t["z"], -0.4 * t["z"]]) + rng.gumbel(size=(n, 3))
    t["g"] = np.array(["p", "q", "r"])[scores.argmax(axis=1)]
    effects = {"q": TRUTH["g[T.q]"], "r": TRUTH["g[T.r]"]}
    t["y"] = 1.0 + t["x"] - t["z"] + 0.5 * t["b"] + t["g"].map(effects).fillna(0.0) + rng.normal(size=n)
    for name, slope in (("x", 0.5), ("b", -0.4), ("g", 0.3)):
        eta = -1.4 + (slope * (t["y"] + t["z"]) if mechanism == "mar" else 0.0)
        t.loc[rng.random(n) < expit(eta), name] = None
    return t


def simulate(runs: int, n: int, mechanism: str) -> pd.DataFrame:
    """Coverage, bias in standard deviations, and mean error over the standard deviation."""
    estimates, errors, inside = [], [], []
    for run in range(runs):
        partition = fs.ClientPartition.from_frame(draw(run, n, mechanism), by="site")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imputed = fs.impute(partition, FORMULA, m=M, iterations=ITERATIONS, seed=run)
            pooled = imputed.fit(lambda p: fs.FederatedOLS.from_formula(FORMULA, p).fit(local=False))
        truth, limits = pd.Series(TRUTH), pooled.conf_int()
        estimates.append(pooled.params[truth.index])
        errors.append(pooled.bse[truth.index])
        inside.append((limits.loc[truth.index, 0] < truth) & (truth < limits.loc[truth.index, 1]))
    found, truth = pd.DataFrame(estimates), pd.Series(TRUTH)
    spread = found.std()
    return pd.DataFrame(
        {
            "coverage": pd.DataFrame(inside).mean(),
            "bias_in_sd": (found.mean() - truth) / spread,
            "error_ratio": pd.DataFrame(errors).mean() / spread,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["mcar", "mar"])
@pytest.mark.parametrize("n", [300, 2000])
def test_intervals_over_imputed_rows_cover(n, mechanism):
    found = simulate(100, n, mechanism)
    assert found["coverage"].between(0.88, 1.0).all()
    assert 0.93 < found["coverage"].mean() < 0.98
    assert found["bias_in_sd"].abs().max() < 0.4


if __name__ == "__main__":
    print(simulate(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
