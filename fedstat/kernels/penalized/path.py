"""Solution paths of a penalized problem, from the largest lambda to smaller ones.

The loss depends on the solver: released sums (``gram``) or rows (in the tests). SCAD and MCP are solved in
one of three ways. *Descent* follows the path of stationary points from the one before, as Breheny and Huang
(2011) do. *LLA* starts from the lasso of the same lambda and repeats the local linear approximation to a
fixed point (Fan, Xue and Zou 2014). *Steps* of LLA from an unpenalized estimate, one or a few, are those of
Zou and Li (2008): each is a lasso, which has a unique solution. The results of the last two at one lambda do
not depend on the other requested lambdas.

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

from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np

from fedstat.errors import ModelError
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty, Terms
from fedstat.typing import Bools, Floats, Ints

Algorithm: TypeAlias = Literal["descent", "lla"]
MAX_LINEARIZATIONS = 100
"""Largest number of lassos that LLA solves for one lambda."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A point of a penalized problem: coefficients b (p,), gradient (p,) and loss there, without the penalty.

    `iterations` are passes over the coefficients, or Newton steps, that led here; `violation` is the largest
    one of the stationarity conditions of the problem that was solved, unscaled.
    """

    b: Floats
    gradient: Floats
    loss: float
    iterations: int
    violation: float


@dataclass(frozen=True, slots=True, eq=False)
class LinearSteps:
    """Local linear approximations from an unpenalized estimate (p,): one or a few (Zou and Li 2008)."""

    start: Floats
    number: int


class Solver(Protocol):
    """Methods of a loss that the path uses."""

    def solve(self, terms: Terms, start: Solution, working: Bools, tol: float) -> Solution:
        """Find a point at which loss and terms are stationary to a violation of `tol`.

        `working` (m,) are the groups that are expected to be needed, those that are not zero at the start
        among them; the solver adds others.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PenalizedPath:
    """Solutions along a path of L descending lambdas: coefficients (L, p), the others (L,).

    The loss is without the penalty. `iterations` of LLA are summed over its lassos. `kkt` is the largest
    violation of the stationarity conditions as a share of `scale` (:func:`violation_unit`). `solutions` are
    what the solver returned, where one was asked.
    """

    lambdas: Floats
    coefficients: Floats
    loss: Floats
    iterations: Ints
    kkt: Floats
    converged: Bools
    scale: float
    solutions: tuple[Solution, ...] = ()


def lambda_max(
    gradient: Floats, penalty: Penalty, groups: CoefficientGroups, steps: LinearSteps | None = None
) -> float:
    """Return the smallest lambda at which zero is stationary for all penalized groups.

    Zero if there are none. Ridge has no such lambda; that of the lasso is returned.

    From the gradient (p,) of the loss where the unpenalized coefficients are fitted and all others are zero.
    With `steps` it is that of the first of these lassos, in which a large estimate has a small weight.
    """
    here = groups.penalized
    level = groups.norms(gradient)[here] / groups.weights[here]
    if steps is not None:
        level = penalty.level_of_slope(groups.norms(steps.start)[here], level)
    return float(np.max(level / ((penalty.selecting or 1.0) * groups.multipliers[here]), initial=0.0))


def violation_unit(gradient: Floats, penalty: Penalty, groups: CoefficientGroups) -> float:
    """Return the unit of violations of stationarity: lambda_max times the selecting share of the penalty.

    It is the largest gradient, so that fits are as accurate with a small `l1_ratio` as with a large one.
    """
    return lambda_max(gradient, penalty, groups) * (penalty.selecting or 1.0)


def lambda_grid(largest: float, *, ratio: float = 1e-3, size: int = 50) -> Floats:
    """Return lambdas (size,) that decrease geometrically from the largest to ``ratio`` times it."""
    if not (0.0 < largest < np.inf and 0.0 < ratio < 1.0 and size >= 2):
        raise ModelError(
            f"no grid of lambdas: expected lambda_max > 0, ratio in (0, 1) and size >= 2, received "
            f"lambda_max = {largest:g}, ratio = {ratio:g}, size = {size}; with lambda_max = 0 no penalized "
            "column adds to the fit"
        )
    return np.asarray(largest * ratio ** (np.arange(size) / (size - 1)), dtype=np.float64)


def strong_set(groups: CoefficientGroups, at: Solution, cut: Floats, cut_before: Floats) -> Bools:
    """Return which groups the next solution is expected to need (strong rule of Tibshirani et al. 2012).

    From the solution before, and the largest gradients (m,) of zero groups (:attr:`Terms.cut`) now and then.
    """
    kept = (groups.norms(at.b) > 0.0) | ~groups.penalized
    return np.asarray(kept | (groups.norms(at.gradient) >= 2.0 * cut - cut_before), dtype=np.bool_)


def follow_path(
    solver: Solver,
    penalty: Penalty,
    groups: CoefficientGroups,
    null: Solution,
    lambdas: Floats,
    *,
    algorithm: Algorithm = "descent",
    steps: LinearSteps | None = None,
    tol: float = 1e-7,
) -> PenalizedPath:
    """Solve the problem at each of the descending lambdas, each from the solution of the one before.

    `null` is the fit of the unpenalized coefficients alone. `algorithm` is used for a nonconvex penalty (a
    convex one has a unique solution), with `steps` of "lla" from an estimate. `tol` is the largest violation
    of the stationarity conditions, in :func:`violation_unit`; with `steps`, of those of the last lasso.
    """
    if algorithm not in ("descent", "lla"):
        raise ModelError(f"no algorithm {algorithm!r}; expected 'descent' or 'lla'")
    lambdas = np.array(lambdas, dtype=np.float64)
    if not len(lambdas) or not (np.diff(lambdas) < 0.0).all() or not 0.0 <= lambdas[-1] < np.inf:
        raise ModelError("expected lambdas that descend and are not negative; sort them, largest first")
    scale = violation_unit(null.gradient, penalty, groups)
    unit = tol * scale if scale > 0.0 else tol
    linearize = algorithm == "lla" and not penalty.convex
    # The null model is the solution before the first lambda, that of lambda_max.
    largest = max(lambda_max(null.gradient, penalty, groups), lambdas[0])
    before, at, found = penalty.at(largest, groups), null, []
    for lam in lambdas:
        terms = penalty.at(float(lam), groups)
        if linearize and steps is not None:
            at = solve_lasso_steps(solver, terms, steps, at, unit)
            found.append(at)
            continue
        # The next lambda starts from this lasso, not from the result of LLA, so that the result at one lambda
        # does not depend on the other requested lambdas.
        lasso = terms.linearized(np.zeros(groups.p)) if linearize else terms
        at = solver.solve(lasso, at, strong_set(groups, at, terms.cut, before.cut), unit)
        found.append(solve_linearized(solver, terms, at, unit) if linearize else at)
        before = terms
    kkt = np.array([solution.violation for solution in found]) * tol / unit
    return PenalizedPath(
        lambdas=lambdas,
        coefficients=np.array([solution.b for solution in found]),
        loss=np.array([solution.loss for solution in found]),
        iterations=np.array([solution.iterations for solution in found]),
        kkt=kkt,
        converged=kkt <= tol,
        scale=scale,
        solutions=tuple(found),
    )


def solve_lasso_steps(solver: Solver, terms: Terms, steps: LinearSteps, at: Solution, tol: float) -> Solution:
    """Solve the lassos of :class:`LinearSteps`, one after the other, the first from `at`."""
    b, groups, iterations = steps.start, terms.groups, 0
    for _ in range(steps.number):
        lasso = terms.linearized(b)
        at = solver.solve(lasso, at, strong_set(groups, at, lasso.cut, lasso.cut), tol)
        b, iterations = at.b, iterations + at.iterations
    return replace(at, iterations=iterations)


def solve_linearized(solver: Solver, terms: Terms, start: Solution, tol: float) -> Solution:
    """Repeat the local linear approximation from a point until it is stationary for the penalty itself.

    It starts from the lasso of the same level, and ends at an unscaled violation of `tol`.
    """
    at, iterations, groups = start, start.iterations, terms.groups
    for _ in range(MAX_LINEARIZATIONS):
        violation = terms.violation(at.b, at.gradient)
        at = replace(at, iterations=iterations, violation=violation)
        if violation <= tol:
            break
        lasso, support = terms.linearized(at.b), groups.norms(at.b) > 0.0
        at = solver.solve(lasso, at, strong_set(groups, at, lasso.cut, lasso.cut), tol)
        iterations += at.iterations
        if (support == (groups.norms(at.b) > 0.0)).all():
            # The fixed point is the stationary point with these zeros: it is computed directly.
            direct = solver.solve(terms, at, strong_set(groups, at, terms.cut, terms.cut), tol)
            iterations += direct.iterations
            if direct.violation <= tol and (support == (groups.norms(direct.b) > 0.0)).all():
                at = direct
    violation = terms.violation(at.b, at.gradient)
    return replace(at, iterations=iterations, violation=violation)
