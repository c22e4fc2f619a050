"""Maximum likelihood from moments: Newton's method on the profile log-likelihood.

The parameters of :mod:`fedstat.models.vertical.likelihood` are few and its derivatives exact, so that
some ten steps reach the stationary point which the iterative exchange approaches in hundreds of
rounds. Where the information is not positive definite the step is Fisher's scoring; either is halved
until the log-likelihood rises.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.errors import EstimationError
from fedstat.models.vertical.likelihood import (
    LikelihoodDerivatives,
    LikelihoodPoint,
    Standard,
    block_covariance,
    evaluate,
    log_likelihood,
    residuals,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Floats

SMALLEST_STEP = 2.0**-20
LONGEST_LOG = 1.0
"""Largest change of the logarithm of a variance in one step."""
SUFFICIENT = 1e-4
ROUNDING = 1e-13
VANISHING, NEARLY_VANISHING = 1e-12, 1e-4
"""Shares of the response's variance: that count as zero, and below which rounding hides the way there."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One evaluation: log-likelihood, relative score norm, largest change, what was done, seconds."""

    iteration: int
    log_likelihood: float
    score: float
    change: float
    move: str
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class MomentsFit:
    """Maximum likelihood estimates, in the units of the data.

    `standard` and `point` are the moments that were fitted and the estimates of standardised columns; `a` is
    the centred intercept, `s2` the residual variance; beta and mu are (P,), Sigma (P, P) block diagonal, t
    (K,) is beta_k' Sigma_k beta_k. The log-likelihood is less the largest value that the likelihood of the
    clients' own blocks can take. The score of the trace is the Newton decrement, the distance to the optimum
    in standard errors, over the root of the number of entities.
    """

    standard: Standard
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
    moments: PatternMoments | Standard,
    *,
    tol: float = 1e-9,
    maxiter: int = 200,
    start: LikelihoodPoint | None = None,
) -> MomentsFit:
    """Maximise the observed-data likelihood of VFEM.

    It stops when the optimum is nearer than `tol` standard errors (the Newton decrement), or with
    ``converged=False`` after `maxiter` steps. It starts from no effects and every block at its own moments,
    as the iterative exchange does with ``init="zero"``. An EstimationError where the moments determine no
    estimate.
    """
    standard = moments if isinstance(moments, Standard) else Standard(moments)
    point = start or standard.start()
    trace: list[TraceRow] = []
    began, move, change = time.perf_counter(), "start", np.inf
    converged, reason = False, "the largest number of iterations was reached"
    for iteration in range(1, maxiter + 1):
        at = evaluate(standard, point)
        move_next, direction = ascent_direction(at)
        decrement = float(np.sqrt(np.maximum(at.score @ direction, 0.0)))
        seconds = time.perf_counter() - began
        score = decrement / np.sqrt(standard.moments.nobs)
        trace.append(TraceRow(iteration, at.log_likelihood, float(score), float(change), move, seconds))
        if decrement <= tol:
            converged, reason = move_next == "newton", "the distance to the optimum is below its tolerance"
            if not converged:
                reason = "a stationary point that is not a maximum was reached"
            break
        point, change, shortened = climb_along(standard, point, at, direction)
        move = "shortened" if shortened else move_next
    return in_units(standard, point, tuple(trace), converged, reason)


def ascent_direction(at: LikelihoodDerivatives) -> tuple[str, Floats]:
    """Newton's step where the information is positive definite, Fisher's scoring elsewhere."""
    for move, information in (("newton", at.information), ("scoring", at.expected)):
        # With ones on its diagonal: coefficients and logarithms of variances differ by orders of magnitude,
        # and whether a factor exists is to depend on neither unit.
        root = np.sqrt(np.maximum(np.abs(np.diag(information)), np.finfo(float).tiny))
        try:
            factor = cho_factor(information / np.outer(root, root), lower=True)
        except np.linalg.LinAlgError:
            continue
        return move, np.asarray(cho_solve(factor, at.score / root) / root)
    raise EstimationError(
        "the information on the coefficients is not positive; the columns are probably collinear across "
        "institutions, or the entities that several of them share are too few: leave out columns or clients"
    )


def climb_along(
    standard: Standard, point: LikelihoodPoint, at: LikelihoodDerivatives, direction: Floats
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
            raise EstimationError(vanishing_message(standard.moments))
        if log_likelihood(standard, trial) >= at.log_likelihood + SUFFICIENT * step * slope - slack:
            return trial, float(np.abs(step * direction).max()), step < 1.0
        step /= 2.0
    if np.exp(point.log_s2) < NEARLY_VANISHING:
        raise EstimationError(vanishing_message(standard.moments))
    raise EstimationError(
        "the log-likelihood falls along every step, however short; "
        "the columns are probably collinear across institutions"
    )


def vanishing_message(moments: PatternMoments) -> str:
    """Say why there is no maximum."""
    return (
        f"a variance goes to zero, where the likelihood has no maximum: {moments.n_complete} of the "
        f"{int(moments.nobs)} entities are complete, and the coefficients may reproduce their "
        "response without error; leave out columns or clients"
    )


def in_units(
    standard: Standard, point: LikelihoodPoint, trace: tuple[TraceRow, ...], converged: bool, reason: str
) -> MomentsFit:
    """Bring estimates of standardised columns to the units of the data."""
    moments, at = standard.moments, residuals(standard, point)
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
        trace=trace,
        converged=converged,
        reason=reason,
    )
