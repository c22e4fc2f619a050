"""The elimination of a block's covariance from the information at its institution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh

from fedstat.errors import EstimationError
from fedstat.models.vfem.blocks.client import Client, Theta
from fedstat.typing import Floats

FLAT = 1e-10
"""Curvature per entity in a direction of Sigma_k, in units of the estimate, below which it counts as none."""


@dataclass(frozen=True, slots=True)
class Elimination:
    """The negative Hessian of the block's likelihood in Sigma_k, made diagonal.

    With Sigma = T T' and the local scatter T diag(s) T', a symmetric perturbation T D T' has the quadratic
    form ``n_k sum_ij D_ij^2 (s_i + s_j - 1) / 2``; `inverse` (p, p) is ``2 / (n_k (s_i + s_j - 1))``,
    `b` (p, p) = T'beta beta'T the direction in which Sigma_k enters v, and `L` (2p, p, p) the coupling of
    Sigma_k with each of (beta_k, mu_k).
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
    """Mean of (x - mu) and of (x - mu)(x - mu)' over the rows that the institution has."""
    n = client.n_seen
    mean = client.s1 / n
    d = mean - mu
    return d, client.S2 / n - np.outer(mean, mean) + np.outer(d, d)


def eliminate_sigma(client: Client, theta: Theta, e: float) -> Elimination:
    """Prepare the elimination of Sigma_k; `e` is the sum of (1/v - z^2)/2 over missing entities.

    Raises EstimationError when the information on Sigma_k is not positive.
    """
    n = client.n_seen
    d, S = local_scatter(client, theta.mu)
    s, V = eigh(S, theta.Sigma)
    T = theta.Sigma @ V
    curvature = 0.5 * n * (s[:, None] + s - 1.0)
    if (np.abs(curvature) < FLAT * n).any():
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
