"""Generalised linear models of columns that several institutions hold, with selection."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.vglm import admm_steps, prediction, response_steps, steps
from fedstat.models.vglm.gram import FAMILY

FAMILIES[FAMILY] = {**steps.STEPS, **response_steps.STEPS, **prediction.STEPS, **admm_steps.STEPS}
