"""Federated averaging and its relatives: the engineering baselines beside the exact federated GLM."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.fedavg.steps import FAMILY, STEPS

FAMILIES[FAMILY] = STEPS

__all__ = ["FAMILIES"]
