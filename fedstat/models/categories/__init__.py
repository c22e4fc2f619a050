"""Regression of a response of categories over sites that hold different rows: ordered, and without an order."""

from fedstat.models.categories import steps

__all__ = ["steps"]
