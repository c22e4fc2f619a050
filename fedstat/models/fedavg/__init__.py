"""Federated averaging and related algorithms, as baselines for the exact federated fits."""

from fedstat.models.fedavg import steps

__all__ = ["steps"]
