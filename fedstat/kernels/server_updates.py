"""What the coordinator of the FedAvg family does with the coefficients that sites return."""

from __future__ import annotations

import numpy as np

from fedstat.errors import EstimationError
from fedstat.typing import Floats, Ints


def average(betas: Floats, weights: Floats) -> Floats:
    """Average coefficients over sites (McMahan et al. 2017, Algorithm 1).

    Parameters
    ----------
    betas : (K, p) array
        Coefficients of each site.
    weights : (K,) array
        Nonnegative weights, not all zero; the numbers of rows n_k in FedAvg.

    Returns
    -------
    (p,) array
    """
    mean: Floats = (betas * (weights / weights.sum())[:, None]).sum(axis=0)
    return mean


def momentum_step(
    beta: Floats, averaged: Floats, velocity: Floats, momentum: float, learning_rate: float = 1.0
) -> tuple[Floats, Floats]:
    """Move by the averaged update and a share of the move before (FedAvgM; Hsu et al. 2019, section 4.3).

    ``v <- momentum v + (beta - averaged)``, ``beta <- beta - learning_rate v``; FedAvg has momentum 0.

    Parameters
    ----------
    beta : (p,) array
        Coefficients that the sites started from.
    averaged : (p,) array
        :func:`average` of what they returned.
    velocity : (p,) array
        v of the round before, zero in the first.
    momentum : float
        In [0, 1).
    learning_rate : float
        Of the server; 1 in Hsu et al.

    Returns
    -------
    beta, velocity : (p,) arrays
    """
    velocity = momentum * velocity + (beta - averaged)
    return beta - learning_rate * velocity, velocity


def fair_step(beta: Floats, betas: Floats, losses: Floats, q: float, L: float) -> Floats:
    """Combine coefficients with more weight on sites with a high loss (q-FedAvg).

    Li et al. 2020, "Fair resource allocation in federated learning", Algorithm 2:
    ``Dw_k = L (beta - beta_k)``, ``Delta_k = F_k^q Dw_k``,
    ``h_k = q F_k^(q-1) ||Dw_k||^2 + L F_k^q``, ``beta - sum_k Delta_k / sum_k h_k``; all divided by
    ``max_k F_k^q``, which changes nothing but keeps the powers finite.

    Parameters
    ----------
    beta : (p,) array
        Coefficients that the sites started from.
    betas : (K, p) array
        Coefficients that they returned.
    losses : (K,) array
        Their mean losses F_k at ``beta``.
    q : float
        Fairness, at least 0; 0 is the average over sites, each counted once.
    L : float
        Lipschitz constant of the gradients, positive; one over the learning rate of the sites.

    Returns
    -------
    (p,) array

    Raises
    ------
    EstimationError
        A loss is not positive, so that its powers have no meaning.
    """
    if q == 0.0:
        return average(betas, np.ones(len(betas)))
    below = int((~(losses > 0.0)).sum())
    if below:
        raise EstimationError(
            f"q-FedAvg weighs sites by powers of their mean loss, which is not positive at {below} of "
            f"{len(losses)} sites; set q = 0"
        )
    moves = L * (beta - betas)
    share = (losses / losses.max()) ** q
    h = share * (q * (moves**2).sum(axis=1) / losses + L)
    step: Floats = (share[:, None] * moves).sum(axis=0) / h.sum()
    return beta - step


def sample_clients(n_clients: int, fraction: float, rng: np.random.Generator) -> Ints:
    """Draw the clients of a round, all equally likely (McMahan et al. 2017, Algorithm 1).

    Parameters
    ----------
    n_clients : int
        How many there are, K.
    fraction : float
        Share to draw, C, in [0, 1].
    rng : numpy.random.Generator

    Returns
    -------
    (m,) array of int
        Different numbers below K in ascending order, m = max(round(C K), 1).
    """
    m = max(round(fraction * n_clients), 1)
    drawn: Ints = np.sort(rng.choice(n_clients, size=m, replace=False)).astype(np.int64)
    return drawn
