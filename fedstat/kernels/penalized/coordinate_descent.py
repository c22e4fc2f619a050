"""Penalized least squares from a Gram matrix: coordinate descent, Newton and proximal Newton steps."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numba import njit

from fedstat.errors import ModelError
from fedstat.kernels import REORDER
from fedstat.kernels.penalized.path import (
    Algorithm,
    LinearSteps,
    PenalizedPath,
    Solution,
    follow_path,
    lambda_grid,
    lambda_max,
)
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty, TermArrays, Terms, threshold_of
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Newton steps on the coefficients that are not zero.
#
# Coordinate descent finds in a few passes which coefficients are zero, but may then need thousands to
# determine the others if columns are correlated. Between zeros and kinks the penalized quadratic is smooth,
# so one linear solve determines them.

NEWTON_HALVINGS = 6


def newton_step(G: Floats, q: Floats, b: Floats, terms: Terms) -> Floats | None:
    """Take one Newton step in the nonzero groups; those whose direction it would reverse become zero.

    G (p, p) is the Hessian of the loss, q (p,) its negative gradient at b (p,). None if no step was found
    that leads nearer to a stationary point.
    """
    active = terms.groups.norms(b) > 0.0
    if not active.any():
        return None
    # Groups at zero stay there: if one must change, the violations reveal it to the solver.
    at, part = terms.groups.columns(active), terms.take(active)
    G, q, b_active = G[np.ix_(at, at)], q[at], b[at]
    pull, bend = part.derivatives(b_active)
    d = q - pull
    if not _solve_positive(G + bend, d):
        return None
    new = _search(G, q, b_active, d, part)
    if new is None:
        return None
    b = b.copy()
    b[at] = new
    return b


def _search(G: Floats, q: Floats, b: Floats, d: Floats, terms: Terms) -> Floats | None:
    """Shorten the step until the objective decreases."""
    before, violation = terms.value(b), terms.violation(b, -q)
    for halving in range(NEWTON_HALVINGS):
        new = b + d * 0.5**halving
        turned = terms.groups.inner_products(b, new) <= 0.0
        new[terms.groups.columns(turned)] = 0.0
        move = new - b
        change = G @ move
        # Near the solution, the change of the value is below its rounding, so the violation decides.
        if not turned.any() and terms.violation(new, change - q) < 0.1 * violation:
            return new
        if (change / 2.0 - q) @ move + terms.value(new) - before < -1e-14 * abs(before):
            return new
    return None


@njit(cache=True, nogil=True, fastmath=REORDER)
def _dot(a: Floats, b: Floats, m: int) -> float:
    """Return the inner product of the first m numbers."""
    total = 0.0
    for i in range(m):
        total += a[i] * b[i]
    return total


@njit(cache=True, nogil=True)
def _solve_positive(A: Floats, x: Floats) -> bool:
    """Solve ``A z = x`` by Cholesky's factor, writing it over A and z over x.

    False if A is not positive definite.

    A plain loop on one thread: a library's threads cost more than they save for some hundred columns.
    """
    p = len(x)
    for i in range(p):
        size = A[i, i]
        for j in range(i):
            A[i, j] = (A[i, j] - _dot(A[i], A[j], j)) / A[j, j]
        pivot = size - _dot(A[i], A[i], i)
        if not pivot > 1e-12 * size:
            return False
        A[i, i] = np.sqrt(pivot)
        x[i] = (x[i] - _dot(A[i], x, i)) / A[i, i]
    for i in range(p - 1, -1, -1):
        x[i] /= A[i, i]
        for j in range(i):
            x[j] -= A[i, j] * x[i]
    return True


# ----------------------------------------------------------------------------------------------------
# Penalized least squares from a Gram matrix and a gradient at zero: no rows.
#
# Minimizes ``b'G b / 2 - c'b + sum_g w_g P(||b_g||)`` by cyclic coordinate descent with covariance updates
# (Friedman, Hastie and Tibshirani 2010, 2.2) over a working set of groups, to which those are added that
# violate the stationarity conditions. With G = X'X/N and c = X'y/N it is the Gaussian problem; with the
# information and score of another family it is the quadratic problem of a Newton step. A group of several
# columns takes a step on a quadratic majorizer, which for orthonormal columns is exact (Breheny and Huang
# 2015).
#
# References
# ----------
# Friedman, J., Hastie, T. and Tibshirani, R. (2010). Regularization paths for generalized linear models via
# coordinate descent. Journal of Statistical Software 33 (1).
# Zou, H., Hastie, T. and Tibshirani, R. (2007). On the "degrees of freedom" of the lasso. Annals of
# Statistics 35, 2173-2192.

MAX_SWEEPS = 10_000
SWEEPS = 25
"""Passes over the coefficients after which a Newton step is tried."""


@njit(cache=True, nogil=True)
def _sweep(
    terms: TermArrays, v: Floats, G: Floats, b: Floats, q: Floats, move: Floats, only_active: bool
) -> float:
    """Take one step in each group, changing b and ``q = c - G b``; return the largest move times v."""
    kind, a, level, ridge, w, starts = terms
    largest = 0.0
    for g in range(len(v)):
        square = active = 0.0
        for j in range(starts[g], starts[g + 1]):
            active += abs(b[j])
            move[j] = q[j] + v[g] * b[j]
            square += move[j] * move[j]
        if v[g] == 0.0 or (only_active and active == 0.0):
            continue
        u = np.sqrt(square)
        # The majorizer is isotropic and the penalty depends only on the norm: the new coefficients are a
        # multiple of `move`.
        share = threshold_of(kind, a, level[g], w[g], v[g] + ridge[g], u) / u if u > 0.0 else 0.0
        if share == 0.0 and active == 0.0:
            continue
        for j in range(starts[g], starts[g + 1]):
            new = share * move[j]
            step = new - b[j]
            b[j] = new
            largest = max(largest, v[g] * abs(step))
            for k in range(len(q)):
                q[k] -= step * G[j, k]
    return largest


@njit(cache=True, nogil=True)
def _descend(terms: TermArrays, v: Floats, G: Floats, b: Floats, q: Floats, tol: float, most: int) -> int:
    """Sweep over all groups, and in between over the nonzero ones; change b, q; return the sweeps."""
    move = np.empty(len(b))
    sweeps = 0
    while sweeps < most:
        sweeps += 1
        if _sweep(terms, v, G, b, q, move, False) <= tol:
            break
        while sweeps < most:
            sweeps += 1
            if _sweep(terms, v, G, b, q, move, True) <= tol:
                break
    return sweeps


@njit(cache=True, nogil=True)
def _negative_gradient(G: Floats, c: Floats, b: Floats) -> Floats:
    """Return ``c - G b``, from scratch: (p, p), (p,), (p,) -> (p,)."""
    q = c.copy()
    for j in range(len(b)):
        if b[j] != 0.0:
            for k in range(len(q)):
                q[k] -= b[j] * G[j, k]
    return q


class GramSolver:
    """Coordinate descent on a quadratic loss ``b'G b / 2 - c'b``.

    G (p, p) is symmetric and positive semidefinite, c (p,) the negative gradient at zero; at most
    `most_sweeps` passes for one lambda. Raises ModelError if shapes do not match, or a number is not finite.
    """

    def __init__(
        self, G: Floats, c: Floats, groups: CoefficientGroups, *, most_sweeps: int = MAX_SWEEPS
    ) -> None:
        p = groups.p
        if G.shape != (p, p) or c.shape != (p,):
            raise ModelError(
                f"expected G ({p}, {p}) and c ({p},) for {p} coefficients; received {G.shape}, {c.shape}"
            )
        if not (np.isfinite(G).all() and np.isfinite(c).all()):
            raise ModelError("expected finite numbers in Gram and gradient; look for missing values")
        self.G = np.ascontiguousarray(G, dtype=np.float64)
        self.c = np.array(c, dtype=np.float64)
        self.groups, self.most_sweeps = groups, most_sweeps
        self.v = curvatures(self.G, groups)

    def start(self, b: Floats | None = None) -> Solution:
        """Return a point to start from; zero where b is None."""
        return self._solution(np.zeros(self.groups.p) if b is None else b, 0)

    def null(self, tol: float = 1e-12) -> Solution:
        """Fit the unpenalized coefficients alone, to tol as a share of the largest entry of c."""
        b, free = np.zeros(self.groups.p), self.groups.columns(~self.groups.penalized)
        if len(free):
            b[free] = np.linalg.lstsq(self.G[np.ix_(free, free)], self.c[free], rcond=tol)[0]
        return self.start(b)

    def solve(self, terms: Terms, start: Solution, working: Bools, tol: float) -> Solution:
        """Find a stationary point; see :class:`~fedstat.kernels.penalized.path.Solver`."""
        at, sweeps, inner = start, 0, tol
        if not terms.cut.any() and terms.ridge.any():
            # Without a selecting part the objective is quadratic, and one linear solve minimizes it.
            A, b = self.G + np.diag(np.repeat(terms.ridge, self.groups.sizes)), self.c.copy()
            if _solve_positive(A, b):
                at = self._solution(b, 1)
                return replace(at, violation=terms.violation(b, at.gradient))
        working = working | (self.groups.norms(start.b) > 0.0)
        while True:
            violations = terms.violations(at.b, at.gradient)
            worst = float(violations.max(initial=0.0))
            if worst <= tol or sweeps >= self.most_sweeps:
                return replace(at, iterations=sweeps, violation=worst)
            new = (violations > tol) & ~working
            # First over the expected groups. If no other group violates the conditions, those within do, and
            # descent continues to a smaller move than requested.
            if sweeps > 0:
                working |= new
                inner = inner if new.any() else inner / 10.0
            b, more = self._settle(terms, at.b, working, inner, self.most_sweeps - sweeps)
            sweeps += more
            at = self._solution(b, sweeps)

    def _settle(self, terms: Terms, b: Floats, working: Bools, tol: float, most: int) -> tuple[Floats, int]:
        """Solve for the working groups; all others stay at zero."""
        at = self.groups.columns(working)
        part, inner = terms.take(working), b[at]
        G, c = (self.G, self.c) if len(at) == len(b) else (self.G[np.ix_(at, at)], self.c[at])
        sweeps = 0
        while sweeps < most:
            # Recomputed, because a Newton step has changed all of them; this also removes the rounding of
            # updates.
            q = _negative_gradient(G, c, inner)
            more = min(SWEEPS, most - sweeps)
            used = _descend(part.arrays, self.v[working], G, inner, q, tol, more)
            sweeps += used
            if used < more:
                break
            nearer = newton_step(G, q, inner, part)
            inner = inner if nearer is None else nearer
        b = np.zeros(len(b))
        b[at] = inner
        return b, sweeps

    def _solution(self, b: Floats, iterations: int) -> Solution:
        q = _negative_gradient(self.G, self.c, b)
        return Solution(b, -q, float(-(self.c + q) @ b / 2.0), iterations, np.inf)


def curvatures(G: Floats, groups: CoefficientGroups) -> Floats:
    """Return the largest eigenvalue of each group's block of G: (p, p) -> (m,)."""
    v = np.diag(G)[groups.starts[:-1]].copy()
    for g in np.flatnonzero(groups.sizes > 1):
        block = slice(groups.starts[g], groups.starts[g + 1])
        # The quadratic with this curvature in every direction is above the group's own.
        v[g] = np.linalg.eigvalsh(G[block, block])[-1]
    return np.asarray(np.maximum(v, 0.0), dtype=np.float64)


def degrees_of_freedom(
    G: Floats, penalty: Penalty, groups: CoefficientGroups, lambdas: Floats, b: Floats
) -> Floats | None:
    """Return ``tr G_A (G_A + R)^-1`` for each fit of a path, with A its nonzero coefficients: (L,).

    R is the ridge part of the penalty: for ridge the trace of the hat matrix, for the elastic net the
    estimate of Zou, Hastie and Tibshirani (2007). None for other penalties and for groups of columns, whose
    nonzero coefficients are counted.
    """
    if not penalty.convex or penalty.selecting == 1.0 or groups.p > len(groups.weights):
        return None
    df = np.zeros(len(lambdas))
    for i, lam in enumerate(lambdas):
        at = b[i] != 0.0
        active, ridge = G[np.ix_(at, at)], penalty.at(float(lam), groups).ridge[at]
        df[i] = np.trace(np.linalg.lstsq(active + np.diag(ridge), active, rcond=1e-12)[0])
    return df


def gram_path(
    G: Floats,
    c: Floats,
    penalty: Penalty,
    groups: CoefficientGroups,
    *,
    lambdas: Floats | None = None,
    ratio: float = 1e-3,
    size: int = 50,
    algorithm: Algorithm = "descent",
    steps: LinearSteps | None = None,
    tol: float = 1e-7,
    most_sweeps: int = MAX_SWEEPS,
) -> PenalizedPath:
    """Minimize ``b'G b / 2 - c'b`` and a penalty along a path of lambdas: G is ``X'X/N``, c ``X'y/N``.

    The columns are standardized. The lambdas descend; None: a geometric grid of `size` from lambda_max to
    `ratio` times it. `algorithm` is the way to SCAD and MCP (see :mod:`fedstat.kernels.penalized.path`), with
    `steps` of "lla" from an estimate; `tol` the largest violation of stationarity, as a share of lambda_max.
    """
    solver = GramSolver(G, c, groups, most_sweeps=most_sweeps)
    null = solver.null()
    if lambdas is None:
        lambdas = lambda_grid(lambda_max(null.gradient, penalty, groups, steps), ratio=ratio, size=size)
    return follow_path(solver, penalty, groups, null, lambdas, algorithm=algorithm, steps=steps, tol=tol)


# ----------------------------------------------------------------------------------------------------
# A proximal Newton step from sums: the quadratic model of a loss, and the penalty itself.
#
# References
# ----------
# Lee, J., Sun, Y. and Saunders, M. (2014). Proximal Newton-type methods for minimizing composite functions.
# SIAM Journal on Optimization 24, 1420-1443.

PROXIMAL_HALVINGS = 25
"""Largest number of halvings of a step until the objective decreases."""


class ProximalStep(NamedTuple):
    """A proximal Newton step: its end, and the decrease of the model of the objective."""

    b: Floats
    decrease: float


def proximal_step(H: Floats, score: Floats, b: Floats, terms: Terms, *, tol: float) -> ProximalStep:
    """Minimize the quadratic model of the loss at b (p,), and the penalty.

    H (p, p) is the information over N at b or near it, `score` (p,) the derivative of the log-likelihood for
    dispersion one over N, `tol` the violation of the stationarity conditions of the model at which to stop.
    """
    solver = GramSolver(H, H @ b + score, terms.groups)
    new = solver.solve(terms, solver.start(b), np.ones(len(terms.level), dtype=np.bool_), tol).b
    d = new - b
    decrease = score @ d - d @ H @ d / 2.0 + terms.value(b) - terms.value(new)
    return ProximalStep(new, float(decrease))
