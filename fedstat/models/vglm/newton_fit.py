"""A path by proximal Newton, the choice of one fit, and the refit on its columns.

A point takes one round of sums of linear predictors, one request to the holder of the response, and one round
of scores; :mod:`fedstat.models.vglm.proximal_newton` states what they reveal about the response. A Hessian
takes the sums of the sites' own weighted products, and secure products between them. It is kept from one
step, and from one lambda, to the next as long as it brings the point nearer. At the null model all weights
are equal, so the first Hessian is the unweighted Gram matrix of the columns.

Between two Hessians, the steps themselves give information on the curvature. Linear predictors at known
coefficients are equations about the rows of an entity, too: as many as there are columns determine them. A
path on which only the chosen fit is exact takes about twelve; see
:class:`~fedstat.models.vglm.path_following.PathFollower`.

Every weighted Gram matrix gives as many equations about a column as there are columns. Their number is
therefore bounded by the number of entities (``most_grams`` of the layout), here and at every site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy.optimize import brentq

from fedstat.errors import EstimationError
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import rounding_error
from fedstat.inference.covariance import invert_information
from fedstat.inference.recession import require_bounded
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.path import violation_unit
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty, Terms, orthonormalizer
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vglm.debiased import DebiasedFit, debiased_fit
from fedstat.models.vglm.distributions import log_likelihood, means_of, own_units
from fedstat.models.vglm.path_following import FoldFit, Folds, PathFollower, use_folds
from fedstat.models.vglm.path_setup import Chooser, CoefficientPath, PathSetup, Refit, to_units
from fedstat.models.vglm.proximal_newton import MAXIMUM, MOST_STEPS, LossOracle, LossPoint, solve
from fedstat.typing import Bools, Floats

UNPENALIZED = Penalty("lasso")
FARTHEST = 1e4
"""Scores above this multiple of the tolerance are not a maximum of a likelihood."""
PERFECT = 1e-6
"""Half the mean deviance at which a binary response counts as separated: its maximum is at infinity."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class SelectedPath:
    """Results of a fit: the path, the index of the chosen fit, and its releases.

    `points` is the number of linear predictors, `grams` that of weighted Gram matrices; `dealers` dealt for
    pairs of sites. `cv` has the mean deviance of left-out folds with its standard error, (L,) each; `halves`
    (L, p) and (L,) are those of :func:`~fedstat.models.vglm.normal_path.stability`, `split_p` (p,) of
    :func:`~fedstat.models.vglm.normal_path.split_pvalues`. `shown`: residuals were sent.
    `errors` are criteria of solved fits minus those that a model proposed for them. `stopped`: other
    lambdas are not solved, because rows could then be solved for. `unbounded` states why the selected columns
    have no unpenalized estimate.
    """

    path: CoefficientPath
    chosen: int
    refit: Refit | None
    points: int
    grams: int
    dealers: Mapping[tuple[str, str], str]
    cv: tuple[Floats, Floats] | None = None
    halves: tuple[Floats, Floats] | None = None
    debiased: DebiasedFit | None = None
    split_p: Floats | None = None
    shown: bool = True
    unbounded: str = ""
    errors: tuple[float, ...] = ()
    stopped: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FitExtras:
    """Additional tasks of a fit: folds, debiased estimates of all columns.

    `apart` are other entities, which estimate the coefficients of selected columns.
    """

    folds: Folds | None = None
    debiased: bool = False
    apart: LossOracle | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PathStart:
    """The fit of the intercept alone, in coordinates of columns that are orthonormal within groups there.

    H (p + 1, p + 1) is the Hessian at that point; the setup has the groups of these coordinates. The columns
    have the `units` of their sites; `reported` are those with the weights of entities.
    """

    units: ColumnScales
    reported: ColumnScales
    setup: PathSetup
    intercept_alone: LossPoint
    H: Floats


def fit_path(
    oracle: LossOracle,
    distribution: DistributionSpec,
    setup: PathSetup,
    select: Chooser,
    *,
    exact: bool,
    further: FitExtras | None = None,
) -> FitProtocol[tuple[SelectedPath, ColumnScales, float]]:
    """Follow the path, choose one of its fits by its place, and refit on its support.

    With `exact`, every fit of the path is exact, otherwise only the chosen one; see :class:`PathFollower`.
    The last return value is the loss of the intercept alone. Raises EstimationError if the unpenalized
    coefficients have no estimate.
    """
    further = further or FitExtras()
    start = yield from _start_path(oracle, distribution, setup)
    follower, fit = yield from _follow_path(oracle, distribution, start, select, exact=exact)
    if further.folds is not None:
        oracle.left += further.folds.parts
        fit = yield from use_folds(follower, fit, further.folds)
    support, apart = fit.path.selected[fit.chosen], further.apart
    refit: Refit | None = None
    unbounded = ""
    try:
        if not (setup.penalty.selecting or setup.unpenalized):
            pass
        elif apart is None:
            refit = yield from refit_support(oracle, fit.point, fit.H, support, start.units, distribution)
        else:
            refit = yield from refit_apart(apart, support, distribution)
    except EstimationError as error:
        # The estimates of a convex penalty stand without a refit.
        if setup.unpenalized or not setup.penalty.convex:
            raise
        unbounded = str(error)
    debiased = None
    if further.debiased:
        debiased = yield from debiased_fit(follower, fit.point, fit.H, distribution)
    oracles = [oracle] if apart is None else [oracle, apart]
    found = SelectedPath(
        path=fit.path,
        chosen=fit.chosen,
        refit=refit,
        unbounded=unbounded,
        points=sum(one.points for one in oracles),
        grams=sum(one.grams for one in oracles),
        dealers=oracle.dealers,
        cv=fit.cv,
        halves=fit.halves,
        debiased=debiased,
        shown=oracle.response.sums is None,
        errors=tuple(follower.errors),
        stopped=follower.stopped,
    )
    return found, start.reported, start.intercept_alone.loss


def _start_path(
    oracle: LossOracle, distribution: DistributionSpec, setup: PathSetup
) -> FitProtocol[PathStart]:
    """Standardize the columns, fit the intercept, and change to the coordinates of the groups."""
    units = yield from oracle.begin(distribution)
    first = yield from _intercept_alone(oracle, distribution, units)
    # At the null model every entity has the same curvature, unless there is an offset. The mean gives the
    # Gram matrix of the columns, in which groups are orthonormal, there too; later Hessians have all of them.
    H = yield from oracle.hessian(replace(first, weight=first.weight.mean() * oracle.layout.relative))
    G, scales, reported = H[1:, 1:] / H[0, 0], np.eye(len(H) - 1), units
    if oracle.layout.weights is not None:
        # Sites standardize without the weights of entities; penalties are of columns standardized with them.
        mean = H[0, 1:] / H[0, 0]
        sd = np.sqrt(np.diag(G) - mean**2)
        G, scales = (G - np.outer(mean, mean)) / np.outer(sd, sd), np.diag(1.0 / sd)
        reported = replace(units, shift=units.shift + units.scale * mean, scale=units.scale * sd)
    T, groups = orthonormalizer(G, setup.groups)
    oracle.T = scales @ T
    first = replace(first, score=np.concatenate([first.score[:1], first.score[1:] @ oracle.T]))
    return PathStart(units, reported, replace(setup, groups=groups), first, oracle.turned(H))


def _follow_path(
    oracle: LossOracle,
    distribution: DistributionSpec,
    start: PathStart,
    select: Chooser,
    *,
    exact: bool,
) -> FitProtocol[tuple[PathFollower, FoldFit]]:
    """Follow the path from the null model, or with `steps` from the unpenalized estimate."""
    setup, point, H = start.setup, start.intercept_alone, start.H
    steps = of_columns = None
    if setup.from_unpenalized:
        complete = yield from _complete(oracle, distribution, point, H)
        setup = setup.adapted(complete.b[1:])
        steps, of_columns = setup.linear_steps(complete.b), setup.linear_steps(complete.b[1:])
    null = yield from _null(oracle, setup, point, H)
    gradient, point = -null.score[1:], null
    lambdas = setup.grid(gradient, of_columns, H[1:, 1:])
    scale = violation_unit(gradient, setup.penalty, setup.groups)
    follower = PathFollower(
        oracle=oracle,
        setup=setup,
        lambdas=lambdas,
        units=start.units,
        select=select,
        steps=steps,
        scale=scale,
        gradient=gradient,
        H=H,
    )
    if steps is not None and not exact and oracle.left > 0:
        # The lassos of the steps are near the unpenalized estimate, and so is their quadratic model.
        point, H = complete, (yield from oracle.hessian(complete))
        follower.seen = {np.inf: null, 0.0: complete}
    path, chosen, at = yield from (follower.exact if exact else follower.quadratic)(point, H)
    return follower, FoldFit(path, chosen, at, H)


def _intercept_alone(
    oracle: LossOracle, distribution: DistributionSpec, units: ColumnScales
) -> FitProtocol[LossPoint]:
    """Go to the estimate of an intercept: without an offset the mean response, for any distribution."""
    b = np.zeros(oracle.layout.p + 1)
    offset = oracle.layout.offset
    b[0] = float(distribution.make().link(units.mean))
    if offset is not None:
        # The mean response at the mean of the means: for a canonical link this is the estimate.
        b[0] = _mean_intercept(distribution, offset, units.mean, float(b[0]))
    first = yield from oracle.masked(oracle.evaluate(b))
    if first is None:
        raise EstimationError(f"{distribution} has no deviance at the mean response; rescale the response")
    if offset is not None or oracle.layout.weights is not None:
        first = yield from _newton_intercept(oracle, first)
    oracle.unit, size = own_units(distribution, first.squares / oracle.layout.n, first.weight)
    oracle.tol = MAXIMUM * size
    return replace(first, b=first.b / oracle.unit, score=first.score * oracle.unit)


def _mean_intercept(distribution: DistributionSpec, offset: Floats, mean: float, start: float) -> float:
    """Return the intercept at which the means have this mean; `start` is that of an offset of zero."""
    low, high = start - float(offset.max()), start - float(offset.min())

    def excess(b: float) -> float:
        return float(means_of(distribution, b + offset).mean()) - mean

    if not low < high:
        return low
    if not excess(low) * excess(high) < 0.0:
        raise EstimationError(
            f"{distribution} has no intercept with this offset: some entities have no mean; rescale the "
            "offset, or use a log link"
        )
    return float(brentq(excess, low, high, xtol=1e-14, rtol=1e-15))


def _newton_intercept(oracle: LossOracle, at: LossPoint) -> FitProtocol[LossPoint]:
    """Maximize the likelihood of the intercept alone by Newton steps, which release no sum of products."""
    n = oracle.layout.n
    for _ in range(MOST_STEPS):
        if abs(at.score[0]) <= MAXIMUM * np.sqrt(at.squares / n):
            break
        b = at.b.copy()
        b[0] += at.score[0] / at.weight.mean()
        found = yield from oracle.masked(oracle.evaluate(b, at.loss + rounding_error(n * at.loss, n) / n))
        if found is None:
            break
        at = found
    return at


def _complete(
    oracle: LossOracle, distribution: DistributionSpec, first: LossPoint, H: Floats
) -> FitProtocol[LossPoint]:
    """Maximize the likelihood without a penalty."""
    (complete,) = yield from solve(oracle, [_free(oracle.layout.p)], first, H, 100.0 * oracle.tol)
    if _separated(distribution, complete.point) or not complete.violation <= FARTHEST * oracle.tol:
        raise EstimationError(
            f"the {oracle.layout.p} columns have no unpenalized estimate: half the mean deviance is "
            f"{complete.point.loss:.1e}, the score {complete.violation:.1e}. Leave out adaptive and steps, "
            "which start from it, or use fewer columns"
        )
    return complete.point


def _separated(distribution: DistributionSpec, at: LossPoint) -> bool:
    return distribution.name == "Binomial" and at.loss < PERFECT


def _null(oracle: LossOracle, setup: PathSetup, first: LossPoint, H: Floats) -> FitProtocol[LossPoint]:
    """Fit the unpenalized coefficients alone."""
    free = setup.groups.columns(~setup.groups.penalized)
    if not len(free):
        return first
    at = np.concatenate([[0], 1 + free])
    (null,) = yield from solve(oracle, [_free(len(free))], first, H, oracle.tol, at=at)
    if not null.violation <= FARTHEST * oracle.tol:
        raise EstimationError(
            f"the {len(free)} unpenalized columns alone have no estimate: score {null.violation:.1e}; "
            "penalize those that do not have to be in the model"
        )
    return null.point


def _free(p: int) -> Terms:
    """No penalty on an intercept and p coefficients."""
    return UNPENALIZED.at(0.0, CoefficientGroups.single(p + 1))


def refit_apart(
    oracle: LossOracle, support: Bools, distribution: DistributionSpec
) -> FitProtocol[Refit | None]:
    """Maximize the likelihood on the support over other entities."""
    units = yield from oracle.begin(distribution)
    first = yield from _intercept_alone(oracle, distribution, units)
    H = yield from oracle.hessian(first, np.flatnonzero(np.append(True, support)))
    return (yield from refit_support(oracle, first, H, support, units, distribution))


def refit_support(
    oracle: LossOracle,
    start: LossPoint,
    H: Floats,
    support: Bools,
    units: ColumnScales,
    distribution: DistributionSpec,
) -> FitProtocol[Refit | None]:
    """Maximize the likelihood on the support; None if no further weighted Gram matrix may be released."""
    layout, names = oracle.layout, ("Intercept", *oracle.layout.names)
    moving = np.abs(oracle.T[support]).max(axis=0, initial=0.0) > 0.0
    at = np.concatenate([[0], 1 + np.flatnonzero(moving)])
    (found,) = yield from solve(oracle, [_free(len(at) - 1)], start, H, oracle.tol, at=at)
    if _separated(distribution, found.point) or not found.violation <= FARTHEST * oracle.tol:
        raise EstimationError(
            f"the {len(at) - 1} columns of the chosen fit have no unpenalized estimate: half the mean "
            f"deviance is {found.point.loss:.1e}, the score {found.violation:.1e}; they may separate the "
            "response. Use fewer columns, or a larger lambda"
        )
    # Without one at the estimate there is no covariance; an approximate one would be too optimistic.
    if layout.most_grams <= oracle.grams:
        return None
    H = yield from oracle.hessian(found.point, at)
    info = layout.nobs * H[np.ix_(at, at)]
    turn = np.linalg.pinv(oracle.turn[np.ix_(at, at)])
    require_bounded(turn.T @ info @ turn, [names[i] for i in at])
    inverse = invert_information(info, [names[i] for i in at])
    # The support consists of complete groups: only its columns are combinations of the free coordinates.
    own = np.concatenate([[0], 1 + np.flatnonzero(support)])
    J = oracle.unit * to_units(support, units) @ oracle.turn[np.ix_(own, at)]
    scale = 1.0
    if distribution.estimates_scale:
        scale = layout.counted * found.point.pearson / (layout.nobs - len(at))
    llf = log_likelihood(distribution.name, found.point.loss, layout.nobs, units.constant, scale)
    return Refit(support, J @ found.point.b[at], scale * J @ inverse @ J.T, llf, scale, found.point.loss)
