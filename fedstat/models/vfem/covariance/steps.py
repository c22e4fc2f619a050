"""An institution's sums for the information on the estimates.

Sigma_k enters the likelihood of y only through t_k = beta_k'Sigma_k beta_k, so each institution can eliminate
its own Sigma_k, up to a K by K system at the coordinator (:mod:`fedstat.models.vfem.covariance.information`).
Everything that is released here is in the units of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.rounds.running_steps import SHOWN, open_sums
from fedstat.kernels.glm.quadrature import BY_MM, BY_MV
from fedstat.kernels.rows import column_sums, gram
from fedstat.models.vfem.blocks.client import Client, Theta, client_of
from fedstat.models.vfem.blocks.declare import weighted
from fedstat.models.vfem.blocks.kept import kept_weights, weighted_sums
from fedstat.models.vfem.blocks.request import BLOCK, SQUARES
from fedstat.models.vfem.covariance.elimination import (
    eliminate_sigma,
    units,
)
from fedstat.models.vfem.iteration.glm_response_steps import glm_response_of
from fedstat.models.vfem.iteration.glm_steps import GLMClient, glm_client
from fedstat.typing import Array, Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class WeightedRows:
    """-L_mm of the site's rows (n_k,), which sites have each of them (n_k, K), and what comes of both.

    Sums of -L_mm uu' (p, p), and of -L_mm u and -L_mv u, in all and by the presence of every other site,
    and by its absence, (1 + K, p).
    """

    h: Floats
    others: Bools
    gram: Floats
    by_h: Floats
    by_cross: Floats

    @classmethod
    def of(cls, U: Floats, h: Floats, cross: Floats, others: Bools, least: int) -> WeightedRows:
        """Sum rows of which all is known."""
        by_h, by_cross = weighted_sums(U, h, others, least), weighted_sums(U, cross, ~others, least)
        return cls(h, others, gram(U, h), by_h, by_cross)


def information(
    data: SiteData, state: State, inverse_v: Floats, others: Bools, sums: Floats
) -> dict[str, Array]:
    """Local sums of the information of a normal response, where -L_mm = 1/v and -L_mv = z/v; see above."""
    client = client_of(state)
    check_lengths(data.name, inverse_v=(inverse_v, client.n_seen), others=(others, client.n_seen))
    state.tell(client.weights(inverse_v, "weights"), client.weights(client.z * inverse_v, "residuals"))
    U = client.X - client.estimate.mu
    rows = WeightedRows.of(U, inverse_v, client.z * inverse_v, others, data.min_count)
    return sum_information(state, client, client.estimate, rows, sums)


def glm_information(
    data: SiteData,
    state: State,
    others: Bools,
    sums: Floats,
    h: Floats | None = None,
    cross: Floats | None = None,
    alone: Array | None = None,
    shown: Array | None = None,
    lengths: Ints | None = None,
) -> dict[str, Array]:
    """Local sums of the information of another response.

    Of the entities that another institution has as well comes `h` (n_k,), -L_mm; of those that no other has
    the mean, `alone`, and unless they are few the sums of the columns' products with -L_mm; and of -L_mv the
    sums of the columns by absent institution, sealed in `shown`, of these `lengths`. Where nobody can deal,
    `h` and `cross`, -L_mv, are those of all entities; the response holder has them.
    """
    client = glm_client(state)
    block, theta = client.block, client.accepted
    U = block.X - theta.mu
    if h is None:
        terms = glm_response_of(state).terms[:, block.rows]
        h, cross = np.maximum(-terms[BY_MM], 0.0), -terms[BY_MV]
    check_lengths(data.name, h=(h, len(U)), others=(others, len(U)))
    if (h < 0.0).any():
        raise MessageError(f"{data.name}: array 'h' holds numbers below zero; the likelihood is log-concave")
    if cross is not None:
        check_lengths(data.name, cross=(cross, len(U)))
        state.tell(block.weights(h, "weights"), block.weights(cross, "weights"))
        rows = WeightedRows.of(U, h, cross, others, data.min_count)
    elif alone is None or shown is None or lengths is None:
        raise MessageError(f"{data.name}: expected 'alone', 'shown' and 'lengths'")
    else:
        boxes = np.split(shown, np.cumsum(lengths)[:-1])
        if len(boxes) > others.shape[1]:
            h = np.where(others.sum(axis=1) == 1, float(alone), h)
        state.tell(block.weights(h, "weights"))
        rows = sealed_rows(data, state, client, WeightedRows.of(U, h, 0.0 * h, others, data.min_count), boxes)
    return sum_information(state, block, theta, rows, sums)


def sealed_rows(
    data: SiteData, state: State, client: GLMClient, rows: WeightedRows, boxes: Sequence[Array]
) -> WeightedRows:
    """Put the response holder's sums in the place of those of rows of which it keeps what they weigh.

    `boxes` have those of -L_mv by absent institution, and unless these are few those of -L_mm at entities
    that no other institution has.
    """
    mu, p = client.accepted.mu, len(client.accepted.mu)
    K, alone = rows.others.shape[1], rows.others.sum(axis=1) == 1
    sums = np.array([open_sums(state, BLOCK, box) for box in boxes[:K]])
    by_cross = np.vstack([np.zeros(p), sums[:, 1:] - sums[:, :1] * mu])
    if len(boxes) == K:
        return replace(rows, by_cross=by_cross)
    n, first, second = np.split(open_sums(state, SQUARES, boxes[K]), [1, 1 + p])
    S = np.zeros((p, p))
    S[np.triu_indices(p)] = second
    S += np.triu(S, 1).T
    U, h = client.block.X - mu, rows.h
    missed = S - np.outer(first, mu) - np.outer(mu, first) + n * np.outer(mu, mu) - gram(U, h * alone)
    of_alone = first - n * mu - column_sums(U, h * alone)
    # They are in the sum over all rows, and in that of a group where too few others are outside of it.
    kept = kept_weights(h, rows.others, data.min_count)
    whole = np.array([bool(w[alone].any()) for w in kept])[:, None]
    return replace(rows, gram=rows.gram + missed, by_h=rows.by_h + whole * of_alone, by_cross=by_cross)


def sum_information(
    state: State, client: Client, theta: Theta, rows: WeightedRows, totals: Floats
) -> dict[str, Array]:
    """Eliminate Sigma_k from the information, and stage the weighted columns for products with others.

    `totals` are four: of -L_vv and -L_v over the entities that the institution lacks, of -L_mm and L_m over
    those that it has. Returns beta, w = Sigma beta; ``gram`` sum of h uu', u = x - mu; ``own`` the diagonal
    block of (beta, mu) without it; weighted sums of u in all and by the presence (``by_v``) or absence
    (``by_z``) of every other institution; and what the elimination leaves.
    """
    n, p, scale = client.n_seen, len(theta.mu), units(client)
    check_lengths(state.site, sums=(totals, 4))
    kappa, e, h_seen, z_seen = totals
    U, w, beta = client.X - theta.mu, theta.Sigma @ theta.beta, theta.beta
    # Products of these with another institution's are the sums over common entities of h u_j u_k'.
    root = np.sqrt(rows.h)[:, None] * U * client.scale
    client.staged = {"U": U, "weights": rows.h, "others": rows.others, "root": root}
    elimination = eliminate_sigma(client, theta, float(e))
    state.keep("vfem elimination", elimination, state.entities)
    own = np.zeros((2 * p, 2 * p))
    own[:p, :p] = 4.0 * kappa * np.outer(w, w) + 2.0 * e * theta.Sigma
    # m has the product mu'beta in it: beside the second derivatives the first, z, stays.
    own[:p, p:] = z_seen * np.eye(p) - np.outer(rows.by_h[0], beta)
    own[p:, :p] = own[:p, p:].T
    own[p:, p:] = h_seen * np.outer(beta, beta) + n * np.linalg.inv(theta.Sigma)
    return {
        "beta": beta / client.scale,
        "w": w * client.scale,
        "own": own * np.outer(scale, scale),
        "gram": rows.gram * np.outer(client.scale, client.scale),
        "by_v": rows.by_h * client.scale,
        "by_z": rows.by_cross * client.scale,
        "J": elimination.lost * np.outer(scale, scale),
        "j": elimination.coupling * scale,
        "N": np.array(elimination.curvature),
    }


OTHERS = Declared("presence", "which institutions have each entity", 2, dtype="bool")
INFORMATION: Mapping[str, Declared] = {
    "beta": weighted("coefficients"),
    "w": weighted("covariance of the block with its linear predictor"),
    "own": weighted("information on the block's coefficients and means", 2),
    "gram": weighted("weighted cross-products within the block", 2),
    "by_v": weighted("weighted sums of the columns, by presence of other institutions", 2),
    "by_z": weighted("products of columns and residuals, by absence of other institutions", 2),
    "J": weighted("information lost to the block's covariance", 2),
    "j": weighted("information lost to the block's covariance"),
    "N": weighted("information lost to the block's covariance", 0),
}
STEPS: Mapping[str, Step] = {
    "information": Step(
        information,
        {
            "inverse_v": Declared(
                "control", "1/v of the institution's entities, by missing pattern", weighs="weights"
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
                "per entity",
                "curvature of the log-likelihood by the linear predictor",
                optional=True,
                weighs="weights",
            ),
            "cross": Declared(
                "per entity", "mixed derivative of the log-likelihood", optional=True, weighs="weights"
            ),
            "alone": Declared("aggregate", "mean curvature of entities that no other has", 0, optional=True),
            "shown": replace(SHOWN, optional=True),
            "lengths": Declared("control", "bytes of each round", dtype="int64", optional=True),
            "others": OTHERS,
            "sums": Declared("aggregate", "sums of derivatives of the log-likelihood"),
        },
        {
            **INFORMATION,
            "by_z": weighted("weighted sums of the columns, by absence of other institutions", 2),
        },
    ),
}
