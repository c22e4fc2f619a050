"""Penalized maximum likelihood with missing blocks, from moments by pattern."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.errors import EstimationError
from fedstat.inference.convergence import rounding_error
from fedstat.kernels.penalized.coordinate_descent import GramSolver
from fedstat.kernels.penalized.path import Solution
from fedstat.kernels.penalized.penalties import Terms
from fedstat.models.vertical.fit import (
    LONGEST_LOG,
    VANISHING,
    LikelihoodDerivatives,
    LikelihoodPoint,
    StandardizedMoments,
    evaluate,
    fit_moments,
    log_likelihood,
    vanishing_variance_message,
)
from fedstat.models.vertical.joint_normal.fit import (
    FreeParameters,
    JointNormalFit,
    JointNormalPoint,
    all_effects,
    differentiate_joint_normal,
    fit_joint_normal,
    joint_normal_likelihood,
    not_determined,
)
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# The normal models of missing blocks in a selecting fit: parameters and derivatives.
#
# Parameters are (intercept, log s2, beta, parameters of the columns), for standardized columns and response.


class WorkingPoint(Protocol):
    """A point of a model: intercept at the origin of the standardized columns, beta (P,), means mu (P,)."""

    @property
    def b(self) -> float:
        """Intercept."""

    @property
    def log_s2(self) -> float:
        """Logarithm of the residual variance."""

    @property
    def beta(self) -> Floats:
        """Coefficients."""

    @property
    def mu(self) -> Floats:
        """Means of the columns."""


class WorkingModel(Protocol):
    """Methods of a normal model that the path uses."""

    @property
    def standard(self) -> StandardizedMoments:
        """Return the moments."""

    def start(self) -> Any:
        """Return the point of no effects."""

    def unpenalized(self) -> Floats:
        """Return the coefficients without a penalty, (P,)."""

    def evaluate(self, point: Any) -> LikelihoodDerivatives:
        """Compute log-likelihood, score, observed and expected information."""

    def score(self, point: Any) -> LikelihoodDerivatives:
        """Compute log-likelihood and score; information is empty if it would take most of the time."""

    def log_likelihood(self, point: Any) -> float:
        """Return the log-likelihood, minus infinity if the model is not valid."""

    def move(self, point: Any, by: Floats) -> Any:
        """Move a point."""

    def longest(self, move: Floats) -> float:
        """Return the share of a step that is tried first."""

    def with_variance(self, point: Any, log_s2: float) -> Any:
        """Replace the residual variance."""


@dataclass(frozen=True, slots=True, eq=False)
class IndependentBlocksModel:
    """Blocks that are independent between sites: :mod:`fedstat.models.vertical.fit`."""

    standard: StandardizedMoments

    def start(self) -> LikelihoodPoint:
        """Return the point of no effects."""
        return self.standard.start()

    def unpenalized(self) -> Floats:
        """Return the coefficients without a penalty, (P,)."""
        return fit_moments(self.standard).point.beta

    def evaluate(self, point: LikelihoodPoint) -> LikelihoodDerivatives:
        """Compute log-likelihood, score, observed and expected information."""
        return evaluate(self.standard, point)

    def score(self, point: LikelihoodPoint) -> LikelihoodDerivatives:
        """Compute log-likelihood, score and information, which takes no more time."""
        return self.evaluate(point)

    def log_likelihood(self, point: LikelihoodPoint) -> float:
        """Return the log-likelihood."""
        return log_likelihood(self.standard, point)

    def move(self, point: LikelihoodPoint, by: Floats) -> LikelihoodPoint:
        """Move a point."""
        return LikelihoodPoint.unpack(point.pack() + by, self.standard.P)

    def longest(self, move: Floats) -> float:
        """Return the share of a step at which no variance changes by more than a factor."""
        logs = float(np.abs(move[self.standard.places[2]]).max())
        return min(1.0, LONGEST_LOG / logs) if logs > 0.0 else 1.0

    def with_variance(self, point: LikelihoodPoint, log_s2: float) -> LikelihoodPoint:
        """Replace the residual variance."""
        return replace(point, log_s2=log_s2)


@dataclass(frozen=True, slots=True, eq=False)
class FreeCovariancePoint:
    """A point of the joint normal model, which has the mean of the response.

    See :mod:`fedstat.models.vertical.joint_normal`.
    """

    joint: JointNormalPoint

    @property
    def b(self) -> float:
        """Intercept at the origin of the standardized columns."""
        return float(self.joint.a - self.joint.mu @ self.joint.beta)

    @property
    def log_s2(self) -> float:
        """Logarithm of the residual variance."""
        return float(np.log(self.joint.s2))

    @property
    def beta(self) -> Floats:
        """Coefficients."""
        return self.joint.beta

    @property
    def mu(self) -> Floats:
        """Means of the columns."""
        return self.joint.mu


@dataclass(frozen=True, slots=True, eq=False)
class FreeCovarianceModel:
    """Columns whose covariance between sites is free, as `edges` (P, P) state.

    `columns`, the largest log-likelihood of the columns alone, is subtracted from the log-likelihood.
    """

    standard: StandardizedMoments
    edges: Bools
    complete: JointNormalFit
    columns: float

    @classmethod
    def of(cls, standard: StandardizedMoments, edges: Bools) -> FreeCovarianceModel:
        """Fit the model without a penalty; the path begins with its columns."""
        complete = fit_joint_normal(standard, edges)
        n, sd = standard.moments.nobs, float(standard.moments.scale[-1])
        return cls(
            standard, edges, complete, complete.joint - complete.log_likelihood - n * float(np.log(sd))
        )

    @property
    def moves(self) -> FreeParameters:
        """All parameters are free."""
        return all_effects(self.edges)

    def start(self) -> FreeCovariancePoint:
        """Return the point of no effects."""
        at = self.complete.point
        return FreeCovariancePoint(JointNormalPoint(at.mu, 0.0, np.zeros_like(at.beta), 1.0, at.Q))

    def unpenalized(self) -> Floats:
        """Return the coefficients without a penalty, (P,)."""
        return self.complete.point.beta

    def evaluate(self, point: FreeCovariancePoint) -> LikelihoodDerivatives:
        """Compute log-likelihood, score, observed and expected information."""
        moments, s2 = self.standard.moments, point.joint.s2
        try:
            at, mean = (
                differentiate_joint_normal(moments, point.joint, self.moves, expected=e)
                for e in (False, True)
            )
        except np.linalg.LinAlgError:
            raise EstimationError(not_determined(moments, point.joint.Q)) from None
        unit = np.ones(len(at.score))
        unit[1] = s2  # derivative with respect to log s2
        observed, expected = (one.information * np.outer(unit, unit) for one in (at, mean))
        return LikelihoodDerivatives(self._own(at.log_likelihood), at.score * unit, observed, expected)

    def score(self, point: FreeCovariancePoint) -> LikelihoodDerivatives:
        """Compute log-likelihood and score, without information."""
        moments = self.standard.moments
        try:
            at = differentiate_joint_normal(moments, point.joint, self.moves, information=False)
        except np.linalg.LinAlgError:
            raise EstimationError(not_determined(moments, point.joint.Q)) from None
        score, none = at.score.copy(), np.empty((0, 0))
        score[1] *= point.joint.s2  # derivative with respect to log s2
        return LikelihoodDerivatives(self._own(at.log_likelihood), score, none, none)

    def _own(self, joint: float) -> float:
        sd = float(self.standard.moments.scale[-1])
        return joint - self.columns - self.standard.moments.nobs * float(np.log(sd))

    def log_likelihood(self, point: FreeCovariancePoint) -> float:
        """Return the log-likelihood, minus infinity if the model is not valid."""
        try:
            return self._own(
                joint_normal_likelihood(self.standard.moments, point.joint.mean, point.joint.cov)
            )
        except np.linalg.LinAlgError:
            return -np.inf

    def move(self, point: FreeCovariancePoint, by: Floats) -> FreeCovariancePoint:
        """Move a point."""
        straight = by.copy()
        straight[1] = point.joint.s2 * np.expm1(by[1])
        return FreeCovariancePoint(self.moves.step(point.joint, straight))

    def longest(self, move: Floats) -> float:
        """Return the full step: outside of positive definite covariances there is no likelihood."""
        return 1.0

    def with_variance(self, point: FreeCovariancePoint, log_s2: float) -> FreeCovariancePoint:
        """Replace the residual variance."""
        return FreeCovariancePoint(replace(point.joint, s2=float(np.exp(log_s2))))


# ----------------------------------------------------------------------------------------------------
# Penalized maximum likelihood with missing blocks, from moments by pattern.
#
# The working model is one of :mod:`fedstat.models.vglm.em_solver`: normal errors and normal columns, with or
# without covariances between sites. Let l be the observed-data log-likelihood, s2 the residual variance, and
# beta the coefficients of standardized columns. A fit is a point where
#
#     beta, means and covariances of the blocks maximize   l - n P_lambda(beta) / s2   at this s2,
#     s2 maximizes   l   at these coefficients, means and covariances.
#
# This is the limit of an EM algorithm whose M-step is penalized least squares on the expected Gram matrix,
# followed by the mean of the expected squared residuals (Staedler and Buehlmann 2012 in other parameters).
# Without missing blocks, the first line is ``RSS/(2n) + P_lambda`` for any s2, the path of the complete data;
# without a penalty, both lines are maximum likelihood.
#
# For given s2, steps are those of proximal Newton on the profile likelihood, where everything except beta is
# free and eliminated. They are halved until the objective increases, so it never decreases. The s2 is the
# root of its score. The information takes most of the time, and is kept from step to step and from lambda to
# lambda as long as a step leaves a small share of the violation.
#
# References
# ----------
# Staedler, N. and Buehlmann, P. (2012). Missing values: sparse inverse covariance estimation and an extension
# to sparse regression. Statistics and Computing 22, 219-235. doi:10.1007/s11222-010-9219-7.

MOST_STEPS, MOST_HALVINGS = 100, 20
MOST_VARIANCES = 60
"""Number of values of s2 that are tried for one lambda."""
SHARE = 0.1
"""Share of the tolerance for the scores of s2 and of the unpenalized parameters."""
SLOW = 0.6
"""Share of the violation that a step may leave before the information is computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockSolution(Solution):
    """A solution, with all parameters of the model there.

    G (p, p) is the information of the coefficients over n, times s2, after the elimination of the others, at
    this point or near it.
    """

    point: WorkingPoint
    G: Floats


@dataclass(frozen=True, slots=True, eq=False)
class ReducedProblem:
    """The information of theta at a point, with b, the means and the blocks' variances eliminated.

    All over n, times s2: G (p, p) is the information of theta after the elimination, `across` (p, d - p) that
    between theta and the eliminated parameters, `factor` the Cholesky factor of their own. `follow` (d - p,
    p) is their derivative with respect to a step of theta, `slope` the expected slope of the score of s2.
    """

    G: Floats
    across: Floats
    factor: tuple[Floats, bool]
    follow: Floats
    slope: float

    def eliminate(self, score: Floats, free: Floats) -> tuple[Floats, Floats]:
        """Return the score of theta after the elimination, and the step of the others if theta stays."""
        step = cho_solve(self.factor, free)
        return score - self.across @ step, step


@dataclass(slots=True, eq=False)
class BlockSolver:
    """The observed-data likelihood of blocks, as the path uses it.

    Coefficients of standardized columns, in the units of the response, are ``T theta``, with T (p, p): theta
    are the coordinates of the penalty.
    """

    joint: WorkingModel
    T: Floats
    kept: ReducedProblem | None = None

    @property
    def standard(self) -> StandardizedMoments:
        """The moments."""
        return self.joint.standard

    @property
    def sd(self) -> float:
        """Standard deviation of the response."""
        return float(self.standard.moments.scale[-1])

    def beta(self, theta: Floats) -> Floats:
        """Return coefficients of standardized columns and response."""
        return np.asarray(self.T @ theta / self.sd)

    def variance(self, point: WorkingPoint) -> float:
        """Residual variance in the units of the data."""
        return float(np.exp(point.log_s2)) * self.sd**2

    def start(self, point: WorkingPoint | None = None) -> BlockSolution:
        """Return the point of no effects, or with some beta, as a solution to start from."""
        at = self.joint.start() if point is None else point
        derivatives = self.joint.evaluate(at)
        self.kept = self._reduce(at, derivatives)
        return self._solution(at, np.linalg.pinv(self.T) @ at.beta * self.sd, derivatives, 0, np.inf)

    def solve(self, terms: Terms, start: Solution, working: Bools, tol: float) -> BlockSolution:
        """Find a stationary point; see :class:`~fedstat.kernels.penalized.path.Solver`."""
        assert isinstance(start, BlockSolution)
        theta, point, steps, root = start.b, start.point, 0, VarianceRoot(start.point.log_s2)
        n = self.standard.moments.nobs
        for _ in range(MOST_VARIANCES):
            theta, point, at, used, violation = self._ascend(terms, theta, point, working, SHARE * tol)
            steps += used
            score = 2.0 * float(at.score[1]) / n
            # In the unit of a residual, as the scores of theta, so that one tolerance applies to both.
            violation = max(violation, self.sd * abs(score))
            if self.sd * abs(score) <= SHARE * tol:
                break
            assert self.kept is not None
            point = self.joint.with_variance(point, root.next(score, self.kept.slope))
            if np.exp(point.log_s2) <= VANISHING:
                raise EstimationError(vanishing_variance_message(self.standard.moments))
        return self._solution(point, theta, at, steps, violation)

    def _ascend(
        self, terms: Terms, theta: Floats, point: WorkingPoint, working: Bools, tol: float
    ) -> tuple[Floats, WorkingPoint, LikelihoodDerivatives, int, float]:
        """Maximize at the s2 of the point; also return the derivatives there."""
        n, s2 = self.standard.moments.nobs, self.variance(point)
        moved, before = True, np.inf
        for step in range(MOST_STEPS + 1):
            at = self.joint.score(point)
            score, free = self._split(at.score * s2 / n)
            violation = max(terms.violation(theta, -score), float(np.abs(free).max()) / self.sd)
            if violation <= tol or not moved or step == MOST_STEPS:
                break
            fresh = len(at.information) > 0 or violation > SLOW * before
            if fresh:
                self.kept = self._reduce(point, at)
            inner = min(tol, 0.1 * violation)
            moved, theta, point = self._step(terms, theta, point, (score, free), working, inner)
            if not moved and not fresh:
                self.kept = self._reduce(point, at)
                moved, theta, point = self._step(terms, theta, point, (score, free), working, inner)
            before = violation
        return theta, point, at, step, violation

    def _step(
        self,
        terms: Terms,
        theta: Floats,
        point: WorkingPoint,
        scores: tuple[Floats, Floats],
        working: Bools,
        tol: float,
    ) -> tuple[bool, Floats, WorkingPoint]:
        """Take one step of proximal Newton, until the objective increases; False if it does not.

        `scores` are those of theta and of the unpenalized parameters, over n, times s2.
        """
        reduced = self.kept
        assert reduced is not None
        pull, free = reduced.eliminate(*scores)
        # The tangent of a concave penalty is above it: if the penalty's own model fails, the tangent gives an
        # increase.
        for model in (terms, terms.linearized(theta)):
            solver = GramSolver(reduced.G, reduced.G @ theta + pull, terms.groups)
            d = solver.solve(model, solver.start(theta), working, tol).b - theta
            found = self._search(terms, model, theta, point, d, free - reduced.follow @ d)
            if found is not None:
                return True, *found
        return False, theta, point

    def _search(
        self, terms: Terms, model: Terms, theta: Floats, point: WorkingPoint, d: Floats, free: Floats
    ) -> tuple[Floats, WorkingPoint] | None:
        """Shorten a step until the objective does not decrease; None if it decreases for every length."""
        n, s2 = self.standard.moments.nobs, self.variance(point)
        move = self._join(self.beta(d), free)
        lowest = self.joint.log_likelihood(point) - n * terms.value(theta) / s2
        lowest -= rounding_error(lowest, n) / 2.0
        share = self.joint.longest(move)
        for _ in range(MOST_HALVINGS):
            trial = self.joint.move(point, share * move)
            b = theta + share * d
            if self.joint.log_likelihood(trial) - n * terms.value(b) / s2 >= lowest:
                return b, trial
            share /= 2.0
        return None

    def _reduce(self, point: WorkingPoint, at: LikelihoodDerivatives) -> ReducedProblem:
        """Eliminate unpenalized parameters, with the observed information if it is positive definite."""
        n, s2 = self.standard.moments.nobs, self.variance(point)
        at = at if len(at.information) else self.joint.evaluate(point)
        slope = 2.0 * float(at.expected[1, 1]) / n
        for information in (at.information, at.expected):
            H, across, inner = self._blocks(information * s2 / n)
            try:
                factor = cho_factor(inner, lower=True)
                follow = cho_solve(factor, across.T)
                G = H - across @ follow
                values = np.linalg.eigvalsh(G)
            except np.linalg.LinAlgError:
                continue
            # The observed information is not positive definite in theta here; the expected one always is.
            if values[0] < -1e-10 * values[-1]:
                continue
            return ReducedProblem(G, across, factor, follow, slope)
        raise EstimationError(
            "the information on the means and variances of the blocks is not positive definite: too few "
            "entities share what several sites hold; leave out columns or sites"
        )

    # ---- (intercept, log s2, beta, parameters of the columns) in two parts: theta, and unpenalized ones --

    def _split(self, values: Floats) -> tuple[Floats, Floats]:
        """Split derivatives into those by theta, and by all others except log s2."""
        beta = self.standard.places[0]
        return self.T.T @ values[beta] / self.sd, np.concatenate([values[:1], values[beta.stop :]])

    def _join(self, beta: Floats, free: Floats) -> Floats:
        """Combine a step of beta and of unpenalized parameters; log s2 stays."""
        return np.concatenate([free[:1], [0.0], beta, free[1:]])

    def _blocks(self, H: Floats) -> tuple[Floats, Floats, Floats]:
        """Blocks (theta, theta), (theta, free) and (free, free) of a matrix."""
        beta = self.standard.places[0]
        free = np.concatenate([[0], np.arange(beta.stop, len(H))])
        across = self.T.T @ H[beta][:, free] / self.sd
        return self.T.T @ H[beta, beta] @ self.T / self.sd**2, across, H[np.ix_(free, free)]

    def _solution(
        self, point: WorkingPoint, theta: Floats, at: LikelihoodDerivatives, steps: int, violation: float
    ) -> BlockSolution:
        n, s2 = self.standard.moments.nobs, self.variance(point)
        score, _ = self._split(at.score * s2 / n)
        assert self.kept is not None
        return BlockSolution(theta, -score, at.log_likelihood, steps, violation, point, self.kept.G)


@dataclass(slots=True)
class VarianceRoot:
    """Search for the logarithm of s2 at which its score is zero: secants within a bracket.

    The score was positive at `low`, negative at `high`; `before` is the last point with the score there.
    """

    at: float
    low: float = -np.inf
    high: float = np.inf
    before: tuple[float, float] | None = None

    def next(self, score: float, slope: float) -> float:
        """Return the next point, from the score here; `slope` is minus its expected slope."""
        if score > 0.0:
            self.low = max(self.low, self.at)
        else:
            self.high = min(self.high, self.at)
        if self.before is not None and self.before[0] != self.at:
            secant = (self.before[1] - score) / (self.at - self.before[0])
            slope = secant if secant > 0.0 else slope
        new = self.at + float(np.clip(score / slope, -LONGEST_LOG, LONGEST_LOG))
        if not self.low < new < self.high:
            new = (self.low + self.high) / 2.0
        self.before, self.at = (self.at, score), new
        return new
