"""Paths, cross-validation, stability and split p-values of the normal family, from Gram matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from fedstat.inference.covariance import invert_information
from fedstat.inference.post_selection import aggregate_splits
from fedstat.kernels.penalized.coordinate_descent import GramSolver, degrees_of_freedom, gram_path
from fedstat.kernels.penalized.penalties import orthonormalizer
from fedstat.models.vertical.exchange.protocol import ColumnScales, Grams
from fedstat.models.vglm import path_setup
from fedstat.progress_line import counted
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Paths and refits of the normal distribution, from sums of products.


def normal_path(S: Floats, units: ColumnScales, setup: path_setup.PathSetup) -> path_setup.CoefficientPath:
    """Fit the normal family along a path.

    S (p + 2, p + 2) are sums over some of the entities of products of (1, X, y), with X and y standardized
    over all.
    """
    # Standardized over all entities, and again over some of them: a part has its own means and variances.
    n, mean = S[0, 0], S[0, 1:] / S[0, 0]
    C = S[1:, 1:] / n - np.outer(mean, mean)
    scale = np.sqrt(np.diag(C)[:-1])
    G = C[:-1, :-1] / np.outer(scale, scale)
    c, variance = units.sd * C[:-1, -1] / scale, units.sd**2 * C[-1, -1]
    T, groups = orthonormalizer(G, setup.groups)
    G, c = T.T @ G @ T, T.T @ c
    setup = replace(setup, groups=groups)
    steps = None
    if setup.from_unpenalized:
        complete = np.linalg.lstsq(G, c, rcond=1e-10)[0]
        setup, steps = setup.adapted(complete), setup.linear_steps(complete)
    found = gram_path(
        G,
        c,
        setup.penalty,
        setup.groups,
        lambdas=setup.grid(GramSolver(G, c, setup.groups).null().gradient, steps, G),
        algorithm=setup.algorithm,
        steps=steps,
        tol=setup.tol,
    )
    b = (found.coefficients @ T.T) / scale
    a = units.mean + units.sd * mean[-1] - b @ mean[:-1]
    df = degrees_of_freedom(G, setup.penalty, setup.groups, found.lambdas, found.coefficients)
    found = replace(found, loss=found.loss + variance / 2.0)
    return path_setup.CoefficientPath.of(found, b, a, units, setup.groups, df)


def prediction_errors(path: path_setup.CoefficientPath, S: Floats, units: ColumnScales) -> Floats:
    """Mean squared error of every fit of a path on other entities, from their sums of products: (L,)."""
    n = S[0, 0]
    a = path.intercepts + path.coefficients @ units.shift - units.mean
    V = np.column_stack([a, path.standardized, np.full(len(a), -units.sd)])
    return np.asarray(np.einsum("li,ij,lj->l", V, S, V) / n)


def normal_refit(S: Floats, units: ColumnScales, support: Bools, names: Sequence[str]) -> path_setup.Refit:
    """Ordinary least squares on the support, from the sums of products of all entities.

    Raises EstimationError, which names collinear columns of the support.
    """
    n, at = S[0, 0], np.concatenate([[0], 1 + np.flatnonzero(support)])
    inverse = invert_information(S[np.ix_(at, at)], ["Intercept", *np.array(names)[support]])
    b = inverse @ S[at, -1]
    rss = units.sd**2 * float(S[-1, -1] - b @ S[at, -1])
    scale = rss / (n - len(b))
    J = path_setup.to_units(support, units)
    params = J @ (units.sd * b)
    params[0] += units.mean
    llf = n * (units.constant - (np.log(2.0 * np.pi * rss / n) + 1.0) / 2.0)
    return path_setup.Refit(support, params, scale * J @ inverse @ J.T, float(llf), scale, rss / n / 2.0)


# ----------------------------------------------------------------------------------------------------
# Cross-validation and selection frequencies of a path, from folds of the entities.


def cross_validate(
    products: Floats, units: ColumnScales, setup: path_setup.PathSetup, path: path_setup.CoefficientPath
) -> tuple[Floats, Floats]:
    """Return mean squared errors of left-out folds, and their standard errors: (L,) each.

    From sums of products by fold, (F, p + 2, p + 2).
    """
    total, setup = products.sum(axis=0), replace(setup, lambdas=path.lambdas)
    errors = np.array(
        [
            prediction_errors(normal_path(total - S, units, setup), S, units)
            for S in counted(list(products), "fold")
        ]
    )
    weight = products[:, 0, 0] / total[0, 0]
    return weighted_mean(errors, weight)


def weighted_mean(errors: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Mean over folds, (F, L) -> (L,), with its standard error; weights (F,) add up to one."""
    mean = weight @ errors
    return mean, np.sqrt(weight @ (errors - mean) ** 2 / (len(errors) - 1))


def stability(
    selected: Callable[[Ints], Bools], folds: int, draws: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Share of random halves of the folds in which each column is selected at each lambda: (L, p).

    Also the mean number of columns that are selected at this lambda or a larger one, (L,). `selected` maps
    the folds of a half to the nonzero coefficients along the path, (L, p). Halves come in `draws`
    complementary pairs (Shah and Samworth 2013); a half consists of complete folds, so that no further
    release is needed.

    References: Meinshausen, N. and Buehlmann, P. (2010). Stability selection. Journal of the Royal
    Statistical Society B 72, 417-473. Shah, R. and Samworth, R. (2013). Variable selection with error
    control: another look at stability selection. Journal of the Royal Statistical Society B 75, 55-80.
    """
    counts, numbers = [], []
    for _ in counted(range(draws), "pair of halves"):
        order = random.permutation(folds)
        for half in (order[: folds // 2], order[folds // 2 :]):
            found = selected(half)
            counts.append(found)
            numbers.append(np.logical_or.accumulate(found, axis=0).sum(axis=1))
    return np.mean(counts, axis=0), np.mean(numbers, axis=0)


def normal_stability(
    products: Floats,
    units: ColumnScales,
    setup: path_setup.PathSetup,
    path: path_setup.CoefficientPath,
    draws: int,
    random: np.random.Generator,
) -> tuple[Floats, Floats]:
    """Share of random halves that select each column, from sums of products by fold (F, p + 2, p + 2)."""
    setup = replace(setup, lambdas=path.lambdas)

    def selected(half: Ints) -> Bools:
        return normal_path(products[half].sum(axis=0), units, setup).selected

    return stability(selected, len(products), draws, random)


# ----------------------------------------------------------------------------------------------------
# Many splits of the entities for the normal family, from the sums of their folds.


def split_pvalues(
    grams: Grams,
    setup: path_setup.PathSetup,
    select: path_setup.Select,
    splits: int,
    names: Sequence[str],
    random: np.random.Generator,
) -> Floats:
    """Return p-values of all columns over many splits, which control the family-wise error rate: (p,).

    In each split a random half of the folds selects, and least squares on the other half tests the selected
    columns, with a Bonferroni correction for their number. From sums of products by fold (F, p + 2, p + 2):
    no further release is needed.
    """
    products, units, F = grams.products, grams.units, len(grams.products)
    # A column that a split does not select has a p-value of one there (Meinshausen, Meier and Buehlmann
    # 2009).
    p_values = np.ones((splits, len(names)))
    for one in p_values:
        order = random.permutation(F)
        S = products[order[: F // 2]].sum(axis=0)
        path = normal_path(S, units, setup)
        chosen = path_setup.choose_fit(path_setup.score_path(path, float(S[0, 0])), select)
        support = path.selected[chosen]
        if support.any():
            refit = normal_refit(products[order[F // 2 :]].sum(axis=0), units, support, names)
            z = refit.params[1:] / np.sqrt(np.diag(refit.cov)[1:])
            one[support] = np.minimum(2.0 * stats.norm.sf(np.abs(z)) * support.sum(), 1.0)
    return aggregate_splits(p_values)
