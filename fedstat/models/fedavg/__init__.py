"""Federated averaging and its relatives: the engineering baselines beside the exact federated GLM."""

from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.models.fedavg.steps import FAMILY, ORDER, STEPS

FAMILIES[FAMILY] = in_order(STEPS, ORDER)

__all__ = ["FAMILIES"]
