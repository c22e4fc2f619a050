"""Steps of the response holder in the iterations of VFEM where the response is not normal.

Released while iterating: sums by missing pattern and scalars. Derivatives of the log-likelihood per entity
stay here: what every institution needs of them, the sums of its columns times these, it learns alone, by
:mod:`fedstat.federation.rounds.running_steps`. Only where nobody can deal for that are they sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.crypto.running_sums import CHECK
from fedstat.federation.design.by_columns import offset_of
from fedstat.federation.door.facts import Entities, GivenWeights, GroupSums
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.rounds.running_steps import SHOWN, seal_sums, taken_of
from fedstat.kernels.glm.count_quadrature import BY_R
from fedstat.kernels.glm.quadrature import (
    BY_M,
    BY_MM,
    BY_MV,
    BY_V,
    BY_VV,
    LARGEST_MEAN,
    LARGEST_VARIANCE,
    LOG_P,
    marginal_mean,
)
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.checks import check_response
from fedstat.models.vfem.blocks.declare import aggregate
from fedstat.models.vfem.blocks.glm_distribution import (
    ALPHAS,
    kernel_of,
    marginal_moments,
    null_beside_offset,
    null_log_likelihood,
    observed_likelihood,
)
from fedstat.models.vfem.blocks.kept import kept_weights
from fedstat.models.vfem.blocks.request import BLOCK, SQUARES
from fedstat.models.vfem.blocks.response import OPENING, GLMResponse, choose_response
from fedstat.typing import Array, Bools, Floats, Ints


def glm_response_of(state: State) -> GLMResponse:
    """Return this fit's response, or say that the fit was not started here."""
    return state.use(
        "vfem glm response", GLMResponse, "this fit was not started here; ask 'glm_start_response' first"
    )


def rows_of_numbers(state: State) -> Ints:
    """Rows of the table that the entities of this fit are, (n,)."""
    return glm_response_of(state).rows


def glm_start_response(
    data: SiteData, state: State, text: str, keep: Bools, code: Ints, estimated: Array | None = None
) -> tuple[dict[str, Array], str]:
    """Choose the entities of a fit; release the mean of their response, and its log-likelihood under that.

    `text` names family and link; `keep` and `code` are those of :func:`choose_response`; where alpha is
    `estimated` the log-likelihood is the largest over it.
    """
    spec, y = DistributionSpec.from_json(text), choose_response(data, state, keep, code)
    check_response(data.name, spec.name, y)
    opened, alpha_too = offset_of(state), estimated is not None
    offset = opened if isinstance(opened, float) else opened[keep]
    response = GLMResponse(y, code, spec, np.flatnonzero(keep), estimates_alpha=alpha_too, offset=offset)
    state.keep("vfem glm response", response, len(y))
    if isinstance(offset, float):
        return {"null": np.array([y.mean(), null_log_likelihood(spec, y, alpha_too)])}, ""
    state.tell(GivenWeights(offset - np.median(offset), "deviations of offsets from their median"))
    return {"null": np.array(null_beside_offset(spec, y, offset, alpha_too))}, ""


def glm_evaluate(
    data: SiteData,
    state: State,
    text: str,
    predictor: Floats,
    centre: Floats,
    spread: Floats,
    lowest: Array | None = None,
    alpha: Array | None = None,
) -> tuple[dict[str, Array], str]:
    """Evaluate the likelihood of the response given what is seen of each entity.

    `predictor` (n,) is the intercept plus the institutions' linear predictors of the blocks that an entity
    has; `centre` and `spread` (G,) are the sums of mu'beta and of beta'Sigma beta over the institutions that
    miss in each pattern. `text` names the columns whose institutions learn their sums with L_m; `alpha` is
    that of a negative binomial response, where it is estimated. Released:
    ``inside``, which is 0, and nothing else comes, when a linear predictor is too large to compute with;
    ``log_likelihood``, and unless it is below `lowest`: ``sums`` (G, 4) of L_m, L_v, -L_mm and L_v^2 by
    pattern, ``of_alpha`` (2,) of its score and the squares, and ``shown``, of the ``lengths`` (K,), for each
    institution.
    """
    response = glm_response_of(state)
    if alpha is not None:
        response.spec = with_alpha(data.name, response.spec, float(alpha))
    G = len(centre)
    check_lengths(data.name, predictor=(predictor, len(response.y)), spread=(spread, G))
    if int(response.code.max()) >= G or (spread < 0.0).any():
        raise MessageError(f"{data.name}: array 'spread' must be a variance for each missing pattern")
    m, v = predictor + centre[response.code] + response.offset, spread[response.code]
    # Out there the integral needs ever more nodes, and no data lie there.
    if np.abs(m).max() > LARGEST_MEAN or v.max() > LARGEST_VARIANCE:
        return {"inside": np.array(0)}, ""
    # Predictors that differ at few entities would make the likelihood tell the responses of these.
    state.tell(GivenWeights(m - np.median(m), "deviations of linear predictors from their median"))
    response.m, response.v = m, v
    terms = observed_likelihood(response.spec, response.y, m, v)
    if not np.isfinite(terms).all():
        return {"inside": np.array(0)}, ""
    response.terms = terms
    log_likelihood = np.array(terms[LOG_P].sum())
    told = {"inside": np.array(1), "log_likelihood": log_likelihood}
    # Of a point that is not accepted nothing else is said.
    if lowest is not None and not log_likelihood >= lowest:
        return told, ""
    # The likelihood is log-concave in m; below zero there is rounding alone.
    z, h = terms[BY_M], np.maximum(-terms[BY_MM], 0.0)
    told["sums"] = response.by_pattern(np.array([z, terms[BY_V], h, terms[BY_V] ** 2]), G)
    if alpha is not None:
        told["of_alpha"] = np.array([terms[BY_R].sum(), terms[BY_R] @ terms[BY_R]])
    sealed = (seal_of(data, state, columns, k, z) for columns, k in json.loads(text or "[]"))
    return told | seal_all(sealed), ""


def with_alpha(site: str, spec: DistributionSpec, alpha: float) -> DistributionSpec:
    """Return the negative binomial with this alpha, as if a stranger had chosen it."""
    if spec.alpha is None or not ALPHAS[0] <= np.log(max(alpha, 1e-300)) <= ALPHAS[1]:
        raise MessageError(f"{site}: array 'alpha' is not that of a negative binomial response")
    return replace(spec, alpha=alpha)


def seal_of(data: SiteData, state: State, columns: str, client: str, values: Floats) -> Array:
    """Seal the sums of columns that an institution opened with some numbers, (n,) of all entities."""
    taken = taken_of(state, columns, client, rows_of_numbers(state))
    return seal_sums(data, state, taken, values[taken.rows])


def seal_all(boxes: Iterable[Array]) -> dict[str, Array]:
    """Put sealed messages one after the other; nothing where there are none."""
    shown = list(boxes)
    if not shown:
        return {}
    return {"shown": np.concatenate(shown), "lengths": np.array([len(one) for one in shown])}


def glm_residuals(data: SiteData, state: State) -> dict[str, Array]:
    """Release the derivatives L_m of every entity, which tell its response, where nobody can deal."""
    return {"z": glm_response_of(state).terms[BY_M]}


def glm_curvature(
    data: SiteData, state: State, text: str, missing: Bools, each: Bools
) -> tuple[dict[str, Array], str]:
    """Release what the observed information needs of the last evaluation.

    `missing` (G, K) tells which institution misses in which pattern, `each` (G,) of which patterns curvatures
    leave one by one; `text` lists the institutions that learn sums, of block and of squares. Released:
    ``sums`` (G, 5) of -L_mm, -L_mv, -L_vv, -L_v and L_m by missing pattern; ``h`` -L_mm per entity, and
    ``shown``, of the ``lengths``: by institution, sums of the block with -L_mv by absent institution, and of
    the squares with -L_mm.
    """
    response = glm_response_of(state)
    told = {"sums": sum_curvatures(data, response, len(missing))}
    h, cross = np.maximum(-response.terms[BY_MM], 0.0), -response.terms[BY_MV]
    told["h"] = np.where(each[response.code], h, 0.0)
    asked, boxes = json.loads(text), []
    for client in asked[BLOCK]:
        rows = taken_of(state, BLOCK, client, response.rows).rows
        kept = kept_weights(cross[rows], missing[response.code[rows]], data.min_count)[1:]
        for weights in kept:
            values = np.zeros(len(cross))
            values[rows] = weights
            boxes.append(seal_of(data, state, BLOCK, client, values))
        if client in asked[SQUARES]:
            taken = taken_of(state, SQUARES, client, response.rows)
            # As many sums as entities would give the curvatures away.
            state.tell(GroupSums(np.zeros_like(taken.rows), taken.part.product.columns_a - CHECK))
            boxes.append(seal_sums(data, state, taken, h[taken.rows]))
    return told | seal_all(boxes), ""


def glm_curvature_openly(data: SiteData, state: State, patterns: Array) -> dict[str, Array]:
    """Release -L_mm and -L_mv of every entity, and ``sums`` as above, where nobody can deal."""
    response = glm_response_of(state)
    h, cross = np.maximum(-response.terms[BY_MM], 0.0), -response.terms[BY_MV]
    return {"h": h, "cross": cross, "sums": sum_curvatures(data, response, int(patterns))}


def sum_curvatures(data: SiteData, response: GLMResponse, patterns: int) -> Floats:
    """Sum derivatives by pattern: (G, 5)."""
    if int(response.code.max()) >= patterns:
        raise MessageError(f"{data.name}: expected the number of missing patterns")
    terms = response.terms
    h = np.maximum(-terms[BY_MM], 0.0)
    return response.by_pattern(
        np.array([h, -terms[BY_MV], -terms[BY_VV], -terms[BY_V], terms[BY_M]]), patterns
    )


def glm_fitted(data: SiteData, state: State) -> dict[str, Array]:
    """Release fitted means and residuals, one per entity, to a coordinator at this institution."""
    response = glm_response_of(state)
    mean = marginal_mean(kernel_of(response.spec), response.m, response.v)[0]
    return {"fitted": mean, "residuals": response.y - mean}


def glm_pearson(data: SiteData, state: State) -> dict[str, Array]:
    """Release the sum of squared residuals of a count over their variance given what is seen, and of squares.

    ``pearson`` (2,): Pearson's statistic, and the sum of its squared terms.
    """
    response = glm_response_of(state)
    mean, variance = marginal_moments(response.spec, response.m, response.v)
    terms = (response.y - mean) ** 2 / variance
    state.tell(GivenWeights(terms, "squared residuals"))
    return {"pearson": np.array([terms.sum(), terms @ terms])}


SEALED_SUMS = {
    "shown": replace(SHOWN, optional=True, behind=(Entities, GivenWeights)),
    "lengths": Declared("control", "bytes of each sealed message", dtype="int64", optional=True),
}
CURVATURE = Declared("per entity", "curvature of the log-likelihood by the linear predictor")
CURVATURES = aggregate("sums of derivatives of the log-likelihood by pattern", 2)
STEPS: Mapping[str, Step] = {
    "glm_start_response": Step(
        glm_start_response,
        {**OPENING, "estimated": Declared("control", "whether alpha is estimated", 0, optional=True)},
        {"null": aggregate("mean of the response, and its log-likelihood under that mean")},
        text_in=Declared("control", "family and link"),
    ),
    "glm_evaluate": Step(
        glm_evaluate,
        {
            "predictor": Declared("per entity", "sum of the institutions' linear predictors", weighs=""),
            "centre": Declared("control", "means of missing linear predictors, by pattern"),
            "spread": Declared("control", "variances of missing linear predictors, by pattern"),
            "lowest": Declared("control", "likelihood below which nothing else is said", 0, optional=True),
            "alpha": Declared("aggregate", "overdispersion of the negative binomial", 0, optional=True),
        },
        {
            "inside": Declared("control", "whether the point is admissible", 0),
            "sums": Declared(
                "aggregate",
                "sums of derivatives of the log-likelihood by pattern",
                2,
                optional=True,
                behind=(Entities,),
            ),
            "of_alpha": Declared(
                "aggregate", "score of alpha, and its square", optional=True, behind=(Entities,)
            ),
            "log_likelihood": Declared("control", "log-likelihood", 0, optional=True),
            **SEALED_SUMS,
        },
        text_in=Declared("control", "which institutions learn sums"),
    ),
    "glm_residuals": Step(
        glm_residuals,
        gives={"z": Declared("per entity", "derivative of the log-likelihood by the linear predictor")},
    ),
    "glm_curvature": Step(
        glm_curvature,
        {
            "missing": Declared("presence", "which institutions miss in each pattern", 2),
            "each": Declared("control", "patterns whose curvatures leave one by one", dtype="bool"),
        },
        {"h": CURVATURE, "sums": CURVATURES, **SEALED_SUMS},
        text_in=Declared("control", "which institutions learn sums"),
    ),
    "glm_curvature_openly": Step(
        glm_curvature_openly,
        {"patterns": Declared("control", "number of missing patterns", 0)},
        {
            "h": CURVATURE,
            "cross": Declared("per entity", "mixed derivative of the log-likelihood"),
            "sums": CURVATURES,
        },
    ),
    "glm_pearson": Step(
        glm_pearson,
        gives={
            "pearson": Declared(
                "aggregate", "Pearson's statistic of the counts", behind=(Entities, GivenWeights)
            )
        },
    ),
    "glm_fitted": Step(
        glm_fitted,
        gives={
            "fitted": Declared("per entity", "fitted means"),
            "residuals": Declared("per entity", "residuals"),
        },
    ),
}
