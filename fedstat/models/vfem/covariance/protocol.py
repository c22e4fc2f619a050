"""The covariance of the estimates from the observed information, as a protocol: who is asked what.

One round for the institutions' sums (before it, where the response is not normal, one for the response
holder's curvatures), cross-products between institutions, and for the robust covariance products of the
scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.covariance import delta_method, invert_information, nearest_psd
from fedstat.models.vfem.blocks.request import BLOCK, SQUARES
from fedstat.models.vfem.covariance.glm_scores import glm_score_products
from fedstat.models.vfem.covariance.information import (
    Eliminated,
    InformationSums,
    PatternCurvatures,
    ScaleSums,
    assemble,
    effective_score_map,
    eliminate,
    hessian,
    joint_covariance,
    project,
)
from fedstat.models.vfem.covariance.psi import Covariance, psi_names
from fedstat.models.vfem.iteration.glm_protocol import QuasiNewtonIteration, split
from fedstat.models.vfem.iteration.protocol import EMIteration
from fedstat.models.vfem.iteration.state import Iteration
from fedstat.models.vfem.moments.cross_products import (
    CrossOptions,
    CrossProducts,
    StagedColumns,
    cross_products,
)
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True)
class CovarianceOptions:
    """Which covariance is wanted, of columns with which names, and where cross-products come from."""

    cov_type: str
    names: Mapping[str, tuple[str, ...]]
    cross: CrossOptions


def ask_information(
    iteration: Iteration, step: str, curvatures: PatternCurvatures, weights: Mapping[str, Mapping[str, Any]]
) -> Rounds[InformationSums]:
    """Ask every institution for its sums, given what tells it of the weights of its entities."""
    lay, seen, asks = iteration.layout, ~iteration.layout.missing, []
    for j, k in enumerate(lay.clients):
        rows, mis, has = lay.rows[k], lay.missing[:, j], seen[:, j]
        totals = [mis @ curvatures.kappa, mis @ curvatures.e, has @ curvatures.h, has @ curvatures.z]
        own = dict(weights.get(k, {}))
        asks.append(iteration.ask(k, step, **own, others=seen[lay.code[rows]], sums=totals))
    replies = yield asks
    return InformationSums(lay, curvatures, [reply.arrays for reply in replies])


def eliminate_sigmas(
    iteration: Iteration, sums: InformationSums, options: CovarianceOptions
) -> Rounds[tuple[Eliminated, CrossProducts, float]]:
    """Obtain the cross-products, and assemble the information; returned with them, and how far they moved."""
    grams = [part["gram"] for part in sums.parts]
    wanted = StagedColumns("information", tuple(len(gram) for gram in grams))
    products = yield from cross_products(iteration.layout, iteration.session, wanted, options.cross)
    blocks, moved = project(grams, products)
    return eliminate(sums, hessian(sums, blocks)), products, moved


def information_covariance(iteration: EMIteration, options: CovarianceOptions) -> Rounds[Covariance]:
    """Invert the observed information, or with ``options.cross.how = "none"`` its "expected" form.

    Robust: with the products of the scores between two such inverses.
    """
    lay, at = iteration.layout, iteration.latest
    curvatures = PatternCurvatures.of_normal(lay.counts, at.v, at.z1, at.z2)
    inverse_v = 1.0 / at.v[lay.code]
    weights = {k: {"inverse_v": inverse_v[lay.rows[k]]} for k in lay.clients}
    sums = yield from ask_information(iteration, "information", curvatures, weights)
    eliminated, products, moved = yield from eliminate_sigmas(iteration, sums, options)
    cov = invert_information(eliminated.information, psi_names(lay.clients, options.names))
    if options.cov_type == "robust":
        meat = yield from score_products(iteration, options.cross, sums, eliminated)
        cov = cov @ meat @ cov
    return Covariance.of(cov, products, moved)


def glm_covariance(iteration: QuasiNewtonIteration, options: CovarianceOptions) -> Rounds[Covariance]:
    """Invert the observed information of (a, beta, mu, Sigma) at the accepted point, and of log alpha.

    Robust: with the products of the scores between two such inverses. Returns that of
    (a, 0 or log alpha, beta_1, mu_1, ..., beta_K, mu_K, t_1, ..., t_K).
    """
    sums = yield from (ask_sealed if iteration.dealers is not None else ask_openly)(iteration)
    if iteration.estimates_alpha:
        scale = yield from ask_scale(iteration)
        sums = replace(sums, scale=scale)
    eliminated, products, moved = yield from eliminate_sigmas(iteration, sums, options)
    meat = None
    if options.cov_type == "robust":
        meat = yield from glm_score_products(iteration, options.cross, sums, eliminated)
    joint = joint_covariance(sums, eliminated, psi_names(iteration.layout.clients, options.names), meat)
    return Covariance.of(joint, products, moved)


def ask_scale(iteration: QuasiNewtonIteration) -> Rounds[ScaleSums]:
    """Ask for the information on log alpha, and on it and the other parameters."""
    lay, remote = iteration.layout, list(iteration.dealers or ())
    ask = partial(iteration.ask, lay.active, "glm_scale_curvature", json.dumps(remote))
    (reply,) = yield [ask(patterns=len(lay.counts))]
    arrays, told = reply.arrays, dict[str, dict[str, Any]]()
    if remote:
        told = {k: {"shown": box} for k, box in zip(remote, split(arrays), strict=True)}
    else:
        told = {k: {"cross": arrays["cross"][lay.rows[k]]} for k in lay.clients if k != lay.active}
    replies = yield [iteration.ask(k, "glm_scale_information", **told.get(k, {})) for k in lay.clients]
    m, v, r = arrays["sums"].T
    return ScaleSums(m, v, r, [reply.arrays["by_scale"] for reply in replies])


def ask_openly(iteration: QuasiNewtonIteration) -> Rounds[InformationSums]:
    """Send the curvatures of every entity, where nobody can deal for sums with them."""
    lay = iteration.layout
    (reply,) = yield [iteration.ask(lay.active, "glm_curvature_openly", patterns=len(lay.counts))]
    curvatures = PatternCurvatures(*reply.arrays["sums"].T)
    weights = {name: reply.arrays[name] for name in ("h", "cross")}
    own = {k: {name: w[lay.rows[k]] for name, w in weights.items()} for k in lay.clients if k != lay.active}
    return (yield from ask_information(iteration, "glm_information", curvatures, own))


def ask_sealed(iteration: QuasiNewtonIteration) -> Rounds[InformationSums]:
    """Seal sums with the curvatures, and send those of entities that two institutions or more have.

    They are sent as well where an institution alone has so few entities that sums over these would tell as
    much.
    """
    lay, remote = iteration.layout, list(iteration.dealers or ())
    squares = [one.site for one in iteration.openings if one.columns == SQUARES]
    text, alone = json.dumps({BLOCK: remote, SQUARES: squares}), {k: iteration.alone(k) for k in remote}
    each = ~np.any([alone[k] for k in squares], axis=0) if squares else np.ones(len(lay.counts), dtype=bool)
    (reply,) = yield [iteration.ask(lay.active, "glm_curvature", text, missing=lay.missing, each=each)]
    arrays = reply.arrays
    curvatures = PatternCurvatures(*arrays["sums"].T)
    boxes, own = iter(split(arrays)), dict[str, dict[str, Any]]()
    for k in remote:
        shown = [next(boxes) for _ in range(len(lay.clients) + (k in squares))]
        own[k] = {
            "h": arrays["h"][lay.rows[k]],
            "alone": float(alone[k] @ curvatures.h) / max(float(alone[k] @ lay.counts), 1.0),
            "shown": np.concatenate(shown),
            "lengths": np.array([len(one) for one in shown]),
        }
    return (yield from ask_information(iteration, "glm_information", curvatures, own))


def score_products(
    iteration: EMIteration, options: CrossOptions, sums: InformationSums, eliminated: Eliminated
) -> Rounds[Floats]:
    """Sum over entities of the products of the effective scores of psi."""
    lay = iteration.layout
    *clients, response = yield [
        *[iteration.ask(k, "scores") for k in lay.clients],
        iteration.ask(lay.active, "response_products", missing=lay.missing),
    ]
    within = [reply.arrays["gram"] for reply in clients]
    wanted = StagedColumns("scores", tuple(len(gram) for gram in within))
    products = yield from cross_products(lay, iteration.session, wanted, options)
    # The response holder stands last, as an institution whose products with all others are known exactly.
    last = {(k, len(clients)): reply.arrays["with_response"] for k, reply in enumerate(clients)}
    whole = assemble([*within, response.arrays["gram"]], {**products.blocks, **last})
    return delta_method(nearest_psd(whole)[0], effective_score_map(sums, eliminated.Q))
