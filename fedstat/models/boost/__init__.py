"""Function-on-function regression by component-wise boosting from one round of sums."""

from fedstat.federation.disclosure.protocol_order import in_order
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.boost.private import steps as private
from fedstat.models.boost.steps import FAMILY, ORDER, SCORE_STEPS, STEPS
from fedstat.models.boost.vertical import steps as vertical

FAMILIES[FAMILY] = in_order({**STEPS, **SCORE_STEPS}, ORDER)
FAMILIES[vertical.FAMILY] = vertical.STEPS
FAMILIES[private.FAMILY] = private.STEPS
