"""An institution's part of the supplemented EM algorithm.

The exact EM map is evaluated at points near the estimate, in standardised columns; nothing of the
institution's own fit changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.linalg import cho_factor

from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.rows import row_dots
from fedstat.models.vfem.blocks.client import Theta, client_of
from fedstat.models.vfem.blocks.declare import aggregate, weighted
from fedstat.models.vfem.blocks.kept import weighted_sums
from fedstat.models.vfem.iteration.m_step import m_step
from fedstat.typing import Array, Bools, Floats


def constants(data: SiteData, state: State, others: Bools) -> dict[str, Array]:
    """Release the estimates and the sums that the EM map needs once; `others` (n_k, K) have each entity.

    beta, mu, Sigma of standardised columns; ``scale``; ``s1`` sums of the columns, over all rows and over
    those that each other institution has; ``S2`` their cross-products.
    """
    client = client_of(state)
    theta = client.estimate
    check_lengths(data.name, others=(others, client.n_seen))
    client.staged["others"] = others
    sums = weighted_sums(client.X, np.ones(client.n_seen), others, data.min_count)
    return {
        "beta": theta.beta,
        "mu": theta.mu,
        "Sigma": theta.Sigma,
        "scale": client.scale,
        "s1": sums,
        "S2": client.S2,
    }


def predictor(data: SiteData, state: State, beta: Floats, mu: Floats) -> dict[str, Array]:
    """Centred linear predictor at another point."""
    client = client_of(state)
    check_lengths(data.name, beta=(beta, len(client.scale)), mu=(mu, len(client.scale)))
    return {"linear_predictor": client.pad(row_dots(client.X, beta) - float(mu @ beta))}


def em_sums(
    data: SiteData,
    state: State,
    z: Floats,
    missing: Floats,
    s2: Array,
    beta: Floats,
    mu: Floats,
    Sigma: Floats,
) -> dict[str, Array]:
    """Local part of the exact M-step at another point.

    Released: ``gradient`` of s2 Q by beta; ``mu`` and ``Sigma``, TWFL (6); ``u_z``, sums of (x - mu) z over
    the entities that each other institution lacks, (K, p).
    """
    client = client_of(state)
    p = len(client.scale)
    check_lengths(data.name, z=(z, client.n_seen), missing=(missing, 3), beta=(beta, p), mu=(mu, p))
    state.tell(client.weights(z, "residuals"))
    theta = Theta(beta, mu, Sigma)
    factor = cho_factor(Sigma, lower=True)
    image, direction, _ = m_step(client, theta, factor, z, missing, float(s2))
    u_z = weighted_sums(client.X - mu, z, ~client.staged["others"], data.min_count)[1:]
    # The coordinator solves for beta at all institutions at once, from the gradients behind their directions.
    gradient = client.n * image.Sigma @ direction if not client.eta else direction * client.n / client.eta
    return {"gradient": gradient, "mu": image.mu, "Sigma": image.Sigma, "u_z": u_z}


STEPS: Mapping[str, Step] = {
    "sem_constants": Step(
        constants,
        {"others": Declared("presence", "which institutions have each entity", 2, dtype="bool")},
        {
            "beta": aggregate("coefficients of standardised columns"),
            "mu": aggregate("means of standardised columns"),
            "Sigma": aggregate("covariance of standardised columns", 2),
            "scale": aggregate("standard deviations of the columns"),
            "s1": aggregate("sums of the columns, by presence of other institutions", 2),
            "S2": aggregate("cross-products within the block", 2),
        },
    ),
    "sem_predictor": Step(
        predictor,
        {
            "beta": Declared("aggregate", "coefficients near the estimate"),
            "mu": Declared("aggregate", "means near the estimate"),
        },
        {
            "linear_predictor": Declared(
                "per entity", "linear predictor x'beta of the institution's block", maskable=True
            )
        },
    ),
    "sem_sums": Step(
        em_sums,
        {
            "z": Declared("per entity", "standardised residual of the response", weighs="residuals"),
            "missing": Declared("aggregate", "sums of z, z^2 and 1/v over entities the institution lacks"),
            "s2": Declared("aggregate", "residual variance", 0),
            "beta": Declared("aggregate", "coefficients near the estimate"),
            "mu": Declared("aggregate", "means near the estimate"),
            "Sigma": Declared("aggregate", "covariance near the estimate", 2),
        },
        {
            "gradient": weighted("gradient by the coefficients"),
            "mu": weighted("means after the M-step"),
            "Sigma": weighted("covariance after the M-step", 2),
            "u_z": weighted("products of columns and residuals, by absence of other institutions", 2),
        },
    ),
}
