"""The protocol for the covariance of the estimates, from observed information and scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.secure_products import ProductOperand
from fedstat.federation.tables.supports import PER_COLUMN
from fedstat.inference.covariance import delta_method, invert_information, nearest_psd
from fedstat.models.vertical.exchange.protocol import dealing_sites
from fedstat.models.vertical.joint_normal.fit import OBSERVED
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.pattern_merging import min_entities
from fedstat.models.vfem.covariance.cross_products import (
    CrossProductOptions,
    CrossProducts,
    ProductRequest,
    cross_products,
    product_session,
)
from fedstat.models.vfem.covariance.information import (
    InformationSums,
    PatternCurvatures,
    ProfiledInformation,
    PsiCovariance,
    ScaleSums,
    assemble_information,
    effective_score_map,
    hessian,
    profile_out_sigma,
    project,
    psi_covariance,
    psi_names,
    score_of_spreads,
)
from fedstat.models.vfem.covariance.score_steps import (
    PARTS,
    RESPONSE_OF_SCORES,
    RESPONSE_OF_SQUARES,
    SCORE_SQUARES,
    SHARE_FACTORS,
    SHARED,
    TIMES,
)
from fedstat.models.vfem.iteration.glm_protocol import QuasiNewtonIteration, split_by_site
from fedstat.models.vfem.iteration.protocol import EMIteration
from fedstat.models.vfem.iteration.state import BLOCK, SQUARES, IterationState
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Products of effective scores if the response is not normal, as a protocol.
#
# If a fit sends columns openly, or no third party can deal, sites receive derivatives of the log-likelihood.
# Otherwise these stay at the response holder, and all products are secure
# (:mod:`fedstat.models.vfem.covariance.score_steps`).

STACKED = max(TIMES.values())


def glm_score_products(
    iteration: QuasiNewtonIteration,
    options: CrossProductOptions,
    sums: InformationSums,
    eliminated: ProfiledInformation,
) -> FitProtocol[Floats]:
    """Sum over entities of the products of the effective scores of psi, and of the t_k given psi."""
    openly = iteration.dealers is None or options.how == "exact"
    complete = yield from (request_unmasked_scores if openly else request_secure_scores)(iteration, options)
    scores = np.vstack([effective_score_map(sums, eliminated.Q), score_of_spreads(sums, eliminated.share)])
    return delta_method(nearest_psd(complete)[0], scores)


def request_unmasked_scores(
    iteration: QuasiNewtonIteration, options: CrossProductOptions
) -> FitProtocol[Floats]:
    """Send every site the derivatives of its entities."""
    lay = iteration.layout
    (reply,) = yield [iteration.request(lay.active, "glm_derivatives_openly")]
    derivatives = reply.arrays["derivatives"]
    replies = yield [
        iteration.request(k, "glm_scores_openly")
        if k == lay.active
        else iteration.request(k, "glm_scores_openly", derivatives=derivatives[:, lay.rows[k]])
        for k in lay.sites
    ]
    own = yield from request_response_scores(iteration, [])
    within = [reply.arrays["gram"] for reply in replies]
    staged = ProductRequest("scores", tuple(len(gram) for gram in within))
    products = yield from cross_products(lay, iteration.session, staged, options)
    K = len(within)
    last = {(k, K): reply.arrays["with_response"] for k, reply in enumerate(replies)}
    return assemble_information([*within, own["gram"][: 2 + K, : 2 + K]], {**products.blocks, **last})


def request_response_scores(
    iteration: QuasiNewtonIteration, reported: Sequence[str]
) -> FitProtocol[dict[str, Floats]]:
    """Request from the response holder its own products, and what hides derivatives from some sites."""
    lay = iteration.layout
    text = json.dumps([list(lay.sites), list(reported)])
    (reply,) = yield [iteration.request(lay.active, "glm_response_scores", text, missing=lay.missing)]
    return dict(reply.arrays)


def request_secure_scores(
    iteration: QuasiNewtonIteration, options: CrossProductOptions
) -> FitProtocol[Floats]:
    """Multiply securely: no party learns more of the derivatives than sums."""
    lay, sites, active = iteration.layout, dealing_sites(iteration.layout), iteration.layout.active
    remote, K = [k for k in lay.sites if k != active], len(lay.sites)
    widths = {k: 2 * p + 1 for k, p in zip(lay.sites, lay.sizes, strict=True)}
    if remote:
        yield from agree_keys(sites, iteration.session)
    own = yield from request_response_scores(iteration, remote)
    boxes = dict(zip(remote, split_by_site(own), strict=True))
    yield [
        iteration.request(k, "glm_scores", json.dumps([active, remote[:i], k == remote[-1]]), shown=boxes[k])
        for i, k in enumerate(remote)
    ]
    q = len(own["gram"])
    pairs: list[tuple[ProductOperand, ProductOperand]] = []
    for k in remote:
        squares = widths[k] * (widths[k] + 1) // 2
        if len(lay.rows[k]) < min_entities(squares, options.min_count):
            raise EstimationError(
                f"cov_type='robust': {len(lay.rows[k])} entities of '{k}' are too few for products of the "
                f"scores of its {widths[k] // 2} columns",
                remedy=OBSERVED,
            )
        pairs.append(
            (
                score_operand(lay, active, RESPONSE_OF_SQUARES, 1),
                score_operand(lay, k, SCORE_SQUARES, squares),
            )
        )
        pairs.append(
            (
                score_operand(lay, active, f"{RESPONSE_OF_SCORES}:{k}", q),
                score_operand(lay, k, PARTS, widths[k]),
            )
        )
    together = [
        (j, k)
        for j, k in combinations(remote, 2)
        if len(np.intersect1d(lay.rows[j], lay.rows[k], assume_unique=True))
        >= min_entities(widths[j] + widths[k] - 1, options.min_count)
    ]
    for j, k in together:
        pairs.append(
            (
                score_operand(lay, j, SHARED, widths[j]),
                score_operand(lay, k, f"{SHARE_FACTORS}:{j}", widths[k]),
            )
        )
    requester = product_session(lay, iteration.session, options.at)
    found = yield from requester.multiply(pairs, sites, 1, STACKED * lay.n)
    products = [one.products[0] for one in found]
    within, between = dict[str, Floats](), dict[tuple[int, int], Floats]()
    place = {k: j for j, k in enumerate(lay.sites)}
    if active in place:
        within[active] = own["gram"][2 + K :, 2 + K :]
        between[place[active], K] = own["gram"][2 + K :, : 2 + K]
    for i, k in enumerate(remote):
        within[k] = symmetric(products[2 * i][0], widths[k])
        with_response = products[2 * i + 1].T
        between[place[k], K] = with_response[:, : 2 + K]
        if active in place:
            first, second = sorted((place[active], place[k]))
            block = with_response[:, 2 + K :]
            between[first, second] = block if first == place[k] else block.T
    for (j, k), one in zip(together, products[2 * len(remote) :], strict=True):
        between[place[j], place[k]] = one
    return assemble_information([*[within[k] for k in lay.sites], own["gram"][: 2 + K, : 2 + K]], between)


def score_operand(layout: Layout, site: str, columns: str, width: int) -> ProductOperand:
    """List the entities of stacked columns: one position for each time that an entity occurs."""
    of_response = columns.startswith((RESPONSE_OF_SCORES, RESPONSE_OF_SQUARES))
    own = np.arange(layout.n) if of_response else layout.rows[site]
    supports = layout.supports(site) + (PER_COLUMN if of_response else 0)
    times = TIMES[columns.partition(":")[0]]
    rows = np.concatenate([own + layout.n * place for place in range(times)])
    return ProductOperand(site, columns, slice(0, width), rows, np.zeros_like(rows), supports=supports)


def symmetric(upper: Floats, width: int) -> Floats:
    """Return the symmetric matrix with this upper triangle."""
    out = np.zeros((width, width))
    out[np.triu_indices(width)] = upper
    return np.asarray(out + np.triu(out, 1).T)


# ----------------------------------------------------------------------------------------------------
# The covariance of the estimates from the observed information, as a protocol.
#
# There is one round for the sites' sums (preceded by one for the response holder's curvatures if the response
# is not normal), then cross-products between sites, and for the robust covariance products of the scores.


@dataclass(frozen=True, slots=True)
class CovarianceOptions:
    """The requested covariance, the names of its columns, and the method for cross-products."""

    cov_type: str
    names: Mapping[str, tuple[str, ...]]
    cross: CrossProductOptions


def request_information(
    iteration: IterationState,
    step: str,
    curvatures: PatternCurvatures,
    weights: Mapping[str, Mapping[str, Any]],
) -> FitProtocol[InformationSums]:
    """Request from every site its sums, with the message that gives it the weights of its entities."""
    lay, seen, requests = iteration.layout, ~iteration.layout.missing, []
    for j, k in enumerate(lay.sites):
        rows, mis, has = lay.rows[k], lay.missing[:, j], seen[:, j]
        totals = [mis @ curvatures.kappa, mis @ curvatures.e, has @ curvatures.h, has @ curvatures.z]
        own = dict(weights.get(k, {}))
        requests.append(iteration.request(k, step, **own, others=seen[lay.code[rows]], sums=totals))
    replies = yield requests
    return InformationSums(lay, curvatures, [reply.arrays for reply in replies])


def eliminate_sigmas(
    iteration: IterationState, sums: InformationSums, options: CovarianceOptions
) -> FitProtocol[tuple[ProfiledInformation, CrossProducts, float]]:
    """Obtain the cross-products and assemble the information; return both, and the products' change."""
    grams = [part["gram"] for part in sums.parts]
    wanted = ProductRequest("information", tuple(len(gram) for gram in grams))
    products = yield from cross_products(iteration.layout, iteration.session, wanted, options.cross)
    blocks, moved = project(grams, products)
    return profile_out_sigma(sums, hessian(sums, blocks)), products, moved


def information_covariance(iteration: EMIteration, options: CovarianceOptions) -> FitProtocol[PsiCovariance]:
    """Invert the observed information, or with ``options.cross.how = "none"`` its "expected" form.

    The robust covariance has the products of the scores between two such inverses.
    """
    lay, at = iteration.layout, iteration.latest
    curvatures = PatternCurvatures.of_normal(lay.counts, at.v, at.z1, at.z2)
    inverse_v = 1.0 / at.v[lay.code]
    weights = {k: {"inverse_v": inverse_v[lay.rows[k]]} for k in lay.sites}
    sums = yield from request_information(iteration, "information", curvatures, weights)
    eliminated, products, moved = yield from eliminate_sigmas(iteration, sums, options)
    cov = invert_information(eliminated.information, psi_names(lay.sites, options.names))
    if options.cov_type == "robust":
        meat = yield from score_products(iteration, options.cross, sums, eliminated)
        cov = cov @ meat @ cov
    return PsiCovariance.of(cov, products, moved)


def glm_covariance(iteration: QuasiNewtonIteration, options: CovarianceOptions) -> FitProtocol[PsiCovariance]:
    """Invert the observed information of (a, beta, mu, Sigma) at the accepted point, and of log alpha.

    The robust covariance has the products of the scores between two such inverses. Returns the covariance of
    (a, 0 or log alpha, beta_1, mu_1, ..., beta_K, mu_K, t_1, ..., t_K).
    """
    sums = yield from (request_sealed_sums if iteration.dealers is not None else request_unmasked_sums)(
        iteration
    )
    if iteration.estimates_alpha:
        scale = yield from request_scale(iteration)
        sums = replace(sums, scale=scale)
    eliminated, products, moved = yield from eliminate_sigmas(iteration, sums, options)
    meat = None
    if options.cov_type == "robust":
        meat = yield from glm_score_products(iteration, options.cross, sums, eliminated)
    joint = psi_covariance(sums, eliminated, psi_names(iteration.layout.sites, options.names), meat)
    return PsiCovariance.of(joint, products, moved)


def request_scale(iteration: QuasiNewtonIteration) -> FitProtocol[ScaleSums]:
    """Request the information on log alpha, and on it and the other parameters."""
    lay, remote = iteration.layout, list(iteration.dealers or ())
    request = partial(iteration.request, lay.active, "glm_scale_curvature", json.dumps(remote))
    (reply,) = yield [request(patterns=len(lay.counts))]
    arrays, reported = reply.arrays, dict[str, dict[str, Any]]()
    if remote:
        reported = {k: {"shown": box} for k, box in zip(remote, split_by_site(arrays), strict=True)}
    else:
        reported = {k: {"cross": arrays["cross"][lay.rows[k]]} for k in lay.sites if k != lay.active}
    replies = yield [iteration.request(k, "glm_scale_information", **reported.get(k, {})) for k in lay.sites]
    m, v, r = arrays["sums"].T
    return ScaleSums(m, v, r, [reply.arrays["by_scale"] for reply in replies])


def request_unmasked_sums(iteration: QuasiNewtonIteration) -> FitProtocol[InformationSums]:
    """Send the curvatures of every entity, if no third party can deal for sums with them."""
    lay = iteration.layout
    (reply,) = yield [iteration.request(lay.active, "glm_curvature_openly", patterns=len(lay.counts))]
    curvatures = PatternCurvatures(*reply.arrays["sums"].T)
    weights = {name: reply.arrays[name] for name in ("h", "cross")}
    own = {k: {name: w[lay.rows[k]] for name, w in weights.items()} for k in lay.sites if k != lay.active}
    return (yield from request_information(iteration, "glm_information", curvatures, own))


def request_sealed_sums(iteration: QuasiNewtonIteration) -> FitProtocol[InformationSums]:
    """Seal sums with the curvatures, and send curvatures of entities that two or more sites have.

    Curvatures are also sent if a single site has so few entities that sums over these would reveal as much.
    """
    lay, remote = iteration.layout, list(iteration.dealers or ())
    squares = [one.site for one in iteration.openings if one.columns == SQUARES]
    text, alone = json.dumps({BLOCK: remote, SQUARES: squares}), {k: iteration.alone(k) for k in remote}
    each = ~np.any([alone[k] for k in squares], axis=0) if squares else np.ones(len(lay.counts), dtype=bool)
    (reply,) = yield [iteration.request(lay.active, "glm_curvature", text, missing=lay.missing, each=each)]
    arrays = reply.arrays
    curvatures = PatternCurvatures(*arrays["sums"].T)
    boxes, own = iter(split_by_site(arrays)), dict[str, dict[str, Any]]()
    for k in remote:
        shown = [next(boxes) for _ in range(len(lay.sites) + (k in squares))]
        own[k] = {
            "h": arrays["h"][lay.rows[k]],
            "alone": float(alone[k] @ curvatures.h) / max(float(alone[k] @ lay.counts), 1.0),
            "shown": np.concatenate(shown),
            "lengths": np.array([len(one) for one in shown]),
        }
    return (yield from request_information(iteration, "glm_information", curvatures, own))


def score_products(
    iteration: EMIteration,
    options: CrossProductOptions,
    sums: InformationSums,
    eliminated: ProfiledInformation,
) -> FitProtocol[Floats]:
    """Sum over entities of the products of the effective scores of psi."""
    lay = iteration.layout
    *sites, response = yield [
        *[iteration.request(k, "scores") for k in lay.sites],
        iteration.request(lay.active, "response_products", missing=lay.missing),
    ]
    within = [reply.arrays["gram"] for reply in sites]
    wanted = ProductRequest("scores", tuple(len(gram) for gram in within))
    products = yield from cross_products(lay, iteration.session, wanted, options)
    # The response holder is last, as a site whose products with all others are known exactly.
    last = {(k, len(sites)): reply.arrays["with_response"] for k, reply in enumerate(sites)}
    complete = assemble_information([*within, response.arrays["gram"]], {**products.blocks, **last})
    return delta_method(nearest_psd(complete)[0], effective_score_map(sums, eliminated.Q))
