"""Steps of an institution in the iterations of VFEM with a normal response.

Notation of Tang, Wang, Feng and Li (TWFL): an institution k holds x_i^k in R^{p_k} for n_k of n entities,
beta_k, mu_k and Sigma_k; the active institution holds y_i, a and s2. Columns are standardised at their
institution once; the maximum likelihood estimate moves along with them.

Released while iterating: one linear predictor per entity, scalars of the iteration, and at the end the
estimates. Under `z`, the other direction, stands (y_i - E[y_i | seen blocks]) / v_g(i).

Of linear predictors, log-likelihoods, squared scores, products of moves and recentrings only sums over
institutions are needed, and masks may hide each institution's own. Needed by institution, and clear, are the
scalars of its points (mu'beta and beta'Sigma beta, which weigh by missing pattern), its largest change, and
whether a point is admissible.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.linalg import cho_factor

from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths, check_room
from fedstat.kernels.rows import row_dots
from fedstat.models.vfem.blocks.client import (
    OPENING,
    Client,
    EvaluatedPoint,
    Theta,
    client_of,
    stage_client,
)
from fedstat.models.vfem.blocks.declare import aggregate
from fedstat.models.vfem.iteration.m_step import (
    block_log_likelihood,
    largest_change,
    m_step,
    mix,
    move_products,
    recentring,
    remember,
    set_first_point,
    whiten_move,
)
from fedstat.typing import Array, Bools, Floats, Ints


def start(
    data: SiteData,
    state: State,
    keep: Bools,
    rows: Ints,
    n: Array,
    filled: Array,
    memory: Array,
    padded: Array,
    beta: Array | None = None,
) -> dict[str, Array]:
    """Standardise the block and set the first point.

    `keep`, `rows`, `n` and `filled` are those of :func:`stage_client`; `memory` earlier points may be mixed;
    `padded` linear predictors go out for all n entities, zero where the institution lacks them, since only so
    can they be added up under masks; `beta` (p,) are starting coefficients in the units of the data.
    Released: the first linear predictor and scalars, and the extreme eigenvalues of the local covariance.
    """
    client = stage_client(data, state, keep, rows, int(n), bool(filled), int(memory))
    if padded:
        check_room(data.name, int(n), client.X.size)
    client.padded = bool(padded)
    first = client.first_point(None if beta is None else np.asarray(beta, dtype=float) * client.scale)
    set_first_point(client, first)
    return describe_points(client) | {"eigenvalues": np.linalg.eigvalsh(first.Sigma)[[0, -1]]}


def describe_points(client: Client) -> dict[str, Array]:
    """Return the newest linear predictor, and the scalars for any mixture of the points.

    For weights c over the points the coordinator needs mu'beta and t = beta'Sigma beta of the mixed
    parameters: sums of ``c_j c_l mu_j'beta_l`` and ``c_j c_l c_m beta_l'Sigma_j beta_m``. Points before
    the newest stand as differences from it (whose own weight is then one): with large weights of both
    signs the products of the points themselves would cancel.
    """
    *earlier, newest = client.points
    B = np.array([*[p.beta - newest.beta for p in earlier], newest.beta])
    MU = np.array([*[p.mu - newest.mu for p in earlier], newest.mu])
    S = np.array([*[p.Sigma - newest.Sigma for p in earlier], newest.Sigma])
    return {
        "linear_predictor": client.pad(row_dots(client.X, newest.beta)),
        "centres": MU @ B.T,
        "spreads": B @ S @ B.T,
    }


def step(
    data: SiteData,
    state: State,
    weights: Floats,
    z: Floats,
    missing: Floats,
    s2: Array,
    omega: Array,
    forget: Array,
) -> dict[str, Array]:
    """Evaluate likelihood and score at a mixture of the points, and make the local M-step there.

    `weights` (q,) of the points sum to one; z (n_k,) are standardised residuals of the institution's
    entities, `missing` (3,) the sums of z, z^2 and 1/v over those that it lacks, `omega` the length of the
    step of beta. `forget`: drop the previous evaluation first, which another institution found inadmissible.

    Released: ``inside``, which is 0, and nothing else comes, when the mixed Sigma has left the positive cone;
    the M-step's linear predictor and its scalars, the log-likelihood of the block less its maximum, the
    squared score norm, the largest change, and the products of the newest move with the earlier ones.
    """
    client = client_of(state)
    check_lengths(data.name, z=(z, client.n_seen), missing=(missing, 3))
    state.tell(client.weights(z, "residuals"))
    if forget:
        client.points, client.evaluated = client.previous
    # Another institution may find the point inadmissible: this evaluation is then taken back.
    client.previous = list(client.points), list(client.evaluated)
    client.omega = float(omega)
    theta = mix(client.points, weights)
    try:
        # Weights of both signs may mix covariances to a matrix that is none.
        factor = cho_factor(theta.Sigma, lower=True)
    except np.linalg.LinAlgError:
        return {"inside": np.array(0)}
    change = largest_change(client.current, theta, float(s2))
    client.current, client.z = theta, z
    image, direction, score2 = m_step(client, theta, factor, z, missing, float(s2))
    remember(client, EvaluatedPoint(theta, image, direction, whiten_move(client, theta, image, float(s2))))
    return describe_points(client) | {
        "inside": np.array(1),
        "log_likelihood": np.array(block_log_likelihood(client, theta, factor)),
        "score2": np.array(score2),
        "change": np.array(change),
        "products": move_products(client),
        "recentring": recentring(theta, image),
    }


def shorten(data: SiteData, state: State, point: Array, omega: Array) -> dict[str, Array]:
    """Go back to an evaluated point, -1 for that of the last call, and leave it by a shorter step of beta."""
    client = client_of(state)
    client.base = base = client.evaluated[int(point)] if point >= 0 else client.base
    assert base is not None
    client.current = base.at
    beta = base.at.beta + float(omega) * base.direction
    image = Theta(beta, base.image.mu, base.image.Sigma)
    set_first_point(client, image)
    return describe_points(client) | {"recentring": recentring(base.at, image)}


def set_rate(data: SiteData, state: State, eta: Array) -> dict[str, Array]:
    """Choose the gradient M-step, TWFL (8), with rate eta."""
    client_of(state).eta = float(eta)
    return {}


def estimates(data: SiteData, state: State) -> dict[str, Array]:
    """Release the estimates of the last evaluated point, in the units of the data."""
    client = client_of(state)
    theta = client.estimate
    return {
        "beta": theta.beta / client.scale,
        "mu": client.shift + client.scale * theta.mu,
        "t": np.array(theta.beta @ (theta.Sigma @ theta.beta)),
    }


POINTS: Mapping[str, Declared] = {
    "linear_predictor": Declared(
        "per entity", "linear predictor x'beta of the institution's block", maskable=True, optional=True
    ),
    "centres": Declared("control", "products mu'beta of the points", 2, optional=True),
    "spreads": Declared("control", "products beta'Sigma beta of the points", 3, optional=True),
}
ITERATION: Mapping[str, Declared] = {
    "inside": Declared("control", "whether the point is admissible", 0),
    "log_likelihood": Declared("control", "log-likelihood", 0, maskable=True, optional=True, wide=True),
    "score2": Declared("control", "squared score norm", 0, maskable=True, optional=True, wide=True),
    "change": Declared("control", "largest change of a parameter", 0, optional=True),
    "products": Declared("control", "inner products of moves", maskable=True, optional=True, wide=True),
}
RECENTRING = Declared("control", "move of the centred intercept", 0, maskable=True, optional=True)

STEPS: Mapping[str, Step] = {
    "start": Step(
        start,
        {
            **OPENING,
            "memory": Declared("control", "memory of the acceleration", 0),
            "padded": Declared("control", "whether linear predictors have zeros for missing entities", 0),
            "beta": Declared("control", "starting coefficients", optional=True),
        },
        {
            **POINTS,
            "eigenvalues": aggregate("extreme eigenvalues of the local covariance"),
        },
    ),
    "set_rate": Step(set_rate, {"eta": Declared("control", "learning rate", 0)}),
    "step": Step(
        step,
        {
            "weights": Declared("control", "weights of the points"),
            "z": Declared("per entity", "standardised residual of the response", weighs="residuals"),
            "missing": Declared("aggregate", "sums of z, z^2 and 1/v over entities the institution lacks"),
            "s2": Declared("aggregate", "residual variance", 0),
            "omega": Declared("control", "step length", 0),
            "forget": Declared("control", "whether to forget the previous evaluation", 0),
        },
        {**POINTS, **ITERATION, "recentring": RECENTRING},
    ),
    "shorten": Step(
        shorten,
        {
            "point": Declared("control", "point to return to", 0),
            "omega": Declared("control", "step length", 0),
        },
        {**POINTS, "recentring": RECENTRING},
    ),
    "estimates": Step(
        estimates,
        gives={
            "beta": aggregate("coefficients"),
            "mu": aggregate("means"),
            "t": aggregate("variance of the block's linear predictor", 0),
        },
    ),
}
