"""All that an institution answers for a split network."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.message import Step
from fedstat.models.laser.training.client_steps import CLIENT_ORDER, CLIENT_STEPS
from fedstat.models.laser.training.holder_steps import HOLDER_ORDER, HOLDER_STEPS
from fedstat.models.laser.training.judging_steps import JUDGING_STEPS
from fedstat.models.laser.transfer.steps import TRANSFER_ORDER, TRANSFER_STEPS

STEPS: Mapping[str, Step] = {**CLIENT_STEPS, **HOLDER_STEPS, **JUDGING_STEPS, **TRANSFER_STEPS}
ORDER: Mapping[str, str] = {**CLIENT_ORDER, **HOLDER_ORDER, **TRANSFER_ORDER}
"""Steps by what may come directly before them at a site."""
