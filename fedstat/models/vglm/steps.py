"""All that an institution answers for a vertical generalised linear model."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.message import Step
from fedstat.models.vertical.exchange.steps import ExchangeRules, exchange_steps
from fedstat.models.vertical.prediction import steps as prediction_steps
from fedstat.models.vglm.admm import steps as admm_steps
from fedstat.models.vglm.newton import steps as newton_steps
from fedstat.models.vglm.response import steps as response_steps
from fedstat.models.vglm.response.distributions import saturated

FAMILY = "vglm"
RULES = ExchangeRules(
    remembers=True,
    columns={newton_steps.WEIGHTED: newton_steps.weighted_columns},
    weights={newton_steps.WEIGHTED: newton_steps.weights_released},
    constant=saturated,
)
STEPS: Mapping[str, Step] = {
    **exchange_steps(RULES),
    **newton_steps.STEPS,
    **response_steps.STEPS,
    **prediction_steps.STEPS,
    **admm_steps.STEPS,
}
