"""Site steps for the information on the estimates, and for the supplemented EM algorithm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, eigh

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import (
    ArrayDeclaration,
    aggregate,
    check_lengths,
    control,
    per_entity,
    presence,
)
from fedstat.federation.protocols.running_sums import SHOWN, open_sums
from fedstat.kernels.glm.negative_binomial import BY_MR, BY_RR, BY_VR
from fedstat.kernels.glm.quadrature import BY_MM, BY_MV
from fedstat.kernels.row_products import column_sums, gram, row_dots
from fedstat.models.vfem.iteration.glm_steps import (
    CURVATURES,
    SEALED_SUMS,
    GLMBlockState,
    glm_block_state_of,
    glm_response_of,
    seal_all,
    seal_of,
)
from fedstat.models.vfem.iteration.site_state import BlockParameters, BlockState, GLMResponse, block_state_of
from fedstat.models.vfem.iteration.state import (
    BLOCK,
    FAMILY,
    SQUARES,
    declare_sums,
    declare_weighted_sums,
    safe_weighted_sums,
    safe_weights,
)
from fedstat.models.vfem.iteration.steps import m_step
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The elimination of a block's covariance from the information at its site.

MIN_EIGENVALUE = 1e-10
"""Smallest curvature per entity in a direction of Sigma_k, in units of the estimate, that is not zero."""


@dataclass(frozen=True, slots=True)
class SigmaElimination:
    """Diagonal form of the negative Hessian of the block's likelihood in Sigma_k.

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


def local_scatter(site: BlockState, mu: Floats) -> tuple[Floats, Floats]:
    """Mean of (x - mu) and of (x - mu)(x - mu)' over the rows that the site has."""
    n = site.n_seen
    mean = site.s1 / n
    d = mean - mu
    return d, site.S2 / n - np.outer(mean, mean) + np.outer(d, d)


def eliminate_sigma(site: BlockState, theta: BlockParameters, e: float) -> SigmaElimination:
    """Prepare the elimination of Sigma_k; `e` is the sum of (1/v - z^2)/2 over missing entities.

    Raises EstimationError when the information on Sigma_k is not positive.
    """
    n = site.n_seen
    d, S = local_scatter(site, theta.mu)
    s, V = eigh(S, theta.Sigma)
    T = theta.Sigma @ V
    curvature = 0.5 * n * (s[:, None] + s - 1.0)
    if (np.abs(curvature) < MIN_EIGENVALUE * n).any():
        raise EstimationError("the entities of a block do not determine its covariance")
    beta = T.T @ theta.beta
    precision_d = np.linalg.solve(theta.Sigma, d)
    along_beta = np.einsum("i,aj->aij", 2.0 * e * beta, T)
    along_mu = np.einsum("ai,j->aij", n * V, T.T @ precision_d)
    L = np.concatenate([along_beta, along_mu])
    symmetric = 0.5 * (L + L.transpose(0, 2, 1))
    return SigmaElimination(T, 1.0 / curvature, np.outer(beta, beta), symmetric)


def units(site: BlockState) -> Floats:
    """Return factors that convert derivatives by (beta, mu) of standardized columns to units of the data."""
    return np.concatenate([site.scale, 1.0 / site.scale])


# ----------------------------------------------------------------------------------------------------
# A site's sums for the information on the estimates.
#
# Sigma_k enters the likelihood of y only through t_k = beta_k'Sigma_k beta_k, so each site can eliminate its
# own Sigma_k, up to a K by K system at the coordinator (:mod:`fedstat.models.vfem.covariance.information`).
# All releases here are in the units of the data.


@dataclass(frozen=True, slots=True, eq=False)
class WeightedRows:
    """-L_mm of the site's rows (n_k,), which sites have each of them (n_k, K), and sums of both.

    The sums are those of -L_mm uu' (p, p), and of -L_mm u and -L_mv u over all rows, by the presence of every
    other site, and by its absence, (1 + K, p).
    """

    h: Floats
    others: Bools
    gram: Floats
    by_h: Floats
    by_cross: Floats

    @classmethod
    def of(cls, U: Floats, h: Floats, cross: Floats, others: Bools, least: int) -> WeightedRows:
        """Sum rows whose derivatives are all known."""
        by_h, by_cross = safe_weighted_sums(U, h, others, least), safe_weighted_sums(U, cross, ~others, least)
        return cls(h, others, gram(U, h), by_h, by_cross)


OTHER_SITES = presence("which sites have each entity", 2, dtype="bool")
INFORMATION: Mapping[str, ArrayDeclaration] = {
    "beta": declare_weighted_sums("coefficients"),
    "w": declare_weighted_sums("covariance of the block with its linear predictor"),
    "own": declare_weighted_sums("information on the block's coefficients and means", 2),
    "gram": declare_weighted_sums("weighted cross-products within the block", 2),
    "by_v": declare_weighted_sums("weighted sums of the columns, by presence of other sites", 2),
    "by_z": declare_weighted_sums("products of columns and residuals, by absence of other sites", 2),
    "J": declare_weighted_sums("information lost to the block's covariance", 2),
    "j": declare_weighted_sums("information lost to the block's covariance"),
    "N": declare_weighted_sums("information lost to the block's covariance", 0),
}


@step(
    FAMILY,
    "estimates fitted",
    takes={
        "inverse_v": control("1/v of the site's entities, by missing pattern", weighs="weights"),
        "others": OTHER_SITES,
        "sums": aggregate("sums over entities of 1/v and z^2"),
    },
    releases=INFORMATION,
)
def information(
    data: SiteData, state: State, inverse_v: Floats, others: Bools, sums: Floats
) -> dict[str, Array]:
    """Local sums of the information of a normal response, where -L_mm = 1/v and -L_mv = z/v; see above."""
    site = block_state_of(state)
    check_lengths(data.name, inverse_v=(inverse_v, site.n_seen), others=(others, site.n_seen))
    state.report(site.weights(inverse_v, "weights"), site.weights(site.z * inverse_v, "residuals"))
    U = site.X - site.estimate.mu
    rows = WeightedRows.of(U, inverse_v, site.z * inverse_v, others, data.min_count)
    return sum_information(state, site, site.estimate, rows, sums)


@step(
    FAMILY,
    "glm_curvature glm_curvature_openly glm_estimates",
    takes={
        "h": per_entity(
            "curvature of the log-likelihood by the linear predictor", optional=True, weighs="weights"
        ),
        "cross": per_entity("mixed derivative of the log-likelihood", optional=True, weighs="weights"),
        "alone": aggregate("mean curvature of entities that no other has", 0, optional=True),
        "shown": replace(SHOWN, optional=True),
        "lengths": control("bytes of each round", dtype="int64", optional=True),
        "others": OTHER_SITES,
        "sums": aggregate("sums of derivatives of the log-likelihood"),
    },
    releases={
        **INFORMATION,
        "by_z": declare_weighted_sums("weighted sums of the columns, by absence of other sites", 2),
    },
)
def glm_information(
    data: SiteData,
    state: State,
    others: Bools,
    sums: Floats,
    h: Floats | None = None,
    cross: Floats | None = None,
    alone: Array | None = None,
    shown: Array | None = None,
    lengths: Ints | None = None,
) -> dict[str, Array]:
    """Local sums of the information of another response.

    `h` (n_k,) is -L_mm of entities that another site has as well. For entities that no other site has, the
    site receives the mean, `alone`, and, unless they are few, the sums of the columns' products with -L_mm.
    It also receives the sums of the columns with -L_mv by absent site. These arrive sealed in `shown`, of
    these `lengths`. If no third party can deal, `h` and `cross`, -L_mv, are those of all entities; the
    response holder has them.
    """
    site = glm_block_state_of(state)
    block, theta = site.block, site.accepted
    U = block.X - theta.mu
    if h is None:
        terms = glm_response_of(state).terms[:, block.rows]
        h, cross = np.maximum(-terms[BY_MM], 0.0), -terms[BY_MV]
    check_lengths(data.name, h=(h, len(U)), others=(others, len(U)))
    if (h < 0.0).any():
        raise MessageError(f"{data.name}: array 'h' has negative values, but the likelihood is log-concave")
    if cross is not None:
        check_lengths(data.name, cross=(cross, len(U)))
        state.report(block.weights(h, "weights"), block.weights(cross, "weights"))
        rows = WeightedRows.of(U, h, cross, others, data.min_count)
    elif alone is None or shown is None or lengths is None:
        raise MessageError(f"{data.name}: expected 'alone', 'shown' and 'lengths'")
    else:
        boxes = np.split(shown, np.cumsum(lengths)[:-1])
        if len(boxes) > others.shape[1]:
            h = np.where(others.sum(axis=1) == 1, float(alone), h)
        state.report(block.weights(h, "weights"))
        rows = sealed_weighted_rows(
            data, state, site, WeightedRows.of(U, h, 0.0 * h, others, data.min_count), boxes
        )
    return sum_information(state, block, theta, rows, sums)


def sealed_weighted_rows(
    data: SiteData, state: State, site: GLMBlockState, rows: WeightedRows, boxes: Sequence[Array]
) -> WeightedRows:
    """Replace sums over rows whose weights the response holder keeps by the response holder's sums.

    `boxes` have the sums with -L_mv by absent site and, unless these are few, those with -L_mm over entities
    that no other site has.
    """
    mu, p = site.accepted.mu, len(site.accepted.mu)
    K, alone = rows.others.shape[1], rows.others.sum(axis=1) == 1
    sums = np.array([open_sums(state, BLOCK, box) for box in boxes[:K]])
    by_cross = np.vstack([np.zeros(p), sums[:, 1:] - sums[:, :1] * mu])
    if len(boxes) == K:
        return replace(rows, by_cross=by_cross)
    n, first, second = np.split(open_sums(state, SQUARES, boxes[K]), [1, 1 + p])
    S = np.zeros((p, p))
    S[np.triu_indices(p)] = second
    S += np.triu(S, 1).T
    U, h = site.block.X - mu, rows.h
    missed = S - np.outer(first, mu) - np.outer(mu, first) + n * np.outer(mu, mu) - gram(U, h * alone)
    of_alone = first - n * mu - column_sums(U, h * alone)
    # They are in the sum over all rows, and in that of a group if too few other rows are outside of it.
    kept = safe_weights(h, rows.others, data.min_count)
    complete = np.array([bool(w[alone].any()) for w in kept])[:, None]
    return replace(rows, gram=rows.gram + missed, by_h=rows.by_h + complete * of_alone, by_cross=by_cross)


def sum_information(
    state: State, site: BlockState, theta: BlockParameters, rows: WeightedRows, totals: Floats
) -> dict[str, Array]:
    """Eliminate Sigma_k from the information, and stage the weighted columns for products with others.

    `totals` are four: of -L_vv and -L_v over the entities that the site lacks, of -L_mm and L_m over those
    that it has. Returns beta, w = Sigma beta; ``gram`` sum of h uu', u = x - mu; ``own`` the diagonal block
    of (beta, mu) without it; weighted sums of u over all rows and by the presence (``by_v``) or absence
    (``by_z``) of every other site; and the results of the elimination.
    """
    n, p, scale = site.n_seen, len(theta.mu), units(site)
    check_lengths(state.site, sums=(totals, 4))
    kappa, e, h_seen, z_seen = totals
    U, w, beta = site.X - theta.mu, theta.Sigma @ theta.beta, theta.beta
    # Products with another site's columns give the sums over common entities of h u_j u_k'.
    root = np.sqrt(rows.h)[:, None] * U * site.scale
    site.staged = {"U": U, "weights": rows.h, "others": rows.others, "root": root}
    elimination = eliminate_sigma(site, theta, float(e))
    state.keep("vfem elimination", elimination, state.entities)
    own = np.zeros((2 * p, 2 * p))
    own[:p, :p] = 4.0 * kappa * np.outer(w, w) + 2.0 * e * theta.Sigma
    # m includes the product mu'beta: in addition to the second derivatives, the first, z, remains.
    own[:p, p:] = z_seen * np.eye(p) - np.outer(rows.by_h[0], beta)
    own[p:, :p] = own[:p, p:].T
    own[p:, p:] = h_seen * np.outer(beta, beta) + n * np.linalg.inv(theta.Sigma)
    return {
        "beta": beta / site.scale,
        "w": w * site.scale,
        "own": own * np.outer(scale, scale),
        "gram": rows.gram * np.outer(site.scale, site.scale),
        "by_v": rows.by_h * site.scale,
        "by_z": rows.by_cross * site.scale,
        "J": elimination.lost * np.outer(scale, scale),
        "j": elimination.coupling * scale,
        "N": np.array(elimination.curvature),
    }


# ----------------------------------------------------------------------------------------------------
# Information on the alpha of a negative binomial response, and on alpha and the other parameters.
#
# The parameter is r = log alpha. The response holder has -L_mr, -L_vr and -L_rr, and every site learns the
# sums of its columns with -L_mr, sealed. If no third party can deal, -L_mr is sent.


def count_response(data: SiteData, state: State) -> GLMResponse:
    """Return the response, which must be negative binomial."""
    response = glm_response_of(state)
    if response.spec.alpha is None:
        raise MessageError(f"{data.name}: the response of this fit has no alpha")
    return response


MIXED_DERIVATIVE = per_entity("mixed derivative of the log-likelihood", optional=True)


@step(
    FAMILY,
    "glm_curvature glm_curvature_openly glm_information",
    takes={"patterns": control("number of missing patterns", 0)},
    releases={"sums": CURVATURES, "cross": MIXED_DERIVATIVE, **SEALED_SUMS},
    requests=control("which sites learn sums"),
)
def glm_scale_curvature(data: SiteData, state: State, text: str, patterns: Array) -> dict[str, Array]:
    """Release ``sums`` (G, 3) of -L_mr, -L_vr and -L_rr by pattern, and seal the sites' sums.

    `text` lists the sites. If it lists none, ``cross``, -L_mr of every entity, is released.
    """
    response, sites = count_response(data, state), json.loads(text)
    if int(response.code.max()) >= int(patterns):
        raise MessageError(f"{data.name}: expected the number of missing patterns")
    sums = response.by_pattern(-response.terms[[BY_MR, BY_VR, BY_RR]], int(patterns))
    cross = -response.terms[BY_MR]
    if not sites:
        return {"sums": sums, "cross": cross}
    return {"sums": sums} | seal_all(seal_of(data, state, BLOCK, k, cross) for k in sites)


@step(
    FAMILY,
    "glm_information glm_scale_curvature",
    takes={"shown": replace(SHOWN, optional=True), "cross": replace(MIXED_DERIVATIVE, weighs="weights")},
    releases={"by_scale": declare_sums("weighted sums of the columns")},
)
def glm_scale_information(
    data: SiteData, state: State, shown: Array | None = None, cross: Floats | None = None
) -> dict[str, Array]:
    """Release the sums of the columns, minus their means, with -L_mr of the site's entities: (p,)."""
    site = glm_block_state_of(state)
    block, mu = site.block, site.accepted.mu
    if shown is not None:
        sums = open_sums(state, BLOCK, shown)
        return {"by_scale": (sums[1:] - sums[0] * mu) * block.scale}
    if cross is None:
        cross = -count_response(data, state).terms[BY_MR][block.rows]
    check_lengths(data.name, cross=(cross, block.n_seen))
    state.report(block.weights(cross, "weights"))
    return {"by_scale": column_sums(block.X - mu, cross) * block.scale}


# ----------------------------------------------------------------------------------------------------
# A site's part of the supplemented EM algorithm.
#
# The exact EM map is evaluated at points near the estimate, in standardized columns. The site's own fit does
# not change.


@step(
    FAMILY,
    "estimates fitted",
    takes={"others": presence("which sites have each entity", 2, dtype="bool")},
    releases={
        "beta": declare_sums("coefficients of standardized columns"),
        "mu": declare_sums("means of standardized columns"),
        "Sigma": declare_sums("covariance of standardized columns", 2),
        "scale": declare_sums("standard deviations of the columns"),
        "s1": declare_sums("sums of the columns, by presence of other sites", 2),
        "S2": declare_sums("cross-products within the block", 2),
    },
    name="sem_constants",
)
def constants(data: SiteData, state: State, others: Bools) -> dict[str, Array]:
    """Release the estimates and the constant sums of the EM map; `others` (n_k, K) have each entity.

    beta, mu, Sigma of standardized columns; ``scale``; ``s1`` sums of the columns, over all rows and over
    those that each other site has; ``S2`` their cross-products.
    """
    site = block_state_of(state)
    theta = site.estimate
    check_lengths(data.name, others=(others, site.n_seen))
    site.staged["others"] = others
    sums = safe_weighted_sums(site.X, np.ones(site.n_seen), others, data.min_count)
    return {
        "beta": theta.beta,
        "mu": theta.mu,
        "Sigma": theta.Sigma,
        "scale": site.scale,
        "s1": sums,
        "S2": site.S2,
    }


@step(
    FAMILY,
    "sem_sums share_product sketch",
    takes={
        "beta": aggregate("coefficients near the estimate"),
        "mu": aggregate("means near the estimate"),
    },
    releases={"linear_predictor": per_entity("linear predictor x'beta of the site's block", maskable=True)},
    name="sem_predictor",
)
def predictor(data: SiteData, state: State, beta: Floats, mu: Floats) -> dict[str, Array]:
    """Release the centered linear predictor at another point."""
    site = block_state_of(state)
    check_lengths(data.name, beta=(beta, len(site.scale)), mu=(mu, len(site.scale)))
    return {"linear_predictor": site.pad(row_dots(site.X, beta) - float(mu @ beta))}


@step(
    FAMILY,
    "residuals sem_predictor",
    takes={
        "z": per_entity("standardized residual of the response", weighs="residuals"),
        "missing": aggregate("sums of z, z^2 and 1/v over entities the site lacks"),
        "s2": aggregate("residual variance", 0),
        "beta": aggregate("coefficients near the estimate"),
        "mu": aggregate("means near the estimate"),
        "Sigma": aggregate("covariance near the estimate", 2),
    },
    releases={
        "gradient": declare_weighted_sums("gradient by the coefficients"),
        "mu": declare_weighted_sums("means after the M-step"),
        "Sigma": declare_weighted_sums("covariance after the M-step", 2),
        "u_z": declare_weighted_sums("products of columns and residuals, by absence of other sites", 2),
    },
    name="sem_sums",
)
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
    """Compute the local part of the exact M-step at another point.

    Released: ``gradient`` of s2 Q by beta; ``mu`` and ``Sigma``, TWFL (6); ``u_z``, sums of (x - mu) z over
    the entities that each other site lacks, (K, p).
    """
    site = block_state_of(state)
    p = len(site.scale)
    check_lengths(data.name, z=(z, site.n_seen), missing=(missing, 3), beta=(beta, p), mu=(mu, p))
    state.report(site.weights(z, "residuals"))
    theta = BlockParameters(beta, mu, Sigma)
    factor = cho_factor(Sigma, lower=True)
    image, direction, _ = m_step(site, theta, factor, z, missing, float(s2))
    u_z = safe_weighted_sums(site.X - mu, z, ~site.staged["others"], data.min_count)[1:]
    # The coordinator solves for beta at all sites at once, from the gradients that give their directions.
    gradient = site.n * image.Sigma @ direction if not site.eta else direction * site.n / site.eta
    return {"gradient": gradient, "mu": image.mu, "Sigma": image.Sigma, "u_z": u_z}
