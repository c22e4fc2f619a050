"""Maximum likelihood of independent blocks from moments, and the covariance of the estimates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.inference.covariance import delta_method, invert_information
from fedstat.models.vertical.likelihood import (
    LikelihoodDerivatives,
    LikelihoodPoint,
    StandardizedMoments,
    block_covariance,
    evaluate,
    log_likelihood,
    residuals,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import NewtonAscent, NewtonFit, TraceRow, step_by
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Maximum likelihood from moments: Newton's method on the profile log-likelihood.
#
# The parameters of :mod:`fedstat.models.vertical.likelihood` are few and its derivatives exact, so that
# some ten steps reach the stationary point which the iterative exchange approaches in hundreds of rounds.
# Where the information is not positive definite the step is Fisher's scoring; either is halved until the
# log-likelihood rises.

SMALLEST_STEP = 2.0**-20
LONGEST_LOG = 1.0
"""Largest change of the logarithm of a variance in one step."""
SUFFICIENT = 1e-4
ROUNDING = 1e-13
VANISHING, NEARLY_VANISHING = 1e-12, 1e-4
"""Shares of the response's variance: that count as zero, and below which rounding hides the way there."""


@dataclass(frozen=True, slots=True, eq=False)
class MomentsFit:
    """Maximum likelihood estimates, in the units of the data.

    `standard` and `point` are the moments that were fitted and the estimates of standardised columns; `a` is
    the centred intercept, `s2` the residual variance; beta and mu are (P,), Sigma (P, P) block diagonal, t
    (K,) is beta_k' Sigma_k beta_k. The log-likelihood is less the largest value that the likelihood of the
    institutions' own blocks can take. The score of the trace is the Newton decrement, the distance to the
    optimum in standard errors, over the root of the number of entities.
    """

    standard: StandardizedMoments
    point: LikelihoodPoint
    a: float
    s2: float
    beta: Floats
    mu: Floats
    Sigma: Floats
    t: Floats
    log_likelihood: float
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str

    @property
    def moments(self) -> PatternMoments:
        """The moments, standardised."""
        return self.standard.moments

    @property
    def params(self) -> Floats:
        """Intercept at the origin of the columns, and coefficients: (1 + P,)."""
        return np.append(self.a - self.mu @ self.beta, self.beta)

    @property
    def rsquared(self) -> float:
        """Share of variance explained for a fully observed entity, 1 - s2 / (s2 + sum t_k)."""
        return float(1.0 - self.s2 / (self.s2 + self.t.sum()))


def fit_moments(
    moments: PatternMoments | StandardizedMoments,
    *,
    tol: float = 1e-9,
    maxiter: int = 200,
    start: LikelihoodPoint | None = None,
) -> MomentsFit:
    """Maximise the observed-data likelihood of VFEM.

    It stops when the optimum is nearer than `tol` standard errors (the Newton decrement), or with
    ``converged=False`` after `maxiter` steps. It starts from no effects and every block at its own moments,
    as the iterative exchange does with ``init="zero"``. An EstimationError where the moments determine no
    estimate, a ModelError where entities have some of an institution's columns only.
    """
    standard = moments if isinstance(moments, StandardizedMoments) else StandardizedMoments(moments)
    if not standard.moments.whole:
        raise ModelError(
            "fit_moments: entities with some of an institution's columns have the law of all columns"
        )
    ascent = NewtonAscent(
        standard.moments.nobs,
        partial(evaluate, standard),
        lambda _, at: ascent_direction(at),
        partial(line_search, standard),
    )
    return estimates_in_units(standard, ascent.climb(start or standard.start(), tol, maxiter))


def ascent_direction(at: LikelihoodDerivatives) -> tuple[str, Floats]:
    """Newton's step where the information is positive definite, Fisher's scoring elsewhere."""
    try:
        return step_by(at.score, (("newton", at.information), ("scoring", at.expected)))
    except np.linalg.LinAlgError:
        raise EstimationError(
            "the information on the coefficients is not positive; the columns are probably collinear across "
            "institutions, or the entities that several of them share are too few: "
            "leave out columns or institutions"
        ) from None


def line_search(
    standard: StandardizedMoments, point: LikelihoodPoint, at: LikelihoodDerivatives, direction: Floats
) -> tuple[LikelihoodPoint, float, bool]:
    """Go along a direction of ascent until the log-likelihood has risen enough.

    Returns the point, the largest change of a parameter, and whether the step was shortened. An
    EstimationError where the log-likelihood falls along the direction, however short the step, or a variance
    goes to zero.
    """
    phi, slope = point.pack(), float(at.score @ direction)
    logs = np.abs(np.append(direction[1], direction[standard.places[2]])).max()
    # A variance changes by a factor e at most: the quadratic model knows nothing of it farther away.
    first = min(1.0, LONGEST_LOG / logs) if logs > 0.0 else 1.0
    # Near the maximum the rise is below the rounding of the log-likelihood, and no step would be long enough.
    slack = ROUNDING * (abs(at.log_likelihood) + standard.moments.nobs)
    step = first
    while step >= SMALLEST_STEP:
        trial = LikelihoodPoint.unpack(phi + step * direction, standard.P)
        if np.exp(trial.log_s2) <= VANISHING:
            raise EstimationError(vanishing_variance_message(standard.moments))
        if log_likelihood(standard, trial) >= at.log_likelihood + SUFFICIENT * step * slope - slack:
            return trial, float(np.abs(step * direction).max()), step < 1.0
        step /= 2.0
    if np.exp(point.log_s2) < NEARLY_VANISHING:
        raise EstimationError(vanishing_variance_message(standard.moments))
    raise EstimationError(
        "the log-likelihood falls along every step, however short; "
        "the columns are probably collinear across institutions"
    )


def vanishing_variance_message(moments: PatternMoments) -> str:
    """Say why there is no maximum."""
    return (
        f"a variance goes to zero, where the likelihood has no maximum: {moments.n_complete} of the "
        f"{int(moments.nobs)} entities are complete, and the coefficients may reproduce their "
        "response without error; leave out columns or institutions"
    )


def estimates_in_units(standard: StandardizedMoments, climbed: NewtonFit[LikelihoodPoint]) -> MomentsFit:
    """Bring estimates of standardised columns to the units of the data."""
    moments, point = standard.moments, climbed.point
    at = residuals(standard, point)
    x, y = moments.scale[:-1], moments.scale[-1]
    return MomentsFit(
        standard=standard,
        point=point,
        a=float(moments.centre[-1] + y * (point.b + at.m.sum())),
        s2=float(y**2 * np.exp(point.log_s2)),
        beta=y * point.beta / x,
        mu=moments.centre[:-1] + x * point.mu,
        Sigma=block_covariance(standard, point, at) * np.outer(x, x),
        t=y**2 * at.t,
        log_likelihood=log_likelihood(standard, point, at),
        trace=climbed.trace,
        converged=climbed.converged,
        reason=climbed.reason,
    )


# ----------------------------------------------------------------------------------------------------
# Covariance of (a, s2, beta, mu) from pattern moments: inverse observed or expected information.
#
# The profile likelihood of :mod:`fedstat.models.vertical.likelihood` has Sigma_1..Sigma_K maximised out, so
# the inverse of its information is the covariance with every nuisance parameter accounted for.


def information_inverse(fit: MomentsFit, *, expected: bool = False) -> Floats:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...) in the units of the data.

    The fit has to have converged. With `expected`, cross-products between institutions are at their
    expectation, zero. An EstimationError where the information is not positive definite.
    """
    information = centered_information(fit)
    if expected:
        beta = fit.standard.places[0]
        information[beta, beta] -= products_between(fit)
    cov = invert_information(information, names_of(fit.moments))
    order = client_order(fit.moments)
    return covariance_in_units(fit.moments, cov[np.ix_(order, order)])


def origin_covariance(fit: MomentsFit) -> Floats:
    """Covariance (1 + P, 1 + P) of the intercept at the origin of the columns and the coefficients."""
    (beta, mu, _), P = fit.standard.places, fit.standard.P
    J = np.zeros((1 + P, 2 + 2 * P))
    # a - sum mu'beta: the means are estimates as well, and their errors are those of the intercept.
    J[0, 0] = 1.0
    J[0, beta], J[0, mu] = -fit.mu, -fit.beta
    J[1:, beta] = np.eye(P)
    return delta_method(information_inverse(fit), J[:, client_order(fit.moments)])


def centered_information(fit: MomentsFit) -> Floats:
    """Observed information of (a, s2, beta, mu, lambda) of standardised columns."""
    standard, point = fit.standard, fit.point
    information = evaluate(standard, point).information
    beta, mu, _ = standard.places
    A = np.eye(len(information))  # d(b, log s2, ...) / d(a, s2, ...); b = a - sum mu'beta
    A[0, beta], A[0, mu] = -point.mu, -point.beta
    A[1, 1] = np.exp(-point.log_s2)
    return np.asarray(A.T @ information @ A)


def products_between(fit: MomentsFit) -> Floats:
    """Sum of u_j u_k'/v over the entities that two sites both have, u = x - mu; zero within sites."""
    standard, moments, mu = fit.standard, fit.moments, fit.point.mu
    h = 1.0 / residuals(standard, fit.point).v
    means = moments.seen * mu
    # Sums of u_j u_k' from those of x_j, x_k and x_j x_k', each pattern weighted by its 1/v.
    mixed = (moments.grams[:, 0, 1:-1] * h[:, None]).T @ means
    products = np.tensordot(h, moments.grams[:, 1:-1, 1:-1], 1) - mixed - mixed.T
    products += (means * (h * moments.n)[:, None]).T @ means
    return np.asarray(products * (1.0 - standard.within))


def names_of(moments: PatternMoments) -> list[str]:
    """Name each parameter of the information, for messages."""
    owners = [moments.clients[k] for k in moments.owner]
    columns = [f"{name} ({client})" for name, client in zip(moments.names, owners, strict=True)]
    means = [f"mean of {column}" for column in columns]
    variances = [f"variance of the block of {client}" for client in moments.clients]
    return ["Intercept", "residual variance", *columns, *means, *variances]


def client_order(moments: PatternMoments) -> list[int]:
    """Places of (a, s2, beta_1, mu_1, beta_2, ...) in (a, s2, beta, mu)."""
    P, columns = len(moments.names), np.arange(len(moments.names))
    by_client = [columns[moments.places(k)] for k in range(len(moments.sizes))]
    return [0, 1, *[int(i) for own in by_client for i in (*(2 + own), *(2 + P + own))]]


def covariance_in_units(moments: PatternMoments, cov: Floats) -> Floats:
    """Bring a covariance of (a, s2, beta_1, mu_1, ...) of standardised columns to the units of the data."""
    x, y = moments.scale[:-1], moments.scale[-1]
    factor = np.concatenate([[y, y**2], y / x, x])[client_order(moments)]
    return np.asarray(cov * np.outer(factor, factor))
