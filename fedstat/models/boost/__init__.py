"""Functions on functions by component-wise boosting, from one round of sums."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.boost.steps import FAMILY, STEPS
from fedstat.models.boost.vertical import steps as vertical

FAMILIES[FAMILY] = STEPS
FAMILIES[vertical.FAMILY] = vertical.STEPS
