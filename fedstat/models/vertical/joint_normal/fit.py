"""Maximum likelihood of the joint normal model of columns and response, and its covariance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.inference.covariance import invert_information, symmetrize
from fedstat.models.vertical.joint_normal.blocks import BlocksPoint
from fedstat.models.vertical.joint_normal.edges import (
    COLLINEAR,
    Between,
    SparsePair,
    edges_between,
    not_determined,
    undetermined_pairs,
)
from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalPoint,
    centered_sums,
    em_step,
    form_separate_sets,
    inverse_by_pattern,
    joint_normal_likelihood,
    m_step,
    observed,
)
from fedstat.models.vertical.joint_normal.model import NEARLY_VANISHING, JointNormalModel, Point
from fedstat.models.vertical.joint_normal.products import InformationProducts
from fedstat.models.vertical.moments import PatternMoments, StandardizedMoments
from fedstat.models.vertical.newton import TraceRow, solve_information
from fedstat.typing import Bools, Floats, Ints

COLUMNS_OF_EM, STEPS_OF_EM = 25, 25
"""Number of columns from which the fit starts with so many steps of EM.

A Newton step takes time of the order P^5, a step of EM P^3: with 59 columns it is 20 times as fast.
"""


@dataclass(frozen=True, slots=True, eq=False)
class JointNormalFit:
    """A joint normal model at its maximum; estimates in the units of the data.

    `point` is that of the standardized columns. `joint` is the log-likelihood of standardized columns and
    response. `log_likelihood` is that of the response given observed columns, in the units of the data: the
    largest value of the columns' own likelihood is subtracted.
    """

    model: JointNormalModel
    point: Point
    joint: float
    log_likelihood: float
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str

    @property
    def moments(self) -> PatternMoments:
        """The moments, standardized."""
        return self.model.moments

    @property
    def moves(self) -> FreeParameters:
        """The free parameters."""
        return self.model.moves

    @property
    def a(self) -> float:
        """Mean of the response."""
        return float(self.moments.center[-1] + self.moments.scale[-1] * self.point.a)

    @property
    def s2(self) -> float:
        """Residual variance of an entity with every column."""
        return float(self.moments.scale[-1] ** 2 * self.point.s2)

    @property
    def beta(self) -> Floats:
        """Coefficients, (P,)."""
        return np.asarray(self.moments.scale[-1] * self.point.beta / self.moments.scale[:-1])

    @property
    def mu(self) -> Floats:
        """Means of the columns, (P,)."""
        return np.asarray(self.moments.center[:-1] + self.moments.scale[:-1] * self.point.mu)

    @property
    def cov(self) -> Floats:
        """Covariance of columns and response, (P + 1, P + 1)."""
        return np.asarray(self.point.cov * np.outer(self.moments.scale, self.moments.scale))

    @property
    def t(self) -> Floats:
        """Variance of each site's own linear predictor, (K,)."""
        member = self.moments.owner == np.arange(len(self.moments.sizes))[:, None]
        own = member * self.beta
        return np.asarray(np.einsum("ki,ij,kj->k", own, self.cov[:-1, :-1], own))

    @property
    def params(self) -> Floats:
        """Intercept at the origin of the columns, and coefficients: (1 + P,)."""
        return np.append(self.a - self.mu @ self.beta, self.beta)

    @property
    def rsquared(self) -> float:
        """Share of variance explained for a fully observed entity."""
        return float(1.0 - self.point.s2 / self.point.cov[-1, -1])


def all_effects(edges: Bools) -> FreeParameters:
    """Return every coefficient and the given entries of the concentration as free parameters."""
    return FreeParameters(edges, np.ones(len(edges), dtype=bool))


def fit_joint_model(
    moments: PatternMoments | StandardizedMoments,
    between: Between,
    *,
    jointly: bool = False,
    tol: float = 1e-9,
    maxiter: int = 200,
    start: Point | None = None,
) -> JointNormalFit:
    """Maximize the observed-data likelihood; columns may be correlated between sites or not.

    The covariances of independent, complete blocks are profiled out, unless they are estimated `jointly`.
    """
    standard = moments if isinstance(moments, StandardizedMoments) else StandardizedMoments(moments)
    profiled = between == "independent" and standard.moments.complete and not jointly
    edges = edges_between(standard.moments, between)
    return fit_joint_normal(standard, edges, profiled=profiled, tol=tol, maxiter=maxiter, start=start)


def fit_joint_normal(
    moments: PatternMoments | StandardizedMoments,
    edges: Bools,
    *,
    profiled: bool = False,
    tol: float = 1e-9,
    maxiter: int = 200,
    start: Point | None = None,
) -> JointNormalFit:
    """Maximize the observed-data likelihood; `edges` (P, P) are pairs of columns that may be correlated.

    It stops when the maximum is nearer than `tol` standard errors (the Newton decrement), or with
    ``converged=False`` after `maxiter` steps; it starts with no effects and every block at its own moments.
    Raises EstimationError if the moments do not determine an estimate.
    """
    standard = moments if isinstance(moments, StandardizedMoments) else StandardizedMoments(moments)
    model = JointNormalModel(standard.moments, all_effects(edges), profiled)
    first = start or no_effects(standard, profiled=profiled)
    if start is None and isinstance(first, JointNormalPoint) and standard.P >= COLUMNS_OF_EM:
        first = em_start(standard.moments, edges, first)
    found = maximize_joint_normal(model, first, tol, maxiter)
    if profiled:
        return found
    null = without_effects(found, np.zeros(standard.P, dtype=bool), tol=1e-4)
    # Without an effect, the columns' own likelihood and that of the response are separate.
    n, sd = model.moments.nobs, float(model.moments.scale[-1])
    columns = null.joint - response_alone(model.moments) + n * float(np.log(sd))
    return replace(found, model=replace(model, columns=columns), log_likelihood=found.joint - columns)


def no_effects(standard: StandardizedMoments, *, profiled: bool) -> Point:
    """Return the model without effects, where every block has its own moments."""
    if profiled:
        return BlocksPoint.start(standard)
    return JointNormalPoint(np.zeros(standard.P), 0.0, np.zeros(standard.P), 1.0, standard.precision)


def em_start(moments: PatternMoments, edges: Bools, point: JointNormalPoint) -> JointNormalPoint:
    """Return a point nearer to the maximum, by some steps of the EM algorithm on the sums by pattern.

    The point is returned unchanged if the maximization step has no closed form, or if a covariance becomes
    singular.
    """
    if not form_separate_sets(edges):
        return point
    try:
        for _ in range(STEPS_OF_EM):
            mean, cov = em_step(moments, point.mean, point.cov)
            Q, beta, s2 = m_step(cov, edges)
            following = JointNormalPoint(mean[:-1], float(mean[-1]), beta, float(s2), symmetrize(Q)[0])
            if s2 <= NEARLY_VANISHING or np.linalg.eigvalsh(following.Q)[-1] > COLLINEAR:
                return point
            point = following
    except np.linalg.LinAlgError:
        pass
    return point


def without_effects(fit: JointNormalFit, effects: Bools, *, tol: float | None = None) -> JointNormalFit:
    """Fit the same model with the other coefficients at zero, as the null of a likelihood ratio."""
    model = replace(fit.model, moves=FreeParameters(fit.moves.edges, effects))
    # One more step takes little time where covariances are profiled out.
    tol = tol or (1e-9 if model.profiled else 1e-6)
    return maximize_joint_normal(model, fit.point.restricted(effects), tol, 200)


def response_alone(moments: PatternMoments) -> float:
    """Largest log-likelihood of the standardized response alone."""
    mean, square = moments.grams[:, [0, -1], -1].sum(axis=0) / moments.nobs
    return float(-0.5 * moments.nobs * (np.log(2.0 * np.pi * (square - mean**2)) + 1.0))


def maximize_joint_normal(model: JointNormalModel, point: Point, tol: float, maxiter: int) -> JointNormalFit:
    """Maximize by Newton steps from a point."""
    found = model.maximize(point, tol, maxiter)
    at = found.point
    joint = joint_normal_likelihood(model.moments, at.mean, at.cov)
    own = model.log_likelihood(at) if model.profiled else joint - model.columns
    return JointNormalFit(model, at, joint, own, found.trace, found.converged, found.reason)


# ----------------------------------------------------------------------------------------------------
# Covariance of the estimates of a joint normal model, which accounts for every parameter.

OBSERVED = Remedy("fit(..., cov_type='observed')", "use {arguments}, or fewer columns")
MIN_GROUP_FREEDOM = 8
"""Fewest degrees of freedom between random groups for a robust covariance."""
SMALLEST_PIVOT = 1e-12
"""Smallest pivot of a factorization of the information, at a unit diagonal, that exceeds rounding."""


def estimates_covariance(fit: JointNormalFit, *, expected: bool = False) -> Floats:
    """Covariance (d, d) of (a, s2, beta_1, mu_1, beta_2, ..., Q) in the units of the data.

    For more than about sixty columns, or profiled covariances, the part without Q. It accounts for all
    parameters. Only predictions for entities that lack columns need the rest, which would take longer than
    the fit.

    The inverse of the observed information or, with `expected`, of that of data from the model that are
    missing completely at random. Raises EstimationError if it is not positive definite.
    """
    if not fit.model.invertible:
        return in_psi(fit, fit.model.leading_inverse(fit.point, 2 + 2 * len(fit.beta), expected=expected))
    return inverse_information(fit, fit.model.information(fit.point, expected=expected))


def inverse_information(fit: JointNormalFit, information: Floats, *, scale: bool = True) -> Floats:
    """Invert an information (d, d) of a model; see above. Without `scale`, no residual variance is estimated.

    Its row and column are then zero in both.
    """
    moments = fit.moments
    owners = [moments.sites[k] for k in moments.owner]
    columns = [f"{name} ({site})" for name, site in zip(moments.names, owners, strict=True)]
    means = [f"mean of {column}" for column in columns]
    if fit.model.profiled:
        others = [f"variance of the block of {site}" for site in moments.sites]
    else:
        entries = zip(*fit.moves.entries, strict=True)
        others = [f"covariance of {columns[a]} and {columns[b]}" for a, b in entries]
    names = np.array(["Intercept", "residual variance", *columns, *means, *others])
    free = np.ones(len(names), dtype=bool)
    free[1] = scale
    information, head = information[np.ix_(free, free)], 1 + int(scale) + 2 * len(columns)
    if not fit.model.invertible:
        cov = leading_inverse(fit, information, head)
    else:
        cov = invert_or_factor(information, names[free].tolist())
    if fit.model.profiled:
        cov = cov[:head, :head]
    if not scale:
        cov = np.insert(np.insert(cov, 1, 0.0, axis=0), 1, 0.0, axis=1)
    return in_psi(fit, cov)


def invert_or_factor(information: Floats, names: list[str]) -> Floats:
    """Invert by a factorization if its pivots exceed rounding; otherwise by eigenvalues, which name columns.

    A factorization is faster. It is also more accurate for entries of the concentration of nearly collinear
    columns, whose information is of the order of the square of the columns' condition.
    """
    root = np.sqrt(np.maximum(np.diag(information), np.finfo(float).tiny))
    try:
        pivots = np.diag(np.linalg.cholesky(information / np.outer(root, root))) ** 2
    except np.linalg.LinAlgError:
        return invert_information(information, names)
    if pivots.min() < SMALLEST_PIVOT:
        return invert_information(information, names)
    return symmetrize(solve_information(information, np.eye(len(information))))[0]


def sandwich_covariance(fit: JointNormalFit, by_group: PatternMoments) -> tuple[Floats, float]:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, ..., Q) by the sandwich, and its degrees of freedom.

    The score of a group of entities is a function of its sums. With S_gj that of group j of the J_g random
    groups of pattern g, and S_g their sum, the variance of the score is

        sum_g [ J_g / (J_g - 1) sum_j (S_gj - n_gj S_g / n_g)(S_gj - n_gj S_g / n_g)' + S_g S_g' / n_g ].

    The second term is the variation between patterns: missingness may depend on observed values. A pattern
    with one group has the variance under the normal model instead. To first order, this is the
    delete-a-group jackknife. `by_group` are the sums of the data of the fit, in the same units.
    """
    groups, at, moves = by_group.standardized(), fit.point.with_concentration(), fit.moves
    seen, code = np.unique(groups.seen, axis=0, return_inverse=True)
    code = code.ravel()
    head = fit.model.parameters if fit.model.invertible else 2 + 2 * len(at.beta)
    inverse = fit.model.inverse_columns(at, head)
    S, n = scores_by_pattern(groups, at, moves) @ inverse, groups.n
    cov, free = np.zeros((head, head)), 0
    for g in range(len(seen)):
        own = np.flatnonzero(code == g)
        total, count, J = S[own].sum(axis=0), n[own].sum(), len(own)
        cov += np.outer(total, total) / count
        if J == 1:
            one = replace(groups, seen=groups.seen[own], n=n[own], grams=groups.grams[own])
            cov += inverse.T @ InformationProducts(one, at, moves, expected=True).product(inverse)
            continue
        away = S[own] - np.outer(n[own] / count, total)
        cov += J / (J - 1.0) * away.T @ away
        free += J - 1
    if free < MIN_GROUP_FREEDOM:
        raise EstimationError(
            "cov_type='robust' needs random groups of entities that are large enough to be released, but the "
            f"missing patterns have only {free + len(seen)} groups in all",
            remedy=OBSERVED,
        )
    return in_psi(fit, symmetrize(cov)[0]), float(free)


def scores_by_pattern(moments: PatternMoments, point: JointNormalPoint, moves: FreeParameters) -> Floats:
    """Return the scores of the entities of each row of the moments, (G, d); they add up to the score."""
    B = point.basis()
    K, _ = inverse_by_pattern(point.cov, observed(moments))
    d, D = centered_sums(moments, point.mean)
    G = 0.5 * (B.T @ (np.matmul(np.matmul(K, D), K) - moments.n[:, None, None] * K) @ B)
    i, j, signs = moves.pairs
    inner = signs * np.where(i == j, 0.5, 1.0) * 2.0 * G[:, i, j]
    return np.asarray(np.hstack([np.einsum("gij,gj->gi", K, d), inner])[:, moves.order])


def leading_inverse(fit: JointNormalFit, information: Floats, head: int) -> Floats:
    """First rows and columns of the inverse, at the cost of one factorization and no eigenvalues."""
    try:
        columns = solve_information(information, np.eye(len(information), head))
    except np.linalg.LinAlgError:
        raise not_determined(fit.moments, fit.point.Q) from None
    return symmetrize(columns[:head])[0]


def site_order(moments: PatternMoments) -> list[int]:
    """Return the indices of (a, s2, beta_1, mu_1, beta_2, ...) in (a, s2, beta, mu)."""
    P, columns = len(moments.names), np.arange(len(moments.names))
    by_site = [columns[moments.places(k)] for k in range(len(moments.sizes))]
    return [0, 1, *[int(i) for own in by_site for i in (*(2 + own), *(2 + P + own))]]


def in_psi(fit: JointNormalFit, cov: Floats) -> Floats:
    """Convert a covariance of (a, s2, beta, mu, Q) of standardized columns to site order and units."""
    moments = fit.moments
    i, j = fit.moves.entries
    x, y = moments.scale[:-1], moments.scale[-1]
    factor = np.concatenate([[y, y**2], y / x, x, 1.0 / (x[i] * x[j])])
    head = site_order(moments)
    order, factor = [*head, *range(len(head), len(cov))], factor[: len(cov)]
    return np.asarray((cov * np.outer(factor, factor))[np.ix_(order, order)])


# ----------------------------------------------------------------------------------------------------
# Sensitivity of the estimates to covariances that the data do not determine.

MAX_PARTIAL_CORRELATION = 1.0 - 1e-9
"""Largest partial correlation for the range; at one the covariance is singular."""
SMALL_MOVE = 1e-5
GRID_POINTS = 201
"""Steps from one limit of a coefficient's range to the other."""


def extremes(fit: JointNormalFit, pair: SparsePair) -> Floats:
    """Intercept and coefficients (2, 1 + P), in the units of the data, at the limits of what is left open.

    For each of them, M moves through the spectral ball along its steepest direction. With one column on
    either side, these are the smallest and the largest value among all models with this likelihood.
    """
    first, second = (fit.moments.units[u] for u in (pair.first, pair.second))
    joint, shape = PartialCovariance(fit.point.cov, first, second), (len(first), len(second))
    scale = fit.moments.scale[-1] / fit.moments.scale[:-1]
    # The intercept is a - mu'beta, and the means do not depend on M.
    units = np.vstack([-fit.mu * scale, np.diag(scale)])
    origin = np.append(fit.a, np.zeros(len(scale)))

    def moved(M: Floats) -> Floats:
        return np.asarray(origin + joint.moved(M) @ units.T)

    at = moved(np.zeros(shape))
    slopes = np.empty((len(at), *shape))
    for cell in np.ndindex(*shape):
        M = np.zeros(shape)
        M[cell] = SMALL_MOVE
        slopes[(slice(None), *cell)] = (moved(M) - at) / SMALL_MOVE
    out = np.empty((2, len(at)))
    for c, slope in enumerate(slopes):
        left, _, right = np.linalg.svd(slope, full_matrices=False)
        # Coefficients need not be monotone, and all change fastest near the limits.
        steps = MAX_PARTIAL_CORRELATION * np.cos(np.linspace(0.0, np.pi, GRID_POINTS))
        along = moved(steps[:, None, None] * (left @ right))[:, c]
        out[:, c] = along.min(), along.max()
    return out


def open_ranges(fit: JointNormalFit) -> Floats | None:
    """Lower and upper limits (2, 1 + P) of intercept and coefficients over what all pairs leave open.

    None if the data determine every covariance. With several pairs, distances from the estimate are added.
    """
    pairs = undetermined_pairs(fit.moments)
    if not pairs:
        return None
    limits = np.array([extremes(fit, pair) for pair in pairs]) - fit.params
    return np.asarray(
        fit.params + np.array([limits[:, 0].clip(max=0.0), limits[:, 1].clip(min=0.0)]).sum(axis=1)
    )


class PartialCovariance:
    """A joint normal model of (x, y) as a function of the partial covariance of two sets of columns."""

    def __init__(self, cov: Floats, first: Ints, second: Ints) -> None:
        rest = np.setdiff1d(np.arange(len(cov)), np.concatenate([first, second]))
        self.cov, self.first, self.second = cov, first, second
        slopes = [np.linalg.solve(cov[np.ix_(rest, rest)], cov[np.ix_(rest, own)]) for own in (first, second)]
        self.explained = slopes[0].T @ cov[np.ix_(rest, second)]
        self.roots = [
            root_of(cov[np.ix_(own, own)] - slope.T @ cov[np.ix_(rest, own)])
            for own, slope in zip((first, second), slopes, strict=True)
        ]

    def moved(self, M: Floats) -> Floats:
        """Coefficients, (..., P), for the partial covariances R_j^1/2 M R_k^1/2, M (..., j, k)."""
        cov = np.broadcast_to(self.cov, (*M.shape[:-2], *self.cov.shape)).copy()
        block = self.explained + self.roots[0] @ M @ self.roots[1]
        cov[..., self.first[:, None], self.second] = block
        cov[..., self.second[:, None], self.first] = block.swapaxes(-1, -2)
        return np.asarray(np.linalg.solve(cov[..., :-1, :-1], cov[..., :-1, -1:])[..., 0])


def root_of(A: Floats) -> Floats:
    """Symmetric root of a covariance."""
    values, vectors = np.linalg.eigh(A)
    return np.asarray((vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T)
