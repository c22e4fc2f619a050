"""Penalized generalized linear models from pooled rows: the oracle of fits from sums.

Minimizes ``f(b) + sum_g w_g P(||b_g||)``, where f is half the deviance over N (the sum of the frequency
weights): up to a constant, the mean negative log-likelihood for dispersion one. Each Newton step minimizes
a quadratic model of f and the penalty itself by coordinate descent (proximal Newton; Lee, Sun and Saunders
2014), and is shortened until the objective falls. The Hessian is kept from one step, and from one lambda, to
the next for as long as it still brings the point nearer: gradients cost a pass over the columns, a Hessian
one over their pairs. Columns that come in are added to it at the point where it was formed. It is the
expected information, which for a canonical link is the observed one.

References
----------
Lee, J., Sun, Y. and Saunders, M. (2014). Proximal Newton-type methods for minimizing composite functions.
SIAM Journal on Optimization 24, 1420-1443.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.local_fit import fit_local
from fedstat.kernels.glm.sums import Rows, canonical_weights, row_means
from fedstat.kernels.penalized.coordinate_descent import PROXIMAL_HALVINGS, proximal_step
from fedstat.kernels.penalized.path import (
    Algorithm,
    LinearSteps,
    PenalizedPath,
    Solution,
    follow_path,
    lambda_grid,
    lambda_max,
)
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty, Terms
from fedstat.kernels.row_products import column_sums, gram, row_dots
from fedstat.typing import Bools, Floats, Ints

MAX_STEPS = 200
SLOW = 0.1
"""Share of the violation that a step may leave before the Hessian is computed again."""

GROWTH = 0.25
"""Share of the columns that may be new to a Hessian; with more, an update saves hardly any time."""


def search_line(objective: Callable[[float], float], current: float, decrease: float) -> float:
    """Return the share of a step that lowers the objective (Armijo's rule), 0 where none does.

    Parameters
    ----------
    objective : callable
        Loss and penalty at ``b + t (b_new - b)``, by t; infinite where the family does not allow a mean.
    current : float
        The same at b.
    decrease : float
        What the model promises, :attr:`ProximalStep.decrease`.
    """
    for halving in range(PROXIMAL_HALVINGS):
        t = 0.5**halving
        if objective(t) <= current - 1e-4 * t * decrease + 1e-13 * abs(current):
            return t
    return 0.0


def _canonical_rows(link: int, eta: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats, float]:
    """Return scores and curvatures by linear predictor, (n,) each, and half the deviance."""
    r, V, half, _ = canonical_weights(link, y, eta)
    return weight * r, weight * V, float(weight @ half)


@dataclass(frozen=True, slots=True, eq=False)
class LossPoint:
    """Rows at one linear predictor: scores and curvatures by it, (n,), and the loss; all over N."""

    eta: Floats
    s: Floats
    w: Floats
    loss: float


class Hessian:
    """Hessian at some point, ``X' diag(w) X``, of the columns that were needed since.

    Attributes
    ----------
    known : (q,) array
        Positions of its columns, ascending.
    w : (n,) array
        Curvatures by the linear predictor, at that point and over N.
    H : (q, q) array
        The Hessian.
    """

    def __init__(self) -> None:
        self.known, self.w, self.H = np.arange(0), np.zeros(0), np.zeros((0, 0))

    def renew(self, at: Ints, X: Floats, w: Floats) -> None:
        """Compute it of the columns at hand, by their positions and values: (p,), (n, p), (n,)."""
        self.known, self.w, self.H = at, w, gram(X, w)

    def grow(self, at: Ints, X: Floats) -> bool:
        """Add columns at hand that are new, at the curvatures of all others; False where they are many."""
        new = ~np.isin(at, self.known)
        if new.sum() > GROWTH * len(at):
            return False
        if new.any():
            H = np.empty((len(at), len(at)))
            H[np.ix_(~new, ~new)] = self.take(at[~new])
            H[new] = (X[:, new].T * self.w) @ X
            H[:, new] = H[new].T
            self.known, self.H = at, H
        return True

    def take(self, at: Ints) -> Floats:
        """Return that of some of the columns that are known."""
        here = np.searchsorted(self.known, at)
        return self.H[np.ix_(here, here)]


class GLMSolver:
    """Proximal Newton on half the mean deviance of rows.

    Parameters
    ----------
    rows : Rows
        Design with all its columns, the intercept among them, standardized where that is wanted.
    family : DistributionSpec
        Family and link.
    groups : Groups
        Groups of the columns; weight 0 for the intercept.
    most_steps : int
        Newton steps at most, for one lambda.

    Raises
    ------
    ModelError
        The shapes do not fit.
    """

    def __init__(
        self, rows: Rows, family: DistributionSpec, groups: CoefficientGroups, *, most_steps: int = MAX_STEPS
    ) -> None:
        if rows.X.shape != (len(rows.y), groups.p):
            raise ModelError(f"expected a design ({len(rows.y)}, {groups.p}), received {rows.X.shape}")
        X, y = (np.ascontiguousarray(a, dtype=np.float64) for a in (rows.X, rows.y))
        self.rows, self.family, self.groups, self.most_steps = (
            replace(rows, X=X, y=y),
            family,
            groups,
            most_steps,
        )
        self.weight = np.ones(len(y)) if rows.weight is None else np.asarray(rows.weight, dtype=np.float64)
        self.offset = 0.0 if rows.offset is None else rows.offset
        self.columns, self.X = np.arange(groups.p), X
        self.hessian = Hessian()
        self.latest: tuple[Floats, LossPoint] | None = None

    def null(self) -> Solution:
        """Fit the unpenalized coefficients alone.

        Raises
        ------
        EstimationError
            They have no estimate.
        """
        b, free = np.zeros(self.groups.p), self.groups.columns(~self.groups.penalized)
        if len(free):
            fit = fit_local(lambda: [replace(self.rows, X=self.rows.X[:, free])], self.family, tol=1e-16)
            if not fit.converged:
                raise EstimationError(
                    f"the {len(free)} unpenalized columns alone have no estimate: {fit.problem}; "
                    "penalize those that do not have to be in the model"
                )
            b[free] = fit.beta
        return self.start(b)

    def start(self, b: Floats) -> Solution:
        """Return a point to start from."""
        point = self._point(b)
        return Solution(b, -column_sums(self.rows.X, point.s), point.loss, 0, np.inf)

    def solve(self, terms: Terms, start: Solution, working: Bools, tol: float) -> Solution:
        """Find a stationary point; see :class:`~fedstat.kernels.penalized.path.Solver`."""
        b, gradient, point = start.b, start.gradient, self._point(start.b)
        working, steps = working | (self.groups.norms(b) > 0.0), 0
        while True:
            most = self.most_steps - steps
            b, point, more = self._settle(terms, b, point, -gradient, working, tol, most)
            self.latest, steps = (b, point), steps + more
            gradient = -column_sums(self.rows.X, point.s)
            violations = terms.violations(b, gradient)
            worst = float(violations.max(initial=0.0))
            new = (violations > tol) & ~working
            if not new.any() or steps >= self.most_steps:
                return Solution(b, gradient, point.loss, steps, worst)
            working |= new

    def _settle(
        self, terms: Terms, b: Floats, point: LossPoint, score: Floats, working: Bools, tol: float, most: int
    ) -> tuple[Floats, LossPoint, int]:
        """Solve for the working groups from b, its rows and its score (p,); all others stay zero."""
        at, part = self.groups.columns(working), terms.take(working)
        self._take(at)
        inner, score, before = b[at], score[at], np.inf
        for step in range(most + 1):
            violation = part.violation(inner, -score)
            if violation <= tol or step == most:
                break
            moved = None
            for anew, terms_of_model in _attempts(violation > SLOW * before, part, inner):
                if anew or not self.hessian.grow(at, self.X):
                    self.hessian.renew(at, self.X, point.w)
                H, inner_tol = self.hessian.take(at), max(0.01 * violation, 0.1 * tol)
                moved = self._move(H, score, inner, part, terms_of_model, point, inner_tol)
                if moved is not None:
                    break
            if moved is None:
                break
            (inner, point), before = moved, violation
            score = column_sums(self.X, point.s)
        b = np.zeros(len(b))
        b[at] = inner
        return b, point, step

    def _move(
        self, H: Floats, score: Floats, b: Floats, terms: Terms, model: Terms, point: LossPoint, tol: float
    ) -> tuple[Floats, LossPoint] | None:
        """Take one step of proximal Newton, as far as the objective falls; None where it does not."""
        new, decrease = proximal_step(H, score, b, model, tol=tol)
        along = row_dots(self.X, new - b)
        points = [point]

        def objective(t: float) -> float:
            points.append(self._at(point.eta + t * along))
            return points[-1].loss + terms.value(b + t * (new - b))

        t = search_line(objective, point.loss + terms.value(b), decrease)
        return (new if t == 1.0 else b + t * (new - b), points[-1]) if t > 0.0 else None

    def _take(self, at: Ints) -> None:
        """Copy some of the columns, unless they are at hand."""
        if not np.array_equal(at, self.columns):
            self.columns, self.X = at, np.take(self.rows.X, at, axis=1)

    def _point(self, b: Floats) -> LossPoint:
        """Return the rows at b: those of the latest solution, where b is its very array."""
        # Most solutions start from the one before.
        if self.latest is None or self.latest[0] is not b:
            self.latest = b, self._at(row_dots(self.rows.X, b) + self.offset)
        return self.latest[1]

    def _at(self, eta: Floats) -> LossPoint:
        rows, N = self.rows, self.rows.count
        loop = self.family.loop
        with np.errstate(all="ignore"):
            if loop is not None:
                s, w, half_deviance = _canonical_rows(loop, eta, rows.y, self.weight)
            else:
                at = row_means(rows, self.family, eta)
                s, w = at.weight * at.residual(rows.y), at.weight * at.expected
                half_deviance = at.fit(rows)[0] / 2.0 if at.inside.all() else np.inf
        loss = half_deviance / N if np.isfinite(half_deviance) else np.inf
        return LossPoint(eta, s / N, w / N, loss)


def _attempts(anew: bool, terms: Terms, b: Floats) -> list[tuple[bool, Terms]]:
    """Return what a step may be modeled by, cheapest first: whether the Hessian is new, and a penalty."""
    # The last one is convex and has the curvature of the point: it leads down wherever there is a way.
    return [(anew, terms), (True, terms), (True, terms.linearized(b))]


def glm_path(
    rows: Rows,
    family: DistributionSpec,
    penalty: Penalty,
    groups: CoefficientGroups,
    *,
    lambdas: Floats | None = None,
    ratio: float = 1e-3,
    size: int = 50,
    algorithm: Algorithm = "descent",
    steps: LinearSteps | None = None,
    tol: float = 1e-7,
    most_steps: int = MAX_STEPS,
) -> PenalizedPath:
    """Fit a penalized generalized linear model to rows along a path of lambdas.

    Parameters
    ----------
    rows : Rows
        Design with all its columns, the intercept among them, standardized where that is wanted.
    family : DistributionSpec
        Family and link.
    penalty : Penalty
        The penalty.
    groups : Groups
        Groups of the columns; weight 0 for the intercept.
    lambdas : (L,) array, optional
        Descending; where None a geometric grid from lambda_max to ``ratio`` times it, `size` of them.
    algorithm : {"descent", "lla"}
        The way to SCAD and MCP; see the module ``penalized_path``.
    steps : LinearSteps, optional
        Start and number of steps of the algorithm "lla".
    tol : float
        Largest violation of the stationarity conditions, as a share of lambda_max.
    most_steps : int
        Newton steps at most, for one lambda.

    Returns
    -------
    PenalizedPath
        Its loss is half the deviance over N.

    Raises
    ------
    ModelError
        An argument has no meaning.
    EstimationError
        The unpenalized coefficients have no estimate.
    """
    solver = GLMSolver(rows, family, groups, most_steps=most_steps)
    null = solver.null()
    if lambdas is None:
        lambdas = lambda_grid(lambda_max(null.gradient, penalty, groups, steps), ratio=ratio, size=size)
    return follow_path(solver, penalty, groups, null, lambdas, algorithm=algorithm, steps=steps, tol=tol)
