"""Generalised linear models of columns that several institutions hold, with selection."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.vglm.exchange.gram import FAMILY
from fedstat.models.vglm.steps import STEPS

FAMILIES[FAMILY] = STEPS
