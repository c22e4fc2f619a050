"""Split neural networks over any subset of sites (LASER), and the methods compared with it."""

from fedstat.federation.disclosure.protocol_order import in_order
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.laser.request import FAMILY
from fedstat.models.laser.steps import ORDER, STEPS

FAMILIES[FAMILY] = in_order(STEPS, ORDER)
