"""Errors of correlations by columns, entities and epsilon, next to those of the first prototype.

    python tests/models/copula/errors_simulation.py [repetitions]

writes ``tests/benchmarks/results/copula_errors.csv``. Columns of five institutions are continuous (two in
five), or have 8, 2 or 4 levels; five factors generate them. Epsilon 10,000 means practically no noise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import ndtri

import fedstat as fs

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "copula_errors.csv"
NO_NOISE = 10_000.0
EPSILONS = (0.1, 1.0, 3.0, 10.0, NO_NOISE)
NONE = (np.nan, np.nan)
PROTOTYPE = {
    (20, 10_000): ((0.59, 0.162), (0.085, 0.027), (0.040, 0.0135), (0.032, 0.0112), (0.034, 0.0109)),
    (20, 70_000): ((0.12, 0.032), (0.023, 0.0056), (0.016, 0.0047), (0.014, 0.0045), (0.013, 0.0045)),
    (55, 10_000): ((0.85, 0.227), (0.23, 0.049), (0.088, 0.024), (0.061, 0.014), NONE),
    (55, 70_000): ((0.381, 0.0598), (0.038, 0.0094), (0.020, 0.0053), (0.018, 0.0045), NONE),
}
"""Largest and root mean squared error by columns and entities, of two or (55 columns) one repetition."""


def design(p):
    """Correlations of p columns with five factors; cuts of columns with 8, 2 and 4 levels."""
    rng = np.random.default_rng(5)
    loadings = rng.normal(0, 0.6, (p, 5))
    S = loadings @ loadings.T + np.diag(rng.uniform(0.3, 1, p))
    cuts = {}
    for j in range(p):
        if j % 5 > 1:
            k = [8, 2, 4][j % 5 - 2]
            at = np.sort(rng.uniform(0.1, 0.9, k - 1)) if k > 2 else [rng.uniform(0.2, 0.85)]
            cuts[j] = ndtri(at)
    return S / np.sqrt(np.outer(np.diag(S), np.diag(S))), cuts


def errors(p, n, epsilon, seed):
    """Errors of all correlations of one synthesis."""
    omega, cuts = design(p)
    names = [f"x{j}" for j in range(p)]
    bounds = {name: range(len(cuts[j]) + 1) if j in cuts else (-4.0, 4.0) for j, name in enumerate(names)}
    held = {f"C{k}": part.tolist() for k, part in enumerate(np.array_split(np.array(names), 5))}
    Z = np.random.default_rng(100 + seed).standard_normal((n, p)) @ np.linalg.cholesky(omega).T
    values = [np.searchsorted(cuts[j], Z[:, j]) if j in cuts else Z[:, j] for j in range(p)]
    frame = pd.DataFrame(dict(zip(names, values, strict=True)))
    policy = fs.Policy(privacy=fs.Budget(epsilon, 1e-6))
    partition = fs.ClientPartition.from_frame(frame, columns=held, policy=policy)
    fit = fs.CopulaSynthesizer(partition, epsilon, bounds).fit()
    return (fit.correlation.to_numpy() - omega)[np.triu_indices(p, 1)]


def measure(p, n, epsilon, repeats):
    """Largest and root mean squared error, means of some repetitions."""
    found = [errors(p, n, epsilon, seed) for seed in range(repeats)]
    return np.mean([(np.abs(e).max(), np.sqrt(np.mean(e**2))) for e in found], axis=0)


def main(repeats=3):
    rows = []
    for (p, n), known in PROTOTYPE.items():
        for epsilon, (largest, rms) in zip(EPSILONS, known, strict=True):
            found = measure(p, n, epsilon, repeats)
            rows.append((p, n, epsilon, *found, largest, rms, found[1] / rms, repeats))
            print(rows[-1], flush=True)
    columns = ["columns", "entities", "epsilon", "largest", "rms", "prototype largest", "prototype rms"]
    out = pd.DataFrame(rows, columns=[*columns, "rms by prototype", "repetitions"])
    out.to_csv(TABLE, index=False, float_format="%.4g", lineterminator="\n")
    print(out.round(4).to_string())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
