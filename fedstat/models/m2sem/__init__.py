"""Clusters of entities whose columns of mixed type are at several sites (M2-SEM)."""

from fedstat.federation.disclosure.protocol_order import in_order
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.m2sem.analyses import OUTSIDE_STEPS
from fedstat.models.m2sem.request import FAMILY
from fedstat.models.m2sem.steps import ORDER, SCORE_ORDER, SCORE_STEPS, STEPS

FAMILIES[FAMILY] = in_order({**STEPS, **SCORE_STEPS, **OUTSIDE_STEPS}, {**ORDER, **SCORE_ORDER})
