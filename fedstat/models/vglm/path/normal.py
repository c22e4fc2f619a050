"""Paths and refits of the normal distribution, from sums of products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedstat.inference.covariance import invert_information
from fedstat.kernels.penalised.gram import GramSolver, gram_path
from fedstat.kernels.penalised.groups import orthonormaliser
from fedstat.models.vertical.exchange.protocol import Units
from fedstat.models.vglm.path.fits import Path, Refit, to_units
from fedstat.models.vglm.path.setup import Setup
from fedstat.typing import Bools, Floats


def normal_path(S: Floats, units: Units, setup: Setup) -> Path:
    """Fit the normal family along a path.

    S (p + 2, p + 2) are sums over some of the entities of products of (1, X, y), X and y standardised over
    all.
    """
    # Standardised over all entities, and over some of them anew: a part has means and variances of its own.
    n, mean = S[0, 0], S[0, 1:] / S[0, 0]
    C = S[1:, 1:] / n - np.outer(mean, mean)
    scale = np.sqrt(np.diag(C)[:-1])
    G = C[:-1, :-1] / np.outer(scale, scale)
    c, variance = units.sd * C[:-1, -1] / scale, units.sd**2 * C[-1, -1]
    T, groups = orthonormaliser(G, setup.groups)
    G, c = T.T @ G @ T, T.T @ c
    setup = replace(setup, groups=groups)
    steps = None
    if setup.from_unpenalised:
        whole = np.linalg.lstsq(G, c, rcond=1e-10)[0]
        setup, steps = setup.adapted(whole), setup.linear_steps(whole)
    found = gram_path(
        G,
        c,
        setup.penalty,
        setup.groups,
        lambdas=setup.grid(GramSolver(G, c, setup.groups).null().gradient, steps),
        algorithm=setup.algorithm,
        steps=steps,
        tol=setup.tol,
    )
    b = (found.coefficients @ T.T) / scale
    a = units.mean + units.sd * mean[-1] - b @ mean[:-1]
    found = replace(found, loss=found.loss + variance / 2.0)
    return Path.of(found, b, a, units, setup.groups)


def prediction_errors(path: Path, S: Floats, units: Units) -> Floats:
    """Mean squared error of every fit of a path on other entities, from their sums of products: (L,)."""
    n = S[0, 0]
    a = path.intercepts + path.coefficients @ units.shift - units.mean
    V = np.column_stack([a, path.standardised, np.full(len(a), -units.sd)])
    return np.asarray(np.einsum("li,ij,lj->l", V, S, V) / n)


def normal_refit(S: Floats, units: Units, support: Bools, names: Sequence[str]) -> Refit:
    """Ordinary least squares on the support, from the sums of products of all entities.

    An EstimationError names columns of the support that are collinear.
    """
    n, at = S[0, 0], np.concatenate([[0], 1 + np.flatnonzero(support)])
    inverse = invert_information(S[np.ix_(at, at)], ["Intercept", *np.array(names)[support]])
    b = inverse @ S[at, -1]
    rss = units.sd**2 * float(S[-1, -1] - b @ S[at, -1])
    scale = rss / (n - len(b))
    J = to_units(support, units)
    params = J @ (units.sd * b)
    params[0] += units.mean
    llf = -n / 2.0 * (np.log(2.0 * np.pi * rss / n) + 1.0)
    return Refit(support, params, scale * J @ inverse @ J.T, float(llf), scale, rss / n / 2.0)
