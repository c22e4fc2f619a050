"""Shared by families over sites with different rows: model, session, rows, predictions, evaluation."""

from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.models.horizontal.evaluation import ORDER, STEPS
from fedstat.models.horizontal.recalibration import FAMILY

FAMILIES[FAMILY] = in_order(STEPS, ORDER)
