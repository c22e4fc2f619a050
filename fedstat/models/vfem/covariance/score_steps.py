"""Site steps for products of effective scores, for the robust covariance."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedstat.errors import MessageError, SecurityError
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.crypto.secure_product import MARK, keyed_digest
from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, check_lengths, control, per_entity, presence
from fedstat.federation.protocols.key_agreement import keys_of
from fedstat.federation.protocols.product_steps import as_bytes
from fedstat.federation.protocols.running_sums import SHOWN
from fedstat.federation.tables.table import entities_of
from fedstat.kernels.glm.negative_binomial import BY_R
from fedstat.kernels.glm.quadrature import BY_M, BY_V
from fedstat.models.vertical.exchange.standardized_columns import StandardizedResponse, detail_of
from fedstat.models.vfem.covariance.steps import SigmaElimination, units
from fedstat.models.vfem.iteration.glm_steps import (
    SEALED_SUMS,
    GLMBlockState,
    glm_block_state_of,
    glm_response_of,
    seal_all,
)
from fedstat.models.vfem.iteration.site_state import (
    BlockParameters,
    BlockState,
    GLMResponse,
    block_state_of,
    normal_response_of,
)
from fedstat.models.vfem.iteration.state import (
    AFTER_INFORMATION,
    FAMILY,
    declare_sums,
    declare_weighted_sums,
    safe_weighted_sums,
    safe_weights,
)
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# A site's part of every entity's effective score, for the robust covariance.
#
# Effective means that the estimation of Sigma_k is accounted for. The score of entity i is ``z_i C_i + V_i``,
# where z = L_m is the derivative of the log-likelihood by the linear predictor. If the response is not
# normal, z stays at the response holder. C and V depend on the site's own columns and parameters.


@dataclass(frozen=True, slots=True, eq=False)
class ScoreParts:
    """C and V of the site's entities, (n_k, 2p + 1): beta (p), mu (p), and Sigma_k's score along v."""

    C: Floats
    V: Floats

    @classmethod
    def of(cls, state: State, block: BlockState, theta: BlockParameters) -> ScoreParts:
        """Split the scores into C and V, in the units of the data."""
        absent = "Sigma was not eliminated; ask 'information' first"
        elimination = state.use("vfem elimination", SigmaElimination, absent)
        U, p, scale = block.staged["U"], len(theta.mu), units(block)
        Y = np.asarray(np.linalg.solve(elimination.T, U.T).T, dtype=np.float64)
        along = quadratic(Y, elimination.b * elimination.inverse)
        lam = np.column_stack([quadratic(Y, L * elimination.inverse) for L in elimination.L])
        C, V = np.zeros((len(U), 2 * p + 1)), np.empty((len(U), 2 * p + 1))
        C[:, : 2 * p] = np.hstack([U, np.tile(-theta.beta, (len(U), 1))]) * scale
        V[:, : 2 * p] = (np.hstack([np.zeros_like(U), np.linalg.solve(theta.Sigma, U.T).T]) - lam) * scale
        V[:, 2 * p] = along
        return cls(C, V)

    def scores(self, z: Floats) -> Floats:
        """Scores of entities with these derivatives."""
        return z[:, None] * self.C + self.V


def quadratic(Y: Floats, A: Floats) -> Floats:
    """Half of y'Ay - tr A for each row y."""
    return np.asarray(0.5 * (np.einsum("ij,ij->i", Y @ A, Y) - np.trace(A)))


LOCAL: Mapping[str, ArrayDeclaration] = {
    "gram": declare_sums("products of the scores within the block", 2),
    "with_response": declare_sums("products of the scores with those of the response", 2),
}
RESPONSE: Mapping[str, ArrayDeclaration] = {"gram": declare_sums("products of the scores of the response", 2)}
MISSING = presence("missing patterns", 2)


@step(FAMILY, "multiply_columns release_columns share_product sketch", releases=LOCAL)
def scores(data: SiteData, state: State) -> dict[str, Array]:
    """Stage the site's part F of every entity's effective score, and release its local products.

    Released: ``gram`` F'F and ``with_response`` F'[z, -e, -e by absent site], e = (1/v - z^2)/2.
    """
    site = block_state_of(state)
    F = ScoreParts.of(state, site, site.estimate).scores(site.z)
    site.staged["scores"] = F
    minus_e = -0.5 * (site.staged["weights"] - site.z**2)
    return local_products(data, site, np.column_stack([site.z, minus_e]), minus_e)


def local_products(data: SiteData, site: BlockState, of_response: Floats, by_v: Floats) -> dict[str, Array]:
    """Multiply the staged scores F with themselves, with the scores of (a, scale), (n_k, 2), and with L_v.

    Released: ``gram`` F'F and ``with_response`` (2p + 1, 2 + K), with L_v by absent site.
    """
    F = site.staged["scores"]
    absent = safe_weighted_sums(F, by_v, ~site.staged["others"], data.min_count)[1:]
    return {"gram": F.T @ F, "with_response": np.column_stack([F.T @ of_response, absent.T])}


@step(FAMILY, "deal_product fitted scores", takes={"missing": MISSING}, releases=RESPONSE)
def response_products(data: SiteData, state: State, missing: Bools) -> dict[str, Array]:
    """Products of the response holder's part of the scores; `missing` (G, K) are sites by pattern."""
    active = normal_response_of(state)
    z, inverse_v = active.z, 1.0 / active.v[active.code]
    minus_e = -0.5 * (inverse_v - z * z)
    F = np.column_stack([z, minus_e, minus_e[:, None] * missing[active.code]])
    return {"gram": F.T @ F}


# ----------------------------------------------------------------------------------------------------
# Products of effective scores if derivatives of the likelihood stay at the response holder.
#
# The score of entity i at site k is ``z_i C_i + V_i`` (:class:`ScoreParts`); the response holder H knows z,
# and site k knows C and V. Only sums over entities are released, each by one secure product of stacked
# columns:
#
#     within k:   sum z^2 CC' + z (CV' + VC') + VV'    H [z^2; z; 1],   k [CC'; CV' + VC'; VV']
#     H and k:    sum R (z C + V)'                     H [z R; R],      k [C; V]
#     j and k:    sum (z C_j + V_j)(z C_k + V_k)'      j [s C; d2 C + d1 V; d1 C + V; s V],
#                                                      k [(a2 C + a1 V)/s; C; V; a1 C/s]
#
# For the last product, H splits z (scaled to at most one in absolute value; C grows instead) and z^2 at
# random. Site j receives d1 = z - a1 and d2 = z^2 - a2, and site k the normal numbers a1 and a2 with standard
# deviation s. Each alone changes the odds of any two values of one z by less than one percent. Both together
# have z, so j and k must not collude. The numbers are drawn from the site's secret and z: the same fit gives
# the same numbers, so repeating it does not average them out.

SPREAD = 2.0**12
"""s: standard deviation of the numbers that hide z; no z is larger than one in absolute value."""
ITEM_OF_RESPONSE = "vfem response scores"
PARTS, SCORE_SQUARES, SHARED, SHARE_FACTORS = "score parts", "score squares", "scores shared", "score factors"
RESPONSE_OF_SCORES, RESPONSE_OF_SQUARES = "response scores", "response squares"
TIMES = {
    PARTS: 2,
    SCORE_SQUARES: 3,
    SHARED: 4,
    SHARE_FACTORS: 4,
    RESPONSE_OF_SCORES: 2,
    RESPONSE_OF_SQUARES: 3,
}
"""How often the entities are repeated in the stacked columns of each name."""


@dataclass(frozen=True, slots=True, eq=False)
class ResponseScores:
    """Columns that the response holder multiplies: z, L_v and the scores of its own parameters (n,), (n, q).

    `sites` are those of the fit; `missing` (n, K) states which of them lack each entity. A sum over some
    entities must include at least `least` of them. `own` (n, 2 p + 1) are scores of its own block, zero if it
    has none.
    """

    z: Floats
    by_scale: Floats
    by_v: Floats
    sites: Sequence[str]
    missing: Bools
    least: int
    own: Floats

    def rows(self, site: str) -> Ints:
        """Return the entities that a site has, among those of the fit."""
        return np.flatnonzero(~self.missing[:, self.sites.index(site)])

    def columns(self, site: str) -> Floats:
        """Return R (n, 2 + K + 2p + 1): z, score of the scale, L_v by absent site, the own block."""
        absent, rows = np.zeros(self.missing.shape), self.rows(site)
        # Sums over the few that a site has and another lacks would reveal them.
        kept = safe_weights(self.by_v[rows], self.missing[rows], self.least)[1:]
        absent[rows] = np.column_stack(kept)
        return np.column_stack([self.z, self.by_scale, absent, self.own])

    def gram(self) -> Floats:
        """Return R'R over all entities."""
        absent = self.by_v[:, None] * self.missing
        R = np.column_stack([self.z, self.by_scale, absent, self.own])
        return R.T @ R


DERIVATIVES = per_entity("first derivatives of the log-likelihood", 2)
WHICH = control("sites of the fit, and who is told")


@step(
    FAMILY,
    f"glm_derivatives_openly {AFTER_INFORMATION}",
    takes={"derivatives": replace(DERIVATIVES, optional=True, weighs="residuals")},
    releases={name: replace(one, behind=(EntityCount, ExternalWeights)) for name, one in LOCAL.items()},
    name="glm_scores_openly",
)
def glm_scores_unmasked(data: SiteData, state: State, derivatives: Floats | None = None) -> dict[str, Array]:
    """Stage the effective scores from derivatives of the site's entities, (3, n_k).

    The response holder has them, see :func:`first_derivatives`. The local products are released, as for a
    normal response.
    """
    site = glm_block_state_of(state)
    block = site.block
    if derivatives is None:
        derivatives = first_derivatives(glm_response_of(state))[:, block.rows]
    check_lengths(data.name, derivatives=(derivatives.T, block.n_seen))
    z, by_v, by_scale = derivatives
    state.report(block.weights(z, "residuals"))
    block.staged["scores"] = ScoreParts.of(state, block, site.accepted).scores(z)
    return local_products(data, block, np.column_stack([z, by_scale]), by_v)


@step(FAMILY, AFTER_INFORMATION, releases={"derivatives": DERIVATIVES}, name="glm_derivatives_openly")
def glm_derivatives_unmasked(data: SiteData, state: State) -> dict[str, Array]:
    """Release derivatives of every entity, which reveal its response, if a fit sends columns openly."""
    return {"derivatives": first_derivatives(glm_response_of(state))}


def first_derivatives(response: GLMResponse) -> Floats:
    """Return L_m, L_v, and L_r if alpha is estimated, otherwise zeros: (3, n)."""
    terms = response.terms
    by_scale = terms[BY_R] if response.estimates_alpha else np.zeros(terms.shape[1])
    return np.array([terms[BY_M], terms[BY_V], by_scale])


@step(
    FAMILY,
    f"glm_scores_openly {AFTER_INFORMATION}",
    takes={"missing": MISSING},
    releases={"gram": declare_weighted_sums("products of the scores of the response", 2), **SEALED_SUMS},
    requests=WHICH,
)
def glm_response_scores(data: SiteData, state: State, text: str, missing: Bools) -> dict[str, Array]:
    """Stage the response holder's columns, release their products, and seal what hides z from the sites.

    `text` lists the sites of the fit and, among these, the sites that receive z; `missing` (G, K) states
    which sites are missing in each pattern. Released: ``gram`` R'R, and ``shown``, of the ``lengths``, for
    each of them.
    """
    response = glm_response_of(state)
    sites, reported = json.loads(text)
    check_lengths(data.name, sites=(missing.T, len(sites)))
    if int(response.code.max()) >= len(missing):
        raise MessageError(f"{data.name}: expected the missing patterns of the fit")
    z, by_v, by_scale = first_derivatives(response)
    own = np.zeros((len(z), 0))
    if data.name in sites:
        site = glm_block_state_of(state)
        F = ScoreParts.of(state, site.block, site.accepted).scores(z[site.block.rows])
        own = np.zeros((len(z), F.shape[1]))
        own[site.block.rows] = F
    held = ResponseScores(z, by_scale, by_v, sites, missing[response.code], data.min_count, own)
    for name in sites:
        state.report(ExternalWeights(z[held.rows(name)] ** 2, "squared residuals"))
    state.keep(ITEM_OF_RESPONSE, held, len(z))
    state.keep("staged response", response_for_products(state, response), len(z))
    return {"gram": held.gram()} | seal_all(shares(data, state, held, response, reported))


def response_for_products(state: State, response: GLMResponse) -> StandardizedResponse:
    """State to which rows the response holder's columns belong, as for an exchange of moments."""
    y = response.y
    detail = detail_of(state, "response")
    return StandardizedResponse(y, response.spec, float(y.mean()), float(y.std()), response.rows, detail)


def shares(
    data: SiteData, state: State, held: ResponseScores, response: GLMResponse, reported: Sequence[str]
) -> list[Array]:
    """Seal for each site the scale of z, z minus a mask that later sites receive, and earlier masks."""
    if not reported:
        return []
    keys, entities = keys_of(state), entities_of(data.table)[response.rows]
    unit = 2.0 ** np.ceil(np.log2(max(float(np.abs(held.z).max()), np.finfo(float).tiny)))
    scaled = np.array([held.z / unit, (held.z / unit) ** 2])
    masks = {site: mask_of(data, site, held.z) for site in reported[:-1]}
    boxes = []
    for place, site in enumerate(reported):
        rows = held.rows(site)
        parts = [masks[other][:, rows] for other in reported[:place]]
        if site in masks:
            parts.insert(0, (scaled - masks[site])[:, rows])
        marked = keyed_digest(keys.secret(site, "marks scores"), "rows", entities[rows].tobytes())
        content = marked + np.array([unit]).tobytes() + b"".join(part.tobytes() for part in parts)
        boxes.append(as_bytes(SealedChannel(keys, site, "scores").seal(content)))
    return boxes


def mask_of(data: SiteData, site: str, z: Floats) -> Floats:
    """Draw a1 and a2 of all entities, (2, n), from the site's secret and z."""
    secret = data.trust.identity.secret("masks of scores")
    drawn = hmac.digest(secret, site.encode() + b"\0" + z.tobytes(), "sha256")
    rng = np.random.default_rng(int.from_bytes(drawn, "big"))
    return SPREAD * rng.standard_normal((2, len(z)))


@step(FAMILY, AFTER_INFORMATION, takes={"shown": SHOWN}, requests=WHICH)
def glm_scores(data: SiteData, state: State, text: str, shown: Array) -> dict[str, Array]:
    """Stage the columns whose products are those of the effective scores; nothing is released.

    `text` names the response holder and the sites before this one, and states whether others come after it;
    `shown` is what the response holder sealed.
    """
    holder, before, last = json.loads(text)
    site = glm_block_state_of(state)
    block, parts = site.block, ScoreParts.of(state, site.block, site.accepted)
    unit, numbers = open_shares(data, state, site, holder, shown)
    if numbers.shape != (len(before) + (not last), 2, block.n_seen):
        raise MessageError(f"{data.name}: expected other numbers of '{holder}'")
    C, V = parts.C, parts.V
    i, j = np.triu_indices(C.shape[1])
    squares = [C[:, i] * C[:, j], C[:, i] * V[:, j] + V[:, i] * C[:, j], V[:, i] * V[:, j]]
    block.staged |= {PARTS: np.vstack([C, V]), SCORE_SQUARES: np.vstack(squares)}
    C = unit * C
    if not last:
        d1, d2 = numbers[0][:, :, None]
        block.staged[SHARED] = np.vstack([SPREAD * C, d2 * C + d1 * V, d1 * C + V, SPREAD * V])
    for other, mask in zip(before, numbers[len(numbers) - len(before) :], strict=True):
        a1, a2 = mask[:, :, None] / SPREAD
        block.staged[f"{SHARE_FACTORS}:{other}"] = np.vstack([a2 * C + a1 * V, C, V, a1 * C])
    return {}


def open_shares(
    data: SiteData, state: State, site: GLMBlockState, holder: str, shown: Array
) -> tuple[float, Floats]:
    """Open what the response holder sealed: the scale of z, and numbers of the own entities (q, 2, n_k)."""
    keys, block = keys_of(state), site.block
    content = SealedChannel(keys, holder, "scores").open(shown.tobytes())
    entities = entities_of(data.table)[block.table_rows]
    marked = keyed_digest(keys.secret(holder, "marks scores"), "rows", entities.tobytes())
    if not hmac.compare_digest(content[:MARK], marked):
        raise SecurityError(
            f"{data.name}: the entities of this fit are not the same, in the same order, as at '{holder}'; "
            "the message was not used. Align the sites again"
        )
    numbers = np.frombuffer(content[MARK:])
    return float(numbers[0]), numbers[1:].reshape(-1, 2, block.n_seen)


def staged_scores(name: str, data: SiteData, state: State, of: str = "") -> Floats:
    """Return the columns of a site that are multiplied."""
    found = glm_block_state_of(state).block.staged.get(f"{name}:{of}" if of else name)
    if found is None:
        raise MessageError(f"{data.name}: there are no columns '{name}' in this session")
    return found


def response_scores(data: SiteData, state: State, of: str) -> Floats:
    """[z R; R], for products with a site."""
    held = response_of_scores(state)
    R = held.columns(of)
    return np.vstack([held.z[:, None] * R, R])


def response_squares(data: SiteData, state: State, of: str = "") -> Floats:
    """[z^2; z; 1]."""
    z = response_of_scores(state).z
    return np.concatenate([z**2, z, np.ones_like(z)])[:, None]


def response_of_scores(state: State) -> ResponseScores:
    """Return the staged columns of the response."""
    return state.use(ITEM_OF_RESPONSE, ResponseScores, "ask 'glm_response_scores' first")


SCORE_COLUMNS: Mapping[str, Callable[..., Floats]] = {
    **{name: partial(staged_scores, name) for name in (PARTS, SCORE_SQUARES, SHARED, SHARE_FACTORS)},
    RESPONSE_OF_SCORES: response_scores,
    RESPONSE_OF_SQUARES: response_squares,
}
