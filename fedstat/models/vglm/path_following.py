"""Following a path beyond the normal family, and quadratic models of the loss by fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.federation.protocols.engine import FitProtocol
from fedstat.kernels.penalized.coordinate_descent import degrees_of_freedom, gram_path
from fedstat.kernels.penalized.path import LinearSteps, PenalizedPath
from fedstat.kernels.penalized.penalties import CoefficientGroups, Terms
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vglm.normal_path import stability, weighted_mean
from fedstat.models.vglm.path_setup import Chooser, CoefficientPath, PathSetup, choose_by_folds
from fedstat.models.vglm.proximal_newton import CertifiedPoint, LossOracle, LossPoint, ProximalNewton, solve
from fedstat.progress_line import counted, open_line
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Following a path if every point takes rounds, and choosing one of its fits.
#
# References
# ----------
# Wang, H. and Leng, C. (2007). Unified LASSO estimation by least squares approximation. Journal of the
# American Statistical Association 102, 1039-1048.

MOST_EXPANSIONS = 12
RESERVED_GRAMS = 3
"""Weighted Gram matrices that one more solution and the standard errors take."""
NEARBY_TOLERANCE = 1e-3
"""Distance in the metric of the Hessian within which the error of a model of the loss is negligible."""


@dataclass(slots=True, eq=False)
class PathFollower:
    """Method to follow a path and to choose one of its fits by `select`.

    With `steps`, local linear approximations of a nonconvex penalty start from the unpenalized fit; `seen`
    has, by lambda, the points at which the loss is known, the null model at infinity. `scale` is the lasso's
    lambda_max, and `gradient` (p,) that of the loss at the null model. H (p + 1, p + 1) is the latest
    released Hessian; degrees of freedom follow from it. `solved` are the solved fits of the path, by index; a
    model proposes all others. `errors` are the criteria of solved fits minus those proposed. It has `stopped`
    if a better proposal or neighbors of the choice are not solved, because rows could then be solved for.
    """

    oracle: LossOracle
    setup: PathSetup
    lambdas: Floats
    units: ColumnScales
    select: Chooser
    steps: LinearSteps | None = None
    scale: float = 1.0
    gradient: Floats = field(default_factory=lambda: np.empty(0))
    H: Floats = field(default_factory=lambda: np.empty((0, 0)))
    seen: dict[float, LossPoint] = field(default_factory=dict)
    solved: dict[int, CertifiedPoint] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def unit(self) -> float:
        """Violation below which a fit has converged."""
        return self.setup.tol * (self.scale if self.scale > 0.0 else 1.0)

    @property
    def linearize(self) -> bool:
        """Whether local linear approximation is used for the penalty."""
        return self.setup.algorithm == "lla" and not self.setup.penalty.convex

    def problem(self, place: int) -> Terms:
        """Return the penalty at one of the lambdas."""
        return self.setup.penalty.at(float(self.lambdas[place]), with_intercept(self.setup.groups))

    def exact(self, point: LossPoint, H: Floats) -> FitProtocol[tuple[CoefficientPath, int, LossPoint]]:
        """Solve at every lambda, from the largest on, and choose one of the solutions.

        All to one tolerance, because a repeated solution with a concave penalty may end at another stationary
        point.
        """
        problems = [self.problem(i) for i in range(len(self.lambdas))]
        found = yield from solve(
            self.oracle, problems, point, H, self.unit, linearize=self.linearize, only=self.steps
        )
        fit = self._solved_path(dict(enumerate(found)))
        if fit[0].df is not None and self.oracle.left > 0:
            # Degrees of freedom depend on the Hessian: choose again with that of the chosen fit.
            self.H = yield from self.oracle.hessian(fit[2])
            fit = self._solved_path(self.solved)
        return fit

    def quadratic(self, point: LossPoint, H: Floats) -> FitProtocol[tuple[CoefficientPath, int, LossPoint]]:
        """Solve where a quadratic model proposes, until the choice and its neighbors are solved.

        The model is that of the loss at the chosen fit (a least-squares approximation as in Wang and Leng
        2007, at the solution itself). Its other fits cost nothing, but may be wrong far from there: solved
        fits replace the model's proposals, and the choice moves to a neighbor that is better. With `steps`,
        the first model is that at the unpenalized estimate, and the loss at known points gives the error of
        the model in between.
        """
        ends = self._ends(self.seen.get(np.inf, point))
        known = ends if self.steps is None else {}
        costs: list[int] = []
        with open_line("proposal", MOST_EXPANSIONS, at_most=True) as line:
            for _ in range(MOST_EXPANSIONS):
                # At the largest lambda, a solution may have a coefficient that is almost zero.
                all_known = known | ends if known else known
                b, loss, kkt = self.model_path(point, H, all_known)
                path = self.path(b, loss, kkt)
                place = self.select(path)
                target = place if place not in all_known else self._open_neighbor(place, all_known)
                if target is not None and not self._affordable(costs):
                    values = self.select.values(path)
                    place, target, self.stopped = min(all_known, key=lambda i: values[i]), None, True
                if target is None:
                    self.solved = all_known
                    return path, place, all_known[place].point
                costs.append(-self.oracle.points)
                known[target], _ = yield from self.follow_proposal(target, b[target], known, point, H)
                costs[-1] += self.oracle.points
                found, near = known[target], self._is_near(b[target], known[target].point, H)
                b[target], loss[target], kkt[target] = found.point.b, found.point.loss, found.violation
                proposed, solved = self.select.values(path), self.select.values(self.path(b, loss, kkt))
                self.errors.append(float(solved[target] - proposed[target]))
                line.step()
                if target == place or solved[target] < solved[place]:
                    point = found.point
                    # A Hessian that predicted this solution serves its neighbors, too; the degrees of freedom
                    # of a ridge penalty are those of the Hessian.
                    serves = near and path.df is None
                    if self.oracle.left > 0 and len(self.lambdas) > 1 and not serves:
                        self.H = H = yield from self.oracle.hessian(point)
        # It would continue: the solved fits are the path.
        return self._solved_path(known | ends)

    def _is_near(self, proposed: Floats, solved: LossPoint, H: Floats) -> bool:
        """Return whether a proposal (p + 1,) is as near to the solution as the model can be trusted."""
        d = solved.b - proposed
        return bool(np.sqrt(d @ H @ d) <= NEARBY_TOLERANCE)

    def _affordable(self, costs: Sequence[int]) -> bool:
        """Whether rows cannot be solved for after one more solution and the refit, or already now.

        Linear predictors and weighted Gram matrices give equations about the columns of all sites but the
        holder's; `costs` are the linear predictors of the solutions so far.
        """
        oracle, layout = self.oracle, self.oracle.layout
        each = (layout.p + 1) * (layout.p + 2) / 2 / layout.n
        own = dict(zip(layout.sites, layout.sizes, strict=True)).get(layout.active, 0)
        most = layout.p - own - (oracle.grams + RESERVED_GRAMS) * each
        return not costs or oracle.points > most or oracle.points + 2 * max(costs) <= most

    def _open_neighbor(self, place: int, known: Mapping[int, CertifiedPoint]) -> int | None:
        """Return a neighbor on the path that is not solved; None if both are, or if the penalty is steps."""
        around = [i for i in (place - 1, place + 1) if 0 <= i < len(self.lambdas) and i not in known]
        return around[0] if around and self.steps is None else None

    def follow_proposal(
        self, place: int, b: Floats, known: Mapping[int, CertifiedPoint], last: LossPoint, H: Floats
    ) -> FitProtocol[tuple[CertifiedPoint, Floats]]:
        """Solve one of the problems from the proposal of a model; also return the latest Hessian."""
        start = yield from self._start(b, place, known, last)
        newton = self._newton(place, start, H)
        (found,) = yield from newton.run()
        if self.seen:
            self.seen[float(self.lambdas[place])] = found.point
        return found, newton.H

    def _newton(self, place: int, start: LossPoint, H: Floats) -> ProximalNewton:
        """Newton's method for the problem at one of the lambdas, from a point."""
        terms = self.problem(place)
        return ProximalNewton(
            oracle=self.oracle,
            problems=[terms],
            at=np.arange(self.oracle.layout.p + 1),
            unit=self.unit,
            point=start,
            H=H.copy(),
            linearize=self.linearize,
            only=self.steps,
        )

    def _solved_path(self, known: Mapping[int, CertifiedPoint]) -> tuple[CoefficientPath, int, LossPoint]:
        """Return a path of the lambdas at which a solution is known."""
        solved = sorted(known)
        self.lambdas = self.lambdas[solved]
        found = [known[i] for i in solved]
        self.solved, path = dict(enumerate(found)), self.path(*stacked(found))
        place = self.select(path)
        return path, place, found[place].point

    def _ends(self, null: LossPoint) -> dict[int, CertifiedPoint]:
        """Return the solutions known at the start: the largest lambda, if it selects nothing."""
        terms = self.problem(0)
        if self.steps is not None:
            terms = terms.linearized(self.steps.start)
        violation = terms.violation(null.b, -null.score)
        return {0: CertifiedPoint(null, violation)} if violation <= self.unit else {}

    def _start(
        self, b: Floats, place: int, known: Mapping[int, CertifiedPoint], last: LossPoint
    ) -> FitProtocol[LossPoint]:
        """Go to the model's fit or, if it is worse than the nearest solution, stay at that."""
        if self.linearize and self.steps is None:
            # From the lasso of this lambda, as on the exact path: the solution must not depend on the model.
            return last
        if not known:
            reached = yield from self.oracle.masked(self.oracle.evaluate(b))
            return last if reached is None else reached
        terms = self.problem(place)
        best = min((one.point for one in known.values()), key=lambda at: at.loss + terms.value(at.b))
        highest = best.loss + terms.value(best.b) - terms.value(b)
        reached = yield from self.oracle.masked(self.oracle.evaluate(b, highest))
        return best if reached is None else reached

    def over(self, point: LossPoint, H: Floats) -> PathFollower:
        """Return the follower for other entities, whose unpenalized fit is that of their quadratic model."""
        if self.steps is None:
            return self
        complete = point.b + np.linalg.lstsq(H, point.score, rcond=1e-10)[0]
        return replace(self, steps=replace(self.steps, start=complete), seen={})

    def model_path(
        self, point: LossPoint, H: Floats, known: Mapping[int, CertifiedPoint]
    ) -> tuple[Floats, Floats, Floats]:
        """Coefficients (L, p + 1), losses and violations (L,) of the quadratic model, or known ones."""
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
        """Estimate the error of the model's loss at coefficients (L, p + 1).

        Its error grows with the cube of the distance, and is known where the loss is, on either side.
        """
        here = next((lam for lam, at in self.seen.items() if at is point), None)
        if here is None:
            return np.zeros(len(b))
        points = np.array([at.b for at in self.seen.values()])
        away = _signed_distances(points - point.b, H, np.array(list(self.seen)) - here)
        far = np.abs(away) > NEARBY_TOLERANCE
        if not far.any():
            return np.zeros(len(b))
        losses = np.array([at.loss for at in self.seen.values()])
        away, ratio = away[far], (losses - model_losses(point, H, points))[far] / away[far] ** 3
        # Between points with known loss, the coefficient of the cube is interpolated; beyond them it is
        # constant.
        order = np.argsort(away)
        mine = _signed_distances(b - point.b, H, self.lambdas - here)
        return np.asarray(mine**3 * np.interp(mine, away[order], ratio[order]))

    def path(self, b: Floats, loss: Floats, violation: Floats) -> CoefficientPath:
        """Convert fits of the path to the units of the data; one without a known violation is a proposal."""
        kkt = violation / (self.scale if self.scale > 0.0 else 1.0)
        converged = kkt <= self.setup.tol
        iterations = np.zeros(len(b), dtype=np.int64)
        fits = PenalizedPath(self.lambdas, b[:, 1:], loss, iterations, kkt, converged, self.scale)
        df = degrees_of_freedom(
            self.H, self.setup.penalty, with_intercept(self.setup.groups), self.lambdas, b
        )
        df = None if df is None else df - 1.0
        b = self.oracle.unit * b
        coefficients = b[:, 1:] @ self.oracle.T.T
        return CoefficientPath.of(fits, coefficients, b[:, 0], self.units, self.setup.groups, df)


def stacked(found: Sequence[CertifiedPoint]) -> tuple[Floats, Floats, Floats]:
    """Coefficients (L, p + 1), losses and violations (L,) of points."""
    b, loss = np.array([one.point.b for one in found]), np.array([one.point.loss for one in found])
    return b, loss, np.array([one.violation for one in found])


def with_intercept(groups: CoefficientGroups) -> CoefficientGroups:
    """Place a group without a penalty before the others."""
    return CoefficientGroups(
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


# ----------------------------------------------------------------------------------------------------
# Quadratic models of the loss by fold: cross-validation and stability selection beyond the normal family.
#
# Near a point, half the mean deviance of the entities of a fold is its value there with gradient and Hessian.
# The holder's reply at the point has the value, scores over the fold's residuals are the gradient, and a
# weighted Gram matrix with the weights of the fold alone is the Hessian: sums over the entities of a fold,
# and no further linear predictor. A fit to some folds minimizes the sum of their models and the penalty; its
# deviance on the others is that of their models. Both are approximations, which are accurate if a fold
# changes the fit little.

MOST_CENTERS = 3
"""Largest number of points at which the loss is modeled by fold, until the choice of lambda is stable."""


@dataclass(frozen=True, slots=True, eq=False)
class FoldModels:
    """Quadratic models of the loss of F folds at a point; sums over the fold, divided by all n.

    Shares and losses are (F,), scores (F, p + 1), Hessians (F, p + 1, p + 1).
    """

    point: LossPoint
    shares: Floats
    losses: Floats
    scores: Floats
    hessians: Floats

    def over(self, folds: Ints | Bools) -> tuple[LossPoint, Floats]:
        """Return the combined model of some folds: the point with their loss and score, and the Hessian."""
        share = self.shares[folds].sum()
        point = replace(
            self.point,
            loss=float(self.losses[folds].sum() / share),
            score=self.scores[folds].sum(axis=0) / share,
        )
        return point, self.hessians[folds].sum(axis=0) / share

    def cross_validate(self, follower: PathFollower) -> tuple[Floats, Floats]:
        """Return the mean deviance of left-out folds, with its standard error: (L,) each."""
        errors = np.empty((len(self.shares), len(follower.lambdas)))
        for fold in counted(range(len(errors)), "fold"):
            here = np.arange(len(errors)) == fold
            # The model of the other folds gives their path, and the fold's own model evaluates it.
            others = self.over(~here)
            b = follower.over(*others).model_path(*others, {})[0]
            errors[fold] = 2.0 * model_losses(*self.over(here), b)
        return weighted_mean(errors, self.shares)

    def stability(
        self, follower: PathFollower, draws: int, random: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """See :func:`fedstat.models.vglm.normal_path.stability`."""

        def selected(half: Ints) -> Bools:
            here = self.over(half)
            b = follower.over(*here).model_path(*here, {})[0]
            # In the columns' coordinates, because columns are selected.
            return np.asarray(b[:, 1:] @ follower.oracle.T.T != 0.0)

        return stability(selected, len(self.shares), draws, random)


def model_folds(oracle: LossOracle, point: LossPoint, code: Ints, parts: int) -> FitProtocol[FoldModels]:
    """Obtain the models at a point: one round of scores, and a weighted Gram for each fold."""
    masks = [(code == fold).astype(np.float64) for fold in range(parts)]
    layout = oracle.layout
    requests = [oracle.request(layout.active, "respond_by_fold", eta=point.eta, code=code, groups=parts)]
    residual = oracle.expected(point.eta)[0]
    if oracle.response.sums is None:
        requests.append(oracle.request(layout.active, oracle.response.step, eta=point.eta))
    by_fold, *openly = yield requests
    for reply in openly:
        residual = reply.arrays["residual"]
    replies = yield [
        oracle.request(k, "sum_scores", residual=residual * mask) for mask in masks for k in layout.sites
    ]
    sums = iter(reply.arrays["scores"] for reply in replies)
    scores, hessians = [], []
    for fold, mask in enumerate(counted(masks, "model of fold")):
        score = np.concatenate([next(sums) for _ in layout.sites]) + oracle.response.score(fold)
        total = by_fold.arrays["totals"][fold]
        scores.append(oracle.unit * np.concatenate([[total], score @ oracle.T]) / layout.n)
        H = yield from oracle.hessian(replace(point, weight=point.weight * mask))
        hessians.append(H)
    shares = np.array([(layout.relative * mask).mean() for mask in masks])
    return FoldModels(point, shares, by_fold.arrays["losses"], np.array(scores), np.array(hessians))


@dataclass(frozen=True, slots=True, eq=False)
class Folds:
    """Purpose of the folds of a fit, (n,) from 0 to parts - 1: choosing lambda, and halves.

    With `choose`, lambda is chosen by cross-validation, with `one_se` by the one-standard-error rule; `draws`
    are pairs of halves for selection frequencies.
    """

    code: Ints
    parts: int
    choose: bool
    draws: int
    random: np.random.Generator
    one_se: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FoldFit:
    """A path and the chosen fit, with the latest Hessian (p + 1, p + 1), and the results of the folds.

    `cv` and `halves`: see :class:`~fedstat.models.vglm.newton_fit.SelectedPath`.
    """

    path: CoefficientPath
    chosen: int
    point: LossPoint
    H: Floats
    cv: tuple[Floats, Floats] | None = None
    halves: tuple[Floats, Floats] | None = None


def use_folds(follower: PathFollower, fit: FoldFit, folds: Folds) -> FitProtocol[FoldFit]:
    """Model the loss by fold at the fit; cross-validate until the choice is stable; draw halves."""
    oracle, solved = follower.oracle, follower.solved
    for _ in range(MOST_CENTERS):
        models = yield from model_folds(oracle, fit.point, folds.code, folds.parts)
        follower.H = models.hessians.sum(axis=0)
        fit = replace(fit, H=follower.H)
        if not folds.choose:
            break
        cv = models.cross_validate(follower)
        best, fit = choose_by_folds(*cv, folds.one_se), replace(fit, cv=cv)
        if best == fit.chosen:
            break
        if best not in solved:
            proposed = follower.model_path(fit.point, fit.H, {})[0][best]
            solved[best], _ = yield from follower.follow_proposal(best, proposed, solved, fit.point, fit.H)
        point = solved[best].point
        path = follower.path(*follower.model_path(point, fit.H, solved))
        fit = replace(fit, path=path, chosen=best, point=point)
        # Hessians by fold at another point would be more than the disclosure checks allow.
        if oracle.left < folds.parts:
            break
    if not folds.draws:
        return fit
    return replace(fit, halves=models.stability(follower, folds.draws, folds.random))
