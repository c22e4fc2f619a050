"""Shared by families over sites with different rows: model, session, rows, predictions, evaluation."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.horizontal.evaluation import FAMILY, STEPS

FAMILIES[FAMILY] = STEPS
