"""An institution's sums for the covariance of the estimates: information, and products of scores.

The observed information of (a, s2, beta, mu) after elimination of Sigma_1..Sigma_K: Sigma_k enters the
likelihood of y only through t_k = beta_k'Sigma_k beta_k, so each client can eliminate its own Sigma_k, up
to a K by K system at the coordinator (see :mod:`fedstat.models.vfem.covariance.protocol`).

Everything that is released here is in the units of the data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.federation.door.facts import Entities, GivenWeights
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.rows import gram
from fedstat.models.vfem.blocks.client import client_of
from fedstat.models.vfem.covariance.elimination import (
    Elimination,
    eliminate_sigma,
    units,
    weighted_sums,
)
from fedstat.models.vfem.iteration.response_steps import active_of
from fedstat.typing import Array, Bools, Floats


def information(
    data: SiteData, state: State, inverse_v: Floats, others: Bools, sums: Floats
) -> dict[str, Array]:
    """Local sums of the observed information.

    Parameters
    ----------
    inverse_v : (n_k,) array
        1 / v of the client's entities.
    others : (n_k, K) array of bool
        Which clients have each of them.
    sums : (4,) array
        Sum of kappa = z^2/v - 1/(2 v^2) and of (1/v - z^2)/2 over the entities the client lacks; of
        1/v and of z over those it has.

    Returns
    -------
    dict
        beta, w = Sigma beta; ``gram`` sum of uu'/v; ``own`` the diagonal block of (beta, mu) without it;
        weighted sums of u in all and by the presence of every other client; and what the elimination
        of Sigma_k leaves.
    """
    client = client_of(state)
    theta = client.current
    assert theta is not None
    n = client.n_seen
    check_lengths(data.name, inverse_v=(inverse_v, n), others=(others, n), sums=(sums, 4))
    p, scale = len(theta.mu), units(client)
    kappa, e, h_seen, z_seen = sums
    U, z = client.X - theta.mu, client.z
    state.tell(client.weights(inverse_v, "weights"), client.weights(z * inverse_v, "residuals"))
    client.staged = {"U": U, "weights": inverse_v, "others": others}
    w = theta.Sigma @ theta.beta
    elimination = eliminate_sigma(client, theta, float(e))
    by_v = weighted_sums(U, inverse_v, others, data.min_count)
    by_z = weighted_sums(U, z * inverse_v, ~others, data.min_count)
    client.staged["root"] = np.sqrt(inverse_v)[:, None] * U * client.scale
    state.keep("vfem elimination", elimination, state.entities)
    own = np.zeros((2 * p, 2 * p))
    own[:p, :p] = 4.0 * kappa * np.outer(w, w) + 2.0 * e * theta.Sigma
    own[:p, p:] = -np.outer(by_v[0], theta.beta) + z_seen * np.eye(p)
    own[p:, :p] = own[:p, p:].T
    own[p:, p:] = h_seen * np.outer(theta.beta, theta.beta) + client.n_seen * np.linalg.inv(theta.Sigma)
    return {
        "beta": theta.beta / client.scale,
        "w": w * client.scale,
        "own": own * np.outer(scale, scale),
        "gram": gram(U, inverse_v) * np.outer(client.scale, client.scale),
        "by_v": by_v * client.scale,
        "by_z": by_z * client.scale,
        "J": elimination.lost * np.outer(scale, scale),
        "j": elimination.coupling * scale,
        "N": np.array(elimination.curvature),
    }


def scores(data: SiteData, state: State) -> dict[str, Array]:
    """Stage the client's part of every entity's effective score, and release its local products.

    Columns: beta (p), mu (p), and the projection of Sigma_k's score on its direction in v; the effect of
    estimating Sigma_k is removed. Multiplied with the response holder's -(1/v - z^2)/2 and z.

    Returns
    -------
    dict
        ``gram`` F'F, ``with_response`` F' [z, -e, -e by absent client], e = (1/v - z^2)/2.
    """
    client = client_of(state)
    theta = client.current
    elimination = state.use(
        "vfem elimination", Elimination, "Sigma was not eliminated; ask 'information' first"
    )
    assert theta is not None
    U, z, inverse_v = client.staged["U"], client.z, client.staged["weights"]
    Y = np.asarray(np.linalg.solve(elimination.T, U.T).T, dtype=np.float64)
    alpha = quadratic(Y, elimination.b * elimination.inverse)
    lam = np.column_stack([quadratic(Y, L * elimination.inverse) for L in elimination.L])
    score = np.column_stack([U * z[:, None], np.linalg.solve(theta.Sigma, U.T).T - np.outer(z, theta.beta)])
    F = np.column_stack([(score - lam) * units(client), alpha])
    minus_e = -0.5 * (inverse_v - z * z)
    client.staged["scores"] = F
    by_absent = weighted_sums(F, minus_e, ~client.staged["others"], data.min_count).T
    return {"gram": F.T @ F, "with_response": np.column_stack([F.T @ z, by_absent])}


def quadratic(Y: Floats, A: Floats) -> Floats:
    """Half of y'Ay - tr A for each row y."""
    return np.asarray(0.5 * (np.einsum("ij,ij->i", Y @ A, Y) - np.trace(A)))


def response_products(data: SiteData, state: State, missing: Bools) -> dict[str, Array]:
    """Products of the response holder's own part of the scores.

    Parameters
    ----------
    missing : (G, K) array of bool
        Which clients miss in each pattern.
    """
    active = active_of(state)
    z, inverse_v = active.z, 1.0 / active.v[active.code]
    minus_e = -0.5 * (inverse_v - z * z)
    F = np.column_stack([z, minus_e, minus_e[:, None] * missing[active.code]])
    return {"gram": F.T @ F}


def _weighted(what: str, ndim: int = 1) -> Declared:
    return Declared("aggregate", what, ndim, behind=(Entities, GivenWeights))


STEPS: Mapping[str, Step] = {
    "information": Step(
        information,
        {
            "inverse_v": Declared(
                "control", "1/v of the client's entities, by missing pattern", weighs="weights"
            ),
            "others": Declared("presence", "which clients have each entity", 2, dtype="bool"),
            "sums": Declared("aggregate", "sums over entities of 1/v and z^2"),
        },
        {
            "beta": _weighted("coefficients"),
            "w": _weighted("covariance of the block with its linear predictor"),
            "own": _weighted("information on the block's coefficients and means", 2),
            "gram": _weighted("weighted cross-products within the block", 2),
            "by_v": _weighted("weighted sums of the columns, by presence of other clients", 2),
            "by_z": _weighted("products of columns and residuals, by absence of other clients", 2),
            "J": _weighted("information lost to the block's covariance", 2),
            "j": _weighted("information lost to the block's covariance"),
            "N": _weighted("information lost to the block's covariance", 0),
        },
    ),
    "scores": Step(
        scores,
        gives={
            "gram": Declared("aggregate", "products of the scores within the block", 2, behind=(Entities,)),
            "with_response": Declared(
                "aggregate", "products of the scores with those of the response", 2, behind=(Entities,)
            ),
        },
    ),
    "response_products": Step(
        response_products,
        {"missing": Declared("presence", "missing patterns", 2)},
        {"gram": Declared("aggregate", "products of the scores of the response", 2, behind=(Entities,))},
    ),
}
