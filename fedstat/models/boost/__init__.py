"""Functions on functions by component-wise boosting, from one round of sums."""

from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.models.boost.private import steps as private
from fedstat.models.boost.score_steps import ORDER, SCORE_STEPS
from fedstat.models.boost.steps import FAMILY, STEPS
from fedstat.models.boost.vertical import steps as vertical

FAMILIES[FAMILY] = in_order({**STEPS, **SCORE_STEPS}, ORDER)
FAMILIES[vertical.FAMILY] = vertical.STEPS
FAMILIES[private.FAMILY] = private.STEPS
