"""An institution's sums for the covariance where the response is not normal."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import Entities, GivenWeights
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.rows import gram
from fedstat.models.vfem.covariance.elimination import eliminate_sigma, units, weighted_sums
from fedstat.models.vfem.iteration.glm_steps import glm_client
from fedstat.typing import Array, Bools, Floats


def glm_information(
    data: SiteData, state: State, h: Floats, cross: Floats, others: Bools, sums: Floats
) -> dict[str, Array]:
    """Local sums of the observed information at the accepted point.

    Parameters
    ----------
    h, cross : (n_k,) arrays
        -L_mm and -L_mv of the client's entities.
    others : (n_k, K) array of bool
        Which clients have each of them.
    sums : (4,) array
        Sums of -L_vv and -L_v over the entities that the client lacks; of -L_mm and L_m over those it
        has.

    Returns
    -------
    dict
        As :func:`fedstat.models.vfem.covariance.steps.information`.
    """
    client = glm_client(state)
    block, theta = client.block, client.accepted
    n, p, scale = block.n_seen, len(theta.mu), units(block)
    check_lengths(data.name, h=(h, n), cross=(cross, n), others=(others, n), sums=(sums, 4))
    if (h < 0.0).any():
        raise MessageError(f"{data.name}: array 'h' holds numbers below zero; the likelihood is log-concave")
    kappa, e, h_seen, z_seen = sums
    U, w, beta = block.X - theta.mu, theta.Sigma @ theta.beta, theta.beta
    state.tell(block.weights(h, "weights"), block.weights(cross, "weights"))
    block.staged = {"root": np.sqrt(h)[:, None] * U * block.scale, "weights": h}
    elimination = eliminate_sigma(block, theta, float(e))
    by_h = weighted_sums(U, h, others, data.min_count)
    by_cross = weighted_sums(U, cross, ~others, data.min_count)
    own = np.zeros((2 * p, 2 * p))
    own[:p, :p] = 4.0 * kappa * np.outer(w, w) + 2.0 * e * theta.Sigma
    own[:p, p:] = z_seen * np.eye(p) - np.outer(by_h[0], beta)
    own[p:, :p] = own[:p, p:].T
    own[p:, p:] = h_seen * np.outer(beta, beta) + n * np.linalg.inv(theta.Sigma)
    return {
        "beta": beta / block.scale,
        "w": w * block.scale,
        "own": own * np.outer(scale, scale),
        "gram": gram(U, h) * np.outer(block.scale, block.scale),
        "by_v": by_h * block.scale,
        "by_z": by_cross * block.scale,
        "J": elimination.lost * np.outer(scale, scale),
        "j": elimination.coupling * scale,
        "N": np.array(elimination.curvature),
    }


def _aggregate(what: str, ndim: int = 1) -> Declared:
    return Declared("aggregate", what, ndim, behind=(Entities, GivenWeights))


STEPS: Mapping[str, Step] = {
    "glm_information": Step(
        glm_information,
        {
            "h": Declared(
                "per entity", "curvature of the log-likelihood by the linear predictor", weighs="weights"
            ),
            "cross": Declared("per entity", "mixed derivative of the log-likelihood", weighs="weights"),
            "others": Declared("presence", "which clients have each entity", 2, dtype="bool"),
            "sums": Declared("aggregate", "sums of derivatives of the log-likelihood"),
        },
        {
            "beta": _aggregate("coefficients"),
            "w": _aggregate("covariance of the block with its linear predictor"),
            "own": _aggregate("information on the block's coefficients and means", 2),
            "gram": _aggregate("weighted cross-products within the block", 2),
            "by_v": _aggregate("weighted sums of the columns, by presence of other clients", 2),
            "by_z": _aggregate("weighted sums of the columns, by absence of other clients", 2),
            "J": _aggregate("information lost to the block's covariance", 2),
            "j": _aggregate("information lost to the block's covariance"),
            "N": _aggregate("information lost to the block's covariance", 0),
        },
    ),
}
