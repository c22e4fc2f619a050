"""Regression where blocks of whole institutions are missing (VFEM)."""

from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.models.vfem.blocks.request import FAMILY
from fedstat.models.vfem.order import ORDER
from fedstat.models.vfem.steps import STEPS

FAMILIES[FAMILY] = in_order(STEPS, ORDER)
