"""Rows of one modality, clusters and posteriors, for tests of several kinds of columns."""

import numpy as np

from fedstat.models.m2sem.modality.categorical import CategoricalModality
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


def levels(
    seed=0, n=200, K=3, Q=2, missing=0.0, kinds=("ordinal", "nominal", "binary", "ordinal", "nominal")
):
    """Levels -1, 0, ..., responsibilities near the truth, and how many levels a column has."""
    rng = np.random.default_rng(seed)
    k, eta = factors(rng, n, K, Q, spread=1.5)
    codes, C = np.empty((n, len(kinds)), dtype=int), []
    for p, kind in enumerate(kinds):
        C.append({"ordinal": 4, "nominal": 3, "binary": 2}[kind])
        if kind == "nominal":
            u = eta @ rng.standard_normal((Q, C[p])) + rng.gumbel(size=(n, C[p]))
            codes[:, p] = u.argmax(axis=1)
        else:
            u = eta @ (rng.choice([-1, 1], Q) * rng.uniform(0.5, 1.5, Q)) + rng.logistic(size=n)
            codes[:, p] = np.searchsorted(np.linspace(-1.5, 1.5, C[p] + 1)[1:-1], u)
    codes[rng.random(codes.shape) < missing] = -1
    return codes, near(rng, k, K), C


MIXED = ("ordinal", "nominal", "binary", "ordinal", "nominal")


def categorical(seed=0, Q=2, kinds=MIXED, covariates=0, **shape):
    codes, r, C = levels(seed, Q=Q, kinds=kinds, **shape)
    z = np.random.default_rng(seed).integers(0, 3, (len(codes), covariates)) - 1.0 if covariates else None
    names = [f"x{p}" for p in range(len(C))]
    return begun(CategoricalModality(codes, names, Q, kinds, C, covariates=z), r), r


def central_hessian(value, at, h):
    """Second derivatives by central differences of fourth order in the step."""
    E = h * np.eye(len(at))

    def second(s):
        four = [[value(at + s * (a + b)) - value(at + s * (a - b)) for b in E] for a in E]
        back = [[value(at - s * (a + b)) - value(at - s * (a - b)) for b in E] for a in E]
        return (np.array(four) + np.array(back)) / (4 * (s * h) ** 2)

    return (4 * second(1) - second(2)) / 3


def begun(modality, r):
    modality.begin(r.shape[1])
    modality.begin_means(r)
    return modality


def objective(modality, r, row_penalties=0.0, means_penalty=0.0):
    return (r * modality.log_densities()).sum() - modality.penalty(row_penalties, means_penalty)


def ascend(modality, r, row_penalties=0.0, means_penalty=0.0, steps=30):
    """Values of the objective before each of `n` M-steps, and after the last."""
    values = [objective(modality, r, row_penalties, means_penalty)]
    for _ in range(steps):
        modality.improve(r, row_penalties, means_penalty)
        values.append(objective(modality, r, row_penalties, means_penalty))
    return np.array(values)
