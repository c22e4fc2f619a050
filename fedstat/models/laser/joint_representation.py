"""Joint representation of all sites' columns from secure products, and its distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedstat.codec import Minimum
from fedstat.errors import EstimationError, MessageError, Remedy
from fedstat.federation.crypto.masks import hides
from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_allocation, check_lengths, control, per_entity
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.protocols.product_steps import COMPARISON_ORDER, PRODUCT_STEPS, check_positions
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.split_networks import count_parameters
from fedstat.models.laser.networks import ADAM, Networks
from fedstat.models.laser.request import FAMILY, NetworksRequest
from fedstat.models.laser.steps import DISTILLED, EXCHANGE, ROWS, DistilledNetwork, input_columns
from fedstat.models.vertical.exchange.protocol import multiply_between_sites, product_operands, symmetrized
from fedstat.models.vertical.exchange.standardized_columns import staged_block
from fedstat.models.vertical.exchange.steps import BLOCK
from fedstat.models.vertical.layout import Layout
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Singular vectors of the columns of all sites, from secure products, over the entities in common.
#
# Products of columns of two sites come from secure multiplication. The vectors follow from the sums of
# products. The joint representation of an entity is a sum of projections, one from each site.

DEPENDENT = 1e-9
"""Share of the largest eigenvalue below which an eigenvalue counts as zero."""


@dataclass(frozen=True, slots=True, eq=False)
class JointRepresentation:
    """Left singular vectors (m, r) of standardized columns of `entities` (m,), at a mean square of one.

    They are the columns times `weights` (p, r).
    """

    entities: Ints
    vectors: Floats
    weights: Floats


def singular_weights(gram: Floats, m: int, width: int) -> Floats:
    """Weights (p, r) that make singular vectors of columns with these sums of products (p, p).

    The vectors are those of the `width` largest singular values, or of all if there are fewer, at a mean
    square of one over the m rows; the largest weight of each is positive.
    """
    values, V = np.linalg.eigh(gram)
    values, V = values[::-1], V[:, ::-1]
    kept = min(width, int((values > DEPENDENT * values[0]).sum()))
    V = V[:, :kept] * np.sign(V[np.abs(V[:, :kept]).argmax(axis=0), np.arange(kept)])
    return np.ascontiguousarray(V * np.sqrt(m / values[:kept]))


def decompose(
    layout: Layout, entities: Ints, width: int, product_session: SecureProductSession
) -> FitProtocol[JointRepresentation]:
    """Decompose the staged columns over those of some entities that every site has (Chai et al. 2022).

    Raises
    ------
    EstimationError
        Fewer than two entities have all sites.
    ModelError
        No third party can deal for two sites.
    """
    chosen = np.zeros(layout.n, dtype=np.bool_)
    complete = np.logical_not(layout.missing.any(axis=1))
    chosen[entities] = complete[layout.code[entities]]
    common, p = np.flatnonzero(chosen), layout.p
    if len(common) < 2:
        raise EstimationError(
            f"method='vfedtrans' decomposes the columns of entities that all sites have; there are "
            f"{len(common)} to learn from",
            remedy=Remedy("fit(..., method='laser')", "Use {arguments} or 'local'"),
        )
    every = np.ones((1, len(layout.sites)), dtype=np.bool_)
    sides = product_operands(layout, BLOCK, np.where(chosen, 0, -1), every)
    replies = yield [product_session.request(s.site, "sum_products", code=s.code, groups=1) for s in sides]
    products = np.zeros((1, p + 1, p + 1))
    for side, reply in zip(sides, replies, strict=True):
        products[:, side.place, side.place] = reply.arrays["grams"]
    yield from multiply_between_sites(layout, sides, products, product_session)
    weights = singular_weights(symmetrized(products)[0, 1:, 1:], len(common), width)
    projected = _project(layout, common, weights, product_session)
    if hides(len(layout.sites)):
        projected = masked_protocol(projected, layout.sites, product_session.session)
    return JointRepresentation(common, (yield from projected), weights)


def _project(
    layout: Layout, common: Ints, weights: Floats, product_session: SecureProductSession
) -> FitProtocol[Floats]:
    """Add up the sites' projections of their columns, (m, r)."""
    replies = yield [
        product_session.request(
            k, "project_columns", rows=np.searchsorted(layout.kept[k], common), weights=weights[at]
        )
        for k, at in layout.places().items()
    ]
    return np.asarray(np.sum([reply.arrays["projection"] for reply in replies], axis=0))


# ----------------------------------------------------------------------------------------------------
# Steps of a site that learns a joint representation from its own columns, and uses both.


@dataclass(frozen=True, slots=True)
class DistillationRequest:
    """A network that predicts a joint representation, its number of epochs, and its batch size."""

    network: NetworksRequest
    epochs: Annotated[int, Minimum(1)]
    batch_size: Annotated[int, Minimum(1)]


@step(
    FAMILY,
    "share_product deal_product sum_products",
    takes={
        "rows": ROWS,
        "weights": aggregate("weights of the columns in singular vectors", 2),
    },
    releases={"projection": per_entity("projections on singular vectors", 2, maskable=True)},
)
def project_columns(data: SiteData, state: State, rows: Ints, weights: Floats) -> dict[str, Array]:
    """Multiply some rows (m,) of the staged block by weights (p, r): ``projection`` (m, r)."""
    X = staged_block(state).X
    check_lengths(data.name, weights=(weights, X.shape[1]))
    check_positions(data.name, rows, len(X))
    check_allocation(data.name, len(rows) * weights.shape[1], X.size)
    return {"projection": X[rows] @ weights}


@step(
    FAMILY,
    "project_columns",
    takes={
        "rows": ROWS,
        "target": per_entity(
            "singular vectors of all sites' columns", 2, dtype="float64", weighs="singular vectors"
        ),
    },
    releases={
        "parameters": aggregate("parameters of the networks", 2, behind=(EntityCount, ExternalWeights))
    },
    request=DistillationRequest,
    requests=control("layers and training"),
)
def distil(
    data: SiteData, state: State, request: DistillationRequest, rows: Ints, target: Floats
) -> dict[str, Array]:
    """Learn a representation (m, r) of some rows from the local columns; it is then an input of the networks.

    Released: ``parameters`` (1, q) of the network that was learned.
    """
    network = request.network
    X, _ = input_columns(state, network)
    check_lengths(data.name, target=(target, len(rows)))
    check_positions(data.name, rows, len(X))
    widths = (X.shape[1], *network.hidden, network.width)
    if target.shape[1] != network.width or not len(rows):
        raise MessageError(f"{data.name}: a representation of {target.shape[1]} columns for another network")
    check_allocation(data.name, ADAM * count_parameters(widths), X.size)
    learned = Networks.draw(widths, 1, network.optimizer, (network.seed, network.number))
    rng = np.random.default_rng([network.seed, network.number])
    for _ in range(request.epochs):
        order = rng.permutation(len(rows))
        for batch in np.array_split(order, -(-len(order) // request.batch_size)):
            _learn(learned, X[rows[batch]], target[batch])
    state.keep(DISTILLED, DistilledNetwork(widths, learned.theta), len(X))
    state.report(EntityCount(len(rows)))
    return {"parameters": learned.theta}


def _learn(network: Networks, X: Floats, target: Floats) -> None:
    """Take a step against the squared error of a batch."""
    A = network.activate(0, np.ascontiguousarray(X.T))
    error = np.ascontiguousarray(network.output(A) - target.T) / len(X)
    network.learn(0, network.back(0, A, error))


include(
    FAMILY,
    {name: EXCHANGE[name] for name in ("sum_products", *PRODUCT_STEPS)},
    {
        **COMPARISON_ORDER,
        "sum_products": "stage_block stage_outcome",
        "open_product": "sum_products deal_product open_product",
    },
)
