"""Accelerated failure time models over sites that hold different rows."""

from fedstat.models.aft import steps

__all__ = ["steps"]
