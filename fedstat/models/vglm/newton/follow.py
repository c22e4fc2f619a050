"""Following a path where every point takes rounds, and choosing one of its fits.

References
----------
Wang, H. and Leng, C. (2007). Unified LASSO estimation by least squares approximation. Journal of the American
Statistical Association 102, 1039-1048.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.federation.rounds.engine import Rounds
from fedstat.kernels.penalised.gram import gram_path
from fedstat.kernels.penalised.groups import Groups
from fedstat.kernels.penalised.path import LinearSteps, PenalisedPath
from fedstat.kernels.penalised.penalties import Terms
from fedstat.models.vertical.exchange.protocol import Units
from fedstat.models.vglm.newton.proximal import CertifiedPoint, LossOracle, LossPoint, ProximalNewton, solve
from fedstat.models.vglm.path.fits import Path
from fedstat.models.vglm.path.setup import Setup
from fedstat.progress_line import open_line
from fedstat.typing import Floats

MOST_EXPANSIONS = 6
NEAR = 1e-3
"""Distance in the metric of the Hessian within which a model of the loss lacks nothing that counts."""


@dataclass(slots=True, eq=False)
class PathFollower:
    """How a path is followed, and one of its fits chosen: `select` takes the path to the place of the fit.

    With `steps`, local linear approximations of a nonconvex penalty start from the unpenalised fit; `seen`
    has, by lambda, the points at which the loss is then known, the null model at infinity. `scale` is
    lambda_max, and `gradient` (p,) that of the loss at the null model. `solved` are the fits of the path that
    are solutions, by their places; all others are what a model proposes.
    """

    oracle: LossOracle
    setup: Setup
    lambdas: Floats
    units: Units
    select: Callable[[Path], int]
    steps: LinearSteps | None = None
    scale: float = 1.0
    gradient: Floats = field(default_factory=lambda: np.empty(0))
    seen: dict[float, LossPoint] = field(default_factory=dict)
    solved: dict[int, CertifiedPoint] = field(default_factory=dict)

    @property
    def unit(self) -> float:
        """Violation at which a fit has converged."""
        return self.setup.tol * (self.scale if self.scale > 0.0 else 1.0)

    @property
    def linearise(self) -> bool:
        """Whether the penalty is reached by local linear approximation."""
        return self.setup.algorithm == "lla" and not self.setup.penalty.convex

    def problem(self, place: int) -> Terms:
        """Return the penalty at one of the lambdas."""
        return self.setup.penalty.at(float(self.lambdas[place]), with_intercept(self.setup.groups))

    def exact(self, point: LossPoint, H: Floats) -> Rounds[tuple[Path, int, LossPoint]]:
        """Solve at every lambda, from the largest on, and choose one of the solutions.

        All to one tolerance: solved once more, a fit of a concave penalty may go to another stationary point.
        """
        problems = [self.problem(i) for i in range(len(self.lambdas))]
        found = yield from solve(
            self.oracle, problems, point, H, self.unit, linearise=self.linearise, only=self.steps
        )
        return self._solved_path(dict(enumerate(found)))

    def quadratic(self, point: LossPoint, H: Floats) -> Rounds[tuple[Path, int, LossPoint]]:
        """Solve where the path of the quadratic model proposes, until it proposes what has been solved.

        The model is that of the loss at the best of them (a least-squares approximation as in Wang and Leng
        2007, at the solution itself). Its other fits cost nothing, and far from there they may be wrong:
        what has been solved stands in the place of what the model says of it.
        With `steps` the first is that at the estimate without a penalty, and the loss at known points tells
        what a model lacks in between.
        """
        ends = self._ends(self.seen.get(np.inf, point))
        known = ends if self.steps is None else {}
        with open_line("proposal", MOST_EXPANSIONS, at_most=True) as line:
            for _ in range(MOST_EXPANSIONS):
                # At the largest lambda a solution may hold a coefficient that is next to nothing.
                all_known = known | ends if known else known
                b, loss, kkt = self.model_path(point, H, all_known)
                path = self.path(b, loss, kkt)
                place = self.select(path)
                if place in all_known:
                    self.solved = all_known
                    return path, place, all_known[place].point
                known[place], H = yield from self.follow_proposal(place, b[place], known, point, H)
                point = known[place].point
                line.step()
                if self.oracle.left > 0 and len(self.lambdas) > 1:
                    H = yield from self.oracle.hessian(point)
        # It would go on: what has been solved is the path.
        return self._solved_path(known | ends)

    def follow_proposal(
        self, place: int, b: Floats, known: Mapping[int, CertifiedPoint], last: LossPoint, H: Floats
    ) -> Rounds[tuple[CertifiedPoint, Floats]]:
        """Solve one of the problems from what a model proposes for it; return as well the latest Hessian."""
        start = yield from self._start(b, place, known, last)
        newton = self._newton(place, start, H)
        (found,) = yield from newton.run()
        if self.seen:
            self.seen[float(self.lambdas[place])] = found.point
        return found, newton.H

    def _newton(self, place: int, start: LossPoint, H: Floats) -> ProximalNewton:
        """Newton's method for the problem at one of the lambdas, from a point."""
        terms = self.problem(place)
        newton = ProximalNewton(
            oracle=self.oracle,
            problems=[terms],
            at=np.arange(self.oracle.layout.p + 1),
            unit=self.unit,
            point=start,
            H=H.copy(),
            linearise=self.linearise,
            only=self.steps,
        )
        if self.linearise and self.steps is None:
            # The model was solved from its lasso: linearising there is the next step of the same kind.
            newton.model = terms.linearised(start.b)
        return newton

    def _solved_path(self, known: Mapping[int, CertifiedPoint]) -> tuple[Path, int, LossPoint]:
        """Make a path of the lambdas at which a solution is known."""
        solved = sorted(known)
        self.lambdas = self.lambdas[solved]
        found = [known[i] for i in solved]
        self.solved, path = dict(enumerate(found)), self.path(*stacked(found))
        place = self.select(path)
        return path, place, found[place].point

    def _ends(self, null: LossPoint) -> dict[int, CertifiedPoint]:
        """Return what is solved at the start: the largest lambda, where it selects nothing."""
        terms = self.problem(0)
        if self.steps is not None:
            terms = terms.linearised(self.steps.start)
        violation = terms.violation(null.b, -null.score)
        return {0: CertifiedPoint(null, violation)} if violation <= self.unit else {}

    def _start(
        self, b: Floats, place: int, known: Mapping[int, CertifiedPoint], last: LossPoint
    ) -> Rounds[LossPoint]:
        """Go to the model's fit, or where it is worse than the nearest solution, stay at that."""
        if not known:
            reached = yield from self.oracle.masked(self.oracle.evaluate(b))
            return last if reached is None else reached
        terms = self.problem(place)
        best = min((one.point for one in known.values()), key=lambda at: at.loss + terms.value(at.b))
        highest = best.loss + terms.value(best.b) - terms.value(b)
        reached = yield from self.oracle.masked(self.oracle.evaluate(b, highest))
        return best if reached is None else reached

    def over(self, point: LossPoint, H: Floats) -> PathFollower:
        """Return the follower of other entities, whose unpenalised fit is that of their quadratic model."""
        if self.steps is None:
            return self
        whole = point.b + np.linalg.lstsq(H, point.score, rcond=1e-10)[0]
        return replace(self, steps=replace(self.steps, start=whole), seen={})

    def model_path(
        self, point: LossPoint, H: Floats, known: Mapping[int, CertifiedPoint]
    ) -> tuple[Floats, Floats, Floats]:
        """Coefficients (L, p + 1), losses and violations (L,) of the quadratic model, save what is known."""
        found = gram_path(
            H,
            H @ point.b + point.score,
            self.setup.penalty,
            with_intercept(self.setup.groups),
            lambdas=self.lambdas,
            algorithm=self.setup.algorithm,
            steps=self.steps,
            tol=self.setup.tol,
        )
        b = found.coefficients.copy()
        loss = model_losses(point, H, b) + self._lacking(b, point, H)
        kkt = np.full(len(b), np.nan)
        for i, one in known.items():
            b[i], loss[i], kkt[i] = one.point.b, one.point.loss, one.violation
        return b, loss, kkt

    def _lacking(self, b: Floats, point: LossPoint, H: Floats) -> Floats:
        """Estimate what the model's loss lacks at coefficients (L, p + 1).

        Its error grows with the cube of the distance, and is known where the loss is, on either side.
        """
        here = next((lam for lam, at in self.seen.items() if at is point), None)
        if here is None:
            return np.zeros(len(b))
        points = np.array([at.b for at in self.seen.values()])
        away = _signed_distances(points - point.b, H, np.array(list(self.seen)) - here)
        far = np.abs(away) > NEAR
        if not far.any():
            return np.zeros(len(b))
        losses = np.array([at.loss for at in self.seen.values()])
        away, ratio = away[far], (losses - model_losses(point, H, points))[far] / away[far] ** 3
        # Between points where the loss is known the coefficient of the cube is interpolated, beyond them it
        # stays.
        order = np.argsort(away)
        mine = _signed_distances(b - point.b, H, self.lambdas - here)
        return np.asarray(mine**3 * np.interp(mine, away[order], ratio[order]))

    def path(self, b: Floats, loss: Floats, violation: Floats) -> Path:
        """Bring fits of the path to the units of the data; one without a known violation is a proposal."""
        kkt = violation / (self.scale if self.scale > 0.0 else 1.0)
        converged = kkt <= self.setup.tol
        iterations = np.zeros(len(b), dtype=np.int64)
        fits = PenalisedPath(self.lambdas, b[:, 1:], loss, iterations, kkt, converged, self.scale)
        b = self.oracle.unit * b
        return Path.of(fits, b[:, 1:] @ self.oracle.T.T, b[:, 0], self.units, self.setup.groups)


def stacked(found: Sequence[CertifiedPoint]) -> tuple[Floats, Floats, Floats]:
    """Coefficients (L, p + 1), losses and violations (L,) of points."""
    b, loss = np.array([one.point.b for one in found]), np.array([one.point.loss for one in found])
    return b, loss, np.array([one.violation for one in found])


def with_intercept(groups: Groups) -> Groups:
    """Put a group without a penalty before the others."""
    return Groups(
        np.concatenate([[0], groups.starts + 1]),
        np.concatenate([[0.0], groups.weights]),
        np.concatenate([[1.0], groups.multipliers]),
    )


def model_losses(point: LossPoint, H: Floats, b: Floats) -> Floats:
    """Losses of the quadratic model at a point for coefficients (L, p + 1): (L,)."""
    d = b - point.b
    return np.asarray(point.loss - d @ point.score + np.einsum("li,ij,lj->l", d, H, d) / 2.0)


def _signed_distances(d: Floats, H: Floats, sign: Floats) -> Floats:
    """Distances of (L, p + 1) from zero in the metric of H, with signs (L,)."""
    return np.asarray(np.copysign(np.sqrt(np.einsum("li,ij,lj->l", d, H, d)), sign))
