"""Clusters of entities whose columns, of mixed type, are at several institutions (M2-SEM)."""

from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.models.m2sem.client.asked import FAMILY
from fedstat.models.m2sem.inference.outside import OUTSIDE_STEPS
from fedstat.models.m2sem.score_steps import SCORE_ORDER, SCORE_STEPS
from fedstat.models.m2sem.steps import ORDER, STEPS

FAMILIES[FAMILY] = in_order({**STEPS, **SCORE_STEPS, **OUTSIDE_STEPS}, {**ORDER, **SCORE_ORDER})
