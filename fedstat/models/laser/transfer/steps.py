"""Steps of a site that learns a joint representation from its own columns, and keeps it beside these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import Entities, GivenWeights
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths, check_room
from fedstat.federation.rounds.product_steps import check_positions
from fedstat.kernels.mlp import count_parameters
from fedstat.models.laser.training.asked import NetworksAsked
from fedstat.models.laser.training.client_steps import DISTILLED, EXCHANGE, ROWS, Distilled, input_columns
from fedstat.models.laser.training.networks import ADAM, Networks
from fedstat.models.vertical.exchange.staged import staged_block
from fedstat.models.vertical.exchange.steps import EXCHANGE_ORDER
from fedstat.records import Least, from_json
from fedstat.typing import Array, Floats, Ints


@dataclass(frozen=True, slots=True)
class DistillationAsked:
    """A network that is to predict a joint representation, how often from each entity, how many at once."""

    network: NetworksAsked
    epochs: Annotated[int, Least(1)]
    batch_size: Annotated[int, Least(1)]


def project_columns(data: SiteData, state: State, rows: Ints, weights: Floats) -> dict[str, Array]:
    """Multiply some rows (m,) of the staged block with weights (p, r): ``projection`` (m, r)."""
    X = staged_block(state).X
    check_lengths(data.name, weights=(weights, X.shape[1]))
    check_positions(data.name, rows, len(X))
    check_room(data.name, len(rows) * weights.shape[1], X.size)
    return {"projection": X[rows] @ weights}


def distil(
    data: SiteData, state: State, text: str, rows: Ints, target: Floats
) -> tuple[dict[str, Array], str]:
    """Learn a representation (m, r) of some rows from the columns here; it is an input of the networks then.

    Released: ``parameters`` (1, q) of the network that was learned.
    """
    asked = from_json(DistillationAsked, text, f"{data.name}: the question about a representation")
    X, network = input_columns(state, asked.network.raw), asked.network
    check_lengths(data.name, target=(target, len(rows)))
    check_positions(data.name, rows, len(X))
    widths = (X.shape[1], *network.hidden, network.width)
    if target.shape[1] != network.width or not len(rows):
        raise MessageError(f"{data.name}: a representation of {target.shape[1]} columns for another network")
    check_room(data.name, ADAM * count_parameters(widths), X.size)
    learned = Networks.draw(widths, 1, network.optimiser, (network.seed, network.number))
    rng = np.random.default_rng([network.seed, network.number])
    for _ in range(asked.epochs):
        order = rng.permutation(len(rows))
        for batch in np.array_split(order, -(-len(order) // asked.batch_size)):
            _learn(learned, X[rows[batch]], target[batch])
    state.keep(DISTILLED, Distilled(widths, learned.theta), len(X))
    state.tell(Entities(len(rows)))
    return {"parameters": learned.theta}, ""


def _learn(network: Networks, X: Floats, target: Floats) -> None:
    """Take a step against the squared error of a batch."""
    A = network.activate(0, np.ascontiguousarray(X.T))
    error = np.ascontiguousarray(network.output(A) - target.T) / len(X)
    network.learn(0, network.back(0, A, error))


TRANSFER_STEPS: Mapping[str, Step] = {
    **{name: EXCHANGE[name] for name in ("sum_products", "deal_product", "open_product", "share_product")},
    "project_columns": Step(
        project_columns,
        {"rows": ROWS, "weights": Declared("aggregate", "weights of the columns in singular vectors", 2)},
        {"projection": Declared("per entity", "projections on singular vectors", 2, maskable=True)},
    ),
    "distil": Step(
        distil,
        {
            "rows": ROWS,
            "target": Declared(
                "per entity",
                "singular vectors of all institutions' columns",
                2,
                dtype="float64",
                weighs="singular vectors",
            ),
        },
        {
            "parameters": Declared(
                "aggregate", "parameters of the networks", 2, behind=(Entities, GivenWeights)
            )
        },
        Declared("control", "layers and training"),
    ),
}
TRANSFER_ORDER: Mapping[str, str] = {
    "share_product": EXCHANGE_ORDER["share_product"],
    "sum_products": "stage_block stage_outcome",
    "open_product": "sum_products deal_product open_product",
    "project_columns": "share_product deal_product sum_products",
    "distil": "project_columns",
}
