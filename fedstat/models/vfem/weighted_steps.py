"""Site steps of the weighted estimate: weights from the response, and columns that are multiplied with them.

The response holder H computes a weight for every entity of a set of sites. Sums with weights come from secure
products of stacked columns; only sums over random groups of entities are released:

    H and k:   sum w (x, xx')'          H [w],                  k [x, xx']
    H and k:   sum w v x'               H [w v],                k [x]
    j and k:   sum w x_j x_k'           j [(w - a) x_j; s x_j], k [x_k; (a / s) x_k]

For the last one, H splits w, scaled to at most one, at random: site j receives w - a, and site k the normal
numbers a with standard deviation s. Each alone changes the odds of any two values of one w by less than one
percent. Both together have w, so j and k must not collude. The numbers are drawn from H's secret and w: the
same fit gives the same numbers, so repeating it does not average them out.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.errors import MessageError, SecurityError
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.crypto.secure_product import MARK, keyed_digest
from fedstat.federation.disclosure.facts import (
    EntityCount,
    ExcludedEntities,
    ExternalWeights,
    GroupSums,
    RowGroups,
)
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control, presence
from fedstat.federation.protocols.key_agreement import keys_of
from fedstat.federation.protocols.product_steps import as_bytes
from fedstat.federation.protocols.running_sums import SHOWN
from fedstat.federation.tables.table import entities_of
from fedstat.models.vertical.exchange.standardized_columns import (
    StandardizedBlock,
    require_groups,
    staged_block,
    staged_response,
)
from fedstat.models.vertical.exchange.steps import CODE, GROUPS, left_out
from fedstat.models.vfem.iteration.glm_steps import SEALED_SUMS, seal_all
from fedstat.models.vfem.iteration.state import FAMILY
from fedstat.typing import Array, Bools, Floats, Ints

SPREAD = 2.0**10
"""s: standard deviation of the numbers that hide w; no w is larger than one in absolute value."""
KNOTS = (0.1, 0.5, 0.9)
"""Quantiles of the response at the knots of its spline."""
WEIGHT, WEIGHTED_VALUES, OWN_PRODUCTS = "weight of a set", "weighted values of a set", "columns and products"
COLUMNS = "columns alone"
SHARED, MASKED = "columns by weights", "columns by masks"
TIMES_OF_WEIGHTED = {SHARED: 2, MASKED: 2}
ITEM = "vfem weights"


@dataclass(frozen=True, slots=True, eq=False)
class HolderWeights:
    """Weights (M, n) of M sets of sites, zero for entities that a set lacks, and own values v (n, q)."""

    weights: Floats
    values: Floats


def response_basis(values: Floats) -> Floats:
    """Return 1, the values (n, q), of which the last is the response, and its restricted cubic spline."""
    y = values[:, -1]
    a, b, c = np.quantile(y, KNOTS)
    columns = [np.ones(len(y)), *values.T]
    if a < b < c:
        last = np.maximum(y - c, 0.0) ** 3
        first, middle = np.maximum(y - a, 0.0) ** 3, np.maximum(y - b, 0.0) ** 3
        columns.append((first - last) / (c - a) - (middle - last) / (c - b))
    return np.column_stack(columns)


def calibrated_weights(basis: Floats, has: Bools) -> Floats:
    """Weights of the entities of a set with which sums of the basis are those over all entities, (n,).

    Those closest to a constant (Deville and Saerndal 1992, linear method).
    """
    own = basis[has]
    if len(own) < 2 * basis.shape[1]:
        raise MessageError("a set of sites has too few entities for its weights")
    out = np.zeros(len(basis))
    out[has] = own @ np.linalg.lstsq(own.T @ own, basis.sum(axis=0), rcond=None)[0]
    return out


@step(
    FAMILY,
    "stage_block stage_response",
    takes={
        "sets": presence("which entities every set of sites has", 2, dtype="bool"),
        "code": CODE,
        "groups": GROUPS,
    },
    releases={
        "sums": aggregate(
            "sums of weights, of the response and of own columns, and of their products by group",
            2,
            behind=(EntityCount, RowGroups, GroupSums, ExcludedEntities, ExternalWeights),
        ),
        **SEALED_SUMS,
    },
    requests=control("the sets of two sites, by number, with these sites and their own sets"),
)
def weigh_response(
    data: SiteData, state: State, text: str, sets: Bools, code: Ints, groups: Array
) -> dict[str, Array]:
    """Compute the weights of every set, release their sums by group, and seal their shares.

    `sets` (M, n); `text` lists (set, first site, its set, second site, its set). Released: ``sums``
    ((M + 1) groups, (1 + q)^2) of w (1, v)(1, v)', without weights last, and ``shown``, of the ``lengths``.
    """
    response, G = staged_response(state), int(groups)
    y = response.standardized
    check_lengths(data.name, code=(code, len(y)), sets=(sets.T, len(y)))
    values = y[:, None]
    if "staged block" in state:
        block = staged_block(state)
        check_lengths(data.name, block=(block.X, len(y)))
        values = np.column_stack([block.X, y])
    width = values.shape[1] + 1
    require_groups(data.name, code, G, (len(sets) + 1) * width * width, width)
    basis = response_basis(values)
    weights = np.array([calibrated_weights(basis, has) for has in sets])
    state.keep(ITEM, HolderWeights(weights, values), len(y))
    state.report(left_out(code), RowGroups("", code, response.rows))
    design, sums = np.column_stack([np.ones(len(y)), values]), []
    for has, w in zip([*sets, np.ones(len(y), dtype=bool)], [*weights, np.ones(len(y))], strict=True):
        of_set = np.where(has, code, -1)
        state.report(response.groups(of_set, columns=values.shape[1]), ExternalWeights(w[has], "weights"))
        for g in range(G):
            own = design[of_set == g]
            sums.append(((own * w[of_set == g, None]).T @ own).ravel())
    return {"sums": np.array(sums)} | seal_all(sealed_shares(data, state, sets, weights, json.loads(text)))


def sealed_shares(
    data: SiteData,
    state: State,
    sets: Bools,
    weights: Floats,
    pairs: Sequence[tuple[int, str, int, str, int]],
) -> Iterator[Array]:
    """Seal w - a for the first site of every pair and a for the second, in the order of the pairs."""
    keys, entities = keys_of(state), entities_of(data.table)[staged_response(state).rows]
    for number, first, of_first, second, of_second in pairs:
        w = weights[number]
        unit = 2.0 ** np.ceil(np.log2(max(float(np.abs(w).max()), np.finfo(float).tiny)))
        mask = mask_of(data, f"{first} {second}", w / unit)
        for site, own, part in ((first, of_first, w / unit - mask), (second, of_second, mask)):
            has = sets[own]
            marked = keyed_digest(
                keys.secret(site, f"marks weights {number}"), "rows", entities[has].tobytes()
            )
            content = marked + np.array([unit]).tobytes() + part[has].tobytes()
            yield as_bytes(SealedChannel(keys, site, f"weights {number}").seal(content))


def mask_of(data: SiteData, pair: str, w: Floats) -> Floats:
    """Draw the numbers that hide the weights, (n,), from the site's secret and the weights."""
    secret = data.trust.identity.secret("masks of weights")
    drawn = hmac.digest(secret, pair.encode() + b"\0" + w.tobytes(), "sha256")
    return SPREAD * np.random.default_rng(int.from_bytes(drawn, "big")).standard_normal(len(w))


@step(
    FAMILY,
    "stage_block stage_response weigh_response weigh_columns",
    takes={"shown": SHOWN},
    requests=control("the response holder, the number of the set, and whether the site is its first"),
)
def weigh_columns(data: SiteData, state: State, text: str, shown: Array) -> dict[str, Array]:
    """Stage the columns times their shares of the weights; nothing is released."""
    holder, number, first = json.loads(text)
    staged, keys = staged_block(state), keys_of(state)
    content = SealedChannel(keys, holder, f"weights {number}").open(shown.tobytes())
    entities = entities_of(data.table)[staged.table_rows]
    marked = keyed_digest(keys.secret(holder, f"marks weights {number}"), "rows", entities.tobytes())
    if not hmac.compare_digest(content[:MARK], marked):
        raise SecurityError(
            f"{data.name}: the entities of this fit are not the same, in the same order, as at '{holder}'; "
            "the message was not used. Align the sites again"
        )
    unit, *_ = numbers = np.frombuffer(content[MARK:])
    part = numbers[1:]
    check_lengths(data.name, shown=(part, len(staged.X)))
    X = staged.X
    stacked = [unit * part[:, None] * X, unit * SPREAD * X] if first else [X, part[:, None] / SPREAD * X]
    state.keep(f"{SHARED if first else MASKED}:{number}", np.vstack(stacked), 2 * len(X))
    return {}


def _stacked(name: str) -> Callable[[SiteData, State, str], Floats]:
    def columns(data: SiteData, state: State, number: str) -> Floats:
        return state.use(f"{name}:{number}", np.ndarray, "request 'weigh_columns' first")

    return columns


def _weight(data: SiteData, state: State, number: str) -> Floats:
    return np.asarray(_held(state).weights[int(number)][:, None])


def _weighted_values(data: SiteData, state: State, number: str) -> Floats:
    held = _held(state)
    return np.asarray(held.weights[int(number)][:, None] * held.values)


def _held(state: State) -> HolderWeights:
    return state.use(ITEM, HolderWeights, "request 'weigh_response' first")


def _columns(data: SiteData, state: State, number: str) -> Floats:
    return np.asarray(staged_block(state).X)


def _own_products(data: SiteData, state: State, number: str) -> Floats:
    staged: StandardizedBlock = staged_block(state)
    i, j = np.triu_indices(staged.X.shape[1])
    return np.column_stack([staged.X, staged.X[:, i] * staged.X[:, j]])


WEIGHTED_COLUMNS: Mapping[str, Callable[..., Floats]] = {
    WEIGHT: _weight,
    WEIGHTED_VALUES: _weighted_values,
    COLUMNS: _columns,
    OWN_PRODUCTS: _own_products,
    SHARED: _stacked(SHARED),
    MASKED: _stacked(MASKED),
}
OF_HOLDER = frozenset({WEIGHT, WEIGHTED_VALUES})
