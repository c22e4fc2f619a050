"""All site steps of a vertical generalized linear model: Newton's method, response, ADMM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.codec import from_json
from fedstat.errors import FedstatError, MessageError
from fedstat.federation.disclosure.facts import (
    EntityCount,
    ExcludedEntities,
    ExternalWeights,
    GroupSums,
    RowGroups,
)
from fedstat.federation.disclosure.family import ONE_OWNER, include, state_without_terms, step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, aggregate, check_lengths, control, per_entity
from fedstat.federation.protocols.product_steps import check_positions
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.coordinate_descent import GramSolver
from fedstat.kernels.penalized.path import lambda_max
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty, Terms, orthonormalizer
from fedstat.kernels.row_products import column_sums, gram, row_dots
from fedstat.models.vertical.exchange.standardized_columns import (
    require_groups,
    staged_block,
    staged_response,
)
from fedstat.models.vertical.exchange.steps import (
    CODE,
    EXCHANGE_ORDER,
    GROUPS,
    ExchangeRules,
    exchange_steps,
    left_out,
)
from fedstat.models.vertical.prediction.steps import LINEAR_PREDICTOR_STEPS, PREDICTOR
from fedstat.models.vglm.distributions import OUTSIDE, POINTS, respond_at, saturated
from fedstat.models.vglm.path_setup import adapted
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Steps of Newton's method at a site: linear predictors, scores, weighted sums of products.

WEIGHTED = "weighted"


RESIDUAL = per_entity("residual of the response", dtype="float64", weighs="residuals")
WEIGHTED_FACTS = (EntityCount, ExternalWeights, GroupSums)
FAMILY = state_without_terms("vglm", ONE_OWNER)


@step(
    FAMILY,
    (
        "admm_coefficients deal_product linear_predictor respond respond_openly share_product stage_block "
        "stage_response sum_scores sum_with_response weigh"
    ),
    takes={"beta": control("coefficients of standardized columns", dtype="float64")},
    releases={"linear_predictor": PREDICTOR},
)
def linear_predictor(data: SiteData, state: State, beta: Floats) -> dict[str, Array]:
    """Release the linear predictor of the block at some coefficients, one value per entity."""
    staged = staged_block(state)
    check_lengths(data.name, beta=(beta, staged.X.shape[1]))
    return {"linear_predictor": row_dots(staged.X, beta)}


@step(
    FAMILY,
    "deal_product linear_predictor respond respond_by_fold respond_openly share_product sum_scores",
    takes={"residual": RESIDUAL},
    releases={
        "scores": aggregate("sums of the columns times residuals", behind=(EntityCount, ExternalWeights))
    },
)
def sum_scores(data: SiteData, state: State, residual: Floats) -> dict[str, Array]:
    """Sum the columns times the residuals: (p,)."""
    staged = staged_block(state)
    check_lengths(data.name, residual=(residual, len(staged.X)))
    return {"scores": column_sums(staged.X, residual)}


@step(
    FAMILY,
    "deal_product share_product sum_scores weigh",
    takes={
        "weight": per_entity("weight of each entity in a Newton step", dtype="float64", weighs="weights"),
        "columns": control("positions of the columns", dtype="int64"),
    },
    releases={
        "sums": aggregate("weighted sums of the columns"),
        "gram": aggregate("weighted sums of products of the columns", 2),
    },
    rows_behind=WEIGHTED_FACTS,
)
def weigh(data: SiteData, state: State, weight: Floats, columns: Ints) -> dict[str, Array]:
    """Receive row weights; release the weighted sums of some columns (q,) and of their products (q, q).

    Their products with columns of other sites are those requested next.
    """
    staged = staged_block(state)
    check_lengths(data.name, weight=(weight, len(staged.X)))
    if not (np.isfinite(weight).all() and (weight >= 0.0).all()):
        raise MessageError(f"{data.name}: array 'weight' must be finite and not negative")
    every, p = np.zeros(len(weight), dtype=np.int64), staged.X.shape[1]
    check_positions(data.name, columns, p, "columns")
    X = staged.X if len(columns) == p else np.ascontiguousarray(staged.X[:, columns])
    # The Gram matrix of a fold has weights of zero elsewhere, and depends only on the fold.
    of_fold = np.where(weight > 0.0, 0, -1)
    require_groups(data.name, of_fold, 1, p * (p + 1), p)
    state.report(ExternalWeights(weight), GroupSums(every, p, staged.grams + 1), GroupSums(of_fold, p))
    state.count_entities(int(np.count_nonzero(weight)))
    staged.weight, staged.grams = weight, staged.grams + 1
    staged.weighted = np.sqrt(weight)[:, None] * X
    return {"sums": column_sums(X, weight), "gram": gram(X, weight)}


def weighted_columns(data: SiteData, state: State, whom: str) -> Floats:
    """Columns times the root of the latest weights, which are multiplied with another site's."""
    staged = staged_block(state)
    if not len(staged.weight):
        raise MessageError(f"{data.name}: there are no columns '{WEIGHTED}' in this session")
    return staged.weighted


def weights_released(data: SiteData, state: State) -> tuple[Floats, int]:
    """Return the latest weights, and how many weighted Gram matrices were released."""
    staged = staged_block(state)
    return staged.weight, max(staged.grams, 1)


# Steps of the response holder: its releases about the response at linear predictors.
#
# With a canonical link these are sums over entities; residuals are released only if a fit needs them.


TOTAL_PREDICTOR = per_entity("sum of the sites' linear predictors", dtype="float64", weighs="")
RESPONSE_SUMS: Mapping[str, ArrayDeclaration] = {
    "loss": aggregate("half the mean deviance", 0, behind=(EntityCount,)),
    "sums": aggregate("sums of residuals and of their squares", behind=(EntityCount,)),
}
FOLD_FACTS = (EntityCount, GroupSums, ExcludedEntities, RowGroups)


@step(
    FAMILY,
    "deal_product linear_predictor respond respond_by_fold share_product sum_with_response",
    takes={
        "eta": TOTAL_PREDICTOR,
        "highest": control("loss above which nothing else is said", 0, optional=True),
    },
    releases=RESPONSE_SUMS,
)
def respond(data: SiteData, state: State, eta: Floats, highest: Array | None = None) -> dict[str, Array]:
    """Compare the response with linear predictors (n,), the sums over sites.

    ``loss`` is half the mean deviance. Residuals and weights are the first and minus the expected second
    derivative of every entity's log-likelihood by its linear predictor. ``sums`` (3,) has the sum of
    residuals, of their squares, and of the squares divided by the weights; zeros if the loss is above
    `highest`.
    """
    loss, residual, weight = _compared(data, state, eta)
    if loss >= OUTSIDE or (highest is not None and not loss <= float(highest)):
        # The excess of the loss would reveal the few rows that caused it.
        return {"loss": np.array(OUTSIDE), "sums": np.zeros(3)}
    # Up to terms without the response, the loss is the sum of y eta: predictors are weights of responses.
    state.report(ExternalWeights(eta - np.median(eta), PREDICTORS))
    # A party with sums of columns times fitted means also has those times residuals: these must not be few.
    state.report(ExternalWeights(residual, "residuals"))
    return {"loss": np.array(loss), "sums": _sums(staged_response(state).distribution, residual, weight)}


@step(
    FAMILY,
    (
        "admm_respond admm_start deal_product linear_predictor respond_by_fold respond_openly "
        "share_product stage_response"
    ),
    takes={"eta": TOTAL_PREDICTOR},
    releases={**RESPONSE_SUMS, "residual": per_entity("residual of the response")},
)
def respond_openly(data: SiteData, state: State, eta: Floats) -> dict[str, Array]:
    """As :func:`respond`, with the residual of every entity, (n,)."""
    loss, residual, weight = _compared(data, state, eta)
    sums = _sums(staged_response(state).distribution, residual, weight)
    return {"loss": np.array(loss), "sums": sums, "residual": residual}


@step(
    FAMILY,
    "deal_product linear_predictor respond respond_by_fold respond_openly share_product sum_scores",
    takes={"eta": TOTAL_PREDICTOR, "code": CODE, "groups": GROUPS},
    releases={
        "losses": aggregate("half the deviance by fold"),
        "totals": aggregate("sums of residuals by fold"),
    },
    rows_behind=FOLD_FACTS,
)
def respond_by_fold(data: SiteData, state: State, eta: Floats, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum by fold, (n,): ``losses`` (G,), half the deviance over n, and ``totals`` (G,) of residuals."""
    response, G = staged_response(state), int(groups)
    _, residual, _ = _compared(data, state, eta)
    n = len(residual)
    check_lengths(data.name, code=(code, n))
    require_groups(data.name, code, G, 2)
    folds = [code == g for g in np.unique(code[code >= 0])]
    state.report(GroupSums(code, 0), left_out(code), RowGroups("", code, response.rows))
    state.report(*(ExternalWeights(eta[here] - np.median(eta), PREDICTORS) for here in folds))
    state.report(*(ExternalWeights(residual[here], "residuals") for here in folds))
    losses, totals = np.zeros((2, G))
    for here in folds:
        case = None if response.case is None else response.case[here]
        loss = respond_at(response.distribution, eta[here], response.y[here], case)[0]
        losses[code[here][0]], totals[code[here][0]] = loss * here.sum() / n, residual @ here
    return {"losses": losses, "totals": totals}


def _compared(data: SiteData, state: State, eta: Floats) -> tuple[float, Floats, Floats]:
    """Loss, residuals and weights at linear predictors."""
    response = staged_response(state)
    check_lengths(data.name, eta=(eta, len(response.y)))
    if not np.isfinite(eta).all():
        raise MessageError(f"{data.name}: array 'eta' must be finite")
    return respond_at(response.distribution, eta, response.y, response.case)


def _sums(distribution: DistributionSpec, residual: Floats, weight: Floats) -> Floats:
    pearson = float(np.sum(residual**2 / weight)) if distribution.estimates_scale and weight.all() else 0.0
    return np.array([residual.sum(), np.sum(residual**2), pearson])


PREDICTORS = "deviations of linear predictors from their median"


# ----------------------------------------------------------------------------------------------------
# Steps of the sharing form of ADMM: penalized least squares at every site.
#
# Let there be N blocks (those of the sites and the intercept), z the mean of their linear predictors and u
# the scaled dual (Boyd et al. 2011, section 7.3). A site moves its own part of the linear predictor by ``z -
# mean - u`` (n,), as far as its penalty allows; the holder of the response moves z and u. Coefficients stay
# at their sites until the end.
#
# References
# ----------
# Boyd, S., Parikh, N., Chu, E., Peleato, B. and Eckstein, J. (2011). Distributed optimization and statistical
# learning via the alternating direction method of multipliers. Foundations and Trends in Machine Learning 3,
# 1-122.

OVER_RELAXATION = 1.6
MOST_NEWTON_STEPS = 60
LOCAL_TOLERANCE = 1e-12


@dataclass(slots=True)
class SharingBlock:
    """A site's part of ADMM.

    Z (n, p) are its columns, orthonormal within groups, G (p, p) is Z'Z / n; coefficients of standardized
    columns are ``T theta``, and eta (n,) is Z theta. `terms` are the penalty at the present lambda, `lasso`
    its replacement.
    """

    Z: Floats
    G: Floats
    T: Floats
    penalty: Penalty
    groups: CoefficientGroups
    theta: Floats
    eta: Floats
    terms: Terms | None = None
    lasso: Terms | None = None


@dataclass(slots=True)
class SharingResponse:
    """Mean linear predictor z and scaled dual u, (n,), and the penalty parameter, at the response holder."""

    z: Floats
    u: Floats
    rho: float = field(default=1.0)


def _block(state: State) -> SharingBlock:
    return state.use("vglm admm", SharingBlock, "ADMM was not started here; ask 'admm_start' first")


RHO = control("penalty parameter", 0)


@step(
    FAMILY,
    "respond_openly stage_block",
    takes={
        "labels": control("group of each column", dtype="int64"),
        "free": control("which columns have no penalty", dtype="bool"),
    },
    requests=control("the penalty"),
)
def admm_start(data: SiteData, state: State, text: str, labels: Ints, free: Bools) -> dict[str, Array]:
    """Prepare the penalized least squares of the block; nothing is released.

    `text` is the penalty in JSON, `labels` (p,) the group of each column, `free` (p,) whether it has no
    penalty; the first column of a group decides for the group.
    """
    X = staged_block(state).X
    check_lengths(data.name, labels=(labels, X.shape[1]), free=(free, X.shape[1]))
    try:
        penalty, groups = from_json(Penalty, text, "the penalty"), CoefficientGroups.of(labels)
        groups = replace(groups, weights=np.where(free[groups.starts[:-1]], 0.0, 1.0))
    except (FedstatError, TypeError, ValueError) as error:
        raise MessageError(f"{data.name}: expected a penalty, and groups side by side") from error
    # In these coordinates, a group's penalty is that of its part of the linear predictor, for any coding.
    T, groups = orthonormalizer(gram(X, np.ones(len(X))) / len(X), groups)
    Z = np.ascontiguousarray(X @ T)
    G = gram(Z, np.ones(len(Z))) / len(Z)
    block = SharingBlock(Z, G, T, penalty, groups, np.zeros(len(T)), np.zeros(len(Z)))
    state.keep("vglm admm", block, len(Z))
    return {}


@step(
    FAMILY,
    "admm_move admm_respond",
    takes={"power": control("power of coefficients that divides penalties", 0)},
)
def admm_adapt(data: SiteData, state: State, power: Array) -> dict[str, Array]:
    """Divide the penalties by a power of the present coefficients; nothing is released."""
    block, gamma = _block(state), float(power)
    if not 0.0 < gamma < np.inf:
        raise MessageError(f"{data.name}: expected a positive power")
    block.groups = adapted(block.groups, block.theta, gamma)
    return {}


@step(
    FAMILY,
    "admm_move admm_start respond_openly",
    takes={"residual": RESIDUAL},
    releases={
        "largest": aggregate(
            "lambda at which the first column is selected", 0, behind=(EntityCount, ExternalWeights)
        )
    },
)
def admm_largest(data: SiteData, state: State, residual: Floats) -> dict[str, Array]:
    """Smallest lambda at which all coefficients of the block are zero."""
    block = _block(state)
    check_lengths(data.name, residual=(residual, len(block.Z)))
    gradient = column_sums(block.Z, residual) / len(block.Z)
    return {"largest": np.array(lambda_max(gradient, block.penalty, block.groups))}


@step(
    FAMILY,
    "admm_adapt admm_certify admm_coefficients admm_largest admm_start",
    takes={
        "lam": control("lambda", 0),
        "linearize": control("whether to linearize the penalty", 0),
    },
)
def admm_set(data: SiteData, state: State, lam: Array, linearize: Array) -> dict[str, Array]:
    """Set lambda; with `linearize`, replace the penalty by its tangents at the present coefficients."""
    block = _block(state)
    if not 0.0 <= float(lam) < np.inf:
        raise MessageError(f"{data.name}: expected a lambda of zero or more")
    block.terms = block.penalty.at(float(lam), block.groups)
    block.lasso = block.terms.linearized(block.theta if bool(linearize) else np.zeros(len(block.theta)))
    return {}


@step(
    FAMILY,
    "admm_move admm_respond admm_set",
    takes={
        "move": per_entity("move of the sum of linear predictors", dtype="float64", weighs="moves"),
        "rho": RHO,
    },
    releases={"linear_predictor": PREDICTOR},
)
def admm_move(data: SiteData, state: State, move: Floats, rho: Array) -> dict[str, Array]:
    """Move the linear predictor as far as the penalty allows, and release it.

    `move` (n,) is the requested move of the sum of linear predictors, as a share of one; `rho` is the penalty
    parameter of the distance.
    """
    block, r = _block(state), float(rho)
    check_lengths(data.name, move=(move, len(block.Z)))
    if block.lasso is None or not (0.0 < r < np.inf and np.isfinite(move).all()):
        raise MessageError(f"{data.name}: request 'admm_set' first, with finite numbers")
    # Least squares towards Z theta + move, (1/2n) rho ||Z b - Z theta - move||^2, and the penalty.
    c = block.G @ block.theta + column_sums(block.Z, move) / len(block.Z)
    solver = GramSolver(r * block.G, r * c, block.groups)
    start = solver.start(block.theta)
    every = np.ones(len(block.lasso.level), dtype=np.bool_)
    block.theta = solver.solve(block.lasso, start, every, LOCAL_TOLERANCE * max(1.0, r)).b
    block.eta = row_dots(block.Z, block.theta)
    return {"linear_predictor": block.eta}


@step(
    FAMILY,
    "admm_move respond_openly",
    takes={"residual": RESIDUAL},
    releases={
        "violation": aggregate(
            "violation of the stationarity conditions", 0, behind=(EntityCount, ExternalWeights)
        )
    },
)
def admm_certify(data: SiteData, state: State, residual: Floats) -> dict[str, Array]:
    """Largest violation of the stationarity conditions of the block: of the penalty itself."""
    block = _block(state)
    check_lengths(data.name, residual=(residual, len(block.Z)))
    if block.terms is None:
        raise MessageError(f"{data.name}: ask 'admm_set' first")
    gradient = -column_sums(block.Z, residual) / len(block.Z)
    return {"violation": np.array(block.terms.violation(block.theta, gradient))}


@step(
    FAMILY,
    "admm_certify",
    releases={"beta": aggregate("coefficients of standardized columns", behind=(EntityCount,))},
)
def admm_coefficients(data: SiteData, state: State) -> dict[str, Array]:
    """Release the coefficients of standardized columns: (p,)."""
    block = _block(state)
    return {"beta": block.T @ block.theta}


@step(
    FAMILY,
    "admm_move admm_respond admm_set respond_openly",
    takes={
        "eta": TOTAL_PREDICTOR,
        "blocks": control("number of blocks", 0),
        "rho": RHO,
        "start": control("whether the fit begins", 0),
    },
    releases={
        "move": per_entity("move of the sum of linear predictors"),
        "sizes": aggregate("norms of residuals, mean and dual", behind=(EntityCount,)),
    },
)
def admm_respond(
    data: SiteData, state: State, eta: Floats, blocks: Array, rho: Array, start: Array
) -> dict[str, Array]:
    """Move the mean linear predictor towards the response, and the dual.

    `eta` (n,) is the sum of the linear predictors of `blocks` blocks N; `start` states whether this is the
    first request of a fit. ``move`` (n,) is ``z - mean - u``, ``sizes`` (5,) are the norms of primal and dual
    residual, mean, z, and dual.
    """
    response, N, r = staged_response(state), int(blocks), float(rho)
    check_lengths(data.name, eta=(eta, len(response.y)))
    if N < 1 or not (0.0 < r < np.inf and np.isfinite(eta).all()):
        raise MessageError(f"{data.name}: expected blocks, and finite numbers")
    mean = eta / N
    if bool(start) or "vglm shared" not in state:
        state.keep("vglm shared", SharingResponse(mean.copy(), np.zeros(len(mean)), r), len(mean))
    shared = state.use("vglm shared", SharingResponse)
    # The scaled dual is the dual divided by rho: it is rescaled when rho changes (Boyd et al. 2011, 3.4.1).
    u = shared.u * (shared.rho / r)
    relaxed = OVER_RELAXATION * mean + (1.0 - OVER_RELAXATION) * shared.z
    z = nearest(response.distribution.name, relaxed + u, response.y, N, r)
    norm = np.linalg.norm
    sizes = [norm(mean - z), r * norm(z - shared.z), norm(mean), norm(z)]
    shared.u, shared.z, shared.rho = u + relaxed - z, z, r
    return {"move": z - mean - shared.u, "sizes": np.array([*sizes, r * norm(shared.u)])}


def nearest(distribution: str, a: Floats, y: Floats, N: int, rho: float) -> Floats:
    """Minimize ``loss(N z) + N rho (z - a)^2 / 2`` for every entity: (n,) -> (n,).

    Newton steps on the derivative, which increases, within a bracket of its root.
    """
    point = POINTS[distribution]
    at = N * a
    ends = np.stack([at, N * (a + point(at, y)[1] / rho)])
    low, high = ends.min(axis=0), ends.max(axis=0)
    t, last = np.clip(at, low, high), high - low
    for _ in range(MOST_NEWTON_STEPS):
        _, residual, weight = point(t, y)
        slope = rho * (t / N - a) - residual
        low, high = np.where(slope <= 0.0, t, low), np.where(slope >= 0.0, t, high)
        new = t - slope / (weight + rho / N)
        # Newton steps may oscillate: if they do not shrink, the bracket is halved, but not around a root.
        closest = 1e-13 * (1.0 + np.abs(t).max())
        wild = (new < low) | (new > high) | (np.abs(new - t) > np.maximum(last / 2.0, closest))
        new = np.where(wild, (low + high) / 2.0, new)
        last, t = np.abs(new - t), new
        if last.max() <= closest:
            break
    return np.asarray(t / N)


# ----------------------------------------------------------------------------------------------------
# All steps of a site for a vertical generalized linear model.

RULES = ExchangeRules(
    remembers=True,
    columns={WEIGHTED: weighted_columns},
    weights={WEIGHTED: weights_released},
    constant=saturated,
    weighted=True,
)
include(
    FAMILY,
    {**exchange_steps(RULES), **LINEAR_PREDICTOR_STEPS},
    {
        **EXCHANGE_ORDER,
        "sum_with_response": "stage_response sum_products",
        "open_product": "deal_product open_product stage_block stage_response sum_products sum_response "
        "sum_with_response weigh",
        "project_block": "predict_block",
    },
)
