"""Site steps of the quasi-Newton iterations of VFEM for a response that is not normal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.errors import MessageError
from fedstat.federation.crypto.secure_product import CHECK
from fedstat.federation.design.vertical_design import offset_of
from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights, GroupSums
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import (
    ArrayDeclaration,
    aggregate,
    check_allocation,
    check_lengths,
    control,
    per_entity,
    presence,
)
from fedstat.federation.protocols.product_steps import check_positions
from fedstat.federation.protocols.running_sums import SHOWN, open_sums, running_steps, seal_sums, taken_of
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.negative_binomial import BY_R
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
from fedstat.kernels.row_products import column_sums, row_dots
from fedstat.models.checks import check_response
from fedstat.models.vfem.iteration.quasi_newton import DirectionWeights, QuasiNewtonMemory
from fedstat.models.vfem.iteration.site_state import (
    ALPHAS,
    BLOCK_OPENING,
    BLOCK_STATE_ITEM,
    MOST_STEPS_KEPT,
    PARTS,
    RESPONSE_OPENING,
    BlockParameters,
    BlockState,
    GLMResponse,
    choose_response,
    kernel_of,
    marginal_moments,
    null_log_likelihood,
    null_with_offset,
    observed_likelihood,
    stage_block_state,
)
from fedstat.models.vfem.iteration.state import BLOCK, FAMILY, SQUARES, declare_sums, safe_weights
from fedstat.models.vfem.iteration.steps import block_log_likelihood
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Steps of the response holder in the iterations of VFEM if the response is not normal.
#
# While iterating, it releases sums by missing pattern and scalars. Row-level derivatives of the
# log-likelihood stay here. Each site needs the sums of its columns times these; it alone learns them, by
# :mod:`fedstat.federation.protocols.running_sums`. The derivatives are sent only if no third party can deal
# for that.


def glm_response_of(state: State) -> GLMResponse:
    """Return this fit's response, or report that the fit was not started here."""
    return state.use(
        "vfem glm response", GLMResponse, "this fit was not started here; ask 'glm_start_response' first"
    )


def rows_of_numbers(state: State) -> Ints:
    """Rows of the table that belong to the entities of this fit, (n,)."""
    return glm_response_of(state).rows


SEALED_SUMS = {
    "shown": replace(SHOWN, optional=True, behind=(EntityCount, ExternalWeights)),
    "lengths": control("bytes of each sealed message", dtype="int64", optional=True),
}
CURVATURE = per_entity("curvature of the log-likelihood by the linear predictor")
CURVATURES = declare_sums("sums of derivatives of the log-likelihood by pattern", 2)


@step(
    FAMILY,
    takes={
        **RESPONSE_OPENING,
        "estimated": control("whether alpha is estimated", 0, optional=True),
    },
    releases={"null": declare_sums("mean of the response, and its log-likelihood under that mean")},
    requests=control("family and link"),
)
def glm_start_response(
    data: SiteData, state: State, text: str, keep: Bools, code: Ints, estimated: Array | None = None
) -> dict[str, Array]:
    """Select the entities of a fit; release the mean of their response, and its log-likelihood at that mean.

    `text` names family and link; `keep` and `code` are those of :func:`choose_response`. If alpha is
    `estimated`, the log-likelihood is the largest over it.
    """
    spec, y = DistributionSpec.from_json(text), choose_response(data, state, keep, code)
    check_response(data.name, spec.name, y)
    opened, alpha_too = offset_of(state), estimated is not None
    offset = opened if isinstance(opened, float) else opened[keep]
    response = GLMResponse(y, code, spec, np.flatnonzero(keep), estimates_alpha=alpha_too, offset=offset)
    state.keep("vfem glm response", response, len(y))
    if isinstance(offset, float):
        return {"null": np.array([y.mean(), null_log_likelihood(spec, y, alpha_too)])}
    state.report(ExternalWeights(offset - np.median(offset), "deviations of offsets from their median"))
    return {"null": np.array(null_with_offset(spec, y, offset, alpha_too))}


@step(
    FAMILY,
    (
        "deal_sums glm_evaluate glm_move glm_residuals glm_start_response joint_predict joint_score "
        "joint_weights take_columns"
    ),
    takes={
        "predictor": per_entity("sum of the sites' linear predictors", weighs=""),
        "center": control("means of missing linear predictors, by pattern"),
        "spread": control("variances of missing linear predictors, by pattern"),
        "lowest": control("likelihood below which nothing else is said", 0, optional=True),
        "alpha": aggregate("overdispersion of the negative binomial", 0, optional=True),
    },
    releases={
        "inside": control("whether the point is admissible", 0),
        "sums": aggregate("sums of derivatives of the log-likelihood by pattern", 2, optional=True),
        "of_alpha": aggregate("score of alpha, and its square", optional=True),
        "log_likelihood": control("log-likelihood", 0, optional=True),
        **SEALED_SUMS,
    },
    rows_behind=(EntityCount,),
    requests=control("which sites learn sums"),
)
def glm_evaluate(
    data: SiteData,
    state: State,
    text: str,
    predictor: Floats,
    center: Floats,
    spread: Floats,
    lowest: Array | None = None,
    alpha: Array | None = None,
) -> dict[str, Array]:
    """Evaluate the likelihood of the response given the observed blocks of each entity.

    `predictor` (n,) is the intercept plus the sites' linear predictors of the blocks that an entity has;
    `center` and `spread` (G,) are the sums of mu'beta and of beta'Sigma beta over the sites that are missing
    in each pattern. `text` names the columns whose sites learn their sums with L_m. `alpha` is that of a
    negative binomial response, if it is estimated. Released: ``inside``, which is 0, without anything else,
    if a linear predictor is too large to compute with; otherwise ``log_likelihood``, and unless it is below
    `lowest`: ``sums`` (G, 4) of L_m, L_v, -L_mm and L_v^2 by pattern, ``of_alpha`` (2,) of its score and the
    squares, and ``shown``, of the ``lengths`` (K,), for each site.
    """
    response = glm_response_of(state)
    if alpha is not None:
        response.spec = with_alpha(data.name, response.spec, float(alpha))
    G = len(center)
    check_lengths(data.name, predictor=(predictor, len(response.y)), spread=(spread, G))
    if int(response.code.max()) >= G or (spread < 0.0).any():
        raise MessageError(f"{data.name}: array 'spread' must have a variance for each missing pattern")
    m, v = predictor + center[response.code] + response.offset, spread[response.code]
    # Far out, the integral needs more and more nodes, and there are no data.
    if np.abs(m).max() > LARGEST_MEAN or v.max() > LARGEST_VARIANCE:
        return {"inside": np.array(0)}
    # If predictors differ for only a few entities, the likelihood would reveal the responses of these.
    state.report(ExternalWeights(m - np.median(m), "deviations of linear predictors from their median"))
    response.m, response.v = m, v
    terms = observed_likelihood(response.spec, response.y, m, v)
    if not np.isfinite(terms).all():
        return {"inside": np.array(0)}
    response.terms = terms
    log_likelihood = np.array(terms[LOG_P].sum())
    reported = {"inside": np.array(1), "log_likelihood": log_likelihood}
    # If the point is not accepted, nothing else is released.
    if lowest is not None and not log_likelihood >= lowest:
        return reported
    # The likelihood is log-concave in m; negative values are only rounding.
    z, h = terms[BY_M], np.maximum(-terms[BY_MM], 0.0)
    reported["sums"] = response.by_pattern(np.array([z, terms[BY_V], h, terms[BY_V] ** 2]), G)
    if alpha is not None:
        reported["of_alpha"] = np.array([terms[BY_R].sum(), terms[BY_R] @ terms[BY_R]])
    sealed = (seal_of(data, state, columns, k, z) for columns, k in json.loads(text or "[]"))
    return reported | seal_all(sealed)


def with_alpha(site: str, spec: DistributionSpec, alpha: float) -> DistributionSpec:
    """Return the negative binomial with this alpha, checked as a value from an unknown sender."""
    if spec.alpha is None or not ALPHAS[0] <= np.log(max(alpha, 1e-300)) <= ALPHAS[1]:
        raise MessageError(f"{site}: array 'alpha' is not that of a negative binomial response")
    return replace(spec, alpha=alpha)


def seal_of(data: SiteData, state: State, columns: str, site: str, values: Floats) -> Array:
    """Seal the sums of a site's opened columns with some numbers, (n,) for all entities."""
    taken = taken_of(state, columns, site, rows_of_numbers(state))
    return seal_sums(data, state, taken, values[taken.rows])


def seal_all(boxes: Iterable[Array]) -> dict[str, Array]:
    """Concatenate sealed messages; nothing if there are none."""
    shown = list(boxes)
    if not shown:
        return {}
    return {"shown": np.concatenate(shown), "lengths": np.array([len(one) for one in shown])}


@step(
    FAMILY,
    "glm_evaluate",
    releases={"z": per_entity("derivative of the log-likelihood by the linear predictor")},
)
def glm_residuals(data: SiteData, state: State) -> dict[str, Array]:
    """Release the derivatives L_m of every entity, which reveal its response, if no third party can deal."""
    return {"z": glm_response_of(state).terms[BY_M]}


@step(
    FAMILY,
    "glm_estimates glm_fitted glm_pearson",
    takes={
        "missing": presence("which sites miss in each pattern", 2),
        "each": control("patterns whose curvatures leave one by one", dtype="bool"),
    },
    releases={"h": CURVATURE, "sums": CURVATURES, **SEALED_SUMS},
    requests=control("which sites learn sums"),
)
def glm_curvature(data: SiteData, state: State, text: str, missing: Bools, each: Bools) -> dict[str, Array]:
    """Release the values of the last evaluation that the observed information needs.

    `missing` (G, K) states which site is missing in which pattern, `each` (G,) for which patterns curvatures
    are released one by one; `text` lists the sites that learn sums, of block and of squares. Released:
    ``sums`` (G, 5) of -L_mm, -L_mv, -L_vv, -L_v and L_m by missing pattern; ``h`` -L_mm per entity, and
    ``shown``, of the ``lengths``: by site, sums of the block with -L_mv by absent site, and of the squares
    with -L_mm.
    """
    response = glm_response_of(state)
    reported = {"sums": sum_curvatures(data, response, len(missing))}
    h, cross = np.maximum(-response.terms[BY_MM], 0.0), -response.terms[BY_MV]
    reported["h"] = np.where(each[response.code], h, 0.0)
    request, boxes = json.loads(text), []
    for site in request[BLOCK]:
        rows = taken_of(state, BLOCK, site, response.rows).rows
        kept = safe_weights(cross[rows], missing[response.code[rows]], data.min_count)[1:]
        for weights in kept:
            values = np.zeros(len(cross))
            values[rows] = weights
            boxes.append(seal_of(data, state, BLOCK, site, values))
        if site in request[SQUARES]:
            taken = taken_of(state, SQUARES, site, response.rows)
            # As many sums as entities would reveal the curvatures.
            state.report(GroupSums(np.zeros_like(taken.rows), taken.part.product.columns_a - CHECK))
            boxes.append(seal_sums(data, state, taken, h[taken.rows]))
    return reported | seal_all(boxes)


@step(
    FAMILY,
    "glm_estimates glm_fitted glm_pearson",
    takes={"patterns": control("number of missing patterns", 0)},
    releases={
        "h": CURVATURE,
        "cross": per_entity("mixed derivative of the log-likelihood"),
        "sums": CURVATURES,
    },
)
def glm_curvature_openly(data: SiteData, state: State, patterns: Array) -> dict[str, Array]:
    """Release -L_mm and -L_mv of every entity, and ``sums`` as above, if no third party can deal."""
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


@step(
    FAMILY,
    "glm_estimates glm_evaluate glm_pearson joint_score joint_weights",
    releases={
        "fitted": per_entity("fitted means"),
        "residuals": per_entity("residuals"),
    },
)
def glm_fitted(data: SiteData, state: State) -> dict[str, Array]:
    """Release fitted means and residuals, one per entity, to a coordinator at this site."""
    response = glm_response_of(state)
    mean = marginal_mean(kernel_of(response.spec), response.m, response.v)[0]
    return {"fitted": mean, "residuals": response.y - mean}


@step(
    FAMILY,
    "glm_estimates glm_evaluate joint_score joint_weights",
    releases={
        "pearson": aggregate("Pearson's statistic of the counts", behind=(EntityCount, ExternalWeights))
    },
)
def glm_pearson(data: SiteData, state: State) -> dict[str, Array]:
    """Release Pearson's statistic of counts, with variances given the observed blocks.

    ``pearson`` (2,): Pearson's statistic, and the sum of its squared terms.
    """
    response = glm_response_of(state)
    mean, variance = marginal_moments(response.spec, response.m, response.v)
    terms = (response.y - mean) ** 2 / variance
    state.report(ExternalWeights(terms, "squared residuals"))
    return {"pearson": np.array([terms.sum(), terms @ terms])}


# ----------------------------------------------------------------------------------------------------
# Steps of a site in the iterations of VFEM if the response is not normal.
#
# Given the observed blocks of entity i, its linear predictor is normal with mean and variance
#
#     m_i = b + sum_{k seen} x_i^k' beta_k + sum_{k missing} mu_k' beta_k,
#     v_i = sum_{k missing} beta_k' Sigma_k beta_k.
#
# The response holder turns m_i and v_i into the likelihood and its derivatives L_m and L_v. The score of
# (beta_k, mu_k, Sigma_k) is a sum over the site's own rows; the site learns no more than that sum. Columns
# are standardized at their site.

NOT_STARTED = "this fit was not started here; ask 'glm_start' first"
RIDGE = 1e-10
"""Where fitted means approach 0 and 1, no curvature is left, but the step must stay finite."""


@dataclass(slots=True)
class GLMBlockState:
    """One site's block during a fit, and its part of the quasi-Newton method.

    `memory` has its latest steps in (beta, mu, Sigma), written as one vector; `trial` is the point of the
    last request; `inverses` (p, p) are those of the local information on beta, without terms of mean zero,
    and on mu.
    """

    block: BlockState
    memory: QuasiNewtonMemory
    trial: BlockParameters
    inverses: tuple[Floats, Floats] | None = None
    scored: int = 0

    @property
    def accepted(self) -> BlockParameters:
        """The point where the score was computed last."""
        return unpack(self.memory.point, len(self.trial.mu))

    def scale_scores(self, scores: Floats) -> Floats:
        """Multiply scores, (r, d), by the inverse of the block-diagonal local information."""
        theta, p = self.accepted, len(self.trial.mu)
        assert self.inverses is not None
        of_beta, of_mu = self.inverses
        by_beta, by_mu = scores[:, :p] @ of_beta, scores[:, p : 2 * p] @ of_mu
        by_Sigma = theta.Sigma @ scores[:, 2 * p :].reshape(-1, p, p) @ theta.Sigma
        return np.hstack([by_beta, by_mu, 2.0 / self.block.n_seen * by_Sigma.reshape(len(scores), -1)])


def pack(theta: BlockParameters) -> Floats:
    """Write (beta, mu, Sigma) as one vector."""
    return np.concatenate([theta.beta, theta.mu, theta.Sigma.ravel()])


def unpack(vector: Floats, p: int) -> BlockParameters:
    """Read the output of :func:`pack`; Sigma stays exactly symmetric."""
    Sigma = vector[2 * p :].reshape(p, p)
    return BlockParameters(vector[:p], vector[p : 2 * p], 0.5 * (Sigma + Sigma.T))


def glm_block_state_of(state: State) -> GLMBlockState:
    """Return this fit's site, or report that the fit was not started here."""
    site = state.use(BLOCK_STATE_ITEM, GLMBlockState, NOT_STARTED)
    if not isinstance(site, GLMBlockState):  # a fit by another algorithm was
        raise MessageError(f"{state.site}: {NOT_STARTED}")
    return site


def _inner(what: str) -> ArrayDeclaration:
    return control(what, 2, maskable=True)


@step(FAMILY, takes={**BLOCK_OPENING, **PARTS, "memory": control("steps that are remembered", 0)})
def glm_start(
    data: SiteData,
    state: State,
    keep: Bools,
    rows: Ints,
    n: Array,
    filled: Array,
    memory: Array,
    seen: Bools | None = None,
) -> dict[str, Array]:
    """Standardize the block and begin at coefficients of zero; nothing is released.

    See :func:`stage_block_state`.
    """
    if not 1 <= int(memory) <= MOST_STEPS_KEPT:
        raise MessageError(f"{data.name}: expected 1 to {MOST_STEPS_KEPT} remembered steps")
    block = stage_block_state(data, state, keep, rows, int(n), bool(filled), memory=0, seen=seen)
    check_allocation(data.name, int(n), block.X.size)
    block.padded = True
    first = block.first_point()
    state.keep(
        BLOCK_STATE_ITEM, GLMBlockState(block, QuasiNewtonMemory(int(memory), pack(first)), first), len(rows)
    )
    return {}


@step(
    FAMILY,
    "glm_evaluate glm_move glm_residuals",
    takes={
        "missing": aggregate("sums of derivatives over entities that the site lacks"),
        "h": aggregate("sum of curvatures over those that it has", 0),
        "shown": replace(SHOWN, optional=True),
        "z": per_entity(
            "derivative of the log-likelihood by the linear predictor", optional=True, weighs="residuals"
        ),
    },
    releases={"sy": _inner("inner products of steps and scores"), "yhy": _inner("inner products of scores")},
)
def glm_score(
    data: SiteData,
    state: State,
    missing: Floats,
    h: Array,
    shown: Array | None = None,
    z: Floats | None = None,
) -> dict[str, Array]:
    """Accept the latest point, and release products of the local score and of the latest steps.

    `missing` (4,) are the sums of L_m, L_v, -L_mm and L_v^2 over entities that the site lacks, `h` that of
    -L_mm over those that it has. For the latter, the site learns the sums of L_m with its columns, which
    arrive in `shown`. If no third party can deal, z (n_k,) is L_m itself, and the response holder has it.
    Released: ``sy`` S'[Y, g] and ``yhy`` [Y, g]'H[Y, g]; see
    :class:`~fedstat.models.vfem.iteration.quasi_newton.QuasiNewtonMemory`.
    """
    site = glm_block_state_of(state)
    block = site.block
    check_lengths(data.name, missing=(missing, 4))
    if shown is not None:
        by_beta = open_sums(state, BLOCK, shown)[1:]
    else:
        z = glm_response_of(state).terms[BY_M][block.rows] if z is None else z
        check_lengths(data.name, z=(z, block.n_seen))
        state.report(block.weights(z, "residuals"))
        by_beta = column_sums(block.X, z)
    theta = site.trial
    site.inverses = local_inverses(block, theta, float(h), missing)
    site.memory.take(pack(theta), local_score(block, theta, by_beta, missing))
    sy, yhy = site.memory.products(site.scale_scores)
    return {"sy": sy, "yhy": yhy}


def local_inverses(
    block: BlockState, theta: BlockParameters, h: float, missing: Floats
) -> tuple[Floats, Floats]:
    """Inverse local information on beta and on mu, with the mean weight for every row; see :func:`glm_score`.

    This inverse affects the path but not the solution; the weights of single rows would reveal their
    response.
    """
    w, (h_mis, squares) = theta.Sigma @ theta.beta, missing[2:]
    # Without terms of mean zero, it is a sum of squares, and no direction can point downhill.
    P = max(h, 0.0) / block.n_seen * block.S2 + h_mis * np.outer(theta.mu, theta.mu)
    P += 4.0 * squares * np.outer(w, w)
    P += RIDGE * np.trace(P) / len(w) * np.eye(len(w))
    M = block.n_seen * np.linalg.inv(theta.Sigma) + h_mis * np.outer(theta.beta, theta.beta)
    return np.linalg.inv(P), np.linalg.inv(M)


def local_score(block: BlockState, theta: BlockParameters, by_beta: Floats, missing: Floats) -> Floats:
    """Score of (beta, mu, Sigma) of standardized columns, from the columns' sums with L_m (p,)."""
    beta, mu, Sigma, n = theta.beta, theta.mu, theta.Sigma, block.n_seen
    z_mis, lv_mis = missing[:2]
    factor = cho_factor(Sigma, lower=True)
    scatter = block.S2 - np.outer(block.s1, mu) - np.outer(mu, block.s1) + n * np.outer(mu, mu)
    by_beta = by_beta + mu * z_mis + 2.0 * lv_mis * (Sigma @ beta)
    by_mu = z_mis * beta + cho_solve(factor, block.s1 - n * mu)
    by_Sigma = 0.5 * cho_solve(factor, cho_solve(factor, scatter - n * Sigma).T)
    # Rounding must not make Sigma asymmetric over many steps.
    by_Sigma = 0.5 * (by_Sigma + by_Sigma.T) + lv_mis * np.outer(beta, beta)
    return np.concatenate([by_beta, by_mu, by_Sigma.ravel()])


@step(
    FAMILY,
    "deal_sums glm_evaluate glm_score glm_start glm_start_response open_columns take_columns",
    takes={
        "of_steps": control("coefficients of a direction"),
        "of_scores": control("coefficients of a direction"),
        "length": control("step length", 0),
    },
    releases={
        "inside": control("whether the point is admissible", 0),
        "linear_predictor": per_entity(
            "linear predictor x'beta of the site's block", maskable=True, optional=True
        ),
        "center": control("product mu'beta", 0, optional=True),
        "spread": control("product beta'Sigma beta", 0, optional=True),
        "log_likelihood": control("log-likelihood", 0, maskable=True, optional=True),
        "change": control("largest change of a parameter", 0, optional=True),
    },
)
def glm_move(
    data: SiteData, state: State, of_steps: Floats, of_scores: Floats, length: Array
) -> dict[str, Array]:
    """Move along a direction from the accepted point, and release the linear predictor there.

    `of_steps` (q,) and `of_scores` (q + 1,) are the coefficients of the direction; a length of 0 stays.
    Released: ``inside``, which is 0, without anything else, if Sigma has left the positive cone; otherwise
    the linear predictor of all n entities, zero where the site lacks them; ``center`` mu'beta and ``spread``
    beta'Sigma beta; the log-likelihood of the block minus its maximum; the largest change.
    """
    site = glm_block_state_of(state)
    kept, p = len(site.memory.steps), len(site.trial.mu)
    check_lengths(data.name, of_steps=(of_steps, kept), of_scores=(of_scores, kept + 1))
    # A length of zero must reproduce the accepted point exactly.
    move = np.zeros_like(site.memory.point)
    if length != 0.0:
        weights = DirectionWeights(of_steps, of_scores)
        move = float(length) * site.memory.direction(weights, site.scale_scores)
    theta = unpack(site.memory.point + move, p)
    try:
        factor = cho_factor(theta.Sigma, lower=True)
    except np.linalg.LinAlgError:
        return {"inside": np.array(0)}
    site.trial = theta
    return {
        "inside": np.array(1),
        "linear_predictor": site.block.pad(row_dots(site.block.X, theta.beta)),
        "center": np.array(theta.mu @ theta.beta),
        "spread": np.array(theta.beta @ theta.Sigma @ theta.beta),
        "log_likelihood": np.array(block_log_likelihood(site.block, theta, factor)),
        "change": np.array(np.abs(move).max()),
    }


@step(
    FAMILY,
    "glm_evaluate glm_move glm_score",
    releases={
        "beta": declare_sums("coefficients"),
        "mu": declare_sums("means"),
        "shift": declare_sums("product of the columns' means and the coefficients", 0),
        "t": declare_sums("variance of the block's linear predictor", 0),
    },
)
def glm_estimates(data: SiteData, state: State) -> dict[str, Array]:
    """Release the estimates of the accepted point, in the units of the data."""
    site = glm_block_state_of(state)
    block, theta = site.block, site.accepted
    beta = theta.beta / block.scale
    return {
        "beta": beta,
        "mu": block.shift + block.scale * theta.mu,
        "shift": np.array(block.shift @ beta),
        "t": np.array(theta.beta @ theta.Sigma @ theta.beta),
    }


def columns_opened(data: SiteData, state: State, which: str, only: Ints) -> tuple[Floats, Ints]:
    """Columns of some entities that are opened for sums: ones and the block, and squares and products.

    With their rows of the table. The part of the name after a blank distinguishes openings.
    """
    block = glm_block_state_of(state).block
    X = block.X
    check_positions(data.name, only, len(X))
    X = X[only]
    block.require_alike(data.name, np.where(np.isin(np.arange(block.n_seen), only), 0, -1))
    parts = [np.ones((len(X), 1)), X]
    kind = which.partition(" ")[0]
    if kind == SQUARES:
        i, j = np.triu_indices(X.shape[1])
        parts.append(X[:, i] * X[:, j])
    elif kind != BLOCK:
        raise MessageError(f"{data.name}: there are no columns '{which}' to open")
    return np.hstack(parts), block.table_rows[only]


include(
    FAMILY,
    running_steps(columns_opened, rows_of_numbers),
    # A dealer reads no row, and may be a site without a column of the model, which has had no step before.
    {
        "open_columns": "deal_sums glm_start open_columns",
        "take_columns": "deal_sums glm_start_response take_columns",
    },
)
