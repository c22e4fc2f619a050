"""What one institution contributes to the covariance of the estimates.

The observed information of (a, s2, beta, mu) after elimination of Sigma_1..Sigma_K: Sigma_k enters the
likelihood of y only through t_k = beta_k'Sigma_k beta_k, so each client can eliminate its own Sigma_k, up
to a K by K system at the coordinator (see :mod:`fedstat.models.vfem.covariance_protocol`).

Everything that is released here is in the units of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh

from fedstat.errors import EstimationError
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.rows import column_sums, gram
from fedstat.kernels.sketch import SKETCHES
from fedstat.models.vfem.client import Client, Theta, client_of
from fedstat.models.vfem.response_steps import Active
from fedstat.typing import Array, Bools, Floats, Ints

SKETCH_KINDS = tuple(SKETCHES)
STAGES = ("information", "scores", "columns")


@dataclass(frozen=True, slots=True)
class Elimination:
    """The negative Hessian of the block's likelihood in Sigma_k, made diagonal.

    With Sigma = T T' and the local scatter T diag(s) T', a symmetric perturbation T D T' has the
    quadratic form ``n_k sum_ij D_ij^2 (s_i + s_j - 1) / 2``.

    Parameters
    ----------
    T : (p, p) array
    inverse : (p, p) array
        ``2 / (n_k (s_i + s_j - 1))``.
    b : (p, p) array
        T'beta beta'T, the direction in which Sigma_k enters v.
    L : (2p, p, p) array
        The coupling of Sigma_k with each of (beta_k, mu_k).
    """

    T: Floats
    inverse: Floats
    b: Floats
    L: Floats

    @property
    def lost(self) -> Floats:
        """L G^-1 L', (2p, 2p)."""
        return np.asarray(np.einsum("aij,ij,bij->ab", self.L, self.inverse, self.L, optimize=True))

    @property
    def coupling(self) -> Floats:
        """L G^-1 b, (2p,)."""
        return np.asarray(np.einsum("aij,ij,ij->a", self.L, self.inverse, self.b))

    @property
    def curvature(self) -> float:
        """B' G^-1 b."""
        return float(np.sum(self.b * self.inverse * self.b))


def local_scatter(client: Client, mu: Floats) -> tuple[Floats, Floats]:
    """Mean of (x - mu) and of (x - mu)(x - mu)' over the rows that the client has."""
    n = client.n_seen
    mean = client.s1 / n
    d = mean - mu
    return d, client.S2 / n - np.outer(mean, mean) + np.outer(d, d)


def eliminate_sigma(client: Client, theta: Theta, e: float) -> Elimination:
    """Prepare the elimination of Sigma_k; `e` is the sum of (1/v - z^2)/2 over missing entities.

    Raises
    ------
    EstimationError
        When the information on Sigma_k is not positive.
    """
    n = client.n_seen
    d, S = local_scatter(client, theta.mu)
    s, V = eigh(S, theta.Sigma)
    T = theta.Sigma @ V
    curvature = 0.5 * n * (s[:, None] + s - 1.0)
    if (np.abs(curvature) < 1e-10 * n).any():
        raise EstimationError("a block's covariance is not determined by the entities that have it")
    beta = T.T @ theta.beta
    precision_d = np.linalg.solve(theta.Sigma, d)
    along_beta = np.einsum("i,aj->aij", 2.0 * e * beta, T)
    along_mu = np.einsum("ai,j->aij", n * V, T.T @ precision_d)
    L = np.concatenate([along_beta, along_mu])
    symmetric = 0.5 * (L + L.transpose(0, 2, 1))
    return Elimination(T, 1.0 / curvature, np.outer(beta, beta), symmetric)


def units(client: Client) -> Floats:
    """Factors that take derivatives by (beta, mu) of standardised columns to the units of the data."""
    return np.concatenate([client.scale, 1.0 / client.scale])


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
    client = client_of(data, state)
    theta = client.current
    assert theta is not None
    n = client.n_seen
    check_lengths(data.name, inverse_v=(inverse_v, n), others=(others, n), sums=(sums, 4))
    p, scale = len(theta.mu), units(client)
    kappa, e, h_seen, z_seen = sums
    U, z = client.X - theta.mu, client.z
    client.staged = {"U": U, "inverse_v": inverse_v, "others": others}
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


def weighted_sums(U: Floats, weights: Floats, groups: Bools, least: int) -> Floats:
    """Return sums of w u over all rows, and over the rows of each group: (1 + K, p).

    A sum over fewer than `least` rows, or over all but so few, would disclose them: the few count as
    zero, their expectation.
    """
    total = column_sums(U, weights)
    sums = [total]
    for group in groups.T:
        size = np.count_nonzero(group)
        few, nearly_all = size < least, len(group) - size < least
        if few or nearly_all:
            sums.append(total if nearly_all and size else np.zeros_like(total))
        else:
            sums.append(column_sums(U, weights * group))
    return np.array(sums)


def scores(data: SiteData, state: State) -> dict[str, Array]:
    """Stage the client's part of every entity's effective score, and release its local products.

    Columns: beta (p), mu (p), and the projection of Sigma_k's score on its direction in v; the effect of
    estimating Sigma_k is removed. Multiplied with the response holder's -(1/v - z^2)/2 and z.

    Returns
    -------
    dict
        ``gram`` F'F, ``with_response`` F' [z, -e, -e by absent client], e = (1/v - z^2)/2.
    """
    client = client_of(data, state)
    theta, elimination = client.current, state.use("vfem elimination")
    assert theta is not None
    U, z, inverse_v = client.staged["U"], client.z, client.staged["inverse_v"]
    Y = np.linalg.solve(elimination.T, U.T).T
    alpha = quadratic(Y, elimination.b * elimination.inverse)
    lam = np.column_stack([quadratic(Y, L * elimination.inverse) for L in elimination.L])
    score = np.column_stack([U * z[:, None], np.linalg.solve(theta.Sigma, U.T).T - np.outer(z, theta.beta)])
    F = np.column_stack([(score - lam) * units(client), alpha])
    minus_e = -0.5 * (inverse_v - z * z)
    response = np.column_stack([z, minus_e, minus_e[:, None] * ~client.staged["others"]])
    client.staged["scores"] = F
    return {"gram": F.T @ F, "with_response": F.T @ response}


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
    active: Active = state.use("vfem active")
    z, inverse_v = active.z, 1.0 / active.v[active.code]
    minus_e = -0.5 * (inverse_v - z * z)
    F = np.column_stack([z, minus_e, minus_e[:, None] * missing[active.code]])
    return {"gram": F.T @ F}


def staged(data: SiteData, state: State, stage: int) -> Floats:
    """Columns that a cross-product is wanted of."""
    client = client_of(data, state)
    if STAGES[stage] == "columns":
        return client.X
    return client.staged["root" if STAGES[stage] == "information" else "scores"]


def sketch(data: SiteData, state: State, stage: Array, size: Array, kind: Array) -> dict[str, Array]:
    """Release a random projection of the staged columns, the same one at every client.

    Parameters
    ----------
    stage : int
        Which columns; see ``STAGES``.
    size : int
        Rows of the projection.
    kind : int
        Which projection; see ``SKETCH_KINDS``.

    Returns
    -------
    dict
        ``sketch`` (size, q), and ``error``, the root mean squared error of the client's own products
        by the sketch, relative to the lengths of the columns.
    """
    client, columns = client_of(data, state), staged(data, state, int(stage))
    seed = int(np.random.SeedSequence([data.common_seed, int(stage)]).generate_state(1, np.uint64)[0])
    draw = SKETCHES[SKETCH_KINDS[int(kind)]]
    projected = draw(columns, client.rows, client.n, int(size), seed)
    exact = columns.T @ columns
    length = np.sqrt(np.diag(exact))
    error = (projected.T @ projected - exact) / np.outer(length, length)
    return {"sketch": projected, "error": np.array(np.sqrt(np.mean(error**2)))}


def release_columns(data: SiteData, state: State, stage: Array) -> dict[str, Array]:
    """Release the staged columns themselves, for another client to multiply with its own."""
    return {"columns": np.ascontiguousarray(staged(data, state, int(stage)))}


def multiply_columns(
    data: SiteData, state: State, stage: Array, columns: Floats, rows: Ints
) -> dict[str, Array]:
    """Release the products of another client's columns with the staged ones.

    Parameters
    ----------
    columns : (m, q) array
        The other client's columns on its m entities.
    rows : (m,) array of int
        Positions of those entities.
    """
    client = client_of(data, state)
    check_lengths(data.name, columns=(columns, len(rows)))
    _, mine, theirs = np.intersect1d(client.rows, rows, assume_unique=True, return_indices=True)
    own = staged(data, state, int(stage))
    return {"products": columns[theirs].T @ own[mine]}


STAGE = Declared("control", "which columns", 0)
STEPS: Mapping[str, Step] = {
    "information": Step(
        information,
        {
            "inverse_v": Declared("control", "1/v of the client's entities, by missing pattern"),
            "others": Declared("presence", "which clients have each entity", 2, dtype="bool"),
            "sums": Declared("aggregate", "sums over entities of 1/v and z^2"),
        },
        {
            "beta": Declared("aggregate", "coefficients"),
            "w": Declared("aggregate", "covariance of the block with its linear predictor"),
            "own": Declared("aggregate", "information on the block's coefficients and means", 2),
            "gram": Declared("aggregate", "weighted cross-products within the block", 2),
            "by_v": Declared("aggregate", "weighted sums of the columns, by presence of other clients", 2),
            "by_z": Declared(
                "aggregate", "products of columns and residuals, by absence of other clients", 2
            ),
            "J": Declared("aggregate", "information lost to the block's covariance", 2),
            "j": Declared("aggregate", "information lost to the block's covariance"),
            "N": Declared("aggregate", "information lost to the block's covariance", 0),
        },
    ),
    "scores": Step(
        scores,
        gives={
            "gram": Declared("aggregate", "products of the scores within the block", 2),
            "with_response": Declared("aggregate", "products of the scores with those of the response", 2),
        },
    ),
    "response_products": Step(
        response_products,
        {"missing": Declared("presence", "missing patterns", 2)},
        {"gram": Declared("aggregate", "products of the scores of the response", 2)},
    ),
    "sketch": Step(
        sketch,
        {
            "stage": STAGE,
            "size": Declared("control", "rows of the sketch", 0),
            "kind": Declared("control", "kind of the sketch", 0),
        },
        {
            "sketch": Declared("sketch", "random projection of the columns", 2),
            "error": Declared("aggregate", "relative error of the sketch within the block", 0),
        },
    ),
    "release_columns": Step(
        release_columns,
        {"stage": STAGE},
        {"columns": Declared("raw columns", "the columns themselves, centred and weighted", 2)},
    ),
    "multiply_columns": Step(
        multiply_columns,
        {
            "stage": STAGE,
            "columns": Declared("raw columns", "another client's columns, centred and weighted", 2),
            "rows": Declared("presence", "positions of that client's entities", dtype="int64"),
        },
        {"products": Declared("aggregate", "cross-products of two clients' columns", 2)},
    ),
}
