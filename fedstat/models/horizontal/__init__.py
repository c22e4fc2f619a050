"""Shared by families whose sites hold different rows: model, rows, predictions, evaluation."""

from fedstat.federation.disclosure.protocol_order import in_order
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.horizontal.evaluation import FAMILY, ORDER, STEPS

FAMILIES[FAMILY] = in_order(STEPS, ORDER)
