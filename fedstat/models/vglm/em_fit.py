"""Selection with missing blocks (missing="em"), and tests of its assumptions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError
from fedstat.inference.covariance import delta_method
from fedstat.kernels.penalized.coordinate_descent import degrees_of_freedom
from fedstat.kernels.penalized.path import follow_path
from fedstat.kernels.penalized.penalties import Penalty, orthonormalizer
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vertical.joint_normal.assumption_tests import BetweenChoice
from fedstat.models.vertical.joint_normal.edges import Between, not_determined
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, maximize_joint_normal, response_alone
from fedstat.models.vertical.joint_normal.likelihood import FreeParameters
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import solve_information
from fedstat.models.vglm.em_solver import BlockSolution, BlockSolver, WorkingModel
from fedstat.models.vglm.path_setup import CoefficientPath, PathSetup, Refit
from fedstat.progress_line import counted
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Selection with the normal family if sites lack some entities: missing="em".
#
# Sums of products by missing pattern are exchanged once. All later computations happen at the coordinator:
# the path of :mod:`fedstat.models.vglm.em_solver`, and maximum likelihood on the selected columns.

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
        raise EstimationError("draws: no random half of the entities determines an estimate; use draws=0")
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
    information = model.information(fit.point)
    try:
        cov = solve_information(information, np.eye(len(information), 2 + k + P))[: 2 + k + P]
    except np.linalg.LinAlgError:
        raise EstimationError(not_determined(moments, fit.point.Q)) from None
    # (intercept at the origin, coefficients) by (a, s2, beta of the support, mu), in the units of the data.
    J = np.zeros((1 + k, 2 + k + P))
    center = fit.point.mu + moments.center[:-1] / scale
    J[0, 0], J[0, 2 : 2 + k], J[0, 2 + k :] = sd, -sd * center[support], -sd * fit.point.beta
    J[1:, 2 : 2 + k] = np.diag(sd / scale[support])
    params = fit.params[np.append(True, support)]
    loss = equivalent_loss(fit.log_likelihood, n)
    return Refit(support, params, delta_method(cov, J), fit.log_likelihood, fit.s2, loss), fit.rsquared
