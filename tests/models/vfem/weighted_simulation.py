"""Coverage and efficiency of method="weighted" where missingness depends on the response.

Sums come from the joined data (``weighted_oracle.py``); maximum likelihood, for normal errors, by EM. Print
one line for each distribution of the errors::

    python tests/models/vfem/weighted_simulation.py [runs]
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from weighted_oracle import ERRORS, TRUTH, draw, sums_of

from fedstat.models.vfem.weighted import weighted_estimate

GROUPS = 10
"""Groups that two thousand entities allow."""


def by_em(x, y, has, steps=300):
    """Coefficients by maximum likelihood under a joint normal distribution."""
    Z, O = np.column_stack([x, y]), np.column_stack([*np.repeat(has, 2, axis=0), np.ones(len(y), dtype=bool)])
    mean, cov = Z.mean(axis=0), np.cov(Z.T)
    patterns, code = np.unique(O, axis=0, return_inverse=True)
    for _ in range(steps):
        first, second = np.zeros(7), np.zeros((7, 7))
        for g, o in enumerate(patterns):
            rows, rest = Z[code.ravel() == g].copy(), np.zeros((7, 7))
            if not o.all():
                B = np.linalg.solve(cov[np.ix_(o, o)], cov[np.ix_(o, ~o)])
                rows[:, ~o] = mean[~o] + (rows[:, o] - mean[o]) @ B
                rest[np.ix_(~o, ~o)] = cov[np.ix_(~o, ~o)] - cov[np.ix_(~o, o)] @ B
            first += rows.sum(axis=0)
            second += rows.T @ rows + len(rows) * rest
        mean, before = first / len(y), cov
        cov = second / len(y) - np.outer(mean, mean)
        if np.abs(cov - before).max() < 1e-6:
            break
    return np.linalg.solve(cov[:6, :6], cov[:6, 6])


def simulate(errors, runs, em=False):
    """Estimates, standard errors and, with `em`, maximum likelihood estimates: (runs, 6) each."""
    found, se, ml = [], [], []
    for seed in range(runs):
        x, y, has = draw(seed, errors)
        sums = sums_of(x, y, has, GROUPS)
        estimate, _, cov = weighted_estimate(sums)
        unit = y.std() / sums.units.scale
        found.append(estimate[2:8] * unit)
        se.append(np.sqrt(np.diag(cov))[2:8] * unit)
        ml.append(by_em(x, y, has) if em else TRUTH)
    return np.array(found), np.array(se), np.array(ml)


def coverage(found, se):
    return np.mean(np.abs(found - TRUTH) < stats.t.ppf(0.975, GROUPS - 1) * se, axis=0)


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    for errors in ERRORS:
        found, se, ml = simulate(errors, runs, em=errors == "normal")
        cover, sd = coverage(found, se), found.std(axis=0)
        bias = np.abs(found.mean(axis=0) - TRUTH) / sd
        line = f"{errors}: coverage {cover.mean():.3f} (worst {cover.min():.3f}), bias / sd {bias.max():.2f}"
        if errors == "normal":
            ratio = sd / ml.std(axis=0)
            line += f", sd / sd of ML {ratio.mean():.2f} (largest {ratio.max():.2f})"
        print(line, f"({runs} runs)", flush=True)
