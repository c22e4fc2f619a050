"""Covariance of the estimates of VFEM where the response is not normal, from the observed information.

The likelihood of y depends on an entity through the mean m_i and variance v_i of its linear predictor, as
with normal errors, where L(m, v) is the normal density. The information is therefore that of
:mod:`fedstat.models.vfem.covariance.protocol` with its weights 1/v, z/v, ... replaced by -L_mm, -L_mv,
-L_vv and -L_v of every entity, without the residual variance. The variances t_k of the linear predictors
come along, since predicted means depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.covariance import invert_information
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.covariance.protocol import (
    Covariance,
    Eliminated,
    Places,
    eliminate,
    hessian,
    project,
    psi_names,
)
from fedstat.models.vfem.iteration.glm_protocol import QuasiNewtonIteration
from fedstat.models.vfem.moments.cross_products import CrossOptions, StagedColumns, cross_products
from fedstat.typing import Array, Floats

SCALE = 1
"""Place of the residual variance, which these families do not have."""


@dataclass(frozen=True, slots=True)
class PatternCurvatures:
    """Second derivatives of the log-likelihood summed by missing pattern, each (G,): -L_mm, -L_mv, -L_vv."""

    h: Floats
    z_v: Floats
    kappa: Floats


def information_round(
    iteration: QuasiNewtonIteration,
) -> Rounds[tuple[PatternCurvatures, list[Mapping[str, Array]]]]:
    """Ask the response holder for curvatures, and every client for its local sums at the accepted point."""
    lay, session = iteration.layout, iteration.session
    (reply,) = yield [ask(lay.active, "glm_curvature", session, patterns=len(lay.counts))]
    h, cross, sums = (reply.arrays[name] for name in ("h", "cross", "sums"))
    of_h, of_cross, of_vv, of_v, of_m = sums.T
    seen, asks = ~lay.missing, []
    for j, k in enumerate(lay.clients):
        rows, mis, has = lay.rows[k], lay.missing[:, j], seen[:, j]
        totals = np.array([mis @ of_vv, mis @ of_v, has @ of_h, has @ of_m])
        others = seen[lay.code[rows]]
        asks.append(
            ask(k, "glm_information", session, h=h[rows], cross=cross[rows], others=others, sums=totals)
        )
    replies = yield asks
    return PatternCurvatures(of_h, of_cross, of_vv), [reply.arrays for reply in replies]


def glm_covariance(
    iteration: QuasiNewtonIteration, options: CrossOptions, names: Mapping[str, tuple[str, ...]]
) -> Rounds[Covariance]:
    """Invert the observed information of all parameters.

    Parameters
    ----------
    iteration : QuasiNewtonIteration
        After it has ended.
    options : CrossOptions
        Where cross-products between clients come from.
    names : mapping of str to tuple of str
        Column names by client.

    Returns
    -------
    Covariance
        Its `psi` is that of (a, 0, beta_1, mu_1, ..., beta_K, mu_K, t_1, ..., t_K).
    """
    lay = iteration.layout
    sums, parts = yield from information_round(iteration)
    wanted = StagedColumns("information", tuple(len(part["gram"]) for part in parts))
    products = yield from cross_products(lay, iteration.session, wanted, options)
    blocks, moved = project(parts, products)
    eliminated = eliminate(lay, sums, parts, hessian(lay, sums, parts, blocks))
    every = [name for at, name in enumerate(psi_names(lay, names)) if at != SCALE]
    return Covariance.of(joint_covariance(eliminated, parts, every), products, moved)


def joint_covariance(eliminated: Eliminated, parts: list[Mapping[str, Array]], names: list[str]) -> Floats:
    """Covariance of (psi, t); t_k = beta'Sigma beta moves by 2 w'd beta + beta'd Sigma beta."""
    places, K = Places(tuple(len(part["beta"]) for part in parts)), len(parts)
    d = places.total
    rest = np.delete(np.arange(d), SCALE)
    joint = np.zeros((d + K, d + K))
    V = np.zeros((d, d))
    try:
        V[np.ix_(rest, rest)] = invert_information(eliminated.information[np.ix_(rest, rest)], names)
    except EstimationError as error:
        raise EstimationError(
            f"{error} Columns that separate the response leave no information, too."
        ) from error
    slope = eliminated.slope.copy()
    slope[SCALE] = 0.0
    along = -slope
    for k, part in enumerate(parts):
        along[places.beta(k), k] += 2.0 * part["w"]
    joint[:d, :d], joint[:d, d:] = V, V @ along
    joint[d:, :d] = joint[:d, d:].T
    joint[d:, d:] = along.T @ V @ along + eliminated.rest
    return joint
