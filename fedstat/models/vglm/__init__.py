"""Generalised linear models of columns that several institutions hold, with selection."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.vglm.steps import FAMILY, STEPS

FAMILIES[FAMILY] = STEPS
