"""Following the solution of a penalised problem from the largest lambda to smaller ones.

The loss is whatever a solver makes of it: sums that were released (``gram``) or rows
(those of the tests). SCAD and MCP are reached in one of three ways. *Descent* goes along the path of
stationary points from the one before, as Breheny and Huang (2011) do. *LLA* starts from the lasso of the same
lambda and repeats the local linear approximation to a fixed point (Fan, Xue and Zou 2014). *Steps* of LLA
from an estimate without a penalty, one or a few, are those of Zou and Li (2008): each is a lasso, which has
one answer. The answer of the last two at one lambda does not depend on which others were asked for.

References
----------
Zou, H. and Li, R. (2008). One-step sparse estimates in nonconcave penalized likelihood models. Annals of
Statistics 36, 1509-1533.
Tibshirani, R. et al. (2012). Strong rules for discarding predictors in lasso-type problems. Journal of the
Royal Statistical Society B 74, 245-266.
Fan, J., Xue, L. and Zou, H. (2014). Strong oracle optimality of folded concave penalized estimation. Annals
of Statistics 42, 819-849.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np

from fedstat.errors import ModelError
from fedstat.kernels.penalised.groups import Groups
from fedstat.kernels.penalised.penalties import Penalty, Terms
from fedstat.typing import Bools, Floats, Ints

Algorithm: TypeAlias = Literal["descent", "lla"]


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A point of a penalised problem.

    Parameters
    ----------
    b : (p,) array
        Coefficients.
    gradient : (p,) array
        Gradient of the loss at b.
    loss : float
        The loss at b, without the penalty.
    iterations : int
        Passes over the coefficients, or Newton steps, that led here.
    violation : float
        Largest violation of the stationarity conditions of the problem that was solved, unscaled.
    """

    b: Floats
    gradient: Floats
    loss: float
    iterations: int
    violation: float


@dataclass(frozen=True, slots=True, eq=False)
class LinearSteps:
    """Local linear approximations from an estimate, a fixed number of them (Zou and Li 2008, 2.3 and 3.2).

    Parameters
    ----------
    start : (p,) array
        Estimate without a penalty.
    number : int
        One or more.
    """

    start: Floats
    number: int


class Solver(Protocol):
    """What the path asks of a loss."""

    def solve(self, terms: Terms, start: Solution, working: Bools, tol: float) -> Solution:
        """Find a stationary point of loss and terms.

        Parameters
        ----------
        terms : Terms
            The penalty of each group.
        start : Solution
            Where to start.
        working : (m,) array
            Groups that are expected to be needed, those that are not zero at the start among them; the
            solver adds others.
        tol : float
            Violation of the stationarity conditions at which to stop.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PenalisedPath:
    """Solutions along a path of L values of lambda.

    Parameters
    ----------
    lambdas : (L,) array
        Descending.
    coefficients : (L, p) array
        One row for each lambda.
    loss : (L,) array
        The loss, without the penalty.
    iterations : (L,) array
        Passes over the coefficients, or Newton steps; of LLA, summed over its lassos.
    kkt : (L,) array
        Largest violation of the stationarity conditions, as a share of `scale`.
    converged : (L,) array
        Whether that is at most the tolerance.
    scale : float
        Smallest lambda at which all penalised coefficients are zero.
    """

    lambdas: Floats
    coefficients: Floats
    loss: Floats
    iterations: Ints
    kkt: Floats
    converged: Bools
    scale: float


def lambda_max(gradient: Floats, penalty: Penalty, groups: Groups, steps: LinearSteps | None = None) -> float:
    """Return the smallest lambda at which zero is stationary for all penalised groups.

    Parameters
    ----------
    gradient : (p,) array
        Gradient of the loss where the unpenalised coefficients are fitted and all others are zero.
    penalty : Penalty
        Its alpha counts.
    groups : Groups
        The groups.
    steps : LinearSteps, optional
        Stationary for the first of these lassos: a large estimate has a small weight in it.

    Returns
    -------
    float
        Zero where nothing is penalised.
    """
    here = groups.penalised
    level = groups.norms(gradient)[here] / groups.weights[here]
    if steps is not None:
        level = penalty.level_of_slope(groups.norms(steps.start)[here], level)
    return float(np.max(level / (penalty.alpha * groups.multipliers[here]), initial=0.0))


def lambda_grid(largest: float, *, ratio: float = 1e-3, size: int = 50) -> Floats:
    """Return lambdas that fall geometrically from the largest to ``ratio`` times it: (size,).

    Raises
    ------
    ModelError
        There is no such grid.
    """
    if not (0.0 < largest < np.inf and 0.0 < ratio < 1.0 and size >= 2):
        raise ModelError(
            f"no grid of lambdas: expected lambda_max > 0, ratio in (0, 1) and size >= 2, received "
            f"lambda_max = {largest:g}, ratio = {ratio:g}, size = {size}; with lambda_max = 0 no penalised "
            "column adds to the fit"
        )
    return np.asarray(largest * ratio ** (np.arange(size) / (size - 1)), dtype=np.float64)


def strong_set(groups: Groups, at: Solution, cut: Floats, cut_before: Floats) -> Bools:
    """Tell which groups the next solution is expected to need (strong rule of Tibshirani et al. 2012).

    Parameters
    ----------
    groups : Groups
        The groups.
    at : Solution
        The solution before.
    cut, cut_before : (m,) array
        Largest gradients of zero groups (:attr:`Terms.cut`) now and at the solution before.
    """
    kept = (groups.norms(at.b) > 0.0) | ~groups.penalised
    return np.asarray(kept | (groups.norms(at.gradient) >= 2.0 * cut - cut_before), dtype=np.bool_)


def follow_path(
    solver: Solver,
    penalty: Penalty,
    groups: Groups,
    null: Solution,
    lambdas: Floats,
    *,
    algorithm: Algorithm = "descent",
    steps: LinearSteps | None = None,
    tol: float = 1e-7,
) -> PenalisedPath:
    """Solve the problem at each lambda, each from the one before; see :func:`follow_solutions`."""
    found = follow_solutions(
        solver, penalty, groups, null, lambdas, algorithm=algorithm, steps=steps, tol=tol
    )
    return collect_path(
        found, np.array(lambdas, dtype=np.float64), lambda_max(null.gradient, penalty, groups), tol
    )


def collect_path(found: Sequence[Solution], lambdas: Floats, scale: float, tol: float) -> PenalisedPath:
    """Put solutions along a path together; `scale` is lambda_max."""
    unit = tol * scale if scale > 0.0 else tol
    kkt = np.array([solution.violation for solution in found]) * tol / unit
    return PenalisedPath(
        lambdas,
        np.array([solution.b for solution in found]),
        np.array([solution.loss for solution in found]),
        np.array([solution.iterations for solution in found]),
        kkt,
        kkt <= tol,
        scale,
    )


def follow_solutions(
    solver: Solver,
    penalty: Penalty,
    groups: Groups,
    null: Solution,
    lambdas: Floats,
    *,
    algorithm: Algorithm = "descent",
    steps: LinearSteps | None = None,
    tol: float = 1e-7,
    most_linearised: int = 100,
) -> list[Solution]:
    """Solve the problem at each lambda, each from the one before.

    Parameters
    ----------
    solver : Solver
        The loss.
    penalty : Penalty
        The penalty.
    groups : Groups
        Its groups.
    null : Solution
        The fit of the unpenalised coefficients alone.
    lambdas : (L,) array
        Descending.
    algorithm : {"descent", "lla"}
        The way to a nonconvex penalty; a convex one has one answer.
    steps : LinearSteps, optional
        Of the algorithm "lla": take these, not those from the lasso to a fixed point.
    tol : float
        Largest violation of the stationarity conditions, as a share of lambda_max; with `steps`, of those of
        the last lasso.
    most_linearised : int
        Lassos that LLA solves at most for one lambda.

    Raises
    ------
    ModelError
        The algorithm is not known, or the lambdas do not descend.
    """
    if algorithm not in ("descent", "lla"):
        raise ModelError(f"no algorithm {algorithm!r}; expected 'descent' or 'lla'")
    lambdas = np.array(lambdas, dtype=np.float64)
    if not len(lambdas) or not (np.diff(lambdas) < 0.0).all() or not 0.0 <= lambdas[-1] < np.inf:
        raise ModelError("expected lambdas that descend and are not negative; sort them, largest first")
    scale = lambda_max(null.gradient, penalty, groups)
    unit = tol * scale if scale > 0.0 else tol
    linearise = algorithm == "lla" and not penalty.convex
    before, at, found = penalty.at(max(scale, lambdas[0]), groups), null, []
    for lam in lambdas:
        terms = penalty.at(float(lam), groups)
        if linearise and steps is not None:
            at = take_steps(solver, terms, steps, at, unit)
            found.append(at)
            continue
        lasso = terms.linearised(np.zeros(groups.p)) if linearise else terms
        at = solver.solve(lasso, at, strong_set(groups, at, terms.cut, before.cut), unit)
        found.append(solve_linearised(solver, terms, at, unit, most_linearised) if linearise else at)
        before = terms
    return found


def take_steps(solver: Solver, terms: Terms, steps: LinearSteps, at: Solution, tol: float) -> Solution:
    """Solve the lassos of :class:`LinearSteps`, one after the other, the first from `at`."""
    b, groups, iterations = steps.start, terms.groups, 0
    for _ in range(steps.number):
        lasso = terms.linearised(b)
        at = solver.solve(lasso, at, strong_set(groups, at, lasso.cut, lasso.cut), tol)
        b, iterations = at.b, iterations + at.iterations
    return replace(at, iterations=iterations)


def solve_linearised(solver: Solver, terms: Terms, start: Solution, tol: float, most: int) -> Solution:
    """Repeat the local linear approximation from a point until it is stationary for the penalty itself.

    Parameters
    ----------
    solver : Solver
        The loss.
    terms : Terms
        The penalty.
    start : Solution
        The lasso of the same level.
    tol : float
        Violation at which to stop, unscaled.
    most : int
        Lassos at most.
    """
    at, iterations, groups = start, start.iterations, terms.groups
    for _ in range(most):
        violation = terms.violation(at.b, at.gradient)
        at = replace(at, iterations=iterations, violation=violation)
        if violation <= tol:
            break
        lasso, support = terms.linearised(at.b), groups.norms(at.b) > 0.0
        at = solver.solve(lasso, at, strong_set(groups, at, lasso.cut, lasso.cut), tol)
        iterations += at.iterations
        if (support == (groups.norms(at.b) > 0.0)).all():
            # The fixed point is the stationary point with these zeros: it is reached without a detour.
            direct = solver.solve(terms, at, strong_set(groups, at, terms.cut, terms.cut), tol)
            iterations += direct.iterations
            if direct.violation <= tol and (support == (groups.norms(direct.b) > 0.0)).all():
                at = direct
    violation = terms.violation(at.b, at.gradient)
    return replace(at, iterations=iterations, violation=violation)
