"""All that an institution answers for a vertical generalised linear model."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.message import Step
from fedstat.models.vglm.admm import steps as admm_steps
from fedstat.models.vglm.exchange import steps as exchange_steps
from fedstat.models.vglm.report import prediction
from fedstat.models.vglm.response import steps as response_steps

STEPS: Mapping[str, Step] = {
    **exchange_steps.STEPS,
    **response_steps.STEPS,
    **prediction.STEPS,
    **admm_steps.STEPS,
}
