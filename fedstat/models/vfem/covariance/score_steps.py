"""An institution's part of every entity's effective score, for the robust covariance.

Effective means that the estimation of Sigma_k is accounted for. The score of entity i is ``z_i C_i + V_i``,
z = L_m the derivative of the log-likelihood by the linear predictor, which stays at the response holder where
the response is not normal; C and V are of the institution's own columns and parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step
from fedstat.models.vfem.blocks.client import Client, Theta, client_of
from fedstat.models.vfem.blocks.declare import aggregate
from fedstat.models.vfem.blocks.kept import weighted_sums
from fedstat.models.vfem.blocks.response import active_of
from fedstat.models.vfem.covariance.elimination import Elimination, units
from fedstat.typing import Array, Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class ScoreParts:
    """C and V of the institution's entities, (n_k, 2p + 1): beta (p), mu (p), and Sigma_k's score along v."""

    C: Floats
    V: Floats

    @classmethod
    def of(cls, state: State, block: Client, theta: Theta) -> ScoreParts:
        """Take the scores apart, in the units of the data."""
        absent = "Sigma was not eliminated; ask 'information' first"
        elimination = state.use("vfem elimination", Elimination, absent)
        U, p, scale = block.staged["U"], len(theta.mu), units(block)
        Y = np.asarray(np.linalg.solve(elimination.T, U.T).T, dtype=np.float64)
        along = quadratic(Y, elimination.b * elimination.inverse)
        lam = np.column_stack([quadratic(Y, L * elimination.inverse) for L in elimination.L])
        C, V = np.zeros((len(U), 2 * p + 1)), np.empty((len(U), 2 * p + 1))
        C[:, : 2 * p] = np.hstack([U, np.tile(-theta.beta, (len(U), 1))]) * scale
        V[:, : 2 * p] = (np.hstack([np.zeros_like(U), np.linalg.solve(theta.Sigma, U.T).T]) - lam) * scale
        V[:, 2 * p] = along
        return cls(C, V)

    def scores(self, z: Floats) -> Floats:
        """Scores of entities with these derivatives."""
        return z[:, None] * self.C + self.V


def quadratic(Y: Floats, A: Floats) -> Floats:
    """Half of y'Ay - tr A for each row y."""
    return np.asarray(0.5 * (np.einsum("ij,ij->i", Y @ A, Y) - np.trace(A)))


def scores(data: SiteData, state: State) -> dict[str, Array]:
    """Stage the institution's part F of every entity's effective score, and release its local products.

    Released: ``gram`` F'F and ``with_response`` F'[z, -e, -e by absent institution], e = (1/v - z^2)/2.
    """
    client = client_of(state)
    F = ScoreParts.of(state, client, client.estimate).scores(client.z)
    client.staged["scores"] = F
    minus_e = -0.5 * (client.staged["weights"] - client.z**2)
    return local_products(data, client, np.column_stack([client.z, minus_e]), minus_e)


def local_products(data: SiteData, client: Client, of_response: Floats, by_v: Floats) -> dict[str, Array]:
    """Multiply the staged scores F with themselves, with the scores of (a, scale), (n_k, 2), and with L_v.

    Released: ``gram`` F'F and ``with_response`` (2p + 1, 2 + K), with L_v by absent institution.
    """
    F = client.staged["scores"]
    absent = weighted_sums(F, by_v, ~client.staged["others"], data.min_count)[1:]
    return {"gram": F.T @ F, "with_response": np.column_stack([F.T @ of_response, absent.T])}


def response_products(data: SiteData, state: State, missing: Bools) -> dict[str, Array]:
    """Products of the response holder's part of the scores; (G, K), which sites miss in each pattern."""
    active = active_of(state)
    z, inverse_v = active.z, 1.0 / active.v[active.code]
    minus_e = -0.5 * (inverse_v - z * z)
    F = np.column_stack([z, minus_e, minus_e[:, None] * missing[active.code]])
    return {"gram": F.T @ F}


LOCAL: Mapping[str, Declared] = {
    "gram": aggregate("products of the scores within the block", 2),
    "with_response": aggregate("products of the scores with those of the response", 2),
}
RESPONSE: Mapping[str, Declared] = {"gram": aggregate("products of the scores of the response", 2)}
MISSING = Declared("presence", "missing patterns", 2)
STEPS: Mapping[str, Step] = {
    "scores": Step(scores, gives=LOCAL),
    "response_products": Step(response_products, {"missing": MISSING}, RESPONSE),
}
