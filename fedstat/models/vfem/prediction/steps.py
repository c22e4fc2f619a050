"""Steps of an institution with entities to predict: projections of its columns, squared errors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.federation.design.by_columns import block_of, response_of
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.models.vfem.blocks.declare import weighted
from fedstat.typing import Array, Bools, Floats


def project_block(data: SiteData, state: State, mu: Floats, factor: Floats) -> dict[str, Array]:
    """Project the centred rows on a factor of the covariance of the estimates."""
    return {"projection": (block_of(state).X - mu) @ factor}


def prediction_errors(data: SiteData, state: State, use: Bools, predicted: Floats) -> dict[str, Array]:
    """Compare predictions with the response of the rows in `use`.

    Released: ``sums`` of rows compared, squared errors, squared deviations of the response from its mean.
    """
    response = response_of(state)
    check_lengths(data.name, use=(use, len(response)), predicted=(predicted, int(np.count_nonzero(use))))
    y = response[use]
    there = np.isfinite(y)
    y, predicted = y[there], predicted[there]
    state.rest_on(len(y))
    deviation = y - y.mean() if len(y) else y
    error = y - predicted
    return {"sums": np.array([len(y), error @ error, deviation @ deviation])}


STEPS: Mapping[str, Step] = {
    "project_block": Step(
        project_block,
        {
            "mu": Declared("aggregate", "means"),
            "factor": Declared("aggregate", "factor of the covariance of the estimates", 2),
        },
        {
            "projection": Declared(
                "raw columns", "columns projected on the covariance of the estimates", 2, maskable=True
            )
        },
    ),
    "prediction_errors": Step(
        prediction_errors,
        {
            "use": Declared("presence", "which entities are compared", dtype="bool"),
            "predicted": Declared("per entity", "predictions", weighs="predictions"),
        },
        {"sums": weighted("number of predictions, their squared errors, squared deviations")},
    ),
}
