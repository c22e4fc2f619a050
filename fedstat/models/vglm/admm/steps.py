"""Steps of the sharing form of ADMM: penalised least squares at every institution.

With N blocks (the institutions' and the intercept), z the mean of their linear predictors and u the scaled
dual (Boyd et al. 2011, section 7.3), an institution moves its own part of the linear predictor by
``z - mean - u`` (n,), as far as its penalty lets it; the holder of the response moves z and u. Coefficients
stay where they are until the end.

References
----------
Boyd, S., Parikh, N., Chu, E., Peleato, B. and Eckstein, J. (2011). Distributed optimization and statistical
learning via the alternating direction method of multipliers. Foundations and Trends in Machine Learning 3,
1-122.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.errors import FedstatError, MessageError
from fedstat.federation.door.facts import Entities, GivenWeights
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.penalised.gram import GramSolver
from fedstat.kernels.penalised.groups import Groups, orthonormaliser
from fedstat.kernels.penalised.path import lambda_max
from fedstat.kernels.penalised.penalties import Penalty, Terms
from fedstat.kernels.rows import column_sums, gram, row_dots
from fedstat.models.vertical.exchange.staged import staged_block, staged_response
from fedstat.models.vertical.prediction.steps import PREDICTOR
from fedstat.models.vglm.newton.steps import RESIDUAL
from fedstat.models.vglm.path.setup import adapted
from fedstat.models.vglm.response.distributions import POINTS
from fedstat.models.vglm.response.steps import TOTAL_PREDICTOR
from fedstat.records import from_json
from fedstat.typing import Array, Bools, Floats, Ints

OVER_RELAXATION = 1.6
NEWTON_STEPS = 60
TIGHT = 1e-12


@dataclass(slots=True)
class SharingBlock:
    """An institution's part of ADMM.

    Z (n, p) are its columns, orthonormal within groups, G (p, p) is Z'Z / n; coefficients of standardised
    columns are ``T theta``, and eta (n,) is Z theta. `terms` are the penalty at the present lambda, `lasso`
    what stands in its place.
    """

    Z: Floats
    G: Floats
    T: Floats
    penalty: Penalty
    groups: Groups
    theta: Floats
    eta: Floats
    terms: Terms | None = None
    lasso: Terms | None = None


@dataclass(slots=True)
class Shared:
    """Mean linear predictor z and scaled dual u, (n,), and the penalty parameter, at the response holder."""

    z: Floats
    u: Floats
    rho: float = field(default=1.0)


def _block(state: State) -> SharingBlock:
    return state.use("vglm admm", SharingBlock, "ADMM was not started here; ask 'admm_start' first")


def admm_start(
    data: SiteData, state: State, text: str, labels: Ints, free: Bools
) -> tuple[dict[str, Array], str]:
    """Prepare the penalised least squares of the block; nothing leaves.

    `text` is the penalty in JSON, `labels` (p,) the group of each column, `free` (p,) whether it has no
    penalty: of a group, what its first column says.
    """
    X = staged_block(state).X
    check_lengths(data.name, labels=(labels, X.shape[1]), free=(free, X.shape[1]))
    try:
        penalty, groups = from_json(Penalty, text, "the penalty"), Groups.of(labels)
        groups = replace(groups, weights=np.where(free[groups.starts[:-1]], 0.0, 1.0))
    except (FedstatError, TypeError, ValueError) as error:
        raise MessageError(f"{data.name}: expected a penalty, and groups side by side") from error
    # In these coordinates a group's penalty is that of its part of the linear predictor, whatever its
    # coding.
    T, groups = orthonormaliser(gram(X, np.ones(len(X))) / len(X), groups)
    Z = np.ascontiguousarray(X @ T)
    G = gram(Z, np.ones(len(Z))) / len(Z)
    block = SharingBlock(Z, G, T, penalty, groups, np.zeros(len(T)), np.zeros(len(Z)))
    state.keep("vglm admm", block, len(Z))
    return {}, ""


def admm_adapt(data: SiteData, state: State, power: Array) -> dict[str, Array]:
    """Divide the penalties by a power of the present coefficients; nothing leaves."""
    block, gamma = _block(state), float(power)
    if not 0.0 < gamma < np.inf:
        raise MessageError(f"{data.name}: expected a power above zero")
    block.groups = adapted(block.groups, block.theta, gamma)
    return {}


def admm_largest(data: SiteData, state: State, residual: Floats) -> dict[str, Array]:
    """Smallest lambda at which all coefficients of the block are zero."""
    block = _block(state)
    check_lengths(data.name, residual=(residual, len(block.Z)))
    gradient = column_sums(block.Z, residual) / len(block.Z)
    return {"largest": np.array(lambda_max(gradient, block.penalty, block.groups))}


def admm_set(data: SiteData, state: State, lam: Array, linearise: Array) -> dict[str, Array]:
    """Set lambda; with `linearise` put the penalty's tangents at the present coefficients in its place."""
    block = _block(state)
    if not 0.0 <= float(lam) < np.inf:
        raise MessageError(f"{data.name}: expected a lambda of zero or more")
    block.terms = block.penalty.at(float(lam), block.groups)
    block.lasso = block.terms.linearised(block.theta if bool(linearise) else np.zeros(len(block.theta)))
    return {}


def admm_move(data: SiteData, state: State, move: Floats, rho: Array) -> dict[str, Array]:
    """Move the linear predictor as far as the penalty lets it; release it.

    `move` (n,) is where all linear predictors together are to move, as a share of one; `rho` the penalty
    parameter of the distance.
    """
    block, r = _block(state), float(rho)
    check_lengths(data.name, move=(move, len(block.Z)))
    if block.lasso is None or not (0.0 < r < np.inf and np.isfinite(move).all()):
        raise MessageError(f"{data.name}: ask 'admm_set' first, and with finite numbers")
    # Least squares towards Z theta + move, (1/2n) rho ||Z b - Z theta - move||^2, and the penalty.
    c = block.G @ block.theta + column_sums(block.Z, move) / len(block.Z)
    solver = GramSolver(r * block.G, r * c, block.groups)
    start = solver.start(block.theta)
    every = np.ones(len(block.lasso.level), dtype=np.bool_)
    block.theta = solver.solve(block.lasso, start, every, TIGHT * max(1.0, r)).b
    block.eta = row_dots(block.Z, block.theta)
    return {"linear_predictor": block.eta}


def admm_certify(data: SiteData, state: State, residual: Floats) -> dict[str, Array]:
    """Largest violation of the stationarity conditions of the block: of the penalty itself."""
    block = _block(state)
    check_lengths(data.name, residual=(residual, len(block.Z)))
    if block.terms is None:
        raise MessageError(f"{data.name}: ask 'admm_set' first")
    gradient = -column_sums(block.Z, residual) / len(block.Z)
    return {"violation": np.array(block.terms.violation(block.theta, gradient))}


def admm_coefficients(data: SiteData, state: State) -> dict[str, Array]:
    """Release the coefficients of standardised columns: (p,)."""
    block = _block(state)
    return {"beta": block.T @ block.theta}


def admm_respond(
    data: SiteData, state: State, eta: Floats, blocks: Array, rho: Array, start: Array
) -> dict[str, Array]:
    """Move the mean linear predictor towards the response, and the dual.

    `eta` (n,) is the sum of the linear predictors of `blocks` blocks N; `start` tells whether this is the
    first ask of a fit. ``move`` (n,) is ``z - mean - u``, ``sizes`` (5,) are the norms of primal and dual
    residual, mean, z, and dual.
    """
    response, N, r = staged_response(state), int(blocks), float(rho)
    check_lengths(data.name, eta=(eta, len(response.y)))
    if N < 1 or not (0.0 < r < np.inf and np.isfinite(eta).all()):
        raise MessageError(f"{data.name}: expected blocks, and finite numbers")
    mean = eta / N
    if bool(start) or "vglm shared" not in state:
        state.keep("vglm shared", Shared(mean.copy(), np.zeros(len(mean)), r), len(mean))
    shared = state.use("vglm shared", Shared)
    # The scaled dual is the dual over rho: it is scaled anew when rho changes (Boyd et al. 2011, 3.4.1).
    u = shared.u * (shared.rho / r)
    relaxed = OVER_RELAXATION * mean + (1.0 - OVER_RELAXATION) * shared.z
    z = nearest(response.distribution.name, relaxed + u, response.y, N, r)
    norm = np.linalg.norm
    sizes = [norm(mean - z), r * norm(z - shared.z), norm(mean), norm(z)]
    shared.u, shared.z, shared.rho = u + relaxed - z, z, r
    return {"move": z - mean - shared.u, "sizes": np.array([*sizes, r * norm(shared.u)])}


def nearest(distribution: str, a: Floats, y: Floats, N: int, rho: float) -> Floats:
    """Minimise ``loss(N z) + N rho (z - a)^2 / 2`` for every entity: (n,) -> (n,).

    Newton's steps on the derivative, which increases, within a bracket of its root.
    """
    point = POINTS[distribution]
    at = N * a
    ends = np.stack([at, N * (a + point(at, y)[1] / rho)])
    low, high = ends.min(axis=0), ends.max(axis=0)
    t, last = np.clip(at, low, high), high - low
    for _ in range(NEWTON_STEPS):
        _, residual, weight = point(t, y)
        slope = rho * (t / N - a) - residual
        low, high = np.where(slope <= 0.0, t, low), np.where(slope >= 0.0, t, high)
        new = t - slope / (weight + rho / N)
        # Newton's steps may go to and fro: where they do not shrink, the bracket is halved.
        wild = (new < low) | (new > high) | (np.abs(new - t) > last / 2.0)
        new = np.where(wild, (low + high) / 2.0, new)
        last, t = np.abs(new - t), new
        if last.max() <= 1e-13 * (1.0 + np.abs(t).max()):
            break
    return np.asarray(t / N)


RHO = Declared("control", "penalty parameter", 0)
STEPS: Mapping[str, Step] = {
    "admm_start": Step(
        admm_start,
        {
            "labels": Declared("control", "group of each column", dtype="int64"),
            "free": Declared("control", "which columns have no penalty", dtype="bool"),
        },
        text_in=Declared("control", "the penalty"),
    ),
    "admm_adapt": Step(
        admm_adapt, {"power": Declared("control", "power of coefficients that divides penalties", 0)}
    ),
    "admm_largest": Step(
        admm_largest,
        {"residual": RESIDUAL},
        {
            "largest": Declared(
                "aggregate",
                "lambda at which the first column is selected",
                0,
                behind=(Entities, GivenWeights),
            )
        },
    ),
    "admm_set": Step(
        admm_set,
        {
            "lam": Declared("control", "lambda", 0),
            "linearise": Declared("control", "whether to linearise the penalty", 0),
        },
    ),
    "admm_move": Step(
        admm_move,
        {
            "move": Declared(
                "per entity", "move of the sum of linear predictors", dtype="float64", weighs="moves"
            ),
            "rho": RHO,
        },
        {"linear_predictor": PREDICTOR},
    ),
    "admm_certify": Step(
        admm_certify,
        {"residual": RESIDUAL},
        {
            "violation": Declared(
                "aggregate", "violation of the stationarity conditions", 0, behind=(Entities, GivenWeights)
            )
        },
    ),
    "admm_coefficients": Step(
        admm_coefficients,
        gives={"beta": Declared("aggregate", "coefficients of standardised columns", behind=(Entities,))},
    ),
    "admm_respond": Step(
        admm_respond,
        {
            "eta": TOTAL_PREDICTOR,
            "blocks": Declared("control", "number of blocks", 0),
            "rho": RHO,
            "start": Declared("control", "whether the fit begins", 0),
        },
        {
            "move": Declared("per entity", "move of the sum of linear predictors"),
            "sizes": Declared("aggregate", "norms of residuals, mean and dual", behind=(Entities,)),
        },
    ),
}
