"""From sums of products to a path of penalised fits, and from the path to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from fedstat.errors import ModelError
from fedstat.inference.covariance import invert_information
from fedstat.inference.selection.criteria import aic, bic, ebic, profiled
from fedstat.kernels.penalised.gram import GramSolver, gram_path
from fedstat.kernels.penalised.groups import Groups, orthonormaliser
from fedstat.kernels.penalised.path import Algorithm, LinearSteps, PenalisedPath, lambda_grid, lambda_max
from fedstat.kernels.penalised.penalties import Penalty
from fedstat.models.vglm.gram import Units
from fedstat.models.vglm.layout import Layout
from fedstat.models.vglm.response_families import minus_twice
from fedstat.typing import Bools, Floats, Ints

Select: TypeAlias = Literal["bic", "ebic", "aic", "cv"]
SMALLEST_COEFFICIENT = 1e-8
"""Of standardised columns: an adaptive weight is no larger than the power of its inverse."""


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What is penalised, and how.

    Parameters
    ----------
    penalty : Penalty
    groups : Groups
        Of the columns, without the intercept.
    adaptive : float
        Power of the first estimates by which penalties are divided; 0: not at all.
    lambdas : (L,) array or None
        Descending; None for a grid.
    size, ratio : int, float
        Of the grid.
    algorithm : {"lla", "descent"}
    tol : float
        Largest violation of the stationarity conditions, as a share of lambda_max.
    steps : int or None
        Of "lla": local linear approximations from the unpenalised fit; None for all from the lasso.
    """

    penalty: Penalty
    groups: Groups
    adaptive: float
    lambdas: Floats | None
    size: int
    ratio: float
    algorithm: Algorithm
    tol: float
    steps: int | None = None

    @property
    def from_unpenalised(self) -> bool:
        """Whether the unpenalised fit has to be known."""
        return self.adaptive > 0.0 or self.steps is not None

    @property
    def unpenalised(self) -> bool:
        """Whether the only fit is the one without a penalty."""
        return self.lambdas is not None and len(self.lambdas) == 1 and self.lambdas[0] == 0.0

    def adapted(self, b: Floats) -> Setup:
        """Divide the penalties by a power of first estimates: (p,), in the coordinates of the groups."""
        if not self.adaptive:
            return self
        return replace(self, groups=adapted(self.groups, b, self.adaptive))

    def linear_steps(self, b: Floats) -> LinearSteps | None:
        """Return the local linear approximations from the unpenalised fit b (p,), if these are taken."""
        return None if self.steps is None else LinearSteps(b, self.steps)

    def grid(self, gradient: Floats, steps: LinearSteps | None = None) -> Floats:
        """Return the lambdas: those given, or a grid from the gradient (p,) where all penalised are zero."""
        if self.lambdas is not None:
            return self.lambdas
        largest = lambda_max(gradient, self.penalty, self.groups, steps)
        return lambda_grid(largest, ratio=self.ratio, size=self.size)


def adapted(groups: Groups, b: Floats, power: float) -> Groups:
    """Divide the weights of groups by a power of the root mean square of first estimates b (p,)."""
    sizes = np.maximum(groups.norms(b) / groups.multipliers, SMALLEST_COEFFICIENT)
    return replace(groups, weights=groups.weights * sizes**-power)


def make_groups(layout: Layout, by_term: bool, unpenalised: Sequence[str]) -> Groups:
    """Group the columns of each term, or none, and free those that must be in the model.

    Parameters
    ----------
    layout : Layout
    by_term : bool
        Whether the columns of a term are penalised together.
    unpenalised : sequence of str
        Columns or terms without a penalty.

    Raises
    ------
    ModelError
        There is no such column or term.
    """
    unknown = [name for name in unpenalised if name not in (*layout.names, *layout.terms)]
    if unknown:
        raise ModelError(
            f"unpenalised: no column or term {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(dict.fromkeys((*layout.terms, *layout.names)))}"
        )
    free = np.isin(layout.names, unpenalised) | np.isin(layout.terms, unpenalised)
    kinds = list(zip(layout.owners, layout.terms, free.tolist(), strict=True))
    places = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    labels = np.array([places[kind] for kind in kinds]) if by_term else np.arange(layout.p)
    groups = Groups.of(labels)
    return replace(groups, weights=np.where(free[groups.starts[:-1]], 0.0, 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """Fits along L values of lambda.

    Parameters
    ----------
    lambdas : (L,) array
    intercepts : (L,) array
    coefficients : (L, p) array
        Both in the units of the data.
    standardised : (L, p) array
        Coefficients of standardised columns.
    loss : (L,) array
        Half the mean deviance.
    kkt : (L,) array
        Largest violation of the stationarity conditions, as a share of `scale`.
    converged : (L,) array of bool
    scale : float
        lambda_max.
    groups : Groups
        With their weights.
    """

    lambdas: Floats
    intercepts: Floats
    coefficients: Floats
    standardised: Floats
    loss: Floats
    kkt: Floats
    converged: Bools
    scale: float
    groups: Groups

    @property
    def selected(self) -> Bools:
        """Which coefficients are not zero: (L, p)."""
        return np.asarray(self.coefficients != 0.0)

    @classmethod
    def of(cls, found: PenalisedPath, b: Floats, a: Floats, units: Units, groups: Groups) -> Path:
        """Bring coefficients b (L, p) of standardised columns, and intercepts a (L,), to the data's units."""
        beta = b / units.scale
        return cls(
            found.lambdas,
            a - beta @ units.shift,
            beta,
            b,
            found.loss,
            found.kkt,
            found.converged,
            found.scale,
            groups,
        )


def normal_path(S: Floats, units: Units, setup: Setup) -> Path:
    """Fit the normal family along a path.

    Parameters
    ----------
    S : (p + 2, p + 2) array
        Sums of products of (1, X, y), X and y standardised over all entities, over some of them.
    units : Units
    setup : Setup
    """
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


@dataclass(frozen=True, slots=True, eq=False)
class Criteria:
    """What speaks for each fit of a path, (L,) each: smaller is better.

    Parameters
    ----------
    df : array
        Coefficients that are not zero, the intercept included.
    aic, bic, ebic : array
    cv, cv_se : array or None
        Cross-validated mean deviance (of the normal family the mean squared error), with its standard error
        over folds.
    """

    df: Floats
    aic: Floats
    bic: Floats
    ebic: Floats
    cv: Floats | None = None
    cv_se: Floats | None = None


def score_path(path: Path, n: int, family: str = "Gaussian") -> Criteria:
    """Compute the information criteria of a path.

    Parameters
    ----------
    path : Path
    n : int
        Entities.
    family : str
        A dispersion is estimated at every fit, by maximum likelihood.
    """
    chosen = np.count_nonzero(path.coefficients, axis=1).astype(float)
    doubled = profiled(2.0 * n * path.loss, n) if family == "Gaussian" else minus_twice(family, path.loss, n)
    df = chosen + 1.0
    free = int(path.groups.sizes[~path.groups.penalised].sum())
    extended = ebic(
        doubled,
        df,
        n,
        chosen=np.maximum(chosen - free, 0.0),
        candidates=path.coefficients.shape[1] - free,
    )
    return Criteria(df, *(np.asarray(v) for v in (aic(doubled, df), bic(doubled, df, n), extended)))


def choose(criteria: Criteria, select: Select) -> int:
    """Return the place of the best fit; of equals the one with the larger lambda."""
    values = {"aic": criteria.aic, "bic": criteria.bic, "ebic": criteria.ebic, "cv": criteria.cv}[select]
    assert values is not None
    return int(np.argmin(values))


def cross_validate(products: Floats, units: Units, setup: Setup, path: Path) -> tuple[Floats, Floats]:
    """Return mean squared errors of folds left out, and their standard errors: (L,) each.

    Parameters
    ----------
    products : (F, p + 2, p + 2) array
        Sums of products by fold.
    """
    total, setup = products.sum(axis=0), replace(setup, lambdas=path.lambdas)
    errors = np.array([prediction_errors(normal_path(total - S, units, setup), S, units) for S in products])
    weight = products[:, 0, 0] / total[0, 0]
    return weighted_mean(errors, weight)


def weighted_mean(errors: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Mean over folds, (F, L) -> (L,), with its standard error; weights (F,) add up to one."""
    mean = weight @ errors
    return mean, np.sqrt(weight @ (errors - mean) ** 2 / (len(errors) - 1))


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """Maximum likelihood on the columns that were selected.

    Parameters
    ----------
    support : (p,) array of bool
    params : (1 + k,) array
        Intercept and coefficients of the support, in the units of the data.
    cov : (1 + k, 1 + k) array
        Inverse observed information.
    llf, scale : float
        Log-likelihood, and dispersion.
    loss : float
        Half the mean deviance.
    """

    support: Bools
    params: Floats
    cov: Floats
    llf: float
    scale: float
    loss: float


def to_units(support: Bools, units: Units) -> Floats:
    """Matrix that takes (intercept, b) of the support's standardised columns to the units of the data."""
    scale, shift = units.scale[support], units.shift[support]
    J = np.diag(np.concatenate([[1.0], 1.0 / scale]))
    J[0, 1:] = -shift / scale
    return J


def normal_refit(S: Floats, units: Units, support: Bools, names: Sequence[str]) -> Refit:
    """Ordinary least squares on the support, from the sums of products of all entities.

    Raises
    ------
    EstimationError
        Columns of the support are collinear; names them.
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


def stability(
    selected: Callable[[Ints], Bools], folds: int, draws: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Share of random halves of the folds in which each column is selected.

    Halves come in complementary pairs (Shah and Samworth 2013); a half is made of whole folds, so that
    nothing further is released.

    Parameters
    ----------
    selected : callable
        From the folds of a half to the coefficients that are not zero along the path: (L, p).
    folds : int
        Number of folds.
    draws : int
        Pairs of halves.
    random : Generator

    Returns
    -------
    (L, p) array
        The share at each lambda.
    (L,) array
        Mean number of columns that are selected at this lambda or a larger one.

    References
    ----------
    Meinshausen, N. and Buehlmann, P. (2010). Stability selection. Journal of the Royal Statistical Society
    B 72, 417-473.
    Shah, R. and Samworth, R. (2013). Variable selection with error control: another look at stability
    selection. Journal of the Royal Statistical Society B 75, 55-80.
    """
    counts, numbers = [], []
    for _ in range(draws):
        order = random.permutation(folds)
        for half in (order[: folds // 2], order[folds // 2 :]):
            found = selected(half)
            counts.append(found)
            numbers.append(np.logical_or.accumulate(found, axis=0).sum(axis=1))
    return np.mean(counts, axis=0), np.mean(numbers, axis=0)


def normal_stability(
    products: Floats, units: Units, setup: Setup, path: Path, draws: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Share of random halves that select each column, from sums of products by fold (F, p + 2, p + 2)."""
    setup = replace(setup, lambdas=path.lambdas)

    def selected(half: Ints) -> Bools:
        return normal_path(products[half].sum(axis=0), units, setup).selected

    return stability(selected, len(products), draws, random)
