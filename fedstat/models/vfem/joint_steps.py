"""Site steps of joint maximum likelihood with a response that is not normal.

The coefficients of an entity's linear predictor, given its observed columns, differ by missing pattern. Sums
are released by pattern; row-level derivatives of the log-likelihood stay at the response holder, as in
:mod:`fedstat.models.vfem.iteration.glm_steps`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights, GroupSums
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control, per_entity, presence
from fedstat.federation.protocols.running_sums import SHOWN, open_sums, seal_sums, taken_of
from fedstat.kernels.glm.quadrature import BY_M, BY_MM, BY_MV, BY_VV
from fedstat.kernels.row_products import column_sums, gram, row_dots
from fedstat.models.vertical.exchange.standardized_columns import require_groups
from fedstat.models.vfem.iteration.glm_steps import (
    CURVATURE,
    CURVATURES,
    SEALED_SUMS,
    glm_block_state_of,
    glm_response_of,
    seal_all,
    seal_of,
    sum_curvatures,
)
from fedstat.models.vfem.iteration.site_state import BlockState
from fedstat.models.vfem.iteration.state import FAMILY, SQUARES
from fedstat.typing import Array, Bools, Floats, Ints

WEIGHTED_FACTS = (EntityCount, ExternalWeights, GroupSums)
CODE = presence("missing pattern of each entity", dtype="int64")
PATTERNS = control("number of missing patterns", 0)
OPENED = {
    "shown": replace(SHOWN, optional=True),
    "lengths": control("bytes of each sealed message", dtype="int64", optional=True),
}
NAMES = control("which columns the sealed sums are of")


@step(
    FAMILY,
    (
        "deal_sums glm_evaluate glm_start glm_start_response joint_predict joint_score joint_weights "
        "open_columns take_columns"
    ),
    takes={"slopes": aggregate("coefficients by missing pattern", 2), "code": CODE},
    releases={
        "linear_predictor": per_entity(
            "linear predictor of the site's block by missing pattern", maskable=True
        )
    },
)
def joint_predict(data: SiteData, state: State, slopes: Floats, code: Ints) -> dict[str, Array]:
    """Linear predictor of the standardized rows, with the slopes (G, p) of each row's pattern, (n_k,)."""
    block = block_by_pattern(data, state, code, len(slopes))
    if slopes.shape[1] != block.X.shape[1]:
        raise MessageError(f"{data.name}: {slopes.shape[1]} slopes for {block.X.shape[1]} columns")
    out = np.empty(block.n_seen)
    for g in np.unique(code):
        out[code == g] = row_dots(np.ascontiguousarray(block.X[code == g]), np.ascontiguousarray(slopes[g]))
    return {"linear_predictor": block.pad(out)}


def block_by_pattern(data: SiteData, state: State, code: Ints, patterns: int) -> BlockState:
    """Return the block of the fit, with the patterns of its rows."""
    block = glm_block_state_of(state).block
    check_lengths(data.name, code=(code, block.n_seen))
    require_groups(data.name, code, patterns, 1 + block.X.shape[1], block.X.shape[1])
    if code.min() < 0:
        raise MessageError(f"{data.name}: array 'code' names a pattern that does not exist")
    block.require_alike(data.name, code)
    return block


@step(
    FAMILY,
    "glm_evaluate joint_predict",
    takes={"code": CODE, "patterns": PATTERNS, **OPENED},
    releases={
        "sums": aggregate("sums of the columns with residuals by pattern", 2, behind=(EntityCount, GroupSums))
    },
    requests=NAMES,
)
def joint_score(
    data: SiteData,
    state: State,
    text: str,
    code: Ints,
    patterns: Array,
    shown: Array | None = None,
    lengths: Ints | None = None,
) -> dict[str, Array]:
    """Release sums of L_m (1, x) by pattern, (G, 1 + p).

    They arrive sealed in `shown`, of these `lengths`, with the names in `text`; the response holder has L_m.
    """
    site, block = glm_block_state_of(state), block_by_pattern(data, state, code, int(patterns))
    site.scored += 1
    # A receiver that knows the residuals of this many rounds has as many equations in a column of a pattern.
    state.report(GroupSums(code, 0, site.scored))
    if shown is None or lengths is None:
        z = glm_response_of(state).terms[BY_M][block.rows]
        state.report(block.weights(z, "residuals"))
        return {"sums": sums_by_pattern(block, z, code, int(patterns))}
    out = np.zeros((int(patterns), 1 + block.X.shape[1]))
    for name, sums in opened(state, text, shown, lengths):
        out[pattern_of(name)] = sums
    return {"sums": out}


def opened(state: State, text: str, shown: Array, lengths: Ints) -> list[tuple[str, Floats]]:
    """Open sealed sums, with the names of their columns."""
    names = json.loads(text)
    if len(names) != len(lengths):
        raise MessageError(f"{state.site}: {len(names)} names for {len(lengths)} sealed sums")
    boxes = np.split(shown, np.cumsum(lengths)[:-1])
    return [(name, open_sums(state, name, box)) for name, box in zip(names, boxes, strict=True)]


def pattern_of(name: str) -> int:
    """State for which pattern columns were opened."""
    return int(name.partition(" ")[2])


def sums_by_pattern(block: BlockState, values: Floats, code: Ints, patterns: int) -> Floats:
    """Sum numbers, (n_k,), and their products with the columns by pattern: (G, 1 + p)."""
    out = np.zeros((patterns, 1 + block.X.shape[1]))
    for g in np.unique(code):
        w = np.where(code == g, values, 0.0)
        out[g, 0], out[g, 1:] = w.sum(), column_sums(block.X, w)
    return out


@step(
    FAMILY,
    "glm_evaluate joint_score",
    takes={"patterns": PATTERNS},
    releases={
        "sums": aggregate(
            "sums of second derivatives of the log-likelihood by pattern", 2, behind=(EntityCount, GroupSums)
        )
    },
)
def joint_weights(data: SiteData, state: State, patterns: Array) -> dict[str, Array]:
    """Release sums by pattern of the last evaluation, for an approximate information.

    With s the linear predictor minus its mean in the pattern: ``sums`` (G, 6) of -L_mm s, -L_mm s^2, -L_mv,
    -L_mv s and -L_vv, and the mean.
    """
    response, G = glm_response_of(state), int(patterns)
    terms, code = response.terms, response.code
    if int(code.max()) >= G:
        raise MessageError(f"{data.name}: expected the number of missing patterns")
    state.report(GroupSums(code, 0))
    mean = np.bincount(code, response.m, G) / np.maximum(np.bincount(code, minlength=G), 1)
    s, h = response.m - mean[code], -terms[BY_MM]
    rows = np.array([h * s, h * s * s, -terms[BY_MV], -terms[BY_MV] * s, -terms[BY_VV]])
    return {"sums": np.column_stack([response.by_pattern(rows, G), mean])}


@step(
    FAMILY,
    "glm_evaluate glm_fitted glm_pearson joint_score joint_weights",
    takes={
        "patterns": PATTERNS,
        "each": control("patterns whose curvatures leave one by one", dtype="bool"),
    },
    releases={"h": CURVATURE, "sums": CURVATURES, **SEALED_SUMS},
    requests=control("which sites learn sums"),
)
def joint_curvature(
    data: SiteData, state: State, text: str, patterns: Array, each: Bools
) -> dict[str, Array]:
    """Release the values of the last evaluation that the information needs.

    Released: ``sums`` (G, 5) of -L_mm, -L_mv, -L_vv, -L_v and L_m by pattern; ``h``, which is -L_mm per
    entity for the patterns in `each` (G,) and zero for others; and ``shown``, of the ``lengths``: for the
    columns in `text`, sums with -L_mv, and with -L_mm for squares.
    """
    response = glm_response_of(state)
    reported = {"sums": sum_curvatures(data, response, int(patterns))}
    h, cross = np.maximum(-response.terms[BY_MM], 0.0), -response.terms[BY_MV]
    check_lengths(data.name, each=(each, int(patterns)))
    reported["h"], boxes = np.where(each[response.code], h, 0.0), []
    for columns, site in json.loads(text):
        if columns.partition(" ")[0] != SQUARES:
            boxes.append(seal_of(data, state, columns, site, cross))
            continue
        taken = taken_of(state, columns, site, response.rows)
        # As many sums as entities would reveal the curvatures.
        state.report(GroupSums(np.zeros_like(taken.rows), taken.part.product.columns_a - 1))
        boxes.append(seal_sums(data, state, taken, h[taken.rows]))
    return reported | seal_all(boxes)


@step(
    FAMILY,
    "joint_curvature joint_predict joint_score",
    takes={
        "code": CODE,
        "patterns": PATTERNS,
        "h": per_entity(
            "curvature of the log-likelihood by the linear predictor", optional=True, weighs="weights"
        ),
        **OPENED,
    },
    releases={
        "grams": aggregate("weighted sums of products of the columns by pattern", 3),
        "cross": aggregate("weighted sums of the columns by pattern", 2),
    },
    rows_behind=WEIGHTED_FACTS,
    requests=NAMES,
)
def joint_information(
    data: SiteData,
    state: State,
    text: str,
    code: Ints,
    patterns: Array,
    h: Floats | None = None,
    shown: Array | None = None,
    lengths: Ints | None = None,
) -> dict[str, Array]:
    """Release sums by pattern for the information, and stage the weighted columns for products with others.

    `h` (n_k,) is -L_mm for entities of patterns that another site observes as well, and zero elsewhere. The
    other sums arrive sealed with the names in `text`, as :func:`joint_curvature` seals them. Released:
    ``grams`` (G, 1 + p, 1 + p) of -L_mm (1, x)(1, x)', and ``cross`` (G, 1 + p) of -L_mv (1, x).
    """
    block, G = block_by_pattern(data, state, code, int(patterns)), int(patterns)
    p = block.X.shape[1]
    reported = [] if shown is None or lengths is None else opened(state, text, shown, lengths)
    cross = np.zeros((G, 1 + p))
    if h is None:
        terms = glm_response_of(state).terms[:, block.rows]
        h = np.maximum(-terms[BY_MM], 0.0)
        cross = sums_by_pattern(block, -terms[BY_MV], code, G)
        state.report(block.weights(terms[BY_MV], "weights"))
    check_lengths(data.name, h=(h, block.n_seen))
    if (h < 0.0).any():
        raise MessageError(f"{data.name}: array 'h' has negative values, but the likelihood is log-concave")
    state.report(block.weights(h, "weights"), GroupSums(code, p))
    grams = np.zeros((G, 1 + p, 1 + p))
    ones = np.column_stack([np.ones(block.n_seen), block.X])
    for g in np.unique(code):
        here = code == g
        grams[g] = gram(np.ascontiguousarray(ones[here]), np.ascontiguousarray(h[here]))
    i, j = np.triu_indices(p)
    for name, sums in reported:
        g = pattern_of(name)
        if name.partition(" ")[0] != SQUARES:
            cross[g] = sums
            continue
        grams[g, 0] = grams[g, :, 0] = sums[: 1 + p]
        grams[g, 1 + i, 1 + j] = grams[g, 1 + j, 1 + i] = sums[1 + p :]
    # Products with another site's columns give the sums over common entities of h x_j x_k'.
    block.staged = {"root": np.sqrt(h)[:, None] * block.X, "weights": h}
    return {"grams": grams, "cross": cross}
