"""Regression of ordered and unordered categories over sites that hold different rows."""

from fedstat.models.categories import steps

__all__ = ["steps"]
