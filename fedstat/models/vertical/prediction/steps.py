"""Site steps of a prediction: linear predictors and projections of new entities."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.federation.design.vertical_design import block_of
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, Step, aggregate, check_lengths, per_entity
from fedstat.kernels.row_products import row_dots
from fedstat.models.vertical.prediction import evaluation
from fedstat.typing import Array, Floats


def predict_block(data: SiteData, state: State, beta: Floats) -> dict[str, Array]:
    """Linear predictor x'beta of the opened rows: one released value per entity."""
    X = np.ascontiguousarray(block_of(state).X)
    check_lengths(data.name, beta=(beta, X.shape[1]))
    return {"linear_predictor": row_dots(X, beta)}


def project_block(data: SiteData, state: State, mu: Floats, factor: Floats) -> dict[str, Array]:
    """Project the centered rows on a factor of the covariance of the estimates."""
    return {"projection": (block_of(state).X - mu) @ factor}


PREDICTOR = per_entity("linear predictor x'beta of the site's block", maskable=True)
LINEAR_PREDICTOR_STEPS: Mapping[str, Step] = {
    "predict_block": Step(
        predict_block,
        {"beta": aggregate("coefficients", dtype="float64")},
        {"linear_predictor": PREDICTOR},
    ),
    "project_block": Step(
        project_block,
        {
            "mu": aggregate("means"),
            "factor": aggregate("factor of the covariance of the estimates", 2),
        },
        {
            "projection": ArrayDeclaration(
                "raw columns", "columns projected on the covariance of the estimates", 2, maskable=True
            )
        },
    ),
    **evaluation.EVALUATION_STEPS,
}
