"""Split networks over any set of institutions (LASER), and the methods that they are compared with."""

from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.models.laser.steps import ORDER, STEPS
from fedstat.models.laser.training.asked import FAMILY

FAMILIES[FAMILY] = in_order(STEPS, ORDER)
