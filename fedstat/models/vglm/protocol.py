"""Proximal Newton over institutions: linear predictors up, residuals down, and now and then a weighted Gram.

A point takes one round of masked linear predictors, one question to the holder of the response, and one round
of scores. A Hessian takes the sums of the institutions' own weighted products, and secure products between
them; it is kept from one step, and from one lambda, to the next for as long as it brings the point nearer. At
the null model all weights are the same, so that the first Hessian is the plain Gram of the columns.

Between two Hessians the steps themselves tell of the curvature. Linear predictors at known coefficients are
equations about the rows of an entity, too: as many as there are columns determine them. A path at which only
the chosen fit is exact takes about a dozen; see :class:`Course`.

Every weighted Gram makes as many equations about a column as there are columns: their number is bounded by
the number of entities (:attr:`~fedstat.models.vglm.layout.Layout.most_grams`), here and at every institution.

References
----------
Wang, H. and Leng, C. (2007). Unified LASSO estimation by least squares approximation. Journal of the American
Statistical Association 102, 1039-1048.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.engine import Rounds
from fedstat.inference.covariance import invert_information
from fedstat.kernels.glm_family import FamilySpec
from fedstat.kernels.penalised_gram import gram_path
from fedstat.kernels.penalised_path import PenalisedPath, lambda_max
from fedstat.kernels.penalties import Penalty, Terms
from fedstat.kernels.penalty_groups import Groups, orthonormaliser
from fedstat.models.vglm.climb import Point, Study, solve
from fedstat.models.vglm.gram import Units, stage
from fedstat.models.vglm.path import Path, Refit, Setup, to_units
from fedstat.typing import Bools, Floats

FREE = Penalty("lasso")
MOST_EXPANSIONS = 6
PERFECT = 1e-6
"""Half the mean deviance at which a binary response counts as separated: its maximum is at infinity."""
LOOSE = 1e-4
"""Violation, as a share of lambda_max, of fits of a path that are not chosen."""
FREE = Penalty("lasso")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """What a fit hands over.

    Parameters
    ----------
    path : Path
    chosen : int
    refit : Refit or None
    points, grams : int
        Linear predictors, and weighted Gram matrices, that were released.
    dealers : mapping of (str, str) to str
    """

    path: Path
    chosen: int
    refit: Refit | None
    points: int
    grams: int
    dealers: Mapping[tuple[str, str], str]


def fit_path(
    study: Study,
    family: FamilySpec,
    setup: Setup,
    select: Callable[[Path], int],
    *,
    exact: bool,
) -> Rounds[tuple[Fitted, Units, float]]:
    """Follow the path, choose one of its fits, and refit on its support.

    Parameters
    ----------
    study : Study
    family : FamilySpec
        Binomial or Poisson with the canonical link.
    setup : Setup
    select : callable
        From the path to the place of the fit.
    exact : bool
        Whether every fit of the path is exact, or the chosen one; see :class:`Course`.

    Returns
    -------
    (Fitted, Units, float)
        The last is the loss of the intercept alone.

    Raises
    ------
    EstimationError
        The unpenalised coefficients have no estimate.
    """
    layout = study.layout
    units = yield from stage(layout, family, study.session)
    b = np.zeros(layout.p + 1)
    b[0] = family.make().link(units.mean)
    first = yield from study.masked(study.evaluate(b))
    assert first is not None
    # At the null model every weight is the same: the Gram of the columns, whatever the family.
    H = yield from study.hessian(first)
    study.T, groups = orthonormaliser(H[1:, 1:] / H[0, 0], setup.groups)
    setup, H = replace(setup, groups=groups), study.turned(H)
    null_loss = first.loss
    first = replace(first, score=np.concatenate([first.score[:1], first.score[1:] @ study.T]))
    if setup.adaptive:
        (whole,) = yield from solve(study, [_free(layout.p)], first, H, 1e-8)
        setup = setup.adapted(whole.point.b[1:])
    null = yield from _null(study, setup, first, H)
    gradient = -null.score[1:]
    course = Course(study, setup, setup.grid(gradient), units, select)
    course.scale = lambda_max(gradient, setup.penalty, setup.groups)
    path, chosen, at = yield from (course.exact if exact else course.quadratic)(null, H)
    refit = yield from refit_support(study, at, H, path.selected[chosen], units, family)
    return Fitted(path, chosen, refit, study.points, study.grams, study.dealers), units, null_loss


@dataclass(slots=True, eq=False)
class Course:
    """How a path is followed, and one of its fits chosen.

    Parameters
    ----------
    study : Study
    setup : Setup
    lambdas : (L,) array
    units : Units
    select : callable
        From the path to the place of the fit.
    scale : float
        lambda_max.
    """

    study: Study
    setup: Setup
    lambdas: Floats
    units: Units
    select: Callable[[Path], int]
    scale: float = 1.0

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

    def exact(self, point: Point, H: Floats) -> Rounds[tuple[Path, int, Point]]:
        """Solve at every lambda, from the largest on; then once more, to the tolerance, at the chosen one."""
        problems = [self.problem(i) for i in range(len(self.lambdas))]
        loose = self.unit * max(1.0, LOOSE / self.setup.tol)
        found = yield from solve(self.study, problems, point, H, loose, self.linearise)
        b, loss = np.array([one.point.b for one in found]), np.array([one.point.loss for one in found])
        kkt = np.array([one.violation for one in found])
        chosen = self.select(self.path(b, loss, kkt, LOOSE))
        start = found[chosen].point
        # The solution is near: the penalty itself, not its lasso, leads there.
        (last,) = yield from solve(self.study, [self.problem(chosen)], start, H, self.unit)
        b[chosen], loss[chosen], kkt[chosen] = last.point.b, last.point.loss, last.violation
        return self.path(b, loss, kkt, LOOSE, chosen), chosen, last.point

    def quadratic(self, point: Point, H: Floats) -> Rounds[tuple[Path, int, Point]]:
        """Solve at the lambda that the path of the quadratic model at the last solution chooses.

        The chosen fit is exact. The others are those of the quadratic model of the loss there (a
        least-squares approximation as in Wang and Leng 2007, at the solution itself), and cost nothing.
        """
        before, ceiling = -1, point.loss
        for _ in range(MOST_EXPANSIONS):
            b, loss = self._model_path(point, H)
            chosen = self.select(self.path(b, loss, np.zeros(len(b)), self.setup.tol))
            if chosen == before:
                break
            before = chosen
            reached = yield from self.study.masked(self.study.evaluate(b[chosen], ceiling))
            start = point if reached is None else reached
            (last,) = yield from solve(self.study, [self.problem(chosen)], start, H, self.unit)
            point = last.point
            if self.study.left > 0 and len(self.lambdas) > 1:
                H = yield from self.study.hessian(point)
        b, loss = self._model_path(point, H)
        b[before], loss[before] = point.b, point.loss
        kkt = np.full(len(b), np.nan)
        kkt[before] = last.violation
        return self.path(b, loss, kkt, self.setup.tol, before), before, point

    def _model_path(self, point: Point, H: Floats) -> tuple[Floats, Floats]:
        """Coefficients (L, p + 1) and losses (L,) of the quadratic model at a point."""
        found = gram_path(
            H,
            H @ point.b + point.score,
            self.setup.penalty,
            with_intercept(self.setup.groups),
            lambdas=self.lambdas,
            algorithm=self.setup.algorithm,
            tol=self.setup.tol,
        )
        d = found.coefficients - point.b
        loss = point.loss - d @ point.score + np.einsum("li,ij,lj->l", d, H, d) / 2.0
        return found.coefficients.copy(), loss

    def path(self, b: Floats, loss: Floats, violation: Floats, tol: float, chosen: int | None = None) -> Path:
        """Bring fits of the path to the units of the data; the chosen one has to meet the tolerance."""
        kkt = violation / (self.scale if self.scale > 0.0 else 1.0)
        tols = np.full(len(b), tol)
        if chosen is not None:
            tols[chosen] = self.setup.tol
        converged = ~(kkt > tols)
        iterations = np.zeros(len(b), dtype=np.int64)
        fits = PenalisedPath(self.lambdas, b[:, 1:], loss, iterations, kkt, converged, self.scale)
        return Path.of(fits, b[:, 1:] @ self.study.T.T, b[:, 0], self.units, self.setup.groups)


def _null(study: Study, setup: Setup, first: Point, H: Floats) -> Rounds[Point]:
    """Fit the unpenalised coefficients alone."""
    free = setup.groups.columns(~setup.groups.penalised)
    if not len(free):
        return first
    at = np.concatenate([[0], 1 + free])
    (null,) = yield from solve(study, [_free(len(free))], first, H, 1e-10, at=at)
    if not null.violation <= 1e-6:
        raise EstimationError(
            f"the {len(free)} unpenalised columns alone have no estimate: score {null.violation:.1e}; "
            "penalise those that do not have to be in the model"
        )
    return null.point


def _free(p: int) -> Terms:
    """No penalty on an intercept and p coefficients."""
    return FREE.at(0.0, Groups.single(p + 1))


def with_intercept(groups: Groups) -> Groups:
    """Put a group without a penalty before the others."""
    return Groups(
        np.concatenate([[0], groups.starts + 1]),
        np.concatenate([[0.0], groups.weights]),
        np.concatenate([[1.0], groups.multipliers]),
    )


def refit_support(
    study: Study,
    start: Point,
    H: Floats,
    support: Bools,
    units: Units,
    family: FamilySpec,
) -> Rounds[Refit | None]:
    """Maximise the likelihood on the support; None where no weighted Gram may be released any more."""
    layout, names = study.layout, ("Intercept", *study.layout.names)
    moving = np.abs(study.T[support]).max(axis=0, initial=0.0) > 0.0
    at = np.concatenate([[0], 1 + np.flatnonzero(moving)])
    (found,) = yield from solve(study, [_free(len(at) - 1)], start, H, 1e-10, at=at)
    perfect = family.name == "Binomial" and found.point.loss < PERFECT
    if perfect or not found.violation <= 1e-6:
        raise EstimationError(
            f"the {len(at) - 1} columns of the chosen fit have no estimate without a penalty: half the mean "
            f"deviance is {found.point.loss:.1e}, the score {found.violation:.1e}; they may separate the "
            "response. Use fewer columns, or a larger lambda"
        )
    if layout.most_grams <= study.grams:
        return None
    H = yield from study.hessian(found.point)
    info = layout.n * H[np.ix_(at, at)]
    inverse = invert_information(info, [names[i] for i in at])
    theta = np.zeros((layout.p, len(at) - 1))
    theta[moving] = np.eye(len(at) - 1)
    J = to_units(support, units)
    turn = np.zeros((len(at), len(at)))
    turn[0, 0] = 1.0
    turn[1:, 1:] = (study.T @ theta)[support]
    J = J @ turn
    llf, scale = layout.n * (units.constant - found.point.loss), 1.0
    if family.name == "Gaussian":
        rss = 2.0 * layout.n * found.point.loss
        llf = -layout.n / 2.0 * (np.log(2.0 * np.pi * rss / layout.n) + 1.0)
        scale = rss / (layout.n - len(at))
    return Refit(support, J @ found.point.b[at], scale * J @ inverse @ J.T, llf, scale, found.point.loss)
