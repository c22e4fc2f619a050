"""Errors of correlations of mixed columns at five institutions, beside those of the design's prototype.

pytest -m slow tests/models/copula/test_errors_simulation.py
"""

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtri

import fedstat as fs

P, K = 20, 5
PROTOTYPE = {10_000: 0.027, 70_000: 0.0056}
"""Root mean square error at epsilon 1, by entities."""
ALLOWED = 1.15


def design():
    """Correlations of 20 columns with five factors; cuts of columns with 8, 2 and 4 levels."""
    rng = np.random.default_rng(5)
    loadings = rng.normal(0, 0.6, (P, K))
    S = loadings @ loadings.T + np.diag(rng.uniform(0.3, 1, P))
    cuts = {}
    for j in range(P):
        if j % 5 > 1:
            k = [8, 2, 4][j % 5 - 2]
            at = np.sort(rng.uniform(0.1, 0.9, k - 1)) if k > 2 else [rng.uniform(0.2, 0.85)]
            cuts[j] = ndtri(at)
    return S / np.sqrt(np.outer(np.diag(S), np.diag(S))), cuts


@pytest.mark.slow
@pytest.mark.parametrize("n", list(PROTOTYPE))
def test_errors_at_epsilon_one(n):
    omega, cuts = design()
    names = [f"x{j}" for j in range(P)]
    bounds = {name: range(len(cuts[j]) + 1) if j in cuts else (-4.0, 4.0) for j, name in enumerate(names)}
    held = {f"C{k}": names[4 * k : 4 * k + 4] for k in range(K)}
    policy, found = fs.Policy(privacy=fs.Budget(1.0, 1e-6)), []
    for seed in range(3):
        Z = np.random.default_rng(100 + seed).standard_normal((n, P)) @ np.linalg.cholesky(omega).T
        values = [np.searchsorted(cuts[j], Z[:, j]) if j in cuts else Z[:, j] for j in range(P)]
        frame = pd.DataFrame(dict(zip(names, values, strict=True)))
        partition = fs.ClientPartition.from_frame(frame, columns=held, policy=policy)
        fit = fs.CopulaSynthesizer(partition, 1.0, bounds).fit()
        errors = (fit.correlation.to_numpy() - omega)[~np.eye(P, dtype=bool)]
        found.append(np.sqrt(np.mean(errors**2)))
    rms = np.mean(found)
    assert rms < ALLOWED * PROTOTYPE[n]
