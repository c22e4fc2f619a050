"""Maximum likelihood of the negative binomial's alpha and the coefficients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import ConvergenceTest
from fedstat.kernels import as_kernel_array
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.negative_binomial import evaluate_nb2, nb2_rows
from fedstat.kernels.glm.sums import Rows, linear_predictor
from fedstat.models.glm.protocol import Newton
from fedstat.models.glm.steps import BETA, COLUMNS, FAMILY, model_of
from fedstat.models.horizontal.rows import INSIDE, summed, weighted_by
from fedstat.models.horizontal.session import add
from fedstat.models.rows.newton import MOST_HALVINGS, newton_step
from fedstat.typing import Array, Floats, Matrix

SMALLEST = 1e-8
"""Alpha below which the counts are not overdispersed."""


@dataclass(frozen=True, slots=True, eq=False)
class Overdispersion:
    """Maximum over the coefficients and alpha.

    `cov` (p, p) is that of the coefficients, in the units of the data, and accounts for alpha's estimation.
    """

    alpha: float
    std_error: float
    cov: Matrix


@step(
    FAMILY,
    "judge sum_nb2",
    takes={
        "beta": aggregate(BETA, common=True),
        **COLUMNS,
        "alpha": aggregate("overdispersion of the negative binomial", 0, common=True),
    },
    releases={
        "inside": INSIDE,
        "score": summed("score, that of alpha last"),
        "information": summed("observed information, alpha last", 2),
        "llf": summed("log-likelihood", 0),
    },
)
def sum_nb2(
    data: SiteData, state: State, beta: Floats, shift: Floats, scale: Floats, alpha: Array
) -> dict[str, Array]:
    """Sum score and observed information of the coefficients and alpha over the rows.

    `beta`, `shift`, `scale` (p,) are as for ``sum_scores``. Released are ``score`` (p + 1,) and
    ``information`` (p + 1, p + 1), alpha last, and ``llf``.
    """
    model = model_of(state)
    T = np.eye(model.p + 1)
    own, T[:-1, :-1] = model.place(shift, scale, beta)
    if not alpha > 0.0:
        raise EstimationError(f"{data.name}: alpha must be positive")
    at = replace(model.distribution, alpha=float(alpha))
    _, counts = weighted_by(model.opened, model.chunks, model.n, own, at, count_functions)
    state.report(*model.facts_at(own, distribution=at), counts)
    sums = evaluate_nb2(model.chunks(), own, float(alpha))
    inside = np.isfinite(sums.log_likelihood)
    return {
        "inside": np.array(inside),
        "score": T.T @ sums.score,
        "information": T.T @ sums.information @ T,
        "llf": np.array(sums.log_likelihood if inside else 0.0),
    }


def count_functions(rows: Rows, beta: Floats, distribution: DistributionSpec) -> Floats:
    """Return log-densities of the counts and their derivatives in alpha, at coefficients (p, R): (m, 4 R).

    Their sums at several alphas add up to the number of rows of each count. The other parts of the sums are
    means and weights, see :func:`~fedstat.kernels.glm.sums.mean_vectors`.
    """
    y, alpha = as_kernel_array(rows.y), float(distribution.alpha or 1.0)
    with np.errstate(all="ignore"):
        parts = [nb2_rows(y, as_kernel_array(linear_predictor(rows, one)), alpha) for one in beta.T]
    functions: Floats = np.nan_to_num(np.vstack([one[[1, 3, 4, 5]] for one in parts]).T)
    return functions if rows.weight is None else functions * rows.weight[:, None]


def estimate_alpha(newton: Newton) -> FitProtocol[Overdispersion]:
    """Newton's method in the coefficients and log alpha, from the fit at the distribution's alpha.

    An EstimationError says that the counts are not overdispersed, or that the iteration does not converge.
    """
    yield from newton.open(local=True)
    gamma, _, _ = yield from newton.maximize()
    # In log alpha no step can leave the domain.
    point = np.append(gamma, np.log(newton.distribution.alpha or 1.0))
    llf, score, information = yield from _sums(newton, point)
    test = ConvergenceTest(newton.n, newton.tol)
    for _ in range(newton.maxiter):
        if point[-1] < np.log(SMALLEST):
            raise EstimationError(
                "alpha goes to zero: the counts vary no more than Poisson counts",
                remedy=Remedy("from_formula(..., family=sm.families.Poisson()).fit()", "use family Poisson"),
            )
        step = newton_step(score, information)
        if test.reached(llf, float(np.sqrt(max(float(score @ step), 0.0)))):
            return _result(newton, point, information)
        for halving in range(MOST_HALVINGS):
            trial = point + step * 0.5**halving
            new, score_new, information_new = yield from _sums(newton, trial)
            # Rounding of a sum over many rows must not count as a fall.
            if new >= llf - 1e-9 * abs(llf):
                break
        else:
            raise EstimationError("alpha: no step increases the log-likelihood, which is not at a maximum")
        point, llf, score, information = trial, new, score_new, information_new
    raise EstimationError(f"alpha did not converge in {newton.maxiter} steps; raise maxiter")


def _sums(newton: Newton, point: Floats) -> FitProtocol[tuple[float, Floats, Floats]]:
    """Log-likelihood, score and information in the coefficients and log alpha."""
    alpha = float(np.exp(point[-1]))
    arrays = {
        "beta": point[:-1],
        "shift": newton.coordinates.shift,
        "scale": newton.coordinates.scale,
        "alpha": np.array(alpha),
    }
    replies = yield newton.session.request_all("sum_nb2", arrays)
    score, information, llf = (add(replies, name) for name in ("score", "information", "llf"))
    if int(add(replies, "inside")) < len(replies):
        return -np.inf, score, information
    # Chain rule from alpha to log alpha; the second derivative adds a term of the score.
    slope = np.ones(len(point))
    slope[-1] = alpha
    information = information * np.outer(slope, slope)
    information[-1, -1] -= score[-1] * alpha
    return float(llf), score * slope, information


def _result(newton: Newton, point: Floats, information: Floats) -> Overdispersion:
    cov = np.linalg.inv(information)
    alpha, back = float(np.exp(point[-1])), newton.coordinates.back
    return Overdispersion(alpha, alpha * float(np.sqrt(cov[-1, -1])), back @ cov[:-1, :-1] @ back.T)


def with_alpha(newton: Newton, alpha: float) -> Newton:
    """Start the same fit again at an estimated alpha."""
    distribution = replace(newton.distribution, alpha=alpha)
    return Newton(newton.session, distribution, newton.maxiter, newton.tol, scaletype=newton.scaletype)
