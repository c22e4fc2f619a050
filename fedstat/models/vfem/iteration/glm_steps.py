"""Steps of an institution in the iterations of VFEM where the response is not normal.

The linear predictor of entity i given what is seen of it is normal with mean and variance

    m_i = b + sum_{k seen} x_i^k' beta_k + sum_{k missing} mu_k' beta_k,
    v_i = sum_{k missing} beta_k' Sigma_k beta_k.

The response holder turns m_i and v_i into the likelihood and its derivatives L_m and L_v; the score of
(beta_k, mu_k, Sigma_k) is a sum over the institution's own rows, of which it learns no more than that sum.
Columns are standardised at their institution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.errors import MessageError
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths, check_room
from fedstat.federation.rounds.product_steps import check_positions
from fedstat.federation.rounds.running_steps import SHOWN, open_sums, running_steps
from fedstat.kernels.glm.quadrature import BY_M
from fedstat.kernels.rows import column_sums, row_dots
from fedstat.models.vfem.blocks.client import ITEM, MOST_STEPS_KEPT, OPENING, Client, Theta, stage_client
from fedstat.models.vfem.blocks.declare import aggregate
from fedstat.models.vfem.blocks.request import BLOCK, SQUARES
from fedstat.models.vfem.iteration.glm_response_steps import glm_response_of, rows_of_numbers
from fedstat.models.vfem.iteration.m_step import block_log_likelihood
from fedstat.models.vfem.iteration.quasi_newton import Memory, Weights
from fedstat.typing import Array, Bools, Floats, Ints

NOT_STARTED = "this fit was not started here; ask 'glm_start' first"
RIDGE = 1e-10
"""Where fitted means run off to 0 and 1 no curvature is left, and the step must stay finite."""


@dataclass(slots=True)
class GLMClient:
    """One institution's block during a fit, and its part of the quasi-Newton method.

    `memory` has its latest steps in (beta, mu, Sigma), written out as one vector; `trial` is the point that
    was asked about last; `inverses` (p, p) are those of the local information on beta, without terms of mean
    zero, and on mu.
    """

    block: Client
    memory: Memory
    trial: Theta
    inverses: tuple[Floats, Floats] | None = None
    scored: int = 0

    @property
    def accepted(self) -> Theta:
        """The point at which the score was taken last."""
        return unpack(self.memory.point, len(self.trial.mu))

    def scale_scores(self, scores: Floats) -> Floats:
        """Multiply scores, (r, d), by the inverse of the block-diagonal local information."""
        theta, p = self.accepted, len(self.trial.mu)
        assert self.inverses is not None
        of_beta, of_mu = self.inverses
        by_beta, by_mu = scores[:, :p] @ of_beta, scores[:, p : 2 * p] @ of_mu
        by_Sigma = theta.Sigma @ scores[:, 2 * p :].reshape(-1, p, p) @ theta.Sigma
        return np.hstack([by_beta, by_mu, 2.0 / self.block.n_seen * by_Sigma.reshape(len(scores), -1)])


def pack(theta: Theta) -> Floats:
    """Write (beta, mu, Sigma) as one vector."""
    return np.concatenate([theta.beta, theta.mu, theta.Sigma.ravel()])


def unpack(vector: Floats, p: int) -> Theta:
    """Read what :func:`pack` wrote; Sigma stays symmetric to the bit."""
    Sigma = vector[2 * p :].reshape(p, p)
    return Theta(vector[:p], vector[p : 2 * p], 0.5 * (Sigma + Sigma.T))


def glm_client(state: State) -> GLMClient:
    """Return this fit's institution, or say that the fit was not started here."""
    client = state.use(ITEM, GLMClient, NOT_STARTED)
    if not isinstance(client, GLMClient):  # a fit by another algorithm was
        raise MessageError(f"{state.site}: {NOT_STARTED}")
    return client


def glm_start(
    data: SiteData, state: State, keep: Bools, rows: Ints, n: Array, filled: Array, memory: Array
) -> dict[str, Array]:
    """Standardise the block (see :func:`stage_client`), and begin at coefficients of zero; nothing leaves."""
    if not 1 <= int(memory) <= MOST_STEPS_KEPT:
        raise MessageError(f"{data.name}: expected 1 to {MOST_STEPS_KEPT} steps to remember")
    block = stage_client(data, state, keep, rows, int(n), bool(filled), memory=0)
    check_room(data.name, int(n), block.X.size)
    block.padded = True
    first = block.first_point()
    state.keep(ITEM, GLMClient(block, Memory(int(memory), pack(first)), first), len(rows))
    return {}


def glm_score(
    data: SiteData,
    state: State,
    missing: Floats,
    h: Array,
    shown: Array | None = None,
    z: Floats | None = None,
) -> dict[str, Array]:
    """Accept the latest point, and release products of the local score and of the latest steps.

    `missing` (4,) are the sums of L_m, L_v, -L_mm and L_v^2 over entities that the institution lacks, `h`
    that of -L_mm over those that it has. Of L_m at these it learns the sums with its columns, which `shown`
    brings; where nobody can deal, z (n_k,) is L_m itself, and the response holder has it. Released: ``sy``
    S'[Y, g] and ``yhy`` [Y, g]'H[Y, g]; see :class:`~fedstat.models.vfem.iteration.quasi_newton.Memory`.
    """
    client = glm_client(state)
    block = client.block
    check_lengths(data.name, missing=(missing, 4))
    if shown is not None:
        by_beta = open_sums(state, BLOCK, shown)[1:]
    else:
        z = glm_response_of(state).terms[BY_M][block.rows] if z is None else z
        check_lengths(data.name, z=(z, block.n_seen))
        state.tell(block.weights(z, "residuals"))
        by_beta = column_sums(block.X, z)
    theta = client.trial
    client.inverses = local_inverses(block, theta, float(h), missing)
    client.memory.take(pack(theta), local_score(block, theta, by_beta, missing))
    sy, yhy = client.memory.products(client.scale_scores)
    return {"sy": sy, "yhy": yhy}


def local_inverses(block: Client, theta: Theta, h: float, missing: Floats) -> tuple[Floats, Floats]:
    """Inverse local information on beta and on mu, with the mean weight for every row; see :func:`glm_score`.

    Whatever stands here shapes the way and not its end; the weights of single rows tell of their response.
    """
    w, (h_mis, squares) = theta.Sigma @ theta.beta, missing[2:]
    # Without terms of mean zero it is a sum of squares, and no direction can point downhill.
    P = max(h, 0.0) / block.n_seen * block.S2 + h_mis * np.outer(theta.mu, theta.mu)
    P += 4.0 * squares * np.outer(w, w)
    P += RIDGE * np.trace(P) / len(w) * np.eye(len(w))
    M = block.n_seen * np.linalg.inv(theta.Sigma) + h_mis * np.outer(theta.beta, theta.beta)
    return np.linalg.inv(P), np.linalg.inv(M)


def local_score(block: Client, theta: Theta, by_beta: Floats, missing: Floats) -> Floats:
    """Score of (beta, mu, Sigma) of standardised columns, from the columns' sums with L_m (p,)."""
    beta, mu, Sigma, n = theta.beta, theta.mu, theta.Sigma, block.n_seen
    z_mis, lv_mis = missing[:2]
    factor = cho_factor(Sigma, lower=True)
    scatter = block.S2 - np.outer(block.s1, mu) - np.outer(mu, block.s1) + n * np.outer(mu, mu)
    by_beta = by_beta + mu * z_mis + 2.0 * lv_mis * (Sigma @ beta)
    by_mu = z_mis * beta + cho_solve(factor, block.s1 - n * mu)
    by_Sigma = 0.5 * cho_solve(factor, cho_solve(factor, scatter - n * Sigma).T)
    # Rounding must not take Sigma out of the symmetric matrices over many steps.
    by_Sigma = 0.5 * (by_Sigma + by_Sigma.T) + lv_mis * np.outer(beta, beta)
    return np.concatenate([by_beta, by_mu, by_Sigma.ravel()])


def glm_move(
    data: SiteData, state: State, of_steps: Floats, of_scores: Floats, length: Array
) -> dict[str, Array]:
    """Go along a direction from the accepted point, and release the linear predictor there.

    `of_steps` (q,) and `of_scores` (q + 1,) are the coefficients of the direction; a length of 0 stays.
    Released: ``inside``, which is 0, and nothing else comes, when Sigma has left the positive cone; the
    linear predictor of all n entities, zero where the institution lacks them; ``centre`` mu'beta and
    ``spread`` beta'Sigma beta; the log-likelihood of the block less its maximum; the largest change.
    """
    client = glm_client(state)
    kept, p = len(client.memory.steps), len(client.trial.mu)
    check_lengths(data.name, of_steps=(of_steps, kept), of_scores=(of_scores, kept + 1))
    # A length of zero must give the accepted point to the bit.
    move = np.zeros_like(client.memory.point)
    if length != 0.0:
        weights = Weights(of_steps, of_scores)
        move = float(length) * client.memory.direction(weights, client.scale_scores)
    theta = unpack(client.memory.point + move, p)
    try:
        factor = cho_factor(theta.Sigma, lower=True)
    except np.linalg.LinAlgError:
        return {"inside": np.array(0)}
    client.trial = theta
    return {
        "inside": np.array(1),
        "linear_predictor": client.block.pad(row_dots(client.block.X, theta.beta)),
        "centre": np.array(theta.mu @ theta.beta),
        "spread": np.array(theta.beta @ theta.Sigma @ theta.beta),
        "log_likelihood": np.array(block_log_likelihood(client.block, theta, factor)),
        "change": np.array(np.abs(move).max()),
    }


def glm_estimates(data: SiteData, state: State) -> dict[str, Array]:
    """Release the estimates of the accepted point, in the units of the data."""
    client = glm_client(state)
    block, theta = client.block, client.accepted
    beta = theta.beta / block.scale
    return {
        "beta": beta,
        "mu": block.shift + block.scale * theta.mu,
        "shift": np.array(block.shift @ beta),
        "t": np.array(theta.beta @ theta.Sigma @ theta.beta),
    }


def columns_opened(data: SiteData, state: State, which: str, only: Ints) -> tuple[Floats, Ints]:
    """Columns of some entities that are opened for sums: ones and the block, and squares and products.

    With their rows of the table. What follows a blank in the name tells openings apart.
    """
    block = glm_client(state).block
    X = block.X
    check_positions(data.name, only, len(X))
    X = X[only]
    parts = [np.ones((len(X), 1)), X]
    kind = which.partition(" ")[0]
    if kind == SQUARES:
        i, j = np.triu_indices(X.shape[1])
        parts.append(X[:, i] * X[:, j])
    elif kind != BLOCK:
        raise MessageError(f"{data.name}: has no columns '{which}' to open")
    return np.hstack(parts), block.table_rows[only]


def _inner(what: str) -> Declared:
    return Declared("control", what, 2, maskable=True)


STEPS: Mapping[str, Step] = {
    **running_steps(columns_opened, rows_of_numbers),
    "glm_start": Step(glm_start, {**OPENING, "memory": Declared("control", "steps that are remembered", 0)}),
    "glm_score": Step(
        glm_score,
        {
            "missing": Declared("aggregate", "sums of derivatives over entities that the institution lacks"),
            "h": Declared("aggregate", "sum of curvatures over those that it has", 0),
            "shown": replace(SHOWN, optional=True),
            "z": Declared(
                "per entity",
                "derivative of the log-likelihood by the linear predictor",
                optional=True,
                weighs="residuals",
            ),
        },
        {"sy": _inner("inner products of steps and scores"), "yhy": _inner("inner products of scores")},
    ),
    "glm_move": Step(
        glm_move,
        {
            "of_steps": Declared("control", "coefficients of a direction"),
            "of_scores": Declared("control", "coefficients of a direction"),
            "length": Declared("control", "step length", 0),
        },
        {
            "inside": Declared("control", "whether the point is admissible", 0),
            "linear_predictor": Declared(
                "per entity",
                "linear predictor x'beta of the institution's block",
                maskable=True,
                optional=True,
            ),
            "centre": Declared("control", "product mu'beta", 0, optional=True),
            "spread": Declared("control", "product beta'Sigma beta", 0, optional=True),
            "log_likelihood": Declared("control", "log-likelihood", 0, maskable=True, optional=True),
            "change": Declared("control", "largest change of a parameter", 0, optional=True),
        },
    ),
    "glm_estimates": Step(
        glm_estimates,
        gives={
            "beta": aggregate("coefficients"),
            "mu": aggregate("means"),
            "shift": aggregate("product of the columns' means and the coefficients", 0),
            "t": aggregate("variance of the block's linear predictor", 0),
        },
    ),
}
