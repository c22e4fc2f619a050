"""Maximum likelihood of the joint normal model of all columns, from moments by pattern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from fedstat.errors import EstimationError
from fedstat.inference.convergence import rounding_error
from fedstat.inference.covariance import invert_information, symmetrize
from fedstat.models.vertical.fit import (
    NEARLY_VANISHING,
    SMALLEST_STEP,
    SUFFICIENT,
    VANISHING,
    MomentsFit,
    StandardizedMoments,
    block_covariance,
    fit_moments,
    residuals,
    site_order,
    vanishing_variance_message,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import NewtonAscent, TraceRow, solve_information, step_by
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The observed-data log-likelihood of a joint normal model of (x, y), its score and information.
#
# With K_g the inverse of the covariance Omega at the observed columns of pattern g, zero elsewhere, and d_g
# and D_g the sums of z - m and (z - m)(z - m)' there,
#
#     l = -sum_g [ n_g log|2 pi Omega_g| + tr K_g D_g ] / 2
#     dl = sum_g K_g d_g . dm + tr(G dOmega),    G = sum_g (K_g D_g K_g - n_g K_g) / 2
#     -d2l[A, B] = sum_g tr(A K_g B W_g),    W_g = K_g D_g K_g - n_g K_g / 2
#     -d2l[u, A] = sum_g u'K_g A K_g d_g,    -d2l[u, u] = sum_g n_g u'K_g u
#
# for changes u of the mean and symmetric A, B of Omega. The parameters are (a, s2, beta, mu) and the
# concentration Q of x, whose entries may be fixed at zero: Omega = T Q^-1 T' + s2 e e', T = (I; beta'). In
# the basis B = (T Q^-1, e), a change of Q_ab is -B (e_a e_b' + e_b e_a') B', one of beta_c the same with (c,
# y) and the opposite sign, and one of s2 B e e' B'. All changes are elementary matrices, and the whole
# information is one contraction of B'K_g B with B'W_g B. The curvature of Omega in these parameters is one
# more such term, with (Q^-1 and zero at y) instead of K and -2 B'G B instead of W.


def joint_normal_covariance(Sigma: Array, beta: Array, s2: complex) -> Array:
    """Covariance of (x, y) for y = a + (x - mu)'beta + e with variance s2; complex for a complex step."""
    w = Sigma @ beta
    return np.block([[Sigma, w[:, None]], [w[None, :], np.array([[s2 + beta @ w]])]])


@dataclass(frozen=True, slots=True, eq=False)
class JointNormalPoint:
    """Joint normal model of standardized (x, y): mean of x (P,) and y, beta (P,), s2, concentration Q."""

    mu: Floats
    a: float
    beta: Floats
    s2: float
    Q: Floats

    @property
    def mean(self) -> Floats:
        """Mean of (x, y)."""
        return np.append(self.mu, self.a)

    def basis(self) -> Floats:
        """Return (T Sigma, e), (P + 1, P + 1); a LinAlgError if Q is not positive definite."""
        Sigma = self.covariates
        B = np.zeros((len(Sigma) + 1, len(Sigma) + 1))
        B[:-1, :-1], B[-1, :-1], B[-1, -1] = Sigma, self.beta @ Sigma, 1.0
        return B

    @property
    def covariates(self) -> Floats:
        """Covariance of x."""
        half = np.linalg.inv(np.linalg.cholesky(self.Q))
        return np.asarray(half.T @ half)

    @property
    def cov(self) -> Floats:
        """Covariance of (x, y)."""
        return joint_normal_covariance(self.covariates, self.beta, self.s2)


@dataclass(frozen=True, slots=True, eq=False)
class FreeParameters:
    """Which parameters are free: entries of Q, (P, P) and symmetric, and of beta, (P,)."""

    edges: Bools
    effects: Bools

    @property
    def entries(self) -> tuple[Ints, Ints]:
        """Return rows and columns of the free entries of Q, on and above its diagonal."""
        rows, columns = np.nonzero(np.triu(self.edges))
        return rows, columns

    @property
    def pairs(self) -> tuple[Ints, Ints, Floats]:
        """Return elementary matrices of changes of (Q, beta, s2): rows, columns and signs, (m,)."""
        P = len(self.effects)
        (i, j), c = self.entries, np.flatnonzero(self.effects)
        rows, columns = np.concatenate([i, c, [P]]), np.concatenate([j, np.full(len(c) + 1, P)])
        return rows, columns, np.append(np.full(len(i), -1.0), np.ones(len(c) + 1))

    @property
    def order(self) -> Ints:
        """Return the indices of (a, s2, beta, mu, Q) in (mu, a, Q, beta, s2)."""
        P, free, moved = len(self.effects), len(self.entries[0]), int(self.effects.sum())
        Q, beta = P + 1 + np.arange(free), P + 1 + free + np.arange(moved)
        return np.concatenate([[P, P + 1 + free + moved], beta, np.arange(P), Q])

    def step(self, point: JointNormalPoint, by: Floats) -> JointNormalPoint:
        """Change a model by a vector in the order of its derivatives."""
        P, moved = len(self.effects), 2 + int(self.effects.sum())
        beta, Q = point.beta.copy(), point.Q.copy()
        beta[self.effects] += by[2:moved]
        i, j = self.entries
        Q[i, j] += by[moved + P :]
        Q[j, i] = Q[i, j]
        mu = point.mu + by[moved : moved + P]
        return JointNormalPoint(mu, point.a + float(by[0]), beta, point.s2 + float(by[1]), Q)


@dataclass(frozen=True, slots=True, eq=False)
class JointNormalDerivatives:
    """Log-likelihood, score (d,) and information (d, d), observed or expected, of the free parameters.

    In the order a, s2, beta, mu (P,), free entries of Q on and above its diagonal, row by row.
    """

    log_likelihood: float
    score: Floats
    information: Floats


def observed(moments: PatternMoments) -> Bools:
    """Return which columns and, last, the response are observed in each pattern, (G, P + 1)."""
    return np.column_stack([moments.seen, np.ones(len(moments.n), dtype=bool)])


def inverse_by_pattern(cov: Floats, seen: Bools) -> tuple[Floats, Floats]:
    """Inverse covariance of the observed columns of each pattern, zero elsewhere, and log determinant.

    Raises LinAlgError if the covariance is not positive definite.
    """
    both = seen[:, :, None] & seen[:, None, :]
    # One at missing columns changes neither the inverse of the rest nor the determinant.
    padded = np.where(both, cov, np.eye(len(cov)))
    L = np.linalg.cholesky(padded)
    half = np.linalg.inv(L)
    K = np.matmul(half.transpose(0, 2, 1), half) * both
    return K, 2.0 * np.log(np.diagonal(L, axis1=1, axis2=2)).sum(axis=1)


def centered_sums(moments: PatternMoments, mean: Array) -> tuple[Array, Array]:
    """Compute the sums d_g (G, P + 1) and D_g (G, P + 1, P + 1) of observed columns, minus the mean."""
    at = observed(moments) * mean
    first = moments.grams[:, 0, 1:]
    d = first - moments.n[:, None] * at
    D = moments.grams[:, 1:, 1:] - first[:, :, None] * at[:, None, :] - at[:, :, None] * d[:, None, :]
    return d, D


def joint_normal_likelihood(moments: PatternMoments, mean: Floats, cov: Floats) -> float:
    """Observed-data log-likelihood of the standardized columns."""
    K, log_det = inverse_by_pattern(cov, observed(moments))
    _, D = centered_sums(moments, mean)
    constant = observed(moments).sum(axis=1) * np.log(2.0 * np.pi) + log_det
    return float(-0.5 * (moments.n @ constant + np.einsum("gij,gji->", K, D, optimize=True)))


def differentiate_joint_normal(
    moments: PatternMoments,
    point: JointNormalPoint,
    moves: FreeParameters,
    *,
    expected: bool = False,
    information: bool = True,
) -> JointNormalDerivatives:
    """Compute log-likelihood, score and information of the free parameters at a point.

    With `expected`, the information is that of data from the model that are missing completely at random:
    without terms of expectation zero, and positive semi-definite. Without `information` it is empty: it takes
    most of the time.
    """
    P, seen, n = len(point.beta), observed(moments), moments.n[:, None, None]
    cov, B = point.cov, point.basis()
    K, log_det = inverse_by_pattern(cov, seen)
    d, D = centered_sums(moments, point.mean)
    KD = np.matmul(K, D)
    M = np.matmul(KD, K)
    constant = seen.sum(axis=1) * np.log(2.0 * np.pi) + log_det
    log_likelihood = -0.5 * (moments.n @ constant + np.trace(KD, axis1=1, axis2=2).sum())
    G = 0.5 * (B.T @ (M - n * K).sum(axis=0) @ B)
    i, j, signs = moves.pairs
    score = np.concatenate([(K @ d[:, :, None])[:, :, 0].sum(axis=0), signs * halved_diagonal(2.0 * G, i, j)])
    if not information:
        return JointNormalDerivatives(float(log_likelihood), score[moves.order], np.empty((0, 0)))
    K_basis = B.T @ K @ B
    W = 0.5 * n * K if expected else M - 0.5 * n * K
    K_all, W_all = K_basis, B.T @ W @ B
    coupling = np.zeros((P + 1, len(i)))
    if not expected:
        curved = np.zeros_like(B)
        curved[:P, :P] = B[:P, :P]
        K_all, W_all = np.concatenate([K_all, curved[None]]), np.concatenate([W_all, -2.0 * G[None]])
        coupling = signs * mean_coupling(K @ B, np.einsum("ji,gjk,gk->gi", B, K, d, optimize=True), i, j)
    inner = np.outer(signs, signs) * contract(K_all, W_all, i, j)
    matrix = np.block([[(n * K).sum(axis=0), coupling], [coupling.T, inner]])
    order = moves.order
    return JointNormalDerivatives(float(log_likelihood), score[order], matrix[np.ix_(order, order)])


def halved_diagonal(values: Floats, i: Ints, j: Ints) -> Floats:
    """Evaluate a symmetric matrix at elementary changes; a diagonal one changes one entry and not two."""
    return np.where(i == j, 0.5, 1.0) * values[i, j]


def mean_coupling(KB: Floats, k: Floats, i: Ints, j: Ints) -> Floats:
    """Sum of u'K A K d over patterns for changes of the mean and elementary changes: (P + 1, m)."""
    total = np.tensordot(KB, k, axes=(0, 0))  # of column a of K B with entry b of B'K d
    return np.asarray(np.where(i == j, 0.5, 1.0) * (total[:, i, j] + total[:, j, i]))


def contract(K: Floats, W: Floats, i: Ints, j: Ints) -> Floats:
    """Sum of tr(A K B W) over patterns for elementary A, B at (i, j): (m, m)."""
    q = K.shape[1]
    weight = np.where(i == j, 0.5, 1.0)
    flat_K, flat_W = K.reshape(len(K), -1), W.reshape(len(W), -1)
    out = np.empty((len(i), len(i)))
    # One row of elementary matrices at a time: q^4 numbers at once would be gigabytes for a hundred columns.
    for a in np.unique(i):
        here = np.flatnonzero(i == a)
        first = (flat_K.T @ W[:, :, a]).reshape(q, q, q)  # K_bc W_da over b, c, d
        second = (flat_W.T @ K[:, :, a]).reshape(q, q, q)  # W_bc K_da
        both = first + second
        table = both[j[here]][:, i, j] + both[j[here]][:, j, i]
        out[here] = table
    return np.asarray(out * np.outer(weight, weight))


# ----------------------------------------------------------------------------------------------------
# Maximum likelihood of the joint normal model from pattern moments, with the covariance.

# ----------------------------------------------------------------------------------------------------
# Maximum likelihood of the joint normal model of columns and response: Newton's method on pattern moments.
#
# Derivatives are exact, so about six steps reach the maximum that EM approaches in hundreds. If the
# information is not positive definite, the step is Fisher scoring. Steps are halved until the log-likelihood
# increases. Without edges between sites, the model is that of :mod:`fedstat.models.vertical.fit`.

SINGULAR = 1e-8
"""Smallest eigenvalue of the correlation matrix of the columns below which it counts as singular."""
COLLINEAR = 1e5
"""Eigenvalue of the concentration of standardized columns from which an error names its columns."""
COLUMNS_OF_EM, STEPS_OF_EM = 25, 25
"""Number of columns from which the fit starts with so many steps of EM.

A Newton step takes time of the order P^5, a step of EM P^3: with 59 columns it is 20 times as fast.
"""


@dataclass(frozen=True, slots=True, eq=False)
class JointNormalFit:
    """A joint normal model at its maximum; estimates in the units of the data.

    `moments` are standardized and `point` is the model of the standardized columns; `moves` are the free
    parameters. `joint` is the log-likelihood of standardized columns and response. `log_likelihood` is that
    of the response given observed columns, in the units of the data: the largest value of the columns' own
    likelihood is subtracted.
    """

    moments: PatternMoments
    point: JointNormalPoint
    moves: FreeParameters
    joint: float
    log_likelihood: float
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str

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
    """Convert every coefficient, and the given entries of the concentration, to units of the data."""
    return FreeParameters(edges, np.ones(len(edges), dtype=bool))


def fit_joint_normal(
    moments: PatternMoments | StandardizedMoments,
    edges: Bools,
    *,
    tol: float = 1e-9,
    maxiter: int = 200,
    start: JointNormalPoint | None = None,
) -> JointNormalFit:
    """Maximize the observed-data likelihood; `edges` (P, P) are pairs of columns that may be correlated.

    It stops when the maximum is nearer than `tol` standard errors (the Newton decrement), or with
    ``converged=False`` after `maxiter` steps; it starts with no effects and every block at its own moments.
    Raises EstimationError if the moments do not determine an estimate.
    """
    standard = moments if isinstance(moments, StandardizedMoments) else StandardizedMoments(moments)
    P = standard.P
    first = start or JointNormalPoint(np.zeros(P), 0.0, np.zeros(P), 1.0, standard.precision)
    if start is None and P >= COLUMNS_OF_EM:
        first = em_start(standard.moments, edges, first)
    found = maximize_joint_normal(standard.moments, first, all_effects(edges), tol, maxiter)
    null = without_effects(found, np.zeros(P, dtype=bool), tol=1e-4)
    # Without an effect, the columns' own likelihood and that of the response are separate.
    alone = response_alone(standard.moments)
    own = found.joint - (null.joint - alone)
    return replace(found, log_likelihood=own - found.moments.nobs * float(np.log(found.moments.scale[-1])))


def em_start(moments: PatternMoments, edges: Bools, point: JointNormalPoint) -> JointNormalPoint:
    """Return a point nearer to the maximum, by some steps of the EM algorithm on the sums by pattern.

    With A = sum_g (K_g D_g K_g - n_g K_g) and u = sum_g K_g d_g, the expected complete-data moments are the
    mean m + Omega u / n and the covariance Omega + (Omega A Omega) / n - (Omega u)(Omega u)' / n^2. The
    point is returned unchanged if the columns that may be correlated form no separate sets, because the
    maximization step then has no closed form, or if a covariance becomes singular.
    """
    if (edges != (edges.astype(float) @ edges > 0.0)).any():
        return point
    seen, n = observed(moments), moments.n
    try:
        for _ in range(STEPS_OF_EM):
            cov, mean = point.cov, point.mean
            K, _ = inverse_by_pattern(cov, seen)
            d, D = centered_sums(moments, mean)
            A = (np.matmul(np.matmul(K, D), K) - n[:, None, None] * K).sum(axis=0)
            move = cov @ np.einsum("gij,gj->i", K, d) / moments.nobs
            cov, mean = cov + cov @ A @ cov / moments.nobs - np.outer(move, move), mean + move
            beta = np.linalg.solve(cov[:-1, :-1], cov[:-1, -1])
            Q = np.linalg.inv(cov[:-1, :-1] * edges) * edges
            s2 = float(cov[-1, -1] - beta @ cov[:-1, -1])
            following = JointNormalPoint(mean[:-1], float(mean[-1]), beta, s2, symmetrize(Q)[0])
            if s2 <= NEARLY_VANISHING or np.linalg.eigvalsh(following.Q)[-1] > COLLINEAR:
                return point
            point = following
    except np.linalg.LinAlgError:
        pass
    return point


def without_effects(fit: JointNormalFit, effects: Bools, *, tol: float = 1e-6) -> JointNormalFit:
    """Fit the same model with the other coefficients at zero, as the null of a likelihood ratio."""
    at = fit.point
    beta = np.where(effects, at.beta, 0.0)
    s2 = at.s2 + float((at.beta - beta) @ at.covariates @ (at.beta - beta))
    start = JointNormalPoint(at.mu, at.a, beta, s2, at.Q)
    found = maximize_joint_normal(fit.moments, start, FreeParameters(fit.moves.edges, effects), tol, 200)
    return replace(found, log_likelihood=fit.log_likelihood + found.joint - fit.joint)


def response_alone(moments: PatternMoments) -> float:
    """Largest log-likelihood of the standardized response alone."""
    mean, square = moments.grams[:, [0, -1], -1].sum(axis=0) / moments.nobs
    return float(-0.5 * moments.nobs * (np.log(2.0 * np.pi * (square - mean**2)) + 1.0))


def maximize_joint_normal(
    moments: PatternMoments, point: JointNormalPoint, moves: FreeParameters, tol: float, maxiter: int
) -> JointNormalFit:
    """Maximize by Newton steps from a point."""
    ascent = NewtonAscent(
        moments.nobs,
        lambda at: differentiate_joint_normal(moments, at, moves),
        partial(joint_ascent_direction, moments, moves),
        partial(line_search_joint_normal, moments, moves),
    )
    found = ascent.ascend(point, tol, maxiter)
    joint = joint_normal_likelihood(moments, found.point.mean, found.point.cov)
    return JointNormalFit(
        moments, found.point, moves, joint, np.nan, found.trace, found.converged, found.reason
    )


def joint_ascent_direction(
    moments: PatternMoments, moves: FreeParameters, point: JointNormalPoint, at: JointNormalDerivatives
) -> tuple[str, Floats]:
    """Take a Newton step if the information is positive definite, otherwise Fisher scoring."""

    def informations() -> Iterator[tuple[str, Floats]]:
        yield "newton", at.information
        yield "scoring", differentiate_joint_normal(moments, point, moves, expected=True).information

    try:
        return step_by(at.score, informations())
    except np.linalg.LinAlgError:
        raise EstimationError(not_determined(moments, point.Q)) from None


def line_search_joint_normal(
    moments: PatternMoments,
    moves: FreeParameters,
    point: JointNormalPoint,
    at: JointNormalDerivatives,
    direction: Floats,
) -> tuple[JointNormalPoint, float, bool]:
    """Halve a step until the log-likelihood has increased enough.

    Returns the point, the largest change of a parameter, and whether the step was shortened.

    Raises EstimationError if it decreases along the direction for every step length, or a variance vanishes.
    """
    slope, step = float(at.score @ direction), 1.0
    slack = rounding_error(at.log_likelihood, moments.nobs) / 2.0
    while step >= SMALLEST_STEP:
        trial = moves.step(point, step * direction)
        try:
            if trial.s2 > 0.0:
                risen = joint_normal_likelihood(moments, trial.mean, trial.cov)
                if risen >= at.log_likelihood + SUFFICIENT * step * slope - slack:
                    if trial.s2 <= VANISHING:
                        raise EstimationError(vanishing_variance_message(moments))
                    if np.linalg.eigvalsh(trial.Q)[-1] > 1.0 / SINGULAR:
                        raise EstimationError(not_determined(moments, trial.Q))
                    return trial, float(np.abs(step * direction).max()), step < 1.0
        except np.linalg.LinAlgError:  # outside of the positive definite covariances
            pass
        step /= 2.0
    if point.s2 < NEARLY_VANISHING:
        named = undetermined_pairs(moments)
        # Independent blocks assume the same of sites without shared entities, so they are no remedy.
        remedy = (
            f". {name_sparse(moments)} The data may contradict this independence; leave out one of them"
            if named
            else ", or fit with between='independent'"
        )
        raise EstimationError(f"{vanishing_variance_message(moments)}{remedy}")
    raise EstimationError(not_determined(moments, point.Q))


def not_determined(moments: PatternMoments, Q: Floats) -> str:
    """Explain why there is no maximum, near a point with concentration Q (P, P) of standardized columns.

    If a combination of columns has no variance there, its columns are named; otherwise the pair of blocks
    with the fewest shared entities.
    """
    values, vectors = np.linalg.eigh(Q)
    if values[-1] > COLLINEAR:
        weight = np.abs(vectors[:, -1])
        owners = [moments.sites[k] for k in moments.owner]
        named = [f"'{moments.names[c]}' ({owners[c]})" for c in np.flatnonzero(weight > 0.05 * weight.max())]
        return (
            f"the covariance of all columns is not determined: {', '.join(named[:-1])} and {named[-1]} are "
            "collinear, a combination of them is constant. Leave one of them out"
        )
    both, names = moments.patterns.T @ (moments.patterns * moments.n[:, None]), moments.unit_names
    j, k = np.unravel_index(both.argmin(), both.shape)
    return (
        f"the covariance of all columns is not determined: {names[j]} and {names[k]} share "
        f"{int(both[j, k]):,} of {int(moments.nobs):,} entities, and columns may be collinear across "
        "sites; leave out columns or sites, or fit with between='independent'"
    )


# ----------------------------------------------------------------------------------------------------
# Covariance of the estimates of a joint normal model, which accounts for every parameter.

MAX_FULL_INVERSE = 2_000
"""Largest number of parameters for which the complete covariance is kept."""
MIN_GROUP_FREEDOM = 8
"""Fewest degrees of freedom between random groups for a robust covariance."""
SMALLEST_PIVOT = 1e-12
"""Smallest pivot of a factorization of the information, at a unit diagonal, that exceeds rounding."""


def estimates_covariance(fit: JointNormalFit, *, expected: bool = False) -> Floats:
    """Covariance (d, d) of (a, s2, beta_1, mu_1, beta_2, ..., Q) in the units of the data.

    For more than about sixty columns, the part without Q. It accounts for all parameters. Only predictions
    for entities that lack columns need the rest, which would take as long again as the fit.

    The inverse of the observed information or, with `expected`, of that of data from the model that are
    missing completely at random. Raises EstimationError if it is not positive definite.
    """
    information = differentiate_joint_normal(fit.moments, fit.point, fit.moves, expected=expected).information
    return inverse_information(fit, information)


def inverse_information(fit: JointNormalFit, information: Floats, *, scale: bool = True) -> Floats:
    """Invert an information (d, d) of a model; see above. Without `scale`, no residual variance is estimated.

    Its row and column are then zero in both.
    """
    moments = fit.moments
    owners = [moments.sites[k] for k in moments.owner]
    columns = [f"{name} ({site})" for name, site in zip(moments.names, owners, strict=True)]
    i, j = fit.moves.entries
    pairs = [f"covariance of {columns[a]} and {columns[b]}" for a, b in zip(i, j, strict=True)]
    means = [f"mean of {column}" for column in columns]
    names = np.array(["Intercept", "residual variance", *columns, *means, *pairs])
    free = np.ones(len(names), dtype=bool)
    free[1] = scale
    information, head = information[np.ix_(free, free)], 1 + int(scale) + 2 * len(columns)
    if len(information) > MAX_FULL_INVERSE:
        cov = leading_inverse(fit, information, head)
    else:
        cov = invert_or_factor(information, names[free].tolist())
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
    groups, at, moves = by_group.standardized(), fit.point, fit.moves
    seen, code = np.unique(groups.seen, axis=0, return_inverse=True)
    code = code.ravel()
    S, n = scores_by_pattern(groups, at, moves), groups.n
    d, free = S.shape[1], 0
    meat = np.zeros((d, d))
    for g in range(len(seen)):
        own = np.flatnonzero(code == g)
        total, count, J = S[own].sum(axis=0), n[own].sum(), len(own)
        meat += np.outer(total, total) / count
        if J == 1:
            one = replace(groups, seen=groups.seen[own], n=n[own], grams=groups.grams[own])
            meat += differentiate_joint_normal(one, at, moves, expected=True).information
            continue
        away = S[own] - np.outer(n[own] / count, total)
        meat += J / (J - 1.0) * away.T @ away
        free += J - 1
    information = differentiate_joint_normal(fit.moments, at, moves).information
    head = d if d <= MAX_FULL_INVERSE else 2 + 2 * len(at.beta)
    try:
        half = solve_information(information, np.eye(d, head)).T
    except np.linalg.LinAlgError:
        raise EstimationError(not_determined(fit.moments, at.Q)) from None
    if free < MIN_GROUP_FREEDOM:
        raise EstimationError(
            "cov_type='robust' needs random groups of entities that are large enough to be released, but the "
            f"missing patterns have only {free + len(seen)} groups in all; use cov_type='observed', or leave "
            "out columns"
        )
    return in_psi(fit, symmetrize(half @ meat @ half.T)[0]), float(free)


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
        raise EstimationError(not_determined(fit.moments, fit.point.Q)) from None
    return symmetrize(columns[:head])[0]


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
# Pairs of blocks with few common entities: restrictions and sensitivity of the estimates.
#
# A block is a site's columns or, if entities have only some of these, a set of them that are missing
# together: a unit of :class:`~fedstat.models.vertical.moments.PatternMoments`.
#
# Where no entity, or hardly one, has the columns of both, their covariance given all other columns and the
# response is not in the data: every partial covariance R_j^1/2 M R_k^1/2 with a spectral norm of M of at
# most one has the same likelihood. The law takes the two as independent given the other columns.

Between: TypeAlias = Literal["free", "independent"]
MIN_COMMON_ENTITIES = 10
"""Number of shared entities per column of two sites that a covariance requires.

With three, covariances of few entities fit noise: on the packaged enterprises, R-squared is then .89, and .81
with ten, where the true value is .76.
"""
MAX_PARTIAL_CORRELATION = 1.0 - 1e-9
"""Largest partial correlation for the range; at one the covariance is singular."""
SMALL_MOVE = 1e-5
GRID_POINTS = 201
"""Steps from one limit of a coefficient's range to the other."""


@dataclass(frozen=True, slots=True)
class SparsePair:
    """Two units, by number, that share n entities, too few for a covariance of their columns."""

    first: int
    second: int
    n: int
    columns: int

    @property
    def undetermined(self) -> bool:
        """Whether the data do not determine the covariance at all, rather than with large error."""
        return self.n < self.columns


def sparse_pairs(moments: PatternMoments) -> list[SparsePair]:
    """Find the pairs of units with too few common entities for a covariance."""
    patterns, sizes = moments.patterns, [len(columns) for columns in moments.units]
    both = patterns.T @ (patterns * moments.n[:, None])
    each = ((j, k, sizes[j] + sizes[k]) for j, k in combinations(range(len(sizes)), 2))
    return [
        SparsePair(j, k, int(both[j, k]), columns)
        for j, k, columns in each
        if both[j, k] < MIN_COMMON_ENTITIES * columns
    ]


def name_sparse(moments: PatternMoments) -> str:
    """Name the pairs, and the assumption for them; empty if there are none."""
    names = moments.unit_names
    listed = [f"{names[p.first]} and {names[p.second]} {p.n:,}" for p in sparse_pairs(moments)]
    if not listed:
        return ""
    return (
        f"Too few shared entities for a covariance of the columns ({MIN_COMMON_ENTITIES} per column are "
        f"needed): {', '.join(listed)}. Such sites count as independent given all other columns. With few "
        "shared entities, the data hardly test this; with none, not at all."
    )


def edges_between(moments: PatternMoments, between: Between) -> Bools:
    """Return which columns may be correlated given all others, (P, P): of one site, or with "free" all."""
    owner, unit = moments.owner, moments.unit
    edges = np.asarray((owner[:, None] == owner) | (between == "free"))
    for pair in sparse_pairs(moments):
        here, there = unit == pair.first, unit == pair.second
        edges &= ~(np.outer(here, there) | np.outer(there, here))
    return edges


def fit_joint_model(
    moments: PatternMoments, between: Between, maxiter: int = 200
) -> MomentsFit | JointNormalFit:
    """Maximize the observed-data likelihood; columns may be correlated between sites or not."""
    if between == "independent" and moments.complete:
        return fit_moments(moments, maxiter=maxiter)
    return fit_joint_normal(moments, edges_between(moments, between), maxiter=maxiter)


@dataclass(frozen=True, slots=True, eq=False)
class UnrestrictedNormal:
    """A normal distribution of standardized (x, y), (P + 1,), and its observed-data log-likelihood."""

    mean: Floats
    cov: Floats
    log_likelihood: float


def joint_normal_of_fit(fit: MomentsFit | JointNormalFit) -> UnrestrictedNormal:
    """Return the distribution of standardized (x, y) at the estimates of a fit."""
    if isinstance(fit, JointNormalFit):
        return UnrestrictedNormal(fit.point.mean, fit.point.cov, fit.joint)
    standard, point = fit.standard, fit.point
    at = residuals(standard, point)
    Sigma = block_covariance(standard, point, at)
    cov = joint_normal_covariance(Sigma, point.beta, np.exp(point.log_s2))
    mean = np.append(point.mu, point.b + at.m.sum())
    return UnrestrictedNormal(mean, cov, joint_normal_likelihood(standard.moments, mean, cov))


def undetermined_pairs(moments: PatternMoments) -> list[SparsePair]:
    """Find the pairs of units with a covariance that the data do not determine at all."""
    return [pair for pair in sparse_pairs(moments) if pair.undetermined]


def extremes(fit: MomentsFit | JointNormalFit, pair: SparsePair) -> Floats:
    """Intercept and coefficients (2, 1 + P), in the units of the data, at the limits of what is left open.

    For each of them, M moves through the spectral ball along its steepest direction. With one column on
    either side, these are the smallest and the largest value among all models with this likelihood.
    """
    first, second = (fit.moments.units[u] for u in (pair.first, pair.second))
    joint, shape = PartialCovariance(joint_normal_of_fit(fit).cov, first, second), (len(first), len(second))
    scale = fit.moments.scale[-1] / fit.moments.scale[:-1]
    # The intercept is a - mu'beta, and the means do not depend on M.
    units = np.vstack([-fit.mu * scale, np.diag(scale)])
    origin = np.append(fit.a, np.zeros(len(scale)))

    def moved(M: Floats) -> Floats:
        return np.asarray(origin + units @ joint.moved(M))

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
        along = [
            moved(r * left @ right)[c]
            for r in MAX_PARTIAL_CORRELATION * np.cos(np.linspace(0.0, np.pi, GRID_POINTS))
        ]
        out[:, c] = min(along), max(along)
    return out


def open_ranges(fit: MomentsFit | JointNormalFit) -> Floats | None:
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
        """Coefficients for the partial covariance R_j^1/2 M R_k^1/2."""
        cov = self.cov.copy()
        block = self.explained + self.roots[0] @ M @ self.roots[1]
        cov[np.ix_(self.first, self.second)] = block
        cov[np.ix_(self.second, self.first)] = block.T
        return np.asarray(np.linalg.solve(cov[:-1, :-1], cov[:-1, -1]))


def root_of(A: Floats) -> Floats:
    """Symmetric root of a covariance."""
    values, vectors = np.linalg.eigh(A)
    return np.asarray((vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T)
