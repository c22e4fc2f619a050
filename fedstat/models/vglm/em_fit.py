"""Selection with missing blocks (missing="em"): penalized maximum likelihood, from moments by pattern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.errors import EstimationError, Remedy
from fedstat.inference.convergence import rounding_error
from fedstat.inference.covariance import delta_method
from fedstat.kernels.penalized.coordinate_descent import GramSolver, degrees_of_freedom
from fedstat.kernels.penalized.path import Solution, follow_path
from fedstat.kernels.penalized.penalties import Penalty, Terms, orthonormalizer
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vertical.joint_normal.assumption_tests import BetweenChoice
from fedstat.models.vertical.joint_normal.blocks import LONGEST_LOG
from fedstat.models.vertical.joint_normal.edges import Between, edges_between
from fedstat.models.vertical.joint_normal.fit import (
    JointNormalFit,
    all_effects,
    fit_joint_normal,
    maximize_joint_normal,
    no_effects,
    response_alone,
)
from fedstat.models.vertical.joint_normal.likelihood import FreeParameters, JointNormalDerivatives
from fedstat.models.vertical.joint_normal.model import (
    VANISHING,
    JointNormalModel,
    Point,
    vanishing_variance_message,
)
from fedstat.models.vertical.moments import PatternMoments, StandardizedMoments
from fedstat.models.vglm.path_setup import CoefficientPath, PathSetup, Refit
from fedstat.progress_line import counted
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class WorkingModel:
    """The normal model of missing blocks along a path, from the point of no effects, `null`.

    If columns may be correlated between sites, `complete` is the fit without a penalty, and the path begins
    with its columns.
    """

    standard: StandardizedMoments
    model: JointNormalModel
    null: Point
    complete: JointNormalFit | None = None

    @classmethod
    def of(cls, moments: PatternMoments, between: Between) -> WorkingModel:
        """Choose the model of the columns."""
        standard = StandardizedMoments(moments)
        edges = edges_between(standard.moments, between)
        if between == "independent" and standard.moments.complete:
            model = JointNormalModel(standard.moments, all_effects(edges), profiled=True)
            return cls(standard, model, no_effects(standard, profiled=True))
        complete = fit_joint_normal(standard, edges)
        at = complete.point.with_concentration()
        null = replace(at, a=0.0, beta=np.zeros_like(at.beta), s2=1.0)
        return cls(standard, complete.model, null, complete)

    def unpenalized(self) -> Floats:
        """Return the coefficients without a penalty, (P,)."""
        complete = self.complete or maximize_joint_normal(self.model, self.null, 1e-9, 200)
        return complete.point.beta


# ----------------------------------------------------------------------------------------------------
# Penalized maximum likelihood with missing blocks, from moments by pattern.
#
# The working model has normal errors and normal columns, with or without covariances between sites. Let l be
# the observed-data log-likelihood, s2 the residual variance, and beta the coefficients of standardized
# columns. A fit is a point where
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

    point: Point
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
    def model(self) -> JointNormalModel:
        """The model without a penalty."""
        return self.joint.model

    @property
    def sd(self) -> float:
        """Standard deviation of the response."""
        return float(self.model.moments.scale[-1])

    def beta(self, theta: Floats) -> Floats:
        """Return coefficients of standardized columns and response."""
        return np.asarray(self.T @ theta / self.sd)

    def variance(self, point: Point) -> float:
        """Residual variance in the units of the data."""
        return float(np.exp(point.log_s2)) * self.sd**2

    def start(self, point: Point | None = None) -> BlockSolution:
        """Return the point of no effects, or with some beta, as a solution to start from."""
        at = self.joint.null if point is None else point
        derivatives = self.model.differentiate(at)
        self.kept = self._reduce(at, derivatives)
        return self._solution(at, np.linalg.pinv(self.T) @ at.beta * self.sd, derivatives, 0, np.inf)

    def solve(self, terms: Terms, start: Solution, working: Bools, tol: float) -> BlockSolution:
        """Find a stationary point; see :class:`~fedstat.kernels.penalized.path.Solver`."""
        assert isinstance(start, BlockSolution)
        theta, point, steps, root = start.b, start.point, 0, VarianceRoot(start.point.log_s2)
        n = self.model.moments.nobs
        for _ in range(MOST_VARIANCES):
            theta, point, at, used, violation = self._ascend(terms, theta, point, working, SHARE * tol)
            steps += used
            score = 2.0 * float(at.score[1]) * point.variance_unit / n
            # In the unit of a residual, as the scores of theta, so that one tolerance applies to both.
            violation = max(violation, self.sd * abs(score))
            if self.sd * abs(score) <= SHARE * tol:
                break
            assert self.kept is not None
            point = point.with_variance(root.next(score, self.kept.slope))
            if np.exp(point.log_s2) <= VANISHING:
                raise EstimationError(vanishing_variance_message(self.model.moments))
        return self._solution(point, theta, at, steps, violation)

    def _ascend(
        self, terms: Terms, theta: Floats, point: Point, working: Bools, tol: float
    ) -> tuple[Floats, Point, JointNormalDerivatives, int, float]:
        """Maximize at the s2 of the point; also return the derivatives there."""
        n, s2 = self.model.moments.nobs, self.variance(point)
        moved, before = True, np.inf
        for step in range(MOST_STEPS + 1):
            at = self.model.differentiate(point, information=False)
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
        point: Point,
        scores: tuple[Floats, Floats],
        working: Bools,
        tol: float,
    ) -> tuple[bool, Floats, Point]:
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
        self, terms: Terms, model: Terms, theta: Floats, point: Point, d: Floats, free: Floats
    ) -> tuple[Floats, Point] | None:
        """Shorten a step until the objective does not decrease; None if it decreases for every length."""
        n, s2 = self.model.moments.nobs, self.variance(point)
        move = self._join(self.beta(d), free)
        lowest = self.model.log_likelihood(point) - n * terms.value(theta) / s2
        lowest -= rounding_error(lowest, n) / 2.0
        share = self.model.longest(move)
        for _ in range(MOST_HALVINGS):
            trial = self.model.step(point, share * move)
            b = theta + share * d
            if self.model.log_likelihood(trial) - n * terms.value(b) / s2 >= lowest:
                return b, trial
            share /= 2.0
        return None

    def _reduce(self, point: Point, at: JointNormalDerivatives) -> ReducedProblem:
        """Eliminate unpenalized parameters, with the observed information if it is positive definite."""
        n, s2 = self.model.moments.nobs, self.variance(point)
        slope = 2.0 * self.model.variance_information(point) * point.variance_unit**2 / n

        def informations() -> Iterator[Floats]:
            yield at.information if len(at.information) else self.model.differentiate(point).information
            yield self.model.differentiate(point, expected=True).information

        for information in informations():
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

    # ---- (intercept, variance, beta, parameters of the columns) in two parts: theta, and unpenalized ones --

    def _split(self, values: Floats) -> tuple[Floats, Floats]:
        """Split derivatives into those by theta, and by all others except the variance."""
        after = 2 + len(self.T)
        return self.T.T @ values[2:after] / self.sd, np.concatenate([values[:1], values[after:]])

    def _join(self, beta: Floats, free: Floats) -> Floats:
        """Combine a step of beta and of unpenalized parameters; the variance stays."""
        return np.concatenate([free[:1], [0.0], beta, free[1:]])

    def _blocks(self, H: Floats) -> tuple[Floats, Floats, Floats]:
        """Blocks (theta, theta), (theta, free) and (free, free) of a matrix."""
        beta = slice(2, 2 + len(self.T))
        free = np.concatenate([[0], np.arange(beta.stop, len(H))])
        across = self.T.T @ H[beta][:, free] / self.sd
        return self.T.T @ H[beta, beta] @ self.T / self.sd**2, across, H[np.ix_(free, free)]

    def _solution(
        self, point: Point, theta: Floats, at: JointNormalDerivatives, steps: int, violation: float
    ) -> BlockSolution:
        n, s2 = self.model.moments.nobs, self.variance(point)
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


# ----------------------------------------------------------------------------------------------------
# Selection with the normal family if sites lack some entities: missing="em".
#
# Sums of products by missing pattern are exchanged once. All later computations happen at the coordinator:
# the path of :class:`BlockSolver`, and maximum likelihood on the selected columns.

NOTHING = 1e3
"""Lambda of the lasso, for standardized columns and response, at which penalized coefficients are zero."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockPath:
    """Fits along a path with missing blocks.

    The loss of the path is half the variance at which a complete normal sample of the same size has the same
    observed-data likelihood; without missing blocks it is half the mean deviance. The units of a column are
    over the entities that have it. `rsquared` (L,) is the share of the variance of the response that is
    explained for an entity with every block, `means` (L, p) those of the columns, in the units of the data.
    """

    path: CoefficientPath
    units: ColumnScales
    rsquared: Floats
    means: Floats


def blocks_path(joint: WorkingModel, setup: PathSetup) -> BlockPath:
    """Fit the normal family along a path, from moments by missing pattern."""
    standard = joint.standard
    moments = standard.moments
    sd = float(moments.scale[-1])
    T, groups = orthonormalizer(standard.S, setup.groups)
    setup = replace(setup, groups=groups)
    steps = None
    if setup.from_unpenalized:
        # In a group of dependent columns some coordinates are zero, and T has no inverse.
        complete = np.linalg.pinv(T) @ joint.unpenalized() * sd
        setup, steps = setup.adapted(complete), setup.linear_steps(complete)
    solver, every = BlockSolver(joint, T), np.ones(len(groups.weights), dtype=np.bool_)
    # By the solver itself, because s2 and the means of the blocks belong to the null model as well.
    null = solver.solve(Penalty("lasso").at(NOTHING * sd, setup.groups), solver.start(), every, 1e-9 * sd)
    fits = follow_path(
        solver,
        setup.penalty,
        setup.groups,
        null,
        setup.grid(null.gradient, steps, null.G),
        algorithm=setup.algorithm,
        steps=steps,
        tol=setup.tol,
    )
    found = [one for one in fits.solutions if isinstance(one, BlockSolution)]
    loss = [equivalent_loss(one.loss, moments.nobs) for one in found]
    fits = replace(fits, loss=np.array(loss))
    units = ColumnScales(moments.center[:-1], moments.scale[:-1], float(moments.center[-1]), sd, 0.0)
    a = units.mean + sd * np.array([one.point.b for one in found])
    # Each fit has its own information.
    df = [
        degrees_of_freedom(one.G, setup.penalty, setup.groups, fits.lambdas[i : i + 1], one.b[None])
        for i, one in enumerate(found)
    ]
    traces = [one for one in df if one is not None]
    path = CoefficientPath.of(
        fits, fits.coefficients @ T.T, a, units, setup.groups, np.concatenate(traces) if traces else None
    )
    means = units.shift + units.scale * np.array([one.point.mu for one in found])
    return BlockPath(path, units, np.array([1.0 - np.exp(one.point.log_s2) for one in found]), means)


@dataclass(frozen=True, slots=True, eq=False)
class MissingBlocksFit:
    """Further results of a fit with missing blocks, in addition to the path.

    Shares of variance explained for an entity with every block, by the chosen fit and by that on its columns,
    and the means (p,) of the columns at the chosen fit; `complete` is the joint normal model of all columns
    without a penalty, if they are correlated between sites; `choice` states why, if the data chose.
    """

    exchange: PatternExchange
    rsquared: float
    refit_rsquared: float
    means: Floats
    complete: JointNormalFit | None = None
    choice: BetweenChoice | None = None


def blocks_stability(
    moments: PatternMoments,
    between: Between,
    setup: PathSetup,
    path: CoefficientPath,
    draws: int,
    random: np.random.Generator,
) -> tuple[Floats, Floats]:
    """Share of random halves of the entities that select each column, as :func:`normal_path.stability`.

    The halves are those of a table of normal columns with the released sums, see :func:`halve_moments`.
    Halves without an estimate are left out; an EstimationError if none has one.
    """
    setup, counts = replace(setup, lambdas=path.lambdas), []
    for _ in counted(range(draws), "pair of halves"):
        for half in halve_moments(moments, random):
            try:
                counts.append(blocks_path(WorkingModel.of(half, between), setup).path.selected)
            except EstimationError:
                continue
    if not counts:
        why = "draws: no random half of the entities determines an estimate"
        raise EstimationError(why, remedy=Remedy("fit(..., draws=0)", "use {arguments}"))
    numbers = [np.logical_or.accumulate(found, axis=0).sum(axis=1) for found in counts]
    return np.mean(counts, axis=0), np.mean(numbers, axis=0)


def halve_moments(
    moments: PatternMoments, random: np.random.Generator
) -> tuple[PatternMoments, PatternMoments]:
    """Divide the entities of each pattern at random, in a table of normal columns with these sums.

    Given their mean and covariance, n rows of normal columns are 1 m' + Q L', where Q (n, q) has orthonormal
    columns that are orthogonal to 1, and is uniform among these. A pattern with at most q + 1 entities has no
    such Q, and its sums are divided in proportion to the entities.
    """
    first = replace(moments, n=np.zeros_like(moments.n), grams=np.zeros_like(moments.grams))
    for g, total in enumerate(moments.grams):
        n, at = round(moments.n[g]), np.flatnonzero(np.append(moments.seen[g], True))
        m = n // 2 + int(n % 2 and random.random() < 0.5)
        own = np.concatenate([[0], 1 + at])
        if n <= len(at) + 1:
            first.grams[g] = total * (m / max(n, 1))
        else:
            mean = total[0, 1 + at] / n
            values, vectors = np.linalg.eigh(total[np.ix_(1 + at, 1 + at)] - n * np.outer(mean, mean))
            Z = random.normal(size=(n, len(at)))
            Q, R = np.linalg.qr(Z - Z.mean(axis=0))
            rows = (Q * np.sign(np.diag(R)))[:m] @ (vectors * np.sqrt(values.clip(min=0.0))).T
            half = np.column_stack([np.ones(m), mean + rows])
            first.grams[g][np.ix_(own, own)] = half.T @ half
        first.n[g] = first.grams[g, 0, 0]
    return first, replace(moments, n=moments.n - first.n, grams=moments.grams - first.grams)


def equivalent_loss(llf: float, n: float) -> float:
    """Half the variance at which a complete normal sample of n has this maximal log-likelihood."""
    return float(np.exp(-2.0 * llf / n - 1.0) / (4.0 * np.pi))


def refit_blocks(joint: WorkingModel, support: Bools) -> tuple[Refit, float]:
    """Maximize the likelihood on the support; also return the share of explained variance.

    All columns stay in the joint normal model. If they are correlated between sites, those outside of the
    support predict missing columns; if blocks are independent, they do not affect the estimates. Raises
    EstimationError if there is no maximum.
    """
    moments, k, P = joint.model.moments, int(support.sum()), len(support)
    n, sd, scale = moments.nobs, float(moments.scale[-1]), moments.scale[:-1]
    if not k:
        mean, variance = moments.response_moments
        llf = response_alone(moments) - n * float(np.log(sd))
        cov = np.array([[variance / n]])
        return Refit(support, np.array([mean]), cov, llf, float(variance), variance / 2.0), 0.0
    model = replace(joint.model, moves=FreeParameters(joint.model.moves.edges, support))
    start = joint.complete.point.restricted(support) if joint.complete else joint.null
    fit = maximize_joint_normal(model, start, 1e-9, 200)
    if not fit.converged:
        raise EstimationError(
            f"the {k} columns of the chosen fit have no unpenalized estimate: {fit.reason}; use fewer "
            "columns, or a larger lambda"
        )
    cov = model.leading_inverse(fit.point, 2 + k + P)
    # (intercept at the origin, coefficients) by (a, s2, beta of the support, mu), in the units of the data.
    J = np.zeros((1 + k, 2 + k + P))
    center = fit.point.mu + moments.center[:-1] / scale
    J[0, 0], J[0, 2 : 2 + k], J[0, 2 + k :] = sd, -sd * center[support], -sd * fit.point.beta
    J[1:, 2 : 2 + k] = np.diag(sd / scale[support])
    params = fit.params[np.append(True, support)]
    loss = equivalent_loss(fit.log_likelihood, n)
    return Refit(support, params, delta_method(cov, J), fit.log_likelihood, fit.s2, loss), fit.rsquared
