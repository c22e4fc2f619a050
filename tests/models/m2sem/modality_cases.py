"""Rows of one modality, clusters and posteriors, for tests of several kinds of columns."""

import numpy as np

from fedstat.models.m2sem.modality.gaussian import GaussianModality


def factors(rng, n, K=3, Q=2, spread=2.0):
    k = rng.integers(0, K, n)
    return k, spread * rng.standard_normal((K, Q))[k] + rng.standard_normal((n, Q))


def continuous(seed=0, n=200, P=6, K=3, Q=2, missing=0.0, covariates=0, noise=1.0):
    """Columns, responsibilities near the truth, covariates or None."""
    rng = np.random.default_rng(seed)
    k, eta = factors(rng, n, K, Q)
    x = eta @ rng.standard_normal((P, Q)).T + noise * rng.standard_normal((n, P)) + rng.standard_normal(P)
    z = rng.standard_normal((n, covariates)) if covariates else None
    if z is not None:
        x += z @ rng.standard_normal((P, covariates)).T
    x[rng.random((n, P)) < missing] = np.nan
    return x * np.exp(rng.standard_normal(P)), near(rng, k, K), z


def near(rng, k, K):
    r = 0.6 * np.eye(K)[k] + 0.4 * rng.dirichlet(np.ones(K), len(k))
    return r


def gaussian(seed=0, Q=2, **shape):
    x, r, z = continuous(seed, Q=Q, **shape)
    return begun(GaussianModality(x, [f"x{p}" for p in range(x.shape[1])], Q, z), r), r


def begun(modality, r):
    modality.begin(r.shape[1])
    modality.begin_means(r)
    return modality


def objective(modality, r, row_penalties=0.0, means_penalty=0.0):
    return (r * modality.log_densities()).sum() - modality.penalty(row_penalties, means_penalty)


def climb(modality, r, row_penalties=0.0, means_penalty=0.0, steps=30):
    """Values of the objective before every one of so many M-steps, and after the last."""
    values = [objective(modality, r, row_penalties, means_penalty)]
    for _ in range(steps):
        modality.improve(r, row_penalties, means_penalty)
        values.append(objective(modality, r, row_penalties, means_penalty))
    return np.array(values)
