"""Steps that VFEM shares with other families, and their order in its exchanges."""

from __future__ import annotations

from fedstat.federation.disclosure.family import include
from fedstat.models.vertical.exchange.steps import EXCHANGE_ORDER, ExchangeRules, exchange_steps
from fedstat.models.vertical.prediction.steps import LINEAR_PREDICTOR_STEPS
from fedstat.models.vfem.covariance.cross_products import PRODUCT_COLUMNS, STAGES, staged_weights
from fedstat.models.vfem.covariance.score_steps import (
    RESPONSE_OF_SCORES,
    RESPONSE_OF_SQUARES,
    SCORE_COLUMNS,
    TIMES,
)
from fedstat.models.vfem.iteration.state import CROSS_STEPS, FAMILY
from fedstat.models.vfem.weighted_steps import OF_HOLDER, TIMES_OF_WEIGHTED, WEIGHTED_COLUMNS

RULES = ExchangeRules(
    remembers=False,
    fills=True,
    shapes=True,
    weighted=True,
    columns={**PRODUCT_COLUMNS, **SCORE_COLUMNS, **WEIGHTED_COLUMNS},
    weights={STAGES[0]: staged_weights},
    times={**TIMES, **TIMES_OF_WEIGHTED},
    of_response=frozenset((RESPONSE_OF_SCORES, RESPONSE_OF_SQUARES)) | OF_HOLDER,
)
include(
    FAMILY,
    {**exchange_steps(RULES), **LINEAR_PREDICTOR_STEPS},
    {
        **EXCHANGE_ORDER,
        "open_product": f"{CROSS_STEPS} deal_product open_product response_products sem_constants "
        "sum_products sum_response weigh_columns weigh_response",
        "project_block": "predict_block",
    },
)
