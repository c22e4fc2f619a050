"""The cases of the stored numbers: data, penalties and lambdas; read by the tests and by make.py."""

import itertools

import numpy as np

SHARES = (0.5, 0.1)
"""Values of lambda, as shares of lambda_max."""

PENALTIES = ("lasso", "elastic_net", "adaptive", "scad", "mcp", "weighted_mcp", "group")
FAMILIES = ("Gaussian", "Binomial", "Poisson")
DESIGNS = {"independent": (150, 20, 0.0), "correlated": (200, 30, 0.8), "wide": (40, 60, 0.3)}
ALPHA = 0.6
SHAPE = {"scad": 3.7, "mcp": 3.0, "weighted_mcp": 6.0}
CONVEX = ("lasso", "elastic_net", "adaptive", "group")


def cases():
    """All (penalty, family, design); more columns than rows for least squares only."""
    grid = itertools.product(PENALTIES, FAMILIES, DESIGNS)
    return [case for case in grid if case[2] != "wide" or case[1] == "Gaussian"]


def data(family, design):
    """Standardized columns (n, p), without an intercept, and a response (n,)."""
    n, p, rho = DESIGNS[design]
    draw = np.random.default_rng([n, p, FAMILIES.index(family)])
    X = np.sqrt(1.0 - rho) * draw.standard_normal((n, p)) + np.sqrt(rho) * draw.standard_normal((n, 1))
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    beta = np.zeros(p)
    beta[:8] = [0.8, -0.6, 0.0, 0.5, -0.4, 0.3, 0.0, 0.7]
    eta = 0.3 + X @ beta
    if family == "Binomial":
        return X, (draw.random(n) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    if family == "Poisson":
        return X, draw.poisson(np.exp(0.5 * eta)).astype(float)
    y = eta + draw.standard_normal(n)
    return X, y - y.mean()


def weights(p):
    """Weights of single coefficients; the second one is not penalized."""
    w = 0.5 + np.arange(p) % 4 / 2.0
    w[1] = 0.0
    return w


def labels(p):
    """Groups of one to four columns, side by side."""
    return np.repeat(np.arange(p), 1 + np.arange(p) % 4)[:p]
