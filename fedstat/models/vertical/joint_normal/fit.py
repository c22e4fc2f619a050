"""Maximum likelihood of the joint normal model from pattern moments, with the covariance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedstat.errors import EstimationError
from fedstat.inference.covariance import invert_information, symmetrize
from fedstat.models.vertical.fit import (
    NEARLY_VANISHING,
    ROUNDING,
    SMALLEST_STEP,
    SUFFICIENT,
    VANISHING,
    client_order,
    vanishing_variance_message,
)
from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalDerivatives,
    JointNormalPoint,
    differentiate_joint_normal,
    joint_normal_likelihood,
)
from fedstat.models.vertical.likelihood import StandardizedMoments
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import NewtonAscent, TraceRow, solve_information, step_by
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Maximum likelihood of the normal law of columns and response: Newton's method on pattern moments.
#
# Derivatives are exact, so that some six steps reach the maximum that EM approaches in hundreds. Where the
# information is not positive definite the step is Fisher's scoring; either is halved until the log-likelihood
# rises. With all edges between institutions left out it is the law of
# :mod:`fedstat.models.vertical.likelihood`.

SINGULAR = 1e-8
"""Smallest eigenvalue of the correlation matrix of the columns below which it counts as singular."""


@dataclass(frozen=True, slots=True, eq=False)
class JointNormalFit:
    """A law at its maximum; estimates in the units of the data.

    `moments` are standardised and `point` the law of the standardised columns; `moves` what was free. `joint`
    is the log-likelihood of columns and response as standardised, `log_likelihood` that of the response given
    what is seen, in the units of the data: less the largest value that the columns' own likelihood takes.
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
        return float(self.moments.centre[-1] + self.moments.scale[-1] * self.point.a)

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
        return np.asarray(self.moments.centre[:-1] + self.moments.scale[:-1] * self.point.mu)

    @property
    def cov(self) -> Floats:
        """Covariance of columns and response, (P + 1, P + 1)."""
        return np.asarray(self.point.cov * np.outer(self.moments.scale, self.moments.scale))

    @property
    def t(self) -> Floats:
        """Variance of each institution's own linear predictor, (K,)."""
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
    """Every coefficient, and of the concentration the entries given."""
    return FreeParameters(edges, np.ones(len(edges), dtype=bool))


def fit_joint_normal(
    moments: PatternMoments | StandardizedMoments,
    edges: Bools,
    *,
    tol: float = 1e-9,
    maxiter: int = 200,
    start: JointNormalPoint | None = None,
) -> JointNormalFit:
    """Maximise the likelihood of what is seen; `edges` (P, P) are pairs of columns that may depend.

    It stops when the maximum is nearer than `tol` standard errors (the Newton decrement), or with
    ``converged=False`` after `maxiter` steps; it starts from no effects and every block at its own moments.
    An EstimationError where the moments determine no estimate.
    """
    standard = moments if isinstance(moments, StandardizedMoments) else StandardizedMoments(moments)
    P = standard.P
    first = start or JointNormalPoint(np.zeros(P), 0.0, np.zeros(P), 1.0, standard.precision)
    found = maximize_joint_normal(standard.moments, first, all_effects(edges), tol, maxiter)
    null = without_effects(found, np.zeros(P, dtype=bool), tol=1e-4)
    # With no effect the columns' own likelihood and that of the response are apart.
    alone = response_alone(standard.moments)
    own = found.joint - (null.joint - alone)
    return replace(found, log_likelihood=own - found.moments.nobs * float(np.log(found.moments.scale[-1])))


def without_effects(fit: JointNormalFit, effects: Bools, *, tol: float = 1e-6) -> JointNormalFit:
    """Fit the same law with the other coefficients at zero: what a likelihood ratio compares with."""
    at = fit.point
    beta = np.where(effects, at.beta, 0.0)
    s2 = at.s2 + float((at.beta - beta) @ at.covariates @ (at.beta - beta))
    start = JointNormalPoint(at.mu, at.a, beta, s2, at.Q)
    found = maximize_joint_normal(fit.moments, start, FreeParameters(fit.moves.edges, effects), tol, 200)
    return replace(found, log_likelihood=fit.log_likelihood + found.joint - fit.joint)


def response_alone(moments: PatternMoments) -> float:
    """Largest log-likelihood of the standardised response by itself."""
    mean, square = moments.grams[:, [0, -1], -1].sum(axis=0) / moments.nobs
    return float(-0.5 * moments.nobs * (np.log(2.0 * np.pi * (square - mean**2)) + 1.0))


def maximize_joint_normal(
    moments: PatternMoments, point: JointNormalPoint, moves: FreeParameters, tol: float, maxiter: int
) -> JointNormalFit:
    """Go up from a point by Newton's steps."""
    ascent = NewtonAscent(
        moments.nobs,
        lambda at: differentiate_joint_normal(moments, at, moves),
        partial(joint_ascent_direction, moments, moves),
        partial(line_search_joint_normal, moments, moves),
    )
    found = ascent.climb(point, tol, maxiter)
    joint = joint_normal_likelihood(moments, found.point.mean, found.point.cov)
    return JointNormalFit(
        moments, found.point, moves, joint, np.nan, found.trace, found.converged, found.reason
    )


def joint_ascent_direction(
    moments: PatternMoments, moves: FreeParameters, point: JointNormalPoint, at: JointNormalDerivatives
) -> tuple[str, Floats]:
    """Newton's step where the information is positive definite, Fisher's scoring elsewhere."""

    def informations() -> Iterator[tuple[str, Floats]]:
        yield "newton", at.information
        yield "scoring", differentiate_joint_normal(moments, point, moves, expected=True).information

    try:
        return step_by(at.score, informations())
    except np.linalg.LinAlgError:
        raise EstimationError(not_determined(moments)) from None


def line_search_joint_normal(
    moments: PatternMoments,
    moves: FreeParameters,
    point: JointNormalPoint,
    at: JointNormalDerivatives,
    direction: Floats,
) -> tuple[JointNormalPoint, float, bool]:
    """Halve a step until the log-likelihood has risen enough.

    Returns the point, the largest change of a parameter, and whether the step was shortened.

    An EstimationError where it falls along the direction, however short the step, or a variance vanishes.
    """
    slope, step = float(at.score @ direction), 1.0
    slack = ROUNDING * (abs(at.log_likelihood) + moments.nobs)
    while step >= SMALLEST_STEP:
        trial = moves.step(point, step * direction)
        try:
            if trial.s2 > 0.0:
                risen = joint_normal_likelihood(moments, trial.mean, trial.cov)
                if risen >= at.log_likelihood + SUFFICIENT * step * slope - slack:
                    if trial.s2 <= VANISHING:
                        raise EstimationError(vanishing_variance_message(moments))
                    if np.linalg.eigvalsh(trial.Q)[-1] > 1.0 / SINGULAR:
                        raise EstimationError(not_determined(moments))
                    return trial, float(np.abs(step * direction).max()), step < 1.0
        except np.linalg.LinAlgError:  # beyond the edge of positive definite covariances
            pass
        step /= 2.0
    if point.s2 < NEARLY_VANISHING:
        raise EstimationError(f"{vanishing_variance_message(moments)}, or fit with between='independent'")
    raise EstimationError(not_determined(moments))


def not_determined(moments: PatternMoments) -> str:
    """Say why there is no maximum."""
    both, names = moments.patterns.T @ (moments.patterns * moments.n[:, None]), moments.unit_names
    j, k = np.unravel_index(both.argmin(), both.shape)
    return (
        f"the covariance of all columns is not determined: {names[j]} and {names[k]} share "
        f"{int(both[j, k]):,} of {int(moments.nobs):,} entities, and columns may be collinear across "
        "institutions; leave out columns or institutions, or fit with between='independent'"
    )


# ----------------------------------------------------------------------------------------------------
# Covariance of the estimates of a normal law, with every parameter of it accounted for.

MAX_FULL_INVERSE = 2_000
"""Parameters of which the whole covariance is kept."""


def estimates_covariance(fit: JointNormalFit, *, expected: bool = False) -> Floats:
    """Covariance (d, d) of (a, s2, beta_1, mu_1, beta_2, ..., Q) in the units of the data.

    Of more than some sixty columns, the part without Q: all parameters are accounted for, and the rest, which
    only predictions for entities that lack columns need, would take as long again as the fit.

    The inverse of the observed information, or with `expected` of that of data which are missing completely
    at random and follow the law. An EstimationError where it is not positive definite.
    """
    information = differentiate_joint_normal(fit.moments, fit.point, fit.moves, expected=expected).information
    return inverse_information(fit, information)


def inverse_information(fit: JointNormalFit, information: Floats, *, scale: bool = True) -> Floats:
    """Invert an information (d, d) of a law; see above. Without `scale` no residual variance is estimated.

    Its place is then zero, in both.
    """
    moments = fit.moments
    owners = [moments.clients[k] for k in moments.owner]
    columns = [f"{name} ({client})" for name, client in zip(moments.names, owners, strict=True)]
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
        cov = invert_information(information, names[free].tolist())
    if not scale:
        cov = np.insert(np.insert(cov, 1, 0.0, axis=0), 1, 0.0, axis=1)
    return in_psi(fit, cov)


def leading_inverse(fit: JointNormalFit, information: Floats, head: int) -> Floats:
    """First rows and columns of the inverse, at the cost of one factor and no eigenvalues."""
    try:
        columns = solve_information(information, np.eye(len(information), head))
    except np.linalg.LinAlgError:
        raise EstimationError(not_determined(fit.moments)) from None
    return symmetrize(columns[:head])[0]


def in_psi(fit: JointNormalFit, cov: Floats) -> Floats:
    """Bring a covariance of (a, s2, beta, mu, Q) of standardised columns to institution order and units."""
    moments = fit.moments
    i, j = fit.moves.entries
    x, y = moments.scale[:-1], moments.scale[-1]
    factor = np.concatenate([[y, y**2], y / x, x, 1.0 / (x[i] * x[j])])
    head = client_order(moments)
    order, factor = [*head, *range(len(head), len(cov))], factor[: len(cov)]
    return np.asarray((cov * np.outer(factor, factor))[np.ix_(order, order)])
