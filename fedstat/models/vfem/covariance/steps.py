"""An institution's sums for the covariance of the estimates: information, and products of scores.

Sigma_k enters the likelihood of y only through t_k = beta_k'Sigma_k beta_k, so each client can eliminate its
own Sigma_k, up to a K by K system at the coordinator (:mod:`fedstat.models.vfem.covariance.information`).
Everything that is released here is in the units of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.rows import gram
from fedstat.models.vfem.blocks.client import Client, Theta, client_of
from fedstat.models.vfem.blocks.declare import aggregate, weighted
from fedstat.models.vfem.blocks.response import active_of
from fedstat.models.vfem.covariance.elimination import (
    Elimination,
    eliminate_sigma,
    units,
    weighted_sums,
)
from fedstat.models.vfem.iteration.glm_steps import glm_client
from fedstat.typing import Array, Bools, Floats


@dataclass(frozen=True, slots=True)
class RowCurvatures:
    """-L_mm and -L_mv of the client's rows, (n_k,), and which clients have each of them, (n_k, K).

    `sums` are four: of -L_vv and -L_v over the entities that the client lacks, of -L_mm and L_m over those
    that it has.
    """

    h: Floats
    cross: Floats
    others: Bools
    sums: Floats


def information(
    data: SiteData, state: State, inverse_v: Floats, others: Bools, sums: Floats
) -> dict[str, Array]:
    """Local sums of the information of a normal response, where -L_mm = 1/v and -L_mv = z/v; see above."""
    client = client_of(state)
    check_lengths(data.name, inverse_v=(inverse_v, client.n_seen))
    state.tell(client.weights(inverse_v, "weights"), client.weights(client.z * inverse_v, "residuals"))
    at = RowCurvatures(inverse_v, client.z * inverse_v, others, sums)
    return sum_information(data, state, client, client.estimate, at)


def glm_information(
    data: SiteData, state: State, h: Floats, cross: Floats, others: Bools, sums: Floats
) -> dict[str, Array]:
    """Local sums of the information of another response; see :class:`RowCurvatures`."""
    client = glm_client(state)
    block = client.block
    check_lengths(data.name, h=(h, block.n_seen), cross=(cross, block.n_seen))
    if (h < 0.0).any():
        raise MessageError(f"{data.name}: array 'h' holds numbers below zero; the likelihood is log-concave")
    state.tell(block.weights(h, "weights"), block.weights(cross, "weights"))
    return sum_information(data, state, block, client.accepted, RowCurvatures(h, cross, others, sums))


def sum_information(
    data: SiteData, state: State, client: Client, theta: Theta, at: RowCurvatures
) -> dict[str, Array]:
    """Eliminate Sigma_k from the information, and stage the weighted columns for products with others.

    Returns beta, w = Sigma beta; ``gram`` sum of h uu', u = x - mu; ``own`` the diagonal block of (beta, mu)
    without it; weighted sums of u in all and by the presence (``by_v``) or absence (``by_z``) of every other
    client; and what the elimination leaves.
    """
    n, p, scale = client.n_seen, len(theta.mu), units(client)
    check_lengths(data.name, others=(at.others, n), sums=(at.sums, 4))
    kappa, e, h_seen, z_seen = at.sums
    U, w, beta = client.X - theta.mu, theta.Sigma @ theta.beta, theta.beta
    # Products of these with another client's are the sums over common entities of h u_j u_k'.
    root = np.sqrt(at.h)[:, None] * U * client.scale
    client.staged = {"U": U, "weights": at.h, "others": at.others, "root": root}
    elimination = eliminate_sigma(client, theta, float(e))
    state.keep("vfem elimination", elimination, state.entities)
    by_h = weighted_sums(U, at.h, at.others, data.min_count)
    by_cross = weighted_sums(U, at.cross, ~at.others, data.min_count)
    own = np.zeros((2 * p, 2 * p))
    own[:p, :p] = 4.0 * kappa * np.outer(w, w) + 2.0 * e * theta.Sigma
    # m has the product mu'beta in it: beside the second derivatives the first, z, stays.
    own[:p, p:] = z_seen * np.eye(p) - np.outer(by_h[0], beta)
    own[p:, :p] = own[:p, p:].T
    own[p:, p:] = h_seen * np.outer(beta, beta) + n * np.linalg.inv(theta.Sigma)
    return {
        "beta": beta / client.scale,
        "w": w * client.scale,
        "own": own * np.outer(scale, scale),
        "gram": gram(U, at.h) * np.outer(client.scale, client.scale),
        "by_v": by_h * client.scale,
        "by_z": by_cross * client.scale,
        "J": elimination.lost * np.outer(scale, scale),
        "j": elimination.coupling * scale,
        "N": np.array(elimination.curvature),
    }


def scores(data: SiteData, state: State) -> dict[str, Array]:
    """Stage the client's part F of every entity's effective score, and release its local products.

    Columns: beta (p), mu (p), and the projection of Sigma_k's score on its direction in v; the effect of
    estimating Sigma_k is removed. Released: ``gram`` F'F and ``with_response`` F'[z, -e, -e by absent
    client], e = (1/v - z^2)/2.
    """
    client = client_of(state)
    theta = client.estimate
    elimination = state.use(
        "vfem elimination", Elimination, "Sigma was not eliminated; ask 'information' first"
    )
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
    """Products of the response holder's part of the scores; (G, K), which clients miss in each pattern."""
    active = active_of(state)
    z, inverse_v = active.z, 1.0 / active.v[active.code]
    minus_e = -0.5 * (inverse_v - z * z)
    F = np.column_stack([z, minus_e, minus_e[:, None] * missing[active.code]])
    return {"gram": F.T @ F}


OTHERS = Declared("presence", "which clients have each entity", 2, dtype="bool")
INFORMATION: Mapping[str, Declared] = {
    "beta": weighted("coefficients"),
    "w": weighted("covariance of the block with its linear predictor"),
    "own": weighted("information on the block's coefficients and means", 2),
    "gram": weighted("weighted cross-products within the block", 2),
    "by_v": weighted("weighted sums of the columns, by presence of other clients", 2),
    "by_z": weighted("products of columns and residuals, by absence of other clients", 2),
    "J": weighted("information lost to the block's covariance", 2),
    "j": weighted("information lost to the block's covariance"),
    "N": weighted("information lost to the block's covariance", 0),
}
STEPS: Mapping[str, Step] = {
    "information": Step(
        information,
        {
            "inverse_v": Declared(
                "control", "1/v of the client's entities, by missing pattern", weighs="weights"
            ),
            "others": OTHERS,
            "sums": Declared("aggregate", "sums over entities of 1/v and z^2"),
        },
        INFORMATION,
    ),
    "glm_information": Step(
        glm_information,
        {
            "h": Declared(
                "per entity", "curvature of the log-likelihood by the linear predictor", weighs="weights"
            ),
            "cross": Declared("per entity", "mixed derivative of the log-likelihood", weighs="weights"),
            "others": OTHERS,
            "sums": Declared("aggregate", "sums of derivatives of the log-likelihood"),
        },
        {
            **INFORMATION,
            "by_z": weighted("weighted sums of the columns, by absence of other clients", 2),
        },
    ),
    "scores": Step(
        scores,
        gives={
            "gram": aggregate("products of the scores within the block", 2),
            "with_response": aggregate("products of the scores with those of the response", 2),
        },
    ),
    "response_products": Step(
        response_products,
        {"missing": Declared("presence", "missing patterns", 2)},
        {"gram": aggregate("products of the scores of the response", 2)},
    ),
}
