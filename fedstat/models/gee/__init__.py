"""Generalized estimating equations over sites that hold different rows, with clusters inside sites."""

from fedstat.models.gee import steps

__all__ = ["steps"]
