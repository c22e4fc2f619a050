"""Generalized linear models of columns at several sites, with selection."""

from fedstat.federation.disclosure.protocol_order import in_order
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.vglm.steps import FAMILY, STEP_ORDER, STEPS

FAMILIES[FAMILY] = in_order(STEPS, STEP_ORDER)
