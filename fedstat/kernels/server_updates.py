"""Updates of the FedAvg family: a site's part of a round, and the coordinator's move from their sums."""

from __future__ import annotations

import numpy as np

from fedstat.errors import EstimationError
from fedstat.typing import Floats, Ints


def momentum_step(
    beta: Floats, averaged: Floats, velocity: Floats, momentum: float, learning_rate: float = 1.0
) -> tuple[Floats, Floats]:
    """Move by the averaged update and a share of the move before (FedAvgM; Hsu et al. 2019, section 4.3).

    ``v <- momentum v + (beta - averaged)``, ``beta <- beta - learning_rate v``; returns both, (p,) each.
    `averaged` is the mean of what the sites reached from beta, weighted by rows, v zero before the first
    round, momentum in [0, 1) (FedAvg has 0), the server's learning rate 1 in Hsu et al.
    """
    velocity = momentum * velocity + (beta - averaged)
    return beta - learning_rate * velocity, velocity


def fair_part(
    beta: Floats, reached: Floats, loss: float, q: float, L: float, reference: float = 1.0
) -> tuple[Floats, float]:
    """One site's part (Delta (p,), h) of a step with more weight on sites with a high loss (q-FedAvg).

    Li et al. 2020, "Fair resource allocation in federated learning", Algorithm 2: ``Dw_k = L (beta -
    beta_k)``, ``Delta_k = F_k^q Dw_k``, ``h_k = q F_k^(q-1) ||Dw_k||^2 + L F_k^q``; the coordinator moves to
    ``beta - sum_k Delta_k / sum_k h_k``. Both are divided by the q-th power of `reference`, a positive loss
    that all sites are told, which changes nothing but keeps them finite.

    `loss` is F_k at beta, q at least 0 (the average over sites, each counted once), L one over the learning
    rate of the sites. An EstimationError where the loss is not positive, so that its powers have no meaning.
    """
    move: Floats = L * (beta - reached)
    # The average over sites: no power of the loss, which may then be zero.
    if q == 0.0:
        return move, L
    if not loss > 0.0:
        raise EstimationError(
            "q-FedAvg weighs sites by powers of their mean loss, which is not positive; set q = 0"
        )
    share = (loss / reference) ** q
    return share * move, share * (q * float(move @ move) / loss + L)


def count_drawn(n_clients: int, fraction: float) -> int:
    """Clients of a round, max(round(C K), 1)."""
    return max(round(fraction * n_clients), 1)


def sample_clients(n_clients: int, fraction: float, rng: np.random.Generator) -> Ints:
    """Draw ``m = max(round(C K), 1)`` of K institutions, equally likely, ascending (McMahan et al. 2017)."""
    m = count_drawn(n_clients, fraction)
    drawn: Ints = np.sort(rng.choice(n_clients, size=m, replace=False)).astype(np.int64)
    return drawn
