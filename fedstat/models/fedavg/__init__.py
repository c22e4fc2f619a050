"""Federated averaging and related algorithms, as baselines for the exact federated fits."""

from fedstat.federation.disclosure.protocol_order import in_order
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.fedavg.steps import FAMILY, ORDER, STEPS

FAMILIES[FAMILY] = in_order(STEPS, ORDER)

__all__ = ["FAMILIES"]
