"""Regression where blocks of whole sites are missing (VFEM)."""

from fedstat.federation.disclosure.protocol_order import in_order
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.vfem.iteration.messages import FAMILY
from fedstat.models.vfem.steps import STEP_ORDER, STEPS

FAMILIES[FAMILY] = in_order(STEPS, STEP_ORDER)
