"""Generalised linear models of columns that several institutions hold, with selection."""

from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.models.vglm.order import ORDER
from fedstat.models.vglm.steps import FAMILY, STEPS

FAMILIES[FAMILY] = in_order(STEPS, ORDER)
